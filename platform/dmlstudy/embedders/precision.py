"""Full float32 on hardware that has a shortcut: TensorFloat-32 rounds the operands of products to 10 bits.

An embedding computed with it differs from a CPU's in the third digit. So whatever is scored, saved or searched is
computed in full float32 (``full_float32``), and so are losses (``full_products``). Convolutions in training may take
the shortcut, which is PyTorch's default on GPUs that have it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of numbers that a backbone may compute in during training (``training.precision``)."""


def is_emulated(precision: str) -> bool:
    """True where this machine's processor has no arithmetic for a precision, as for bf16 without AVX-512.

    Its numbers are then converted one by one: a ResNet-18 trains ten times slower than in float32.
    """
    here: Any = torch.ops.mkldnn
    if precision == "bf16":
        return not here._is_mkldnn_bf16_supported()
    return precision == "fp16" and not here._is_mkldnn_fp16_supported()


Setting = TypeVar("Setting", str, bool)
_BACKENDS: Any = torch.backends
"""Their types say nothing of these settings."""


class _Held:
    """A setting of the whole process, as a block that any number of threads may be in: the first to enter sets it, and
    the last to leave sets it back."""

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._num_within = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_within == 0:
                self._undo = self._change()
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if self._num_within == 0:
                self._undo()


def _full_products() -> Callable[[], None]:
    old = _old_setting(torch.get_float32_matmul_precision, "highest")
    kernels = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul)
    before = [kernel.fp32_precision for kernel in kernels]
    torch.set_float32_matmul_precision("highest")

    def undo() -> None:
        torch.set_float32_matmul_precision(old)
        _restore(kernels, before)

    return undo


def _full_convolutions() -> Callable[[], None]:
    cudnn = _BACKENDS.cudnn
    old = _old_setting(lambda: bool(cudnn.allow_tf32), True)
    kernels = (cudnn.conv, cudnn.rnn, _BACKENDS.mkldnn.conv)
    before = [kernel.fp32_precision for kernel in kernels]
    cudnn.allow_tf32 = False
    for kernel in kernels:
        kernel.fp32_precision = "ieee"

    def undo() -> None:
        cudnn.allow_tf32 = old
        _restore(kernels, before)

    return undo


_PRODUCTS, _CONVOLUTIONS = _Held(_full_products), _Held(_full_convolutions)


def full_products() -> _Held:
    """A block in which matrix products are in full float32, whatever was set; convolutions are as they were."""
    return _PRODUCTS


class full_float32:
    """A block in which matrix products and convolutions are in full float32."""

    def __enter__(self) -> None:
        _PRODUCTS.__enter__()
        _CONVOLUTIONS.__enter__()

    def __exit__(self, *_: object) -> None:
        _CONVOLUTIONS.__exit__()
        _PRODUCTS.__exit__()


def in_force() -> dict[str, str]:
    """PyTorch's settings at this moment; "tf32" means something only on hardware that has it."""
    return {
        "matrix_products": _BACKENDS.cuda.matmul.fp32_precision,
        "convolutions": _BACKENDS.cudnn.conv.fp32_precision,
    }


def _old_setting(getter: Callable[[], Setting], default: Setting) -> Setting:
    """A setting of PyTorch's older interface, which must be changed with the newer one's: where the two differ, PyTorch
    answers with an error. They do where only the newer one was used, so that the older one is as it was."""
    try:
        return getter()
    except RuntimeError:
        return default


def _restore(kernels: tuple[Any, ...], before: list[str]) -> None:
    for kernel, precision in zip(kernels, before, strict=True):
        kernel.fp32_precision = precision
