"""The four methods against their published sums, one number at a time, and one contract for all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from dmlstudy.hashing import METHODS, build
from dmlstudy.hashing.methods import (
    SGH,
    SSDH,
    TBH,
    GreedyHash,
    HashMethod,
    bernoulli_bits,
    cosine_distances,
    signs,
    smoothing,
    with_slope_of,
)
from dmlstudy.hashing.ranking import PointRanking

F, D = 6, 8
each_method = pytest.mark.parametrize("name", sorted(METHODS))


def features(num_rows: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, F, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def method(name: str, **params: float | int) -> HashMethod:
    """A small one in float64, prepared on 40 rows."""
    sizes = {"ssdh": {"hidden": 5}, "tbh": {"hidden": 5, "continuous": 4}}.get(name, {})
    built = build(name, D, F, sizes | params, seed=3).method.double()
    built.prepare(features(40, seed=9))
    return built


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(loss: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True))


def check_gradients(module: nn.Module, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    pairs = list(zip(gradients(got, module), gradients(expected, module), strict=True))
    assert sum(wanted is not None and float(wanted.abs().max()) > 1e-6 for _, wanted in pairs) >= 2
    for one, other in pairs:
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def bit(h: Tensor) -> Tensor:
    """[h > 0], with the slope of the sigmoid."""
    p = 1 / (1 + torch.exp(-h))
    return (1.0 if h > 0 else 0.0) + (p - p.detach())


def test_sgh_is_the_published_sum() -> None:
    sgh, x_BF = method("sgh", alpha=0.3, beta=0.2), features()
    assert isinstance(sgh, SGH)
    w, c, u, s, m = sgh.encoder_FD, sgh.bias_D, sgh.decoder_DF, sgh.scale_F, sgh.shift_F
    total = 0.2 / 2 * (sum(v**2 for v in w.flatten()) + sum(v**2 for v in u.flatten()))
    for x_F in x_BF:
        h = [sum(x_F[f] * w[f, d] for f in range(F)) + c[d] for d in range(D)]
        b = [bit(h[d]) for d in range(D)]
        for f in range(F):
            rebuilt = sum(b[d] * u[d, f] for d in range(D)) * abs(s[f]) + m[f]
            total = total + (x_F[f] - rebuilt) ** 2 / 2
        for d in range(D):
            p = 1 / (1 + torch.exp(-h[d]))
            total = total + 0.3 * (-b[d] * torch.log(p) - (1 - b[d]) * torch.log(1 - p))
    check_gradients(sgh, sgh.step(x_BF, generator()).loss, total / x_BF.numel())


def test_sgh_starts_at_the_features_statistics() -> None:
    sgh, x_NF = method("sgh"), features(40, seed=9)
    assert isinstance(sgh, SGH)
    torch.testing.assert_close(sgh.shift_F.detach(), x_NF.mean(0))
    torch.testing.assert_close(sgh.scale_F.detach(), x_NF.var(0, correction=0))


def test_ssdh_is_the_published_sum() -> None:
    ssdh, x_BF = method("ssdh", near=0.3, far=0.3), features()
    total, kinds = torch.zeros((), dtype=torch.float64), set()
    for i, x_F in enumerate(x_BF):
        for j, y_F in enumerate(x_BF):
            distance = 1 - x_F @ y_F / x_F.norm() / y_F.norm()
            wanted = float(distance < ssdh.near_limit) - float(distance > ssdh.far_limit)
            got = torch.tanh(ssdh.logits(x_BF)[i]) @ torch.tanh(ssdh.logits(x_BF)[j]) / D
            total = total + abs(wanted) * (got - wanted) ** 2
            kinds.add(wanted)
    assert kinds == {-1, 0, 1}
    check_gradients(ssdh, ssdh.step(x_BF, generator()).loss, total / len(x_BF) ** 2)


def test_ssdh_fits_two_half_gaussians() -> None:
    """As the authors' code does: mirror each side of the mode, and fit both by maximum likelihood."""
    ssdh, x_NF = method("ssdh", near=2.0, far=1.5), features(40, seed=9)
    distance_NN = cosine_distances(x_NF).numpy()
    pair_P = distance_NN[np.triu_indices(40, 1)]
    counts, edges = np.histogram(pair_P, bins=200, range=(0, 2))
    mode = edges[counts.argmax()]
    left, right = pair_P[pair_P <= mode], pair_P[pair_P > mode]
    left_mean, left_std = norm.fit(np.concatenate([left, 2 * mode - left]))
    right_mean, right_std = norm.fit(np.concatenate([right, 2 * mode - right]))
    assert float(ssdh.mode) == pytest.approx(mode)
    assert float(ssdh.near_limit) == pytest.approx(left_mean - 2.0 * left_std)
    assert float(ssdh.far_limit) == pytest.approx(right_mean + 1.5 * right_std)


