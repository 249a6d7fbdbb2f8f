"""The parameters of a data set, told once for all functions that load one: its name, its place, how it is seen."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from dmlstudy.data.canvas import Kind
from dmlstudy.data.decoding import MAX_PIXELS, ORIENTATIONS, Reading
from dmlstudy.data.decoding import background as colour
from dmlstudy.data.images import Fit
from dmlstudy.data.layouts import Expected

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A data set ``name`` at ``path``; images are read and seen as ``Fit`` says.

    With ``on_corrupt='skip'`` each picture is decoded once when the set is loaded, and those that cannot be are left
    out and noted; one whose bytes cannot be read is an error all the same. Pictures that are decoded when they are
    read have a ``canvas`` of this kind (``data.canvas``), one in memory of at most ``canvas_gib``.

    ``camera`` is a column, or a regular expression of a picture's path with one group (``cameras.cameras``).

    ``expected`` has counts of data sets, by default those that are published.
    """

    name: str
    path: str | None = None
    image_size: int | None = None
    resize_to: int | None = None
    keep_aspect: bool = True
    on_corrupt: str = "error"
    _: KW_ONLY
    orientation: str = "exif"
    background: str = "white"
    max_pixels: int = MAX_PIXELS
    canvas: Kind = "none"
    canvas_gib: float = 8.0
    camera: str | None = None
    expected: Mapping[str, Expected] | None = None

    @property
    def place(self) -> Path | None:
        return None if self.path is None else Path(self.path)

    @property
    def fit(self) -> Fit:
        """The conversion of pictures to images. Raises ValueError naming the setting that is wrong."""
        how = reading(self.orientation, self.background, self.max_pixels)
        return Fit(self.image_size, self.resize_to, self.keep_aspect, how)


def reading(orientation: str, background: str, max_pixels: int) -> Reading:
    """The way pictures are read by a study's settings. Raises ValueError naming the one that is wrong."""
    if orientation not in ORIENTATIONS:
        raise ValueError(f"data.orientation: {orientation!r}, choose from {', '.join(ORIENTATIONS)}")
    try:
        return Reading(orientation, colour(background), max_pixels)
    except ValueError as error:
        raise ValueError(f"data.background: {error}") from None


def taking(parameters: Callable[P, Source]) -> Callable[[Callable[[Source], T]], Callable[P, T]]:
    """A function of a source becomes one of the source's own parameters: ``@taking(Source)``."""

    def decorated(load: Callable[[Source], T]) -> Callable[P, T]:
        @functools.wraps(load)
        def load_by_parameters(*arguments: P.args, **named: P.kwargs) -> T:
            return load(parameters(*arguments, **named))

        own = inspect.signature(parameters).replace(
            return_annotation=inspect.signature(load).return_annotation
        )
        load_by_parameters.__signature__ = own  # type: ignore[attr-defined]
        return load_by_parameters

    return decorated
