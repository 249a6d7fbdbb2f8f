"""The data sets by name, and images of any origin for embedding.

Adding a data set is one function ``(path, image_size) -> ZeroShotData`` and one line in ``DATASETS``.
Shapes: N images, H height, W width, C channels.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data import parquet
from dmlstudy.data.images import (
    Images,
    ImageSet,
    ZeroShotData,
    decode,
    halves,
    resize,
    stack,
    with_channels,
    zero_shot,
)
from dmlstudy.naming import nearest

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)


def digits(path: Path | None, image_size: int | None) -> ZeroShotData:
    """scikit-learn's bundled 8x8 digits, pixel = round(x * 255 / 16): classes 0-4 and 5-9.

    The file is read without importing scikit-learn, for which every worker of a study would wait seconds.
    """
    library = importlib.util.find_spec("sklearn")
    assert library is not None
    assert library.origin is not None
    rows = np.loadtxt(Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images_NHWC = np.round(rows[:, :-1].reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8)
    labels_N = rows[:, -1].astype(np.int64)
    return halves("digits", ImageSet(resize(images_NHWC, image_size), labels_N, tuple("0123456789")))


def image_folder(path: Path | None, image_size: int | None) -> ZeroShotData:
    """A folder with one sub-folder per class, or with ``train/`` and ``test/`` that hold such sub-folders.

    Without ``train/`` and ``test/`` the first half of the sorted classes is development.
    """
    folder = _existing_folder("image_folder", path)
    train, test = folder / "train", folder / "test"
    if train.is_dir() and test.is_dir():
        return zero_shot("image_folder", _class_folders(train, image_size), _class_folders(test, image_size))
    return halves("image_folder", _class_folders(folder, image_size))


def hf_parquet(path: Path | None, image_size: int | None) -> ZeroShotData:
    """Hugging Face Parquet: a folder with ``train.parquet`` and ``test.parquet`` (or their numbered parts
    ``train-00000-of-00002.parquet``), or one file whose classes are cut in half."""
    if path is not None and path.is_file():
        return halves("hf_parquet", _parquet_set([path], image_size))
    folder = _existing_folder("hf_parquet", path)
    train, test = (_parquet_parts(folder, split) for split in ("train", "test"))
    return zero_shot("hf_parquet", _parquet_set(train, image_size), _parquet_set(test, image_size))


DATASETS: Mapping[str, Callable[[Path | None, int | None], ZeroShotData]] = {
    "digits": digits,
    "image_folder": image_folder,
    "hf_parquet": hf_parquet,
}


def load(name: str, path: str | None = None, image_size: int | None = None) -> ZeroShotData:
    """Load the data set ``name`` from ``path``, resized to squares of ``image_size`` pixels if given.

    Raises ValueError for an unknown name, a missing folder, and images that are broken or of unequal size.
    """
    if name not in DATASETS:
        raise ValueError(f"data.name: unknown data set {name!r}{nearest(name, DATASETS, listed=True)}")
    return DATASETS[name](Path(path) if path is not None else None, image_size)


def load_images(
    path: str | Path, image_size: int | None, channels: int
) -> tuple[list[str], list[str] | None, Images]:
    """Load images of any origin for embedding: ids, labels (None if unknown) and ``images_NHWC``.

    ``path`` is an image; a folder, read recursively, where an image's sub-folder is its label;
    ``.npy`` or ``.npz`` (``images``, optionally ``ids`` and ``labels``) with uint8 of shape NHW or NHWC;
    or ``.parquet`` in the Hugging Face layout.
    Raises ValueError naming the file that is missing, broken, or not of these kinds.
    """
    path = Path(path)
    assert channels in (1, 3)
    ids: list[str]
    labels: list[str] | None = None
    if path.is_dir():
        ids, labels, images_NHWC = _folder_images(path, image_size)
    elif not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    elif path.suffix.lower() in (".npy", ".npz"):
        ids, labels, images_NHWC = _array_images(path, image_size)
    elif path.suffix.lower() == ".parquet":
        table = parquet.read_images([path], image_size)
        ids, images_NHWC = table.ids, table.images_NHWC
        if table.labels_N is not None:
            labels = [table.class_names[c] for c in table.labels_N.tolist()]
    else:
        ids, images_NHWC = [path.name], decode(path, str(path), image_size)[None]
    return ids, labels, with_channels(images_NHWC, channels)


def _existing_folder(name: str, path: Path | None) -> Path:
    if path is None:
        raise ValueError(f"data.path: {name} needs a folder; set data.path")
    if not path.is_dir():
        raise ValueError(f"data.path: folder {path} does not exist")
    return path


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())


def _read_files(files: Sequence[Path], image_size: int | None) -> Images:
    return stack(((str(p), decode(p, str(p), image_size)) for p in files), len(files))


def _class_folders(folder: Path, image_size: int | None) -> ImageSet:
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    files_of = {p.name: _image_files(p) for p in folders}
    empty = [name for name, files in files_of.items() if not files]
    if empty:
        raise ValueError(f"{folder / empty[0]}: no images in this class folder; remove it")
    if len(files_of) < 2:
        raise ValueError(f"{folder}: {len(files_of)} class folders; put each class's images in a sub-folder")
    labels = [c for c, files in enumerate(files_of.values()) for _ in files]
    files = [p for files in files_of.values() for p in files]
    return ImageSet(_read_files(files, image_size), np.array(labels, dtype=np.int64), tuple(files_of))


def _parquet_parts(folder: Path, split: str) -> list[Path]:
    whole = folder / f"{split}.parquet"
    parts = [whole] if whole.is_file() else sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if not parts:
        raise ValueError(f"data.path: folder {folder} has no {split}.parquet")
    return parts


def _parquet_set(paths: Sequence[Path], image_size: int | None) -> ImageSet:
    table = parquet.read_images(paths, image_size)
    if table.labels_N is None:
        raise ValueError(f"{paths[0]}: no column label; zero-shot data needs class ids")
    labels_N = np.searchsorted(np.array(list(table.class_names)), table.labels_N).astype(np.int64)
    names = tuple(table.class_names.values())
    if len(set(names)) < len(names):
        raise ValueError(f"{paths[0]}: two labels have the same class name in the file's metadata")
    return ImageSet(table.images_NHWC, labels_N, names)


def _folder_images(folder: Path, image_size: int | None) -> tuple[list[str], list[str] | None, Images]:
    files = _image_files(folder)
    if not files:
        raise ValueError(f"{folder}: no images in this folder")
    relative = [p.relative_to(folder) for p in files]
    flat = all(p.parent == Path() for p in relative)
    labels = None if flat else ["" if p.parent == Path() else p.parent.as_posix() for p in relative]
    return [p.as_posix() for p in relative], labels, _read_files(files, image_size)


def _array_images(path: Path, image_size: int | None) -> tuple[list[str], list[str] | None, Images]:
    arrays = _arrays(path)
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
    return ids, columns.get("labels"), resize(images, image_size)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {"images": content}
        with content:
            return {key: content[key] for key in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a readable NumPy file ({error})") from error
