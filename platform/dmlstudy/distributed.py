"""The only door to torch.distributed: gathering with exact gradients, and answers all ranks agree on.

Without an initialised process group there is one rank, 0, and tensors pass through untouched.
Shapes: N rows on this rank (ragged: any number, also none), M rows on all ranks, D embedding size,
W ranks (the world size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from dmlstudy.losses.batch_loss import BatchLoss, of_batch
from dmlstudy.losses.interface import ALONE, Embeddings, Labels, Loss, LossSum, World, check_embeddings
from dmlstudy.losses.plan import BatchPlan
from dmlstudy.transfers import placed

Result = TypeVar("Result")

BUCKET_BYTES = 25 * 2**20
"""Gradients that are averaged in one call, as data parallel has it."""


def rank() -> int:
    """This process's number, 0 when not distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


class Refused(ValueError):
    """A batch that cannot be used; every rank raises it alike, so none waits for another in a collective."""


def world_size() -> int:
    """Number of processes W, 1 when not distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(local: Embeddings) -> Embeddings:
    """All ranks' rows in rank order: (N, D) of each rank -> (M, D), labels and ids exactly as int64, norms if given.

    The gradient flows through z alone: backward sums what all ranks' losses say about a row and hands it
    to the row's owner (reduce-scatter SUM). Every rank must call this, and backward through it. Where a rank's
    embeddings are not finite, or its labels or ids are malformed, every rank raises the same Refused, which names
    the rank.
    """
    sizes = _sizes_if_sound(local)
    if world_size() == 1:
        norm_N = None if local.norm_N is None else local.norm_N.detach()
        return Embeddings(local.z_ND, local.y_N, local.id_N, norm_N=norm_N)
    z_MD: Tensor = _Gather.apply(local.z_ND, sizes)
    labels_M2 = _gather_padded(torch.stack([local.y_N, local.id_N], dim=1), sizes)
    norm_M = None if local.norm_N is None else _gather_padded(local.norm_N.detach(), sizes)
    return Embeddings(z_MD, labels_M2[:, 0], labels_M2[:, 1], norm_N=norm_M)


class GlobalLabels:
    """Labels and ids of a batch of all ranks, of which the host of each knows all: none asks another for them.

    ``labels`` are those of all ranks' rows, in rank order, in the host's memory; ``sizes`` the ranks' numbers of rows.
    They lie on ``device`` too, to where they are copied without a wait.

    A ``plan`` may have been made of this rank's labels and all; without one each loss makes its own.
    """

    def __init__(
        self, labels: Labels, sizes: Sequence[int], device: torch.device, plan: BatchPlan | None = None
    ) -> None:
        self.labels, self.sizes, self.plan = labels, list(sizes), plan
        assert len(labels.y_N) == len(labels.id_N) == sum(self.sizes)
        first = sum(self.sizes[: rank()])
        self.own = slice(first, first + self.sizes[rank()])
        """This rank's rows."""
        self._own_labels = labels.rows(self.own) if plan is None else plan.anchors
        self._placed = Labels(*(placed(x_M, device) for x_M in labels))

    @property
    def device(self) -> torch.device:
        return self._placed.y_N.device

    def of_own(self, z_ND: Tensor, structure_ND: Tensor | None = None) -> Embeddings:
        """This rank's embeddings, labelled."""
        y_N, id_N = self._placed.rows(self.own)
        return Embeddings(z_ND, y_N, id_N, structure_ND, on_host=self._own_labels, plan=self.plan)

    def gathered(self, local: Embeddings) -> Embeddings:
        """All ranks' rows, as ``gather`` has them, without a question to another rank's host and without a check.

        Every rank must call this, and backward through it.
        """
        z_MD, norm_M = local.z_ND, None if local.norm_N is None else local.norm_N.detach()
        if world_size() > 1:
            z_MD = _Gather.apply(z_MD, self.sizes)
            norm_M = None if norm_M is None else _gather_padded(norm_M, self.sizes)
        return Embeddings(z_MD, *self._placed, norm_N=norm_M, on_host=self.labels, plan=self.plan)

    def words(self, unsound_W2: Sequence[Sequence[float]]) -> str:
        """The complaint of each rank whose embeddings are not finite, or ''.

        ``unsound_W2`` has each rank's number of such rows, and the first of them.
        """
        said = []
        for number, (size, (num_rows, row)) in enumerate(zip(self.sizes, unsound_W2, strict=True)):
            if num_rows:
                image = int(self.labels.id_N[sum(self.sizes[:number]) + int(row)])
                said.append(f"rank {number}: {not_finite(int(num_rows), size, image)}")
        return "; ".join(said)


