"""The study that is meant for a GPU runs on a CPU too, with its kills, and finds nothing wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).with_name("study.py")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_study_with_a_killed_worker_and_a_killed_driver_ends_as_a_whole_one(tmp_path: Path) -> None:
    command = [sys.executable, str(STUDY), "--cpu", "--keep", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 worker killed" in found.stdout
    assert "1 driver killed" in found.stdout
    same = re.findall(r"leaderboards of 'one' and '(\w+)' differ by +0 *$", found.stdout, re.MULTILINE)
    assert sorted(same) == ["again", "resumed"], found.stdout
