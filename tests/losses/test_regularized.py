"""A loss with a regulariser: each with its own mean, at any number of ranks; and every regulariser's law."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses import tiles
from dmlstudy.losses.class_softmax import ProxyNCAPlusPlus
from dmlstudy.losses.distance_levels import DistanceLevels
from dmlstudy.losses.graph import GraphConsistency
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.losses.pair_weighting import Contrastive
from dmlstudy.losses.regularized import Regularized
from dmlstudy.losses.spreading import GlobalOrthogonal, KoLeo
from dmlstudy.losses.structure import Structure
from dmlstudy.losses.threshold_consistency import ThresholdConsistentMargin

DIM, NUM_ROWS = 5, 13
SPLITS = [(7, 6), (12, 1), (0, 13), (5, 0, 8), (3, 3, 3, 4), (13, 0, 0, 0)]
each_split = pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))

REGULARIZERS: dict[str, Loss] = {
    "gc_bar": GraphConsistency(),
    "gc_bar median": GraphConsistency(sigma_mode="median"),
    "gc_bar_squared": GraphConsistency("gc_bar_squared"),
    "gc": GraphConsistency("gc", sigma=0.5),
    "structure": Structure(),
    "structure adaptive": Structure(eta_source="adaptive"),
    "structure paper": Structure("paper"),
    "structure paper adaptive": Structure("paper", "adaptive"),
    "levels": DistanceLevels(),
    "tcm": ThresholdConsistentMargin(0.9, 0.1),
    "koleo": KoLeo(),
    "gor": GlobalOrthogonal(),
    "gor all": GlobalOrthogonal(pairs="all"),
}
each_regularizer = pytest.mark.parametrize("name", list(REGULARIZERS))


class Counted(Loss):
    """Sum over the anchors' rows with a label above 0 of their coordinates; counts those rows."""

    accepts_memory: ClassVar[bool] = False

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.tensor(times))
        self.num_references = -1

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        self.num_references = len(references.z_ND)
        chosen_N = anchors.y_N > 0
        total = self.times * anchors.z_ND[chosen_N].sum() + 0 * references.z_ND.sum()
        return LossSum(total, chosen_N.sum().to(total.dtype))


class CountedWithMemory(Counted):
    accepts_memory: ClassVar[bool] = True


class _Unanswered(Exception):
    """A rank cannot go on before the others have said their part."""


