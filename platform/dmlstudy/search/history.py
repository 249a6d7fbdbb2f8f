"""The trials of a search by family, in terms of its parameters; importances are Optuna's, sensitivities our own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from dmlstudy.records import Record, Scalar, present_key
from dmlstudy.search.samplers import FAMILY, as_finished
from dmlstudy.search.sensitivity import Sensitivity, sensitivities
from dmlstudy.search.storage import trials_of
from dmlstudy.store import Store
from dmlstudy.trials import Status, best_ranked

FEWEST = 4
"""Finished trials below which an importance would be noise."""

MOST = 1000
"""The newest finished trials, from which importances and sensitivities are computed."""


class Tried(Record):
    """A trial that has ended: finished, pruned or failed.

    ``score`` is the objective, of one stopped early what it had then; ``curve`` is the objective after each report.
    ``params`` are by their names within the family.
    """

    number: int
    status: Status
    score: float | None
    params: dict[str, Scalar | None]
    curve: dict[int, float]
    reason: str


class Parameter(Record):
    """A searched parameter: choices, or numbers from low to high; its share of importance where that is known.

    ``sensitivity`` is None where no trials or equal scores tell nothing of any parameter.
    """

    name: str
    choices: list[Scalar | None] | None = None
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    importance: float | None = None
    sensitivity: Sensitivity | None = None

    def place(self, value: Scalar | None) -> float:
        """A value's place in the parameter's range, from 0 to 1, on the parameter's own scale."""
        if self.choices is not None:
            return self.choices.index(value) / max(len(self.choices) - 1, 1)
        assert value is not None
        low, high, own = self.low, self.high, float(value)
        if self.is_log:
            low, high, own = math.log(low), math.log(high), math.log(own)
        return (own - low) / (high - low) if high > low else 0.5


class Searched(Record):
    """A family's trials in their order, and its parameters, the most important first."""

    family: str
    trials: list[Tried]
    parameters: list[Parameter]

    def of(self, status: Status) -> list[Tried]:
        """The trials that ended so."""
        return [trial for trial in self.trials if trial.status == status]

    @property
    def best(self) -> Tried | None:
        """The best finished trial, as the search itself ranks them."""
        scored = [trial for trial in self.of(Status.FINISHED) if trial.score is not None]
        return best_ranked(scored, lambda trial: (trial.score or 0.0, trial.number))


def searched(store: Store, study: str) -> dict[str, Searched]:
    """The ended trials of each family; families without one are left out."""
    of_family: dict[str, list[FrozenTrial]] = {}
    for trial in trials_of(store, study) if store.has_searches else []:
        if FAMILY in trial.user_attrs and trial.state.is_finished():
            of_family.setdefault(str(trial.user_attrs[FAMILY]), []).append(trial)
    return {family: _searched(family, trials) for family, trials in sorted(of_family.items())}


def _searched(family: str, trials: Sequence[FrozenTrial]) -> Searched:
    distributions: dict[str, Any] = {}
    for trial in trials:
        distributions |= {name: d for name, d in trial.distributions.items() if name != FAMILY}
    moved = {name: each for name, each in distributions.items() if not each.single()}
    shares = importances([trial for trial in trials if trial.state == TrialState.COMPLETE], list(moved))
    moves = sensitivities(as_finished([t for t in trials if t.state != TrialState.FAIL])[-MOST:], moved)
    parameters = [
        _parameter(family, name, each, shares.get(name), moves.get(name)) for name, each in moved.items()
    ]
    parameters.sort(key=lambda each: (-(each.importance or 0.0), each.name))
    return Searched(family=family, trials=[_tried(family, each) for each in trials], parameters=parameters)


def importances(finished: Sequence[FrozenTrial], names: Sequence[str]) -> dict[str, float]:
    """Each parameter's share of what Optuna says decides the objective (PED-ANOVA, which takes parameters that only
    some trials have); of too few trials, or of equal scores, nothing."""
    finished = finished[-MOST:]
    known = [name for name in names if any(name in trial.params for trial in finished)]
    if len(finished) < FEWEST or not known or len({trial.values[0] for trial in finished}) < 2:
        return {}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(direction="maximize")
        study.add_trials(
            [
                create_trial(params=trial.params, distributions=trial.distributions, value=trial.values[0])
                for trial in finished
            ]
        )
        # Warned is of parameters that few trials have; the page says how many trials there are.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(get_param_importances(study, params=known))
    finally:
        optuna.logging.set_verbosity(verbosity)


def _parameter(
    family: str, name: str, distribution: Any, importance: float | None, sensitivity: Sensitivity | None
) -> Parameter:
    told: dict[str, Any] = {
        "name": _short(family, name),
        "importance": importance,
        "sensitivity": sensitivity,
    }
    if isinstance(distribution, CategoricalDistribution):
        return Parameter(choices=list(distribution.choices), **told)
    return Parameter(low=distribution.low, high=distribution.high, is_log=distribution.log, **told)


def _tried(family: str, trial: FrozenTrial) -> Tried:
    curve = {step: score for step, score in trial.intermediate_values.items() if math.isfinite(score)}
    score = trial.values[0] if trial.state == TrialState.COMPLETE else None
    if trial.state == TrialState.PRUNED and curve:
        score = curve[max(curve)]
    return Tried(
        number=trial.number,
        status=Status.of_optuna(trial.state.name),
        score=score,
        params={_short(family, name): value for name, value in trial.params.items() if name != FAMILY},
        curve=curve,
        reason=str(trial.user_attrs.get("reason", "")),
    )


def _short(family: str, name: str) -> str:
    return present_key(name.removeprefix(f"{family}/"))
