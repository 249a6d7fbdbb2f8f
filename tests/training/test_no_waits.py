"""The training step reads no number of a device: the host goes on, and the device has work when it is done with this.

A tensor of these tests holds its numbers back, as one of a device does until it is waited for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dmlstudy import distributed
from dmlstudy.losses import mining
from dmlstudy.losses.interface import Labels
from dmlstudy.training import exactness
from dmlstudy.training.gradients import gradients_of

ATEN = torch.ops.aten
READING = (
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.equal.default,
)
INDEXING = (ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default)

WAITING = {"adaptive_bound"} | {name for name, case in exactness.CASES.items() if "sample" in case.params}
"""Weights of layers are found on the host, from the losses of a batch; the classes drawn are counted."""


class OnDevice(Tensor):
    """A tensor whose numbers the host cannot read."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=numbers.device,
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:  # type: ignore[override]
        return "OnDevice"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [each for each in [*args, *(kwargs or {}).values()] if isinstance(each, cls)]
        if function in READING or (function in INDEXING and any(map(_is_mask, args[1]))):
            raise AssertionError(f"{function} waits for a device")
        found = function(*tree_map(_numbers, args), **tree_map(_numbers, kwargs or {}))
        for each in given:  # an operator that writes gives what it has written to
            if found is each.numbers:
                return each
        return tree_map(lambda each: cls(each) if isinstance(each, Tensor) else each, found)


def _numbers(x: Any) -> Any:
    return x.numbers if isinstance(x, OnDevice) else x


def _is_mask(x: Any) -> bool:
    return isinstance(x, OnDevice) and x.dtype in (torch.bool, torch.uint8)


class OnDeviceLabels(distributed.GlobalLabels):
    """Labels of a batch that lie on a device beside the host."""

    def __init__(self, known: distributed.GlobalLabels) -> None:
        super().__init__(known.labels, known.sizes, torch.device("cpu"))
        self._placed = Labels(*(OnDevice(x_M) for x_M in known.labels))


def step_on_device(name: str, chunk: int | None) -> None:
    """A training step after another one: some losses look at the norms of the first batch they see."""
    step = exactness.step_of(exactness.CASES[name]).double()
    gradients_of(step, chunk)(*exactness.whole_batch(1)).read()
    images, labels = exactness.whole_batch(0)
    gradients_of(step, chunk)(OnDevice(images), OnDeviceLabels(labels))


@pytest.mark.parametrize("chunk", [None, exactness.CHUNK])
@pytest.mark.parametrize("name", [name for name in exactness.CASES if name not in WAITING])
def test_no_number_is_read(name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mining, "is_free_to_read", lambda x: not isinstance(x, OnDevice))
    step_on_device(name, chunk)


def test_a_number_that_is_read_is_seen() -> None:
    with pytest.raises(RuntimeError, match=r"tolist\(\) is not supported"):
        step_on_device("adaptive_bound", None)
