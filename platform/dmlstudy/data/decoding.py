"""The one way a picture's bytes become pixels, wherever it comes from: a data set, a folder to embed, a request.

Only the formats in ``formats`` are ever opened, so no picture starts a program (as PostScript would). The first of
several frames or pages is read.

Pixels have 8 bits: of 16 bits the upper 8 are kept, floats from 0 to 1 are scaled. CMYK and palettes become
RGB; colour profiles are not applied. A TIFF and a HEIC are turned by their own decoders.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

Orientation: TypeAlias = Literal["exif", "as_stored"]
Colour: TypeAlias = tuple[int, int, int]

ORIENTATIONS: tuple[Orientation, ...] = get_args(Orientation)
MAX_PIXELS = 178_956_970
"""Pixels of a picture, unless more are allowed: Pillow's own bound against decompression bombs."""

COLOURS: Mapping[str, Colour] = {"white": (255, 255, 255), "black": (0, 0, 0), "grey": (128, 128, 128)}
DROP = "drop"
"""No background: alpha is dropped, and a transparent pixel has the colour stored under it."""

ALWAYS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif", ".hif"),
}
"""By Pillow's name of a format, the names of its files."""

INSTALL = {"HEIF": "pip install 'dmlstudy[heic]'", "AVIF": "install a Pillow with AVIF"}
"""Installation of a format that is not among ``formats`` here."""

ORIENTATION_TAG = 0x0112

DAMAGES = (
    OSError,
    SyntaxError,  # which Pillow raises for PNG and EXIF
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""Errors that Pillow and its plugins raise for bytes that are not a whole picture."""


class Reading(NamedTuple):
    """The way stored pixels become those that are seen, before they are resized.

    ``orientation``: 'exif' turns a picture as its EXIF tag says, 'as_stored' leaves it. ``background`` is the colour
    behind transparent pixels, None drops alpha. A picture of more than ``max_pixels`` is refused.
    """

    orientation: Orientation = "exif"
    background: Colour | None = COLOURS["white"]
    max_pixels: int = MAX_PIXELS


AS_BEFORE = Reading("as_stored", None)
"""The reading of models that say nothing about orientation and transparency."""


class DamagedImage(ValueError):
    """A picture whose bytes can be read but are not an image's."""


class UnsuitableImage(ValueError):
    """A sound picture that is not taken: too large, or of numbers whose black and white are not known."""


@functools.cache
def formats() -> tuple[str, ...]:
    """Pillow's names of all formats that are opened: AVIF where Pillow has it, HEIF where pillow-heif is installed."""
    from PIL import features

    warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd metadata; pixels are what counts
    found = [*ALWAYS]
    if features.check("avif"):
        found.append("AVIF")
    if importlib.util.find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()
        found.append("HEIF")
    return tuple(found)


@functools.cache
def suffixes() -> frozenset[str]:
    """Endings of files that count as pictures."""
    return frozenset(suffix for name in formats() for suffix in SUFFIXES[name])


def missing_format(suffix: str) -> str:
    """The package to install for files that end so; empty for files that are read, and for those that never are."""
    name = next((name for name, ends in SUFFIXES.items() if suffix in ends), None)
    return "" if name is None or name in formats() else INSTALL.get(name, "")


def background(text: str) -> Colour | None:
    """The colour that a text names: white, black, grey, ``#rrggbb``, or None for ``drop``.

    Raises ValueError for any other text.
    """
    if text == DROP:
        return None
    if text in COLOURS:
        return COLOURS[text]
    digits = text.removeprefix("#")
    if (
        text.startswith("#")
        and len(digits) == 6
        and all(digit in "0123456789abcdefABCDEF" for digit in digits)
    ):
        return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)
    raise ValueError(f"{text!r}: choose from {', '.join(COLOURS)}, {DROP}, or write a colour as '#ff8800'")


def opened(encoded: bytes, name: str, reading: Reading = Reading()) -> Any:  # noqa: B008
    """Decode one picture: grey (L) for black-and-white and grey modes, else RGB.

    Raises DamagedImage naming the picture if it cannot be decoded, UnsuitableImage if it is too large or has numbers
    without a known range.
    """
    with _damage_named(encoded, name):
        picture = _header(encoded)
        width, height = picture.size
    if width * height > reading.max_pixels:
        raise UnsuitableImage(
            f"{name}: {width} x {height} pixels, more than {reading.max_pixels}; if the picture is your own, raise"
            " data.max_pixels of the study, or --max-pixels of embed"
        )
    with _damage_named(encoded, name), picture:
        return _pixels(picture, name, reading)


def check_pixels(encoded: bytes, name: str, most: int) -> tuple[int, int]:
    """The width and height of a picture, which is not decoded.

    Raises DamagedImage for what is no picture, ValueError for one that has more pixels.
    """
    width, height = header_size(encoded, name)
    if width * height > most:
        raise ValueError(f"{name}: {width} x {height} pixels; at most {most} in all")
    return width, height


def header_size(encoded: bytes, name: str) -> tuple[int, int]:
    """The width and height of a picture as it is stored, which is not decoded; raises DamagedImage."""
    with _damage_named(encoded, name), _header(encoded) as picture:
        width, height = picture.size
    return width, height


