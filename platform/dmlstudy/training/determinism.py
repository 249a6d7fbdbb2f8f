"""Kernels on a GPU that give the same digits each time, for as long as a trial trains. On a CPU nothing is changed:
there they do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dmlstudy.training.interface import TrialFailed

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE_WORKSPACE = ":4096:8"
"""Without it cuBLAS may sum in another order when streams run at once."""


@contextmanager
def repeatable(how: str, device: torch.device) -> Iterator[None]:
    """Training as ``training.deterministic`` wants it, until the end of the block.

    "where_possible" takes the kernel that repeats wherever PyTorch has one, and warns of each operation that has none;
    "always" raises TrialFailed there; "never" leaves PyTorch's settings as they are.

    cuBLAS reads its variable once in a process, before its first product: it is set for trials of any kind, and stays.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault(WORKSPACE, REPEATABLE_WORKSPACE)
    if how == "never":
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    mode = torch.get_deterministic_debug_mode()
    cudnn.deterministic, cudnn.benchmark = True, False
    torch.set_deterministic_debug_mode("warn" if how == "where_possible" else "error")
    try:
        yield
    except RuntimeError as error:
        if how == "always" and "does not have a deterministic implementation" in str(error):
            operation = str(error).partition(" does not have")[0]
            raise TrialFailed(
                f"training.deterministic: always, but PyTorch has no deterministic {operation} on CUDA; set it to"
                " where_possible"
            ) from None
        raise
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = before
