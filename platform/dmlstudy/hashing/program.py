"""A hashing model as a program for torch alone: features to codes.

Shapes: N items, F features, D bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dmlstudy.embedders.program import vectors, write_program
from dmlstudy.hashing.folder import PROGRAM, load
from dmlstudy.hashing.model import HashingModel
from dmlstudy.model_folder import example, seal


class Codes(nn.Module):
    """Features to codes of +1 and -1, int8, and omega_ND where there is a structure head."""

    mean_F: Tensor
    scale: Tensor

    def __init__(self, model: HashingModel) -> None:
        super().__init__()
        self.method = model.method
        self.head = None if model.structure is None else model.structure.head
        self.register_buffer("mean_F", model.mean_F)
        self.register_buffer("scale", model.scale)

    def forward(self, x_NF: Tensor) -> dict[str, Tensor]:
        scaled_NF = (x_NF - self.mean_F) / self.scale
        outputs = {"embedding": torch.where(self.method.logits(scaled_NF) > 0, 1, -1).to(torch.int8)}
        return outputs if self.head is None else {**outputs, "structure": self.head(scaled_NF)}


class _Bits(nn.Module):
    """The codes alone."""

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        self.codes = codes

    def forward(self, x_NF: Tensor) -> Tensor:
        bits_ND: Tensor = self.codes(x_NF)["embedding"]
        return bits_ND


def add_program(folder: str | Path) -> None:
    """Add ``hashing.pt2`` to a saved model's folder. Raises RuntimeError if it computes other codes."""
    folder = Path(folder)
    model = load(folder)
    model.structure = None
    few_NF, several_NF = (vectors(example(folder), num, model.num_features) for num in (2, 5))
    write_program(_Bits(Codes(model)).eval(), few_NF, several_NF, folder / PROGRAM)
    seal(folder)