def marks(encoded: bytes, reading: Reading) -> bytes:
    """Marks that tell a picture's pixels from those that ``AS_BEFORE`` reads; empty if these are the same.

    So the fingerprint of a data set whose pictures are neither turned nor transparent is what it always was.
    """
    if reading[:2] == AS_BEFORE[:2] or _is_plain_jpeg(encoded):
        return b""
    try:
        with _header(encoded) as picture:
            orientation = 1
            if reading.orientation == "exif" and _may_be_turned(picture, encoded):
                orientation = _orientation(picture)
            has_background = reading.background is not None and _is_transparent(picture)
    except DAMAGES:
        return b""
    turned = b"" if orientation == 1 else b"orientation %d " % orientation
    return turned + (bytes(reading.background) if has_background and reading.background else b"")


def _is_plain_jpeg(encoded: bytes) -> bool:
    """Most pictures there are: told by a look at the bytes, for a header takes longer."""
    return encoded.startswith(b"\xff\xd8") and b"Exif\0" not in encoded and b"tiff:Orientation" not in encoded


def _may_be_turned(picture: Any, encoded: bytes) -> bool:
    """True if reading the orientation is worth its cost: a PNG may have it at its end and must be decoded for it.

    A TIFF is turned by Pillow itself, and always was.
    """
    if picture.format == "PNG":
        return any(name in encoded for name in (b"eXIf", b"profile type exif", b"adobe.xmp"))
    return bool(picture.format != "TIFF")


def _is_transparent(picture: Any) -> bool:
    return bool(
        picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getextrema()[0] < 255
    )


_OPENING = threading.Lock()


def _header(encoded: bytes) -> Any:
    """A picture of which nothing is decoded yet.

    Pillow's bound on pixels is one of the whole process, and lifted here: whoever opens a picture compares its size
    with a bound of its own before anything is decoded.
    """
    from PIL import Image

    known = formats()
    with _OPENING:
        bound, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(io.BytesIO(encoded), formats=known)
        finally:
            Image.MAX_IMAGE_PIXELS = bound


@contextmanager
def _damage_named(encoded: bytes, name: str) -> Iterator[None]:
    from PIL import Image

    try:
        yield
    except UnsuitableImage:
        raise
    except (*DAMAGES, Image.DecompressionBombError) as error:
        raise DamagedImage(
            f"{name}: not a readable image ({_reason(error, encoded)}); repair or remove it"
        ) from error


def _reason(error: Exception, encoded: bytes) -> str:
    """Pillow's reason, which names the buffer if it does not know the format."""
    from PIL import UnidentifiedImageError

    if not isinstance(error, UnidentifiedImageError):
        return " ".join(str(error).split()) or type(error).__name__
    is_heif = encoded[4:8] == b"ftyp" and encoded[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"hevc")
    if is_heif and "HEIF" not in formats():
        return f"HEIC: {INSTALL['HEIF']}"
    return f"none of {', '.join(formats())}"


def _pixels(picture: Any, name: str, reading: Reading) -> Any:
    from PIL import Image

    is_grey = picture.mode in ("1", "L", "LA") or picture.mode.startswith(("I", "F"))
    picture.load()
    if reading.orientation == "exif" and (method := _transposition(_orientation(picture))) is not None:
        picture = picture.transpose(method)
    if picture.mode.startswith(("I", "F")):
        picture = _of_8_bits(picture, name)
    if picture.has_transparency_data:
        if reading.background is not None:
            is_grey = is_grey and len(set(reading.background)) == 1
            behind = Image.new("RGBA", picture.size, (*reading.background, 255))
            picture = Image.alpha_composite(behind, picture.convert("RGBA"))
        else:
            picture.info.pop("transparency", None)  # Pillow warns of some palettes'
    mode = "L" if is_grey else "RGB"
    return picture if picture.mode == mode else picture.convert(mode)


def _orientation(picture: Any) -> int:
    """As EXIF (or XMP) says, 1 to 8; 1 where it is missing or damaged. Pillow itself has turned a TIFF."""
    try:
        found = picture.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # whatever parsing of damaged metadata comes upon; the pixels are sound
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _transposition(orientation: int) -> Any:
    """The transposition of ``PIL.ImageOps.exif_transpose``, which would also rewrite the metadata."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation)


def _of_8_bits(picture: Any, name: str) -> Any:
    """The upper 8 of 16 bits, and floats from 0 to 1 times 255, rounded."""
    from PIL import Image

    values = np.asarray(picture)
    low, high = values.min(), values.max()
    if picture.mode.startswith("F"):
        if not (low >= 0 and high <= 1):  # also of NaN
            raise UnsuitableImage(
                f"{name}: floating-point pixels from {low:g} to {high:g}; scale them to 0..1, or store 8 or 16 bits"
            )
        return Image.fromarray((values * 255).round().astype(np.uint8))
    if low < 0 or high > 65535:
        raise UnsuitableImage(
            f"{name}: pixels from {low} to {high}; scale them to 8 or 16 bits without a sign"
        )
    return Image.fromarray((values >> 8).astype(np.uint8))
