"""The Python interface, as the READMEs show it: their samples are run as they stand there, on a study that was made."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch.distributed as dist
from PIL import Image
from support.made_study import Maker

import dmlstudy
from dmlstudy import data, embedders
from dmlstudy.engine.interruption import Interruption, StudyInterrupted
from dmlstudy.engine.progress import Tell, engine_noise_to
from dmlstudy.saved import Model
from dmlstudy.store import Store

ROOT = Path(__file__).resolve().parents[1]


def section(document: str, heading: str) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


SECTION = section("README.md", "From Python")
SAMPLES = re.findall(
    r"^```python\n(.*?)^```",
    SECTION
    + section("platform/dmlstudy/losses/README.md", "In your own loop")
    + section("platform/dmlstudy/serving/README.md", "From Python"),
    re.MULTILINE | re.DOTALL,
)
STUDY = str(re.search(r'dmlstudy\.run\("([^"]+)"', SECTION)[1])  # type: ignore[index]
STORE = str(re.search(r'store="([^"]+)"', SECTION)[1])  # type: ignore[index]
NAME = Path(STUDY).stem


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the samples name: a study file, a finished study in a store, and pictures."""
    folder = tmp_path_factory.mktemp("interface")
    (folder / STUDY).parent.mkdir(parents=True)
    (folder / STUDY).write_text((ROOT / STUDY).read_text())
    store = Store(folder / STORE)
    store.prepare()
    made = Maker(store, NAME)
    made.search("alpha", "finished", 0.5, {1: 0.4, 2: 0.5}, training__lr=1e-3, loss__margin=0.2)
    made.search("beta", "pruned", 0.3, {1: 0.3}, "below the median", training__lr=2e-3)
    made.search("beta", "finished", 0.4, {1: 0.3, 2: 0.4}, training__lr=5e-3)
    for family, scores in {"alpha": (0.60, 0.61), "beta": (0.50, 0.52)}.items():
        for seed, score in enumerate(scores, 1):
            made.judge(family, seed, score)
    made.end("alpha")
    (folder / "pictures").mkdir()
    for number, image_HWC in enumerate(data.load("digits").test.read(np.arange(3))):
        Image.fromarray(image_HWC[..., 0]).save(folder / "pictures" / f"{number}.png")
    shutil.copy(folder / "pictures" / "1.png", folder / "query.png")
    embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    embedders.save(embedder, folder / "model", {}, np.zeros((2, 8, 8, 1), np.uint8))
    return folder


@contextmanager
def of_the_registry(folder: Path) -> Iterator[Model]:
    yield Model.open(folder / "model")