class _Rank:
    """One of several ranks that are played one after the other in this process, on one autograd graph."""

    def __init__(self, number: int, split: tuple[int, ...], answers: list[Tensor]) -> None:
        self.number, self.split, self.answers = number, split, answers
        self.size = len(split)
        self.num_asked = 0

    def gather(self, x_B: Tensor) -> Tensor:
        return self._exchange("gather", x_B)

    def sum(self, x: Tensor) -> Tensor:
        return self._exchange("sum", x)

    def total(self, n: int) -> int:
        return int(self.sum(torch.tensor(n)))

    def max(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def share(self, n: int) -> slice:
        return slice(self.number * n // len(self.split), (self.number + 1) * n // len(self.split))

    def _exchange(self, kind: str, x: Tensor) -> Tensor:
        if self.num_asked == len(self.answers):
            raise _Unanswered(kind, x)
        self.num_asked += 1
        return self.answers[self.num_asked - 1]


def in_ranks(
    loss: Loss, batch: Embeddings, split: tuple[int, ...], memory: Embeddings | None = None
) -> LossSum:
    """The sums over ranks of total and count. All ranks are run up to the same exchange, then again.

    Their sum's gradient by the batch is what data parallel would give: each exchanged tensor is one node
    of the graph, which hands on the sum of what all ranks say about it.
    """
    buffers = [buffer.clone() for buffer in loss.buffers()]
    references = batch._replace(structure_ND=None, drift_N=None)
    if memory is not None:
        parts = zip(batch[:3], memory[:3], strict=True)
        references = Embeddings(*(torch.cat([ours, theirs]) for ours, theirs in parts))
    answers: list[Tensor] = []
    while True:
        done: list[LossSum] = []
        said: list[tuple[str, Tensor]] = []
        for number in range(len(split)):
            for buffer, old in zip(loss.buffers(), buffers, strict=True):
                buffer.data.copy_(old)
            start = sum(split[:number])
            anchors = batch.rows(slice(start, start + split[number]))
            try:
                done.append(loss(anchors, references, _Rank(number, split, answers)))
            except _Unanswered as unanswered:
                said.append(unanswered.args)
        if not said:
            return LossSum(sum(part.total for part in done), sum(part.count for part in done))
        assert len(said) == len(split), "the ranks do not make the same calls"
        kinds, parts = {kind for kind, _ in said}, [x for _, x in said]
        assert len(kinds) == 1, "the ranks do not make the same calls"
        answers.append(torch.cat(parts) if kinds == {"gather"} else torch.stack(parts).sum(0))


def embeddings(num_rows: int = NUM_ROWS, seed: int = 0) -> Embeddings:
    """Unit vectors of three classes and a singleton, one image drawn twice, with structure embeddings."""
    generator = torch.Generator().manual_seed(seed)
    z_ND, x_ND = torch.randn(2, num_rows, DIM, dtype=torch.float64, generator=generator)
    y_N, id_N = torch.arange(num_rows) % 3, torch.arange(num_rows) + 2**53
    if num_rows > 9:
        z_ND[9], id_N[9], y_N[num_rows - 1] = z_ND[3], id_N[3], 3
    return Embeddings(
        functional.normalize(z_ND).requires_grad_(),
        y_N,
        id_N,
        (0.5 + x_ND.sigmoid()).requires_grad_(),
        drift_N=x_ND.square().sum(1),
    )


def mean_and_gradients(loss: Loss, total: Tensor, count: Tensor, batch: Embeddings) -> tuple[Tensor, ...]:
    value = total / count.clamp(min=1)
    leaves = [batch.z_ND, batch.structure_ND, *loss.parameters()]
    return value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)


@each_split
@each_regularizer
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
def test_any_number_of_ranks_gives_one_process_s_gradient(
    name: str, split: tuple[int, ...], tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, loss = embeddings(), copy.deepcopy(REGULARIZERS[name]).double()
    if tiled:
        monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 1)
    alone = copy.deepcopy(loss)
    wanted = mean_and_gradients(alone, *alone(batch), batch)
    total, count = in_ranks(loss, batch, split)
    assert count.item() == pytest.approx(1 if name.startswith("gc") else NUM_ROWS, rel=1e-14)
    for number, (got, truth) in enumerate(
        zip(mean_and_gradients(loss, total, count, batch), wanted, strict=True)
    ):
        if number < 2:
            assert truth.abs().max() > 1e-4
        torch.testing.assert_close(got, truth, rtol=1e-9, atol=1e-13)
    for got, truth in zip(loss.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@each_regularizer
def test_more_ranks_than_rows(name: str, num_rows: int) -> None:
    batch, loss = embeddings(num_rows), copy.deepcopy(REGULARIZERS[name]).double()
    alone = copy.deepcopy(loss)
    wanted = mean_and_gradients(alone, *alone(batch), batch)
    split = (num_rows, 0, 0, 0)
    got = mean_and_gradients(loss, *in_ranks(loss, batch, split), batch)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-13)


@each_split
def test_each_part_has_its_own_mean(split: tuple[int, ...]) -> None:
    """The base's terms are 9 of 13 rows, a regulariser's count is its own."""
    batch = embeddings()
    for regularizer in (GraphConsistency(), DistanceLevels()):
        loss = Regularized(Counted(), copy.deepcopy(regularizer), 0.3).double()
        total, count = in_ranks(loss, batch, split)
        chosen_N = batch.y_N > 0
        term = copy.deepcopy(regularizer).double()(batch)
        expected = batch.z_ND[chosen_N].sum() / chosen_N.sum() + 0.3 * term.total / term.count
        assert count == chosen_N.sum()
        torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=1e-13)
        got = torch.autograd.grad(total / count, batch.z_ND)[0]
        torch.testing.assert_close(got, torch.autograd.grad(expected, batch.z_ND)[0], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("base", ["contrastive", "proxies"])
@each_split
@each_regularizer
def test_the_sum_keeps_the_law(name: str, split: tuple[int, ...], base: str) -> None:
    batch = embeddings()
    first = Contrastive(negative_margin=1.5) if base == "contrastive" else ProxyNCAPlusPlus(4, DIM)
    loss = Regularized(first, copy.deepcopy(REGULARIZERS[name]), 0.5).double()
    alone = copy.deepcopy(loss)
    wanted = mean_and_gradients(alone, *alone(batch), batch)
    got = mean_and_gradients(loss, *in_ranks(loss, batch, split), batch)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-13)


