"""Losses of the catalogue in a training loop of one's own: embeddings and labels in, one number to differentiate out.

Shapes: N rows of a batch, D embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dmlstudy.losses import catalogue
from dmlstudy.losses.catalogue import Part
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.unused import check_used
from dmlstudy.records import CURVATURE, Scalar


class BatchLoss(nn.Module):
    """The mean of a loss over a batch: total / max(1, count).

    Rows with equal ids are one image and no positive pair; without ids each row is an image of its own.

    A loss that looks at norms (``loss.uses_norms``) takes embeddings as they are before they are normalised, and
    normalises them itself.

    Under data parallel training wrap it with ``distributed.across_ranks``, which compares with the batches of all
    ranks.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, z_ND: Tensor, labels_N: Tensor, ids_N: Tensor | None = None) -> Tensor:
        """The mean, a scalar. Raises ValueError for wrong shapes, for labels or ids that are not int64, and for a
        first batch of unit vectors where the loss looks at norms."""
        if ids_N is None:
            ids_N = torch.arange(len(z_ND), device=z_ND.device)
        total, count = self.loss(of_batch(self.loss, z_ND, labels_N, ids_N))
        return total / count.clamp(min=1)

    if TYPE_CHECKING:

        def __call__(self, z_ND: Tensor, labels_N: Tensor, ids_N: Tensor | None = None) -> Tensor: ...


def of_batch(loss: Loss, z_ND: Tensor, labels_N: Tensor, ids_N: Tensor) -> Embeddings:
    """A batch for this loss: as it is, or normalised with its norms where the loss looks at them."""
    batch = Embeddings(z_ND, labels_N, ids_N)
    can_be = z_ND.ndim == 2 and z_ND.is_floating_point()  # the loss says what is wrong with others
    return batch.with_norms() if loss.uses_norms and can_be else batch


def build(
    name: str,
    *,
    num_classes: int | None = None,
    class_sizes: Sequence[int] | None = None,
    dim: int | None = None,
    num_layers: int = 1,
    seed: int = 0,
    matryoshka: Sequence[int] = (),
    curvature: float = CURVATURE,
    regularizer: tuple[str, Mapping[str, Scalar]] | None = None,
    **params: Scalar | Part,
) -> BatchLoss:
    """The loss ``name`` of the catalogue, with these parameters and the others at their defaults.

    Losses with proxies need ``num_classes`` and ``dim``, the embedding size, and have parameters of their own to be
    trained, and some ``class_sizes``, the number of training images of each class.

    Where a parameter names a weighting, mining or distance, an object may stand: a ``weighting.Weighting``,
    a ``mining.Miner``, a ``distances.Distance``. A ``regularizer`` is a name and its parameters, ``weight`` among them.
    ``matryoshka`` are sizes below ``dim``: the loss is the mean over these leading parts and the whole.

    ``distance='hyperbolic'`` is of points of a ball of this ``curvature``, as ``embedders.on_ball`` gives them.

    Raises ValueError as ``catalogue.build``, for a size that is needed and missing, and for a parameter that the chosen
    weighting, mining or mode does not use.
    """
    sizes = {"num_classes": num_classes, "dim": dim}
    needed = [*catalogue.sizes_of(name), *(["dim"] if matryoshka else [])]
    missing = [key for key in dict.fromkeys(needed) if sizes[key] is None]
    if missing:
        raise ValueError(f"loss {name!r} needs {' and '.join(missing)}; pass {missing[0]}=...")
    check_used("loss", name, params)
    if regularizer is not None:
        check_used("regularizer", *regularizer)
    return BatchLoss(
        catalogue.build(
            name,
            params,
            regularizer=regularizer,
            leading=matryoshka,
            num_classes=1 if num_classes is None else num_classes,
            class_sizes=class_sizes,
            dim=1 if dim is None else dim,
            num_layers=num_layers,
            seed=seed,
            curvature=curvature,
        )
    )
