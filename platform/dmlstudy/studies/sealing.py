"""The sealed plan of a study's verdict: kept before the first test image is read, and checked afterwards."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from dmlstudy.files import written_whole
from dmlstudy.registry import tracking
from dmlstudy.registry.environment import commit, source_sha256
from dmlstudy.registry.runs import PLAN, PLAN_SHA256, Run, RunKind, StudyRuns
from dmlstudy.search.study_search import StudySearch
from dmlstudy.search.verdict_trials import verdict_trial
from dmlstudy.spec import study_file, yaml_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.spec.study_paths import Places
from dmlstudy.store import Store, StoreError
from dmlstudy.studies.status import served
from dmlstudy.text import first_line
from dmlstudy.trials import Status
from dmlstudy.verdict.comparison import UnitMeans
from dmlstudy.verdict.power import ASSUMED, Pilot, PlanPower, of_folds
from dmlstudy.verdict.sealed_plan import PLAN_FILE, SealedPlan, digest_of
from dmlstudy.verdict.sequential import Looks

NO_PLAN = "it has no sealed plan: its verdict began before plans were kept, or there is none yet"

DATA = (
    "development_sha256",
    "test_sha256",
    "features_sha256",
    "retention_sha256",
    "num_development_images",
    "num_test_images",
)
"""Tags of a study's run that say on which data it is."""

CLOCK_S = 1.0
"""Seconds by which the times of a file and of a run may differ."""

ROUNDING = 1e-6
"""A score differs by less from the mean of its own scores by class."""

MOST_TOLD = 3
"""Differences that a line names."""


def code_version() -> str:
    """The commit, or the digest of the sources where that is not known."""
    return commit() or f"sources {source_sha256()}"


def plan_of(
    spec: StudySpec, search: StudySearch, data: Mapping[str, str], folds: str, power: PlanPower
) -> SealedPlan:
    """The plan of a study whose search is over; ``folds`` is the text that names their classes."""
    configs, winner = search.competitors().configs, search.winner()
    assert winner is not None
    return SealedPlan(
        study=spec.name,
        sealed=time.time(),
        code_version=code_version(),
        study_sha256=spec.digest(),
        meaning=spec.meaning(),
        folds_sha256=digest_of(folds),
        data={name: data[name] for name in DATA if name in data},
        objective=spec.file.protocol.objective,
        rule=search.plan,
        weights=search.plan.weights,
        winner=winner,
        trials={
            family: [verdict_trial(config, seed).fingerprint() for seed in search.plan.seeds]
            for family, config in configs.items()
        },
        pairs=search.pairs(),
        power=power.facts(),
    )


def seal(
    spec: StudySpec,
    store: Store,
    tracker: tracking.StudyTracker,
    search: StudySearch,
    origin: Mapping[str, str],
    folds: str,
    power: PlanPower,
    tell: Callable[[str], object],
) -> None:
    """Keep the plan in the study's folder and with its run, and say what it can see.

    Does nothing where an earlier session has done so, nor where one has begun the verdict without: a plan that comes
    later seals nothing.
    """
    if not tracker.may_seal:
        return
    families = search.competitors().best
    power = power._replace(num_families=len(families))
    if power.pilot == ASSUMED:
        power = power._replace(pilot=_pilot(tracker, families, spec.file.protocol.objective))
    for line in power.told():
        tell(line)
    plan = plan_of(spec, search, origin, folds, power)
    with written_whole(store.study_folder(spec.name) / PLAN_FILE) as file:
        file.write(plan.text.encode())
    tracker.seal(plan)
    tell(f"the plan of the verdict is sealed before the first test image is read: sha256 {plan.digest}")


def _pilot(tracker: tracking.StudyTracker, families: Iterable[str], objective: str) -> Pilot:
    """The pilot of this search's folds; what is assumed where they kept no scores by class."""
    means = {
        family: [UnitMeans.of(each, objective) for each in tracker.fold_scores(family)] for family in families
    }
    folds = {
        family: {fold: each for fold, each in enumerate(own) if each is not None}
        for family, own in means.items()
    }
    return of_folds(folds) or ASSUMED


