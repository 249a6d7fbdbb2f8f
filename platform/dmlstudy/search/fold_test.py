"""The fold test: is a trial hopeless by the folds that have ended, compared with the best one on the same folds?

Let s_f be a trial's last score on fold f of F, and b_f that of the best finished trial, both of the same classes. After
k folds the mean difference is d = mean(s_f - b_f).

Scores are taken as trial + fold + noise, with one variance v of the noise for all trials of a group. It is estimated by
the residual mean square of that layout over the T finished trials, on (T - 1)(F - 1) degrees of freedom.

The difference of the two means over all F folds is predicted to be d, with the variance

    2 v (F - k) / (k F).

So the chance that the trial ends above the best is that of Student's t beyond -d over its root. It is a paired test
whose variance is pooled over trials, which one or two folds alone could not tell.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dmlstudy.search.early_stopping import SearchCurve

FEWEST_TRIALS = 3
"""Finished trials from which the variance of the noise is estimated."""

Peers: TypeAlias = tuple[str, int, int]
"""(whose peers, planned epochs, number of folds)."""


class FoldTest:
    """Stops a trial between folds where its chance to end above its group's best is below ``level``; at 0 nobody."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._finished: defaultdict[Peers, dict[int, NDArray[np.float64]]] = defaultdict(dict)
        """The scores of each fold of the finished trials, by turn."""

    def learn(self, trial: SearchCurve) -> None:
        """Take in a trial; one that has not finished all folds counts nowhere."""
        if not self.level or trial.num_folds == 1:
            return
        scores_F = fold_scores(trial.scores, trial.epochs, trial.num_folds)
        if len(scores_F) == trial.num_folds:
            self._finished[_peers(trial)][trial.turn] = scores_F

    def stops(self, trial: SearchCurve, step: int) -> bool:
        """True if the trial should be stopped after ``step``, at which a fold has ended and another one follows."""
        if not self.level or step % trial.epochs or step >= trial.last_step:
            return False
        return self.chance(trial, step // trial.epochs) < self.level

    def chance(self, trial: SearchCurve, num_ended: int) -> float:
        """The chance that the trial ends above the best, by its first folds; 1 where too little is known."""
        by_turn = self._finished.get(_peers(trial), {})
        finished_TF = [by_turn[turn] for turn in sorted(by_turn)]  # in whichever order they were learned
        scores_K = fold_scores(trial.scores, trial.epochs, num_ended)
        if len(finished_TF) < FEWEST_TRIALS or len(scores_K) < num_ended:
            return 1.0
        k, num_folds = num_ended, trial.num_folds
        best_F = max(finished_TF, key=lambda scores_F: float(scores_F.mean()))
        variance = noise_variance(np.stack(finished_TF))
        spread = math.sqrt(2 * variance * (num_folds - k) / (k * num_folds))
        difference = float((scores_K - best_F[:k]).mean())
        if spread == 0:
            return float(difference >= 0)
        return float(stats.t.sf(-difference / spread, (len(finished_TF) - 1) * (num_folds - 1)))


def fold_scores(scores: Mapping[int, float], epochs: int, num_folds: int) -> NDArray[np.float64]:
    """The last scores of a trial's folds, up to the first one that has not ended or lacks it.

    A report is the mean m_k over the folds so far, so the k-th fold's own score is k m_k - (k - 1) m_(k-1).
    """
    steps = itertools.takewhile(scores.__contains__, range(epochs, (num_folds + 1) * epochs, epochs))
    totals = [fold * scores[step] for fold, step in enumerate(steps, start=1)]
    return np.diff(totals, prepend=0.0)


def noise_variance(scores_TF: NDArray[np.float64]) -> float:
    """v of scores of T trials on F folds, at least 2 each: what neither trial nor fold explains, of one score."""
    num_trials, num_folds = scores_TF.shape
    trial_T1, fold_1F = scores_TF.mean(axis=1, keepdims=True), scores_TF.mean(axis=0, keepdims=True)
    residual_TF = scores_TF - trial_T1 - fold_1F + scores_TF.mean()
    return float((residual_TF**2).sum() / ((num_trials - 1) * (num_folds - 1)))


def _peers(trial: SearchCurve) -> Peers:
    return trial.group, trial.epochs, trial.num_folds
