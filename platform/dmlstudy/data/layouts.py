"""The folders that retrieval data sets come in: each layout's account of its pictures, and their expected numbers.

A layout is one function ``(folder, expected) -> Parts``. Several are known of most data sets; the first whose files
exist is used. Counts: as published (``data/README.md``), and Brown et al. 2020 (Smooth-AP) for iNaturalist 2018.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data.images import Indices
from dmlstudy.data.pictures import Files, Listing, by_name, joined, listing


class PartSize(NamedTuple):
    """Numbers of classes and images."""

    classes: int
    images: int


Expected = Mapping[str, PartSize]
"""By part: development and test, or development, query and gallery."""

EXPECTED: Mapping[str, Expected] = {
    "cub200": {"development": PartSize(100, 5864), "test": PartSize(100, 5924)},
    "cars196": {"development": PartSize(98, 8054), "test": PartSize(98, 8131)},
    "sop": {"development": PartSize(11318, 59551), "test": PartSize(11316, 60502)},
    "inshop": {
        "development": PartSize(3997, 25882),
        "query": PartSize(3985, 14218),
        "gallery": PartSize(3985, 12612),
    },
    "inaturalist2018": {"development": PartSize(5690, 325846), "test": PartSize(2452, 136093)},
    # Of Market-1501 without its 3,819 junk pictures; its distractors are a class of the gallery.
    "market1501": {
        "development": PartSize(751, 12936),
        "query": PartSize(750, 3368),
        "gallery": PartSize(751, 15913),
    },
    "msmt17": {
        "development": PartSize(1041, 32621),
        "query": PartSize(3060, 11659),
        "gallery": PartSize(3060, 82161),
    },
    "veri776": {
        "development": PartSize(576, 37778),
        "query": PartSize(200, 1678),
        "gallery": PartSize(200, 11579),
    },
    "omniglot": {"development": PartSize(964, 19280), "test": PartSize(659, 13180)},
    "cifar10": {"development": PartSize(5, 30000), "test": PartSize(5, 30000)},
    "cifar100": {"development": PartSize(50, 30000), "test": PartSize(50, 30000)},
    "mnist": {"development": PartSize(5, 35735), "test": PartSize(5, 34265)},
    "fashion_mnist": {"development": PartSize(5, 35000), "test": PartSize(5, 35000)},
    "kmnist": {"development": PartSize(5, 35000), "test": PartSize(5, 35000)},
    "emnist": {"development": PartSize(24, 67200), "test": PartSize(23, 64400)},
}

CONCEPTS = "concepts"
"""The part of pictures with several concepts each: all there are, before queries are drawn."""

EXPECTED_CLOSED: Mapping[str, Expected] = {
    "cifar10": {"training": PartSize(10, 50000), "test": PartSize(10, 10000)},
    "cifar100": {"training": PartSize(100, 50000), "test": PartSize(100, 10000)},
    "mnist": {"training": PartSize(10, 60000), "test": PartSize(10, 10000)},
    "fashion_mnist": {"training": PartSize(10, 60000), "test": PartSize(10, 10000)},
    "kmnist": {"training": PartSize(10, 60000), "test": PartSize(10, 10000)},
    "emnist": {"training": PartSize(47, 112800), "test": PartSize(47, 18800)},
    "flickr25k": {CONCEPTS: PartSize(24, 25000)},
    # Of 269,648 pictures these show one of the 21 concepts; 186,577, as NASA has it, show one of the 10 commonest.
    "nuswide21": {CONCEPTS: PartSize(21, 195834)},
}
"""Of closed sets, whose classes are on both sides: the published split, or all pictures with concepts."""


class Parts(NamedTuple):
    """Development and test pictures; which of the latter are queries and gallery, None: each is both."""

    development: Listing
    test: Listing
    test_query: Indices | None = None
    test_gallery: Indices | None = None
    left_out: tuple[str, ...] = ()
    """Lines on what the files hold and is not used."""


class Concepts(NamedTuple):
    """Pictures and what each shows, (pictures, concepts)."""

    paths: Sequence[Path]
    shows_NL: NDArray[np.bool_]
    names: tuple[str, ...]


def flickr25k(folder: Path) -> Concepts:
    """MIR-FLICKR 25,000 (Huiskes and Lew 2008): 24 concepts.

    ``im1.jpg`` ... in the folder or in ``mirflickr/``, and for each concept a file ``<concept>.txt`` of picture
    numbers beside them or in ``annotations/`` or ``mirflickr25k_annotations_v080/``; the stricter ``<concept>_r1.txt``
    are not used.
    """
    for root in _roots(folder, ("", "mirflickr")):
        pictures = {int(path.stem[2:]): path for path in root.glob("im*.jpg") if path.stem[2:].isdigit()}
        for place in (root, *(base / name for base in (root, folder) for name in ANNOTATIONS)):
            files = [
                path
                for path in sorted(place.glob("*.txt"))
                if not path.stem.endswith("_r1") and path.stem.lower() != "readme"
            ]
            if pictures and files:
                return _with_concepts("flickr25k", pictures, files)
    raise _unknown("flickr25k", folder, "im1.jpg ... and annotations/<concept>.txt")


ANNOTATIONS = ("annotations", "mirflickr25k_annotations_v080")


def _with_concepts(name: str, pictures: Mapping[int, Path], files: Sequence[Path]) -> Concepts:
    numbers = sorted(pictures)
    place = {number: row for row, number in enumerate(numbers)}
    shows_NL = np.zeros((len(numbers), len(files)), dtype=np.bool_)
    for concept, file in enumerate(files):
        try:
            shown = [int(word) for word in file.read_text(encoding="utf-8").split()]
        except ValueError as error:
            raise ValueError(f"{file}: not a list of picture numbers ({error})") from None
        missing = [number for number in shown if number not in place]
        if missing:
            raise ValueError(
                f"data.path: {name} lists picture im{missing[0]}.jpg in {file.name}, which is not there, with"
                f" {len(missing) - 1} more; unpack the archive again"
            )
        shows_NL[[place[number] for number in shown], concept] = True
    return Concepts([pictures[number] for number in numbers], shows_NL, tuple(file.stem for file in files))


def nuswide21(folder: Path) -> Concepts:
    """NUS-WIDE (Chua et al. 2009) with its 21 most frequent concepts.

    ``ImageList/Imagelist.txt`` names the pictures, ``Groundtruth/AllLabels/Labels_<concept>.txt`` has 0 or 1 for each
    (both also without their first folder); the pictures are below ``Flickr/``, ``images/`` or the folder itself.
    """
    listed = _first_file(folder, ("ImageList/Imagelist.txt", "Imagelist.txt", "ImageList/ImageList.txt"))
    labels = next(
        (
            found
            for place in ("Groundtruth/AllLabels", "AllLabels", "groundtruth/AllLabels")
            if (found := sorted((folder / place).glob("Labels_*.txt")))
        ),
        [],
    )
    if listed is None or not labels:
        raise _unknown(
            "nuswide21", folder, "ImageList/Imagelist.txt and Groundtruth/AllLabels/Labels_<concept>.txt"
        )
    names = [line.strip().replace("\\", "/") for line in listed.read_text(encoding="utf-8").splitlines()]
    columns = {path.stem.removeprefix("Labels_"): np.loadtxt(path, dtype=np.int8, ndmin=1) for path in labels}
    for concept, column_N in columns.items():
        if len(column_N) != len(names):
            raise ValueError(
                f"data.path: nuswide21 has {len(column_N)} labels of {concept!r} for {len(names)} pictures;"
                " unpack the archive again"
            )
    chosen = sorted(sorted(columns, key=lambda concept: (-int(columns[concept].sum()), concept))[:21])
    shows_NL = np.stack([columns[concept] > 0 for concept in chosen], axis=1)
    shown_N = np.flatnonzero(shows_NL.any(axis=1))
    root = next((folder / name for name in ("Flickr", "images") if (folder / name).is_dir()), folder)
    paths = [root / names[row] for row in shown_N.tolist()]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"{missing[0]}: nuswide21 lists this picture, which is not there, with {len(missing) - 1} more;"
            " unpack the archive again"
        )
    return Concepts(paths, shows_NL[shown_N], tuple(chosen))


def _first_file(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def cub200(folder: Path, expected: Expected) -> Parts:
    """CUB-200-2011 (Wah et al. 2011): classes 1-100, and 101-200.

    ``images.txt`` and ``image_class_labels.txt`` beside ``images/``, or ``images/<class>/*.jpg`` alone.
    """
    root = _root("cub200", folder, ("images",), ("", "CUB_200_2011"))
    if (root / "images.txt").is_file() and (root / "image_class_labels.txt").is_file():
        path_of = dict(_rows(root / "images.txt", 2))
        class_of = dict(_rows(root / "image_class_labels.txt", 2))
        ids = [number for number in path_of if number in class_of]
        paths = [root / "images" / path_of[number] for number in ids]
        whole = _numbered("cub200", paths, [class_of[number] for number in ids])
    else:
        whole = _of_class_folders([root / "images"])
    return _first_classes("cub200", whole, expected)


def cars196(folder: Path, expected: Expected) -> Parts:
    """Cars196 (Krause et al. 2013): classes 1-98, and 99-196, whatever split of the images the files contain.

    ``cars_annos.mat`` beside ``car_ims/``; or ``cars_train/`` and ``cars_test/`` with ``cars_train_annos.mat`` and
    ``cars_test_annos_withlabels.mat`` beside them or in ``devkit/``; or class folders in ``train/`` and ``test/``
    (or ``car_data/``, ``car_data/car_data/``), numbered as ``names.csv`` has them, else in their order.
    """
    for root in _roots(folder, ("", "stanford_cars", "cars196", "cars", "car_data", "car_data/car_data")):
        if (root / "cars_annos.mat").is_file():
            rows = _annotations(root / "cars_annos.mat")
            paths = [root / _text(row["relative_im_path"]) for row in rows]
            return _first_classes("cars196", _numbered("cars196", paths, _classes(rows)), expected)
        marked = _found(root, "cars_train_annos.mat", "cars_test_annos_withlabels.mat")
        if marked:
            rows_of = [_annotations(path) for path in marked]
            sides = [_either(root, side) for side in ("cars_train", "cars_test")]
            paths = [
                side / _text(row["fname"]) for side, rows in zip(sides, rows_of, strict=True) for row in rows
            ]
            classes = [label for rows in rows_of for label in _classes(rows)]
            return _first_classes("cars196", _numbered("cars196", paths, classes), expected)
        if (root / "train").is_dir() and (root / "test").is_dir():
            whole = _of_class_folders([root / "train", root / "test"])
            ordered = _in_order(whole, _names_file(root, folder))
            return _first_classes("cars196", ordered, expected)
    raise _unknown(
        "cars196", folder, "cars_annos.mat, cars_test_annos_withlabels.mat (or devkit/), or train/ and test/"
    )


def sop(folder: Path, expected: Expected) -> Parts:
    """Stanford Online Products (Song et al. 2016): ``Ebay_train.txt``, and ``Ebay_test.txt``."""
    root = _root("sop", folder, ("Ebay_train.txt", "Ebay_test.txt"), ("", "Stanford_Online_Products"))
    parts = {}
    for part, name in (("development", "Ebay_train.txt"), ("test", "Ebay_test.txt")):
        rows = list(_rows(root / name, 4, skip=1))
        parts[part] = _numbered("sop", [root / path for *_, path in rows], [row[1] for row in rows])
    return checked("sop", Parts(parts["development"], parts["test"]), expected)


def inshop(folder: Path, expected: Expected) -> Parts:
    """In-Shop Clothes Retrieval (Liu et al. 2016, DeepFashion): items to train on, queries and gallery of others.

    ``list_eval_partition.txt`` (or in ``Eval/`` or ``Anno/``) beside ``Img/img/`` or ``img/``.
    """
    for root in _roots(folder, ("", "In-shop Clothes Retrieval Benchmark", "inshop", "deepfashion")):
        lists = [root / place / "list_eval_partition.txt" for place in ("", "Eval", "Anno")]
        partition = next((path for path in lists if path.is_file()), None)
        if partition is None:
            continue
        pictures = root / "Img" if (root / "Img").is_dir() else root
        of: dict[str, list[tuple[Path, str]]] = {"train": [], "query": [], "gallery": []}
        for path, item, status in _rows(partition, 3, skip=2):
            if status not in of:
                raise ValueError(f"{partition}: status {status!r} of {path}; known are train, query, gallery")
            of[status].append((pictures / path, item))
        train, query, gallery = (
            by_name(Files([path for path, _ in rows]), [item for _, item in rows]) for rows in of.values()
        )
        _check_files("inshop", [train, query, gallery])
        test = joined(query, gallery)
        is_query_N = np.arange(len(test.labels_N)) < len(query.labels_N)
        found = Parts(train, test, np.flatnonzero(is_query_N), np.flatnonzero(~is_query_N))
        return checked("inshop", found, expected)
    raise _unknown(
        "inshop",
        folder,
        "list_eval_partition.txt (or Eval/list_eval_partition.txt), which says what is query and what gallery,",
    )


def inaturalist2018(folder: Path, expected: Expected) -> Parts:
    """iNaturalist 2018, cut by species as in Brown et al. 2020: the lists ``Inaturalist_{train,test}_set1.txt``.

    They stand beside the pictures' ``train_val2018/`` or in ``Inat_dataset_splits/``; a picture's species are
    the two folders it lies in.
    """
    names = ("Inaturalist_train_set1.txt", "Inaturalist_test_set1.txt")
    for root in _roots(folder, ("", "Inaturalist", "inaturalist", "iNaturalist")):
        lists = _found(root, *names)
        if lists is None:
            continue
        sides = []
        for path in lists:
            entries = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            species = ["/".join(Path(entry).parts[-3:-1]) for entry in entries]
            sides.append(by_name(Files([root / entry for entry in entries]), species))
        _check_files("inaturalist2018", sides)
        return checked("inaturalist2018", Parts(sides[0], sides[1]), expected)
    raise _unknown("inaturalist2018", folder, " and ".join(names))


def omniglot(folder: Path, expected: Expected) -> Parts:
    """Omniglot (Lake et al. 2015): characters of the background alphabets, and of those for evaluation.

    ``images_background/`` and ``images_evaluation/`` (or in ``omniglot-py/``, where torchvision unpacks them), each
    ``<alphabet>/<character>/*.png``.
    """
    root = _root("omniglot", folder, ("images_background", "images_evaluation"), ("", "omniglot-py"))
    sides = []
    for name in ("images_background", "images_evaluation"):
        files = sorted((root / name).glob("*/*/*.png"))
        sides.append(by_name(Files(files), [f"{p.parent.parent.name}/{p.parent.name}" for p in files]))
    return checked("omniglot", Parts(sides[0], sides[1]), expected)


def _roots(folder: Path, places: Sequence[str]) -> list[Path]:
    return [folder / place for place in places if (folder / place).is_dir()]


def _root(name: str, folder: Path, marks: Sequence[str], places: Sequence[str]) -> Path:
    for root in _roots(folder, places):
        if all((root / mark).exists() for mark in marks):
            return root
    raise _unknown(name, folder, " and ".join(marks))


def _unknown(name: str, folder: Path, marks: str) -> ValueError:
    return ValueError(
        f"data.path: {folder} has no layout of {name} that is known; it needs {marks}, here or in the archive's folder"
    )


def _found(root: Path, *names: str) -> list[Path] | None:
    """The files of these names beside each other or in the folders such lists are kept in; None unless all are."""
    places = ("", "devkit", "Inat_dataset_splits", "car_devkit/devkit")
    found = [
        next((root / place / name for place in places if (root / place / name).is_file()), None)
        for name in names
    ]
    return None if None in found else [path for path in found if path is not None]


def _either(root: Path, side: str) -> Path:
    """``cars_train``, or ``cars_train/cars_train`` as archives of archives have it."""
    return root / side / side if (root / side / side).is_dir() else root / side


def _rows(path: Path, num_columns: int, skip: int = 0) -> Iterable[list[str]]:
    """Lines of words, of which the last may hold spaces; raises ValueError naming a line with fewer."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if number < skip or not line.strip():
            continue
        words = line.split(maxsplit=num_columns - 1)
        if len(words) != num_columns:
            raise ValueError(f"{path}, line {number + 1}: {len(words)} words, expected {num_columns}")
        yield [word.strip() for word in words]


def _annotations(path: Path) -> list[Any]:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        return list(loadmat(path, squeeze_me=True)["annotations"].reshape(-1))
    except (MatReadError, OSError, ValueError, KeyError, NotImplementedError, TypeError) as error:
        raise ValueError(f"{path}: not a MATLAB file with annotations ({error})") from None


def _text(value: Any) -> str:
    return str(np.asarray(value).reshape(-1)[0])


def _classes(rows: Iterable[Any]) -> list[str]:
    return [str(int(np.asarray(row["class"]).reshape(-1)[0])) for row in rows]


def _names_file(root: Path, folder: Path) -> list[str]:
    path = next((p for p in (root / "names.csv", folder / "names.csv") if p.is_file()), None)
    if path is None:
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [row[0].replace("/", "-") for row in csv.reader(file) if row]


def _numbered(name: str, paths: Sequence[Path], numbers: Sequence[str]) -> Listing:
    """Pictures whose classes are numbered, in the order of the numbers; classes are called by them."""
    present = sorted({int(number) for number in numbers})
    position = {number: place for place, number in enumerate(present)}
    labels = [position[int(number)] for number in numbers]
    whole = listing(Files(paths), labels, [str(number) for number in present])
    _check_files(name, [whole])
    return whole


def _of_class_folders(roots: Sequence[Path]) -> Listing:
    """Pictures of the folders' sub-folders, classes in the order of the sub-folders' names."""
    files = [
        path
        for root in roots
        for path in sorted(root.glob("*/*"))
        if path.suffix.lower() in (".jpg", ".jpeg", ".png") and not path.name.startswith(".")
    ]
    names = sorted({path.parent.name for path in files})
    position = {name: number for number, name in enumerate(names)}
    return listing(Files(files), [position[path.parent.name] for path in files], names)


