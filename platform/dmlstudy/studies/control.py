"""Look at, end and go on with studies from another shell: by study name, or by job on a cluster.

What a study has done stands in Optuna's and MLflow's storages, what runs now in the study's folder
(``wishes``), and whether its driver lives in the lock it holds: so all of it is known while the study runs,
after its end and after a crash, without Ray. MLflow, Optuna and Ray take seconds to import, so what does
not need them does not wait for them.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmlstudy.engine.stop_requests import (
    BY_HAND,
    RunningTrial,
    running_trials,
    tune_ids,
    wish,
    wished,
    withdraw,
)
from dmlstudy.records import Record
from dmlstudy.spec.epochs import counted
from dmlstudy.store import Store, StoreError, seconds_spent, spec_of
from dmlstudy.studies.duration import duration, pace

if TYPE_CHECKING:
    from dmlstudy.engine.jobs import Job
    from dmlstudy.spec.study_file import StudySpec

Write = Callable[[str], object]


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
    """What a study is doing, as its storages and its folder say.

    ``reason`` is why it failed, ``notes`` what else to know or do about it.
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

    def num(self, what: Literal["finished", "stopped", "failed", "judged"]) -> int:
        return sum(getattr(family, f"num_{what}") for family in self.families)

    @property
    def best(self) -> FamilyStatus | None:
        """The family with the best trial so far."""
        tried = [family for family in self.families if family.best is not None]
        return max(tried, key=lambda family: family.best or 0.0, default=None)


def statuses(store: Store, study: str | None) -> list[StudyStatus]:
    """The status of one study, or of all of the store's; raises StoreError where there is none."""
    names = [study] if study else store.studies()
    if not names:
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
    """What a study is doing, from Optuna, MLflow and the study's folder; no Ray is asked."""
    state = store.read_state(name)
    spec_of(store, name, state)
    is_running = state["state"] == "running"
    running = running_trials(store.study_folder(name)) if is_running else []
    trials = _search_trials(store, name)
    notes = [_mend(store, name, state)] if state["state"] == "interrupted" else []
    try:
        verdicts, speeds = _ended_runs(_served(store, state), name)
    except StoreError as error:
        verdicts, speeds = [], []
        notes.append(f"of its verdict nothing is known: {error}")
    is_finished = state["state"] == "finished"
    # A search may end before its number of trials: by its time, or when its space is exhausted.
    is_searched = is_finished or bool(verdicts) or any(trial.phase != "search" for trial in running)
    families = _family_rows(state, trials, verdicts, running, is_searched)
    num_ended = sum(trial.state.is_finished() for trial in trials)
    num_left = 0 if is_searched else max(0, state.get("num_search_trials", 0) - num_ended)
    num_left += 0 if is_finished else max(0, state.get("num_verdict_trials", 0) - len(verdicts))
    ended_at = [trial.datetime_complete.timestamp() for trial in trials if trial.datetime_complete]
    ended_at += [run.info.end_time / 1000 for run in verdicts]
    started = state.get("started", 0.0)
    own = [moment for moment in ended_at if moment >= started]
    elapsed = (time.time() if is_running else state["updated"]) - started
    each = pace(own, max(1, len(running)))
    return StudyStatus(
        study=name,
        state=state["state"],
        reason=str(state.get("reason", "")) if state["state"] in ("failed", "interrupted") else "",
        notes=notes,
        seconds_spent=seconds_spent(state),
        num_left=num_left,
        families=families,
        running=running,
        trials_per_hour=3600 * len(own) / elapsed if own and elapsed > 0 else None,
        images_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=each * num_left if each is not None and is_running else None,
    )


