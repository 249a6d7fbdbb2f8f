"""The fold test on the trials of a study: the folds it would have spared, and the searches that lose their best trial.

    dmlstudy run tests/benchmarks/recorded/folds.yaml --store STORE    # or your own study, without early stopping
    python tests/benchmarks/folds.py recorded-folds --store STORE

Of a study whose trials were trained and scored on all of their folds. A search is up to 20 trials of a family in a
random order, one after the other. What is stopped after a fold is not seen again, and teaches the test nothing.
**Lost** are searches whose best finished trial is worse than the best of all; **cost** is by how much, as a mean over
all searches.

In the same run: Optuna's ``WilcoxonPruner``, which tests the same pairs by their signed ranks, and a rule that does not
pair: the mean over the folds so far is below the best trial's by two standard errors of its folds.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState

from dmlstudy.search.early_stopping import SearchCurve
from dmlstudy.search.fold_test import FoldTest, fold_scores
from dmlstudy.search.storage import open_storage
from dmlstudy.store import Store

TRIALS = 20
LEVELS = (0.01, 0.05, 0.1, 0.2)

Scores = NDArray[np.float64]
Stops = Callable[[Scores, int, list[Scores]], bool]
"""Is a trial, by its scores, stopped after so many folds, beside those that finished before it?"""


class Outcome(NamedTuple):
    """A search's share of folds that it spared, and how much worse its best finished trial is than the best of all."""

    spared: float
    cost: float


def by_fold_test(level: float) -> Stops:
    def stops(scores_F: Scores, num_ended: int, finished: list[Scores]) -> bool:
        test = FoldTest(level)
        for each_F in finished:
            test.learn(_curve(each_F))
        return test.stops(_curve(scores_F), num_ended)

    return stops


def by_wilcoxon(level: float) -> Stops:
    """Optuna's pruner. It compares with its study's best trial, so its study holds that one and the new one alone."""

    def stops(scores_F: Scores, num_ended: int, finished: list[Scores]) -> bool:
        if not finished:
            return False
        best_F = _best(finished)
        study = optuna.create_study(
            direction="maximize", pruner=optuna.pruners.WilcoxonPruner(p_threshold=level, n_startup_steps=0)
        )
        values = {step: float(score) for step, score in enumerate(best_F)}
        study.add_trial(optuna.create_trial(value=float(best_F.mean()), intermediate_values=values))
        trial = study.ask()
        for step, score in enumerate(scores_F[:num_ended]):
            trial.report(float(score), step)
        return trial.should_prune()

    return stops


def unpaired(scores_F: Scores, num_ended: int, finished: list[Scores]) -> bool:
    if not finished:
        return False
    best_F = _best(finished)
    error = float(best_F.std(ddof=1)) / math.sqrt(num_ended)
    return bool(scores_F[:num_ended].mean() < best_F.mean() - 2 * error)


def searched(scores_TF: Scores, stops: Stops) -> Outcome:
    """Trials one after the other, each stopped by its first folds or finished."""
    num_folds, finished, num_seen = scores_TF.shape[1], list[Scores](), 0
    for scores_F in scores_TF:
        ended = next((k for k in range(1, num_folds) if stops(scores_F, k, finished)), num_folds)
        num_seen += ended
        if ended == num_folds:
            finished.append(scores_F)
    lost = float(scores_TF.mean(axis=1).max()) - float(_best(finished).mean())
    return Outcome(1 - num_seen / scores_TF.size, lost)


def _best(finished: list[Scores]) -> Scores:
    return max(finished, key=lambda each_F: float(each_F.mean()))


def _curve(scores_F: Scores) -> SearchCurve:
    """Folds of one epoch each, whose reports are means over the folds so far."""
    means = np.cumsum(scores_F) / np.arange(1, len(scores_F) + 1)
    return SearchCurve("family", 0, 1, len(scores_F), dict(enumerate(map(float, means), start=1)))


def scores_of(store: Store, name: str) -> dict[str, Scores]:
    """The score of each fold of a study's finished trials, by family; ValueError where it has nothing to compare."""
    protocol, training = (store.read_state(name)["spec"][key] for key in ("protocol", "training"))
    num_folds = protocol["num_folds"]
    if num_folds < 2:
        raise ValueError(f"{name}: has one fold; take a study with protocol.num_folds of 2 at least")
    study, found = optuna.load_study(study_name=name, storage=open_storage(store)), dict[str, list[Scores]]()
    for trial in study.get_trials(states=(TrialState.COMPLETE,)):
        scores_F = fold_scores(trial.intermediate_values, training["epochs"], num_folds)
        if len(scores_F) == num_folds:
            found.setdefault(str(trial.user_attrs["family"]), []).append(scores_F)
    return {family: np.stack(own) for family, own in sorted(found.items())}


def show(scores: Mapping[str, Scores], num_searches: int) -> None:
    """A table: one row for each rule, over all families."""
    rules: dict[str, Stops] = {f"fold test, {level:g}": by_fold_test(level) for level in LEVELS}
    rules |= {f"Optuna: Wilcoxon, {level:g}": by_wilcoxon(level) for level in (0.1, 0.2)}
    rules |= {"not paired, two standard errors": unpaired}
    print("| rule | folds spared | lost | cost, in hundredths |")
    print("|---|---:|---:|---:|")
    for name, stops in rules.items():
        rng, found = np.random.default_rng(0), list[Outcome]()
        for scores_TF in scores.values():
            for _ in range(num_searches):
                drawn_T = rng.permutation(len(scores_TF))[:TRIALS]
                found.append(searched(scores_TF[drawn_T], stops))
        spared, costs = np.array([each.spared for each in found]), np.array([each.cost for each in found])
        print(f"| {name} | {spared.mean():.0%} | {(costs > 0).mean():.1%} | {100 * costs.mean():.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("study")
    parser.add_argument("--store", type=Path, default=Path("dmlstudy_store"))
    parser.add_argument("--searches", type=int, default=300, help="of each family; default: %(default)s")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    scores = scores_of(Store(options.store.absolute()), options.study)
    for name, scores_TF in scores.items():
        print(f"{name}: {scores_TF.shape[0]} trials of {scores_TF.shape[1]} folds")
    show(scores, options.searches)


if __name__ == "__main__":
    main()
