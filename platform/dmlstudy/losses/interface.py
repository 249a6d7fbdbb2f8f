"""Interface of every loss: embeddings in, a sum over local anchors and its count out.

Shapes: N rows (B anchors on this rank, or M references), D embedding size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


class Embeddings(NamedTuple):
    """Embedded samples: the own batch, the gathered batch or a memory queue, one type for all.

    ``id_N`` names the image: two rows of one class with an equal id are one image (the row itself, or a
    duplicate drawn with replacement) and are no positive pair (``losses/README.md``). ``structure_ND`` holds the
    structure embeddings omega where the embedder has such a head; references need none.

    ``norm_N`` holds the norms before normalising where the loss ``uses_norms``; those of references have no gradient.
    ``drift_N`` holds squared distances from the start's model where the loss ``retains`` it; references have none.
    """

    z_ND: Tensor
    y_N: Tensor
    id_N: Tensor
    structure_ND: Tensor | None = None
    norm_N: Tensor | None = None
    drift_N: Tensor | None = None

    def rows(self, selected: slice | Tensor) -> Embeddings:
        """The selected rows of every part."""
        structure_ND = None if self.structure_ND is None else self.structure_ND[selected]
        norm_N = None if self.norm_N is None else self.norm_N[selected]
        drift_N = None if self.drift_N is None else self.drift_N[selected]
        return Embeddings(
            self.z_ND[selected], self.y_N[selected], self.id_N[selected], structure_ND, norm_N, drift_N
        )

    def with_norms(self) -> Embeddings:
        """Embeddings that are not normalised yet as unit vectors, with their norms beside them; float32 at least."""
        z_ND = self.z_ND.to(torch.promote_types(self.z_ND.dtype, torch.float32))
        return self._replace(z_ND=normalize(z_ND, dim=1, eps=1e-12), norm_N=z_ND.norm(dim=1))


class LossSum(NamedTuple):
    """Sum over the local terms, on the graph, and their number; the step divides by the global count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which no one asks of a loss


class World(Protocol):
    """The ranks that share a batch, as a loss sees them; each rank makes the same calls in one order."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def gather(self, x_B: Tensor) -> Tensor:
        """All ranks' rows in rank order, (B, ...) -> (M, ...); the gradient of each row reaches its owner."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum of every rank's x on every rank; backward sums what the ranks say about it."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Largest of every rank's x, element by element, without gradient."""
        ...

    def share(self, n: int) -> slice:
        """This rank's part of n items that every rank has; the parts are disjoint and cover all n."""
        ...


