"""How scores went along in a study's verdict trials, from the runs that hold them."""

from __future__ import annotations

import re
from typing import NamedTuple

from dmlstudy.registry import tracking
from dmlstudy.store import Store


class Curve(NamedTuple):
    """One trial: what it told after each part, by metric; a value for each step it has all of them of."""

    family: str
    seed: int
    values: dict[str, list[float]]


def verdict_curves(store: Store, study: str, metrics: str) -> list[Curve]:
    """The finished verdict trials that told metrics whose names match the regular expression, by family and seed.

    Raises StoreError for an unknown study.
    """
    client = tracking.connect(store)
    experiment_id = tracking.experiment_of(client, store, study)
    found: dict[tuple[str, int], Curve] = {}
    for run in tracking.search_all(
        client, experiment_id, "tags.dmlstudy_kind = 'verdict' and tags.status = 'finished'"
    ):
        names = [name for name in run.data.metrics if re.fullmatch(metrics, name)]
        histories = {
            name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
            for name in names
        }
        if not histories:
            continue
        steps = sorted(set.intersection(*(set(history) for history in histories.values())))
        family, seed = run.data.tags["family"], int(run.data.tags["seed"])
        values = {name: [history[step] for step in steps] for name, history in histories.items()}
        found[family, seed] = Curve(family, seed, values)
    return [found[key] for key in sorted(found)]
