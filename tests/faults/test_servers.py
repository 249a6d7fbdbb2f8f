"""What a study stands on goes away: the MLflow server on PostgreSQL, room for artifacts; and who may speak to it.

MLflow's server needs Flask-WTF, which pip puts into a temporary folder. Everything listens on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
import requests
from mlflow.exceptions import MlflowException
from support.ports import free_port
from support.postgres import running_postgres
from support.trees import end_tree

from dmlstudy.registry import connection
from dmlstudy.registry.runs import raw_runs
from dmlstudy.store import Store, StoreError

from .conftest import DMLSTUDY, Record, trials_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SPEC = """
name: served
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 4}
training: {epochs: 20, head_lr_mult: 1, lr: 1.0e-3}
families:
  multi-similarity: {space: multi_similarity}
search: {trials_per_family: 3, scheduler: none}
protocol: {num_folds: 1, verdict_seeds: 1}
resources: {workers: 1, cpus_per_worker: 1, max_concurrent_trials: 1}
"""
OUTAGE_S = 30
PASSWORD = secrets.token_hex(16)
CREDENTIALS = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORD}


def wait_until(condition: Callable[[], bool], timeout: float, why: Callable[[], object]) -> float:
    """Seconds until the condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout, why()
        time.sleep(0.1)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of an empty database on loopback."""
    with running_postgres() as address:
        yield f"postgresql+psycopg://{address}"


class Server:
    """An ``mlflow server`` with basic authentication that can be stopped and started again."""

    def __init__(self, database: str, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        extra = folder / "extra"
        wheels = ["Flask-WTF", "WTForms"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(extra)]
        subprocess.run([*pip, *wheels], check=True, timeout=200)
        config = folder / "basic_auth.ini"
        config.write_text(
            "[mlflow]\ndefault_permission = READ\n"
            f"database_uri = sqlite:///{folder / 'basic_auth.db'}\nadmin_username = admin\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(extra), os.environ.get("PYTHONPATH", "")]),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # ten processes that no study needs
            "MLFLOW_AUTH_CONFIG_PATH": str(config),
            "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": PASSWORD,
        }
        self._command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self._command += ["--backend-store-uri", database]
        self._command += ["--artifacts-destination", str(folder / "artifacts")]
        self.start()

    def start(self) -> None:
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=self._folder, stdout=log, stderr=log
            )
        wait_until(self._is_up, 150, (self._folder / "server.log").read_text)

    def stop(self) -> None:
        end_tree(self._process)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return True
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(postgres, tmp_path_factory.mktemp("mlflow"))
    yield running
    running.stop()


class Run:
    """``dmlstudy run`` in a process of its own, with what it has shown so far."""

    def __init__(self, folder: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.store = folder / "store"
        self._log = folder / f"{time.monotonic_ns()}.shown"
        (folder / "study.yaml").write_text(SPEC)
        command = [*DMLSTUDY, "run", str(folder / "study.yaml"), "--store", str(self.store), *options]
        with open(self._log, "wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
            )

    def shown(self) -> str:
        return self._log.read_text()

    def logged(self) -> str:
        """What the study's logs say, of its progress and of its engines."""
        folder = self.store / "studies" / "served"
        return "".join((folder / name).read_text(errors="replace") for name in ("progress.log", "engine.log"))

    def wait_for(self, pattern: str, timeout: float = 300) -> None:
        def is_there() -> bool:
            found = re.search(pattern, self.shown(), re.MULTILINE)
            assert found or self.process.poll() is None, self.shown()
            return found is not None

        wait_until(is_there, timeout, self.shown)

    def states(self) -> list[str]:
        return [trial.state.name for trial in trials_of(self.store, "served")]


def test_a_study_waits_for_its_mlflow_server_on_postgresql(
    server: Server, tmp_path: Path, record_fault: Record
) -> None:
    run = Run(tmp_path, "--tracking-uri", server.uri, environment=CREDENTIALS)
    try:
        run.wait_for(r"^1/5 ")
        server.stop()
        stopped = time.monotonic()
        wait_until(lambda: "does not answer; the study waits" in run.logged(), OUTAGE_S, run.logged)
        time.sleep(max(0.0, stopped + OUTAGE_S - time.monotonic()))
        assert run.process.poll() is None, run.shown()
        server.start()
        seconds = wait_until(lambda: "the MLflow server is back after" in run.logged(), 60, run.logged)
        assert run.process.wait(timeout=300) == 0, run.shown()
    finally:
        end_tree(run.process)
    assert run.states() == ["COMPLETE"] * 3
    assert seconds < 20
    record_fault(f"MLflow server away for {OUTAGE_S} s (from its return)", 0, seconds)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        client = mlflow.MlflowClient(server.uri)
        experiment = client.get_experiment_by_name("served")
        assert experiment is not None
        runs = list(raw_runs(client, experiment.experiment_id))
    assert [run.info.run_name for run in runs if run.info.status == "RUNNING"] == []
    finished = [r for r in runs if r.data.tags["status"] == "finished"]
    kinds = [r.data.tags["dmlstudy_kind"] for r in finished]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "study": 1,
        "search": 3,
        "verdict": 2,
        "leaderboard": 2,
    }

    command = [*DMLSTUDY, "leaderboard", "served", "--json", "--tracking-uri", server.uri]
    board = subprocess.run(command, env=os.environ | CREDENTIALS, capture_output=True, check=True)
    assert json.loads(board.stdout)["model"] == "served-embedder/1"
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert re.fullmatch(r"error: the MLflow store .* \(.*401.*\); check .*\n", refused.stderr), refused.stderr

    reader = {"username": "reader", "password": PASSWORD}
    login = ("admin", PASSWORD)
    requests.post(f"{server.uri}/api/2.0/mlflow/users/create", json=reader, auth=login).raise_for_status()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        first = client.get_model_version("served-embedder", "1")
        client.create_model_version(
            "served-embedder",
            first.source,
            first.run_id,
            tags=first.tags,
            model_id=first.source.removeprefix("models:/"),
        )
        command = [
            *DMLSTUDY,
            "promote",
            "served-embedder/2",
            "--anyway",
            "why not",
            "--tracking-uri",
            server.uri,
        ]
        as_reader = {"MLFLOW_TRACKING_USERNAME": "reader", "MLFLOW_TRACKING_PASSWORD": PASSWORD}
        refused = subprocess.run(
            command, env=os.environ | as_reader, capture_output=True, text=True, check=False
        )
        assert refused.returncode == 2, refused.stderr
        assert re.fullmatch(
            r"error: the MLflow store .* refuses: .*403.*; see that you may do that there, or name another .*\n",
            refused.stderr,
        ), refused.stderr
        assert client.get_model_version_by_alias("served-embedder", "champion").version == "1"


