"""The parts of a trial: a task, which says what kind of thing is learned, and its trainer, which learns it.

Nothing heavy is imported here, for the study file asks a task too, and is read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dmlstudy.data import ClosedSet, Fold, RowFold, ZeroShotData
    from dmlstudy.data.images import Indices
    from dmlstudy.records import DataConfig, TrialConfig

TrialData: TypeAlias = "ZeroShotData | ClosedSet"
"""What trials learn from and are judged by: each task knows which of the two its own are."""


class TrialFailed(RuntimeError):
    """A trial that cannot go on, with the reason; raised on every rank at once."""


class Share(NamedTuple):
    """Items that one model of a trial learns from, those it is judged by, and its stream of random numbers."""

    stream: int
    train: Indices | None
    """Development items; none: all of them."""
    held_out: Indices | None
    """Development items too; none: the test items."""


def derived_seed(seed: int, stream: int) -> int:
    """The seed of a trial's model with this stream of random numbers."""
    import numpy as np

    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


class Trainer(Protocol):
    """A model in training."""

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """Train an epoch and return its metrics; nothing is done, and none returned, where ``training.epochs`` is 0."""

    def score(self) -> dict[str, float]:
        """Metrics of the model as it is now, on the held-out items; every rank must call this."""

    def outputs(self) -> dict[str, Tensor]:
        """What the model makes of the held-out items, for ``Task.score_fold_models``: nothing, for most."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name; maybe the tensors themselves, not copies."""

    def restore(self, state: Mapping[str, Tensor], num_epochs: int) -> None:
        """Go on, bit for bit, as the trainer of the same configuration whose ``state`` this was after so many epochs.

        Other tensors may stand beside its own. Raises ValueError where its own are missing or of another shape.
        """

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the model, its provenance and some examples to a folder (``model_folder``)."""


class Task(Protocol):
    """One kind of thing that trials learn; ``tasks.TASKS`` lists all."""

    name: ClassVar[str]
    noun: ClassVar[str]
    """What its trials learn, as the object of a sentence."""
    section: ClassVar[str | None]
    """The section of a study file, and of a trial's configuration, that makes a trial one of this task."""

    is_distributed: ClassVar[bool] = False
    """Whether several processes can train one model together."""
    has_fold_models: ClassVar[bool] = False
    """Whether a verdict may judge a model per fold as well, each by itself and all as one."""
    draws_test_curve: ClassVar[bool] = False
    """Whether a verdict's model is scored on the test items after each epoch, as a search's is on the held-out ones."""

    def dataset(self, config: DataConfig) -> TrialData:
        """The data, read once by a process that runs many trials."""

    def folds(self, config: TrialConfig) -> Sequence[Fold] | Sequence[RowFold]:
        """Folds of the development items. Raises ValueError where these are too few."""

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> Trainer:
        """A trainer that has learned nothing yet. Raises ValueError for settings that have no meaning for it."""

    def score_fold_models(
        self, config: TrialConfig, outputs: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """Scores on the test items of a verdict's fold models, which left these ``outputs``."""
        raise NotImplementedError

    def measured_once(self, config: TrialConfig, device: torch.device) -> dict[str, float]:
        """What a search trial measures beside its scores, at its end: nothing, for most."""
        return {}
