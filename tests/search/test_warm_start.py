"""Earlier studies weighed by how they rank what is known: the weights by hand, the laws, and what it brings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy.stats import kendalltau
from support.tune_simulator import Score, Tune, by_number, in_memory, study

from dmlstudy.records import Scalar, TrialConfig
from dmlstudy.search import warm_start
from dmlstudy.search.warm_start import (
    PRIOR,
    RANKINGS,
    WARM_START,
    Candidate,
    PointRanks,
    WeighedPoints,
    predicted_scores,
    shrunk_weight,
    study_weights,
)
from dmlstudy.spec.study_file import StudySpec

SPACE: dict[str, Any] = {
    "space": "contrastive",
    "override": {
        "loss.negative_margin": {"float": [0.0, 1.5], "default": 0.75},
        "training.lr": {"float": [1.0e-6, 1.0], "log": True, "default": 1.0e-3},
        "training.head_lr_mult": 1,
        "batch.classes": "all",
        "batch.images_per_class": 4,
    },
}
TOP = 0.9


def top_at(margin: float, lr: float) -> Score:
    """A hill with its top at this place, each axis from 0 to 1."""

    def score(config: TrialConfig, step: int) -> float:
        at = float(config.loss.params["negative_margin"]) / 1.5, (math.log10(config.training.lr) + 6) / 6
        distance = (at[0] - margin) ** 2 + (at[1] - lr) ** 2
        return TOP - 0.4 + 0.4 * math.exp(-distance / 0.245)

    return score


def named(name: str, trials: int, of: Sequence[str] = ("red",), **search: Any) -> StudySpec:
    return study(
        name=name,
        families=dict.fromkeys(of, SPACE),
        training={"epochs": 1},
        protocol={"num_folds": 1, "verdict_seeds": 1},
        search={"trials_per_family": trials, "scheduler": "none", "sampler": "random", **search},
    )


def played(spec: StudySpec, storage: InMemoryStorage, score: Score, **how: Any) -> Tune:
    return Tune(in_memory(spec, storage=storage), score, num_steps_of_trial=1, **how).run()


def stored(tops: dict[str, tuple[float, float]], trials: int = 15, seed: int = 0) -> InMemoryStorage:
    """A storage with a study for each of these tops."""
    storage = InMemoryStorage()
    for number, (name, top) in enumerate(tops.items(), 1):
        played(named(name, trials, seed=1000 * number + seed), storage, top_at(*top))
    return storage


NUM_STUDIES = 40
NUM_TRIALS = 10
AXES = ("f/one", "f/two", "f/three")
DEFAULT: dict[str, Scalar] = dict.fromkeys(AXES, 0.5)
UNIT = {name: FloatDistribution(0, 1) for name in AXES}


def on_hill(top: NDArray[np.float64], place: NDArray[np.float64]) -> float:
    return float(np.exp(-((place - top) ** 2).sum() / 0.25))


def trial_at(
    number: int, place: NDArray[np.float64], score: float, source: str = "", family: str = "f"
) -> FrozenTrial:
    trial = create_trial(
        params=dict(zip(AXES, map(float, place), strict=True)),
        distributions=dict(UNIT),
        value=score,
        user_attrs={"family": family, "generation": number, **({WARM_START: source} if source else {})},
    )
    trial.number = number
    return trial


def earlier(rng: np.random.Generator, top: NDArray[np.float64]) -> list[FrozenTrial]:
    """A search of 24 trials that begins at random and then stays near its best, as adaptive samplers do."""
    found: list[FrozenTrial] = []
    for number in range(24):
        place = rng.random(3)
        if number >= 10:
            best = max(found, key=lambda trial: trial.values[0])
            place = np.clip([best.params[name] for name in AXES] + rng.normal(0, 0.1, 3), 0, 1)
        found.append(trial_at(number, place, on_hill(top, place)))
    return found


def known_of(tops: Sequence[Any], rng: np.random.Generator) -> tuple[PointRanks, list[Candidate]]:
    """Earlier studies with these tops: their five best points in rank order, and how they rank them."""
    studies = {name: earlier(rng, np.asarray(top)) for name, top in zip("abcdef", tops, strict=False)}
    ranked = {name: sorted(each, key=lambda t: (-t.values[0], t.number)) for name, each in studies.items()}
    points = [
        Candidate(f"{name} #{trials[place].number}", trials[place].params)
        for place in range(5)
        for name, trials in ranked.items()
    ]
    asked = [DEFAULT, *(each.point for each in points)]
    ranks = {name: warm_start._places(predicted_scores(each, asked)) for name, each in studies.items()}
    return PointRanks(default=DEFAULT, sources=[each.source for each in points], ranks=dict(ranks)), points


def best_so_far(
    top: NDArray[np.float64], known: PointRanks, points: Sequence[Candidate], how: str, seed: int
) -> list[float]:
    """The best score after each trial: the default, up to five points of earlier studies, then random ones."""
    weighed = WeighedPoints("f", known, points, 5 if how == "auto" else 0)
    in_rank_order = iter(points[: 5 if how == "rank" else 0])
    rng = np.random.default_rng([seed, 1])
    trials: list[FrozenTrial] = []
    for number in range(NUM_TRIALS):
        tried = [trial.params for trial in trials]
        taken = Candidate("", DEFAULT)
        if number:
            drawn = dict(zip(AXES, map(float, rng.random(3)), strict=True))
            found = weighed.next(trials, tried.__contains__) or next(in_rank_order, None)
            taken = found or Candidate("", drawn)
        place = np.array([taken.point[name] for name in AXES], dtype=float)
        trials.append(trial_at(number, place, on_hill(top, place), taken.source))
        weighed.note(trials[-1])
    return list(itertools.accumulate((trial.values[0] for trial in trials), max))


def shortfalls(kinds: str) -> dict[str, list[float]]:
    """The mean distance from the top after each trial over fixed generators, for earlier studies of these kinds.

    An ``a`` is alike: its top lies near; an ``m`` misleads: its top lies half a range away on two axes or three.
    """
    runs: dict[str, list[list[float]]] = {"auto": [], "rank": [], "none": []}
    for seed in range(NUM_STUDIES):
        rng = np.random.default_rng(seed)
        top = rng.uniform(0.1, 0.9, 3)
        tops = [
            np.clip(top + rng.normal(0, 0.08, 3), 0, 1)
            if kind == "a"
            else (top + np.array([0.5, 0.5 * (number % 2), 0.5])) % 1
            for number, kind in enumerate(kinds)
        ]
        known, points = known_of(tops, rng)
        for how, own in runs.items():
            own.append(best_so_far(top, known, points, how, seed))
    return {how: [1 - float(each) for each in np.mean(own, axis=0)] for how, own in runs.items()}


def test_with_one_alike_and_misleading_ones_a_good_point_comes_sooner() -> None:
    """The misleading ones come first by name."""
    found = shortfalls("ma")
    assert found["auto"][5] < 0.9 * found["rank"][5]
    assert all(one <= other + 1e-9 for one, other in zip(found["auto"], found["rank"], strict=True))
    assert found["auto"][5] < 0.3 * found["none"][5]
    found = shortfalls("mmma")
    assert found["auto"][3] < 0.4 * found["rank"][3]
    assert found["auto"][-1] < 0.8 * found["rank"][-1]


def test_little_is_lost_where_none_is_alike_or_all_are() -> None:
    unlike = shortfalls("mm")
    assert all(one <= other + 1e-9 for one, other in zip(unlike["auto"], unlike["rank"], strict=True))
    alike = shortfalls("aa")
    assert all(one <= other + 0.005 for one, other in zip(alike["auto"], alike["rank"], strict=True))


# The weights


def at(
    number: int, score: float | None, source: str = "", state: TrialState = TrialState.COMPLETE
) -> FrozenTrial:
    """A trial of one parameter; the default is where ``x`` is 0."""
    trial = create_trial(
        state=state,
        value=score if state == TrialState.COMPLETE else None,
        params={"f/x": number / 10},
        distributions={"f/x": FloatDistribution(0, 1)},
        user_attrs={"family": "f", "generation": number, **({WARM_START: source} if source else {})},
        intermediate_values={} if score is None else {1: score},
    )
    trial.number = number
    return trial


def test_weights_are_shrunk_rank_correlations() -> None:
    known = PointRanks(
        default={"f/x": 0.0},
        sources=["a #7", "b #1", "a #2", "a #9"],
        ranks={"a": [0, 3, 1, 2, None], "b": [1, 0, 3, 1, 2], "few": [None] * 5},
    )
    trials = [at(0, 0.2), at(1, 0.9, "a #7"), at(2, 0.3, "b #1"), at(3, 0.25, "a #2"), at(4, 0.5, "a #9")]
    a, b, few = study_weights("f", known, [*trials[::-1], at(5, 0.99)])
    tau = kendalltau([0.2, 0.9, 0.3, 0.25], [0, 3, 1, 2]).statistic
    assert (a.num_pairs, a.num_alike, a.num_taken) == (6, 5, 3)
    assert a.weight == pytest.approx((3 * tau + 1.5) / 6)
    # b ranks the default and #2 alike: one of its ten pairs counts for neither.
    assert (b.num_pairs, b.num_alike, b.num_taken) == (10, 4, 1)
    assert b.weight == pytest.approx((4 * (4 - 5) / 10 + 1.5) / 7)
    assert (few.num_pairs, few.weight, few.num_taken) == (0, PRIOR, 0)
    assert str(few) == "few: 0 taken, weight 0.50 (not compared)"


def test_a_study_that_ranks_all_the_other_way_is_left_out() -> None:
    assert shrunk_weight(0.0, 0) == shrunk_weight(0.0, 1) == PRIOR
    assert 0 < shrunk_weight(-1.0, 2) < PRIOR  # one comparison does not suffice
    assert shrunk_weight(-1.0, 3) == 0.0
    assert (
        0 < shrunk_weight(-1 / 3, 3) < shrunk_weight(1 / 3, 3) < shrunk_weight(1.0, 3) < shrunk_weight(1.0, 9)
    )


def test_equal_failed_and_unfinished_points_say_nothing() -> None:
    known = PointRanks(default={"f/x": 0.0}, sources=["a #1", "a #2"], ranks={"a": [0, 2, 1]})
    equal = [at(0, 0.5), at(1, 0.5, "a #1"), at(2, 0.5, "a #2")]
    assert study_weights("f", known, equal)[0].weight == PRIOR
    failed = [at(0, 0.5), at(1, None, "a #1", TrialState.FAIL), at(2, None, "a #2", TrialState.RUNNING)]
    (own,) = study_weights("f", known, failed)
    assert (own.num_pairs, own.num_taken) == (0, 2)
    stopped = [at(0, 0.5), at(1, 0.1, "a #1", TrialState.PRUNED)]
    (own,) = study_weights("f", known, stopped)
    assert (own.num_pairs, own.num_alike, own.weight) == (1, 0, 0.125)


def test_predictions_are_exact_where_a_point_was_tried() -> None:
    space = {
        "lr": FloatDistribution(1e-6, 1e-2, log=True),
        "form": CategoricalDistribution(["a", None]),
        "p": FloatDistribution(0, 1),
    }
    rng = np.random.default_rng(0)
    trials, points = [], []
    for number in range(30):
        point: dict[str, Any] = {"lr": float(10 ** rng.uniform(-6, -2)), "form": ["a", None][number % 2]}
        if number % 2:
            point["p"] = float(rng.random())
        score = -((math.log10(point["lr"]) + 4) ** 2) + (number % 2)
        own = {name: space[name] for name in point}
        trials.append(create_trial(params=point, distributions=own, value=score))
        points.append(point)
    found = predicted_scores(trials, points)
    np.testing.assert_allclose(found, [trial.values[0] for trial in trials])
    good, bad, other = predicted_scores(trials, [{"lr": 1e-4, "form": None}, {"lr": 1e-6}, {"form": "new"}])
    assert good > bad
    assert math.isfinite(other)
    assert predicted_scores(trials[:3], points) == []
    assert predicted_scores([], points) == []


# Laws of the search


TOPS = {"alike": (0.3, 0.4), "far": (0.9, 0.9), "last": (0.35, 0.35)}


@pytest.mark.parametrize(
    "search",
    [
        {},
        {"generation_size": 3},
        {"families": "adaptive", "sampler": "tpe"},
        {"sampler": "tpe", "scheduler": "asha", "generation_size": 2, "reduction_factor": 2},
        {"sampler": "cma"},
    ],
    ids=str,
)
def test_neither_order_nor_interruption_changes_what_is_taken(search: dict[str, Any]) -> None:
    spec = named("later", 9, ("red", "blue"), warm_start="auto", **search)

    def storage() -> InMemoryStorage:
        made = InMemoryStorage()
        for name, top in TOPS.items():
            played(named(name, 8, ("red", "blue"), seed=3), made, top_at(*top))
        return made

    unbroken = played(spec, storage(), top_at(0.3, 0.4)).search
    expected = by_number(unbroken)
    taken = [trial.user_attrs.get(WARM_START) for trial in unbroken.study.trials]
    assert sum(each is not None for each in taken) >= 4
    assert by_number(played(spec, storage(), top_at(0.3, 0.4), at_once=4, seed=1).search) == expected
    broken = storage()
    for session in range(6):
        how = {"at_once": 2, "seed": session, "num_steps_of_trial": 1}
        Tune(in_memory(spec, storage=broken), top_at(0.3, 0.4), **how).run(5 + session)
        if session == 2:  # what the earlier studies have become since is nothing to this one
            optuna.delete_study(study_name="far", storage=broken)
            played(named("newest", 8, ("red", "blue")), broken, top_at(0.1, 0.1))
    again = played(spec, broken, top_at(0.3, 0.4), at_once=3, seed=7).search
    assert by_number(again) == expected
    assert [trial.user_attrs.get(WARM_START) for trial in again.study.trials] == taken


def test_a_study_that_began_before_there_were_weights_goes_on_in_rank_order() -> None:
    storage = stored({"far": (0.9, 0.9), "alike": (0.3, 0.4)})
    auto = named("later", 12, warm_start="auto")
    listed = named("later", 12, warm_start=["alike", "far"])
    old = InMemoryStorage()
    for name in ("alike", "far"):
        optuna.copy_study(from_study_name=name, from_storage=storage, to_storage=old)
    begun = in_memory(listed, storage=old)
    assert RANKINGS not in begun.study.user_attrs
    expected = played(listed, storage, top_at(0.3, 0.4)).search
    assert by_number(played(auto, old, top_at(0.3, 0.4)).search) == by_number(expected)


def test_what_was_taken_from_where_is_told_once() -> None:
    storage = stored({"alike": (0.3, 0.4), "far": (0.95, 0.95)}, trials=20)
    spec = named("later", 12, warm_start="auto")
    tune = Tune(in_memory(spec, storage=storage), top_at(0.3, 0.4), num_steps_of_trial=1)
    (first,) = tune.search.take_notes()
    assert first == (
        "search.warm_start: red: 5 of 38 configurations of earlier studies come right after the default, by how 2"
        " earlier studies rank what is known by then"
    )
    tune.run()
    told = [line for line in tune.search.take_notes() if "warm_start" in line]
    (weights,) = told
    assert weights.startswith("search.warm_start: red: of earlier studies alike: ")
    assert "taken, weight" in weights
    resumed = in_memory(spec, storage=storage)
    Tune(resumed, top_at(0.3, 0.4), num_steps_of_trial=1).run()
    assert resumed.take_notes() == []


def test_studies_on_the_same_data_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = stored({"a": (0.3, 0.4), "b": (0.3, 0.4)})
    optuna.load_study(study_name="a", storage=storage).set_user_attr("data", "cub")
    found = warm_start.earlier_best(named("later", 9, warm_start="auto"), storage)
    assert found["red"][0][0].startswith("b #")
    listed = warm_start.earlier_best(named("later", 9, warm_start=["a", "b"]), storage)
    assert listed["red"][0][0].startswith("a #")


def test_a_store_without_a_study_to_learn_from() -> None:
    for storage in (InMemoryStorage(), stored({"tiny": (0.3, 0.4)}, trials=1)):
        tune = played(named("later", 6, warm_start="auto"), storage, top_at(0.3, 0.4))
        assert len(tune.search.study.trials) == 6
