"""Losses are flat in memory: at N = 16,384 no pair or triplet loss holds a matrix of all pairs (1 GiB)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmlstudy.losses import catalogue
from dmlstudy.losses.proxies import ProxyLoss

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory.py"
LIMIT_MIB = 512


@pytest.mark.timeout(600)
def test_one_rank_s_peak_stays_below_512_mib() -> None:
    """Sixteen ranks share the batch, for time's sake: the tiles are those of one, its gradients 16 MiB less."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "16", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    proxies = {name for name in catalogue.CATALOGUE if issubclass(catalogue.kind_of(name), ProxyLoss)}
    assert found.keys() == {*catalogue.CATALOGUE, *catalogue.REGULARIZERS} - proxies
    for name, ((seconds, mib),) in found.items():
        assert 8 < mib < LIMIT_MIB, f"{name}: {mib:.0f} MiB in {seconds:.1f} s"
