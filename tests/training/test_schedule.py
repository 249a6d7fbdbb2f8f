"""Learning-rate schedules: their formulas, planned length alone, and what is refused."""

from __future__ import annotations

import math

import pytest

from dmlstudy.training.schedule import Schedule, milestones, planned


def factors(kind: str, *batches: int, **options: float) -> list[float]:
    schedule = planned(kind, 10, 10, step_at="0.5 0.75", **options)  # type: ignore[arg-type]
    return [schedule.factor(u) for u in batches]


def test_values_of_each_schedule() -> None:
    expected = [0.1, 1.0, 1.0, 0.5, 0.000304586]
    assert factors("cosine", 0, 9, 10, 55, 99, warmup_epochs=1) == pytest.approx(expected, abs=1e-9)
    assert factors("cosine", 55, 99, warmup_steps=10, floor=0.2) == pytest.approx(
        [0.6, 0.2 + 0.8 * 0.000304586]
    )
    assert factors("linear", 0, 50, 99) == pytest.approx([1, 0.5, 0.01])
    assert factors("linear", 50, floor=0.5) == [0.75]
    assert factors("constant", 0, 4, 5, 99, warmup_epochs=0.5) == [0.2, 1, 1, 1]
    assert factors("step", 0, 49, 50, 69, 70, 99) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert factors("step", 0, 9, 50, warmup_steps=10, step_factor=0.2) == pytest.approx([0.1, 1, 0.2])


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "step"])
def test_factors_lie_within_bounds_and_fall_after_the_warm_up(kind: str) -> None:
    schedule = planned(kind, 7, 13, warmup_epochs=1.3, floor=0.01, step_at="0.5 0.75")
    values = [schedule.factor(u) for u in range(7 * 13)]
    warmup = round(1.3 * 13)
    assert all(0 < value <= 1 for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup - 1] == values[warmup] == 1
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


def test_the_schedule_of_a_paper() -> None:
    """Structure embeddings: times 0.2 at epochs 40, 60 and 80."""
    for text in ("0.4 0.6 0.8", "0.4, 0.6, 0.8", "40 60 80"):
        schedule = planned("step", 100, 3, step_at=text, step_factor=0.2)
        values = [schedule.factor(3 * epoch) for epoch in (0, 39, 40, 59, 60, 79, 80, 99)]
        assert values == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008])
        assert schedule.factor(3 * 40 - 1) == 1


def test_shares_are_rounded_down_to_whole_epochs() -> None:
    assert milestones("0.29 0.5", 100) == (29, 50)  # 0.29 * 100 is 28.999... in floating point
    assert milestones("0.5 0.75", 5) == (2, 3)
    assert milestones("0.5 0.75", 1) == (1, 1)  # the first epoch is at full rates
    assert milestones("40", 60) == (40,)


@pytest.mark.parametrize("text", ["", "half", "0", "-1", "1.5", "nan", "inf", "0.5;0.75", "1e28", "1e999999"])
def test_other_places_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"training\.step_at: .*; write as 0\.5 0\.75, or 40 60 80"):
        milestones(text, 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup_epochs": 10.0}, "training.warmup_epochs: 10 is not shorter than training.epochs: 10"),
        (
            {"warmup_steps": 100},
            "training.warmup_steps: 100 is not shorter than the 100 batches of 10 epochs",
        ),
    ],
)
def test_a_warm_up_is_shorter_than_the_training(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        factors("cosine", 0, **options)
    assert planned("cosine", 0, 10, **options) == Schedule("cosine", 0, 10, *_warmup(options))  # type: ignore[arg-type]


def _warmup(options: dict[str, float]) -> tuple[int]:
    return (int(options.get("warmup_steps") or math.floor(options["warmup_epochs"] * 10)),)