def asked(y_N: Tensor, id_N: Tensor) -> GlobalLabels:
    """The labels of all ranks' rows, of which each rank knows its own alone; every rank must call this."""
    y_M, id_M = (gather_rows(x_N).cpu() for x_N in (y_N, id_N))
    return GlobalLabels(Labels(y_M, id_M), _sizes(len(y_N)), y_N.device)


def gather_rows(x: Tensor) -> Tensor:
    """All ranks' rows in rank order, (N, ...) -> (M, ...), without gradient, on x's own device."""
    if world_size() == 1:
        return x.detach()
    rows = x.detach().to(_device(x))
    return _gather_padded(rows, _sizes(rows.shape[0])).to(x.device)


def rows_on_rank_0(x: Tensor) -> Tensor:
    """All ranks' rows in rank order on the CPU of rank 0; each other rank's own on it. Every rank must call this."""
    rows = x.detach()
    if world_size() == 1:
        return rows
    sizes = _sizes(len(rows))
    rows = rows.to(_device(rows)).contiguous()
    if rank() > 0:
        dist.send(rows, 0)
        return rows
    parts = [rows.cpu()]
    for other in range(1, world_size()):
        received = rows.new_empty(sizes[other], *rows.shape[1:])
        dist.recv(received, other)
        parts.append(received.cpu())
    return torch.cat(parts)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum of every rank's x, without gradient; x keeps its value."""
    return _reduced(x, dist.ReduceOp.SUM)


def max_over_ranks(x: Tensor) -> Tensor:
    """Largest of every rank's x, element by element, without gradient; x keeps its value."""
    return _reduced(x, dist.ReduceOp.MAX)


