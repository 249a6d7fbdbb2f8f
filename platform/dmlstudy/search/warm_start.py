"""Starting points of a search besides its defaults: the best configurations of earlier studies in the storage.

Of studies that are named they come in rank order. With ``search.warm_start: auto`` each earlier study has a weight: how
far it ranks the points that both know as this study does.

The default and the points taken so far are such points, for this study has scored them. The earlier one has tried them,
or a forest of extremely randomised trees on its trials predicts their scores; at points that were tried it is exact.

With τ Kendall's rank correlation over the n points known so far, the weight is

    w = max(0, ((n - 1) τ + κ τ₀) / (n - 1 + κ)),

so at first all are equal, and one with w = 0 is left out. The next point is the best untried one of the study with the
largest w / (1 + points taken from it), as seats are given by d'Hondt. Where all are left out, the sampler goes on.

Source: ranking losses as weights, after M. Feurer, B. Letham, E. Bakshy, Scalable meta-learning for Bayesian
optimization using ranking-weighted Gaussian process ensembles, 2018, and M. Wistuba, N. Schilling, L. Schmidt-Thieme,
Scalable Gaussian process-based transfer surrogates for hyperparameter optimization, Machine Learning 107, 2018.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from dmlstudy.records import Record, Scalar
from dmlstudy.search.samplers import FAMILY, as_finished
from dmlstudy.search.storage import attrs_in, trials_of, user_attrs_of
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.store import Store
from dmlstudy.trials import rank

MOST_PER_FAMILY = 5
MOST_READ = 50

WARM_START = "warm_start"
"""The user attribute of a study for the points that it found when it began, of a trial for where its point is from."""

RANKINGS = "warm_start_rankings"
"""The user attribute of a study for what earlier studies say of these points; only with ``auto``."""

FEWEST_RANKED = 4
"""Scored trials of an earlier study below which it says nothing of points that it has not tried."""

MOST_RANKED = 200
"""The newest trials of an earlier study from which it ranks points."""

TREES = 60

ABSENT = object()
"""In the place of a value that a point does not have."""

PRIOR, PRIOR_COMPARISONS = 0.5, 3.0
"""τ₀ and κ: before it is known better, earlier studies are thought to be half alike, as if from three comparisons.

So one comparison, of a place that the earlier study may have predicted badly, never leaves a study out; two may.
"""


def earlier_best(
    spec: StudySpec, storage: optuna.storages.BaseStorage
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Points of each family that did best in the studies the spec names, each as (where it comes from, point).

    Every study's best come first, then every study's second best: scores of different studies are not
    compared, for their data may differ. With ``auto`` studies on data of this name come before others.

    Points are as they were drawn then; what of them the present space takes is for others to see. Raises SpecError
    for a study that is not in the storage.
    """
    known = sorted(set(optuna.get_all_study_names(storage)) - {spec.name})
    wanted: Sequence[str] = spec.file.search.warm_start
    if wanted == "auto":
        wanted = sorted(known, key=lambda name: attrs_in(storage, name).get("data") != spec.data.name)
    ranked: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = {name: [] for name in spec.families}
    for order, name in enumerate(wanted):
        if name not in known:
            there = ", ".join(known) or "none"
            all_of_them = "; for all of them write auto without brackets" if name == "auto" else ""
            raise SpecError(
                f"search.warm_start: no study {name!r} in the store; there are: {there}{all_of_them}"
            )
        for family, trials in _of_families(storage, name, TrialState.COMPLETE).items():
            if family in ranked:
                trials.sort(key=lambda trial: rank(trial.values[0], trial.number), reverse=True)
                ranked[family] += [
                    (rank, order, f"{name} #{trial.number}", _without_family(trial.params))
                    for rank, trial in enumerate(trials)
                ]
    return {
        family: [(source, point) for _, _, source, point in sorted(found, key=lambda item: item[:2])][
            :MOST_READ
        ]
        for family, found in ranked.items()
    }


def _of_families(
    storage: optuna.storages.BaseStorage, study: str, *states: TrialState
) -> dict[str, list[FrozenTrial]]:
    found: dict[str, list[FrozenTrial]] = {}
    for trial in optuna.load_study(study_name=study, storage=storage).get_trials(
        deepcopy=False, states=states
    ):
        found.setdefault(str(trial.user_attrs.get(FAMILY)), []).append(trial)
    return found


def _without_family(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != FAMILY}


def study_of(source: str) -> str:
    """The study that a point comes from, by what its trial says of that."""
    return source.rpartition(" #")[0]


# What earlier studies say of points


