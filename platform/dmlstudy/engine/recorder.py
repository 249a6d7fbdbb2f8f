"""The one place from which a running study writes: MLflow runs, trained embedders, progress lines."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import tune

from dmlstudy.data import state_file
from dmlstudy.engine.cluster import ClusterError
from dmlstudy.engine.cluster_watch import ClusterWatch
from dmlstudy.engine.gang import checkpoint_name
from dmlstudy.engine.mailbox import EMBEDDER, FOLD_SCORES, PAIR_COUNTS, UNIT_SCORES
from dmlstudy.engine.progress import ProgressLines
from dmlstudy.files import temporary_folder
from dmlstudy.records import UnitScores
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.store import StoreError
from dmlstudy.text import first_line
from dmlstudy.trials import GOING_ON, Status

STOPPED_KEPT = 16
"""After so many further stopped trials a stopped one's state is removed again: its workers, which were an epoch ahead,
may have written it once more."""

REMOVAL_SHARE = 0.05
"""Removing states takes no larger share of the time where it fails, as on a server that does not answer; what is left
is removed at the end of the study."""


VAULT_PATIENCE_S = 120.0
"""Time for which the driver waits for a vault that is being restarted."""

MOST_RETRAINED = 3
"""The most times that a verdict trial is rerun because its files were lost."""


class StudyEnds(Exception):
    """Ends Tune's loop cleanly."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Vault:
    """Holds the files of finished trials between the worker that made them and the driver that files them.

    Its process is started again where it was killed; what it held is lost then, and its trials are handed out again.
    """

    def __init__(self) -> None:
        self._files: dict[str, dict[str, bytes]] = {}

    def put(self, trial_id: str, files: dict[str, bytes]) -> None:
        self._files[trial_id] = files

    def files(self, trial_id: str) -> dict[str, bytes]:
        return self._files.get(trial_id, {})

    def drop(self, trial_id: str) -> None:
        self._files.pop(trial_id, None)


