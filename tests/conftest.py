"""How two processes share the tests; a server of the S3 protocol on loopback and a browser without a window."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

WITH_RAYS = ("tests/end_to_end/", "tests/faults/")
"""Folders whose tests run studies on both cores, share some of them, and kill processes at set moments."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands each file to one process, so that what its tests share is made once, and all WITH_RAYS to one process.

    So no two of the studies that tests start run at the same time, as in a run with a single process.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "rays" if nodeid.startswith(WITH_RAYS) else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # in the order below, and not by the number of tests
    return Scheduling(config, log)


def has_gpu() -> bool:
    import faiss

    return bool(faiss.get_num_gpus())


def may_mount() -> bool:
    """True if a file system can be mounted; tried on a folder of its own, and undone."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return mounted.returncode == 0


HAS = {
    "gpu": has_gpu,
    "mount": may_mount,
    "data": lambda: "DMLSTUDY_TEST_DATA" in os.environ,
    "wrk": lambda: shutil.which("wrk") is not None,
}
"""Of what tests may need, whether this machine has it."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need what the machine lacks are left out; where processes share them, the longest begin first."""
    needed = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("needs"))}
    lacking = {what for what in needed.values() if not HAS[what]()}
    left_out = [item for item, what in needed.items() if what in lacking]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(WITH_RAYS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the machine lacks, and the fault table: what each fault cost, as reports tell it of all processes."""
    if lacking := [what for what, is_here in HAS.items() if not is_here()]:
        terminalreporter.write_line(f"left out: tests that need what is not here ({', '.join(lacking)})")
    reports = [report for found in terminalreporter.stats.values() for report in found]
    rows = [
        value
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "fault"
    ]
    if rows:
        terminalreporter.write_sep("=", "faults")
        terminalreporter.write_line("| fault | trials lost | seconds to recover |")
        terminalreporter.write_line("|---|---:|---:|")
    for fault, num_lost, seconds in rows:
        terminalreporter.write_line(f"| {fault} | {num_lost} | {seconds:.1f} |")


class S3Server:
    """A server with one bucket, by moto; ``uri`` names what is in it as pyarrow takes it."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self._query = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        self.bucket = f"bucket-{uuid.uuid4().hex}"  # moto's buckets outlive its servers
        self.filesystem(allow_bucket_creation="true").create_dir(self.bucket)

    def uri(self, path: str, bucket: str | None = None) -> str:
        return f"s3://{bucket or self.bucket}/{path}?{self._query}"

    def filesystem(self, **options: str) -> Any:
        from pyarrow import fs

        more = "".join(f"&{name}={value}" for name, value in options.items())
        return fs.FileSystem.from_uri(self.uri("") + more)[0]

    def files(self, folder: str = "") -> list[str]:
        """The objects below a folder of the bucket, by their paths in it."""
        from pyarrow import fs

        root = f"{self.bucket}/{folder}".rstrip("/")
        there = self.filesystem().get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{root}/") for info in there if info.is_file)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="session")
def s3_keys() -> Iterator[None]:
    """Keys as a machine's environment gives them; processes that are started from here on inherit them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "an-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-key")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture
def s3(s3_keys: None) -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The program of a browser; installed by apt where this is root, by one process at a time."""
    with FileLock(Path(tempfile.gettempdir()) / f"dmlstudy-tests-{os.getuid()}.lock"):
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None and os.getuid() == 0 and shutil.which("apt-get"):
            subprocess.run(["apt-get", "update", "-qq"], check=False, timeout=120)
            subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], check=False, timeout=600)
            found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail("Chromium is not installed: apt-get install chromium")
    return found


@pytest.fixture(scope="session")
def dom(chromium: str) -> Callable[..., str]:
    """``dom(url, width=1600)``: the document of a page after its scripts have had 20 seconds of its own time."""

    def document(url: str, width: int = 1600) -> str:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--window-size={width},1000", "--virtual-time-budget=20000", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout

    return document
