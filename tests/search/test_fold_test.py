"""The fold test: its formulas by plain least squares, its chances by simulation, and a search that uses it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from support.tune_simulator import EPOCHS, FOLDS, Tune, by_number, in_memory, study

from dmlstudy.records import TrialConfig
from dmlstudy.search import samplers
from dmlstudy.search.early_stopping import SearchCurve
from dmlstudy.search.fold_test import FEWEST_TRIALS, FoldTest, fold_scores, noise_variance
from dmlstudy.spec.study_file import SpecError

NUM_FOLDS = 4


def curve(
    scores_F: np.ndarray, epochs: int = 2, num_folds: int = NUM_FOLDS, group: str = "a", turn: int = 0
) -> SearchCurve:
    """A trial that reports the mean over its folds so far, and something else within them."""
    scores = {}
    for fold, mean in enumerate(np.cumsum(scores_F) / np.arange(1, len(scores_F) + 1), start=1):
        scores |= {(fold - 1) * epochs + step: -9.0 for step in range(1, epochs)} | {
            fold * epochs: float(mean)
        }
    return SearchCurve(group, turn, epochs, num_folds, scores)


def taught(level: float, scores_TF: np.ndarray) -> FoldTest:
    test = FoldTest(level)
    for turn, scores_F in enumerate(scores_TF):
        test.learn(curve(scores_F, turn=turn))
    return test


@pytest.mark.parametrize("num_ended", range(NUM_FOLDS + 1))
def test_scores_of_folds_come_back_from_the_means_that_are_reported(num_ended: int) -> None:
    scores_F = np.random.default_rng(0).uniform(size=num_ended)
    assert fold_scores(curve(scores_F).scores, 2, NUM_FOLDS) == pytest.approx(scores_F)


def test_a_fold_without_a_score_ends_the_row() -> None:
    assert len(fold_scores({2: 0.5, 6: 0.4}, 2, 3)) == 1
    assert len(fold_scores({}, 2, 3)) == 0


def test_the_noise_is_what_trial_and_fold_leave_by_least_squares() -> None:
    scores_TF = np.random.default_rng(1).normal(size=(5, NUM_FOLDS))
    trial, fold = np.indices(scores_TF.shape)
    design = np.hstack([np.eye(5)[trial.ravel()], np.eye(NUM_FOLDS)[fold.ravel()]])
    fitted, *_ = np.linalg.lstsq(design, scores_TF.ravel(), rcond=None)
    squares = ((scores_TF.ravel() - design @ fitted) ** 2).sum()
    assert noise_variance(scores_TF) == pytest.approx(squares / (4 * (NUM_FOLDS - 1)))


def simulated(rng: np.random.Generator, num_trials: int, spread: float) -> np.ndarray:
    """Scores of trials on folds of unequal difficulty; the noise has the variance 1."""
    quality_T1 = rng.normal(scale=spread, size=(num_trials, 1))
    return quality_T1 + rng.normal(scale=3, size=NUM_FOLDS) + rng.normal(size=(num_trials, NUM_FOLDS))


@pytest.mark.parametrize("num_ended", [1, 2, 3])
def test_chances_are_as_large_as_they_say(num_ended: int) -> None:
    """Of trials with a chance in a range, about so many end above the best; the difficulty of folds cancels."""
    rng = np.random.default_rng(2)
    chances, ended_above = [], []
    for _ in range(1500):
        scores_TF = simulated(rng, 9, spread=1.0)
        finished_TF, new_F = scores_TF[:-1], scores_TF[-1]
        test = taught(0.5, finished_TF)
        chances.append(test.chance(curve(new_F), num_ended))
        ended_above.append(new_F.mean() > finished_TF.mean(axis=1).max())
    chance_N, above_N = np.array(chances), np.array(ended_above)
    for low, high in ((0.0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 1.0)):
        chosen_N = (chance_N >= low) & (chance_N < high)
        if chosen_N.sum() < 40:
            continue
        error = 3 * np.sqrt(max(high, 0.05) * (1 - min(high, 0.9)) / chosen_N.sum())
        assert low - 0.1 - error < above_N[chosen_N].mean() < high + error


def test_few_of_the_stopped_would_have_won_and_many_folds_are_saved() -> None:
    """At a level of 0.05, 20 trials: the search's best is lost in few searches, though each trial is judged by it."""
    rng, num_lost, num_spared, num_folds = np.random.default_rng(3), 0, 0, 0
    for _ in range(300):
        scores_TF = simulated(rng, 20, spread=2.0)
        test, best = FoldTest(0.05), -np.inf
        for turn, scores_F in enumerate(scores_TF):
            own = curve(scores_F, turn=turn)
            step = next((k for k in range(1, NUM_FOLDS) if test.stops(own, 2 * k)), NUM_FOLDS)
            num_spared, num_folds = num_spared + NUM_FOLDS - step, num_folds + NUM_FOLDS
            if step == NUM_FOLDS:
                test.learn(own)
                best = max(best, scores_F.mean())
        num_lost += best < scores_TF.mean(axis=1).max()
    assert num_lost / 300 < 0.05
    assert num_spared / num_folds > 0.4


def test_it_judges_between_folds_only_and_knows_enough_first() -> None:
    hopeless = np.array([-5.0, -5.0, -5.0, -5.0])
    finished_TF = np.random.default_rng(4).normal(size=(FEWEST_TRIALS, NUM_FOLDS))
    test = taught(0.05, finished_TF)
    assert [step for step in range(1, 9) if test.stops(curve(hopeless), step)] == [2, 4, 6]
    assert not taught(0.05, finished_TF[1:]).stops(curve(hopeless), 2)
    assert not test.stops(curve(hopeless, group="another family"), 2)
    assert not test.stops(curve(hopeless, epochs=1), 2), "of other planned epochs"
    assert not taught(0.0, finished_TF).stops(curve(hopeless), 2)
    assert not test.stops(SearchCurve("a", 0, 2, NUM_FOLDS, {4: 0.5}), 4), "its first fold has no score"


