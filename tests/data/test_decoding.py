"""Pictures as people have them: only known formats are opened, turned upright, made opaque, brought to 8 bits."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from dmlstudy import data
from dmlstudy.data import decoding, pictures
from dmlstudy.data.decoding import (
    AS_BEFORE,
    COLOURS,
    DamagedImage,
    Reading,
    UnsuitableImage,
    background,
    check_pixels,
    marks,
    opened,
)
from dmlstudy.data.images import Fit

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (9, 14, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (9, 14), dtype=np.uint8)
PLAIN = {
    "rgb.png": Image.fromarray(RGB),
    "grey.png": Image.fromarray(GREY),
    "bits.png": Image.fromarray(GREY > 99),
    "palette.png": Image.fromarray(RGB).quantize(16),
    "rgb.jpg": Image.fromarray(RGB),
    "grey.jpg": Image.fromarray(GREY),
    "cmyk.jpg": Image.fromarray(RGB).convert("CMYK"),
    "cmyk.tif": Image.fromarray(RGB).convert("CMYK"),
    "rgb.webp": Image.fromarray(RGB),
    "rgb.gif": Image.fromarray(RGB),
    "rgb.bmp": Image.fromarray(RGB),
    "rgb.ppm": Image.fromarray(RGB),
    "grey.pgm": Image.fromarray(GREY),
    "opaque.png": Image.fromarray(np.dstack([RGB, np.full((9, 14), 255, np.uint8)])),
    "opaque_grey.png": Image.merge("LA", [Image.fromarray(GREY), Image.new("L", (14, 9), 255)]),
}
"""Pictures that nobody has turned and that hide nothing."""


def encoded(picture: Image.Image, suffix: str = ".png", **named: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, Image.registered_extensions()[suffix], **named)
    return buffer.getvalue()


def as_before(content: bytes) -> Image.Image:
    """The whole of what decoding once was."""
    with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as picture:
        warnings.simplefilter("ignore")
        return picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")


def same(found: Any, expected: Image.Image) -> None:
    assert found.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_picture_is_what_it_always_was(name: str) -> None:
    content = encoded(PLAIN[name], Path(name).suffix)
    for reading in (Reading(), AS_BEFORE, Reading("exif", (1, 2, 3)), Reading("as_stored", (255, 255, 255))):
        if name == "opaque_grey.png" and reading.background == (1, 2, 3):
            continue  # which is then of three channels, for its background is
        same(opened(content, name, reading), as_before(content))
        assert marks(content, reading) == b""


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_exif_says(suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[decoding.ORIENTATION_TAG] = orientation
    content = encoded(Image.fromarray(RGB), suffix, exif=exif)
    with Image.open(io.BytesIO(content)) as picture:
        upright = ImageOps.exif_transpose(picture)
    assert upright.size == ((9, 14) if orientation > 4 else (14, 9))
    same(opened(content, "it"), upright)
    is_told = orientation > 1 and suffix != ".tif"  # which Pillow has always turned
    assert bool(marks(content, Reading())) == is_told
    if is_told:
        same(opened(content, "it", Reading("as_stored")), as_before(content))
        assert marks(content, Reading("as_stored")) == b""


def test_the_orientation_of_a_grey_and_of_a_16_bit_picture() -> None:
    exif = Image.Exif()
    exif[decoding.ORIENTATION_TAG] = 6
    same(opened(encoded(Image.fromarray(GREY), exif=exif), "it"), Image.fromarray(np.rot90(GREY, -1)))
    deep = RNG.integers(0, 65536, (9, 14), dtype=np.uint16)
    same(
        opened(encoded(Image.fromarray(deep), exif=exif), "it"),
        Image.fromarray((np.rot90(deep, -1) >> 8).astype(np.uint8)),
    )


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # as ``formats`` has it, which a test's own filters undo
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
def test_damaged_exif_turns_nothing(exif: bytes) -> None:
    content = encoded(Image.fromarray(RGB), ".jpg", exif=exif)
    same(opened(content, "it"), as_before(content))


ALPHA = RNG.integers(0, 256, (9, 14), dtype=np.uint8)
ALPHA[0, 0], ALPHA[0, 1] = 0, 255


def palette_with_alpha() -> bytes:
    picture = Image.fromarray(RGB).quantize(4)
    return encoded(picture, transparency=bytes([0, 128, 255, 255]))


TRANSPARENT: dict[str, Callable[[], bytes]] = {
    "rgba": lambda: encoded(Image.fromarray(np.dstack([RGB, ALPHA]))),
    "rgba.webp": lambda: encoded(
        Image.fromarray(np.dstack([RGB, ALPHA])), ".webp", lossless=True, exact=True
    ),
    "grey and alpha": lambda: encoded(Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])),
    "palette with alpha": palette_with_alpha,
    "one colour of a palette": lambda: encoded(Image.fromarray(RGB).quantize(4), transparency=2),
    "one colour": lambda: encoded(Image.fromarray(RGB), transparency=tuple(RGB[3, 4].tolist())),
    "one grey": lambda: encoded(Image.fromarray(GREY), transparency=int(GREY[3, 4])),
    "gif": lambda: encoded(Image.fromarray(RGB).quantize(4), ".gif", transparency=2),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
@pytest.mark.parametrize("colour", ["white", "#ff8800", "drop"])
def test_transparent_pixels_show_what_is_behind(kind: str, colour: str) -> None:
    content = TRANSPARENT[kind]()
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.has_transparency_data
        rgba = np.asarray(picture.convert("RGBA")).astype(float)
        is_grey = picture.mode in ("L", "LA")
    found = opened(content, "it", Reading("exif", background(colour)))
    if colour == "drop":
        same(found, as_before(content))
        return
    assert found.mode == ("L" if is_grey and colour == "white" else "RGB")
    behind = np.array(background(colour), float)
    expected = (rgba[..., :3] * rgba[..., 3:] + behind * (255 - rgba[..., 3:])) / 255
    pixels = np.asarray(found.convert("RGB"))
    assert np.abs(pixels - expected).max() <= 1
    np.testing.assert_array_equal(
        pixels[rgba[..., 3] == 0], np.broadcast_to(behind, (9, 14, 3))[rgba[..., 3] == 0]
    )
    np.testing.assert_array_equal(pixels[rgba[..., 3] == 255], rgba[..., :3][rgba[..., 3] == 255])
    assert marks(content, Reading("exif", background(colour))) == bytes(background(colour) or b"")


def test_opaque_pixels_are_exact_whatever_they_and_the_background_are() -> None:
    values = np.arange(256, dtype=np.uint8)
    picture = np.dstack(
        [np.tile(values, (2, 1))] * 3 + [np.stack([np.full(256, 255), np.zeros(256)]).astype(np.uint8)]
    )
    for colour in ((255, 255, 255), (0, 0, 0), (7, 130, 201)):
        found = np.asarray(
            opened(encoded(Image.fromarray(picture)), "it", Reading("exif", colour)).convert("RGB")
        )
        np.testing.assert_array_equal(found[0], np.stack([values] * 3, axis=1))
        np.testing.assert_array_equal(found[1], np.broadcast_to(np.array(colour, np.uint8), (256, 3)))


def test_colours_have_names_or_digits() -> None:
    assert background("white") == COLOURS["white"] == (255, 255, 255)
    assert background("#0180fF") == (1, 128, 255)
    assert background("drop") is None
    for wrong in ("purple", "#12345", "#12345g", "", "0180ff"):
        with pytest.raises(ValueError, match=r"choose from white, black, grey, drop, or write a colour"):
            background(wrong)


def png_of_16_bits(colour_type: int, rows: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, which Pillow reads and does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = rows.shape[:2]
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


DEEP = RNG.integers(0, 65536, (9, 14), dtype=np.uint16)
DEEP[0, :2] = 0, 65535


@pytest.mark.parametrize(
    "content",
    [
        encoded(Image.fromarray(DEEP)),
        encoded(Image.fromarray(DEEP), ".tif"),
        encoded(Image.fromarray(DEEP.astype(np.int32)), ".tif"),
        b"P5 14 9 65535\n" + DEEP.astype(">u2").tobytes(),
        png_of_16_bits(0, DEEP),
        png_of_16_bits(4, np.dstack([DEEP, np.full_like(DEEP, 65535)])),
    ],
    ids=["png", "tiff", "tiff of 32", "pgm", "written by hand", "with alpha"],
)
def test_of_16_bits_the_upper_8_are_kept(content: bytes) -> None:
    for reading in (Reading(), AS_BEFORE):
        same(opened(content, "it", reading).convert("L"), Image.fromarray((DEEP >> 8).astype(np.uint8)))


def test_colours_of_16_bits_too() -> None:
    deep = RNG.integers(0, 65536, (9, 14, 3), dtype=np.uint16)
    same(opened(png_of_16_bits(2, deep), "it"), Image.fromarray((deep >> 8).astype(np.uint8)))


def test_floats_from_0_to_1_are_scaled_and_others_refused() -> None:
    values = RNG.random((9, 14)).astype(np.float32)
    values[0, :2] = 0, 1
    found = opened(encoded(Image.fromarray(values), ".tif"), "it")
    same(found, Image.fromarray(np.round(values * 255).astype(np.uint8)))
    for wrong, said in (
        (values * 2, r"floating-point pixels from 0 to 2; scale them to 0\.\.1"),
        (values - 1, "from -1 to 0;"),
        (np.where(values == 0, np.nan, values), "floating-point pixels from nan"),
    ):
        content = encoded(Image.fromarray(wrong.astype(np.float32)), ".tif")
        with pytest.raises(UnsuitableImage, match=rf"it\.tif: .*{said}"):
            opened(content, "it.tif")
    content = encoded(Image.fromarray(np.full((2, 2), 70000, np.int32)), ".tif")
    with pytest.raises(
        UnsuitableImage, match=r"it\.tif: pixels from 70000 to 70000; scale them to 8 or 16 bits"
    ):
        opened(content, "it.tif")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called gs at the front of PATH, which only leaves a file that says it ran."""
    from PIL import EpsImagePlugin

    ran, folder = tmp_path / "gs-ran", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return ran


