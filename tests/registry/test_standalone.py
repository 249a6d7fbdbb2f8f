"""A registered model where there is no dmlstudy: MLflow, NumPy and torch load it, check it and compute the same."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import requests
import torch
from support.ports import free_port
from support.verdict_trials import verdict_trial

from dmlstudy import embedders, hashing, model_folder, online
from dmlstudy.registry import models, standalone
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store

VECTORS = np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32)
PICTURES = np.random.default_rng(1).integers(0, 256, (300, 8, 12, 3), dtype=np.uint8)


def of_images(folder: Path) -> None:
    made = embedders.build(
        "small_conv", 6, width=4, in_channels=3, image_size=(8, 12), seed=1, structure="official"
    )
    embedders.save(made, folder, {}, PICTURES)


def of_vectors(folder: Path) -> None:
    embedders.save(
        embedders.build("mlp2", 6, width=4, in_channels=10, image_size=(), seed=1), folder, {}, VECTORS
    )


def codes(folder: Path) -> None:
    made = hashing.build("ssdh", 16, 10, {"hidden": 8}, term=("point_ranking", {}))
    made.prepare(torch.from_numpy(VECTORS), standardize=True)
    hashing.save(made.eval(), folder, {}, VECTORS)


def learner(name: str, scaling: str, **params: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        made, preparation = (
            online.build(name, params, num_features=10, seed=3),
            online.Preparation.of(scaling, VECTORS),
        )
        if made.arity == 3:
            made.partial_fit(online.Constraints(preparation(VECTORS)[:39].reshape(13, 3, 10)))
        online.save(online.Learned(made, preparation, name, params), folder, {}, VECTORS)

    return save


SAVED: dict[str, Callable[[Path], None]] = {
    "images": of_images,
    "vectors": of_vectors,
    "codes": codes,
    "oahu": learner("oahu", "contrast", num_hidden=2, width=6, size=5),
    "oasis": learner("oasis", "standardize"),
    "opml": learner("opml", "unit"),
}

SCRIPT = """
import json, sys
blocked = {"dmlstudy", "safetensors", "torchvision", "faiss", "ray", "optuna", "PIL"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Refuse())
import mlflow, numpy
names, root = json.loads(sys.argv[1]), sys.argv[2]
mlflow.set_tracking_uri("sqlite:///" + root + "/store/mlflow.db")
for name in names:
    model = mlflow.pyfunc.load_model("models:/" + name + "@champion")
    numpy.save(root + "/" + name + ".z.npy", model.predict(numpy.load(root + "/" + name + ".x.npy")))
"""


def register(store: Store, name: str, folder: Path) -> None:
    tracker = StudyTracker(store, name, {})
    config = verdict_trial("any")
    run_id = tracker.start_trial("any", config, None)
    tracker.end_trial(run_id, "finished", [], {})
    tags = {"study": name, "family": "any"}
    models.register(store, name, lambda _: folder, run_id=run_id, tags=tags, card=lambda preprocessing: "")
    tracker.client.set_registered_model_alias(name, models.CHAMPION, "1")


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of models, and what each is given as NAME.x.npy."""
    root = tmp_path_factory.mktemp("standalone")
    store = Store(root / "store")
    store.prepare()
    for name, save in SAVED.items():
        save(root / name)
        register(store, name, root / name)
        x_N = model_folder.example(root / name)
        assert x_N is not None
        np.save(root / f"{name}.x.npy", x_N)
    return root


def expected(registered: Path, name: str) -> np.ndarray:
    """What training computed of the example."""
    kept: np.ndarray = model_folder.read_arrays(registered / name / model_folder.EXAMPLE)["z"]
    return kept


def test_mlflow_and_torch_alone_compute_what_training_did(registered: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(SAVED)), str(registered)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for name in SAVED:
        z_ND, wanted_ND = np.load(registered / f"{name}.z.npy"), expected(registered, name)
        assert (z_ND.dtype, z_ND.shape) == (wanted_ND.dtype, wanted_ND.shape), name
        np.testing.assert_allclose(z_ND, wanted_ND, atol=1e-6, rtol=1e-6, err_msg=name)


