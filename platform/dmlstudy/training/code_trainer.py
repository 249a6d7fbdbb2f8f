"""Codes in training: binary codes of frozen features, judged by Hamming ranking of a closed set.

Shapes: N rows, F features, Q queries, M items of the database.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlstudy import hashing
from dmlstudy.data.images import Indices, Labels
from dmlstudy.hashing import HashingFailed
from dmlstudy.records import DataConfig, HashingConfig, TrialConfig
from dmlstudy.training import dataset_cache, trainer_state
from dmlstudy.training.interface import Share, Trainer, TrialFailed, derived_seed
from dmlstudy.training.scores import Scored, unit_scores
from dmlstudy.training.structure_scores import structure_scores

GENERATOR = "generator"
"""The name of the random generator's state."""


class Rows(NamedTuple):
    """Features, and a class of each, or which concepts it shows."""

    x_NF: NDArray[np.float32]
    labels: Labels | NDArray[np.bool_]


class CodeTrainer(Trainer):
    """Codes of frozen features in training; labels are seen by the judge alone.

    Some of the held-out rows are queries, and the database is always all rows that are no queries: those of the
    development side and, where test rows are held out, of both sides. Raises ValueError as ``HashingTrainer``.
    """

    def __init__(self, config: TrialConfig, share: Share, device: torch.device) -> None:
        codes = config.hashing
        assert codes is not None
        self.config = config
        self.codes = codes
        self.development, self.test = _rows(config.data, codes.features, device)
        self.held_out = share.held_out
        given = HashingConfig(
            loss=config.loss,
            regularizer=config.regularizer,
            hashing=codes,
            training=config.training,
            seed=derived_seed(config.seed, share.stream),
        )
        rows_N = np.arange(len(self.development.labels)) if share.train is None else share.train
        chosen_N = rows_N[_drawn(len(rows_N), codes.num_train, given.seed)]
        self.trainer = hashing.HashingTrainer(given, self.development.x_NF[chosen_N], device)
        self.parts = {"model": self.trainer.model}

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """One pass over the features. Raises TrialFailed where training cannot go on."""
        if self.config.training.epochs == 0:
            return {}
        try:
            return self.trainer.train_epoch(epoch)
        except HashingFailed as error:
            raise TrialFailed(str(error)) from None

    def score(self) -> dict[str, float]:
        return self.judge().metrics

    def judge(self) -> Scored:
        """Scores of the held-out queries, with each query's own."""
        if self.held_out is not None:
            return self._ranked(self.development, self.held_out[: self.codes.num_queries])
        # The same queries for every family and seed, so that they can be compared pair by pair.
        queries = _drawn(len(self.test.labels), self.codes.num_queries, 0)
        return self._ranked(self.test, queries, self.development)

    def _ranked(self, rows: Rows, query_Q: Indices, more: Rows | None = None) -> Scored:
        """Scores of some of the rows as queries of the others, and of ``more`` before them."""
        model = self.trainer.model
        z_ND = model.codes(rows.x_NF)
        other_M = np.setdiff1d(np.arange(len(z_ND)), query_Q)
        z_MD, labels_M = z_ND[other_M], rows.labels[other_M]
        if more is not None:
            z_MD = np.concatenate([model.codes(more.x_NF), z_MD])
            labels_M = np.concatenate([more.labels, labels_M])
        omega_QD = None if self.config.regularizer is None else model.omega(rows.x_NF[query_Q])
        ranked = hashing.rank_codes(
            z_ND[query_Q],
            rows.labels[query_Q],
            z_MD,
            labels_M,
            at=self.config.map_at,
            omega_QD=omega_QD if self.codes.rerank else None,
            rerank=self.codes.rerank,
        )
        metrics = hashing.means(ranked)
        if omega_QD is not None:
            metrics |= structure_scores(omega_QD, self.codes.num_bits, self.config)
        of_each = {prefix: scores.sums(query_Q) for prefix, scores in ranked.items()}
        (unit_U, count_U, _), *_ = of_each.values()
        sums = {
            prefix + name: sum_U.tolist()
            for prefix, own in of_each.items()
            for name, sum_U in own.sums.items()
        }
        return Scored(metrics, unit_scores(unit_U.tolist(), count_U.tolist(), sums))

    def state(self) -> dict[str, Tensor]:
        state = trainer_state.state_of(self.parts, self.trainer.optimizer)
        return state | {GENERATOR: self.trainer.generator.get_state()}

    def restore(self, state: Mapping[str, Tensor], num_epochs: int) -> None:
        trainer_state.restore(self.parts, self.trainer.optimizer, state)
        self.trainer.generator.set_state(state[GENERATOR])

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        examples = self.test.x_NF[: dataset_cache.NUM_EXAMPLES]
        hashing.save(self.trainer.model, folder, dict(provenance), examples)


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
