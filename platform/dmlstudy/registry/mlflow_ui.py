"""MLflow's own web page on a store."""

from __future__ import annotations

import os
import socket
import sys

from dmlstudy.registry import artifact_places
from dmlstudy.store import Store, StoreError


def check(store: Store, port: int) -> None:
    """Raises StoreError where there is no store, where it was moved, and where the port is taken."""
    if not (store.root / "mlflow.db").is_file():
        raise StoreError(f"no studies in {store.root}; name another store with --store")
    artifact_places.check(store)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StoreError(f"port {port}: {error.strerror}; name another with --port") from None


def serve(store: Store, port: int) -> None:
    """Become ``mlflow server`` on the store's database, on loopback."""
    arguments = [
        "--backend-store-uri",
        store.tracking_uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    arguments += ["--default-artifact-root", str(store.artifacts)]
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", *arguments])
