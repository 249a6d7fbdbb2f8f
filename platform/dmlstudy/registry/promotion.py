"""The champion and the challenger of a model, and the rule by which one takes the other's place.

A version takes the champion's place only where both were judged on the same test data by the same metric and it is
better. One model is put in use, so the two models are compared class by class.

Their families, compared on the verdict seeds of both, must not say worse.

Without scores by class, as of older studies, and with few classes the families alone decide. Whatever is decided is
kept with the model, with its reason.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException

from dmlstudy.records import Record
from dmlstudy.registry import card, connection, leaderboard, model_page, models, tracking
from dmlstudy.registry.markdown import verbatim
from dmlstudy.registry.models import CHAMPION, RegisteredVersion
from dmlstudy.search.verdict_trials import SHIPPED_SEED
from dmlstudy.store import Store, StoreError
from dmlstudy.text import one_line
from dmlstudy.verdict.comparison import (
    NOT_KEPT,
    PLURALS,
    Comparison,
    ModelComparison,
    compare,
    compare_models,
)

if TYPE_CHECKING:
    from dmlstudy.registry.compatibility import Compatibility

CHALLENGER = "challenger"

HISTORY = "mlflow.dmlstudy.history"
"""The registered model's tag that holds its decisions, newest last, as JSON; MLflow's page shows no tag of this prefix,
but the model's description, which puts them into words (``model_page``)."""

OLD_HISTORY = "history"
"""The tag of older stores, which is read as long as there is no other."""

MOST_KEPT = 20

ANYWAY = "without a comparison: "
"""The beginning of the reason of a decision that a person made; their own words follow."""

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
    test_sha256: str = ""
    """The test data by which two versions were compared; empty where none were."""
    challenge: int | None = None
    """The number of this comparison among those of the model's versions on the same test data, from 1."""
    is_open: bool = False
    """True if its aliases are still to be set; the next decision sets them first."""

    @property
    def is_promoted(self) -> bool:
        return self.champion == self.version


class Challenge(Record):
    """Two registered versions on one test set: as the models that they are, and by the families they are of.

    Where one of the two comparisons is missing, ``no_models`` or ``no_families`` says why.
    """

    first: str
    second: str
    test_sha256: str
    models: ModelComparison | None
    no_models: str = ""
    families: Comparison | None
    no_families: str = ""

    @property
    def is_won(self) -> bool:
        """True if the first is to take the second's place."""
        if self.models is None:
            return self.families is not None and self.families.outcome == "better"
        is_worse = self.families is not None and self.families.outcome == "worse"
        return self.models.outcome == "better" and not is_worse

    @property
    def reason(self) -> str:
        """The reason of a decision, in a line."""
        if self.models is None:
            assert self.families is not None
            return (
                f"{_outcome(self.families, self.second)} by {_shown(self.families)}; {self._models_unknown}"
            )
        of_models = f"{_outcome(self.models, self.second)} as a model{self._where} by {self.models}"
        if self.families is None:
            return f"{of_models}; its family was not compared: {self.no_families}"
        return f"{of_models}; its family {self.families.outcome} by {_shown(self.families)}"

    @property
    def lines(self) -> list[str]:
        """Both comparisons, a line each."""
        found = [f"families: {self.no_families}"]
        if self.families is not None:
            found = [f"{self.families}, {self.families.num_seeds} seeds"]
        if self.models is None:
            return [*found, self._models_unknown]
        said = f"{self.first} {_outcome(self.models, self.second)}{self._where}: {self.models}"
        return [*found, f"these two models, one seed each: {said}"]

    @property
    def _models_unknown(self) -> str:
        return f"the models were not compared by class: {self.no_models}"

    @property
    def _where(self) -> str:
        assert self.models is not None
        return f" on {PLURALS[self.models.unit]} like these"


@connection.in_one_line
def compared(store: Store, first: str, second: str) -> Challenge:
    """Two registered versions as models, and by the verdict seeds of the families they are the models of.

    Raises StoreError where there is no such version, where they were judged by another metric or on other test data,
    and where neither comparison can tell anything.
    """
    a, b = models.resolve(store, first), models.resolve(store, second)
    return _compared(store, a, b)


@connection.in_one_line
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


@connection.in_one_line
def promote(store: Store, reference: str, anyway: str | None = None) -> Decision:
    """Make a version the champion if it is better than the one there is, or ``anyway`` for the reason given.

    Where it is not better the champion stays and the decision says why. Called again after a kill it completes what was
    decided. Raises StoreError for the champion itself, where the two cannot be compared and no reason is given, and for
    a reason without a word.
    """
    if anyway is not None and not anyway.strip():
        raise StoreError("--anyway: no reason is given; say why in a few words, or leave it out")
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
    if anyway is not None:
        return _decided(store, version, champion, f"{ANYWAY}{one_line(anyway)}")
    return _challenged(store, version, champion)


@connection.in_one_line
def rivals(store: Store, reference: str) -> tuple[str, str] | None:
    """A version and the champion whose place it is to take, as NAME/VERSION; None where there is no other."""
    version = models.resolve(store, reference)
    champion = _champion(store, version.name)
    if champion is None or champion.version == version.version:
        return None
    return f"{version.name}/{version.version}", f"{champion.name}/{champion.version}"


@connection.in_one_line
def note_compatibility(store: Store, reference: str, found: Compatibility) -> None:
    """Keep a version's compatibility with the champion before it as a section of its card on MLflow's page.

    A section of the same is replaced.
    """
    client, version = connection.connect(store), models.resolve(store, reference)
    written = client.get_model_version(version.name, str(version.version)).description or ""
    text = card.with_compatibility(written, card.compatibility(found))
    client.update_model_version(version.name, str(version.version), text)


