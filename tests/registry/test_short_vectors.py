"""What a leaderboard shows of short vectors: each form with its bytes, beside the whole and beside the winner's."""

from __future__ import annotations

import json
import statistics

import pytest
from support.verdict_trials import verdict_trial

from dmlstudy import metric_names
from dmlstudy.cli.tables import show_leaderboard
from dmlstudy.metric_names import ShortForm, short_form
from dmlstudy.records import DataConfig
from dmlstudy.registry.card import card
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.report import short_vectors as report_short_vectors
from dmlstudy.report.page import Plot
from dmlstudy.store import Store
from dmlstudy.verdict.comparison import compare

SIXTEEN, BYTE = ShortForm(16, 32), ShortForm(None, 8)
SCORES = {  # the whole, its first 16 numbers, its 8 bits a number, by seed
    "red": ((0.60, 0.62, 0.61), (0.40, 0.41, 0.42), (0.60, 0.62, 0.609)),
    "blue": ((0.50, 0.53, 0.50), (0.48, 0.50, 0.49), (0.49, 0.52, 0.51)),
}


@pytest.fixture(scope="module")
def board(store: Store) -> Leaderboard:
    tracker = StudyTracker(store, "shortened", {}, origin={"objective": "map_at_r", "num_test_images": "896"})
    for family, by_form in SCORES.items():
        search = verdict_trial(family).model_copy(update={"phase": "search"})
        run_id = tracker.start_trial("x", search, 0)
        tracker.end_trial(run_id, "finished", [], {"map_at_r": by_form[0][0]})  # type: ignore[arg-type]
        for seed, (whole, sixteen, byte) in enumerate(zip(*by_form, strict=True), 1):
            scores = {"map_at_r": whole, SIXTEEN.of("map_at_r"): sixteen, BYTE.of("map_at_r"): byte}
            run_id = tracker.start_trial("x", verdict_trial(family, seed), None)
            tracker.end_trial(run_id, "finished", [], metric_names.all_on_test(scores))  # type: ignore[arg-type]
    tracker.end_study("finished", {"winner": "red", "model": "m/1"})
    return leaderboard(store, "shortened")


def test_each_form_has_its_bytes_score_and_comparisons(board: Leaderboard) -> None:
    found = {(each.family, each.size, each.bits): each for each in board.short}
    whole = board.short[0].whole_bytes // 4
    assert list(found) == [(family, *rest) for family in SCORES for rest in ((whole, 8), (16, 32))]
    names = dict.fromkeys(SCORES, ("whole", "sixteen", "byte"))
    by_seed = {
        f"{family} {form}": dict(enumerate(scores, 1))
        for family in SCORES
        for form, scores in zip(names[family], SCORES[family], strict=True)
    }
    pairs = [(f"{family} {form}", f"{family} whole") for family in SCORES for form in ("byte", "sixteen")]
    pairs[3:3] = [("blue byte", "red byte")]
    pairs.append(("blue sixteen", "red sixteen"))
    wanted = {(each.first, each.second): each for each in compare(by_seed, pairs=pairs, resolution=1 / 896)}
    for family in SCORES:
        for form, key, size in (("sixteen", (family, 16, 32), 64), ("byte", (family, whole, 8), whole)):
            each = found[key]
            assert each.num_bytes == size
            assert each.score.mean == pytest.approx(statistics.fmean(by_seed[f"{family} {form}"].values()))
            assert each.beside_whole is not None
            own = wanted[f"{family} {form}", f"{family} whole"]
            assert each.beside_whole.effect == pytest.approx(own.effect)
            assert each.beside_whole.adjusted_p_value == pytest.approx(own.adjusted_p_value)
            if family == "red":
                assert each.beside_winner is None
            else:
                assert each.beside_winner is not None
                assert each.beside_winner.low == pytest.approx(wanted[f"blue {form}", f"red {form}"].low)
    assert len(board.comparisons) == 1, "the verdict's own pairs stay as they are"


def test_the_terminal_and_the_page_show_them(board: Leaderboard, capsys: pytest.CaptureFixture[str]) -> None:
    show_leaderboard(board)
    shown = capsys.readouterr().out
    assert "short vectors: test map_at_r of the first numbers of embeddings" in shown
    assert "16 x 32 bit" in shown
    parts = report_short_vectors.parts(board)
    assert any(isinstance(part, Plot) for part in parts)
    sentence = report_short_vectors.sentence(board)
    assert "is the shortest that is not measurably worse than the whole" in sentence
    assert "x 8 bit" in sentence


def test_the_card_has_a_table_of_them_alone(board: Leaderboard) -> None:
    row = next(row for row in board.rows if row.family == "blue")
    about = {"limits": "", "data": DataConfig(name="digits"), "trained": "", "origin": {}, "protocol": {}}
    text = card(board, row, name="m", **about)  # type: ignore[arg-type]
    judged, _, rest = text.partition("## Short vectors")
    assert "dim16" not in judged
    whole = board.short[0].whole_bytes
    assert f"the whole takes {whole} bytes" in rest
    assert "| 16 x 32 bit | 64 | 0.4900 ± 0.025 | -0.0200" in rest
    assert rest.count(" bit | ") == 2


def test_a_study_without_them_shows_nothing_of_them(board: Leaderboard) -> None:
    plain = board.model_copy(update={"short": []})
    assert "short" not in json.loads(plain.model_dump_json())
    assert report_short_vectors.parts(plain) == []


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("map_at_r_dim64", ("map_at_r", ShortForm(64, 32))),
        ("test_map_at_r_dim64_int8", ("test_map_at_r", ShortForm(64, 8))),
        ("recall_at_1_binary", ("recall_at_1", ShortForm(None, 1))),
        ("recall_at_1", None),
        ("test_map_at_r", None),
    ],
)
def test_names_are_read_as_they_are_built(name: str, wanted: tuple[str, ShortForm] | None) -> None:
    assert short_form(name) == wanted
    if wanted is not None:
        assert wanted[1].of(wanted[0]) == name


@pytest.mark.parametrize(
    ("form", "num_bytes"),
    [(ShortForm(64, 32), 256), (ShortForm(None, 8), 100), (ShortForm(None, 1), 13), (ShortForm(8, 1), 1)],
)
def test_bytes_of_a_vector(form: ShortForm, num_bytes: int) -> None:
    assert form.num_bytes(100) == num_bytes
