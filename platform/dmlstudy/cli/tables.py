"""The one place where results become tables, lines and JSON on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dmlstudy.metric_names import for_people, on_retention, on_test
from dmlstudy.text import one_line

if TYPE_CHECKING:
    from dmlstudy.registry.leaderboard import Leaderboard


SCORES = ("recall_at_1", "map_at_r", "macro_f1", "accuracy", "map")
"""Metrics of which two are shown of a model, and one beside a study's objective; the first that there are."""


WIDTH = 150  # of what is not shown on a terminal


console = Console()


if not console.is_terminal:
    console = Console(width=WIDTH)


def say(text: str) -> None:
    """Print lines at once and as they are: names and paths may look like Rich's markup."""
    print(text, flush=True)


def show_json(facts: Any) -> None:
    import json

    print(json.dumps(_without_nan(facts), indent=1))


def _without_nan(facts: Any) -> Any:
    """The facts with null for numbers that JSON has no word for."""
    if isinstance(facts, dict):
        return {name: _without_nan(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_without_nan(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Cells are shown as they are: names may look like Rich's markup, or hold what a terminal obeys."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(one_line(cell)) for cell in row))
    console.print(table)


def show_leaderboard(board: Leaderboard) -> None:
    objective = board.objective
    known = [name for name in SCORES if any(on_test(name) in row.test for row in board.rows)]
    tests = [on_test(name) for name in [objective, *(name for name in known if name != objective)][:2]]
    elsewhere = [on_retention(objective)] if board.retention else []
    table = Table(title=f"{board.study}: {board.status}", title_justify="left", box=None)
    for column in ("family", f"val {objective}", *tests, *elsewhere, "seeds", "trials"):
        table.add_column(for_people(column), no_wrap=True)
    for row in board.rows:
        spread = "" if row.validation_stderr is None else f" ± {row.validation_stderr:.3f}"
        table.add_row(
            f"{row.family}{' *' if row.family == board.winner else ''}",
            "-" if row.validation is None else f"{row.validation:.4f}{spread}",
            *(str(row.test.get(name, "-")) for name in tests),
            *(str(row.retention.get(name, "-")) for name in elsewhere),
            str(row.num_judged or ""),
            f"{row.num_finished}+{row.num_pruned}+{row.num_failed}" if row.num_tried else "",
        )
    console.print(table, highlight=False)
    say(
        "* best on what was held out in the search (mean over folds ± standard error)\n"
        "test: mean ± 95% t-interval over the row's seeds, each scored once\n"
        "trials: finished + stopped early + failed"
        + (f"\nregistered as {board.model} @champion" if board.model else "")
    )
    if board.front:
        _show_front(board)
    if board.comparisons:
        _show_comparisons(board)
    for line in board.untested:
        say(line)
    if board.retention:
        _show_retention(board)
    if board.short:
        _show_short_vectors(board)


def show_tally(boards: Sequence[Leaderboard], family: str, *, as_json: bool) -> None:
    from dmlstudy.text import nearest
    from dmlstudy.verdict.comparison import tallied

    families = {row.family for board in boards for row in board.rows}
    if family not in families:
        raise ValueError(
            f"--against: no family {family!r} in these studies{nearest(family, families, listed=True)}"
        )
    tallies = tallied((board.comparisons for board in boards), family)
    if as_json:
        show_json({rival: tally.model_dump(mode="json") for rival, tally in tallies.items()})
        return
    show_table(
        (f"{family} against", "win/tie/loss"), [(rival, str(tally)) for rival, tally in tallies.items()]
    )


def _show_front(board: Leaderboard) -> None:
    objective, second = board.objective, board.second_objective
    say(
        f"\n{objective} against {second}, trials that none beats in both; the rows above are of each family's best"
        f" by {objective} alone:"
    )
    show_table(
        ("family", "trial", f"val {objective}", str(second)),
        [(one.family, f"#{one.trial}", f"{one.validation:.4f}", str(one.size)) for one in board.front],
    )


def _show_comparisons(board: Leaderboard) -> None:
    from dmlstudy.registry.search_luck import luck_lines
    from dmlstudy.verdict.comparison import remarks

    num = len(board.comparisons)
    nums = {comparison.num_seeds for comparison in board.comparisons}
    seeds = f" over {nums.pop()} seeds" if len(nums) == 1 else ""
    say(f"\ntest {board.objective}, paired by seed{seeds}:")
    for comparison in board.comparisons:
        own = "" if seeds else f", {comparison.num_seeds} seeds"
        say(f"  {comparison}{own}")
    say(
        f"better, worse: p ≤ 0.05, adjusted for all {num} pairs (Holm): at most 5% of studies name a false one"
        " for each population\n"
        f"[ ]: hold for all {num} pairs at once with 95% (Bonferroni); wider than the test, so one may reach past 0"
        " beside a better"
    )
    for line in [*remarks(board.comparisons), board.paired, *luck_lines(board)]:
        if line:
            say(line)


def _show_short_vectors(board: Leaderboard) -> None:
    say(
        f"\nshort vectors: test {board.objective} of the first numbers of embeddings, of 32, 8 and 1 bit each"
    )
    show_table(
        (
            "family",
            "numbers x bits",
            "bytes",
            "of",
            for_people(on_test(board.objective)),
            "less the whole's",
            "less the winner's",
        ),
        [
            (
                each.family,
                each.form,
                str(each.num_bytes),
                str(each.whole_bytes),
                str(each.score),
                "" if each.beside_whole is None else each.beside_whole.told_effect(),
                "" if each.beside_winner is None else each.beside_winner.told_effect(),
            )
            for each in board.short
        ],
    )
    say(
        "paired by seed; better, worse: p ≤ 0.05, adjusted for these pairs alone, and [ ] hold for all of them at once"
    )


def _show_retention(board: Leaderboard) -> None:
    assert board.retention is not None
    say(f"\nretention: the same models on {board.retention}, of no part in the search or the choice")
    if board.retention.seen:
        say(f"  but {board.retention.seen}")
    if not board.lost:
        return
    say(f"retention {board.objective} less the untrained embedder's, paired by seed, adjusted among these:")
    for comparison in board.lost:
        say(f"  {comparison}")