def test_what_it_requires_is_what_pip_finds(registered: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{registered}/store/mlflow.db")
    path = Path(mlflow.artifacts.download_artifacts("models:/codes@champion"))
    required = (path / "requirements.txt").read_text().split()
    assert [each.partition("==")[0] for each in required] == ["mlflow", "torch", "numpy"]
    assert all("==" in each and "+" not in each for each in required)
    assert [each.name for each in (path / "code").iterdir() if each.suffix] == ["dmlstudy_model_1.py"]
    for name in ("requirements.txt", "conda.yaml", "python_env.yaml", "MLmodel"):
        assert "dmlstudy==" not in (path / name).read_text()


def test_inputs_of_another_kind_are_refused_in_words(registered: Path) -> None:
    pictures, vectors = (standalone._load_pyfunc(str(registered / name)) for name in ("images", "oasis"))
    assert pictures.predict(PICTURES[:0]).shape == (0, 6)
    np.testing.assert_array_equal(
        pictures.predict(PICTURES[:2].astype(np.int64)), pictures.predict(PICTURES[:2])
    )
    for wrong, message in (
        (PICTURES[:, :4], r"images: expected shape \(N, 8, 12, 3\), got \(300, 4, 12, 3\)"),
        (PICTURES / 255, r"images: expected whole numbers from 0 to 255 \(uint8\), got float64"),
        (PICTURES.astype(int) * 2, r"images: expected whole numbers from 0 to 255"),
    ):
        with pytest.raises(ValueError, match=message):
            pictures.predict(wrong)
    with pytest.raises(ValueError, match=r"vectors: expected shape \(N, 10\), got \(40, 9\)"):
        vectors.predict(VECTORS[:, :9])
    with pytest.raises(ValueError, match="item 1: beyond what the model takes"):
        vectors.predict(np.stack([VECTORS[0], VECTORS[0] * 1e6]))


@pytest.mark.parametrize("name", ["weights.safetensors", "embedder.pt2", "embedder.json"])
def test_an_altered_file_is_not_loaded(name: str, registered: Path, tmp_path: Path) -> None:
    shutil.copytree(registered / "images", tmp_path / "model")
    path = tmp_path / "model" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: altered, by its SHA-256"):
        standalone._load_pyfunc(str(tmp_path))
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}: missing"):
        standalone._load_pyfunc(str(tmp_path))
    (tmp_path / "model" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        standalone._load_pyfunc(str(tmp_path))


def test_no_object_in_a_program_is_unpickled(registered: Path, tmp_path: Path) -> None:
    """A program sealed anew whose weights are a pickle that would write a file."""

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    path = tmp_path / "planted"
    torch.save(Planted(), path)
    with standalone._only_tensors(), pytest.raises(Exception, match=r"[Ww]eights"):
        torch.load(path, weights_only=False)
    assert not (tmp_path / "ran").exists()
    assert standalone.ONLY_TENSORS not in os.environ


def test_a_model_registered_by_an_earlier_version_still_loads(tmp_path: Path) -> None:
    """Those name dmlstudy's own loader."""
    of_images(tmp_path / "model")
    mlflow.pyfunc.save_model(
        tmp_path / "mlflow",
        loader_module="dmlstudy.registry.pyfunc",
        data_path=str(tmp_path / "model"),
        pip_requirements=["numpy"],
    )
    z_ND = mlflow.pyfunc.load_model(str(tmp_path / "mlflow")).predict(PICTURES)
    np.testing.assert_allclose(z_ND, expected(tmp_path, "model"), atol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_its_requirements_install_and_it_computes_there(registered: Path, tmp_path: Path) -> None:
    """Takes gigabytes and minutes: a new environment from the model's own requirements and nothing else."""
    mlflow.set_tracking_uri(f"sqlite:///{registered}/store/mlflow.db")
    path = Path(mlflow.artifacts.download_artifacts("models:/images@champion", dst_path=str(tmp_path)))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "-r", path / "requirements.txt"]
    subprocess.run(install, check=True, timeout=2400)
    subprocess.run([python, "-c", SCRIPT, '["images"]', registered], check=True, timeout=300, cwd=tmp_path)
    np.testing.assert_allclose(
        np.load(registered / "images.z.npy"), expected(registered, "images"), atol=1e-6
    )


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_mlflow_serves_it_from_an_environment_that_it_builds(registered: Path, tmp_path: Path) -> None:
    """As above, by ``mlflow models serve``: uv builds the environment."""
    mlflow.set_tracking_uri(f"sqlite:///{registered}/store/mlflow.db")
    path = mlflow.artifacts.download_artifacts("models:/images@champion", dst_path=str(tmp_path))
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", path, "--env-manager", "uv"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    own["MLFLOW_ENV_ROOT"] = str(tmp_path / "environments")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=own, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 2400
        while True:
            try:
                if requests.get(f"http://127.0.0.1:{port}/ping", timeout=5).status_code == 200:
                    break
            except requests.ConnectionError:
                pass
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(1)
        address = f"http://127.0.0.1:{port}/invocations"
        answer = requests.post(address, json={"inputs": PICTURES[:3].tolist()}, timeout=60)
        np.testing.assert_allclose(
            answer.json()["predictions"], expected(registered, "images")[:3], atol=1e-6
        )
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, 9)
        process.wait()
