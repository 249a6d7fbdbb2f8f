"""From a registered model to an answer: each file is hashed once by a command, and the network is there once."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from support.verdict_trials import verdict_trial
from typer.testing import CliRunner

import dmlstudy
from dmlstudy import cli, data, embedders, online
from dmlstudy.embedders import Embedder
from dmlstudy.model_folder import read_json
from dmlstudy.online import OnlineLearner
from dmlstudy.registry import models
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.serving import gallery as galleries
from dmlstudy.serving.server import Service
from dmlstudy.store import Store

NAME, GALLERY_FILES = "small-embedder", Counter(galleries.FILES)
X = np.random.default_rng(0).normal(size=(30, 10)).astype(np.float32)


class Counts(NamedTuple):
    """How often each file was hashed, by its name, and how many networks were made."""

    hashed: Counter[str]
    networks: list[object]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a registered embedder, a folder of pictures, and a learner with its gallery."""
    root = tmp_path_factory.mktemp("once")
    made = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    images = np.random.default_rng(1).integers(0, 256, (12, 8, 8, 1), dtype=np.uint8)
    embedders.save(made, root / "trained", {}, images[:2])
    store = Store(root / "store")
    store.prepare()
    tracker = StudyTracker(store, "once", {})
    run_id = tracker.start_trial("any verdict seed 1", verdict_trial("any"), None)
    tracker.end_trial(run_id, "finished", [], {"test_map_at_r": 0.5})
    version = models.register(
        store,
        NAME,
        lambda _: root / "trained",
        run_id=run_id,
        tags={"study": "once"},
        card=lambda _: "# card",
    )
    tracker.client.set_registered_model_alias(NAME, models.CHAMPION, str(version.version))
    (root / "pictures").mkdir()
    for number, image_HWC in enumerate(images):
        Image.fromarray(image_HWC[..., 0]).save(root / "pictures" / f"{number:02}.png")
    params = {"num_hidden": 2, "width": 6, "size": 5}
    learner = online.build("oahu", params, num_features=10, seed=3)
    learned = online.Learned(learner, online.Preparation.of("unit", X), "oahu", params)
    online.save(learned, root / "learner", {}, X[:2])
    np.savez(root / "x.npz", x=X)
    return root


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Counted from here on. A network on the device ``meta`` has no weights, and is none."""
    counted = Counts(Counter(), [])
    digest, init, learn = hashlib.file_digest, Embedder.__init__, OnlineLearner.__init__

    def file_digest(file: IO[bytes], *arguments: Any) -> Any:
        counted.hashed[Path(file.name).name] += 1
        return digest(file, *arguments)

    def build(self: Embedder, *arguments: Any) -> None:
        init(self, *arguments)
        if next(self.parameters()).device.type != "meta":
            counted.networks.append(self)

    def build_learner(self: OnlineLearner, *arguments: Any, **named: Any) -> None:
        learn(self, *arguments, **named)
        counted.networks.append(self)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    monkeypatch.setattr(Embedder, "__init__", build)
    monkeypatch.setattr(OnlineLearner, "__init__", build_learner)
    return counted


def command(*arguments: str | Path) -> str:
    done = CliRunner().invoke(cli.app.app, [str(each) for each in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Service]]:
    """The services that ``dmlstudy serve`` would have put behind HTTP."""
    made: list[Service] = []
    monkeypatch.setattr("dmlstudy.serving.server.serve", lambda service, *_, **__: made.append(service))
    yield made
    for service in made:
        service.close()


def test_each_command_hashes_a_file_once_and_loads_one_network(
    place: Path, tmp_path: Path, counts: Counts, served: list[Service]
) -> None:
    def counted(*arguments: str | Path) -> Counter[str]:
        counts.hashed.clear()
        counts.networks.clear()
        command(*arguments)
        return Counter(counts.hashed)

    at = ("--store", place / "store")
    model, z, gallery = tmp_path / "model", tmp_path / "z.parquet", tmp_path / "gallery"
    hashed = counted("pull", NAME, "--to", model, *at)
    files = Counter(list(read_json(model / "manifest.json")))
    assert (hashed, len(counts.networks)) == (files, 1)
    assert {"weights.safetensors", "embedder.pt2", "card.md"} < set(files)

    assert (counted("embed", model, place / "pictures", "-o", z), len(counts.networks)) == (files, 1)
    assert (counted("index", z, "-o", gallery), len(counts.networks)) == (GALLERY_FILES, 0)
    query = place / "pictures" / "00.png"
    hashed = counted("retrieve", model, gallery, query, "--sheet", tmp_path / "sheet.html")
    assert (hashed, len(counts.networks)) == (files + GALLERY_FILES, 1)
    hashed = counted("export", model, "--format", "torch_export", "-o", tmp_path / "model.pt2")
    assert (hashed, len(counts.networks)) == (files, 1)
    for reference in ((model,), (NAME, *at)):
        hashed = counted("serve", *reference, "--gallery", gallery, "--port", "0")
        assert (hashed, len(counts.networks)) == (files + GALLERY_FILES, 1)
    first, second = (data.read_embeddings(z)[2][:1], served[-1])
    answered = second.submit(images_of(query), True).result()[0]
    assert answered is not None
    np.testing.assert_allclose(answered, first, atol=1e-6)


def images_of(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    content = io.BytesIO(path.read_bytes())
    return np.asarray(Image.open(content))[None, :, :, None]


def test_a_learner_that_embeds_queries_otherwise_is_there_once(
    place: Path, tmp_path: Path, counts: Counts, served: list[Service]
) -> None:
    command("embed", place / "learner", place / "x.npz", "-o", tmp_path / "z.parquet")
    command("index", tmp_path / "z.parquet", "-o", tmp_path / "gallery")
    counts.hashed.clear()
    counts.networks.clear()
    command("serve", place / "learner", "--gallery", tmp_path / "gallery", "--port", "0")
    files = Counter(list(read_json(place / "learner" / "manifest.json")))
    assert (counts.hashed, len(counts.networks)) == (files + GALLERY_FILES, 1)
    (service,) = served
    for is_query in (False, True):
        assert service.submit(X[:2], is_query).result()[0] is not None


def test_a_model_for_python_is_there_once_and_outlives_its_copy(place: Path, counts: Counts) -> None:
    model = dmlstudy.models.load(NAME, store=place / "store", device="cpu")
    assert (set(counts.hashed.values()), len(counts.networks)) == ({1}, 1)
    assert not model.folder.exists()
    assert repr(model) == f"<embedder {NAME} of images 8 x 8 x 1>"
    assert model.embed(place / "pictures").shape == (12, 6)
    assert model.embed(images_of(place / "pictures" / "00.png")).shape == (1, 6)
    assert len(counts.networks) == 1
    assert model.example is not None
    assert model.notes == {}  # none were saved with it
