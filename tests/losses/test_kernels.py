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
import triton
from support.kernels_beside_rows import SETTINGS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dmlstudy import losses
from dmlstudy.losses import catalogue, kernels
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.tiles import RowLoss

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "kernels_beside_rows.py"
LIMITS = {"float32": 3e-6, "tf32": 3e-6, "bf16x3": 3e-5, "bf16": 1e-2}
"""The largest relative error, by precision; a coarse one may round a slope the other way."""
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
        precision = str(SETTINGS[label][1].get("precision", "float32"))
        assert max(errors) < LIMITS[precision], label


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_gpu_has_kernels_where_there_are_any(name: str) -> None:
    assert catalogue.parameters_of(name)["backend"] == "auto"
    for params, devices in (({}, ("cuda",)), ({"backend": "triton"}, ("cuda",)), ({"backend": "tiles"}, ())):
        loss = losses.build(name, **params).loss
        assert isinstance(loss, RowLoss)
        assert loss.kernel_devices == devices


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "triplet",
            {"backend": "triton"},
            r"loss 'triplet' has no kernels; leave backend out, or choose from .*circle",
        ),
        ("circle", {"backend": "cuda"}, r"backend='cuda' is unknown"),
    ],
)
def test_what_does_not_fit_is_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        losses.build(name, **params)


def test_a_batch_without_positives_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def swept(form: Any, distance: Any, product_TM: Any, *_: Any) -> tuple[Any, Any]:
        return product_TM.sum(), product_TM.new_ones(())

    asked_for = SimpleNamespace(sweep=swept)
    monkeypatch.setitem(sys.modules, "dmlstudy.losses.kernels", asked_for)
    monkeypatch.setattr("dmlstudy.losses.kernels", asked_for, raising=False)
    loss = losses.build("circle").loss
    assert isinstance(loss, RowLoss)
    loss.kernel_devices = ("cpu",)
    paired = Embeddings(torch.eye(4), torch.tensor([0, 0, 1, 1]), torch.arange(4))
    alone = paired._replace(y_N=torch.arange(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(paired, paired)
    with pytest.warns(UserWarning, match="no positive pair"):
        loss(alone, alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(alone, alone)


def test_kernels_that_do_not_run_are_told_of_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "sweep", fails)
    batch = Embeddings(torch.eye(6).roll(1, 0) + 0.3, torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6))
    plain = losses.build("circle", backend="tiles").loss(batch)
    loss = losses.build("circle").loss
    assert isinstance(loss, RowLoss)
    loss.kernel_devices = ("cpu",)
    with pytest.warns(
        UserWarning, match=r"Circle runs without its kernels, more slowly: RuntimeError: Failed to"
    ):
        found = loss(batch)
    assert torch.equal(found.total, plain.total)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(batch)
    asked = losses.build("circle", backend="triton").loss
    assert isinstance(asked, RowLoss)
    asked.kernel_devices = ("cpu",)
    with pytest.raises(RuntimeError, match="C compiler"):
        asked(batch)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("num_parts", "part"), [(1, "*fp32"), (1, "*bf16"), (2, "*bf16")])
def test_kernels_compile_for_gpus(capability: int, num_parts: int, part: str) -> None:
    """No GPU is needed to compile for one."""
    rates = dict.fromkeys(RATES, "fp32")
    how = {"DISTANCE": 1, "CURVE": 0, "PACED": True, "BLOCK": kernels.BLOCK}
    found = dict.fromkeys(("pull", "push", "num_pulls", "num_pushes", "line"), "*fp32")
    _compiled(
        kernels._sums,
        BANDS | found | {"num_columns": "i32", "epsilon": "fp32"} | rates,
        how | {"RULE": True, "BAND_BLOCK": kernels.BAND_BLOCK},
        capability,
    )
    by_row = dict.fromkeys(("pull", "push", "by_pull", "by_push", "by_line"), "*fp32")
    parts = {"high": part, "low": part, "num_columns": "i32", "num_blocks": "i32"}
    _compiled(kernels._slopes, BANDS | by_row | parts | rates, how | {"IN_TWO": num_parts == 2}, capability)


BANDS = {
    "product": "*fp32",
    **dict.fromkeys(("first_column", "stop_column", "id_left", "id_right"), "*i64"),
    **dict.fromkeys(("least", "most"), "*fp32"),
}
RATES = ("pull_rate", "pull_center", "pull_shift", "push_rate", "push_center", "push_shift")


def _compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int) -> None:
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), places)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": kernels.WARPS})
    assert made.metadata.shared < 48 * 2**10


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
