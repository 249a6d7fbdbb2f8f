"""Inputs of a finished model: images or vectors of any origin, read a part at a time.

Shapes: N items, B items of a part, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data import tables
from dmlstudy.data.decoding import check_pixels
from dmlstudy.data.images import Fit, decode, resize, stack, with_channels
from dmlstudy.data.loader import in_threads
from dmlstudy.data.parquet import PictureTable, column_names, read_columns
from dmlstudy.data.picture_files import files_below, image_files, left_out, nothing_read
from dmlstudy.data.pictures import Files, Pictures, encoded

ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".parquet")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".7z")


@dataclass(frozen=True, eq=False)
class Inputs:
    """Items by number; ``labels`` is None where none are known.

    ``read`` gives a part of any items, ``one``, of pictures that are decoded one by one, a single item of ``shape``.
    ``stamps`` holds each item's state when it was found: the size and time of its file, or of the file that holds
    all. ``left_out`` counts the files of a folder that are not read, by their kinds.
    """

    ids: Sequence[str]
    labels: Sequence[str] | None
    read: Callable[[range], NDArray[Any]]
    stamps: Sequence[str]
    one: Callable[[int], NDArray[np.uint8]] | None = None
    shape: tuple[int, ...] | None = None
    left_out: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def keys(self) -> Iterator[str]:
        """Keys that tell each item from others that were there before: its name, label and stamp."""
        labels = self.labels or [""] * len(self.ids)
        return (
            f"{each}\0{label}\0{stamp}"
            for each, label, stamp in zip(self.ids, labels, self.stamps, strict=True)
        )


def open_images(path: str | Path, fit: Fit, channels: int) -> Inputs:
    """Images for a model that takes them: uint8 (B, H, W, C), seen as in ``load``.

    ``path`` is one of::

        an image
        a folder            read recursively; an image's sub-folder is its label
        .npy, .npz          uint8 ``images`` of shape NHW or NHWC, resized to squares; optionally ``ids``, ``labels``
        .parquet            in the Hugging Face layout
        .csv, .parquet      a table with a column ``path`` (from its folder), optionally ``id`` and ``label``

    Pictures are decoded as they are read, by as many threads as the machine has cores. Raises ValueError naming
    what is missing, broken or of none of these kinds.
    """
    path = _existing(path)
    if path.is_dir():
        files = image_files(path)
        if not files:
            raise ValueError(f"{path}: {nothing_read(path)}")
        relative = [file.relative_to(path) for file in files]
        is_flat = all(each.parent == Path() for each in relative)
        labels = (
            None
            if is_flat
            else ["" if each.parent == Path() else each.parent.as_posix() for each in relative]
        )
        found = _of_pictures(Files(files), [each.as_posix() for each in relative], labels, fit, channels)
        return replace(found, left_out=left_out(files_below(path)))
    if path.suffix.lower() in ARRAYS:
        return _of_arrays(path, fit, channels)
    if path.suffix.lower() in TABLES:
        columns = read_columns(path) if path.suffix.lower() == ".csv" else _path_columns(path)
        if columns is not None:
            return _of_table(path, columns, fit, channels)
        pictures = PictureTable([path])
        labels = None
        if pictures.labels_N is not None:
            labels = [pictures.class_names[c] for c in pictures.labels_N.tolist()]
        return _of_pictures(pictures, pictures.ids(), labels, fit, channels, _stamps(path, len(pictures)))
    if path.name.lower().endswith(ARCHIVES):
        raise ValueError(f"{path}: is an archive; unpack it and name its folder")
    return _of_pictures(Files([path]), [path.name], None, fit, channels)


def open_vectors(path: str | Path, num_features: int) -> Inputs:
    """Vectors for a model that takes them: float32 (B, F), of a file as ``load_features`` takes it, labels or not.

    Raises ValueError as that, and for vectors of another size.
    """
    path = _existing(path)
    x_NF, y, columns = tables.matrix(path)
    if x_NF.shape[1] != num_features:
        raise ValueError(f"{path}: vectors of size {x_NF.shape[1]}; the model takes {num_features}")
    named = {
        key: [str(value) for value in column]
        for key, column in (("id", columns.get("id")), ("label", y))
        if column is not None
    }
    ids = named.get("id", [str(row) for row in range(len(x_NF))])
    return Inputs(ids, named.get("label"), lambda part: x_NF[part.start : part.stop], _stamps(path, len(ids)))


def decode_images(
    encoded: Sequence[bytes],
    fit: Fit,
    channels: int,
    max_pixels: int,
    *,
    max_in_all: int | None = None,
    before_each: Callable[[], None] = lambda: None,
) -> NDArray[np.uint8]:
    """Pictures that are no files, as ``open_images`` reads them; none of more than ``max_pixels`` is decoded.

    Nor is any where all together have more than ``max_in_all``. ``before_each`` is called before each is decoded, and
    ends it all by what it raises. Raises ValueError naming the picture, by its number from 0, that is no image or
    is too large, before or after resizing.
    """
    places = [f"image {number}" for number in range(len(encoded))]
    in_all = 0
    for place, each in zip(places, encoded, strict=True):
        width, height = check_pixels(each, place, max_pixels)
        in_all += width * height
        _check_canvas(place, width, height, fit, max_pixels)
    if max_in_all is not None and in_all > max_in_all:
        raise ValueError(
            f"{len(encoded)} images of {in_all} pixels together; at most {max_in_all}: send fewer at once, or smaller"
        )

    def seen(place: str, each: bytes) -> NDArray[np.uint8]:
        before_each()
        image_HWC: NDArray[np.uint8] = with_channels(decode(each, place, fit)[None], channels)[0]
        return image_HWC

    pictures = ((place, seen(place, each)) for place, each in zip(places, encoded, strict=True))
    return stack(pictures, len(encoded))


def _check_canvas(place: str, width: int, height: int, fit: Fit, max_pixels: int) -> None:
    """Raise ValueError for a picture so narrow that it has too many pixels once its shorter side is resized."""
    if fit.resize_to is None or not fit.keep_aspect:
        return
    resized = fit.resize_to**2 * max(width, height) // max(1, min(width, height))
    if resized > max_pixels:
        raise ValueError(
            f"{place}: {width} x {height} pixels, of which resizing the shorter side to {fit.resize_to} makes"
            f" {resized}; at most {max_pixels}"
        )


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"{path}: is neither a file nor a folder; name one")
    return path


def _of_pictures(
    pictures: Pictures,
    ids: Sequence[str],
    labels: Sequence[str] | None,
    fit: Fit,
    channels: int,
    stamps: Sequence[str] | None = None,
) -> Inputs:
    def one(row: int) -> NDArray[np.uint8]:
        place = pictures.place(row)
        image_HWC: NDArray[np.uint8] = with_channels(
            decode(encoded(pictures, row), place, fit)[None], channels
        )[0]
        return image_HWC

    def read(part: range) -> NDArray[np.uint8]:
        places = [pictures.place(row) for row in part]
        return stack(zip(places, in_threads(one, list(part)), strict=True), len(part))

    if stamps is None:
        assert isinstance(pictures, Files)
        stamps = [_stamp(file) for file in pictures.paths]
    return Inputs(ids, labels, read, stamps, one, None if fit.size is None else (*fit.size, channels))


def _of_arrays(path: Path, fit: Fit, channels: int) -> Inputs:
    arrays = tables.arrays(path, "images")
    if "images" not in arrays:
        raise ValueError(f"{path}: no array named images, but {', '.join(arrays)}")
    images = arrays["images"]
    if images.dtype != np.uint8:
        raise ValueError(f"{path}: dtype {images.dtype}, expected uint8 with pixels 0..255; convert it first")
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise ValueError(f"{path}: shape {images.shape}, expected NHW or NHWC with 1 or 3 channels, N > 0")
    columns = {key: [str(x) for x in arrays[key]] for key in ("ids", "labels") if key in arrays}
    for key, column in columns.items():
        if len(column) != len(images):
            raise ValueError(f"{path}: {len(column)} {key} for {len(images)} images")
    ids = columns.get("ids", [str(i) for i in range(len(images))])

    def read(part: range) -> NDArray[np.uint8]:
        return with_channels(resize(images[part.start : part.stop], fit.image_size), channels)

    return Inputs(ids, columns.get("labels"), read, _stamps(path, len(ids)))


def _path_columns(path: Path) -> dict[str, Any] | None:
    """The columns of a Parquet table that names files; None of one that holds the pictures themselves."""
    names = column_names(path)
    return read_columns(path) if "path" in names and not {"image", "img"} & set(names) else None


def _of_table(path: Path, columns: dict[str, Any], fit: Fit, channels: int) -> Inputs:
    if "path" not in columns:
        raise ValueError(f"{path}: no column path; it has {', '.join(columns)}")
    missing = [row for row, value in enumerate(columns["path"]) if not value]
    if missing:
        raise ValueError(f"{path}: row {missing[0]} has no path; give one or leave the row out")
    files = [path.parent / str(value) for value in columns["path"]]
    if not files:
        raise ValueError(f"{path}: no rows")
    strange = next((row for row, file in enumerate(files) if file.exists() and not file.is_file()), None)
    if strange is not None:
        raise ValueError(
            f"{path}: row {strange}: {files[strange]} is not a file; name one, or leave the row out"
        )
    ids = [str(value) for value in columns.get("id", columns["path"])]
    labels = [str(value) for value in columns["label"]] if "label" in columns else None
    return _of_pictures(Files(files), ids, labels, fit, channels)


def _stamp(path: Path) -> str:
    """Size and time of a file, or of nothing where there is none: reading it will tell."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def _stamps(path: Path, num_items: int) -> Sequence[str]:
    """Of items that one file holds: a change of it is one of all."""
    return [_stamp(path)] * num_items
