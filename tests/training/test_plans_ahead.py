"""Plans of batches are made beside the training of earlier ones: never by the thread that launches steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.ranks import config

from dmlstudy import data
from dmlstudy.losses import plan
from dmlstudy.losses.interface import Labels
from dmlstudy.records import TrialConfig
from dmlstudy.training.embedder_trainer import EmbedderTrainer

LOSSES: dict[str, dict[str, Any]] = {
    name: {"loss": {"name": name}}
    for name in (
        "contrastive", "triplet", "binomial_deviance", "angular", "lifted_structure", "norm_softmax", "adaface",
        "sup_ap",
    )
}  # fmt: skip
LOSSES["koleo"] = {"loss": {"name": "contrastive"}, "regularizer": {"name": "koleo"}}
LOSSES["graph_consistency"] = {"loss": {"name": "contrastive"}, "regularizer": {"name": "graph_consistency"}}


def trainer(**changes: Any) -> EmbedderTrainer:
    given = TrialConfig.model_validate(config(batch__per_epoch=5, **changes))
    return EmbedderTrainer(given, data.load("digits").development, torch.device("cpu"), stream=0)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_main_thread_makes_none(name: str, views: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    in_order = plan.in_order

    def watched(labels: Labels) -> torch.Tensor:
        seen.append(threading.current_thread().name)
        return in_order(labels)

    monkeypatch.setattr(plan, "in_order", watched)
    own = trainer(**LOSSES[name], **({"augmentation": {"flip": 0.5}} if views else {}))
    own.train_epoch(0)
    assert seen
    assert set(seen) == {"ahead_0"}


def test_an_epoch_that_is_broken_off_leaves_no_thread() -> None:
    own = trainer(loss={"name": "contrastive"})
    reading = own._read_batches(0)
    next(reading)
    reading.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("ahead")]
