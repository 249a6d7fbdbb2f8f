"""Interface of every loss: embeddings in, a sum over local anchors and its count out.

Shapes: N rows (B anchors on this rank, or M references), D embedding size, L live rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlstudy.losses.products import Product, exact
from dmlstudy.transfers import placed

if TYPE_CHECKING:
    from dmlstudy.losses.plan import BatchPlan


class Labels(NamedTuple):
    """Labels of samples, and the names of their images, int64."""

    y_N: Tensor
    id_N: Tensor

    def rows(self, selected: slice | Tensor) -> Labels:
        """The selected rows of both."""
        return Labels(self.y_N[selected], self.id_N[selected])


class Embeddings(NamedTuple):
    """Embedded samples: the own batch, the gathered batch or a memory queue, one type for all.

    ``id_N`` names the image: two rows of one class with an equal id are one image (the row itself, or a
    duplicate drawn with replacement) and are no positive pair (``losses/README.md``). ``structure_ND`` holds the
    structure embeddings omega where the embedder has such a head; references need none.

    ``norm_N`` holds the norms before normalising where the loss ``uses_norms``; those of references have no gradient.
    ``drift_N`` holds squared distances from the start's model where the loss ``retains`` it; references have none.

    ``on_host`` holds labels and ids in the host's memory too, where they are known there: what follows from them alone,
    such as the order of rows, is then found without waiting for a device.

    ``live_LD`` are the first rows of ``z_ND`` as they were before constants were put behind them, such as a memory's:
    where given, a gradient may flow through these alone. Whoever replaces ``z_ND`` replaces them too.

    ``plan`` was made of ``on_host`` ahead, by the loader's thread; it holds for those very labels alone.
    """

    z_ND: Tensor
    y_N: Tensor
    id_N: Tensor
    structure_ND: Tensor | None = None
    norm_N: Tensor | None = None
    drift_N: Tensor | None = None
    on_host: Labels | None = None
    live_LD: Tensor | None = None
    plan: BatchPlan | None = None

    @property
    def labels(self) -> Labels:
        """Labels and ids where they are read best: on the host if they are known there, else beside the embeddings."""
        return Labels(self.y_N, self.id_N) if self.on_host is None else self.on_host

    @property
    def finite_N(self) -> Tensor:
        """True for rows whose embedding is finite, and its norm where there is one."""
        finite_N = self.z_ND.detach().isfinite().all(dim=1)
        return finite_N if self.norm_N is None else finite_N & self.norm_N.detach().isfinite()

    def rows(self, selected: slice | Tensor) -> Embeddings:
        """The selected rows of every part, all of them live; a tensor of places lies where ``labels`` do."""
        on_host = None if self.on_host is None else self.on_host.rows(selected)
        if isinstance(selected, Tensor):
            selected = placed(selected, self.z_ND.device)
        structure_ND = None if self.structure_ND is None else self.structure_ND[selected]
        norm_N = None if self.norm_N is None else self.norm_N[selected]
        drift_N = None if self.drift_N is None else self.drift_N[selected]
        y_N, id_N = self.y_N[selected], self.id_N[selected]
        return Embeddings(self.z_ND[selected], y_N, id_N, structure_ND, norm_N, drift_N, on_host)

    def with_norms(self) -> Embeddings:
        """Embeddings that are not normalised yet as unit vectors, with their norms beside them; float32 at least."""
        z_ND = self.z_ND.to(torch.promote_types(self.z_ND.dtype, torch.float32))
        return self._replace(z_ND=normalize(z_ND, dim=1, eps=1e-12), norm_N=z_ND.norm(dim=1))


def labelled(z_ND: Tensor, labels: Labels) -> Embeddings:
    """Embeddings whose labels and ids the host knows."""
    y_N, id_N = (placed(x_N, z_ND.device) for x_N in labels)
    return Embeddings(z_ND, y_N, id_N, on_host=labels)


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

    def total(self, n: int) -> int:
        """Sum of every rank's n, known to the host."""
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

    def total(self, n: int) -> int:
        """n itself."""
        return n

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
    """True if its products, by ``product``, may be computed in another precision than float32 (``products``)."""

    uses_norms: ClassVar[bool] = False
    """True if the loss looks at the norms that embeddings had before they were normalised."""

    finds_whole_gradients: bool = False
    """True if backward gives the loss's own parameters the gradient of all ranks, which nothing averages then."""

    retains: Literal["", "features", "embedding"] = ""
    """The output of the model, if any, whose distance from the start's the loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.product: Product = exact

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
    return LossSum(total, total.new_full((), anchors.z_ND.shape[0]))


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


def check_classes(embeddings: Embeddings, num_classes: int) -> None:
    """Raises ValueError unless every label lies in 0..num_classes-1."""
    y_N, _ = embeddings.labels
    if not y_N.numel():
        return
    first, last = torch.stack(y_N.aminmax()).tolist()
    if not 0 <= first <= last < num_classes:
        raise ValueError(
            f"labels run from {first} to {last}, but the loss was built for "
            f"num_classes={num_classes}; number the training classes 0..{num_classes - 1}"
        )


def check_embeddings(role: str, embeddings: Embeddings) -> None:
    """Raises ValueError for embeddings, labels or ids of a wrong type or shape, naming their ``role``."""
    z_ND, y_N, id_N, structure_ND, norm_N, drift_N, _, live_LD, _ = embeddings
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
    assert live_LD is None or (len(live_LD) <= len(z_ND) and live_LD.shape[1:] == z_ND.shape[1:])
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
