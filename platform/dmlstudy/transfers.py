"""Copies between the host and a device that neither of them waits for.

A GPU runs behind the host, which launches its work. Whoever reads one of its numbers waits until all work before it is
done, and the GPU then idles until the host has launched more. So what the host knows is sent from pinned memory, and
what it must know is copied at once and read later.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
