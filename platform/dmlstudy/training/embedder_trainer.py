"""An embedder in training: its batches, its step on every rank, its embeddings, and its state between epochs.

Shapes: N images, H height, W width, C channels, D embedding size.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmlstudy import data, distributed, embedders
from dmlstudy.data import Batches, Features, ImageSet, LabelledImages, Loader, PKBatches
from dmlstudy.data.images import Indices, Inputs, Labels
from dmlstudy.embedders import Embedder
from dmlstudy.embedders.recomputation import recompute_blocks
from dmlstudy.heartbeat import beat
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.metric_names import IMAGES_PER_SECOND, TRAIN_LOSS
from dmlstudy.records import BatchConfig, LossConfig, TrialConfig, draw_mismatch
from dmlstudy.training import canvases, dataset_cache, feature_cache, started, trainer_state
from dmlstudy.training.averaging import MovingAverage, StartWeights
from dmlstudy.training.gradients import Gradients, gradients_of
from dmlstudy.training.interface import Trainer, TrialFailed, derived_seed
from dmlstudy.training.optimization import Optimization
from dmlstudy.training.recipe import check_chunk_and_share, check_draw, check_recipe
from dmlstudy.training.retrieval_scores import Embedded, retrieval_scores
from dmlstudy.training.shares import shares_of

EMBEDDED = 256
"""Images that are read and embedded at once where they are not in memory."""

Embed = Callable[[Tensor], tuple[Tensor, Tensor | None]]

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Encoder(Protocol):
    """The model that a step trains: unit embeddings of images and, from a structure head, weights of dimensions."""

    @property
    def backbone(self) -> nn.Module: ...

    @property
    def has_layers(self) -> bool: ...

    def embed_with_structure(self, images_NHWC: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def features(self, images_NHWC: Tensor) -> Tensor: ...

    def embed_features(self, features_NF: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def weigh_layers(self, alpha_L: Tensor) -> None: ...


class Step(nn.Module):
    """Images of this rank to the sum of its loss terms: embed, gather the global batch, compare.

    The embedder, a module, runs in ``precision`` (autocast), compiled if so wished; embeddings and losses are float32.
    ``gather`` and ``world`` are those of the process group, unless given.
    """

    def __init__(
        self,
        embedder: Encoder,
        loss: Loss,
        memory: CrossBatchMemory | None,
        precision: str = "float32",
        is_compiled: bool = False,
        *,
        gather: Callable[[Embeddings], Embeddings] | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.embedder = embedder
        self.gather, self.world = gather, world
        self.loss = loss
        self.dtype = PRECISIONS[precision]
        self.embed: Embed = embedder.embed_with_structure
        self.find_features: Callable[[Tensor], Tensor] = embedder.features
        if is_compiled:
            self.embed, self.find_features = _compiled(self.embed, self.find_features)
        # In a tuple, data parallel does not see it: it is the same on all ranks and need not be sent to them.
        self.memory = (memory,)

    def forward(self, images_NHWC: Tensor, y_N: Tensor, id_N: Tensor) -> tuple[Tensor, Tensor]:
        z_ND, structure_ND = self.encode(images_NHWC)
        total, count = self.compare(Embeddings(z_ND, y_N, id_N, structure_ND))
        self.weigh_layers()
        return total, count

    def encode(self, images_NHWC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embeddings of images and, from a structure head, their structure embeddings."""
        with self._precision(images_NHWC):
            return self.embed(images_NHWC)

    def features(self, images_NHWC: Tensor) -> Tensor:
        """The backbone's features of images, in the step's precision."""
        with self._precision(images_NHWC):
            return self.find_features(images_NHWC)

    def embed_features(self, features_NF: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output of ``encode``, from the backbone's features."""
        with self._precision(features_NF):
            return self.embedder.embed_features(features_NF)

    def compare(self, anchors: Embeddings) -> LossSum:
        """The loss of this rank's embeddings beside those of all ranks, and of the memory, which takes them in."""
        references = (self.gather or distributed.gather)(anchors)
        (memory,) = self.memory
        if memory is not None:
            references = memory.references(references)
        return self.loss(anchors, references, self.world or distributed.world())

    def weigh_layers(self) -> None:
        """Hand the weights of layers that the loss has found on to the embedder, for the next batch."""
        layer_weights = self.loss.layer_weights
        if layer_weights is not None and self.embedder.has_layers:
            self.embedder.weigh_layers(layer_weights)

    def _precision(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not torch.float32)


def _compiled(
    embed: Embed, find_features: Callable[[Tensor], Tensor]
) -> tuple[Embed, Callable[[Tensor], Tensor]]:
    """The functions, each to be compiled at its first batch.

    PyTorch compiles one function for 8 architectures in a process and runs it as it is for all further ones. So what
    it compiled before, which this process needs no more, is forgotten; its cache on disk is not.
    """
    torch.compiler.reset()
    return torch.compile(embed), torch.compile(find_features)


class HeldOut(NamedTuple):
    """Images that an embedder is judged on; each is query and gallery item, or as told."""

    images: LabelledImages
    query: Indices | None = None
    gallery: Indices | None = None


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
        self.config = config
        self.device = device
        self.held_out = held_out
        self.seed = derived_seed(config.seed, stream)
        present, labels_N = np.unique(train.labels_N, return_inverse=True)
        self.images = train
        self.labels_N = labels_N.astype(np.int64)
        *height_width, channels = train.image_shape
        augmentation = data.Augmentation(**config.augmentation.model_dump())
        data.check_augmentation(augmentation, config.data.image_size, config.data.resize_to)
        data.check_channels(augmentation, channels)
        canvases.prepare(train, config.data)
        regularizer = config.regularizer
        if problem := draw_mismatch(config.batch, regularizer):
            raise ValueError(problem)
        check_recipe(config.training)
        check_chunk_and_share(config)
        self.embedder = embedders.build(
            config.embedder.backbone,
            config.embedder.dim,
            width=config.embedder.width,
            weights=started.weights_of(config),
            freeze_bn=config.embedder.freeze_bn,
            in_channels=channels,
            image_size=tuple(height_width),
            structure=_structure_head(regularizer),
            fusion=config.embedder.fusion,
            pooling=config.embedder.pooling,
            head_norm=config.embedder.head_norm,
            code=config.embedder.code,
            head_depth=config.embedder.head_depth,
            head_width=config.embedder.head_width,
            seed=self.seed,
            make_backbone=feature_cache.backbone_maker(config),
        ).to(device)
        started.check(config, self.embedder)
        fill = data.fill_for(self.embedder.mean_C.tolist(), channels)
        # Images that are in memory as they are trained on need no reading ahead.
        self.loader = (
            None
            if isinstance(train, Features) or (isinstance(train, ImageSet) and augmentation.is_off)
            else feature_cache.loader(
                config,
                sides,
                train,
                replace(augmentation, fill=fill),
                self.seed,
                empty=data.pinned if device.type == "cuda" else None,
            )
        )
        training = config.training
        if training.channels_last:
            self.embedder.backbone.to(memory_format=torch.channels_last)
        if training.checkpointing and not feature_cache.applies(config):
            recompute_blocks(self.embedder.backbone)
        batch = config.batch
        loss = catalogue.build(
            config.loss.name,
            config.loss.params,
            regularizer=(regularizer.name, regularizer.params) if regularizer else None,
            memory=batch.memory_size > 0,
            num_classes=len(present),
            dim=config.embedder.dim,
            num_layers=config.embedder.head_depth + 1,
            seed=self.seed,
        ).to(device)
        check_draw(batch, has_classes=catalogue.has_class_vectors(loss))
        self.batches = _batches(batch, self.labels_N, len(present), self.seed)
        memory = (
            CrossBatchMemory(batch.memory_size, config.embedder.dim, batch.memory_warmup).to(device)
            if batch.memory_size
            else None
        )
        self.parts = {"embedder": self.embedder, "loss": loss} | ({"memory": memory} if memory else {})
        self.features = feature_cache.of_trainer(config, self.embedder, device, sides)
        encoder = self.embedder if self.features is None else feature_cache.HeadOnly(self.embedder)
        is_compiled = training.compile and self.features is None
        self.module = Step(encoder, loss, memory, training.precision, is_compiled)
        self.optimization = Optimization(training, self.embedder, loss, len(self.batches), device)
        self.optimizer = self.optimization.optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self.is_frozen = training.freeze_backbone_epochs > 0
        self._wrap()
        # After wrapping, which makes all ranks begin with the same weights.
        self.average = MovingAverage(self.embedder, training.ema_decay) if training.ema_decay else None
        self.parts |= {"average": self.average} if self.average else {}
        self.shares = shares_of(training.wise_ft)
        self.share = self.shares[-1]
        """The share of the trained weights in what is scored now."""
        self.start = StartWeights(self.embedder) if self.shares[0] < 1 else None
        self.num_epochs = 0

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
        num_images = 0
        started = time.perf_counter()
        for number, batch, local, read_NHWC in self._read_batches(epoch):
            self.optimization.start_step(epoch * len(self.batches) + number)
            y_N = torch.from_numpy(self.labels_N[local]).to(self.device)
            id_N = torch.from_numpy(local.astype(np.int64)).to(self.device)
            self.optimizer.zero_grad(set_to_none=True)
            try:
                mean = self.gradients(torch.from_numpy(read_NHWC), y_N, id_N, self.scaler.scale)
            except ValueError as error:
                if distributed.world_size() > 1 and not isinstance(error, distributed.Refused):
                    raise  # other ranks may know nothing of it, and wait for this one
                raise TrialFailed(f"epoch {epoch + 1}, batch {number + 1}: {error}") from None
            try:
                self.optimization.step(self.scaler)
            except TrialFailed as error:
                raise TrialFailed(f"epoch {epoch + 1}, batch {number + 1}: {error}") from None
            if self.average is not None:
                self.average.update(self.embedder)
            losses.append(mean)
            num_images += len(batch)
            beat()
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

    def _read_batches(self, epoch: int) -> Iterator[tuple[int, Indices, Indices, Inputs]]:
        """Number, global indices, this rank's share of them and its images, of each batch of an epoch."""
        batches, again = itertools.tee(self.batches.epoch(epoch))
        shares = (batch[distributed.own_slice(len(batch))] for batch in again)
        if self.features is not None:
            features_NF = self.features.in_training(epoch)
            for number, (batch, local) in enumerate(zip(batches, shares, strict=True)):
                yield number, batch, local, features_NF.read(local)
            return
        if self.loader is None:
            for number, (batch, local) in enumerate(zip(batches, shares, strict=True)):
                yield number, batch, local, self.images.read(local)
            return
        to_read, taken = itertools.tee(shares)
        read = self.loader.epoch(to_read, feature_cache.view_of(self.config.training, epoch))
        for number, (batch, local) in enumerate(zip(batches, taken, strict=True)):
            read_NHWC, error = _next(read)
            if distributed.any_rank(error is not None):
                raise _unreadable(self.images, local, error, epoch)
            yield number, batch, local, read_NHWC

    def embed(self, images: LabelledImages, *, structure: bool = False) -> Embedded:
        """Embeddings of the images, found in shares by the ranks; all of them on each rank.

        With ``structure``, which needs a structure head, structure embeddings too.
        """
        self._agree_on_statistics()
        embedder = self.kept()
        share = distributed.own_slice(len(images.labels_N))
        if self.features is not None and self.held_out is not None and images is self.held_out.images:
            local_NE = self.features.embedded_held_out(embedder, share, structure=structure)
        elif isinstance(images, ImageSet | Features):
            local_NE = self._columns(embedder, images.read(np.arange(len(images))[share]), structure)
        else:
            local_NE = self._read_and_embed(embedder, images, np.arange(len(images))[share], structure)
        both_NE: NDArray[np.float32] = (
            distributed.gather_rows(torch.from_numpy(local_NE).to(self.device)).cpu().numpy()
        )
        if not np.isfinite(both_NE).all():
            raise TrialFailed(f"embeddings are not finite after epoch {self.num_epochs}")
        dim = self.config.embedder.dim
        z_ND = np.ascontiguousarray(both_NE[:, :dim])
        return Embedded(z_ND, np.ascontiguousarray(both_NE[:, dim:]) if structure else None)

    def kept(self) -> Embedder:
        """The embedder that is scored and saved: the trained one, or an average in its place."""
        embedder = self.embedder if self.average is None else self.average.embedder
        return embedder if self.start is None else self.start.mixed(embedder, self.share)

    def _read_and_embed(
        self, embedder: Embedder, images: LabelledImages, indices: Indices, structure: bool
    ) -> NDArray[np.float32]:
        canvases.prepare(images, self.config.data)
        pieces = [indices[start : start + EMBEDDED] for start in range(0, len(indices), EMBEDDED)]
        read = Loader(images).epoch(pieces)
        parts = [np.empty((0, self.config.embedder.dim * (1 + structure)), np.float32)]
        error = None
        for piece in pieces:
            read_NHWC, error = _next(read)
            if error is not None:
                indices = piece
                break
            parts.append(self._columns(embedder, read_NHWC, structure))
        if distributed.any_rank(error is not None):
            raise _unreadable(images, indices, error, self.num_epochs - 1)
        return np.concatenate(parts)

    def _columns(self, embedder: Embedder, images_NHWC: Inputs, structure: bool) -> NDArray[np.float32]:
        """z_ND and, if wished for, omega_ND to its right."""
        z_ND, omega_ND = embedders.embed_with_structure(embedder, images_NHWC, device=self.device)
        if not structure:
            return z_ND
        assert omega_ND is not None
        return np.concatenate([z_ND, omega_ND], axis=1)

    def score(self) -> dict[str, float]:
        """Metrics of retrieval among the held-out images, computed by rank 0 for all."""
        embedded, (images, query, gallery) = self._embed_held_out()
        return retrieval_scores(embedded, images.labels_N, query, gallery, self.config)

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
        has_structure = self.config.retrieval.rerank == "structure"
        return self.embed(self.held_out.images, structure=has_structure), self.held_out

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the embedder, and what it makes of some held-out images."""
        assert self.held_out is not None
        images = self.held_out.images
        example_NHWC = images.read(np.arange(min(dataset_cache.NUM_EXAMPLES, len(images))))
        fit = dataset_cache.fit_of(self.config.data)
        about = {**provenance, **started.notes(self.config, self.embedder, self.images)}
        embedders.save(self.kept(), folder, about, example_NHWC, fit=fit)

    def state(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name; the tensors themselves, not copies."""
        state = trainer_state.state_of(self.parts, self.optimizer)
        state |= {f"scaler.{name}": torch.tensor(value) for name, value in self.scaler.state_dict().items()}
        return state

    def restore(self, state: Mapping[str, Tensor], num_epochs: int) -> None:
        """Take over the ``state`` of a trainer of the same configuration after that many epochs.

        Raises ValueError if its tensors are not this trainer's.
        """
        trainer_state.restore(self.parts, self.optimizer, state)
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


def _next(read: Iterator[Inputs]) -> tuple[Inputs, ValueError | None]:
    """The next images, or why they cannot be read."""
    try:
        return next(read), None
    except ValueError as error:
        return np.empty((0, 0, 0, 0), np.uint8), error


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


def _batches(batch: BatchConfig, labels_N: Labels, num_classes: int, seed: int) -> Batches:
    classes = num_classes if batch.classes == "all" else batch.classes
    if batch.draw == "random":
        return data.RandomBatches(len(labels_N), classes * batch.images_per_class, batch.per_epoch, seed)
    if batch.draw == "two_draws":
        return data.TwoDraws(labels_N, classes, batch.images_per_class, batch.per_epoch, seed)
    return PKBatches(labels_N, classes, batch.images_per_class, batch.per_epoch, seed)


def _structure_head(regularizer: LossConfig | None) -> str:
    """The structure head a regulariser trains: its preset, or none."""
    if regularizer is None or regularizer.name != "structure":
        return "none"
    return str((catalogue.parameters_of("structure") | regularizer.params)["preset"])
