"""A trial's adapter: its keys checked, and put on the embedder that is trained."""

from __future__ import annotations

from dmlstudy.embedders import Embedder, adapters
from dmlstudy.embedders.blocks import without_data
from dmlstudy.records import TrainingConfig, TrialConfig

NONE, LORA = "none", "lora"

KEYS = ("lora_rank", "lora_alpha", "lora_targets", "lora_blocks")
"""Keys that an adapter alone uses."""


def check_adapter(config: TrialConfig) -> None:
    """Raise ValueError, beginning with the key, for keys of an adapter that are not used or do not agree."""
    training = config.training
    if training.adapter == NONE:
        for key in KEYS:
            value = getattr(training, key)
            if value != TrainingConfig.model_fields[key].default:
                raise ValueError(
                    f"training.{key}: {value} is not used by training.adapter: none; leave it out, or put it under the"
                    " option of training.adapter that uses it: lora"
                )
        return
    if training.unfreeze_last != "all":
        raise ValueError(
            f"training.unfreeze_last: {training.unfreeze_last} stands beside training.adapter: lora, under which no"
            " weight of the backbone is trained; leave it out, and set training.lora_blocks"
        )
    if 0 < training.epochs <= training.freeze_backbone_epochs:
        raise ValueError(
            f"training.freeze_backbone_epochs: {training.freeze_backbone_epochs} of {training.epochs} epochs leave"
            " training.adapter: lora untrained; set it lower, or training.adapter: none"
        )
    if not config.embedder.freeze_bn:
        raise ValueError(
            "training.adapter: lora leaves the backbone's batch norm as it is, statistics too; set embedder.freeze_bn:"
            " true, or training.adapter: none"
        )


def check_backbone(config: TrialConfig) -> None:
    """Raise ValueError where the backbone has not what is to be adapted; nothing where only data can tell."""
    training, embedder = config.training, config.embedder
    if training.adapter == NONE:
        return
    side = {} if config.data.image_size is None else {"side": config.data.image_size}
    network = without_data(embedder.backbone, embedder.fusion, **side)
    if network is not None:
        adapters.chosen(network, training.lora_targets, training.lora_blocks)


def adapt(embedder: Embedder, training: TrainingConfig, seed: int) -> None:
    """Put the adapter on the backbone, where there is one and it will be trained."""
    if training.adapter == NONE or training.epochs == 0:
        return
    adapters.attach(
        embedder.backbone,
        rank=training.lora_rank,
        alpha=training.lora_rank if training.lora_alpha is None else training.lora_alpha,
        targets=training.lora_targets,
        last=training.lora_blocks,
        seed=seed,
    )
