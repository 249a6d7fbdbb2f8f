"""Starting points of a search besides its defaults: the best configurations of earlier studies in the storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from dmlstudy.search.samplers import FAMILY
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.trials import rank

MOST_PER_FAMILY = 5
MOST_READ = 50


def earlier_best(
    spec: StudySpec, storage: optuna.storages.BaseStorage
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Points of each family that did best in the studies the spec names, each as (where it comes from, point).

    Every study's best come first, then every study's second best: scores of different studies are not
    compared, for their data may differ. Points are as they were drawn then; what of them the present space
    takes is for others to see. Raises SpecError for a study that is not in the storage.
    """
    known = sorted(set(optuna.get_all_study_names(storage)) - {spec.name})
    wanted: Sequence[str] = spec.file.search.warm_start
    if wanted == "auto":
        wanted = known
    ranked: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = {name: [] for name in spec.families}
    for order, name in enumerate(wanted):
        if name not in known:
            there = ", ".join(known) or "none"
            raise SpecError(f"search.warm_start: no study {name!r} in the store; there are: {there}")
        study = optuna.load_study(study_name=name, storage=storage)
        done: dict[str, list[FrozenTrial]] = {}
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            done.setdefault(str(trial.user_attrs.get("family")), []).append(trial)
        for family, trials in done.items():
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


def _without_family(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != FAMILY}
