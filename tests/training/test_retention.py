"""Retention: a verdict trial's model scored on other data, by the same rules; search trials know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, failing_trial, saving_trial, trial

from dmlstudy import data, embedders, retrieval
from dmlstudy.records import TrialConfig
from dmlstudy.training import dataset_cache

SHOWN = ("map_at_r", "r_precision", "recall_at_1", "recall_at_4")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Six classes of five noisy grey pictures, of which the last three are for the test."""
    rng = np.random.default_rng(0)
    for c in range(6):
        level = rng.integers(0, 256)
        for i in range(5):
            pixels = (0.5 * level + 0.5 * rng.integers(0, 256, (9, 9))).astype(np.uint8)
            path = tmp_path / "other" / f"class{c}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return tmp_path / "other"


def judged(other: Path, **changes: Any) -> dict[str, Any]:
    retention = {"name": "image_folder", "path": str(other), "image_size": 8, **changes.pop("retention", {})}
    return config(phase="verdict", retention=retention, **changes)


def without(metrics: dict[str, float]) -> dict[str, float]:
    return {name: score for name, score in metrics.items() if not name.startswith("retention_")}


@pytest.mark.parametrize("epochs", [0, 2])
def test_scores_are_those_of_the_saved_model(other: Path, tmp_path: Path, epochs: int) -> None:
    """By hand: the model that was kept, the same pictures, the same metrics; the untrained row has them too."""
    found = saving_trial(judged(other, training__epochs=epochs), str(tmp_path / "model"))
    test = data.load("image_folder", str(other), 8).test
    z_ND = embedders.embed(embedders.load(tmp_path / "model"), test.read(np.arange(len(test))))
    expected = retrieval.evaluate(z_ND, test.labels_N, recall_at=(1, 4))
    for metric in SHOWN:
        assert found[f"retention_{metric}"] == pytest.approx(expected[metric], abs=1e-6)
        assert found[f"retention_{metric}"] != found[f"test_{metric}"]


def test_nothing_else_of_a_trial_changes(other: Path) -> None:
    plain, found = trial(config(phase="verdict")), trial(judged(other))
    assert without(found[1]) == plain[1]
    assert len(found[1]) > len(plain[1])
    assert not any("retention" in name for report in found[0] for name in report)


def test_a_search_trial_never_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_cache, "retention", lambda config: pytest.fail("it was read"))
    plain = config(training__epochs=1)
    found = plain | {"retention": {"name": "image_folder", "path": "/nowhere"}}
    assert trial(found)[1] == trial(plain)[1]
    prints = [TrialConfig.model_validate(raw).fingerprint() for raw in (plain, found)]
    assert prints[0] == prints[1]
    verdicts = [
        TrialConfig.model_validate(raw | {"phase": "verdict"}).fingerprint() for raw in (plain, found)
    ]
    assert verdicts[0] != verdicts[1]


def test_where_it_is_decoded_to_changes_no_fingerprint(other: Path) -> None:
    prints = {
        TrialConfig.model_validate(judged(other, retention=further)).fingerprint()
        for further in ({}, {"canvas": "disk"}, {"canvas_gib": 1.0})
    }
    assert len(prints) == 1


def test_ranks_embed_it_in_shares(other: Path, pool: GlooPool) -> None:
    alone = trial(judged(other))[1]
    for _, found in pool.run(2, trial, judged(other)):
        for metric in SHOWN:
            assert found[f"retention_{metric}"] == pytest.approx(alone[f"retention_{metric}"], abs=1e-5)


def test_an_interrupted_trial_keeps_it(other: Path, tmp_path: Path) -> None:
    _, found, attempts = broken_trial(judged(other), str(tmp_path / "kept"), "epoch")
    assert attempts > 1
    assert found == trial(judged(other))[1]


def test_query_and_gallery_are_those_of_the_data(tmp_path: Path) -> None:
    rng, lines = np.random.default_rng(1), ["path,label,split,is_query,is_gallery"]
    for c in range(6):
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{c}{i}.png")
            side = "train" if c < 3 else "test"
            lines.append(f"{c}{i}.png,{c},{side},{str(i == 0).lower()},{str(i > 0).lower()}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    raw = config(phase="verdict", retention={"name": "table", "path": str(tmp_path / "table.csv")})
    found = saving_trial(raw, str(tmp_path / "model"))
    sides = data.load("table", str(tmp_path / "table.csv"))
    z_ND = embedders.embed(embedders.load(tmp_path / "model"), sides.test.read(np.arange(len(sides.test))))
    query, gallery = sides.test_query, sides.test_gallery
    assert query is not None
    assert gallery is not None
    labels_N = sides.test.labels_N
    expected = retrieval.gallery_scores(
        z_ND[query], labels_N[query], z_ND[gallery], labels_N[gallery], recall_at=(1, 4)
    ).means()
    for metric in SHOWN:
        assert found[f"retention_{metric}"] == pytest.approx(expected[metric], abs=1e-6)


def test_vectors_may_have_other_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for name in ("own", "other"):
        np.savez(
            tmp_path / f"{name}.npz",
            features=rng.normal(size=(80, 5)).astype(np.float32),
            labels=np.repeat(np.arange(8), 10),
        )
    own, other = ({"name": "features", "path": str(tmp_path / f"{name}.npz")} for name in ("own", "other"))
    found = trial(
        config(
            phase="verdict", data=own, retention=other, embedder={"backbone": "mlp1", "dim": 8, "width": 8}
        )
    )[1]
    assert 0 < found["retention_map_at_r"] < 1


def test_a_damaged_picture_fails_the_trial_or_is_left_out(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = {"retention": {"resize_to": 9}}  # read when it is embedded
    damaged = sorted((other / "class5").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:60])
    raw = judged(
        other, **lazy, data={"name": "image_folder", "path": str(other), "image_size": 8, "resize_to": 9}
    )
    raw["data"]["on_corrupt"] = "skip"
    raw["batch"] = {"classes": 2, "images_per_class": 2, "per_epoch": 1}
    dataset_cache.forget()
    assert failing_trial(raw).startswith("protocol.retention: ")
    assert str(damaged) in failing_trial(raw)
    dataset_cache.forget()
    raw["retention"] = raw["retention"] | {"on_corrupt": "skip"}
    found = trial(raw)[1]
    assert found["retention_map_at_r"] == pytest.approx(found["test_map_at_r"], abs=1e-6)
    dataset_cache.forget()
