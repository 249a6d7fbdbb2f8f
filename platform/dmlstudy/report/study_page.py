"""The page of a study: its verdict, its search, what its winner does, what it cost and how it is done again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dmlstudy import metric_names
from dmlstudy.html import Html, check_page, element, write_page
from dmlstudy.metric_names import TRAIN_LOSS
from dmlstudy.registry.curves import last_told, pair_counts, verdict_curves
from dmlstudy.registry.history import history, keep_page
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.report import (
    examples,
    figures,
    retention,
    sensitivities,
    short_vectors,
    streams,
    thresholds,
    tuning,
    words,
)
from dmlstudy.report.page import (
    Plot,
    Section,
    folded,
    page,
    paragraph,
    table,
    with_commands,
)
from dmlstudy.search.history import FEWEST, Searched, searched
from dmlstudy.search.stop_rule import told_of
from dmlstudy.search.warm_start import StudyWeight, stored_weights
from dmlstudy.spec.study_file import replicate_name
from dmlstudy.store import Store, StoreError, seconds_spent
from dmlstudy.trials import ENDED, Status

FURTHER = ("recall_at_1", "map_at_r", "r_precision", "map", "accuracy", "macro_f1", "nmi")
"""Metrics of the test classes that are shown beside the objective, where there are such."""

MOST_FURTHER = 3

MOST_PAIRS = 15
"""Pairs of families that are shown at once; more are folded away."""

BASE_HEIGHT, OF_LEGEND = 330, 16
"""Pixels of a plot with a line for each family, and what each family adds to its legend on a phone."""


class Written(NamedTuple):
    """Of a page: how many families it shows, and what its reader should know about the study's state.

    ``not_kept`` says why the page could not be kept with the study's run, as in a store that is only read. ``matters``
    is the page's sentence on the parameters, ``parameters`` its table as values; ``earlier`` are the weights of earlier
    studies that the search began with.
    """

    num_families: int
    notice: str
    not_kept: str
    """The reason why the store did not take the page; empty if it did."""
    matters: str
    parameters: Sequence[sensitivities.ParameterEffect]
    earlier: Sequence[StudyWeight]


def write_report(store: Store, study: str, output: Path, *, with_examples: bool = True) -> Written:
    """Write a study's page to ``output``, whole or not at all, and keep it with the study's run, if the store takes it.

    Raises StoreError for an unknown study, ValueError for an output that may not be written (``html.check_page``).
    """
    check_page(output)
    board = leaderboard(store, study)
    kept = history(store, study)
    state = _state(store, study)
    notice = _notice(board, state)
    tried = searched(store, study)
    earlier = stored_weights(store, study)
    if not with_examples:
        of_winner = examples.absent("left out by --without-examples.")
    else:
        of_winner = examples.sections(store, study, board, kept.tags, state.get("cwd"))
    first = words.news(board)
    top: list[Html] = [paragraph(first or words.verdict(board), kind="verdict")]
    if first:
        top.append(paragraph(words.verdict(board)))
    if notice:
        top.insert(
            0,
            element("p", element("b", "Not finished. "), with_commands(notice), class_="notice", role="note"),
        )
    if board.model:
        decided = f": {kept.tags['decision']}" if "decision" in kept.tags else ""
        top.append(paragraph(f"Registered as {board.model}{decided}.", kind="quiet"))
    sections = [
        Section("leaderboard", "Leaderboard", _leaderboard(board)),
        Section("pairs", "Families compared in pairs", _pairs(board)),
        *_thresholds(store, board),
        Section(
            "search",
            "Search",
            [
                *_ended_early(store, board.study, kept.texts.get("study.yaml")),
                *_search(board, tried, kept.texts.get("study.yaml"), _again(store, board)),
                *_earlier(earlier),
            ],
        ),
        Section("curves", "Learning curves", _curves(store, board, tried)),
        *of_winner,
        Section("cost", "Cost", words.cost(board, kept, seconds_spent(state) if state else None)),
        Section("reproduce", "How to do it again", words.reproduction(board, kept, state)),
    ]
    text = page(f"Study {study}", top, sections)
    write_page(output, text)
    own = list(tried.values())
    told = sensitivities.sentence(own, board.objective), sensitivities.effects(own), earlier
    try:
        keep_page(store, study, text)
    except StoreError as error:  # a store that may only be read; the page itself is there
        return Written(len(board.rows), notice, str(error), *told)
    return Written(len(board.rows), notice, "", *told)


def _state(store: Store, study: str) -> Mapping[str, Any]:
    """The state in the study's folder; empty if the study lies in another store."""
    try:
        return store.read_state(study)
    except StoreError:
        return {}


