"""The only door to torch.distributed: gathering with exact gradients, and answers all ranks agree on.

Without an initialised process group there is one rank, 0, and tensors pass through untouched.
Shapes: N rows on this rank (ragged: any number, also none), M rows on all ranks, D embedding size,
W ranks (the world size).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from dmlstudy.losses.interface import Embeddings, LossSum


def rank() -> int:
    """This process's number, 0 when not distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes W, 1 when not distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Returns when every rank has called it."""
    any_rank(False)


def gather(local: Embeddings) -> Embeddings:
    """All ranks' rows in rank order: (N, D) of each rank -> (M, D), labels and ids exactly as int64.

    The gradient flows through z alone: backward sums what all ranks' losses say about a row and hands it
    to the row's owner (reduce-scatter SUM). Every rank must call this, and backward through it.
    """
    if world_size() == 1:
        return local
    sizes = _sizes(local.z_ND.shape[0])
    z_MD: Tensor = _Gather.apply(local.z_ND, sizes)
    labels_M2 = _gather_padded(torch.stack([local.y_N, local.id_N], dim=1), sizes)
    return Embeddings(z_MD, labels_M2[:, 0], labels_M2[:, 1])


def gather_rows(x: Tensor) -> Tensor:
    """All ranks' rows in rank order, (N, ...) -> (M, ...), without gradient, on x's own device."""
    if world_size() == 1:
        return x.detach()
    rows = x.detach().to(_device(x))
    return _gather_padded(rows, _sizes(rows.shape[0])).to(x.device)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum of every rank's x, without gradient; x keeps its value."""
    summed = x.detach().clone()
    if world_size() > 1:
        summed = summed.to(_device(x))
        dist.all_reduce(summed)
    return summed.to(x.device)


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same answer on every rank."""
    return bool(sum_over_ranks(torch.tensor(int(flag))) > 0)


def agree(flag: bool) -> bool:
    """Rank 0's flag, on every rank."""
    return any_rank(flag and rank() == 0)


def own_slice(n: int) -> slice:
    """This rank's contiguous share of n items; shares differ by one item at most and cover all n."""
    return slice(rank() * n // world_size(), (rank() + 1) * n // world_size())


def scaled_for_mean(loss: LossSum) -> tuple[Tensor, float]:
    """What this rank must backpropagate, and the global mean loss for the log.

    The objective is (W/Z) * total with Z = max(1, sum over ranks of the count): data parallel averages
    gradients over ranks, so the result is the gradient of one process on the global batch.
    """
    sums = torch.stack([loss.total.detach(), loss.count]).cpu().double()
    total, count = sum_over_ranks(sums).tolist()
    count = max(1.0, count)
    return loss.total * (world_size() / count), total / count


def data_parallel(module: nn.Module) -> nn.Module:
    """The module with gradients averaged over ranks, or the module itself when there is one rank.

    Wrap encoder and loss together, so that the loss's own parameters are averaged too. Every parameter
    that requires a gradient now must get one in every step: change requires_grad before wrapping.
    Keep the wrapper alive until backward is done: gradients are not averaged without it.
    """
    if world_size() == 1:
        return module
    device = next(module.parameters()).device
    return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)


def step_generator(seed: int, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on (seed, step) alone, never on the rank: all ranks draw the same.

    Streams of different steps are unrelated; a CPU and a CUDA generator give different numbers.
    """
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


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


def _sizes(n: int) -> list[int]:
    counts_W = torch.zeros(world_size(), dtype=torch.int64)
    counts_W[rank()] = n
    return [int(count) for count in sum_over_ranks(counts_W)]


def _gather_padded(x: Tensor, sizes: list[int]) -> Tensor:
    assert x.shape[0] == sizes[rank()]
    mine = _padded(x, max(sizes))
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.cat([x, x.new_zeros(n - x.shape[0], *x.shape[1:])]).contiguous()


def _device(x: Tensor) -> torch.device:
    """Where the backend can see x: NCCL only reaches CUDA memory."""
    if x.is_cuda or dist.get_backend() != "nccl":
        return x.device
    return torch.device("cuda", torch.cuda.current_device())
