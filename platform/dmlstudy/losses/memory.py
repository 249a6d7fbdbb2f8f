"""Cross-batch memory: embeddings of earlier batches as further references.

Shapes: S rows of room in the memory, M rows gathered from all ranks, D embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.parameters import at_least


class CrossBatchMemory(nn.Module):
    """A queue of the last ``size`` embeddings, detached, with their labels and ids (Wang et al. 2020, XBM).

    It belongs to the state of training and is saved with it: ``z``, ``y`` and ``id`` hold the rows, the oldest
    first, ``filled`` how many there are, ``num_batches`` how many batches it has seen.

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

    def references(self, gathered: Embeddings) -> Embeddings:
        """The gathered rows, then the memory's, the oldest first; and takes the gathered rows in afterwards.

        In the first ``warmup`` batches the memory fills but is not shown. Beyond ``size`` the oldest rows fall
        out; of a larger batch its last rows stay. With memory rows there are no structure embeddings.
        Raises ValueError for rows of another size than ``dim``.
        """
        z_MD, y_M, id_M = gathered.z_ND, gathered.y_N, gathered.id_N
        if z_MD.shape[1] != self.dim:
            raise ValueError(f"embeddings have size {z_MD.shape[1]}, the memory's dim is {self.dim}")
        self.z, self.y, self.id = self.z.to(z_MD), self.y.to(y_M), self.id.to(id_M)
        filled = int(self.filled)
        older = Embeddings(self.z[:filled], self.y[:filled], self.id[:filled])
        references = gathered
        if filled and int(self.num_batches) >= self.warmup:
            references = Embeddings(
                torch.cat([z_MD, older.z_ND]), torch.cat([y_M, older.y_N]), torch.cat([id_M, older.id_N])
            )
        for queue, old, new in (
            (self.z, older.z_ND, z_MD),
            (self.y, older.y_N, y_M),
            (self.id, older.id_N, id_M),
        ):
            kept = torch.cat([old, new.detach()])[-self.size :]
            queue[: len(kept)] = kept
        self.filled.fill_(min(self.size, filled + len(z_MD)))
        self.num_batches += 1
        return references
