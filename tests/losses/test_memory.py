"""The cross-batch memory: a queue of detached rows behind the batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.memory import CrossBatchMemory

DIM = 3


def batch_of(*ids: int, dtype: torch.dtype = torch.float32) -> Embeddings:
    """Rows whose values, labels and ids tell which image they are."""
    id_N = torch.tensor(ids, dtype=torch.int64)
    z_ND = (id_N[:, None] + torch.tensor([0.1, 0.2, 0.3])).to(dtype)
    return Embeddings(z_ND.requires_grad_(), id_N % 2, id_N, torch.ones_like(z_ND))


def ids(embeddings: Embeddings) -> list[int]:
    """The ids, after checking that every row's parts belong together."""
    expected = batch_of(*embeddings.id_N.tolist(), dtype=embeddings.z_ND.dtype)
    assert torch.equal(embeddings.z_ND, expected.z_ND)
    assert torch.equal(embeddings.y_N, expected.y_N)
    return embeddings.id_N.tolist()


def test_batch_first_then_the_oldest_first() -> None:
    memory = CrossBatchMemory(5, DIM)
    assert ids(memory.references(batch_of(1, 2))) == [1, 2]
    assert ids(memory.references(batch_of(3, 4))) == [3, 4, 1, 2]
    assert ids(memory.references(batch_of(5, 6))) == [5, 6, 1, 2, 3, 4]
    assert ids(memory.references(batch_of(7))) == [7, 2, 3, 4, 5, 6]
    assert ids(memory.references(batch_of())) == [3, 4, 5, 6, 7]
    assert ids(memory.references(batch_of(8))) == [8, 3, 4, 5, 6, 7]


def test_a_batch_larger_than_the_memory_leaves_its_last_rows() -> None:
    memory = CrossBatchMemory(3, DIM)
    assert ids(memory.references(batch_of(1, 2, 3, 4, 5))) == [1, 2, 3, 4, 5]
    assert ids(memory.references(batch_of(6, 7, 8, 9))) == [6, 7, 8, 9, 3, 4, 5]
    assert ids(memory.references(batch_of(10))) == [10, 7, 8, 9]
    assert memory.filled == 10
    assert ids(memory.references(batch_of())) == [8, 9, 10]


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_it_is_a_queue_whatever_the_batches(size: int) -> None:
    memory, queue, next_id = CrossBatchMemory(size, DIM), list[int](), 1
    for number in (0, 1, 3, 5, 2, 9, 1, 7, 14, 4, 4, 0, 6):
        new = list(range(next_id, next_id + number))
        next_id += number
        assert ids(memory.references(batch_of(*new))) == new + queue
        queue = (queue + new)[-size:]


@pytest.mark.parametrize("number", [2, 4])
def test_a_memory_saved_with_its_oldest_row_first_goes_on(number: int) -> None:
    """As it was saved before it was a ring: ``filled`` was at most the size."""
    memory = CrossBatchMemory(4, DIM)
    older = batch_of(*range(1, number + 1))
    state = memory.state_dict() | {"filled": torch.tensor(number), "num_batches": torch.tensor(3)}
    state["z"] = functional.pad(older.z_ND.detach(), (0, 0, 0, 4 - number))
    state["y"], state["id"] = (functional.pad(x, (0, 4 - number)) for x in (older.y_N, older.id_N))
    memory.load_state_dict(state)
    assert ids(memory.references(batch_of(7, 8, 9))) == [7, 8, 9, *range(1, number + 1)]
    assert ids(memory.references(batch_of())) == [number, 7, 8, 9]


def test_counts_stay_on_the_cpu() -> None:
    memory = CrossBatchMemory(2, DIM).to("meta")
    assert memory.z.device.type == memory.id.device.type == "meta"
    assert memory.filled.device.type == memory.num_batches.device.type == "cpu"


def test_the_gathered_rows_alone_are_live() -> None:
    memory = CrossBatchMemory(4, DIM)
    assert memory.references(batch_of(1, 2)).live_LD is None
    gathered = batch_of(3)
    assert memory.references(gathered).live_LD is gathered.z_ND


def test_warm_up_fills_but_does_not_show() -> None:
    memory = CrossBatchMemory(4, DIM, warmup=2)
    assert ids(memory.references(batch_of(1))) == [1]
    assert ids(memory.references(batch_of(2))) == [2]
    assert ids(memory.references(batch_of(3))) == [3, 1, 2]


def test_the_gradient_reaches_the_batch_alone() -> None:
    memory = CrossBatchMemory(4, DIM)
    first, second = batch_of(1, 2), batch_of(3)
    memory.references(first)
    references = memory.references(second)
    assert references.structure_ND is None
    references.z_ND.sum().backward()
    assert first.z_ND.grad is None
    assert (second.z_ND.grad == 1).all()
    memory.references(batch_of(4))
    assert ids(references) == [3, 1, 2]  # later batches do not reach back


def test_it_is_saved_with_the_state() -> None:
    memory = CrossBatchMemory(3, DIM, warmup=1)
    memory.references(batch_of(1, 2))
    memory.references(batch_of(3, 4))
    assert set(memory.state_dict()) == {"z", "y", "id", "filled", "num_batches"}
    again = CrossBatchMemory(3, DIM, warmup=1)
    again.load_state_dict(memory.state_dict())
    assert ids(again.references(batch_of(5))) == ids(memory.references(batch_of(5))) == [5, 2, 3, 4]


def test_it_follows_the_batch_s_dtype() -> None:
    memory = CrossBatchMemory(3, DIM)
    memory.references(batch_of(1, dtype=torch.float64))
    references = memory.references(batch_of(2, dtype=torch.float64))
    assert references.z_ND.dtype == memory.z.dtype == torch.float64
    assert ids(references) == [2, 1]


def test_ids_keep_all_their_bits() -> None:
    memory = CrossBatchMemory(2, DIM)
    large = batch_of(0)._replace(id_N=torch.tensor([2**62 + 1]))
    memory.references(large)
    assert memory.references(batch_of(1)).id_N.tolist() == [1, 2**62 + 1]


def test_an_image_s_older_embedding_is_no_pair_for_it() -> None:
    """Only the two older images are positives; the anchor's own older row is none."""
    memory = CrossBatchMemory(8, DIM)
    loss = catalogue.build("contrastive", {}, num_classes=2, dim=DIM)
    z_ND = functional.normalize(torch.randn(4, DIM, generator=torch.Generator().manual_seed(0)))
    zeros_N = torch.zeros(3, dtype=torch.int64)
    memory.references(Embeddings(z_ND[:3], zeros_N, torch.tensor([5, 6, 7])))
    anchor = Embeddings(z_ND[3:], zeros_N[:1], torch.tensor([5]))
    total, count = loss(anchor, memory.references(anchor))
    expected = (z_ND[3] - z_ND[1:3]).norm(dim=1).mean()
    assert count == 1
    torch.testing.assert_close(total, expected)


def test_faults() -> None:
    for arguments in ({"size": 0, "dim": 2}, {"size": 2, "dim": 0}, {"size": 2, "dim": 2, "warmup": -1}):
        with pytest.raises(ValueError, match=r"must be a finite number >= "):
            CrossBatchMemory(**arguments)
    with pytest.raises(ValueError, match="embeddings have size 3, the memory's dim is 4"):
        CrossBatchMemory(2, 4).references(batch_of(1))
