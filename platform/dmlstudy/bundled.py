"""Location of the search-space and job files: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``search_spaces`` or ``jobs`` that came with this package."""
    inside = PACKAGE / "bundled" / name
    return inside if inside.is_dir() else PACKAGE.parents[1] / name
