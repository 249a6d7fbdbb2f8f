"""Families that are like others: what they share, what is refused, and what a study without them keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec, given

LR: dict[str, Any] = {"float": [1e-5, 1e-3], "log": True, "default": 1e-4}
ONE_LOSS = """
paper: two losses
loss:
  name:
    choice:
      triplet: {margin: {float: [0.1, 0.5], default: 0.2}, mining: semi_hard}
      contrastive: {negative_margin: {float: [0.5, 1.4], default: 0.8}, positive_margin: 0.0}
      multi_similarity_distance: {margin: {float: [0.6, 1.4], default: 1.0}}
    default: triplet
"""


def study(search: dict[str, Any] | None = None, **families: dict[str, Any]) -> StudySpec:
    return given(
        {
            "name": "paired",
            "data": {"name": "digits"},
            "training": {"epochs": 1, "lr": LR},
            "families": {name: {"space": "pair_weighting"} | entry for name, entry in families.items()},
            "search": {"trials_per_family": 4} | (search or {}),
        }
    )


def shared(found: StudySpec, name: str) -> dict[str, str]:
    return {
        mine.partition("/")[2]: " or ".join(each.partition("/")[2] for each in theirs)
        for mine, theirs in found.likenesses[name].shared.items()
    }


def own(found: StudySpec, name: str) -> list[str]:
    return [each.partition("/")[2] for each in found.likenesses[name].own]


def test_parameters_of_one_name_are_shared_and_a_switch_is_not() -> None:
    found = study(a={}, b={"like": "a", "override": {"loss.normalize": "none"}})
    names = set(shared(found, "b"))
    assert {"training.lr", "loss.p", "loss.beta", "batch.classes", "loss.negative_margin"} <= names
    assert "loss.normalize" not in names
    assert own(found, "b") == []
    assert all(mine == theirs for mine, theirs in shared(found, "b").items())
    lines = found.tree("b")[-3:]
    assert lines[0].startswith(
        "like a: takes its points, trial by trial: training.lr, training.head_lr_mult,"
    )
    assert lines[1:] == [
        "    searches nothing of its own",
        "    differs: loss.normalize none; a: in {anchor, none}, default anchor",
    ]
    assert found.tree("a") == found.families["a"].tree()
    twice = study(a={}, b={"like": "a"})
    assert twice.tree("b")[-1] == "    differs in nothing from a"


def test_an_option_that_is_fixed_is_the_option_that_is_chosen() -> None:
    found = study(
        a={},
        power={"like": "a", "override": {"loss.weighting": "power"}},
        back={"like": "power"},
    )
    assert shared(found, "power")["loss.p"] == "loss.p"
    assert "loss.weighting" not in shared(found, "power")
    assert own(found, "power") == []
    assert own(found, "back") == ["loss.weighting", "loss.alpha", "loss.beta"]


def test_a_name_of_an_option_is_that_of_the_family_that_has_it_fixed(tmp_path: Path) -> None:
    (tmp_path / "losses.yaml").write_text(ONE_LOSS)
    space = {"space": str(tmp_path / "losses.yaml")}
    found = study(
        any=space,
        triplet=space | {"like": "any", "override": {"loss.name": "triplet"}},
        other=space | {"like": "any", "override": {"loss.name": "multi_similarity_distance"}},
        back=space | {"like": "triplet"},
    )
    assert shared(found, "triplet")["loss.margin"] == "loss.margin@triplet"
    assert shared(found, "other")["loss.margin"] == "loss.margin@multi_similarity_distance"
    assert shared(found, "back")["loss.margin@triplet"] == "loss.margin"
    assert "loss.margin@multi_similarity_distance" in own(found, "back")
    point = found.families["any"].default_point() | {"any/training.lr": 2e-4}
    given_values = found.likenesses["triplet"].given(point)
    assert given_values["triplet/loss.margin"] == 0.2
    assert given_values["triplet/training.lr"] == 2e-4
    assert "other/loss.margin" not in found.likenesses["other"].given(point)


def test_the_number_of_trials() -> None:
    switched = {"like": "a", "override": {"loss.normalize": "none"}}
    alone, paired = study(a={}, b={}), study(a={}, b=switched)
    assert alone.num_search_trials == paired.num_search_trials == 8
    found = study(a={}, b=switched | {"fix": "best"})
    assert [found.num_trials_of(name) for name in "ab"] == [4, 1]
    assert found.num_search_trials == 5
    assert found.search_in_words() == "1 families x 4, and 1 x 1"
    assert alone.search_in_words(" trials") == "2 families x 4 trials"
    assert "like a: takes its best configuration: " in "\n".join(found.tree("b"))


WIDER = {"float": [1e-6, 1e-2], "log": True, "default": 1e-4}


@pytest.mark.parametrize(
    ("families", "search", "fault"),
    [
        ({"b": {"like": "c"}}, {}, "families.b.like: no family 'c' in this study; known are: a, b"),
        (
            {"b": {"like": "b"}},
            {},
            "families.b.like: b: it is in turn like b, or like one that is; one family must be searched by itself:"
            " leave its like out",
        ),
        (
            {"b": {"like": "c"}, "c": {"like": "b"}},
            {},
            "families.b.like: c: it is in turn like b, or like one that is; one family must be searched by itself:"
            " leave its like out",
        ),
        (
            {"b": {"fix": "best"}},
            {},
            "families.b.fix: best: says which points of another family are taken; name it by like",
        ),
        ({"b": {"like": "a", "fix": "worst"}}, {}, "families.b.fix: input should be 'best', got 'worst'"),
        (
            {"b": {"like": "a"}},
            {"families": "adaptive"},
            "families.b.like: a: with search.families: adaptive families have no trials of their own that another could"
            " take the points of; set search.families: equal",
        ),
        (
            {"b": {"like": "a", "fix": "best"}},
            {"wall_time": "2h"},
            "families.b.fix: best: begins when a's search has ended, for which search.wall_time may leave no time;"
            " leave it out, search.trials_per_family is the budget",
        ),
        (
            {"a": {"override": {"training.lr": WIDER}}, "b": {"like": "a"}},
            {},
            "families.b.like: training.lr of a is in [1e-06, 0.01], log, default 0.0001, which b's, in [1e-05, 0.001],"
            " log, default 0.0001, does not hold; give both the same domain",
        ),
        (
            {"b": {"like": "a", "override": {"loss.normalize": {"choice": ["anchor"]}}}},
            {},
            "families.b.like: loss.normalize of a is in {anchor, none}, default anchor, which b's, in {anchor}, default"
            " anchor, does not hold; give both the same domain",
        ),
        (
            {"b": {"like": "a", "override": {"batch.classes": {"int": [8, 64], "step": 2, "default": 16}}}},
            {},
            "families.b.like: batch.classes of a is in {8..64}, default 16, which b's, in {8..64}, step 2, default 16,"
            " does not hold; give both the same domain",
        ),
    ],
)
def test_what_cannot_be_paired_is_refused(
    families: dict[str, Any], search: dict[str, Any], fault: str
) -> None:
    with pytest.raises(SpecError) as refused:
        study(search, **({"a": {}} | families))
    assert str(refused.value) == fault


@pytest.mark.parametrize(
    ("leaders", "followers"),
    [
        (LR, WIDER),
        ({"choice": [1e-5, 1e-3]}, LR),
        (LR | {"log": False}, LR),
    ],
)
def test_a_wider_domain_takes_the_values_of_a_narrower_one(leaders: Any, followers: Any) -> None:
    found = study(
        a={"override": {"training.lr": leaders}},
        b={"like": "a", "override": {"training.lr": followers}},
    )
    assert "training.lr" in shared(found, "b")


@pytest.mark.parametrize(
    ("leaders", "followers"),
    [
        ({"int": [8, 16], "step": 4}, {"choice": [8, 12, 16, 20]}),
        ({"int": [8, 16], "step": 4}, {"int": [6, 20], "step": 2}),
        ({"choice": [8, 10]}, {"int": [8, 16], "step": 2}),
    ],
)
def test_integers_are_taken_where_the_steps_fit(leaders: Any, followers: Any) -> None:
    found = study(
        a={"override": {"batch.classes": leaders}},
        b={"like": "a", "override": {"batch.classes": followers}},
    )
    assert "batch.classes" in shared(found, "b")


def test_a_study_without_pairs_keeps_its_fingerprint() -> None:
    alone = study(a={}, b={})
    assert "like" not in alone.file.model_dump()["families"]["a"]
    assert study_file.as_begun(alone, "ecdd79410e65091a").fingerprint() == "ecdd79410e65091a"
    assert study(a={}, b={"like": "a"}).fingerprint() != alone.fingerprint()
    assert study(a={}, b={"like": "a", "fix": "best"}).fingerprint() not in (
        alone.fingerprint(),
        study(a={}, b={"like": "a"}).fingerprint(),
    )
