"""The Python interface in a real notebook kernel: progress as text; a cell is interrupted, and run again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from support.made_study import Maker

from dmlstudy.store import Store

ENGINE = """
import logging, os, sys, threading, time
from pathlib import Path

import dmlstudy
from dmlstudy.engine.interruption import Interruption, StudyInterrupted
from dmlstudy.engine.progress import engine_noise_to
from dmlstudy.studies import run

num_told = 0
logger = logging.getLogger("engine")
logger.addHandler(logging.StreamHandler())

def noise():
    os.write(1, b"noise of the engine\\n")
    thread = threading.Thread(target=lambda: print("noise of a thread", file=sys.stderr))
    thread.start()
    thread.join()
    logger.warning("noise of a logger")
    print("noise that is printed")

def run_study(spec, store, *, address, tell):
    global num_told
    with engine_noise_to(Path("engine.log")), Interruption():
        try:
            while num_told < 3:
                noise()
                num_told += 1
                tell(f"{num_told}/3 of {spec.name}")
                while num_told == 2 and not Path("again").exists():
                    time.sleep(0.1)
        except KeyboardInterrupt:
            Path("again").touch()
            raise StudyInterrupted from None

run.run_study = run_study
"""
"""In Ray's place: turns file descriptors 1 and 2 to a log, tells lines, and hears an interrupt, as a study does."""

CELL = """
study = dmlstudy.run(
    {
        "name": "made",
        "data": {"name": "digits"},
        "batch": {"classes": "all", "images_per_class": 8},
        "families": {"triplet": {"space": "triplet_weighting"}},
    },
    store="store",
)
study.leaderboard()
"""

PATIENCE_S = 400


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel as a notebook starts it: one that knows of a test does not watch its file descriptors."""
    known = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager, client = start_new_kernel(startup_timeout=PATIENCE_S, cwd=str(tmp_path), env=known)
    process = manager.provisioner.process
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    process.wait(PATIENCE_S)  # a busy machine takes longer than ``shutdown_kernel`` waits


def told(client: BlockingKernelClient, code: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the kernel publishes of a cell until it is idle again."""
    asked = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            return
        yield kind, content


def test_a_cell_is_interrupted_and_run_again(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    store = Store(tmp_path / "store")
    store.prepare()
    made = Maker(store, "made")
    made.search("triplet", "finished", 0.5, {1: 0.5})
    made.end("triplet")
    assert [content for kind, content in told(client, ENGINE) if kind == "error"] == []

    text, errors = "", []
    for kind, content in told(client, CELL):
        text += content["text"] if kind == "stream" else ""
        errors += [content] if kind == "error" else []
        if kind == "stream" and "2/3 of made" in content["text"]:
            manager.interrupt_kernel()
    assert text == "1/3 of made\n2/3 of made\n"
    assert [error["ename"] for error in errors] == ["KeyboardInterrupt"]
    assert "study made is interrupted; what was finished is kept: run it again" in errors[0]["evalue"]

    again = list(told(client, CELL))
    assert [content["text"] for kind, content in again if kind == "stream"] == ["3/3 of made\n"]
    (shown,) = [content["data"] for kind, content in again if kind == "execute_result"]
    assert "<table" in shown["text/html"]
    assert "triplet" in shown["text/plain"]
    noise = (tmp_path / "engine.log").read_text().splitlines()
    for source in ("of the engine", "of a thread", "of a logger", "that is printed"):
        assert noise.count(f"noise {source}") == 3
    assert "1/3 of made" not in noise
    echoed = list(told(client, "print('as before')"))
    assert {"name": "stdout", "text": "as before\n"} in [content for kind, content in echoed]
