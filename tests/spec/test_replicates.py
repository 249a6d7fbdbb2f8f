"""A search that is done again is its study from other seeds, with the leading families alone."""

from __future__ import annotations

from typing import Any

import pytest

from dmlstudy.spec import study_file
from dmlstudy.spec.replicates import replicate
from dmlstudy.spec.study_file import SpecError
from dmlstudy.verdict.sequential import Plan


def study(**protocol: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "model_name": "shipped",
        "data": {"name": "digits"},
        "batch": {"classes": "all", "images_per_class": 4},
        "training": {"epochs": 2},
        "families": {name: {"space": name} for name in ("triplet", "margin", "contrastive")},
        "search": {"seed": 7},
        "protocol": {"num_folds": 2, "verdict_seeds": 4, "recall_at": [1], **protocol},
    }


def test_it_differs_in_seeds_and_families_alone() -> None:
    spec = study_file.parse(study(searches=3, search_seeds=3))
    again = replicate(spec, 3, ["contrastive", "triplet"])
    assert again.name == "small.search3"
    assert again.model_name == "small.search3-embedder"
    assert list(again.families) == ["triplet", "contrastive"]  # in the file's order
    assert again.file.search == spec.file.search.model_copy(update={"seed": 2007})
    own, there = spec.file.protocol, again.file.protocol
    changed = {name for name in type(own).model_fields if getattr(own, name) != getattr(there, name)}
    assert changed == {"verdict_seeds", "fold_models", "searches", "search_seeds", "replicate_of"}
    assert there.searches == 1
    for section in ("data", "batch", "training"):
        assert getattr(again.file, section) == getattr(spec.file, section)
    assert list(Plan.of(there).seeds) == [2001, 2002, 2003]
    assert list(Plan.of(own).seeds) == [1, 2, 3, 4]


def test_it_can_be_read_again_from_its_own_file() -> None:
    again = replicate(study_file.parse(study(searches=2)), 2, ["triplet", "margin"])
    assert study_file.parse(again.raw).fingerprint() == again.fingerprint()


def test_a_family_that_takes_anothers_points_brings_it_along() -> None:
    raw = study(searches=2)
    raw["families"]["flat"] = {"space": "triplet", "like": "triplet"}
    again = replicate(study_file.parse(raw), 2, ["flat", "margin"])
    assert list(again.families) == ["triplet", "margin", "flat"]


def test_seeds_in_steps_become_a_fixed_number() -> None:
    spec = study_file.parse(study(verdict_seeds={"from": 3, "to": 10}, give_up=0.2, searches=2))
    protocol = replicate(spec, 2, ["triplet", "margin"]).file.protocol
    assert protocol.verdict_seeds == 2
    assert protocol.give_up == 0.1


def test_the_largest_seed_wraps() -> None:
    raw = study(searches=2)
    raw["search"]["seed"] = 2**32 - 1
    assert replicate(study_file.parse(raw), 2, ["triplet", "margin"]).file.search.seed == 999


def test_a_study_of_one_search_has_its_earlier_fingerprint() -> None:
    plain = study_file.parse(study())
    assert study_file.parse(study(searches=1)).fingerprint() == plain.fingerprint()
    assert (
        not {"searches", "search_seeds", "search_leaders", "replicate_of"}
        & plain.file.protocol.model_dump().keys()
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"search": {"families": "adaptive"}}, r"protocol\.searches: 2 needs a search for each family"),
        ({"search": {"warm_start": "auto"}}, r"protocol\.searches: 2 stands beside search\.warm_start: auto"),
        ({"protocol": {"search_leaders": 4}}, r"protocol\.search_leaders: 4 of 3 families"),
        (
            {"protocol": {"search_seeds": 5}},
            r"protocol\.search_seeds: 5 is more than protocol\.verdict_seeds",
        ),
        ({"protocol": {"search_seeds": 1}}, r"protocol\.search_seeds"),
        ({"name": "n" * 60}, r"name: n+ is too long for protocol\.searches: 2.*shorten it by 4 characters"),
    ],
)
def test_what_cannot_be_done_again_is_one_line(changes: dict[str, Any], said: str) -> None:
    raw = study(searches=2)
    for section, values in changes.items():
        raw[section] = raw[section] | values if isinstance(values, dict) else values
    with pytest.raises(SpecError, match=said):
        study_file.parse(raw)
