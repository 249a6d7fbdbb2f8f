"""A recipe's keys in study files: searched, checked before a trial begins, and without a trace at their defaults."""

from __future__ import annotations

from typing import Any

import pytest

from dmlstudy.losses import catalogue
from dmlstudy.records import TrainingConfig
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.studies import checks
from dmlstudy.training import recipe


def study(**changes: Any) -> dict[str, Any]:
    """A small sound study, changed at names such as ``training`` or ``training__lr``."""
    raw: dict[str, Any] = {
        "name": "small",
        "data": {"name": "digits"},
        "embedder": {"dim": 8, "width": 4},
        "batch": {"classes": "all", "images_per_class": 4},
        "training": {"epochs": 2},
        "families": {"contrastive": {"space": "contrastive"}, "margin": {"space": "margin"}},
        "search": {},
        "protocol": {"num_folds": 2},
        "resources": {"workers": 1},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        raw[section] = {**raw.get(section, {}), key: value} if key else value
    return raw


def checked(raw: dict[str, Any]) -> StudySpec:
    found = study_file.parse(raw)
    checks.check_parts(found)
    return found


DOMAINS: dict[str, Any] = {
    "loss_lr_mult": 1,
    "loss_lr": {"float": [1e-5, 10], "log": True, "default": 0.1},
    "schedule": {
        "choice": {
            "constant": {},
            "cosine": {"lr_floor": {"float": [0, 0.1]}},
            "step": {"step_at": {"choice": ["0.5 0.75", "1"]}, "step_factor": {"float": [0.1, 0.5]}},
        }
    },
    "warmup_epochs": {"float": [0, 1]},
    "layer_decay": {"float": [0.5, 1], "default": 0.75},
    "unfreeze_last": {"choice": [0, 1, "all"], "default": "all"},
    "decay_norms": {"choice": [True, False]},
    "clip_norm": {"float": [0.1, 10], "log": True},
    "clip_loss_norm": {"float": [0.1, 10], "log": True},
    "fused": {"choice": [False, True]},
    "checkpointing": {"choice": [False, True]},
}


def test_every_key_of_a_recipe_can_be_searched() -> None:
    spec = checked(study(training=DOMAINS | {"epochs": 2}))
    for family in spec.families.values():
        configs = [spec.trial_config(family, values).training for values in spec.corners(family)]
        for key in DOMAINS.keys() - {"loss_lr_mult"}:
            assert len({getattr(config, key) for config in configs}) > 1, key
        assert {config.step_at for config in configs} == {"0.5 0.75", "1"}


def test_defaults_leave_no_trace() -> None:
    plain = study_file.parse(study())
    written = study_file.parse(study(training__schedule="constant", training__unfreeze_last="all"))
    configs = [
        spec.trial_config(spec.families["margin"], study_file.default_values(spec.families["margin"]))
        for spec in (plain, written)
    ]
    assert configs[0].fingerprint() == configs[1].fingerprint()
    assert plain.task.logged_params(configs[1]) == plain.task.logged_params(configs[0])
    assert not {
        name for name in plain.task.logged_params(configs[0]) if "schedule" in name or "unfreeze" in name
    }
    assert set(TrainingConfig().model_dump()) & set(TrainingConfig.LATER) == set()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"head_depth": 2}, r"loss\.name: adaface learns from the norms .* beside embedder\.head_depth: 2"),
        ({"code": "tanh"}, r"has no meaning beside embedder\.code: tanh"),
        ({"fusion": "unit_heads"}, r"has no meaning beside embedder\.fusion: unit_heads"),
    ],
)
def test_a_loss_of_norms_needs_norms_that_differ(own: dict[str, Any], said: str) -> None:
    families = {"x": {"space": "adaface"}}
    checked(study(families=families))
    with pytest.raises(SpecError, match=said):
        checked(study(families=families, embedder={"dim": 8, "width": 4} | own))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"embedder__dim": 64},
            r"embedder\.dim: 64 stands beside embedder\.head: none, which gives the 256 features",
        ),
        ({"embedder__head_depth": 1}, r"embedder\.head: none has no place beside embedder\.head_depth: 1"),
        (
            {"training__unfreeze_last": 0},
            r"training\.unfreeze_last: 0 freezes the backbone, and embedder\.head: none",
        ),
        (
            {"training__freeze_backbone_epochs": 1},
            r"training\.freeze_backbone_epochs: 1 freezes the backbone",
        ),
    ],
)
def test_an_embedder_without_a_head_is_checked_before_a_trial(changes: dict[str, Any], said: str) -> None:
    bare = {"dim": 256, "width": 4, "head": "none"}
    checked(study(embedder=bare))
    section, _, key = next(iter(changes)).partition("__")
    raw = study(embedder=bare)
    raw[section] = raw[section] | {key: next(iter(changes.values()))}
    with pytest.raises(SpecError, match=said):
        checked(raw)


