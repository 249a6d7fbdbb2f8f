"""Matryoshka: the mean of a loss over leading parts, with class vectors cut alike, at any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from support.small_batch import assert_same, embeddings
from support.worked_example import example
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.class_softmax import NormSoftmax
from dmlstudy.losses.infonce import SupCon
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.matryoshka import Matryoshka

NUM_CLASSES, DIM = 5, 4
SUITED = [
    name
    for name in catalogue.CATALOGUE
    if not catalogue.build(name, {}, num_classes=NUM_CLASSES, dim=DIM).why_not_cut()
]
each_suited = pytest.mark.parametrize("name", SUITED)


def first_numbers(batch: Embeddings, size: int) -> Embeddings:
    return batch._replace(z_ND=functional.normalize(batch.z_ND[:, :size], dim=1))


def cut_by_hand(loss: Loss, size: int) -> Loss:
    """A loss of that size, whose class vectors are the first numbers of the other's."""
    cut = copy.deepcopy(loss)
    for module in cut.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                setattr(module, name, torch.nn.Parameter(parameter[..., :size].detach().clone()))
    return cut


def test_a_worked_example() -> None:
    total, count = Matryoshka(SupCon(0.5), [2], 3)(example())
    assert (total / count).item() == pytest.approx(0.9849000982, abs=5e-11)


def test_most_losses_go_with_it() -> None:
    assert {
        "triplet",
        "supcon",
        "multi_similarity",
        "proxy_anchor",
        "soft_triple",
        "margin",
        "cosface",
    } <= set(SUITED)


@each_suited
@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
def test_it_is_the_mean_of_the_sizes_losses(name: str) -> None:
    batch, base = embeddings(), catalogue.build(name, {}, num_classes=NUM_CLASSES, dim=DIM).double()
    total, count = Matryoshka(copy.deepcopy(base), [2, 3], DIM)(batch)
    sums = [cut_by_hand(base, size)(first_numbers(batch, size)) for size in (2, 3)] + [base(batch)]
    mean = sum((each.total / each.count.clamp(min=1) for each in sums), torch.zeros(())) / 3
    assert count == sums[-1].count
    assert_same((total / count.clamp(min=1),), (mean,), 1e-10)


@pytest.mark.parametrize("name", ["cosface", "soft_triple"])
def test_class_vectors_get_the_gradient_of_all_sizes(name: str) -> None:
    batch, base = embeddings(), catalogue.build(name, {}, num_classes=NUM_CLASSES, dim=DIM).double()
    whole = Matryoshka(copy.deepcopy(base), [2], DIM)
    total, count = whole(batch)
    (total / count).backward()
    part = cut_by_hand(base, 2)
    for loss, own in ((base, batch), (part, first_numbers(batch, 2))):
        total, count = loss(own)
        (total / count / 2).backward()
    for got, of_all, of_part in zip(whole.parameters(), base.parameters(), part.parameters(), strict=True):
        wanted = of_all.grad.clone()
        wanted[..., :2] += of_part.grad
        assert_same((got.grad,), (wanted,), 1e-10)


@pytest.mark.parametrize("sizes", [[], [3, 2], [2, 2], [0, 2], [2, 4]])
def test_sizes_ascend_below_the_whole(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="must be ascending sizes below the embedding's 4"):
        Matryoshka(SupCon(), sizes, 4)


def test_a_loss_whose_state_is_of_one_size_is_refused() -> None:
    layered = catalogue.build("adaptive_bound", {}, num_classes=3, dim=4, num_layers=2)
    with pytest.raises(ValueError, match="matryoshka does not go with a loss that weighs the layers"):
        Matryoshka(layered, [2], 4)
    for given, said in (
        ({"sample": 0.5}, "of sampled classes"),
        ({"share": slice(0, 2)}, "whose classes are shared"),
    ):
        with pytest.raises(ValueError, match=f"matryoshka does not go with a loss {said}"):
            Matryoshka(NormSoftmax(3, 4, **given), [2], 4)  # type: ignore[arg-type]


def test_embeddings_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="embeddings have size 4, and matryoshka's largest is 6"):
        Matryoshka(SupCon(), [2], 6)(embeddings())
