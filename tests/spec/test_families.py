"""Every family that comes with the package trains on real data, from its file to a score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlstudy import bundled, data
from dmlstudy.records import TrialReport
from dmlstudy.spec import study_file as specs
from dmlstudy.studies import checks
from dmlstudy.training.tasks import OWN_SECTIONS
from dmlstudy.training.trial import run_trial


def study(families: dict[str, Any]) -> specs.StudySpec:
    return specs.parse(
        {
            "name": "families",
            "data": {"name": "digits"},
            "embedder": {"dim": 8, "width": 4},
            "batch": {"classes": "all", "images_per_class": 6, "per_epoch": 4},
            "training": {"epochs": 2, "lr": 1.0e-3},
            "families": families,
            "protocol": {"num_folds": 1},
        }
    )


def reports_of(spec: specs.StudySpec, family: str) -> list[TrialReport]:
    config = spec.trial_config(spec.families[family], specs.default_values(spec.families[family]))
    reports: list[TrialReport] = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_trial(config, reports.append)
    finally:
        torch.set_num_threads(before)
    return reports


STUDIES = sorted((bundled.folder("search_spaces") / "studies").glob("*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=[file.stem for file in STUDIES])
def test_every_study_that_comes_along_is_sound_but_for_its_data(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_data(**settings: object) -> None:
        raise ValueError(f"no data {settings['name']}")

    monkeypatch.setattr(data, "load", no_data)
    monkeypatch.setattr(data, "load_closed", no_data)
    spec = specs.load(file)
    assert spec.name == file.stem.replace("_", "-")
    with pytest.raises(specs.SpecError, match=f"^no data {spec.file.data.name}$"):
        checks.check_parts(spec)


OF_KIND = {
    kind: {name for name, file in specs.family_files().items() if file.parent.name == kind}
    for kind in OWN_SECTIONS
}


@pytest.mark.parametrize("name", sorted(OF_KIND["hashing"]))
def test_every_family_of_codes_trains_at_its_defaults(name: str) -> None:
    spec = specs.parse(
        {
            "name": "codes",
            "data": {"name": "digits"},
            "training": {"epochs": 2},
            "hashing": {"num_train": 300, "num_queries": 20},
            "families": {name: {"space": name}},
            "protocol": {"num_folds": 1, "objective": "map"},
            "resources": {"workers": 1},
        }
    )
    reports = reports_of(spec, name)
    assert len(reports) == 2
    for report in reports:
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert 0 < report.metrics["map"] <= 1
        assert (report.metrics["ranking_loss"] > 0) == name.startswith("nasa_")


@pytest.mark.parametrize("name", sorted(OF_KIND["online"]))
def test_every_online_family_trains_at_its_defaults(name: str) -> None:
    spec = specs.parse(
        {
            "name": "streams",
            "data": {"name": "digits"},
            "training": {"epochs": 2},
            "online": {"num_seeds": 200, "num_implied": 50},
            "families": {name: {"space": name}},
            "protocol": {"num_folds": 1, "objective": "accuracy"},
            "resources": {"workers": 1},
        }
    )
    reports = reports_of(spec, name)
    assert len(reports) == 2
    for report in reports:
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert 0.3 < report.metrics["accuracy"] <= 1


@pytest.mark.parametrize("name", sorted(specs.family_files().keys() - OF_KIND["hashing"] - OF_KIND["online"]))
def test_every_family_trains_at_its_defaults(name: str) -> None:
    reports = reports_of(study({name: {"space": name}}), name)
    assert len(reports) == 2
    for report in reports:
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert report.metrics["train_loss"] != 0
        assert 0 < report.metrics["map_at_r"] <= 1


@pytest.mark.parametrize(
    "override",
    [
        {"loss.name": "multi_similarity"},
        {"regularizer.term": "gc", "regularizer.sigma_mode": "median", "regularizer.draw": "two_draws"},
        {"regularizer": {"name": "structure", "preset": "paper"}},
        {"regularizer": {"name": "distance_levels", "weight": 0.1}},
        {"batch.memory_size": 64, "loss.name": "multi_similarity"},
    ],
    ids=lambda override: "+".join(override),
)
def test_a_regularizer_or_a_memory_goes_with_another_loss(override: dict[str, Any]) -> None:
    spec = study({"mixed": {"space": "graph_consistency", "override": override}})
    for report in reports_of(spec, "mixed"):
        assert math.isfinite(report.metrics["train_loss"])


def test_a_loss_of_the_library_is_searched_by_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "sup_con.yaml"
    file.write_text(
        "paper: pytorch-metric-learning\n"
        "loss: {name: 'pml:SupConLoss', temperature: {float: [0.01, 1.0], log: true, default: 0.1}}\n"
    )
    spec = study({"sup-con": {"space": str(file)}})
    for report in reports_of(spec, "sup-con"):
        assert report.metrics["train_loss"] > 0
