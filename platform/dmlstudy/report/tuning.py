"""Tuning curves: the best of k trials of a search, with a band where one is valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from dmlstudy.html import element
from dmlstudy.report import figures
from dmlstudy.report.page import Plot, in_plot, paragraph, table
from dmlstudy.search.history import Searched
from dmlstudy.spec import yaml_file
from dmlstudy.spec.study_file import SearchConfig
from dmlstudy.trials import Status
from dmlstudy.verdict.tuning_curves import FEWEST, FEWEST_SEARCHES, TuningPoint, pointwise_curve, tuning_curve

TOLD = (10, 20, 50, 100)
"""Numbers of trials that the table has a column for, as far as a search went."""

MOST_POINTS = 400
"""Points of a curve that are drawn."""


def parts(
    families: Sequence[Searched],
    order: Mapping[str, int],
    objective: str,
    study_file: str | None,
    again: Sequence[Mapping[str, Searched]] = (),
) -> list[str | Plot]:
    """The part of a page on the best of k trials; empty where no family has tried enough.

    ``study_file`` is the study's YAML, which says how trials were drawn; None where it is lost. ``again`` holds the
    families of each search that was done again.
    """
    reason = _without_band(study_file)
    lanes = {
        each.family: [each, *(one[each.family] for one in again if each.family in one)] for each in families
    }
    of_family = over_searches if reason else curve
    curves = {name: points for name, own in lanes.items() if (points := of_family(own))}
    found: list[str | Plot] = [*_table(families, curves, are_random=not reason)]
    if not found:
        return []
    title = element("h3", "What more trials bring")
    if not curves:
        reason = reason or f"it takes {FEWEST} random trials that ran to their end"
        return [title, paragraph(f"One search, without a band: {reason}."), *found]
    if reason:
        caption = (
            f"Mean over {len(again) + 1} searches of the best validation {objective} after k trials, with a 95%"
            " t-interval over searches at each k by itself: it does not hold for all k at once."
        )
    else:
        caption = (
            f"Median of the best validation {objective} of k random trials, with a band for each family that holds"
            " for all k at once with 95%, whatever the scores’ distribution. The default is no random trial and left"
            " out. Where the band’s upper end is not drawn, the trials do not bound it."
        )
        if again:
            caption += f" The trials of {len(again) + 1} searches are taken together."
    label = "; ".join(
        f"{name}: best of {points[-1].num_trials} {points[-1].best:.4f}, at least {points[-1].low:.4f}"
        for name, points in curves.items()
    )
    height = 330 + 16 * len(curves)
    return [title, Plot(bands(curves, order, objective), caption, label, height), *found]


def curve(lanes: Sequence[Searched]) -> list[TuningPoint]:
    """A family's curve from the random trials of its searches, all but the first of each.

    Empty where they are too few, or where one was stopped.
    """
    drawn = [trial for lane in lanes for trial in lane.trials[1:]]
    scores = [trial.score for trial in drawn if trial.status == Status.FINISHED and trial.score is not None]
    failed = [0.0 for trial in drawn if trial.status == Status.FAILED]
    if len(scores) + len(failed) < len(drawn) or len(drawn) < FEWEST or not scores:
        return []
    try:
        return tuning_curve([*scores, *failed])
    except ValueError:  # an objective that is no share
        return []


def over_searches(lanes: Sequence[Searched]) -> list[TuningPoint]:
    """A family's curve over its searches, whatever their trials depend on; empty where the searches are too few."""
    if len(lanes) < FEWEST_SEARCHES:
        return []
    return pointwise_curve([dict(figures.running_best(lane.trials)) for lane in lanes])


def bands(curves: Mapping[str, Sequence[TuningPoint]], order: Mapping[str, int], objective: str) -> go.Figure:
    """The curves, each in its band; the upper end is drawn where the trials bound it."""
    figure = go.Figure()
    for family, points in curves.items():
        own, name = figures.look(order[family]), in_plot(family)
        spaced = points[:: -(-len(points) // MOST_POINTS)]
        bounded = [point for point in spaced if point.high < 1]
        for end, drawn in (("high", bounded), ("low", spaced)):
            figure.add_scatter(
                x=[point.num_trials for point in drawn],
                y=[getattr(point, end) for point in drawn],
                mode="lines",
                line={"color": own.color, "width": 1, "dash": "dot", "shape": "hv"},
                legendgroup=name,
                showlegend=False,
                hovertemplate=f"{name}: {'at most' if end == 'high' else 'at least'} %{{y:.4f}}<extra></extra>",
            )
        figure.add_scatter(
            x=[point.num_trials for point in spaced],
            y=[point.best for point in spaced],
            mode="lines",
            line={"color": own.color, "width": 2, "dash": own.dash, "shape": "hv"},
            name=name,
            legendgroup=name,
            hovertemplate=f"{name}: best of %{{x}} %{{y:.4f}}<extra></extra>",
        )
    figures.styled(figure, x="k, trials", y=f"best validation {objective} of k")
    figure.update_xaxes(tickformat="d", zeroline=False)
    return figure


def _table(
    families: Sequence[Searched], curves: Mapping[str, Sequence[TuningPoint]], *, are_random: bool
) -> list[str | Plot]:
    """The best after 10, 20, 50 and 100 trials: with a band its middle and band, else what this search had then."""
    longest = max((len(each.trials) for each in families), default=0)
    columns = [num for num in TOLD if num <= longest]
    if not columns:
        return []
    rows = []
    for each in families:
        best = dict(figures.running_best(each.trials))
        points = {point.num_trials: point for point in curves.get(each.family, ())}
        cells = []
        for num in columns:
            if num in points:
                point = points[num]
                high = f"{point.high:.4f}" if point.high < 1 else "1"
                cells.append(f"{point.best:.4f} [{point.low:.4f}, {high}]")
            else:
                cells.append(f"{best[num]:.4f}" if num in best and each.family not in curves else "–")
        rows.append([each.family, *cells])
    alone = "the best finished trial of this one search after so many trials, the default included"
    middle = (
        "Median of the best of so many random trials"
        if are_random
        else "Mean over searches after so many trials"
    )
    caption = f"{middle}, with its band." if curves else f"{alone[0].upper()}{alone[1:]}."
    if any(each.family not in curves for each in families) and curves:
        caption += f" Without a band: {alone}."
    return [
        table(caption, ["family", *(f"best after {num}" for num in columns)], rows, "l" + "n" * len(columns))
    ]


def _without_band(study_file: str | None) -> str:
    """The reason why no band is valid; empty where the trials are independent draws."""
    if study_file is None:
        return "the study’s file, which says how trials were drawn, is not kept any more"
    search = search_of(study_file)
    if search is None:
        return "the study’s file, which says how trials were drawn, cannot be read"
    if search.sampler != "random":
        return f"trials of search.sampler: {search.sampler} depend on one another; those of random would not"
    if search.scheduler != "none":
        scheduler = search.scheduler if "scheduler" in search.model_fields_set else "its default"
        return f"search.scheduler: {scheduler} stops trials by one another; none would not"
    if search.families != "equal":
        return "the sampler chose the families too"
    if search.warm_start:
        return "the first trials came from earlier studies (search.warm_start)"
    if search.stop_when:
        return "the scores decided the number of trials (search.stop_when)"
    return ""


def search_of(study_file: str | None) -> SearchConfig | None:
    """The section of a study's file on its search; None where it cannot be read."""
    try:
        raw = yaml_file.mapping(study_file or "", "study.yaml").get("search", {})
        return SearchConfig.model_validate(raw)
    except ValueError:
        return None
