"""Batches on their way to a GPU: the next one is copied while the last one is computed.

A copy from ordinary memory makes the host wait for all that the GPU has to do. From pinned memory, on a stream of its
own, it runs beside the computation.

Shapes: B images of a batch, and whatever an image is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from dmlstudy.data.images import Inputs

NUM_SLOTS = 2
"""Batches that may be on the device at once: one is computed, one arrives."""


def sent(batches: Iterable[Inputs], device: torch.device) -> Iterator[Tensor]:
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

    def filled(self, images: Inputs) -> Tensor:
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
