"""The champion and the challenger of a model, and the rule by which one takes the other's place.

A version takes the champion's place only where both were judged on the same test data by the same metric, and the
paired comparison of their families' verdict seeds says better. Whatever is decided is kept with the model, with its
reason.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from mlflow.exceptions import MlflowException

from dmlstudy.records import Record
from dmlstudy.registry import leaderboard, model_page, models, tracking
from dmlstudy.registry.models import CHAMPION, RegisteredVersion
from dmlstudy.store import Store, StoreError
from dmlstudy.verdict.comparison import Comparison, compare

CHALLENGER = "challenger"

HISTORY = "mlflow.dmlstudy.history"
"""The registered model's tag that holds its decisions, newest last, as JSON; MLflow's page shows no tag of this prefix,
but the model's description, which puts them into words (``model_page``)."""

OLD_HISTORY = "history"
"""The tag of older stores, which is read as long as there is no other."""

MOST_KEPT = 20

ROLLED_BACK = "rolled back from version"
"""The beginning of the reason of a decision that restores the former champion."""

NOT_FOUND = 404


class Decision(Record):
    """A decision on a version, its time and reason; ``champion`` is the version in use from then on."""

    at: str
    version: int
    champion: int
    before: int | None
    """The version in use until then; none for a model's first."""
    reason: str
    challenger: int | None = None
    """The version that is the challenger afterwards; none where that stays as it was."""
    undoes: bool = False
    """True if the former champion was restored."""
    is_open: bool = False
    """True if its aliases are still to be set; the next decision sets them first."""

    @property
    def is_promoted(self) -> bool:
        return self.champion == self.version


@tracking.in_one_line
def compared(store: Store, first: str, second: str) -> Comparison:
    """Two registered versions by the verdict seeds of the families they are the models of.

    Raises StoreError where there is no such version, and where they were judged by another metric, on other test
    data or on too few common seeds to tell anything.
    """
    a, b = models.resolve(store, first), models.resolve(store, second)
    return _compared(store, a, b)


@tracking.in_one_line
def offer(store: Store, version: RegisteredVersion, second: RegisteredVersion | None = None) -> Decision:
    """Make a new version the champion where there is none or it is better, else the challenger.

    Where there was no champion, ``second`` becomes the challenger. A second call changes nothing, except that it
    completes an interrupted one.
    """
    decisions = _completed(store, version.name)
    known = [each for each in decisions if each.version == version.version]
    if known:
        if decisions[-1] == known[-1]:
            _apply(store, version.name, known[-1])
        return known[-1]
    champion = _champion(store, version.name)
    if champion is None or champion.version == version.version:
        reason = f"first version, of {version.family} in the study {version.study}"
        return _decided(store, version, None, reason, second=second)
    return _challenged(store, version, champion)


@tracking.in_one_line
def promote(store: Store, reference: str, anyway: str | None = None) -> Decision:
    """Make a version the champion if it is better than the one there is, or ``anyway`` for the reason given.

    Where it is not better the champion stays and the decision says why. Called again after a kill it completes what was
    decided. Raises StoreError for the champion itself, and where the two cannot be compared and no reason is given.
    """
    version = models.resolve(store, reference)
    broken_off = _open(store, version.name)
    _completed(store, version.name)
    if broken_off and broken_off.version == version.version and not broken_off.undoes:
        return broken_off
    champion = _champion(store, version.name)
    if champion is None:
        return _decided(store, version, None, "no version was in use")
    if champion.version == version.version:
        raise StoreError(f"{version.name}/{version.version} is the champion already")
    if anyway:
        return _decided(store, version, champion, f"without a comparison: {anyway}")
    return _challenged(store, version, champion)


@tracking.in_one_line
def rollback(store: Store, name: str) -> Decision:
    """Put the version back in use that the present one took over from; each further time the one before that.

    Called again after a kill it completes what was begun. Raises StoreError where there is none before.
    """
    broken_off = _open(store, name)
    decisions = _completed(store, name)
    if broken_off and broken_off.undoes:
        return broken_off
    champion = _champion(store, name)
    if champion is None:
        raise StoreError(f"no model {name!r} with a champion in the store {store.tracking_uri}")
    there = {each.version: each for each in models.versions(store, name)}
    earlier = [each for each in _in_use_before(decisions, champion.version) if each in there]
    if not earlier:
        raise StoreError(
            f"{name}/{champion.version}: there is nothing before it to go back to; `dmlstudy promote NAME/VERSION"
            " --anyway REASON` puts any version in use"
        )
    reason = f"{ROLLED_BACK} {champion.version}"
    return _decided(store, there[earlier[-1]], champion, reason, undoes=True)


def _in_use_before(decisions: list[Decision], champion: int) -> list[int]:
    """The versions that were in use before, the latest last; one that was rolled back from is not among them."""
    in_use: list[int] = []
    for each in decisions:
        if not in_use and each.before is not None:
            in_use = [each.before]
        if each.undoes or each.reason.startswith(ROLLED_BACK):  # by the reason: decisions of older stores
            while in_use and in_use[-1] != each.champion:
                in_use.pop()
        if in_use[-1:] != [each.champion]:
            in_use.append(each.champion)
    if champion in in_use:
        while in_use[-1] != champion:  # someone has moved the alias by hand
            in_use.pop()
        in_use.pop()
    return in_use


@tracking.in_one_line
def history(store: Store, name: str) -> list[Decision]:
    """Decisions on a model's versions, oldest first."""
    client = tracking.connect(store)
    try:
        tags = client.get_registered_model(name).tags
    except MlflowException as error:
        if error.get_http_status_code() != NOT_FOUND:  # type: ignore[no-untyped-call]
            raise
        return []
    return [Decision(**each) for each in json.loads(tags.get(HISTORY) or tags.get(OLD_HISTORY) or "[]")]


