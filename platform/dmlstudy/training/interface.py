"""The parts of a trial: a task, which says what kind of thing is learned, and its trainer, which learns it.

Nothing heavy is imported here, for the study file asks a task too, and is read without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from dmlstudy.training.scores import Scored

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dmlstudy.data import ClosedSet, ZeroShotData
    from dmlstudy.data.images import Indices, Labels
    from dmlstudy.records import DataConfig, MetricsConfig, Scalar, TrialConfig, TrialReport, Unit

FirstReports: TypeAlias = "Callable[[TrialConfig], list[tuple[float, TrialReport]]]"
"""Begins a trial and gives its first reports, two at most, with the time of each."""

TrialData: TypeAlias = "ZeroShotData | ClosedSet"
"""The data that trials learn from and are judged by; each task knows which of the two it uses."""


class TrialFailed(RuntimeError):
    """A trial that cannot go on, with the reason; raised on every rank at once."""


class TwoSides(Protocol):
    """A fold of the development items, of classes or of rows."""

    @property
    def train_indices(self) -> Indices: ...

    @property
    def validation_indices(self) -> Indices: ...


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

    def judge(self) -> Scored:
        """The same, with sums by unit where the held-out items have such; every rank must call this."""
        return Scored(self.score())

    def score_elsewhere(self, dataset: ZeroShotData) -> dict[str, float]:
        """The same metrics on the test items of other data, which ``Task.retention`` gives; empty for most tasks."""
        return {}

    def score_shares(self, scores: dict[str, float]) -> list[dict[str, float]]:
        """Metrics with each of several shares of the trained weights; empty where there is nothing to choose.

        ``scores`` are the model's as it is now, which has the largest share. Every rank must call this.
        """
        return []

    def outputs(self) -> dict[str, Tensor]:
        """The model's outputs on the held-out items, for ``Task.score_fold_models``; empty for most tasks."""
        return {}

    @property
    def has_shared_state(self) -> bool:
        """True if each rank has a part of the state, so that all of them must ask for it together."""
        return False

    def state(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name, on rank 0; maybe the tensors themselves, not copies."""

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
    """The model its trials train, as the object of a sentence."""
    product: ClassVar[str]
    """The suffix of a registered model's name, after the study's."""
    untrained: ClassVar[str]
    """The noun of the untrained row."""
    unit: ClassVar[Unit] = "class"
    """The kind of thing whose scores on the test items vary together: others of the kind would have been others."""
    limits: ClassVar[str]
    """The limits of its scores, as stated on a model's card."""

    section: ClassVar[str | None]
    """The section of a study file, and of a trial's configuration, that makes a trial one of this task."""
    sections: ClassVar[tuple[str, ...]]
    """Sections that mean something to it, beside ``loss`` and ``regularizer``."""
    unmeasured: ClassVar[tuple[str, ...]] = ()
    """Keys of ``protocol`` that ask for what is not measured of it."""
    objective: ClassVar[str]
    """The metric that its studies search for where they name none."""
    second_objectives: ClassVar[Mapping[str, str]]
    """Second objectives that it has, in words."""
    size_param: ClassVar[str | None]
    """The logged parameter that is the size of its embeddings or codes."""
    changes_untrained: ClassVar[Mapping[str, Any]] = {}
    """Settings of its untrained row, in addition to those common to all tasks."""

    baselines: ClassVar[tuple[str, ...]] = ()
    """Losses that a study of it should have among its families, as what the others have to beat."""

    is_distributed: ClassVar[bool] = False
    """True if several processes can train one model together."""
    uses_gpu: ClassVar[bool] = True
    has_fold_models: ClassVar[bool] = False
    """True if a verdict may also judge a model per fold, each by itself and all as one."""
    draws_test_curve: ClassVar[bool] = False
    """True if a verdict's model is scored on the test items after each epoch, as a search's is on the held-out ones."""
    has_codes: ClassVar[bool] = False
    """True if its models give bits, compared by Hamming distance."""

    def logged_params(self, config: TrialConfig) -> dict[str, Scalar]:
        """The parameters of a trial under the names that its run has them by: ``section.name``."""
        logged: dict[str, Scalar] = {}
        for section, part in (("loss", config.loss), ("regularizer", config.regularizer)):
            if part is not None:
                logged[section] = part.name
                logged |= {f"{section}.{name}": value for name, value in part.params.items()}
        for section in self.sections:
            values = getattr(config, section).model_dump()
            logged |= {f"{section}.{name}": value for name, value in values.items() if value is not None}
        return logged | {"seed": config.seed, "num_folds": config.num_folds}

    def is_of_untrained(self, param: str) -> bool:
        """True if a logged parameter describes a model before training."""

    def untrained_key(self, params: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
        """The model before training, by a run's parameters: equal for families that share an untrained row."""
        return frozenset(each for each in params.items() if self.is_of_untrained(each[0]))

    def overlap(self, params: Mapping[str, Any], num_rows: int) -> float | None:
        """Test rows over rows to learn from, by a run's parameters, where each seed of a verdict shuffles all rows.

        None where all seeds are judged by the same test items, as of most tasks.
        """
        return None

    def size(self, params: Mapping[str, Any]) -> int:
        """The size of an embedding, or the bits of a code, by a run's parameters."""
        assert self.size_param is not None
        return int(params[self.size_param])

    def features(self, config: TrialConfig) -> str | None:
        """The kind of frozen features, or the folder of the embedder that makes them; none are, for most."""
        return None

    def metrics(self, protocol: MetricsConfig) -> list[str]:
        """Metrics that can be a study's objective."""

    def check(self, config: TrialConfig, key: str) -> None:
        """Raise ValueError, beginning with the ``key`` of the family, for what no trial could be built of."""

    def check_data(self, configs: Sequence[tuple[str, TrialConfig]], dataset: TrialData) -> None:
        """Raise ValueError for data that are too few for the folds of these configurations, the same for all.

        Each stands with the key of its family, with which the error begins where it is that family's.
        """
        self.folds(configs[0][1])

    def dataset(self, config: DataConfig) -> TrialData:
        """The data, read once by a process that runs many trials."""

    def retention(self, config: TrialConfig) -> ZeroShotData | None:
        """Data beside the study's on which a verdict's model is scored as well, read once; none for most tasks."""
        return None

    def folds(self, config: TrialConfig) -> Sequence[TwoSides]:
        """Folds of the development items. Raises ValueError where these are too few."""

    def fit(self, config: TrialConfig, share: Share, device: torch.device) -> Trainer:
        """A trainer that has learned nothing yet. Raises ValueError for settings that have no meaning for it."""

    def score_fold_models(
        self, config: TrialConfig, outputs: Sequence[Mapping[str, Tensor]], device: torch.device
    ) -> Scored:
        """Scores on the test items of a verdict's fold models, which left these ``outputs``."""
        assert not self.has_fold_models
        return Scored({})

    def measured_once(self, config: TrialConfig, device: torch.device) -> dict[str, float]:
        """Further measurements of a search trial, at its end; empty for most tasks."""
        return {}

    def test_rows(self, config: TrialConfig) -> Indices:
        """Test items that the verdict of this seed has neither trained on nor chosen by."""
        import numpy as np

        return np.arange(len(self.dataset(config.data).test))

    def notes(self, config: TrialConfig, num_items: int) -> list[str]:
        """Lines on the split and the device beyond what every task tells: none, for most."""
        return []

    def seconds(
        self, config: TrialConfig, labels_N: Labels, num_test: int, first_reports: FirstReports
    ) -> tuple[float, float]:
        """About how long a search trial and a verdict trial take, from the first reports of some trials."""
