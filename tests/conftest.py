"""A server of the S3 protocol on loopback and a browser without a window, for the tests of any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest


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
    """The program of a browser; installed by apt where this is root."""
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
