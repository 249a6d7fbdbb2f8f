"""Learning curves of real trials, kept as a table, and a surrogate of them that any point of their space can be asked.

``record`` takes curves from stores; ``load`` gives them back. A surrogate is fitted to the last scores over the unit
cube, by scikit-learn: numbers as shares of their range or of its logarithm, choices as 0 and 1. It is a Gaussian
``process``, or a ``forest`` of extremely randomised trees, which has no leaning towards samplers that are such
processes themselves. Each is a weighted mean of the recorded trials; the same weights give the score after each epoch.
The forest's mean goes through the recorded scores.

A trial at a point has the curve of the mean there, plus the residual curve from the process of a recorded trial drawn
by its seed: noise as large, and as alike from epoch to epoch, as that of real trials.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution, distribution_to_json, json_to_distribution
from optuna.trial import TrialState
from scipy import stats
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from dmlstudy.search.storage import open_storage
from dmlstudy.store import Store

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "recorded" / "curves.parquet"
STUDIES = b"studies"
SHARED = ("batch", "training")
"""The sections of a study's file, beside a family's own, that its space depends on."""

Floats: TypeAlias = NDArray[np.float64]


def process(at_NP: Floats, curve_NE: Floats) -> Callable[[Floats], Floats]:
    """The mean curves of a Gaussian process at K points."""
    smooth = ConstantKernel() * Matern(np.ones(at_NP.shape[1]), (0.2, 50.0), nu=2.5)
    kernel = smooth + WhiteKernel(0.1, (0.005, 1.0))
    fitted = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    with warnings.catch_warnings():
        # A dimension that does not matter has the greatest length that there is.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted.fit(at_NP, curve_NE[:, -1])
    mean_E = curve_NE.mean(axis=0)
    weight_NE = np.linalg.solve(fitted.kernel_(at_NP), curve_NE - mean_E)
    covariance = fitted.kernel_.k1
    return lambda at_KP: np.asarray(mean_E + covariance(at_KP, at_NP) @ weight_NE)


def forest(at_NP: Floats, curve_NE: Floats) -> Callable[[Floats], Floats]:
    """The mean curves of a forest at K points: of each of its trees that of the leaf's trials."""
    fitted = ExtraTreesRegressor(200, random_state=0).fit(at_NP, curve_NE[:, -1])
    trees = [each.tree_ for each in fitted.estimators_]
    curves = []
    for tree in trees:
        leaf_N = tree.apply(at_NP.astype(np.float32))
        is_in_LN = np.arange(tree.node_count)[:, None] == leaf_N
        curves.append(is_in_LN @ curve_NE / np.maximum(1, is_in_LN.sum(axis=1, keepdims=True)))

    def means(at_KP: Floats) -> Floats:
        at = at_KP.astype(np.float32)
        return np.asarray(
            sum(curve_LE[tree.apply(at)] for tree, curve_LE in zip(trees, curves, strict=True)) / len(trees)
        )

    return means


SURROGATES = {"process": process, "forest": forest}


class RecordedCurves:
    """The trials of one family: N points in their space, their objective after each of E epochs, and the surrogate."""

    def __init__(
        self, name: str, study: dict[str, Any], rows: list[dict[str, Any]], surrogate: str = "process"
    ) -> None:
        self.name = name
        self.study = study
        """The sections of the study's file that make the space, with this family alone."""
        self.curve_NE: Floats = np.array([row["curve"] for row in rows])
        params = [json.loads(row["params"]) for row in rows]
        self._distributions = {
            key: json_to_distribution(each) for row in rows for key, each in json.loads(row["space"]).items()
        }
        at_NP = np.stack([self._at(each) for each in params])
        self._at_NP, self._fit = at_NP, SURROGATES[surrogate]
        smooth = process(at_NP, self.curve_NE)
        self._means = smooth if surrogate == "process" else self._fit(at_NP, self.curve_NE)
        self._residual_NE = self.curve_NE - smooth(at_NP)
        rng = np.random.default_rng(0)
        drawn_KP = np.concatenate([at_NP, *(self._near(at_NP, rng) for _ in range(20))])
        self.best = float(self._means(drawn_KP)[:, -1].max())
        """The highest last score of the mean, at the recorded points and at points near them."""

    @property
    def epochs(self) -> int:
        return int(self.curve_NE.shape[1])

    def rank_correlation(self, num_folds: int = 10) -> float:
        """Spearman's, of the last scores with those that the surrogate predicts for trials it was not fitted to."""
        fold_N = np.random.default_rng(0).permutation(len(self.curve_NE)) % num_folds
        predicted_N = np.empty(len(self.curve_NE))
        for fold in range(num_folds):
            is_out_N = fold_N == fold
            means = self._fit(self._at_NP[~is_out_N], self.curve_NE[~is_out_N])
            predicted_N[is_out_N] = means(self._at_NP[is_out_N])[:, -1]
        return float(stats.spearmanr(predicted_N, self.curve_NE[:, -1]).statistic)

    def quality(self, params: Mapping[str, Any]) -> float:
        """The last score of the mean at a point: what trials there have without their noise."""
        return float(self._means(self._at(params)[None])[0, -1])

    def curve(self, params: Mapping[str, Any], seed: int) -> Floats:
        """The scores of a trial at a point after each epoch."""
        noise_E = self._residual_NE[np.random.default_rng(seed).integers(len(self._residual_NE))]
        return np.asarray(self._means(self._at(params)[None])[0] + noise_E)

    def _at(self, params: Mapping[str, Any]) -> Floats:
        """A point of the unit cube; 0.5 for a number that it does not have."""
        found: list[float] = []
        for name, each in sorted(self._distributions.items()):
            if isinstance(each, CategoricalDistribution):
                found += [float(params.get(name) == choice) for choice in each.choices]
            else:
                found.append(_place(params[name], each) if name in params else 0.5)
        return np.array(found)

    def _near(self, at_NP: Floats, rng: np.random.Generator) -> Floats:
        """The points with their numbers moved a little."""
        is_number_P = np.array(
            [
                not isinstance(each, CategoricalDistribution)
                for _, each in sorted(self._distributions.items())
                for _ in (each.choices if isinstance(each, CategoricalDistribution) else (0,))
            ]
        )
        return np.clip(at_NP + 0.15 * is_number_P * rng.normal(size=at_NP.shape), 0, 1)


def _place(value: Any, distribution: Any) -> float:
    """A number's place in its range, from 0 to 1."""
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
            space = {
                name: distribution_to_json(each)
                for name, each in trial.distributions.items()
                if not each.single()
            }
            row = {
                "table": table,
                "params": json.dumps(trial.params),
                "space": json.dumps(space),
                "curve": curve,
            }
            rows.append(row)
    texts = [(name, pa.string()) for name in ("table", "params", "space")]
    curves = ("curve", pa.list_(pa.float32()))
    schema = pa.schema([*texts, curves], metadata={STUDIES: json.dumps(spaces).encode()})
    return pa.Table.from_pylist(rows, schema)


def load(file: Path = FILE, surrogate: str = "process") -> dict[str, RecordedCurves]:
    """The recorded curves by their table's name, which ends in the surrogate's where that is not the process."""
    kept = pq.read_table(file)
    found = {}
    for table, study in json.loads(kept.schema.metadata[STUDIES]).items():
        rows = [row for row in kept.to_pylist() if row["table"] == table]
        name = table if surrogate == "process" else f"{table}, {surrogate}"
        found[name] = RecordedCurves(name, study, rows, surrogate)
    return found
