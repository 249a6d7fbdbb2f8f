"""The state of studies, as seen from another shell.

A study's past is in Optuna's and MLflow's storages, its running trials in the study's folder
(``engine.stop_requests``). The lock shows whether its driver is alive. So all of it is known while the study runs,
after its end and after a crash, without Ray.

MLflow and Optuna take seconds to import, so they are imported where they are used.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmlstudy.engine.stop_requests import (
    RunningTrial,
    running_trials,
)
from dmlstudy.metric_names import IMAGES_PER_SECOND
from dmlstudy.records import Record, is_untrained
from dmlstudy.spec.pace import Trials, Work, seconds_left
from dmlstudy.store import Store, StoreError, seconds_spent, spec_of
from dmlstudy.text import duration
from dmlstudy.trials import ENDED, Status, best_ranked

if TYPE_CHECKING:
    from dmlstudy.registry.runs import Run


class FamilyStatus(Record):
    """Trials of one family by state; ``best`` is its best objective on the validation classes.

    ``num_judged`` counts its finished runs of the verdict. The untrained embedder has no search.
    """

    family: str
    num_waiting: int
    num_running: int
    num_finished: int
    num_stopped: int
    num_failed: int
    num_judged: int
    best: float | None
    best_trial: int | None


class StudyStatus(Record):
    """A study's state, as its storages and its folder say.

    ``reason`` is why it failed, ``notes`` what else to know or do about it. With ``is_bound`` the trials and seconds
    left are the most that there can be: seeds are added until the verdict is decided, or a search may end early.
    """

    study: str
    state: str
    reason: str
    notes: list[str]
    seconds_spent: float
    num_left: int
    families: list[FamilyStatus]
    running: list[RunningTrial]
    trials_per_hour: float | None
    images_per_second: float | None
    seconds_left: float | None
    is_bound: bool = False

    def num(self, what: Literal["finished", "stopped", "failed", "judged"]) -> int:
        return sum(getattr(family, f"num_{what}") for family in self.families)

    @property
    def best(self) -> FamilyStatus | None:
        """The family with the best trial so far."""
        tried = [family for family in self.families if family.best is not None]
        return best_ranked(tried, lambda family: (family.best or 0.0, family.best_trial))


def statuses(store: Store, study: str | None) -> list[StudyStatus]:
    """The status of one study, or of all of the store's, which may have none yet or no more.

    Raises StoreError where there is no such study, and no store.
    """
    names = [study] if study else store.studies()
    if not names and not store.root.is_dir():
        raise StoreError(f"no studies in the store {store.root}; start one with `dmlstudy run`")
    if study:
        return [study_status(store, study)]
    return [_status_or_why_not(store, name) for name in names]


def _status_or_why_not(store: Store, name: str) -> StudyStatus:
    """A study's status; of one whose folder is damaged, why there is none: it does not hide the others."""
    try:
        return study_status(store, name)
    except StoreError as error:
        return StudyStatus(
            study=name,
            state="unreadable",
            reason="",
            notes=[str(error)],
            seconds_spent=0.0,
            num_left=0,
            families=[],
            running=[],
            trials_per_hour=None,
            images_per_second=None,
            seconds_left=None,
        )


