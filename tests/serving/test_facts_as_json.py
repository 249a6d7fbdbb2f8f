"""What the commands that write a file say of it as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dmlstudy.cli.app import app


def said(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_what_is_embedded_indexed_and_exported(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    file, gallery, program = tmp_path / "z.parquet", tmp_path / "gallery", tmp_path / "plain.pt2"
    embedded = said("embed", models["plain"], pictures, "-o", file)
    form = {"whole": 6, "bits": 32, "bytes_per_vector": 24}
    assert embedded == {"file": str(file), "num_items": 30, "dim": 6, "left_out": [], **form}
    indexed = said("index", file, "-o", gallery)
    assert indexed == {
        "folder": str(gallery),
        "num_items": 30,
        "dim": 6,
        "kind": "flat",
        "bits": 32,
        "bytes_per_vector": 24,
        "map": None,
    }
    exported = said("export", models["plain"], "--format", "torch_export", "-o", program)
    assert exported["file"] == str(program)
    assert exported["difference"] < 1e-5
    assert exported["input"]["dtype"] == "uint8"
