"""Which version of a model is in use: the champion, the challenger, and when one takes the other's place.

A version takes the champion's place only where both were judged on the same test data by the same metric, and the
paired comparison of their families' verdict seeds says better. Whatever is decided is kept with the model, with its
reason.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from mlflow.exceptions import MlflowException

from dmlstudy.records import Record
from dmlstudy.registry import leaderboard, models, tracking
from dmlstudy.registry.comparison import Comparison, compare
from dmlstudy.registry.models import CHAMPION, RegisteredVersion
from dmlstudy.registry.store import Store, StoreError

CHALLENGER = "challenger"

HISTORY = "history"
"""The registered model's tag that holds its decisions, newest last, as JSON."""

MOST_KEPT = 20

NOT_FOUND = 404


class Decision(Record):
    """What was decided on a version, when, and why; ``champion`` is the version in use from then on."""

    at: str
    version: int
    champion: int
    before: int | None
    """The version in use until then; none for a model's first."""
    reason: str

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

    Where there was no champion, ``second`` becomes the challenger. Once more changes nothing, and completes what was
    broken off.
    """
    decisions = history(store, version.name)
    known = [each for each in decisions if each.version == version.version]
    if known:
        if decisions[-1] == known[-1]:
            _apply(store, version.name, known[-1], second)
        return known[-1]
    champion = _champion(store, version.name)
    if champion is None or champion.version == version.version:
        reason = f"first version, of {version.family} in the study {version.study}"
        return _decided(store, version, None, reason, second=second)
    return _challenged(store, version, champion)


@tracking.in_one_line
def promote(store: Store, reference: str, anyway: str | None = None) -> Decision:
    """Make a version the champion if it is better than the one there is, or ``anyway`` for the reason given.

    Where it is not better the champion stays and the decision says why. Raises StoreError for the champion itself, and
    where the two cannot be compared and no reason is given.
    """
    version = models.resolve(store, reference)
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
    """Put the version back in use that was before the present one. Raises StoreError where there was none."""
    champion = _champion(store, name)
    if champion is None:
        raise StoreError(f"no model {name!r} with a champion in the store {store.tracking_uri}")
    taken = [each for each in history(store, name) if each.champion == champion.version and each.before]
    changes = [each for each in taken if each.before != champion.version]
    if not changes:
        raise StoreError(
            f"{name}/{champion.version} has been the champion from the beginning: there is nothing before"
        )
    before = models.resolve(store, f"{name}/{changes[-1].before}")
    return _decided(store, before, champion, f"rolled back from version {champion.version}")


@tracking.in_one_line
def history(store: Store, name: str) -> list[Decision]:
    """What was decided on a model's versions, oldest first; empty of one without decisions."""
    client = tracking.connect(store)
    try:
        noted = client.get_registered_model(name).tags.get(HISTORY, "[]")
    except MlflowException as error:
        if error.get_http_status_code() != NOT_FOUND:  # type: ignore[no-untyped-call]
            raise
        return []
    return [Decision(**each) for each in json.loads(noted)]


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
    return next(
        (each for each in models.versions(store) if each.name == name and CHAMPION in each.aliases), None
    )


def _decided(
    store: Store,
    version: RegisteredVersion,
    champion: RegisteredVersion | None,
    reason: str,
    *,
    stays: bool = False,
    second: RegisteredVersion | None = None,
) -> Decision:
    """Note the decision, then set the aliases: killed in between, ``offer`` sets them again."""
    client = tracking.connect(store)
    before = None if champion is None else champion.version
    decision = Decision(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version.version,
        champion=before if stays and before is not None else version.version,
        before=before,
        reason=reason,
    )
    kept = [*history(store, version.name), decision][-MOST_KEPT:]
    while len(text := json.dumps([each.model_dump() for each in kept])) > tracking.MOST_IN_A_TAG:
        kept = kept[1:]
    client.set_registered_model_tag(version.name, HISTORY, text)
    client.set_model_version_tag(version.name, str(version.version), "decision", reason)
    _apply(store, version.name, decision, second)
    return decision


def _apply(store: Store, name: str, decision: Decision, second: RegisteredVersion | None) -> None:
    """Set the aliases as decided."""
    client = tracking.connect(store)
    client.set_registered_model_alias(name, CHAMPION, str(decision.champion))
    challenger = decision.before if decision.is_promoted else decision.version
    if challenger is None and second is not None:
        challenger = second.version
    if challenger is not None:
        client.set_registered_model_alias(name, CHALLENGER, str(challenger))
