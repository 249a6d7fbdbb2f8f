"""The luck of the search: with whole searches as replicates, intervals hold for the procedure, not for one outcome."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import scipy.stats
from support.made_study import Maker

from dmlstudy.registry import search_luck as luck_of
from dmlstudy.registry import tracking
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.registry.search_luck import errors_to_decide, search_luck, too_few
from dmlstudy.store import Store
from dmlstudy.verdict.comparison import UnitMeans, compare
from dmlstudy.verdict.sequential import Plan


def drawn(
    num: int, *, search: float, seed: float, rng: np.random.Generator
) -> list[dict[str, dict[int, float]]]:
    """Scores of two families of equal worth, each with luck of its searches and of its seeds."""
    found = []
    for number in range(num):
        of_search = rng.normal(0, search, 2)
        first = 1 + 1000 * number
        found.append(
            {
                name: {s: 0.5 + of_search[at] + rng.normal(0, seed) for s in range(first, first + 2)}
                for at, name in enumerate(("a", "b"))
            }
        )
    return found


def test_a_search_is_one_replicate() -> None:
    scores = drawn(3, search=0.02, seed=0.01, rng=np.random.default_rng(0))
    scores[0]["a"] |= {3: 0.9, 4: 0.9}  # more seeds of the first search, which the others do not have
    scores[0]["untrained"] = {1: 0.1, 2: 0.1}
    found = search_luck(scores, [{}] * 3, resolution=1e-4)
    assert found is not None
    assert (found.num_searches, found.num_seeds) == (3, 2)
    means = [[statistics.fmean(sorted_first(each[name])) for each in scores] for name in ("a", "b")]
    assert [each.score_by_search for each in found.procedures] == [pytest.approx(own) for own in means]
    (one,) = found.comparisons
    (expected,) = compare(
        {name: dict(enumerate(own)) for name, own in zip("ab", means, strict=True)}, resolution=1e-4
    )
    assert one.model_copy(update={"like_unknown": ""}) == expected.model_copy(update={"like_unknown": ""})
    assert one.num_seeds == 3


def test_pairs_that_the_plan_names_are_the_only_ones() -> None:
    scores = [{name: {1: at + number, 2: at} for at, name in enumerate("abc")} for number in range(3)]
    plan = Plan(looks=(3,), compare=(("c", "a"),), decide_on=None, give_up=0.0)
    found = search_luck(scores, [{}] * 3, resolution=1e-4, plan=plan)
    assert found is not None
    assert [(each.first, each.second, each.effect) for each in found.comparisons] == [("c", "a", 2.0)]
    every = search_luck(scores, [{}] * 3, resolution=1e-4, plan=plan.model_copy(update={"compare": "winner"}))
    assert every is not None
    assert len(every.comparisons) == 3


def sorted_first(by_seed: dict[int, float]) -> list[float]:
    return [by_seed[seed] for seed in sorted(by_seed)[:2]]


def test_the_deviation_of_a_search_is_less_that_of_its_seeds() -> None:
    scores = [{"a": {1: 0.5, 2: 0.7}}, {"a": {1001: 0.6, 1002: 0.8}}, {"a": {2001: 0.9, 2002: 0.9}}]
    found = search_luck([each | {"b": each["a"]} for each in scores], [{}] * 3, resolution=1e-4)
    assert found is not None
    over = statistics.variance([0.6, 0.7, 0.9])
    within = statistics.fmean([0.02, 0.02, 0.0]) / 2
    assert found.procedures[0].deviation == pytest.approx((over - within) ** 0.5)
    still = [{"a": {1: 0.5, 2: 0.7}, "b": {1: 0.1, 2: 0.2}}] * 2
    found = search_luck(still, [{}] * 2, resolution=1e-4)
    assert found is not None
    assert found.procedures[0].deviation == 0.0  # never of a negative variance
    assert "2 searches only describe" in found.lines[-1]


def test_searches_that_decide_little_among_many_differences_are_said_to() -> None:
    """Student's 97.5% quantile of 2 degrees is 4.303; of 18 differences at once it is that of 1 - .025 / 18."""
    assert errors_to_decide(3, 1) == pytest.approx(4.303, abs=1e-3)
    assert errors_to_decide(3, 18) == pytest.approx(scipy.stats.t.ppf(1 - 0.025 / 18, 2))
    (line,) = too_few(3, 18)
    assert line == (
        "3 searches decide little among 18 differences at once: one counts from 18.9 standard errors on, with 6"
        " searches from 5.5"
    )
    assert too_few(3, 0) == too_few(3, 1) == too_few(8, 18) == []
    assert "only describe" in too_few(2, 18)[0]


