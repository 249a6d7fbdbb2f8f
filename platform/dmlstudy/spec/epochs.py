"""A trial's progress in epochs of folds; its reports are numbered through all models that it trains."""

from __future__ import annotations

from typing import NamedTuple

from dmlstudy.records import TrialConfig


class Place(NamedTuple):
    """An epoch of one of the models that a trial trains one after another; before its first epoch all are 0.

    In the search the models are those of the folds, and in a verdict the folds' models, if any, and the last of all.
    """

    fold: int
    num_folds: int
    epoch: int
    num_epochs: int
    of: str = "fold"

    def __str__(self) -> str:
        if not self.epoch:
            return "no epoch yet"
        epoch = f"epoch {self.epoch} of {self.num_epochs}"
        return epoch if self.num_folds == 1 else f"{self.of} {self.fold} of {self.num_folds}, {epoch}"


def place(config: TrialConfig, step: int) -> Place:
    """The epoch that a trial's report of this number is about."""
    if config.phase == "search":
        num, of = config.num_folds, "fold"
    else:
        num, of = 1 + (config.num_folds if config.fold_models else 0), "model"
    return counted(step, num, config.training.epochs, of)


def counted(step: int, num_folds: int, num_epochs: int, of: str = "fold") -> Place:
    """The same of so many folds and epochs."""
    num_epochs = max(num_epochs, 1)
    if step < 1:
        return Place(0, num_folds, 0, num_epochs, of)
    fold, epoch = divmod(step - 1, num_epochs)
    return Place(fold + 1, num_folds, epoch + 1, num_epochs, of)
