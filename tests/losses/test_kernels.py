"""Kernels, in Triton's interpreter, beside the losses' own rows in float64; and who may ask for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.kernels_beside_rows import SETTINGS

from dmlstudy import losses
from dmlstudy.losses import catalogue
from dmlstudy.losses.tiles import RowLoss

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "kernels_beside_rows.py"
WITH_KERNELS = [name for name in catalogue.CATALOGUE if "backend" in catalogue.parameters_of(name)]


@pytest.mark.timeout(600)
def test_kernels_find_what_rows_are_in_float64() -> None:
    """Anchors are some of the references, images are in them twice, and rows behind the live ones have no gradient."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    assert found.keys() == SETTINGS.keys()
    assert {name for name, _ in SETTINGS.values()} == set(WITH_KERNELS)
    for label, errors in found.items():
        assert max(errors) < 3e-6, label


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernels_are_asked_for_by_a_parameter(name: str) -> None:
    assert catalogue.parameters_of(name)["backend"] == "tiles"
    for backend in ("tiles", "triton"):
        loss = losses.build(name, backend=backend).loss
        assert isinstance(loss, RowLoss)
        assert loss.in_kernels == (backend == "triton")


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "triplet",
            {"backend": "triton"},
            r"loss 'triplet' has no kernels; leave backend out, or choose from .*circle",
        ),
        ("circle", {"backend": "cuda"}, r"backend='cuda' is unknown"),
        ("circle", {"backend": "triton", "precision": "bf16"}, r"backend='triton' computes in float32"),
    ],
)
def test_what_does_not_fit_is_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        losses.build(name, **params)


def test_without_triton_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    losses.build("circle")
    with pytest.raises(ValueError, match=r"backend='triton' needs Triton; pip install triton"):
        losses.build("circle", backend="triton")


@pytest.mark.parametrize("params", [{"learn": True}, {"denominator": "negatives"}, {"distance": "euclidean"}])
def test_a_supcon_that_kernels_cannot_compute_has_no_form(params: dict[str, Any]) -> None:
    loss = losses.build("supcon", **params).loss
    assert isinstance(loss, RowLoss)
    assert loss.form() is None