@connection.in_one_line
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


@connection.in_one_line
def history(store: Store, name: str) -> list[Decision]:
    """Decisions on a model's versions, oldest first."""
    client = connection.connect(store)
    try:
        tags = client.get_registered_model(name).tags
    except MlflowException as error:
        if error.get_http_status_code() != NOT_FOUND:  # type: ignore[no-untyped-call]
            raise
        return []
    found = [Decision(**each) for each in json.loads(tags.get(HISTORY) or tags.get(OLD_HISTORY) or "[]")]
    # Earlier versions noted any reason, and could not write some elsewhere.
    return [
        each if each.reason.isprintable() else each.model_copy(update={"reason": one_line(each.reason)})
        for each in found
    ]


def _challenged(store: Store, version: RegisteredVersion, champion: RegisteredVersion) -> Decision:
    try:
        found = _compared(store, version, champion)
    except StoreError as error:
        return _decided(store, version, champion, str(error), stays=True)
    return _decided(
        store, version, champion, found.reason, stays=not found.is_won, test_sha256=found.test_sha256
    )


def _outcome(comparison: Comparison | ModelComparison, rival: str) -> str:
    preposition = "from" if comparison.outcome == "not distinguishable" else "than"
    return f"{comparison.outcome} {preposition} {rival}"


def _shown(comparison: Comparison) -> str:
    """Its numbers alone."""
    return str(comparison).partition(": ")[2] + f", {comparison.num_seeds} seeds"


def _compared(store: Store, a: RegisteredVersion, b: RegisteredVersion) -> Challenge:
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
    of_models = _as_models(*judged)
    families = None
    if len(scores[names[0]].keys() & scores[names[1]].keys()) >= 2:
        by_unit = {name: each.by_seed for name, each in zip(names, judged, strict=True)}
        units = {**judged[0].units, "by_unit": by_unit}
        (families,) = compare(scores, resolution=judged[0].resolution, **units)
    elif isinstance(of_models, str):
        raise StoreError(
            f"{names[0]} and {names[1]} have fewer than 2 verdict seeds in common: nothing can be told"
        )
    models_known = of_models if isinstance(of_models, ModelComparison) else None
    return Challenge(
        first=names[0],
        second=names[1],
        test_sha256=judged[0].test_sha256,
        models=models_known,
        no_models=of_models if isinstance(of_models, str) else "",
        families=families,
        no_families="" if families else "fewer than 2 verdict seeds in common",
    )


def _as_models(a: leaderboard.Judged, b: leaderboard.Judged) -> ModelComparison | str:
    """The comparison of the two models that are shipped, or why there is none."""
    unit = a.units.get("unit", "class")
    if "overlap" in a.units:
        return "each seed shuffles the rows"
    shipped = [each.by_seed.get(SHIPPED_SEED) for each in (a, b)]
    if shipped[0] is None or shipped[1] is None:
        return next(str(each.units.get("unknown", NOT_KEPT)) for each in (a, b)).format(unit=unit)
    return compare_models(shipped[0], shipped[1], unit)


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
    test_sha256: str | None = None,
) -> Decision:
    """Note the decision as open, set the aliases, and close it: killed in between, the next to decide completes it."""
    before = None if champion is None else champion.version
    in_use = before if stays and before is not None else version.version
    challenger = before if in_use == version.version else version.version
    if challenger is None and second is not None:
        challenger = second.version
    decisions = history(store, version.name)
    challenge = None
    if test_sha256 is not None:
        before_it = [each.challenge or 0 for each in decisions if each.test_sha256 == test_sha256]
        challenge = 1 + max(before_it, default=0)
    decision = Decision(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version.version,
        champion=in_use,
        before=before,
        reason=reason,
        challenger=challenger,
        undoes=undoes,
        test_sha256=test_sha256 or "",
        challenge=challenge,
    )
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
    client = connection.connect(store)
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
    client = connection.connect(store)
    client.set_model_version_tag(name, str(decision.version), "decision", decision.reason)
    client.set_registered_model_alias(name, CHAMPION, str(decision.champion))
    challenger = decision.challenger  # None: of an older store, or of a first version alone
    if challenger is None:
        challenger = decision.before if decision.is_promoted else decision.version
    if challenger is not None:
        client.set_registered_model_alias(name, CHALLENGER, str(challenger))


@connection.in_one_line
def describe(store: Store, name: str) -> None:
    """Tell on the model's page what is in use, how it is loaded and what was decided, unless someone wrote there."""
    client = connection.connect(store)
    written = client.get_registered_model(name).description or ""
    if written and not written.endswith(model_page.WRITTEN):
        return
    decisions = [(each.at, said(_in_markdown(each), name)) for each in history(store, name)]
    text = model_page.text(name, models.versions(store, name), decisions)
    if text != written:
        client.update_registered_model(name, text)


def _in_markdown(decision: Decision) -> Decision:
    """The decision with a person's words, if any, as they are."""
    if not decision.reason.startswith(ANYWAY):
        return decision
    words = verbatim(decision.reason.removeprefix(ANYWAY))
    return decision.model_copy(update={"reason": f"{ANYWAY}{words}"})


def said(decision: Decision, name: str) -> str:
    """The decision in one line."""
    what = (
        "is the champion"
        if decision.is_promoted
        else f"is the challenger, {name}/{decision.champion} stays the champion"
    )
    which = "" if decision.challenge is None else f" (challenge {decision.challenge} on this test set)"
    return f"{name}/{decision.version} {what}: {decision.reason}{which}"
