"""Pictures of streams: what they show is what the trials told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dmlstudy.records import (
    BatchConfig,
    DataConfig,
    EmbedderConfig,
    LossConfig,
    OnlineConfig,
    TrainingConfig,
    TrialConfig,
)
from dmlstudy.registry.curves import Curve, last_told, verdict_curves
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.report import streams
from dmlstudy.store import Store

CURVES = [
    Curve(
        "oahu",
        seed,
        {
            "num_constraints": [100.0, 200.0],
            "error_rate": [0.5 + seed / 10, 0.3 + seed / 20],
            "layer_weight_0": [0.4, 0.1],
            "layer_weight_1": [0.6, 0.9],
        },
    )
    for seed in (1, 2, 3)
] + [
    Curve(
        "opml", 1, {"num_constraints": [90.0, 180.0], "error_rate": [0.4, 0.2], "layer_weight_0": [1.0, 1.0]}
    )
]


def test_errors_are_means_with_t_intervals() -> None:
    oahu, opml = streams.error_against_constraints(CURVES).data
    assert (oahu.name, opml.name) == ("oahu", "opml")
    assert list(oahu.x) == [100, 200]
    np.testing.assert_allclose(oahu.y, [0.7, 0.4])
    low, high = stats.t.interval(0.95, 2, loc=0.7, scale=stats.sem([0.6, 0.7, 0.8]))
    assert oahu.error_y.array[0] == pytest.approx((high - low) / 2)
    assert list(opml.error_y.array) == [0, 0]


def test_weights_of_layers_are_stacked_in_their_order() -> None:
    first, second = streams.layer_weights(CURVES, "oahu").data
    assert (first.name, second.name) == ("layer 0", "layer 1")
    np.testing.assert_allclose([first.y, second.y], [[0.4, 0.1], [0.6, 0.9]])
    assert first.stackgroup == second.stackgroup


def test_prequential_errors_are_means_over_seeds_at_the_ends_of_windows() -> None:
    told = [
        Curve(
            "slda",
            seed,
            {
                "prequential_width": [480.0],
                "num_constraints": [1000.0],
                "prequential_error_00": [0.4 + seed / 10],
                "prequential_error_02": [0.1],
                **({"prequential_error_10": [0.1]} if seed == 1 else {}),
            },
        )
        for seed in (1, 2, 3)
    ]
    (line,) = streams.prequential_errors(told).data
    assert list(line.x) == [480, 1000]
    np.testing.assert_allclose(line.y, [0.6, 0.1])
    low, high = stats.t.interval(0.95, 2, loc=0.6, scale=stats.sem([0.5, 0.6, 0.7]))
    np.testing.assert_allclose(line.error_y.array, [(high - low) / 2, 0], atol=1e-12)
    _, drawn, _ = streams.plots(CURVES, told)
    assert drawn.caption.startswith(
        "Test, then train: error on rows that the stream names for the first time"
    )
    assert streams.with_prequential(CURVES) == []


def test_curves_are_read_from_the_runs_and_begin_untrained(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    tracker = StudyTracker(store, "streams", {})

    def told(family: str, seed: int, reports: list[dict[str, float]]) -> None:
        config = TrialConfig(
            family=family,
            phase="verdict",
            seed=seed,
            data=DataConfig(name="digits"),
            embedder=EmbedderConfig(),
            batch=BatchConfig(),
            training=TrainingConfig(),
            online=OnlineConfig(),
            loss=LossConfig(name="oahu"),
        )
        run_id = tracker.start_trial(f"{family} verdict seed {seed}", config, None)
        steps = [{"step": float(number), **metrics} for number, metrics in enumerate(reports, 1)]
        tracker.end_trial(run_id, "finished", steps, {"test_accuracy": 0.5})

    layers = {"layer_weight_0": 0.5, "layer_weight_1": 0.5}
    for seed in (1, 2):
        told("untrained", seed, [{"error_rate": 0.9, **layers}])
        told(
            "oahu",
            seed,
            [
                {
                    "error_rate": 0.8 - n / 10,
                    "num_constraints": 100.0 * n,
                    "prequential_width": 240.0,
                    "prequential_error_00": 1 / n,
                    **layers,
                }
                for n in (1, 2)
            ],
        )
    found = {(c.family, c.seed): c for c in verdict_curves(store, "streams", streams.METRICS)}
    assert found["oahu", 2].values["error_rate"] == pytest.approx([0.7, 0.6])
    curves = streams.of_streams(list(found.values()))
    assert [curve.family for curve in curves] == ["oahu", "oahu"]
    assert curves[0].values["num_constraints"] == [0, 100, 200]
    assert curves[0].values["error_rate"] == pytest.approx([0.9, 0.7, 0.6])
    last = streams.with_prequential(last_told(store, "streams", streams.PREQUENTIAL))
    assert [(curve.family, curve.seed) for curve in last] == [("oahu", 1), ("oahu", 2)]
    assert last[0].values["prequential_error_00"] == [0.5]
    errors, weights = streams.plots(curves)
    assert errors.caption.startswith("Error rate against number of constraints: mean over up to 2 seeds")
    assert weights.caption == "oahu: weights of the layers (mean over 2 seeds)."
