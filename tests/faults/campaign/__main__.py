"""Runs a campaign: ``python -m tests.faults.campaign --kills 1000 --seed 0 --record kills.csv``.

Called again with the same record it goes on with the next round. A round that differs keeps its folder. The exit
status is 1 if any did.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import time
from pathlib import Path

from .plan import COMMAND, KINDS, VARIATIONS, planned
from .record import EQUAL, CampaignRecord, table
from .rounds import StudyRound, temporary, unbroken
from .uses import use_store


def main() -> int:
    given = _arguments()
    kinds, variations = given.kinds.split(","), given.variations.split(",")
    record = CampaignRecord(given.record or given.folder / "kills.csv")
    end = time.monotonic() + 60 * given.minutes
    numbers = itertools.count() if given.round is None else iter([given.round])
    try:
        for number in numbers:
            if record.num_kills >= given.kills or time.monotonic() > end:
                break
            if given.round is None and number in record.done(given.seed):
                continue
            _play(given.folder.absolute(), given.seed, number, kinds, variations, record)
    except KeyboardInterrupt:
        pass
    sys.stdout.write(f"{table(record.rows, KINDS)}\n")
    return int(any(row.result != EQUAL for row in record.rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "tests.faults.campaign", description="Random kills of studies and commands."
    )
    parser.add_argument("--kills", type=int, default=1000, help="kills in the record at which it ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="play only this round, whatever the record has")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--variations", default=",".join(VARIATIONS), help=f"of {', '.join(VARIATIONS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins later")
    parser.add_argument("--folder", type=Path, default=Path("campaign"), help="for stores and logs")
    parser.add_argument(
        "--record", type=Path, help="the CSV file of the kills; default: kills.csv in the folder"
    )
    return parser.parse_args()


def _play(
    folder: Path, seed: int, number: int, kinds: list[str], variations: list[str], record: CampaignRecord
) -> None:
    """One round: its study, and then commands of use in the store that it leaves."""
    plan = planned(seed, number, kinds, variations)
    home = folder / f"whole-{plan.variation}"
    whole = unbroken(home, plan.variation)
    own = folder / f"round-{seed}-{number}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    began = time.monotonic()
    with temporary() as scratch:
        found = StudyRound(own, seed, number, plan, whole, record, scratch).play()
        if not found and COMMAND in kinds:
            found = use_store(own, home, seed, number, plan.commands, record, scratch)
        _tell(f"{time.monotonic() - began:.0f} s, {record.num_kills} kills; left: {_left(Path(scratch))}")
    if found:
        again = (
            f"--seed {seed} --round {number} --kinds {','.join(kinds)} --variations {','.join(variations)}"
        )
        _tell(f"round {number} differs: {'; '.join(found)}; again: {again}; kept: {own}")
    else:
        shutil.rmtree(own, ignore_errors=True)


def _left(scratch: Path) -> str:
    """What the killed have left where temporary files lie."""
    names = sorted(path.name.split("-")[0][:16] for path in scratch.iterdir())
    return ", ".join(f"{len(list(group))} {name}" for name, group in itertools.groupby(names)) or "nothing"


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
