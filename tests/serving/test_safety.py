"""Model folders are used without Ray, MLflow, Optuna or pickle, and whatever has been done to a file is noticed."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmlstudy import data, description, embedders, hashing, model_folder, online, saved
from dmlstudy.hashing.model import Recipe
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files

SCRIPT = Path(__file__).parents[1] / "support" / "blocked.py"
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
    items = of_files(Model.open(whole[name]), inputs)
    expected = Model.open(whole[name]).compute(items.read(range(len(items))))
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
        Model.open(folder)
    model_folder.seal(folder)  # as whoever can write the folder might
    with pytest.raises(ValueError, match=file) as caught:
        model_folder.largest_deviation(folder, Model.open(folder).compute)
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
        for load in (Model.open, LOADS[name]):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                load(folder)
            named = "manifest" if file == model_folder.MANIFEST else file
            said = str(caught.value).replace(str(folder), "")
            if damage is swapped:  # two are wrong; the first of them that is looked at is named
                assert any(each in said for each in files), said
            elif damage is Path.unlink and file in saved.KINDS and load is not LOADS[name]:
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
        for load in (Model.open, LOADS[name]):
            with pytest.raises(
                ValueError, match=r"extra\.py: a (link|file) that the manifest does not list; take"
            ):
                load(folder)


def test_another_kind_s_description_in_the_folder_is_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(whole["codes"], tmp_path / "model")
    shutil.copy(whole["plain"] / "embedder.json", folder)
    with pytest.raises(ValueError, match=r"embedder\.json") as caught:
        Model.open(folder)
    assert "\n" not in str(caught.value)


def described(folder: Path) -> Path:
    """The description of the model in a folder."""
    return next(folder / name for name in saved.KINDS if (folder / name).is_file())


def test_what_is_read_of_a_description_is_what_models_are_built_with() -> None:
    """A new argument that is not read would be lost, or refused, when the model is loaded."""
    architecture = {each.name for each in dataclasses.fields(embedders.Architecture)}
    assert set(description.ArchitectureFields.model_fields) == architecture
    assert set(description.RecipeFields.model_fields) == set(Recipe._fields)
    defaults = {each.name: each.default for each in dataclasses.fields(embedders.Architecture)}
    for name, field in description.ArchitectureFields.model_fields.items():
        assert field.is_required() or field.default == defaults[name]


def changed(folder: Path, to: Path, keys: tuple[str | int, ...], value: object) -> Path:
    """A copy of a model whose description has another value there, sealed anew as whoever can write it might."""
    path = described(shutil.copytree(folder, to))
    content = json.loads(path.read_text())
    at = content
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(content))
    model_folder.seal(to)
    return to


def used(folder: Path) -> None:
    """All that is done with a model's folder before it is asked anything."""
    model = Model.open(folder)
    assert model.notes is not None
    assert (model.fit is None) == (model.takes.image_size is None)
    model_folder.largest_deviation(folder, model.compute)


