"""An online learner as a program for torch alone: points to their embeddings as a gallery's.

Shapes: N points, D features, E size of a layer, L layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dmlstudy.embedders.program import vectors, write_program
from dmlstudy.model_folder import example, seal
from dmlstudy.online.folder import PROGRAM, Learned, load
from dmlstudy.online.learner import OnlineLearner
from dmlstudy.online.linear import OASIS
from dmlstudy.online.oahu import OAHU
from dmlstudy.online.preparation import UNIT


def add_program(folder: str | Path) -> None:
    """Add ``online.pt2`` to a saved learner's folder. Raises RuntimeError if it computes other embeddings."""
    folder = Path(folder)
    learned = load(folder)
    few_ND, several_ND = (vectors(example(folder), num, learned.learner.num_features) for num in (2, 5))
    write_program(LearnedLayers(learned).eval(), few_ND, several_ND, folder / PROGRAM)
    seal(folder)


class LearnedLayers(nn.Module):
    """Points of a gallery, scaled as in training, to the layers side by side, each times the root of its weight."""

    shift_D: Tensor
    scale_D: Tensor

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.scaling, self.layers = learned.preparation.kind, _layers(learned.learner)
        self.register_buffer("shift_D", torch.tensor(learned.preparation.shift_D))
        self.register_buffer("scale_D", torch.tensor(learned.preparation.scale_D))

    def forward(self, x_ND: Tensor) -> Tensor:
        x_ND = ((x_ND.double() - self.shift_D) / self.scale_D).float()
        if self.scaling == "contrast":
            x_ND = x_ND - x_ND.mean(dim=1, keepdim=True)
        if self.scaling in UNIT:
            x_ND = x_ND * _inverse(x_ND)
        z_NE: Tensor = self.layers(x_ND.double())
        return z_NE.float()


def _layers(learner: OnlineLearner) -> nn.Module:
    if isinstance(learner, OAHU):
        return _Depths(learner)
    return _Raised(learner) if isinstance(learner, OASIS) else _Linear(learner)


class _Linear(nn.Module):
    """x A, for a learner whose embedding is linear."""

    a_DE: Tensor

    def __init__(self, learner: OnlineLearner) -> None:
        super().__init__()
        (of_axes_DE,) = learner.embed(np.eye(learner.num_features))
        self.register_buffer("a_DE", torch.tensor(of_axes_DE))

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND @ self.a_DE


class _Raised(nn.Module):
    """[x, sqrt(r^2 - |x|^2)] of OASIS; not a number beyond the radius r."""

    def __init__(self, learner: OASIS) -> None:
        super().__init__()
        self.radius = learner.radius

    def forward(self, x_ND: Tensor) -> Tensor:
        length_N1 = x_ND.square().sum(dim=1, keepdim=True).sqrt()
        height_N1 = ((self.radius - length_N1) * (self.radius + length_N1)).sqrt()
        return torch.cat([x_ND, height_N1], dim=1)


class _Depths(nn.Module):
    """[sqrt(alpha^0) f^0, ..., sqrt(alpha^L) f^L] of OAHU, in its own precision."""

    input_DV: Tensor
    hidden_LHH: Tensor
    bias_LH: Tensor
    theta_LHE: Tensor
    root_L: Tensor

    def __init__(self, learner: OAHU) -> None:
        super().__init__()
        self.size = learner.size
        state = learner.state()
        for name, own in (("input", "DV"), ("hidden", "LHH"), ("bias", "LH"), ("theta", "LHE")):
            self.register_buffer(f"{name}_{own}", torch.tensor(state[name]))
        self.register_buffer("root_L", torch.tensor(np.sqrt(learner.layer_weights)))

    def forward(self, x_ND: Tensor) -> Tensor:
        u_NV = x_ND.to(self.input_DV.dtype) @ self.input_DV
        raw = [u_NV[:, : self.size]]
        h_NH = u_NV[:, self.size :]
        for layer in range(len(self.theta_LHE)):
            before_NH = h_NH if layer == 0 else h_NH @ self.hidden_LHH[layer - 1]
            h_NH = torch.relu(before_NH + self.bias_LH[layer])
            raw.append(h_NH @ self.theta_LHE[layer])
        return torch.cat(
            [root * (f_NE * _inverse(f_NE)).double() for root, f_NE in zip(self.root_L, raw, strict=True)],
            dim=1,
        )


def _inverse(x_ND: Tensor) -> Tensor:
    """1 / |x| of each row, and 0 of one without a direction."""
    length_N1 = x_ND.square().sum(dim=1, keepdim=True).sqrt()
    return torch.where(length_N1 > 1e-12, 1 / length_N1.clamp_min(1e-12), 0.0)