def study_status(store: Store, name: str) -> StudyStatus:
    """A study's state from Optuna, MLflow and the study's folder; Ray is not asked."""
    state = store.read_state(name)
    spec_of(store, name, state)
    is_running = state["state"] == "running"
    running = running_trials(store.study_folder(name)) if is_running else []
    trials = search_trials(store, name)
    notes = [mend(store, name, state)] if state["state"] == "interrupted" else []
    try:
        verdicts, speeds = _ended_runs(served(store, state), name)
    except StoreError as error:
        verdicts, speeds = [], []
        notes.append(f"of its verdict nothing is known: {error}")
    is_finished = state["state"] == "finished"
    # A search may end before its number of trials: by its time, or when its space is exhausted.
    is_searched = is_finished or bool(verdicts) or any(trial.phase != "search" for trial in running)
    families = _family_rows(state, trials, verdicts, running, is_searched)
    num_ended = sum(trial.state.is_finished() for trial in trials)
    left = Trials() if is_finished else _left(state, num_ended, verdicts)
    left = left._replace(search=0) if is_searched else left
    work = Work(*state.get("work", Work()))
    ends = [(trial.datetime_complete.timestamp(), work.search) for trial in trials if trial.datetime_complete]
    ends += [
        (run.ended, work.untrained if is_untrained(run.family) else work.verdict)
        for run in verdicts
        if run.ended
    ]
    started = state.get("started", 0.0)
    own = [(moment, done) for moment, done in ends if moment >= started]
    elapsed = (time.time() if is_running else state["updated"]) - started
    seconds = seconds_left(own, max(1, len(running)), work, left)
    return StudyStatus(
        study=name,
        state=state["state"],
        reason=str(state.get("reason", "")) if state["state"] in ("failed", "interrupted") else "",
        notes=notes,
        seconds_spent=seconds_spent(state),
        num_left=sum(left),
        families=families,
        running=running,
        trials_per_hour=3600 * len(own) / elapsed if own and elapsed > 0 else None,
        images_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=seconds if is_running else None,
        is_bound=(bool(state.get("is_bound")) and sum(left) > 0)
        or (bool(state.get("is_search_bound")) and left.search > 0),
    )


def _left(state: Mapping[str, Any], num_searched: int, verdicts: list[Run]) -> Trials:
    """Trials that have not ended, of the planned ones."""
    of_untrained = sum(is_untrained(run.family) for run in verdicts)
    num_untrained = state.get("num_untrained_trials", of_untrained)  # earlier versions did not say
    num_trained = state.get("num_verdict_trials", 0) - num_untrained
    return Trials(
        max(0, state.get("num_search_trials", 0) - num_searched),
        max(0, num_trained - (len(verdicts) - of_untrained)),
        max(0, num_untrained - of_untrained),
    )


def status_row(status: StudyStatus) -> list[str]:
    """Study, state, trials finished, stopped early, failed and left, best, time over all sessions."""
    best = status.best
    return [
        status.study,
        status.state + (f": {status.reason}" if status.reason else ""),
        f"{status.num('finished')} + {status.num('judged')} judged",
        str(status.num("stopped")),
        str(status.num("failed")),
        f"≤ {status.num_left}" if status.is_bound else str(status.num_left),
        f"{best.best:.4f} {best.family}" if best else "none yet",
        duration(status.seconds_spent),
    ]


def family_rows(status: StudyStatus) -> list[list[str]]:
    """A row per family: trials waiting, running, finished, stopped, failed, judged, and its best."""
    return [
        [
            family.family,
            *(str(getattr(family, f"num_{what}")) for what in ("waiting", "running", "finished")),
            *(str(getattr(family, f"num_{what}")) for what in ("stopped", "failed", "judged")),
            "" if family.best is None else f"{family.best:.4f} #{family.best_trial}",
        ]
        for family in status.families
    ]


def status_lines(status: StudyStatus) -> list[str]:
    """Running trials, throughput and estimated end, in lines."""
    lines: list[str] = []
    for trial in status.running:
        score = "no score yet" if trial.score is None else f"{trial.score:.4f}"
        lines.append(
            f"running: {trial.label}, {trial.place}, {score}, for {duration(time.time() - trial.started)}"
        )
    if status.trials_per_hour is not None:
        speed = "" if status.images_per_second is None else f", {status.images_per_second:.0f} images/s each"
        lines.append(f"throughput: {status.trials_per_hour:.0f} trials per hour{speed}")
    if status.seconds_left is None and status.state == "running":
        lines.append("estimated end: ... (too few trials have ended to say)")
    elif status.seconds_left is not None and status.state == "running":
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + status.seconds_left))
        latest = " at the latest (fewer trials may be needed)" if status.is_bound else ""
        lines.append(f"estimated end: {end}, in {duration(status.seconds_left)}{latest}")
    return lines


