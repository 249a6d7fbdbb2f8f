"""Rules of early stopping, by hand: what ended peers set as the standard and who falls below it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import optuna
import pytest

from dmlstudy.search import early_stopping
from dmlstudy.search.early_stopping import RULES, Asha, EarlyStopping, Hyperband, SearchCurve


def curve(
    scores: list[float], *, turn: int = 0, group: str = "a", epochs: int = 4, folds: int = 2
) -> SearchCurve:
    finite = {step: score for step, score in enumerate(scores, start=1) if math.isfinite(score)}
    return SearchCurve(group, turn, epochs, folds, finite)


def taught(name: str, eta: int, *curves: SearchCurve) -> EarlyStopping:
    rule = RULES[name](eta)
    for ended in curves:
        rule.learn(ended)
    return rule


def stopped_at(rule: EarlyStopping, scores: list[float], **more: int | str) -> int | None:
    """The step at which a trial with these scores is stopped."""
    for step in range(1, len(scores) + 1):
        if rule.stops(curve(scores[:step], **more), step):  # type: ignore[arg-type]
            return step
    return None


FLAT = {level: curve([level] * 8) for level in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}


@pytest.mark.parametrize(
    ("level", "step"),
    [(0.7, None), (0.4, None), (0.39, 2), (0.0, 2)],
    ids=["best", "as good", "below", "last"],
)
def test_halving_keeps_the_best_half(level: float, step: int | None) -> None:
    """Rungs at 2 and 4: r = 4 epochs / 2; of six peers and the trial the best three have 0.4 or more."""
    assert stopped_at(taught("halving", 2, *FLAT.values()), [level] * 8) == step


def test_halving_judges_at_rungs_only_and_by_those_who_got_there() -> None:
    short = [curve([0.9, 0.9]), curve([0.8, 0.8])]  # stopped after two steps
    rule = taught("halving", 2, *short, curve([0.9, 0.9, 0.2, 0.2]), curve([0.9, 0.9, 0.3, 0.3]))
    assert stopped_at(rule, [0.0, 0.9, 0.0, 0.25]) == 4
    assert stopped_at(rule, [0.0, 0.9, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0]) is None  # nobody was there at 8


@pytest.mark.parametrize("eta", [2, 3, 4])
@pytest.mark.parametrize("num_peers", range(4, 14))
def test_halving_decides_as_the_pruner_of_optuna(eta: int, num_peers: int) -> None:
    """A rung after the first step, at which peers and trials have random scores, some of them equal."""
    order = random.Random(num_peers)
    peers = [order.randint(0, 9) / 10 for _ in range(num_peers)]
    rule = taught("halving", eta, *(curve([score], epochs=1) for score in peers))
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=eta)
    for score in [0.0, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0]:
        study = optuna.create_study(direction="maximize", pruner=pruner)
        for own in [*peers, score]:
            trial = study.ask()
            trial.report(own, 1)
            pruned = trial.should_prune()
        assert rule.stops(curve([score], epochs=1), 1) == pruned


@pytest.mark.parametrize("name", sorted(RULES))
def test_nobody_is_stopped_at_the_last_step_or_for_a_score_that_is_not_finite(name: str) -> None:
    """Bracket 0 of hyperband and halving have rungs at 2, 4 and 8 of 8 steps."""
    rule = taught(name, 2, *FLAT.values())
    assert not rule.stops(curve([0.0] * 8), 8)
    assert not rule.stops(
        SearchCurve("a", 0, 4, 2, {1: 0.0, 3: 0.0}), 2
    )  # what was reported there is left out


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_curve_is_learned_whole_or_step_by_step(name: str) -> None:
    curves = [curve([0.1 * ((7 * i + j) % 10) for j in range(8)], turn=i) for i in range(9)]
    steps = RULES[name](2)
    for known in curves:
        for step in range(1, 9):
            steps.learn(curve(list(known.scores.values())[:step], turn=known.turn), since=step)
    for level in (0.2, 0.4, 0.6):
        for turn in range(3):
            whole = stopped_at(taught(name, 2, *curves), [level] * 8, turn=turn)
            assert stopped_at(steps, [level] * 8, turn=turn) == whole


def test_it_takes_eta_peers_to_judge() -> None:
    assert stopped_at(taught("halving", 3, FLAT[0.5], FLAT[0.6]), [0.0] * 8) is None
    assert stopped_at(taught("halving", 3, FLAT[0.4], FLAT[0.5], FLAT[0.6]), [0.0] * 8) == 1
    assert stopped_at(taught("median", 3, FLAT[0.5], FLAT[0.6]), [0.0] * 8) is None


@pytest.mark.parametrize("name", ["halving", "median"])
def test_peers_are_of_the_same_group(name: str) -> None:
    rule = taught(name, 2, *FLAT.values())
    assert stopped_at(rule, [0.0] * 8, group="a") == 2
    assert stopped_at(rule, [0.0] * 8, group="b") is None


class Played:
    """Trials that pause at their rungs, by hand.

    Each has one score at every step; with ``later`` a score of its own from its second rung on.
    """

    def __init__(self, name: str, eta: int, *levels: float, later: Sequence[float] = ()) -> None:
        self.later = later
        self.rule = RULES[name](eta)
        assert isinstance(self.rule, Asha)
        self.asha: Asha = self.rule
        self.levels: list[float] = []
        self.rungs: list[int] = []
        for level in levels:
            self.arrives(level)

    def curve(self, turn: int) -> SearchCurve:
        level = self.later[turn] if self.later and self.rungs[turn] else self.levels[turn]
        return replace(curve([level] * 8, turn=turn), num_promotions=self.rungs[turn])

    def arrives(self, level: float) -> None:
        """A further trial comes to its first rung, unless it has none."""
        self.levels.append(level)
        self.rungs.append(0)
        self.pauses(len(self.levels) - 1)

    def pauses(self, turn: int) -> None:
        if self.asha.pause_after(self.curve(turn)) is not None:
            self.asha.pause(self.curve(turn))

    def promoted(self) -> list[int]:
        """The turns of those that go on, one after another, each to its next rung or end."""
        found: list[int] = []
        while (turn := self.asha.promotable("a")) is not None:
            self.asha.leave(self.curve(turn))
            self.rungs[turn] += 1
            self.pauses(turn)
            found.append(turn)
        return found


def test_asha_promotes_the_best_half_as_it_grows_higher_rungs_first() -> None:
    """Rungs at 2 and 4 of 8 steps: r = 4 epochs / 2."""
    played = Played("asha", 2, 0.1)
    assert played.promoted() == []
    played.arrives(0.2)
    assert played.promoted() == [1]  # the best of two
    played.arrives(0.05)
    assert played.promoted() == []  # of three still one
    played.arrives(0.3)
    assert played.promoted() == [3, 3]  # second at rung 0, and then the best of two at rung 1: on to its end
    played.arrives(0.25)
    played.arrives(0.0)
    assert played.promoted() == [4]  # of six the best three; of three at rung 1 still one
    assert [played.asha.pause_after(curve([], turn=0, epochs=epochs)) for epochs in (1, 2, 4, 8)] == [
        1,
        1,
        2,
        4,
    ]


def test_asha_promotes_as_the_algorithm_of_its_paper() -> None:
    """Algorithm 2 of Li et al. 2020, get_job: from the highest rung down, the best n/eta not yet promoted."""
    order = random.Random(0)
    for eta in (2, 3, 4):
        played, promoted = Played("asha", eta), set[tuple[int, int]]()
        rungs: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
        num_rungs = 2  # below 8 steps, from 4 // eta on
        for turn in range(40):
            played.arrives(order.randint(0, 12) / 10)
            rungs[0].append(turn)
            expected = []
            while True:
                for k in reversed(range(num_rungs)):
                    ranked = sorted(rungs[k], key=lambda t: (-played.levels[t], t))
                    left = [t for t in ranked[: len(ranked) // eta] if (k, t) not in promoted]
                    if left:
                        promoted.add((k, left[0]))
                        rungs[k + 1].append(left[0])
                        expected.append(left[0])
                        break
                else:
                    break
            assert played.promoted() == expected


def test_who_cannot_be_promoted_any_more_is_hopeless_and_nobody_else() -> None:
    """Of at most 8 trials 4 leave the first rung; two more are kept for those that may fail."""
    played = Played("asha", 2, *(0.1 * level for level in range(8)))
    assert played.asha.hopeless("a", 0) == [0, 1]
    assert played.asha.hopeless("a", 2) == [0]
    assert played.asha.hopeless("a", 1, [played.curve(0)]) == [0], "of those that run one more may come"
    assert played.asha.hopeless("a", 4) == []
    assert played.asha.hopeless("b", 0) == []
    assert played.asha.waiting("a") == list(reversed(range(8)))


@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
@pytest.mark.parametrize("eta", [2, 3])
def test_giving_up_the_hopeless_changes_no_promotion(
    scheduler: str, eta: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that rise send far more than 1/eta to the second rung; none of them may be given up too soon."""
    monkeypatch.setattr(early_stopping, "SPARE", 0)
    num_given_up = 0
    for seed in range(30):
        order = random.Random(seed)
        levels = [order.random() + 0.05 * seed * turn for turn in range(40)]
        later = [order.random() for _ in levels]

        def play(*, gives_up: bool, levels: list[float] = levels, later: list[float] = later) -> list[int]:
            nonlocal num_given_up
            played, found = Played(scheduler, eta, later=later), []
            for turn, level in enumerate(levels):
                played.arrives(level)
                found += played.promoted()
                for each in played.asha.hopeless("a", len(levels) - turn - 1) if gives_up else ():
                    played.asha.leave(played.curve(each))
                    num_given_up += 1
            return found

        assert play(gives_up=True) == play(gives_up=False)
    assert num_given_up > 200


