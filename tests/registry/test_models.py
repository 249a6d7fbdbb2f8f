"""Registered embedders: registered, named, pulled, loaded by MLflow and by torch alone, and never altered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import mlflow
import numpy as np
import pytest
from support.verdict_trials import verdict_trial

from dmlstudy import data, embedders
from dmlstudy.registry import connection, models
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.saved import Model
from dmlstudy.store import Store, StoreError
from dmlstudy.verdict.thresholds import Errors, Rate, fields


def build(seed: int) -> embedders.Embedder:
    return embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=seed)


def pictures(num: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (num, 8, 8, 1), dtype=np.uint8)


class Registered(NamedTuple):
    store: Store
    versions: list[RegisteredVersion]
    embedders: list[embedders.Embedder]
    run_ids: list[str]


@pytest.fixture(scope="module")
def registered(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Registered:
    """Two versions of ``digits-embedder``; the second one is the champion."""
    tracker = StudyTracker(store, "models", {})
    config = verdict_trial("power")
    made = Registered(store, [], [], [])
    for seed in (1, 2):
        embedder = build(seed)
        folder = tmp_path_factory.mktemp("trained") / "embedder"
        embedders.save(embedder, folder, {"family": "power"}, pictures(2))
        run_id = tracker.start_trial(f"power verdict seed {seed}", config, None)
        tracker.end_trial(run_id, "finished", [], {"test_map_at_r": 0.5})
        version = models.register(
            store,
            "digits-embedder",
            lambda _, folder=folder: folder,
            run_id=run_id,
            tags={"study": "models", "family": "power", "spec_fingerprint": "f00"},
            card=lambda _, seed=seed: f"# seed {seed}",
        )
        tracker.client.set_registered_model_alias(version.name, "champion", str(version.version))
        made.versions.append(models.resolve(store, version.name))
        made.embedders.append(embedder)
        made.run_ids.append(run_id)
    return made


def test_what_is_registered_says_where_it_is_from(registered: Registered) -> None:
    first, second = registered.versions
    assert (first.name, first.version, second.version) == ("digits-embedder", 1, 2)
    assert (second.study, second.family, second.run_id) == ("models", "power", registered.run_ids[1])
    assert second.aliases == ["champion"]
    assert len(second.sha256) == 64
    client = connection.connect(registered.store)
    description = client.get_model_version(second.name, str(second.version)).description
    assert description.startswith("# seed 2")
    assert "dmlstudy pull digits-embedder/2 --to model" in description
    assert 'mlflow.pyfunc.load_model("models:/digits-embedder/2")' in description
    assert "* takes: images, values 0 to 255: uint8 (N, 8, 8, 1)" in description
    assert "* gives: one row for each: float32 (N, 6)" in description
    assert first.sha256 != second.sha256


def test_the_run_is_left_ended(registered: Registered) -> None:
    client = connection.connect(registered.store)
    for run_id in registered.run_ids:
        assert client.get_run(run_id).info.status == "FINISHED"
    assert mlflow.active_run() is None


def test_versions_are_listed(registered: Registered) -> None:
    listed = models.versions(registered.store)
    assert [(v.name, v.version, v.aliases) for v in listed] == [
        ("digits-embedder", 1, []),
        ("digits-embedder", 2, ["champion"]),
    ]
    assert models.versions(registered.store, "digits-embedder") == listed
    assert models.versions(registered.store, "another") == []


@pytest.mark.parametrize(
    ("reference", "version"),
    [
        ("digits-embedder", 2),
        ("digits-embedder@champion", 2),
        ("digits-embedder/1", 1),
        ("digits-embedder/2", 2),
    ],
)
def test_a_reference_means_one_version(reference: str, version: int, registered: Registered) -> None:
    assert models.resolve(registered.store, reference).version == version


@pytest.mark.parametrize("reference", ["digit-embedder", "digits-embedder@best", "digits-embedder/7"])
def test_an_unknown_reference_names_what_there_is(reference: str, registered: Registered) -> None:
    with pytest.raises(StoreError) as caught:
        models.resolve(registered.store, reference)
    assert str(caught.value) == (
        f"no model '{reference}' in the store {registered.store.tracking_uri};"
        " there are: digits-embedder/1, digits-embedder/2 @champion"
    )


@pytest.mark.parametrize("reference", ["", "a/b", "a@b@c", "a/1/2", "@champion"])
def test_what_is_no_reference(reference: str, registered: Registered) -> None:
    with pytest.raises(StoreError, match="expected NAME, NAME@ALIAS or NAME/VERSION"):
        models.resolve(registered.store, reference)


@pytest.mark.parametrize(("reference", "number"), [("digits-embedder", 1), ("digits-embedder/1", 0)])
def test_pulled_it_is_the_original(
    reference: str, number: int, registered: Registered, tmp_path: Path
) -> None:
    version = models.pull(registered.store, reference, tmp_path / "new" / "model")
    assert version == models.resolve(registered.store, reference)
    assert {path.name for path in (tmp_path / "new" / "model").iterdir()} == {
        "weights.safetensors",
        "embedder.json",
        "embedder.pt2",
        "example.safetensors",
        "card.md",
        "manifest.json",
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    pulled, images = embedders.load(tmp_path / "new" / "model"), pictures(9)
    np.testing.assert_array_equal(
        embedders.embed(pulled, images), embedders.embed(registered.embedders[number], images)
    )
    other = registered.embedders[1 - number]
    assert not np.allclose(embedders.embed(pulled, images), embedders.embed(other, images))
    description = json.loads((tmp_path / "new" / "model" / "embedder.json").read_text())
    assert description["extra"] == {"family": "power"}


def test_a_threshold_is_registered_and_pulled_with_its_model(registered: Registered, tmp_path: Path) -> None:
    store, folder = registered.store, tmp_path / "trained"
    embedders.save(build(9), folder, {"family": "power"}, pictures(2))
    tracker = StudyTracker(store, "thresholds", {})
    run_id = tracker.start_trial("power verdict seed 1", verdict_trial("power"), None)
    fmr = Rate(644, 495_000, 100, 0.0007, 0.0026, 0.0005, 0.0035)
    found = Errors(0.612, 1e-3, fmr, Rate(80, 1000, 100, 0.06, 0.11), ["one class is in 30% of it"])
    version = models.register(
        store,
        "threshold-embedder",
        lambda _: folder,
        run_id=run_id,
        tags={"study": "models", "family": "power"},
        card=lambda _: "# one with a threshold",
        threshold=fields(found),
    )
    models.pull(store, f"threshold-embedder/{version.version}", tmp_path / "pulled")
    pulled = Model.open(tmp_path / "pulled").threshold
    assert pulled is not None
    assert (pulled.tau, pulled.wanted_fmr, pulled.fmr.low, pulled.words) == (0.612, 1e-3, 0.0007, str(found))
    with models.fetched(store, "threshold-embedder/1") as fetched:
        pass
    assert fetched.threshold == pulled  # known after its files are gone


def test_a_folder_that_is_there_is_not_touched(registered: Registered, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("mine too")
    for name in ("mine", "file"):
        with pytest.raises(
            StoreError, match=rf"{name}: exists already; name a new folder with --to, or replace"
        ):
            models.pull(registered.store, "digits-embedder", tmp_path / name)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "mine too"
    (tmp_path / "empty").mkdir()
    models.pull(registered.store, "digits-embedder", tmp_path / "empty")
    assert (tmp_path / "empty" / "embedder.json").is_file()


def test_an_unknown_model_makes_no_folder(registered: Registered, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no model 'nothing'"):
        models.pull(registered.store, "nothing", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_fetched_for_the_time_being(registered: Registered, tmp_path: Path) -> None:
    with models.fetched(registered.store, "digits-embedder/1") as model:
        assert model.loaded.network.architecture.seed == 1
    assert not model.folder.exists()
    assert model.compute(pictures(2)).shape == (2, 6)
    models.pull(registered.store, "digits-embedder", tmp_path / "model")
    with models.fetched(registered.store, str(tmp_path / "model")) as model:
        assert model.folder == tmp_path / "model"
    with open(tmp_path / "model" / "weights.safetensors", "ab") as file:
        file.write(b"x")
    with (
        pytest.raises(ValueError, match=r"weights\.safetensors: altered"),
        models.fetched(registered.store, str(tmp_path / "model")),
    ):
        pytest.fail("an altered folder was used")


def test_mlflow_alone_gives_the_same_embeddings(registered: Registered) -> None:
    connection.connect(registered.store)
    loaded = mlflow.pyfunc.load_model("models:/digits-embedder@champion")
    images = pictures(9)
    z = loaded.predict(images)
    assert z.shape == (9, 6)
    assert z.dtype == np.float32
    np.testing.assert_allclose(z, embedders.embed(registered.embedders[1], images), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    signature = loaded.metadata.signature
    assert signature.inputs.inputs[0].shape == (-1, 8, 8, 1)
    assert signature.outputs.inputs[0].shape == (-1, 6)


TORCH_ALONE = """
import sys
blocked = {"dmlstudy", "ray", "mlflow", "safetensors", "torchvision", "optuna", "faiss", "pyarrow"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Refuse())
import numpy, torch
folder, scratch = sys.argv[1:]
embed = torch.export.load(folder + "/embedder.pt2").module()
with torch.no_grad():
    numpy.save(scratch + "/z.npy", embed(torch.from_numpy(numpy.load(scratch + "/x.npy"))).numpy())
