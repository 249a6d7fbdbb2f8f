"""Seeds that are added until named pairs are decided, from the study's file to its leaderboard, report and status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import called

pytestmark = pytest.mark.timeout(400)

STUDY = """
name: named
data: {name: digits}
embedder: {backbone: small_conv, dim: 8, width: 4, matryoshka: [4]}
batch: {classes: 3, images_per_class: 4, per_epoch: 2}
training: {epochs: 1, lr: 1.0e-3}
families:
  triplet: {space: triplet}
  supcon: {space: supcon}
  mixed: {space: recall_at_k}
search: {trials_per_family: 1, scheduler: none}
protocol:
  num_folds: 1
  verdict_seeds: {from: 3, to: 5}
  compare: [[supcon, triplet], [mixed, triplet]]
  fold_models: false
resources: {workers: 1}
"""


def test_named_pairs_by_seeds_in_steps(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "study.yaml").write_text(STUDY)
    ran = called("run", tmp_path / "study.yaml", "--store", store)
    assert ran.returncode == 0, ran.stderr

    shown = called("leaderboard", "named", "--store", store, "--json")
    board: dict[str, Any] = json.loads(shown.stdout)
    pairs = {(each["first"], each["second"]) for each in board["comparisons"]}
    assert pairs == {("supcon", "triplet"), ("mixed", "triplet")}
    assert {each["most_seeds"] for each in board["comparisons"]} == {5}
    num_judged = {row["family"]: row["num_judged"] for row in board["rows"]}
    for each in board["comparisons"]:
        assert each["look"] in (3, 4, 5)
        assert each["num_seeds"] == each["look"] <= num_judged[each["first"]]
    assert {(each["family"], each["size"], each["bits"]) for each in board["short"]} == {
        (family, size, bits)
        for family in ("triplet", "supcon", "mixed")
        for size, bits in ((4, 32), (4, 8), (4, 1), (8, 8), (8, 1))
    }

    status = json.loads(called("status", "named", "--store", store, "--json").stdout)
    (own,) = status if isinstance(status, list) else [status]
    assert own["state"] == "finished"
    assert own["num_left"] == 0
    # What the driver has noted is what has run: the looks have lowered the number that the plan began with.
    state = json.loads((store / "studies" / "named" / "study.json").read_text())
    assert state["num_verdict_trials"] == sum(num_judged.values())

    page = tmp_path / "report.html"
    assert called("report", "named", "--store", store, "--verify").returncode == 0
    assert called("report", "named", "--store", store, "--output", page).returncode == 0
    text = page.read_text()
    assert "Short vectors" in text
    assert "supcon" in text
