"""Electrical energy of a worker: the counter of its GPU, and its share of the processors' counters.

| counter | what of it counts |
|---|---|
| NVML's total energy of the worker's GPU | all, or ``gpus_per_worker`` of it where that is a part |
| RAPL's of each processor package and its memory | the process's share of the machine's busy CPU time |

Neither holds disks, fans and the network. A machine's idle time is shared by those that compute on it. RAPL is readable
by root alone on most systems, and not at all on most virtual machines; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dmlstudy import distributed

POWERCAP = Path("/sys/class/powercap")
STAT = Path("/proc/stat")
MICROJOULES_PER_WH = 3.6e9
MILLIJOULES_PER_WH = 3.6e6
DRAM = "dram"
IDLE_COLUMNS = (3, 4)
"""Of the line ``cpu`` in /proc/stat: idle, and waiting for a device."""

CPU_COLUMNS = 8
"""Further ones count guests' time, which is in the first ones already."""


class _Domain:
    """One energy counter of RAPL, which begins again at its range."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._seen = self._now()

    def passed(self) -> int:
        """Microjoules since the last call."""
        now = self._now()
        passed = now - self._seen
        self._seen = now
        return passed if passed >= 0 else passed + self._range

    def _now(self) -> int:
        return int(self._file.read_text())


class _Cpu:
    """A process's part of what its machine's processors use."""

    def __init__(self, powercap: Path, stat: Path, own_seconds: Callable[[], float]) -> None:
        self._stat, self._own_seconds = stat, own_seconds
        self._domains = [
            _Domain(folder) for folder in sorted(powercap.glob("intel-rapl:*")) if _counts(folder)
        ]
        self._own, self._busy = own_seconds(), self._busy_seconds()

    def __bool__(self) -> bool:
        return bool(self._domains)

    def passed_wh(self) -> float:
        own, busy = self._own_seconds(), self._busy_seconds()
        share = min(1.0, (own - self._own) / max(busy - self._busy, 1e-9))
        self._own, self._busy = own, busy
        return share * sum(domain.passed() for domain in self._domains) / MICROJOULES_PER_WH

    def _busy_seconds(self) -> float:
        ticks = [int(word) for word in self._stat.read_text().splitlines()[0].split()[1:]][:CPU_COLUMNS]
        return (sum(ticks) - sum(ticks[each] for each in IDLE_COLUMNS)) / os.sysconf("SC_CLK_TCK")


def _counts(folder: Path) -> bool:
    """True for a processor package, and for its memory, which the package's counter leaves out."""
    name = (folder / "name").read_text().strip()
    return name.startswith("package") or name == DRAM


class _Gpu:
    """A worker's part of what its GPU uses."""

    def __init__(self, device: torch.device, part: float) -> None:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._read = pynvml.nvmlDeviceGetTotalEnergyConsumption
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._part = min(1.0, part)
        self._seen: int = self._read(self._handle)

    def passed_wh(self) -> float:
        now: int = self._read(self._handle)
        passed, self._seen = now - self._seen, now
        return self._part * passed / MILLIJOULES_PER_WH


class EnergyMeter:
    """Counts the energy of this process on its device, in Wh; ``sample`` it every few minutes, for counters wrap.

    ``gpus`` is what it holds of a GPU. A counter that fails later ends: what it has counted stays.
    """

    def __init__(
        self,
        device: torch.device,
        gpus: float = 1.0,
        *,
        powercap: Path = POWERCAP,
        stat: Path = STAT,
        own_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._lock = threading.Lock()
        self._counters: list[_Cpu | _Gpu] = []
        self._wh = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            if cpu := _Cpu(powercap, stat, own_seconds):
                self._counters.append(cpu)
        if device.type == "cuda":
            # No driver, no permission, too old a GPU, or a part of one by MIG: NVML has an error for each.
            with contextlib.suppress(Exception):
                self._counters.append(_Gpu(device, gpus))
        self._can_read = bool(self._counters)

    def sample(self) -> None:
        """Add what was used since the last sample; any thread may."""
        with self._lock:
            for counter in list(self._counters):
                try:
                    self._wh += counter.passed_wh()
                except Exception:  # NVML's errors have no base among the standard ones
                    self._counters.remove(counter)

    def take(self) -> float | None:
        """Wh since this was last called; None where no counter can be read."""
        self.sample()
        with self._lock:
            taken, self._wh = self._wh, 0.0
        return taken if self._can_read else None


def of_all_ranks(taken_wh: float | None) -> float | None:
    """The sum of what the ranks have taken; None where one of them cannot tell. Every rank calls it."""
    own = torch.tensor([taken_wh or 0.0, taken_wh is not None], dtype=torch.float64)
    total, num_known = distributed.sum_over_ranks(own).tolist()
    return float(total) if num_known == distributed.world_size() else None
