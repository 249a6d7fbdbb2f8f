"""Changes of a training image after its crop and flip: rotation, RandAugment, colours, grey, blur, erased boxes.

torchvision's transforms v2 change the pixels; the parameters are drawn here. Each op has a generator of its own, from
(seed, epoch, image, VIEWS, number of the op), so that no op moves another's draws. No global generator is used.

Pictures are Pillow's, grey or RGB, and keep their mode. Shapes: H height, W width, in pixels.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

MAGNITUDES = 31
"""Bins of RandAugment's magnitudes, 0 to 30."""

LARGEST_BLUR = 2.0
"""Pixels: the standard deviation of the widest blur; the narrowest has 0.1."""

AREAS, LOG_RATIOS = (0.02, 0.33), (math.log(0.3), math.log(3.3))
"""Bounds of an erased box: its share of the picture, and the logarithm of its height / width."""

TRIES = 10
"""Boxes that are drawn before a picture is left as it is."""

Generator = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class ViewOps:
    """Strengths of the ops, in the order in which they are applied; 0 leaves an op out.

    ``rotate``: degrees; the angle is uniform in [-rotate, rotate].

    ``randaugment``: number of ops of RandAugment, each of ``magnitude`` (0 to 30).

    ``jitter``, ``hue``: with probability ``jitter_p`` brightness, contrast and saturation are multiplied by factors
    uniform in [1 - jitter, 1 + jitter], the hue is shifted by a part of the circle uniform in [-hue, hue].

    ``grey``, ``blur``, ``erase``: probabilities.

    ``fill`` is the colour of what an op lays bare, a number for each channel or one for all.
    """

    rotate: float = 0.0
    randaugment: int = 0
    magnitude: int = 9
    jitter: float = 0.0
    hue: float = 0.0
    jitter_p: float = 0.8
    grey: float = 0.0
    blur: float = 0.0
    erase: float = 0.0
    fill: tuple[int, ...] = (0,)

    @property
    def has_ops(self) -> bool:
        return any(op.is_on(self) for op in OPS.values())

    def changed(self, picture: Any, seed: tuple[int, ...]) -> Any:
        """The picture after all ops; ``seed`` is (seed, epoch, image, VIEWS)."""
        for op in OPS.values():
            if op.is_on(self):
                picture = op.apply(self, picture, np.random.default_rng((*seed, op.number)))
        return picture

    def fill_of(self, picture: Any) -> list[int]:
        """The fill, a number for each of the picture's channels."""
        num_channels = len(picture.getbands())
        return list(self.fill) if len(self.fill) == num_channels else [self.fill[0]] * num_channels


class Op(NamedTuple):
    """One change; its ``number`` is part of the seed of its draws and is never given to another."""

    number: int
    is_on: Callable[[ViewOps], bool]
    apply: Callable[[ViewOps, Any, Generator], Any]


def fill_for(mean: Sequence[float], channels: int) -> tuple[int, ...]:
    """The pixel that a network of this ``mean`` of pixels in [0, 1] sees as nothing: round(255 mean) of each channel.

    Of grey images it is that of the mean over the network's channels.
    """
    values = mean if len(mean) == channels else [sum(mean) / len(mean)] * channels
    return tuple(min(255, max(0, round(255 * value))) for value in values)


def check_channels(ops: ViewOps, channels: int, path: str = "augmentation") -> None:
    """Raise ValueError for an op of colours where images have none."""
    if channels == 1:
        for key in ("hue", "grey"):
            if getattr(ops, key) > 0:
                raise ValueError(
                    f"{path}.{key}: the images are grey and have no colour to change; leave it out"
                )


def one_thread() -> None:
    """Have kernels of torch that the calling thread runs start no further threads.

    Each thread that reads pictures would otherwise have as many as there are cores. Other threads keep theirs: torch
    has a number for each thread, and one that new threads begin with, which is put back.
    """
    import torch

    number = torch.get_num_threads()
    torch.set_num_threads(1)
    mend = threading.Thread(target=torch.set_num_threads, args=(number,))
    mend.start()
    mend.join()


