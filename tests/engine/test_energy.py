"""The energy of a worker, from counters that a test turns: folders as RAPL's, and a stand-in for NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dmlstudy.engine.energy import EnergyMeter

CPU = torch.device("cpu")
WH = 3_600_000_000
"""Microjoules."""


class Machine:
    """Folders as Linux shows RAPL's counters and the processors' time, and a process of it."""

    def __init__(self, root: Path) -> None:
        self.powercap, self.stat, self.own = root / "powercap", root / "stat", 0.0
        self.powercap.mkdir()
        self.busy(0)

    def domain(self, name: str, of: str, microjoules: int = 0, most: int = 100 * WH) -> Path:
        folder = self.powercap / name
        folder.mkdir()
        (folder / "name").write_text(f"{of}\n")
        (folder / "max_energy_range_uj").write_text(f"{most}\n")
        file = folder / "energy_uj"
        file.write_text(f"{microjoules}\n")
        return file

    def busy(self, ticks: int) -> None:
        """So many of the machine's ticks have passed in programs; others it was idle, or ran guests' programs."""
        self.stat.write_text(f"cpu  {ticks} 0 0 7000 3000 0 0 0 {ticks} 0\ncpu0 1 2 3\n")

    def work(self, counters: dict[Path, int], ticks: int, own: float) -> None:
        """Counters stand at so many Wh; the machine was busy for so many ticks, the process for so many seconds."""
        for file, watt_hours in counters.items():
            file.write_text(f"{watt_hours * WH}\n")
        self.busy(ticks)
        self.own = own

    def meter(self) -> EnergyMeter:
        return EnergyMeter(CPU, powercap=self.powercap, stat=self.stat, own_seconds=lambda: self.own)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_process_has_its_share_of_the_processors_energy(machine: Machine) -> None:
    package, other = (
        machine.domain("intel-rapl:0", "package-0", WH),
        machine.domain("intel-rapl:1", "package-1"),
    )
    memory = machine.domain("intel-rapl:0:1", "dram")
    core, whole = machine.domain("intel-rapl:0:0", "core"), machine.domain("intel-rapl:2", "psys")
    meter = machine.meter()
    counters = {package: 5, other: 3, memory: 2, core: 50, whole: 90}
    machine.work(counters, 1000, own=2.5)  # ten seconds, of which two and a half are the process's
    assert meter.take() == pytest.approx((4 + 3 + 2) / 4)
    assert meter.take() == 0


def test_shares_follow_the_time_between_samples(machine: Machine) -> None:
    file = machine.domain("intel-rapl:0", "package-0")
    meter = machine.meter()
    machine.work({file: 8}, 1000, own=10.0)
    meter.sample()
    machine.work({file: 16}, 2000, own=10.0)  # others had the machine now
    assert meter.take() == pytest.approx(8)


def test_a_counter_that_has_begun_again(machine: Machine) -> None:
    file = machine.domain("intel-rapl:0", "package-0", 9 * WH, most=10 * WH)
    meter = machine.meter()
    machine.work({file: 2}, 100, own=5.0)  # more than the machine's: clocks differ, and a share is at most 1
    assert meter.take() == pytest.approx(3)


def test_what_cannot_be_read_is_not_known(machine: Machine, tmp_path: Path) -> None:
    assert machine.meter().take() is None
    machine.domain("intel-rapl:0", "package-0").write_text("")
    assert machine.meter().take() is None
    assert EnergyMeter(CPU, powercap=tmp_path / "none", stat=tmp_path / "none").take() is None


def test_what_was_counted_stays_when_a_counter_goes(machine: Machine) -> None:
    file = machine.domain("intel-rapl:0", "package-0")
    meter = machine.meter()
    machine.work({file: 1}, 100, own=1.0)
    meter.sample()
    file.unlink()
    assert meter.take() == pytest.approx(1)
    assert meter.take() == 0


def test_a_gpu_counts_by_its_identity_and_part(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"GPU-1f": 7_200_000}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: read[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1f"))
    known = {"powercap": machine.powercap, "stat": machine.stat}
    whole, half = (
        EnergyMeter(torch.device("cuda"), 1, **known),
        EnergyMeter(torch.device("cuda"), 0.5, **known),
    )
    many = EnergyMeter(torch.device("cuda"), 2, **known)
    read["GPU-1f"] += 3_600_000
    assert (whole.take(), half.take(), many.take()) == (1, 0.5, 1)
    read.clear()
    assert whole.take() == 0
    assert EnergyMeter(torch.device("cuda"), 1, **known).take() is None
