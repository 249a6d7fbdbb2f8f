"""A model's preprocessing of pictures: as stored with the model, in words, and as code.

The description is JSON under ``preprocessing`` in ``embedder.json``. ``words`` and ``code`` are made of it alone, so
that the card, an exported file and the folder say the same: ``code`` is a function of Pillow and NumPy whose pixels are
those of ``data.open_images``, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from dmlstudy.data.decoding import AS_BEFORE, ORIENTATIONS, Reading, background
from dmlstudy.data.images import Fit

Rule = Literal["image_size", "shorter_side", "both_sides"]
RULES: tuple[Rule, ...] = get_args(Rule)

MOST_SIDE = 2**15
"""Pixels that a description may have a side resized to."""

OPENER = "Image.open(path)"

TURNED = "turned as its EXIF orientation says"
STORED = "left as it is stored, whatever its EXIF orientation says"
BITS = "upper 8 of 16, floats from 0 to 1 times 255"


def described(
    fit: Fit,
    *,
    image_size: tuple[int, int],
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    network_order: str,
) -> dict[str, Any]:
    """All that a stranger needs to turn a file into what the model takes, and that into what its network sees."""
    reading = fit.reading
    rule: Rule = "image_size"
    if fit.resize_to is not None:
        rule = "shorter_side" if fit.keep_aspect else "both_sides"
    return {
        "dtype": "uint8",
        "layout": "NHWC",
        "channels": channels,
        "image_size": list(image_size),
        "range": [0, 255],
        "colours": "RGB" if channels == 3 else "grey",
        "orientation": reading.orientation,
        "background": None if reading.background is None else "#" + bytes(reading.background).hex(),
        "bits": BITS,
        "frame": "first",
        "resize": {
            "rule": rule,
            "to": list(image_size) if fit.resize_to is None else fit.resize_to,
            "filter": "bilinear",
            "antialias": True,
        },
        "crop": "none" if fit.resize_to is None else "centre",
        "scale": 1 / 255,
        "mean": list(mean),
        "std": list(std),
        "network_order": network_order,
    }


def fit_of(preprocessing: Mapping[str, Any], place: str) -> Fit | None:
    """The way a description reads and sees pictures; None if it is older than that.

    Raises ValueError, which begins with ``place``, for a description that is not understood.
    """
    if "orientation" not in preprocessing:
        return None
    try:
        height, width = (int(side) for side in preprocessing["image_size"])
        resize, orientation, colour = (preprocessing[key] for key in ("resize", "orientation", "background"))
        rule, to = resize["rule"], resize["to"]
        if orientation not in ORIENTATIONS or rule not in RULES or min(height, width) < 1:
            raise ValueError(f"orientation {orientation!r}, resize {rule!r}")
        if resize["filter"] != "bilinear" or resize["antialias"] is not True:
            raise ValueError(f"filter {resize['filter']!r}")
        behind = None if colour is None else background(colour)
        side = None if rule == "image_size" else int(to)
        if side is not None and not max(height, width) <= side <= MOST_SIDE:
            raise ValueError(f"resize to {side}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{place}: preprocessing is not understood ({reason}); copy the folder again"
        ) from None
    size = height if height == width else (height, width)
    return Fit(size, side, rule != "both_sides", Reading(orientation, behind))


def fit_before(preprocessing: Mapping[str, Any], trained_on: Mapping[str, Any], place: str) -> Fit:
    """The fit of a model that says nothing about orientation: by the settings of the data it was trained on.

    Raises ValueError as ``fit_of``.
    """
    try:
        height, width = (int(side) for side in preprocessing["image_size"])
        resize_to, keep_aspect = trained_on.get("resize_to"), trained_on.get("keep_aspect", True)
        side = None if resize_to is None else int(resize_to)
        if min(height, width) < 1 or (side is not None and not max(height, width) <= side <= MOST_SIDE):
            raise ValueError(f"resize to {side}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_understood(place, error) from None
    return Fit(height if height == width else (height, width), side, bool(keep_aspect), AS_BEFORE)


def _not_understood(place: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:80] or type(error).__name__
    return ValueError(f"{place}: preprocessing is not understood ({reason}); copy the folder again")


def words(preprocessing: Mapping[str, Any]) -> list[str]:
    """The steps from a file to the model's input, one a line; of vectors the only line there is."""
    if "resize" not in preprocessing:
        if preprocessing.get("layout") == "NF":
            return [f"vectors float32 (N, {preprocessing['features']}), as they are"]
        return []
    height, width = preprocessing["image_size"]
    resize, colour = preprocessing["resize"], preprocessing["background"]
    scaled = {
        "image_size": f"both sides to {width} x {height} (width x height)",
        "shorter_side": f"its shorter side to {resize['to']} pixels, the other in proportion, rounded",
        "both_sides": f"both sides to {resize['to']} pixels",
    }[resize["rule"]]
    steps = [
        f"orientation: the picture (of several frames the first) is"
        f" {TURNED if preprocessing['orientation'] == 'exif' else STORED}",
        f"bits: 8; {preprocessing['bits']}",
        "transparency: alpha is dropped" if colour is None else f"transparency: composed on {colour}",
        "colours: RGB (CMYK and palettes converted, colour profiles not applied)",
        f"resize: {scaled}, bilinear with antialiasing (Pillow's)",
    ]
    if preprocessing["crop"] == "centre":
        steps.append(f"crop: the centre, {width} x {height}")
    if preprocessing["channels"] == 1:
        steps.append("grey: ITU-R 601 luma, after resizing")
    return [
        *steps,
        f"input: uint8, 0 to 255, (N, {height}, {width}, {preprocessing['channels']}), {preprocessing['colours']}",
        "within the model: (input / 255 - mean) / std with mean"
        f" {_numbers(preprocessing['mean'])} and std {_numbers(preprocessing['std'])} of RGB; its network then sees"
        f" {preprocessing['network_order']}",
    ]


