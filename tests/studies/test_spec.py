"""Study files: the ready ones are sound, and whatever is wrong with one is said in one line with the mend."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmlstudy.losses import catalogue
from dmlstudy.records import Scalar
from dmlstudy.studies import checks, spec
from dmlstudy.studies.space import Choice, Fixed, Float, Int, Space
from dmlstudy.studies.spec import SpecError, StudySpec

DIGITS = spec.bundled.folder("search_spaces") / "studies" / "digits.yaml"
FAMILIES = spec.family_files()


def study(**changes: Any) -> dict[str, Any]:
    """A small sound study, changed at full names such as ``training.epochs``; None takes a key away."""
    raw: dict[str, Any] = {
        "name": "small",
        "data": {"name": "digits"},
        "embedder": {"dim": 8, "width": 4},
        "batch": {"classes": "all", "images_per_class": 4},
        "training": {"epochs": 2},
        "families": {"contrastive": {"space": "contrastive"}, "margin": {"space": "margin"}},
        "search": {"trials_per_family": 2},
        "protocol": {"num_folds": 2, "verdict_seeds": 1},
        "resources": {"workers": 1},
    }
    for full_name, value in changes.items():
        *sections, key = full_name.split("__")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            place.pop(key)
        else:
            place[key] = copy.deepcopy(value)
    return raw


def checked(raw: dict[str, Any]) -> StudySpec:
    found = spec.parse(raw)
    checks.check_parts(found)
    return found


def test_the_digits_study_is_sound() -> None:
    found = spec.load(DIGITS)
    dataset = checks.check_parts(found)
    assert dataset.name == "digits"
    assert found.name == "digits"
    assert found.num_search_trials == len(found.families) * found.file.search.trials_per_family
    assert found.num_verdict_trials == (len(found.families) + 1) * found.file.protocol.verdict_seeds
    assert spec.load(DIGITS, name="again").name == "again"
    values = spec.default_values(found.families["pair-power"])
    assert values["loss.weighting"] == "power"
    assert "loss.q" in values
    assert "loss.beta" not in values


@pytest.mark.parametrize("path", sorted(DIGITS.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_study_can_be_read(path: Path) -> None:
    assert spec.load(path).families


def leaves(space: Space) -> Iterator[tuple[str, Any]]:
    for name, domain in space.items():
        yield name, domain
        if isinstance(domain, Choice):
            for children in domain.options.values():
                yield from leaves(children)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_in_the_catalogue_and_builds_at_its_edges(name: str) -> None:
    loss, paper, space = spec.read_family(name, "families.x")
    assert loss in catalogue.CATALOGUE
    assert paper
    found = spec.parse(study(batch={}, embedder={"dim": 8}, families={"x": {"space": name}}))
    family = found.families["x"]
    assert any(not isinstance(domain, Fixed) for _, domain in leaves(space))
    corners = found.corners(family)
    assert len(corners) > 5
    for values in corners:
        config = found.trial_config(family, values)
        catalogue.build(config.loss.name, config.loss.params, num_classes=3, dim=8)
        assert set(config.loss.params) <= set(catalogue.parameters_of(loss))


def test_each_catalogue_entry_has_a_family() -> None:
    assert {spec.read_family(name, "families.x")[0] for name in FAMILIES} == set(catalogue.CATALOGUE)


PRINTED: list[tuple[str, str, Scalar, list[Scalar]]] = [
    # family, parameter, default, values the papers tried
    ("pair_weighting", "loss.weighting", "exponential", ["constant", "power", "exponential"]),
    ("pair_weighting", "loss.normalize", "anchor", ["anchor", "none"]),
    ("pair_weighting", "loss.mining", "threshold", ["threshold", "threshold+margin"]),
    ("pair_weighting", "epsilon", 0.1, [0.1]),
    ("pair_weighting", "loss.positive_margin", 0.0, [0]),
    ("pair_weighting", "loss.negative_margin", 0.8, [0.8, 1.0]),
    ("pair_weighting", "p", 0.0, [0, 0.5, 1]),
    ("pair_weighting", "q", 1.0, [0, 1, 2, 3, 4, 5]),
    ("pair_weighting", "alpha", 0.0, [0, 1, 2]),
    ("pair_weighting", "beta", 2.0, [1, 2, 10, 40, 50]),
    ("triplet_weighting", "loss.weighting", "exponential", ["constant", "power", "exponential"]),
    ("triplet_weighting", "loss.normalize", "anchor", ["anchor", "none"]),
    ("triplet_weighting", "loss.margin", 0.1, [0.1, 0.2]),
    ("triplet_weighting", "p", 5.0, [0, 1, 2, 3, 4, 5]),
    ("triplet_weighting", "alpha", 40.0, [1, 40, 60]),
    ("multi_similarity", "loss.alpha", 2.0, [2]),
    ("multi_similarity", "loss.beta", 50.0, [40, 50]),
    ("multi_similarity", "loss.threshold", 0.5, [0.5]),
    ("multi_similarity", "loss.epsilon", 0.1, [0.1]),
    ("contrastive", "loss.negative_margin", 0.8, [0.8]),
    ("margin", "loss.beta", 1.2, [1.2]),
    ("margin", "loss.alpha", 0.2, [0.2]),
    ("proxy_nca", "loss.temperature", 0.1111, [1 / 9]),
    *((name, "training.lr", 1e-5, [1e-5, 1e-6, 1e-4]) for name in FAMILIES),
    *((name, "training.head_lr_mult", 10, [1, 10]) for name in FAMILIES),
    *((name, "batch.classes", 16, [16, 64]) for name in FAMILIES),
    *((name, "batch.images_per_class", 5, [5]) for name in FAMILIES),
]


@pytest.mark.parametrize(
    ("family", "name", "default", "tried"), PRINTED, ids=[f"{row[0]}-{row[1]}" for row in PRINTED]
)
def test_ranges_hold_what_the_papers_tried(
    family: str, name: str, default: Scalar, tried: list[Scalar]
) -> None:
    domain = dict(leaves(spec.read_family(family, "families.x")[2]))[name]
    assert not isinstance(domain, Fixed)
    assert domain.default == default
    for value in tried:
        if isinstance(domain, Choice):
            assert value in domain.options
        else:
            assert isinstance(domain, Float | Int)
            assert domain.low <= value <= domain.high


def test_what_a_file_says_of_training_goes_over_the_family_and_an_override_over_both() -> None:
    override = {"training.lr": 0.5, "loss.negative_margin": {"float": [0.4, 0.5]}}
    found = checked(
        study(
            training={"epochs": 3, "lr": {"float": [0.1, 0.2]}},
            families={"a": {"space": "contrastive"}, "b": {"space": "contrastive", "override": override}},
        )
    )
    a, b = found.families.values()
    assert a.space["training.lr"] == Float(0.1, 0.2, 0.1)
    assert b.space["training.lr"] == Fixed(0.5)
    assert b.space["loss.negative_margin"] == Float(0.4, 0.5, 0.4)
    config = found.trial_config(b, spec.default_values(b), phase="verdict", seed=7)
    assert (config.training.lr, config.training.epochs, config.seed, config.phase) == (0.5, 3, 7, "verdict")
    assert config.batch.classes == "all"
    assert config.loss.params == {"positive_margin": 0.0, "negative_margin": 0.4}


def test_an_override_may_search_what_the_family_file_does_not_name() -> None:
    entry = {"space": "contrastive", "override": {"embedder.dim": {"choice": [8, 16]}}}
    found = checked(study(embedder={"width": 4}, families={"a": entry}))
    assert "a/embedder.dim" in found.families["a"].default_point()


def test_a_family_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("loss: {name: margin, alpha: {float: [0.1, 0.2]}}\ntraining: {lr: 0.01}\n")
    found = checked(study(families={"mine": {"space": str(file)}}))
    assert found.families["mine"].loss == "margin"


BAD: list[tuple[str, dict[str, Any], str]] = [
    # what is changed, and the line that must come back
    ("key at the top", study(familys={}), "familys: unknown key; did you mean 'families'?"),
    ("key in data", study(data__pth="x"), "data.pth: unknown key; did you mean 'path'?"),
    ("key in search", study(search__sampl=3), "search.sampl: unknown key; did you mean 'sampler'?"),
    ("key in protocol", study(protocol__folds=3), "protocol.folds: unknown key; did you mean 'num_folds'?"),
    (
        "key in resources",
        study(resources__worker=3),
        "resources.worker: unknown key; did you mean 'workers'?",
    ),
    ("key in training", study(training__epoch=3), "training.epoch: unknown key; did you mean 'epochs'?"),
    (
        "key in embedder",
        study(embedder__size=3),
        "embedder.size: unknown key; known: backbone, dim, freeze_bn",
    ),
    (
        "key in a family",
        study(families__margin__overide={}),
        "families.margin.overide: unknown key; did you mean 'override'?",
    ),
    (
        "key in a domain",
        study(training__lr={"float": [1, 2], "lgo": True}),
        "training.lr.lgo: unknown key; did you mean 'log'?",
    ),
    ("missing", study(data=None), "data: is missing; add it"),
    ("missing below", study(families={"a": {"override": {}}}), "families.a.space: is missing; add it"),
    ("no family", study(families={}), "families: dictionary should have at least 1 item"),
    ("type", study(protocol__num_folds="two"), "protocol.num_folds: input should be a valid integer"),
    ("type of a section", study(data="digits"), "data: input should be a valid dictionary"),
    (
        "type in training",
        study(training__epochs="ten"),
        "families.contrastive.training.epochs: input should be",
    ),
    (
        "too small",
        study(search__trials_per_family=0),
        "search.trials_per_family: input should be greater than 0",
    ),
    ("below the range", study(embedder__dim=1), "families.contrastive.embedder.dim: input should be greater"),
    (
        "edge out of range",
        study(training__lr={"float": [-1, 1], "default": 0.5}),
        "families.contrastive.training.lr: input should be greater than 0, got -1.0",
    ),
    (
        "sampler",
        study(search__sampler="grid"),
        "search.sampler: input should be 'tpe' or 'random', got 'grid'",
    ),
    (
        "optimizer",
        study(training__optimizer="adma"),
        "training.optimizer: input should be 'adam', 'adamw' or 'sgd'",
    ),
    ("classes", study(batch__classes="some"), "families.contrastive.batch.classes: input should be"),
    ("name of the study", study(name="a/b"), "name: string should match pattern"),
    ("name of the model", study(model_name="a/b"), "model_name: string should match pattern"),
    ("name of a family", study(families={"it's": {"space": "margin"}}), "families.it's: string should match"),
    (
        "reserved family",
        study(families={"untrained": {"space": "margin"}}),
        "families.untrained: this name is the untrained embedder's; choose another",
    ),
    (
        "family",
        study(families={"a": {"space": "contrastiv"}}),
        "families.a.space: no family 'contrastiv'; did you mean 'contrastive'?",
    ),
    (
        "family file",
        study(families={"a": {"space": "no/such.yaml"}}),
        "no/such.yaml: no such file (named by families.a",
    ),
    ("data set", study(data__name="digit"), "data.name: unknown data set 'digit'; did you mean 'digits'?"),
    (
        "backbone",
        study(embedder__backbone="resnet8"),
        "embedder.backbone: no backbone 'resnet8'; did you mean 'resnet18'?",
    ),
    (
        "objective",
        study(protocol__objective="map_at_k"),
        "protocol.objective: no metric 'map_at_k'; did you mean 'map_at_r'?",
    ),
    (
        "objective not measured",
        study(protocol__objective="recall_at_16"),
        "protocol.objective: no metric 'recall_at_16'",
    ),
    (
        "loss option",
        study(families={"a": {"space": "margin", "override": {"loss.betta": 1}}}),
        "families.a.override.loss.betta: unknown parameter; did you mean 'beta'?",
    ),
    (
        "loss value",
        study(families={"a": {"space": "margin", "override": {"loss.beta": "high"}}}),
        "families.a.loss: loss 'margin': beta='high' must be of type number",
    ),
    (
        "choice of a loss",
        study(families={"a": {"space": "pair_weighting", "override": {"loss.weighting": "powr"}}}),
        "families.a.override.loss.weighting: 'powr' is no option; did you mean 'power'?",
    ),
    (
        "override of training",
        study(families={"a": {"space": "margin", "override": {"training.rate": 1}}}),
        "families.a.override.training.rate: unknown parameter; known: epochs",
    ),
    (
        "override without a section",
        study(families={"a": {"space": "margin", "override": {"beta": 1}}}),
        "families.a.override.beta: expected section.parameter, as in loss.weighting or training.lr",
    ),
    (
        "malformed override",
        study(families={"a": {"space": "margin", "override": {"loss.beta": {"float": [2, 1]}}}}),
        "families.a.override.loss.beta.float: low 2 is above high 1; swap them",
    ),
    (
        "more classes than a fold has",
        study(batch__classes={"int": [2, 4]}),
        "families.contrastive.batch.classes: up to 4 classes per batch, but a fold trains on 2;"
        " set batch.classes to at most 2 or to all",
    ),
    ("too many folds", study(protocol__num_folds=5), "num_folds: 5 does not leave 2 classes on each side"),
    (
        "no folder",
        study(data={"name": "image_folder"}),
        "data.path: image_folder needs a folder; set data.path",
    ),
    (
        "missing folder",
        study(data={"name": "image_folder", "path": "/no/such"}),
        "data.path: folder /no/such does not exist",
    ),
]


@pytest.mark.parametrize(("raw", "line"), [(raw, line) for _, raw, line in BAD], ids=[row[0] for row in BAD])
def test_a_bad_study_is_refused_in_one_line(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        checked(raw)
    message = str(caught.value)
    assert line in message
    assert "\n" not in message
    assert len(message) < 300


def test_the_small_study_itself_is_sound() -> None:
    checked(study())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: x\nfamilies: [\n", ", line 3: not YAML: "),
        ("name: x\n\tdata: y\n", ", line 2: not YAML: "),
        ("a: b: c\n", ", line 1: not YAML: mapping values are not allowed here"),
        ("- name\n- data\n", ": expected a mapping at the top, got list"),
        ("", ": expected a mapping at the top, got NoneType"),
        ("name: !!python/object:os.system {}\n", ", line 1: not YAML: "),
    ],
)
def test_a_file_that_is_no_mapping_of_yaml(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        spec.load(file)
    assert str(caught.value).startswith(f"{file}{line}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: no such file \(a study file; the ready ones are in"):
        spec.load(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="cannot be read"):
        spec.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin\.yaml: cannot be read"):
        spec.load(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss: margin\n", "mine.yaml: loss: expected a mapping with the key name"),
        ("training: {lr: 1}\n", "mine.yaml: loss: expected a mapping with the key name"),
        (
            "loss: {name: margin}\ntrainig: {lr: 1}\n",
            "mine.yaml: trainig: unknown key; did you mean 'training'?",
        ),
        ("loss: {name: margin}\ntraining: {rl: 1}\n", "mine.yaml: training.rl: unknown key; "),
        ("loss: {name: margin}\ntraining: 3\n", "mine.yaml: training: expected a mapping of parameters"),
        ("loss: {name: margni}\n", "families.a.loss: loss='margni' is unknown; did you mean 'margin'?"),
        ("loss: {name: margin, gamma: 1}\n", "families.a.loss: loss 'margin' has no parameter 'gamma'; "),
        (
            "loss: {name: margin, beta: {flaot: [0, 1]}}\n",
            "mine.yaml: loss.beta: a domain has one of the keys",
        ),
        ("loss: {name: margin, alpha: {float: [-1, 1]}}\n", "families.a.loss: alpha=-1.0 must be"),
    ],
)
def test_a_bad_family_file_is_refused_in_one_line(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        checked(study(families={"a": {"space": str(file)}}))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


SAME = spec.parse(study()).fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"training__epochs": 3},
        {"search__seed": 1},
        {"search__trials_per_family": 3},
        {"protocol__num_folds": 1},
        {"data__image_size": 16},
        {"families__margin__override": {"loss.beta": 1.0}},
        {"families": {"contrastive": {"space": "contrastive"}}},
        {"resources__workers": 2},  # another world size may give other last digits
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_fingerprint_changes_with_the_meaning(changes: dict[str, Any]) -> None:
    assert spec.parse(study(**changes)).fingerprint() != SAME


def test_the_fingerprint_keeps_when_only_the_resources_change(tmp_path: Path) -> None:
    assert len(SAME) == 16
    raw = study(resources__max_concurrent_trials=1, resources__cpus_per_worker=2)
    assert spec.parse(raw).fingerprint() == SAME
    assert spec.parse(dict(reversed(study().items()))).fingerprint() == SAME


def test_the_fingerprint_follows_the_content_of_a_family_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    prints = []
    for high in (0.2, 0.3):
        file.write_text(f"loss: {{name: margin, alpha: {{float: [0.1, {high}]}}}}\n")
        prints.append(spec.parse(study(families={"a": {"space": str(file)}})).fingerprint())
    assert prints[0] != prints[1]


def test_corners_reach_under_every_choice() -> None:
    found = spec.parse(study(families={"a": {"space": "pair_weighting"}}))
    corners = found.corners(found.families["a"])
    assert {values["loss.weighting"] for values in corners} == {"constant", "power", "exponential"}
    for name, edges in (
        ("q", {0.0, 5.0}),
        ("p", {0.0, 2.0}),
        ("beta", {0.5, 50.0}),
        ("epsilon", {0.02, 0.3}),
    ):
        assert {values[f"loss.{name}"] for values in corners if f"loss.{name}" in values} >= edges


def test_an_edge_under_a_choice_is_built_too() -> None:
    weighting = {"choice": {"constant": {}, "power": {"p": 0, "q": {"float": [0, 1]}}}}
    override = {"loss.weighting": weighting}
    checked(study(families={"a": {"space": "pair_weighting", "override": override}}))
    weighting["choice"]["power"] = {"p": 0, "q": {"float": [-1, 1], "default": 0}}
    with pytest.raises(SpecError, match=r"^families\.a\.loss: q=-1\.0 must be"):
        checked(study(families={"a": {"space": "pair_weighting", "override": override}}))
