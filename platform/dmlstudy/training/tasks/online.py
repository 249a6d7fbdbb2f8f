"""The task of online learning: a metric from a stream of constraints, judged by k-NN classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dmlstudy.records import DataConfig, TrialConfig
from dmlstudy.training.interface import Share, Task

if TYPE_CHECKING:
    import torch

    from dmlstudy.data import ClosedSet, RowFold
    from dmlstudy.training.stream_trainer import StreamTrainer


class Online(Task):
    """A learner of a stream, one constraint after another."""

    name = "online"
    noun = "a learner of a stream of constraints"
    section = "online"
    draws_test_curve = True

    def dataset(self, config: DataConfig) -> ClosedSet:
        from dmlstudy.training import dataset_cache

        return dataset_cache.closed(config)

    def folds(self, config: TrialConfig) -> Sequence[RowFold]:
        from dmlstudy import data
        from dmlstudy.training.stream_trainer import rows_of

        return data.row_folds(len(rows_of(config).development), config.num_folds, config.seed)

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> StreamTrainer:
        from dmlstudy.training.stream_trainer import StreamTrainer

        return StreamTrainer(config, share)