def test_a_failed_trial_leaves_its_places_to_others() -> None:
    played = Played("asha", 2, 0.1, 0.2, 0.3, 0.4)
    assert played.promoted() == [3, 2, 3]
    played.asha.forget(played.curve(3))
    assert played.promoted() == []  # one of three, which has been promoted
    played.arrives(0.0)
    assert played.promoted() == [1, 2]  # two of four, and then one of two at the next rung
    assert Played("asha", 2, math.nan, 0.2).promoted() == [1]


def test_peers_at_a_rung_have_equal_planned_epochs() -> None:
    rule = Asha(2)
    for turn, epochs in enumerate((4, 4, 8)):
        rule.pause(curve([0.1 * turn] * 16, turn=turn, epochs=epochs))
    assert rule.promotable("a") == 1
    rule = taught("halving", 2, *(curve([0.5] * 4, epochs=2, turn=turn) for turn in range(4)))
    assert stopped_at(rule, [0.1] * 4, epochs=2) == 1
    assert stopped_at(rule, [0.1] * 8, epochs=4) is None


def test_hyperband_has_a_bracket_for_each_first_rung_and_one_without() -> None:
    """8 steps, r = 2, eta = 2: first rungs at 2, 4 and 8, where a trial has ended."""
    rule = Hyperband(2)
    assert [rule.pause_after(curve([], turn=turn)) for turn in range(6)] == [2, 4, None, 2, 4, None]
    played = Played("hyperband", 2, *[0.5] * 6)
    assert played.promoted() == [1, 0]  # of equal ones the first; the higher rung before the lower one


