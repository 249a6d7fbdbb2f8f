"""Features of a backbone that never trains: computed once per image and view, then read by all trials and folds.

A trial uses them where it asks for it (``training.feature_cache: auto``), its backbone is frozen in all epochs and so
in eval mode, and its views are deterministic: augmentation off, or ``training.cached_views: V``. Its training batches
and its scoring then run the heads alone. ``embedders/README.md`` says how its scores compare with those without it.

Features are always computed in pieces of 256 images in their order, all images of a side of the data at once, so they
are the same numbers on any number of ranks and in any fold.

Shapes: N images, B images of one batch, F features, D embedding size, E columns of the embedding.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmlstudy import data, distributed, embedders
from dmlstudy.data import LabelledImages, Loader, ZeroShotData
from dmlstudy.data.images import Indices, Inputs, RandomViews
from dmlstudy.data.loader import Empty
from dmlstudy.embedders.backbones import Backbone, build_backbone
from dmlstudy.embedders.modes import in_eval_mode
from dmlstudy.embedders.precision import PRECISIONS, full_float32
from dmlstudy.heartbeat import beat
from dmlstudy.model_folder import JSON
from dmlstudy.records import DataConfig, TrainingConfig, TrialConfig
from dmlstudy.training import feature_store, held_backbone
from dmlstudy.training.feature_store import Matrix
from dmlstudy.training.interface import Share, TrialFailed

PIECE = 256
"""Images that pass the backbone at once."""

HEAD_PIECE = 8192
"""Rows of features that pass the heads at once, where they are scored."""

VIEWS_SEED = 0
"""The seed of ``cached_views``, of every trial, fold and seed of a verdict, so that they share them."""

LIBRARIES = ("torch", "torchvision", "timm", "pillow", "numpy")
"""Libraries that decide on features' digits; another version computes them anew."""


class ChosenImages(NamedTuple):
    """Some images of a side of the data; ``rows`` None: all."""

    images: LabelledImages
    rows: Indices | None

    def read(self, indices: Indices, views: RandomViews | None = None) -> Inputs:
        """Images by their numbers among the chosen ones; a view is drawn by the number among all."""
        return self.images.read(indices if self.rows is None else self.rows[indices], views)


class WholeSides(NamedTuple):
    """The sides of the data that a share's images are of."""

    train: ChosenImages
    held_out: ChosenImages


def sides_of(dataset: ZeroShotData, share: Share) -> WholeSides:
    """The images a share trains on and is judged by, as parts of the data's sides."""
    development = dataset.development
    return WholeSides(
        ChosenImages(development, share.train),
        ChosenImages(dataset.test, None)
        if share.held_out is None
        else ChosenImages(development, share.held_out),
    )


def is_frozen_throughout(training: TrainingConfig) -> bool:
    """True if no parameter of the backbone trains in any epoch. The one place that decides it."""
    if training.adapter != "none":
        return False
    return training.unfreeze_last == 0 or training.freeze_backbone_epochs >= max(training.epochs, 1)


def applies(config: TrialConfig) -> bool:
    """True if the trial's features are computed once and kept."""
    has_fixed_views = _augmentation(config).is_off or config.training.cached_views > 0
    return (
        config.training.feature_cache == "auto" and is_frozen_throughout(config.training) and has_fixed_views
    )


def note(config: TrialConfig) -> str | None:
    """A line for people on a frozen backbone whose features are computed in every epoch, else None."""
    training = config.training
    if not is_frozen_throughout(training) or training.epochs == 0 or applies(config):
        return None
    if training.feature_cache == "off":
        return (
            "the backbone is frozen in all epochs, and yet runs in each; training.feature_cache: auto computes the"
            " features of an image once for all trials"
        )
    return (
        "training.feature_cache: auto keeps no features of views that are new in each epoch; leave augmentation out,"
        " or set training.cached_views: 8"
    )


def view_of(training: TrainingConfig, epoch: int) -> int:
    """The number of the view that an epoch shows of each image."""
    return epoch % training.cached_views if training.cached_views else epoch


