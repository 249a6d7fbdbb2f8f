"""What figures show are the numbers of the leaderboard, of Optuna, and of computations by hand."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from optuna.importance import get_param_importances
from support.made_study import Maker

from dmlstudy.registry.curves import Curve
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.report import figures
from dmlstudy.report.figures import PairDistances
from dmlstudy.search.history import Parameter, Searched, Tried, searched


def tried(number: int, score: float | None, status: str = "finished", **params: float) -> Tried:
    return Tried(number=number, status=status, score=score, params=dict(params), curve={}, reason="")


def test_scores_are_the_leaderboards(small: Maker) -> None:
    rows = leaderboard(small.store, "small").rows
    drawn = {trace.name: trace for trace in figures.scores(rows, "test_map_at_r").data}
    assert drawn.keys() == {"alpha", "beta", "untrained"}
    for row in rows:
        if row.num_judged:
            estimate = row.test["test_map_at_r"]
            assert list(drawn[row.family].x) == [estimate.mean]
            assert list(drawn[row.family].error_x.array) == [estimate.half_width]
    # By hand: mean and t(0.975, 2) s / sqrt(3).
    assert drawn["alpha"].x[0] == pytest.approx(0.61)
    assert drawn["alpha"].error_x.array[0] == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)


def test_importance_is_optunas(small: Maker) -> None:
    own = searched(small.store, "small")["alpha"]
    reference = optuna.create_study(direction="maximize")
    reference.add_trials(
        [t for t in small.optuna.trials if t.user_attrs["family"] == "alpha" and t.values is not None]
    )
    expected = {name.removeprefix("alpha/"): s for name, s in get_param_importances(reference).items()}
    assert {each.name: each.importance for each in own.parameters} == expected
    assert sum(expected.values()) == pytest.approx(1)
    (bars,) = figures.importance(own).data
    assert list(bars.x) == sorted(expected.values(), reverse=True)


def test_what_was_searched_is_read_by_family(small: Maker) -> None:
    found = searched(small.store, "small")
    assert found.keys() == {"alpha", "beta", "gamma"}
    alpha = found["alpha"]
    assert [trial.score for trial in alpha.of("finished")] == [0.5, 0.6, 0.55, 0.7, 0.65]
    assert [(trial.score, trial.curve) for trial in alpha.of("pruned")] == [(0.3, {1: 0.3})]
    assert alpha.trials[0].params == {"training.lr": 1e-3, "loss.margin": 0.2, "loss.weighting": "power"}
    assert found["beta"].parameters == []
    assert found["gamma"].trials[0].reason == "loss is not finite <b>"
    assert [each.importance for each in found["gamma"].parameters] == [None]


def test_the_best_so_far_is_of_finished_trials_only() -> None:
    trials = [
        tried(0, None, "failed"),
        tried(1, 0.5),
        tried(2, 0.9, "pruned"),
        tried(5, 0.4),
        tried(6, 0.6),
    ]
    assert figures.running_best(trials) == [(2, 0.5), (3, 0.5), (4, 0.5), (5, 0.6)]
    own = Searched(family="f", trials=trials, parameters=[])
    finished, pruned, best = figures.history([own], {"f": 0}, "map_at_r").data
    assert (list(finished.x), list(finished.y)) == ([2, 4, 5], [0.5, 0.4, 0.6])
    assert (list(pruned.x), list(pruned.y), pruned.marker.symbol) == ([3], [0.9], "circle-open")
    assert (list(best.x), list(best.y)) == ([2, 5], [0.5, 0.6])


def test_many_trials_are_drawn_as_some_and_their_best_as_steps() -> None:
    trials = [tried(number, 0.1 + (number // 400) / 10, x=1.0 + number / 5000) for number in range(1600)]
    own = Searched(family="f", trials=trials, parameters=[Parameter(name="x", low=1, high=2)])
    finished, _, best = figures.history([own], {"f": 0}, "map_at_r").data
    assert len(finished.x) == 400
    assert list(best.x) == [1, 401, 801, 1201, 1600]
    assert len(figures.slices(own).data[0].x) == 400
    lines = figures.parallel(own, "map_at_r").data
    assert len(lines) == figures.STRENGTHS
    assert sum(x is None for line in lines for x in line.x) == figures.MOST_LINES


def test_a_place_in_a_range_by_hand() -> None:
    assert Parameter(name="x", low=1, high=3).place(1.5) == pytest.approx(0.25)
    assert Parameter(name="x", low=1e-4, high=1e-2, is_log=True).place(1e-3) == pytest.approx(0.5)
    choice = Parameter(name="x", choices=["a", "b", "c"])
    assert [choice.place(each) for each in ("a", "b", "c")] == [0, 0.5, 1]
    assert Parameter(name="x", choices=["a"]).place("a") == 0


def test_lines_go_through_each_parameter_and_end_at_the_objective() -> None:
    own = Searched(
        family="f",
        trials=[tried(0, 0.2, x=1.0, y=10.0), tried(1, 0.6, x=3.0), tried(2, None, "failed", x=2.0, y=1.0)],
        parameters=[Parameter(name="x", low=1, high=3), Parameter(name="y", low=0, high=10)],
    )
    worse, *between, better = figures.parallel(own, "map_at_r").data
    assert not any(len(line.x) for line in between)
    assert (list(worse.x), list(better.x)) == ([0, 1, 0, None], [1, 1, None])
    assert (list(worse.y), list(better.y)) == ([0, 1, 2, None], [0, 2, None])
    assert better.line.width > worse.line.width


def test_slices_show_finished_trials_that_have_the_parameter() -> None:
    own = Searched(
        family="f",
        trials=[tried(0, 0.2, x=1.0, y=10.0), tried(1, 0.6, x=3.0), tried(2, 0.1, "pruned", x=2.0)],
        parameters=[Parameter(name="x", low=1, high=3), Parameter(name="y", low=0, high=10)],
    )
    x, y = figures.slices(own).data
    assert (list(x.x), list(x.y)) == ([0, 1], [0.2, 0.6])
    assert (list(y.x), list(y.y)) == ([1], [0.2])


def test_choices_have_room_and_all_their_names() -> None:
    choices = ["constant", "power", "exponential", "distance_weighted"]
    trials = [tried(n, 0.1 * n) for n in range(4)]
    trials = [t.model_copy(update={"params": {"w": c}}) for t, c in zip(trials, choices, strict=True)]
    own = Searched(family="f", trials=trials, parameters=[Parameter(name="w", choices=choices)])
    axis = figures.slices(own).layout.xaxis
    assert list(axis.ticktext) == ["constant", "power", "exponential", "distance_<br>weighted"]
    assert axis.tickangle == 0
    assert axis.range[0] < -0.1
    assert axis.range[1] > 1.1
    assert figures.slice_columns(own) == 1
    few = [Parameter(name="w", choices=["a", "b"]), Parameter(name="x", low=0, high=1)]
    assert figures.slice_columns(own.model_copy(update={"parameters": few})) == 2


def curve_of(score: float, steps: int) -> Searched:
    trial = tried(3, score).model_copy(
        update={"curve": {step: score + step / 100 for step in range(1, steps + 1)}}
    )
    return Searched(family="f", trials=[trial], parameters=[])


def test_curves_count_epochs_as_epochs() -> None:
    drawn = figures.validation_curves([curve_of(0.5, 6)], {"f": 0}, "map_at_r", 2)
    assert list(drawn.data[0].x) == [1, 2, 3, 4, 5, 6]
    axis = drawn.layout.xaxis
    assert (list(axis.tickvals), list(axis.ticktext)) == ([1, 2, 3, 4, 5, 6], ["1", "2"] * 3)
    assert axis.title.text == "epoch of each fold"
    assert [each.text for each in drawn.layout.annotations] == ["fold 1", "fold 2", "fold 3"]
    assert [each.x0 for each in drawn.layout.shapes] == [2.5, 4.5]
    one = figures.validation_curves([curve_of(0.5, 40)], {"f": 0}, "map_at_r", 40).layout.xaxis
    assert one.title.text == "epoch"
    assert list(one.ticktext) == [str(epoch) for epoch in range(1, 41, 4)]
    many = figures.validation_curves([curve_of(0.5, 1000)], {"f": 0}, "map_at_r", 20).layout.xaxis
    assert len(many.tickvals) <= 50


def test_a_verdicts_models_are_lines_of_their_own() -> None:
    """A shipped model and two of folds, with two epochs each: no sawtooth."""
    curves = [Curve("f", seed, {"train_loss": [4.0, 2.0, 5.0, 3.0, 6.0, 1.0]}) for seed in (1, 2)]
    shipped, *of_folds = figures.training_loss(curves, {"f": 0}, 2).data
    assert (list(shipped.x), list(shipped.y)) == ([1, 2], [4, 2])
    assert [(list(each.x), list(each.y)) for each in of_folds] == [([1, 2], [5, 3]), ([1, 2], [6, 1])]
    assert shipped.showlegend
    assert not any(each.showlegend for each in of_folds)
    assert all(each.line.width < shipped.line.width for each in of_folds)
    assert "model of fold 2" in of_folds[1].hovertemplate


def test_training_losses_are_means_over_seeds() -> None:
    curves = [Curve("f", seed, {"train_loss": [1.0 * seed, 0.5 * seed]}) for seed in (1, 2, 3)]
    curves.append(Curve("g", 1, {"train_loss": [-1.0]}))
    f, g = figures.training_loss(curves, {"f": 0, "g": 1}).data
    assert (list(f.x), list(f.y)) == ([1, 2], [2, 1])
    assert list(g.y) == [-1]
    assert figures.training_loss(curves[:3], {}).layout.yaxis.type == "log"
    assert figures.training_loss(curves, {}).layout.yaxis.type is None


def test_histograms_are_shares_of_pairs_in_common_bins() -> None:
    before = PairDistances(np.array([0.0, 0.1, 0.2]), np.array([0.1, 0.9]))
    after = PairDistances(np.array([0.0, 0.0, 0.3]), np.array([0.6, 1.2]))
    edges = figures.bins([before, after])
    assert (edges[0], edges[-1], len(edges)) == (0, 1.2, figures.BINS + 1)
    traces = figures.histograms([("before", before), ("after", after)], "distance").data
    for trace, distances in zip(traces, [*before, *after], strict=True):
        assert sum(trace.y) == pytest.approx(1)
        np.testing.assert_allclose(trace.y, np.histogram(distances, edges)[0] / len(distances))
    assert figures.overlap(after, edges) == 0
    alike = PairDistances(np.array([0.0, 1.0]), np.array([0.0, 0.0, 1.0, 1.0]))
    assert figures.overlap(alike, np.array([-0.5, 0.5, 1.5])) == 1


def test_no_bin_of_bits_lies_between_two_distances() -> None:
    few = PairDistances(np.array([0.0, 3.0]), np.array([5.0]))
    np.testing.assert_array_equal(figures.bins([few]), np.arange(-0.5, 5.6))
    many = figures.bins([PairDistances(np.array([0.0]), np.array([500.0]))])
    assert len(many) <= figures.BINS + 2
    assert not np.mod(many + 0.5, 1).any()
    assert many[0] < 0
    assert many[-1] > 500


def test_a_class_is_not_told_by_colour_alone() -> None:
    looks = [figures.look(number) for number in range(40)]
    assert len(set(looks)) == 40
    for one, other in zip(looks, looks[len(figures.COLORS) :], strict=False):
        assert one.color == other.color
        assert one.symbol != other.symbol