def _notice(board: Leaderboard, state: Mapping[str, Any]) -> str:
    """A notice about a study that is not finished, with the fix."""
    now = state.get("state", board.status)
    if now == "finished":
        return ""
    if now == "running":
        return f"The study is running: this is what it knows so far; `dmlstudy report {board.study}` when it has ended."
    reason = f" ({state['reason']})" if state.get("reason") else ""
    return (
        f"The study is {now}{reason}: this is what it knows so far; `dmlstudy resume {board.study}` goes on, then make"
        " the report again."
    )


def _leaderboard(board: Leaderboard) -> list[str | Plot]:
    metric = metric_names.on_test(board.objective)
    further = [name for name in FURTHER if name != board.objective]
    further = [name for name in further if any(metric_names.on_test(name) in row.test for row in board.rows)]
    of_folds = [metric_names.separate(board.objective), metric_names.concatenated(board.objective)]
    parts: list[str | Plot] = [words.leaderboard_table(board)]
    judged = [row for row in board.rows if metric in row.test]
    if judged:
        caption = "The same as a picture: mean over seeds with its 95% t-interval."
        label = "; ".join(f"{row.family} {words.interval(row.test[metric])}" for row in judged)
        parts.append(Plot(figures.scores(board.rows, metric), caption, label, 90 + 34 * len(board.rows)))
    if board.front:
        parts.append(words.front_table(board))
    scores = words.scores_table(board, [*further[:MOST_FURTHER], *of_folds])
    parts += retention.parts(board)
    parts += short_vectors.parts(board)
    more = [words.search_table(board), *([scores] if scores else [])]
    told = "Validation scores, trials and seeds" + (", other test scores" if scores else "")
    return [*parts, folded(told, *more)]


def _pairs(board: Leaderboard) -> list[str | Plot]:
    if not board.comparisons:
        judged = any(row.num_judged for row in board.rows)
        why = (
            "only one was judged on the test classes" if judged else "none was judged on the test classes yet"
        )
        return [paragraph(f"There are no two families to compare: {why}.")]
    pairs = words.comparison_table(board)
    folds = len(board.comparisons) > MOST_PAIRS
    return [
        folded(f"All {len(board.comparisons)} pairs", pairs) if folds else pairs,
        *([paragraph(f"{board.paired[0].upper()}{board.paired[1:]}.", kind="quiet")] if board.paired else []),
        *words.luck(board),
    ]


def _thresholds(store: Store, board: Leaderboard) -> list[Section]:
    """The section on shipped thresholds; none of a study without verification."""
    counts = pair_counts(store, board.study)
    return [Section("thresholds", "Thresholds", thresholds.parts(board, counts))] if counts else []


def _ended_early(store: Store, study: str, study_file: str | None) -> list[str | Plot]:
    """A line on each search that has ended before its number of trials."""
    search = tuning.search_of(study_file)
    is_whole = search is not None and search.families == "adaptive"
    lines = told_of(store, study, is_whole=is_whole)
    return [paragraph(f"{line[0].upper()}{line[1:]}.", kind="quiet") for line in lines]


def _again(store: Store, board: Leaderboard) -> list[dict[str, Searched]]:
    """The families of each search that was done again, as far as the verdict knows of them."""
    num_searches = board.luck.num_searches if board.luck else 1
    return [searched(store, replicate_name(board.study, number)) for number in range(2, num_searches + 1)]


