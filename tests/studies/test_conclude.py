"""A study without Ray: what it keeps of its origin, and a kill while its winner is registered costs nothing."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import optuna
import pytest
from support.copied_store import copied
from support.tune_simulator import Tune, study

from dmlstudy import data, embedders, model_folder
from dmlstudy.registry import connection, models, tracking
from dmlstudy.registry.runs import raw_runs
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec.study_file import StudySpec, default_values
from dmlstudy.store import Store
from dmlstudy.studies import run as studies
from dmlstudy.studies.conclude import conclude
from dmlstudy.studies.run import run_study

WRITES = {
    "create_logged_model",
    "set_logged_model_tags",
    "log_model_artifacts",
    "log_outputs",
    "finalize_logged_model",
    "create_registered_model",
    "create_model_version",
    "update_model_version",
    "update_registered_model",
    "set_registered_model_tag",
    "set_model_version_tag",
    "set_registered_model_alias",
    "create_run",
    "update_run",
    "log_batch",
    "log_text",
    "set_terminated",
    "set_experiment_tag",
    "set_tag",
}
"""Calls of MLflow's client by which something is written while a study is concluded."""

SCORES = {"red": (0.70, (0.50, 0.52)), "blue": (0.65, (0.55, 0.53)), "untrained": (None, (0.3, 0.31))}


class Died(BaseException):
    """The driver, at a write."""


class Deaths:
    """Makes the client die before the so-many-th write, and counts writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self.dies_at, self.said = 0, -1, ""
        self.deepness = 0
        for name in WRITES:
            monkeypatch.setattr(mlflow.MlflowClient, name, self._counted(name))

    def _counted(self, name: str) -> Any:
        call = getattr(mlflow.MlflowClient, name)

        def write(*arguments: Any, **named: Any) -> Any:
            if self.deepness:  # one write that calls another
                return call(*arguments, **named)
            if self.num == self.dies_at:
                self.said = name
                raise Died
            self.num += 1
            self.deepness += 1
            try:
                return call(*arguments, **named)
            finally:
                self.deepness -= 1

        return write


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a study of which all trials are over, and nothing of its conclusion."""
    root = tmp_path_factory.mktemp("judged")
    spec, store = study(), Store(root / "store")
    store.prepare()
    embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    embedders.save(embedder, root / "embedder", {}, np.zeros((2, 8, 8, 1), np.uint8))
    tracker = StudyTracker(store, spec.name, {}, origin={"objective": "map_at_r"})
    for number, (name, (validation, tests)) in enumerate(SCORES.items()):
        family = spec.families["red" if name == "untrained" else name]
        found = spec.trial_config(family, default_values(family)).model_copy(update={"family": name})
        if validation is not None:
            run_id = tracker.start_trial(f"{name} #0", found, number)
            folds = {f"fold_{fold}_map_at_r": validation for fold in range(2)}
            tracker.end_trial(
                run_id, "finished", [{"step": 1, "map_at_r": 0.1}], {"map_at_r": validation, **folds}
            )
        for seed, score in enumerate(tests, 1):
            config = found.model_copy(update={"phase": "verdict", "seed": seed})
            run_id = tracker.start_trial(f"{name} verdict seed {seed}", config, None)
            if seed == 1 and validation is not None:
                tracker.log_model(run_id, str(root / "embedder"))
            tracker.end_trial(run_id, "finished", [{"step": 1, "train_loss": 1.0}], {"test_map_at_r": score})
    return root / "store"


def concluded(store: Store) -> None:
    """Go on with the study, as `dmlstudy resume` does when all trials are over."""
    spec = study()
    tracker = StudyTracker(store, spec.name, {}, origin={"objective": "map_at_r"})
    conclude(spec, store, tracker, SimpleNamespace(winner=lambda: "red"))  # type: ignore[arg-type]


def seen(store: Store) -> dict[str, Any]:
    """All that a user sees of a store, without ids and times."""
    client = connection.connect(store)
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    runs = list(raw_runs(client, experiment.experiment_id))
    names = {run.info.run_id: run.info.run_name for run in runs} | {experiment.experiment_id: "EXPERIMENT"}
    logged = client.search_logged_models([experiment.experiment_id])

    def shown(tags: dict[str, str]) -> dict[str, str]:
        return {
            name: re.sub(r"runs:/\w+|\d{4}-\d\d-\d\dT[\d:+]*", "", names.get(value, value))
            for name, value in tags.items()
            if name not in ("sittings", "environment", "sha256")
        }

    return {
        "experiment": shown(experiment.tags),
        "runs": sorted(
            (
                run.info.run_name,
                run.info.status,
                names.get(run.data.tags.get(tracking.PARENT, ""), ""),
                sorted(shown(run.data.tags).items()),
                sorted(run.data.params.items()),
                sorted(run.data.metrics.items()),
                len(run.outputs.model_outputs) if run.outputs else 0,
                sorted(f.path for f in client.list_artifacts(run.info.run_id) if "environment" not in f.path),
            )
            for run in runs
        ),
        "logged": sorted(
            (
                model.status,
                names[model.source_run_id],
                sorted(shown(model.tags).items()),
                sorted((metric.key, metric.value) for metric in model.metrics or []),
                sorted(f.path for f in client.list_logged_model_artifacts(model.model_id)),
            )
            for model in logged
        ),
        "registered": [
            (model.name, shown(model.tags), model.description, model.aliases)
            for model in client.search_registered_models()
        ],
        "versions": [
            (each.name, each.version, each.aliases, each.family, each.metrics, bool(each.sha256))
            for each in models.versions(store)
        ],
        "cards": [
            (version.description, shown(version.tags))
            for version in client.search_model_versions("name = 'simulated-embedder'")
        ],
        "files": sorted(
            path.name
            for path in (store.root / "artifacts").rglob("*")
            if "environment" not in path.name and not re.fullmatch(r"[0-9a-f]{32}|m-[0-9a-f]{32}", path.name)
        ),
    }


