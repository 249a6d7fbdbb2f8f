"""The smallest configuration of a verdict's trial, for tests that record its run and never train it."""

from __future__ import annotations

from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig


def verdict_trial(family: str, seed: int = 0) -> TrialConfig:
    return TrialConfig(
        family=family,
        phase="verdict",
        data=DataConfig(name="digits"),
        embedder=EmbedderConfig(),
        batch=BatchConfig(),
        training=TrainingConfig(),
        loss=LossConfig(name="contrastive"),
        seed=seed,
    )
