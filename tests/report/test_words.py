"""The verdict in a sentence, and tables whose numbers are the leaderboard's."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.made_study import Maker

from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.history import history
from dmlstudy.registry.leaderboard import FrontTrial, Leaderboard, Row, leaderboard
from dmlstudy.registry.runs import Run
from dmlstudy.report import words
from dmlstudy.verdict.comparison import compare


def row(family: str, validation: float | None, scores: list[float], **known: Any) -> Row:
    given: dict[str, Any] = {
        "num_finished": 1,
        "num_pruned": 0,
        "num_failed": 0,
        "num_judged": len(scores),
        "validation_stderr": None,
        "params": {},
        "untrained": None,
        "test": {"test_map_at_r": Estimate.of(scores)} if scores else {},
    }
    return Row(family=family, validation=validation, **(given | known))


def board(scores: dict[str, list[float]], winner: str | None = "a", **known: Any) -> Leaderboard:
    by_seed = {family: dict(enumerate(own, 1)) for family, own in scores.items()}
    rows = [
        row(
            family,
            None if family == "untrained" else 0.9 - number / 10,
            own,
            untrained=None if family == "untrained" or "untrained" not in scores else "untrained",
        )
        for number, (family, own) in enumerate(scores.items())
    ]
    judged = {family: own for family, own in by_seed.items() if own}
    given: dict[str, Any] = {
        "study": "s",
        "objective": "map_at_r",
        "second_objective": None,
        "status": "finished",
        "winner": winner,
        "model": None,
        "rows": rows,
        "front": [],
        "comparisons": compare(judged, resolution=1e-6) if len(judged) > 1 else [],
    }
    return Leaderboard(**(given | known))


A, B, LIKE_A = [0.60, 0.62, 0.61], [0.50, 0.53, 0.50], [0.61, 0.60, 0.62]


def test_a_winner_that_is_better() -> None:
    found = board({"a": A, "b": B})
    (comparison,) = found.comparisons
    said = words.verdict(found)
    assert said.startswith(
        "a wins by validation map_at_r 0.9000; on the test classes it has 0.6100 [0.5852, 0.6348]"
    )
    assert " and is better than the runner-up b on these classes: +0.1000 [+0.0752, +0.1248], p = " in said
    assert said.endswith(f"p = {comparison.adjusted_p_value:.3f}.")


def test_a_winner_that_cannot_be_told_from_the_runner_up() -> None:
    assert "is not distinguishable from the runner-up b: " in words.verdict(board({"a": A, "b": LIKE_A}))


def test_a_winner_that_is_worse_on_the_test_classes_is_said_to_be() -> None:
    said = words.verdict(board({"a": B, "b": A, "c": LIKE_A}))
    assert "is worse than the runner-up b on these classes: \N{MINUS SIGN}0.1000" in said
    assert said.endswith("; b and c did better there.")
    (comparison,) = board({"b": A, "a": B}).comparisons
    assert words.difference(comparison, "a").startswith("\N{MINUS SIGN}0.1000 [\N{MINUS SIGN}0.12")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (board({"a": A, "untrained": B}), "is better than its embedder untrained on these classes: +0.1000"),
        (board({"a": A}), "and there is nothing to compare it with."),
        (board({"a": A}, status="running"), "and there is nothing to compare it with yet."),
        (
            board({"a": A, "b": B, "c": B}, comparisons=board({"b": A, "c": B}).comparisons),
            "[0.5852, 0.6348], and no pair that it is in was compared.",
        ),
        (
            board({"a": A, "b": B, "c": B}, comparisons=board({"a": A, "c": B}).comparisons),
            "[0.5852, 0.6348], and it was not compared with the runner-up b.",
        ),
        (
            board({"a": [], "b": []}, None),
            "a leads so far by validation map_at_r 0.9000; it was not judged",
        ),
        (board({"a": [0.5], "b": [0.4]}), "0.5000 (one seed, so no interval)"),
        (board({"a": [0.5, 0.1], "b": [0.4]}), f"0.3000 [{words.MINUS}2.2412, 2.8412]"),
        (board({}, None), "No trial has finished"),
    ],
)
def test_verdicts_of_little(found: Leaderboard, expected: str) -> None:
    assert expected in words.verdict(found)


UP, DOWN = [0.71, 0.73, 0.72], [0.30, 0.31, 0.32]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (
            {"a": UP, "untrained": A},
            r"a wins and beats the untrained embedder on these classes by 0.1100 \[.*\], p .* test map_at_r\.",
        ),
        ({"a": UP, "b": UP, "untrained": A}, r"a wins and beats .*; the other family does too\."),
        ({"a": UP, "b": LIKE_A, "untrained": A}, r"a wins and beats .*; the other family does not\."),
        ({"a": UP, "b": UP, "c": UP, "untrained": A}, r".*; 2 of the 2 other families do\."),
        ({"a": UP, "b": DOWN, "c": UP, "untrained": A}, r".*; 1 of the 2 other families does\."),
        ({"a": UP, "b": DOWN, "c": DOWN, "untrained": A}, r".*; none of the 2 other families does\."),
        (
            {"a": LIKE_A, "b": UP, "untrained": A},
            r"a wins, but does not measurably beat the untrained embedder on test map_at_r;"
            r" b does: \+0.1100 \[.*\], p .*",
        ),
        (
            {"a": LIKE_A, "b": [0.62, 0.61, 0.61], "untrained": A},
            r"a wins, but no family measurably beats the untrained embedder on test map_at_r: b comes nearest with"
            r" \+0.0033 \[.*\], p = 1.000, not distinguishable\.",
        ),
        (
            {"a": DOWN, "b": B, "untrained": A},
            r"a wins, but no family measurably beats the untrained embedder on test map_at_r: b comes nearest with"
            r" \N{MINUS SIGN}0.1000 .*, worse\.",
        ),
        (
            {"a": LIKE_A, "untrained": A},
            r"a wins, but no family measurably beats .* on test map_at_r: a has .*, not distinguishable\.",
        ),
    ],
)  # fmt: skip
def test_the_news_is_what_training_was_worth(scores: dict[str, list[float]], expected: str) -> None:
    assert re.fullmatch(expected, words.news(board(scores)))


def test_there_is_no_news_without_an_untrained_row_and_little_while_it_runs() -> None:
    assert words.news(board({"a": A, "b": B})) == ""
    assert words.news(board({"a": [], "b": []}, None)) == ""
    assert words.news(board({"a": UP, "untrained": A}, None)).startswith(
        "a leads so far and beats the untrained"
    )


@pytest.mark.parametrize(("name", "noun"), [("hashing.num_bits", "code"), ("online.k", "learner")])
def test_what_is_untrained_has_its_name(name: str, noun: str) -> None:
    found = board({"a": UP, "untrained": A})
    rows = [found.rows[0].model_copy(update={"params": {name: "5"}}), found.rows[1]]
    assert f"beats the untrained {noun} on these classes by" in words.news(
        found.model_copy(update={"rows": rows})
    )


def cells(text: str) -> list[list[str]]:
    """The body of a table, tags left out."""
    body = text[text.index("<tbody>") :]
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", each)]
        for each in re.findall(r"<tr>.*?</tr>", body)
    ]


def test_the_leaderboards_numbers(small: Maker) -> None:
    found = leaderboard(small.store, "small")
    text = words.leaderboard_table(found)
    assert re.findall(r'scope="col"[^>]*>([^<]*)', text) == [
        "family",
        "test map_at_r",
        "less untrained",
        "verdict",
    ]
    rows = cells(text)
    against = next(each for each in found.comparisons if {each.first, each.second} == {"alpha", "untrained"})
    assert rows[0] == [
        "alpha (winner)",
        "0.6100 [0.5852, 0.6348]",
        words.difference(against, "alpha"),
        f"better on these classes, {words.p_value(against)}".replace("<", "&lt;"),
    ]
    assert rows[0][2].startswith("+0.4600 [+0.")
    assert [each[0] for each in rows][:2] == ["alpha (winner)", "beta"]
    assert ["gamma", "–", "–", "–"] in rows
    assert rows[-1] == ["untrained", "0.1500 [0.0258, 0.2742]", "–", "–"]
    searched = cells(words.search_table(found))
    assert searched[0] == ["alpha (winner)", "0.7000", "5 + 1 + 0", "3"]
    assert ["gamma", "–", "0 + 0 + 1", "–"] in searched
    scores = words.scores_table(found, ["recall_at_1", "nmi"])
    assert scores is not None
    assert cells(scores)[0] == ["alpha (winner)", "0.7100 [0.6852, 0.7348]"]
    assert words.scores_table(found, ["nmi"]) is None


def test_a_leaderboard_without_a_comparison_with_the_untrained_one_has_no_columns_of_it() -> None:
    text = words.leaderboard_table(board({"a": A, "b": B}))
    assert cells(text) == [["a (winner)", "0.6100 [0.5852, 0.6348]"], ["b", "0.5100 [0.4670, 0.5530]"]]
    assert "untrained" not in text


def test_a_leaderboard_before_the_verdict_has_the_validation_scores() -> None:
    text = words.leaderboard_table(board({"a": [], "b": []}, None))
    assert cells(text) == [["a", "0.9000"], ["b", "0.8000"]]
    assert "no test score yet" in text


def test_the_comparisons_numbers(small: Maker) -> None:
    found = leaderboard(small.store, "small")
    rows = cells(words.comparison_table(found))
    assert len(rows) == len(found.comparisons) == 3
    for shown, each in zip(rows, found.comparisons, strict=True):
        assert shown[:3] == [each.first, f"{each.outcome} {each.preposition}", f"{each.second}{each.where}"]
        assert each.where == ("" if each.outcome == "not distinguishable" else " on these classes")
        assert float(shown[3].replace("\N{MINUS SIGN}", "-")) == pytest.approx(each.effect, abs=1e-4)
        assert each.low is not None
        assert float(shown[4].split()[0].replace("\N{MINUS SIGN}", "-")) == pytest.approx(each.low, abs=1e-4)
        assert shown[5] == ("&lt; 0.001" if each.adjusted_p_value < 0.001 else f"{each.adjusted_p_value:.3f}")
        assert shown[6] == "3"


def test_what_can_be_had_at_each_size() -> None:
    front = [FrontTrial(family="a", trial=4, validation=0.5, size=16)]
    found = board({"a": A}, second_objective="embedding_dim", front=front)
    assert cells(words.front_table(found)) == [["a", "#4", "0.5000", "16"]]


def run(started: float, ended: float | None, workers: int = 1, kind: str = "search") -> Run:
    return Run(
        kind=kind,
        family="a",
        status="finished",
        seed=0,
        workers=workers,
        device="cpu",
        started=started,
        ended=ended,
        reason="",
    )


def test_time_with_a_trial_running_by_hand() -> None:
    assert words.busy_seconds([]) == 0
    runs = [run(100, 110), run(105, 120), run(106, 107), run(130, 140), run(150, None)]
    assert words.busy_seconds(runs) == 30
    assert words.busy_seconds(runs[::-1]) == 30


def test_costs_add_up(small: Maker) -> None:
    found = leaderboard(small.store, "small")
    kept = history(small.store, "small").model_copy(
        update={"runs": [run(0, 60, 2), run(30, 90, 2), run(120, 180, 2, "verdict")]}
    )
    trials, whole = words.cost(board({"a": A}), kept, 200.0)
    assert cells(trials) == [["a", "1", "0", "0", "1", "0", "2:00 min", "1:00 min", "6:00 min"]]
    facts = dict(cells(whole))
    assert facts["wall time, all sessions"] == "3:20 min"
    assert facts["worker time, all trials"] == "6:00 min"
    assert facts["time with a trial running"] == "2:30 min"
    assert facts["trials at once, on average"] == "1.20"
    assert facts["engine: time with no trial running"] == "50 s (25.0% of the wall time)"
    assert "how much of a trial" in facts["not known"]
    assert "not known" in dict(cells(words.cost(found, kept, None)[1]))["wall time, all sessions"]


def test_energy_and_money_stand_beside_the_time_where_they_are_known(small: Maker) -> None:
    priced = [
        run(0, 3600, 2).model_copy(
            update={"id": "x", "metrics": {"energy_wh": 400.0}, "tags": {"cost_per_hour": "1.5"}}
        ),
        run(0, 1800, 1, "verdict").model_copy(update={"id": "y", "metrics": {"energy_wh": 800.0}}),
        run(0, None).model_copy(update={"id": "z", "tags": {"cost_per_hour": "1.5"}}),
    ]
    kept = history(small.store, "small").model_copy(update={"runs": priced})
    trials, whole = words.cost(board({"a": A}), kept, 3600.0)
    assert cells(trials)[0][-3:] == ["2:30 h", "1.2 kWh", "3.00 (of 1 of 2)"]
    facts = dict(cells(whole))
    assert (facts["energy, all trials"], facts["cost, all trials"]) == ("1.2 kWh", "3.00 (of 1 of 2)")


def test_how_to_do_it_again_holds_the_file_and_what_it_was_of(small: Maker) -> None:
    found = leaderboard(small.store, "small").model_copy(update={"model": "small; rm -rf/1"})
    kept = history(small.store, "small")
    text = "".join(words.reproduction(found, kept, small.store.read_state("small")))
    assert "data: {name: digits}  # &lt;b&gt;not bold&lt;/b&gt;" in text
    assert "dmlstudy run study.yaml --name small-again" in text
    assert "git checkout abc" in text
    assert "dmlstudy pull &#x27;small; rm -rf/1&#x27; --to model" in text
    assert f"SHA-256 {kept.tags['test_sha256']}" in text
    assert "search 0; verdict 1, 2, 3" in text
    assert ">torch</th><td>9.9</td>" in text
    lost = "".join(words.reproduction(found, kept.model_copy(update={"texts": {}}), {}))
    assert "The study’s file is not among the artifacts of its run any more." in lost
    assert "dmlstudy run" not in lost