def test_where_all_finished_agree_the_worse_is_stopped_and_the_equal_is_not() -> None:
    test = taught(0.05, np.tile(np.arange(4.0), (3, 1)))
    assert test.stops(curve(np.arange(4.0) - 0.1), 2)
    assert not test.stops(curve(np.arange(4.0)), 2)


def test_the_order_in_which_trials_are_learned_does_not_matter() -> None:
    """Of equal means the first trial's is the best, and an interruption lets them be learned in another order."""
    trials = [curve(np.array(scores), turn=turn) for turn, scores in enumerate(([3, 0, 0, 1], [0, 3, 1, 0]))]
    trials += [curve(np.array([0.0, 0.1, 0.2, 0.3]), turn=2)]
    own = curve(np.array([1.5]), turn=3)
    found = set()
    for order in itertools.permutations(trials):
        test = FoldTest(0.05)
        for trial in [*order, order[0]]:
            test.learn(trial)
        found.add(test.chance(own, 1))
    assert len(found) == 1


def of_folds(config: TrialConfig, step: int) -> float:
    """The mean over folds so far of a quality that depends on the trial, and of noise."""
    scores = []
    for fold in range(-(-step // EPOCHS)):
        noise = random.Random(f"{config.training.lr} {fold}").gauss(0, 0.01)
        scores.append(1.0 - abs(np.log10(config.training.lr) + 4.5) + 0.1 * fold + noise)
    return float(np.mean(scores))


@pytest.mark.parametrize("scheduler", ["none", "median"])
@pytest.mark.parametrize("families", ["equal", "adaptive"])
def test_a_search_stops_trials_by_it_and_finds_the_same_best(scheduler: str, families: str) -> None:
    def done(**search: object) -> Tune:
        own = {"trials_per_family": 12, "scheduler": scheduler, "sampler": "random", "families": families}
        return Tune(in_memory(study(search=own | search)), of_folds).run()

    plain, tested = done(), done(fold_test=0.05)
    stopped = [
        t for t in tested.search.study.trials if "a chance below 0.05" in t.user_attrs.get("reason", "")
    ]
    assert stopped
    assert all(trial.state == TrialState.PRUNED for trial in stopped)
    assert all(trial.last_step % EPOCHS == 0 and trial.last_step < FOLDS * EPOCHS for trial in stopped)
    assert tested.search.best() == plain.search.best()
    assert by_number(done(fold_test=0.0).search) == by_number(plain.search)


def test_folds_that_it_cannot_use_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^search.fold_test: there is one fold; set protocol.num_folds: 4"):
        study(search={"fold_test": 0.05}, protocol={"num_folds": 1})
    with pytest.raises(SpecError, match=r"^search.fold_test: would stop trials for their quality alone"):
        study(
            search={
                "fold_test": 0.05,
                "sampler": "nsga2",
                "second_objective": "latency_ms",
                "scheduler": "none",
            }
        )


def completed(number: int, scores_F: np.ndarray) -> optuna.trial.FrozenTrial:
    means_F = np.cumsum(scores_F) / np.arange(1, len(scores_F) + 1)
    reports = {2 * fold: float(mean) for fold, mean in enumerate(means_F, start=1)}
    return optuna.trial.create_trial(value=float(scores_F.mean()), intermediate_values=reports)


def test_the_gaussian_process_is_told_the_noise_of_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    from optuna.samplers._gp.sampler import gp  # where it is called from, which keeps what it has imported

    scores_TF = simulated(np.random.default_rng(5), 6, spread=1.0)
    trials = [completed(number, scores_F) for number, scores_F in enumerate(scores_TF)]
    share = samplers.fold_noise(trials, NUM_FOLDS)
    assert share == pytest.approx(noise_variance(scores_TF) / NUM_FOLDS / scores_TF.mean(axis=1).var())
    assert samplers.fold_noise(trials[:2], NUM_FOLDS) == samplers.fold_noise(trials, 1) == 0.0
    assert samplers.fold_noise([], NUM_FOLDS) == samplers.fold_noise([trials[0]] * 4, NUM_FOLDS) == 0.0
    seen, fit = [], gp.fit_kernel_params

    def fitted(*args: object, minimum_noise: float, **more: object) -> object:
        seen.append(minimum_noise)
        return fit(*args, minimum_noise=minimum_noise, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(gp, "fit_kernel_params", fitted)
    own = study(search={"sampler": "gp", "scheduler": "none", "trials_per_family": 6})
    Tune(in_memory(own), of_folds).run()
    assert max(seen) > min(seen) > 0


def test_the_noise_is_of_trials_that_have_seen_all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the process itself stopped trials look finished; their last steps say nothing of the length of a fold."""
    steps, noise = set(), samplers.fold_noise

    def noted(trials: Sequence[optuna.trial.FrozenTrial], num_folds: int) -> float:
        steps.update(trial.last_step for trial in trials if trial.state == TrialState.COMPLETE)
        return noise(trials, num_folds)

    monkeypatch.setattr(samplers, "fold_noise", noted)
    own = study(search={"sampler": "gp", "trials_per_family": 8})
    ended = Tune(in_memory(own), of_folds).run().search.study.trials
    assert any(trial.state == TrialState.PRUNED for trial in ended)
    assert steps == {FOLDS * EPOCHS}
