"""A module as a program of ``torch.export``: one file that torch alone computes with."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

TOLERANCE = 1e-5
"""Largest difference of the program's numbers from the module's."""


def write_program(module: nn.Module, x_N: Tensor, other_M: Tensor, path: Path) -> None:
    """Export ``module`` by the inputs ``x_N``, for any number of items, and compare both on ``other_M``.

    Its parameters take no gradient afterwards, so the program's results have none. Raises RuntimeError if
    the two differ by more than ``TOLERANCE``.
    """
    module.requires_grad_(False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns about its own internals
        program = exported(module, x_N)
        difference = (program.module()(other_M).float() - module(other_M).float()).abs().max().item()
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{path}: the exported program differs from the model by {difference:.2g}")
        torch.export.save(program, path)


def exported(module: nn.Module, x_N: Tensor, dim: str = "batch") -> torch.export.ExportedProgram:
    """The module's graph for any number of items, which it calls ``dim``.

    ``torch.export`` notes with each node where in the code it stands. That is left out: it names folders of whoever
    exports, and makes two machines' files of one model differ.
    """
    with torch.no_grad():
        program = torch.export.export(module, (x_N,), dynamic_shapes=({0: torch.export.Dim(dim)},))
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def vectors(example_NF: NDArray[np.floating] | None, num: int, num_features: int) -> Tensor:
    """``num`` float32 vectors: an example's, repeated as needed, or zeros without an example."""
    given_NF = np.zeros((1, num_features)) if example_NF is None or not len(example_NF) else example_NF
    return torch.from_numpy(np.resize(given_NF, (num, num_features)).astype(np.float32))
