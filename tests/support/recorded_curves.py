"""Learning curves of real trials, kept as a table, and the trial of it that is nearest to a point.

``record`` takes them from stores; ``load`` gives them back. A point that a sampler draws has the curve of the recorded
trial nearest to it, with real noise: distances are Euclidean, of numbers as shares of their range (of its logarithm,
where the space has one), of choices 0 or 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from dmlstudy.search.storage import open_storage
from dmlstudy.store import Store

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "recorded" / "curves.parquet"
STUDIES = b"studies"
SHARED = ("batch", "training")
"""The sections of a study's file, beside a family's own, that its space depends on."""


class RecordedCurves:
    """The trials of one family: N points in their space, and their objective after each of E epochs."""

    def __init__(self, name: str, study: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.name = name
        self.study = study
        """The sections of the study's file that make the space, with this family alone."""
        self.curve_NE: NDArray[np.float64] = np.array([row["curve"] for row in rows])
        self._params = [json.loads(row["params"]) for row in rows]
        self._columns: dict[str, NDArray[np.float64]] = {}

    @property
    def epochs(self) -> int:
        return int(self.curve_NE.shape[1])

    @property
    def best(self) -> float:
        """The highest last score."""
        return float(self.curve_NE[:, -1].max())

    def nearest(self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> int:
        """The number of the recorded trial nearest to a point."""
        apart_N = np.zeros(len(self._params))
        for name, distribution in distributions.items():
            gap_N = np.abs(self._column(name, distribution) - _place(params[name], distribution))
            gap_N = np.nan_to_num(gap_N, nan=1.0)
            apart_N += gap_N > 0 if isinstance(distribution, CategoricalDistribution) else gap_N**2
        return int(apart_N.argmin())

    def _column(self, name: str, distribution: BaseDistribution) -> NDArray[np.float64]:
        """The recorded trials' places in a parameter's range; not a number where they have none."""
        if name not in self._columns:
            values = [each.get(name) for each in self._params]
            self._columns[name] = np.array([np.nan if v is None else _place(v, distribution) for v in values])
        return self._columns[name]


def _place(value: Any, distribution: Any) -> float:
    """A value's place in its range, from 0 to 1; of choices their number."""
    if isinstance(distribution, CategoricalDistribution):
        return float(distribution.choices.index(value))
    low, high, own = distribution.low, distribution.high, float(value)
    if distribution.log:
        low, high, own = np.log(low), np.log(high), np.log(own)
    return float((own - low) / (high - low)) if high > low else 0.0


def record(studies: Mapping[str, Path]) -> pa.Table:
    """The finished trials of these studies, each in the store beside it, by family."""
    rows, spaces = [], {}
    for name, folder in studies.items():
        store = Store(folder)
        storage = open_storage(store)
        file = store.read_state(name)["spec"]
        study = optuna.load_study(study_name=name, storage=storage)
        for trial in study.get_trials(states=(TrialState.COMPLETE,)):
            family = str(trial.user_attrs["family"])
            table = f"{name.removeprefix('recorded-')} {family}"
            own = {"families": {family: file["families"][family]}}
            spaces[table] = {section: file[section] for section in SHARED} | own
            curve = [score for _, score in sorted(trial.intermediate_values.items())]
            rows.append({"table": table, "params": json.dumps(trial.params), "curve": curve})
    schema = pa.schema(
        [
            ("table", pa.string()),
            ("number", pa.int32()),
            ("params", pa.string()),
            ("curve", pa.list_(pa.float32())),
        ],
        metadata={STUDIES: json.dumps(spaces).encode()},
    )
    return pa.Table.from_pylist(rows, schema)


def load(file: Path = FILE) -> dict[str, RecordedCurves]:
    """The recorded curves by their table's name."""
    kept = pq.read_table(file)
    found = {}
    for table, study in json.loads(kept.schema.metadata[STUDIES]).items():
        rows = [row for row in kept.to_pylist() if row["table"] == table]
        found[table] = RecordedCurves(table, study, rows)
    return found
