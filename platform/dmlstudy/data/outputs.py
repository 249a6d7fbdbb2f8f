"""Where a result may go: a new file, or the one an earlier call of the same kind has written."""

from __future__ import annotations

import os
from pathlib import Path

PARQUET, HTML, ZIP = b"PAR1", b"<!doctype html", b"PK\x03\x04"
"""How files of results begin."""


def check_output(path: str | Path, what: str, begins: bytes) -> Path:
    """The path, if a file of results may be written to it: nothing is there, or a file that ``begins`` so.

    ``what`` is what such a file is called. Raises ValueError for a folder that is missing or cannot be written, for a
    folder in the file's place, and for any other file: it is kept.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder; make it or name another output")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent}: cannot be written; change its permissions or name another output")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(begins)).lower() != begins.lower():
                raise ValueError(f"{path}: exists already and is not {what}; name another output")
    return path