def code(preprocessing: Mapping[str, Any], opener: str = OPENER) -> str:
    """A function of Pillow and NumPy that reads a file as ``words`` says; empty for vectors.

    ``opener`` is the expression that opens ``path`` as Pillow's picture.
    """
    if "resize" not in preprocessing:
        return ""
    height, width = preprocessing["image_size"]
    to = preprocessing["resize"]["to"]
    size = {
        "image_size": f"({width}, {height})",
        "shorter_side": f"[max({to}, round({to} / min(image.size) * side)) for side in image.size]",
        "both_sides": f"({to}, {to})",
    }[preprocessing["resize"]["rule"]]
    lines = [
        "import numpy as np",
        f"from PIL import {', '.join(_of_pillow(preprocessing))}",
        "",
        f"def read(path):  # uint8 ({height}, {width}, {preprocessing['channels']}), 0 to 255",
        *_opening(preprocessing, opener),
    ]
    lines += [
        f"    size = {size}  # width, height",
        '    image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)',
    ]
    if preprocessing["crop"] == "centre":
        lines += [
            f"    left, top = round((image.width - {width}) / 2), round((image.height - {height}) / 2)",
            f"    image = image.crop((left, top, left + {width}, top + {height}))",
        ]
    ends = '    return np.asarray(image.convert("L"))[..., None]' if preprocessing["channels"] == 1 else None
    return "\n".join([*lines, ends or "    return np.asarray(image)", ""])


def picture_code(preprocessing: Mapping[str, Any]) -> str:
    """A function of Pillow that opens a file as ``code`` does, and leaves resizing to others; empty for vectors.

    Its pictures are RGB, of a model of grey ones without colour.
    """
    if "resize" not in preprocessing:
        return ""
    grey = '.convert("L").convert("RGB")' if preprocessing["channels"] == 1 else ""
    lines = [
        "import numpy as np",
        f"from PIL import {', '.join(_of_pillow(preprocessing))}",
        "",
        "def picture(path):  # RGB, of any size",
        *_opening(preprocessing, OPENER),
        f'    return image.convert("RGB"){grey}',
    ]
    return "\n".join([*lines, ""])


def _of_pillow(preprocessing: Mapping[str, Any]) -> list[str]:
    return ["Image", "ImageOps"] if preprocessing["orientation"] == "exif" else ["Image"]


def _opening(preprocessing: Mapping[str, Any], opener: str) -> list[str]:
    """The lines from ``path`` to ``image``: turned, of 8 bits, without transparency."""
    is_turned, colour = preprocessing["orientation"] == "exif", preprocessing["background"]
    lines = [
        f"    with {opener} as file:",
        f"        image = {'ImageOps.exif_transpose(file)' if is_turned else 'file.copy()'}",
        '    if image.mode[0] in "IF":  # 16 bits, or floats from 0 to 1',
        "        x = np.asarray(image)",
        '        image = Image.fromarray((x >> 8 if x.dtype.kind != "f" else (x * 255).round()).astype("uint8"))',
    ]
    if colour is not None:
        lines += [
            "    if image.has_transparency_data:",
            f'        image = Image.alpha_composite(Image.new("RGBA", image.size, "{colour}"), image.convert("RGBA"))',
        ]
    return lines


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"
