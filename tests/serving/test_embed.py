"""Embedding in parts: the same numbers however it is cut, broken off or shared out; nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from dmlstudy import data, model_folder
from dmlstudy.data.decoding import ORIENTATION_TAG
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files
from dmlstudy.serving import embed, retrieve
from dmlstudy.serving.embed import EmbedJob, embed_into, one_by_one, told
from dmlstudy.serving.gallery import build
from dmlstudy.serving.retriever import Retriever


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "PART", 7)


def job(model: Path, inputs: Path, output: Path, batch_size: int = 4) -> EmbedJob:
    return EmbedJob(str(model), str(inputs), str(output), batch_size, "cpu")


@pytest.mark.parametrize("kind", ["plain", "structure", "depth", "codes", "learner"])
def test_every_kind_of_model(
    kind: str, models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    inputs = vectors if kind in ("codes", "learner") else pictures
    told: list[tuple[list[int], int]] = []

    def follow(parts: Iterator[int], number: int) -> list[int]:
        told.append((list(parts), number))
        return told[-1][0]

    output = tmp_path / "z.parquet"
    own = job(models[kind], inputs, output)
    made = embed_into(own, one_by_one, follow)  # type: ignore[arg-type]
    ids, labels, z_ND = data.read_embeddings(output)
    items = of_files(Model.open(models[kind]), inputs)
    expected = Model.open(models[kind]).compute(items.read(range(len(items))))
    assert made[:3] == (len(items), expected.shape[1], [])
    assert made.bytes_per_vector == expected[0].nbytes
    assert (ids, labels) == (list(items.ids), items.labels)
    assert z_ND.dtype == expected.dtype
    np.testing.assert_allclose(z_ND, expected, atol=1e-6)
    assert told == [(list(range(len(own.parts))), len(own.parts))]
    assert len(own.parts) > 2
    assert data.embeddings_origin(output) == {
        "model": Model.open(models[kind]).fingerprint,
        "source": str(inputs),
        **({} if kind == "plain" else {"uncut": Model.open(models[kind]).uncut}),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["z.parquet"]


def test_broken_off_it_goes_on_from_its_parts(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    own = job(models["plain"], pictures, tmp_path / "z.parquet")

    def breaking(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        yield from own.make(numbers[:3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_into(own, breaking)
    assert not (tmp_path / "z.parquet").exists()
    made: list[int] = []

    def noting(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        made.extend(numbers)
        return one_by_one(own, numbers)

    embed_into(job(models["plain"], pictures, tmp_path / "z.parquet"), noting)
    assert made == list(range(3, len(own.parts)))
    embed_into(job(models["plain"], pictures, tmp_path / "whole.parquet"))
    first, second = (data.read_embeddings(tmp_path / name) for name in ("z.parquet", "whole.parquet"))
    assert first[:2] == second[:2]
    np.testing.assert_array_equal(first[2], second[2])


def test_parts_of_something_else_are_refused(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    def breaking(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        yield own.make(numbers[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_into(job(models["plain"], pictures, tmp_path / "z.parquet"), breaking)
    for model, inputs in (("structure", pictures), ("plain", pictures / "class0")):
        with pytest.raises(
            ValueError, match=r"z\.parquet\.parts: holds parts of another model or of other inputs"
        ):
            embed_into(job(models[model], inputs, tmp_path / "z.parquet"))


def test_a_picture_that_is_none_is_named_and_the_output_left_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"no picture")
    output = tmp_path / "z.parquet"
    data.write_embeddings(output, ["before"], None, np.ones((1, 6), np.float32))
    before = output.read_bytes()
    line = r"a\.png: not a readable image .*; repair or remove it, or leave it out by --on-corrupt skip$"
    with pytest.raises(ValueError, match=line):
        embed_into(job(models["plain"], folder, output))
    assert output.read_bytes() == before


def test_what_is_refused(models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; make it or name another output"):
        embed_into(job(models["plain"], pictures, tmp_path / "none" / "z.parquet"))
    with pytest.raises(ValueError, match="is a folder; name a file"):
        embed_into(job(models["plain"], pictures, tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in this folder"):
        embed_into(job(models["plain"], tmp_path / "empty", tmp_path / "z.parquet"))
    with pytest.raises(ValueError, match="vectors of size 10; the model takes 9"):
        data.open_vectors(vectors, 9)
    assert not list(tmp_path.glob("z*"))


def test_what_is_there_and_no_file_of_embeddings_stays(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    for name, columns in (("pictures", {"image": [b""], "label": [0]}), ("scores", {"study": ["s"]})):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    own = tmp_path / "own.parquet"
    data.write_embeddings(own, ["a"], None, np.ones((1, 4)))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("pictures", "scores"):
        with pytest.raises(
            ValueError, match=f"{name}.parquet: exists already and is not a file of embeddings"
        ):
            embed_into(job(models["plain"], pictures, tmp_path / f"{name}.parquet"))
    with pytest.raises(ValueError, match=r"own.parquet: is read for it and would be lost"):
        embed_into(job(models["plain"], own, tmp_path / ".." / tmp_path.name / "own.parquet"))
    with pytest.raises(ValueError, match=r"a Parquet file; call it z.parquet"):
        embed_into(job(models["plain"], pictures, tmp_path / "z.csv"))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_name_that_is_no_text_is_named(models: dict[str, Path], own_pictures: Path, tmp_path: Path) -> None:
    picture = next(own_pictures.rglob("*.png"))
    picture.rename(os.fsdecode(os.fsencode(picture.parent) + b"/caf\xe9.png"))
    with pytest.raises(ValueError, match=r"caf\\udce9.png: its name is not UTF-8; rename the file"):
        embed_into(job(models["plain"], own_pictures, tmp_path / "z.parquet"))
    with pytest.raises(ValueError, match=r"caf\\udce9.png: its name is not UTF-8"):
        data.load("image_folder", own_pictures)


@pytest.fixture
def own_pictures(pictures: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(pictures, tmp_path / "pictures"))


def noted(made: list[int]) -> Any:
    """A runner that notes which parts are made."""

    def run(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        made.extend(numbers)
        return one_by_one(own, numbers)

    return run


def agrees(output: Path, model: Path, inputs: Path) -> None:
    """What was written is what the model makes of all pictures that are there, in their order."""
    ids, labels, z_ND = data.read_embeddings(output)
    items = of_files(Model.open(model), inputs)
    assert (ids, labels) == (list(items.ids), items.labels)
    np.testing.assert_allclose(z_ND, Model.open(model).compute(items.read(range(len(items)))), atol=1e-6)


@pytest.mark.parametrize("mend", ["remove", "repair"])
def test_after_a_bad_picture_is_mended_it_goes_on_from_its_parts(
    mend: str, models: dict[str, Path], own_pictures: Path, tmp_path: Path
) -> None:
    bad = own_pictures / "class1" / "28.png"  # the last of its class: of 30 pictures the 20th
    whole = bad.read_bytes()
    bad.write_bytes(whole[:60])
    own = job(models["plain"], own_pictures, tmp_path / "z.parquet")
    with pytest.raises(ValueError, match=r"class1/28\.png: not a readable image .*; repair or remove it"):
        embed_into(own)
    (at,) = (number for number, part in enumerate(own.parts) if 19 in part.rows)
    there = set(own.folder.glob("*.parquet"))
    assert len(there) == at >= 2
    if mend == "repair":
        bad.write_bytes(whole)
    else:
        bad.unlink()
    made: list[int] = []
    again = job(models["plain"], own_pictures, tmp_path / "z.parquet")
    embed_into(again, noted(made))
    assert [number for number in range(at) if number not in made] == list(range(at)), "none was made again"
    agrees(tmp_path / "z.parquet", models["plain"], own_pictures)
    assert not own.folder.exists()


def test_a_picture_more_or_less_costs_its_own_part_alone(
    models: dict[str, Path], own_pictures: Path, tmp_path: Path
) -> None:
    """Whichever it is: parts are cut where their items say, not by counting."""
    before = {part.name for part in job(models["plain"], own_pictures, tmp_path / "z.parquet").parts}
    assert len(before) > 3
    for path in sorted(own_pictures.rglob("*.png")):
        aside = path.rename(tmp_path / path.name)
        now = {part.name for part in job(models["plain"], own_pictures, tmp_path / "z.parquet").parts}
        assert len(now - before) <= 2
        aside.rename(path)
    assert {part.name for part in job(models["plain"], own_pictures, tmp_path / "z").parts} == before


def test_pictures_that_are_skipped_are_counted_named_and_kept_in_mind(
    models: dict[str, Path], own_pictures: Path, tmp_path: Path
) -> None:
    broken = [own_pictures / "class0" / name for name in ("00.png", "03.png", "06.png")]
    whole = [path.read_bytes() for path in broken]
    for path in broken:
        path.write_bytes(b"no picture")
    Image.new("F", (8, 8), 300.0).save(broken[2], "TIFF")  # a sound one, of which nobody knows what is white
    (own_pictures / "class0" / "notes.txt").write_text("?")
    output = tmp_path / "z.parquet"

    def skipping() -> EmbedJob:
        return EmbedJob(str(models["plain"]), str(own_pictures), str(output), 4, "cpu", "skip")

    made = embed_into(skipping())
    assert (made.num_items, [each for each, _ in made.left_out]) == (
        27,
        ["class0/00.png", "class0/03.png", "class0/06.png"],
    )
    assert told(skipping(), made) == [
        "left out: 1 .txt",
        *(f"left out: {reason}" for _, reason in made.left_out),
    ]
    assert "class0/00.png: not a readable image" in made.left_out[0][1]
    assert "class0/06.png: floating-point pixels from 300 to 300; scale them to 0..1" in made.left_out[2][1]
    assert data.embeddings_left_out(output) == made.left_out
    assert data.embeddings_origin(output)["source"] == str(own_pictures)
    ids, _, z_ND = data.read_embeddings(output)
    for path in broken:
        path.unlink()
    items = of_files(Model.open(models["plain"]), own_pictures)
    assert ids == list(items.ids)
    np.testing.assert_allclose(z_ND, Model.open(models["plain"]).compute(items.read(range(27))), atol=1e-6)

    for path in broken:  # and broken off: without skip, a part that has left something out is made again
        path.write_bytes(b"no picture")

    def breaking(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        yield from own.make(numbers[:1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_into(skipping(), breaking)
    with pytest.raises(ValueError, match=r"00\.png: not a readable"):
        embed_into(job(models["plain"], own_pictures, output))
    for path, content in zip(broken, whole, strict=True):
        path.write_bytes(content)
    assert embed_into(skipping()).left_out == []
    agrees(output, models["plain"], own_pictures)


def test_a_skipped_pictures_name_is_no_command_to_the_terminal(
    models: dict[str, Path], own_pictures: Path, tmp_path: Path
) -> None:
    (own_pictures / "class0" / "\x1b[2J\nerror: fine.png").write_bytes(b"no picture")
    skipping = EmbedJob(
        str(models["plain"]), str(own_pictures), str(tmp_path / "z.parquet"), 4, "cpu", "skip"
    )
    (line,) = told(skipping, embed_into(skipping))
    assert r"\x1b[2J error: fine.png: not a readable image" in line


def test_many_skipped_pictures_are_not_all_told(models: dict[str, Path], tmp_path: Path) -> None:
    made = embed.EmbedResult(1, 6, [(str(number), f"{number}: not a readable image") for number in range(13)])
    (tmp_path / "a.png").touch()
    lines = told(job(models["plain"], tmp_path, tmp_path / "z.parquet"), made)
    assert len(lines) == 11
    assert lines[-1] == "left out: 3 more that cannot be decoded; the file's metadata name all"


def test_of_pictures_that_are_all_none_nothing_is_written(models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no picture")
    own = EmbedJob(str(models["plain"]), str(tmp_path), str(tmp_path / "z.parquet"), 4, "cpu", "skip")
    with pytest.raises(ValueError, match=r"a\.png: not a readable.*; none of the 2 pictures can be decoded"):
        embed_into(own)
    assert not (tmp_path / "z.parquet").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 3', b"\xff"])
def test_a_torn_note_beside_the_parts_is_no_obstacle(
    content: bytes, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    own = job(models["plain"], pictures, tmp_path / "z.parquet")
    own.folder.mkdir()
    (own.folder / embed.NOTED).write_bytes(content)
    assert embed_into(own).num_items == 30
    agrees(tmp_path / "z.parquet", models["plain"], pictures)


def test_killed_at_any_moment_the_same_command_completes_with_the_same_file(
    models: dict[str, Path], own_pictures: Path, tmp_path: Path
) -> None:
    (own_pictures / "class0" / "00.png").write_bytes(b"no picture")
    for path in own_pictures.rglob("*.png"):
        os.utime(path, (1, 1))  # times take part in where items are cut into parts
    (tmp_path / "out").mkdir()
    script = Path(__file__).parents[1] / "support" / "killed.py"
    done = subprocess.run(
        [sys.executable, script, models["plain"], own_pictures, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 35, "moments at which it was killed"


def test_pictures_are_read_while_others_are_computed(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    own = job(models["plain"], pictures, tmp_path / "z.parquet")
    one, network, later = own.items.one, own.opened.loaded, threading.Event()
    assert one is not None
    num_computed = 0

    def reading(row: int) -> np.ndarray:
        if row >= own.parts[0].rows.stop:
            later.set()
        return one(row)

    def computing(items: np.ndarray) -> np.ndarray:
        nonlocal num_computed
        num_computed += 1
        if num_computed == 1:
            assert later.wait(60), "a picture of the next part is read before the first batch is computed"
        computed: np.ndarray = network.compute(items)
        return computed

    object.__setattr__(own.items, "one", reading)
    own.opened.__dict__["loaded"] = network._replace(compute=computing)
    embed_into(own)
    agrees(tmp_path / "z.parquet", models["plain"], pictures)


def test_a_model_from_before_reads_pictures_as_then(models: dict[str, Path], tmp_path: Path) -> None:
    """What it says of itself is cut to what it once said; its weights are the same."""
    old = Path(shutil.copytree(models["plain"], tmp_path / "old"))
    described = json.loads((old / "embedder.json").read_text())
    kept = ("dtype", "layout", "channels", "image_size", "scale", "mean", "std")
    described["preprocessing"] = {key: described["preprocessing"][key] for key in kept}
    described["extra"] = {"config": {"data": {"resize_to": 10, "keep_aspect": False}}}
    (old / "embedder.json").write_text(json.dumps(described))
    model_folder.seal(old)
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    rng = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    Image.fromarray(rng.integers(0, 256, (9, 13, 2), dtype=np.uint8), "LA").save(
        tmp_path / "set" / "a.png", exif=exif
    )
    with Image.open(tmp_path / "set" / "a.png") as picture:
        stored = picture.convert("L").resize((10, 10), Image.Resampling.BILINEAR).crop((1, 1, 9, 9))
        upright = ImageOps.exif_transpose(picture)
        white = Image.new("RGBA", upright.size, "white")
        opaque = Image.alpha_composite(white, upright.convert("RGBA")).convert("L")
        new = opaque.resize((8, 8), Image.Resampling.BILINEAR)
    for model, expected in ((old, stored), (models["plain"], new)):
        embed_into(job(model, tmp_path / "set", tmp_path / "z.parquet"))
        z_1D = data.read_embeddings(tmp_path / "z.parquet")[2]
        seen = np.asarray(expected)[None, ..., None]
        np.testing.assert_allclose(z_1D, Model.open(model).compute(seen), atol=1e-6)
    with_none = Model.open(old).fit
    assert with_none is not None
    assert with_none.reading == data.AS_BEFORE


def test_a_second_call_of_one_output_is_refused_while_the_first_lives(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """The first is another process, stopped in the middle of its work, and then killed."""
    started, own = tmp_path / "started", job(models["plain"], pictures, tmp_path / "z.parquet")
    if (first := os.fork()) == 0:

        def stopped(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
            started.touch()
            while True:
                signal.pause()
            yield

        embed_into(own, stopped)
        os._exit(1)
    try:
        while not started.exists():
            assert os.waitpid(first, os.WNOHANG) == (0, 0)
            time.sleep(0.01)
        for inputs in (pictures, pictures / "class0"):
            with pytest.raises(
                ValueError, match=r"z\.parquet: another dmlstudy embed is writing it; wait"
            ) as error:
                embed_into(job(models["plain"], inputs, tmp_path / "z.parquet"))
            assert "\n" not in str(error.value)
        embed_into(job(models["plain"], pictures, tmp_path / "other.parquet"))
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    assert embed_into(own).num_items == 30
    agrees(tmp_path / "z.parquet", models["plain"], pictures)
    assert not own.folder.exists()


def test_a_folder_of_parts_that_goes_away_meanwhile_is_made_again(
    models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the call before this one ends between the making of the folder and its locking."""
    own = job(models["plain"], pictures, tmp_path / "z.parquet")
    make, made = Path.mkdir, []

    def made_and_gone(path: Path, *args: Any, **named: Any) -> None:
        make(path, *args, **named)
        if path == own.folder:
            made.append(path)
            if len(made) <= 2:  # also when the lock makes its own folder
                path.rmdir()

    monkeypatch.setattr(Path, "mkdir", made_and_gone)
    assert embed_into(own).num_items == 30
    assert len(made) > 2