class Checked(NamedTuple):
    """The digest of a study's sealed plan, and what differs from it; no digest where there is none."""

    digest: str
    differing: list[str]

    def __str__(self) -> str:
        if not self.differing:
            return (
                f"all is as the plan says that was sealed before the first test image: sha256 {self.digest}"
            )
        more = len(self.differing) - MOST_TOLD
        return "; ".join(self.differing[:MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


def verify(store: Store, study: str) -> Checked:
    """Compare a study with its sealed plan. Raises StoreError where there is no such study."""
    try:
        state: Mapping[str, Any] = store.read_state(study)
    except StoreError:
        state = {}  # another store's, of which this one knows the runs
    runs = tracking.runs_of(served(store, state), study)
    kept, tag = runs.text(PLAN_FILE), runs.study.tags.get(PLAN_SHA256, "")
    path = store.study_folder(study) / PLAN_FILE
    in_folder = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    if kept is None and in_folder is None and not tag:
        return Checked("", [NO_PLAN])
    missing = [
        f"the sealed plan is missing {where}"
        for where, is_there in (
            ("with the study's run", kept is not None),
            ("among the tags of the study's run", bool(tag)),
            ("in the study's folder", in_folder is not None or not state),
        )
        if not is_there
    ]
    texts = {"with the study's run": kept, "in the study's folder": in_folder}
    other = [
        f"{PLAN_FILE} {where} is not the one that was sealed"
        for where, text in texts.items()
        if text is not None and tag and digest_of(text) != tag
    ]
    text = next((each for each in (kept, in_folder) if each is not None and digest_of(each) == tag), None)
    if text is None:
        return Checked(tag, missing + other)
    try:
        plan = SealedPlan.model_validate_json(text)
    except ValidationError as error:
        return Checked(tag, [f"{PLAN_FILE} cannot be read by this version: {first_line(error)}"])
    differing = [*missing, *other, *_in_study(plan, state, runs), *_in_trials(plan, state, runs)]
    return Checked(tag, differing)


def _in_study(plan: SealedPlan, state: Mapping[str, Any], runs: StudyRuns) -> Iterator[str]:
    """Differences in the study file, the folds and the data."""
    tags = runs.study.tags
    files = {"study.json": state.get("spec"), "the run's study.yaml": _yaml(runs.text("study.yaml"))}
    for where, raw in files.items():
        if raw is None:
            if state or where != "study.json":
                yield f"{where} does not hold the study file any more"
            continue
        yield from _in_file(plan, where, raw, state)
    folds = runs.text("folds.json") or ""
    if digest_of(folds) != plan.folds_sha256:
        yield "the folds are not those of the plan"
    known = {**plan.data, "spec_fingerprint": plan.study_sha256[:16], "objective": plan.objective}
    for name, value in known.items():
        if tags.get(name) != value:
            yield f"{name} is {value} in the plan and {tags.get(name)} in the study's run"
    if PLAN in tags and json.loads(tags[PLAN]) != json.loads(plan.rule.model_dump_json()):
        yield "the rule of the verdict in the study's run is not that of the plan"
    if state and (origin := state.get("origin", {})).get("test_sha256") != plan.data.get("test_sha256"):
        yield f"test_sha256 is {plan.data.get('test_sha256')} in the plan and {origin.get('test_sha256')} in study.json"


def _yaml(text: str | None) -> Mapping[str, Any] | None:
    try:
        return None if text is None else yaml_file.mapping(text, "study.yaml")
    except yaml_file.YamlError:
        return None


def _in_file(plan: SealedPlan, where: str, raw: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """Differences between a copy of the study file and the plan, key by key."""
    try:
        spec = study_file.parse({**raw, "name": plan.study}, Places(*state.get("folders", [])))
    except SpecError as error:
        yield f"{where}: {error}"
        return
    spec = study_file.as_begun(spec, plan.study_sha256[:16])
    if spec.digest() == plan.study_sha256:
        return
    known, own = _flat(plan.meaning), _flat(json.loads(json.dumps(spec.meaning())))
    keys = [key for key in {**known, **own} if known.get(key) != own.get(key)]
    for key in keys:
        yield f"{key} is {known.get(key, 'not there')} in the plan and {own.get(key, 'not there')} in {where}"
    if not keys:
        yield f"{where} is not the study file of the plan"
    if plan.code_version != (present := code_version()):
        yield f"(sealed by {plan.code_version}, read by {present}, whose defaults and spaces may be others)"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their keys' path, without the first two of the form's own."""
    if isinstance(value, Mapping) and value:
        return {
            key: leaf for name, each in value.items() for key, leaf in _flat(each, f"{path}.{name}").items()
        }
    return {path.removeprefix(".").removeprefix("file."): value}


def _in_trials(plan: SealedPlan, state: Mapping[str, Any], runs: StudyRuns) -> Iterator[str]:
    """Differences in the trials of the verdict: unknown ones, too many, too few, and scores that are not their own."""
    every = [run for run in runs.every(RunKind.VERDICT) if run.status != Status.INTERRUPTED]
    finished = Counter((run.family, run.seed) for run in every if run.status == Status.FINISHED)
    for run in every:
        name = f"verdict seed {run.seed} of {run.family}"
        own = plan.trials.get(run.family)
        if own is None:
            yield f"{name} is of a family that the plan does not have"
            continue
        if run.seed not in plan.rule.seeds:
            yield f"{name} is beyond the plan's {len(own)} seeds"
            continue
        if run.tags.get("config_fingerprint") != own[plan.rule.seeds.index(run.seed)]:
            yield f"{name} has another configuration than the plan"
        if run.started < plan.sealed - CLOCK_S:
            yield f"{name} began before the plan was sealed"
        yield from _in_scores(run, name, runs)
    for (family, seed), number in finished.items():
        if number > 1:
            yield f"verdict seed {seed} of {family} has {number} finished runs"
    yield from _too_many_or_few(plan, state, runs)


def _in_scores(run: Run, name: str, runs: StudyRuns) -> Iterator[str]:
    """Say so unless a finished trial's score is the mean of its own scores by class, where it has such."""
    if run.status != Status.FINISHED:
        return
    found = runs.seed_score(run)
    scores = runs.unit_scores(run)
    if scores is not None and scores.digest() != run.tags.get("units_sha256"):
        yield f"{name}: its scores by class are not of the queries that it was judged by"
    if found.score is None or found.units is None:
        return
    counts, mean_C = found.units.counts, found.units.mean_C
    mean = sum(n * float(each) for n, each in zip(counts, mean_C, strict=True)) / sum(counts)
    if abs(mean - found.score) > ROUNDING:
        yield f"{name}: its score is {found.score:.6f}, and that of its classes {mean:.6f}"


def _too_many_or_few(plan: SealedPlan, state: Mapping[str, Any], runs: StudyRuns) -> Iterator[str]:
    """Seeds that the rule does not ask for, and in a finished study those that it does and that are not there."""
    scores = runs.verdict_scores()
    known = {key: each for key, each in scores.items() if key[0] in plan.trials}
    if plan.rule.is_in_steps:
        looks = Looks(plan.rule, list(plan.trials), plan.pairs, runs.study.resolution, overlap=runs.overlap())
        looks.take(known)
        asked = {*looks.asked, *looks.wanted}
        missing = looks.wanted
    else:
        asked = {(family, seed) for family in plan.trials for seed in plan.rule.seeds}
        missing = sorted(asked)
    for family, seed in known:
        if (family, seed) not in asked and seed in plan.rule.seeds:
            yield f"verdict seed {seed} of {family} is one that the rule did not ask for"
    if runs.study.status == "finished" or state.get("state") == "finished":
        for family, seed in missing:
            if (family, seed) not in known:
                yield f"verdict seed {seed} of {family} is missing"
