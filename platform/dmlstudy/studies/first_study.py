"""A study file for a folder of pictures: ``dmlstudy init`` looks at its classes and writes numbers that suit them."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dmlstudy import data
from dmlstudy.data import datasets
from dmlstudy.data.pictures import Listing
from dmlstudy.files import written_whole
from dmlstudy.spec import yaml_file
from dmlstudy.spec.study_file import SpecError, parse
from dmlstudy.studies.wall_time import Machine
from dmlstudy.text import nearest, shown
from dmlstudy.training.tasks.class_checks import check_class_counts


class Amounts(NamedTuple):
    """Numbers of trials, epochs and seeds that a budget stands for."""

    trials: int
    epochs: int
    max_folds: int
    seeds: int


BUDGETS: dict[str, Amounts] = {
    "quick": Amounts(2, 3, 2, 2),
    "standard": Amounts(8, 10, 4, 3),
    "thorough": Amounts(19, 30, 4, 5),
}

BATCH = 80
"""Pictures of a batch, about."""

MOST_CLASSES, MOST_IMAGES = 16, 20
"""Classes of a batch, and pictures of each, at most."""

SMALLEST, LARGEST = 28, 64
"""Sides that small_conv is made for."""

MOST_PIXELS = 178_956_970
"""Pixels of a picture that is inspected: twice what Pillow opens without suspecting a bomb."""

PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
"""Text that YAML reads unchanged."""


class Folder(NamedTuple):
    """A folder's pictures: counts for each class to learn from and for each that is kept for the test."""

    own_C: list[int]
    test_C: list[int]
    side: int

    @property
    def words(self) -> str:
        num = sum(self.own_C) + sum(self.test_C)
        return (
            f"{num} pictures of {len(self.own_C) + len(self.test_C)} classes: {len(self.own_C)} to learn from,"
            f" {len(self.test_C)} kept for the test"
        )


class FirstStudy(NamedTuple):
    """A study file's text, and what it is of."""

    name: str
    text: str
    folder: Folder


def write(
    folder: Path, output: Path, *, name: str | None, image_size: int | None, budget: str, machine: Machine
) -> FirstStudy:
    """Write a study of the pictures in ``folder`` to ``output``, which must not be there yet; whole or not at all.

    Raises SpecError for a folder no study can be made of, with the reason, and for an existing file.
    """
    if budget not in BUDGETS:
        raise SpecError(f"--budget: no {shown(budget)}{nearest(budget, BUDGETS, listed=True)}")
    if os.path.lexists(output):  # first, for to look at a large folder takes a while
        raise SpecError(f"{output}: is there already; name another file with -o, or remove it")
    found = look(folder)
    study = name or _name_of(folder)
    text = text_of(study, _path(folder, output), found, image_size or _side(found), BUDGETS[budget], machine)
    try:
        parse(yaml_file.mapping(text, str(output)))  # a name of the user's may be none
    except ValueError as error:
        raise SpecError(error) from None
    try:
        if not output.parent.is_dir():  # a folder that is made would hide a slip in its name
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with written_whole(output) as file:
            file.write(text.encode())
    except OSError as error:
        raise SpecError(f"{output}: cannot be written: {error.strerror}; name another file with -o") from None
    return FirstStudy(study, text, found)


def look(folder: Path) -> Folder:
    """Count the pictures of each class and look at one; raises SpecError where no study can be made of them."""
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder; name one with a sub-folder of pictures for each class")
    try:
        parts = datasets.image_folder(folder, None)
        own_C, test_C = (np.bincount(side.labels_N).tolist() for side in parts[:2])
        check_class_counts(len(own_C), len(test_C), 1)
        side = _side_of_first(parts.development)
    except (ValueError, OSError) as error:
        raise SpecError(str(error).removeprefix("data.path: ")) from None
    for which, counts in (("to learn from", own_C), ("kept for the test", test_C)):
        if max(counts) < 2:
            raise SpecError(
                f"{folder}: each of the {len(counts)} classes {which} has one picture, so that nothing is alike; add"
                " pictures, at least two of a class"
            )
    return Folder(own_C, test_C, side)