def test_postscript_reaches_no_program(ghostscript: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for number in range(8):
        path = folder / f"class{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(EPS)
    fit = Fit(8)
    ways: list[Callable[[], object]] = [
        lambda: opened(EPS, "it"),
        lambda: opened(EPS, "it", AS_BEFORE),
        lambda: check_pixels(EPS, "it", 10**9),
        lambda: data.decode_images([EPS], fit, 3, 10**9),
        lambda: data.open_images(folder, fit, 3).read(range(8)),
        lambda: data.load("image_folder", str(folder), 8),
        lambda: data.load("image_folder", str(folder), 8, 10).development.read(np.arange(2)),
        lambda: data.load("image_folder", str(folder), 8, on_corrupt="skip"),
    ]
    for way in ways:
        with pytest.raises(ValueError, match=r"not a readable image \(none of PNG, JPEG|finds no images"):
            way()
    assert marks(EPS, Reading()) == b""
    assert not ghostscript.exists()
    with pytest.raises(OSError), Image.open(io.BytesIO(EPS)) as picture:  # noqa: PT011
        picture.load()
    assert ghostscript.exists(), "the trap works: Pillow alone runs it"


@pytest.mark.parametrize("suffix", [".ico", ".icns", ".jp2", ".pcx", ".tga", ".sgi", ".dds"])
def test_formats_that_nobody_asked_for_are_not_opened(suffix: str) -> None:
    Image.init()
    content = encoded(Image.fromarray(RGB).resize((16, 16)), suffix)
    with pytest.raises(
        DamagedImage, match=r"it: not a readable image \(none of PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM"
    ):
        opened(content, "it")


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".png", ".webp"])
def test_of_several_frames_or_pages_the_first_is_read(suffix: str) -> None:
    frames = [Image.new("RGB", (14, 9), colour) for colour in ("red", "green", "blue")]
    content = encoded(frames[0], suffix, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.n_frames == 3
    found = np.asarray(opened(content, "it")).astype(int)
    assert np.abs(found - [255, 0, 0]).max() < 8


def test_a_phone_s_jpeg_of_several_pictures_is_one() -> None:
    first, second = Image.new("RGB", (16, 8), "red"), Image.new("RGB", (16, 8), "blue")
    buffer = io.BytesIO()
    first.save(buffer, "MPO", save_all=True, append_images=[second])
    assert np.asarray(opened(buffer.getvalue(), "it"))[0, 0, 0] > 200


def test_avif_where_pillow_has_it() -> None:
    assert ("AVIF" in decoding.formats()) == (".avif" in decoding.suffixes()) == features.check("avif")
    if features.check("avif"):
        found = np.asarray(opened(encoded(Image.new("RGB", (16, 16), "red"), ".avif"), "it")).astype(int)
        assert np.abs(found - [255, 0, 0]).max() < 12


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is installed is looked up anew in a test, and after it."""
    for each in (decoding.formats, decoding.suffixes):
        each.cache_clear()
    yield
    for each in (decoding.formats, decoding.suffixes):
        each.cache_clear()


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def without_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pillow_heif" else find(name, *more)
    )


def test_heic_without_its_decoder_says_what_to_install(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_heif(monkeypatch)
    assert ".heic" not in decoding.suffixes()
    with pytest.raises(
        DamagedImage, match=r"it: not a readable image \(HEIC: pip install 'dmlstudy\[heic\]'\)"
    ):
        opened(HEIC + b"x" * 100, "it")
    for name in ("birds", "cats"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.HEIC").write_bytes(HEIC)
    with pytest.raises(ValueError, match="birds") as caught:
        data.load("image_folder", str(tmp_path), 8)
    said = str(caught.value)
    assert "only 5 .heic (pip install 'dmlstudy[heic]'); convert them" in said
    assert "remove" not in said
    assert "\n" not in said


def test_heic_with_its_decoder_is_a_picture(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The decoder is played by one that finds a PNG behind the head of a HEIC."""
    from PIL import PngImagePlugin

    def register() -> None:
        monkeypatch.setitem(
            Image.OPEN,
            "HEIF",
            (
                lambda file, name: PngImagePlugin.PngImageFile(io.BytesIO(file.read()[len(HEIC) :])),
                lambda prefix: prefix[4:12] == b"ftypheic",
            ),
        )

    fake = types.ModuleType("pillow_heif")
    fake.__spec__ = importlib.machinery.ModuleSpec("pillow_heif", None)
    fake.register_heif_opener = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_heif", fake)
    same(opened(HEIC + encoded(Image.fromarray(RGB)), "it"), Image.fromarray(RGB))
    (tmp_path / "a.heic").write_bytes(HEIC + encoded(Image.fromarray(RGB)))
    np.testing.assert_array_equal(data.open_images(tmp_path, Fit(), 3).read(range(1))[0], RGB)


def test_large_pictures_are_refused_by_a_bound_that_can_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        for name in "ab":
            Image.fromarray(RGB).save(tmp_path / f"{number}" / f"{name}.png")
    said = r"0/a\.png: 14 x 9 pixels, more than 125; .*raise data\.max_pixels of the study, or --max-pixels of embed$"
    for way in ({}, {"resize_to": 9}, {"on_corrupt": "skip"}):
        with pytest.raises(UnsuitableImage, match=said):
            data.load("image_folder", str(tmp_path), 8, max_pixels=125, **way).development.read(np.arange(1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # Pillow's own bound, of the whole process
    found = data.load("image_folder", str(tmp_path), 8, max_pixels=126)
    assert len(found.development) == 4
    assert Image.MAX_IMAGE_PIXELS == 10
    with pytest.raises(ValueError, match="image 0: 14 x 9 pixels; at most 125 in all"):
        data.decode_images([encoded(Image.fromarray(RGB))], Fit(8), 3, 125)


def picture_set(folder: Path, exif: Image.Exif | None = None) -> str:
    """Four classes of two pictures; the last one has this EXIF."""
    for number in range(8):
        path = folder / f"class{number // 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 14, 3), dtype=np.uint8)
        named = {"exif": exif} if exif and number == 7 else {}
        Image.fromarray(pixels).save(path, **named)
    return str(folder)


@pytest.mark.parametrize("limit", [0, 2**30], ids=["lazy", "decoded"])
def test_a_fingerprint_changes_only_where_pixels_do(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", limit)
    old: Any = {"orientation": "as_stored", "background": "drop"}
    plain = picture_set(tmp_path / "plain")
    now, before = (data.load("image_folder", plain, 8, **way) for way in ({}, old))
    assert isinstance(now.test, data.LazyImages if limit == 0 else data.ImageSet)
    assert now.test_fingerprint == before.test_fingerprint
    assert now.development_fingerprint == before.development_fingerprint
    exif = Image.Exif()
    exif[decoding.ORIENTATION_TAG] = 8
    turned = picture_set(tmp_path / "turned", exif)
    now, before = (data.load("image_folder", turned, 8, **way) for way in ({}, old))
    assert now.development_fingerprint == before.development_fingerprint
    assert now.test_fingerprint != before.test_fingerprint
    with Image.open(tmp_path / "turned" / "class3" / "7.jpg") as picture:
        upright = ImageOps.exif_transpose(picture).resize((8, 8), Image.Resampling.BILINEAR)
        stored = picture.resize((8, 8), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(now.test.read(np.array([3]))[0], np.asarray(upright))
    np.testing.assert_array_equal(before.test.read(np.array([3]))[0], np.asarray(stored))


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    plain = picture_set(tmp_path / "plain")
    for load in (data.load, data.load_closed):
        with pytest.raises(ValueError, match=r"data\.orientation: 'up', choose from exif, as_stored"):
            load("image_folder", plain, 8, orientation="up")
        with pytest.raises(ValueError, match=r"data\.background: 'purple': choose from white"):
            load("image_folder", plain, 8, background="purple")
