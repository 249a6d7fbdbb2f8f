"""Every task keeps its protocol: its trials can be broken off, and what they save says of which data it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import config as embedder_config

from dmlstudy import data, distributed, model_folder
from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.saved import Model
from dmlstudy.spec.study_file import SECTIONS, ProtocolConfig
from dmlstudy.training import dataset_cache
from dmlstudy.training.interface import Share
from dmlstudy.training.tasks import TASKS, task_of, task_of_params, untrained_key
from dmlstudy.training.trial import TrialStopped, run_trial

TIMES = ("images_per_second", "rows_per_second")
"""Metrics that depend on the machine's mood."""

SMALL = {"num_hidden": 2, "width": 12, "size": 6}


def frozen(loss: str, params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A trial of codes or of a stream, with two or three epochs for each of two folds."""
    return {
        "family": loss,
        "data": {"name": "digits"},
        "embedder": {},
        "batch": {},
        "training": {"epochs": 2, "lr": 1e-3},
        "loss": {"name": loss, "params": params or {}},
        "num_folds": 2,
        **changes,
    }


def codes(loss: str, params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    own = {"num_bits": 16, "num_queries": 40, "num_train": 200}
    return frozen(loss, params, hashing=own, objective="map", **changes)


def stream(loss: str, params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    own = {"num_seeds": 400, "num_implied": 100, "scaling": "centred_unit"} | changes.pop("online", {})
    return frozen(loss, params, online=own, objective="accuracy", **{"training": {"epochs": 3}} | changes)


TRIALS: dict[str, dict[str, Any]] = {
    "embedding": embedder_config(),
    "hashing": codes(
        "tbh",
        {"hidden": 16, "continuous": 8},
        regularizer={"name": "point_ranking", "params": {"neighbours": 4}},
    ),
    "hashing with limits of its own": codes(
        "ssdh", {"hidden": 16}, training={"epochs": 2, "lr": 1e-3, "optimizer": "sgd", "weight_decay": 0.1}
    ),
    "online": stream("oahu", SMALL),
    "online in a race": stream(
        "oahu",
        SMALL,
        online={"num_seeds": 1400, "on_drift": "reopen", "probation": 500},
        training={"epochs": 4},
        num_folds=1,
    ),
    "online from pairs": stream("lego", online={"num_pairs": 50}, training={"epochs": 5}),
    "online in one pass": stream("opml"),
    "online with empty parts": stream("pair_hinge", online={"num_implied": 80}, training={"epochs": 4}),
}
"""The first of each task is called like it."""

PHASES = ("search", "verdict")


class Jumpy:
    """Hears a rise at every 700th loss, so that races are begun where there is no drift."""

    def __init__(self, sensitivity: float) -> None:
        self.seen = 0

    def update(self, losses: np.ndarray) -> bool:
        before, self.seen = self.seen, self.seen + len(losses)
        return self.seen // 700 > before // 700


@pytest.fixture(autouse=True)
def jumpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmlstudy.online.stream.Watch", Jumpy)


def digits(metrics: dict[str, float], without: tuple[str, ...] = TIMES) -> dict[str, str]:
    """Every digit of the metrics; not a number is like itself."""
    return {name: repr(value) for name, value in metrics.items() if name not in without}


def exactly(reports: list[TrialReport], without: tuple[str, ...] = ()) -> list[tuple[int, dict[str, str]]]:
    return [(each.step, digits(each.metrics, without)) for each in reports]


def given(name: str, phase: str = "search") -> TrialConfig:
    raw = TRIALS[name] | {"phase": phase, "fold_models": phase == "verdict"}
    return TrialConfig.model_validate(raw)


def weights(folder: Path) -> dict[str, Any]:
    return model_folder.read_arrays(folder / model_folder.WEIGHTS)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", TRIALS)
def test_broken_off_after_each_report_a_trial_goes_on_bit_for_bit(
    name: str, phase: str, tmp_path: Path
) -> None:
    """Each attempt makes the reports before it again, as they were, and breaks off one report later."""
    config, whole = given(name, phase), list[TrialReport]()
    save_to = tmp_path / "whole" if phase == "verdict" else None
    result = run_trial(config, whole.append, save_to=save_to)
    before: list[TrialReport] = []
    for num_made in range(len(whole)):
        reports: list[TrialReport] = []

        def report(each: TrialReport, num_made: int = num_made, reports: Any = reports) -> None:
            reports.append(each)
            if len(reports) > num_made:
                raise TrialStopped

        with pytest.raises(TrialStopped):
            run_trial(config, report, checkpoint=tmp_path / "state", min_seconds_between=0)
        kept = max(0, num_made - 1)
        assert exactly(reports[:kept]) == exactly(before[:kept]), (
            "what was told is told again, times included"
        )
        before = reports
    for attempt in ("broken", "ended"):  # a trial that has ended ends again
        again: list[TrialReport] = []
        save_to = tmp_path / attempt if phase == "verdict" else None
        last = run_trial(
            config, again.append, save_to=save_to, checkpoint=tmp_path / "state", min_seconds_between=0
        )
        assert exactly(again, without=TIMES) == exactly(whole, without=TIMES)
        assert digits(last.metrics) == digits(result.metrics)
        assert (last.unit_scores, last.of_folds) == (result.unit_scores, result.of_folds)
        assert bool(last.of_folds) is (phase == "search")
        assert (last.unit_scores is None) is (phase == "search")
        if save_to is not None:
            own, other = weights(save_to), weights(tmp_path / "whole")
            assert own.keys() == other.keys()
            assert all(np.array_equal(own[key], other[key]) for key in own)


def test_the_race_is_under_way_at_a_report_of_its_trial() -> None:
    """Else it would not be tested that its state is kept."""
    config = given("online in a race")
    task = TASKS["online"]
    trainer = task.fit(config, Share(0, *task.folds(config)[0][:2]), torch.device("cpu"))
    raced = []
    for epoch in range(config.training.epochs):
        trainer.train_epoch(epoch)
        raced.append(len(trainer.state()["race"]) > 0)
    assert any(raced)
    assert not raced[-1]


@pytest.mark.parametrize("name", TASKS)
def test_what_is_saved_says_which_data_it_is_of(name: str, tmp_path: Path) -> None:
    config = given(name, "verdict")
    run_trial(config, lambda report: None, save_to=tmp_path / "model")
    noted = Model.open(tmp_path / "model").notes
    dataset = TASKS[name].dataset(config.data)
    assert noted["trained_on"] == "digits"
    assert noted["development_fingerprint"] == dataset.development_fingerprint
    assert noted["test_fingerprint"] == dataset.test_fingerprint
    assert (noted["num_shared_images"], noted["workers"], noted["device"]) == (0, 1, "cpu")
    assert TrialConfig.model_validate(noted["config"]) == config
    assert noted["family"] == config.family
    json.dumps(noted)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_found_by_its_section(name: str) -> None:
    assert task_of(given(name)) is TASKS[name]
    assert TASKS[name].name == name


@pytest.mark.parametrize("name", TASKS)
def test_a_trainer_keeps_its_protocol(name: str) -> None:
    task, config = TASKS[name], given(name)
    folds = task.folds(config)
    assert len(folds) == config.num_folds
    held_out = np.concatenate([fold.validation_indices for fold in folds])
    assert len(set(held_out.tolist())) == len(held_out)
    share = Share(1, folds[0].train_indices, folds[0].validation_indices)
    device = torch.device("cpu")
    trained, fresh = (task.fit(config, share, device) for _ in range(2))
    assert trained.score() == fresh.score(), "equal trainers begin alike"
    trained.train_epoch(0)
    state = {key: value.clone() for key, value in trained.state().items()}
    assert not any(key.startswith("fold_") for key in state), "kept for the outputs of fold models"
    fresh.restore(state | {"fold_embeddings.0": torch.zeros(1)}, 1)
    assert fresh.state().keys() == state.keys()
    for trainer in (trained, fresh):
        trainer.train_epoch(1)
    assert digits(fresh.score()) == digits(trained.score())
    other = TrialConfig.model_validate(TRIALS[name] | {"training": {"epochs": 0}})
    assert task.fit(other, share, device).train_epoch(0) == {}
    with pytest.raises((ValueError, KeyError)):
        fresh.restore({key: value for key, value in state.items() if key != min(state)}, 1)


@pytest.mark.parametrize("name", TASKS)
def test_every_metric_that_a_task_names_is_measured(name: str) -> None:
    further: dict[str, Any] = {
        "embedding": {"map_at": [10], "full_map": True, "macro": True},
        "hashing": {"map_at": [10, 100]},
        "online": {"online": {"num_seeds": 100, "num_implied": 0, "num_pairs": 50, "measure_recall": True}},
    }[name]
    config = TrialConfig.model_validate(TRIALS[name] | further | {"training": {"epochs": 1}, "num_folds": 1})
    TASKS[name].check(config, "families.a")
    result = run_trial(config, lambda report: None)
    assert set(TASKS[name].metrics(config)) <= result.metrics.keys()


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "embedding": ({"training": {"epochs": 2, "lr": 1e-5}}, {"embedder": {"dim": 16, "width": 4}}),
    "hashing": ({"training": {"epochs": 2, "lr": 1e-5}}, {"hashing": {"num_bits": 32}}),
    "online": (
        {"loss": {"name": "oahu", "params": SMALL | {"eta": 0.02}}},
        {"loss": {"name": "oahu", "params": SMALL | {"size": 7}}},
    ),
}
"""Of each task a change of how it is trained, and one of what is trained."""


@pytest.mark.parametrize("name", TASKS)
def test_an_untrained_model_is_told_from_others_by_a_trial_and_by_its_run(name: str) -> None:
    task, one = TASKS[name], given(name)
    trained_otherwise, another = (
        TrialConfig.model_validate(TRIALS[name] | change) for change in CHANGES[name]
    )
    assert untrained_key(one) == untrained_key(trained_otherwise) != untrained_key(another)
    runs = [
        {key: str(value) for key, value in task.logged_params(config).items()}
        for config in (one, trained_otherwise, another)
    ]
    assert all(task_of_params(run) is task for run in runs)
    first, same, other = (task.untrained_key(run) for run in runs)
    assert first == same != other
    assert task.is_of_untrained("loss") == (name != "embedding")
    if task.size_param is not None:
        assert task.size(runs[0]) == task.size(task.logged_params(one)) != task.size(runs[2])


def test_tasks_differ_in_what_they_are_called_by() -> None:
    for names in zip(
        *((task.name, task.noun, task.product, task.limits) for task in TASKS.values()), strict=True
    ):
        assert len(set(names)) == len(TASKS)
    for task in TASKS.values():
        assert set(task.sections) <= SECTIONS.keys()
        assert task.section is None or task.section in task.sections
        assert set(task.unmeasured) <= ProtocolConfig.model_fields.keys()


def test_what_one_process_learns_is_refused_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for name, task in TASKS.items():
        if not task.is_distributed:
            with pytest.raises(
                ValueError, match=rf"resources\.workers: one process trains {task.noun}, not 2; set 1"
            ):
                run_trial(given(name), lambda report: None)


def test_a_study_file_is_read_without_what_computes() -> None:
    """Though it asks the tasks: the command line answers before torch is there."""
    ask = "import sys, dmlstudy.spec.study_file; print(*{'numpy', 'torch', 'scipy', 'pyarrow'} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    assert told.stdout.split() == []


def test_the_data_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for loader in ("load", "load_closed"):
        whole = getattr(data, loader)
        monkeypatch.setattr(
            data, loader, lambda *a, whole=whole, **n: read.append(n["name"]) or whole(*a, **n)
        )
    for name in TASKS:
        dataset_cache.forget()
        read.clear()
        run_trial(given(name), lambda report: None)
        assert len(read) <= 1, name
