"""The task of most studies: an embedder, judged by retrieval among classes it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dmlstudy.records import DataConfig, MetricsConfig, TrialConfig, embedding_size
from dmlstudy.training.interface import FirstReports, Share, Task, TrialData

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dmlstudy.data import Fold, ZeroShotData
    from dmlstudy.data.images import Labels
    from dmlstudy.training.embedder_trainer import EmbedderTrainer
    from dmlstudy.training.scores import Scored


class Embedding(Task):
    """An embedder of images or vectors."""

    name = "embedding"
    noun = "an embedder"
    product = "embedder"
    untrained = "embedder"
    limits = (
        "Scores are of classes of the same data set that were not trained on; of others nothing is known."
    )
    section = None
    sections = ("embedder", "batch", "training", "augmentation", "retrieval")
    objective = "map_at_r"
    second_objectives = MappingProxyType({"embedding_dim": "embedding_dim", "latency_ms": "latency_ms"})
    size_param = "embedder.dim"
    is_distributed = True
    has_fold_models = True

    def is_of_untrained(self, param: str) -> bool:
        return param.startswith("embedder.") and param not in (
            "embedder.structure_input",  # no embedding before training is of them
            "embedder.matryoshka",
        )

    def size(self, params: Mapping[str, Any]) -> int:
        return embedding_size(int(params["embedder.dim"]), str(params.get("embedder.dim_per", "whole")))

    def metrics(self, protocol: MetricsConfig) -> list[str]:
        from dmlstudy import retrieval
        from dmlstudy.hashing import metrics_at

        known = ["map_at_r", "r_precision", *(f"recall_at_{k}" for k in protocol.recall_at)]
        known += [name for k in protocol.map_at for name in metrics_at(k)]
        known += ["map"] * (protocol.full_map or protocol.reid)
        known += [*(f"cmc_at_{k}" for k in retrieval.CMC_AT), "minp"] * protocol.reid
        return known + [f"macro_{name}" for name in known] * protocol.macro

    def check(self, config: TrialConfig, key: str) -> None:
        from dmlstudy.training.tasks import embedding_checks

        embedding_checks.check(config, key)

    def check_data(self, configs: Sequence[tuple[str, TrialConfig]], dataset: TrialData) -> None:
        from dmlstudy.data import ZeroShotData
        from dmlstudy.training.tasks import class_checks

        assert isinstance(dataset, ZeroShotData)
        class_checks.check_data(configs, dataset)

    def dataset(self, config: DataConfig) -> ZeroShotData:
        from dmlstudy.training import dataset_cache

        return dataset_cache.zero_shot(config)

    def retention(self, config: TrialConfig) -> ZeroShotData | None:
        from dmlstudy.training import dataset_cache

        return None if config.retention is None else dataset_cache.retention(config.retention)

    def folds(self, config: TrialConfig) -> Sequence[Fold]:
        from dmlstudy import data

        labels_N = self.dataset(config.data).development.labels_N
        return data.class_disjoint_folds(labels_N, config.num_folds, config.seed)

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> EmbedderTrainer:
        from dmlstudy.training.embedder_trainer import EmbedderTrainer, HeldOut
        from dmlstudy.training.feature_cache import sides_of

        dataset = self.dataset(config.data)
        development = dataset.development
        return EmbedderTrainer(
            config,
            development if share.train is None else development.select(share.train),
            device,
            stream=share.stream,
            held_out=HeldOut(dataset.test, dataset.test_query, dataset.test_gallery, dataset.test_camera_N)
            if share.held_out is None
            else HeldOut(
                development.select(share.held_out),
                camera_N=None
                if dataset.development_camera_N is None
                else dataset.development_camera_N[share.held_out],
            ),
            sides=sides_of(dataset, share),
        )

    def score_fold_models(
        self, config: TrialConfig, outputs: Sequence[Mapping[str, Tensor]], device: torch.device
    ) -> Scored:
        """Metrics of each model alone, the mean over them, and of their concatenated embeddings."""
        from dmlstudy import metric_names
        from dmlstudy.training.retrieval_scores import Embedded, concatenated, retrieval_scores
        from dmlstudy.training.scores import joined, mean_scored, renamed

        dataset = self.dataset(config.data)
        rest = dataset.test.labels_N, dataset.test_query, dataset.test_gallery, config
        of_folds = [Embedded.of(each) for each in outputs]

        def scored(embedded: Embedded) -> Scored:
            camera_N = dataset.test_camera_N
            return retrieval_scores(embedded, *rest, camera_N=camera_N, device=device, by_class=True)

        separate = mean_scored([scored(embedded) for embedded in of_folds])
        ensemble = scored(concatenated(of_folds))
        return joined(
            [renamed(separate, metric_names.separate), renamed(ensemble, metric_names.concatenated)]
        )

    def measured_once(self, config: TrialConfig, device: torch.device) -> dict[str, float]:
        """The time to embed a picture, where that is wished for."""
        import numpy as np

        from dmlstudy import distributed, embedders, metric_names

        if not config.measure_latency:
            return {}
        trainer = self.fit(config, Share(0, *self.folds(config)[0][:2]), device)
        if distributed.rank() != 0:  # alone, for ranks of one machine would share its cores
            return {}
        image_HWC = self.dataset(config.data).development.read(np.arange(1))[0]
        return {metric_names.LATENCY_MS: embedders.latency_ms(trainer.kept(), image_HWC, device)}

    def notes(self, config: TrialConfig, num_items: int) -> list[str]:
        from dmlstudy.training.verification_scores import notes

        dataset = self.dataset(config.data)
        return notes(config, dataset.test.labels_N, dataset.test_query, dataset.test_gallery)

    def seconds(
        self, config: TrialConfig, labels_N: Labels, num_test: int, first_reports: FirstReports
    ) -> tuple[float, float]:
        """From the images per second of a few batches."""
        from dmlstudy.data import class_disjoint_folds
        from dmlstudy.metric_names import IMAGES_PER_SECOND

        # Epochs with a frozen backbone are the first and the fast ones; a warm-up may be longer than these few batches.
        few = {
            "batch": config.batch.model_copy(update={"per_epoch": 2}),
            "training": config.training.model_copy(
                update={"freeze_backbone_epochs": 0, "warmup_epochs": 0.0, "warmup_steps": 0}
            ),
        }
        rate = first_reports(config.model_copy(update=few))[-1][1].metrics[IMAGES_PER_SECOND]
        folds = class_disjoint_folds(labels_N, config.num_folds, config.seed)
        sizes = [(len(fold.train_indices), len(fold.validation_indices)) for fold in folds]
        # An epoch shows each training image about once; embedding an image costs a third of training on it.
        epochs = config.training.epochs
        search = sum(epochs * (train + validation / 3) for train, validation in sizes) / rate
        trained_on = [len(labels_N)] + [train for train, _ in sizes] * config.fold_models
        elsewhere = self.retention(config)
        num_elsewhere = 0 if elsewhere is None else len(elsewhere.test)
        return search, (sum(epochs * part + num_test / 3 for part in trained_on) + num_elsewhere / 3) / rate
