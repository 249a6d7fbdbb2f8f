"""Codes and online learners are registered, pulled and used as embedders are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.verdict_trials import verdict_trial

from dmlstudy import hashing, model_folder, online
from dmlstudy.registry import models
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.saved import Model
from dmlstudy.store import Store, StoreError

X = np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32)


def codes(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    torch.manual_seed(0)
    model = hashing.build("ssdh", 16, 10, {"hidden": 8}).eval()
    hashing.save(model, folder, {"family": "codes"}, X[:4])
    return model.codes


def learner(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    made = online.build("oahu", {"num_hidden": 2, "width": 6, "size": 5}, num_features=10, seed=3)
    preparation = online.Preparation.of("standardize", X)
    made.partial_fit(
        online.Constraints(preparation(X).reshape(-1, 2, 10)[:20].repeat(2, axis=1)[:, :3] + X[:3])
    )
    learned = online.Learned(made, preparation, "oahu", {"num_hidden": 2, "width": 6, "size": 5})
    online.save(learned, folder, {"family": "learner"}, X[:4])
    return learned.embed


def map_of_one_pass(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Its state has a number without dimensions."""
    made = online.build("opml", {}, num_features=10)
    made.partial_fit(online.Constraints(X[:39].reshape(13, 3, 10)))
    learned = online.Learned(made, online.Preparation.of("none", X), "opml", {})
    online.save(learned, folder, {}, X[:4])
    return learned.embed


SAVED: dict[str, Callable[[Path], Callable[[np.ndarray], np.ndarray]]] = {
    "hashing model": codes,
    "online learner": learner,
    "online learner of one pass": map_of_one_pass,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("kinds") / "store")
    store.prepare()
    return store


@pytest.fixture(params=SAVED)
def registered(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> tuple[Any, ...]:
    compute = SAVED[request.param](tmp_path / "model")
    tracker = StudyTracker(store, f"kinds {request.param}", {})
    config = verdict_trial("any")
    run_id = tracker.start_trial("any verdict seed 1", config, None)
    tracker.end_trial(run_id, "finished", [], {"test_map": 0.5})
    name = request.param.replace(" ", "-")
    tags = {"study": "kinds", "family": "any"}
    version = models.register(
        store, name, lambda _: tmp_path / "model", run_id=run_id, tags=tags, card=lambda _: "# card"
    )
    tracker.client.set_registered_model_alias(name, models.CHAMPION, str(version.version))
    version = models.resolve(store, name)
    return store, name, version, compute, request.param


def test_what_was_registered_is_pulled_and_computes_the_same(
    registered: tuple[Any, ...], tmp_path: Path
) -> None:
    store, name, version, compute, kind = registered
    pulled = models.pull(store, name, tmp_path / "pulled")
    assert pulled == version
    assert (tmp_path / "pulled" / models.CARD).read_text().startswith("# card")
    opened = Model.open(tmp_path / "pulled")
    assert kind.startswith(opened.kind)
    np.testing.assert_array_equal(opened.compute(X), compute(X))
    served = mlflow.pyfunc.load_model(f"models:/{name}@champion")
    np.testing.assert_array_equal(served.predict(X), compute(X))
    with models.fetched(store, str(tmp_path / "pulled")) as model:
        assert model.folder == tmp_path / "pulled"
    weights = tmp_path / "pulled" / model_folder.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.safetensors: altered since it was saved"):
        Model.open(tmp_path / "pulled")


def test_what_cannot_be_registered_or_pulled(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds none of embedder\.json, hashing\.json, online\.json"):
        Model.open(tmp_path)
    made = hashing.build("ssdh", 16, 10, {"hidden": 8})
    hashing.save(made, tmp_path / "model")
    client = StudyTracker(store, "no example", {}).client
    run_id = client.search_runs([client.get_experiment_by_name("no example").experiment_id])[0].info.run_id
    with pytest.raises(ValueError, match="has no example; save the model with one"):
        models.register(store, "x", lambda _: tmp_path / "model", run_id=run_id, tags={}, card=lambda _: "")
    with pytest.raises(StoreError, match="no model 'nothing'"):
        models.pull(store, "nothing", tmp_path / "pulled")


def test_an_example_from_before_there_were_other_kinds_is_read(tmp_path: Path) -> None:
    compute = learner(tmp_path / "model")
    path = tmp_path / "model" / model_folder.EXAMPLE
    kept = load_file(path)
    save_file({"images": kept["x"], "z": kept["z"]}, path)
    model_folder.seal(tmp_path / "model")
    np.testing.assert_array_equal(model_folder.example(tmp_path / "model"), X[:4])
    assert model_folder.largest_deviation(tmp_path / "model", compute) == 0
