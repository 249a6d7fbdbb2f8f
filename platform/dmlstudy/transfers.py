"""Copies between the host and a device that neither of them waits for.

A GPU runs behind the host, which launches its work. Whoever reads one of its numbers waits until all work before it is
done, and the GPU then idles until the host has launched more. So what the host knows is sent from pinned memory, and
what it must know is copied at once and read later.

Shapes: B images of a batch, and whatever an image is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_SLOTS = 2
"""Batches that may be on the device at once: one is computed, one arrives."""


def placed(x: Tensor, device: torch.device) -> Tensor:
    """The host's tensor on a device, on which later work finds it whole; x itself where it is there already."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class ReadLater:
    """Numbers of a device, on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._values = values.detach()
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """The numbers, flat; waits for what computed them, and for nothing after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.flatten().tolist()


def is_free_to_read(x: Tensor) -> bool:
    """True if the host has the tensor's numbers at hand."""
    return x.device.type == "cpu"


def sent(batches: Iterable[NDArray[Any]], device: torch.device) -> Iterator[Tensor]:
    """Yield copies of the batches on the device, each to be used before the next is asked for.

    What is queued on the current stream of a GPU before that may still read the batch: the host does not wait for it.
    """
    if device.type != "cuda":
        for images in batches:
            yield torch.tensor(images, device=device)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    slots = [_Slot(device, stream) for _ in range(NUM_SLOTS)]
    for number, images in enumerate(batches):
        slot = slots[number % NUM_SLOTS]
        yield slot.filled(images)
        slot.is_free.record(torch.cuda.current_stream(device))


class _Slot:
    """A place in pinned memory and one on the device, which hold one batch after another."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._pinned = self._there = torch.empty(0)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """The end of what the current stream does with the batch."""

    def filled(self, images: NDArray[Any]) -> Tensor:
        """The images on the device, as the current stream may use them from now on."""
        self._arrived.synchronize()  # the copy before has left the pinned place
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self.is_free)
            kind = torch.from_numpy(np.empty(0, images.dtype)).dtype
            if self._pinned.dtype != kind or self._pinned.numel() < images.size:
                self._pinned = torch.empty(images.size, dtype=kind, pin_memory=True)
                self._there = torch.empty(images.size, dtype=kind, device=self._device)
            pinned = self._pinned[: images.size].view(images.shape)
            there = self._there[: images.size].view(images.shape)
            np.copyto(pinned.numpy(), images)
            there.copy_(pinned, non_blocking=True)
            self._arrived.record(self._stream)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._arrived)
        there.record_stream(current)
        return there
