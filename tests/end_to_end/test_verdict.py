"""A verdict of all parts, from its file to its leaderboard: killed and resumed it is the unbroken one."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.trees import end_tree

from .conftest import DMLSTUDY, called, command

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

STUDY = """
name: whole
data: {name: image_folder, path: pictures, image_size: 8}
embedder: {backbone: small_conv, dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 2}
training: {epochs: 1, lr: 1.0e-3}
families:
  triplet: {space: triplet}
  structured:
    space: triplet
    like: triplet
    override: {regularizer: {name: structure}}
search: {trials_per_family: 2, sampler: random, scheduler: none}
protocol:
  num_folds: 2
  verdict_seeds: {from: 3, to: 4}
  searches: 2
  fold_models: false
  verification: true
  fmr: 0.05
resources: {workers: 1}
"""


def pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        colour = rng.integers(0, 256, 3)
        for i in range(5):
            path = folder / "pictures" / f"class{number:02}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = 0.6 * colour + 0.4 * rng.integers(0, 256, (12, 12, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    (folder / "study.yaml").write_text(STUDY)


def board(store: Path, study: str = "whole") -> dict[str, Any]:
    shown = called("leaderboard", study, "--store", store, "--json")
    assert shown.returncode == 0, shown.stderr
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def run_until(folder: Path, store: Path, line: str) -> None:
    """Run the study, and kill all its processes once this has been told."""
    with open(folder / "shown", "ab") as file:
        process = subprocess.Popen(
            [*DMLSTUDY, "run", folder / "study.yaml", "--store", store],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ,
        )
        try:
            while process.poll() is None and line not in (folder / "shown").read_text():
                time.sleep(0.05)
            assert process.poll() is None, (folder / "shown").read_text()
        finally:
            end_tree(process)


def test_a_whole_verdict_is_told_sealed_and_resumed(tmp_path: Path) -> None:
    pictures(tmp_path)
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    ran = command("run", tmp_path / "study.yaml", "--store", unbroken, timeout=900)
    assert ran.returncode == 0, ran.stderr
    for line in ("verdict seed 1", "whole.search2: 2 families"):
        run_until(tmp_path, killed, line)
    resumed = command("resume", "whole", "--store", killed, timeout=900)
    assert resumed.returncode == 0, resumed.stderr
    for study in ("whole", "whole.search2"):
        assert board(killed, study) == board(unbroken, study)

    found = board(unbroken)
    assert found["luck"]["num_searches"] == 2
    assert {each["family"] for each in found["luck"]["procedures"]} == {"triplet", "structured"}
    assert all(each["like_outcome"] for each in found["comparisons"])
    assert all(each["ended"] for each in found["comparisons"])
    rows = {row["family"]: row for row in found["rows"]}
    assert 3 <= rows["triplet"]["num_judged"] <= 4
    for name in ("test_eer", "test_fmr_at_tau_5e-2", "test_fnmr_at_tau_5e-2"):
        assert name in rows["triplet"]["test"]
    assert "test_omega_deviation" in rows["structured"]["test"]

    report = called("report", "whole", "--store", unbroken, "-o", tmp_path / "whole.html")
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "whole.html").read_text()
    for title in ("The luck of the search", "What more trials bring", "Thresholds"):
        assert (title in page) is (title != "What more trials bring")  # two trials tell nothing
    assert called("report", "whole", "--verify", "--store", unbroken).returncode == 0
    plan = next((unbroken / "studies" / "whole").glob("verdict_plan.json"))
    plan.write_text(
        plan.read_text().replace('"give_up":0.1', '"give_up":0.2').replace('"give_up": 0.1', '"give_up": 0.2')
    )
    refused = called("report", "whole", "--verify", "--store", unbroken)
    assert refused.returncode == 1
    assert "verdict_plan.json in the study's folder is not the one that was sealed" in refused.stdout

    kept = called("pull", "whole-embedder@champion", "--to", tmp_path / "model", "--store", unbroken)
    assert kept.returncode == 0, kept.stderr
    threshold = json.loads((tmp_path / "model" / "threshold.json").read_text())
    assert threshold["wanted_fmr"] == 0.05
    assert "set for FMR 0.05 on held-out development classes" in threshold["words"]