def test_median_compares_the_best_so_far_with_running_averages() -> None:
    """At step 2 the peers' running averages are 0.2, 0.4 and 0.5: their median is 0.4; at step 4 it is 0.5."""
    peers = [curve([0.1, 0.3, 0.2, 0.2]), curve([0.2, 0.6, 0.6, 0.6]), curve([0.5] * 4)]
    rule = taught("median", 2, *peers)
    assert stopped_at(rule, [0.0, 0.39]) == 2
    assert stopped_at(rule, [0.0, 0.4]) is None
    assert stopped_at(rule, [0.45, 0.0, 0.0, 0.0]) == 3  # averages 0.2, 1.4 / 3 and 0.5 there
    assert stopped_at(rule, [0.47, 0.0, 0.0, 0.0]) == 4
    assert stopped_at(rule, [0.0]) is None  # before the first rung nobody is judged


def test_none_stops_nobody() -> None:
    assert stopped_at(taught("none", 2, *FLAT.values()), [-1.0] * 8) is None


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_order_of_peers_does_not_matter(name: str) -> None:
    curves = [curve([0.1 * ((7 * i + j) % 10) for j in range(8)], turn=i) for i in range(12)]
    trial = [0.3, 0.5, 0.2, 0.4, 0.4, 0.3, 0.5, 0.3]
    there = [stopped_at(taught(name, 3, *curves), trial, turn=turn) for turn in range(4)]
    back = [stopped_at(taught(name, 3, *reversed(curves)), trial, turn=turn) for turn in range(4)]
    assert there == back