@pytest.mark.parametrize(
    ("name", "keys", "value", "said"),
    [
        ("plain", ("architecture", "dim"), 10**9, "architecture.dim"),
        ("plain", ("architecture", "dim"), 60_000, "does not fit the architecture"),
        ("plain", ("architecture", "dim"), -1, "architecture.dim"),
        ("plain", ("architecture", "dim"), True, "architecture.dim"),
        ("plain", ("architecture", "dim"), "6", "architecture.dim"),
        ("plain", ("architecture", "width"), 10**9, "architecture.width"),
        ("plain", ("architecture", "width"), 60_000, "does not fit the architecture"),
        ("plain", ("architecture", "head_depth"), -1, "architecture.head_depth"),
        ("plain", ("architecture", "head_depth"), 60, "61 layers"),
        ("plain", ("architecture", "head_width"), 10**12, "architecture.head_width"),
        ("plain", ("architecture", "seed"), "x", "architecture.seed"),
        ("plain", ("architecture", "backbone"), None, "architecture.backbone"),
        ("plain", ("architecture", "backbone"), "../../x", "no backbone"),
        ("plain", ("architecture", "image_size"), [8], r"\[height, width\]"),
        ("plain", ("architecture", "image_size"), [10**9, 10**9], "architecture.image_size.0"),
        ("plain", ("architecture", "image_size"), None, "architecture.image_size"),
        ("plain", ("architecture", "in_channels"), 2, "channels"),
        ("plain", ("architecture", "loader"), "os.system", "architecture.loader: Extra inputs"),
        ("plain", ("architecture",), [], "architecture"),
        ("plain", ("format_version",), 2, "format version 2"),
        ("plain", ("extra",), [1], "extra"),
        ("plain", ("extra",), {"config": "x"}, "extra.config"),
        ("plain", ("extra",), {"config": {"data": 7}}, "extra.config.data"),
        ("plain", ("extra",), {"config": {"data": {"resize_to": 10**9}}}, "extra.config.data.resize_to"),
        ("codes", ("model", "num_bits"), 10**9, "model.num_bits"),
        ("codes", ("model", "num_bits"), 24, "does not fit the architecture"),
        ("codes", ("model", "num_features"), 10**6, "does not fit the architecture"),
        ("codes", ("model", "name"), "pickle", "not understood"),
        ("codes", ("model", "params"), {"x": []}, "model.params"),
        ("codes", ("model", "term"), ["point_ranking", "x"], "model.term"),
        ("codes", ("input", "features"), "10", "input.features"),
        ("learner", ("input", "features"), 10**6, "larger than what"),
        ("learner", ("learner", "params", "width"), 10**9, "larger than what"),
        ("learner", ("learner", "params", "num_hidden"), 10**6, "larger than what"),
        ("learner", ("learner", "name"), 7, "learner.name"),
        ("learner", ("scaling",), None, "scaling"),
    ],
)
def test_a_description_that_asks_for_too_much_or_another_thing_is_refused(
    name: str, keys: tuple[str, ...], value: object, said: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(whole[name], tmp_path / "model", keys, value)
    with pytest.raises(ValueError, match=said) as caught:
        used(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"{", b"[]", b"7", b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}", b""]
)
def test_a_description_that_is_no_object_is_refused(
    content: bytes, whole: dict[str, Path], tmp_path: Path
) -> None:
    for name in KINDS:
        folder = shutil.copytree(whole[name], tmp_path / name)
        described(folder).write_bytes(content)
        model_folder.seal(folder)
        for use in (Model.open, LOADS[name]):
            with pytest.raises(ValueError, match=described(folder).name) as caught:
                use(folder)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("missing", ["x", "z", "rows"])
def test_an_example_without_inputs_or_outputs_is_refused(
    missing: str, name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[name], tmp_path / "model")
    arrays = model_folder.read_arrays(folder / model_folder.EXAMPLE)
    if missing == "rows":
        arrays["z"] = arrays["z"][:1].copy()
    else:
        del arrays[missing]
    save_file(arrays, folder / model_folder.EXAMPLE)
    model_folder.seal(folder)
    with pytest.raises(ValueError, match=r"example\.safetensors: (holds no array|2 inputs and 1 outputs)"):
        used(folder)


def places(content: object, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where there is a value, however deep."""
    pairs: list[tuple[str | int, object]] = []
    if isinstance(content, dict):
        pairs = list(content.items())
    elif isinstance(content, list):
        pairs = list(enumerate(content))
    found = [(*above, key) for key, _ in pairs]
    return found + [place for key, value in pairs for place in places(value, (*above, key))]


STRANGE = (None, True, -1, 0, 1, 10**6, 2**31, 10**12, 10**400, 0.5, -1e308, "", "x", "../../x", "\n", "9" * 600, [],
           {}, [[]], {"a": 1}, [1, 2, 3])  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_description_is_used_or_refused_in_one_line(
    name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    """120 seeded changes of one or two fields each; what a model of another kind would be is refused as well."""
    rng = np.random.default_rng(0)
    folder = shutil.copytree(whole[name], tmp_path / "model")
    path = described(folder)
    text = path.read_text()
    everywhere = places(json.loads(text))
    refused = 0
    for _ in range(120):
        content = json.loads(text)
        for number in rng.integers(0, len(everywhere), int(rng.integers(1, 3))):
            at, place = content, everywhere[number]
            try:
                for key in place[:-1]:
                    at = at[key]
                at[place[-1]] = copy.deepcopy(STRANGE[int(rng.integers(len(STRANGE)))])
            except (TypeError, KeyError, IndexError):
                continue  # the first change has taken it away
        path.write_text(json.dumps(content))
        model_folder.seal(folder)
        said = refusal(folder)
        assert "\n" not in said
        assert len(said) < 900
        refused += said != ""
    assert refused > 40


def refusal(folder: Path) -> str:
    """Why a model is not used; empty where it is."""
    try:
        used(folder)
    except ValueError as error:
        return str(error)
    return ""
