"""An embedder in training: its epochs on every rank, its embeddings and scores, and its state between epochs.

Shapes: N images, H height, W width, C channels, D embedding size.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlstudy import distributed, embedders
from dmlstudy.data import Features, ImageSet, LabelledImages, Loader, ZeroShotData
from dmlstudy.data.images import Indices, Inputs
from dmlstudy.data.loader import ahead
from dmlstudy.embedders import Embedder
from dmlstudy.embedders.adapters import merged
from dmlstudy.heartbeat import beat
from dmlstudy.losses.interface import Labels
from dmlstudy.losses.plan import BatchPlan
from dmlstudy.metric_names import IMAGES_PER_SECOND, TRAIN_LOSS
from dmlstudy.records import TrialConfig
from dmlstudy.training import assembly, canvases, dataset_cache, feature_cache, started, trainer_state
from dmlstudy.training.averaging import MovingAverage, StartWeights
from dmlstudy.training.class_shards import ClassShards
from dmlstudy.training.gradients import Gradients, MeanLoss, gradients_of
from dmlstudy.training.interface import Trainer, TrialFailed, derived_seed
from dmlstudy.training.optimization import Norms, Optimization
from dmlstudy.training.retrieval_scores import Embedded, retrieval_scores
from dmlstudy.training.scores import Scored, joined
from dmlstudy.training.shares import shares_of
from dmlstudy.training.short_vectors import short_vector_scores

EMBEDDED = 256
"""Images that are read and embedded at once."""


class HeldOut(NamedTuple):
    """Images that an embedder is judged on; each is query and gallery item, or as told."""

    images: LabelledImages
    query: Indices | None = None
    gallery: Indices | None = None
    camera_N: Indices | None = None
    """Of each image, -1 where it is unknown; None: cameras do not matter."""


class EmbedderTrainer(Trainer):
    """An embedder in training on one set of classes, judged on ``held_out`` ones."""

    def __init__(
        self,
        config: TrialConfig,
        train: LabelledImages,
        device: torch.device,
        *,
        stream: int,
        held_out: HeldOut | None = None,
        sides: feature_cache.WholeSides | None = None,
    ) -> None:
        self.config, self.device, self.held_out = config, device, held_out
        self.images = train
        self.seed = derived_seed(config.seed, stream)
        present, labels_N, sizes = np.unique(train.labels_N, return_inverse=True, return_counts=True)
        self.labels_N = labels_N.astype(np.int64)
        training = config.training
        assembly.check(config, train)
        self.embedder = assembly.make_embedder(config, train.image_shape, self.seed, device)
        self.loader = assembly.make_loader(config, self.embedder, train, sides, self.seed, device)
        self._embedding: tuple[LabelledImages, Loader] | None = None
        """The images that were embedded last, and what reads them."""
        loss = assembly.make_loss(config, sizes.tolist(), self.seed, device)
        self.batches = assembly.make_batches(config.batch, self.labels_N, len(present), self.seed)
        memory = assembly.make_memory(config, device)
        self.features = feature_cache.of_trainer(config, self.embedder, device, sides)
        has_features = self.features is not None
        self.module = assembly.make_step(config, self.embedder, loss, memory, has_features=has_features)
        self.optimization = Optimization(training, self.embedder, loss, len(self.batches), device)
        self.optimizer = self.optimization.optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self.is_frozen = training.freeze_backbone_epochs > 0
        self._wrap()
        # After wrapping, which makes all ranks begin with the same weights.
        self.average = MovingAverage(self.embedder, training.ema_decay) if training.ema_decay else None
        self.shares = shares_of(training.wise_ft)
        self.share = self.shares[-1]
        """The share of the trained weights in what is scored now."""
        self.start = StartWeights(merged(self.embedder)) if self.shares[0] < 1 else None
        named = {"embedder": self.embedder, "loss": loss, "memory": memory, "average": self.average}
        self.parts = {name: part for name, part in named.items() if part is not None}
        self.class_shards = ClassShards(self.parts, self.optimizer)
        self.num_epochs = 0

    @property
    def has_shared_state(self) -> bool:
        """True where ranks have shares of class vectors."""
        return bool(self.class_shards.shares)

    def _wrap(self) -> None:
        """Gradients of what is trained now: data parallel wants one of every parameter it has seen to want one."""
        self.gradients: Gradients | None = None  # the one before lets go of the parameters first
        self.optimization.unfrozen.require(is_frozen=self.is_frozen)
        self.gradients = gradients_of(self.module, self.config.batch.chunk)

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """One pass of PK batches; the mean loss and the images per second over all ranks."""
        if self.config.training.epochs == 0:
            return {}
        self.num_epochs = epoch + 1
        self.embedder.train()
        is_frozen = epoch < self.config.training.freeze_backbone_epochs
        if is_frozen != self.is_frozen:
            self.is_frozen = is_frozen
            self._wrap()
        self.optimization.unfrozen.rest()
        if is_frozen:
            self.embedder.backbone.eval()
        assert self.gradients is not None
        losses: list[float] = []
        launched: _Launched | None = None
        num_images = 0
        started = time.perf_counter()
        for number, plan, read_NHWC in self._read_batches(epoch):
            self.optimization.start_step(epoch * len(self.batches) + number)
            self.optimizer.zero_grad(set_to_none=True)
            try:
                mean = self.gradients(torch.from_numpy(read_NHWC), self._labels(plan), self.scaler.scale)
            except ValueError as error:
                if launched is not None:
                    launched.read()  # where it has failed, the weights of this batch were not to be
                if distributed.world_size() > 1 and not isinstance(error, distributed.Refused):
                    raise  # other ranks may know nothing of it, and wait for this one
                raise _failed(epoch, number, error) from None
            norms = self.optimization.step(self.scaler)
            if self.average is not None:
                self.average.update(self.embedder)
            if launched is not None:
                losses.append(launched.read())
            launched = _Launched(epoch, number, mean, norms)
            num_images += len(plan.references.y_N)
            beat()
        if launched is not None:
            losses.append(launched.read())
        elapsed = time.perf_counter() - started
        metrics = {TRAIN_LOSS: statistics.fmean(losses), IMAGES_PER_SECOND: num_images / elapsed}
        weights = self.module.loss.layer_weights
        if weights is not None:
            metrics |= {f"layer_weight_{layer}": alpha for layer, alpha in enumerate(weights.tolist())}
        if self.loader is not None and self.features is None:
            rate, waited = self.loader.rates
            metrics["loader_images_per_second"] = rate * distributed.world_size()
            metrics["loader_wait_share"] = waited / elapsed
        return metrics

    def _labels(self, plan: BatchPlan) -> distributed.GlobalLabels:
        labels = plan.references
        return distributed.GlobalLabels(labels, distributed.share_sizes(len(labels.y_N)), self.device, plan)

    def _planned(self, batch: Indices) -> BatchPlan:
        """Labels of a global batch, its indices as ids, and what follows from them."""
        labels = Labels(torch.from_numpy(self.labels_N[batch]), torch.from_numpy(batch.astype(np.int64)))
        return BatchPlan(labels.rows(distributed.own_slice(len(batch))), labels).whole()

    def _read_batches(self, epoch: int) -> Iterator[tuple[int, BatchPlan, Inputs]]:
        """Number, plan, and the images of this rank's share, of each batch of an epoch.

        Plans are made by a thread of their own, while earlier batches are trained on. A step of kept features is too
        short for that on the CPU: a thread's start, once an epoch, costs more than the plans.
        """
        to_plan, again = itertools.tee(self.batches.epoch(epoch))
        if self.features is not None and self.device.type == "cpu":
            yield from self._read_planned(map(self._planned, to_plan), again, epoch)
            return
        with closing(ahead(self._planned, to_plan)) as plans:
            yield from self._read_planned(plans, again, epoch)

    def _read_planned(
        self, plans: Iterator[BatchPlan], again: Iterator[Indices], epoch: int
    ) -> Iterator[tuple[int, BatchPlan, Inputs]]:
        shares = (batch[distributed.own_slice(len(batch))] for batch in again)
        if self.features is not None:
            features_NF = self.features.in_training(epoch)
            for number, (plan, local) in enumerate(zip(plans, shares, strict=True)):
                yield number, plan, features_NF.read(local)
            return
        if self.loader is None:
            for number, (plan, local) in enumerate(zip(plans, shares, strict=True)):
                yield number, plan, self.images.read(local)
            return
        to_read, taken = itertools.tee(shares)
        read = self.loader.epoch(to_read, feature_cache.view_of(self.config.training, epoch))
        for number, (plan, local) in enumerate(zip(plans, taken, strict=True)):
            read_NHWC, error = _next(read)
            if distributed.any_rank(error is not None):
                raise _unreadable(self.images, local, error, epoch)
            yield number, plan, read_NHWC

    def embed(self, images: LabelledImages, *, structure: bool = False) -> Embedded:
        """Embeddings of the images, found in shares by the ranks; all of them on each rank.

        With ``structure``, which needs a structure head, structure embeddings too.
        """
        self._agree_on_statistics()
        embedder = self.kept()
        share = distributed.own_slice(len(images.labels_N))
        if self.features is not None and self.held_out is not None and images is self.held_out.images:
            local_NE = self.features.embedded_held_out(embedder, share, structure=structure)
        else:
            local_NE = self._read_and_embed(embedder, images, np.arange(len(images))[share], structure)
        both_NE: NDArray[np.float32] = (
            distributed.gather_rows(torch.from_numpy(local_NE).to(self.device)).cpu().numpy()
        )
        if not np.isfinite(both_NE).all():
            raise TrialFailed(f"embeddings are not finite after epoch {self.num_epochs}")
        dim = self.config.embedder.size
        z_ND = np.ascontiguousarray(both_NE[:, :dim])
        return Embedded(z_ND, np.ascontiguousarray(both_NE[:, dim:]) if structure else None)

    def kept(self) -> Embedder:
        """The embedder that is scored and saved: the trained one, or an average in its place; adapters merged."""
        embedder = merged(self.embedder if self.average is None else self.average.embedder)
        return embedder if self.start is None else self.start.mixed(embedder, self.share)

    def _read_and_embed(
        self, embedder: Embedder, images: LabelledImages, indices: Indices, structure: bool
    ) -> NDArray[np.float32]:
        pieces = [indices[start : start + EMBEDDED] for start in range(0, len(indices), EMBEDDED)]
        if isinstance(images, ImageSet | Features):
            return self._columns(embedder, map(images.read, pieces), len(indices), structure)
        canvases.prepare(images, self.config.data)
        if self._embedding is None or self._embedding[0] is not images:
            self._embedding = images, Loader(images)
        read = _UntilUnreadable(self._embedding[1].epoch(pieces), pieces)
        local_NE = self._columns(embedder, read, len(indices), structure)
        if distributed.any_rank(read.error is not None):
            raise _unreadable(images, read.piece, read.error, self.num_epochs - 1)
        return local_NE

    def _columns(
        self, embedder: Embedder, batches: Iterable[Inputs], num_images: int, structure: bool
    ) -> NDArray[np.float32]:
        """z_ND and, if wished for, omega_ND to its right."""
        z_ND, omega_ND = embedders.embed_batches(embedder, batches, num_images, self.device)
        if not structure:
            return z_ND
        assert omega_ND is not None
        return np.concatenate([z_ND, omega_ND], axis=1)

    def score(self) -> dict[str, float]:
        """Metrics of retrieval among the held-out images; each rank ranks a share of the queries."""
        embedded, (images, query, gallery, camera_N) = self._embed_held_out()
        rest = images.labels_N, query, gallery, self.config
        return retrieval_scores(embedded, *rest, camera_N=camera_N, device=self.device).metrics

    def judge(self) -> Scored:
        """The same, with sums by class."""
        embedded, (images, query, gallery, camera_N) = self._embed_held_out()
        rest = images.labels_N, query, gallery, self.config
        short = short_vector_scores(embedded.z_ND, *rest, camera_N=camera_N, device=self.device)
        whole = retrieval_scores(embedded, *rest, camera_N=camera_N, device=self.device, by_class=True)
        return joined([whole, short])

    def score_elsewhere(self, dataset: ZeroShotData) -> dict[str, float]:
        """The same among the test images of other data."""
        if self.config.retention is not None:
            canvases.prepare(dataset.test, self.config.retention)
        embedded = self._embed_to_judge(dataset.test)
        rest = dataset.test.labels_N, dataset.test_query, dataset.test_gallery
        camera_N = dataset.test_camera_N
        return retrieval_scores(embedded, *rest, self.config, camera_N=camera_N, device=self.device).metrics

    def score_shares(self, scores: dict[str, float]) -> list[dict[str, float]]:
        """Metrics with each share of the trained weights, the largest's being ``scores``; none where there is one."""
        *others, largest = self.shares
        found = []
        for self.share in others:
            found.append(self.score())
            beat()
        self.share = largest
        return [*found, scores] if others else []

    def outputs(self) -> dict[str, Tensor]:
        """Embeddings of the held-out images."""
        return self._embed_held_out()[0].tensors()

    def _embed_held_out(self) -> tuple[Embedded, HeldOut]:
        assert self.held_out is not None
        return self._embed_to_judge(self.held_out.images), self.held_out

    def _embed_to_judge(self, images: LabelledImages) -> Embedded:
        return self.embed(images, structure=self.embedder.structure_head is not None)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the embedder, and what it makes of some held-out images."""
        assert self.held_out is not None
        images = self.held_out.images
        example_NHWC = images.read(np.arange(min(dataset_cache.NUM_EXAMPLES, len(images))))
        fit = dataset_cache.fit_of(self.config.data)
        about = {**provenance, **started.notes(self.config, self.embedder, self.images)}
        embedders.save(self.kept(), folder, about, example_NHWC, fit=fit)

    def state(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name; the tensors themselves, not copies, where they are whole."""
        state = self.class_shards.gathered(trainer_state.state_of(self.parts, self.optimizer))
        state |= {f"scaler.{name}": torch.tensor(value) for name, value in self.scaler.state_dict().items()}
        return state

    def restore(self, state: Mapping[str, Tensor], num_epochs: int) -> None:
        """Take over the ``state`` of a trainer of the same configuration after that many epochs.

        Raises ValueError if its tensors are not this trainer's.
        """
        trainer_state.restore(self.parts, self.optimizer, self.class_shards.cut(state))
        scaler = {name.partition(".")[2]: v.item() for name, v in state.items() if name.startswith("scaler.")}
        if scaler:
            self.scaler.load_state_dict(scaler)
        self.num_epochs = num_epochs

    def _agree_on_statistics(self) -> None:
        """Rank 0's batch statistics on every rank, as in the next step, and as they are kept and saved."""
        if distributed.world_size() == 1 or self.config.embedder.freeze_bn:
            return
        with torch.no_grad():
            for buffer in self.embedder.buffers():
                own = buffer if distributed.rank() == 0 else torch.zeros_like(buffer)
                buffer.copy_(distributed.sum_over_ranks(own))
        if self.average is not None:
            self.average.take_over_buffers(self.embedder)


