"""The task of online learning: a metric from a stream of constraints, judged by k-NN classification."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dmlstudy.records import OF_STRUCTURE, DataConfig, MetricsConfig, OnlineConfig, TrialConfig
from dmlstudy.training.interface import FirstReports, Share, Task

if TYPE_CHECKING:
    import torch

    from dmlstudy.data import ClosedSet, RowFold
    from dmlstudy.data.images import Indices, Labels
    from dmlstudy.training.stream_trainer import StreamTrainer

OF_JUDGE = ("features", "scaling", "k", "vote")
"""Parameters of a learner's surroundings that decide what it scores before it learns."""


class Online(Task):
    """A learner of a stream, one constraint after another."""

    name = "online"
    noun = "a learner of a stream of constraints"
    product = "learner"
    untrained = "learner"
    unit = "row"
    limits = "Scores are of test rows of the classes that its constraints were of; of other classes nothing is known."
    section = "online"
    sections = ("online", "training")
    unmeasured = (
        "macro",
        "reid",
        "clusters",
        "map_at",
        "full_map",
        "retention",
        "verification",
        "short_vectors",
    )
    objective = "accuracy"
    second_objectives = MappingProxyType[str, str]({})
    size_param = None
    baselines = ("slda", "nearest_class_mean", "whitening")
    uses_gpu = False
    draws_test_curve = True

    def is_of_untrained(self, param: str) -> bool:
        section, _, name = param.partition(".")
        return param == "loss" or name in {"loss": OF_STRUCTURE, "online": OF_JUDGE}.get(section, ())

    def overlap(self, params: Mapping[str, Any], num_rows: int) -> float | None:
        """Of shuffled halves; of as many rows where their number is not known."""
        if params.get("online.split") != "shuffled":
            return None
        num_learned = num_rows // 2
        return (num_rows - num_learned) / num_learned if num_learned else 1.0

    def features(self, config: TrialConfig) -> str:
        return _stream(config).features

    def metrics(self, protocol: MetricsConfig) -> list[str]:
        return ["accuracy", "macro_f1", "auc", *(f"recall_at_{k}" for k in protocol.recall_at)]

    def check(self, config: TrialConfig, key: str) -> None:
        from dmlstudy import online
        from dmlstudy.training.tasks.checked import check_features, refused

        stream = _stream(config)
        with refused(key):
            learner = online.build(config.loss.name, config.loss.params, num_features=2)
        if config.regularizer is not None:
            raise ValueError(f"{key}.regularizer: means nothing to an online learner; leave it out")
        needs = {
            "auc": ("num_pairs", stream.num_pairs > 0),
            "recall": ("measure_recall", stream.measure_recall),
        }
        for metric, (setting, is_set) in needs.items():
            if config.objective.startswith(metric) and not is_set:
                raise ValueError(f"protocol.objective: {config.objective} needs online.{setting}; set it")
        if stream.on_drift == "reopen" and not isinstance(learner, online.CanReopen):
            raise ValueError(f"{key}.online.on_drift: {config.loss.name} cannot begin anew; set ignore")
        check_features(stream.features, f"{key}.online.features")

    def dataset(self, config: DataConfig) -> ClosedSet:
        """The same as of hashing. Raises ValueError where items have several labels, of which none can be told."""
        from dmlstudy.training import dataset_cache

        closed = dataset_cache.closed(config)
        if closed.concepts is not None:
            raise ValueError(
                "data.name: items with several labels have no class to be told; choose another set"
            )
        return closed

    def folds(self, config: TrialConfig) -> Sequence[RowFold]:
        from dmlstudy import data
        from dmlstudy.training.stream_trainer import rows_of

        return data.row_folds(len(rows_of(config).development), config.num_folds, config.seed)

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> StreamTrainer:
        from dmlstudy.training.stream_trainer import StreamTrainer

        return StreamTrainer(config, share)

    def test_rows(self, config: TrialConfig) -> Indices:
        """Of shuffled rows those of the test half that stand among the data's own test rows."""
        import numpy as np

        from dmlstudy.training.stream_trainer import sides_of

        if _stream(config).split != "shuffled":
            return super().test_rows(config)
        closed = self.dataset(config.data)
        first = len(closed.development)
        held_out = sides_of(first + len(closed.test), first, config.seed)[1]
        return np.sort(held_out[held_out >= first] - first)

    def notes(self, config: TrialConfig, num_items: int) -> list[str]:
        """Lines on the device and on shuffled halves."""
        device = "device: one CPU, for a stream is learned one constraint after another"
        if _stream(config).split != "shuffled":
            return [device]
        return [
            device,
            f"split: all {num_items} are shuffled by each verdict seed and cut in halves; the search"
            f" has {config.num_folds} fold(s) of one such half",
        ]

    def seconds(
        self, config: TrialConfig, labels_N: Labels, num_test: int, first_reports: FirstReports
    ) -> tuple[float, float]:
        """From the first part and from judging alone, whose time grows with queries x gallery."""
        from dmlstudy.data.folds import HELD_OUT

        parts = []
        for epochs in (0, config.training.epochs):
            training = config.training.model_copy(update={"epochs": epochs})
            started = time.perf_counter()
            parts.append(first_reports(config.model_copy(update={"training": training}))[0][0] - started)
        judging, learning = parts[0], max(0.0, parts[1] - parts[0])
        folds, epochs = config.num_folds, config.training.epochs
        num_rows = len(labels_N) + num_test
        num_development = num_rows // 2 if _stream(config).split == "shuffled" else len(labels_N)
        held_out = num_development / (folds if folds > 1 else HELD_OUT)
        growth = (num_rows - num_development) * num_development / (held_out * (num_development - held_out))
        return folds * epochs * (learning + judging), epochs * (learning + growth * judging)


def _stream(config: TrialConfig) -> OnlineConfig:
    assert config.online is not None
    return config.online