@each_split
def test_the_regularizer_does_not_see_the_memory(split: tuple[int, ...]) -> None:
    batch, memory = embeddings(), embeddings(6, seed=7)
    memory = memory._replace(z_ND=memory.z_ND.detach())
    base, regularizer = CountedWithMemory(), Counted()
    loss = Regularized(base, regularizer, 1.0)
    assert loss.accepts_memory
    in_ranks(loss, batch, split, memory)
    assert (base.num_references, regularizer.num_references) == (19, 13)
    for name in REGULARIZERS:
        loss = Regularized(CountedWithMemory(), copy.deepcopy(REGULARIZERS[name]), 0.5).double()
        with_memory, without = in_ranks(loss, batch, split, memory), in_ranks(loss, batch, split)
        torch.testing.assert_close(with_memory.total, without.total, rtol=1e-12, atol=1e-13)


def test_with_the_memory_module() -> None:
    memory = CrossBatchMemory(20, DIM)
    loss = Regularized(Contrastive(negative_margin=1.5), Structure(), 0.5).double()
    plain = Contrastive(negative_margin=1.5)
    structure = Structure()
    for seed in range(3):
        batch = embeddings(seed=seed)
        references = memory.references(batch)
        total, count = loss(batch, references)
        term = structure(batch)
        expected = plain(batch, references).total / 13 + 0.5 * term.total / term.count
        torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)


def test_without_memory_the_base_sees_what_it_is_given() -> None:
    loss = Regularized(Counted(), Counted(), 1.0)
    assert not loss.accepts_memory
    assert not Regularized(loss, Counted(), 1.0).accepts_memory
    assert Regularized(Regularized(CountedWithMemory(), Counted(), 1.0), Counted(), 1.0).accepts_memory


def test_a_base_without_terms_leaves_the_regularizer() -> None:
    batch = embeddings()
    nothing = batch._replace(y_N=torch.zeros_like(batch.y_N))
    total, count = Regularized(Counted(), DistanceLevels(), 0.3).double()(nothing)
    term = DistanceLevels().double()(nothing)
    assert count == 0
    torch.testing.assert_close(total, 0.3 * term.total / term.count, rtol=1e-12, atol=0)


def test_both_are_submodules() -> None:
    loss = Regularized(ProxyNCAPlusPlus(4, DIM), DistanceLevels(), 1.0)
    assert {name for name, _ in loss.named_parameters()} == {"base.proxies_CD", "regularizer.levels_L"}
    assert "regularizer.running_mean" in loss.state_dict()


def test_a_weight_of_zero_is_the_base() -> None:
    batch = embeddings()
    base = Contrastive(negative_margin=1.5)
    loss = Regularized(base, DistanceLevels(), 0.0).double()
    torch.testing.assert_close(loss(batch).total, base(batch).total, rtol=0, atol=0)


def test_faults() -> None:
    with pytest.raises(ValueError, match=r"weight=-1"):
        Regularized(Counted(), Counted(), -1.0)
    with pytest.raises(ValueError, match="no structure head"):
        Regularized(Counted(), Structure(), 1.0)(embeddings()._replace(structure_ND=None))
