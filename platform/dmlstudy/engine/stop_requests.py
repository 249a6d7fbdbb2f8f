"""Files through which another shell watches a running study and asks it to stop a trial; no network, no Ray.

<store>/studies/<name>/running.json     the driver says which trials run now, and how far they are
<store>/studies/<name>/trials.jsonl     a line per trial that was handed out: its number and Tune's id
<store>/studies/<name>/wishes/<number>  a request to stop this trial

The driver looks twice a second. It removes a request once it has answered it; the storages tell how.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmlstudy.files import written_whole
from dmlstudy.records import Record
from dmlstudy.spec.epochs import Place, place
from dmlstudy.store import LOCK
from dmlstudy.trials import Status

if TYPE_CHECKING:
    from dmlstudy.search.study_search import Assignment

POLL_S = 0.5
BY_HAND = "stopped by hand"


class RunningTrial(Record):
    """A trial that runs now; trials of the verdict have no number. ``score`` is the objective so far.

    ``step`` counts its reports, ``epoch`` and ``fold`` (of a verdict: the model) say what the last one was about; all
    are 0 before the first.
    """

    number: int | None
    label: str
    family: str
    phase: str
    step: int
    fold: int
    num_folds: int
    epoch: int
    num_epochs: int
    score: float | None
    started: float

    @property
    def place(self) -> str:
        """Its progress in words."""
        of = "fold" if self.phase == "search" else "model"
        return str(Place(self.fold, self.num_folds, self.epoch, self.num_epochs, of))


class Desk:
    """The driver's side: shows what runs, and ends the trials that it is asked to stop.

    What a full disk does not take is not shown. The study ends of it, and says why, where a trial is recorded.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a session in the study's folder; what an earlier one left unanswered is void."""
        self._folder = folder
        self._requests = folder / "wishes"
        self._requests.mkdir(parents=True, exist_ok=True)
        for left in self._requests.iterdir():
            left.unlink(missing_ok=True)
        self._started: dict[str, float] = {}
        self._shown = ""
        self._next_look = 0.0
        self._show([])

    def note(self, trial_id: str, assignment: Assignment) -> None:
        """Keep under which id Tune, and so the engines' log, knows a trial."""
        line = {"number": assignment.number, "label": assignment.label, "trial_id": trial_id}
        with suppress(OSError), open(self._folder / "trials.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"time": time.time()}) + "\n")

    def serve(self, controller: Any, assignments: Mapping[str, Assignment]) -> None:
        """Read the requests and show what runs, at most every POLL_S; called in every step of Tune's loop.

        ``controller`` is Tune's, as it shows itself to a scheduler. A trial that waits for its workers is
        ended as soon as it has started.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + POLL_S
        live = [trial for trial in controller.get_live_trials() if trial.trial_id in assignments]
        for number in requested_stops(self._folder):
            trial = next((t for t in live if assignments[t.trial_id].number == number), None)
            if trial is not None and trial.status == "PENDING":
                continue
            if trial is not None and assignments[trial.trial_id].status == Status.RUNNING:
                self._end(controller, trial, assignments[trial.trial_id])
            (self._requests / str(number)).unlink(missing_ok=True)
        now = time.time()
        running = [
            (trial.trial_id, assignments[trial.trial_id])
            for trial in controller.get_live_trials()
            if trial.status == "RUNNING" and trial.trial_id in assignments
        ]
        self._started = {trial_id: self._started.get(trial_id, now) for trial_id, _ in running}
        self._show([_shown(assignment, self._started[trial_id]) for trial_id, assignment in running])

    def _end(self, controller: Any, trial: Any, assignment: Assignment) -> None:
        # The searcher leaves a status alone that is settled, and Tune's callbacks record it.
        assignment.status = Status.PRUNED
        at = place(assignment.config, _step(assignment))
        assignment.reason = f"{BY_HAND} after {at}" if at.epoch else f"{BY_HAND} before its first epoch ended"
        controller.stop_trial(trial)

    def _show(self, running: list[RunningTrial]) -> None:
        text = json.dumps([trial.model_dump() for trial in running])
        if text != self._shown:
            path = self._folder / "running.json"
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            # Written anew at every change, so it need not outlast a loss of power, and the driver does not wait.
            with suppress(OSError), written_whole(path, draft, outlasts_power=False) as file:
                file.write(text.encode())
            self._shown = text


def running_trials(folder: Path) -> list[RunningTrial]:
    """Running trials as the study's driver showed them last, oldest first; valid only while the driver lives.

    A driver that has just taken the study has shown nothing yet, whatever one before it left there.
    """
    path = folder / "running.json"
    try:
        if (folder / LOCK).exists() and path.stat().st_mtime_ns < (folder / LOCK).stat().st_mtime_ns:
            return []
        shown = json.loads(path.read_text(encoding="utf-8"))
        trials = [RunningTrial.model_validate(trial) for trial in shown]
    except (FileNotFoundError, ValueError):  # ValueError: damaged, or as another version shows it
        return []
    return sorted(trials, key=lambda trial: trial.started)


def tune_ids(folder: Path, number: int) -> list[str]:
    """The ids under which Tune has known a trial: one for each session that began it."""
    path = folder / "trials.jsonl"
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # cut by a crash
            continue
        if entry["number"] == number:
            found.append(str(entry["trial_id"]))
    return found


def request_stop(folder: Path, number: int) -> None:
    """Request that a trial ends."""
    (folder / "wishes").mkdir(exist_ok=True)
    (folder / "wishes" / str(number)).touch()


def requested_stops(folder: Path) -> list[int]:
    """Numbers of the trials with an unanswered request to stop."""
    return sorted(int(path.name) for path in (folder / "wishes").glob("*") if path.name.isdigit())


def withdraw(folder: Path, number: int) -> None:
    """Withdraw a request."""
    (folder / "wishes" / str(number)).unlink(missing_ok=True)


def _shown(assignment: Assignment, started: float) -> RunningTrial:
    config, step = assignment.config, _step(assignment)
    at = place(config, step)
    return RunningTrial(
        number=assignment.number,
        label=assignment.label,
        family=config.family,
        phase=config.phase,
        step=step,
        fold=at.fold,
        num_folds=at.num_folds,
        epoch=at.epoch,
        num_epochs=at.num_epochs,
        score=assignment.metrics.get(config.objective),
        started=started,
    )


def _step(assignment: Assignment) -> int:
    return int(assignment.curve[-1].get("step", 0)) if assignment.curve else 0
