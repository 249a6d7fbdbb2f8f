"""The pictures among a folder's files, and the files that are left out, by their kinds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from dmlstudy.data.decoding import missing_format, suffixes
from dmlstudy.text import one_line

MOST_KINDS = 8
"""The most kinds of files that are distinguished."""


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and below; none whose name, or whose folder's, begins with a dot."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(folder / entry.name)
        elif entry.is_file():
            yield folder / entry.name


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in suffixes()


def image_files(folder: Path) -> list[Path]:
    """The files of a folder and below whose names are those of pictures, sorted; hidden ones are left out.

    Raises ValueError naming one whose name is no text, for an id or a class could not be written.
    """
    found = sorted(filter(is_picture, files_below(folder)))
    for path in found:
        if not str(path).isascii():
            _check_name(path, path.relative_to(folder.parent) if folder.name else path)
    return found


def _check_name(path: Path, name: Path) -> None:
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{one_line(path)}: its name is not UTF-8; rename the file or its folder") from None


def sub_folders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted; hidden ones are left out."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def left_out(files: Iterable[Path]) -> str:
    """Counts of files that are not read, by kind, as ``5 .heic (how to read them), 2 .txt``; empty if all are read."""
    counts = Counter(path.suffix.lower() for path in files if not is_picture(path))
    kinds = sorted(counts, key=lambda suffix: (not missing_format(suffix), -counts[suffix], suffix))
    told = [f"{counts[kind]} {kind or 'without a suffix'}{_mend(kind)}" for kind in kinds[:MOST_KINDS]]
    if num_others := sum(counts[kind] for kind in kinds[MOST_KINDS:]):
        told.append(f"{num_others} of other kinds")
    return ", ".join(told)


def _mend(suffix: str) -> str:
    mend = missing_format(suffix)
    return f" ({mend})" if mend else ""


def nothing_read(folder: Path) -> str:
    """The message for a folder without any picture that is read."""
    if kinds := left_out(files_below(folder)):
        return f"no images in this folder that are read, only {kinds}; convert them"
    return "no images in this folder; put some into it"
