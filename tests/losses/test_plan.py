"""A plan made ahead gives a loss the numbers that it finds by itself, and is used for its own labels alone."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from dmlstudy.data.loader import ahead
from dmlstudy.distributed import GlobalLabels
from dmlstudy.losses.interface import Labels
from dmlstudy.losses.plan import BatchPlan, order_of, plan_of
from dmlstudy.training import exactness

CPU = torch.device("cpu")


def labels_of(*images: tuple[int, int]) -> Labels:
    y_N, id_N = (torch.tensor(column) for column in zip(*images, strict=True))
    return Labels(y_N, id_N)


@pytest.mark.parametrize("name", exactness.CASES)
def test_it_changes_no_digit_of_a_step(name: str) -> None:
    found: list[dict[str, Tensor]] = []
    for is_ahead in (False, True):
        images, labels = exactness.whole_batch(0)
        if is_ahead:
            (plan,) = ahead(lambda known: BatchPlan(known.rows(slice(None)), known).whole(), [labels.labels])
            labels = GlobalLabels(labels.labels, labels.sizes, CPU, plan)
        step = exactness.step_of(exactness.CASES[name]).double()
        compared = step(images, labels)
        compared.total.backward()
        grads = {each: p.grad for each, p in step.named_parameters() if p.grad is not None}
        found.append({"total": compared.total.detach(), "count": compared.count, **grads})
    alone, planned = found
    assert alone.keys() == planned.keys()
    for each, value in alone.items():
        dense = [x.to_dense() if x.is_sparse else x for x in (value, planned[each])]
        assert torch.equal(*dense), each


def test_it_is_used_for_its_own_labels_alone() -> None:
    labels = labels_of((1, 3), (0, 2), (1, 1), (0, 0))
    plan = BatchPlan(labels.rows(slice(2)), labels)
    known = GlobalLabels(labels, [4], CPU, BatchPlan(labels.rows(slice(None)), labels))
    anchors = known.of_own(torch.eye(4))
    references = known.gathered(anchors)
    assert plan_of(anchors, references) is known.plan
    assert order_of(references).tolist() == order_of(anchors).tolist() == [3, 1, 2, 0]
    some = anchors.rows(torch.tensor([0, 1]))
    assert plan_of(some, references) is not known.plan
    assert plan_of(some, references).anchor_order_B.tolist() == [1, 0]
    assert order_of(some).tolist() == [1, 0]
    assert plan_of(anchors, references._replace(plan=plan)) is not plan


@pytest.mark.parametrize(
    ("anchors", "references", "is_any"),
    [
        ([(0, 0), (1, 1)], [(0, 0), (1, 1)], False),
        ([(0, 0), (0, 0)], [(0, 0), (0, 0)], False),
        ([(0, 0)], [(0, 0), (0, 1)], True),
        ([(2, 7)], [(2, 8), (3, 9)], True),
        ([(2, 7)], [(3, 9)], False),
    ],
)
def test_positive_pairs_are_seen(
    anchors: list[tuple[int, int]], references: list[tuple[int, int]], is_any: bool
) -> None:
    assert bool(BatchPlan(labels_of(*anchors), labels_of(*references)).has_positive) == is_any


def test_without_references_nothing_is_missed() -> None:
    nothing = Labels(torch.arange(0), torch.arange(0))
    assert bool(BatchPlan(labels_of((0, 0)), nothing).has_positive)
    assert bool(BatchPlan(nothing, nothing).has_positive)


def test_one_thread_works_ahead_in_order() -> None:
    names = set()

    def work(item: int) -> int:
        names.add(threading.current_thread().name)
        if item == 7:
            raise ValueError("seven")
        return item * item

    taken = ahead(work, range(9))
    assert [next(taken) for _ in range(7)] == [item * item for item in range(7)]
    with pytest.raises(ValueError, match="seven"):
        next(taken)
    assert names == {"ahead_0"}
