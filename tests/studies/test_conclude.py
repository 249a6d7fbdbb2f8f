"""A study without Ray: what it keeps of its origin, and a kill while its winner is registered costs nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
from tune_simulator import Tune, study

from dmlstudy import data, embedders
from dmlstudy.registry import models, tracking
from dmlstudy.registry.store import Store
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.studies import study as studies
from dmlstudy.studies.search import StudySearch
from dmlstudy.studies.spec import StudySpec, default_values
from dmlstudy.studies.study import _conclude, run_study


@pytest.mark.parametrize(
    ("where", "call", "left"),
    [
        (mlflow, "register_model", []),
        (mlflow.MlflowClient, "set_registered_model_alias", [[]]),
        (studies, "publish", [["champion"]]),
        (studies, "publish_folds", [["champion"]]),
    ],
    ids=["before the version", "before the alias", "before the rows", "before the folds"],
)
def test_a_kill_while_registering_leaves_a_champion_in_the_end(
    where: Any, call: str, left: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store, search = study(), Store(tmp_path / "store"), SimpleNamespace(winner=lambda: "red")
    store.prepare()
    embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    embedders.save(embedder, tmp_path / "embedder", {}, np.zeros((2, 8, 8, 1), np.uint8))
    tracker = StudyTracker(store, spec.name, {})
    family = spec.families["red"]
    config = spec.trial_config(family, default_values(family), phase="verdict", seed=1)
    run_id = tracker.start_trial("red verdict seed 1", config, None)
    tracker.log_model(run_id, str(tmp_path / "embedder"))
    tracker.end_trial(run_id, "finished", [], {"test_map_at_r": 0.5})

    def killed(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as kill:
        kill.setattr(where, call, killed)
        with pytest.raises(KeyboardInterrupt):
            _conclude(spec, store, tracker, search)  # type: ignore[arg-type]
    assert [version.aliases for version in models.versions(store)] == left

    tracker = StudyTracker(store, spec.name, {})
    assert tracker.finished_verdicts() == {("red", 1)}
    board = _conclude(spec, store, tracker, search)  # type: ignore[arg-type]
    (version,) = models.versions(store)
    assert (version.version, version.aliases, version.metrics) == (1, ["champion"], {"test_map_at_r": 0.5})
    assert (board.status, board.model) == ("finished", f"{version.name}/1")
    assert tracker.client.get_run(run_id).info.status == "FINISHED"
    (row,) = tracking.search_all(tracker.client, tracker.experiment_id, "tags.dmlstudy_kind = 'leaderboard'")
    kept = [row.data.tags[name] for name in ("family", "comparison", "model")]
    assert kept == ["red", "winner", f"{version.name}/1"]


def test_what_a_study_keeps_of_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedders.save(
        embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0),
        tmp_path / "model",
        {},
        np.zeros((2, 8, 8, 1), np.uint8),
    )

    def play(
        spec: StudySpec, store: Store, tell: Any, tracker: StudyTracker, search: StudySearch, _: Any
    ) -> None:
        for number, config in Tune(search).run().started:
            run_id = tracker.start_trial(config.family, config, number)
            name = "map_at_r" if number is not None else "test_map_at_r"
            if number is None:
                tracker.log_model(run_id, str(tmp_path / "model"))
            tracker.end_trial(run_id, "finished", [], {name: 0.5 + 0.01 * config.seed})

    monkeypatch.setattr(studies, "connected", lambda *arguments: contextlib.nullcontext())
    monkeypatch.setattr(studies, "_run_trials", play)
    spec, store = study(search__trials_per_family=2), Store(tmp_path / "store")
    told: list[str] = []
    board = run_study(spec, store, address=None, tell=told.append)
    assert (board.status, board.objective, board.front) == ("finished", "map_at_r", [])
    assert {row.family for row in board.rows} == {"red", "blue", "untrained"}
    client = mlflow.MlflowClient(store.tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name(spec.name).experiment_id])
    (parent,) = [run for run in runs if run.data.tags["dmlstudy_kind"] == "study"]
    digits = data.load("digits")
    expected = {
        "store_id": store.identity(),
        "spec_fingerprint": spec.fingerprint(),
        "development_sha256": digits.development.fingerprint(),
        "test_sha256": digits.test.fingerprint(),
        "num_shared_images": "0",
        "sittings": "1",
    }
    assert {name: parent.data.tags.get(name) for name in expected} == expected
    trials = [run for run in runs if run.data.tags["dmlstudy_kind"] in ("search", "verdict")]
    assert {(run.data.tags["workers"], run.data.tags["device"]) for run in trials} == {("2", "cpu")}
    shown = {
        run.data.tags["family"]: run.data for run in runs if run.data.tags["dmlstudy_kind"] == "leaderboard"
    }
    assert shown.keys() == {"red", "blue", "untrained"}
    assert {board.winner: board.model} == {
        f: row.tags["model"] for f, row in shown.items() if f == board.winner
    }
    texts = {
        file.path: Path(client.download_artifacts(parent.info.run_id, file.path)).read_text()
        for file in client.list_artifacts(parent.info.run_id)
    }
    assert texts.keys() == {"study.yaml", "search_space.yaml", "folds.json", "environment.json"}
    assert len(json.loads(texts["folds.json"])["search"]) == 2
    assert "source_sha256" in json.loads(texts["environment.json"])["code"]
    assert run_study(spec, store, address=None, tell=told.append) == board
    assert told == ["study simulated is finished already; run it under another --name to repeat it"]
