"""What a person sees: durations, a line per trial, and the engines' noise kept in a file."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dmlstudy.engine import progress
from dmlstudy.engine.progress import ProgressLines
from dmlstudy.records import (
    UNTRAINED,
    BatchConfig,
    DataConfig,
    EmbedderConfig,
    LossConfig,
    TrainingConfig,
    TrialConfig,
)
from dmlstudy.search.study_search import Assignment
from dmlstudy.spec.pace import Trials, Work
from dmlstudy.text import duration
from dmlstudy.trials import Status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (42.4, "42 s"),
        (59.4, "59 s"),
        (59.6, "1:00 min"),
        (187, "3:07 min"),
        (3599.4, "59:59 min"),
        (3599.6, "1:00 h"),
        (7500, "2:05 h"),
        (100 * 3600, "100:00 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def assignment(status: Status, phase: str = "search", **more: object) -> Assignment:
    config = TrialConfig.model_validate(
        {
            "family": "triplet",
            "phase": phase,
            "data": DataConfig(name="digits"),
            "embedder": EmbedderConfig(),
            "batch": BatchConfig(),
            "training": TrainingConfig(),
            "loss": LossConfig(name="contrastive"),
        }
    )
    label = "triplet #3" if phase == "search" else "triplet verdict seed 1"
    return Assignment(label, config, status=status, **more)  # type: ignore[arg-type]


def time_left(line: str) -> str:
    return re.split(r"  left |  +(?:best|no best)", line)[1].strip()


SCORES = {"map_at_r": 0.81234, "map_at_r_stderr": 0.0123, "test_map_at_r": 0.7}


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (assignment("finished", metrics=SCORES), "map_at_r 0.8123 ± 0.0123"),
        (assignment("finished", metrics={"map_at_r": 0.5}), "map_at_r 0.5000 "),
        (
            assignment("pruned", metrics={"map_at_r": 0.5}, curve=[{}, {}, {}]),
            "map_at_r 0.5000 stopped, epoch 3 of 20",
        ),
        (assignment("failed", reason="loss is nan in epoch 1"), "failed: loss is nan in epoch 1"),
        (assignment("finished", "verdict", metrics=SCORES), "test_map_at_r 0.7000"),
        (assignment("finished", metrics={}), "map_at_r nan"),
    ],
    ids=["finished", "one fold", "pruned", "failed", "verdict", "no score"],
)
def test_a_line_for_each_outcome(ended: Assignment, expected: str) -> None:
    told: list[str] = []
    ProgressLines(told.append, "map_at_r", Trials(8), 12, 22, Work()).ended(ended, 7.25, (0.9, "triplet #1"))
    (line,) = told
    assert line.startswith(f" 5/12  {ended.label}")
    assert expected in line
    assert re.search(r"  7\.2 s  left \.\.\. +best 0\.9000 triplet #1$", line)
    assert "\n" not in line


def test_an_interrupted_trial_counts_for_nothing() -> None:
    told: list[str] = []
    shown = ProgressLines(told.append, "map_at_r", Trials(8), 12, 22, Work())
    shown.ended(assignment("interrupted", metrics=SCORES), 3.0, (0.9, "triplet #1"))
    shown.ended(assignment("finished", metrics=SCORES), 3.0, (0.9, "triplet #1"))
    assert told[0].split() == ["triplet", "#3", "interrupted"]
    assert told[1].startswith(" 5/12")
    assert told[0].index("triplet") == told[1].index("triplet")


def test_no_best_yet_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told: list[str] = []
    shown = ProgressLines(told.append, "map_at_r", Trials(10), 10, 22, Work())
    for pause in (0, 30, 50):  # the first trial paid for the start, so the pace is 40 s
        now[0] += pause
        shown.ended(assignment("failed", reason="x"), 1.0, None)
    assert "no best yet" in told[0]
    assert [time_left(line) for line in told] == ["...", "4:00 min", "4:40 min"]
    assert [line[:5] for line in told] == [" 1/10", " 2/10", " 3/10"]


def test_no_time_is_told_from_one_burst_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told: list[str] = []
    shown = ProgressLines(told.append, "map_at_r", Trials(10), 10, 22, Work(), num_at_once=2)
    for pause in (40, 1, 59, 1):
        now[0] += pause
        shown.ended(assignment("failed", reason="x"), 1.0, None)
    assert [time_left(line) for line in told] == ["...", "...", "...", "3:00 min"]


def test_the_time_left_is_that_of_the_kinds_of_trials_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told: list[str] = []
    work = Work.of(1, fold_models=False)  # a search trial learns from half of the classes
    shown = ProgressLines(told.append, "map_at_r", Trials(2, 2, 2), 6, 22, work)
    for pause, phase, family in (
        (0, "search", "triplet"),
        (200, "search", "triplet"),
        (5, "verdict", UNTRAINED),
        (5, "verdict", UNTRAINED),
        (300, "verdict", "triplet"),
    ):
        now[0] += pause
        ended = assignment("finished", phase, metrics=SCORES)
        shown.ended(replace(ended, config=ended.config.model_copy(update={"family": family})), 1.0, None)
    left = [time_left(line) for line in told]
    assert left == ["...", "10:00 min", "10:05 min", "10:00 min", "5:00 min"]


def test_people_hear_that_no_epoch_has_ended_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told: list[str] = []
    shown = ProgressLines(told.append, "map_at_r", Trials(10), 10, 22, Work())
    for _ in range(45):
        now[0] += 1
        shown.beat(is_training=False)
    shown.beat(is_training=True)
    shown.beat(is_training=False)
    assert told == [
        "no epoch has ended yet, 20 s after the start: workers start, then train the first one",
        "no epoch has ended yet, 40 s after the start: workers start, then train the first one",
        "the first epoch has ended, 45 s after the start",
    ]
    quick: list[str] = []
    ProgressLines(quick.append, "map_at_r", Trials(10), 10, 22, Work()).beat(is_training=True)
    assert quick == []


def test_a_study_goes_on_where_nobody_listens_any_more() -> None:
    heard: list[str] = []

    def terminal(line: str) -> None:
        if heard:
            raise BrokenPipeError(32, "Broken pipe")
        heard.append(line)

    tell = progress.as_long_as_heard(terminal)
    for line in ("one", "two", "three"):
        tell(line)
    assert heard == ["one"]


NOISE = """
import os, subprocess, sys
from pathlib import Path
from dmlstudy.engine.progress import engine_noise_to, terminal