def test_the_samples_of_the_readmes_run(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One after the other, as a reader would; the study is there, and its model lies beside the store."""
    asked: list[Any] = []
    monkeypatch.chdir(place)
    monkeypatch.setattr(
        "dmlstudy.studies.run.run_study",
        lambda spec, store, *, address, tell: asked.append((spec.name, store.root.name, address)),
    )
    monkeypatch.setattr(
        "dmlstudy.registry.models.fetched",
        lambda store, model, **_: asked.append((model, store.root.name)) or of_the_registry(place),
    )
    assert len(SAMPLES) >= 3
    names: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        for sample in SAMPLES:
            exec(compile(sample, "README.md", "exec"), names)
    finally:
        dist.destroy_process_group()
    assert asked == [(NAME, STORE, None), (f"{NAME}-embedder@champion", STORE)]
    assert next(place.glob("*.html")).read_text().startswith("<!")
    assert names["encoder"].module.weight.grad.abs().max() > 0
    np.testing.assert_allclose(np.linalg.norm(names["embeddings"], axis=1), 1, atol=1e-5)
    assert names["embeddings"].shape == (3, 6)
    assert len(names["gallery"]) == 3
    assert repr(names["server"]).endswith(", closed>")


def test_a_study_is_read_as_frames(place: Path) -> None:
    study = dmlstudy.load(place / STORE, NAME)
    board, trials, comparisons = study.leaderboard(), study.trials(), study.comparisons()
    assert all(isinstance(frame, pd.DataFrame) for frame in (board, trials, comparisons))
    assert list(board["family"]) == ["alpha", "beta"]
    assert list(board["is_winner"]) == [True, False]
    assert board["test_map_at_r_estimate"].tolist() == pytest.approx([0.605, 0.51])
    assert list(trials["number"]) == [0, 1, 2]
    assert list(trials["status"]) == ["finished", "pruned", "finished"]
    assert trials["param.loss.margin"].notna().tolist() == [True, False, False]
    assert comparisons["effect"].tolist() == pytest.approx([0.095])
    assert (study.status, study.winner, study.model) == ("finished", "alpha", None)


def test_a_study_says_briefly_what_it_is_and_escapes_it(place: Path) -> None:
    study = dmlstudy.load(place / STORE, NAME)
    assert repr(study) == f"<study {NAME}: finished, 2 families, winner alpha>"
    rows = [row.model_copy(update={"family": "<script>"}) for row in study._board.rows]
    study._board = study._board.model_copy(update={"rows": rows, "winner": "<b>"})
    page = study._repr_html_()
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;" in page
    assert not {"<script>", "<b>"} & set(re.findall(r"<\w+>", page))


def test_a_model_embeds_arrays_files_and_folders_alike(place: Path) -> None:
    model = dmlstudy.models.load(place / "model", device="cpu")
    assert repr(model).endswith("of images 8 x 8 x 1>")
    of_folder = model.embed(place / "pictures")
    images_NHWC = data.load("digits").test.read(np.arange(3))
    np.testing.assert_allclose(model.embed(images_NHWC), of_folder, atol=1e-6)
    np.testing.assert_allclose(model.embed(images_NHWC[..., 0]), of_folder, atol=1e-6)
    files = [place / "pictures" / f"{number}.png" for number in (2, 0)]
    np.testing.assert_allclose(model.embed(files), of_folder[[2, 0]], atol=1e-6)
    wrong: list[tuple[Any, str]] = [
        (np.zeros((2, 8, 8), np.float32), "takes images, uint8 NHW or NHWC"),
        ([], "embeds an array, a path or a list of paths"),
        ("nowhere.png", "no such file"),
    ]
    for items, message in wrong:
        with pytest.raises(ValueError, match=message) as raised:
            model.embed(items)
        assert "\n" not in str(raised.value)


class Cell(io.TextIOBase):
    """Standard output of a notebook: it is written to, and is no file descriptor that could be turned."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def test_an_interrupted_cell_leaves_the_kernel_as_it_was(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C, sent to this process while the engine's noise is turned away."""

    def run_study(spec: Any, store: Store, *, address: None, tell: Tell) -> None:
        with engine_noise_to(tmp_path / "engine.log"), Interruption():
            os.write(1, b"noise\n")
            tell("1/2  contrastive")
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise StudyInterrupted from None

    def state() -> list[Any]:
        files = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
        return files + [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    cell, before = Cell(), state()
    monkeypatch.setattr("dmlstudy.studies.run.run_study", run_study)
    monkeypatch.setattr(sys, "stdout", cell)
    with pytest.raises(
        KeyboardInterrupt, match=r"is interrupted; what was finished is kept: run it again, or"
    ):
        dmlstudy.run(place / STUDY, store=place / STORE)
    assert cell.text == "1/2  contrastive\n"
    assert (tmp_path / "engine.log").read_text().startswith("noise\n")
    assert state() == before


SCRIPT = """
import builtins, os, sys, threading
from pathlib import Path

import dmlstudy
from dmlstudy.engine.progress import engine_noise_to
from dmlstudy.studies import run

prints = builtins.print

def run_study(spec, store, *, address, tell):
    with engine_noise_to(Path("engine.log")):
        print("of the engine")
        builtins.print = lambda *words, **how: prints(*words, **how)  # as Ray does when it first shows a worker's line
        threads = [threading.Thread(target=tell, args=(f"{number} of 20",)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.write(1, b"of its libraries" + bytes([10]))

def tell(line):
    print("own", line)
    print("to stderr", line, file=sys.stderr)

run.run_study = run_study
streams = sys.stdout, sys.stderr
for how in ({}, {}, {"tell": tell}, {"tell": print}):
    try:
        dmlstudy.run(sys.argv[1], store="store", **how)
    except ValueError:  # there is no such study afterwards
        prints("ended")
    assert (sys.stdout, sys.stderr) == streams
"""


def test_each_run_is_heard_whoever_prints(tmp_path: Path) -> None:
    """Also a second one in a process, where Ray has put another function in the place of ``print``."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ROOT / STUDY],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    heard = [sorted(run.split("\n")) for run in done.stdout.split("ended\n")[:-1]]
    plain = sorted(f"{number} of 20" for number in range(20))
    assert heard == [["", *plain], ["", *plain], ["", *(f"own {line}" for line in plain)], ["", *plain]]
    assert sorted(done.stderr.splitlines()) == [f"to stderr {line}" for line in plain]
    noise = sorted((tmp_path / "engine.log").read_text().splitlines())
    assert noise == ["of its libraries"] * 4 + ["of the engine"] * 4


def test_a_gallery_is_searched_and_served_alike(place: Path, tmp_path: Path) -> None:
    model = dmlstudy.models.load(place / "model", device="cpu")
    embeddings = dmlstudy.models.embed(model, place / "pictures", tmp_path / "z.parquet")
    gallery = dmlstudy.models.index(embeddings, tmp_path / "gallery")
    found = dmlstudy.models.retrieve(model, gallery, place / "query.png", k=2)
    assert found["rank"].tolist() == [1, 2]
    assert found["item"][0] == "1.png"
    assert found["accept"].isna().all()
    with dmlstudy.models.serve(model, tmp_path / "gallery") as server:
        asked = urllib.request.Request(
            f"{server.url}/retrieve?k=2",
            (place / "query.png").read_bytes(),
            {"Content-Type": "image/png"},
        )
        with urllib.request.urlopen(asked) as answer:
            (results,) = json.load(answer)["results"]
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ValueError, match=f"--port {port}: .*name another with --port"):
            dmlstudy.models.serve(model, port=port)
    assert [each["id"] for each in results] == found["item"].tolist()
    assert [each["distance"] for each in results] == pytest.approx(found["distance"].tolist())
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(asked, timeout=5)
    assert not [thread.name for thread in threading.enumerate() if "dmlstudy" in thread.name]


def test_a_study_file_is_made_of_a_folder_once(tmp_path: Path) -> None:
    for label in range(8):
        folder = tmp_path / "birds" / f"{label}"
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("L", (28, 28), 40 * number).save(folder / f"{number}.png")
    written = dmlstudy.init(tmp_path / "birds", tmp_path / "birds.yaml", budget="quick")
    assert "name: birds" in written.read_text()
    with pytest.raises(ValueError, match="is there already"):
        dmlstudy.init(tmp_path / "birds", tmp_path / "birds.yaml")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: dmlstudy.models.pull("x-embedder", folder / "m", store=folder / "none"), "none"),
        (lambda folder: dmlstudy.init(folder / "none"), "none"),
        (lambda folder: dmlstudy.load(folder / "none", "x"), "none"),
        (lambda folder: dmlstudy.models.load("x-embedder", store=folder / "none"), "none"),
        (lambda folder: dmlstudy.run({"name": "x"}, store=folder), "data: is missing; add it"),
        (lambda folder: dmlstudy.run(folder / "x.yaml", store=folder), "no such file"),
    ],
)
def test_what_is_not_there_is_one_line(call: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)


def test_names_are_listed_and_no_other_is_known() -> None:
    assert set(dmlstudy.__all__) <= set(dir(dmlstudy))
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        dmlstudy.runn  # noqa: B018