def test_greedyhash_is_the_published_sum() -> None:
    greedy, x_BF = method("greedyhash", penalty=0.3), features(7)
    h_BD = greedy.logits(x_BF)
    z_BD = torch.where(h_BD > 0, 1.0, -1.0) + h_BD - h_BD.detach()

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()

    total = sum((cosine(z_BD[i], z_BD[i + 3]) - cosine(x_BF[i], x_BF[i + 3])) ** 2 for i in range(3)) / 3
    total = total + 0.3 * sum(abs(abs(h) - 1) ** 3 for h in h_BD.flatten()) / h_BD.numel()
    check_gradients(greedy, greedy.step(x_BF, generator()).loss, total)


def test_tbh_is_the_published_sum_and_both_its_players_move_at_once() -> None:
    """The authors' two losses and two optimisers, against one loss whose gradient is theirs, part by part."""
    tbh, x_BF = method("tbh", adversarial=0.7), features()
    assert isinstance(tbh, TBH)
    e_BH = tbh.encoder[0](x_BF).relu()
    h_BD = tbh.to_bits(e_BH)
    b_BD = torch.stack([torch.stack([bit(h) for h in h_D]) for h_D in h_BD])
    c_BC = tbh.to_continuous(e_BH).sigmoid()
    num_rows = len(x_BF)
    a = [[torch.zeros(())] * num_rows for _ in range(num_rows)]
    for i in range(num_rows):
        for j in range(num_rows):
            differing = sum(b_BD[i, d] * (1 - b_BD[j, d]) + (1 - b_BD[i, d]) * b_BD[j, d] for d in range(D))
            if differing == 0:  # |x| has slope 0 at 0, in the authors' code too
                differing = torch.zeros((), dtype=torch.float64)
            a[i][j] = (1 - differing / D) ** 1.4
    q = [sum(row) + 1e-8 for row in a]
    y_BC = torch.stack(
        [
            sum(a[i][j] / (q[i] * q[j]).sqrt() * tbh.graph(c_BC[j]) for j in range(num_rows)).sigmoid()
            for i in range(num_rows)
        ]
    )
    noise = generator(5)
    real_BD = (torch.rand(num_rows, D, generator=noise, dtype=torch.float64) > 0.5).double()
    real_BC = torch.rand(num_rows, 4, generator=noise, dtype=torch.float64)
    critics = nn.ModuleList([tbh.bits_critic, tbh.graph_critic])
    adversarial = torch.zeros((), dtype=torch.float64)
    for critic, real, made in ((tbh.bits_critic, real_BD, b_BD), (tbh.graph_critic, real_BC, y_BC)):
        adversarial = adversarial - critic(real).sigmoid().log().mean()
        adversarial = adversarial - (1 - critic(made).sigmoid()).log().mean()
    distortion = sum(((tbh.decoder(y_BC) - x_BF) ** 2).flatten()) / (2 * num_rows)
    actor = (distortion - 0.7 * adversarial) / F

    loss = tbh.step(x_BF, generator(5)).loss
    torch.testing.assert_close(loss, actor, rtol=1e-10, atol=0)
    for got, wanted in zip(gradients(loss, critics), gradients(0.7 * adversarial / F, critics), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    players = nn.ModuleList([tbh.encoder, tbh.to_bits, tbh.to_continuous, tbh.graph, tbh.decoder])
    for got, wanted in zip(gradients(loss, players), gradients(actor, players), strict=True):
        assert wanted.abs().max() > 1e-6
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_smoothing_has_the_degrees_of_its_graph() -> None:
    b_BD = (features() > 0).double()
    operator_BB = smoothing(b_BD)
    torch.testing.assert_close(operator_BB, operator_BB.T)
    assert torch.linalg.eigvalsh(operator_BB).max() == pytest.approx(1, abs=1e-7)
    alike_BB = smoothing(b_BD[:1].expand(4, -1))
    torch.testing.assert_close(alike_BB, torch.full((4, 4), 0.25, dtype=torch.float64))


def test_estimates_of_the_gradient() -> None:
    h = torch.tensor([-2.0, 0.0, 0.3], dtype=torch.float64, requires_grad=True)
    p = h.detach().sigmoid()
    for z, slope, value in (
        (bernoulli_bits(h), p * (1 - p), [0, 0, 1]),
        (with_slope_of(signs(h), h), torch.ones(3).double(), [-1, -1, 1]),
        (with_slope_of(signs(h), h.tanh()), 1 - h.detach().tanh() ** 2, [-1, -1, 1]),
    ):
        assert z.tolist() == value
        torch.testing.assert_close(torch.autograd.grad(z.sum(), h)[0], slope)


@each_method
def test_codes_are_signs_and_carry_a_gradient(name: str) -> None:
    each, x_BF = method(name), features()
    z_BD, _ = each.step(x_BF, generator())
    assert set(z_BD.flatten().tolist()) == {-1.0, 1.0}
    assert torch.equal(z_BD > 0, each.logits(x_BF) > 0)
    ranked = PointRanking(3, 0.5)(x_BF, z_BD, torch.ones_like(z_BD))
    assert any(g is not None and g.abs().max() > 0 for g in gradients(ranked, each))


@each_method
def test_a_seed_and_the_arguments_decide_everything(name: str) -> None:
    torch.manual_seed(1)
    first = method(name)
    expected = torch.rand(3, generator=torch.default_generator)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), expected)  # nothing was drawn from the global generator
    second = method(name)
    x_BF = features()
    assert torch.equal(first.step(x_BF, generator(2)).loss, second.step(x_BF, generator(2)).loss)
    with_term = build(name, D, F, {}, term=("point_ranking", {}), seed=3).method
    without = build(name, D, F, {}, seed=3).method
    for one, other in zip(with_term.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other)
    other = build(name, D, F, {}, seed=4).method
    assert not torch.equal(next(other.parameters()), next(without.parameters()))