@pytest.mark.parametrize("step_at", [[0.4, 0.6, 0.8], "0.4 0.6 0.8", ["0.4", 0.6, 0.8]])
def test_epochs_may_be_a_list(step_at: Any) -> None:
    for changes in (
        {"training__step_at": step_at},
        {"families": {"a": {"space": "margin", "override": {"training.step_at": step_at}}}},
    ):
        spec = checked(study(training__schedule="step", **changes))
        family = next(iter(spec.families.values()))
        assert spec.trial_config(family, study_file.default_values(family)).training.step_at == "0.4 0.6 0.8"


def test_a_study_of_steps_may_be_tried_with_one_epoch() -> None:
    checked(study(training={"epochs": 1, "schedule": "step", "step_at": "0.5 0.75"}))
    checked(study(training={"epochs": 50, "schedule": "step", "step_at": "40 60 80"}))


def test_one_number_is_a_list_too() -> None:
    assert TrainingConfig.model_validate({"step_at": 0.5}).step_at == "0.5"
    assert TrainingConfig.model_validate({"step_at": (40, 60)}).step_at == "40 60"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__lr": [1e-5, 1e-4]}, r"training\.lr: expected a value or a domain such as"),
        (
            {"training__lr_floor": 0.1},
            r"families\.contrastive\.training\.lr_floor: 0\.1 is not used by .*constant; ",
        ),
        (
            {"training": {"epochs": 2, "schedule": "step", "step_at": "40 60"}},
            r"contrastive\.training\.step_at: 40 60 lies beyond training\.epochs: 2, so that the rates would",
        ),
        ({"training__warmup_epochs": 2.0}, r"contrastive\.training\.warmup_epochs: 2 is not shorter than"),
        (
            {"training__loss_lr": 0.1},
            r"families\.margin\.training\.loss_lr: 0\.1 is the rate .*loss_lr_mult: 1 where",
        ),
        (
            {"training__unfreeze_last": 4},
            r"training\.unfreeze_last: 4 blocks, but the backbone has 3; set it",
        ),
        ({"training__unfreeze_last": "last"}, r"training\.unfreeze_last: input should be "),
        (
            {"batch__images_per_class": 1},
            r"contrastive\.batch\.images_per_class: 1 leaves this loss without a pair",
        ),
        (
            {"batch__images_per_class": 0},
            r"batch\.images_per_class: input should be greater than or equal to 1",
        ),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_before_a_trial_begins(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        checked(study(**changes))


def test_rungs_under_a_schedule_that_ends_low_are_pointed_out() -> None:
    def notes(**changes: Any) -> list[str]:
        return [note for note in study_file.parse(study(**changes)).notes if "schedule" in note]

    cosine = {"training__schedule": {"choice": ["constant", "cosine"]}}
    (note,) = notes(**cosine)
    assert note.startswith(
        "training.schedule: cosine ends low, so that scores at the rungs of search.scheduler"
    )
    assert notes(**cosine, search__scheduler="none") == []
    assert notes() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"training__unfreeze_last": {"float": [0, 2]}},
        {"training__decay_norms": {"float": [0, 1]}},
        {"augmentation__randaugment": {"float": [0, 3]}},
        {"batch__chunk": {"choice": {1: {}, 8: {}}}, "batch__images_per_class": {"float": [2, 4]}},
    ],
)
def test_a_real_domain_of_a_key_without_real_values_is_refused(changes: dict[str, Any]) -> None:
    key = list(changes)[-1].replace("__", ".")
    with pytest.raises(SpecError, match=rf"families\.contrastive\.{key}: input should be a valid"):
        study_file.parse(study(**changes))


def test_cached_views_need_a_view_somewhere_in_the_space() -> None:
    flip = {"float": [0, 0.5]}
    checked(study(training__cached_views=2, augmentation={"flip": flip}))
    for without in ({}, {"flip": 0}, {"magnitude": 5}):
        with pytest.raises(SpecError, match=r"contrastive\.training\.cached_views: without augmentation"):
            checked(study(training__cached_views=2, augmentation=without))


@pytest.mark.parametrize("key", ["hue", "grey"])
def test_views_of_colours_are_refused_for_grey_images_before_a_trial_begins(key: str) -> None:
    for domain in (0.1, {"float": [0, 0.4]}):
        with pytest.raises(
            SpecError, match=rf"^families\.contrastive\.augmentation\.{key}: the images are grey "
        ):
            checked(study(augmentation={key: domain}))
    checked(study(augmentation={"jitter": 0.4}))


def test_the_losses_of_norms_are_those_of_the_catalogue() -> None:
    assert {name for name in catalogue.CATALOGUE if catalogue.kind_of(name).uses_norms} == set(recipe.BY_NORM)
