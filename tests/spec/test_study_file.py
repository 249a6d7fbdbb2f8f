"""Study files: the ready ones are sound, and whatever is wrong with one is said in one line with the mend."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlstudy.losses import catalogue
from dmlstudy.records import LossConfig, Scalar, TrialConfig
from dmlstudy.search.samplers import Point
from dmlstudy.search.subsearch import subsearches_of
from dmlstudy.spec import study_file
from dmlstudy.spec.space import Choice, Fixed, Float, Int, Space
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.studies import checks
from dmlstudy.text import LINE

DIGITS = study_file.bundled.folder("search_spaces") / "studies" / "digits.yaml"
FAMILIES = [name for name, file in study_file.family_files().items() if file.parent.name == "search_spaces"]


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
    found = study_file.parse(raw)
    checks.check_parts(found)
    return found


def test_the_digits_study_is_sound() -> None:
    found = study_file.load(DIGITS)
    dataset = checks.check_parts(found)
    assert dataset.name == "digits"
    assert found.name == "digits"
    assert found.num_search_trials == len(found.families) * found.file.search.trials_per_family
    assert found.num_verdict_trials == (len(found.families) + 1) * found.file.protocol.verdict_seeds
    assert study_file.load(DIGITS, name="again").name == "again"
    values = study_file.default_values(found.families["pair-power"])
    assert values["loss.weighting"] == "power"
    assert "loss.q" in values
    assert "loss.beta" not in values


def leaves(space: Space) -> Iterator[tuple[str, Any]]:
    for name, domain in space.items():
        yield name, domain
        if isinstance(domain, Choice):
            for children in domain.options.values():
                yield from leaves(children)


def names_of(family: str, section: str = "loss") -> list[Any]:
    """What the loss (or regulariser) of a bundled family can be called."""
    name = study_file.read_family(family, "families.x")[1].get(f"{section}.name", Fixed("none"))
    return [name.value] if isinstance(name, Fixed) else list(name.edges)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_in_the_catalogue_and_builds_at_its_edges(name: str) -> None:
    paper, space = study_file.read_family(name, "families.x")
    assert paper
    found = study_file.parse(study(batch={}, embedder={"dim": 8}, families={"x": {"space": name}}))
    family = found.families["x"]
    assert any(not isinstance(domain, Fixed) for _, domain in leaves(space))
    corners = found.corners(family)
    assert len(corners) > 5
    built = set()
    for values in corners:
        config = found.trial_config(family, values)
        catalogue.build(
            config.loss.name,
            config.loss.params,
            regularizer=config.regularizer and (config.regularizer.name, config.regularizer.params),
            memory=config.batch.memory_size > 0,
            num_classes=3,
            class_sizes=[2, 3, 5],
            dim=8,
        )
        assert set(config.loss.params) <= set(catalogue.parameters_of(config.loss.name))
        for part in filter(None, [config.regularizer]):
            assert set(part.params) <= set(catalogue.parameters_of_regularizer(part.name))
        built.add(config.loss.name)
    assert built == set(names_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_validated(name: str) -> None:
    checked(study(families={"x": {"space": name}}))


@pytest.mark.parametrize(
    ("name", "objective"),
    [("characters", "map_at_r"), ("cifar10_hashing", "map"), ("cifar10_online", "accuracy")],
)
def test_the_objective_is_that_of_the_task_where_none_is_named(name: str, objective: str) -> None:
    raw = yaml.safe_load(DIGITS.with_stem(name).read_text())
    named, unnamed = (
        study_file.parse({**raw, "protocol": {**raw.get("protocol", {}), "objective": given}})
        for given in (objective, "default")
    )
    assert unnamed.file.protocol.objective == objective
    assert unnamed.fingerprint() == named.fingerprint()


def test_each_catalogue_entry_has_a_family() -> None:
    assert {name for family in FAMILIES for name in names_of(family)} == set(catalogue.CATALOGUE)
    for name in catalogue.CATALOGUE:
        assert names_of(name) == [name]  # and it is called the same


def test_a_parameter_that_a_space_leaves_at_its_default_is_set_or_searched() -> None:
    override = {"loss.average": "with_positive", "loss.precision": {"choice": ["float32", "bf16x3"]}}
    regularized = {"regularizer.momentum": 0.5, "loss.precision": "tf32"}
    found = checked(
        study(
            families={
                "x": {"space": "supcon", "override": override},
                "y": {"space": "distance_levels", "override": regularized},
            }
        )
    )
    config = found.trial_config(found.families["x"], study_file.default_values(found.families["x"]))
    assert config.loss.params["average"] == "with_positive"
    assert config.loss.params["precision"] == "float32"
    with pytest.raises(
        SpecError, match=r"families\.x\.override\.loss\.precisoin: unknown .* did you mean 'precision'"
    ):
        checked(study(families={"x": {"space": "supcon", "override": {"loss.precisoin": "bf16"}}}))


def test_each_regulariser_has_a_family() -> None:
    found = {name for family in FAMILIES for name in names_of(family, "regularizer")} - {"none"}
    assert found == set(catalogue.REGULARIZERS)


NASA = ("structure", "distance_levels")
CGML = "graph_consistency"

PRINTED: list[tuple[str, str, Scalar, list[Scalar]]] = [
    # family, parameter, default, values the papers tried
    ("pair_weighting", "loss.weighting", "exponential", ["constant", "power", "exponential"]),
    ("pair_weighting", "loss.normalize", "anchor", ["anchor", "none"]),
    ("pair_weighting", "loss.mining", "threshold", ["threshold", "threshold+margin", "threshold+batch_hard"]),
    ("pair_weighting", "epsilon", 0.1, [0.1]),
    ("pair_weighting", "loss.positive_margin", 0.0, [0]),
    ("pair_weighting", "loss.negative_margin", 0.8, [0.8, 1.0]),
    ("pair_weighting", "p", 0.0, [0, 0.5, 1]),
    ("pair_weighting", "q", 1.0, [0, 1, 2, 3, 4, 5]),
    ("pair_weighting", "alpha", 0.0, [0, 1, 2]),
    ("pair_weighting", "beta", 2.0, [1, 2, 10, 40, 50]),
    ("triplet_weighting", "loss.weighting", "exponential", ["constant", "power", "exponential"]),
    ("triplet_weighting", "loss.normalize", "anchor", ["anchor", "none"]),
    ("triplet_weighting", "loss.mining", "all", ["all", "semi_hard", "batch_hard", "margin"]),
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
    ("margin", "loss.nu", 0.0, [0.0, 1e-4, 1e-2]),
    ("triplet", "loss.margin", 0.2, [0.1, 0.2]),
    ("n_pair", "loss.scale", 100.0, [1, 10, 100, 128]),
    ("n_pair", "loss.l2", 5e-4, [5e-4]),
    ("lifted_structure", "loss.margin", 1.0, [1.0]),
    ("multi_similarity_distance", "loss.version", "v1", ["v1", "v2"]),
    ("multi_similarity_distance", "loss.margin", 1.0, [1.0]),
    ("binomial_deviance", "loss.alpha", 2.0, [2]),
    ("binomial_deviance", "loss.beta", 0.5, [0.5]),
    ("binomial_deviance", "loss.negative_weight", 25.0, [25]),
    ("ranked_list", "loss.negative_temperature", 10.0, [10]),
    ("circle", "loss.margin", 0.4, [0.25, 0.4]),
    ("circle", "loss.gamma", 80.0, [80, 256]),
    ("angular", "loss.angle", 40.0, [36, 45, 55]),
    ("smooth_ap", "loss.tau", 0.01, [0.01]),
    ("sup_ap", "loss.rho", 100.0, [100]),
    ("sup_ap", "loss.delta", 0.05, [0.05]),
    ("recall_at_k", "loss.ks", "1 2 4 8 16", ["1 2 4", "1 2 4 8 16"]),
    ("recall_at_k", "loss.tau", 0.01, [0.01]),
    ("recall_at_k", "loss.k_temperature_mode", "fixed", ["fixed", "k"]),
    ("proxy_nca", "loss.temperature", 1.0, [1]),
    ("proxy_nca_pp", "loss.temperature", 0.1111, [1 / 9]),
    ("proxy_anchor", "loss.alpha", 32.0, [32]),
    ("proxy_anchor", "loss.delta", 0.1, [0.1]),
    ("soft_triple", "loss.scale", 20.0, [20]),
    ("soft_triple", "loss.centers", 10, [1, 10]),
    ("potential_field", "loss.alpha", 4.0, [1, 4, 6]),
    ("potential_field", "loss.delta", 0.2, [0.1, 0.2, 0.3]),
    ("potential_field", "loss.proxies", 15, [2, 15]),
    ("arcface", "loss.margin", 28.6, [math.degrees(0.5)]),
    ("cosface", "loss.margin", 0.35, [0.35]),
    ("norm_softmax", "loss.temperature", 0.05, [0.05]),
    ("subcenter_arcface", "loss.centers", 3, [3]),
    ("subcenter_arcface", "loss.margin_by/fixed/margin", 28.6, [math.degrees(0.5)]),
    ("subcenter_arcface", "loss.margin_by/class_size/exponent", 0.25, [0.25]),
    ("curricularface", "loss.margin", 0.5, [0.5]),
    ("adaface", "loss.margin", 0.4, [0.4]),
    ("magface", "loss.norm_weight", 35.0, [35]),
    ("graph_consistency", "loss.name", "binomial_deviance", ["triplet_weighting", "n_pair"]),
    ("graph_consistency", "loss.name/triplet_weighting/margin", 0.1, [0.1]),
    ("graph_consistency", "loss.name/n_pair/scale", 100.0, [10, 100]),
    ("graph_consistency", "loss.name/binomial_deviance/negative_weight", 25.0, [25]),
    ("graph_consistency", "regularizer.term/gc_bar/weight", 0.002, [0.001, 0.002]),
    ("graph_consistency", "regularizer.term/gc/weight", 0.01, [0.01]),
    ("graph_consistency", "regularizer.sigma_mode/fixed/sigma", 1.0, [0.1, 10]),
    ("graph_consistency", "regularizer.draw", "split", ["two_draws"]),
    ("graph_consistency", "batch.classes", 13, [13, 26]),
    ("graph_consistency", "batch.images_per_class", 10, [4, 6, 8, 10]),
    ("structure", "loss.name", "triplet", ["triplet", "margin", "multi_similarity", "proxy_nca_pp"]),
    ("structure", "regularizer.preset", "official", ["official", "paper"]),
    ("structure", "regularizer.preset/paper/eta_source", "plain", ["plain", "adaptive"]),
    ("structure", "regularizer.weight", 1.0, [1, 2, 3, 4, 5]),
    ("structure", "regularizer.t", 3.0, [1, 2, 3, 4, 5]),
    ("structure", "regularizer.alpha", 10.0, [10]),
    ("cross_batch_memory", "batch.memory_size", 4096, [1024, 4096, 16384]),
    *((name, "training.lr", 1e-5, [1e-5, 1e-6, 1e-4]) for name in FAMILIES if name not in NASA),
    *((name, "training.lr", 5e-5, [5e-5, 1e-4]) for name in NASA),
    *((name, "training.head_lr_mult", 10, [1, 10]) for name in FAMILIES),
    *((name, "batch.classes", 16, [16, 64]) for name in FAMILIES if name not in (*NASA, CGML)),
    *((name, "batch.classes", 32, [32]) for name in NASA),
    *((name, "batch.images_per_class", 5, [5]) for name in FAMILIES if name not in (*NASA, CGML)),
    *((name, "batch.images_per_class", 4, [2, 3, 4]) for name in NASA),
]


@pytest.mark.parametrize(
    ("family", "name", "default", "tried"), PRINTED, ids=[f"{row[0]}-{row[1]}" for row in PRINTED]
)
def test_ranges_hold_what_the_papers_tried(
    family: str, name: str, default: Scalar, tried: list[Scalar]
) -> None:
    top, *path = name.split("/")
    domain = dict(leaves(study_file.read_family(family, "families.x")[1]))[top]
    for option, child in zip(path[::2], path[1::2], strict=True):
        assert isinstance(domain, Choice)
        domain = domain.options[option][child]
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
    config = found.trial_config(b, study_file.default_values(b), phase="verdict", seed=7)
    assert (config.training.lr, config.training.epochs, config.seed, config.phase) == (0.5, 3, 7, "verdict")
    assert config.batch.classes == "all"
    assert config.loss.params == {"positive_margin": 0.0, "negative_margin": 0.4}


def test_an_override_may_search_what_the_family_file_does_not_name() -> None:
    entry = {"space": "contrastive", "override": {"embedder.dim": {"choice": [8, 16]}}}
    found = checked(study(embedder={"width": 4}, families={"a": entry}))
    assert "a/embedder.dim" in found.families["a"].default_point()


def test_workers_are_told_paths_that_lead_there_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pth").touch()
    for weights, expected in (("net.pth", str(tmp_path / "net.pth")), ("default", "default")):
        birds = {"name": "image_folder", "path": "birds"}
        found = study_file.parse(study(data=birds, embedder={"backbone": "resnet18", "weights": weights}))
        family = next(iter(found.families.values()))
        config = found.trial_config(family, study_file.default_values(family))
        assert config.data.path == str(tmp_path / "birds")
        assert config.embedder.weights == expected
    assert found.file.data.path == "birds"


def test_a_family_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("loss: {name: margin, alpha: {float: [0.1, 0.2]}}\ntraining: {lr: 0.01}\n")
    found = checked(study(families={"mine": {"space": str(file)}}))
    assert found.families["mine"].space["loss.name"] == Fixed("margin")


def test_numbers_that_yaml_reads_as_text_are_taken(tmp_path: Path) -> None:
    override = {"training.lr": {"float": ["1e-5", "1e-3"], "log": True}, "loss.nu": "1e-4", "loss.beta": 1.2}
    found = checked(study(families={"a": {"space": "margin", "override": override}}))
    family = found.families["a"]
    assert family.space["training.lr"] == Float(1e-5, 1e-3, 1e-5, log=True)
    assert found.trial_config(family, study_file.default_values(family)).loss.params["nu"] == 1e-4
    plain = study_file.parse(study(training__lr="1e-4"))  # as it was read before, fingerprint and all
    assert study_file.as_begun(plain, "af25443d67119b19").fingerprint() == "af25443d67119b19"
    assert (
        plain.trial_config(
            plain.families["margin"], {"loss.name": "margin", "training.lr": "1e-4"}
        ).training.lr
        == 1e-4
    )


TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("data.image_size", {"data__image_size": 1_000_000}),
    ("data.resize_to", {"data__resize_to": 20_000}),
    ("augmentation.padding", {"augmentation__padding": 10**9}),
    ("batch.memory_size", {"batch__memory_size": 10**12}),
    ("batch.memory_warmup", {"batch__memory_warmup": 10**12}),
    ("batch.images_per_class", {"batch__images_per_class": 10**9}),
    ("batch.classes", {"batch__classes": 10**9}),
    ("batch.per_epoch", {"batch__per_epoch": 10**12}),
    ("embedder.head_width", {"embedder__head_width": 10**9}),
    ("training.epochs", {"training__epochs": 10**9}),
    ("training.lr", {"training__lr": math.inf}),
    ("training.weight_decay", {"training__weight_decay": math.inf}),
    ("retrieval.first", {"retrieval__first": 10**12}),
    ("retrieval.k1", {"retrieval__k1": 10**12}),
    ("protocol.map_at.0", {"protocol__map_at": [10**30]}),
    ("protocol.recall_at.1", {"protocol__recall_at": [1, 10**30]}),
    ("protocol.recall_at", {"protocol__recall_at": [1] * 200_000}),
    ("protocol.num_folds", {"protocol__num_folds": 10**12}),
    ("protocol.verdict_seeds", {"protocol__verdict_seeds": 10**12}),
    ("search.trials_per_family", {"search__trials_per_family": 10**12}),
    ("search.device_hours", {"search__device_hours": math.inf}),
    ("resources.workers", {"resources__workers": 10**12}),
    ("resources.cpus_per_worker", {"resources__cpus_per_worker": math.inf}),
    ("resources.silence_limit_s", {"resources__silence_limit_s": math.inf}),
    ("families", {"families": {f"f{number}": {"space": "margin"} for number in range(300)}}),
    ("families", {"embedder__dim": {"choice": list(range(2, 302))}, "families": {
        f"f{number}": {"space": "margin"} for number in range(80)
    }}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "changes"), TOO_MUCH, ids=[f"{key}-{n}" for n, (key, _) in enumerate(TOO_MUCH)]
)
def test_what_no_machine_holds_is_refused_at_once(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"^(families\.contrastive\.)?{key}: ") as caught:
        study_file.parse(study(**changes))
    assert len(str(caught.value)) < 200


def test_long_values_and_names_are_shortened() -> None:
    long = "x" * 250_000
    for raw in (
        study(name=long),
        study(data__path=[long] * 1000),
        study(families={long: {"space": "margin"}}),
        study(families={"a": {"space": long}}),
        study(families={"a": {"space": "margin", "override": {f"loss.{long}": 1}}}),
        study(families={"a": {"space": "margin", "override": {"loss.beta": long}}}),
        study(training__optimizer={"choice": ["adam", long]}),
        study(embedder__backbone=long),
        study(protocol__objective=long),
        study(**{long: 1}),
    ):
        with pytest.raises(SpecError) as caught:
            checked(raw)
        assert len(str(caught.value)) <= LINE


def test_an_option_of_ones_own_is_a_choice() -> None:
    override = {"training.head_lr_mult": {"choice": [2]}}
    found = checked(study(families={"a": {"space": "margin", "override": override}}))
    family = found.families["a"]
    assert found.trial_config(family, study_file.default_values(family)).training.head_lr_mult == 2


BAD: list[tuple[str, dict[str, Any], str]] = [
    # what is changed, and the line that must come back
    (
        "key at the top that is needed",
        {"familes" if key == "families" else key: value for key, value in study().items()},
        "familes: unknown key; did you mean 'families'?",
    ),
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
        "embedder.size: unknown key; known: backbone, clip_radius, code, curvature, dim, dim_per, freeze_bn",
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
    ("no family", study(families={}), "families: needs at least one, got {}"),
    ("type", study(protocol__num_folds="two"), "protocol.num_folds: input should be a valid integer"),
    (
        "type of a section",
        study(data="digits"),
        "data: expected a section with keys of its own, got 'digits'",
    ),
    (
        "type in training",
        study(training__epochs="ten"),
        "families.contrastive.training.epochs: input should be",
    ),
    (
        "epochs searched",
        study(training__epochs={"int": [1, 5]}),
        "training.epochs: epochs are not searched, for trials are compared epoch by epoch; set one number",
    ),
    (
        "epochs under a choice",
        study(training__optimizer={"choice": {"adam": {}, "sgd": {"epochs": 4}}}, training__epochs=None),
        "training.epochs: epochs are not searched",
    ),
    (
        "epochs of a family",
        study(families__margin__override={"training.epochs": 9}),
        "families.margin.override.training.epochs: margin has 9 epochs, but contrastive another number;"
        " all families need the same: set training.epochs for all of them",
    ),
    ("negative seed", study(search__seed=-1), "search.seed: input should be greater than or equal to 0"),
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
        "search.sampler: no sampler 'grid'; known: auto, cma, gp, nsga2, qmc, random, tpe; hub:PACKAGE is one of",
    ),
    (
        "optimizer",
        study(training__optimizer="adma"),
        "training.optimizer: input should be 'adam', 'adamw' or 'sgd'",
    ),
    ("classes", study(batch__classes="some"), "families.contrastive.batch.classes: input should be"),
    (
        "name of the study",
        study(name="a/b"),
        "name: use letters a to z, digits, . _ and -, a letter or digit first, 64 of them at most, got 'a/b'",
    ),
    ("name of the model", study(model_name="a/b"), "model_name: use letters a to z, digits, . _ and -"),
    ("name of a family", study(families={"it's": {"space": "margin"}}), "families.it's: use letters"),
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
        "families.a.override.training.rate: unknown parameter; known: ",
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
        "option of a parameter",
        study(families={"a": {"space": "graph_consistency", "override": {"loss.alpha@binomial": 1}}}),
        "families.a.override.loss.alpha@binomial: unknown parameter; did you mean 'alpha@binomial_deviance'?",
    ),
    (
        "override that stands in two places",
        study(
            families={"a": {"space": "margin", "override": {"loss.mining": {"choice": {"all": {"nu": 0}}}}}}
        ),
        "families.a.override.loss.mining: nu stands in two places; rename one",
    ),
    (
        "a number that is no option",
        study(families={"a": {"space": "margin", "override": {"training.head_lr_mult": 2}}}),
        "families.a.override.training.head_lr_mult: 2 is no option; known: 1, 10; for one of your own write"
        " {choice: [2]}",
    ),
    (
        "name of a loss",
        study(families={"a": {"space": "structure", "override": {"loss.name": "margni"}}}),
        "families.a.override.loss.name: 'margni' is no option; did you mean 'margin'?",
    ),
    (
        "name of a loss is a number",
        study(families={"a": {"space": "margin", "override": {"loss.name": 3}}}),
        "families.a.override.loss.name: expected a name or a choice of names",
    ),
    (
        "parameter of no regularizer",
        study(families={"a": {"space": "margin", "override": {"regularizer.weight": 1}}}),
        "families.a.override.regularizer.weight: the family has no regularizer; override regularizer: {name",
    ),
    (
        "regularizer without a name",
        study(families={"a": {"space": "margin", "override": {"regularizer": {"weight": 1}}}}),
        "families.a.override.regularizer: expected a mapping with the key name",
    ),
    (
        "regularizer of the study without a name",
        study(regularizer={"weight": 1}),
        "regularizer: expected a mapping with the key name",
    ),
    (
        "memory",
        study(batch__memory_size=-1),
        "families.contrastive.batch.memory_size: input should be greater",
    ),
    (
        "more classes than a fold has",
        study(batch__classes={"int": [2, 4]}),
        "families.contrastive.batch.classes: up to 4 classes per batch, but a fold trains on 2 (of 10 classes 5 are"
        " kept for the test and 5 are to learn from, of which a fold holds 3 out);"
        " set batch.classes to at most 2 or to all",
    ),
    (
        "too many folds",
        study(protocol__num_folds=5),
        "protocol.num_folds: 5 folds need 10 classes, two to be held out by each, and of 10 classes 5 are kept for the"
        " test and 5 are to learn from; set protocol.num_folds to at most 2, or add classes",
    ),
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
    (
        "missing folder, relative",
        study(data={"name": "image_folder", "path": "no/such"}),
        f"data.path: folder {Path.cwd() / 'no/such'} does not exist",
    ),
]


@pytest.mark.parametrize(("raw", "line"), [(raw, line) for _, raw, line in BAD], ids=[row[0] for row in BAD])
def test_a_bad_study_is_refused_in_one_line(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        checked(raw)
    message = str(caught.value)
    assert line in message
    assert "\n" not in message
    assert len(message) < 320


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
        ("name: !!python/object:os.system {}\n", ", line 1: tags are not read ('tag:yaml.org,2002:pytho"),
        ("name: !!timestamp f\n", ", line 1: tags are not read ("),
        ("embedder:\n  dim: !!bool x\n", ", line 2: tags are not read ("),
        ("a: &a [1]\n", ", line 1: aliases and anchors are not read ('&a'); write the value out"),
        ("a: 1\nb: *a\n", ", line 2: aliases and anchors are not read ('*a'); write the value out"),
        ("a: 1\nb: {<<: {c: 1}}\n", ", line 2: merges (<<) are not read; write the keys out"),
        ("a: &a {choice: *a}\n", ", line 1: aliases and anchors are not read ('&a')"),
        (
            "search: {seed: 1}\nname: x\nsearch: {seed: 2}\n",
            ", line 3: the key 'search' stands there twice; leave one out",
        ),
        ("? [1, 2]\n: 3\n", ", line 1: a list or mapping cannot be a key; write text"),
        (f"a: {'[' * 20000}\n", ", line 1: more than 40 lists and mappings within each other; take some"),
        ("a:\n- 1" + "\n- 1" * 20000, ", line 19999: more than 20000 keys and values; make it smaller"),
        (f"a: {'9' * 5000}\n", ": not YAML: Exceeds the limit"),
        ("a: 1\nb: \0\n", ", line 2: not YAML: the character 0x0 cannot be read; remove it"),
    ],
)
def test_a_file_that_is_no_mapping_of_yaml(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        study_file.load(file)
    assert str(caught.value).startswith(f"{file}{line}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= LINE


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: no such file \(a study file; the ready ones are in"):
        study_file.load(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match=r": is a folder; name the YAML file in it, there is none$"):
        study_file.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(
        SpecError, match=r"latin\.yaml: cannot be read: byte 9 is no UTF-8 text; save it as UTF-8"
    ):
        study_file.load(tmp_path / "latin.yaml")
    with pytest.raises(SpecError, match=r"folder; name the YAML file in it, as .*latin\.yaml$"):
        study_file.load(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError, match=r"pipe\.yaml: is a pipe or device; name a file"):
        study_file.load(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError, match=r"pipe\.yaml: is a pipe or device"):
        study_file.parse(study(families={"a": {"space": str(tmp_path / "pipe.yaml")}}))
    with pytest.raises(SpecError, match="is no file's name"):
        study_file.load("a\0b.yaml")
    (tmp_path / "large.yaml").write_text(f"name: x\n{'#' * 2**20}\n")
    with pytest.raises(SpecError, match=r"large\.yaml: has 1\.0 MiB, and at most 1 is read"):
        study_file.load(tmp_path / "large.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss: margin\n", "mine.yaml: loss: expected a mapping with the key name"),
        ("training: {lr: 1}\n", "mine.yaml: loss: expected a mapping with the key name"),
        ("loss: {name: 3}\n", "mine.yaml: loss.name: expected a name or a choice of names"),
        (
            "loss: {name: {choice: [margin, 3]}}\n",
            "mine.yaml: loss.name: expected a name or a choice of names",
        ),
        (
            "loss: {name: {choice: {margin: {alpha: 1}}}, alpha: 2}\n",
            "mine.yaml: loss: alpha stands in two places; rename one",
        ),
        (
            "loss: {name: {choice: {triplet: {}, margin: {gamma: 1}}}}\n",
            "families.a.loss: loss 'margin' has no parameter 'gamma'; ",
        ),
        (
            "loss: {name: triplet}\nregularizer: {weight: 1}\n",
            "mine.yaml: regularizer: expected a mapping with the key name",
        ),
        (
            "loss: {name: triplet}\nregularizer: {name: {float: [0, 1]}}\n",
            "mine.yaml: regularizer.name: expected a name or a choice of names",
        ),
        ("loss: {name: triplet}\nregularizer: {name: strukture}\n", "families.a.regularizer: regularizer"),
        (
            "loss: {name: triplet}\nregularizer: {name: structure, weigth: 1}\n",
            "families.a.regularizer: regularizer",
        ),
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


OVERRIDES = [
    (name, line.removeprefix("# override: "))
    for name, file in study_file.family_files().items()
    for line in file.read_text().splitlines()
    if line.startswith("# override: ")
]


@pytest.mark.parametrize(("name", "line"), OVERRIDES, ids=[f"{name}-{line[:40]}" for name, line in OVERRIDES])
def test_an_override_that_a_space_names_is_one(name: str, line: str) -> None:
    override = yaml.safe_load(line)
    raw = {key: value for key, value in study().items() if key not in ("batch", "embedder")}
    family = study_file.parse(raw | {"families": {"a": {"space": name, "override": override}}}).families["a"]
    for full_name in override:
        assert full_name in family.space


TWO_DRAWS = {"space": "graph_consistency", "override": {"regularizer.draw": "two_draws"}}


def test_two_draws_of_a_regularizer_set_those_of_batches() -> None:
    found, family = only({"space": "graph_consistency"})
    configs = [found.trial_config(family, values) for values in found.corners(family)]
    assert {(c.regularizer.params["draw"], c.batch.draw) for c in configs if c.regularizer} == {
        ("split", "pk"),
        ("two_draws", "two_draws"),
    }
    assert default_config(TWO_DRAWS).batch.draw == "two_draws"
    assert default_config(TWO_DRAWS, batch={"draw": "two_draws", "classes": 2}).batch.classes == 2
    assert default_config({"space": "triplet"}, batch={"draw": "two_draws"}).batch.draw == "two_draws"


@pytest.mark.parametrize(
    ("entry", "draw", "message"),
    [
        (
            TWO_DRAWS,
            "pk",
            "two_draws needs batches of two draws, not batch.draw: pk; set batch.draw: two",
        ),
        (TWO_DRAWS, "random", "two_draws needs batches of two draws, not batch.draw: random; set batch"),
        (
            {"space": "graph_consistency"},
            "two_draws",
            "split would mix the two draws of batch.draw: two_draws",
        ),
    ],
)
def test_a_draw_of_batches_that_does_not_fit_the_regularizer_is_refused(
    entry: dict[str, Any], draw: str, message: str
) -> None:
    with pytest.raises(SpecError, match=f"^families.a: regularizer.draw: {message}"):
        only(entry, batch={"draw": draw})


def only(entry: dict[str, Any], **changes: Any) -> tuple[StudySpec, study_file.Family]:
    found = study_file.parse(study(families={"a": entry}, **changes))
    return found, found.families["a"]


def default_config(entry: dict[str, Any], **changes: Any) -> TrialConfig:
    found, family = only(entry, **changes)
    return found.trial_config(family, study_file.default_values(family))


def test_the_loss_of_a_family_may_be_searched() -> None:
    found, family = only({"space": "graph_consistency"})
    point = family.default_point()
    assert point["a/loss.name"] == "binomial_deviance"
    assert point["a/loss.alpha@binomial_deviance"] == 2.0
    config = found.trial_config(family, study_file.default_values(family))
    assert config.loss.name == "binomial_deviance"
    assert config.loss.params == {"alpha": 2.0, "beta": 0.5, "negative_weight": 25.0}
    losses = {values["loss.name"] for values in found.corners(family)}
    assert losses == {"triplet_weighting", "n_pair", "binomial_deviance", "multi_similarity"}


def test_the_loss_of_a_family_may_be_fixed_to_one_of_several() -> None:
    entry: dict[str, Any] = {"space": "graph_consistency", "override": {"loss.name": "n_pair"}}
    assert default_config(entry).loss == LossConfig(name="n_pair", params={"scale": 100.0, "l2": 0.0})
    entry["override"]["loss.scale"] = 5.0
    assert default_config(entry).loss.params == {"scale": 5.0, "l2": 0.0}


def test_an_override_reaches_a_parameter_under_one_loss_or_under_all() -> None:
    entry: dict[str, Any] = {"space": "graph_consistency", "override": {"loss.alpha@binomial_deviance": 3.0}}
    found, family = only(entry)
    alphas = {(v["loss.name"], v["loss.alpha"]) for v in found.corners(family) if "loss.alpha" in v}
    assert {alpha for loss, alpha in alphas if loss == "binomial_deviance"} == {3.0}
    assert {alpha for loss, alpha in alphas if loss == "multi_similarity"} == {1.0, 2.0, 10.0}
    found, family = only({"space": "graph_consistency", "override": {"loss.alpha": 3.0}})
    assert {values.get("loss.alpha", 3.0) for values in found.corners(family)} == {3.0}


def test_a_regularizer_comes_from_the_family_the_study_or_an_override() -> None:
    structure = {"name": "structure", "weight": {"float": [1, 2]}}
    assert default_config({"space": "triplet"}).regularizer is None
    ours = default_config({"space": "structure"}).regularizer
    assert ours is not None
    assert (ours.name, ours.params["preset"], ours.params["eta_floor"]) == ("structure", "official", 0.2)
    expected = LossConfig(name="structure", params={"weight": 1.0})
    override = {"regularizer": structure}
    assert default_config({"space": "triplet", "override": override}).regularizer == expected
    assert default_config({"space": "triplet"}, regularizer=structure).regularizer == expected
    # the study's goes over the family's as a whole, and an override over both
    assert default_config({"space": "graph_consistency"}, regularizer=structure).regularizer == expected
    changed = {"space": "structure", "override": {"regularizer.weight": 4, "regularizer.preset": "paper"}}
    config = default_config(
        changed, regularizer={"name": "structure", "preset": {"choice": ["paper"]}, "weight": 1}
    )
    assert config.regularizer == LossConfig(name="structure", params={"preset": "paper", "weight": 4})


def test_a_regularizer_may_be_none() -> None:
    found, family = only({"space": "structure", "override": {"regularizer.name": "none"}})
    assert not any(name.startswith("regularizer") for name in family.space)
    assert found.trial_config(family, study_file.default_values(family)).regularizer is None
    assert default_config({"space": "structure"}, regularizer={"name": "none"}).regularizer is None
    name = {"choice": {"none": {}, "structure": {"weight": {"float": [1, 2]}}}}
    found, family = only({"space": "triplet", "override": {"regularizer": {"name": name}}})
    configs = [found.trial_config(family, values) for values in found.corners(family)]
    assert configs[0].regularizer is None
    weights = {config.regularizer.params["weight"] for config in configs if config.regularizer}
    assert weights == {1.0, 2.0}


def test_a_regularizer_with_a_weight_for_each_term() -> None:
    found, family = only({"space": "graph_consistency"})
    seen = {(values["regularizer.term"], values["regularizer.weight"]) for values in found.corners(family)}
    assert seen == {
        ("gc_bar", 2e-3), ("gc_bar", 1e-5), ("gc_bar", 1e-1), ("gc", 1e-2), ("gc", 1e-4), ("gc", 1.0)
    }  # fmt: skip
    assert family.default_point()["a/regularizer.weight@gc_bar"] == 2e-3


def test_the_parameters_of_a_family_for_people() -> None:
    assert study_file.parameters(only({"space": "contrastive"})[1].space) == [
        "positive_margin, negative_margin"
    ]
    assert study_file.parameters(only({"space": "distance_levels"})[1].space) == [
        "margin, mining",
        "+ distance_levels: weight, momentum",
    ]
    assert study_file.parameters(only({"space": "graph_consistency"})[1].space) == [
        "triplet_weighting: weighting, distance, margin",
        "n_pair: scale, l2",
        "binomial_deviance: alpha, beta, negative_weight",
        "multi_similarity: alpha, beta, threshold, epsilon",
        "+ graph_consistency: term, sigma_mode, draw",
    ]


SAME = study_file.parse(study()).fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"training__epochs": 3},
        {"search__seed": 1},
        {"search__trials_per_family": 3},
        {"protocol__num_folds": 1},
        {"data__image_size": 16},
        {"families__margin__override": {"loss.beta": 1.0}},
        {"families__margin__override": {"loss.name": "triplet"}},
        {"regularizer": {"name": "structure"}},
        {"families": {"contrastive": {"space": "contrastive"}}},
        {"resources__workers": 2},  # another world size may give other last digits
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_fingerprint_changes_with_the_meaning(changes: dict[str, Any]) -> None:
    assert study_file.parse(study(**changes)).fingerprint() != SAME


def test_the_fingerprint_keeps_when_only_the_resources_change(tmp_path: Path) -> None:
    assert len(SAME) == 16
    raw = study(
        resources__max_concurrent_trials=1, resources__cpus_per_worker=2, resources__storage_path="/x"
    )
    assert study_file.parse(raw).fingerprint() == SAME
    assert study_file.parse(dict(reversed(study().items()))).fingerprint() == SAME


def test_the_fingerprint_follows_the_content_of_a_family_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    prints = []
    for high in (0.2, 0.3):
        file.write_text(f"loss: {{name: margin, alpha: {{float: [0.1, {high}]}}}}\n")
        prints.append(study_file.parse(study(families={"a": {"space": str(file)}})).fingerprint())
    assert prints[0] != prints[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_point_of_another_space_is_completed_with_defaults(name: str) -> None:
    """From nothing the default point is made; from a choice alone, whatever the choice brings at its defaults."""
    found = study_file.parse(study(families={"x": {"space": name}}))
    (subsearch,), family = subsearches_of(found), found.families["x"]
    assert subsearch.completed("x", {}) == family.default_point()
    assert subsearch.completed("x", {"x/gone": 1.0}) == family.default_point()
    for corner in family.corners():
        (drawn, _) = Point.read(subsearch.completed("x", corner), subsearch.sample)
        assert drawn[1] in found.corners(family)


def test_corners_reach_under_every_choice() -> None:
    found = study_file.parse(study(families={"a": {"space": "pair_weighting"}}))
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


def test_views_of_images_are_searched_and_checked() -> None:
    flip = {"float": [0, 1], "default": 0.5}
    views = {"crop": {"choice": ["none", "random_resized"], "default": "random_resized"}, "flip": flip}
    found = checked(study(augmentation=views, batch__draw="random"))
    family = found.families["margin"]
    config = found.trial_config(family, study_file.default_values(family))
    assert (config.augmentation.crop, config.augmentation.flip) == ("random_resized", 0.5)
    assert {"augmentation.crop", "augmentation.flip"} <= set(family.space)
    assert config.batch.draw == "random"
    with pytest.raises(
        SpecError, match=r"families\.contrastive\.augmentation\.crop: a random crop .*padding"
    ):
        checked(study(augmentation={"crop": "random"}))
    with pytest.raises(SpecError, match=r"augmentation\.flip"):
        checked(study(augmentation={"flip": 1.5}))


def test_keys_that_came_later_change_no_earlier_study() -> None:
    """Known from the version before these keys: a study and a trial of it, which a store may hold interrupted."""
    raw = {
        "name": "s",
        "data": {"name": "digits"},
        "families": {"red": {"space": "contrastive"}, "blue": {"space": "multi_similarity"}},
    }
    found = study_file.as_begun(study_file.parse(raw), "41171dbb8e8d54d6")
    config = found.trial_config(found.families["red"], study_file.default_values(found.families["red"]))
    assert (found.fingerprint(), config.fingerprint()) == ("41171dbb8e8d54d6", "eacb42adce096109")
    other = study_file.parse(raw | {"training": {"deterministic": "always"}})
    assert other.fingerprint() != found.fingerprint()


UNUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"loss.weighting": "constant", "loss.mining": "margin", "loss.epsilon": 0.2, "loss.p": 2.0},
        "families.f.override.loss.p: 2.0 is not used by loss.weighting: constant; leave it out, or set loss.weighting:"
        " power",
    ),
    (
        {"loss.weighting": {"choice": ["power", "constant"], "default": "power"}, "loss.p": 1.0},
        "families.f.override.loss.p: 1.0 is not used by loss.weighting: constant; leave it out, or put it under the"
        " options of loss.weighting that use it: power",
    ),
    (
        {"regularizer": {"name": "graph_consistency", "sigma_mode": "median", "sigma": 2.0}},
        "families.f.override.regularizer: sigma: 2.0 is not used by regularizer.sigma_mode: median; leave it out, or"
        " set regularizer.sigma_mode: fixed",
    ),
]
"""Overrides of ``UNCONDITIONAL``, and what is said of them."""

UNCONDITIONAL = "loss: {name: pair_weighting, weighting: power, mining: threshold, p: 0.0, epsilon: 0.1}\n"


@pytest.mark.parametrize(("override", "message"), UNUSED)
def test_a_parameter_without_effect_is_refused_in_new_studies_alone(
    override: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Stored studies of earlier versions may have such, and are resumed by ``parse``."""
    space = tmp_path / "own.yaml"
    space.write_text(UNCONDITIONAL.replace("threshold", "margin"))
    raw = {
        "name": "s",
        "data": {"name": "digits"},
        "families": {"f": {"space": str(space), "override": override}},
    }
    with pytest.raises(SpecError, match=re.escape(message)):
        study_file.given(raw)
    assert study_file.parse(raw).families["f"].name == "f"


def test_a_parameter_of_a_family_s_file_without_effect_is_refused(tmp_path: Path) -> None:
    space = tmp_path / "own.yaml"
    space.write_text(UNCONDITIONAL)
    raw = {"name": "s", "data": {"name": "digits"}, "families": {"f": {"space": str(space)}}}
    with pytest.raises(
        SpecError, match=r"families.f: loss.epsilon: 0.1 is not used by loss.mining: threshold"
    ):
        study_file.given(raw)


def test_values_from_python_replace_some_of_the_study() -> None:
    raw = {"name": "s", "data": {"name": "digits"}, "families": {"f": {"space": "contrastive"}}}
    spec = study_file.given(raw, "t", {"training.lr": 1e-05, "families.f.override.loss.negative_margin": 0.5})
    assert spec.name == "t"
    values = study_file.default_values(spec.families["f"])
    assert (values["training.lr"], values["loss.negative_margin"]) == (1e-05, 0.5)
    with pytest.raises(SpecError, match=r"^overrides: trainning\.lr: unknown key; did you mean 'training'"):
        study_file.given(raw, None, {"trainning.lr": 1})