class Recorder(tune.Callback):
    """Follows Tune's trials: opens an MLflow run for each, and ends it with its scores and reason.

    What a trial has left elsewhere, its embedder in the vault and its state below ``checkpoints`` (a folder or a URI),
    stays until all of it is recorded: a driver killed before that finds it again.

    ``is_stopped`` says whether the study is to end early, ``watch`` what has died of the cluster that it runs on.
    ``note_bound`` is told how many verdict trials there are at most, and of untrained embedders, where looks at the
    verdict lower these numbers; ``note_planned`` how many trials each search has, where one may end early.
    """

    def __init__(
        self,
        search: StudySearch,
        tracker: StudyTracker,
        progress: ProgressLines,
        vault: Any,
        checkpoints: str,
        is_stopped: Callable[[], bool] = lambda: False,
        watch: ClusterWatch | None = None,
        note_bound: Callable[[int, int], None] = lambda num_all, num_untrained: None,
        note_planned: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self._search = search
        self._note_bound = note_bound
        self._bound = (-1, -1)
        self._note_planned = note_planned
        self._planned: dict[str, int] = {}
        self._tracker = tracker
        self._progress = progress
        self._vault = vault
        self._checkpoints = checkpoints
        self._is_stopped = is_stopped
        self._watch = watch
        self._num_retrained: Counter[str] = Counter()
        self._open: dict[str, str] = {}
        """The runs of the trials that are at work, by trial."""
        self._energy_wh: dict[str, float] = {}
        self._stopped: deque[str] = deque()
        self._removes_again = 0.0
        self.failure: StoreError | ClusterError | None = None
        """The error that ends the study, if there is one."""

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        # Tune swallows what most callbacks raise, but not here.
        if not self.failure and self._watch and (reason := self._watch.why_gone()):
            self.failure = ClusterError(self._to_be_resumed(reason))
        if self.failure or self._is_stopped():
            raise StudyEnds
        self._tell_notes()
        self._progress.beat(self._search.has_progress())

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if self.failure:
            return
        assignment = self._search.assignments[trial.trial_id]
        try:
            run_id = self._run_of(assignment)
        except Exception as error:
            self._fail(assignment, error)
        else:
            self._open[trial.trial_id] = run_id

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Mapping[str, Any], **info: Any
    ) -> None:
        energy = result.get("energy_wh")
        if energy is not None:
            self._energy_wh[trial.trial_id] = energy

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial.trial_id)
        result = trial.last_result
        is_hopeless = result.get("unfit") or (result.get("unstarted") and not self._search.has_progress())
        if is_hopeless and not self.failure:
            self.failure = ClusterError(self._to_be_resumed(result["failure"]))

    def _to_be_resumed(self, reason: str) -> str:
        again = self._tracker.store.command("resume", self._search.spec.name)
        return f"{reason}{', and' if ';' in reason else ';'} `{again}` goes on"

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._open:  # it failed before it started
            self.on_trial_start(iteration, trials, trial)
        assignment = self._search.assignments[trial.trial_id]
        if assignment.status == Status.FAILED and self._watch and self._watch.is_doubtful():
            self._search.hand_out_again(trial.trial_id, assignment.reason)  # Ray is dying, and not the trial
        self._end(trial.trial_id)

    def end_open_runs(self) -> None:
        """End what an interruption has left open."""
        for trial_id in list(self._open):
            self._search.assignments[trial_id].status = Status.INTERRUPTED
            self._end(trial_id)

    def _end(self, trial_id: str) -> None:
        if trial_id not in self._open or self.failure:
            return
        assignment = self._search.assignments[trial_id]
        try:
            self._file(trial_id, assignment)
        except Exception as error:
            self._fail(assignment, error)

    def _fail(self, assignment: Assignment, error: Exception) -> None:
        """Give up recording; the trial is run again, or only its end, once the fault is fixed."""
        assignment.status = Status.INTERRUPTED
        if isinstance(error, StoreError):
            self.failure = error
            return
        self.failure = StoreError(
            f"{assignment.label} could not be recorded ({type(error).__name__}: {first_line(error)});"
            " mend it and run the study again, it goes on from there"
        )
        self.failure.__cause__ = error

    def _run_of(self, assignment: Assignment) -> str:
        """The run of a trial that begins or goes on: that in which it has paused, or a new one."""
        paused = self._paused_run_of(assignment)
        if paused is None:
            return self._new_run_of(assignment)
        self._tracker.reopen(paused)
        return paused

    def _paused_run_of(self, assignment: Assignment) -> str | None:
        if not assignment.continues_after:
            return None
        assert assignment.number is not None
        return self._tracker.take_up(assignment.number)

    def _new_run_of(self, assignment: Assignment) -> str:
        assignment.continues_after = 0  # its run is to hold all reports
        return self._tracker.start_trial(assignment.label, assignment.config, assignment.number)

    def file_given_up(self, assignment: Assignment) -> None:
        """Record that a paused trial is not promoted any more."""
        if self.failure:
            raise StudyEnds
        try:
            run_id = self._paused_run_of(assignment) or self._new_run_of(assignment)
            seconds = self._tracker.seconds_at_work(run_id)
            self._tracker.end_trial(
                run_id,
                assignment.status,
                assignment.curve,
                {},
                assignment.reason,
                already=assignment.continues_after,
            )
        except Exception as error:
            self._fail(assignment, error)
            raise StudyEnds from None
        self._remove_state(assignment)
        self._progress.ended(assignment, seconds, self._search.best())

    def _file(self, trial_id: str, assignment: Assignment) -> None:
        run_id = self._open[trial_id]
        assert assignment.status != Status.RUNNING
        is_verdict = assignment.config.phase == "verdict"
        if is_verdict and assignment.status == Status.FINISHED:
            files = self._from_vault(trial_id)
            if not files and self._num_retrained[assignment.label] < MOST_RETRAINED:
                self._num_retrained[assignment.label] += 1
                self._search.hand_out_again(trial_id, "its results were lost with the vault")
            elif not files:
                raise RuntimeError("its results are lost")
            else:
                assignment.unit_scores = self._keep(run_id, files)
        elif self._search.is_best_yet(assignment):
            self._keep_fold_scores(run_id, trial_id)
        seconds = self._tracker.seconds_at_work(run_id)
        self._tracker.end_trial(
            run_id,
            assignment.status,
            assignment.curve,
            assignment.metrics,
            assignment.reason,
            self._search.values_of(assignment),
            already=assignment.continues_after,
            energy_wh=self._energy_wh.pop(trial_id, None),
        )
        self._search.commit(trial_id)
        del self._open[trial_id]
        self._forget(trial_id, assignment)
        self._tracker.note_search(self._search.counts(), self._search.best_numbers())
        is_in_steps = self._search.plan.is_in_steps
        left = self._search.left if is_in_steps or self._note_planned else None
        is_judged = is_in_steps and left is not None and left.search == 0
        if is_judged and (bound := self._search.verdict_at_most) != self._bound:
            self._bound = bound
            self._note_bound(*bound)
        self._progress.ended(assignment, seconds, self._search.best(), left)
        self._tell_notes()

    def _tell_notes(self) -> None:
        """Tell of the search's decisions, and note for other shells how many trials are left of it."""
        for line in self._search.take_notes():
            self._progress.tell(line)
        if self._note_planned is not None and (planned := self._search.num_planned_of) != self._planned:
            self._planned = planned
            with suppress(OSError):  # as of a full disk, which a trial's record tells of
                self._note_planned(planned)

    def _keep(self, run_id: str, files: dict[str, bytes]) -> UnitScores | None:
        """File a verdict trial's scores by class, what its thresholds do, and its model, where it left such.

        Gives back these scores, if there are any.
        """
        with temporary_folder() as folder:
            (Path(folder) / EMBEDDER).mkdir()
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            if any(name.startswith(f"{EMBEDDER}/") for name in files):
                self._tracker.log_model(run_id, str(Path(folder) / EMBEDDER))
            if PAIR_COUNTS in files:
                self._tracker.log_pair_counts(run_id, Path(folder) / PAIR_COUNTS)
            return self._tracker.log_unit_scores(run_id, Path(folder) / UNIT_SCORES)

    def _keep_fold_scores(self, run_id: str, trial_id: str) -> None:
        """File a search trial's scores by class, which are no part of the search: lost ones are left out."""
        content = self._from_vault(trial_id).get(FOLD_SCORES)
        if content is None:
            return
        with temporary_folder() as folder:
            file = Path(folder) / FOLD_SCORES
            file.write_bytes(content)
            self._tracker.log_fold_scores(run_id, file)

    def _from_vault(self, trial_id: str) -> dict[str, bytes]:
        """A trial's files; none where the vault was killed after it got them."""
        try:
            files: dict[str, bytes] = ray.get(self._vault.files.remote(trial_id), timeout=VAULT_PATIENCE_S)
        except ray.exceptions.RayError:
            return {}
        return files

    def _forget(self, trial_id: str, assignment: Assignment) -> None:
        """Remove what the trial has left elsewhere, for it is recorded; one that goes on is resumed from it."""
        if assignment.status in GOING_ON:
            return
        self._vault.drop.remote(trial_id)
        folder = self._remove_state(assignment)
        if assignment.status == Status.PRUNED:
            self._stopped.append(folder)
        if len(self._stopped) > STOPPED_KEPT:
            self._remove(self._stopped.popleft())

    def _remove_state(self, assignment: Assignment) -> str:
        """Remove what a trial has kept to be resumed from; gives back its folder."""
        name = checkpoint_name(assignment.config.model_dump(mode="json"))
        folder = state_file.join(self._checkpoints, name)
        self._remove(folder)
        return folder

    def _remove(self, folder: str) -> None:
        """Remove a trial's state, unless that failed a while ago."""
        started = time.monotonic()
        if started < self._removes_again:
            return
        try:
            state_file.at(folder).remove()
        except OSError:
            ended = time.monotonic()
            self._removes_again = ended + (ended - started) / REMOVAL_SHARE

    def __getstate__(self) -> dict[str, Any]:
        return {}
