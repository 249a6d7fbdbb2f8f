"""The record of a campaign: a row for each kill and one for each round's end, and the table that they make."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROUND = "round"
"""The kind of the row that ends a round."""

EQUAL = "equal"

OVER = "over"
"""The state of a command that came to its end before it was killed, which is no kill."""

COUNTED = ("num_lost", "num_orphans", "num_bricked")
COLUMNS = (
    *("killed", "kills", "results lost", "orphans", "stores bricked", "differences"),
    *("until it goes on, median", "longest"),
)


class Row(NamedTuple):
    """A kill, or a round's end. ``went_on_s`` is empty where the next kill or the end came first."""

    seed: int
    round: int
    kind: str
    life: int = 0
    moment_s: float = 0.0
    process: str = ""
    state: str = ""
    went_on_s: float | None = None
    num_lost: int = 0
    num_orphans: int = 0
    num_bricked: int = 0
    result: str = EQUAL


class CampaignRecord:
    """A CSV file to which rows are added one by one; a campaign that was killed goes on after its last whole round."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")
            path.write_bytes(b"".join(whole[:2]))  # without a row that a kill has torn
        self.rows = _read(path) if path.exists() else []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(Row._fields)
            writer.writerow(row)

    def done(self, seed: int) -> set[int]:
        """The rounds of the seed that have come to their end."""
        return {row.round for row in self.rows if row.seed == seed and row.kind == ROUND}

    @property
    def num_kills(self) -> int:
        return sum(row.kind != ROUND and row.state != OVER for row in self.rows)


def _read(path: Path) -> list[Row]:
    """The rows of a file."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for values in csv.DictReader(file):
            rows.append(
                Row(
                    seed=int(values["seed"]),
                    round=int(values["round"]),
                    kind=values["kind"],
                    life=int(values["life"]),
                    moment_s=float(values["moment_s"]),
                    process=values["process"],
                    state=values["state"],
                    went_on_s=float(values["went_on_s"]) if values["went_on_s"] else None,
                    num_lost=int(values["num_lost"]),
                    num_orphans=int(values["num_orphans"]),
                    num_bricked=int(values["num_bricked"]),
                    result=values["result"],
                )
            )
    return rows


def table(rows: Iterable[Row], kinds: Sequence[str]) -> str:
    """The campaign as a table in Markdown: a line for each kind, and one for the whole rounds."""
    rows = list(rows)
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * (len(COLUMNS) - 1)}",
    ]
    for kind in (*kinds, ROUND):
        own = [row for row in rows if row.kind == kind]
        if not own:
            continue
        seconds = [row.went_on_s for row in own if row.went_on_s is not None]
        times = [f"{statistics.median(seconds):.0f} s", f"{max(seconds):.0f} s"] if seconds else ["", ""]
        num_kills = sum(row.state != OVER for row in own)
        counts = [num_kills, *(sum(row[Row._fields.index(name)] for row in own) for name in COUNTED)]
        counts.append(sum(row.result != EQUAL for row in own))
        name = "whole rounds, compared at their end" if kind == ROUND else kind
        lines.append(f"| {' | '.join([name, *map(str, counts), *times])} |")
    return "\n".join(lines)
