"""Keys of earlier versions: read under their present names, with one line that says so; fingerprints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlstudy.records import TrialConfig
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec

UNDER = {4: {}, 5: {"sampler": {"choice": ["pk", "random"]}}}
CONSISTENT = {"regularizer.draw": "two_draws", "batch.images_per_class": 4}
EARLIER: dict[str, Any] = {
    "name": "earlier",
    "data": {"name": "digits"},
    "embedder": {"dim": 8},
    "batch": {"images_per_class": {"choice": UNDER}},
    "families": {
        "a": {"space": "triplet"},
        "b": {"space": "margin", "override": {"batch.sampler@5": "random"}},
        "c": {"space": "graph_consistency", "override": CONSISTENT},
    },
}
"""A study as it could be written before batch.sampler was called batch.draw."""

OF_BEFORE = "b9fc1043a818ef59", ("75c8f77f968ebd65", "aaa4ab8c434ba1c8", "61c0fd915790e04e")
"""Its fingerprint then, and that of each family's last corner."""


def fingerprints(study: StudySpec) -> tuple[str, tuple[str, ...]]:
    last = {name: study.corners(family)[-1] for name, family in study.families.items()}
    configs = [study.trial_config(family, last[name]) for name, family in study.families.items()]
    return study.fingerprint(), tuple(config.fingerprint() for config in configs)


def small(**changes: Any) -> dict[str, Any]:
    return {"name": "s", "data": {"name": "digits"}, "families": {"a": {"space": "triplet"}}, **changes}


def overriding(**override: Any) -> dict[str, Any]:
    return small(families={"a": {"space": "triplet", "override": override}})


@pytest.mark.parametrize("key", ["sampler", "draw"])
def test_fingerprints_and_stored_points_are_those_of_before(key: str) -> None:
    raw = yaml.safe_load(yaml.safe_dump(EARLIER, sort_keys=False).replace("sampler", key))
    found = study_file.as_begun(study_file.parse(raw), OF_BEFORE[0])
    assert fingerprints(found) == OF_BEFORE
    corners = found.families["a"].corners()
    assert any("a/batch.sampler" in point for point in corners)  # so Optuna's storage knows it
    assert not any("a/batch.draw" in point for point in corners)
    assert len(found.notes) == (key == "sampler")


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (small(batch={"sampler": "random"}), "batch.sampler"),
        (overriding(**{"batch.sampler": "random"}), "families.a.override.batch.sampler"),
        (small(batch={"sampler": {"choice": ["random", "pk"]}}), "batch.sampler"),
    ],
)
def test_an_earlier_key_is_read_with_one_line(raw: dict[str, Any], place: str) -> None:
    found = study_file.given(raw)
    family = found.families["a"]
    assert found.trial_config(family, study_file.default_values(family)).batch.draw == "random"
    assert found.notes == [f"{place}: this key is called batch.draw now and is read as that; rename it"]
    assert study_file.given(found.raw).notes == []  # what is kept of a new study has the present names


def test_several_earlier_keys_are_one_line() -> None:
    raw = small(batch={"sampler": "pk"}) | {
        "families": {name: {"space": "triplet", "override": {"batch.sampler": "pk"}} for name in "ab"}
    }
    (line,) = study_file.parse(raw).notes
    assert line.endswith("rename it (one of 3 such keys)")


def test_an_earlier_key_of_a_search_space_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("loss: {name: triplet}\nbatch: {sampler: {choice: [pk, random], default: random}}\n")
    found = study_file.given(small(families={"a": {"space": str(file)}}))
    family = found.families["a"]
    assert found.trial_config(family, study_file.default_values(family)).batch.draw == "random"
    assert family.tree()[-1] == "batch.draw in {pk, random}, default random"
    assert found.notes[0].startswith("own.yaml: batch.sampler: this key is called batch.draw now")


@pytest.mark.parametrize("before", [{}, {"batch": {"draw": "pk"}}, {"batch": {"sampler": "pk"}}])
@pytest.mark.parametrize(
    "assignments",
    [["batch.sampler=random"], {"batch.sampler": "random"}, ["families.a.override.batch.sampler=random"]],
)
def test_an_assignment_to_an_earlier_key_replaces_the_value(before: dict[str, Any], assignments: Any) -> None:
    found = study_file.given(small(**before), None, assignments)
    family = found.families["a"]
    assert found.trial_config(family, study_file.default_values(family)).batch.draw == "random"
    (line,) = found.notes
    assert "batch.sampler: this key is called batch.draw now and is read as that" in line


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (small(batch={"sampler": "pk", "draw": "pk"}), "batch.sampler: stands there beside batch.draw, its name now"),
        (
            overriding(**{"batch.draw": "pk", "batch.sampler": "pk"}),
            "families.a.override.batch.sampler: stands there beside batch.draw, its name now; leave it out",
        ),
        (
            small(batch={"classes": {"choice": {4: {"sampler": "pk", "draw": "pk"}}}}),
            "batch.sampler: stands there beside batch.draw",
        ),
        (small(batch={"sampler": "grid"}), "families.a.batch.draw: input should be 'pk', 'two_draws' or 'random'"),
        (small(batch={"sampl": "pk"}), "batch.sampl: unknown key"),
        (small(batch=3), "batch: "),
        (small(families={"a": {"space": "triplet", "override": 3}}), "families.a.override: "),
    ],
)  # fmt: skip
def test_mistakes_are_refused_in_one_line(raw: dict[str, Any], message: str) -> None:
    for read in (study_file.parse, study_file.given):
        with pytest.raises(SpecError) as caught:
            read(raw)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_a_search_space_with_both_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("loss: {name: triplet}\nbatch: {sampler: pk, draw: pk}\n")
    with pytest.raises(SpecError, match=r"^own\.yaml: batch\.sampler: stands there beside batch\.draw"):
        study_file.parse(small(families={"a": {"space": str(file)}}))


def test_a_configuration_that_an_earlier_version_left_is_read() -> None:
    found = study_file.parse(small(batch={"draw": "random"}))
    family = found.families["a"]
    config = found.trial_config(family, study_file.default_values(family))
    values = config.model_dump(mode="json")
    assert values["batch"]["draw"] == "random"
    values["batch"]["sampler"] = values["batch"].pop("draw")
    assert TrialConfig.model_validate(values) == config
    with pytest.raises(ValueError, match="sampler"):
        TrialConfig.model_validate({**values, "batch": {"sampler": "pk", "draw": "pk"}})


@pytest.mark.parametrize("of_then", [{"sampler": "tpe"}, {"sampler": "tpe", "scheduler": "halving"}])
def test_a_study_keeps_the_defaults_it_began_with(of_then: dict[str, str]) -> None:
    begun = study_file.parse(small(search={**of_then, "seed": 3}))
    for named in ({}, *({key: of_then[key]} for key in of_then)):
        again = study_file.as_begun(study_file.parse(small(search={"seed": 3, **named})), begun.fingerprint())
        assert again.file.search == begun.file.search
        assert again.fingerprint() == begun.fingerprint()
    today = study_file.parse(small()).file.search
    assert (today.sampler, today.scheduler) == ("gp", "asha")
    other = study_file.parse(small(search={"scheduler": "median", "seed": 3}))
    assert study_file.as_begun(other, begun.fingerprint()) is other
    new = study_file.parse(small())
    assert study_file.as_begun(new, new.fingerprint()) is new
