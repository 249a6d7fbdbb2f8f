"""Gathers: NCCL with one rank on the card, gloo with two that share it, and there the law of the training step."""

from __future__ import annotations

import multiprocessing
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from bench import Bench

from dmlstudy import distributed
from dmlstudy.losses.interface import Embeddings
from dmlstudy.training.exactness import CASES, TOLERANCE, check

TIMEOUT_S = 40
EVERY_ON_CPU = 12


def measure(bench: Bench) -> None:
    plans = [("gloo", 2)] if bench.is_small else [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 2)]
    for backend, world_size in plans:
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            processes = [
                context.Process(target=_rank, args=(bench, backend, rank, world_size, meeting))
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(1.0, bench.left() - 5))
            codes = [process.exitcode for process in processes]
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        if any(codes):
            bench.row(f"{backend}, {world_size} ranks", 0, "", problem=f"ranks ended with {codes}")


def _rank(bench: Bench, backend: str, rank: int, world_size: int, meeting: str) -> None:
    if bench.device.type == "cuda":
        torch.cuda.set_device(bench.device)
    else:
        torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size, timeout=timeout)
    name = f"{backend}, {world_size} rank(s)"
    if world_size == 1:
        _alone(bench, name)
    else:
        _together(bench, name, rank)
    dist.destroy_process_group()


def _alone(bench: Bench, name: str) -> None:
    """One rank takes no collective by itself, so those of a gather are called."""
    z_ND = torch.randn(bench.sized(8, 4096), 128, device=bench.device, requires_grad=True)
    sizes = [len(z_ND)]

    def gathered() -> None:
        z_ND.grad = None
        distributed._Gather.apply(z_ND, sizes).square().sum().backward()

    gathered()
    assert z_ND.grad is not None
    off = (z_ND.grad - 2 * z_ND).abs().max().item()
    problem = f"its gradient is off by {off:.1e}" if off else ""
    bench.row(
        f"{name}: gather of 4096 x 128 and back", 1e3 * bench.seconds(gathered, 20, 3), "ms", problem=problem
    )
    flag = torch.zeros(1, dtype=torch.int64)
    seconds = bench.seconds(lambda: dist.all_reduce(flag.to(distributed._device(flag))), 50, 5)
    bench.row(f"{name}: a flag in host memory over all ranks", 1e6 * seconds, "us")
    told: list[object] = [None]
    dist.all_gather_object(told, "a word")
    assert told == ["a word"]


def _together(bench: Bench, name: str, rank: int) -> None:
    num = bench.sized(8, 2048) + rank  # ragged
    z_ND = torch.randn(num, 128, device=bench.device, requires_grad=True)
    y_N = torch.arange(num, device=bench.device)

    def gathered() -> None:
        z_ND.grad = None
        distributed.gather(Embeddings(z_ND, y_N, y_N)).z_ND.square().sum().backward()

    seconds = bench.seconds(gathered, 5, 1)
    if rank == 0:
        bench.row(f"{name}: gather and back", 1e3 * seconds, "ms")
    names = list(CASES)[:: EVERY_ON_CPU if bench.is_small else 1]
    worst: dict[float, float] = {}  # by what a case may be off by
    wrong, looked_at = [], 0
    for each in names:
        found = check(CASES[each], bench.device)
        worst[found.tolerance] = max(worst.get(found.tolerance, 0.0), found.value_error, found.error)
        wrong += [] if found.is_exact else [each]
        looked_at += 1
        if distributed.agree(bench.left() < 15):
            break
    if rank == 0:
        problem = f"not exact: {', '.join(wrong)}" if wrong else ""
        note = f"{looked_at} of {len(names)} cases"
        for tolerance, error in worst.items():
            how = "float64" if tolerance == TOLERANCE else "float32 of kernels"
            bench.row(
                f"{name}: law of the training step, {how}",
                error,
                "relative",
                tolerance,
                note=note,
                problem=problem,
            )
