"""Two runs of the quickstart's study for this whole folder: one interrupted and continued by ``dmlstudy run``,
one submitted as a job to a Ray head started here. They are the platform as its users meet it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ports import free_port
from support.trees import end_tree

from dmlstudy import cli

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "search_spaces" / "studies" / "digits.yaml"
NUM_TRIALS = 4 * 4 + 5 * 2
NUM_EPOCHS = 3
NUM_FOLDS = 2
BIN = Path(sys.executable).parent
DMLSTUDY = [sys.executable, "-m", "dmlstudy"]
SECRETS = {
    name: f"{name.lower()}-{secrets.token_hex(16)}"
    for name in (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN"),
        *("AZURE_STORAGE_KEY", "GOOGLE_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "DMLSTUDY_TOKEN"),
        *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    )
}
"""What is in the environment of those who run studies; it is to stay there. MLFLOW_TRACKING_USERNAME is none of it:
MLflow names the author of a run by it."""


@dataclass(frozen=True)
class Finished:
    """A study that was run by the command line: where it lies, what was shown, and where Ray kept its own files."""

    store: Path
    shown: str
    ray: Path | None = None


def command(
    *arguments: str | Path, timeout: float = 400, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``dmlstudy`` as a user would, in a process of its own, with ``more`` in its environment."""
    return subprocess.run(
        [*DMLSTUDY, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | dict(more or {}),
    )


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same within this process, which has imported everything already: seconds less for each call."""
    shown, errors = io.StringIO(), io.StringIO()
    code = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["dmlstudy", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(list(map(str, arguments)), code, shown.getvalue(), errors.getvalue())


def wait_for_line(path: Path, pattern: str, process: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait until a line of the file matches."""
    end = time.monotonic() + timeout
    while not re.search(pattern, path.read_text(), re.MULTILINE):
        assert process.poll() is None, f"it ended early: {path.read_text()}"
        assert time.monotonic() < end, f"no line like {pattern!r} in {timeout} s: {path.read_text()}"
        time.sleep(0.1)


def interrupted(spec: Path, store: Path, after: str, log: Path) -> tuple[int, float]:
    """Run the digits study and end it from another shell when a line like ``after`` shows.

    ``dmlstudy stop`` sends the running command what Ctrl-C sends. The exit code and the seconds to the end.
    """
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*DMLSTUDY, "run", str(spec), "--store", str(store)], stdout=file, stderr=subprocess.STDOUT
        )
        wait_for_line(log, after, process, timeout=240)
        started = time.monotonic()
        stopped = called("stop", "digits", "--store", store)
        assert "study digits is stopped" in stopped.stdout, stopped
        return process.wait(timeout=60), time.monotonic() - started


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's study with fewer epochs and trials: enough for stops, a verdict and an interval."""
    text = QUICKSTART.read_text()
    for old, new in (
        ("epochs: 5", f"epochs: {NUM_EPOCHS}"),
        ("trials_per_family: 6", "trials_per_family: 4"),
        ("verdict_seeds: 3", "verdict_seeds: 2"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("spec") / "digits.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="session")
def interrupted_run(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, float, str]:
    """The digits study stopped by Ctrl-C after a trial's end: store, exit code, seconds to stop, status."""
    folder = tmp_path_factory.mktemp("run")
    store = folder / "store"
    code, seconds = interrupted(spec, store, r"^ 1/26 ", folder / "shown")
    return store, code, seconds, called("status", "digits", "--store", store).stdout


@pytest.fixture(scope="session")
def finished(spec: Path, interrupted_run: tuple[Path, int, float, str]) -> Iterator[Finished]:
    """The same study after the same command was given again, by somebody with secrets."""
    store = interrupted_run[0]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # paths of sockets must be short
        result = command("run", spec, "--store", store, more={**SECRETS, "RAY_TMPDIR": folder})
        assert result.returncode == 0, result.stdout + result.stderr
        yield Finished(store, result.stdout, Path(folder))


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray head of two CPUs on loopback; the address of its Jobs API."""
    ports = [free_port() for _ in range(3)]
    options = ["--num-cpus=2", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
    options += [f"--port={ports[0]}", f"--dashboard-port={ports[1]}", "--disable-usage-stats"]
    # Other Rays may run here, on the usual ports.
    options += ["--dashboard-agent-listen-port=0", f"--ray-client-server-port={ports[2]}"]
    head = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(ports[1], head)
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        end_tree(head, signal.SIGTERM)


@pytest.fixture(scope="session")
def submitted(
    spec: Path, ray_head: str, finished: Finished, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """The digits study, unbroken, as a job on the Ray head (after ``finished``, for there are two cores)."""
    store = tmp_path_factory.mktemp("submit") / "store"
    result = command("submit", spec, "--address", ray_head, "--store", store, "--wait")
    assert result.returncode == 0, result.stdout + result.stderr
    return Finished(store, result.stdout)


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout: float = 240) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended early"
            assert time.monotonic() < end, f"nothing listens on port {port} after {timeout} s"
            time.sleep(0.2)
