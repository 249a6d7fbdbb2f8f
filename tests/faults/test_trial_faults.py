"""Trials that cannot go on: a loss that is not finite, memory that is not there, an image that cannot be read.

Each is recorded with its reason, and the study goes on.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from .conftest import (
    DMLSTUDY,
    Record,
    board_of,
    left,
    runs_left_open,
    seconds_until_training,
    trials_of,
)

pytestmark = pytest.mark.timeout(600)

SPEC = """
name: faults
data: {{name: image_folder, path: {images}}}
embedder: {{dim: 4096, width: 4}}
batch: {{classes: all, images_per_class: 4, per_epoch: 4}}
training: {{epochs: 40, head_lr_mult: 1, lr: 1.0e-3}}
families:
  diverging: {{space: multi_similarity, override: {{training.lr: 1.0e+30, training.optimizer: sgd}}}}
  calm: {{space: multi_similarity}}
  hungry: {{space: multi_similarity, override: {{batch.memory_size: 10_000_000}}}}
  sound: {{space: multi_similarity}}
search: {{trials_per_family: 2, scheduler: none}}
protocol: {{num_folds: 1, verdict_seeds: 1, fold_models: false}}
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twelve pictures of each digit, in a folder per class."""
    digits = load_digits()
    for label in range(10):
        folder = tmp_path / "images" / str(label)
        folder.mkdir(parents=True)
        for number, pixels in enumerate(digits.images[digits.target == label][:12]):
            Image.fromarray((pixels * 15).astype(np.uint8)).save(folder / f"{number:02d}.png")
    return tmp_path / "images"


def test_a_study_does_not_begin_with_an_image_that_cannot_be_read(tmp_path: Path, images: Path) -> None:
    (tmp_path / "study.yaml").write_text(SPEC.format(images=images))
    (images / "3" / "07.png").write_bytes(b"torn")
    store = tmp_path / "store"
    refused = subprocess.run(
        [*DMLSTUDY, "run", tmp_path / "study.yaml", "--store", store], capture_output=True, text=True
    )
    assert refused.returncode == 2
    line = r"error: .*3/07\.png: not a readable image .*; repair or remove it, or .* data\.on_corrupt: skip\n"
    assert re.fullmatch(line, refused.stderr)
    assert not store.exists()


@pytest.mark.long
def test_a_study_survives_trials_that_diverge_run_out_of_memory_or_meet_a_torn_image(
    tmp_path: Path, images: Path, record_fault: Record
) -> None:
    (tmp_path / "study.yaml").write_text(SPEC.format(images=images))
    torn = images / "3" / "07.png"
    whole = torn.read_bytes()
    mark, store, log = uuid.uuid4().hex, tmp_path / "store", tmp_path / "shown"
    folder = store / "studies" / "faults"
    with open(log, "wb") as file:
        study = subprocess.Popen(
            [*DMLSTUDY, "run", tmp_path / "study.yaml", "--store", store],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"DMLSTUDY_TEST": mark},
        )

        def wait_for(pattern: str) -> None:
            end = time.monotonic() + 240
            while not re.search(pattern, log.read_text(), re.MULTILINE):
                assert study.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)

        try:
            wait_for(r"^ *1/13 +diverging #0 +failed: epoch 1, batch \d+: rank \d: .* not finite")
            record_fault("loss or embeddings not finite", 1, seconds_until_training(folder, than=0))
            wait_for(r"^ *3/13 +hungry #2 +failed: out of memory: ")
            record_fault("out of memory", 1, seconds_until_training(folder, than=2))
            wait_for(r"^ *6/13 +calm #5 +")
            torn.write_bytes(whole[: len(whole) // 2])
            wait_for(r"^ *7/13 +hungry #6 ")  # so the next trial's workers are new, and read the images anew
            wait_for(r"^ *8/13 +sound #7 +failed: DamagedImage: ")
            torn.write_bytes(whole)
            record_fault("image torn while the study runs", 1, seconds_until_training(folder, than=7))
            assert study.wait(timeout=300) == 0, log.read_text()
        finally:
            study.kill()
            study.wait()

    assert left(mark) == [], "a process outlived its study"
    trials = trials_of(store, "faults")
    states = [trial.state.name for trial in trials]
    assert states == ["FAIL", "COMPLETE", "FAIL", "COMPLETE", "FAIL", "COMPLETE", "FAIL", "FAIL"]
    reasons = {0: "not finite|is nan", 2: "^out of memory: .*rank", 7: r"3/07\.png: not a readable image"}
    for number, reason in (reasons | {4: reasons[0], 6: reasons[2]}).items():
        assert re.search(reason, trials[number].user_attrs["reason"]), trials[number].user_attrs
    assert runs_left_open(store, "faults") == []
    board = board_of(store, "faults")
    assert board["winner"] in ("calm", "sound")
    failed = {row["family"]: row["num_failed"] for row in board["rows"]}
    assert [failed[name] for name in ("diverging", "calm", "hungry", "sound")] == [2, 0, 2, 1]