def _search(
    board: Leaderboard,
    tried: Mapping[str, Searched],
    study_file: str | None,
    again: Sequence[Mapping[str, Searched]],
) -> list[str | Plot]:
    order = {row.family: place for place, row in enumerate(board.rows)}
    own = sorted(tried.values(), key=lambda each: order.get(each.family, len(order)))
    order |= {each.family: order.get(each.family, len(order)) for each in own}
    if not own:
        return [paragraph("No trial of the search has ended, or the study’s search is not in this store.")]
    parts: list[str | Plot] = []
    if any(each.of(Status.FINISHED) or each.of(Status.PRUNED) for each in own):
        caption = (
            f"Validation {board.objective} of each trial in the order of its family’s search; lines are the best"
            " finished one so far. Open marks were stopped early, with what they had then."
            f"{_thinned(own)}"
        )
        label = "; ".join(
            f"{each.family}: best {best.score:.4f} by trial {best.number} of {len(each.trials)}"
            for each in own
            if (best := each.best) is not None
        )
        height = BASE_HEIGHT + OF_LEGEND * len(own)
        parts.append(Plot(figures.history(own, order, board.objective), caption, label, height))
        parts += tuning.parts(own, order, board.objective, study_file, again)
    parts += sensitivities.parts(own, board.objective)
    few = [each.family for each in own if each.parameters and 2 <= len(each.of(Status.FINISHED)) < FEWEST]
    if few:
        parts.append(
            paragraph(
                f"How much each parameter matters is estimated from {FEWEST} finished trials of a family on; fewer"
                f" have: {', '.join(few)}. A larger search.trials_per_family gives more.",
                kind="quiet",
            )
        )
    fixed = [each for each in own if not each.parameters and each.best is not None]
    for each in own:
        if each not in fixed:
            parts += _family(each, board.objective)
    return [*parts, *_without_parameters(fixed, board.objective)]


def _earlier(weights: Sequence[StudyWeight]) -> list[str | Plot]:
    """The part on earlier studies; empty of a search that did not weigh any."""
    if not weights:
        return []
    caption = (
        "Configurations of earlier studies that this search has tried (search.warm_start: auto). A study’s weight comes"
        " of how it ranks the points that both know; one with weight 0 is left out."
    )
    rows = [
        [
            each.family,
            each.study,
            str(each.num_taken),
            f"{each.weight:.2f}",
            f"{each.num_alike} of {each.num_pairs}" if each.num_pairs else "–",
        ]
        for each in weights
    ]
    head = ["family", "earlier study", "configurations taken", "weight", "pairs ranked alike"]
    return [element("h3", "From earlier studies"), table(caption, head, rows, "llnnn")]


def _thinned(families: Sequence[Searched]) -> str:
    """A remark on the points if there are too many trials to draw each."""
    if all(len(each.trials) <= figures.MOST_POINTS for each in families):
        return ""
    return f" Of a family with more than {figures.MOST_POINTS} trials some at equal distances are drawn."


def _without_parameters(families: Sequence[Searched], objective: str) -> list[str | Plot]:
    """Families of which there is nothing to draw, for every trial of theirs is the same."""
    if not families:
        return []
    rows = []
    for each in families:
        best = each.best
        assert best is not None
        rows.append([each.family, str(len(each.trials)), f"{best.score:.4f} (#{best.number})"])
    caption = "No parameter of these was searched, so there is no importance of any and nothing to draw."
    title = element("h3", "Families without a searched parameter")
    return [title, table(caption, ["family", "trials", f"validation {objective}"], rows, "lnn")]


