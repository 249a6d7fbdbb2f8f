"""Kernels, in Triton's interpreter, beside the losses' own rows in float64; and who may ask for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels_beside_rows import SETTINGS

from dmlstudy import losses
from dmlstudy.losses import catalogue
from dmlstudy.losses.forms import KernelResult
from dmlstudy.losses.interface import Embeddings
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


def test_a_batch_without_positives_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def swept(*args: Any, wanted: bool) -> KernelResult:
        z_BD = args[2].features_NF
        return KernelResult(z_BD.sum(), z_BD.new_ones(()), (z_BD, z_BD))

    asked_for = SimpleNamespace(sweep=swept)
    monkeypatch.setitem(sys.modules, "dmlstudy.losses.kernels", asked_for)
    monkeypatch.setattr("dmlstudy.losses.kernels", asked_for, raising=False)
    loss = losses.build("circle", backend="triton").loss
    assert isinstance(loss, RowLoss)
    form = loss.form()
    assert form is not None
    paired = Embeddings(torch.eye(4), torch.tensor([0, 0, 1, 1]), torch.arange(4))
    alone = paired._replace(y_N=torch.arange(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.by_kernels(form, paired, paired)
    with pytest.warns(UserWarning, match="no positive pair"):
        loss.by_kernels(form, alone, alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.by_kernels(form, alone, alone)


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
