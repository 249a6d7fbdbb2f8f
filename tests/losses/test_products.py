"""Products in several precisions: how far they are from exact ones, and losses that compute by them."""

from __future__ import annotations

import pytest
import torch
from support.small_batch import balanced
from torch import Tensor
from torch.nn import functional

from dmlstudy import losses
from dmlstudy.losses import catalogue, products
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.products import PRODUCTS

ERRORS = {"float32": 2.0**-22, "bf16x3": 2.0**-15, "tf32": 2.0**-10, "bf16": 2.0**-7}
"""Of a product, relative to the factors' norms: twice a factor's."""

ABLE = [name for name in catalogue.CATALOGUE if catalogue.kind_of(name).has_precision]
LABELS = torch.arange(48) % 6
coarse = pytest.mark.parametrize("precision", ["bf16x3", "tf32", "bf16"])


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a_NK = torch.randn(40, 96, generator=generator, dtype=torch.float64)
    return a_NK.to(dtype), torch.randn(96, 30, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", list(PRODUCTS))
def test_errors_are_those_of_the_factors(precision: str, dtype: torch.dtype) -> None:
    a_NK, b_KM = factors(dtype)
    got = PRODUCTS[precision](a_NK, b_KM)
    assert got.dtype == dtype
    exact = a_NK.double() @ b_KM.double()
    error = ((got - exact).abs() / (a_NK.norm(dim=1)[:, None] * b_KM.norm(dim=0)).double()).max().item()
    assert error <= ERRORS[precision]
    if precision != "float32":
        assert error > ERRORS[precision] / 200, "it is finer than it says"


def test_tf32_is_rounded_to_the_nearest() -> None:
    step = 2.0**-10
    x = torch.tensor(
        [1.0, 1 + step, 1 + 0.4 * step, 1 + 0.6 * step, 1 + 0.5 * step, 1 + 1.5 * step, -3.3, 0.0]
    )
    wanted = [1.0, 1 + step, 1.0, 1 + step, 1.0, 1 + 2 * step, -3.30078125, 0.0]
    assert products._rounded_to_tf32(x).tolist() == wanted


@pytest.mark.parametrize("name", ["added", "written"])
@pytest.mark.parametrize("precision", list(PRODUCTS))
def test_products_in_given_memory_are_the_same(precision: str, name: str) -> None:
    a_NK, b_KM = factors(torch.float32)
    out_NM = torch.ones(40, 30)
    of = products.add_product if name == "added" else products.write_product
    of(out_NM, a_NK, b_KM, PRODUCTS[precision])
    wanted = PRODUCTS[precision](a_NK, b_KM) + (1 if name == "added" else 0)
    torch.testing.assert_close(out_NM, wanted, rtol=1e-5, atol=1e-5)


def mean_and_gradient(name: str, precision: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z_ND = torch.randn(48, 16, generator=generator) + 2 * torch.eye(6, 16)[LABELS]
    loss = losses.build(name, num_classes=6, dim=16, precision=precision)
    if not loss.loss.uses_norms:
        z_ND = functional.normalize(z_ND)
    z_ND.requires_grad_()
    value = loss(z_ND, LABELS)
    value.backward()
    assert z_ND.grad is not None
    return value.detach(), z_ND.grad


@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
@coarse
@pytest.mark.parametrize("name", ABLE)
def test_a_loss_is_near_its_exact_value(name: str, precision: str) -> None:
    """Hinges, mined sets and steep sigmoids may turn on a rounding, so gradients are compared as a whole."""
    value, gradient = mean_and_gradient(name, "float32")
    rough, rough_gradient = mean_and_gradient(name, precision)
    assert rough_gradient.isfinite().all()
    assert not torch.equal(gradient, rough_gradient), "the precision is not used"
    assert rough.item() == pytest.approx(
        value.item(), rel=150 * ERRORS[precision], abs=20 * ERRORS[precision]
    )
    if precision != "bf16":
        cosine = functional.cosine_similarity(gradient.flatten(), rough_gradient.flatten(), dim=0)
        assert cosine > 0.98


def test_precision_is_a_parameter_like_others() -> None:
    assert catalogue.parameters_of("triplet")["precision"] == "float32"
    assert "precision" not in catalogue.parameters_of("soft_triple")
    with pytest.raises(ValueError, match=r"precision='fp8' is unknown; .*bf16"):
        losses.build("triplet", precision="fp8")
    with pytest.raises(ValueError, match="loss 'soft_triple' computes in float32 alone; leave precision out"):
        losses.build("soft_triple", num_classes=3, dim=4, precision="bf16")


def test_the_default_is_the_exact_product() -> None:
    batch = balanced()
    plain, named = (losses.build("contrastive", **given) for given in ({}, {"precision": "float32"}))
    own = Embeddings(batch.z_ND.float(), batch.y_N, batch.id_N)
    assert torch.equal(plain(own.z_ND, own.y_N), named(own.z_ND, own.y_N))
