"""What sections measure with: rows of the table, time, memory, waits of the host, utilisation."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A line of the table. ``target`` is the most ``value`` should be; ``problem`` says what is wrong, if anything."""

    section: str
    what: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""
    problem: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        mark = "!!" if self.problem or (self.target is not None and not self.value <= self.target) else "  "
        target = "" if self.target is None else f"{self.target:.4g}"
        return (
            f"{mark} {self.section:10.10} {self.what:58.58} {self.value:10.4g} {self.unit:9.9} {target:>7}"
            f"  {self.problem or self.note}"
        ).rstrip()


@dataclass
class Bench:
    """A section's device, its time, and where its rows go."""

    section: str
    device: torch.device
    deadline: float
    tell: Callable[[Row], None]

    @property
    def is_small(self) -> bool:
        """True on a CPU, where everything runs at sizes that take seconds."""
        return self.device.type == "cpu"

    def sized(self, small: T, large: T) -> T:
        return small if self.is_small else large

    def left(self) -> float:
        """Seconds until the section is ended."""
        return self.deadline - time.monotonic()

    def row(self, what: str, value: float, unit: str, target: float | None = None, **rest: Any) -> None:
        """Tell a result; targets are those of a GPU."""
        own = None if self.is_small else target
        self.tell(Row(self.section, what, float(value), unit, own, **rest))

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 5, warm: int = 1) -> float:
        """The median time of a run, after ``warm`` further ones."""
        for _ in range(warm):
            run()
        self.wait()
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - started)
        return statistics.median(found)

    def peak_gib(self, run: Callable[[], object]) -> float:
        """GiB of the device that a run needs beside what is there; 0 on a CPU, where it is not measured."""
        if self.device.type != "cuda":
            run()
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.wait()
        return (torch.cuda.max_memory_allocated(self.device) - before) / GIB

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[collections.Counter[str]]:
        """A block whose waits for the GPU are counted by file and line of dmlstudy; none are on a CPU."""
        found: collections.Counter[str] = collections.Counter()
        if self.device.type != "cuda":
            yield found
            return

        def seen(message: Warning | str, _: type[Warning], file: str, line: int, *__: object) -> None:
            if "synchroniz" not in str(message).lower():
                return
            own = [frame for frame in traceback.extract_stack() if "dmlstudy" in frame.filename]
            found[
                f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else f"{Path(file).name}:{line}"
            ] += 1

        self.wait()
        shown = warnings.showwarning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = seen  # type: ignore[assignment]
                yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown

    @contextlib.contextmanager
    def utilisation(self) -> Iterator[list[int]]:
        """A block during which nvidia-smi measures the GPU's utilisation, in percent, ten times a second."""
        found: list[int] = []
        process = None
        command = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        if self.device.type == "cuda":
            with contextlib.suppress(OSError):
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield found
        finally:
            if process is not None:
                process.terminate()
                found += [int(word) for word in process.communicate()[0].split() if word.isdigit()]


def unit_rows(num: int, dim: int, per_class: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors around a centre for each class, labels and ids, in random order."""
    generator = torch.Generator(device).manual_seed(0)
    y_N = torch.randperm(num, generator=generator, device=device) // per_class
    centre_CD = torch.randn(num // per_class + 1, dim, generator=generator, device=device)
    z_ND = torch.randn(num, dim, generator=generator, device=device).add_(centre_CD[y_N])
    return torch.nn.functional.normalize(z_ND, dim=1), y_N, torch.arange(num, device=device)