class PointRanks(Record):
    """A family's default and the points that were found for it, as each earlier study ranks them.

    ``ranks`` has for each study, in the order in which points are taken, the place from the worst up of the default
    and then of each point of ``sources``: equal places for equal scores, None for a point outside the present space.
    A study that cannot say has none.
    """

    default: dict[str, Scalar]
    sources: list[str]
    ranks: dict[str, list[int | None]]


Fitted = Callable[[str, Mapping[str, Any]], Mapping[str, Scalar] | None]
"""The point of a family in the present space; None where it does not fit."""


def point_ranks(
    points: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]],
    defaults: Mapping[str, Mapping[str, Scalar]],
    fitted: Fitted,
    storage: optuna.storages.BaseStorage,
) -> dict[str, PointRanks]:
    """For each family with points: the ranks that the studies they come from give to them and to the default."""
    trials_by: dict[str, dict[str, list[FrozenTrial]]] = {}
    found: dict[str, PointRanks] = {}
    for family, own in points.items():
        if not own or family not in defaults:
            continue
        placed = [defaults[family], *(fitted(family, point) for _, point in own)]
        asked = [_without_family(point) for point in placed if point is not None]
        ranks: dict[str, list[int | None]] = {}
        for study in dict.fromkeys(study_of(source) for source, _ in own):
            if study not in trials_by:
                trials_by[study] = _of_families(storage, study, TrialState.COMPLETE, TrialState.PRUNED)
            scored = as_finished(trials_by[study].get(family, []))[-MOST_RANKED:]
            said = iter(_places(predicted_scores(scored, asked)))
            ranks[study] = [None if point is None else next(said, None) for point in placed]
        sources = [source for source, _ in own]
        found[family] = PointRanks(default=_without_family(defaults[family]), sources=sources, ranks=ranks)
    return found


def predicted_scores(trials: Sequence[FrozenTrial], points: Sequence[Mapping[str, Any]]) -> list[float]:
    """The scores at points by a forest on scored trials, exact where one was tried; none of too few trials.

    Parameters are compared by name, numbers on the scale on which they were drawn, choices each by itself. One that a
    trial or a point does not have is a value of its own.
    """
    trials = [trial for trial in trials if math.isfinite(trial.values[0])]
    distributions: dict[str, BaseDistribution] = {}
    for trial in trials:
        distributions |= _without_family(trial.distributions)
    if len(trials) < FEWEST_RANKED or not distributions:
        return []
    from sklearn.ensemble import ExtraTreesRegressor  # type: ignore[import-untyped]

    forest = ExtraTreesRegressor(n_estimators=TREES, random_state=0, n_jobs=1)
    forest.fit(_features(distributions, [t.params for t in trials]), [trial.values[0] for trial in trials])
    # Equal points may differ in the last digits of their means; a rank is not to hang on that.
    return [float(score) for score in np.round(forest.predict(_features(distributions, points)), 12)]


def _features(distributions: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """A row for each point: a column for each number, on its own scale from 0 to 1, and for each choice."""
    columns: list[list[float]] = []
    for name, each in sorted(distributions.items()):
        drawn = [point.get(name, ABSENT) for point in points]
        if isinstance(each, CategoricalDistribution):
            columns += [[float(value == choice) for value in drawn] for choice in each.choices]
        else:
            columns.append([_placed(each, value) for value in drawn])
    return np.array(columns, dtype=float).T.reshape(len(points), len(columns))


def _placed(distribution: Any, value: Any) -> float:
    """The place of a number in a range, from 0 to 1; -1 of what is none, or none of a logarithmic scale."""
    low, high = distribution.low, distribution.high
    if not isinstance(value, int | float) or (distribution.log and value <= 0):
        return -1.0
    if distribution.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low) if high > low else 0.0


def _places(scores: Sequence[float]) -> list[int]:
    order = sorted(set(scores))
    return [order.index(score) for score in scores]


# The weights


class StudyWeight(Record):
    """The weight of an earlier study in one family: how often it ranks two points as this study does."""

    family: str
    study: str
    weight: float
    num_alike: int
    num_pairs: int
    """Pairs of points that this study scores unlike and the earlier one ranks."""
    num_taken: int

    def __str__(self) -> str:
        agreement = (
            f"ranks {self.num_alike} of {self.num_pairs} pairs alike" if self.num_pairs else "not compared"
        )
        left_out = ", left out" if not self.weight else ""
        return f"{self.study}: {self.num_taken} taken, weight {self.weight:.2f} ({agreement}{left_out})"


