"""The Python interface, as the README shows it: its samples are run as they stand there, on a small study."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch.distributed as dist

import dmlstudy
from dmlstudy import data

ROOT = Path(__file__).resolve().parents[1]
SECTION = (
    (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## From Python\n")[2].partition("\n## ")[0]
)
SAMPLES = re.findall(r"^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
STUDY = Path(str(re.search(r'dmlstudy\.run\("([^"]+)"', SECTION)[1]))  # type: ignore[index]
STORE = str(re.search(r'store="([^"]+)"', SECTION)[1])  # type: ignore[index]

SMALL = f"""
name: {STUDY.stem}
data: {{name: digits}}
embedder: {{backbone: small_conv, dim: 4, width: 2}}
batch: {{classes: 2, images_per_class: 2, per_epoch: 2}}
training: {{epochs: 1}}
families:
  contrastive: {{space: contrastive}}
  triplet: {{space: triplet}}
search: {{trials_per_family: 1, scheduler: none, seed: 0}}
protocol: {{num_folds: 2, verdict_seeds: 2, fold_models: false}}
resources: {{workers: 1, cpus_per_worker: 1}}
"""

NOTEBOOK = """
import io, json, os, signal, sys

class Cell(io.TextIOBase):  # as a notebook's: it is written to, and is no file descriptor
    def __init__(self):
        self.text = ""
    def write(self, text):
        self.text += text
        return len(text)

terminal, sys.stdout = sys.stdout, Cell()
import dmlstudy

def interrupt(line):
    if line.lstrip().startswith("1/"):
        os.kill(os.getpid(), signal.SIGINT)

where = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
said = ""
try:
    dmlstudy.run(sys.argv[1], store=sys.argv[2], tell=interrupt)
except KeyboardInterrupt as error:
    said = str(error)
is_restored = where == [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
is_restored &= handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
interrupted = dmlstudy.load(sys.argv[2], sys.argv[3]).status
study = dmlstudy.run(sys.argv[1], store=sys.argv[2])
facts = {"said": said, "interrupted": interrupted, "is_restored": is_restored, "status": study.status}
print(json.dumps(facts | {"told": sys.stdout.text}), file=terminal)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the samples name: a study file, and pictures."""
    folder = tmp_path_factory.mktemp("interface")
    (folder / STUDY).parent.mkdir(parents=True)
    (folder / STUDY).write_text(SMALL)
    return folder


@pytest.fixture(scope="module")
def told(place: Path) -> dict[str, Any]:
    """The study run by a notebook: interrupted after its first trial, then to its end."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOTEBOOK), str(STUDY), STORE, STUDY.stem],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    facts: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return facts


def test_an_interrupted_cell_leaves_the_kernel_as_it_was_and_goes_on(told: dict[str, Any]) -> None:
    assert told["said"].startswith(
        f"study {STUDY.stem} is interrupted; what was finished is kept: run it again"
    )
    assert told["interrupted"] == "interrupted"
    assert told["is_restored"]
    assert told["status"] == "finished"
    lines = [line for line in told["told"].splitlines() if re.match(r" *\d+/\d+ ", line)]
    assert 1 <= len(lines) < 8
    assert "best" in lines[-1]


def test_the_samples_of_the_readme_run(
    told: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One after the other, as a reader would; the study that they name is there and finished."""
    import safetensors  # noqa: F401  # the folder of pictures is read as it is

    monkeypatch.chdir(place)
    from PIL import Image

    (place / "pictures").mkdir()
    images_NHWC = data.load("digits").test.images_NHWC[:3]
    for number, image_HWC in enumerate(images_NHWC):
        Image.fromarray(image_HWC[..., 0]).save(place / "pictures" / f"{number}.png")
    assert len(SAMPLES) >= 4
    names: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        for sample in SAMPLES:
            exec(compile(sample, "README.md", "exec"), names)
    finally:
        dist.destroy_process_group()
    board = names["study"].leaderboard()
    assert isinstance(board, pd.DataFrame)
    assert set(board["family"]) >= {"contrastive", "triplet"}
    assert board["is_winner"].sum() == 1
    assert board["test_map_at_r_estimate"].between(0, 1).all()
    trials = names["study"].trials()
    assert list(trials["status"]) == ["finished"] * 2
    assert list(trials["number"]) == sorted(trials["number"])
    assert trials["param.loss.margin"].notna().sum() == 1
    comparisons = names["study"].comparisons()
    assert {"first", "second", "effect", "adjusted_p_value", "outcome"} <= set(comparisons.columns)
    assert len(comparisons) == 3
    assert next(place.glob("*.html")).read_text().startswith("<!")
    np.testing.assert_allclose(np.linalg.norm(names["embeddings"], axis=1), 1, atol=1e-5)
    model = names["model"]
    np.testing.assert_allclose(model.embed(images_NHWC), names["embeddings"], atol=1e-6)
    files = [place / "pictures" / f"{number}.png" for number in (2, 0)]
    np.testing.assert_allclose(model.embed(files), names["embeddings"][[2, 0]], atol=1e-6)


def test_a_study_and_a_model_say_briefly_what_they_are(told: dict[str, Any], place: Path) -> None:
    study = dmlstudy.load(place / STORE, STUDY.stem)
    assert repr(study).startswith(f"<study {STUDY.stem}: finished, 3 families, winner ")
    rows = [row.model_copy(update={"family": "<script>"}) for row in study._board.rows]
    study._board = study._board.model_copy(update={"rows": rows, "winner": "<b>"})
    page = study._repr_html_()
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;" in page
    assert not {"<script>", "<b>"} & set(re.findall(r"<\w+>", page))
    model = dmlstudy.models.load(f"{STUDY.stem}-embedder", store=place / STORE, device="cpu")
    assert repr(model) == f"<embedder {STUDY.stem}-embedder of images 28 x 28 x 1>".replace(
        "28 x 28", f"{model.takes.image_size} x {model.takes.image_size}"
    )
    for items, message in (
        (np.zeros((2, 8, 8), np.float32), "takes images, uint8 NHW or NHWC"),
        ([], "embeds an array, a path or a list of paths"),
        ("nowhere.png", "no such file"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            model.embed(items)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: dmlstudy.load(folder / "none", "x"), "none"),
        (lambda folder: dmlstudy.models.load("x-embedder", store=folder / "none"), "none"),
        (lambda folder: dmlstudy.run({"name": "x"}, store=folder), "data: is missing; add it"),
        (lambda folder: dmlstudy.run(folder / "x.yaml", store=folder), "no such file"),
    ],
)
def test_what_is_not_there_is_one_line(call: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_cluster_of_names_is_looked_up_and_no_other() -> None:
    assert set(dmlstudy.__all__) <= set(dir(dmlstudy))
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        dmlstudy.runn  # noqa: B018
