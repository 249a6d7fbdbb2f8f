"""A study with retention data, from its file to its leaderboard, report and card."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlstudy import data, models, retrieval

from .conftest import called

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

STUDY = """
name: keep
data: {name: image_folder, path: own, image_size: 8}
embedder: {backbone: small_conv, dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 2}
training: {epochs: 1, lr: 1.0e-3}
families:
  ms: {space: multi_similarity}
search: {trials_per_family: 1}
protocol: {num_folds: 2, verdict_seeds: 2, retention: {name: image_folder, path: other}}
resources: {workers: 2}
"""


def test_a_study_records_what_is_kept_elsewhere(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, classes in (("own", range(8)), ("other", range(8, 14))):
        for c in classes:
            colour = rng.integers(0, 256, 3)
            for i in range(5):
                path = tmp_path / name / f"class{c:02}" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = 0.5 * colour + 0.5 * rng.integers(0, 256, (12, 12, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    (tmp_path / "study.yaml").write_text(STUDY)
    store = tmp_path / "store"
    ran = called("run", tmp_path / "study.yaml", "--store", store)
    assert ran.returncode == 0, ran.stderr
    assert "retention map_at_r" in ran.stdout
    shown = called("leaderboard", "keep", "--store", store, "--json")
    rows = {row["family"]: row for row in json.loads(shown.stdout)["rows"]}
    for row in rows.values():
        assert row["retention"]["retention_map_at_r"]["num"] == 2
    model = models.load("keep-embedder@champion", store=store)
    test = data.load("image_folder", str(tmp_path / "other"), 8).test
    expected = retrieval.evaluate(model.embed(test.read(np.arange(len(test)))), test.labels_N)
    kept = called("pull", "keep-embedder@champion", "--to", tmp_path / "model", "--store", store)
    assert kept.returncode == 0, kept.stderr
    from dmlstudy.registry import tracking
    from dmlstudy.store import Store

    runs = tracking.runs_of(Store(store), "keep")
    (shipped,) = [run for run in runs.judged("ms") if run.seed == 1]
    for metric in ("map_at_r", "recall_at_1"):
        assert shipped.metrics[f"retention_{metric}"] == pytest.approx(expected[metric], abs=1e-6)
    assert called("report", "keep", "--store", store, "-o", tmp_path / "r.html").returncode == 0
    assert "Retention" in (tmp_path / "r.html").read_text()
    assert "retention map_at_r" in next((tmp_path / "model").glob("*.md")).read_text()