def test_items_that_change_meanwhile_are_told(
    models: dict[str, Path], own_pictures: Path, tmp_path: Path
) -> None:
    own = job(models["plain"], own_pictures, tmp_path / "z.parquet")

    def changing(own: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        """As by processes that find another picture than this one has found, and fewer parts."""
        (own_pictures / "class0" / "00.png").rename(own_pictures / "class0" / "000.png")
        changed = job(models["plain"], own_pictures, tmp_path / "z.parquet")
        changed.__dict__["parts"] = changed.parts[: len(own.parts) - 1]
        return changed.make(numbers)

    with pytest.raises(
        ValueError, match="changed while it was embedded; run again, which goes on from its parts"
    ):
        embed_into(own, changing)
    assert embed_into(job(models["plain"], own_pictures, tmp_path / "z.parquet")).num_items == 30


def test_a_gallery_without_the_skipped_pictures_still_has_a_sheet(
    models: dict[str, Path], own_pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_pictures / "class0" / "00.png").write_bytes(b"no picture")
    output = tmp_path / "z.parquet"
    embed_into(EmbedJob(str(models["plain"]), str(own_pictures), str(output), 4, "cpu", "skip"))
    retriever = Retriever(Model.open(models["plain"]), build(output, tmp_path / "gallery"))
    queries = of_files(Model.open(models["plain"]), own_pictures / "class1")
    hits = retrieve.retrieve(retriever, queries, 1)
    drawn: list[Any] = []
    monkeypatch.setattr(retrieve, "write_sheet", lambda path, title, rows: drawn.extend(rows))
    retrieve.write_contact_sheet(tmp_path / "s.html", retriever, queries, hits)
    for query, (found,) in drawn:  # each finds itself, which is another row of the gallery than of the folder
        np.testing.assert_array_equal(found.image_HWC, query.image_HWC)
    (own_pictures / "class1" / "01.png").unlink()
    with pytest.raises(ValueError, match="holds other items than the gallery was made of"):
        retrieve.write_contact_sheet(tmp_path / "s.html", retriever, queries, hits)