def _family(family: Searched, objective: str) -> list[str | Plot]:
    """A family's parameters: lines through them, their importance, and each by itself, if trials suffice."""
    best, finished = family.best, family.of(Status.FINISHED)
    counts = ", ".join(f"{len(family.of(status))} {status.words}" for status in ENDED)
    parts: list[str | Plot] = [element("h3", family.family)]
    if best is None:
        reasons = [each.reason for each in family.of(Status.FAILED) if each.reason]
        why = f" The first failed with: {reasons[0]}" if reasons else ""
        return [*parts, paragraph(f"No trial finished ({counts}), so there is nothing to draw.{why}")]
    values = ", ".join(f"{name} = {figures.shown(value)}" for name, value in best.params.items())
    parts.append(
        paragraph(f"{counts}. Best: #{best.number}, {best.score:.4f}{f', with {values}' if values else ''}.")
    )
    if len(finished) < 2:
        return [*parts, paragraph("One trial finished, so there is nothing to compare its parameters with.")]
    rows = len(family.parameters)
    label = f"{family.family}: {len(finished)} trials as lines through {rows} parameters"
    parts.append(
        Plot(
            figures.parallel(family, objective),
            f"Each line is a finished trial through its parameters; the stronger, the higher its {objective}."
            + (f" The best {figures.MOST_LINES} are shown." if len(finished) > figures.MOST_LINES else ""),
            label,
            60 + 62 * (rows + 1),
        )
    )
    known = [each for each in family.parameters if each.importance is not None]
    if known:
        told = ", ".join(f"{each.name} {each.importance:.2f}" for each in known)
        caption = (
            f"Importance (PED-ANOVA) from {len(finished)} finished trials; of few trials a hint, no more."
        )
        parts.append(Plot(figures.importance(family), caption, f"Importance: {told}", 90 + 30 * len(known)))
    elif len(finished) >= FEWEST:
        parts.append(
            paragraph("All finished trials have the same score: no parameter mattered.", kind="quiet")
        )
    caption = f"Validation {objective} against each parameter; the brighter, the later the trial.{_thinned([family])}"
    label = f"{family.family}: {objective} against each of {rows} parameters"
    parts.append(
        Plot(figures.slices(family), caption, label, 70 + 180 * -(-rows // figures.slice_columns(family)))
    )
    return parts


def _epochs(board: Leaderboard) -> int | None:
    """Epochs of a model, the same for all families; none where no run says."""
    known = [int(row.params["training.epochs"]) for row in board.rows if "training.epochs" in row.params]
    return max(1, *known) if known else None


def _curves(store: Store, board: Leaderboard, tried: Mapping[str, Searched]) -> list[str | Plot]:
    order = {row.family: place for place, row in enumerate(board.rows)}
    order |= {name: order.get(name, len(order)) for name in tried}
    own = sorted(tried.values(), key=lambda each: order[each.family])
    parts: list[str | Plot] = []
    epochs = _epochs(board)
    longest = max((max(best.curve, default=0) for each in own if (best := each.best)), default=0)
    if longest > 1:
        over = (
            " From the second fold on, the mean with the folds before."
            if longest > (epochs or longest)
            else ""
        )
        parts.append(
            Plot(
                figures.validation_curves(own, order, board.objective, epochs),
                f"Validation {board.objective} after each epoch of each family’s best trial of the search.{over}",
                f"Learning curves of the best trials of {len(own)} families",
                BASE_HEIGHT + OF_LEGEND * len(own),
            )
        )
    told = streams.of_streams(verdict_curves(store, board.study, streams.METRICS))
    if told:
        before = streams.with_prequential(last_told(store, board.study, streams.PREQUENTIAL))
        return [*parts, *streams.plots(told, before)]
    losses = verdict_curves(store, board.study, TRAIN_LOSS)
    if any(len(curve.values[TRAIN_LOSS]) > 1 for curve in losses):
        of_folds = any(len(curve.values[TRAIN_LOSS]) > (epochs or math.inf) for curve in losses)
        parts.append(
            Plot(
                figures.training_loss(losses, order, epochs),
                "Training loss of the verdict’s models, mean over seeds."
                f"{' Thin lines: the models of the folds.' if of_folds else ''} Each family has a loss of its own:"
                " shapes can be compared, heights cannot.",
                "Training losses of the verdict's models by epoch",
                BASE_HEIGHT + OF_LEGEND * len({curve.family for curve in losses}),
            )
        )
    if not parts:
        parts.append(paragraph("No trial has told of more than one epoch, so there is no curve."))
    return parts
