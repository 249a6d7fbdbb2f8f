"""Exports: the same numbers as the model for any number of items, by another runtime, and nothing else left behind."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dmlstudy
from dmlstudy import cli, data, embedders, hashing, model_folder, online
from dmlstudy.data import Fit, Reading, preprocessing
from dmlstudy.data.decoding import ORIENTATION_TAG
from dmlstudy.saved import Model
from dmlstudy.serving import export as exports
from dmlstudy.serving.export import Format, export

from .conftest import X, embedder

FORMATS: tuple[Format, ...] = ("onnx", "torch_export")

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "official structure": {"structure": "official"},
    "paper structure": {"structure": "paper", "head_norm": True},
    "depths": {"head_depth": 2, "head_width": 5},
    "tanh": {"code": "tanh"},
    "sign": {"code": "sign", "structure": "official"},
    "features": {"fusion": "features", "pooling": "avg+max"},
    "a head a stage": {"fusion": "heads", "pooling": "max", "code": "sign"},
    "a unit head a stage": {"fusion": "unit_heads"},
    "none": {"head": "none", "dim": 256},
    "ball": {"space": "ball", "curvature": 0.5},
}
CASES: list[tuple[str, int | tuple[int, int] | tuple[()], int, str]] = [
    *(("small_conv", 8, 1, head) for head in HEADS),
    *(("mlp2", (), 10, head) for head in ("plain", "official structure", "depths", "tanh")),
    ("small_conv", (9, 13), 3, "plain"),
    ("linear", (), 10, "plain"),
    ("resnet18", (32, 40), 1, "a head a stage"),
    ("mobilenet_v3_small", 32, 3, "official structure"),
    ("bn_inception", 32, 3, "a head a stage"),
    ("timm:resnet10t", 32, 3, "features"),
    ("timm:vit_tiny_patch16_224", 32, 3, "plain"),
]
LARGE: list[tuple[str, int, int, str]] = [
    ("resnet50", 64, 3, "features"),
    ("vit_b_16", 32, 3, "official structure"),
    ("swin_t", 64, 3, "plain"),
    ("convnext_tiny", 64, 3, "a head a stage"),
    ("googlenet", 64, 3, "plain"),
]


def computed(path: Path, x_N: np.ndarray) -> dict[str, np.ndarray]:
    """What a file makes of inputs, with the library that it is for and nothing of ours."""
    if path.suffix == ".pt2":
        with torch.no_grad():
            outputs = torch.export.load(path).module()(torch.from_numpy(x_N))
        return {name: value.numpy() for name, value in outputs.items()}
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    assert entry.shape[1:] == list(x_N.shape[1:])
    assert isinstance(entry.shape[0], str)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {entry.name: x_N}), strict=True))


def inputs(folder: Path, number: int) -> np.ndarray:
    takes, rng = Model.open(folder).takes, np.random.default_rng(number)
    if takes.image_size is None:
        return rng.normal(size=(number, takes.num_features)).astype(np.float32)
    size = embedders.load(folder).architecture.image_size
    return rng.integers(0, 256, (number, *size, takes.channels), dtype=np.uint8)


def agrees(folder: Path, output: Path) -> None:
    """A file computes what the model does, of 1, 2 and 7 items."""
    for number in (1, 2, 7):
        x_N = inputs(folder, number)
        z_ND, omega_ND = Model.open(folder).query(x_N)
        got = computed(output, x_N)
        assert got.keys() == ({"embedding"} if omega_ND is None else {"embedding", "structure"})
        assert got["embedding"].dtype == z_ND.dtype
        np.testing.assert_allclose(got["embedding"], z_ND, atol=1e-5)
        if omega_ND is not None:
            np.testing.assert_allclose(got["structure"], omega_ND, atol=1e-5)


def places_in(path: Path) -> set[str]:
    """Names of folders of this machine that a file, or a file of an archive, holds."""
    folders = {
        str(Path(each).resolve())
        for each in (dmlstudy.__path__[0], torch.__path__[0], Path.home(), Path.cwd())
    }
    contents = [path.read_bytes()]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents += [archive.read(name) for name in archive.namelist()]
    return {folder for folder in folders if any(folder.encode() in content for content in contents)}


def check_embedder(case: tuple[Any, ...], kind: Format, folder: Path) -> None:
    backbone, size, channels, head = case
    options = {"dim": 6, "width": 4} | HEADS[head]
    made = embedders.build(backbone, in_channels=channels, image_size=size, seed=1, **options)
    shape = (2, *made.architecture.image_size, channels)
    rng = np.random.default_rng(0)
    example: Any = rng.integers(0, 256, shape, dtype=np.uint8) if size else rng.normal(size=shape)
    embedders.save(made, folder / "model", {}, example if size else example.astype(np.float32))
    output = folder / f"it{exports.SUFFIXES[kind]}"
    exported = export(Model.open(folder / "model"), output, kind)
    assert 0 <= exported.difference <= 1e-5
    agrees(folder / "model", output)
    for path in (output, *(folder / "model").rglob("*.pt2")):
        assert places_in(path) == set()
    assert sorted(path.name for path in folder.iterdir()) == [output.name, "model"]
    embedders.verify(folder / "model")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=[f"{each[0]}-{each[3]}-{each[1]}" for each in CASES])
def test_an_embedder_computes_the_same_elsewhere(case: tuple[Any, ...], kind: Format, tmp_path: Path) -> None:
    check_embedder(case, kind, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", LARGE, ids=[each[0] for each in LARGE])
def test_a_large_one_too(case: tuple[Any, ...], kind: Format, tmp_path: Path) -> None:
    check_embedder(case, kind, tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("method", ["sgh", "ssdh", "greedyhash", "tbh"])
def test_codes_are_the_same_bits(method: str, kind: Format, tmp_path: Path) -> None:
    term = ("point_ranking", {}) if method in ("sgh", "tbh") else None
    made = hashing.build(method, 16, 10, {}, term=term, seed=1)
    made.prepare(torch.from_numpy(X), standardize=True)
    hashing.save(made.eval(), tmp_path / "model", {}, X[:3])
    output = tmp_path / f"codes{exports.SUFFIXES[kind]}"
    assert export(Model.open(tmp_path / "model"), output, kind).about["distance"] == "hamming"
    agrees(tmp_path / "model", output)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("name", "scaling", "params"),
    [
        ("oahu", "standardize", {"num_hidden": 2, "width": 6, "size": 5}),
        ("oahu", "contrast", {"num_hidden": 0, "size": 5, "precision": "float32"}),
        ("opml", "unit", {}),
        ("rdml", "none", {}),
        ("lego", "centred_unit", {}),
        ("euclidean", "contrast", {}),
    ],
)
def test_an_online_learner_is_the_same_map(
    name: str, scaling: str, params: dict[str, Any], kind: Format, tmp_path: Path
) -> None:
    made, preparation = (
        online.build(name, params, num_features=10, seed=3),
        online.Preparation.of(scaling, X),
    )
    made.prepare(preparation(X))
    x_BCD = preparation(X).reshape(-1, made.arity, 10)
    made.partial_fit(online.Constraints(x_BCD, np.arange(len(x_BCD)) % 2 == 0 if made.arity == 2 else None))
    online.save(online.Learned(made, preparation, name, params), tmp_path / "model", {}, X[:2])
    output = tmp_path / f"learner{exports.SUFFIXES[kind]}"
    export(Model.open(tmp_path / "model"), output, kind)
    agrees(tmp_path / "model", output)
    origin = np.zeros((1, 10), np.float32)
    np.testing.assert_allclose(
        computed(output, origin)["embedding"], Model.open(tmp_path / "model").compute(origin), atol=1e-5
    )


def test_what_a_file_says_of_itself(models: dict[str, Path], tmp_path: Path) -> None:
    import onnxruntime

    expected = {
        "model": Model.open(models["structure"]).fingerprint,
        "input": {
            "name": "images",
            "dtype": "uint8",
            "layout": "NHWC",
            "shape": ["N", 8, 8, 1],
            "range": [0, 255],
        },
        "outputs": {
            "embedding": {"dtype": "float32", "shape": ["N", 6]},
            "structure": {"dtype": "float32", "shape": ["N", 6]},
        },
        "distance": "euclidean",
        "preprocessing": json.loads((models["structure"] / "embedder.json").read_text())["preprocessing"],
        "preprocessing_steps": preprocessing.words(Model.open(models["structure"]).preprocessing),
        "preprocessing_code": preprocessing.code(Model.open(models["structure"]).preprocessing),
    }
    for kind in FORMATS:
        assert (
            export(Model.open(models["structure"]), tmp_path / f"m{exports.SUFFIXES[kind]}", kind).about
            == expected
        )
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["dmlstudy"]) == expected
    assert session.get_modelmeta().custom_metadata_map["preprocessing_code"] == expected["preprocessing_code"]
    (entry,) = session.get_inputs()
    assert (entry.name, entry.type, entry.shape) == ("images", "tensor(uint8)", ["N", 8, 8, 1])
    kept = {exports.ABOUT: ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=kept)
    assert json.loads(kept[exports.ABOUT]) == expected


@pytest.mark.parametrize(
    ("backbone", "channels", "fit", "forms"),
    [
        ("small_conv", 1, Fit(8, 10), FORMATS),
        ("small_conv", 3, Fit((9, 13)), FORMATS),
        ("small_conv", 3, Fit(32, 40, keep_aspect=False), FORMATS[1:]),
        pytest.param(
            "bn_inception",
            3,
            Fit(32, 36, reading=Reading("exif", (255, 136, 0))),
            FORMATS[1:],
            marks=pytest.mark.long,
        ),
    ],
    ids=["grey", "not square", "both sides", "of Caffe"],
)
def test_who_has_the_file_alone_reproduces_the_example_from_pictures(
    backbone: str, channels: int, fit: Fit, forms: tuple[Format, ...], tmp_path: Path
) -> None:
    """Turned, transparent and of 16 bits: by the code in the file's metadata, which knows nothing of us."""
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    folder = tmp_path / "pictures"
    folder.mkdir()
    rgba = rng.integers(0, 256, (41, 60, 4), dtype=np.uint8)
    Image.fromarray(rgba[..., :3]).save(folder / "a.jpg", exif=exif)
    Image.fromarray(rgba).save(folder / "b.png")
    Image.fromarray(rng.integers(0, 65536, (50, 44), dtype=np.uint16)).save(folder / "c.png")
    example = data.open_images(folder, fit, channels).read(range(3))
    size = fit.size
    assert size is not None
    made = embedders.build(backbone, 6, width=4, in_channels=channels, image_size=size, seed=1)
    embedders.save(made, tmp_path / "model", {}, example, fit)
    kept = model_folder.read_arrays(tmp_path / "model" / model_folder.EXAMPLE)
    assert Model.open(tmp_path / "model").preprocessing["network_order"] == (
        "BGR" if backbone == "bn_inception" else "RGB"
    )
    for form in forms:
        output = tmp_path / f"it{exports.SUFFIXES[form]}"
        space: dict[str, Any] = {}
        exec(export(Model.open(tmp_path / "model"), output, form).about["preprocessing_code"], space)
        read = np.stack([space["read"](path) for path in sorted(folder.iterdir())])
        np.testing.assert_array_equal(read, kept["x"])
        np.testing.assert_allclose(computed(output, read)["embedding"], kept["z"], atol=1e-5)


