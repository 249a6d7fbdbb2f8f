"""One trial: train what a configuration says and say how good it is, fold by fold, epoch by epoch.

``run_trial`` knows no Ray and no MLflow: ``report`` is a callable, so a test runs a trial with a lambda. What kind of
thing is learned it asks the trial's task (``tasks``). It runs on every rank alike; what is global (batches, losses,
scores) is the same number on each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlstudy import distributed, embedders, metric_names
from dmlstudy.data import ZeroShotData
from dmlstudy.records import TrialConfig, TrialReport, TrialResult, UnitScores
from dmlstudy.training.checkpoint import MIN_SECONDS_BETWEEN, Checkpoint
from dmlstudy.training.determinism import repeatable
from dmlstudy.training.interface import Share, Task, Trainer, TrialData, TrialFailed
from dmlstudy.training.scores import Scored, joined, mean, spread
from dmlstudy.training.shares import check_settled, settle, shares_of, told
from dmlstudy.training.tasks import task_of

Report = Callable[[TrialReport], None]

OUTPUTS = "fold_"
"""The prefix of fold models' outputs in a trial's state; no trainer uses it."""


class TrialStopped(Exception):
    """Raised by ``report``, on every rank at once, to end a trial early."""


class TrialPaused(Exception):
    """Raised by ``run_trial``, on every rank at once, after the report at which it was to pause."""


def run_trial(
    config: TrialConfig,
    report: Report,
    *,
    device: torch.device | None = None,
    save_to: Path | None = None,
    checkpoint: str | Path | None = None,
    min_seconds_between: float = MIN_SECONDS_BETWEEN,
    pause_after: int | None = None,
) -> TrialResult:
    """Train and evaluate one configuration.

    Phase ``search``: for each fold of the development items (of classes, for an embedder; else of rows), train from
    scratch and evaluate on the held-out items after every epoch. The reported objective after epoch e of fold f is
    the mean of the finished folds' last scores and this epoch's, so its fidelity only grows.

    Where ``training.wise_ft`` has several shares, these reports are of the largest. The last report and the result are
    of the share that is best on the mean over the folds.

    Phase ``verdict``: train on all development items and evaluate once, at the end, on the test items; a stream of
    constraints also after each of its parts, which are its epochs. With ``retention`` the same model is scored on the
    test classes of that data too ('retention_').

    With ``fold_models`` an embedder is trained for each fold as well, and scored on the test classes twice: each by
    itself ('test_separate_', the mean over folds), and all together as one embedding, the concatenation
    ('test_concatenated_').

    Rank 0 writes the model of a verdict trial to ``save_to``. Raises TrialFailed when the loss or an
    embedding stops being finite, ValueError on several ranks where one process learns, and lets TrialStopped from
    ``report`` pass.

    In the folder ``checkpoint``, a path or a URI, which belongs to this trial alone and is seen by all ranks, rank 0
    keeps the trial's state, after the report of an epoch and at most every ``min_seconds_between`` (0: always).

    A call that finds it there makes its reports again, as they were, goes on from it and gives, on as many ranks,
    the further reports and the result of an unbroken trial, bit for bit.

    The state after the last epoch is always kept, and none is removed here, however the trial ends: so the caller may
    be killed until it has recorded the result, and call again for it. Raises ValueError for the state of another
    configuration.

    After the report of step ``pause_after`` the state is kept and TrialPaused is raised; at once in a call that finds
    this state. A later call, with another step or none, goes on from there.

    Losses and all that is scored are computed in full float32, whatever PyTorch was told (``embedders.precision``).
    """
    device = device or torch.device("cpu")
    task = task_of(config)
    if distributed.world_size() > 1 and not task.is_distributed:
        raise ValueError(
            f"resources.workers: one process trains {task.noun}, not {distributed.world_size()}; set 1"
        )
    try:
        with embedders.full_products(), repeatable(config.training.deterministic, device):
            kept = Checkpoint(checkpoint, config.fingerprint(), min_seconds_between)
            return _Trial(task, config, report, device, kept, pause_after).run(save_to)
    finally:
        if (
            device.type == "cuda"
        ):  # the next trial of this process, or another's on this GPU, needs other sizes
            torch.cuda.empty_cache()


class _Trial:
    """A trial on its way: one model after another, of each fold and, in a verdict, of all development items."""

    def __init__(
        self,
        task: Task,
        config: TrialConfig,
        report: Report,
        device: torch.device,
        kept: Checkpoint,
        pause_after: int | None,
    ) -> None:
        self.task, self.config, self.device, self.kept = task, config, device, kept
        self.pause_after = pause_after
        self.dataset = task.dataset(config.data)
        _agree_on(self.dataset)
        self.is_verdict = config.phase == "verdict"
        self.is_judged = task.draws_test_curve or not self.is_verdict
        """True if models are scored after each epoch."""
        self.num_epochs = max(config.training.epochs, 1) if self.is_judged else config.training.epochs
        self.shares = self._shares()
        check_settled(config)
        self.choices = shares_of(config.training.wise_ft)
        self.begun = kept.load()
        self.reports = _Reports(report, self.begun.reports)
        self.finished = list(self.begun.scores)
        """The last scores of each fold of a search."""
        self.of_folds = list(self.begun.of_folds)
        """The same by unit, of folds that have such scores."""
        self.of_shares = list(self.begun.of_shares)
        """The same with each of several shares of the trained weights."""
        self.outputs = {
            name: tensor for name, tensor in self.begun.tensors.items() if name.startswith(OUTPUTS)
        }
        """The outputs of a verdict's fold models."""

    def run(self, save_to: Path | None) -> TrialResult:
        step = self._step(self.begun.fold, self.begun.epoch)
        if self.pause_after is not None and step >= self.pause_after:
            raise TrialPaused  # as in the call before, which may have been killed until the caller knew of it
        if not self.is_verdict:
            return self._search()
        trainer, scored = self._verdict()
        if save_to is not None and distributed.rank() == 0:
            trainer.save(save_to, self._provenance())
        return TrialResult(
            metrics=scored.metrics,
            unit_scores=scored.unit_scores,
            pair_counts=scored.pair_counts,
            embedder_folder=None if save_to is None else str(save_to),
        )

    def _shares(self) -> list[Share]:
        """Of a search the folds; of a verdict all development items, after the folds if they have models too."""
        config, is_verdict = self.config, self.is_verdict
        if is_verdict and not (config.fold_models and self.task.has_fold_models):
            return [Share(0, None, None)]
        folds = self.task.folds(config)
        if not is_verdict:
            return [
                Share(number, fold.train_indices, fold.validation_indices)
                for number, fold in enumerate(folds)
            ]
        of_folds = [Share(number, fold.train_indices, None) for number, fold in enumerate(folds, 1)]
        return [*of_folds, Share(0, None, None)]

    def _search(self) -> TrialResult:
        for number in range(self.begun.fold, len(self.shares)):
            scored = self._train(number)[1]  # its trainer goes before the next one takes memory
            self.finished.append(scored.metrics)
            if scored.unit_scores is not None:
                self.of_folds.append(scored.unit_scores)
            self._keep(number + 1, 0)
        settled = self._settled(self.finished)
        metrics = mean(settled) | spread(settled, self.config.objective)
        if any(self.of_shares):
            metrics |= told(self.choices, self.of_shares, self.config.objective)
        metrics |= self.task.measured_once(self.config, self.device)
        return TrialResult(
            metrics=metrics | _damaged(self.config, self.dataset), of_folds=self._of_all_folds()
        )

    def _of_all_folds(self) -> tuple[UnitScores, ...]:
        """Scores by unit of every fold; none where some are missing, or are of another share than the metrics."""
        if any(self.of_shares) or len(self.of_folds) < len(self.shares):
            return ()
        return tuple(self.of_folds)

    def _settled(self, scores: list[dict[str, float]]) -> list[dict[str, float]]:
        """The folds' last ``scores``, or those with the share that they choose together."""
        if not any(self.of_shares):
            return scores
        return settle(self.choices, self.of_shares, self.config.objective).scores

    def _verdict(self) -> tuple[Trainer, Scored]:
        """The trainer of all development items, and the scores on the test items."""
        *of_folds, whole = range(len(self.shares))
        for number in of_folds[self.begun.fold :]:
            own = self._train(number)[0].outputs()
            self.outputs |= {f"{OUTPUTS}{name}.{number}": tensor for name, tensor in own.items()}
            self._keep(number + 1, 0)
        parts: list[Scored] = []
        if of_folds:
            left = [_numbered(self.outputs, number) for number in of_folds]
            parts.append(self.task.score_fold_models(self.config, left, self.device))
        trainer, last = self._train(whole)
        parts.append(last if last.metrics else trainer.judge())
        found, of_units, of_pairs = joined(parts)
        metrics = metric_names.all_on_test(found) | self._retention(trainer)
        return trainer, Scored(metrics | _damaged(self.config, self.dataset), of_units, of_pairs)

    def _retention(self, trainer: Trainer) -> dict[str, float]:
        """Scores on the test items of the retention data; empty where the trial has none."""
        dataset = self.task.retention(self.config)
        if dataset is None:
            return {}
        _agree_on(dataset)
        try:
            return metric_names.all_on_retention(trainer.score_elsewhere(dataset))
        except TrialFailed as error:
            raise TrialFailed(f"protocol.retention: {error}") from None

    def _train(self, number: int) -> tuple[Trainer, Scored]:
        """The trainer of a share after all its epochs, or those that are left, and its scores after the last one.

        There are no scores where none was due, or where nothing was left to train.
        """
        trainer = self.task.fit(self.config, self.shares[number], self.device)
        start = self.begun.epoch if number == self.begun.fold else 0
        if start:
            trainer.restore(self.begun.tensors, start)
        scored = Scored({})
        for epoch in range(start, self.num_epochs):
            metrics = trainer.train_epoch(epoch)
            if self.is_judged:
                is_last = epoch + 1 == self.num_epochs
                scored = trainer.judge() if is_last else Scored(trainer.score())
                metrics = mean(self._scores_now(number, epoch, trainer, scored.metrics)) | metrics
            self.reports.make(self._step(number, epoch + 1), metrics)
            # What is left of a share after its last epoch is kept when it is known; of a verdict's model that is all.
            if epoch + 1 < self.num_epochs or (self.is_verdict and number + 1 == len(self.shares)):
                self._keep(number, epoch + 1, trainer)
        return trainer, scored

    def _step(self, number: int, epoch: int) -> int:
        """The epochs of all shares up to ``epoch`` of one."""
        return number * self.num_epochs + epoch

    def _scores_now(
        self, number: int, epoch: int, trainer: Trainer, scores: dict[str, float]
    ) -> list[dict[str, float]]:
        """Scores of the finished folds and, after an epoch, of this one; at the very end by the share they choose."""
        every = [*self.finished, scores]
        if self.is_verdict or epoch + 1 < self.num_epochs:
            return every
        self.of_shares.append(trainer.score_shares(scores))
        return self._settled(every) if number + 1 == len(self.shares) else every

    def _keep(self, number: int, epoch: int, trainer: Trainer | None = None) -> None:
        """Offer the state after ``epoch`` epochs of a share to the checkpoint.

        Raises TrialPaused where the trial is to pause there.
        """
        is_last = number == len(self.shares) or (
            self.is_verdict and number + 1 == len(self.shares) and epoch == self.num_epochs
        )
        is_pause = self._step(number, epoch) == self.pause_after

        def tensors() -> dict[str, Tensor]:
            return self.outputs | (trainer.state() if trainer else {})

        of_shares = self.of_shares if any(self.of_shares) else ()
        self.kept.offer(
            number,
            epoch,
            self.finished,
            tensors,
            self.reports.made,
            of_shares=of_shares,
            of_folds=self.of_folds,
            is_required=is_last or is_pause,
            is_shared=trainer is not None and trainer.has_shared_state,
        )
        if is_pause:
            raise TrialPaused

    def _provenance(self) -> dict[str, Any]:
        """The provenance of a saved model, the same for every task."""
        config, dataset, device = self.config, self.dataset, self.device
        return {
            "family": config.family,
            "trained_on": dataset.name,
            "development_fingerprint": dataset.development_fingerprint,
            "test_fingerprint": dataset.test_fingerprint,
            "num_shared_images": dataset.num_shared_images,
            "workers": distributed.world_size(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "config": config.model_dump(mode="json"),
        }


def _numbered(outputs: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Of all outputs those of one fold model, by their own names."""
    end = f".{number}"
    return {
        name.removeprefix(OUTPUTS).removesuffix(end): tensor
        for name, tensor in outputs.items()
        if name.endswith(end)
    }


def _agree_on(dataset: TrialData) -> None:
    """Raise TrialFailed, on every rank, where ranks have left out different damaged pictures."""
    if distributed.world_size() == 1 or not isinstance(dataset, ZeroShotData):
        return
    own = hashlib.sha256(repr(dataset.damaged).encode()).digest()[:8]
    seen_W2 = torch.tensor([[int.from_bytes(own, "little", signed=True), dataset.num_damaged]])
    digest_W, num_damaged_W = distributed.gather_rows(seen_W2).T.tolist()
    if len(set(digest_W)) > 1:
        raise TrialFailed(
            f"workers see different data: {', '.join(map(str, num_damaged_W))} pictures cannot be decoded on ranks 0 to"
            f" {len(num_damaged_W) - 1}; give all nodes the same files"
        )


def _damaged(config: TrialConfig, dataset: TrialData) -> dict[str, float]:
    """The number of pictures left out, where any may be."""
    if config.data.on_corrupt != "skip" or not isinstance(dataset, ZeroShotData):
        return {}
    return {"num_damaged_images": float(dataset.num_damaged)}


class _Reports:
    """A trial's reports; those made before an interruption are repeated at once."""

    def __init__(self, report: Report, earlier: Sequence[TrialReport]) -> None:
        self._report = report
        self.made: list[TrialReport] = []
        for each in earlier:
            self.make(each.step, each.metrics)

    def make(self, step: int, metrics: dict[str, float]) -> None:
        self.made.append(TrialReport(step=step, metrics=metrics))
        self._report(self.made[-1])