def _reduced(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    reduced = x.detach().clone()
    if world_size() > 1:
        reduced = reduced.to(_device(x))
        dist.all_reduce(reduced, operation)
    return reduced.to(x.device)


def any_rank(flag: bool) -> bool:
    """True on every rank if the flag is set on any."""
    return bool(sum_over_ranks(torch.tensor(int(flag))) > 0)


def agree(flag: bool) -> bool:
    """Rank 0's flag, on every rank."""
    return any_rank(flag and rank() == 0)


def computed_once(compute: Callable[[], Result]) -> Result:
    """Rank 0's result on every rank; the others wait. Where it raises, every rank does: the others a RuntimeError
    of the same words."""
    if world_size() == 1:
        return compute()
    told: list[Any] = [None, None]
    failure: Exception | None = None
    if rank() == 0:
        try:
            told[0] = compute()
        except Exception as error:
            failure, told[1] = error, _words(error)
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[1] is not None:
        raise RuntimeError(f"rank 0: {told[1]}")
    result: Result = told[0]
    return result


def computed_by_each(compute: Callable[[], Result]) -> list[Result]:
    """Every rank's result on every rank, in rank order. Where it raises on a rank, every rank does: those that could
    compute theirs a RuntimeError of the same words."""
    if world_size() == 1:
        return [compute()]
    result: Result | None = None
    failure: Exception | None = None
    try:
        result = compute()
    except Exception as error:
        failure = error
    told: list[Any] = [None] * world_size()
    dist.all_gather_object(told, (result, None if failure is None else _words(failure)))
    if failure is not None:
        raise failure
    for number, (_, words) in enumerate(told):
        if words is not None:
            raise RuntimeError(f"rank {number}: {words}")
    return [each for each, _ in told]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def own_slice(n: int) -> slice:
    """This rank's contiguous share of n items; shares differ by one item at most and cover all n."""
    return slice(_first(rank(), n), _first(rank() + 1, n))


def share_sizes(n: int) -> list[int]:
    """The sizes of all ranks' shares of n items."""
    return [_first(number + 1, n) - _first(number, n) for number in range(world_size())]


def _first(number: int, n: int) -> int:
    """The first of n items in a rank's share."""
    return number * n // world_size()


def world() -> World:
    """The ranks that share a batch, as a loss may ask them."""
    return ALONE if world_size() == 1 else _AllRanks()


def scaled_for_mean(loss: LossSum, unsound_2: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The objective that this rank must backpropagate, the global mean loss for the log, and what ranks say beside it.

    The objective is (W/Z) * total with Z = max(1, sum over ranks of the count): data parallel averages
    gradients over ranks, so the result is the gradient of one process on the global batch.

    The mean and each rank's ``unsound_2``, (W, 2), are float64 and lie where the loss does: no device is waited for.
    """
    sums = torch.zeros(2 + 2 * world_size(), dtype=torch.float64, device=loss.total.device)
    sums[0], sums[1] = loss.total.detach(), loss.count
    if unsound_2 is not None:
        sums[2 + 2 * rank() : 4 + 2 * rank()] = unsound_2
    sums = sum_over_ranks(sums)
    count = sums[1].clamp(min=1)
    objective = loss.total * (world_size() / count).to(loss.total.dtype)
    return objective, sums[0] / count, sums[2:].view(-1, 2)


def data_parallel(module: nn.Module) -> nn.Module:
    """The module with gradients averaged over ranks, or the module itself when there is one rank.

    Wrap encoder and loss together, so that the loss's own parameters are averaged too, but for a loss that finds whole
    gradients itself. Every parameter that requires a gradient now must get one in every step: change requires_grad
    before wrapping. Keep the wrapper alive until backward is done: gradients are not averaged without it.
    """
    if world_size() == 1:
        return module
    device = next(module.parameters()).device
    left_alone = _with_whole_gradients(module)
    if left_alone:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            module, left_alone
        )
    return DistributedDataParallel(
        module, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )


def averaged_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients are averaged over ranks: all but those of losses that find whole gradients."""
    left_alone = _with_whole_gradients(module)
    return [parameter for name, parameter in module.named_parameters() if name not in left_alone]


def _with_whole_gradients(module: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is that of all ranks when backward ends."""
    return [
        name
        for prefix, part in module.named_modules()
        if isinstance(part, Loss) and part.finds_whole_gradients
        for name, _ in part.named_parameters(prefix)
    ]


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Put the mean over ranks of each trained parameter's gradient in its place, as data parallel does by itself.

    Every rank must call this with the same parameters. A rank that has no gradient counts as one of zeros, and where
    no rank has one none is made.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if world_size() == 1 or not trained:
        return
    num_ranks_P = sum_over_ranks(torch.tensor([int(parameter.grad is not None) for parameter in trained]))
    gradients = []
    for parameter, num_ranks in zip(trained, num_ranks_P.tolist(), strict=True):
        if num_ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)

    def average(flat: Tensor) -> None:
        dist.all_reduce(flat)
        flat /= world_size()

    _in_buckets(gradients, average)


def take_over_rank_0(module: nn.Module) -> None:
    """Put rank 0's parameters and buffers in the place of each rank's, as data parallel does when it wraps a module.

    Parameters of losses that find whole gradients are left alone, as there.
    """
    if world_size() > 1:
        tensors = [tensor.detach() for tensor in (*averaged_parameters(module), *module.buffers())]
        _in_buckets(tensors, lambda flat: dist.broadcast(flat, src=0))


def across_ranks(loss: BatchLoss) -> nn.Module:
    """The loss, comparing this rank's rows with those of all ranks, for encoders under data parallel training.

    ``loss(z_ND, labels_N)`` has the global mean as its value and, once data parallel has averaged gradients, exactly
    the gradient of one process on the global batch, of the encoder and of the loss's own parameters.

    Every rank must call it, and backward through it, as often; its share may be ragged. Give ids where one
    image is in several rows: without ids, all rows of all ranks are different images.
    """
    module = _GlobalMean(loss)
    has_own = any(parameter.requires_grad for parameter in averaged_parameters(module))
    return data_parallel(module) if has_own else module


class _GlobalMean(nn.Module):
    """The mean over all ranks' rows, whose gradient is this rank's part of it times the number of ranks."""

    def __init__(self, loss: BatchLoss) -> None:
        super().__init__()
        self.loss = loss.loss

    def forward(self, z_ND: Tensor, labels_N: Tensor, ids_N: Tensor | None = None) -> Tensor:
        if ids_N is None:
            before = sum(_sizes(len(z_ND))[: rank()])
            ids_N = torch.arange(before, before + len(z_ND), device=z_ND.device)
        anchors = of_batch(self.loss, z_ND, labels_N, ids_N)
        objective, mean, _ = scaled_for_mean(LossSum(*self.loss(anchors, gather(anchors), world())))
        return objective - objective.detach() + mean.to(objective.dtype)


class _AllRanks:
    """The ranks of the process group, as losses see them."""

    @property
    def size(self) -> int:
        return world_size()

    def gather(self, x_B: Tensor) -> Tensor:
        gathered_M: Tensor = _Gather.apply(x_B, _sizes(len(x_B)))
        return gathered_M

    def sum(self, x: Tensor) -> Tensor:
        summed: Tensor = _Sum.apply(x)
        return summed

    def total(self, n: int) -> int:
        return sum(_sizes(n))

    def max(self, x: Tensor) -> Tensor:
        return max_over_ranks(x)

    def share(self, n: int) -> slice:
        return own_slice(n)


class _Sum(torch.autograd.Function):
    """Sum over ranks; every rank's objective may look at it, so its transpose is the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return sum_over_ranks(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_over_ranks(grad)


class _Gather(torch.autograd.Function):
    """Concatenation over ranks; its transpose is a reduce-scatter with SUM."""

    @staticmethod
    def forward(ctx: Any, z_ND: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _gather_padded(z_ND, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        sizes: list[int] = ctx.sizes
        shards = [_padded(shard, max(sizes)) for shard in torch.split(grad_MD, sizes)]
        own = torch.empty_like(shards[0])
        dist.reduce_scatter_tensor(own, torch.cat(shards))
        return own[: sizes[rank()]], None


def _in_buckets(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Let a collective change the tensors in place, many of one type in each call."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        bucket: list[Tensor] = []
        for tensor in (each for each in tensors if each.dtype == dtype):
            if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET_BYTES:
                _as_one(bucket, collective)
                bucket = []
            bucket.append(tensor)
        _as_one(bucket, collective)


def _as_one(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = flat.to(_device(flat))
    collective(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _sizes(n: int) -> list[int]:
    counts_W = torch.zeros(world_size(), dtype=torch.int64)
    counts_W[rank()] = n
    return [int(count) for count in sum_over_ranks(counts_W)]


def _sizes_if_sound(local: Embeddings) -> list[int]:
    """Every rank's number of rows; if any rank's are unsound, all raise what those ranks have to say."""
    problem = _problem(local)
    if world_size() == 1:
        problems = [problem]
        sizes = [len(local.z_ND)]
    else:
        table_W2 = torch.zeros(world_size(), 2, dtype=torch.int64)
        table_W2[rank()] = torch.tensor([len(local.y_N), problem is not None])
        table_W2 = sum_over_ranks(table_W2)
        sizes = table_W2[:, 0].tolist()
        problems = [None] * world_size()
        if table_W2[:, 1].any():
            dist.all_gather_object(problems, problem)
    said = [f"rank {number}: {problem}" for number, problem in enumerate(problems) if problem]
    if said:
        raise Refused("; ".join(said))
    return sizes


def _problem(local: Embeddings) -> str | None:
    try:
        check_embeddings("batch", local)
    except ValueError as error:
        return str(error)
    finite_N = local.finite_N
    if finite_N.all():
        return None
    row = int((~finite_N).nonzero()[0])
    return not_finite(int((~finite_N).sum()), len(finite_N), int(local.id_N[row]))


def not_finite(num_rows: int, size: int, image: int) -> str:
    """The complaint of a share of ``size`` images."""
    return f"the embeddings of {num_rows} of {size} images are not finite, the first of image {image}"


def _gather_padded(x: Tensor, sizes: list[int]) -> Tensor:
    assert x.shape[0] == sizes[rank()]
    mine = _padded(x, max(sizes))
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.cat([x, x.new_zeros(n - x.shape[0], *x.shape[1:])]).contiguous()


def _device(x: Tensor) -> torch.device:
    """A device on which the backend can see x: NCCL only reaches CUDA memory."""
    if x.is_cuda or dist.get_backend() != "nccl":
        return x.device
    return torch.device("cuda", torch.cuda.current_device())
