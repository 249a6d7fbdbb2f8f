"""The sampler that ``auto`` stands for: told, and the same study as with its name."""

from __future__ import annotations

from typing import Any

import pytest

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import StudySpec


def study(sampler: str, **search: Any) -> StudySpec:
    return study_file.parse(
        {
            "name": "small",
            "data": {"name": "digits"},
            "batch": {"classes": "all", "images_per_class": 4},
            "families": {name: {"space": name} for name in ("contrastive", "margin")},
            "search": search if sampler == "default" else {"sampler": sampler, **search},
        }
    )


@pytest.mark.parametrize(
    ("search", "sampler", "why"),
    [
        ({}, "gp", "18 of 19 trials are drawn by the scores of others"),
        ({"generation_size": 14}, "gp", "5 of 19 trials are drawn by the scores of others"),
        ({"generation_size": 15}, "qmc", "15 of 19 trials are drawn before any has a score"),
        (
            {"trials_per_family": 160, "generation_size": 80},
            "qmc",
            "80 of 160 trials are drawn before any has a score",
        ),
        ({"generation_size": 64}, "qmc", "19 of 19 trials are drawn before any has a score"),
        ({"trials_per_family": 150}, "gp", "149 of 150 trials are drawn by the scores of others"),
        (
            {"trials_per_family": 151},
            "tpe",
            "150 of 151 trials are drawn by the scores of others, and gp would be slow with so many",
        ),
        ({"trials_per_family": 1}, "tpe", "there is one trial, the default"),
        (
            {"deterministic": False},
            "gp",
            "trials are drawn by the scores there are by then; where 15 or more run at once, set qmc",
        ),
        ({"families": "adaptive", "generation_size": 19}, "tpe", "families are adaptive"),
        (
            {"second_objective": "embedding_dim", "scheduler": "none"},
            "nsga2",
            "there is a second objective",
        ),
    ],
)
def test_auto_is_a_sampler_for_the_budget(search: dict[str, Any], sampler: str, why: str) -> None:
    found = study("auto", **search)
    assert found.file.search.sampler == sampler
    assert found.sampler_in_words == f"{sampler}, as {why}"
    assert study("default", **search).fingerprint() == found.fingerprint()
    named = study(sampler, **search)
    assert found.fingerprint() == named.fingerprint()
    assert named.sampler_in_words == sampler
