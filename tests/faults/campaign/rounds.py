"""A round: one study, run to its verdict, broken at the planned moments and resumed each time."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ..conftest import Driver, left, marked, shown
from .plan import SOON, VARIATIONS, Kill, Round
from .record import EQUAL, ROUND, CampaignRecord, Row
from .stores import STUDY, Contents, asked, contents, differences, ended, opened

OF_RAY = {"raylet": "/raylet/raylet ", "gcs": "/gcs_server "}
WORKER = "ray::RayTrainWorker"
NO_ACTORS = {WORKER, "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Processes of a raylet that are no actors: agents, with which it dies, and those that wait for work."""

ENDED_BY = {"driver", "group", "machine"}
"""Kinds of kills after which there is no driver."""

BY_RAY = {2, 1, -9}
"""How a study ends whose Ray has died: by itself; by Ray's own code, or by its guard, while Ray is started."""

END_S = 600.0
"""A study that has not ended so long after its last kill hangs."""

ORPHAN_S = 120.0
"""A process that still runs so long after its study is an orphan.

Ray's agents wait up to a minute for a control service that was killed, and end then.
"""


class Broken(AssertionError):
    """A study that did not go on as it should have."""


class Whole(NamedTuple):
    """A variation's study that was never broken: its seconds, those until its first epoch, and what it made."""

    seconds: float
    start_s: float
    num_ended: int
    contents: Contents


def unbroken(folder: Path, variation: str) -> Whole:
    """The variation's unbroken study, which is run where the folder does not have it yet."""
    kept = folder / "contents.json"
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "tiny.yaml").write_text(VARIATIONS[variation])
        began = time.monotonic()
        with temporary() as scratch:
            driver = Driver(
                folder / "shown",
                "run",
                folder / "tiny.yaml",
                "--store",
                folder / "store",
                environment=at(scratch),
            )
            try:
                study = folder / "store" / "studies" / STUDY
                driver.wait_until(lambda: any(trial["step"] for trial in shown(study)), every=0.02)
                start_s = time.monotonic() - began
                assert driver.process.wait(timeout=END_S) == 0, driver.log.read_text()
                seconds = time.monotonic() - began
            finally:
                driver.end()
        whole = Whole(
            seconds,
            start_s,
            len(ended(folder / "store")),
            contents(folder / "store") | opened(folder / "store"),
        )
        kept.write_text(json.dumps(whole._asdict()))
    return Whole(**json.loads(kept.read_text()))


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder for all temporary files, Ray's sockets among them, whose paths must be short."""
    return tempfile.TemporaryDirectory(prefix="dc-", dir="/tmp", ignore_cleanup_errors=True)


def at(scratch: str) -> dict[str, str]:
    return {"TMPDIR": scratch}


