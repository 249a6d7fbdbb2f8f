"""A study's log, and all that is known of one trial, written for another shell."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmlstudy import metric_names
from dmlstudy.engine.stop_requests import (
    RunningTrial,
    tune_ids,
)
from dmlstudy.metric_names import IMAGES_PER_SECOND, TRAIN_LOSS
from dmlstudy.spec.epochs import counted
from dmlstudy.store import Store, StoreError
from dmlstudy.studies.status import named, running_now, search_trials, served
from dmlstudy.text import duration
from dmlstudy.training.shares import KEY, share_of
from dmlstudy.trials import Status

if TYPE_CHECKING:
    from dmlstudy.registry.runs import Run

Write = Callable[[str], object]


def logs(store: Store, study: str | None, write: Write, *, engine: bool, follow: bool) -> None:
    """Write a study's progress lines, or its engines' log; with ``follow`` until the study ends."""
    study = named(store, study)
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
    """Everything about a search trial: configuration, state, reason, curve, times, the engines' log."""
    name = named(store, study)
    state = store.read_state(name)
    folder = store.study_folder(name)
    trials = search_trials(store, name)
    if not 0 <= number < len(trials):
        asked = f"it has #0 to #{len(trials) - 1} so far" if trials else "none was begun yet"
        raise StoreError(f"study {name!r} has no trial {number}; {asked}")
    trial = trials[number]
    at_work = next((t for t in running_now(folder, state) if t.number == number), None)
    runs = _runs_of_trial(served(store, state), name, number)
    lines = [f"trial {number} of {name}: {trial_state(trial, at_work)}"]
    if reason := trial.user_attrs.get("reason"):
        lines.append(f"reason: {reason}")
    lines += _sessions(runs)
    params = runs[-1][0].params if runs else {}
    lines += ["", "configuration", *(f"  {key}: {value}" for key, value in (params or trial.params).items())]
    lines += _choice(runs)
    lines += ["", "learning curve", *_curve_lines(trial, runs)]
    ids = tune_ids(folder, number)
    for id_ in ids:
        for path in sorted(folder.glob(f"ray/tune/*{id_}*/error.txt")):
            lines += ["", "its error", *path.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines += ["", *_mentions(folder / "engine.log", ids)]
    return lines


def trial_state(trial: Any, at_work: RunningTrial | None) -> str:
    if at_work is not None:
        return f"running, {at_work.place}, for {duration(time.time() - at_work.started)}"
    score = f", {trial.values[0]:.4f}" if trial.values else ""
    return Status.of_optuna(trial.state.name).words + score


def _sessions(runs: list[tuple[Run, Any]]) -> list[str]:
    """A line for each time the trial was begun."""
    lines = []
    for run, _ in runs:
        line = f"begun {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(run.started))}"
        if run.ended:
            line += f", {run.status.words} after {run.seconds:.1f} s at work"
        lines.append(f"{line} (MLflow run {run.id})")
    return lines


def _choice(runs: list[tuple[Run, Any]]) -> list[str]:
    """The choice of the folds of a finished trial, and the scores it was made by."""
    metrics = runs[-1][0].metrics if runs else {}
    chosen = [f"  {KEY}: {share}, chosen on the folds" for share in share_of(metrics).values()]
    means = [f"  {name}: {metrics[name]:.6g}" for name in sorted(metrics) if metric_names.is_of_share(name)]
    return ["", "chosen", *chosen, *means] if chosen else []


def _curve_lines(trial: Any, runs: list[tuple[Run, Any]]) -> list[str]:
    """Epochs, fold by fold, with the objective, and with what else MLflow has once the trial has ended."""
    columns: dict[str, dict[int, float]] = {"objective": dict(trial.intermediate_values)}
    columns |= runs[-1][1] if runs else {}
    steps = sorted({step for values in columns.values() for step in values})
    if not steps:
        return ["  no report yet"]
    params = runs[-1][0].params if runs else {}
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


def _runs_of_trial(store: Store, name: str, number: int) -> list[tuple[Run, dict[str, dict[int, float]]]]:
    """MLflow's runs of a trial, oldest first, each with its curves of loss and speed."""
    from dmlstudy.registry import tracking
    from dmlstudy.registry.runs import RunKind

    runs = tracking.runs_of(store, name)
    return [
        (run, {key: runs.curve(run, key) for key in (TRAIN_LOSS, IMAGES_PER_SECOND) if key in run.metrics})
        for run in runs.every(RunKind.SEARCH, number=number)
    ]


def _mentions(path: Path, words: list[str], num: int = 200) -> list[str]:
    """The last lines of the engines' log with one of these words."""
    found: deque[str] = deque(maxlen=num)
    if words and path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            found.extend(line.rstrip() for line in file if any(word in line for word in words))
    title = f"the engines' log on it ({', '.join(words)})" if words else "the engines' log on it"
    return [title, *(f"  {line}" for line in found)] if found else [f"{title}: nothing"]
