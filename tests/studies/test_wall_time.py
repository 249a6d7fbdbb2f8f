"""What ``validate`` says of the time: of what ``run`` does on this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmlstudy.records import ResourcesConfig
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.studies import checks, estimate, wall_time
from dmlstudy.studies.wall_time import Machine, Seconds, num_at_once, wall_seconds
from dmlstudy.text import LINE
from dmlstudy.training.interface import TrialFailed

FOUR_CPUS = Machine({"CPU": 4.0, "GPU": 0.0})


def study(**changes: Any) -> StudySpec:
    return study_file.parse(
        {
            "name": "small",
            "data": {"name": "digits"},
            "embedder": {"dim": 8, "width": 4},
            "batch": {"classes": "all", "images_per_class": 4},
            "training": {"epochs": 2},
            "families": {"a": {"space": "contrastive"}, "b": {"space": "margin"}},
            "search": {"trials_per_family": 6},
            "protocol": {"num_folds": 2, "verdict_seeds": 3},
            "resources": {"workers": 1},
        }
        | changes
    )


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"workers": 1}, 4),
        ({"workers": 2}, 2),
        ({"workers": 1, "cpus_per_worker": 3}, 1),
        ({"workers": 1, "max_concurrent_trials": 3}, 3),
        ({"workers": 8}, 0),
        ({"workers": 1, "gpus_per_worker": 1}, 0),
    ],
)
def test_as_many_at_once_as_ray_holds_here(resources: dict[str, Any], expected: int) -> None:
    assert num_at_once(ResourcesConfig(**resources), FOUR_CPUS) == expected


def test_generations_wait_for_their_longest_trial_and_the_verdict_does_not() -> None:
    trials = {"a": Seconds(10, 1), "b": Seconds(20, 2)}
    one_by_one = study()
    assert wall_seconds(one_by_one, trials, 1, 6) == 6 * 30 + 3 * 3
    # A generation has one trial of each family: two at once, the longer one decides; four help the verdict.
    assert wall_seconds(one_by_one, trials, 2, 6) == 6 * 20 + 5
    assert wall_seconds(one_by_one, trials, 4, 6) == 6 * 20 + 3
    wide = study(search={"trials_per_family": 6, "generation_size": 2})
    assert wall_seconds(wide, trials, 4, 6) == 3 * 20 + 3
    free = study(search={"trials_per_family": 6, "deterministic": False})
    assert wall_seconds(free, trials, 4, 6) == 50 + 3
    huge = study(search={"trials_per_family": 100_000, "deterministic": False})
    assert wall_seconds(huge, trials, 4, 100_000) == 30 * 100_000 / 4 + 3


def said(found: StudySpec, machine: Machine, seconds: dict[str, Seconds] | None, **patches: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "this_machine", lambda: machine)
        if seconds is not None:
            patch.setattr(estimate, "_seconds", lambda found, dataset, name: seconds[name])
        for name, value in patches.items():
            patch.setattr(estimate, name, value)
        return estimate.describe(found, checks.check_parts(found), measure=True)


def test_the_time_is_of_what_runs_here() -> None:
    trials = {"a": Seconds(10, 1), "b": Seconds(20, 2)}
    lines = said(study(), Machine({"CPU": 2.0, "GPU": 0.0}), trials)
    assert "here: 2 at once on 2 CPU and no GPU" in lines
    assert lines[-1] == (
        "time: at most about 2:25 min, 2 at once on this machine (measured on a few batches in one process; early"
        " stopping makes it less); 67% of it is b"
    )


def test_the_money_is_of_all_workers_hours() -> None:
    trials = {"a": Seconds(1000, 500), "b": Seconds(1000, 500)}
    line = said(study(resources={"workers": 2, "cost_per_hour": 0.9}), FOUR_CPUS, trials)[-1]
    assert (
        "; cost: at most about 7.50 of worker time; " in line
    )  # 12 trials, 6 verdict trials: 15,000 s twice


def test_a_long_study_is_told_how_to_look_sooner() -> None:
    trials = {"a": Seconds(1000, 500), "b": Seconds(1000, 500)}
    line = said(study(), Machine({"CPU": 2.0, "GPU": 0.0}), trials)[-1]
    assert line.startswith("time: at most about 2:05 h, 2 at once")
    assert line.endswith(
        "; a first look takes 29:30 min: --name first-look --set training.epochs=1 --set search.trials_per_family=2"
    )


def test_what_this_machine_cannot_hold_is_for_a_cluster() -> None:
    trials = {"a": Seconds(10, 1), "b": Seconds(20, 2)}
    lines = said(study(resources={"workers": 1, "gpus_per_worker": 1}), FOUR_CPUS, trials)
    assert not [line for line in lines if line.startswith("here: ")]
    (line,) = (line for line in lines if line.startswith("this machine"))
    assert line.startswith("this machine (4 CPU and no GPU) cannot hold a trial: it needs a cluster that can")
    assert ", one trial at a time on a machine like this one" in lines[-1]


def test_what_may_surprise_is_noted() -> None:
    assert not [
        line for line in said(study(), FOUR_CPUS, {"a": Seconds(1, 1), "b": Seconds(1, 1)}) if "note" in line
    ]
    none = {"a": Seconds(0, 0), "b": Seconds(0, 0)}
    lines = said(study(training={"epochs": 0}, data={"name": "digits", "image_size": 96}), FOUR_CPUS, none)
    first, second = (line for line in lines if line.startswith("note: "))
    assert first.startswith("note: training.epochs is 0: nothing is trained")
    assert second.startswith(
        "note: embedder.backbone: small_conv is made for sides of up to 64 pixels, and these have 96"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TrialFailed("epoch 1: the loss is nan\nmore"), "a few batches could not be trained: epoch 1: the loss"),
        (MemoryError(), "a batch does not fit this machine's memory; set batch.classes"),
        (RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 10 bytes"), "a batch does not fit"),
        (OverflowError(), "a few batches could not be trained: OverflowError"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_line(error: Exception, message: str) -> None:
    def fail(*arguments: object) -> Seconds:
        raise error

    threads = torch.get_num_threads()
    with pytest.raises(SpecError) as caught:
        said(study(), FOUR_CPUS, None, _seconds=fail)
    assert str(caught.value).startswith(f"families.a: {message}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= LINE
    assert torch.get_num_threads() == threads


def test_a_batch_that_fills_this_machine_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.os, "sysconf", lambda name: 2**12)  # a machine of 16 MiB
    for found in (study(), study(batch={"classes": "all", "images_per_class": 1000})):
        dataset = checks.check_parts(found)
        if found.file.batch["images_per_class"] == 4:
            estimate._check_memory(found, dataset, "a")
            continue
        with pytest.raises(
            SpecError, match=r"^families\.a: a batch of 5000 items of 8 x 8 x 1 .* machine has 0; set"
        ):
            estimate._check_memory(found, dataset, "a")


def test_a_batch_in_chunks_needs_less_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 250 images of 64 pixels the distances are 250 kB, the numbers 64 kB; a chunk of 5 and the pixels 17 kB."""
    monkeypatch.setattr(estimate.os, "sysconf", lambda name: 768)  # half of it are 288 KiB
    batch = {"classes": "all", "images_per_class": 50}
    whole, in_chunks = study(batch=batch), study(batch=batch | {"chunk": 5})
    estimate._check_memory(in_chunks, checks.check_parts(in_chunks), "a")
    with pytest.raises(SpecError, match="a batch of 250 items"):
        estimate._check_memory(whole, checks.check_parts(whole), "a")


def test_each_family_is_named_while_it_is_measured() -> None:
    told: list[str] = []
    found = study()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "_seconds", lambda *arguments: Seconds(1, 1))
        estimate.describe(found, checks.check_parts(found), measure=True, tell=told.append)
    assert told == ["measuring a, family 1 of 2", "measuring b, family 2 of 2"]


def test_this_machine_has_what_ray_counts() -> None:
    machine = wall_time.this_machine()
    assert machine.cpus >= 1
    assert machine.gpus == torch.cuda.device_count()
