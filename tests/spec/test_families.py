"""Every family that comes with the package trains on real data, from its file to a score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlstudy import bundled, data, embedders
from dmlstudy.records import TrialConfig, TrialReport
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


def configs_of(name: str) -> dict[str, TrialConfig]:
    """Each family's default trial of a study that comes along."""
    spec = specs.load(bundled.folder("search_spaces") / "studies" / f"{name}.yaml")
    return {key: spec.trial_config(each, specs.default_values(each)) for key, each in spec.families.items()}


def test_fusion_is_compared_at_equal_pooling_and_as_many_parameters() -> None:
    found = configs_of("omniglot_fusion")
    num_parameters = {}
    for name, config in found.items():
        own = config.embedder
        built = embedders.build(
            own.backbone,
            own.size,
            width=own.width,
            fusion=own.fusion,
            pooling=own.pooling,
            in_channels=1,
            image_size=28,
            seed=0,
        )
        num_parameters[name] = sum(parameter.numel() for parameter in built.parameters())
    rival = num_parameters["last-stage-averaged-168"]
    for fused in ("fused-features", "fused-heads-each"):
        assert num_parameters[fused] == pytest.approx(rival, rel=0.005)
    assert {config.embedder.pooling for name, config in found.items() if "averaged" in name} == {"avg"}
    assert found["fused-heads-each"].embedder.size == 3 * found["last-stage-averaged"].embedder.dim


def test_graph_consistency_has_the_papers_lambda_scale_and_draws() -> None:
    found = configs_of("omniglot_graph_consistency")
    terms = {name: config.regularizer for name, config in found.items() if config.regularizer}
    for name, term in terms.items():
        assert term.params["weight"] == (1e-3 if name.startswith("triplet") else 2e-3)
        draws = {config.batch.draw for config in (found[name], found[name.removesuffix("-gc")])}
        assert draws == {"two_draws" if "two-draws" in name else "pk"}
        assert term.params["draw"] == ("two_draws" if "two-draws" in name else "split")
    assert {found[name].loss.params["scale"] for name in found if name.startswith("n-pair")} == {100.0}


def test_structure_heads_are_searched_around_the_authors_rate() -> None:
    authors = 5e-5
    for name, config in configs_of("omniglot_nasa").items():
        multiple = config.training.structure_lr_mult
        assert (multiple is not None) == ("nasa" in name)
        if multiple is not None:
            assert config.training.lr * multiple == pytest.approx(authors)
    spec = study({"nasa": {"space": "structure"}})
    values = specs.default_values(spec.families["nasa"])
    assert values["training.structure_lr_mult"] == 1.0
