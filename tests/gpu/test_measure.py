"""The measurements of a GPU run on a CPU too, at tiny sizes and with stand-ins for all that a bare machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MEASURE = Path(__file__).with_name("measure.py")
SECTIONS = ("machine", "exact", "ranks", "training", "large", "evaluation", "steps")


def measured(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MEASURE), "--cpu", "--stand-ins", "--out", str(folder), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_every_section_runs_to_its_end(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "!!" not in found.stdout, found.stdout
    rows = json.loads((tmp_path / "gpu.json").read_text())
    whole = [row["section"] for row in rows if row["what"] == "whole section"]
    assert whole == list(SECTIONS)
    for row in rows:
        assert row["what"] in found.stdout or row["what"][:58] in found.stdout
    (law,) = (row for row in rows if "law of the training step" in row["what"])
    assert law["value"] < 1e-9


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    found = measured(tmp_path, "--only", "machine,larger")
    assert found.returncode == 2
    assert "no section larger" in found.stderr