def test_a_program_is_loaded_without_unpickling(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("something was unpickled")

    def plain(*arguments: Any, **named: Any) -> Any:
        assert named.get("weights_only") is True
        return really(*arguments, **named)

    really = torch.load
    for name in models:
        export(Model.open(models[name]), tmp_path / f"{name}.pt2", "torch_export")
    for module, attribute in ((pickle, "Unpickler"), (pickle, "loads"), (pickle, "load")):
        monkeypatch.setattr(module, attribute, refused)
    monkeypatch.setattr(torch, "load", plain)
    for name, folder in models.items():
        x_N = inputs(folder, 2)
        np.testing.assert_allclose(
            computed(tmp_path / f"{name}.pt2", x_N)["embedding"], Model.open(folder).compute(x_N), atol=1e-5
        )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_differs_is_not_left_behind(
    kind: Format, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / f"m{exports.SUFFIXES[kind]}"
    export(Model.open(models["plain"]), output, kind)
    before = output.read_bytes()
    another = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=9).eval()
    monkeypatch.setattr(exports, "PROGRAMS", {"embedder": lambda _: exports._Embedder(another)})
    for path in (output, tmp_path / f"new{output.suffix}"):
        with pytest.raises(ValueError, match=r"differs from the model by \d\.\de[+-]\d\d, more than 1e-05"):
            export(Model.open(models["plain"]), path, kind)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert output.read_bytes() == before


def test_outputs_of_another_type_or_name_differ(models: dict[str, Path]) -> None:
    z = np.ones((2, 3), np.float32)
    assert exports._difference({"embedding": z}, {"embedding": z + 1e-3}) == pytest.approx(1e-3, rel=1e-3)
    assert exports._difference({"embedding": 100 * z}, {"embedding": 101 * z}) == pytest.approx(0.01)
    for other in ({"embedding": z.astype(np.float64)}, {"embedding": z[:1]}, {"z": z}, {}):
        assert exports._difference({"embedding": z}, other) == float("inf")


@pytest.mark.parametrize("kind", FORMATS)
def test_what_the_exporter_cannot_do_is_one_line(
    kind: Format, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Branching(torch.nn.Module):
        def forward(self, x_N: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"embedding": x_N.float() if x_N.sum() > 0 else -x_N.float()}

    monkeypatch.setattr(exports, "PROGRAMS", {"embedder": lambda _: Branching()})
    with pytest.raises(ValueError, match=rf"plain: has no form of --format {kind} \(.+\); take") as caught:
        export(Model.open(models["plain"]), tmp_path / f"m{exports.SUFFIXES[kind]}", kind)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_oasis_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = online.build("oasis", {}, num_features=10)
    made.partial_fit(online.Constraints(X.reshape(10, 3, 10)))
    online.save(
        online.Learned(made, online.Preparation.of("none", X), "oasis", {}), tmp_path / "m", {}, X[:2]
    )
    with pytest.raises(ValueError, match=r"oasis embeds queries otherwise.*dmlstudy\.online\.load") as caught:
        export(Model.open(tmp_path / "m"), tmp_path / "o.onnx", "onnx")
    assert "\n" not in str(caught.value)


def test_without_the_extra_it_says_what_to_install(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"needs onnx, onnxruntime: pip install 'dmlstudy\[export\]'"):
        export(Model.open(models["plain"]), tmp_path / "m.onnx", "onnx")
    assert export(Model.open(models["plain"]), tmp_path / "m.pt2", "torch_export").difference <= 1e-5


def test_outputs_that_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(models["plain"], tmp_path / "model")
    (tmp_path / "thesis.onnx").write_text("years of work")
    (tmp_path / "folder.onnx").mkdir()
    table: list[tuple[Path, str, str]] = [
        (tmp_path / "thesis.onnx", "onnx", "exists already and is not a file of --format onnx"),
        (tmp_path / "folder.onnx", "onnx", "is a folder; name a file"),
        (tmp_path / "none" / "m.onnx", "onnx", "no such folder"),
        (tmp_path / "m.pt2", "onnx", r"ends in \.onnx"),
        (tmp_path / "m.tflite", "tflite", "--format tflite: choose from onnx, torch_export"),
        (copy / "m.onnx", "onnx", "lies in the model's folder, which is sealed"),
    ]
    for output, kind, message in table:
        with pytest.raises(ValueError, match=message):
            export(Model.open(copy), output, kind)
    assert (tmp_path / "thesis.onnx").read_text() == "years of work"
    with (copy / model_folder.WEIGHTS).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"weights\.safetensors: altered"):
        export(Model.open(copy), tmp_path / "m.onnx", "onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.onnx", "model", "thesis.onnx"]


def test_without_an_example_random_inputs_are_compared(tmp_path: Path) -> None:
    made = embedder(tmp_path / "with")
    embedders.save(made, tmp_path / "model")
    assert [len(batch) for batch in exports._batches(Model.open(tmp_path / "model"))] == [1, 3]
    assert export(Model.open(tmp_path / "model"), tmp_path / "m.pt2", "torch_export").difference <= 1e-5


def test_the_command(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dmlstudy", "export", str(models["plain"]), "--format", "onnx"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    shown = capfd.readouterr().out
    assert shown.startswith("plain.onnx: images uint8 (N, 8, 8, 1) to embedding; differs from the model by ")
    agrees(models["plain"], tmp_path / "plain.onnx")
    assert exports.default_output("digits@champion", "torch_export") == Path("digits-champion.pt2")
