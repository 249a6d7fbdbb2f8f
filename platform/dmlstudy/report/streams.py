"""A study of online learners as pictures: error against constraints, test-then-train, and the weights of layers.

As OAHU's figures 4, 7 and 8 show them, but with intervals over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import plotly.graph_objects as go
from scipy.special import stdtrit

from dmlstudy.records import is_untrained, untrained_name
from dmlstudy.registry.curves import Curve
from dmlstudy.report.figures import COLORS, look, styled
from dmlstudy.report.page import Plot, in_plot

METRICS = r"error_rate|accuracy|num_constraints|layer_weight_\d+"
PREQUENTIAL = r"prequential_error_\d+|prequential_width|num_constraints"


def error_against_constraints(curves: Sequence[Curve]) -> go.Figure:
    """Mean error rate over seeds after each part of the stream, with a 95% t-interval, one line for each family."""
    figure = go.Figure()
    for number, (family, own) in enumerate(_by_family(curves)):
        x, errors = _aligned(own, "num_constraints"), _aligned(own, "error_rate")
        own_look = look(number)
        figure.add_scatter(
            x=x.mean(axis=0),
            y=errors.mean(axis=0),
            error_y={"type": "data", "array": _half_widths(errors)},
            mode="lines+markers",
            name=in_plot(family),
            line={"color": own_look.color, "dash": own_look.dash},
            marker={"symbol": own_look.symbol},
        )
    styled(figure, x="constraints learned from", y="error rate")
    figure.update_yaxes(rangemode="tozero")
    return figure


def prequential_errors(curves: Sequence[Curve]) -> go.Figure:
    """Mean prequential error over seeds in each window of the stream, with a 95% t-interval, a line for each family.

    A window stands at its last constraint. Only windows that all seeds of a family have are drawn.
    """
    figure = go.Figure()
    for number, (family, own) in enumerate(_by_family(curves)):
        told = ({name for name in curve.values if name.startswith("prequential_error_")} for curve in own)
        names = sorted(set.intersection(*told), key=_number)
        last_S1 = np.array([[curve.values["num_constraints"][-1]] for curve in own])
        width_S1 = np.array([[curve.values["prequential_width"][-1]] for curve in own])
        end_SW = np.minimum(width_S1 * np.array([[_number(name) + 1 for name in names]]), last_S1)
        error_SW = np.array([[curve.values[name][-1] for name in names] for curve in own])
        own_look = look(number)
        figure.add_scatter(
            x=end_SW.mean(axis=0),
            y=error_SW.mean(axis=0),
            error_y={"type": "data", "array": _half_widths(error_SW), "thickness": 1, "width": 0},
            mode="lines+markers",
            name=in_plot(family),
            line={"color": own_look.color, "dash": own_look.dash},
            marker={"symbol": own_look.symbol, "size": 4},
        )
    styled(figure, x="constraints of the stream", y="error before learning")
    figure.update_yaxes(rangemode="tozero")
    return figure


def layer_weights(curves: Sequence[Curve], family: str) -> go.Figure:
    """Mean weights alpha of a family's layers over seeds after each part of the stream, stacked to 1."""
    own = [curve for curve in curves if curve.family == family]
    names = sorted((name for name in own[0].values if name.startswith("layer_weight_")), key=_number)
    x = _aligned(own, "num_constraints").mean(axis=0)
    figure = go.Figure()
    for name in names:
        figure.add_scatter(
            x=x,
            y=_aligned(own, name).mean(axis=0),
            mode="lines",
            stackgroup="weights",
            name=f"layer {_number(name)}",
            line={"color": COLORS[_number(name) % len(COLORS)]},
        )
    styled(figure, x="constraints learned from", y="weight")
    figure.update_yaxes(range=[0, 1])
    return figure


def of_streams(found: Sequence[Curve]) -> list[Curve]:
    """The curves of streams of constraints, beginning at 0 where their learner was judged untrained with that seed."""
    untrained = {(curve.family, curve.seed): curve for curve in found if is_untrained(curve.family)}
    only = len({curve.family for curve in untrained.values()}) == 1
    return [
        _from_the_start(c, untrained.get((untrained_name(None if only else c.family), c.seed)))
        for c in found
        if c.values.get("num_constraints")
    ]


def with_prequential(found: Sequence[Curve]) -> list[Curve]:
    """Those of runs that told prequential errors; runs of earlier versions and untrained learners did not."""
    return [curve for curve in found if curve.values.get("prequential_width")]


def plots(curves: Sequence[Curve], prequential: Sequence[Curve] = ()) -> list[Plot]:
    """The pictures: errors, those of test-then-train where they are known, and weights of each family with layers."""
    seeds = max(len(own) for _, own in _by_family(curves))
    drawn = [
        Plot(
            error_against_constraints(curves),
            f"Error rate against number of constraints: mean over up to {seeds} seeds, with 95% t-intervals.",
            "Error rate against number of constraints, a line for each family",
        )
    ]
    if prequential:
        seeds = max(len(own) for _, own in _by_family(prequential))
        caption = (
            "Test, then train: error on rows that the stream names for the first time, before anything is learned from"
            f" them, in windows of constraints: mean over up to {seeds} seeds, with 95% t-intervals. Constraints that"
            " others imply name no new rows, and lines end where none is left."
        )
        what = "Prequential error along the stream, a line for each family"
        drawn.append(Plot(prequential_errors(prequential), caption, what))
    for family in dict.fromkeys(curve.family for curve in curves if "layer_weight_1" in curve.values):
        num = sum(curve.family == family for curve in curves)
        caption = f"{family}: weights of the layers (mean over {num} seeds)."
        drawn.append(Plot(layer_weights(curves, family), caption, caption))
    return drawn


def _from_the_start(curve: Curve, untrained: Curve | None) -> Curve:
    """The curve with what its learner scored before the first constraint, where that is known of all its metrics."""
    names = curve.values.keys() - {"num_constraints"}
    if untrained is None or not all(untrained.values.get(name) for name in names):
        return curve
    before = {name: untrained.values[name][-1] for name in names} | {"num_constraints": 0.0}
    return curve._replace(values={name: [before[name], *own] for name, own in curve.values.items()})


def _by_family(curves: Sequence[Curve]) -> list[tuple[str, list[Curve]]]:
    return [(family, list(own)) for family, own in groupby(curves, key=lambda curve: curve.family)]


def _aligned(curves: Sequence[Curve], name: str) -> np.ndarray:
    """(seeds, parts), as many parts as all seeds have."""
    parts = min(len(curve.values[name]) for curve in curves)
    return np.array([curve.values[name][:parts] for curve in curves])


def _half_widths(values: np.ndarray) -> np.ndarray:
    num = len(values)
    if num < 2:
        return np.zeros(values.shape[1])
    return np.asarray(stdtrit(num - 1, 0.975) * values.std(axis=0, ddof=1) / num**0.5)


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])
