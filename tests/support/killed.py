"""Embeds in child processes that are killed at every change of the disk, one after the other, and goes on each time.

Run by ``test_embedding`` with a model, pictures and an empty folder; says how many moments there were. It holds no
torch, so that children can be forked: what is computed is a few of the pixels.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dmlstudy.data import decoding, parquet
from dmlstudy.saved.model import Model, Network
from dmlstudy.serving import embed
from dmlstudy.serving.embed import EmbedJob, embed_into

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")


def armed(moment: int | None, folder: Path) -> None:
    """Let this process be killed before its so-manieth change below the folder; None: never."""
    passed = itertools.count()

    def step() -> None:
        if next(passed) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in CHANGES or (event == "open" and "w" in str(arguments[1]))
        if is_change and str(arguments[0]).startswith(str(folder)):
            step()

    sys.addaudithook(hear)
    for place, name in ((os, "fsync"), (parquet.pq, "write_table")):
        setattr(place, name, _before_and_after(getattr(place, name), step))


def _before_and_after(work: Callable[..., Any], step: Callable[[], None]) -> Callable[..., Any]:
    def stepping(*arguments: Any, **named: Any) -> Any:
        result = work(*arguments, **named)
        if work.__name__ == "write_table":
            whole = Path(arguments[1]).read_bytes()
            os.truncate(arguments[1], len(whole) // 2)
            step()
            Path(arguments[1]).write_bytes(whole)
        step()
        return result

    return stepping


def child(job: EmbedJob, moment: int | None, folder: Path) -> bool:
    """Whether it ended by itself."""
    if (process := os.fork()) == 0:
        armed(moment, folder)
        embed_into(job)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def main(model: Path, pictures: Path, folder: Path) -> None:
    decoding.formats()  # once here, not in each child
    Image.init()
    embed.PART = 18
    Model.loaded = Network(None, lambda x_N: x_N.reshape(len(x_N), -1)[:, :6].astype(np.float32), None)
    output = folder / "z.parquet"
    job = EmbedJob(str(model), str(pictures), str(output), batch_size=4, device="cpu", on_corrupt="skip")
    assert child(job, None, folder)
    expected = output.read_bytes()
    for moment in itertools.count():
        shutil.rmtree(folder)
        folder.mkdir()
        is_whole = child(job, moment, folder)
        if output.exists():
            assert output.read_bytes() == expected, moment
        assert is_whole or child(job, None, folder)
        assert output.read_bytes() == expected, moment
        assert os.listdir(folder) == ["z.parquet"], (moment, os.listdir(folder))
        if is_whole:
            sys.stdout.write(f"{moment}\n")
            return


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
