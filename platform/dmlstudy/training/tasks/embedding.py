"""The task of most studies: an embedder, judged by retrieval among classes it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dmlstudy.records import DataConfig, TrialConfig
from dmlstudy.training.interface import Share, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dmlstudy.data import Fold, ZeroShotData
    from dmlstudy.training.embedder_trainer import EmbedderTrainer


class Embedding(Task):
    """An embedder of images or vectors."""

    name = "embedding"
    noun = "an embedder"
    section = None
    is_distributed = True
    has_fold_models = True

    def dataset(self, config: DataConfig) -> ZeroShotData:
        from dmlstudy.training import dataset_cache

        return dataset_cache.zero_shot(config)

    def folds(self, config: TrialConfig) -> Sequence[Fold]:
        from dmlstudy import data

        labels_N = self.dataset(config.data).development.labels_N
        return data.class_disjoint_folds(labels_N, config.num_folds, config.seed)

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> EmbedderTrainer:
        from dmlstudy.training.embedder_trainer import EmbedderTrainer, HeldOut

        dataset = self.dataset(config.data)
        development = dataset.development
        return EmbedderTrainer(
            config,
            development if share.train is None else development.select(share.train),
            device,
            stream=share.stream,
            held_out=HeldOut(dataset.test, dataset.test_query, dataset.test_gallery)
            if share.held_out is None
            else HeldOut(development.select(share.held_out)),
        )

    def score_fold_models(
        self, config: TrialConfig, outputs: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """'separate_' of each model alone, the mean over them; 'concatenated_' of their embeddings as one."""
        from dmlstudy import metric_names
        from dmlstudy.training.retrieval_scores import Embedded, concatenated, retrieval_scores
        from dmlstudy.training.scores import mean

        dataset = self.dataset(config.data)
        rest = dataset.test.labels_N, dataset.test_query, dataset.test_gallery, config
        of_folds = [Embedded.of(each) for each in outputs]
        separate = mean([retrieval_scores(embedded, *rest) for embedded in of_folds])
        ensemble = retrieval_scores(concatenated(of_folds), *rest)
        return {metric_names.separate(name): score for name, score in separate.items()} | {
            metric_names.concatenated(name): score for name, score in ensemble.items()
        }

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
        return {metric_names.LATENCY_MS: embedders.latency_ms(trainer.embedder, image_HWC, device)}
