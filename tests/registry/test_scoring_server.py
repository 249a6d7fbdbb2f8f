"""MLflow's own scoring server takes a model as it is registered, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import numpy as np
import psutil
import pytest
import requests
from mlflow.models import infer_signature
from support.ports import free_port

from dmlstudy import embedders

ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
"""MLflow looks for uvicorn on the path, where an activated environment has it."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*An input example was not provided"),
]


def test_it_answers_with_the_model_s_embeddings(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    made = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=1)
    embedders.save(made, tmp_path / "model", {}, images)
    expected = embedders.embed(made, images)
    mlflow.pyfunc.save_model(
        tmp_path / "mlflow",
        loader_module="dmlstudy.registry.pyfunc",
        data_path=str(tmp_path / "model"),
        signature=infer_signature(images, expected),
        pip_requirements=["dmlstudy"],
    )
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(tmp_path / "mlflow")]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ACTIVATED)
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                if requests.get(f"http://127.0.0.1:{port}/ping", timeout=5).status_code == 200:
                    break
            except requests.ConnectionError:
                pass
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        address = f"http://127.0.0.1:{port}/invocations"
        answer = requests.post(address, json={"inputs": images.tolist()}, timeout=60)
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(answer.json()["predictions"], expected, atol=1e-6)
        answer = requests.post(address, json={"inputs": images[:, :4].tolist()}, timeout=60)
        assert answer.status_code == 400, answer.text
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.kill()
        process.wait()