def _family_rows(
    state: Mapping[str, Any],
    trials: list[Any],
    verdicts: list[Run],
    running: list[RunningTrial],
    is_searched: bool,
) -> list[FamilyStatus]:
    names = list(state["spec"]["families"])
    is_equal = state["spec"].get("search", {}).get("families", "equal") == "equal"
    of_trial = {
        trial.number: trial.user_attrs.get("family", names[trial.number % len(names)]) for trial in trials
    }
    judged = Counter(run.family for run in verdicts)
    at_work = Counter(trial.family for trial in running)
    searched = Counter(trial.family for trial in running if trial.phase == "search")
    rows = []
    for name in [*names, *(other for other in judged if other not in names)]:
        own = [trial for trial in trials if of_trial[trial.number] == name]
        by_status = Counter(Status.of_optuna(trial.state.name) for trial in own)
        num_ended = sum(by_status[status] for status in ENDED)
        # One search over all families says only when it asks for a trial which family it is for.
        planned = planned_of(name, state, names) if is_equal and name in names else len(own)
        waiting = 0 if is_searched else max(0, planned - num_ended - searched[name])
        scored = [trial for trial in own if Status.of_optuna(trial.state.name) == Status.FINISHED]
        best = best_ranked(scored, lambda trial: (trial.values[0], trial.number))
        rows.append(
            FamilyStatus(
                family=name,
                num_waiting=waiting,
                num_running=at_work[name],
                num_finished=by_status[Status.FINISHED],
                num_stopped=by_status[Status.PRUNED],
                num_failed=by_status[Status.FAILED],
                num_judged=judged[name],
                best=None if best is None else best.values[0],
                best_trial=None if best is None else best.number,
            )
        )
    return rows


def planned_of(name: str, state: Mapping[str, Any], names: Sequence[str]) -> int:
    """Trials of a family's search; families that are like others may have fewer than the rest."""
    known: Mapping[str, int] = state.get("num_trials_of", {})
    if name in known:
        return known[name]
    num_others: int = state.get("num_search_trials", 0) - sum(known.values())
    return num_others // (len(names) - len(known))


def mend(store: Store, name: str, state: Mapping[str, Any]) -> str:
    """Advice about a study that does not run: what to know and do."""
    if state["state"] == "finished":
        return f"see `{store.command('leaderboard', name)}`"
    why = (
        "its process is gone; "
        if state["crashed"]
        else "it was stopped on request; "
        if state["stopped"]
        else ""
    )
    return f"{why}`{store.command('resume', name)}` goes on"


def search_trials(store: Store, name: str) -> list[Any]:
    """The search's trials as Optuna knows them; none where the search has not begun."""
    if not store.has_searches:
        return []
    from dmlstudy.search.storage import trials_of

    return list(trials_of(store, name))


def served(store: Store, state: Mapping[str, Any]) -> Store:
    """The store with the MLflow server that the study was run with, if none is named."""
    return replace(store, server=store.server or state.get("server"))


def _ended_runs(store: Store, name: str) -> tuple[list[Run], list[float]]:
    """The finished runs of the verdict, and the images per second of the last trials that ended."""
    from dmlstudy.registry import tracking

    runs = tracking.runs_of(store, name)
    verdicts = [run for run in runs.verdicts if run.status == Status.FINISHED]
    told = [run.metrics.get(IMAGES_PER_SECOND) for run in runs.last_ended(10)]
    return verdicts, [speed for speed in told if speed is not None]


def named(store: Store, study: str | None) -> str:
    if study is None:
        known = ", ".join(store.studies()) or "none yet"
        raise StoreError(f"name a study of the store {store.root}: {known}")
    return study


def running_now(folder: Path, state: Mapping[str, Any]) -> list[RunningTrial]:
    return running_trials(folder) if state["state"] == "running" else []
