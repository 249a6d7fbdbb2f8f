"""The command that tests the claims of papers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from dmlstudy.cli.app import (
    DEFAULT_STORE,
    ClusterOption,
    JsonOption,
    PatienceOption,
    ServerOption,
    SetOption,
    StoreOption,
    app,
    end_interrupted,
    store_at,
)
from dmlstudy.cli.tables import WIDTH, console, say, show_json, show_table

if TYPE_CHECKING:
    from dmlstudy.spec.claims import Claim, ClaimsFile, ClaimsOf
    from dmlstudy.store import Store
    from dmlstudy.studies.claims import CheckedClaims, ClaimFinding, PairOutcome

OUTCOMES = ("difference", "these classes", "p", "classes like these", "p")
"""Columns of a claim's outcome."""


@app.command(
    epilog="Examples: `dmlstudy claims --list` · `dmlstudy claims --only gpw-pk` ·"
    " `dmlstudy claims --only cgml --data omniglot=/data/omniglot --trials 10 --seeds 3-10` ·"
    " `dmlstudy claims --data cifar10=/data/cifar10 --only nasa-codes oahu --searches 3` ·"
    " `dmlstudy claims --data /data/birds --only gpw"
    " --set 'embedder={backbone: resnet18, weights: default, dim: 96}'` ·"
    " `dmlstudy claims --write claims/`",
)
def claims(
    only: Annotated[
        Optional[list[str]],
        typer.Option(
            "--only", help="A claim, a paper (gpw, cgml, nasa, oahu) or a study; any number of times."
        ),
    ] = None,
    others: Annotated[
        Optional[list[str]], typer.Argument(metavar="[ID]...", help="More of the same after --only.")
    ] = None,
    data: Annotated[
        Optional[list[str]],
        typer.Option(
            "--data",
            help="FOLDER or NAME=FOLDER in the place of the package's small data: Omniglot or classes of pictures;"
            " cifar10=FOLDER and its like for codes and streams.",
        ),
    ] = None,
    trials: Annotated[
        Optional[int], typer.Option("--trials", min=1, help="Trials of each family's search.")
    ] = None,
    seeds: Annotated[
        Optional[str],
        typer.Option(
            "--seeds",
            metavar="N|FROM-TO",
            help="Seeds that each family's best is judged with; 3-10: added until the claims are decided, or 10.",
        ),
    ] = None,
    searches: Annotated[
        Optional[int],
        typer.Option(
            "--searches",
            min=1,
            help="Times that the search of each family is done. From 3 on, outcomes with the luck of the search.",
        ),
    ] = None,
    epochs: Annotated[Optional[int], typer.Option("--epochs", min=1, help="Epochs of each trial.")] = None,
    assignments: SetOption = None,
    write: Annotated[
        Optional[Path], typer.Option("--write", help="Only write the study files into this folder.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Only show the claims, and what testing them costs.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option(help="Time a few training steps of each study to tell its duration.")
    ] = True,
    json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    tracking_uri: ServerOption = None,
    tracking_timeout: PatienceOption = None,
    address: ClusterOption = None,
) -> None:
    """Test the claims of four papers, and print what is reproduced, contrary, not distinguishable and not tested.

    Claims that share data and embedder are one study, in which two families differ in one switch and see the same
    drawn points. Call it again to resume. Without `--data` it takes the small data that come with the package.
    """
    from dmlstudy.spec import claims as spec

    if others and not only:
        raise ValueError(f"{others[0]}: write --only {others[0]}, or nothing for all claims")
    settings = {
        "search.trials_per_family": trials,
        "protocol.verdict_seeds": None if seeds is None else _seeds(seeds),
        "protocol.searches": searches,
        "training.epochs": epochs,
    }
    file = spec.read()
    chosen = spec.chosen(file, [*(only or ()), *(others or ())])
    given = {key: value for key, value in settings.items() if value is not None}
    studies = spec.studies_of(file, chosen, spec.data_at(data or ()), given, assignments or ())
    if write is not None:
        if not studies:
            raise ValueError(f"--write: nothing to write: {chosen[0].id}: {spec.why_not(chosen[0], studies)}")
        _write(studies, write, json)
        return
    place = store_at(store, tracking_uri, tracking_timeout)
    if list_:
        _list(file, chosen, studies, place, estimate, json)
        return
    failures: dict[str, str] = {}
    found = {
        finding.id: finding
        for name, study in studies.items()
        for finding in _tested(name, study, place, address, json, estimate, failures)
    }
    from dmlstudy.studies.claims import untested

    told = [found.get(claim.id) or untested(claim, spec.why_not(claim, studies)) for claim in chosen]
    if json:
        show_json([finding.model_dump() for finding in told])
    else:
        _show(told, studies)
    if failures:
        raise typer.Exit(1)


def _seeds(given: str) -> int | dict[str, int]:
    """``protocol.verdict_seeds`` from ``--seeds``."""
    from pydantic import ValidationError

    from dmlstudy.records import MOST_SEEDS_IN_STEPS, SeedRange

    fewest, dash, most = given.partition("-")
    numbers = (fewest, most) if dash else (fewest,)
    if not all(number.isascii() and number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--seeds {given}: is no number of seeds; write one as 5, or a range as 3-10")
    if not dash:
        return int(fewest)
    found = {"from": int(fewest), "to": int(most)}
    try:
        SeedRange.model_validate(found)
    except ValidationError:
        raise ValueError(
            f"--seeds {given}: a range begins with 3 or more and ends with more, {MOST_SEEDS_IN_STEPS} at most; write"
            " it as 3-10"
        ) from None
    return found


def _tested(
    name: str,
    study: ClaimsOf,
    place: Store,
    address: str | None,
    quiet: bool,
    estimate: bool,
    failures: dict[str, str],
) -> list[ClaimFinding]:
    """Run or resume the study of some claims; what cannot be run is a reason for which they are not tested."""
    from dmlstudy.engine.interruption import StudyInterrupted
    from dmlstudy.engine.progress import as_long_as_heard, terminal
    from dmlstudy.registry.leaderboard import leaderboard
    from dmlstudy.spec.study_file import SpecError
    from dmlstudy.studies import claims as of_studies
    from dmlstudy.studies.conclude import StudyFailed
    from dmlstudy.studies.run import run_study

    try:
        written = of_studies.spec_of(study)
        if not (quiet or _is_finished(place, written)):
            print(_cost(written, place, estimate), file=sys.stderr)
        with terminal() as stream:
            width = None if console.is_terminal else WIDTH
            tell = Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=True).print
            run_study(
                written.spec, place, address=address, tell=_unheard if quiet else as_long_as_heard(tell)
            )
    except StudyInterrupted:
        end_interrupted("the same command")
    except (SpecError, StudyFailed) as error:
        failures[name] = " ".join(str(error).split())
        return [of_studies.untested(claim, failures[name]) for claim in study.claims]
    return of_studies.findings(study.claims, leaderboard(place, written.spec.name), written.spec.families)


def _is_finished(place: Store, written: CheckedClaims) -> bool:
    return written.spec.name in place.studies() and (
        place.read_state(written.spec.name).get("state") == "finished"
    )


def _cost(written: CheckedClaims, place: Store, estimate: bool) -> str:
    from dmlstudy.studies import checks, starts
    from dmlstudy.studies import claims as of_studies

    dataset = checks.check_parts(written.spec)
    if not estimate:
        return of_studies.cost(written.spec, dataset, measure=False)
    with starts.looked_at(written.spec, place, starts.present(written.spec, dataset)):
        return of_studies.cost(written.spec, dataset, measure=True)


def _write(studies: Mapping[str, ClaimsOf], folder: Path, json: bool) -> None:
    from dmlstudy.studies import claims as of_studies

    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    written = [of_studies.spec_of(study) for study in studies.values()]
    paths = [of_studies.write(each, folder) for each in written]
    if json:
        show_json(
            [{"file": str(path), "study": each.spec.name} for path, each in zip(paths, written, strict=True)]
        )
        return
    for path, each in zip(paths, written, strict=True):
        say(f"{path}: {len(each.claims)} claims, {len(each.spec.families)} families")


def _list(
    file: ClaimsFile,
    chosen: Sequence[Claim],
    studies: Mapping[str, ClaimsOf],
    place: Store,
    estimate: bool,
    json: bool,
) -> None:
    from dmlstudy.spec.claims import why_not
    from dmlstudy.spec.study_file import SpecError
    from dmlstudy.studies import claims as of_studies

    whys = {claim.id: why_not(claim, studies) for claim in chosen}
    costs: dict[str, str] = {}
    for name, study in studies.items():
        try:
            costs[name] = _cost(of_studies.spec_of(study), place, estimate)
        except SpecError as error:
            costs[name] = f"claims-{name}: cannot be run: {error}"
    if json:
        told = [claim.model_dump() | {"not_tested": whys[claim.id] or None} for claim in chosen]
        facts: dict[str, Any] = {"papers": file.papers, "claims": told}
        show_json(facts | {"studies": costs})
        return
    for paper, title in file.papers.items():
        own = [claim for claim in chosen if claim.paper == paper]
        if not own:
            continue
        say(f"{paper}: {title}")
        show_table(
            ("claim", "what is claimed", "place", "tested by"),
            [(claim.id, claim.claim, claim.place, _tested_by(claim, whys[claim.id])) for claim in own],
        )
        say("")
    for line in costs.values():
        say(line)


def _tested_by(claim: Claim, why_not: str) -> str:
    if why_not:
        return f"not tested: {why_not}"
    return f"{claim.first} {claim.expected} than {claim.second}"


def _show(found: Sequence[ClaimFinding], studies: Mapping[str, ClaimsOf]) -> None:
    """The claims that were tested as one table, the others with their reasons."""
    tested = [finding for finding in found if finding.effect is not None]
    if tested:
        show_table(
            ("claim", "claimed", *OUTCOMES),
            [
                (each.id, f"{each.first} {each.expected} than {each.second}", *_outcomes(each))
                for each in tested
            ],
        )
        say("")
        _show_points(tested)
    searched_again = [each for each in tested if each.by_search]
    if searched_again:
        _show_by_search(searched_again)
    for finding in found:
        if finding.effect is None:
            say(f"{finding.id}: not tested: {finding.why} ({finding.place})")
        elif finding.why:
            say(f"{finding.id}: not tested on classes like these: {finding.why}")
    say(f"{len(found)} claims; {_counted(found)}")
    if searched_again:
        say(f"by search: {_counted([each.by_search for each in found])}")
    say(
        "p: Holm's, among the claims of one study; [ ]: 95% for all of them at once, on these classes; these classes:"
        " with other seeds; like these: with other classes too, of codes and streams with other images of the same"
        " classes"
    )
    if any(study.data.is_bundled for study in studies.values()):
        say(
            "these are small data and a small budget: what is not distinguishable here may be so with --data, --trials"
            " and --seeds"
        )


def _show_points(tested: Sequence[ClaimFinding]) -> None:
    """Lines on the points that the two families of each claim were judged at."""
    at_one = [each.id for each in tested if not each.apart]
    if at_one:
        say(f"of the same values, but for the switch: {', '.join(at_one)}")
    for each in tested:
        if each.apart:
            luck = "" if each.by_search else "; --searches 3 or more tells how much that is"
            names = ", ".join(each.apart)
            say(f"{each.id}: each at its own best, of another {names}: the search is in the difference{luck}")
    say("")


def _show_by_search(found: Sequence[ClaimFinding]) -> None:
    """The same claims with the search as the unit."""
    from dmlstudy.registry.search_luck import too_few

    num_searches = min(each.num_searches for each in found)
    say(f"by search: {num_searches} searches of each family, each with its own best")
    show_table(
        ("claim", "of each search", *OUTCOMES),
        [
            (each.id, " ".join(f"{one:+.4f}" for one in each.differences), *_outcomes(each.by_search))
            for each in found
            if each.by_search
        ],
    )
    for line in too_few(num_searches, len(found)):
        say(line)
    say("")


def _outcomes(each: PairOutcome) -> tuple[str, ...]:
    """The cells of ``OUTCOMES``; the interval is that on these classes."""
    interval = "" if each.low is None or each.high is None else f" [{each.low:+.4f}, {each.high:+.4f}]"
    return f"{each.effect:+.4f}{interval}", each.these, _p(each.p), each.like_these, _p(each.like_p)


def _counted(found: Sequence[PairOutcome | None]) -> str:
    """The outcomes of both populations, counted; None counts as not tested."""
    names = ("reproduced", "contrary", "not distinguishable", "not tested")

    def counts(outcomes: Sequence[str]) -> str:
        return ", ".join(f"{outcomes.count(name)} {name}" for name in names)

    these = counts([each.these if each else "not tested" for each in found])
    like_these = counts([each.like_these if each else "not tested" for each in found])
    return f"on these classes {these}; on classes like these {like_these}"


def _p(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _unheard(_: str) -> None:
    """Drops a line that is not to be seen."""