class StudyRound:
    """Runs the study of one round in an empty folder; ``rows`` of kills go to the record at once."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        number: int,
        planned: Round,
        whole: Whole,
        record: CampaignRecord,
        scratch: str,
    ) -> None:
        self.folder, self.store = folder, folder / "store"
        self._seed, self._number = seed, number
        self._planned, self._whole, self._record = planned, whole, record
        self._environment = at(scratch)
        self._drivers: list[Driver] = []
        self._known: dict[str, object] = {}
        self._waiting: tuple[Row, float, set[object]] | None = None

    def play(self) -> list[str]:
        """Lines on what differs from the unbroken study; the round's row is recorded."""
        (self.folder / "tiny.yaml").write_text(VARIATIONS[self._planned.variation])
        lost, found, num_bricked, num_orphans = 0, [], 0, 0
        try:
            kills = list(self._planned.kills)
            while self._live(kills):
                pass
            self._settle(None)
            there = contents(self.store) | opened(self.store)
            num_bricked = int(any("refused" in key for key in there))
            found = differences(there, self._whole.contents)
        except Broken as broken:
            found = [str(broken)]
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
            num_bricked = 1
        finally:
            self._settle(None)
            lost = self._num_lost()
            orphans = [
                (process.pid, process.name()) for d in self._drivers for process in left(d.mark, ORPHAN_S)
            ]
            num_orphans = len(orphans)
            for driver in self._drivers:
                driver.end()
        if lost:
            found.append(f"{lost} results that were there before a kill are gone or others")
        if orphans:
            found.append(f"processes outlive the study: {orphans}")
        self._record.add(
            Row(
                self._seed,
                self._number,
                ROUND,
                life=len(self._drivers),
                process=self._planned.variation,
                num_lost=lost,
                num_orphans=num_orphans,
                num_bricked=num_bricked,
                result="; ".join(found)[:2000] or EQUAL,
            )
        )
        return found

    def _live(self, kills: list[Kill]) -> bool:
        """One driver's life; True if the study is not over after it."""
        life = len(self._drivers)
        is_known = (self.store / "studies" / STUDY / "study.json").exists()
        words = ["resume", STUDY] if is_known and life % 2 else ["run", str(self.folder / "tiny.yaml")]
        driver = Driver(
            self.folder / f"shown-{life}", *words, "--store", self.store, environment=self._environment
        )
        self._drivers.append(driver)
        began = time.monotonic()
        at_first = self._signs()
        may_end = False
        while kills:
            kill = kills[0]
            victim = self._victim(driver, kill, at_first)
            if victim is None:  # it has come to its end before
                break
            kills.pop(0)
            may_end = may_end or kill.kind in OF_RAY
            self._kill(driver, kill, victim, life, time.monotonic() - began)
            if kill.kind in ENDED_BY:
                driver.process.wait()
                return True
            if kill.kind in OF_RAY:
                break
        end = time.monotonic() + END_S
        while driver.process.poll() is None:
            if time.monotonic() > end:
                raise Broken(f"life {life} hangs: {_last_lines(driver)}")
            self._hear()
            time.sleep(0.2)
        said = driver.log.read_text(errors="replace")
        if "Traceback" in said:
            raise Broken(f"life {life} printed a traceback: {_last_lines(driver)}")
        if driver.process.returncode == 0:
            return False
        if may_end and driver.process.returncode in BY_RAY and _said_at_last(driver).startswith("error: "):
            return True
        raise Broken(f"life {life} ended with {driver.process.returncode}: {_last_lines(driver)}")

    def _victim(self, driver: Driver, kill: Kill, at_first: set[object]) -> psutil.Process | None:
        """The process to be killed, when the moment has come and there is one; None if the driver ends before.

        The life has got somewhere when it shows an epoch or a result that was not there ``at_first``.
        """
        moment = time.monotonic() + kill.share * self._whole.start_s if kill.as_it_starts else None
        while driver.process.poll() is None:
            self._hear()
            if moment is None:
                if not self._signs() <= at_first:
                    moment = time.monotonic() + SOON * kill.share * self._work_left_s()
                time.sleep(0.1)
            elif time.monotonic() < moment:
                time.sleep(min(0.2, max(0.0, moment - time.monotonic())))
            elif kill.kind in ENDED_BY:
                return psutil.Process(driver.process.pid)
            elif found := _of_kind(driver, kill.kind):
                return found[int(kill.which * len(found))]
            else:
                time.sleep(0.2)
        return None

    def _work_left_s(self) -> float:
        """Estimated seconds of work that are left, the verdict's among them."""
        share = 1 - len(ended(self.store)) / self._whole.num_ended
        return 4.0 + share * (self._whole.seconds - self._whole.start_s)

    def _kill(self, driver: Driver, kill: Kill, victim: psutil.Process, life: int, lived: float) -> None:
        name = "dmlstudy" if kill.kind in ENDED_BY else _name(victim)
        state = self._state(kill)
        row = Row(self._seed, self._number, kill.kind, life, round(lived, 2), name, state)
        self._settle(None)
        self._known |= ended(self.store)
        if kill.kind == "group":
            driver.kill()
        elif kill.kind == "machine":
            for process in marked(driver.mark):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        self._waiting = (row, time.monotonic(), self._signs())

    def _signs(self) -> set[object]:
        """Epochs that the driver shows, and results that are recorded."""
        epochs: set[object] = set()
        with suppress(ValueError, OSError):  # a file that is being replaced
            epochs = {
                (trial["label"], trial["step"])
                for trial in shown(self.store / "studies" / STUDY)
                if trial["step"]
            }
        return epochs | set(ended(self.store))

    def _hear(self) -> None:
        """Record the last kill once the study has gone on after it."""
        if self._waiting is not None and not self._signs() <= self._waiting[2]:
            self._settle(time.monotonic() - self._waiting[1])

    def _settle(self, went_on_s: float | None) -> None:
        """Record the last kill, with the results that are not there any more."""
        if self._waiting is None:
            return
        row, _, _ = self._waiting
        self._waiting = None
        seconds = None if went_on_s is None else round(went_on_s, 1)
        self._record.add(row._replace(went_on_s=seconds, num_lost=self._num_lost()))

    def _num_lost(self) -> int:
        """Results that were there before a kill and are gone, or others."""
        there = ended(self.store)
        return sum(there.get(run) != found for run, found in self._known.items())

    def _state(self, kill: Kill) -> str:
        """How far the study is."""
        num = len(ended(self.store))
        if num == self._whole.num_ended:
            registered = len(asked(self.store, "SELECT 1 FROM model_versions"))
            return f"conclusion, {registered} registered"
        return f"{'start' if kill.as_it_starts else 'trials'}, {num} ended"


def _of_kind(driver: Driver, kind: str) -> list[psutil.Process]:
    """The driver's processes of this kind, oldest first."""
    if kind in OF_RAY:
        return marked(driver.mark, OF_RAY[kind])
    named = {process: _name(process) for process in marked(driver.mark, "ray::")}
    if kind == "worker":
        return [process for process, name in named.items() if name == WORKER]
    return [process for process, name in named.items() if name.startswith("ray::") and name not in NO_ACTORS]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        return Path(words[0]).name.split(".")[0] if words else process.name()
    return "gone"


def _said_at_last(driver: Driver) -> str:
    """The error of a driver that has ended, or its last line.

    A guard may say it a moment later. Where one of its threads ends the driver, another may tell of a trial after that.
    """
    end = time.monotonic() + 5
    while True:
        last = driver.log.read_text(errors="replace").strip().splitlines()[-3:]
        errors = [line for line in last if line.startswith("error: ")]
        if errors or time.monotonic() > end:
            return errors[-1] if errors else _last_lines(driver)
        time.sleep(0.1)


def _last_lines(driver: Driver) -> str:
    lines = driver.log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "nothing said"
