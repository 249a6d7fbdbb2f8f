"""The end of a process that has started others, as servers and Ray's heads do."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import Any

import psutil


def end_tree(process: subprocess.Popen[Any], how: signal.Signals = signal.SIGKILL) -> None:
    """End a process with everything it started, if it has not ended itself; what outlives ``how`` is killed."""
    if process.poll() is not None:
        return
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(how)
    for member in psutil.wait_procs(tree, timeout=20)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=10)
