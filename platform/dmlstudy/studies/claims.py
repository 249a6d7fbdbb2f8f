"""The outcome of the papers' claims, from the leaderboards of the studies that test them.

A claim is reproduced where the difference has the expected sign and Holm's p-value, among the claims' pairs of its
study, is at most 0.05; contrary where the sign is the other one. Both are told of two populations: of other
seeds on these test classes, and of other classes like these as well.

Where the searches were done again, both are told of the procedure "search, then train" too: the search is the unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dmlstudy import metric_names
from dmlstudy.files import check_output, written_whole
from dmlstudy.records import Record
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.spec import study_file, yaml_file
from dmlstudy.spec.claims import Claim, ClaimsOf
from dmlstudy.spec.likeness import searched_by_both
from dmlstudy.spec.study_file import Family, StudySpec
from dmlstudy.studies.estimate import of_searches, roughly
from dmlstudy.training.interface import TrialData
from dmlstudy.verdict.comparison import ALPHA, Comparison, Pair

Outcome = Literal["reproduced", "contrary", "not distinguishable", "not tested"]

BEGINS = b"# Claims "
"""The beginning of the study files that claims are written to; others are not replaced."""

DIGITS = 8
"""Of a study's fingerprint, in its name: another version of the claims, or other data, are another study."""


class PairOutcome(Record):
    """The outcome of a claim's pair, in one unit: the seed, or the search.

    ``effect`` is the first family's test score minus the second's, as a mean over units. ``these`` and ``like_these``
    are the outcomes for the two populations, with Holm's p-values. Intervals hold for all claims of a study at once.
    """

    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    like_low: float | None = None
    like_high: float | None = None
    like_p: float | None = None
    these: Outcome = "not tested"
    like_these: Outcome = "not tested"


class ClaimFinding(PairOutcome):
    """The outcome of a claim by seed.

    ``why`` says why a claim is not tested, or not for other classes. ``by_search`` is the outcome of ``num_searches``
    searches, each with its own best: the luck of the search is in it. It is None where the searches were done once.
    ``differences`` are those of each search, the first one first.

    ``apart`` names the parameters that both families search, of which the judged configurations have other values.
    Where it is empty they differ in the claim's switch alone, and in what only one of them searches.
    """

    id: str
    paper: str
    place: str
    claim: str
    study: str | None
    first: str | None
    second: str | None
    expected: str | None
    metric: str | None = None
    first_score: float | None = None
    second_score: float | None = None
    num_seeds: int = 0
    why: str = ""
    apart: list[str] = []
    num_searches: int = 0
    by_search: PairOutcome | None = None
    differences: list[float] = []


class CheckedClaims(NamedTuple):
    """A study of claims, checked, under the name it runs by."""

    spec: StudySpec
    raw: Mapping[str, Any]
    claims: tuple[Claim, ...]


def spec_of(claims: ClaimsOf) -> CheckedClaims:
    """The study of some claims, under a name that tells it from other versions; raises SpecError."""
    plain = study_file.given(claims.raw)
    name = f"{plain.name}-{plain.fingerprint()[:DIGITS]}"
    raw = {**claims.raw, "name": name}
    return CheckedClaims(study_file.given(raw), raw, claims.claims)


def write(written: CheckedClaims, folder: Path) -> Path:
    """Write a study of claims as an ordinary study file; raises ValueError for a file that is none of these."""
    path = folder / f"{written.raw['name']}.yaml"
    check_output(path, "a study of claims", BEGINS)
    lines = [f"# Claims {', '.join(claim.id for claim in written.claims)}.", f"# dmlstudy run {path.name}"]
    with written_whole(path) as file:
        file.write("\n".join([*lines, yaml_file.dump(written.raw)]).encode())
    return path


def untested(claim: Claim, why: str, study: str | None = None) -> ClaimFinding:
    """A claim that is not tested, and the reason."""
    return ClaimFinding(
        id=claim.id,
        paper=claim.paper,
        place=claim.place,
        claim=claim.claim,
        study=study,
        first=claim.first,
        second=claim.second,
        expected=claim.expected,
        why=why,
    )