def _in_order(whole: Listing, names: Sequence[str]) -> Listing:
    """Classes in the order of ``names``, if these are all of them."""
    if set(names) != set(whole.class_names):
        return whole
    position = {name: number for number, name in enumerate(names)}
    renumbered_C = np.array([position[name] for name in whole.class_names], dtype=np.int64)
    return listing(whole.pictures, renumbered_C[whole.labels_N], tuple(names))


def _first_classes(name: str, whole: Listing, expected: Expected) -> Parts:
    """As many classes as are expected are for development, the rest for testing."""
    is_first_N = whole.labels_N < expected["development"].classes
    return checked(name, Parts(whole.part(is_first_N), whole.part(~is_first_N)), expected)


def _check_files(name: str, listings: Sequence[Listing]) -> None:
    for each in listings:
        assert isinstance(each.pictures, Files)
        missing = [path for path in each.pictures.paths if not path.is_file()]
        if missing:
            raise ValueError(
                f"{missing[0]}: {name} lists this picture, which is not there, with {len(missing) - 1} more;"
                " unpack the archive again"
            )


def checked(name: str, parts: Parts, expected: Expected) -> Parts:
    """The parts, if they have as many classes and images as they should; else ValueError, which names both counts."""
    found = {"development": count(parts.development.labels_N)}
    if parts.test_query is None or parts.test_gallery is None:
        found["test"] = count(parts.test.labels_N)
    else:
        found["query"] = count(parts.test.labels_N[parts.test_query])
        found["gallery"] = count(parts.test.labels_N[parts.test_gallery])
    check_counts(name, found, expected)
    return parts


def check_counts(name: str, found: Expected, expected: Expected) -> None:
    """Raise ValueError where a part has another number of classes or images than it should."""
    assert found.keys() == expected.keys()
    for part, counts in expected.items():
        if found[part] != counts:
            what = CONCEPTS if part == CONCEPTS else f"{part} classes"
            raise ValueError(
                f"data.path: {name} has {counts.classes} {what} with {counts.images} images, this folder"
                f" {found[part].classes} with {found[part].images}; unpack the archive again"
            )


def count(labels_N: Any) -> PartSize:
    """The classes that occur, and the images."""
    return PartSize(len(np.unique(labels_N)), len(labels_N))