def _challenged(store: Store, version: RegisteredVersion, champion: RegisteredVersion) -> Decision:
    try:
        comparison = _compared(store, version, champion)
    except StoreError as error:
        return _decided(store, version, champion, str(error), stays=True)
    name = f"{champion.name}/{champion.version}"
    reason = f"{comparison.outcome} {comparison.preposition} {name} by {_shown(comparison)}"
    return _decided(store, version, champion, reason, stays=comparison.outcome != "better")


def _shown(comparison: Comparison) -> str:
    """Its numbers alone."""
    return str(comparison).partition(": ")[2] + f", {comparison.num_seeds} seeds"


def _compared(store: Store, a: RegisteredVersion, b: RegisteredVersion) -> Comparison:
    names = [f"{each.name}/{each.version}" for each in (a, b)]
    judged = [leaderboard.judged(store, each.study, each.family) for each in (a, b)]
    for what, values in (
        ("metrics", [each.metric for each in judged]),
        ("test data", [each.test_sha256 for each in judged]),
    ):
        if values[0] != values[1]:
            shown = f" ({values[0]}, {values[1]})" if what == "metrics" else ""
            raise StoreError(
                f"{names[0]} and {names[1]} were judged by other {what}{shown}: they cannot be compared"
            )
    scores = {name: each.score_by_seed for name, each in zip(names, judged, strict=True)}
    if a.study == b.study and a.family == b.family:
        raise StoreError(
            f"{names[0]} and {names[1]} are of the same family of one study: nothing tells them apart"
        )
    if len(scores[names[0]].keys() & scores[names[1]].keys()) < 2:
        raise StoreError(
            f"{names[0]} and {names[1]} have fewer than 2 verdict seeds in common: nothing can be told"
        )
    (comparison,) = compare(scores, resolution=judged[0].resolution)
    return comparison


def _champion(store: Store, name: str) -> RegisteredVersion | None:
    return models.with_alias(store, name, CHAMPION)


def _decided(
    store: Store,
    version: RegisteredVersion,
    champion: RegisteredVersion | None,
    reason: str,
    *,
    stays: bool = False,
    second: RegisteredVersion | None = None,
    undoes: bool = False,
) -> Decision:
    """Note the decision as open, set the aliases, and close it: killed in between, the next to decide completes it."""
    before = None if champion is None else champion.version
    in_use = before if stays and before is not None else version.version
    challenger = before if in_use == version.version else version.version
    if challenger is None and second is not None:
        challenger = second.version
    decision = Decision(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version.version,
        champion=in_use,
        before=before,
        reason=reason,
        challenger=challenger,
        undoes=undoes,
    )
    decisions = history(store, version.name)
    _write(store, version.name, [*decisions, decision.model_copy(update={"is_open": True})])
    _apply(store, version.name, decision)
    describe(store, version.name)
    _write(store, version.name, [*decisions, decision])
    return decision


def _open(store: Store, name: str) -> Decision | None:
    """The last decision, if it was interrupted, in its completed form."""
    decisions = history(store, name)
    if not decisions or not decisions[-1].is_open:
        return None
    return decisions[-1].model_copy(update={"is_open": False})


def _completed(store: Store, name: str) -> list[Decision]:
    """The decisions, after completing the last one if it was interrupted."""
    decisions, broken_off = history(store, name), _open(store, name)
    if broken_off is None:
        return decisions
    there = {version.version for version in models.versions(store, name)}
    if {broken_off.version, broken_off.champion} <= there:
        _apply(store, name, broken_off)
        describe(store, name)
    decisions[-1] = broken_off
    _write(store, name, decisions)
    return decisions


def _write(store: Store, name: str, decisions: list[Decision]) -> None:
    """Keep as many of the newest as a tag takes."""
    client = tracking.connect(store)
    kept = decisions[-MOST_KEPT:]
    while (
        len(text := json.dumps([each.model_dump(exclude_defaults=True) for each in kept]))
        > tracking.MOST_IN_A_TAG
    ):
        kept = kept[1:]
    client.set_registered_model_tag(name, HISTORY, text)
    if OLD_HISTORY in client.get_registered_model(name).tags:
        client.delete_registered_model_tag(name, OLD_HISTORY)


def _apply(store: Store, name: str, decision: Decision) -> None:
    """Note the decision with its version and set the aliases; once more changes nothing."""
    client = tracking.connect(store)
    client.set_model_version_tag(name, str(decision.version), "decision", decision.reason)
    client.set_registered_model_alias(name, CHAMPION, str(decision.champion))
    challenger = decision.challenger  # None: of an older store, or of a first version alone
    if challenger is None:
        challenger = decision.before if decision.is_promoted else decision.version
    if challenger is not None:
        client.set_registered_model_alias(name, CHALLENGER, str(challenger))


@tracking.in_one_line
def describe(store: Store, name: str) -> None:
    """Tell on the model's page what is in use, how it is loaded and what was decided, unless someone wrote there."""
    client = tracking.connect(store)
    written = client.get_registered_model(name).description or ""
    if written and not written.endswith(model_page.WRITTEN):
        return
    text = model_page.text(
        name, models.versions(store, name), [(each.at, said(each, name)) for each in history(store, name)]
    )
    if text != written:
        client.update_registered_model(name, text)


def said(decision: Decision, name: str) -> str:
    """The decision in one line."""
    what = (
        "is the champion"
        if decision.is_promoted
        else f"is the challenger, {name}/{decision.champion} stays the champion"
    )
    return f"{name}/{decision.version} {what}: {decision.reason}"
