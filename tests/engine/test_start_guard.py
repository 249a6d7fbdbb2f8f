"""The guard beside Ray's start: it speaks for a process that cannot, and is silent beside one that can."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, signal, subprocess, sys
from pathlib import Path
from dmlstudy.engine.cluster_watch import end_process
from dmlstudy.engine.progress import engine_noise_to, error_output
from dmlstudy.engine.start_guard import guards

with engine_noise_to(Path("engine.log")), guards.beside("Ray on this machine", error_output()):
    exec(sys.argv[1])
"""
HELD = "service = subprocess.Popen(['./gcs_server', '60']); service.kill(); ctypes.PyDLL(None).sleep(60)"
ENDED = (
    "error: this process ended while Ray connected it: it was killed, or a service of Ray ended just then; "
    "run the same again\n"
)
DIED = "error: Ray on this machine has died: its control service ended as it started; run the same again\n"


def run(folder: Path, what: str) -> tuple[int, str]:
    """The exit code and the errors of a process that does this inside."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], cwd=folder, capture_output=True, text=True, timeout=50
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("how", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_ends_without_a_word_is_spoken_for(tmp_path: Path, how: str) -> None:
    assert run(tmp_path, how) == (1 if "exit" in how else -9, ENDED)


def test_a_process_whose_threads_are_all_held_ends_soon_after_its_service(tmp_path: Path) -> None:
    """Ray's own code holds them for a minute, and then ends the process without a word."""
    shutil.copy(str(shutil.which("sleep")), tmp_path / "gcs_server")
    assert run(tmp_path, HELD) == (-9, DIED)


@pytest.mark.parametrize(("how", "code"), [("pass", 0), ("sys.exit(3)", 3), ("end_process(2)", 2)])
def test_one_that_ends_on_purpose_speaks_for_itself(tmp_path: Path, how: str, code: int) -> None:
    assert run(tmp_path, how) == (code, "")


def test_an_interruption_from_the_keyboard_is_not_the_guards(tmp_path: Path) -> None:
    """The keyboard's goes to the whole group of processes."""
    group = "signal.signal(signal.SIGINT, signal.default_int_handler); os.setpgid(0, 0); os.killpg(0, signal.SIGINT)"
    said = run(tmp_path, f"{group}; signal.pause()")[1]
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert said.count("Traceback") == 1
