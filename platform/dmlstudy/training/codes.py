"""One trial of hashing: binary codes of frozen features, judged by Hamming ranking of a closed set.

Shapes: N rows, F features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy import data, distributed, hashing, metric_names
from dmlstudy.data import RowFold
from dmlstudy.data.images import Labels
from dmlstudy.hashing import HashingFailed, HashingModel
from dmlstudy.records import DataConfig, HashingConfig, TrialConfig, TrialReport, TrialResult
from dmlstudy.training import dataset_cache
from dmlstudy.training.learner import TrialFailed, derived_seed
from dmlstudy.training.scores import mean, spread


class Rows(NamedTuple):
    """Features, and a class of each, or which concepts it shows."""

    x_NF: NDArray[np.float32]
    labels: Labels | NDArray[np.bool_]


def run_hashing_trial(
    config: TrialConfig,
    report: Callable[[TrialReport], None],
    *,
    device: torch.device,
    save_to: Path | None = None,
) -> TrialResult:
    """Train and judge codes with one configuration; labels are seen by the judge alone.

    Phase ``search``: for each fold of the development rows, codes are trained on the other rows, and after every
    epoch the fold's queries are ranked; what is reported is as in a trial of an embedder. Phase ``verdict``: trained
    on all development rows, judged once by queries among the test rows, and written to ``save_to``. The database
    is always all rows that are no queries: in a verdict those of both sides. Raises TrialFailed where training cannot
    go on, and ValueError on more than one rank.
    """
    codes = config.hashing
    assert codes is not None
    if distributed.world_size() > 1:
        raise ValueError("codes of frozen features are learned by one process; set resources.workers: 1")
    development, test = _rows(config.data, codes.features, device)
    epochs = config.training.epochs

    def trained(
        rows_N: NDArray[np.int64], stream: int, report: Callable[[TrialReport, HashingModel], None]
    ) -> HashingModel:
        given = HashingConfig(
            loss=config.loss,
            regularizer=config.regularizer,
            hashing=codes,
            training=config.training,
            seed=derived_seed(config.seed, stream),
        )
        chosen_N = rows_N[_drawn(len(rows_N), codes.num_train, given.seed)]
        try:
            return hashing.train_hashing(given, development.x_NF[chosen_N], report, device=device)
        except HashingFailed as error:
            raise TrialFailed(str(error)) from None

    def judged(
        model: HashingModel, rows: Rows, query_Q: NDArray[np.int64], more: Rows | None = None
    ) -> dict[str, float]:
        """Scores of some of the rows as queries of the others, and of ``more`` before them."""
        z_ND = model.codes(rows.x_NF)
        other_M = np.setdiff1d(np.arange(len(z_ND)), query_Q)
        z_MD, labels_M = z_ND[other_M], rows.labels[other_M]
        if more is not None:
            z_MD = np.concatenate([model.codes(more.x_NF), z_MD])
            labels_M = np.concatenate([more.labels, labels_M])
        is_reranked = config.regularizer is not None and codes.rerank > 0
        return hashing.evaluate_codes(
            z_ND[query_Q],
            rows.labels[query_Q],
            z_MD,
            labels_M,
            at=config.map_at,
            omega_QD=model.omega(rows.x_NF[query_Q]) if is_reranked else None,
            rerank=codes.rerank,
        )

    if config.phase == "verdict":
        model = trained(np.arange(len(development.labels)), 0, lambda each, _: report(each))
        # The same queries for every family and seed, so that they can be compared pair by pair.
        queries = _drawn(len(test.labels), codes.num_queries, 0)
        scores = judged(model, test, queries, development)
        if save_to is not None:
            about: dict[str, Any] = {"family": config.family, "config": config.model_dump(mode="json")}
            hashing.save(model, save_to, about, test.x_NF[: dataset_cache.NUM_EXAMPLES])
        return TrialResult(
            metrics=metric_names.all_on_test(scores),
            embedder_folder=None if save_to is None else str(save_to),
        )

    finished: list[dict[str, float]] = []

    def searched(number: int, fold: RowFold) -> dict[str, float]:
        queries = fold.validation_indices[: codes.num_queries]
        scores: dict[str, float] = {}

        def tell(each: TrialReport, model: HashingModel) -> None:
            scores.update(judged(model, development, queries))
            step = number * max(epochs, 1) + each.step
            report(TrialReport(step=step, metrics=mean([*finished, scores]) | each.metrics))

        model = trained(fold.train_indices, number, tell)
        if not epochs:
            tell(TrialReport(step=1, metrics={}), model)
        return scores

    for number, fold in enumerate(data.row_folds(len(development.labels), config.num_folds, config.seed)):
        finished.append(searched(number, fold))
    return TrialResult(metrics=mean(finished) | spread(finished, config.objective))


def _drawn(num_rows: int, num_drawn: int | None, seed: int) -> NDArray[np.int64]:
    """Sorted places of so many rows, drawn without replacement; of all where there are no more."""
    if num_drawn is None or num_drawn >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:num_drawn])


@functools.lru_cache(maxsize=1)
def _rows(config: DataConfig, features: str, device: torch.device) -> tuple[Rows, Rows]:
    """Development and test rows, with the features that are wished for."""
    closed = dataset_cache.closed(config)
    of_development, of_test = closed.relevance
    return (
        Rows(dataset_cache.features_of(closed.development, features, device), of_development),
        Rows(dataset_cache.features_of(closed.test, features, device), of_test),
    )
