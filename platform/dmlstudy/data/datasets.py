"""The data sets by name, and images of any origin for embedding.

Adding a data set is one function ``(path, expected) -> Parts`` that lists its pictures, and one line in ``DATASETS``.
Shapes: N images, H height, W width, C channels.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dmlstudy.data import hugging_face, layouts, reidentification, shards, tables, uned, wildlife
from dmlstudy.data.cameras import cameras, check_none
from dmlstudy.data.canvas import KINDS
from dmlstudy.data.decoding import Reading
from dmlstudy.data.images import (
    Images,
    ImageSet,
    Indices,
    Labels,
    ZeroShotData,
    first_half,
    halves,
    resize,
)
from dmlstudy.data.layouts import EXPECTED, Expected, Parts, check_counts, checked, count
from dmlstudy.data.parquet import PictureTable
from dmlstudy.data.picture_files import image_files, nothing_read, sub_folders
from dmlstudy.data.pictures import (
    Files,
    Listing,
    class_disjoint,
    halved,
    image_sets,
    listing,
    sound,
)
from dmlstudy.data.source import Source, taking
from dmlstudy.data.tables import Features, load_features
from dmlstudy.text import first_line, nearest

TORCHVISION: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "cifar10": ("CIFAR10", {}),
    "cifar100": ("CIFAR100", {}),
    "mnist": ("MNIST", {}),
    "fashion_mnist": ("FashionMNIST", {}),
    "kmnist": ("KMNIST", {}),
    "emnist": ("EMNIST", {"split": "balanced"}),
}
"""Closed sets of images in arrays: torchvision's class and its further arguments."""


class Arrays(NamedTuple):
    """Images that are small and in memory anyway; the first half of their classes is development."""

    images_NHWC: Images
    labels_N: Labels
    class_names: tuple[str, ...]