def status_row(status: StudyStatus) -> list[str]:
    """Study, state, trials finished, stopped early, failed and left, best, time over all sittings."""
    best = status.best
    return [
        status.study,
        status.state + (f": {status.reason}" if status.reason else ""),
        f"{status.num('finished')} + {status.num('judged')} judged",
        str(status.num("stopped")),
        str(status.num("failed")),
        str(status.num_left),
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
        lines.append(f"estimated end: {end}, in {duration(status.seconds_left)}")
    return lines


def _family_rows(
    state: Mapping[str, Any],
    trials: list[Any],
    verdicts: list[Any],
    running: list[RunningTrial],
    is_searched: bool,
) -> list[FamilyStatus]:
    names = list(state["spec"]["families"])
    is_equal = state["spec"].get("search", {}).get("families", "equal") == "equal"
    of_trial = {
        trial.number: trial.user_attrs.get("family", names[trial.number % len(names)]) for trial in trials
    }
    judged = Counter(run.data.tags["family"] for run in verdicts)
    at_work = Counter(trial.family for trial in running)
    searched = Counter(trial.family for trial in running if trial.phase == "search")
    rows = []
    for name in [*names, *(other for other in judged if other not in names)]:
        own = [trial for trial in trials if of_trial[trial.number] == name]
        by_state = Counter(trial.state.name for trial in own)
        num_ended = sum(by_state[kind] for kind in ("COMPLETE", "PRUNED", "FAIL"))
        # One search over all families says only when it asks for a trial which family it is for.
        planned = state.get("num_search_trials", 0) // len(names) if is_equal and name in names else len(own)
        waiting = 0 if is_searched else max(0, planned - num_ended - searched[name])
        scored = [trial for trial in own if trial.state.name == "COMPLETE"]
        best = max(scored, key=lambda trial: (trial.values[0], -trial.number), default=None)
        rows.append(
            FamilyStatus(
                family=name,
                num_waiting=waiting,
                num_running=at_work[name],
                num_finished=by_state["COMPLETE"],
                num_stopped=by_state["PRUNED"],
                num_failed=by_state["FAIL"],
                num_judged=judged[name],
                best=None if best is None else best.values[0],
                best_trial=None if best is None else best.number,
            )
        )
    return rows


def _mend(store: Store, name: str, state: Mapping[str, Any]) -> str:
    """What to know and do about a study that does not run."""
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


def _search_trials(store: Store, name: str) -> list[Any]:
    """The search's trials as Optuna knows them; none where the search has not begun."""
    if not store.optuna_file.is_file():
        return []
    from dmlstudy.search.storage import trials_of

    return list(trials_of(store, name))


def _served(store: Store, state: Mapping[str, Any]) -> Store:
    """The store with the MLflow server that the study was run with, if none is named."""
    return replace(store, server=store.server or state.get("server"))


def _ended_runs(store: Store, name: str) -> tuple[list[Any], list[float]]:
    """The finished runs of the verdict, and the images per second of the last trials that ended."""
    from dmlstudy.registry import tracking

    client = tracking.connect(store)
    experiment = tracking.experiment_of(client, store, name)
    verdicts = tracking.search_all(
        client, experiment, "tags.dmlstudy_kind = 'verdict' and tags.status = 'finished'"
    )
    once = {(run.data.tags["family"], run.data.tags["seed"]): run for run in verdicts}
    last = client.search_runs([experiment], max_results=10, order_by=["attributes.end_time DESC"])
    speeds = [
        run.data.metrics["images_per_second"] for run in last if "images_per_second" in run.data.metrics
    ]
    return list(once.values()), speeds


def logs(store: Store, study: str | None, write: Write, *, engine: bool, follow: bool) -> None:
    """Write a study's progress lines, or its engines' log; with ``follow`` until the study ends."""
    study = _named(store, study)
    store.read_state(study)
    path = store.study_folder(study) / ("engine.log" if engine else "progress.log")
    position = 0
    while True:
        running = follow and store.read_state(study)["state"] == "running"
        position += _write_from(path, position, write)
        if not running:
            return
        time.sleep(0.5)


def _write_from(path: Path, position: int, write: Write) -> int:
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    write(content.decode(errors="replace"))
    return len(content)


def trial_log(store: Store, study: str | None, number: int) -> list[str]:
    """What is known of a trial of the search: configuration, state, reason, curve, times, what engines said."""
    name = _named(store, study)
    state = store.read_state(name)
    folder = store.study_folder(name)
    trials = _search_trials(store, name)
    if not 0 <= number < len(trials):
        asked = f"it has #0 to #{len(trials) - 1} so far" if trials else "none was begun yet"
        raise StoreError(f"study {name!r} has no trial {number}; {asked}")
    trial = trials[number]
    at_work = next((t for t in _at_work(folder, state) if t.number == number), None)
    runs = _runs_of_trial(_served(store, state), name, number)
    lines = [f"trial {number} of {name}: {_trial_state(trial, at_work)}"]
    if reason := trial.user_attrs.get("reason"):
        lines.append(f"reason: {reason}")
    lines += _sittings(runs)
    params = runs[-1][0].data.params if runs else {}
    lines += ["", "configuration", *(f"  {key}: {value}" for key, value in (params or trial.params).items())]
    lines += ["", "learning curve", *_curve_lines(trial, runs)]
    ids = tune_ids(folder, number)
    for id_ in ids:
        for path in sorted(folder.glob(f"ray/tune/*{id_}*/error.txt")):
            lines += ["", "its error", *path.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines += ["", *_mentions(folder / "engine.log", ids)]
    return lines


def _trial_state(trial: Any, at_work: RunningTrial | None) -> str:
    if at_work is not None:
        return f"running, {at_work.place}, for {duration(time.time() - at_work.started)}"
    return {"COMPLETE": "finished", "PRUNED": "stopped early", "FAIL": "failed"}.get(
        trial.state.name, "waiting"
    ) + (f", {trial.values[0]:.4f}" if trial.values else "")


def _sittings(runs: list[tuple[Any, Any]]) -> list[str]:
    """A line for each time the trial was begun."""
    lines = []
    for run, _ in runs:
        begun = run.info.start_time / 1000
        line = f"begun {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(begun))}"
        if run.info.end_time:
            line += f", {run.data.tags.get('status', 'ended')} after {run.info.end_time / 1000 - begun:.1f} s"
        lines.append(f"{line} (MLflow run {run.info.run_id})")
    return lines


def _curve_lines(trial: Any, runs: list[tuple[Any, Any]]) -> list[str]:
    """Epochs, fold by fold, with the objective, and with what else MLflow has once the trial has ended."""
    columns: dict[str, dict[int, float]] = {"objective": dict(trial.intermediate_values)}
    columns |= runs[-1][1] if runs else {}
    steps = sorted({step for values in columns.values() for step in values})
    if not steps:
        return ["  no report yet"]
    params = runs[-1][0].data.params if runs else {}
    num_folds, num_epochs = int(params.get("num_folds", 1)), int(params.get("training.epochs", steps[-1]))
    folds = f"  {'fold':>6}" if num_folds > 1 else ""
    lines = [f"{folds}  {'epoch':>6}" + "".join(f"  {column:>17}" for column in columns)]
    for step in steps:
        at = counted(step, num_folds, num_epochs)
        fold = f"  {f'{at.fold}/{num_folds}':>6}" if num_folds > 1 else ""
        cells = (columns[column].get(step) for column in columns)
        lines.append(
            f"{fold}  {f'{at.epoch}/{at.num_epochs}':>6}"
            + "".join(f"  {'-' if c is None else format(c, '.6g'):>17}" for c in cells)
        )
    return lines


def _runs_of_trial(store: Store, name: str, number: int) -> list[tuple[Any, dict[str, dict[int, float]]]]:
    """MLflow's runs of a trial, oldest first, each with its curves of loss and speed."""
    from dmlstudy.registry import tracking

    client = tracking.connect(store)
    experiment = tracking.experiment_of(client, store, name)
    runs = tracking.search_all(
        client, experiment, f"tags.dmlstudy_kind = 'search' and tags.trial_number = '{number}'"
    )
    found = []
    for run in runs:
        curves = {
            key: {m.step: m.value for m in client.get_metric_history(run.info.run_id, key)}
            for key in ("train_loss", "images_per_second")
            if key in run.data.metrics
        }
        found.append((run, curves))
    return found


def _mentions(path: Path, words: list[str], num: int = 200) -> list[str]:
    """The last lines of the engines' log with one of these words."""
    found: deque[str] = deque(maxlen=num)
    if words and path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            found.extend(line.rstrip() for line in file if any(word in line for word in words))
    title = f"the engines' log on it ({', '.join(words)})" if words else "the engines' log on it"
    return [title, *(f"  {line}" for line in found)] if found else [f"{title}: nothing"]


def stop(store: Store, study: str | None) -> str:
    """Ask a running study to end, wait until it has, and say so.

    Only the process that holds the study's lock is signalled, also while it is still starting Ray.
    """
    name = _named(store, study)
    state, driver = store.read_state(name), store.driver(name)
    if driver is None:
        return f"study {name} is not running: it is {state['state']}"
    if driver.pid is None:
        raise StoreError(f"study {name!r} is only just starting; try again")
    if driver.host != socket.gethostname():
        raise StoreError(
            f"study {name!r} runs on {driver.host}; stop it there, or its job:"
            f" dmlstudy stop --job {state['job'] or 'JOB'} --address http://HOST:8265"
        )
    is_ending = state["state"] != "running" and (state["pid"], state["host"]) == driver
    if not is_ending:
        try:
            os.kill(driver.pid, signal.SIGINT)
        except OSError as error:
            raise StoreError(
                f"study {name!r}: its process {driver.pid} takes no signal from here ({error.strerror});"
                f" see `{store.command('status', name)}`, and stop it where and as whom it was started"
            ) from None
    for _ in range(600):
        if store.driver(name) != driver:
            break
        time.sleep(0.1)
    else:
        return f"study {name} was asked to stop and is still ending its trials"
    ended = store.read_state(name)
    if ended["state"] in ("finished", "failed") and ended["pid"] == driver.pid:
        return f"study {name} has come to its end by itself: it is {ended['state']}"
    return f"study {name} is stopped; `{store.command('resume', name)}` goes on with it"


def stop_trial(store: Store, study: str | None, number: int, *, timeout_s: float = 60.0) -> str:
    """End one running trial of a running study, wait until it has ended, and say so.

    The wish travels through the study's folder, so it works from every machine that sees the store. Raises
    StoreError where the trial is not running.
    """
    name = _named(store, study)
    state = store.read_state(name)
    folder = store.study_folder(name)
    if state["state"] != "running":
        raise StoreError(
            f"study {name!r} is not running: it is {state['state']}; {_mend(store, name, state)}"
        )
    running = _at_work(folder, state)
    if number not in {trial.number for trial in running}:
        labels = ", ".join(trial.label for trial in running) or "none at this moment"
        raise StoreError(
            f"trial {number} of {name!r} is not running; running are: {labels}"
            " (trials of the verdict have no number: they are the study's end)"
        )
    wish(folder, number)
    end = time.monotonic() + timeout_s
    while number in wished(folder):
        if store.read_state(name)["state"] != "running":
            withdraw(folder, number)
            raise StoreError(
                f"study {name!r} ended before it looked at the wish; see `{store.command('status', name)}`"
            )
        if time.monotonic() > end:
            return f"trial {number} of {name} was asked to stop, and ends when its study next looks"
        time.sleep(0.1)
    trial = _search_trials(store, name)[number]
    reason = str(trial.user_attrs.get("reason", ""))
    if reason.startswith(BY_HAND):
        return f"trial {number} of {name} is {reason}"
    return f"trial {number} of {name} ended by itself before: {_trial_state(trial, None)}"


def resume(store: Store, study: str | None) -> tuple[StudySpec, Store]:
    """The study as it was given, and the store with its MLflow server, to go on with it.

    Its relative paths lead where they led when it was started. Raises StoreError where it is running, and SpecError
    where its file names others that are not there any more.
    """
    from dmlstudy.spec import study_file as specs
    from dmlstudy.spec.study_paths import Places

    name = _named(store, study)
    state = store.read_state(name)
    if state["state"] == "running":
        raise StoreError(
            f"study {name!r} is running on {state['host']}; see `{store.command('status', name)}`"
        )
    # Where its relative paths were looked for; a store of an earlier version has the current folder alone.
    folders = state.get("folders") or [state.get("cwd", os.getcwd())]
    return specs.parse({**spec_of(store, name, state), "name": name}, Places(*folders)), _served(store, state)


def _named(store: Store, study: str | None) -> str:
    if study is None:
        known = ", ".join(store.studies()) or "none yet"
        raise StoreError(f"name a study of the store {store.root}: {known}")
    return study


def _at_work(folder: Path, state: Mapping[str, Any]) -> list[RunningTrial]:
    return running_trials(folder) if state["state"] == "running" else []


def job_status(job: str, address: str | None) -> Job:
    """What a job is doing, with what it printed last."""
    from dmlstudy.engine import jobs

    return jobs.job(job, address)


def jobs_of(address: str) -> list[Job]:
    """The jobs of a cluster, oldest first."""
    from dmlstudy.engine import jobs

    return jobs.jobs(address)


def job_row(job: Job) -> list[str]:
    """Id, study, state, when it began and how long it ran."""
    began = "" if job.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started))
    return [job.job, job.study or "-", job.state, began, "" if job.seconds is None else duration(job.seconds)]


def job_lines(job: Job) -> list[str]:
    """A job's state and time; below it the study's last progress line, with its trials and the time left."""
    ran = "" if job.seconds is None else f", for {duration(job.seconds)}"
    return [f"job {job.job}: {job.state}{ran}", *([job.last_line] if job.last_line else [])]


def job_logs(job: str, address: str | None, write: Write, *, follow: bool) -> None:
    """Write what a job has printed; with ``follow`` until it ends."""
    from dmlstudy.engine import jobs

    jobs.known_job(job, address)
    assert address is not None
    if follow:
        jobs.follow(job, address, write)
    else:
        write(jobs.client(address).get_job_logs(job))


def stop_job(job: str, address: str | None) -> str:
    """Ask a job to end; its study ends as by Ctrl-C."""
    from dmlstudy.engine import jobs

    jobs.known_job(job, address)
    stopped = jobs.client(address).stop_job(job)
    return f"job {job} is asked to stop" if stopped else f"job {job} had ended already"
