"""What the page, the command and its JSON say of parameters: the same, in words that follow from the numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loaded_page import parsed
from support.made_study import Maker

import dmlstudy
from dmlstudy import cli
from dmlstudy.report import sensitivities
from dmlstudy.search.history import Parameter, Searched, Tried
from dmlstudy.search.sensitivity import Influence, Sensitivity
from dmlstudy.store import Store
from dmlstudy.trials import Status

STRONG = Sensitivity(change=0.12, low=0.08, high=0.17)
WEAK = Sensitivity(change=0.01, low=0.0, high=0.02)
WIDE = Sensitivity(change=0.05, low=0.0, high=0.2)
FEW = Sensitivity(untold="6 of 11 trials needed")


def searched(family: str = "f", num: int = 19, **known: Sensitivity | None) -> Searched:
    trials = [
        Tried(number=n, status=Status.FINISHED, score=0.5, params={}, curve={}, reason="") for n in range(num)
    ]
    return Searched(
        family=family,
        trials=trials,
        parameters=[Parameter(name=name, high=1, sensitivity=each) for name, each in known.items()],
    )


def test_the_sentence_of_one_family() -> None:
    said = sensitivities.sentence([searched(lr=STRONG, p=WEAK, margin=WIDE, dim=FEW)], "map_at_r")
    assert said == (
        "What matters is lr (moves map_at_r by 0.120 [0.080, 0.170]); beside it p (0.010 [0.000, 0.020]) does not;"
        " of margin (0.050 [0.000, 0.200]) these trials cannot tell; nothing is known of dim (6 of 11 trials needed)."
    )
    assert sensitivities.sentence([searched(p=WEAK)], "map_at_r") == (
        "Of p (0.010 [0.000, 0.020]) these trials cannot tell."
    )


def test_a_table_in_which_nothing_is_known_is_left_out() -> None:
    assert len(sensitivities.parts([searched(num=6, lr=FEW)], "map_at_r")) == 2
    assert len(sensitivities.parts([searched(num=6, lr=FEW), searched("g", lr=WIDE)], "map_at_r")) == 4


def test_too_few_trials_are_said_to_be_too_few() -> None:
    assert sensitivities.sentence([], "map_at_r") == ""
    assert sensitivities.sentence([searched()], "map_at_r") == ""
    assert sensitivities.sentence([searched(num=6, lr=FEW)], "map_at_r") == (
        "6 finished trials are too few to tell what matters: lr (6 of 11 trials needed)."
    )
    assert sensitivities.sentence([searched(num=1, lr=None)], "map_at_r") == (
        "1 finished trial is too few to tell what matters: lr (no two trials with different scores)."
    )


def test_of_families_with_too_few_trials_the_nearest_is_named() -> None:
    """Whoever asks in which order; and trials that were stopped early are trials."""
    far, near = (
        Sensitivity(untold=f"8 of {needed} trials needed", num_lacking=needed - 8) for needed in (12, 9)
    )
    families = [searched("red", 1, lr=far), searched("blue", 1, lr=near)]
    stopped = [each.model_copy(update={"status": Status.PRUNED}) for each in searched(num=7).trials]
    families = [each.model_copy(update={"trials": [*each.trials, *stopped]}) for each in families]
    for order in (families, families[::-1]):
        assert sensitivities.sentence(order, "map_at_r") == (
            "2 finished and 14 stopped trials are too few to tell what matters: lr (8 of 9 trials needed in blue)."
        )


def test_over_families_the_clearest_is_named() -> None:
    families = [
        searched("red", lr=STRONG, p=WEAK),
        searched("blue", lr=STRONG.model_copy(update={"low": 0.1}), p=WIDE),
        searched("green", lr=WIDE),
    ]
    assert sensitivities.sentence(families, "map_at_r") == (
        "What matters is lr (in 2 of 3 families, most in blue: moves map_at_r by 0.120 [0.100, 0.170]);"
        " beside it p (in 1 of 2 families, at most 0.010 [0.000, 0.020]) does not."
    )


def test_many_parameters_are_counted() -> None:
    known: dict[str, Any] = {f"p{number:02}": STRONG for number in range(40)}
    said = sensitivities.sentence([searched(**known)], "map_at_r")
    assert said.count("moves map_at_r") == sensitivities.MOST_NAMED
    assert said.endswith(" and 35 others.")
    assert len(sensitivities.effects([searched(**known)])) == 40


@pytest.fixture(scope="module")
def moved(store: Store) -> Maker:
    """Two families in which the learning rate moves the score by 0.1 and the margin does not."""
    maker = Maker(store, "moved")
    rng = np.random.default_rng(0)
    for family in ("red", "<b onclick=x>\x1b[31mblue"):
        for _ in range(22):
            place, margin = rng.random(2)
            score = float(0.5 + 0.1 * place + rng.normal(0, 0.002))
            maker.search(
                family,
                "finished",
                score,
                training__lr=float(10 ** (-4 + 2 * place)),
                loss__margin=float(0.1 + 0.4 * margin),
                loss__weighting=["power", "exponential"][rng.integers(2)],
            )
    maker.end("red")
    return maker


def test_page_command_and_json_say_the_same(
    moved: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(*more: str) -> str:
        line = ["dmlstudy", "report", "moved", "-o", str(tmp_path / "page.html"), "--without-examples", *more]
        monkeypatch.setattr(sys, "argv", [*line, "--store", str(moved.store.root)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    facts = json.loads(called("--json"))
    assert facts["matters"].startswith("What matters is training.lr (in 2 of 2 families, most in ")
    assert "beside it loss.margin (" in facts["matters"]
    of_red = {each["parameter"]: each for each in facts["parameters"] if each["family"] == "red"}
    assert of_red.keys() == {"training.lr", "loss.margin", "loss.weighting"}
    assert 0.08 < of_red["training.lr"]["low"] < 0.095 < of_red["training.lr"]["high"] < 0.12
    assert of_red["training.lr"]["influence"] == "matters"
    assert of_red["loss.margin"]["influence"] == "does not"
    assert sum(each["importance"] for each in of_red.values()) == pytest.approx(1)
    shown = called()
    assert "\x1b" not in shown
    assert "What matters is training.lr (in 2 of 2 families, most in " in shown
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = parsed(text)
    assert found.handlers == []
    assert len(found.scripts) == 2
    cell = of_red["training.lr"]
    assert f"<b>{cell['change']:.3f} <span" in text
    assert f"[{cell['low']:.3f}, {cell['high']:.3f}]" in text
    assert re.search(r"<th scope=\"row\">training\.lr</th>.*<th scope=\"row\">loss\.margin</th>", text)


def test_the_interface_gives_the_same_rows(moved: Maker) -> None:
    frame = dmlstudy.load(moved.store.root, "moved").parameters()
    assert list(frame.columns) == list(sensitivities.ParameterEffect.model_fields)
    assert set(frame.influence) <= set(Influence)
    own = frame[(frame.family == "red") & (frame.parameter == "training.lr")].iloc[0]
    assert 0.08 < own.low < 0.095 < own.high < 0.12


def test_a_study_with_little_is_said_to_have_little(small: Maker) -> None:
    frame = dmlstudy.load(small.store.root, "small").parameters()
    assert set(frame.family) == {"alpha", "gamma"}
    assert set(frame.why) == {
        "6 of 10 trials needed",
        "6 of 9 trials needed",
        "no two trials with different scores",
    }
    assert frame.change.isna().all()