assert not blocked & {name.split(".")[0] for name in sys.modules}
"""


def test_the_pulled_folder_works_with_torch_alone(registered: Registered, tmp_path: Path) -> None:
    models.pull(registered.store, "digits-embedder", tmp_path / "model")
    images = pictures(11)
    np.save(tmp_path / "x.npy", images)
    subprocess.run(
        [sys.executable, "-c", TORCH_ALONE, str(tmp_path / "model"), str(tmp_path)], check=True, timeout=120
    )
    z = np.load(tmp_path / "z.npy")
    np.testing.assert_allclose(z, embedders.embed(registered.embedders[1], images), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)


def stored(registered: Registered, name: str) -> Path:
    """Where the store keeps this file of version 1."""
    found = [
        path
        for path in (registered.store.root / "artifacts").rglob(name)
        if models.sha256(path.parent / "manifest.json") == registered.versions[0].sha256
    ]
    (path,) = found
    return path


@pytest.mark.parametrize(
    "name",
    [
        "weights.safetensors",
        "embedder.json",
        "embedder.pt2",
        "example.safetensors",
        "card.md",
        "manifest.json",
    ],
)
def test_a_flipped_byte_in_the_store_is_found(name: str, registered: Registered, tmp_path: Path) -> None:
    path = stored(registered, name)
    original = path.read_bytes()
    altered = bytearray(original)
    altered[len(altered) // 2] ^= 1
    try:
        path.write_bytes(bytes(altered))
        with pytest.raises(StoreError) as caught:
            models.pull(registered.store, "digits-embedder/1", tmp_path / "model")
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    finally:
        path.write_bytes(original)
    models.pull(registered.store, "digits-embedder/1", tmp_path / "model")


def test_a_link_put_into_the_store_is_not_pulled(registered: Registered, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    link = stored(registered, "manifest.json").with_name("extra.py")
    link.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(StoreError, match=r"extra\.py") as caught:
            models.pull(registered.store, "digits-embedder/1", tmp_path / "model")
        assert "\n" not in str(caught.value)
    finally:
        link.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("first", ["weights.safetensors", "embedder.json", "example.safetensors"])
def test_files_that_have_changed_places_are_named(first: str, registered: Registered, tmp_path: Path) -> None:
    paths = [stored(registered, name) for name in (first, "embedder.pt2")]
    kept = [path.read_bytes() for path in paths]
    try:
        for path, content in zip(paths, reversed(kept), strict=True):
            path.write_bytes(content)
        with pytest.raises(StoreError, match=rf"({first}|embedder\.pt2): altered"):
            models.pull(registered.store, "digits-embedder/1", tmp_path / "model")
    finally:
        for path, content in zip(paths, kept, strict=True):
            path.write_bytes(content)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["weights.safetensors", "embedder.json", "embedder.pt2", "manifest.json"])
def test_a_file_cut_off_in_the_store_is_named(name: str, registered: Registered, tmp_path: Path) -> None:
    path = stored(registered, name)
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[: len(kept) // 2])
        with pytest.raises(StoreError, match=name):
            models.pull(registered.store, "digits-embedder/1", tmp_path / "model")
    finally:
        path.write_bytes(kept)
    assert list(tmp_path.iterdir()) == []


def test_what_was_pulled_is_used_without_the_engines_and_without_pickle(
    registered: Registered, tmp_path: Path
) -> None:
    models.pull(registered.store, "digits-embedder", tmp_path / "model")
    np.savez(tmp_path / "some.npz", images=pictures(5))
    script = Path(__file__).parents[1] / "support" / "blocked.py"
    command = [sys.executable, script, tmp_path / "model", tmp_path / "some.npz", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    expected = embedders.embed(registered.embedders[1], pictures(5))
    np.testing.assert_allclose(np.load(tmp_path / "api.npy"), expected, atol=1e-6)
    np.testing.assert_allclose(data.read_embeddings(tmp_path / "command.parquet")[2], expected, atol=1e-6)


def test_files_swapped_for_others_that_agree_with_each_other(registered: Registered, tmp_path: Path) -> None:
    """The manifest of another embedder does not pass for the registered one."""
    manifest, weights = stored(registered, "manifest.json"), stored(registered, "weights.safetensors")
    kept = {path: path.read_bytes() for path in (manifest, weights)}
    try:
        weights.write_bytes(kept[weights] + b"x")
        listed = json.loads(kept[manifest]) | {"weights.safetensors": models.sha256(weights)}
        manifest.write_text(json.dumps(listed))
        with pytest.raises(StoreError, match=r"manifest\.json is not the one that was registered"):
            models.pull(registered.store, "digits-embedder/1", tmp_path / "model")
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_a_missing_file_in_the_store_is_named(registered: Registered, tmp_path: Path) -> None:
    said = {
        name: rf"{name}: listed in the manifest, but missing"
        for name in ("weights.safetensors", "embedder.pt2", "example.safetensors", "card.md")
    }
    for name, message in {
        **said,
        "embedder.json": r"embedder\.json",
        "manifest.json": r"manifest\.json",
    }.items():
        path = stored(registered, name)
        path.rename(tmp_path / "aside")
        try:
            with pytest.raises(StoreError, match=message):
                models.pull(registered.store, "digits-embedder/1", tmp_path / "model")
        finally:
            (tmp_path / "aside").rename(path)
    assert list(tmp_path.iterdir()) == []
