"""A study whose verdict trials kept scores by class, in everything that shows its leaderboard."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.verdict_trials import verdict_trial

from dmlstudy import cli
from dmlstudy.data import unit_scores_as_bytes
from dmlstudy.records import DataConfig, TrialConfig, UnitScores
from dmlstudy.registry import leaderboard_file, mlflow_view
from dmlstudy.registry.card import card
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.registry.tracking import StudyTracker, runs_of
from dmlstudy.report import words
from dmlstudy.spec import study_file
from dmlstudy.store import Store
from dmlstudy.trials import Status

NUMBERS = itertools.count()

SEEDS = (1, 2, 3)


def of_classes(family: str, seed: int, num_classes: int = 12) -> UnitScores:
    """Red is better than blue in each class; green is better in a few classes of these, and by much."""
    rng = np.random.default_rng(seed)
    score_C = 0.5 + 0.002 * rng.normal(size=num_classes)
    if family == "red":
        score_C += 0.1 + 0.001 * np.arange(num_classes)
    if family == "green":
        score_C += 0.03 * np.resize([5, -1, -1, -1], num_classes) + 0.001 * rng.normal(size=num_classes)
    return UnitScores(
        units=list(range(num_classes)), counts=[4] * num_classes, sums={"map_at_r": (4 * score_C).tolist()}
    )


def mean(scores: UnitScores) -> float:
    return sum(scores.sums["map_at_r"]) / sum(scores.counts)


def made(
    store: Store,
    *,
    families: Mapping[str, Mapping[int, UnitScores | None]] | None = None,
    configs: Any = verdict_trial,
    **origin: str,
) -> StudyTracker:
    families = families or {
        family: {seed: of_classes(family, seed) for seed in SEEDS} for family in ("red", "green", "blue")
    }
    given = {"objective": "map_at_r", "num_test_images": "48000", "num_development_images": "48000"}
    tracker = StudyTracker(store, f"two-{next(NUMBERS)}", {}, origin=given | origin)
    for family, of_seeds in families.items():
        for seed, scores in of_seeds.items():
            config: TrialConfig = configs(family, seed)
            run_id = tracker.start_trial(f"{family} {seed}", config, None)
            value = mean(scores or of_classes(family, seed))
            if scores is not None:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "classes.parquet"
                    file.write_bytes(unit_scores_as_bytes(scores))
                    tracker.log_unit_scores(run_id, file)
            objective = origin.get("objective", "map_at_r")
            tracker.end_trial(run_id, Status.FINISHED, [], {f"test_{objective}": value})
    return tracker


@pytest.fixture(scope="module")
def tracker(store: Store) -> StudyTracker:
    return made(store)


@pytest.fixture(scope="module")
def board(store: Store, tracker: StudyTracker) -> Leaderboard:
    return leaderboard(store, tracker.study).model_copy(update={"winner": "red"})


def test_each_of_the_outcomes_is_told(board: Leaderboard) -> None:
    lines = {(each.first, each.second): str(each) for each in board.comparisons}
    assert lines["red", "blue"].startswith("red better than blue on classes like these: +0.1055 [")
    assert "; on these 12 classes [" in lines["red", "blue"]
    assert lines["green", "blue"].startswith("green better than blue on these 12 classes only: +0.0")
    assert "; on classes like these [" in lines["green", "blue"]
    assert lines["green", "blue"].endswith("% of it classes")


def test_one_table_has_all_scores_once_the_study_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = made(store)
    before = leaderboard(store, tracker.study)
    tracker.log_verdict_scores()
    fetched: list[str] = []
    client = type(runs_of(store, tracker.study)._client)
    download = client.download_artifacts

    def noting(self: Any, run_id: str, path: str, to: str) -> str:
        fetched.append(path)
        return str(download(self, run_id, path, to))

    monkeypatch.setattr(client, "download_artifacts", noting)
    assert leaderboard(store, tracker.study) == before
    assert fetched == ["verdict_classes.parquet"]


def test_the_terminal_names_both_populations(board: Leaderboard, capfd: pytest.CaptureFixture[str]) -> None:
    cli.tables.show_leaderboard(board)
    shown = capfd.readouterr().out
    assert "  red better than blue on classes like these: +0.1055 [" in shown
    assert "at most 5% of studies name a false one for each population" in shown
    assert "on classes like these: with other classes of the same kind too, as many of them" in shown


def test_files_have_a_column_for_each(board: Leaderboard, tmp_path: Path) -> None:
    columns = {each.name: each.values for each in leaderboard_file.columns(board)}
    families = columns["family"]
    blue = next(each for each in board.comparisons if (each.first, each.second) == ("red", "blue")).turned
    place = list(families).index("blue")
    assert columns["like_verdict"][place] == "worse"
    assert columns["like_effect_low"][place] == blue.like_low
    assert columns["like_adjusted_p_value"][place] == blue.like_adjusted_p_value
    assert (columns["num_classes"][place], columns["num_moved"][place]) == (12, 12)
    assert columns["like_verdict"][list(families).index("red")] is None
    again = Leaderboard.model_validate_json(board.model_dump_json())
    assert again == board
    head = leaderboard_file.csv_text(board).splitlines()[0].split(",")
    assert {"like_verdict", "like_effect_low", "like_effect_high", "class_share"} <= set(head)


def test_the_report_has_both_intervals(board: Leaderboard) -> None:
    text = words.comparison_table(board)
    assert "on these classes" in text
    assert "on classes like these" in text
    assert "green" in text
    assert "blue on these 12 classes only" in text


def test_mlflows_page_names_the_population(board: Leaderboard) -> None:
    assert mlflow_view.outcome(board, "blue").startswith("worse on classes like these, p ")
    assert mlflow_view.outcome(board.model_copy(update={"winner": "blue"}), "green").startswith(
        "better on these 12 classes only, p "
    )


def test_a_card_says_what_the_populations_are(board: Leaderboard) -> None:
    row = next(row for row in board.rows if row.family == "red")
    text = card(
        board,
        row,
        limits="Limits.",
        data=DataConfig(name="digits"),
        trained="2026-01-01",
        origin={},
        protocol={},
        name="m",
    )
    assert "* red better than blue on classes like these: +0.1055 [" in text
    assert "On these classes: with other seeds; on classes like these: with other classes" in text


def test_a_score_that_is_no_mean_over_queries_is_of_these_classes_alone(store: Store) -> None:
    found = leaderboard(store, made(store, objective="nmi").study).comparisons
    assert {each.like_unknown for each in found} == {"nmi is no mean over queries"}
    assert " on these classes: " in next(str(each) for each in found if each.outcome != "not distinguishable")


def test_an_older_study_says_what_it_can(store: Store) -> None:
    families = {family: dict.fromkeys(SEEDS) for family in ("red", "blue")}
    (found,) = leaderboard(store, made(store, families=families).study).comparisons
    assert str(found).startswith("red better than blue on these classes: +0.1055 [")
    assert found.like_unknown == "no scores by class were kept"


def test_a_study_resumed_by_this_version_pairs_what_it_has(store: Store) -> None:
    """A seed of which one family has no scores by class leaves nothing to say of classes like these."""
    families: dict[str, dict[int, UnitScores | None]] = {
        "red": {1: None, **{seed: of_classes("red", seed) for seed in (2, 3)}},
        "blue": {seed: of_classes("blue", seed) for seed in SEEDS},
    }
    (found,) = leaderboard(store, made(store, families=families).study).comparisons
    assert (found.num_seeds, found.outcome, found.like_outcome) == (3, "better", None)


def test_families_judged_by_other_queries_are_not_paired_by_class(store: Store) -> None:
    families = {
        "red": {seed: of_classes("red", seed) for seed in SEEDS},
        "blue": {seed: of_classes("blue", seed, 11) for seed in SEEDS},
    }
    tracker = made(store, families=families)
    tracker.log_verdict_scores()
    (found,) = leaderboard(store, tracker.study).comparisons
    assert found.like_unknown == "they were not judged by the same classes"
    assert found.outcome == "better"


def test_shuffled_rows_need_no_scores_by_row(store: Store) -> None:
    """Halves of all rows: as many to learn from as for the test."""
    spec = study_file.parse(
        {
            "name": "s",
            "data": {"name": "digits"},
            "online": {"split": "shuffled"},
            "families": {name: {"space": "rdml"} for name in ("red", "blue")},
            "protocol": {"num_folds": 2, "verdict_seeds": 2, "objective": "accuracy"},
            "resources": {"workers": 1},
        }
    )

    def config(family: str, seed: int) -> TrialConfig:
        point = study_file.default_values(spec.families[family])
        given = spec.trial_config(spec.families[family], point)
        return given.model_copy(update={"phase": "verdict", "seed": seed})

    families = {family: dict.fromkeys(SEEDS) for family in ("red", "blue")}
    tracker = made(store, families=families, configs=config, objective="accuracy")
    (found,) = leaderboard(store, tracker.study).comparisons
    assert (found.unit, found.num_classes) == ("row", 0)
    assert found.class_share == pytest.approx(1 / (1 + 1 / 3))
    assert found.low is not None
    assert found.like_low is not None
    widths = [found.effect - each for each in (found.low, found.like_low)]
    assert widths[1] / widths[0] == pytest.approx((1 + 3) ** 0.5)
