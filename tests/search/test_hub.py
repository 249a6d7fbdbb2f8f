"""Samplers of OptunaHub from a folder: what they propose is tried, and what cannot be used is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from support.tune_simulator import Tune, by_number, in_memory, study

from dmlstudy.spec.study_file import SpecError, StudySpec

NEAR_BEST = '''
import optuna

class NearBest(optuna.samplers.BaseSampler):
    """Draws at random, and learning rates within a tenth of the best one's."""

    def __init__(self, seed=None):
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        drawn = self._random.sample_independent(study, trial, name, distribution)
        done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        known = [t for t in done if name in t.params]
        if not known or not name.endswith("lr"):
            return drawn
        best = max(known, key=lambda t: t.value).params[name]
        return min(distribution.high, max(distribution.low, best * (0.9 + 0.2 * (hash(drawn) % 100) / 100)))
'''
SEEDLESS = NEAR_BEST.replace("seed=None", "").replace("seed=seed", "seed=1")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    programs = {
        "near_best": NEAR_BEST,
        "seedless": SEEDLESS,
        "broken": "import a_package_that_is_not_there",
        "two": NEAR_BEST + NEAR_BEST.replace("NearBest", "Other"),
        "greedy": NEAR_BEST.replace("seed=None", "must, seed=None"),
        "empty": "",
    }
    for name, program in programs.items():
        folder = tmp_path / "package" / "samplers" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(program)
    return tmp_path / "package"


def by(registry: Path, sampler: str, **search: Any) -> StudySpec:
    own = {"sampler": sampler, "registry": str(registry), "trials_per_family": 8, "scheduler": "none"}
    return study(search=own | search)


def test_its_points_are_tried_and_a_study_repeats(registry: Path) -> None:
    spec = by(registry, "hub:samplers/near_best")
    unbroken = by_number(Tune(in_memory(spec)).run().search)
    storage = InMemoryStorage()
    Tune(in_memory(spec, storage=storage), at_once=2).run(17)
    resumed = Tune(in_memory(spec, storage=storage), at_once=3).run().search
    assert by_number(resumed) == unbroken
    assert (
        by_number(Tune(in_memory(study(search={"trials_per_family": 8, "scheduler": "none"}))).run().search)
        != unbroken
    )
    last = [trial for trial in resumed.study.trials if trial.user_attrs["family"] == "red"][-1]
    best = max(
        trial.params["red/training.lr"] for trial in resumed.study.trials if "red/training.lr" in trial.params
    )
    assert 0 < last.params["red/training.lr"] <= best


def test_a_study_goes_on_with_the_same_program_only(registry: Path) -> None:
    spec, storage = by(registry, "hub:samplers/near_best"), InMemoryStorage()
    Tune(in_memory(spec, storage=storage)).run(5)
    (registry / "samplers" / "near_best" / "helper.py").write_text("x = 1\n")
    with pytest.raises(
        SpecError, match="the program of hub:samplers/near_best has changed since the study began"
    ):
        in_memory(spec, storage=storage)


def test_of_several_samplers_one_is_named(registry: Path) -> None:
    with pytest.raises(SpecError, match=r"name one of its samplers as hub:PACKAGE:CLASS \(NearBest, Other\)"):
        in_memory(by(registry, "hub:samplers/two"))
    assert in_memory(by(registry, "hub:samplers/two:Other"))


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("hub:samplers/absent", "no package .*absent; search.registry names the folder that holds samplers/"),
        ("hub:samplers/broken", "cannot be imported .*a_package_that_is_not_there"),
        ("hub:samplers/empty", r"name one of its samplers .*\(none\)"),
        ("hub:samplers/greedy", "cannot be made with a seed alone"),
        ("hub:samplers/seedless", "takes no seed, so its studies would not repeat"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_said_in_a_line(registry: Path, sampler: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as raised:
        in_memory(by(registry, sampler))
    assert "\n" not in str(raised.value)


def test_a_relative_folder_lies_beside_the_study_file(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(registry.parent)
    spec = study(search={"sampler": "hub:samplers/near_best", "registry": "package", "trials_per_family": 2})
    monkeypatch.chdir("/")
    assert in_memory(spec)


def test_one_without_a_seed_is_taken_where_nothing_must_repeat(registry: Path) -> None:
    spec = by(registry, "hub:samplers/seedless", deterministic=False)
    assert len(Tune(in_memory(spec)).run().search.study.trials) == 16


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"sampler": "tpf"}, "no sampler 'tpf'.*tpe"),
        ({"sampler": "hub:../../etc"}, "no sampler 'hub:../../etc'"),
        ({"sampler": "hub:samplers/x"}, "needs search.registry, the folder that holds its package"),
        (
            {"sampler": "tpe", "registry": "/there"},
            "search.registry: is read with sampler: hub:PACKAGE alone",
        ),
    ],
)
def test_names_are_checked_before_anything_is_read(search: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        study(search=search)
