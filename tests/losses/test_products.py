"""Products in several precisions: how far they are from exact ones, and losses that compute by them."""

from __future__ import annotations

import pytest
import torch
from support.small_batch import balanced
from torch import Tensor
from torch.nn import functional

from dmlstudy import losses
from dmlstudy.losses import catalogue, products
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.products import PRODUCTS
from dmlstudy.losses.regularized import Regularized
from dmlstudy.records import Scalar

ERRORS = {"float32": 2.0**-22, "bf16x3": 2.0**-15, "tf32": 2.0**-10, "bf16": 2.0**-7}
"""Of a product, relative to the factors' norms: twice a factor's."""

REGULARIZERS = [name for name, kind in catalogue.REGULARIZERS.items() if kind.has_precision]
NAMES = [*catalogue.CATALOGUE, *(f"+ {name}" for name in REGULARIZERS)]
"""Losses, and regularisers beside a loss that is silent on its own."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", list(PRODUCTS))
def test_a_factor_of_many_products_gives_the_same(precision: str, dtype: torch.dtype) -> None:
    product = PRODUCTS[precision]
    (a_NK, b_KM), exact = factors(dtype), precision == "float32"
    b_MK = b_KM.T.contiguous()
    rows, others = products.factor(a_NK, product).rows(slice(3, 20)), products.factor(b_MK, product)
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    slope_TM = rows.times(others)
    torch.testing.assert_close(slope_TM, product(a_NK[3:20], b_MK.T), **close)
    parts = others.parts(slope_TM.clone())
    assert [part.shape for part in others.room(slope_TM)] == [part.shape for part in parts]
    together_TM = torch.stack([part.to(dtype) for part in parts]).sum(0)
    assert (together_TM - slope_TM).abs().max() <= 2.0**-7 * slope_TM.abs().max()
    size = {"rtol": 1e-5, "atol": 1e-5 * slope_TM.abs().max().item() * 30}
    torch.testing.assert_close(others.weighted(parts), product(slope_TM, b_MK), **size)
    out_MK = torch.ones_like(b_MK)
    rows.add_weighted(out_MK, parts)
    torch.testing.assert_close(out_MK, 1 + product(slope_TM.T, a_NK[3:20]), **size)


def built(name: str, precision: str) -> Loss:
    if name.startswith("+ "):
        silent: dict[str, Scalar] = {"negative_margin": 0.0, "mining": "batch_hard", "positive_margin": 0.0}
        pairs: dict[str, Scalar] = {"pairs": "all"} if name == "+ gor" else {}  # of others the bound is kept
        regularizer = (name[2:], {"precision": precision, **pairs})
        return catalogue.build("pair_weighting", silent, regularizer=regularizer, num_classes=6, dim=16)
    return catalogue.build(
        name, {"precision": precision}, class_sizes=[8] * 6, num_classes=6, dim=16, num_layers=2
    )


def mean_and_gradient(name: str, precision: str, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z_ND = torch.randn(48, 16, generator=generator) + 2 * torch.eye(6, 16)[LABELS]
    omega_ND = 0.5 + torch.rand(48, 16, generator=generator)
    loss = built(name, precision)
    if not loss.uses_norms:
        z_ND = functional.normalize(z_ND)
    z_ND.requires_grad_()
    batch = Embeddings(z_ND, LABELS, torch.arange(48), omega_ND)
    total, count = loss(batch.with_norms() if loss.uses_norms else batch)
    (factor * total / count).backward()
    assert z_ND.grad is not None
    return (total / count).detach(), z_ND.grad


@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
@coarse
@pytest.mark.parametrize("name", NAMES)
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
    assert catalogue.parameters_of_regularizer("gor")["precision"] == "float32"
    assert "precision" not in catalogue.parameters_of_regularizer("retention")
    with pytest.raises(ValueError, match=r"precision='fp8' is unknown; .*bf16"):
        losses.build("triplet", precision="fp8")
    with pytest.raises(ValueError, match=r"regularizer 'gor': precision='fp8' is unknown"):
        losses.build("triplet", regularizer=("gor", {"precision": "fp8"}))
    with pytest.raises(ValueError, match=r"regularizer .retention. has no products .* leave precision out"):
        losses.build("triplet", regularizer=("retention", {"precision": "bf16"}))


def test_a_loss_and_its_regulariser_have_each_their_own() -> None:
    loss = losses.build("triplet", precision="tf32", regularizer=("koleo", {"precision": "bf16"})).loss
    assert isinstance(loss, Regularized)
    assert loss.base.product is PRODUCTS["tf32"]
    assert loss.regularizer.product is PRODUCTS["bf16"]


@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_three_times_a_loss_is_three_times_its_own(name: str) -> None:
    """Not its rounding: the factor is the number of ranks over the count, and must decide on nothing."""
    _, gradient = mean_and_gradient(name, "bf16")
    _, threefold = mean_and_gradient(name, "bf16", factor=3.0)
    torch.testing.assert_close(threefold, 3 * gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


@coarse
def test_on_a_graph_gradients_are_products_of_the_same_kind(precision: str) -> None:
    a_NK, b_KM = (x.requires_grad_() for x in factors(torch.float32))
    product = PRODUCTS[precision]
    out_NM = products.differentiable(product)(a_NK, b_KM)
    slope_NM = torch.randn(out_NM.shape, generator=torch.Generator().manual_seed(2))
    out_NM.backward(slope_NM)
    assert torch.equal(out_NM, product(a_NK, b_KM))
    assert torch.equal(a_NK.grad, product(slope_NM, b_KM.T))
    assert torch.equal(b_KM.grad, product(a_NK.T, slope_NM))


def test_the_default_is_the_exact_product() -> None:
    batch = balanced()
    plain, named = (losses.build("contrastive", **given) for given in ({}, {"precision": "float32"}))
    own = Embeddings(batch.z_ND.float(), batch.y_N, batch.id_N)
    assert torch.equal(plain(own.z_ND, own.y_N), named(own.z_ND, own.y_N))
