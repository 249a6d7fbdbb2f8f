"""``dmlstudy init``: whatever folder it takes, the file it writes can be run; one it does not take, it says why."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.studies import checks, first_study
from dmlstudy.studies.first_study import BUDGETS
from dmlstudy.studies.wall_time import Machine
from dmlstudy.text import LINE

CPUS, GPU = Machine({"CPU": 2.0, "GPU": 0.0}), Machine({"CPU": 8.0, "GPU": 1.0})


def pictures(place: Path, *counts: int, side: int = 8, first: int = 0) -> Path:
    """A folder of classes with so many pictures each, of noise."""
    rng = np.random.default_rng(0)
    for label, count in enumerate(counts, first):
        folder = place / f"class {label:03}"
        folder.mkdir(parents=True)
        for number in range(count):
            noise = rng.integers(0, 256, (side, side + 2, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{number}.png")
    return place


def written(folder: Path, output: Path, **options: object) -> StudySpec:
    """What is written, as it is checked before it is run."""
    named = {"name": None, "image_size": None, "budget": "standard", "machine": CPUS} | options
    first_study.write(folder, output, **named)  # type: ignore[arg-type]
    found = study_file.load(output)
    checks.check_parts(found)
    return found


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("counts", "folds", "batch"),
    [
        ([4] * 7, 2, (2, 4)),
        ([20] * 8, 2, (2, 20)),
        ([3] * 24, 4, (9, 3)),
        ([2] * 200, 4, (16, 2)),
        ([1, 3, 1, 3, 3, 1, 3, 1, 5, 5], 2, (2, 3)),
    ],
    ids=["7", "8", "24", "200", "some-single"],
)
def test_what_is_written_is_sound(
    counts: list[int], folds: int, batch: tuple[int, int], budget: str, tmp_path: Path
) -> None:
    found = written(pictures(tmp_path / "pics", *counts), tmp_path / "study.yaml", budget=budget)
    amounts = BUDGETS[budget]
    assert (found.name, found.raw["data"]["path"]) == ("pics", "pics")
    assert (found.file.search.trials_per_family, found.file.training["epochs"]) == amounts[:2]
    assert found.file.protocol.verdict_seeds == amounts.seeds
    assert found.file.protocol.num_folds == min(folds, amounts.max_folds)
    if amounts.max_folds >= folds:
        assert tuple(found.file.batch.values()) == batch
    text = (tmp_path / "study.yaml").read_text()
    assert ("4 classes have one picture" in text) == (1 in counts)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_its_own_training_and_test_folders_are_kept(tmp_path: Path) -> None:
    pictures(tmp_path / "pics" / "train", *[4] * 6)
    pictures(tmp_path / "pics" / "test", *[4] * 2, first=6)
    found = written(tmp_path / "pics", tmp_path / "study.yaml")
    assert found.file.protocol.num_folds == 2
    assert (
        "32 pictures of 8 classes: 6 to learn from, 2 kept for the test"
        in (tmp_path / "study.yaml").read_text()
    )


def test_names_sizes_and_gpus(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "2024 é: birds", *[2] * 8, side=80)
    found = written(folder, tmp_path / "a.yaml")
    assert (found.name, found.data.path, found.data.image_size) == ("2024-birds", str(folder), 64)
    assert found.file.resources.gpus_per_worker == 0
    found = written(folder, tmp_path / "b.yaml", name="2024", image_size=32, machine=GPU)
    assert (found.name, found.data.image_size) == ("2024", 32)
    assert found.file.resources.gpus_per_worker == 1
    (tmp_path / "elsewhere").mkdir()
    found = written(folder, tmp_path / "elsewhere" / "c.yaml")
    assert found.raw["data"]["path"] == str(folder)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "0 class folders; put each class's images in a sub-folder"),
        ([3], "1 class folders; put each class's images in a sub-folder"),
        ([3, 3], "of 2 classes 1 are kept for the test and 1 are to learn from, which must be at least 2 and 4"),
        ([3, 3, 3], "of 3 classes 1 are kept for the test and 2 are to learn from"),
        ([3] * 6, "of 6 classes 3 are kept for the test and 3 are to learn from, which must be at least 2 and 4, as"
         " scores are of classes that are held out; add classes, 7 in all where half are kept for the test"),
        ([1] * 8, "each of the 4 classes to learn from has one picture, so that nothing is alike"),
        ([3, 0, 3, 3], "class 001: no images in this"),
    ],
    ids=lambda value: f"{len(value)}-classes" if isinstance(value, list) else None,
)  # fmt: skip
def test_what_no_study_can_be_made_of_is_refused(counts: list[int], message: str, tmp_path: Path) -> None:
    (tmp_path / "pics").mkdir()
    folder = pictures(tmp_path / "pics", *counts)
    with pytest.raises(SpecError) as caught:
        written(folder, tmp_path / "study.yaml")
    assert message in str(caught.value)
    assert len(str(caught.value)) <= LINE
    assert not (tmp_path / "study.yaml").exists()


def test_other_wrong_input(tmp_path: Path) -> None:
    folder, output = pictures(tmp_path / "pics", *[2] * 8), tmp_path / "study.yaml"
    for options, message in (
        ({"budget": "qick"}, r"^--budget: no 'qick'; did you mean 'quick'\?"),
        ({"name": "a/b"}, r"^name: use letters a to z, digits"),
        ({"image_size": 100_000}, r"^data\.image_size: input should be less than or equal to 4096"),
    ):
        with pytest.raises(SpecError, match=message):
            written(folder, output, **options)
        assert not output.exists()
    with pytest.raises(SpecError, match=r"none: no such folder; name one with a sub-folder"):
        written(tmp_path / "none", output)
    with pytest.raises(SpecError, match=r"no/study\.yaml: cannot be written: No such file"):
        written(folder, tmp_path / "no" / "study.yaml")
    output.write_text("mine")
    with pytest.raises(SpecError, match=r"study\.yaml: is there already; name another file with -o"):
        written(folder, output)
    assert output.read_text() == "mine"
    (folder / "class 000" / "0.png").write_bytes(b"torn")
    with pytest.raises(SpecError, match=r"class 000/0\.png"):
        written(folder, tmp_path / "other.yaml")


def test_a_write_that_fails_or_is_killed_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = pictures(tmp_path / "pics", *[2] * 8), tmp_path / "study.yaml"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            SpecError, match=r"study\.yaml: cannot be written: No space left on device; name an"
        ):
            written(folder, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pics"]
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        with contextlib.suppress(BaseException):
            written(folder, output)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not output.exists()
    written(folder, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pics", "study.yaml"]
