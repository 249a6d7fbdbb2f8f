"""The task of hashing: binary codes of frozen features, judged by Hamming ranking of a closed set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from dmlstudy.records import CodesConfig, DataConfig, MetricsConfig, TrialConfig
from dmlstudy.training.interface import FirstReports, Share, Task

if TYPE_CHECKING:
    import torch

    from dmlstudy.data import ClosedSet, RowFold
    from dmlstudy.data.images import Labels
    from dmlstudy.training.code_trainer import CodeTrainer


class Hashing(Task):
    """Codes learned without labels."""

    name = "hashing"
    noun = "codes of frozen features"
    product = "codes"
    untrained = "code"
    unit = "image"
    limits = (
        "Scores are of test rows of the classes that it was trained on; of other classes nothing is known."
    )
    section = "hashing"
    sections = ("hashing", "training")
    unmeasured = ("macro", "reid", "clusters", "retention", "verification", "short_vectors")
    objective = "map"
    second_objectives = MappingProxyType({"embedding_dim": "embedding_dim, their bits"})
    size_param = "hashing.num_bits"
    # Untrained weights of bits would only shuffle what codes find.
    changes_untrained = MappingProxyType({"regularizer": None})
    has_codes = True

    def is_of_untrained(self, param: str) -> bool:
        return param in ("loss", "hashing.num_bits", "hashing.features", "hashing.standardize")

    def features(self, config: TrialConfig) -> str:
        return _codes(config).features

    def metrics(self, protocol: MetricsConfig) -> list[str]:
        from dmlstudy import hashing

        return [*hashing.METRICS, *(name for k in protocol.map_at for name in hashing.metrics_at(k))]

    def check(self, config: TrialConfig, key: str) -> None:
        from dmlstudy import hashing
        from dmlstudy.training.tasks.checked import check_features, refused

        codes, term = _codes(config), config.regularizer
        try:
            hashing.check_training(config.training)
        except ValueError as error:
            raise ValueError(f"{key}.{error}") from None
        with refused(key):
            hashing.build(
                config.loss.name,
                codes.num_bits,
                2,
                config.loss.params,
                term=(term.name, term.params) if term else None,
            )
        check_features(codes.features, f"{key}.hashing.features")

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

    def notes(self, config: TrialConfig, num_items: int) -> list[str]:
        """A line on the device."""
        return ["device: codes are trained on a worker's GPU where it has one, and ranked on its CPUs"]

    def seconds(
        self, config: TrialConfig, labels_N: Labels, num_test: int, first_reports: FirstReports
    ) -> tuple[float, float]:
        """From whole epochs: what takes long is the ranking of a whole database after each."""
        from dmlstudy.data import row_folds

        started = time.perf_counter()
        (first, report), *further = first_reports(config)
        per_epoch = further[-1][0] - first if further else first - started
        rate = report.metrics["rows_per_second"]
        folds = row_folds(len(labels_N), config.num_folds, config.seed)
        most = _codes(config).num_train or len(labels_N)
        ranking = max(0.0, per_epoch - min(most, len(folds[0].train_indices)) / rate)
        items = (len(labels_N) + num_test) / len(labels_N)
        epochs = config.training.epochs
        return epochs * len(folds) * per_epoch, epochs * min(most, len(labels_N)) / rate + items * ranking


def _codes(config: TrialConfig) -> CodesConfig:
    assert config.hashing is not None
    return config.hashing