@pytest.mark.needs("mount")
@pytest.mark.parametrize(
    ("fault", "message"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_a_store_that_takes_no_artifacts_ends_the_study_and_loses_nothing(
    tmp_path: Path, record_fault: Record, fault: str, message: str
) -> None:
    artifacts = tmp_path / "store" / "artifacts"
    artifacts.mkdir(parents=True)
    filler = artifacts / "filler"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(artifacts)], check=True)

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(artifacts)], check=True)

    try:
        run = Run(tmp_path)
        try:
            run.wait_for(r"^1/5 ")
            if fault == "read-only":
                remount("ro")
            else:
                with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                    while file.write(b"0" * 1024):
                        pass
            assert run.process.wait(timeout=200) == 2, run.shown()
        finally:
            end_tree(run.process)
        assert re.search(rf"^error: the MLflow store .* {message}", run.shown(), re.MULTILINE)
        first, *others = run.states()
        assert first == "COMPLETE"
        assert set(others) <= {"COMPLETE", "RUNNING"}, "one whose scores could not be kept is to be run again"

        remount("rw")
        filler.unlink(missing_ok=True)
        mended = time.monotonic()
        run = Run(tmp_path)
        try:
            assert run.process.wait(timeout=200) == 0, run.shown()
            record_fault(f"artifact store {fault} (from its mend to the end)", 0, time.monotonic() - mended)
        finally:
            end_tree(run.process)
        assert run.states() == ["COMPLETE"] * 3
        assert "registered as served-embedder/1" in run.shown()
    finally:
        subprocess.run(["umount", "--lazy", str(artifacts)], check=True)


def test_only_an_outage_is_waited_for(tmp_path: Path) -> None:
    """A full disk fails at once; a server that is away fails after the patience, and then at once."""
    told: list[str] = []
    store = Store(tmp_path, f"http://127.0.0.1:{free_port()}", patience_s=1.5)
    patiently = connection.Patience(store, mlflow.MlflowClient(store.tracking_uri), told.append)

    def full() -> None:
        raise OSError(28, "No space left on device")

    def away() -> None:
        raise MlflowException("API request failed")

    def wrong() -> None:
        raise MlflowException.invalid_parameter_value("a bad name")

    for call, message in ((full, "No space left on device"), (wrong, "a bad name")):
        with pytest.raises(StoreError, match=f"did not take a record: .*{message}"):
            patiently(call)
    assert told == []
    with pytest.raises(
        StoreError, match=r"no MLflow server at .* for 2 s; when it is back, run the study again"
    ):
        patiently(away)
    assert len(told) == 1
    assert "does not answer; the study waits up to 2 s for it" in told[0]
    started = time.monotonic()
    with pytest.raises(StoreError, match="did not take a record"):
        patiently(away)
    assert time.monotonic() - started < 0.5, "it has given up already"


def test_a_ray_cluster_with_a_token_takes_only_who_has_it(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(SPEC)
    homes = {name: tmp_path / name for name in ("with", "without")}
    for home in homes.values():
        (home / ".ray").mkdir(parents=True)
    token = homes["with"] / ".ray" / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # paths of sockets must be short
        options = ["--num-cpus=1", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
        options += [f"--port={port}", f"--dashboard-port={dashboard}", "--disable-usage-stats"]
        # Other Rays may run here, on the usual ports.
        options += ["--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port()}"]
        head = subprocess.Popen(
            [Path(sys.executable).parent / "ray", "start", "--head", "--block", *options],
            env=clean | {"HOME": str(homes["with"]), "RAY_TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def listens() -> bool:
            assert head.poll() is None
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", dashboard), timeout=1).close()
                return True
            return False

        def submitted(home: Path) -> subprocess.CompletedProcess[str]:
            address = f"http://127.0.0.1:{dashboard}"
            return subprocess.run(
                [*DMLSTUDY, "submit", "study.yaml", "--address", address, "--store", "store"],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env=clean | {"HOME": str(home)},
                timeout=150,
            )

        try:
            wait_until(listens, 150, lambda: "no dashboard")
            refused = submitted(homes["without"])
            assert refused.returncode == 2, refused
            assert re.fullmatch(r"error: .* asks for a token.*\n", refused.stderr), refused.stderr
            accepted = submitted(homes["with"])
            assert accepted.returncode == 0, accepted
            assert accepted.stdout.startswith("job served-")
        finally:
            end_tree(head, signal.SIGTERM)
