"""What a person does with a finished study: models, pull, embed, the other verbs, MLflow's page."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import mlflow
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.ports import free_port

from dmlstudy import data, retrieval

from .conftest import DMLSTUDY, NUM_TRIALS, QUICKSTART, Finished, called, wait_for_port

pytestmark = pytest.mark.timeout(900)

TORCH_ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"dmlstudy", "ray", "mlflow", "optuna", "faiss", "safetensors", "torchvision"}:
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import numpy, torch
images = torch.tensor(numpy.load(sys.argv[2]))
numpy.save(sys.argv[3], torch.export.load(sys.argv[1]).module()(images).detach().numpy())
"""


@pytest.fixture(scope="module")
def pulled(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pull") / "model"
    result = called("pull", "digits-embedder@champion", "--to", folder, "--store", finished.store)
    assert result.returncode == 0, result.stderr
    assert "SHA-256 of every file verified" in result.stdout
    return folder


def test_the_champion_computes_what_training_computed(finished: Finished, pulled: Path) -> None:
    """The example's embeddings were written by the training worker; the model in MLflow reproduces them."""
    example = load_file(pulled / "example.safetensors")
    mlflow.set_tracking_uri(f"sqlite:///{finished.store / 'mlflow.db'}")
    model = mlflow.pyfunc.load_model("models:/digits-embedder@champion")
    z_ND = model.predict(example["x"])
    np.testing.assert_allclose(z_ND, example["z"], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(z_ND, axis=1), 1, atol=1e-6)
    test = data.load("digits").test
    np.testing.assert_array_equal(example["x"], test.images_NHWC[:8])
    scores = retrieval.evaluate(model.predict(test.images_NHWC), test.labels_N)
    client = mlflow.MlflowClient()
    version = client.get_model_version_by_alias("digits-embedder", "champion")
    run = client.get_run(version.run_id)
    assert run.data.tags["seed"] == "1"
    for name, score in scores.items():
        assert run.data.metrics[f"test_{name}"] == pytest.approx(score, abs=1e-6)


def test_the_pulled_folder_works_with_torch_alone(pulled: Path, tmp_path: Path) -> None:
    example = load_file(pulled / "example.safetensors")
    np.save(tmp_path / "images.npy", example["x"])
    arguments = [pulled / "embedder.pt2", tmp_path / "images.npy", tmp_path / "z.npy"]
    subprocess.run([sys.executable, "-c", TORCH_ALONE, *map(str, arguments)], check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "z.npy"), example["z"], atol=1e-6)


def test_embed_by_reference_and_by_folder(finished: Finished, pulled: Path, tmp_path: Path) -> None:
    example = load_file(pulled / "example.safetensors")
    np.savez(tmp_path / "some.npz", images=example["x"])
    for number, model in enumerate(("digits-embedder@champion", pulled)):
        output = tmp_path / f"{number}.parquet"
        result = called("embed", model, tmp_path / "some.npz", "-o", output, "--store", finished.store)
        assert result.returncode == 0, result.stderr
        assert "8 embeddings of size 64" in result.stdout
        _, _, z_ND = data.read_embeddings(output)
        np.testing.assert_allclose(z_ND, example["z"], atol=1e-6)


def test_a_study_that_has_ended_cannot_be_stopped(finished: Finished) -> None:
    result = called("stop", "digits", "--store", finished.store)
    assert (result.returncode, result.stdout) == (1, "study digits is not running: it is finished\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["status"], "+ 10 judged"),
        (["status", "digits"], "finished"),
        (["leaderboard", "digits"], "untrained"),
        (["models"], "champion"),
        (["logs", "digits"], f"{NUM_TRIALS}/{NUM_TRIALS}"),
    ],
)
def test_every_verb_works_on_what_the_study_left(
    arguments: list[str], shown: str, finished: Finished
) -> None:
    result = called(*arguments, "--store", finished.store)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout


def test_validate_shows_the_tree_the_trials_and_the_time() -> None:
    result = called("validate", QUICKSTART)
    assert result.returncode == 0, result.stderr
    for text in (
        "if threshold+margin: epsilon",
        "24 to search (4 families x 6), 15 for the verdict",
        "time: at most",
    ):
        assert text in result.stdout


def test_the_page_opens_on_the_store(finished: Finished) -> None:
    port = free_port()
    page = subprocess.Popen(
        [*DMLSTUDY, "ui", "--port", str(port), "--store", str(finished.store)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, page)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            assert answer.status == 200
    finally:
        page.send_signal(signal.SIGTERM)
        page.wait(timeout=30)
