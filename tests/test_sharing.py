"""Tests that two processes share, as tests/run.sh has them do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PASSES = """
import pytest
@pytest.mark.parametrize("number", range(4))
def test_passes(number): pass
"""
RECORDS = "def test_records(record_fault): record_fault('a fault', 2, 3.5)"


def test_a_file_is_one_process_s_and_so_are_the_studies_and_faults_are_told(tmp_path: Path) -> None:
    """Told by the reports: ``[gw0] [ 10%] PASSED tests/...``; those of one process come in its order."""
    tests = tmp_path / "tests"
    for folder in ("data", "end_to_end", "faults", "losses"):
        (tests / folder).mkdir(parents=True)
        for name in ("test_one.py", "test_two.py"):
            (tests / folder / name).write_text(PASSES)
    (tests / "faults" / "test_faults.py").write_text(RECORDS)
    for conftest in ("conftest.py", "faults/conftest.py"):
        shutil.copy(TESTS / conftest, tests / conftest)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", "-v", "--numprocesses=2", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stdout + run.stderr

    files: dict[str, list[str]] = {}
    for process, file in re.findall(r"^\[(gw\d)\] .*PASSED (tests/\S+?)::", run.stdout, re.MULTILINE):
        files.setdefault(process, []).append(file)
    assert sum(map(len, files.values())) == 8 * 4 + 1
    assert len(files) == 2
    first, second = (set(of_one) for of_one in files.values())
    assert not first & second
    with_rays = sorted(str(path.relative_to(tmp_path)) for path in tests.glob("[ef]*/test_*.py"))
    (sequence,) = [of_one for of_one in files.values() if with_rays[0] in of_one]
    assert list(dict.fromkeys(sequence))[: len(with_rays)] == with_rays
    assert "| a fault | 2 | 3.5 |" in run.stdout