def digits(path: Path | None, expected: Expected | None) -> Arrays:
    """scikit-learn's bundled 8x8 digits, pixel = round(x * 255 / 16): classes 0-4 and 5-9.

    The file is read without importing scikit-learn, for which every worker of a study would wait seconds.
    """
    library = importlib.util.find_spec("sklearn")
    assert library is not None
    assert library.origin is not None
    rows = np.loadtxt(Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images_NHWC = np.round(rows[:, :-1].reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8)
    labels_N = rows[:, -1].astype(np.int64)
    return Arrays(images_NHWC, labels_N, tuple("0123456789"))


def image_folder(path: Path | None, expected: Expected | None) -> Parts:
    """A folder with one sub-folder per class, or with ``train/`` and ``test/`` that hold such sub-folders.

    Without ``train/`` and ``test/`` the first half of the sorted classes is development; with them it is as
    ``class_disjoint`` says.
    """
    folder = existing_folder("image_folder", path)
    train, test = folder / "train", folder / "test"
    if train.is_dir() and test.is_dir():
        return Parts(*class_disjoint(str(folder), class_folders(train), class_folders(test)))
    return Parts(*halved(class_folders(folder)))


def hf_parquet(path: Path | None, expected: Expected | None) -> Parts:
    """Hugging Face Parquet: a folder with ``train.parquet`` and ``test.parquet`` (or their numbered parts
    ``train-00000-of-00002.parquet``, also below ``data/``), which are cut as ``class_disjoint`` says, or one file
    whose classes are cut in half."""
    if path is not None and path.is_file():
        return Parts(*halved(_listed(PictureTable([path]))))
    folder = existing_folder("hf_parquet", path)
    return Parts(*class_disjoint(str(folder), *parquet_sides(folder)))


def table(path: Path | None, expected: Expected | None) -> Parts:
    """A CSV or Parquet table of labels and paths, as ``tables.table`` has it."""
    if path is None or not path.is_file():
        raise ValueError(f"data.path: table needs a CSV or Parquet file, and {path} is none; set data.path")
    return tables.table(path)


def saved_datasets(path: Path | None, expected: Expected | None) -> Parts:
    """A folder of the library ``datasets``, as ``hugging_face.hf_datasets`` has it."""
    return hugging_face.hf_datasets(existing_folder("hf_datasets", path))


def individuals(path: Path | None, expected: Expected | None) -> Parts:
    """A CSV of pictures and the animals they show, as ``wildlife.wildlife`` has it."""
    if path is None or not path.exists():
        raise ValueError(
            f"data.path: wildlife needs a CSV file or its folder, and {path} is none; set data.path"
        )
    return wildlife.wildlife(path)


def universal(path: Path | None, expected: Expected | None) -> Parts:
    """Domains of UnED, as ``uned.uned`` has them."""
    return uned.uned(existing_folder("uned", path), expected)


def tar_shards(path: Path | None, expected: Expected | None) -> Parts:
    """A folder of tar shards in the WebDataset layout, as ``shards.shards`` has it."""
    return shards.shards(existing_folder("shards", path))


def _of_layout(
    name: str, layout: Callable[[Path, Expected], Parts], path: Path | None, expected: Expected | None
) -> Parts:
    folder = existing_folder(name, path)
    assert expected is not None
    has_roles = "query" in expected  # which Parquet files do not tell
    if not has_roles and has_parquet(folder):
        return checked(name, hf_parquet(folder, None), expected)
    return layout(folder, expected)


def _of_torchvision(name: str, path: Path | None, expected: Expected | None) -> Parts | Arrays:
    """All images of a closed set, where torchvision's ``download=True`` has put them, or as Hugging Face Parquet."""
    folder = existing_folder(name, path)
    assert expected is not None
    if has_parquet(folder):
        return checked(name, hf_parquet(folder, None), expected)
    sides = torchvision_sides(name, folder)
    images_NHWC = np.concatenate([side.images_NHWC for side in sides])
    labels_N = np.concatenate([side.labels_N for side in sides])
    is_first_N = labels_N < first_half(len(sides[0].class_names))
    found = {"development": count(labels_N[is_first_N]), "test": count(labels_N[~is_first_N])}
    check_counts(name, found, expected)
    return Arrays(images_NHWC, labels_N, sides[0].class_names)


def torchvision_sides(name: str, folder: Path) -> list[Arrays]:
    """Training and test images of a set of torchvision's; raises ValueError where they are not in the folder."""
    from torchvision import datasets  # type: ignore[import-untyped]

    kind, arguments = TORCHVISION[name]
    try:
        sides = [getattr(datasets, kind)(folder, train=train, **arguments) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"data.path: {folder} does not hold {name} ({first_line(error)}); get it by"
            f" torchvision.datasets.{kind}({str(folder)!r}, download=True"
            f"{''.join(f', {key}={value!r}' for key, value in arguments.items())})"
        ) from None
    images = [np.asarray(side.data) for side in sides]
    labels = [np.asarray(side.targets, dtype=np.int64) for side in sides]
    num_classes = int(max(of_side.max() for of_side in labels)) + 1
    names = [str(each) for each in sides[0].classes]
    if len(set(names)) != num_classes:
        names = [str(number) for number in range(num_classes)]
    return [
        Arrays(of_side[..., None] if of_side.ndim == 3 else of_side, labels_N, tuple(names))
        for of_side, labels_N in zip(images, labels, strict=True)
    ]


FEATURES = "features"
"""The data set of vectors: ``feature_sides``, or one file."""

DATASETS: Mapping[str, Callable[[Path | None, Expected | None], Parts | Arrays]] = {
    "digits": digits,
    "image_folder": image_folder,
    "hf_parquet": hf_parquet,
    "hf_datasets": saved_datasets,
    "table": table,
    "shards": tar_shards,
    "wildlife": individuals,
    "uned": universal,
    "cub200": functools.partial(_of_layout, "cub200", layouts.cub200),
    "cars196": functools.partial(_of_layout, "cars196", layouts.cars196),
    "sop": functools.partial(_of_layout, "sop", layouts.sop),
    "inshop": functools.partial(_of_layout, "inshop", layouts.inshop),
    "inaturalist2018": functools.partial(_of_layout, "inaturalist2018", layouts.inaturalist2018),
    "omniglot": functools.partial(_of_layout, "omniglot", layouts.omniglot),
    "market1501": functools.partial(_of_layout, "market1501", reidentification.market1501),
    "msmt17": functools.partial(_of_layout, "msmt17", reidentification.msmt17),
    "veri776": functools.partial(_of_layout, "veri776", reidentification.veri776),
    **{name: functools.partial(_of_torchvision, name) for name in TORCHVISION},
}


@taking(Source)
def load(source: Source) -> ZeroShotData:
    """Load a data set whose test classes are not those of development; the parameters are those of ``Source``.

    Small sets are decoded at once; pictures of larger ones when they are read.

    Raises ValueError for an unknown name, a missing folder, one whose counts are not those expected, and images that
    are broken or of unequal size.
    """
    name, place = source.name, source.place
    known = (*DATASETS, FEATURES)
    if name not in known:
        raise ValueError(f"data.name: unknown data set {name!r}{nearest(name, known, listed=True)}")
    check_sizes(source)
    fit = source.fit
    if name == FEATURES:
        check_none(name, source.camera, "are vectors, of which no camera is known")
        return _feature_data(place)
    expected = EXPECTED if source.expected is None else source.expected
    found = DATASETS[name](place, expected.get(name))
    if isinstance(found, Arrays):
        check_none(name, source.camera, "has no cameras")
        return halves(name, ImageSet(resize(found.images_NHWC, source.image_size), *found[1:]))
    damaged: tuple[int, ...] = ()
    if source.on_corrupt == "skip":
        found, damaged = _without_damaged(found, fit.reading)
    if not any(len(side.labels_N) for side in found[:2]):
        raise ValueError(f"data.path: {name} finds no images at {source.path}")
    of_sides = cameras(name, source.camera, place, found[:2]) or (None, None)
    way_out = "" if source.on_corrupt == "skip" else "leave it out by data.on_corrupt: skip"
    development, test = image_sets(
        found[:2], fit, way_out, canvas=source.canvas, canvas_gib=source.canvas_gib
    )
    return ZeroShotData(
        name,
        development,
        test,
        found.test_query,
        found.test_gallery,
        damaged,
        places(found[:2]),
        of_sides[0],
        of_sides[1],
        found.left_out,
    )


def places(listings: Sequence[Listing]) -> Callable[[int], str]:
    """Names of images for people, by their number over all listings in turn."""
    rows = [(each.pictures, int(row)) for each in listings for row in each.row_N]
    return lambda number: rows[number][0].place(rows[number][1])


def check_sizes(source: Source) -> None:
    """Raise ValueError where ``image_size`` and ``resize_to`` do not go with the data set or with each other."""
    name, path, image_size, resize_to = source.name, source.place, source.image_size, source.resize_to
    if name == FEATURES:
        for key, size in (("image_size", image_size), ("resize_to", resize_to)):
            if size is not None:
                raise ValueError(f"data.{key}: features are vectors, which have no side; leave it out")
        if source.canvas != "none":
            raise ValueError(
                "data.canvas: features are vectors, of which there are no pictures; leave it out"
            )
    if source.canvas not in KINDS:
        raise ValueError(f"data.canvas: {source.canvas!r}, choose from {', '.join(KINDS)}")
    if resize_to is None:
        return
    is_array_folder = name in TORCHVISION and path is not None and path.is_dir() and not has_parquet(path)
    if name == "digits" or is_array_folder:
        raise ValueError(
            f"data.resize_to: {name} has images of one size; leave it out, and for random crops set"
            " augmentation.padding"
        )
    if image_size is None or resize_to < image_size:
        raise ValueError(
            f"data.resize_to: {resize_to} pixels, of which data.image_size are seen; set data.image_size to at most"
            f" {resize_to}, it is {image_size}"
        )


def feature_sides(folder: Path) -> tuple[Features, Features]:
    """The matrices ``train`` and ``test`` (``.npz`` or ``.parquet``) in a folder; raises ValueError without them."""
    sides: list[Features] = []
    for side in ("train", "test"):
        found = [path for path in (folder / f"{side}.npz", folder / f"{side}.parquet") if path.is_file()]
        if len(found) != 1:
            raise ValueError(f"data.path: {folder} needs one of {side}.npz and {side}.parquet")
        sides.append(load_features(found[0]))
    train, test = sides
    if train.x_ND.shape[1] != test.x_ND.shape[1]:
        raise ValueError(
            f"data.path: {folder} has {train.x_ND.shape[1]} training and {test.x_ND.shape[1]} test features"
        )
    return train, test


def _feature_data(path: Path | None) -> ZeroShotData:
    """Matrices ``train`` and ``test`` of different classes in a folder, or one file whose classes are cut in half."""
    if path is not None and path.is_file():
        return halves(FEATURES, load_features(path))
    return ZeroShotData(FEATURES, *feature_sides(existing_folder(FEATURES, path)))


def _without_damaged(found: Parts, how: Reading) -> tuple[Parts, tuple[int, ...]]:
    """The pictures that can be decoded, and the numbers of the others."""
    development_N, test_N = (sound(each, how) for each in found[:2])
    new_index_N = np.cumsum(test_N) - 1

    def left(indices: Indices | None) -> Indices | None:
        return None if indices is None else new_index_N[indices[test_N[indices]]]

    kept = Parts(
        found.development.part(development_N),
        found.test.part(test_N),
        left(found.test_query),
        left(found.test_gallery),
        found.left_out,
    )
    damaged = np.flatnonzero(~np.concatenate([development_N, test_N]))
    return kept, tuple(damaged.tolist())


def existing_folder(name: str, path: Path | None) -> Path:
    if path is None:
        raise ValueError(f"data.path: {name} needs a folder; set data.path")
    if path.is_file():
        raise ValueError(
            f"data.path: {path} is a file; {name} needs a folder, of an archive the one that it unpacks to"
        )
    if not path.is_dir():
        raise ValueError(f"data.path: folder {path} does not exist")
    return path


def class_folders(folder: Path) -> Listing:
    folders = sub_folders(folder)
    files_of = {p.name: image_files(p) for p in folders}
    empty = next((p for p in folders if not files_of[p.name]), None)
    if empty is not None:
        raise ValueError(f"{empty}: {nothing_read(empty)}, or take this class's folder away")
    if len(files_of) < 2:
        raise ValueError(f"{folder}: {len(files_of)} class folders; put each class's images in a sub-folder")
    labels = [c for c, files in enumerate(files_of.values()) for _ in files]
    files = [p for files in files_of.values() for p in files]
    return listing(Files(files), labels, tuple(files_of))


def _split_files(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / "data"):
        whole = place / f"{split}.parquet"
        if parts := [whole] if whole.is_file() else _numbered_parts(place, split):
            return parts
    return []


PART = re.compile(r"-(\d+)-of-(\d+)(?:-[0-9a-f]+)?\.parquet")
"""The end of a part's name, after the split; older ones end in a hash of their content."""


def _numbered_parts(place: Path, split: str) -> list[Path]:
    """The parts of a split in their order, none where there is no part.

    Raises ValueError naming one that is missing, and where there are more files than parts.
    """
    files = sorted(place.glob(f"{split}-*-of-*.parquet"))
    found = [(path, part) for path in files if (part := PART.fullmatch(path.name.removeprefix(split)))]
    for _, part in found:
        digits, total = len(part[2]), int(part[2])
        present = {int(other[1]) for _, other in found if other[2] == part[2]}
        missing = sorted(set(range(total)) - present)
        if missing:
            raise ValueError(
                f"data.path: {place} has {len(present)} of {total} parts of {split}, without"
                f" {split}-{missing[0]:0{digits}}-of-{part[2]}.parquet; get all parts"
            )
        if len(found) != total:
            names = ", ".join(path.name for path, _ in found[:4])
            raise ValueError(
                f"data.path: {place} has {len(found)} files for {total} parts of {split} ({names} ...); keep one of"
                " each part"
            )
    return [path for path, _ in found]


def has_parquet(folder: Path) -> bool:
    return bool(_split_files(folder, "train") and _split_files(folder, "test"))


def parquet_sides(folder: Path) -> tuple[Listing, Listing]:
    """Training and test pictures of a folder in the Hugging Face layout.

    Raises ValueError where there is not one of both, or where only one names its classes, so that it cannot be known
    which are the same.
    """
    sides = []
    for split in ("train", "test"):
        parts = _split_files(folder, split)
        if not parts:
            raise ValueError(f"data.path: folder {folder} has no {split}.parquet")
        sides.append(PictureTable(parts))
    train, test = sides
    if train.has_names != test.has_names:
        named, other = ("train", "test") if train.has_names else ("test", "train")
        raise ValueError(
            f"{folder}: {named} has class names in its metadata, {other} has ids alone; write both with names"
        )
    return _listed(train), _listed(test)


def _listed(pictures: PictureTable) -> Listing:
    place = pictures.paths[0]
    if pictures.labels_N is None:
        raise ValueError(f"{place}: no column label; zero-shot data needs class ids")
    labels_N = np.searchsorted(np.array(list(pictures.class_names)), pictures.labels_N)
    names = tuple(pictures.class_names.values())
    if len(set(names)) < len(names):
        raise ValueError(f"{place}: two labels have the same class name in the file's metadata")
    return listing(pictures, labels_N, names)
