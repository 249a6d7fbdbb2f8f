"""The training step of one rank: images in, embeddings beside those of all ranks, the sum of its loss terms out.

Shapes: N images, H height, W width, C channels, L layers of the head, F features, D embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy import distributed
from dmlstudy.distributed import GlobalLabels
from dmlstudy.embedders.precision import PRECISIONS
from dmlstudy.embedders.structure import RunningInput
from dmlstudy.losses.distances import full_precision
from dmlstudy.losses.fused import fuse
from dmlstudy.losses.interface import Embeddings, Loss, World
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.losses.structure import mean_distance

Embed: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class Encoder(Protocol):
    """The model that a step trains: unit embeddings of images and, from a structure head, weights of dimensions."""

    @property
    def backbone(self) -> nn.Module: ...

    @property
    def has_layers(self) -> bool: ...

    def embed_with_structure(
        self, images_NHWC: Tensor, *, is_unit: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...

    def features(self, images_NHWC: Tensor) -> Tensor: ...

    def embed_features(
        self, features_NF: Tensor, *, is_unit: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...

    def weigh_layers(self, alpha_L: Tensor) -> None: ...


class Compared(NamedTuple):
    """A rank's sum of loss terms, on the graph, their number, and its embeddings that are not finite.

    ``unsound_2`` has the number of such rows and the first of them, in float64.
    """

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    unsound_2: Tensor


class Step(nn.Module):
    """Images of this rank to the sum of its loss terms: embed, gather the global batch, compare.

    The embedder, a module, runs in ``precision`` (autocast), compiled if so wished; embeddings and losses are float32.
    On a GPU a loss's tiles are compiled too.

    With ``is_rescaled`` the loss is given embeddings over the mean distance of two different rows of the global batch,
    with gradient through that mean: embeddings off the sphere have no scale of their own.

    Where the loss looks at norms, embeddings are normalised in ``compare`` and not before: one tensor then carries
    direction and norm through the step, and through its chunks. Where it looks at distances from the ``start``, a
    frozen copy of the embedder before training, these are one more column of that tensor.

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
        is_rescaled: bool = False,
        start: Encoder | None = None,
        gather: Callable[[Embeddings], Embeddings] | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.embedder = embedder
        self.gather, self.world = gather, world
        self.is_rescaled = is_rescaled
        self.loss = loss
        self.dtype = PRECISIONS[precision]
        self.embed: Embed = embedder.embed_with_structure
        if loss.uses_norms:
            self.embed = partial(embedder.embed_with_structure, is_unit=False)
        self.start = None if start is None else Frozen(start)
        if loss.retains:
            assert start is not None
            self.embed = self._embed_beside_start
        self.find_features: Callable[[Tensor], Tensor] = embedder.features
        if is_compiled:
            self.embed, self.find_features = _compiled(self.embed, self.find_features)
            fuse(loss)
        # In a tuple, data parallel does not see it: it is the same on all ranks and need not be sent to them.
        self.memory = (memory,)
        self.running = [module for module in self.modules() if isinstance(module, RunningInput)]
        """Inputs of heads whose statistics follow the batches."""
        self.has_begun = not self.running

    def forward(self, images_NHWC: Tensor, labels: GlobalLabels) -> Compared:
        compared = self.compare(self.encode(images_NHWC), labels)
        self.weigh_layers()
        return compared

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
            return self._beside_start(features_NF, features_NF.detach())

    def _embed_beside_start(self, images_NHWC: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.start is not None
        with torch.no_grad():
            start_NF = self.start.encoder.features(images_NHWC)
        return self._beside_start(self.embedder.features(images_NHWC), start_NF)

    def _beside_start(self, features_NF: Tensor, start_NF: Tensor) -> tuple[Tensor, Tensor | None]:
        """The embedder's output of features, with a column of distances where the loss looks at them.

        ``start_NF`` are the start's features of the same images: the same ones where the backbone is never trained.
        """
        z_ND, omega_ND = self.embedder.embed_features(features_NF, is_unit=not self.loss.uses_norms)
        if not self.loss.retains:
            return z_ND, omega_ND
        assert self.start is not None
        if self.loss.retains == "features":
            drift_N = squared_distance(features_NF, start_NF)
        else:
            with torch.no_grad():
                start_ND, _ = self.start.encoder.embed_features(start_NF)
            drift_N = squared_distance(z_ND, start_ND)
        return torch.cat([z_ND, drift_N[:, None].to(z_ND.dtype)], dim=1), omega_ND

    def compare(self, encoded: tuple[Tensor, Tensor | None], labels: GlobalLabels) -> Compared:
        """The loss of this rank's embeddings beside those of all ranks, and of the memory, which takes them in."""
        anchors = labels.of_own(*encoded)
        if self.loss.retains:
            anchors = anchors._replace(z_ND=anchors.z_ND[:, :-1], drift_N=anchors.z_ND[:, -1])
        if self.loss.uses_norms:
            anchors = anchors.with_norms()
        anchors, unsound_2 = made_finite(anchors)
        references = (self.gather or labels.gathered)(anchors)
        if self.is_rescaled:
            scale = mean_distance(references.z_ND, self.world or distributed.world())
            anchors, references = (each._replace(z_ND=each.z_ND / scale) for each in (anchors, references))
        (memory,) = self.memory
        if memory is not None:
            references = memory.references(references)
        return Compared(*self.loss(anchors, references, self.world or distributed.world()), unsound_2)

    def begin(self, chunks: Iterable[Tensor]) -> None:
        """Give heads the statistics of the first batch before it is trained on; later batches are left alone.

        Every rank must call this, with its share of the images.
        """
        if self.has_begun:
            return
        if not all(each.num_batches for each in self.running):  # a resumed or saved one has them
            with torch.no_grad():
                for images in chunks:
                    with self._precision(images):
                        self.embedder.embed_with_structure(images)
            self.renew()
        self.has_begun = True

    def renew(self) -> None:
        """Take the batch that was trained on into the statistics of heads' inputs; every rank must call this."""
        for each in self.running:
            each.renew(self.world or distributed.world())

    def weigh_layers(self) -> None:
        """Hand the weights of layers that the loss has found on to the embedder, for the next batch."""
        layer_weights = self.loss.layer_weights
        if layer_weights is not None and self.embedder.has_layers:
            self.embedder.weigh_layers(layer_weights)

    def _precision(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not torch.float32)


class Frozen(nn.Module):
    """An encoder as it is, always in eval mode, that nothing trains."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stay in eval mode."""
        super().train(False)
        return self


def made_finite(batch: Embeddings) -> tuple[Embeddings, Tensor]:
    """The batch with zeros for rows that are not finite, and the number of these rows and the first of them, (2,).

    A device is not waited for, so the step goes on: a loss has then sound rows to sort, draw and count, and whoever
    reads the numbers ends the training.
    """
    unsound_N = ~batch.finite_N
    if batch.norm_N is not None:
        batch = batch._replace(norm_N=batch.norm_N.masked_fill(unsound_N, 0))
    batch = batch._replace(z_ND=batch.z_ND.masked_fill(unsound_N[:, None], 0))
    if not len(unsound_N):
        return batch, unsound_N.new_zeros(2, dtype=torch.float64)
    return batch, torch.stack([unsound_N.sum(), unsound_N.to(torch.uint8).argmax()]).double()


def squared_distance(a_NF: Tensor, b_NF: Tensor) -> Tensor:
    """||a / |a| - b / |b| ||^2 of each row, (N,), in float32 at least."""
    a_NF, b_NF = full_precision(a_NF, b_NF)
    return (functional.normalize(a_NF, dim=1) - functional.normalize(b_NF, dim=1)).square().sum(1)


def _compiled(
    embed: Embed, find_features: Callable[[Tensor], Tensor]
) -> tuple[Embed, Callable[[Tensor], Tensor]]:
    """The functions, each to be compiled at its first batch.

    PyTorch compiles one function for 8 architectures in a process and runs it as it is for all further ones. So what
    it compiled before, which this process needs no more, is forgotten; its cache on disk is not.
    """
    torch.compiler.reset()
    return torch.compile(embed), torch.compile(find_features)
