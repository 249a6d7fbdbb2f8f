"""Model folders are used without Ray, MLflow, Optuna or pickle, and whatever has been done to a file is noticed."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmlstudy import data, embedders, hashing, model_folder, online
from dmlstudy.registry import kinds
from dmlstudy.use.embedding import opened

SCRIPT = Path(__file__).with_name("blocked.py")
KINDS = ("plain", "codes", "learner")
LOADS: dict[str, Callable[[Path], object]] = {
    "plain": embedders.load,
    "codes": hashing.load,
    "learner": online.load,
}


@pytest.fixture(scope="module")
def whole(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models as they are when they have been pulled: an embedder with its program, all with a card."""
    root = tmp_path_factory.mktemp("whole")
    for name in KINDS:
        shutil.copytree(models[name], root / name)
        if name == "plain":
            embedders.add_program(root / name)
        (root / name / "card.md").write_text("# a card")
        model_folder.seal(root / name)
    return {name: root / name for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_used_without_the_engines_and_without_pickle(
    name: str, whole: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    inputs = pictures if name == "plain" else vectors
    done = subprocess.run(
        [sys.executable, SCRIPT, whole[name], inputs, tmp_path], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    items = opened(whole[name], inputs)
    expected = kinds.verified(whole[name])(items.read(range(len(items))))
    np.testing.assert_allclose(np.load(tmp_path / "api.npy"), expected, atol=1e-6)
    np.testing.assert_allclose(data.read_embeddings(tmp_path / "command.parquet")[2], expected, atol=1e-6)


class Executed:
    """Its pickle makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("file", [model_folder.WEIGHTS, model_folder.EXAMPLE])
def test_a_pickle_in_the_place_of_numbers_is_refused_and_not_run(
    file: str, name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[name], tmp_path / "model")
    (folder / file).write_bytes(pickle.dumps(Executed(tmp_path / "executed")))
    with pytest.raises(ValueError, match=rf"{file}: altered"):
        kinds.verified(folder)
    model_folder.seal(folder)  # as whoever can write the folder might
    with pytest.raises(ValueError, match=file) as caught:
        model_folder.largest_deviation(folder, kinds.verified(folder))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def linked(path: Path) -> None:
    """The same content, but somewhere else, where it may change."""
    aside = path.parent.with_name(f"aside-{path.name}")
    path.rename(aside)
    path.symlink_to(aside)


def swapped(path: Path) -> None:
    other = next(each for each in sorted(path.parent.iterdir()) if each != path)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("damage", [flipped, truncated, Path.unlink, linked, swapped])
@pytest.mark.parametrize("name", KINDS)
def test_each_damaged_file_is_named(
    name: str, damage: Callable[[Path], object], whole: dict[str, Path], tmp_path: Path
) -> None:
    files = sorted(path.name for path in whole[name].iterdir())
    assert len(files) == (6 if name == "plain" else 5)
    for file in files:
        folder = shutil.copytree(whole[name], tmp_path / file / "model")
        damage(folder / file)
        for load in (kinds.verified, kinds.parts, LOADS[name]):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                load(folder)
            named = "manifest" if file == model_folder.MANIFEST else file
            said = str(caught.value).replace(str(folder), "")
            if damage is swapped:  # two are wrong; the first of them that is looked at is named
                assert any(each in said for each in files), said
            elif damage is Path.unlink and file in kinds.KINDS and load is not LOADS[name]:
                assert "holds none of" in said
                assert file in said
            else:
                assert named in said, (file, said)
            assert "\n" not in said


@pytest.mark.parametrize("name", KINDS)
def test_what_does_not_belong_to_the_model_is_named(
    name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "secret").write_text("mine")

    def a_link(path: Path) -> None:
        path.symlink_to(tmp_path / "secret")

    def a_broken_link(path: Path) -> None:
        path.symlink_to(tmp_path / "nowhere")

    def a_linked_folder(path: Path) -> None:
        path.symlink_to(tmp_path / "elsewhere")

    def a_file(path: Path) -> None:
        path.write_text("print('hello')")

    def a_file_below(path: Path) -> None:
        path.mkdir()
        (path / "extra.py").write_text("")

    for number, add in enumerate((a_link, a_broken_link, a_linked_folder, a_file, a_file_below)):
        folder = shutil.copytree(whole[name], tmp_path / f"model{number}")
        add(folder / "extra.py")
        for load in (kinds.verified, kinds.parts, LOADS[name]):
            with pytest.raises(
                ValueError, match=r"extra\.py: a (link|file) that the manifest does not list; take"
            ):
                load(folder)


def test_another_kind_s_description_in_the_folder_is_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(whole["codes"], tmp_path / "model")
    shutil.copy(whole["plain"] / "embedder.json", folder)
    for use in (kinds.verified, kinds.takes):
        with pytest.raises(ValueError, match=r"embedder\.json") as caught:
            use(folder)
        assert "\n" not in str(caught.value)
