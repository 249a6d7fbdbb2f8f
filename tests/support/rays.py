"""A Ray of its own on loopback, as ``ray start --head`` makes it, for tests that want more than one on a machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from support.ports import free_port
from support.trees import end_tree

RAY = Path(sys.executable).parent / "ray"


class Head(NamedTuple):
    """The port of a Ray's control store (its address on this machine) and the address of its Jobs API."""

    port: int
    dashboard: str


@contextmanager
def ray_head(temp_dir: Path) -> Iterator[Head]:
    """A head of one CPU until the end of the block; two in one ``temp_dir`` are as two with Ray's default."""
    temp_dir.mkdir(parents=True, exist_ok=True)
    port, dashboard, clients = (free_port() for _ in range(3))
    options = ["--num-cpus=1", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--port={port}"]
    options += [f"--dashboard-port={dashboard}", f"--ray-client-server-port={clients}"]
    options += ["--dashboard-agent-listen-port=0", "--disable-usage-stats", f"--temp-dir={temp_dir}"]
    with open(temp_dir / f"{port}.log", "wb") as log:
        process = subprocess.Popen(
            [RAY, "start", "--head", "--block", *options], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + 240
        while not _listens(dashboard):
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < end, Path(log.name).read_text()
            time.sleep(0.2)
        yield Head(port, f"http://127.0.0.1:{dashboard}")
    finally:
        end_tree(process, signal.SIGTERM)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
