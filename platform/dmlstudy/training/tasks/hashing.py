"""The task of hashing: binary codes of frozen features, judged by Hamming ranking of a closed set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dmlstudy.records import DataConfig, TrialConfig
from dmlstudy.training.interface import Share, Task

if TYPE_CHECKING:
    import torch

    from dmlstudy.data import ClosedSet, RowFold
    from dmlstudy.training.code_trainer import CodeTrainer


class Hashing(Task):
    """Codes learned without labels."""

    name = "hashing"
    noun = "codes of frozen features"
    section = "hashing"

    def dataset(self, config: DataConfig) -> ClosedSet:
        from dmlstudy.training import dataset_cache

        return dataset_cache.closed(config)

    def folds(self, config: TrialConfig) -> Sequence[RowFold]:
        from dmlstudy import data

        num_rows = len(self.dataset(config.data).development)
        return data.row_folds(num_rows, config.num_folds, config.seed)

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> CodeTrainer:
        from dmlstudy.training.code_trainer import CodeTrainer

        return CodeTrainer(config, share, device)