class _Launched(NamedTuple):
    """A step that a device may still be busy with, while the host launches the next one."""

    epoch: int
    number: int
    mean: MeanLoss
    norms: Norms

    def read(self) -> float:
        """The mean loss. Raises TrialFailed, which names the batch, on every rank alike."""
        try:
            mean = self.mean.read()
            self.norms.check()
        except (ValueError, TrialFailed) as error:
            raise _failed(self.epoch, self.number, error) from None
        return mean


def _failed(epoch: int, number: int, error: Exception) -> TrialFailed:
    return TrialFailed(f"epoch {epoch + 1}, batch {number + 1}: {error}")


def _next(read: Iterator[Inputs]) -> tuple[Inputs, ValueError | None]:
    """The next images, or why they cannot be read."""
    try:
        return next(read), None
    except ValueError as error:
        return np.empty((0, 0, 0, 0), np.uint8), error


class _UntilUnreadable:
    """The images of some pieces, up to the first that cannot be read, and why that one cannot."""

    def __init__(self, read: Iterator[Inputs], pieces: Sequence[Indices]) -> None:
        self._read, self._pieces = read, pieces
        self.piece = np.arange(0)
        self.error: ValueError | None = None

    def __iter__(self) -> Iterator[Inputs]:
        for piece in self._pieces:
            self.piece = piece
            images_NHWC, self.error = _next(self._read)
            if self.error is not None:
                return
            yield images_NHWC


def _unreadable(
    images: LabelledImages, indices: Indices, error: ValueError | None, epoch: int
) -> TrialFailed:
    """The same failure on every rank, where any rank has an ``error`` with its ``indices``; all must call this.

    Each rank reads again what some could not, so that each can say what is wrong with it.
    """
    lost = indices if error is not None else indices[:0]
    all_lost = distributed.gather_rows(torch.from_numpy(lost.astype(np.int64))).numpy()
    try:
        images.read(all_lost)
    except ValueError as found:
        return TrialFailed(f"epoch {max(epoch, 0) + 1}: {found}")
    return TrialFailed(
        f"epoch {max(epoch, 0) + 1}: a picture was not readable on some rank, but is on others"
    )
