"""The structure head (NASA 4.1): beside its embedding, an image gets a weight for every dimension.

Shapes: N images, F features, D embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmlstudy.losses.interface import World
from dmlstudy.text import nearest

HIDDEN = 512

NO_STRUCTURE = "none"

PRESETS: Mapping[str, str] = {
    NO_STRUCTURE: "no structure head",
    "official": "0.5 + sigmoid, as in the authors' code",
    "paper": "D * softmax, as printed",
}

AS_THEY_ARE, CENTER, STANDARDIZE = "none", "center", "standardize"

INPUTS: Mapping[str, str] = {
    AS_THEY_ARE: "the backbone's features",
    CENTER: "the same less their running mean",
    STANDARDIZE: "the same over the root of their running mean variance too",
}

MOMENTUM = 0.9
"""Share of the earlier statistics in the running ones, after a batch."""

SATURATED = 0.01
"""A weight this near to a bound of its preset is saturated."""


class RunningInput(nn.Module):
    """(x - m) / s of features x_NF, m and s renewed after each batch from the features of all ranks.

    After the batch with mean b_F and mean variance v, both over all its rows::

        m <- 0.9 m + 0.1 b        s^2 <- 0.9 s^2 + 0.1 v        (s stays 1 where the input is centred alone)

    The first batch's own are taken before it is trained on, so that no step sees features as they are. In training as
    in use a row's output is a function of this row alone: statistics have no gradient, and lag by a batch.

    In training mode ``forward`` adds up what it sees, and ``renew`` takes it in. Rows may be seen in chunks, and all of
    them twice. Source: the centre of DINO (Caron et al. 2021, Eq. 4).
    """

    mean_F: Tensor
    variance: Tensor
    num_batches: Tensor

    def __init__(self, features: int, *, is_scaled: bool) -> None:
        super().__init__()
        self.is_scaled = is_scaled
        self.register_buffer("mean_F", torch.zeros(features))
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self._seen = torch.zeros(features + 2, dtype=torch.float64)
        """Sums over rows since the last ``renew``: of the features, of all their squares, of ones. It is no buffer, for
        it is this rank's alone."""

    def forward(self, features_NF: Tensor) -> Tensor:
        """The features by the statistics as they are now, float32 at least."""
        if self.training:
            x_NF = features_NF.detach().double()
            num_rows = x_NF.new_full((1,), len(x_NF))
            self._seen.add_(torch.cat([x_NF.sum(0), x_NF.square().sum()[None], num_rows]))
        centred_NF = features_NF - self.mean_F
        return centred_NF / self.variance.sqrt() if self.is_scaled else centred_NF

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningInput:
        super()._apply(change, recurse)  # type: ignore[no-untyped-call]
        self._seen = self._seen.to(self.mean_F.device)
        return self

    @torch.no_grad()
    def renew(self, world: World) -> None:
        """Take in what all ranks have seen since the last time; every rank must call this."""
        sums = world.sum(self._seen.clone())
        self._seen.zero_()
        num_rows = sums[-1]
        if num_rows == 0:
            return
        mean_F = sums[:-2] / num_rows
        variance = (sums[-2] / num_rows - mean_F.square().sum()).clamp(min=0) / len(mean_F)
        kept = MOMENTUM if self.num_batches > 0 else 0.0
        self.mean_F.copy_(kept * self.mean_F.double() + (1 - kept) * mean_F)
        if self.is_scaled and variance > 0:  # features that are all alike have no scale
            self.variance.copy_(kept * self.variance.double() + (1 - kept) * variance)
        self.num_batches += 1


class StructureHead(nn.Module):
    """omega = a(W2 . + b2) of features_NF, positive weights of mean about 1 for each image.

    'official', as in the authors' code: linear to 512, batch norm, linear to D, batch norm, 0.5 + sigmoid, so
    in (0.5, 1.5). 'paper': linear to 512, batch norm, ReLU, linear to D, and D times the softmax, so that the
    mean is exactly 1 (raw softmax weights would shrink each distance by sqrt(D)).

    Batch norm keeps its initial statistics in training too, as in the authors' code, and is an affine map: statistics
    of a rank's part of the batch would make training depend on the number of ranks. ``input`` 'center' or 'standardize'
    puts a ``RunningInput`` before all this.

    Float32 out, or float64 of such. Raises ValueError for another preset or input.
    """

    def __init__(self, features: int, dim: int, preset: str, input: str = AS_THEY_ARE) -> None:
        super().__init__()
        self.preset = preset
        if input not in INPUTS:
            raise ValueError(
                f"embedder.structure_input: unknown {input!r}{nearest(input, INPUTS, listed=True)}"
            )
        self.input: RunningInput | None = None
        if input != AS_THEY_ARE:
            self.input = RunningInput(features, is_scaled=input == STANDARDIZE)
        first = [nn.Linear(features, HIDDEN), nn.BatchNorm1d(HIDDEN)]
        if preset == "official":
            self.layers = nn.Sequential(*first, nn.Linear(HIDDEN, dim), nn.BatchNorm1d(dim))
        elif preset == "paper":
            self.layers = nn.Sequential(*first, nn.ReLU(), nn.Linear(HIDDEN, dim))
        else:
            raise ValueError(f"a structure head has preset 'official' or 'paper', not {preset!r}")
        self.train()

    def forward(self, features_NF: Tensor) -> Tensor:
        """Structure embeddings omega_ND."""
        if self.input is not None:
            features_NF = self.input(features_NF)
        x_ND: Tensor = self.layers(features_NF)
        x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
        if self.preset == "official":
            return 0.5 + x_ND.sigmoid()
        return x_ND.shape[1] * x_ND.softmax(dim=1)

    def train(self, mode: bool = True) -> StructureHead:
        """Set the mode; batch norm stays in eval mode."""
        super().train(mode)
        for module in self.layers:
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def check_structure(structure: str) -> str:
    """``structure`` if it names a preset or none; raises ValueError with the nearest name otherwise."""
    if structure not in PRESETS:
        raise ValueError(
            f"embedder.structure: unknown {structure!r}{nearest(structure, PRESETS, listed=True)}"
        )
    return structure


def deviation(omega_ND: NDArray[Any]) -> float:
    """Distance of structure embeddings from one and the same for all items: the mean over dimensions of sd_i(omega_i).

    The standard deviation is that of these items (divided by N), in float64. Weights that are all .5 or 1.5, but the
    same for each item, have 0: they choose dimensions, and say nothing of an item's neighbourhood.
    """
    return float(omega_ND.astype(np.float64).std(axis=0).mean())


def saturated_share(omega_ND: NDArray[Any], preset: str, dim: int) -> float:
    """The share of weights within .01 of a bound: .5 and 1.5 of 'official', 0 and D = ``dim`` of 'paper'."""
    low, high = (0.5, 1.5) if preset == "official" else (0.0, float(dim))
    return float(((omega_ND <= low + SATURATED) | (omega_ND >= high - SATURATED)).mean())