def _rotated(ops: ViewOps, picture: Any, rng: Generator) -> Any:
    """The picture turned about its centre, of its size, bilinear."""
    from torchvision.transforms.v2 import InterpolationMode, functional  # type: ignore[import-untyped]

    angle = ops.rotate * rng.uniform(-1, 1)
    return functional.rotate(picture, angle, InterpolationMode.BILINEAR, fill=ops.fill_of(picture))


def _jittered(ops: ViewOps, picture: Any, rng: Generator) -> Any:
    """The picture in other colours, the four changes in a drawn order; all draws are taken at any strength."""
    from torchvision.transforms.v2 import functional

    is_changed = rng.random() < ops.jitter_p
    order = rng.permutation(4).tolist()
    shifts = rng.uniform(-1, 1, 4).tolist()
    if not is_changed:
        return picture
    brightness, contrast, saturation = (max(0.0, 1 + ops.jitter * shift) for shift in shifts[:3])
    changes: list[Callable[[Any], Any]] = [
        lambda x: functional.adjust_brightness(x, brightness),
        lambda x: functional.adjust_contrast(x, contrast),
        lambda x: functional.adjust_saturation(x, saturation),
        lambda x: functional.adjust_hue(x, ops.hue * shifts[3]),
    ]
    for number in order:
        if (ops.hue if number == 3 else ops.jitter) > 0:
            picture = changes[number](picture)
    return picture


def _grey(ops: ViewOps, picture: Any, rng: Generator) -> Any:
    from torchvision.transforms.v2 import functional

    if rng.random() >= ops.grey:
        return picture
    return functional.rgb_to_grayscale(picture, num_output_channels=len(picture.getbands()))


def _blurred(ops: ViewOps, picture: Any, rng: Generator) -> Any:
    """The picture through a Gaussian, sigma uniform in [0.1, 2], which is cut off at 3 sigma."""
    from torchvision.transforms.v2 import functional

    is_changed, sigma = rng.random() < ops.blur, rng.uniform(0.1, LARGEST_BLUR)
    if not is_changed:
        return picture
    side = min(
        2 * math.ceil(3 * sigma) + 1, 2 * min(picture.size) - 1
    )  # the picture is reflected at its edges
    return functional.gaussian_blur(picture, [side, side], [sigma, sigma])


def _erased(ops: ViewOps, picture: Any, rng: Generator) -> Any:
    """The picture without the pixels of a box, which show the fill (Zhong et al. 2017, Algorithm 1)."""
    if rng.random() >= ops.erase:
        return picture
    import torch
    from torchvision.transforms.v2 import functional

    for _ in range(TRIES):
        area = picture.width * picture.height * rng.uniform(*AREAS)
        ratio = math.exp(rng.uniform(*LOG_RATIOS))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < picture.height and width < picture.width:
            top = int(rng.integers(picture.height - height + 1))
            left = int(rng.integers(picture.width - width + 1))
            fill_C11 = torch.tensor(ops.fill_of(picture), dtype=torch.uint8)[:, None, None]
            return functional.erase(picture, top, left, height, width, fill_C11)
    return picture


class Change(NamedTuple):
    """One of RandAugment's: its parameter at magnitude 0 and 30, and whether a coin turns its sign."""

    bounds: Callable[[Any], tuple[float, float]]
    has_sign: bool
    apply: Callable[[Any, float, list[int]], Any]


def _randaugmented(ops: ViewOps, picture: Any, rng: Generator) -> Any:
    """The picture after ops drawn with replacement (Cubuk et al. 2020); holes show the fill, bilinear."""
    import torch

    for _ in range(ops.randaugment):
        change = tuple(RANDAUGMENT.values())[rng.integers(len(RANDAUGMENT))]
        is_turned = change.has_sign and rng.random() <= 0.5
        # Of float32, as torchvision has it, for a pixel may hang on the last digit.
        parameter = float(torch.linspace(*change.bounds(picture), MAGNITUDES)[ops.magnitude])
        picture = change.apply(picture, -parameter if is_turned else parameter, ops.fill_of(picture))
    return picture


