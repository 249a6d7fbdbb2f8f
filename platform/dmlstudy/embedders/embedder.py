"""The embedder f: image -> unit sphere, with its preprocessing inside.

Shapes: N images, H height, W width, C channels, D embedding size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dmlstudy.embedders.backbones import Backbone, build_backbone
from dmlstudy.embedders.ball import BALL, SPACES, SPHERE, on_ball
from dmlstudy.embedders.heads import (
    CODES,
    LINEAR,
    NO_CODE,
    NO_HEAD,
    DepthHead,
    LevelHeads,
    bare_head,
    encode,
    linear_head,
)
from dmlstudy.embedders.modes import in_eval_mode
from dmlstudy.embedders.precision import full_float32
from dmlstudy.embedders.stages import NO_FUSION, OWN_POOLING, UNIT_HEADS
from dmlstudy.embedders.starting import begun_with
from dmlstudy.embedders.structure import AS_THEY_ARE, NO_STRUCTURE, StructureHead, check_structure
from dmlstudy.heartbeat import beat
from dmlstudy.records import CLIP_RADIUS, CURVATURE
from dmlstudy.text import nearest
from dmlstudy.transfers import sent


@dataclass(frozen=True)
class Architecture:
    """The arguments an embedder was built with: enough to build it again."""

    backbone: str
    dim: int
    width: int
    weights: str | None
    freeze_bn: bool
    in_channels: int
    image_size: tuple[int, ...]  # height, width; () where the input is vectors of in_channels features
    seed: int
    structure: str = NO_STRUCTURE
    fusion: str = NO_FUSION
    pooling: str = OWN_POOLING
    head_norm: bool = False
    code: str = NO_CODE
    head_depth: int = 0
    head_width: int = 100
    head: str = LINEAR
    structure_input: str = AS_THEY_ARE
    unit_norm: bool = True
    space: str = SPHERE
    curvature: float = CURVATURE
    clip_radius: float = CLIP_RADIUS


class Embedder(nn.Module):
    """An embedder: z = c(h(b((x / 255 - mean) / std))) / |.|, or, without ``unit_norm``, z = h(...) as it is.

    In a ball z is h(...) as a point of it (``ball.on_ball``). b is the backbone, h the linear head (or nothing:
    ``heads.bare_head``) and c the code (``heads.encode``).

    ``forward`` takes ``images_NHWC`` (uint8, or float in 0..255) of the size and channels it was built for
    and returns ``z_ND``, float32, of unit norm unless built without. Grey images become RGB where the backbone wants
    three channels. An embedder of feature vectors (``image_size`` ()) takes ``x_NF`` (float32) unchanged.

    With a structure head, ``embed_with_structure`` gives structure embeddings too. Weight decay and learning
    rates find their groups in ``.backbone``, ``.head`` and ``.structure_head``.
    """

    mean_C: Tensor
    std_C: Tensor

    def __init__(self, backbone: Backbone, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.backbone = backbone.network
        self.head = _head(backbone, architecture)
        self.channels = backbone.channels
        self.register_buffer("mean_C", torch.tensor(backbone.mean))
        self.register_buffer("std_C", torch.tensor(backbone.std))
        self.loaded_sha256: str | None = None
        """``weights.digest`` of the tensors that its weights were given as; None of random weights."""
        self.loaded_head_sha256: str | None = None
        """``SavedParts.head_sha256`` of the saved embedder that it begins as; None where it begins as none."""
        self.begun_parts: tuple[str, ...] = ("backbone",)
        """The parts that given weights are of; a saved embedder's are of its heads too."""
        self.structure_head: StructureHead | None = None
        if architecture.structure != NO_STRUCTURE:
            self.structure_head = StructureHead(
                backbone.num_features, architecture.dim, architecture.structure, architecture.structure_input
            )
        self.train()  # so that freeze_bn holds from the start

    def forward(self, images_NHWC: Tensor) -> Tensor:
        return self._embedded(self.features(images_NHWC))

    def embed_with_structure(
        self, images_NHWC: Tensor, *, is_unit: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """z_ND as from ``forward``, and the structure embeddings omega_ND of the same features.

        omega is None without a structure head. Without ``is_unit`` z is as it is before it is normalised.
        """
        return self.embed_features(self.features(images_NHWC), is_unit=is_unit)

    def embed_features(self, features_NF: Tensor, *, is_unit: bool = True) -> tuple[Tensor, Tensor | None]:
        """z_ND and omega_ND, as from ``embed_with_structure``, of images with these ``features``."""
        omega_ND = None if self.structure_head is None else self.structure_head(features_NF)
        return self._embedded(features_NF, is_unit=is_unit), omega_ND

    @property
    def layers(self) -> tuple[list[int], NDArray[np.float64]] | None:
        """The sizes and weights of the layers of a head of several depths; None of another."""
        if not isinstance(self.head, DepthHead):
            return None
        return self.head.sizes, self.head.alpha_L.cpu().numpy()

    @property
    def has_layers(self) -> bool:
        """True if its head has several depths, each of which a loss over layers may weigh."""
        return self.architecture.head_depth > 0

    def weigh_layers(self, alpha_L: Tensor) -> None:
        """Take over the weights of the layers of a head of several depths (``heads.DepthHead``).

        Raises ValueError where the head is another, or has another number of layers.
        """
        if not isinstance(self.head, DepthHead) or len(self.head.alpha_L) != len(alpha_L):
            raise ValueError(
                f"{len(alpha_L)} layer weights, but the embedder's head has {self.architecture.head_depth + 1};"
                " set embedder.head_depth"
            )
        self.head.weigh(alpha_L)

    def features(self, images_NHWC: Tensor) -> Tensor:
        """The backbone's output, features_NF. Raises ValueError for images of another shape."""
        expected = (*self.architecture.image_size, self.architecture.in_channels)
        if tuple(images_NHWC.shape[1:]) != expected:
            raise ValueError(
                f"images are {tuple(images_NHWC.shape[1:])} (HWC), this embedder takes {expected}"
            )
        if not self.architecture.image_size:
            of_vectors_NF: Tensor = self.backbone(images_NHWC.float())
            return of_vectors_NF
        x_NHWC = images_NHWC.float() / 255
        x_NHWC = x_NHWC.expand(-1, -1, -1, self.channels)  # grey to RGB; a no-op where they agree
        x_NCHW = ((x_NHWC - self.mean_C) / self.std_C).permute(0, 3, 1, 2)
        features_NF: Tensor = self.backbone(x_NCHW.contiguous(memory_format=self._memory_format()))
        return features_NF

    def _memory_format(self) -> torch.memory_format:
        """The backbone weights' memory format: a convolution runs channels last if its weights or its images are so."""
        for weight in self.backbone.parameters():
            if weight.ndim == 4:
                is_last = weight.is_contiguous(memory_format=torch.channels_last)
                if is_last != weight.is_contiguous():  # of one input channel, or of 1 x 1, a weight is both
                    return torch.channels_last if is_last else torch.contiguous_format
        return torch.contiguous_format

    def _embedded(self, features_NF: Tensor, *, is_unit: bool = True) -> Tensor:
        z_ND: Tensor = self.head(features_NF)
        z_ND = encode(z_ND.float(), self.architecture.code, training=self.training)
        own = self.architecture
        if own.space == BALL:
            return on_ball(z_ND, own.curvature, own.clip_radius)
        return F.normalize(z_ND, dim=1, eps=1e-12) if is_unit and own.unit_norm else z_ND

    def train(self, mode: bool = True) -> Embedder:
        """Set the mode; with ``freeze_bn`` batch norm keeps its running statistics in either mode."""
        super().train(mode)
        if self.architecture.freeze_bn:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self


def _head(backbone: Backbone, architecture: Architecture) -> nn.Module:
    dim, layer_norm = architecture.dim, architecture.head_norm
    if architecture.head == NO_HEAD:
        return _bare_head(backbone, architecture)
    if architecture.head_depth:
        if backbone.levels or architecture.code != NO_CODE:
            what = f"fusion: {architecture.fusion}" if backbone.levels else f"code: {architecture.code}"
            raise ValueError(
                f"embedder.head_depth: a head of several depths has no {what}; leave one of them out"
            )
        depth, width = architecture.head_depth, architecture.head_width
        return DepthHead(backbone.num_features, dim, depth, width, layer_norm)
    if backbone.levels:
        return LevelHeads(backbone.levels, dim, layer_norm, is_unit=architecture.fusion == UNIT_HEADS)
    return linear_head(backbone.num_features, dim, layer_norm)


def _bare_head(backbone: Backbone, architecture: Architecture) -> nn.Module:
    own = architecture
    check_bare_head(own.backbone, backbone.num_features, own.dim, own.head_depth, own.fusion)
    return bare_head(backbone.num_features, own.head_norm)


def check_bare_head(backbone: str, num_features: int, dim: int, head_depth: int, fusion: str) -> None:
    """Raise ValueError where the features of a backbone cannot be the embedding as they are."""
    if head_depth or fusion not in (NO_FUSION, "features"):
        key = f"embedder.head_depth: {head_depth}" if head_depth else f"embedder.fusion: {fusion}"
        raise ValueError(f"embedder.head: none has no place beside {key}; leave one of them out")
    if dim != num_features:
        raise ValueError(
            f"embedder.dim: {dim} stands beside embedder.head: none, which gives the {num_features} features of"
            f" {backbone} as they are; set it to {num_features}"
        )


def build(
    backbone: str,
    dim: int,
    *,
    width: int = 32,
    weights: str | None = None,
    freeze_bn: bool = True,
    in_channels: int,
    image_size: int | tuple[int, ...],
    structure: str = NO_STRUCTURE,
    fusion: str = NO_FUSION,
    pooling: str = OWN_POOLING,
    head_norm: bool = False,
    code: str = NO_CODE,
    head_depth: int = 0,
    head_width: int = 100,
    head: str = LINEAR,
    structure_input: str = AS_THEY_ARE,
    unit_norm: bool = True,
    space: str = SPHERE,
    curvature: float = CURVATURE,
    clip_radius: float = CLIP_RADIUS,
    seed: int,
    make_backbone: Callable[..., Backbone] = build_backbone,
) -> Embedder:
    """Build an embedder whose initial parameters depend on the arguments only, not on global generators.

    ``image_size`` is a side, or (height, width), in pixels, or () for vectors of ``in_channels`` features;
    ``weights`` is None, 'default', a file or the folder of a saved embedder (``starting``); ``structure`` is 'none', or
    'official' or 'paper' for a structure head, which does not change the initial parameters of the rest, and
    ``structure_input`` what that gets (``structure.INPUTS``).

    ``fusion`` and ``pooling`` say which stages' features the head gets (``levels``), ``head_norm`` puts a layer norm
    before it, and ``code`` 'tanh' or 'sign' makes the embedding a code of ``dim`` bits (``heads``). ``dim`` is the
    size of the whole embedding, also with several heads.

    ``head_depth`` hidden layers of ``head_width`` units make a head of several depths. Without ``unit_norm`` the
    embedding is as the head gives it. ``head`` 'none' leaves the features as they are, which must be ``dim``.

    ``space`` 'ball' makes the embedding a point of a ball of this ``curvature``, of features cut at ``clip_radius``; it
    has no structure head, code or head of several depths.

    ``make_backbone`` is ``build_backbone``, or gives what that would.

    Raises ValueError for an unknown backbone, structure or code, weights that do not fit, or images of channels other
    than 1 and 3.
    """
    if image_size != () and in_channels not in (1, 3):
        raise ValueError(f"images have {in_channels} channels, an embedder takes 1 or 3")
    _check_space(space, structure, code, head_depth, unit_norm)
    if code not in CODES:
        raise ValueError(f"embedder.code: unknown {code!r}{nearest(code, CODES, listed=True)}")
    height_width = (image_size, image_size) if isinstance(image_size, int) else image_size
    architecture = Architecture(
        backbone,
        dim,
        width,
        weights,
        freeze_bn,
        in_channels,
        height_width,
        seed,
        structure=check_structure(structure),
        fusion=fusion,
        pooling=pooling,
        head_norm=head_norm,
        code=code,
        head_depth=head_depth,
        head_width=head_width,
        head=head,
        structure_input=structure_input,
        unit_norm=unit_norm,
        space=space,
        curvature=curvature,
        clip_radius=clip_radius,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = make_backbone(backbone, in_channels, width, weights, height_width, fusion, pooling)
        embedder = Embedder(network, architecture)
    return begun_with(embedder, weights, network)


def _check_space(space: str, structure: str, code: str, head_depth: int, unit_norm: bool) -> None:
    """Raise ValueError for an unknown space, and for what has no meaning in a ball."""
    if space not in SPACES:
        raise ValueError(f"embedder.space: unknown {space!r}{nearest(space, SPACES, listed=True)}")
    beside = {
        f"a structure head ({structure})": structure != NO_STRUCTURE,
        f"embedder.code: {code}": code != NO_CODE,
        f"embedder.head_depth: {head_depth}": head_depth > 0,
        "embedder.unit_norm: false": not unit_norm,
    }
    for what, is_there in beside.items():
        if space == BALL and is_there:
            raise ValueError(f"embedder.space: ball has no meaning beside {what}; leave one of them out")


def latency_ms(
    embedder: Embedder,
    image_HWC: NDArray[np.uint8] | NDArray[np.float32],
    device: str | torch.device | None = None,
) -> float:
    """Milliseconds to embed one image that is alone in its batch: the median of 20 times, after 3 to warm up."""
    seconds = []
    for _ in range(23):
        started = time.perf_counter()
        embed(embedder, image_HWC[None], device=device)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds[3:])


def embed(
    embedder: Embedder,
    images_NHWC: NDArray[np.uint8] | NDArray[np.float32],
    batch_size: int = 256,
    device: str | torch.device | None = None,
) -> NDArray[np.float32]:
    """Return ``z_ND`` of the images in eval mode and full float32, on ``device`` (default: where the embedder is).

    The embedder's device and the mode of each of its modules are restored.
    """
    return embed_with_structure(embedder, images_NHWC, batch_size, device)[0]


def embed_with_structure(
    embedder: Embedder,
    images_NHWC: NDArray[np.uint8] | NDArray[np.float32],
    batch_size: int = 256,
    device: str | torch.device | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Return ``z_ND`` as ``embed`` does, and ``omega_ND``, which is None without a structure head."""
    starts = range(0, len(images_NHWC), batch_size)
    batches = (images_NHWC[start : start + batch_size] for start in starts)
    return embed_batches(embedder, batches, len(images_NHWC), device)


def embed_batches(
    embedder: Embedder,
    batches: Iterable[NDArray[np.uint8] | NDArray[np.float32]],
    num_images: int,
    device: str | torch.device | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """The same of batches that come one by one, ``num_images`` in all at most.

    A GPU computes one while the next is made and sent (``transfers``). The numbers are those of each batch alone.
    """
    home = embedder.mean_C.device
    target = home if device is None else torch.device(device)
    z_ND = torch.empty(num_images, embedder.architecture.dim, device=target)
    omega_ND = None if embedder.structure_head is None else torch.empty_like(z_ND)
    done = 0
    try:
        embedder.to(target)  # half of it may be there when memory runs out
        with in_eval_mode(embedder), full_float32():
            for images in sent(batches, target):
                beat()
                rows = slice(done, done + len(images))
                with torch.inference_mode():
                    z, omega = embedder.embed_with_structure(images)
                    z_ND[rows] = z
                    if omega_ND is not None and omega is not None:
                        omega_ND[rows] = omega
                done = rows.stop
    finally:
        embedder.to(home)
    on_host = z_ND[:done].cpu().numpy()
    return on_host, None if omega_ND is None else omega_ND[:done].cpu().numpy()
