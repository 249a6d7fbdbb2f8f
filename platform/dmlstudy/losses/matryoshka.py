"""A loss of several leading parts of an embedding, so that short vectors are as good as they can be.

Shapes: N rows, D embedding size, S sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.func import functional_call
from torch.nn import functional

from dmlstudy.losses.distances import full_precision
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, brought_to


class Matryoshka(Loss):
    """A loss's mean over the leading parts of embeddings (Kusupati et al. 2022).

    L = (1/S) sum_d L_d, L_d the loss of z[:d] / ||z[:d]||; class vectors and proxies are cut alike, other parameters
    are shared. Each L_d is its own sum over all ranks by its own count.

    ``sizes`` are the shorter parts; the whole embedding is always among the S. The count is the loss's of the whole.
    Where the whole has no terms the parts remain.

    Raises ValueError for sizes that do not ascend within 1..D-1, for embeddings of another size than ``dim``, and for a
    loss whose state is that of one size: running statistics, norms, layers.
    """

    def __init__(self, base: Loss, sizes: Sequence[int], dim: int) -> None:
        super().__init__()
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] >= dim:
            raise ValueError(
                f"matryoshka={' '.join(map(str, sizes))!r} must be ascending sizes below the embedding's {dim}"
            )
        if problem := base.why_not_cut():
            raise ValueError(f"matryoshka does not go with {problem}; leave it out, or take another loss")
        self.base = base
        self.sizes = (*sizes, dim)

    @property
    def accepts_memory(self) -> bool:  # type: ignore[override]  # what is a class's elsewhere is the base's here
        """True if the base accepts references of earlier batches."""
        return self.base.accepts_memory

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The sizes' sums, brought to the count of the whole."""
        if anchors.z_ND.shape[1] != self.sizes[-1]:
            raise ValueError(
                f"embeddings have size {anchors.z_ND.shape[1]}, and matryoshka's largest is {self.sizes[-1]}; "
                "build the loss with dim = the embedder's size"
            )
        sums = []
        for size in self.sizes:
            own = _cut(anchors, size)
            others = own if references is anchors else _cut(references, size)
            sums.append(self._of_size(size, own, others, world))
        *parts, whole = sums
        total = sum(brought_to(whole.count, [(1.0, part) for part in parts], world), whole.total)
        return LossSum(total / len(self.sizes), whole.count)

    def _of_size(self, size: int, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The base's sum, its class vectors (parameters of more than one dimension, D the last) cut to ``size``."""
        if size == self.sizes[-1]:
            return self.base(anchors, references, world)
        cut = {name: x[..., :size] if x.ndim > 1 else x for name, x in self.base.named_parameters()}
        return LossSum(*functional_call(self.base, cut, (anchors, references, world)))


def _cut(embeddings: Embeddings, size: int) -> Embeddings:
    """The leading numbers as unit vectors, in float32 at least; the whole embedding as it is."""
    if size == embeddings.z_ND.shape[1]:
        return embeddings
    z_ND, live_LD = (
        None if x is None else functional.normalize(full_precision(x)[0][:, :size], dim=1)
        for x in (embeddings.z_ND, embeddings.live_LD)
    )
    assert z_ND is not None
    return embeddings._replace(z_ND=z_ND, live_LD=live_LD)