print("before")
shown = terminal()
try:
    with engine_noise_to(Path(sys.argv[1])):
        print("python noise")
        print("python error", file=sys.stderr)
        os.write(1, b"out of C\\n")
        os.write(2, b"error of C\\n")
        subprocess.run(["echo", "noise of a child"], check=True)
        print("for people", file=shown)
        if sys.argv[2] == "raise":
            raise RuntimeError("in between")
except RuntimeError as error:
    assert str(error) == "in between"
print("after")
print("after on stderr", file=sys.stderr)
shown.close()
assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")
"""


@pytest.mark.parametrize("ending", ["normal", "raise"])
def test_noise_goes_to_the_file_and_people_see_the_rest(ending: str, tmp_path: Path) -> None:
    log = tmp_path / "deep" / "engine.log"
    log.parent.mkdir()
    log.write_text("kept\n")
    shown = subprocess.run(
        [sys.executable, "-c", NOISE, str(log), ending], capture_output=True, text=True, timeout=120
    )
    assert shown.stderr == "after on stderr\n"
    assert shown.returncode == 0
    assert shown.stdout == "before\nfor people\nafter\n"
    lines = log.read_text().splitlines()
    assert lines[0] == "kept"
    noise = ["python noise", "python error", "out of C", "error of C", "noise of a child"]
    if ending == "raise":
        assert "Traceback (most recent call last):" in lines
        assert lines[-1] == "RuntimeError: in between"
        assert set(noise) < set(lines)
    else:
        assert sorted(lines[1:]) == sorted(noise)


def test_a_folder_is_made_for_the_noise(tmp_path: Path) -> None:
    log = tmp_path / "not" / "there" / "engine.log"
    subprocess.run(
        [sys.executable, "-c", NOISE, str(log), "normal"], check=True, capture_output=True, timeout=120
    )
    assert "out of C" in log.read_text()


ON_A_FULL_DISK = """
import sys
from contextlib import suppress
from pathlib import Path
from dmlstudy.engine.progress import engine_noise_to

try:
    with engine_noise_to(Path("/dev/full")):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                print("noise", file=stream)
        raise ValueError("what is wrong")
except ValueError as error:
    print(error)
    print(error, file=sys.stderr)
"""


def test_noise_that_a_full_disk_does_not_take_hides_no_error() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK], capture_output=True, text=True, timeout=120
    )
    assert (shown.stdout, shown.stderr) == ("what is wrong\n", "what is wrong\n")


def test_where_seeds_may_be_added_the_numbers_are_bounds_and_say_so() -> None:
    told: list[str] = []
    shown = ProgressLines(told.append, "map_at_r", Trials(0, 9), 10, 22, Work(), is_bound=True)
    judged = assignment("finished", "verdict", metrics=SCORES)
    shown.ended(judged, 1.0, None, Trials(0, 8))
    shown.ended(judged, 1.0, None, Trials(0, 3))  # a look has left families out
    shown.ended(judged, 1.0, None, Trials())
    assert [line.split()[0] for line in told] == ["2/≤10", "3/≤6", "4/4"]
    assert "left ≤ " in told[0]
    assert "≤" not in told[2]