class OneProcess:
    """A world of one rank: everything is its own."""

    size = 1

    def gather(self, x_B: Tensor) -> Tensor:
        """x itself."""
        return x_B

    def sum(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def share(self, n: int) -> slice:
        """All n."""
        return slice(0, n)


ALONE = OneProcess()


class Loss(nn.Module, ABC):
    """A loss that is a sum over anchors: L = (1/Z) sum_a L_a(references), Z the global count.

    Anchors z_BD and references z_MD give a LossSum of two scalars. An empty selection gives a zero that
    is still attached to the graph, with zero gradients. A subclass says only what ``terms`` are.
    """

    accepts_memory: ClassVar[bool] = False
    """True if references may hold rows of earlier batches (a cross-batch memory) after the gathered ones."""

    has_precision: ClassVar[bool] = False
    """True if its products may be computed in another precision than float32 (``products``)."""

    uses_norms: ClassVar[bool] = False
    """True if the loss looks at the norms that embeddings had before they were normalised."""

    finds_whole_gradients: bool = False
    """True if backward gives the loss's own parameters the gradient of all ranks, which nothing averages then."""

    retains: Literal["", "features", "embedding"] = ""
    """The output of the model, if any, whose distance from the start's the loss looks at."""

    def forward(
        self, anchors: Embeddings, references: Embeddings | None = None, world: World = ALONE
    ) -> LossSum:
        """Terms of the anchors against the references (default: the anchors themselves).

        With several ranks, references are the gathered batch and ``world`` what all of them share.
        Raises ValueError for wrong shapes, for labels or ids that are not int64, for unequal D.
        """
        check_embeddings("anchors", anchors)
        if references is None:
            references = anchors
        else:
            check_embeddings("references", references)
            if references.z_ND.shape[1] != anchors.z_ND.shape[1]:
                raise ValueError(
                    f"anchors have embedding size {anchors.z_ND.shape[1]}, references "
                    f"{references.z_ND.shape[1]}; embed both with the same embedder"
                )
        total, count = self.terms(anchors, references, world)
        return LossSum(total, count.detach())

    def why_not_cut(self) -> str:
        """The part of the loss that has no meaning for the first numbers of an embedding, or ''."""
        if self.layer_weights is not None:
            return "a loss that weighs the layers of an embedding"
        if self.uses_norms:
            return "a loss that looks at norms"
        if next(iter(self.buffers()), None) is not None:
            return "a loss that keeps running statistics"
        return ""

    @property
    def layer_weights(self) -> Tensor | None:
        """alpha of the embedding's layers, where the loss moves it; the embedder then weights its layers so."""
        return None

    @abstractmethod
    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of the anchors' terms and their number, for inputs that have been checked."""

    if TYPE_CHECKING:

        def __call__(
            self, anchors: Embeddings, references: Embeddings | None = None, world: World = ALONE
        ) -> LossSum: ...


def per_anchor(total: Tensor, anchors: Embeddings) -> LossSum:
    """The sum with the number of all local anchors as its count, also those with an empty selection."""
    return LossSum(total, total.new_tensor(float(anchors.z_ND.shape[0])))


def brought_to(count: Tensor, parts: Sequence[tuple[float, LossSum]], world: World) -> list[Tensor]:
    """Weighted totals of sums with counts of their own, so that over all ranks' ``count`` each is weight x its mean.

    weight x total x Z / Z_part, the counts of all ranks and at least 1. Every rank must call this.
    """
    counts = world.sum(torch.stack([count.double(), *(part.count.double() for _, part in parts)])).clamp(
        min=1
    )
    return [
        (weight * counts[0] / own).to(part.total.dtype) * part.total
        for (weight, part), own in zip(parts, counts[1:], strict=True)
    ]


def check_classes(y_B: Tensor, num_classes: int) -> None:
    """Raises ValueError unless every label lies in 0..num_classes-1."""
    if y_B.numel() and not 0 <= int(y_B.min()) <= int(y_B.max()) < num_classes:
        raise ValueError(
            f"labels run from {int(y_B.min())} to {int(y_B.max())}, but the loss was built for "
            f"num_classes={num_classes}; number the training classes 0..{num_classes - 1}"
        )


def check_embeddings(role: str, embeddings: Embeddings) -> None:
    """Raises ValueError for embeddings, labels or ids of a wrong type or shape, naming their ``role``."""
    z_ND, y_N, id_N, structure_ND, norm_N, drift_N = embeddings
    if z_ND.ndim != 2 or not z_ND.is_floating_point():
        raise ValueError(
            f"{role}: embeddings must be a floating (N, D) tensor, not {z_ND.dtype} {tuple(z_ND.shape)}"
        )
    for name, x_N in (("labels", y_N), ("sample ids", id_N)):
        if x_N.dtype != torch.int64:
            raise ValueError(f"{role}: {name} must be int64, not {x_N.dtype}; convert them with .long()")
        if x_N.shape != z_ND.shape[:1]:
            raise ValueError(
                f"{role}: {name} must have one entry per embedding: "
                f"shape ({z_ND.shape[0]},), not {tuple(x_N.shape)}"
            )
    if structure_ND is not None and structure_ND.shape != z_ND.shape:
        raise ValueError(
            f"{role}: structure embeddings must have the embeddings' shape {tuple(z_ND.shape)}, "
            f"not {tuple(structure_ND.shape)}"
        )
    for name, scalar_N in (("norms", norm_N), ("distances from the start", drift_N)):
        if scalar_N is not None and (scalar_N.shape != y_N.shape or not scalar_N.is_floating_point()):
            raise ValueError(
                f"{role}: {name} must be a floating tensor with one entry per embedding: shape ({z_ND.shape[0]},), not "
                f"{scalar_N.dtype} {tuple(scalar_N.shape)}"
            )
