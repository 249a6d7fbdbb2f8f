"""The power of a study's verdict on its own data, by the best pilot that there is."""

from __future__ import annotations

from collections import Counter

from dmlstudy import metric_names
from dmlstudy.data import ClosedSet
from dmlstudy.retrieval import num_relevant_elsewhere
from dmlstudy.spec.study_file import SpecError, StudySpec, default_values
from dmlstudy.store import Store, StoreError
from dmlstudy.training.interface import TrialData
from dmlstudy.verdict.comparison import PLURALS
from dmlstudy.verdict.power import ASSUMED, Pilot, PlanPower, of_comparisons
from dmlstudy.verdict.sequential import Plan
from dmlstudy.verdict.two_sources import FEWEST_UNITS

NO_MEANS = ("macro_f1", "auc")
"""Metrics that are no mean over queries, so that nothing is known of units like those of the test."""

MOST_READ = 3
"""Earlier studies whose verdicts are read in search of a pilot."""


def units(spec: StudySpec, dataset: TrialData) -> tuple[int, ...] | None:
    """The queries of each unit of the test, or ones where each counts alike; None where the objective is no mean.

    Labels alone are read, no image.
    """
    objective = spec.file.protocol.objective
    if objective in NO_MEANS:
        return None
    labels_N = dataset.test.labels_N
    if isinstance(dataset, ClosedSet):
        return (1,) * len(labels_N)
    query, camera_N = dataset.test_query, dataset.test_camera_N
    asked_N = labels_N if query is None else labels_N[query]
    if camera_N is not None:  # who has no hit by another camera is not asked
        asked_N = asked_N[num_relevant_elsewhere(labels_N, camera_N, query, dataset.test_gallery) > 0]
    counts = Counter(asked_N.tolist())
    of_units = tuple(counts[label] for label in sorted(counts))
    return of_units if metric_names.micro(objective) == objective else (1,) * len(of_units)


def power(
    spec: StudySpec, dataset: TrialData, pilot: Pilot = ASSUMED, *, num_families: int | None = None
) -> PlanPower:
    """The power of the study's plan on its data; ``num_families`` are those that the search has left."""
    family = next(iter(spec.families.values()))
    config = spec.trial_config(family, default_values(family))
    num_rows = len(dataset.development) + len(dataset.test)
    overlap = spec.task.overlap(spec.task.logged_params(config), num_rows)
    return PlanPower(
        Plan.of(spec.file.protocol),
        len(spec.families) if num_families is None else num_families,
        spec.task.unit,
        None if overlap is not None else units(spec, dataset),
        pilot,
        overlap,
    )


def check_population(spec: StudySpec, dataset: TrialData) -> None:
    """Raises SpecError where a verdict is to be decided on classes like these, and nothing can be said of such."""
    protocol = spec.file.protocol
    if protocol.decide_on != "classes_like_these" or (found := power(spec, dataset)).overlap is not None:
        return
    plural = PLURALS[found.unit]
    if found.counts is None:
        why = f"{protocol.objective} is no mean over queries"
    elif len(found.counts) < FEWEST_UNITS:
        why = f"the test has {len(found.counts)} {plural}, and it takes {FEWEST_UNITS}"
    else:
        return
    raise SpecError(
        f"protocol.decide_on: classes_like_these cannot be decided on, for {why}; set protocol.decide_on: these_classes"
    )


def of_store(store: Store, spec: StudySpec, dataset: TrialData) -> Pilot | None:
    """The pilot of the newest verdict in the store on the same test data by the same objective; None without one."""
    objective, counts = spec.file.protocol.objective, units(spec, dataset)
    found: list[tuple[float, str]] = []
    for name in store.studies():
        try:
            state = store.read_state(name)
        except StoreError:
            continue
        origin = state.get("origin", {})
        is_same = (origin.get("test_sha256"), origin.get("objective")) == (
            dataset.test_fingerprint,
            objective,
        )
        if is_same and state["state"] == "finished" and name != spec.name:
            found.append((state["updated"], name))
    if not found:
        return None
    from dmlstudy.registry.leaderboard import leaderboard
    from dmlstudy.studies.status import served

    for _, name in sorted(found, reverse=True)[:MOST_READ]:
        try:
            comparisons = leaderboard(served(store, store.read_state(name)), name).comparisons
        except StoreError:
            continue
        pilot = of_comparisons(comparisons, counts, f"the verdict of {name}, on the same data")
        if pilot is not None:
            return pilot
    return None


def best_pilot(store: Store, spec: StudySpec, dataset: TrialData) -> Pilot:
    """The best before a search: an earlier verdict of the store on the same data, else what is assumed."""
    return of_store(store, spec, dataset) or ASSUMED