def study_weights(family: str, known: PointRanks, trials: Sequence[FrozenTrial]) -> list[StudyWeight]:
    """The weight of each earlier study, given this study's trials of the family whatever their state, in any order."""
    trials = sorted(trials, key=lambda trial: trial.number)
    places = {source: place for place, source in enumerate(known.sources, 1)}
    taken = [str(trial.user_attrs[WARM_START]) for trial in trials if WARM_START in trial.user_attrs]
    scored: dict[int, float] = {}
    for trial in as_finished([t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]):
        place = places.get(str(trial.user_attrs.get(WARM_START)))
        if place is None and _without_family(trial.params) == known.default:
            place = 0
        if place is not None:
            scored.setdefault(place, trial.values[0])
    counts = Counter(map(study_of, taken))
    found = []
    for study, ranks in known.ranks.items():
        shared = [(score, at) for place, score in scored.items() if (at := ranks[place]) is not None]
        signs = [
            np.sign(one - other) * np.sign(at - there)
            for number, (one, at) in enumerate(shared)
            for other, there in shared[:number]
            if one != other
        ]
        found.append(
            StudyWeight(
                family=family,
                study=study,
                weight=shrunk_weight(float(np.mean(signs)) if signs else 0.0, len(shared) if signs else 0),
                num_alike=sum(sign > 0 for sign in signs),
                num_pairs=len(signs),
                num_taken=counts[study],
            )
        )
    return found


def shrunk_weight(tau: float, num_points: int) -> float:
    """The weight at a rank correlation over so many points; see the formula above."""
    comparisons = max(0, num_points - 1)
    return max(0.0, (comparisons * tau + PRIOR_COMPARISONS * PRIOR) / (comparisons + PRIOR_COMPARISONS))


class Candidate(NamedTuple):
    """A point of an earlier study that fits the present space."""

    source: str
    point: dict[str, Scalar]


class WeighedPoints:
    """The points of earlier studies from which a family takes up to ``most``, by their studies' weights.

    What comes next is a function of the study's attribute and of the family's trials, so of what is stored.
    """

    def __init__(self, family: str, known: PointRanks, candidates: Sequence[Candidate], most: int) -> None:
        self.family = family
        self._known = known
        self._candidates = candidates
        self._most = most
        self._taken: dict[int, str] = {}
        self._last_generation = -1
        self._is_told = False

    @property
    def num_taken(self) -> int:
        """Number of points taken so far."""
        return len(self._taken)

    def note(self, trial: FrozenTrial) -> None:
        """Take into account a trial of the family that was requested, now or in an earlier session."""
        if WARM_START in trial.user_attrs:
            self._taken[trial.number] = str(trial.user_attrs[WARM_START])
            self._last_generation = trial.user_attrs["generation"]
        elif self._taken and trial.user_attrs["generation"] > self._last_generation:
            self._is_told = True  # in an earlier session, or just now

    def weights(self, trials: Sequence[FrozenTrial]) -> list[StudyWeight]:
        """The weights, given the family's trials whose end is to be known."""
        counts = Counter(map(study_of, self._taken.values()))
        return [
            each.model_copy(update={"num_taken": counts[each.study]})
            for each in study_weights(self.family, self._known, trials)
        ]

    def next(
        self, trials: Sequence[FrozenTrial], is_tried: Callable[[Mapping[str, Any]], bool]
    ) -> Candidate | None:
        """The point that comes next; None where ``most`` were taken or no study is left to take one from."""
        if self.num_taken >= self._most:
            return None
        standing = {each.study: each.weight / (1 + each.num_taken) for each in self.weights(trials)}
        for study in sorted(standing, key=lambda study: -standing[study]):  # of equal ones the first
            if not standing[study]:
                break
            for each in self._candidates:
                if study_of(each.source) == study and not is_tried(each.point):
                    return each
        return None

    def lines(self, trials: Sequence[FrozenTrial], running: Container[int]) -> list[str]:
        """A line for people on what was taken from where, once and when no trial that was taken runs."""
        if self._is_told or not self._taken or any(number in running for number in self._taken):
            return []
        self._is_told = True
        return [f"{self.family}: of earlier studies {'; '.join(map(str, self.weights(trials)))}"]


def stored_weights(store: Store, study: str) -> list[StudyWeight]:
    """The weights of the earlier studies that a study began with, as its trials are now; none without ``auto``."""
    attrs = user_attrs_of(store, study)
    trials = trials_of(store, study) if RANKINGS in attrs else []
    return [
        each
        for family, known in attrs.get(RANKINGS, {}).items()
        for each in study_weights(
            family,
            PointRanks.model_validate(known),
            [trial for trial in trials if trial.user_attrs.get(FAMILY) == family],
        )
    ]