def test_intervals_hold_for_the_procedure_where_those_of_one_search_do_not() -> None:
    """Equal procedures whose search has twice the luck of a seed; 2,000 studies, 3 searches."""
    rng = np.random.default_rng(1)
    held, held_once = 0, 0
    for _ in range(2000):
        scores = drawn(3, search=0.02, seed=0.01, rng=rng)
        found = search_luck(scores, [{}] * 3, resolution=1e-9)
        assert found is not None
        (one,) = found.comparisons
        assert one.low is not None
        assert one.high is not None
        held += one.low <= 0 <= one.high
        once = {
            name: {s: v + rng.normal(0, 0.01) for s, v in enumerate([np.mean(list(own.values()))] * 5)}
            for name, own in scores[0].items()
        }
        (one,) = compare(once, resolution=1e-9)
        held_once += (one.low or 0) <= 0 <= (one.high or 0)
    assert 0.935 <= held / 2000 <= 0.965
    assert held_once / 2000 < 0.7


def units(values_C: list[float], key: str = "k") -> UnitMeans:
    return UnitMeans(key, [1] * len(values_C), np.array(values_C))


def test_classes_are_those_of_the_means_over_seeds() -> None:
    rng = np.random.default_rng(2)
    scores = drawn(3, search=0.02, seed=0.01, rng=rng)
    by_unit: list[dict[str, Any]] = [
        {
            "unit": "class",
            "by_unit": {
                name: {seed: units([v + d for d in (-0.1, 0.1) * 6]) for seed, v in own.items()}
                for name, own in each.items()
            },
        }
        for each in scores
    ]
    found = search_luck(scores, by_unit, resolution=1e-4)
    assert found is not None
    (one,) = found.comparisons
    assert one.like_outcome is not None
    assert one.num_classes == 12
    del by_unit[1]["by_unit"]["b"]  # an older version, which kept none
    found = search_luck(scores, by_unit, resolution=1e-4)
    assert found is not None
    assert found.comparisons[0].like_outcome is None


@pytest.mark.parametrize(
    "scores",
    [
        [{"a": {1: 0.5, 2: 0.6}}],
        [{"a": {1: 0.5, 2: 0.6}}, {"b": {1: 0.5, 2: 0.6}}],
        [{"a": {1: 0.5, 2: 0.6}}, {"a": {1001: 0.5}}],
        [{"a": {1: 0.5, 2: 0.6}}, {"a": {}}],
    ],
)
def test_what_was_not_done_again_tells_nothing(scores: list[dict[str, dict[int, float]]]) -> None:
    assert search_luck(scores, [{}] * len(scores), resolution=1e-4) is None


def judged(store: Store, study: str, scores: dict[str, list[float]], first: int = 1, **origin: str) -> Maker:
    maker = Maker(store, study, **origin)
    for place, (family, own) in enumerate(scores.items()):
        maker.search(family, "finished", 0.7 - 0.1 * place, training__lr=1e-3)
        for number, score in enumerate(own):
            maker.judge(family, first + number, score)
    return maker


def test_the_leaderboard_reads_the_finished_searches_of_its_study(tmp_path: Any) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    judged(store, "s", {"a": [0.5, 0.52, 0.9], "b": [0.4, 0.42, 0.1], "c": [0.2, 0.2, 0.2]}).end("a")
    assert leaderboard(store, "s").luck is None
    assert "each search was run once" in luck_of.luck_lines(leaderboard(store, "s"))[0]
    assert luck_of.leaders(leaderboard(store, "s"), 2) == ["a", "b"]
    judged(store, "s.search2", {"a": [0.6, 0.62], "b": [0.3, 0.3]}, 1001, replicate_of="s").end("a")
    third = judged(store, "s.search3", {"a": [0.7, 0.7], "b": [0.5, 0.5]}, 2001, replicate_of="s")
    judged(store, "t.search2", {"a": [0.7, 0.7]}, 1001).end("a")  # someone's own study of such a name
    found = leaderboard(store, "s").luck
    assert found is not None
    assert found.num_searches == 2  # the third still runs
    third.end("a")
    found = leaderboard(store, "s").luck
    assert found is not None
    assert [each.score_by_search for each in found.procedures] == [
        pytest.approx([0.51, 0.61, 0.7]),
        pytest.approx([0.41, 0.3, 0.5]),
    ]
    assert tracking.replicates_of(store, "t") == []
    assert leaderboard(store, "s.search2").luck is None