def _side_of_first(pictures: Listing) -> int:
    """The shorter side of one picture, which is decoded as a study would."""
    row = int(pictures.row_N[0])
    try:
        (image_HWC,) = data.decode_images([pictures.pictures.encoded(row)], data.Fit(), 3, MOST_PIXELS)
    except ValueError as error:
        raise ValueError(f"{pictures.pictures.place(row)}: {error}") from None
    return int(min(image_HWC.shape[:2]))


def text_of(name: str, path: str, found: Folder, image_size: int, amounts: Amounts, machine: Machine) -> str:
    """The study file, with a comment on each choice that depends on the data."""
    num_classes = len(found.own_C)
    folds = _num_folds(num_classes, amounts.max_folds)
    trained_on = num_classes - -(-num_classes // folds) if folds > 1 else num_classes - num_classes // 2
    classes = min(trained_on, MOST_CLASSES)
    usual = int(np.median(found.own_C))
    images = max(2, min(usual, MOST_IMAGES, BATCH // classes))
    has_gpu = machine.gpus >= 1
    single = sum(count == 1 for count in (*found.own_C, *found.test_C))
    alone = [f"# {single} classes have one picture, which never has a hit"] * bool(single)
    lines = [
        f"# {found.words}.",
        *alone,
        "# `dmlstudy validate` tells the time it takes, `dmlstudy run` runs it, `dmlstudy options` lists all keys.",
        f"name: {_scalar(name)}",
        f"data: {{name: image_folder, path: {_scalar(path)}, image_size: {image_size}}}",
        "",
        "# A small network from scratch: nothing is downloaded. Better on photographs, at home on a GPU:",
        "# embedder: {backbone: resnet18, weights: default, dim: 128}    # and data.image_size: 224",
        "embedder: {backbone: small_conv, width: 32, dim: 64}",
        f"# A fold trains on {trained_on} classes, the usual one of which has {usual} picture{'s' * (usual > 1)}",
        f"batch: {{classes: {classes}, images_per_class: {images}}}",
        f"training: {{epochs: {amounts.epochs}, head_lr_mult: 1, lr: {{float: [1.0e-5, 1.0e-2], log: true,"
        " default: 3.0e-4}}",
        "augmentation: {flip: 0.5}    # mirrored views; 0 where left and right matter",
        "",
        "families:                    # `dmlstudy families` lists all",
        "  multi-similarity: {space: multi_similarity}",
        "  proxy-anchor: {space: proxy_anchor}",
        "  contrastive: {space: contrastive}",
        "",
        f"search: {{trials_per_family: {amounts.trials}, seed: 0}}",
        f"protocol: {{num_folds: {folds}, verdict_seeds: {amounts.seeds}, objective: map_at_r}}",
        f"resources: {{workers: 1, cpus_per_worker: 1{', gpus_per_worker: 1' * has_gpu}}}",
    ]
    return "\n".join(lines) + "\n"


def _num_folds(num_classes: int, most: int) -> int:
    """Folds that hold at least 3 classes out each where there are enough, and 2 in any case."""
    return max(2, min(most, num_classes // 3))


def _side(found: Folder) -> int:
    """The pictures' own size where small_conv is made for it."""
    return min(LARGEST, max(SMALLEST, found.side))


def _name_of(folder: Path) -> str:
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name).strip("-._")
    return words[:64] or "pictures"


def _path(folder: Path, output: Path) -> str:
    """Relative to the study file where the pictures lie beside or below it, else absolute."""
    whole, base = folder.resolve(), output.absolute().parent.resolve()
    return os.path.relpath(whole, base) if whole.is_relative_to(base) else str(whole)


def _scalar(text: str) -> str:
    """Text as YAML reads it again: plain where it does not read as a number or anything else."""
    is_plain = PLAIN.fullmatch(text) and yaml_file.value(text, "") == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)
