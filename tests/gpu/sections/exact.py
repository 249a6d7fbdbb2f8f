"""Every loss forward and backward in five precisions beside float64 on the CPU, and where it makes the host wait.

The step is that of training, over the small encoder of the law's cases.
"""

from __future__ import annotations

import dataclasses

import torch
from bench import Bench
from torch import Tensor

from dmlstudy.distributed import GlobalLabels
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import ALONE, Labels
from dmlstudy.training.exactness import CASES, Batch, Case, global_batch, step_of
from dmlstudy.training.step import Step

LIMITS = {"float64": 1e-8, "float32": 1e-3, "bf16x3": 1e-2}
"""The largest relative error of a gradient; tf32 and bf16 are shown and not judged, for some losses are steep."""

STEEP = {("adaptive_bound", "bf16x3"): 2e-2}
"""The limit of a case that multiplies errors of its products by a thousand, on a CPU too."""


def measure(bench: Bench) -> None:
    names = list(CASES)
    for number, name in enumerate(names):
        if bench.left() < 10:
            bench.row("cases not looked at", len(names) - number, "", problem="out of time")
            return
        try:
            _look_at(bench, CASES[name])
        except (RuntimeError, ValueError) as error:
            bench.row(name, 0, "ms", problem=f"{type(error).__name__}: {error}"[:200])


def _look_at(bench: Bench, case: Case) -> None:
    cpu = torch.device("cpu")
    truth = _outcome(_prepared(case, cpu, torch.float64), cpu, torch.float64)
    errors = {}
    for precision in ("float64", "float32", "bf16x3", "tf32", "bf16"):
        dtype = torch.float64 if precision == "float64" else torch.float32
        own = case
        if precision not in ("float64", "float32"):
            has_its_own = case.params.keys() & {catalogue.PRECISION, catalogue.BACKEND}
            if not catalogue.kind_of(case.loss).has_precision or has_its_own:
                continue
            own = dataclasses.replace(case, params=case.params | {"precision": precision})
        found = _outcome(_prepared(own, bench.device, dtype), bench.device, dtype)
        errors[precision] = _errors(found, truth)
    step = _prepared(case, bench.device, torch.float32)
    seconds = bench.seconds(lambda: _outcome(step, bench.device, torch.float32), 3, 1)
    with bench.host_waits() as waits:
        _outcome(step, bench.device, torch.float32)
    beyond = [
        f"{name}: gradient off by {errors[name][1]:.0e}"
        for name, limit in LIMITS.items()
        if name in errors
        and "precision" not in case.params
        and not errors[name][1] <= STEEP.get((case.name, name), limit)
    ]
    told = " ".join(f"{name} {value:.0e}/{gradient:.0e}" for name, (value, gradient) in errors.items())
    where = " ".join(f"{place}x{num}" for place, num in waits.most_common(4))
    bench.row(
        case.name,
        1e3 * seconds,
        "ms",
        note=f"{told}; {sum(waits.values())} waits {where}",
        problem="; ".join(beyond),
        details={"errors": errors, "waits": dict(waits)},
    )


def _prepared(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    """The step, after a batch that fills the memory where there is one."""
    step = step_of(case, lambda batch: batch, ALONE).to(device, dtype)
    if case.memory_size:
        with torch.no_grad():
            step(*_batch(1, device, dtype))
    return step


def _batch(number: int, device: torch.device, dtype: torch.dtype) -> Batch:
    x, y, ids = global_batch(number)
    return x.to(device, dtype), GlobalLabels(Labels(y, ids), [len(y)], device)


def _outcome(step: Step, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The mean loss and all gradients, on the device."""
    step.zero_grad(set_to_none=False)
    total, count, _ = step(*_batch(0, device, dtype))
    mean = total / count.clamp(min=1)
    mean.backward()
    return [mean.detach(), *(parameter.grad for parameter in step.parameters() if parameter.grad is not None)]


def _errors(found: list[Tensor], truth: list[Tensor]) -> tuple[float, float]:
    """Relative errors: of the value, and of all gradients together."""
    value = abs(found[0].item() - truth[0].item()) / max(abs(truth[0].item()), 1e-12)
    ours, wanted = (
        torch.cat([each.to_dense().cpu().double().flatten() for each in side[1:]]) for side in (found, truth)
    )
    return value, ((ours - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()