def _affine(picture: Any, fill: list[int], *, centre: list[float] | None = None, **parameters: Any) -> Any:
    from torchvision.transforms.v2 import InterpolationMode, functional

    own: dict[str, Any] = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], **parameters}
    return functional.affine(
        picture, **own, interpolation=InterpolationMode.BILINEAR, fill=fill, center=centre
    )


def _shear(picture: Any, along_x: float, along_y: float, fill: list[int]) -> Any:
    degrees = [math.degrees(math.atan(along_x)), math.degrees(math.atan(along_y))]
    return _affine(picture, fill, centre=[0, 0], shear=degrees)


def _turn(picture: Any, degrees: float, fill: list[int]) -> Any:
    from torchvision.transforms.v2 import InterpolationMode, functional

    return functional.rotate(picture, degrees, InterpolationMode.BILINEAR, fill=fill)


def _by(name: str) -> Callable[[Any, float, list[int]], Any]:
    """A function of torchvision's of a picture and one factor, 1 plus the parameter."""

    def apply(picture: Any, parameter: float, fill: list[int]) -> Any:
        from torchvision.transforms.v2 import functional

        return getattr(functional, name)(picture, 1 + parameter)

    return apply


def _plain(
    name: str, *, of: Callable[[float], float] | None = None
) -> Callable[[Any, float, list[int]], Any]:
    """A function of torchvision's of a picture, and of its parameter where it has one."""

    def apply(picture: Any, parameter: float, fill: list[int]) -> Any:
        from torchvision.transforms.v2 import functional

        return getattr(functional, name)(picture, *([] if of is None else [of(parameter)]))

    return apply


RANDAUGMENT: Mapping[str, Change] = MappingProxyType(
    {
        "Identity": Change(lambda x: (0, 0), False, lambda x, value, fill: x),
        "ShearX": Change(lambda x: (0, 0.3), True, lambda x, value, fill: _shear(x, value, 0, fill)),
        "ShearY": Change(lambda x: (0, 0.3), True, lambda x, value, fill: _shear(x, 0, value, fill)),
        "TranslateX": Change(
            lambda x: (0, 150 / 331 * x.width),
            True,
            lambda x, value, fill: _affine(x, fill, translate=[int(value), 0]),
        ),
        "TranslateY": Change(
            lambda x: (0, 150 / 331 * x.height),
            True,
            lambda x, value, fill: _affine(x, fill, translate=[0, int(value)]),
        ),
        "Rotate": Change(lambda x: (0, 30), True, _turn),
        "Brightness": Change(lambda x: (0, 0.9), True, _by("adjust_brightness")),
        "Color": Change(lambda x: (0, 0.9), True, _by("adjust_saturation")),
        "Contrast": Change(lambda x: (0, 0.9), True, _by("adjust_contrast")),
        "Sharpness": Change(lambda x: (0, 0.9), True, _by("adjust_sharpness")),
        "Posterize": Change(lambda x: (8, 4), False, _plain("posterize", of=round)),
        "Solarize": Change(lambda x: (1, 0), False, _plain("solarize", of=lambda value: 255 * value)),
        "AutoContrast": Change(lambda x: (0, 0), False, _plain("autocontrast")),
        "Equalize": Change(lambda x: (0, 0), False, _plain("equalize")),
    }
)
"""RandAugment's changes with torchvision's names, order and ranges."""

OPS: Mapping[str, Op] = MappingProxyType(
    {
        "rotate": Op(1, lambda ops: ops.rotate > 0, _rotated),
        "randaugment": Op(2, lambda ops: ops.randaugment > 0, _randaugmented),
        "jitter": Op(3, lambda ops: ops.jitter_p > 0 and max(ops.jitter, ops.hue) > 0, _jittered),
        "grey": Op(4, lambda ops: ops.grey > 0, _grey),
        "blur": Op(5, lambda ops: ops.blur > 0, _blurred),
        "erase": Op(6, lambda ops: ops.erase > 0, _erased),
    }
)
"""The ops in the order in which they are applied."""
