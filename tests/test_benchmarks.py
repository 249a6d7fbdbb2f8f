"""Each benchmark still runs, at its smallest size: a script that no test calls is out of date before it is read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor
from support import recorded_curves

from dmlstudy.spec.study_file import load
from dmlstudy.store import Store
from dmlstudy.studies.run import run_study

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"

SHARED = {"fresh", "training_step"}
"""What benchmarks import of each other."""

SMALLEST = {
    "checkpointing": "--network resnet18 --image-size 32 --batch 4 --turns 1",
    "chunks": "--side 32 --batch 16 --large 32 --chunk 8 --pairs 1 --threads 1",
    "classes": "arcface --classes 1000 --size 32 --rounds 1",
    "cost": "search_spaces/studies/cub200.yaml --batches 1",
    "drift": "--seeds 1 --eta 0.05",
    "features": "--pictures 100 --epochs 2 --rounds 1 --kept-trials 1",
    "loader": "--pictures 8 --epochs 40 --rounds 1",
    "losses": "contrastive --sizes 64 --dims 16 --rounds 1",
    "many_runs": "--trials 50 --repeats 1",
    "memory": "triplet --size 256 --ranks 1 2",
    "online": "--triplets 96 --rounds 1",
    "overhead": "--trials 1 --study 2 --seconds 0.2",
    "retrieval": "--sizes 300 --dims 16 --per-class 5 --rounds 1",
    "scale": "--trials 12 --gangs 4",
    "search": "--searches 2 --samplers random --schedulers none --results {scratch}/regrets.jsonl --tables"
    " 'omniglot multi-similarity'",
    "serving": "--seconds 2 --connections 2",
    "verification": "--sizes 300 --dims 16 --rounds 1",
}


ONLINE = """
name: few-of-a-stream
data: {name: digits}
online: {features: grey, num_seeds: 20, num_implied: 20}
training: {epochs: 1}
families: {rdml: {space: rdml}, neighbours: {space: euclidean}}
search: {trials_per_family: 1}
protocol: {objective: accuracy, num_folds: 2, verdict_seeds: 2}
resources: {workers: 1}
"""


FOLDS = """
name: few-of-two-folds
data: {name: digits}
embedder: {backbone: small_conv, dim: 8, width: 4}
batch: {classes: 2, images_per_class: 4, per_epoch: 2}
training: {epochs: 1}
families: {triplet: {space: triplet}}
search: {trials_per_family: 6, scheduler: none}
protocol: {num_folds: 2, verdict_seeds: 1}
resources: {workers: 1}
"""


def printed(name: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_every_benchmark_has_its_smallest_size() -> None:
    assert {*SMALLEST, "folds", "online_table"} == {path.stem for path in BENCHMARKS.glob("*.py")} - SHARED


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs("wrk")) if name == "serving" else name for name in SMALLEST],
)
def test_a_benchmark_prints_its_numbers(name: str, tmp_path: Path) -> None:
    assert re.search(r"\d\.\d", printed(name, *shlex.split(SMALLEST[name].format(scratch=tmp_path))))


def test_a_forests_last_scores_are_scikit_learns_and_each_epoch_has_the_same_weights() -> None:
    rng = np.random.default_rng(0)
    at_NP, last_N = rng.uniform(size=(40, 3)), rng.normal(size=40)
    means = recorded_curves.forest(at_NP, np.stack([2 * last_N + 1, last_N], axis=1))
    new_KP = rng.uniform(size=(20, 3))
    fitted = ExtraTreesRegressor(200, random_state=0).fit(at_NP, last_N)
    expected_K = fitted.predict(new_KP)
    np.testing.assert_allclose(means(new_KP), np.stack([2 * expected_K + 1, expected_K], axis=1))


@pytest.mark.long
def test_the_table_of_a_stream_stands_beside_the_papers(tmp_path: Path) -> None:
    file, store = tmp_path / "stream.yaml", Store(tmp_path / "store")
    file.write_text(ONLINE)
    run_study(load(file), store, address=None, tell=lambda line: None)
    rows = printed("online_table", "few-of-a-stream", "--store", str(store.root)).splitlines()
    assert any(row.startswith("| rdml | 0.") and "| 0.76 ± 0.01 |" in row for row in rows), rows


@pytest.mark.long
def test_the_fold_test_is_replayed_on_a_study(tmp_path: Path) -> None:
    file, store = tmp_path / "folds.yaml", Store(tmp_path / "store")
    file.write_text(FOLDS)
    run_study(load(file), store, address=None, tell=lambda line: None)
    rows = printed("folds", "few-of-two-folds", "--store", str(store.root), "--searches", "5").splitlines()
    assert rows[0] == "triplet: 6 trials of 2 folds"
    assert any(re.match(r"\| fold test, 0\.05 \| \d+% \|", row) for row in rows), rows
