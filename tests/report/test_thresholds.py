"""The section on shipped thresholds: words, table, curve; none where a study has no thresholds."""

from __future__ import annotations

from pathlib import Path

from support.made_study import Maker

from dmlstudy import data
from dmlstudy.records import PairCounts
from dmlstudy.registry.curves import pair_counts
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.report import thresholds
from dmlstudy.report.page import Plot
from dmlstudy.report.study_page import write_report
from dmlstudy.store import Store
from dmlstudy.verdict.thresholds import shipped

ALPHA = PairCounts(
    units=list(range(60)),
    impostors=[118] * 60,
    genuine=[3] * 60,
    shipped="1e-2",
    thresholds={"1e-1": 0.2, "1e-2": 0.5},
    accepted={"1e-1": [12] * 60, "1e-2": [1, 2, 0] * 20},
    rejected={"1e-1": [0] * 60, "1e-2": [1, 0, 0] * 20},
    class_pairs={"1e-1": 5, "1e-2": 5},
    curve=[(0.0, 0.5, 0.0), (0.2, 0.1, 0.02), (0.5, 0.01, 0.1), (0.9, 0.0, 0.8)],
)
NONE = ALPHA.model_copy(update={"accepted": {"1e-1": [0] * 60, "1e-2": [0] * 60}, "curve": []})


def judged(store: Store, folder: Path) -> Maker:
    """A study whose two families have thresholds: of one no impostor is accepted."""
    maker = Maker(store, "verified")
    for family, counts in (("<b>alpha", ALPHA), ("beta", NONE)):
        maker.search(family, "finished", 0.6 if counts is ALPHA else 0.5, {1: 0.5})
        for seed in (1, 2):
            run_id = maker.judge(family, seed, 0.5 + seed / 10)
            file = folder / "pairs.parquet"
            own = (
                counts
                if seed == 1
                else counts.model_copy(update={"rejected": {"1e-1": [3] * 60, "1e-2": [3] * 60}})
            )
            file.write_bytes(data.pair_counts_as_bytes(own))
            maker.tracker.log_pair_counts(run_id, file)
    maker.judge("untrained", 1, 0.1)
    maker.end("<b>alpha")
    return maker


def test_a_page_shows_what_the_shipped_thresholds_do(store: Store, tmp_path: Path) -> None:
    judged(store, tmp_path)
    assert pair_counts(store, "verified") == {"<b>alpha": ALPHA, "beta": NONE}
    board = leaderboard(store, "verified")
    parts = thresholds.parts(board, pair_counts(store, "verified"))
    (plot,) = (part for part in parts if isinstance(part, Plot))
    words = str(parts[0])
    found = shipped(ALPHA)
    assert found is not None
    assert f"&lt;b&gt;alpha: {found}. 60 new classes of the kind will show a FMR from " in words
    line, mark = plot.figure.data
    # a rate of 0 has no place on a logarithmic axis
    assert (list(line.x), list(line.y)) == ([0.1, 0.01], [0.02, 0.1])
    assert (list(mark.x), list(mark.y)) == ([30 / 3540], [20 / 180])
    assert plot.figure.layout.xaxis.type == plot.figure.layout.yaxis.type == "log"
    (winner,) = plot.figure.layout.shapes
    assert winner.x0 == winner.x1
    table = str(parts[1])
    assert "0 of 3540 pairs" in table
    assert "<b>alpha" not in table
    write_report(store, "verified", tmp_path / "page.html", with_examples=False)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<section id="thresholds"' in text
    assert "<b>alpha" not in text


def test_a_study_without_thresholds_has_no_section(small: Maker, tmp_path: Path) -> None:
    assert pair_counts(small.store, "small") == {}
    write_report(small.store, "small", tmp_path / "page.html", with_examples=False)
    assert 'id="thresholds"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_warnings_of_the_winner_are_shown(store: Store) -> None:
    board = leaderboard(store, "verified").model_copy(update={"winner": "beta"})
    parts = thresholds.parts(board, {"beta": NONE})
    assert "No impostor of 3540 was accepted" in str(parts[1])
    assert not any(isinstance(part, Plot) for part in parts)