def findings(
    claims: Sequence[Claim], board: Leaderboard, families: Mapping[str, Family]
) -> list[ClaimFinding]:
    """The outcomes of a study's claims by its leaderboard, in their order.

    The study compares the claims' pairs alone. Each of them counts in Holm's correction, also of a claim whose switch
    did nothing.
    """
    rows = {row.family: row for row in board.rows}
    compared = _by_pair(board.comparisons)
    by_search = _by_pair(board.luck.comparisons) if board.luck else {}
    procedures = board.luck.procedures if board.luck else []
    scores_by_search = {each.family: each.score_by_search for each in procedures}
    found = []
    for claim in claims:
        why = _why_not(claim, board, rows) or (
            "" if claim.pair in compared else "its families were not compared"
        )
        if why:
            found.append(untested(claim, why, board.study))
            continue
        each, metric = compared[claim.pair], metric_names.on_test(board.objective)
        facts = {
            "metric": board.objective,
            "first_score": _score(rows[claim.pair[0]], metric),
            "second_score": _score(rows[claim.pair[1]], metric),
            "num_seeds": each.num_seeds,
            "apart": _apart(rows[claim.pair[0]], rows[claim.pair[1]], families),
            **dict(_of(claim, each)),
        }
        if again := by_search.get(claim.pair):
            facts |= {"num_searches": again.num_seeds, "by_search": _of(claim, again)}
            first, second = (scores_by_search[family] for family in claim.pair)
            facts |= {"differences": [one - other for one, other in zip(first, second, strict=True)]}
        unknown = "" if each.like_adjusted_p_value is not None else each.like_unknown
        found.append(untested(claim, unknown, board.study).model_copy(update=facts))
    return found


def _by_pair(comparisons: Sequence[Comparison]) -> dict[Pair, Comparison]:
    """Comparisons either way round."""
    turned = {(each.second, each.first): each.turned for each in comparisons}
    return turned | {(each.first, each.second): each for each in comparisons}


def _of(claim: Claim, each: Comparison) -> PairOutcome:
    p, like_p = each.adjusted_p_value, each.like_adjusted_p_value
    return PairOutcome(
        effect=each.effect,
        low=each.low,
        high=each.high,
        p=p,
        like_low=each.like_low,
        like_high=each.like_high,
        like_p=like_p,
        these=_outcome(claim, each, p),
        like_these="not tested" if like_p is None else _outcome(claim, each, like_p),
    )


def _outcome(claim: Claim, comparison: Comparison, p: float) -> Outcome:
    if not p <= ALPHA:
        return "not distinguishable"
    is_better = comparison.effect > 0
    return "reproduced" if is_better == (claim.expected == "better") else "contrary"


def _why_not(claim: Claim, board: Leaderboard, rows: Mapping[str, Row]) -> str:
    """The reason for which a claim is not tested; empty where it is."""
    if board.status != "finished":
        return f"study {board.study} is {board.status}"
    for family in claim.pair:
        row = rows.get(family)
        if row is None or not row.num_judged:
            failed = (
                f", {row.num_failed} of its {row.num_tried} trials failed" if row and row.num_failed else ""
            )
            return f"{family} was not judged{failed}"
    if claim.check is None:
        return ""
    for family in claim.pair:
        value = _score(rows[family], metric_names.on_test(claim.check.metric))
        if value is not None and not value >= claim.check.at_least:
            return (
                f"the switch did nothing: {claim.check.metric} of {family} is {value:.2g}, below"
                f" {claim.check.at_least:g}"
            )
    return ""


def _apart(first: Row, second: Row, families: Mapping[str, Family]) -> list[str]:
    """Parameters that both families search, and have different values of."""
    both = searched_by_both(families[first.family], families[second.family])
    return [name for name in both if first.params.get(name) != second.params.get(name)]


def _score(row: Row, metric: str) -> float | None:
    estimate = row.test.get(metric)
    return None if estimate is None or math.isnan(estimate.mean) else estimate.mean


def cost(spec: StudySpec, dataset: TrialData, *, measure: bool) -> str:
    """The line on a study's size and, if ``measure``, on the time it takes here, by the first of those alike."""
    line = (
        f"{spec.name}: {len(spec.families)} families, {spec.num_search_trials} trials to search and"
        f" {spec.num_verdict_trials} for the verdict"
    )
    line = "; ".join([line, *of_searches(spec)])
    return f"{line}; {roughly(spec, dataset)}" if measure else line