@each_method
@pytest.mark.parametrize("kind", ["zeros", "equal", "large", "small", "one", "two"])
def test_extreme_batches_stay_finite(name: str, kind: str) -> None:
    each = method(name).float()
    x_BF = {
        "zeros": torch.zeros(6, F),
        "equal": features().float()[:1].expand(6, -1),
        "large": 1e4 * features().float(),
        "small": 1e-20 * features().float(),
        "one": features(1).float(),
        "two": features(2).float(),
    }[kind]
    loss = each.step(x_BF, generator()).loss
    assert loss.isfinite()
    for gradient in gradients(loss, each):
        assert gradient is None or gradient.isfinite().all()


@each_method
def test_features_alike_everywhere_can_be_prepared(name: str) -> None:
    each = method(name)
    for x_NF in (torch.zeros(5, F).double(), torch.ones(5, F).double()):
        each.prepare(x_NF)
        assert each.step(x_NF, generator()).loss.isfinite()


@each_method
def test_training_lowers_the_loss(name: str) -> None:
    each = method(name, **({"adversarial": 0.0} if name == "tbh" else {}))  # a game's loss need not fall
    x_BF, noise = features(32), generator()
    optimizer = torch.optim.Adam(each.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = each.step(x_BF, noise).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10]) - 0.02 * abs(sum(losses[:10]))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("sgd", {}, "hashing method='sgd' is unknown; did you mean 'sgh'"),
        ("sgh", {"alfa": 1.0}, "hashing method 'sgh' has no parameter 'alfa'; did you mean 'alpha'"),
        ("sgh", {"alpha": -1.0}, "alpha=-1.0 must be a finite number >= 0"),
        ("ssdh", {"near": math.nan}, "near=nan must be a finite"),
        ("tbh", {"hidden": 0}, "hidden=0 must be a finite number >= 1"),
        ("tbh", {"hidden": 1.5}, "hidden=1.5 must be of type int"),
        ("greedyhash", {"penalty": "x"}, "penalty='x' must be of type number"),
        ("greedyhash", {"num_bits": 8}, "has no parameter 'num_bits'"),
    ],
)
def test_faults(name: str, params: dict[str, float | int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, D, F, params)


def test_faults_of_the_rest() -> None:
    for num_bits in (0, 12):
        with pytest.raises(ValueError, match=f"num_bits={num_bits}: codes are whole bytes"):
            build("sgh", num_bits, F, {})
    with pytest.raises(ValueError, match="ssdh needs at least 2 rows"):
        SSDH(F, D).prepare(torch.zeros(1, F))
    with pytest.raises(ValueError, match="term='ranking' is unknown; did you mean 'point_ranking'"):
        build("sgh", D, F, {}, term=("ranking", {}))
    for params, message in (
        ({"weight": "x"}, "weight='x' must be a number"),
        ({"weight": -1.0}, "weight=-1.0 must be"),
        ({"preset": "oficial"}, "preset 'official' or 'paper'"),
        ({"neighbors": 3}, "did you mean 'neighbours'"),
    ):
        with pytest.raises(ValueError, match=message):
            build("sgh", D, F, {}, term=("point_ranking", params))


def test_cosine_of_halves_needs_no_order_within_a_pair() -> None:
    greedy = GreedyHash(F, D).double()
    x_BF = features(6)
    swapped = torch.cat([x_BF[3:], x_BF[:3]])
    torch.testing.assert_close(
        greedy.step(x_BF, generator()).loss, greedy.step(swapped, generator()).loss, rtol=1e-12, atol=0
    )
