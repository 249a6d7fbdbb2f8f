"""Cross-batch memory: embeddings of earlier batches as further references.

Shapes: S rows of room in the memory, M rows gathered from all ranks, D embedding size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dmlstudy.losses.interface import Embeddings, Labels
from dmlstudy.losses.parameters import at_least

MOST_ON_HOST = 2**17
"""Rows up to which a memory knows its labels on the host too: there, sorting more takes longer than a GPU's answer."""


class CrossBatchMemory(nn.Module):
    """A queue of the last ``size`` embeddings, detached, with their labels and ids (Wang et al. 2020, XBM).

    It belongs to the state of training and is saved with it. ``filled`` is the number of rows it has taken in, of
    which ``z``, ``y`` and ``id`` hold the last: the n-th at place n modulo ``size``. ``num_batches`` is the number of
    batches it has seen. Both are on the CPU, so that no step waits for a GPU.

    Every rank stores the rows of all ranks, so the queue is the same on each; it follows the batch's dtype and
    device. Losses make no positive pair of two rows of one class and image, so an image's older embedding is no
    positive for it.

    Raises ValueError unless size, dim >= 1 and warmup >= 0.
    """

    z: Tensor
    y: Tensor
    id: Tensor
    filled: Tensor
    num_batches: Tensor

    def __init__(self, size: int, dim: int, warmup: int = 0) -> None:
        super().__init__()
        self.size = int(at_least("size", size, 1))
        self.dim = int(at_least("dim", dim, 1))
        self.warmup = int(at_least("warmup", warmup, 0))
        self.register_buffer("z", torch.zeros(self.size, self.dim))
        self.register_buffer("y", torch.zeros(self.size, dtype=torch.int64))
        self.register_buffer("id", torch.zeros(self.size, dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self._host_rings: Labels | None = None
        """``y`` and ``id`` on the host, after so many batches:"""
        self._host_batches = -1

    def references(self, gathered: Embeddings) -> Embeddings:
        """The gathered rows, then the memory's, the oldest first; and takes the gathered rows in afterwards.

        The gathered rows alone are live.

        In the first ``warmup`` batches the memory fills but is not shown. Beyond ``size`` the oldest rows fall
        out; of a larger batch its last rows stay. With memory rows there are no structure embeddings.
        Raises ValueError for rows of another size than ``dim``.
        """
        z_MD, y_M, id_M = gathered.z_ND, gathered.y_N, gathered.id_N
        if z_MD.shape[1] != self.dim:
            raise ValueError(f"embeddings have size {z_MD.shape[1]}, the memory's dim is {self.dim}")
        self.z, self.y, self.id = self.z.to(z_MD), self.y.to(y_M), self.id.to(id_M)
        filled = int(self.filled)
        host_rings = None if gathered.on_host is None else self._on_host()
        rings = [(self.z, z_MD), (self.y, y_M), (self.id, id_M)]
        if gathered.on_host is not None and host_rings is not None:
            rings += zip(host_rings, gathered.on_host, strict=True)
        references = gathered
        if filled and int(self.num_batches) >= self.warmup:
            z_RD, y_R, id_R, *on_host = (
                torch.cat([new, *self._oldest_first(ring, filled)]) for ring, new in rings
            )
            known = Labels(*on_host) if on_host else None
            references = Embeddings(z_RD, y_R, id_R, on_host=known, live_LD=z_MD)
        for ring, new in rings:
            self._take_in(ring, filled, new.detach())
        self.filled += len(z_MD)
        self.num_batches += 1
        if host_rings is not None:
            self._host_batches = int(self.num_batches)
        return references

    def _on_host(self) -> Labels | None:
        """The rings of labels and ids on the host; of a state that was taken over a GPU is asked once."""
        if self.size > MOST_ON_HOST:
            return None
        if self._host_rings is None or self._host_batches != int(self.num_batches):
            self._host_rings = Labels(self.y.to("cpu", copy=True), self.id.to("cpu", copy=True))
        return self._host_rings

    def _oldest_first(self, ring: Tensor, filled: int) -> list[Tensor]:
        """The rows in it, in two parts where they go over its end."""
        if filled <= self.size:
            return [ring[:filled]]
        oldest = filled % self.size
        return [ring[oldest:], ring[:oldest]]

    def _take_in(self, ring: Tensor, filled: int, new: Tensor) -> None:
        """Write the new rows, or of more than it holds the last, in the place of the oldest."""
        place = (filled + max(0, len(new) - self.size)) % self.size
        kept = new[-self.size :]
        until_end = min(len(kept), self.size - place)
        ring[place : place + until_end] = kept[:until_end]
        ring[: len(kept) - until_end] = kept[until_end:]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CrossBatchMemory:
        """Move and convert the rows alone."""
        counts = self.filled, self.num_batches
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.filled, self.num_batches = counts
        return self
