"""A model's preprocessing in words and as code: the code's pixels are those of our own reading, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import preprocessing
from dmlstudy.data.decoding import AS_BEFORE, ORIENTATION_TAG, Reading
from dmlstudy.data.images import Fit

RNG = np.random.default_rng(3)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    return exif


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures as people have them: tall and wide, turned, transparent, grey, of few and of many bits."""
    folder = tmp_path_factory.mktemp("pictures")
    tall, wide = (RNG.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((31, 18), (17, 40)))
    alpha = RNG.integers(0, 256, (17, 40), dtype=np.uint8)
    deep = RNG.integers(0, 65536, (17, 40), dtype=np.uint16)
    kept: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "tall.png": (Image.fromarray(tall), {}),
        "wide.jpg": (Image.fromarray(wide), {}),
        "small.png": (Image.fromarray(tall[:5, :4]), {}),
        "turned.jpg": (Image.fromarray(tall), {"exif": turned(6)}),
        "mirrored.png": (Image.fromarray(wide), {"exif": turned(7)}),
        "turned.tif": (Image.fromarray(wide), {"exif": turned(8)}),
        "transparent.png": (Image.fromarray(np.dstack([wide, alpha])), {}),
        "transparent.webp": (Image.fromarray(np.dstack([wide, alpha])), {"lossless": True, "exact": True}),
        "palette.gif": (Image.fromarray(tall).quantize(9), {"transparency": 3}),
        "grey.png": (Image.fromarray(wide[..., 0]), {}),
        "grey_alpha.png": (Image.merge("LA", [Image.fromarray(wide[..., 0]), Image.fromarray(alpha)]), {}),
        "bits.png": (Image.fromarray(alpha > 99), {}),
        "deep.png": (Image.fromarray(deep), {"exif": turned(3)}),
        "deep.tif": (Image.fromarray(deep), {}),
        "float.tif": (Image.fromarray(RNG.random((17, 40)).astype(np.float32)), {}),
        "cmyk.jpg": (Image.fromarray(wide).convert("CMYK"), {}),
    }
    for name, (picture, named) in kept.items():
        picture.save(folder / name, **named)
    return folder


FITS = {
    "squeezed": Fit(12),
    "not square": Fit((10, 14)),
    "shorter side": Fit(12, 16),
    "both sides": Fit(12, 16, keep_aspect=False),
    "shorter side, cut off tightly": Fit(13, 13),
    "on orange": Fit(12, 16, reading=Reading("exif", (255, 136, 0))),
    "as before": Fit(12, 16, reading=AS_BEFORE),
    "as stored, on white": Fit(12, reading=Reading("as_stored")),
}


def described(fit: Fit, channels: int = 3, order: str = "RGB") -> dict[str, Any]:
    size = fit.size
    assert size is not None
    made = preprocessing.described(
        fit, image_size=size, channels=channels, mean=[0.5] * 3, std=[0.25] * 3, network_order=order
    )
    kept: dict[str, Any] = json.loads(json.dumps(made))
    return kept


def reader(code: str) -> Callable[[Path], np.ndarray]:
    """The function that a stranger gets who copies the code."""
    space: dict[str, Any] = {}
    exec(code, space)
    return space["read"]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", FITS)
def test_the_code_reads_as_we_do(name: str, channels: int, pictures: Path) -> None:
    code = preprocessing.code(described(FITS[name], channels))
    assert len(code.splitlines()) <= 17
    assert all(len(line) <= 120 for line in code.splitlines())
    read = reader(code)
    items = data.open_images(pictures, FITS[name], channels)
    assert len(items) == 16
    for number, each in enumerate(items.ids):
        np.testing.assert_array_equal(read(pictures / each), items.read(range(number, number + 1))[0], each)


@pytest.mark.parametrize("name", FITS)
def test_a_description_is_read_back_as_it_was_meant(name: str) -> None:
    fit = FITS[name]
    assert preprocessing.fit_of(described(fit), "model") == fit._replace(
        reading=fit.reading._replace(max_pixels=Reading().max_pixels)
    )


def test_a_model_that_says_nothing_of_orientation_keeps_its_way(pictures: Path) -> None:
    old = {"image_size": [12, 12], "mean": [0.5]}
    assert preprocessing.fit_of(old, "model") is None
    fit = preprocessing.fit_before(old, {"resize_to": 16, "keep_aspect": False}, "model")
    assert fit == Fit(12, 16, False, AS_BEFORE)
    assert preprocessing.fit_before(old, {}, "model") == Fit(12, reading=AS_BEFORE)
    with Image.open(pictures / "turned.jpg") as picture:
        stored = picture.resize((12, 12), Image.Resampling.BILINEAR)
    found = data.open_images(pictures / "turned.jpg", Fit(12, reading=AS_BEFORE), 3).read(range(1))
    np.testing.assert_array_equal(found[0], np.asarray(stored))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("orientation", "up"),
        ("orientation", 3),
        ("background", "purple"),
        ("background", 3),
        ("resize", None),
        ("resize.rule", "longer_side"),
        ("resize.rule", []),
        ("resize.to", 10**9),
        ("resize.to", 2),
        ("resize.to", "x"),
        ("resize.filter", "lanczos"),
        ("resize.antialias", False),
        ("image_size", [12]),
        ("image_size", 12),
        ("image_size", [0, 12]),
        ("image_size", None),
    ],
)
def test_a_description_that_was_altered_is_one_line(path: str, value: Any) -> None:
    altered = described(FITS["shorter side"])
    section, _, key = path.rpartition(".")
    (altered[section] if section else altered)[key] = value
    with pytest.raises(
        ValueError, match=r"^m: preprocessing is not understood \(.+\); copy the folder again$"
    ):
        preprocessing.fit_of(altered, "m")
    if path == "image_size":
        with pytest.raises(ValueError, match=r"^m: preprocessing is not understood"):
            preprocessing.fit_before({"image_size": value}, {}, "m")


def test_words_name_every_step() -> None:
    text = "\n".join(preprocessing.words(described(FITS["on orange"], 1, "BGR")))
    for said in (
        "turned as its EXIF orientation says",
        "8; upper 8 of 16, floats from 0 to 1 times 255",
        "composed on #ff8800",
        "its shorter side to 16 pixels, the other in proportion, rounded, bilinear with antialiasing",
        "crop: the centre, 12 x 12",
        "grey: ITU-R 601 luma, after resizing",
        "input: uint8, 0 to 255, (N, 12, 12, 1), grey",
        "mean [0.5, 0.5, 0.5] and std [0.25, 0.25, 0.25] of RGB; its network then sees BGR",
    ):
        assert said in text
    before = "\n".join(preprocessing.words(described(FITS["as before"])))
    assert "left as it is stored" in before
    assert "alpha is dropped" in before
    assert "both sides to 14 x 10 (width x height)" in "\n".join(
        preprocessing.words(described(FITS["not square"]))
    )
    vectors = {"dtype": "float32", "layout": "NF", "features": 7}
    assert preprocessing.words(vectors) == ["vectors float32 (N, 7), as they are"]
    assert preprocessing.code(vectors) == ""
    assert preprocessing.words({}) == []
    assert re.search(
        r"^def read\(path\):  # uint8 \(12, 12, 3\)", preprocessing.code(described(Fit(12))), re.M
    )
