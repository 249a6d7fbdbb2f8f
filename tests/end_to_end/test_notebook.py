"""A study in a real notebook kernel: progress as text, interrupted as by the stop button, and gone on with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

pytestmark = pytest.mark.long

CELL = """
import dmlstudy

study = dmlstudy.run(
    {
        "name": "tiny",
        "data": {"name": "digits"},
        "embedder": {"backbone": "small_conv", "dim": 8, "width": 4},
        "batch": {"classes": "all", "images_per_class": 8},
        "training": {"epochs": 1},
        "families": {"triplet": {"space": "triplet_weighting"}},
        "search": {"trials_per_family": 4},
        "protocol": {"num_folds": 1, "verdict_seeds": 1},
        "resources": {"workers": 1},
    },
    store="store",
)
study.leaderboard()
"""

PATIENCE_S = 400


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel as a notebook starts it; one that knows of a test does not watch its file descriptors."""
    known = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager, client = start_new_kernel(startup_timeout=PATIENCE_S, cwd=str(tmp_path), env=known)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def told(client: BlockingKernelClient, asked: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the kernel publishes of a cell until it is idle again."""
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
    text, errors, is_interrupted = "", [], False
    for kind, content in told(client, client.execute(CELL)):
        text += content["text"] if kind == "stream" else ""
        errors += [content] if kind == "error" else []
        if "1/6 " in text and not is_interrupted:
            is_interrupted = True
            manager.interrupt_kernel()
    assert [error["ename"] for error in errors] == ["KeyboardInterrupt"], text
    assert "study tiny is interrupted; what was finished is kept: run it again" in errors[0]["evalue"]

    again, shown = "", []
    for kind, content in told(client, client.execute(CELL)):
        assert kind != "error", content
        again += content["text"] if kind == "stream" else ""
        shown += [content["data"]] if kind == "execute_result" else []
    assert "6/6 " in again, again
    assert "1/6 " not in again
    assert [line for line in again.splitlines() if "\x1b" in line] == []
    assert len(shown) == 1
    assert "<table" in shown[0]["text/html"]
    assert "triplet" in shown[0]["text/plain"]
    assert (tmp_path / "store" / "studies" / "tiny" / "engine.log").is_file()