def test_an_unbroken_conclusion_is_complete(judged: Path, tmp_path: Path) -> None:
    store = copied(judged, tmp_path / "store")
    concluded(store)
    state = seen(store)
    assert [(v[1], v[2], v[3]) for v in state["versions"]] == [
        (1, ["champion"], "red"),
        (2, ["challenger"], "blue"),
    ]
    assert all(v[4]["test_map_at_r"] > 0.5 and "validation" in v[4] and v[5] for v in state["versions"])
    assert all("## Use" in text and tags["family"] for text, tags in state["cards"])
    (parent,) = [run for run in state["runs"] if run[0] == "simulated"]
    metrics, params, tags = dict(parent[5]), dict(parent[4]), dict(parent[3])
    assert (metrics["validation"], metrics["test_map_at_r"]) == (0.7, 0.51)
    assert (params["search.sampler"], params["protocol.num_folds"], params["data"]) == ("tpe", "2", "digits")
    first = tags["mlflow.note.content"].splitlines()[0]
    assert (
        "/runs?viewStateShareKey=leaderboard): **red** wins by map_at_r, validation 0.7000, test 0.5100 ±"
        in first
    )
    assert {run[0] for run in state["runs"] if "fold" in run[0]} == {
        f"{f} #0 fold {n}" for f in ("red", "blue") for n in (0, 1)
    }
    assert len(state["logged"]) == 2


def test_killed_before_any_write_a_conclusion_ends_the_same(
    judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    shutil.copytree(judged.parent / "embedder", tmp_path / "exported")
    embedders.add_program(tmp_path / "exported")

    def add_program(folder: Path) -> None:
        """Each model is the same one here, and torch takes seconds to export it."""
        shutil.copy(tmp_path / "exported" / "embedder.pt2", folder)
        model_folder.seal(folder)

    monkeypatch.setattr(embedders, "add_program", add_program)
    unbroken = copied(judged, tmp_path / "unbroken")
    deaths = Deaths(monkeypatch)
    concluded(unbroken)
    num_writes, expected = deaths.num, seen(unbroken)
    assert num_writes > 40
    for number in range(0, num_writes, every):
        store = copied(judged, tmp_path / f"broken-{number}")
        deaths.num, deaths.dies_at = 0, number
        with pytest.raises(Died):
            concluded(store)
        deaths.dies_at = -1
        concluded(store)
        assert seen(store) == expected, f"killed before write {number}, {deaths.said}"
        shutil.rmtree(tmp_path / f"broken-{number}")


@pytest.fixture(
    params=[9, pytest.param(1, marks=(pytest.mark.long, pytest.mark.timeout(1800)))], ids=["some", "all"]
)
def every(request: pytest.FixtureRequest) -> int:
    """Of how many writes one is tried."""
    step: int = request.param
    return step


def test_what_a_study_keeps_of_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedders.save(
        embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0),
        tmp_path / "model",
        {},
        np.zeros((2, 8, 8, 1), np.uint8),
    )

    def play(
        spec: StudySpec, store: Store, tell: Any, tracker: StudyTracker, search: StudySearch, *_: Any
    ) -> None:
        for number, config in Tune(search).run().started:
            run_id = tracker.start_trial(config.family, config, number)
            name = "map_at_r" if number is not None else "test_map_at_r"
            if number is None:
                tracker.log_model(run_id, str(tmp_path / "model"))
            tracker.end_trial(run_id, "finished", [], {name: 0.5 + 0.01 * config.seed})

    monkeypatch.setattr(studies, "connected", lambda *arguments: contextlib.nullcontext())
    monkeypatch.setattr(studies, "run_trials", play)
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
    searched = optuna.load_study(study_name=spec.name, storage=store.optuna_url)
    assert searched.metric_names == ["map_at_r"], "optuna-dashboard calls it Objective 0"
    texts = {
        file.path: Path(client.download_artifacts(parent.info.run_id, file.path)).read_text()
        for file in client.list_artifacts(parent.info.run_id)
    }
    assert texts.keys() == {
        "study.yaml",
        "search_space.yaml",
        "folds.json",
        "environment.json",
        "verdict_plan.json",
    }
    assert len(json.loads(texts["folds.json"])["search"]) == 2
    assert "source_sha256" in json.loads(texts["environment.json"])["code"]

    def read(*_: object, **__: object) -> None:
        pytest.fail("the data of a finished study were read")

    for name in ("load", "files_digest", "remarks"):
        monkeypatch.setattr(data, name, read)
    told.clear()
    assert run_study(spec, store, address=None, tell=told.append) == board
    assert told == ["study simulated is finished already; run it under another --name to repeat it"]
