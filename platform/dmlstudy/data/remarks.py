"""Remarks on the data before a study begins: omissions and likely faults.

Shapes: N images, C classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dmlstudy.data.folds import Fold
from dmlstudy.data.images import Labels, ZeroShotData
from dmlstudy.data.picture_files import files_below, is_picture, left_out, sub_folders
from dmlstudy.data.seen_classes import ClosedSet
from dmlstudy.text import one_line


def remarks(dataset: ZeroShotData | ClosedSet, path: str | None) -> list[str]:
    """Lines on a data set as it was loaded from ``path``; none where nothing is odd."""
    return [one_line(line) for line in _remarks(dataset, path)]


def _remarks(dataset: ZeroShotData | ClosedSet, path: str | None) -> list[str]:
    lines = left_out_of_classes(Path(path)) if dataset.name == "image_folder" and path is not None else []
    if isinstance(dataset, ClosedSet):
        return lines + ([] if dataset.concepts else _under_two_labels(dataset))
    for side, images in (("development", dataset.development), ("test", dataset.test)):
        size_C = np.bincount(images.labels_N)
        num_single, num_classes = int((size_C == 1).sum()), int((size_C > 0).sum())
        if num_single:
            lines.append(
                f"{side}: {num_single} of {num_classes} classes have one image: never a hit, never a positive pair"
            )
    lines += [*dataset.left_out, *_on_cameras(dataset), *_twice_in_a_class(dataset)]
    return lines + _under_two_labels(dataset)


def _on_cameras(dataset: ZeroShotData) -> list[str]:
    lines = []
    for side, camera_N in (("development", dataset.development_camera_N), ("test", dataset.test_camera_N)):
        if camera_N is not None and (num := int((camera_N < 0).sum())):
            lines.append(
                f"{side}: {num} of {len(camera_N)} images without a camera, which are left out of no ranking"
            )
    return lines


def _twice_in_a_class(dataset: ZeroShotData) -> list[str]:
    """Lines on pictures whose nearest item is their own copy, whatever the model."""
    lines = []
    for side, images in (("development", dataset.development), ("test", dataset.test)):
        found = Counter(zip(images.content_hashes(), images.labels_N.tolist(), strict=True))
        if num := sum(number for number in found.values() if number > 1):
            lines.append(
                f"{side}: {num} of {len(images)} images have an identical copy in their own class, which any model"
                " finds: scores are too high; keep one of each"
            )
    return lines


def _under_two_labels(dataset: ZeroShotData | ClosedSet) -> list[str]:
    development, test, place = dataset.development, dataset.test, dataset.places
    contents = development.content_hashes() + test.content_hashes()
    labels = [side.class_names[label] for side in (development, test) for label in side.labels_N.tolist()]
    numbers_of: dict[bytes, list[int]] = {}
    for number, content in enumerate(contents):
        numbers_of.setdefault(content, []).append(number)
    twice = [numbers for numbers in numbers_of.values() if len({labels[number] for number in numbers}) > 1]
    if not twice:
        return []
    first, *others = twice[0]
    second = next(number for number in others if labels[number] != labels[first])
    called = [labels[number] if place is None else place(number) for number in (first, second)]
    num_images = sum(map(len, twice))
    return [f"the same picture under two labels: {num_images} images, as {called[0]} and {called[1]}"]


def left_out_of_classes(folder: Path) -> list[str]:
    """Lines on what lies in a folder of class folders, or of ``train`` and ``test`` with these, and is not taken."""
    sides = [folder / "train", folder / "test"]
    others: list[Path] = []
    if all(side.is_dir() for side in sides):
        others = [each for each in sub_folders(folder) if each not in sides]
    else:
        sides = [folder]
    lines = []
    if kinds := left_out(path for side in sides for each in sub_folders(side) for path in files_below(each)):
        lines.append(f"left out: {kinds}")
    beside = {path for place in (folder, *sides) for path in place.iterdir() if path.name[0] != "."}
    if loose := sorted(path for path in beside if path.is_file() and is_picture(path)):
        lines.append(f"left out: {len(loose)} pictures beside the class folders, as {loose[0]}")
    if others:
        lines.append(f"left out: what is in {', '.join(each.name for each in others)} beside train and test")
    return lines


def check_hits(dataset: ZeroShotData, folds: Sequence[Fold]) -> None:
    """Raise ValueError where no query of a side that is judged could have a hit: each of its classes has one image.

    Queries and gallery that are given were compared when they were loaded.
    """
    sides: dict[str, Labels] = {} if dataset.test_query is not None else {"test": dataset.test.labels_N}
    for number, fold in enumerate(folds, 1):
        sides[f"fold {number}'s validation"] = dataset.development.labels_N[fold.validation_indices]
    for side, labels_N in sides.items():
        if len(labels_N) and np.bincount(labels_N).max() == 1:
            raise ValueError(
                f"data: each of the {len(labels_N)} {side} classes of {dataset.name} has one image, so no query can"
                " have a hit; give classes two images or more"
            )
