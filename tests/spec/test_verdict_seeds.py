"""``protocol.verdict_seeds`` in both forms, the keys beside it, and what they leave as it was."""

from __future__ import annotations

from typing import Any

import pytest

from dmlstudy.records import SeedRange
from dmlstudy.spec import study_file
from dmlstudy.spec.options import options
from dmlstudy.spec.study_file import ProtocolConfig, SpecError, StudySpec
from dmlstudy.studies import checks


def study(**protocol: Any) -> StudySpec:
    return study_file.parse(
        {
            "name": "s",
            "data": {"name": "digits"},
            "batch": {"classes": "all", "images_per_class": 4},
            "families": {"red": {"space": "contrastive"}, "blue": {"space": "triplet"}},
            "protocol": protocol,
        }
    )


STEPS = {"from": 3, "to": 10}


def test_a_fixed_number_is_as_it_was() -> None:
    found = study(verdict_seeds=7)
    assert found.file.protocol.verdict_seeds == found.file.protocol.most_seeds == 7
    assert found.file.protocol.pairs == "all"
    written = found.file.protocol.model_dump(mode="json")
    assert written["verdict_seeds"] == 7
    assert not written.keys() & {"decide_on", "give_up", "compare"}
    assert study().fingerprint() == study(verdict_seeds=5).fingerprint()
    assert len(found.digest()) == 64
    assert found.digest().startswith(found.fingerprint())


def test_seeds_in_steps() -> None:
    found = study(verdict_seeds=STEPS)
    seeds = found.file.protocol.verdict_seeds
    assert isinstance(seeds, SeedRange)
    assert (seeds.fewest, seeds.most, str(seeds)) == (3, 10, "3 to 10")
    assert found.file.protocol.pairs == "winner"
    assert study(verdict_seeds=STEPS, compare="all").file.protocol.pairs == "all"
    assert found.num_verdict_trials == 10 * (2 + 1)
    others = [{"to": 12}, {"from": 4}]
    prints = {study(verdict_seeds={**STEPS, **each}).fingerprint() for each in others}
    assert len({found.fingerprint(), *prints}) == 3


def test_pairs_that_are_named() -> None:
    named = study(compare=[["blue", "red"]])
    assert named.file.protocol.pairs == (("blue", "red"),)
    assert study(verdict_seeds=STEPS, compare=[["blue", "red"]]).file.protocol.pairs == (("blue", "red"),)
    turned = study(compare=[["red", "blue"]])
    assert len({named.fingerprint(), turned.fingerprint(), study().fingerprint()}) == 3


def test_more_pairs_than_can_be_kept_are_refused() -> None:
    names = [f"family-{number:02d}-with-a-name-that-is-long" for number in range(12)]
    families = {name: {"space": "triplet"} for name in names}
    pairs = [[a, b] for place, a in enumerate(names) for b in names[place + 1 :]]
    raw = {**study().raw, "families": families}
    study_file.parse({**raw, "protocol": {**raw["protocol"], "compare": pairs[:40]}})
    with pytest.raises(
        SpecError, match=r"protocol.compare: 66 pairs of 5017 characters, and 4000 can be kept"
    ):
        study_file.parse({**raw, "protocol": {**raw["protocol"], "compare": pairs}})


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ({"verdict_seeds": {"from": 3}}, "protocol.verdict_seeds.to: is missing; add it"),
        (
            {"verdict_seeds": {"from": 3, "too": 9}},
            "protocol.verdict_seeds.too: unknown key; did you mean 'to'?",
        ),
        ({"verdict_seeds": {"from": 9, "to": 4}}, "protocol.verdict_seeds: 'from' must be less than 'to'"),
        ({"verdict_seeds": {"from": 5, "to": 5}}, "protocol.verdict_seeds: 'from' must be less than 'to'"),
        (
            {"verdict_seeds": {"from": 1, "to": 4}},
            "protocol.verdict_seeds.from: input should be greater than",
        ),
        ({"verdict_seeds": {"from": 3, "to": 1000}}, "protocol.verdict_seeds.to: input should be less than"),
        ({"verdict_seeds": [3, 10]}, "protocol.verdict_seeds: input should be a valid integer"),
        (
            {"decide_on": "these_classes"},
            "protocol.decide_on: these_classes is read only where seeds are added",
        ),
        ({"give_up": 0.2}, "protocol.give_up: 0.2 is read only where seeds are added"),
        ({"verdict_seeds": STEPS, "give_up": 1.0}, "protocol.give_up: input should be less than 1"),
        ({"verdict_seeds": STEPS, "decide_on": "others"}, "protocol.decide_on: input should be"),
        ({"compare": "some"}, "protocol.compare: input should be"),
        ({"compare": []}, "protocol.compare: needs at least one, got []"),
        ({"compare": ["red"]}, "protocol.compare.0: input should be a valid tuple, got 'red'"),
        ({"compare": [["red"]]}, "protocol.compare.0.1: is missing; add it"),
        (
            {"compare": [["red", "blu"]]},
            "protocol.compare: [red, blu]: no family blu; did you mean 'blue'?",
        ),
        (
            {"compare": [["blue", "blue"]]},
            "protocol.compare: [blue, blue] is a family with itself; name two, or leave the pair out",
        ),
        (
            {"compare": [["red", "blue"], ["blue", "red"]]},
            "protocol.compare: [blue, red] stands there twice; leave one out",
        ),
    ],
)
def test_what_is_refused_and_how(protocol: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        study(**protocol)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_population_of_which_nothing_can_be_said_is_refused_before_anything_is_trained() -> None:
    asked = {"verdict_seeds": STEPS, "num_folds": 1}
    checks.check_parts(study(**asked, decide_on="classes_like_these"))  # digits: five test classes
    found = study_file.parse(
        {
            **study(**asked, decide_on="classes_like_these", objective="macro_f1").raw,
            "data": {"name": "kmnist"},
        }
    )
    dataset = checks.check_parts(study(**asked))
    with pytest.raises(SpecError, match="classes_like_these cannot be decided on, for macro_f1 is no mean"):
        checks.pilots.check_population(found, dataset)


def test_the_keys_are_among_the_options() -> None:
    found = {option.key: option for option in options("protocol")}
    assert "{from: 3, to: 10}" in found["protocol.verdict_seeds"].description
    assert found["protocol.verdict_seeds"].default == "5"
    assert found["protocol.give_up"].default == "0.1"
    assert found["protocol.compare"].values == "winner | all or list of: [text, text]"
    assert "[[a, b], [a, c]]" in found["protocol.compare"].description
    assert ProtocolConfig().decide_on is None