def loader(
    config: TrialConfig,
    sides: WholeSides | None,
    train: LabelledImages,
    augmentation: data.Augmentation,
    seed: int,
    empty: Empty | None = None,
) -> Loader:
    """The loader of training images; with ``cached_views`` their views are those that all trials share."""
    if not config.training.cached_views or sides is None:
        return Loader(train, augmentation, seed, empty=empty)
    return Loader(sides.train, augmentation, VIEWS_SEED, empty=empty)


def backbone_maker(config: TrialConfig) -> Callable[..., Backbone]:
    """The function that makes the trial's backbone; where that never trains, what this process has made is shared."""
    if applies(config):
        return partial(held_backbone.made, config.training.channels_last)
    held_backbone.forget()
    return build_backbone


class HeadOnly(nn.Module):
    """The embedder as a function of its backbone's features, for ``Step``."""

    def __init__(self, embedder: embedders.Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    @property
    def has_layers(self) -> bool:
        return self.embedder.has_layers

    @property
    def backbone(self) -> nn.Module:
        return self.embedder.backbone

    def weigh_layers(self, alpha_L: Tensor) -> None:
        self.embedder.weigh_layers(alpha_L)

    def features(self, features_BF: Tensor) -> Tensor:
        return features_BF

    def embed_features(self, features_BF: Tensor, *, is_unit: bool = True) -> tuple[Tensor, Tensor | None]:
        return self.embedder.embed_features(features_BF, is_unit=is_unit)

    def embed_with_structure(
        self, features_BF: Tensor, *, is_unit: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return self.embedder.embed_features(features_BF, is_unit=is_unit)


def of_trainer(
    config: TrialConfig, embedder: embedders.Embedder, device: torch.device, sides: WholeSides | None
) -> FrozenFeatures | None:
    """The kept features of a trainer's images; None where the backbone is to compute in each epoch."""
    return FrozenFeatures(config, embedder, device, sides) if sides is not None and applies(config) else None


class FrozenFeatures:
    """Features of the images that a trainer learns from and is judged by, each side computed when first needed.

    Every rank asks for them at once. Where one cannot have them all raise TrialFailed.
    """

    def __init__(
        self, config: TrialConfig, embedder: embedders.Embedder, device: torch.device, sides: WholeSides
    ) -> None:
        self._config, self._embedder, self._device, self._sides = config, embedder, device, sides
        self._parts = _of_backbone(config, embedder, device)
        self._matrices: dict[tuple[bool, int | None, str], Matrix] = {}

    def in_training(self, epoch: int) -> _CachedRows:
        """Features of the images trained on, as an epoch shows them, in the precision of training."""
        training = self._config.training
        view = None if _augmentation(self._config).is_off else view_of(training, epoch)
        return self._rows(self._sides.train, True, view, training.precision)

    def embedded_held_out(
        self, embedder: embedders.Embedder, share: slice, *, structure: bool
    ) -> NDArray[np.float32]:
        """z_ND and, if asked for, omega_ND to its right, of this ``share`` of the held-out images.

        The embedder's heads may be others than those in training, as their average.
        """
        rows = self._rows(self._sides.held_out, False, None, "float32")
        numbers = np.arange(rows.num_rows)[share]
        parts = [np.empty((0, embedder.architecture.dim * (1 + structure)), np.float32)]
        with in_eval_mode(embedder), torch.inference_mode(), full_float32():
            for start in range(0, len(numbers), HEAD_PIECE):
                features_BF = torch.from_numpy(rows.read(numbers[start : start + HEAD_PIECE]))
                z_BD, omega_BD = embedder.embed_features(features_BF.to(self._device))
                columns = [z_BD, omega_BD] if structure and omega_BD is not None else [z_BD]
                parts.append(torch.cat(columns, dim=1).float().cpu().numpy())
                beat()
        return np.concatenate(parts)

    def _rows(self, chosen: ChosenImages, in_training: bool, view: int | None, precision: str) -> _CachedRows:
        matrix = (in_training, view, precision)
        if matrix not in self._matrices:
            self._matrices[matrix] = self._kept(chosen.images, view, precision)
        return _CachedRows(self._matrices[matrix], chosen.rows)

    def _kept(self, images: LabelledImages, view: int | None, precision: str) -> Matrix:
        parts = {
            **self._parts,
            "images": _of_images(self._config, images),
            "view": None if view is None else _of_view(self._config, view),
            "precision": precision,
        }
        found, error = None, None
        try:
            found = feature_store.kept(parts, len(images), lambda: self._computed(images, view, precision))
        except (ValueError, OSError) as refusal:
            error = refusal
        if distributed.any_rank(error is not None):
            raise TrialFailed(str(error) if error else "another rank could not have its features")
        assert found is not None
        return found

    def _computed(self, images: LabelledImages, view: int | None, precision: str) -> Iterator[Matrix]:
        """Features of all images, in pieces."""
        data.prepare(images)
        pieces = [np.arange(start, min(start + PIECE, len(images))) for start in range(0, len(images), PIECE)]
        if view is None:
            read = Loader(images).epoch(pieces)
        else:
            fill = data.fill_for(self._embedder.mean_C.tolist(), images.image_shape[-1])
            augmentation = replace(_augmentation(self._config), fill=fill)
            read = Loader(images, augmentation, VIEWS_SEED).epoch(pieces, view)
        with in_eval_mode(self._embedder), torch.inference_mode():
            for images_BHWC in read:
                with _computing(precision, self._device):
                    features_BF = self._embedder.features(torch.from_numpy(images_BHWC).to(self._device))
                wide = torch.float64 if features_BF.dtype is torch.float64 else torch.float32
                yield features_BF.to(wide).cpu().numpy()


class _CachedRows(NamedTuple):
    """Rows of a matrix of features, by the numbers of the images that were chosen of their side."""

    matrix_NF: Matrix
    rows: Indices | None

    @property
    def num_rows(self) -> int:
        return len(self.matrix_NF) if self.rows is None else len(self.rows)

    def read(self, indices: Indices) -> Matrix:
        """A copy of these rows."""
        chosen: Matrix = self.matrix_NF[indices if self.rows is None else self.rows[indices]]
        return chosen


def _augmentation(config: TrialConfig) -> data.Augmentation:
    return data.Augmentation(**config.augmentation.model_dump())


def _computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of a pass: full float32, or autocast as in training."""
    if precision == "float32":
        return full_float32()
    return torch.autocast(device.type, PRECISIONS[precision])


def _of_backbone(config: TrialConfig, embedder: embedders.Embedder, device: torch.device) -> dict[str, JSON]:
    """All that features depend on beside the images: backbone, weights, libraries and device."""
    own = config.embedder
    return {
        "form": 1,
        "backbone": own.backbone,
        "width": own.width,
        "fusion": own.fusion,
        "pooling": own.pooling,
        "weights": held_backbone.digest_of(embedder.backbone),
        "normalisation": [embedder.mean_C.tolist(), embedder.std_C.tolist()],
        "channels_last": config.training.channels_last,
        "libraries": _versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _of_images(config: TrialConfig, images: LabelledImages) -> Mapping[str, JSON]:
    """The images: the digest of their contents, in their order, and how they are read and resized."""
    contents = b"".join(images.content_hashes())
    seen = config.data.model_dump(mode="json", exclude={"name", "path", "on_corrupt", *DataConfig.SPEED})
    return {"sha256": hashlib.sha256(contents).hexdigest(), "shape": list(images.image_shape), **seen}


def _of_view(config: TrialConfig, view: int) -> Mapping[str, JSON]:
    return {**config.augmentation.model_dump(mode="json"), "seed": VIEWS_SEED, "number": view}


@functools.cache
def _versions() -> dict[str, JSON]:
    found: dict[str, JSON] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
