"""A batch's plan: the order of rows, the bands of anchors and the numbers of pairs, from labels and ids alone.

Labels of a batch are known before its embeddings are, so a plan can be made ahead, by another thread. Where none was
made, a loss makes its own of the labels it is given.

Shapes: B anchors on this rank, M references.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dmlstudy.losses.interface import Embeddings, Labels


class BatchPlan:
    """The order of (label, id) of anchors and of references, and where each anchor's class lies among references.

    It lies where the labels do, and nothing in it depends on who made it or when.
    """

    def __init__(self, anchors: Labels, references: Labels) -> None:
        self.anchors, self.references = anchors, references
        self.anchor_order_B, self.reference_order_M = in_order(anchors), in_order(references)
        self.sorted_anchors = anchors.rows(self.anchor_order_B)
        self.sorted_references = references.rows(self.reference_order_M)
        (y_B, id_B), (y_M, id_M) = self.sorted_anchors, self.sorted_references
        self.lows_B = torch.searchsorted(y_M, y_B)
        self.highs_B = torch.searchsorted(y_M, y_B, right=True)
        """The first reference of each anchor's class, and the one after the last, in this order."""
        self.has_positive = y_M.new_ones((), dtype=torch.bool)
        """True, as a tensor, if any pair is positive, or if there is nothing to pair with."""
        if len(y_M):  # ids are in order within a class: another image than i's is its first or its last
            first_B, last_B = id_M[self.lows_B.clamp(max=len(y_M) - 1)], id_M[(self.highs_B - 1).clamp(min=0)]
            is_any = ((self.lows_B < self.highs_B) & ((first_B != id_B) | (last_B != id_B))).any()
            self.has_positive = is_any | ((y_M[1:] == y_M[:-1]) & (id_M[1:] != id_M[:-1])).any()

    @cached_property
    def pair_numbers(self) -> tuple[Tensor, Tensor]:
        """Numbers of positive and of negative pairs of each anchor, (B,) and (B,), in the anchors' own order."""
        return pair_numbers(self.anchors, self.references)

    def whole(self) -> BatchPlan:
        """This plan, with all that is otherwise found when it is asked for."""
        _ = self.pair_numbers
        return self


def plan_of(anchors: Embeddings, references: Embeddings) -> BatchPlan:
    """The plan that was made of these very labels, or a new one."""
    made = references.plan
    if made is not None and made.anchors is anchors.on_host and made.references is references.on_host:
        return made
    return BatchPlan(anchors.labels, references.labels)


def order_of(embeddings: Embeddings) -> Tensor:
    """The order of the rows by (label, id), from their plan where they have one; it lies where the labels do."""
    plan = embeddings.plan
    if plan is not None and plan.references is embeddings.on_host:
        return plan.reference_order_M
    if plan is not None and plan.anchors is embeddings.on_host:
        return plan.anchor_order_B
    return in_order(embeddings.labels)


def in_order(labels: Labels) -> Tensor:
    """The permutation that sorts by label, and by id within a label; it lies where the labels do."""
    by_id_N = labels.id_N.argsort(stable=True)
    return by_id_N[labels.y_N[by_id_N].argsort(stable=True)]


def pair_numbers(anchors: Labels, references: Labels) -> tuple[Tensor, Tensor]:
    """Numbers of positive and of negative pairs of each anchor, (B,) and (B,), from labels and ids."""
    y_N, id_N = torch.cat([anchors.y_N, references.y_N]), torch.cat([anchors.id_N, references.id_N])
    order_N = in_order(Labels(y_N, id_N))
    is_reference_N = (order_N >= len(anchors.y_N)).long()
    changed_N = torch.zeros_like(y_N, dtype=torch.bool)
    alike: list[Tensor] = []  # references of an anchor's class, and those of its class and image
    for x_N in (y_N[order_N], id_N[order_N]):
        changed_N = changed_N | (x_N != x_N.roll(1))
        group_N = changed_N.cumsum(0)
        number_N = torch.zeros(len(y_N) + 1, dtype=torch.int64, device=y_N.device)
        number_N.index_add_(0, group_N, is_reference_N)
        alike.append(torch.empty_like(y_N).scatter_(0, order_N, number_N[group_N])[: len(anchors.y_N)])
    return alike[0] - alike[1], len(references.y_N) - alike[0]
