"""MLflow's page on a store, as ``dmlstudy ui`` starts it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from support.ports import free_port

from dmlstudy.store import Store


@contextlib.contextmanager
def ui_of(store: Store) -> Iterator[int]:
    """The port on loopback of a page that answers, until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "dmlstudy", "ui", "--port", str(port), "--store", str(store.root)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=60)
