"""Replay a study of thousands of trials on 64 gangs, with synthetic learning curves in place of training.

    python tests/benchmarks/scale.py [--trials 10000] [--gangs 64] [--scheduler asha] [--epoch-seconds 3]

The search, the early stopping, Optuna's storage and MLflow's are the real ones, driven as Tune and the recorder
drive them; only Ray and the training are not there. Time is simulated: a trial's epoch takes ``--epoch-seconds``, and
a trial begins SWITCH_S after it is handed out. The driver's own time is real and counts: while it works on one trial,
gangs wait for the next one. So the **share in training** is that of the gangs' time until the search's last trial
is handed out. With ``--generations`` a generation waits for its last trial, as studies do by default.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from ray.tune.search import Searcher

from dmlstudy.engine.stop_requests import Desk
from dmlstudy.engine.tune_adapter import StudyScheduler, TuneSearch
from dmlstudy.records import TrialConfig
from dmlstudy.registry import tracking
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.search.storage import open_storage
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import Store

EPOCHS, FOLDS = 5, 2
SWITCH_S = 0.17
"""Seconds beyond training of a trial on a gang that is there, as ``overhead.py`` measures them."""

PARTS = ("suggest", "observe", "commit", "mlflow")
MARKS = (100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


def study(num_trials: int, num_gangs: int, search: Mapping[str, Any]) -> StudySpec:
    """Four families, each of which asks for a quarter of the gangs' trials at a time, where there are generations."""
    names = ("contrastive", "triplet", "multi_similarity", "margin")
    return study_file.parse(
        {
            "name": "scale",
            "data": {"name": "digits"},
            "batch": {"classes": "all", "images_per_class": 4},
            "training": {
                "epochs": EPOCHS,
                "lr": {"float": [1e-6, 1e-2], "log": True, "default": 1e-5},
            },
            "families": {name: {"space": name, "override": {"batch.classes": "all"}} for name in names},
            "search": {
                "trials_per_family": math.ceil(num_trials / len(names)),
                **({"generation_size": max(1, num_gangs // len(names))} if search["deterministic"] else {}),
                **search,
            },
            "protocol": {"num_folds": FOLDS, "verdict_seeds": 5},
        }
    )


def quality(config: TrialConfig) -> float:
    """Best at a learning rate that differs by family, with the noise of a seed."""
    best_lr = {"contrastive": -3.0, "triplet": -4.0, "multi_similarity": -3.5}.get(config.family, -2.5)
    noise = random.Random(f"{config.fingerprint()} {config.seed}").gauss(0, 0.02)
    return 0.8 - 0.05 * (math.log10(config.training.lr) - best_lr) ** 2 + noise


class TrialOfTune:
    """The part of Tune's trial that the scheduler looks at."""

    error_file = None

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


class Replay:
    """Plays Tune, its gangs and the recorder, in simulated time."""

    def __init__(
        self,
        search: StudySearch,
        tracker: tracking.StudyTracker,
        num_gangs: int,
        epoch_s: float,
        folder: Path,
    ) -> None:
        self.search, self.adapter = search, TuneSearch(search)
        self.tracker = tracker
        self.scheduler = StudyScheduler(search, Desk(folder))
        self.num_gangs = num_gangs
        self.epoch_s = epoch_s
        self.now = self.driver_free = 0.0
        self.trained = 0.0
        self.of_search: tuple[float, float] | None = None
        """(seconds in training, seconds of all gangs) when the last search trial was handed out."""
        self.num_handed_out = self.num_begun = self.num_ended = 0
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.of_processor: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[float, int, str, TrialConfig, int]] = []
        self._runs: dict[str, str] = {}

    def run(self) -> None:
        """Play until the search says that it is over."""
        started, cpu_started = time.perf_counter(), time.process_time()
        mark, cpu_mark, mark_begun = started, cpu_started, 0
        print(
            f"{'begun':>7} {'wait':>6} {'ms/trial':>9} {'CPU ms/trial':>13} {'driver MiB':>11} {'s':>7}"
            f" {'simulated s':>12}"
        )
        while True:
            self._as_driver(self._fill)
            if not self._events:
                break
            self.now, _, trial_id, config, step = heapq.heappop(self._events)
            self._as_driver(self._advance, trial_id, config, step)
            if self.num_begun in MARKS and self.num_begun != mark_begun:
                now, cpu, num = time.perf_counter(), time.process_time(), self.num_begun - mark_begun
                num_waiting = self.num_begun - self.num_ended - len(self._events)
                print(
                    f"{self.num_begun:>7} {num_waiting:>6} {1000 * (now - mark) / num:>9.1f}"
                    f" {1000 * (cpu - cpu_mark) / num:>13.1f} {resident_mib():>11.0f}"
                    f" {now - started:>7.0f} {self.now:>12.0f}",
                    flush=True,
                )
                mark, cpu_mark, mark_begun = now, cpu, self.num_begun
        total = time.perf_counter() - started
        print(f"{self.num_ended} trials in {total:.1f} s, {resident_mib():.0f} MiB at the end,", end="")
        print(f" for {self.now:.0f} s of simulated time", end="")
        cpu = time.process_time() - cpu_started
        print(f" ({self.now / total:.1f} times faster than real time; {cpu:.0f} s of CPU)")
        if self.of_search is not None:
            trained, whole = self.of_search
            print(f"the search's share in training: {trained / whole:.1%} of {self.num_gangs} gangs' time")
        for what, seconds in (("ms", self.seconds), ("CPU ms", self.of_processor)):
            spent = ", ".join(f"{name} {1000 * s / self.num_ended:.1f}" for name, s in seconds.items())
            print(f"{what} per trial by part: {spent}")

    def _as_driver(self, call: Any, *args: Any) -> None:
        """Let the driver do something once it is free; its real time counts as simulated time."""
        self.now = max(self.now, self.driver_free)
        started = time.perf_counter()
        call(*args)
        self.driver_free = self.now + time.perf_counter() - started

    def _fill(self) -> None:
        while len(self._events) < self.num_gangs:
            trial_id = f"t{self.num_handed_out}"
            answer = self._timed("suggest", self.adapter.suggest, trial_id)
            if answer is None or answer == Searcher.FINISHED:
                return
            assert isinstance(answer, Mapping)
            self.num_handed_out += 1
            assignment = self.search.assignments[trial_id]
            self.num_begun += not assignment.continues_after
            paused = None
            if assignment.continues_after:
                paused = self._timed("mlflow", self.tracker.take_up, assignment.number)
            if paused is None:
                self._runs[trial_id] = self._timed(
                    "mlflow", self.tracker.start_trial, assignment.label, assignment.config, assignment.number
                )
            else:
                self._timed("mlflow", self.tracker.reopen, paused)
                self._runs[trial_id] = paused
            if assignment.number is not None:
                waited = sum(event[0] - self.now for event in self._events)  # counted, and not trained yet
                self.of_search = (self.trained - max(0.0, waited), self.now * self.num_gangs)
            self._push(trial_id, assignment.config, assignment.continues_after + 1, SWITCH_S)

    def _push(self, trial_id: str, config: TrialConfig, step: int, after: float = 0.0) -> None:
        seconds = self.epoch_s * (0.8 + 0.4 * random.Random(f"{trial_id} {step}").random())
        self.trained += seconds
        end = self.now + after + seconds
        heapq.heappush(self._events, (end, int(trial_id[1:]), trial_id, config, step))

    def _advance(self, trial_id: str, config: TrialConfig, step: int) -> None:
        is_verdict = config.phase == "verdict"
        num_steps = config.training.epochs if is_verdict else EPOCHS * FOLDS
        score = quality(config) * (1 - math.exp(-step / 3))
        metrics = {"step": float(step), "train_loss": 1 - score, "images_per_second": 1000.0}
        if not is_verdict:
            metrics |= {"map_at_r": score, "recall_at_1": score, "map_at_r_stderr": 0.01}
        result: dict[str, Any] = {f"metrics/{name}": value for name, value in metrics.items()}
        trial = TrialOfTune(trial_id)
        decision = self._timed(
            "observe", self.scheduler.on_trial_result, None, trial, result | {"done": False}
        )
        assignment = self.search.assignments[trial_id]
        is_paused = step == assignment.pause_after
        if decision == "CONTINUE" and step < num_steps and not is_paused:
            self._push(trial_id, config, step + 1)
            return
        if is_verdict:
            result = {"metrics/test_map_at_r": quality(config), "metrics/test_recall_at_1": quality(config)}
        self.adapter.on_trial_complete(trial_id, result | {"done": True, "paused": is_paused})
        self._end_run(self._runs.pop(trial_id), assignment, assignment.metrics)
        self._timed("commit", self.search.commit, trial_id)
        self._timed("mlflow", self.tracker.note_search, self.search.counts(), self.search.best_numbers())
        self.search.best()
        self.num_ended += not is_paused

    def give_up(self, assignment: Assignment) -> None:
        """Record that a paused trial is not promoted any more, as the recorder does."""
        run = self._timed("mlflow", self.tracker.take_up, assignment.number)
        self._end_run(run, assignment, {})
        self.num_ended += 1

    def _end_run(self, run: str, assignment: Assignment, metrics: Mapping[str, float]) -> None:
        self._timed(
            "mlflow",
            self.tracker.end_trial,
            run,
            assignment.status,
            assignment.curve,
            metrics,
            assignment.reason,
            already=assignment.continues_after,
        )

    def _timed(self, part: str, call: Any, *args: Any, **named: Any) -> Any:
        """Count the time of a call, without that of timed calls inside it."""
        clocks = (self.seconds, time.perf_counter), (self.of_processor, time.process_time)
        before = [sum(spent.values()) - clock() for spent, clock in clocks]
        answer = call(*args, **named)
        for (spent, clock), at_first in zip(clocks, before, strict=True):
            spent[part] += clock() - sum(spent.values()) + at_first
        return answer


def resident_mib() -> float:
    """What this process holds in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--gangs", type=int, default=64)
    parser.add_argument("--epoch-seconds", type=float, default=3.0, help="of training, on average")
    parser.add_argument("--sampler", default="tpe")
    parser.add_argument("--scheduler", default="asha")
    parser.add_argument("--generations", action="store_true")
    parser.add_argument(
        "--store", type=Path, help="where the study is kept; default: a folder that is removed"
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="no replay: what one has left in --store is resumed"
    )
    arguments = parser.parse_args()
    if arguments.rebuild and arguments.store is None:
        parser.error("--rebuild: needs --store, the folder with the study")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(arguments.store or Path(scratch))
        store.prepare()
        named = {"sampler": arguments.sampler, "scheduler": arguments.scheduler}
        found = study(arguments.trials, arguments.gangs, named | {"deterministic": arguments.generations})
        tracker = tracking.StudyTracker(store, found.name, {})
        storage = open_storage(store)
        if not arguments.rebuild:
            search = StudySearch(found, storage, set())
            replay = Replay(search, tracker, arguments.gangs, arguments.epoch_seconds, Path(scratch))
            search.record_given_up = replay.give_up
            replay.run()
            tracker.end_study("finished", {"objective": "map_at_r"})
        started, before = time.perf_counter(), resident_mib()
        again = StudySearch(found, storage, tracker.finished_verdicts())
        took, most = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert again.is_over or arguments.rebuild
        print(f"rebuilt from the storage, as after an interruption, in {took:.1f} s; the driver has", end="")
        print(f" {before:.0f} MiB before, {resident_mib():.0f} after, {most:.0f} at most so far")
        for _ in range(2):
            started = time.perf_counter()
            board = leaderboard(store, found.name)
            print(f"the leaderboard in {time.perf_counter() - started:.2f} s: {len(board.rows)} rows")


if __name__ == "__main__":
    main()
