"""The neighbourhood structure loss against the paper's sums, both presets, and what losses/README.md says of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import tiles
from dmlstudy.losses.distances import euclidean
from dmlstudy.losses.interface import ALONE, Embeddings
from dmlstudy.losses.structure import PairBlock, Structure, to_centres

DIM = 4
SETTINGS = [
    {"preset": preset, "eta_source": source, **rest}
    for preset in ("official", "paper")
    for source in ("plain", "adaptive")
    for rest in ({}, {"t": 1.0, "alpha": 3.0}, {"t": 5.0, "alpha": 30.0, "eta_floor": 0.9})
]
each_setting = pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values()))
)


def embeddings(num_rows: int, *, dim: int = DIM, seed: int = 0) -> Embeddings:
    """Unit vectors and weights in (0.5, 1.5), float64, of no particular labels."""
    generator = torch.Generator().manual_seed(seed)
    z_ND, x_ND = torch.randn(2, num_rows, dim, dtype=torch.float64, generator=generator)
    return Embeddings(
        functional.normalize(z_ND).requires_grad_(),
        torch.arange(num_rows) % 3,
        torch.arange(num_rows) + 40,
        (0.5 + x_ND.sigmoid()).requires_grad_(),
    )


def as_printed(
    batch: Embeddings,
    preset: str,
    eta_source: str,
    t: float = 3.0,
    alpha: float = 10.0,
    eta_floor: float = 0.2,
) -> Tensor:
    """NASA Eq. 10-12 with one number at a time."""
    z_ND, omega_ND = batch.z_ND, batch.structure_ND
    assert omega_ND is not None
    places = range(len(z_ND))
    pairs = [(i, j) for i in places for j in places if i != j]

    def plain(i: int, j: int) -> Tensor:
        return ((z_ND[i] - z_ND[j]) ** 2).sum().clamp(min=1e-12).sqrt()

    def adaptive(i: int, j: int) -> Tensor:
        return (omega_ND[i] * (z_ND[i] - z_ND[j]) ** 2).sum().clamp(min=1e-12).sqrt()

    if preset == "official":
        z_ND = z_ND / (sum((plain(i, j) for i, j in pairs[1:]), plain(*pairs[0])) / len(pairs))
    source = plain if eta_source == "plain" else adaptive
    values = [source(i, j).item() for i, j in pairs]
    if preset == "official":
        values += [0.0 for _ in places]
    eta1 = sum(values) / len(values)
    theta = math.sqrt(sum((value - eta1) ** 2 for value in values) / (len(values) - 1))
    eta2 = max(eta_floor * eta1, eta1 - t * theta)
    total = torch.zeros((), dtype=torch.float64)
    for i, j in pairs:
        d = adaptive(i, j)
        to_far, to_near = (d - eta1).abs(), (d - eta2).abs()
        c = torch.exp(-alpha * to_far) / (torch.exp(-alpha * to_far) + torch.exp(-alpha * to_near))
        total = total + c * to_far + (1 - c) * to_near
    return total / len(pairs)


def value_and_gradients(loss: Structure, batch: Embeddings) -> tuple[Tensor, Tensor, Tensor]:
    total, count = loss(batch)
    value = total / count
    z_gradient_ND, omega_gradient_ND = torch.autograd.grad(value, [batch.z_ND, batch.structure_ND])
    return value.detach(), z_gradient_ND, omega_gradient_ND


@each_setting
def test_value_and_gradients_equal_the_formula(setting: dict[str, str]) -> None:
    batch = embeddings(9)
    loss = Structure(**setting)
    value, *gradients = value_and_gradients(loss, batch)
    assert loss(batch).count == 9
    expected = as_printed(batch, **setting)
    assert expected > 1e-2
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)
    for got, wanted in zip(
        gradients, torch.autograd.grad(expected, [batch.z_ND, batch.structure_ND]), strict=True
    ):
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@each_setting
def test_batch_order_labels_ids_and_tiles_change_nothing(
    setting: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, batch = Structure(**setting), embeddings(11)
    whole = value_and_gradients(loss, batch)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    other = value_and_gradients(loss, batch.rows(order))
    torch.testing.assert_close(other[0], whole[0], rtol=1e-12, atol=0)
    for got, wanted in zip(other[1:], whole[1:], strict=True):
        torch.testing.assert_close(got, wanted[order], rtol=1e-10, atol=1e-12)
    relabelled = batch._replace(y_N=torch.zeros_like(batch.y_N), id_N=torch.zeros_like(batch.id_N))
    assert torch.equal(value_and_gradients(loss, relabelled)[0], whole[0])
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 1)
    for got, wanted in zip(value_and_gradients(loss, batch), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("num_rows", [2, 32, 128])
def test_statistics(num_rows: int) -> None:
    z_ND = embeddings(num_rows, dim=128).z_ND.detach()
    pairs = PairBlock(euclidean.left(z_ND), euclidean.right(z_ND), slice(0, num_rows), ALONE)
    d_NN = torch.cdist(z_ND, z_ND, compute_mode="donot_use_mm_for_euclid_dist")
    off_N = d_NN[~torch.eye(num_rows, dtype=torch.bool)]
    for counts_self, entries in ((True, d_NN.flatten()), (False, off_N)):
        mean, std = pairs.statistics(counts_self=counts_self)
        torch.testing.assert_close(mean, entries.mean(), rtol=1e-12, atol=0)
        torch.testing.assert_close(std, entries.std(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("num_rows", "theta", "eta2", "eta2_with_zeros"),
    [(128, 0.0871, 0.739, 0.621), (32, 0.1573, 0.528, 0.270)],
)
def test_zeros_of_the_diagonal_lower_the_near_centre(
    num_rows: int, theta: float, eta2: float, eta2_with_zeros: float
) -> None:
    """The figures of losses/README.md follow from one another, and the statistics of any batch are related likewise."""

    def with_zeros(theta: float) -> tuple[float, float]:
        """Mean and deviation with n zeros more, where they were 1 and theta over n (n-1) pairs."""
        mean, num_pairs = (num_rows - 1) / num_rows, num_rows * (num_rows - 1)
        squares = (num_pairs - 1) * theta**2 + num_pairs * (1 - mean) ** 2 + num_rows * mean**2
        return mean, math.sqrt(squares / (num_rows**2 - 1))

    assert 1 - 3 * theta == pytest.approx(eta2, abs=1e-3)
    mean, std = with_zeros(theta)
    assert mean - 3 * std == pytest.approx(eta2_with_zeros, abs=1e-3)

    z_ND = embeddings(num_rows, dim=64).z_ND.detach()
    pairs = PairBlock(euclidean.left(z_ND), euclidean.right(z_ND), slice(0, num_rows), ALONE)
    off_mean, off_std = pairs.statistics(counts_self=False)
    mean, std = with_zeros(float(off_std / off_mean))
    got_mean, got_std = pairs.statistics(counts_self=True)
    assert got_mean / off_mean == pytest.approx(mean, rel=1e-12)
    assert got_std / off_mean == pytest.approx(std, rel=1e-12)


def test_float32_statistics_are_stable() -> None:
    """A narrow spread on a large mean: a difference of sums in float32 would lose it."""
    z_ND = functional.normalize(torch.randn(300, 4096, generator=torch.Generator().manual_seed(0)))
    parts = euclidean.left(z_ND), euclidean.right(z_ND)
    mean, std = PairBlock(*parts, slice(0, 300), ALONE).statistics(counts_self=False)
    exact_NN = torch.cdist(z_ND.double(), z_ND.double())
    exact = exact_NN[~torch.eye(300, dtype=torch.bool)]
    torch.testing.assert_close(mean, exact.mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(std, exact.std(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("d", "slope"), [(0.7, 1.18), (0.9, -1.18), (0.8, 0.0), (1.0, -0.053)])
def test_the_weight_is_not_detached(d: float, slope: float) -> None:
    """At far = 1 and near = .6: slope 1.18 at .7 (.76 detached), and reversed near a centre."""
    x = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    far, near = torch.tensor([1.0, 0.6], dtype=torch.float64)
    (got,) = torch.autograd.grad(to_centres(x, far, near, 10.0), x)
    assert got.item() == pytest.approx(slope, abs=0.005)


@pytest.mark.parametrize("alpha", [1.0, 1e6])
def test_the_weight_is_that_of_the_far_centre(alpha: float) -> None:
    far, near = torch.tensor([1.0, 0.6], dtype=torch.float64)
    at_far, at_near = to_centres(far, far, near, alpha), to_centres(near, far, near, alpha)
    assert at_far == pytest.approx(0.4 / (1 + math.exp(min(0.4 * alpha, 700))))
    assert at_near == pytest.approx(at_far)


def test_official_is_free_of_scale() -> None:
    batch = embeddings(9)
    larger = batch._replace(z_ND=(7 * batch.z_ND.detach()).requires_grad_())
    value, gradient_ND, _ = value_and_gradients(Structure(), batch)
    other_value, other_gradient_ND, _ = value_and_gradients(Structure(), larger)
    torch.testing.assert_close(other_value, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(7 * other_gradient_ND, gradient_ND, rtol=1e-9, atol=1e-12)
    assert (batch.z_ND * gradient_ND).sum().abs() < 1e-12  # none along a change of scale


def test_equal_weights_leave_plain_distances() -> None:
    batch = embeddings(9)
    ones = batch._replace(structure_ND=torch.ones_like(batch.z_ND).requires_grad_())
    sources = [
        value_and_gradients(Structure("paper", eta_source=source), ones) for source in ("plain", "adaptive")
    ]
    for got, wanted in zip(*sources, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@each_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_collapse_and_duplicates_stay_finite(setting: dict[str, str], dtype: torch.dtype) -> None:
    collapsed = Embeddings(
        functional.normalize(torch.ones(6, DIM, dtype=dtype)).requires_grad_(),
        torch.zeros(6, dtype=torch.int64),
        torch.arange(6),
        torch.full((6, DIM), 0.9, dtype=dtype, requires_grad=True),
    )
    again = [0, 1, 2, 3, 3, 4, 0]
    base = embeddings(5)
    repeated = Embeddings(
        base.z_ND.detach().to(dtype)[again].requires_grad_(),
        base.y_N[again],
        base.id_N[again],
        base.structure_ND.detach().to(dtype)[again].requires_grad_(),
    )
    for batch in (collapsed, repeated):
        for x in value_and_gradients(Structure(**setting), batch):
            assert x.isfinite().all()
    if dtype == torch.float64:
        expected = as_printed(repeated, **setting)
        torch.testing.assert_close(
            value_and_gradients(Structure(**setting), repeated)[0], expected.detach(), rtol=1e-6, atol=1e-6
        )


@each_setting
@pytest.mark.parametrize("num_rows", [0, 1])
def test_one_row_or_none_is_zero_on_the_graph(num_rows: int, setting: dict[str, str]) -> None:
    batch = embeddings(num_rows)
    total, count = Structure(**setting)(batch)
    assert total == 0
    assert count == num_rows
    total.backward()
    for x in (batch.z_ND, batch.structure_ND):
        assert (x.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@each_setting
def test_autocast_computes_in_full_precision(setting: dict[str, str], dtype: torch.dtype) -> None:
    loss, batch = Structure(**setting), embeddings(9)
    single = Embeddings(
        batch.z_ND.detach().float(), batch.y_N, batch.id_N, batch.structure_ND.detach().float()
    )
    plain = loss(single).total
    with torch.autocast("cpu", dtype=dtype):
        under = loss(single).total
    assert plain.dtype == under.dtype == torch.float32
    assert torch.equal(plain, under)
    torch.testing.assert_close(plain.double(), loss(batch).total.detach(), rtol=1e-4, atol=0)
    half = loss(single._replace(structure_ND=single.structure_ND.to(dtype))).total
    assert half.isfinite()


def test_faults() -> None:
    with pytest.raises(ValueError, match="the embedder has no structure head"):
        Structure()(embeddings(4)._replace(structure_ND=None))
    with pytest.raises(ValueError, match="preset='oficial' is unknown; did you mean 'official'"):
        Structure("oficial")
    with pytest.raises(ValueError, match="eta_source='both' is unknown"):
        Structure(eta_source="both")
    for arguments in ({"t": -1.0}, {"alpha": 0.0}, {"eta_floor": -0.1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            Structure(**arguments)
