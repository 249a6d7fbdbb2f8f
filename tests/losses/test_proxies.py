"""The proxy losses against their formulas in plain loops, against pytorch-metric-learning, and their laws.

Reference loops work on scalars in float64; their own autograd gives the gradients to compare with.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.regularizers import SparseCentersRegularizer
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.class_softmax import ArcFace, CosFace, ProxyNCAPlusPlus
from dmlstudy.losses.interface import ALONE, Embeddings, Loss, World
from dmlstudy.losses.proxies import ProxyAnchor, ProxyNCA, SoftTriple, unit_vectors

NUM_CLASSES, DIM = 5, 4
LOSSES: list[type[Loss]] = [ProxyNCA, ProxyNCAPlusPlus, ProxyAnchor, SoftTriple, ArcFace, CosFace]
Reference = Callable[[Loss, Tensor, Tensor], Tensor]
"""(loss, unit embeddings, labels) -> mean loss of the batch."""

each_loss = pytest.mark.parametrize("kind", LOSSES, ids=lambda kind: kind.__name__)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.mark.parametrize("shape", [(10_000, 5), (9_001, 3, 7), (4_097, 1), (8_192, 2), (12_289, 1), (3, 2)])
def test_shares_of_first_vectors_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    """Bit for bit: blocks are drawn as one draw of all would."""
    whole, num = unit_vectors(3, *shape), shape[0]
    for share in (slice(0, num), slice(num // 3, num // 2), slice(num - 2, num), slice(num, num)):
        assert torch.equal(unit_vectors(3, *shape, share=share), whole[share])


class Rank:
    """One of several pretended ranks; a proxy loss needs nothing but its share."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, x_B: Tensor) -> Tensor:
        raise NotImplementedError

    def sum(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def total(self, n: int) -> int:
        raise NotImplementedError

    def max(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def share(self, n: int) -> slice:
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)


def embeddings(
    labels: list[int] | None = None, z_ND: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Embeddings:
    """Unit vectors drawn towards their class; by default of four classes, one a singleton, class 3 absent."""
    y_N = torch.tensor([0, 1, 0, 1, 2, 0, 1, 2, 4, 1] if labels is None else labels, dtype=torch.int64)
    if z_ND is None:
        z_ND = torch.randn(len(y_N), DIM, dtype=dtype, generator=torch.Generator().manual_seed(0))
        z_ND = z_ND + 1.5 * functional.one_hot(y_N % DIM, DIM)
    return Embeddings(
        functional.normalize(z_ND.to(dtype)).requires_grad_(), y_N, torch.arange(100, 100 + len(y_N))
    )


def build(kind: type[Loss], num_classes: int = NUM_CLASSES, **params: float) -> Loss:
    return kind(num_classes=num_classes, dim=DIM, seed=3, **params)


def stretched(loss: Loss) -> Loss:
    """The loss in float64 with proxies off the sphere: the forward pass must normalise them."""
    with torch.no_grad():
        for parameter in loss.double().parameters():
            parameter *= 1 + torch.rand(
                (*parameter.shape[:-1], 1), generator=torch.Generator().manual_seed(7), dtype=torch.float64
            )
    return loss


def dot(a: Tensor, b: Tensor) -> Tensor:
    return sum((a[d] * b[d] for d in range(len(a))), torch.zeros((), dtype=torch.float64))


def squared(a: Tensor, b: Tensor) -> Tensor:
    return dot(a - b, a - b)


def total_of(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def unit(vector: Tensor) -> Tensor:
    return vector / dot(vector, vector).sqrt()


def proxies_of(loss: Loss) -> list[Tensor]:
    return [unit(proxy) for proxy in loss.proxies_CD]


def softmax_loss(logits: list[Tensor], own: int) -> Tensor:
    return -torch.log(torch.exp(logits[own]) / total_of([torch.exp(logit) for logit in logits]))


def proxy_nca(loss: Loss, z_ND: Tensor, y_N: Tensor) -> Tensor:
    proxies, terms = proxies_of(loss), []
    for z, y in zip(z_ND, y_N.tolist(), strict=True):
        scores = [torch.exp(-squared(z, proxy) / loss.temperature) for proxy in proxies]
        others = [score for c, score in enumerate(scores) if c != y]
        terms.append(-torch.log(scores[y] / total_of(others)))
    return total_of(terms) / len(terms)


def proxy_nca_plus_plus(loss: Loss, z_ND: Tensor, y_N: Tensor) -> Tensor:
    proxies = proxies_of(loss)
    terms = [
        softmax_loss([-squared(z, proxy) / loss.temperature for proxy in proxies], y)
        for z, y in zip(z_ND, y_N.tolist(), strict=True)
    ]
    return total_of(terms) / len(terms)


def proxy_anchor(loss: Loss, z_ND: Tensor, y_N: Tensor) -> Tensor:
    pulls, pushes = [], []
    for c, proxy in enumerate(proxies_of(loss)):
        s = [dot(proxy, z) for z in z_ND]
        own = [s[j] for j, y in enumerate(y_N) if y == c]
        others = [s[j] for j, y in enumerate(y_N) if y != c]
        if own:
            pulls.append(torch.log(1 + total_of([torch.exp(-loss.alpha * (x - loss.delta)) for x in own])))
        pushes.append(torch.log(1 + total_of([torch.exp(loss.alpha * (x + loss.delta)) for x in others])))
    return total_of(pulls) / len(pulls) + total_of(pushes) / len(pushes)


def soft_triple(loss: Loss, z_ND: Tensor, y_N: Tensor) -> Tensor:
    centers = [[unit(center) for center in centers_KD] for centers_KD in loss.centers_CKD]
    terms = []
    for z, y in zip(z_ND, y_N.tolist(), strict=True):
        logits = []
        for c, own_centers in enumerate(centers):
            s = [dot(z, center) for center in own_centers]
            weights = [torch.exp(x / loss.gamma) for x in s]
            similarity = total_of([w * x for w, x in zip(weights, s, strict=True)]) / total_of(weights)
            logits.append(loss.scale * (similarity - (loss.margin if c == y else 0)))
        terms.append(softmax_loss(logits, y))
    k = len(centers[0])
    gaps = [
        torch.sqrt(2 + 1e-5 - 2 * dot(own_centers[s], own_centers[t]))
        for own_centers in centers
        for s in range(k)
        for t in range(s + 1, k)
    ]
    spread = total_of(gaps) / (len(centers) * k * (k - 1)) if k > 1 else total_of([])
    return total_of(terms) / len(terms) + loss.tau * spread


def arc_face(loss: Loss, z_ND: Tensor, y_N: Tensor) -> Tensor:
    proxies, m, terms = proxies_of(loss), math.radians(loss.margin), []
    for z, y in zip(z_ND, y_N.tolist(), strict=True):
        logits = [dot(z, proxy) for proxy in proxies]
        theta = torch.acos(logits[y])
        logits[y] = torch.cos(theta + m) if theta + m <= math.pi else torch.cos(theta) - m * math.sin(m)
        terms.append(softmax_loss([loss.scale * logit for logit in logits], y))
    return total_of(terms) / len(terms)


def cos_face(loss: Loss, z_ND: Tensor, y_N: Tensor) -> Tensor:
    proxies, terms = proxies_of(loss), []
    for z, y in zip(z_ND, y_N.tolist(), strict=True):
        logits = [dot(z, proxy) - (loss.margin if c == y else 0) for c, proxy in enumerate(proxies)]
        terms.append(softmax_loss([loss.scale * logit for logit in logits], y))
    return total_of(terms) / len(terms)


REFERENCES: dict[type[Loss], tuple[Reference, list[dict[str, float]]]] = {
    ProxyNCA: (proxy_nca, [{}, {"temperature": 0.2}]),
    ProxyNCAPlusPlus: (proxy_nca_plus_plus, [{}, {"temperature": 0.5}]),
    ProxyAnchor: (proxy_anchor, [{}, {"alpha": 8.0, "delta": 0.3}, {"delta": -0.2}]),
    SoftTriple: (
        soft_triple,
        [
            {},
            {"tau": 0.0, "centers": 3},
            {"tau": 1.0, "centers": 2, "gamma": 0.5, "scale": 10.0, "margin": 0.1},
            {"centers": 1},
        ],
    ),
    ArcFace: (arc_face, [{}, {"margin": 0.0}, {"margin": 60.0, "scale": 8.0}, {"margin": 90.0}]),
    CosFace: (cos_face, [{}, {"margin": 0.0}, {"margin": 0.1, "scale": 10.0}]),
}
CASES = [
    pytest.param(kind, params, id="-".join([kind.__name__, *(f"{k}={v}" for k, v in params.items())]))
    for kind, (_, settings) in REFERENCES.items()
    for params in settings
]


def gradients(total: Tensor, batch: Embeddings, loss: Loss) -> list[Tensor]:
    leaves = [batch.z_ND, *loss.parameters()]
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found)
    return list(found)


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_value_and_gradient_equal_the_paper_s_loops(kind: type[Loss], params: dict[str, float]) -> None:
    loss, batch = stretched(build(kind, **params)), embeddings()
    total, count = loss(batch)
    expected = REFERENCES[kind][0](loss, batch.z_ND, batch.y_N)
    assert count.item() == (1 if kind is ProxyAnchor else len(batch.y_N))
    assert not count.requires_grad
    assert abs(expected.item()) > 1e-3
    torch.testing.assert_close(total / count, expected, rtol=1e-10, atol=1e-10)
    wanted = gradients(expected, batch, loss)
    for gradient, reference in zip(gradients(total / count, batch, loss), wanted, strict=True):
        assert reference.abs().max() > 1e-4
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-10)


def test_arcface_cases_reach_the_continuation() -> None:
    """The loops above would prove nothing about theta + m > 180 degrees if no anchor were there."""
    loss, batch = stretched(build(ArcFace, margin=90.0)), embeddings()
    own = torch.stack([dot(z, proxies_of(loss)[y]) for z, y in zip(batch.z_ND, batch.y_N, strict=True)])
    beyond = own.acos() + math.radians(90) > math.pi
    assert beyond.any()
    assert not beyond.all()


def library_loss(loss: Loss) -> nn.Module:
    """The same definition in pytorch-metric-learning, with the same proxies.

    Its ProxyNCALoss has the own proxy in the denominator: it is ProxyNCA++, and nothing there is the
    original ProxyNCA. Its SoftTripleLoss knows the spread of centres as a regularizer, without the 1e-5,
    and its divisor is C K (K-1) too.
    """
    sizes = {"num_classes": NUM_CLASSES, "embedding_size": DIM}
    match loss:
        case ProxyNCAPlusPlus():
            library, weights = (
                pml.ProxyNCALoss(**sizes, softmax_scale=1 / loss.temperature),
                loss.proxies_CD,
            )
            library.proxies = nn.Parameter(weights.detach().clone())
        case ProxyAnchor():
            library = pml.ProxyAnchorLoss(**sizes, alpha=loss.alpha, margin=loss.delta)
            library.proxies = nn.Parameter(loss.proxies_CD.detach().clone())
        case SoftTriple():
            num_centers = loss.centers_CKD.shape[1]
            library = pml.SoftTripleLoss(
                **sizes,
                centers_per_class=num_centers,
                la=loss.scale,
                gamma=loss.gamma,
                margin=loss.margin,
                weight_regularizer=SparseCentersRegularizer(NUM_CLASSES, num_centers),
                weight_reg_weight=loss.tau,
            )
            library.fc = nn.Parameter(loss.centers_CKD.detach().flatten(0, 1).T.clone())
        case ArcFace() | CosFace():
            kind = pml.ArcFaceLoss if isinstance(loss, ArcFace) else pml.CosFaceLoss
            library = kind(**sizes, margin=loss.margin, scale=loss.scale)
            library.W = nn.Parameter(loss.proxies_CD.detach().T.clone())
    return library.double()


@pytest.mark.parametrize(
    ("kind", "params"),
    [case for case in CASES if case.values[0] is not ProxyNCA and "centers=1" not in case.id],
)
def test_value_equals_pytorch_metric_learning(kind: type[Loss], params: dict[str, float]) -> None:
    loss, batch = stretched(build(kind, **params)), embeddings()
    total, count = loss(batch)
    expected = library_loss(loss)(batch.z_ND.detach(), batch.y_N)
    tolerance = 1e-5 if kind is SoftTriple else 1e-10  # the 1e-5 under the root
    torch.testing.assert_close(total / count, expected, rtol=1e-10, atol=tolerance)


@pytest.mark.parametrize("split", [(4, 3, 3), (9, 0, 1), (0, 0, 10), (1,) * 10], ids=str)
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_ranks_add_up_to_one_process(
    kind: type[Loss], params: dict[str, float], split: tuple[int, ...]
) -> None:
    """Anchors over ranks, each against the whole batch: total, count and gradients sum to those of one."""
    loss, batch = build(kind, **params).double(), embeddings()
    whole = loss(batch)
    start, parts = 0, []
    for rank, size in enumerate(split):
        world: World = Rank(rank, len(split))
        parts.append(loss(batch.rows(slice(start, start + size)), batch, world))
        gradients(parts[-1].total, batch, loss)
        start += size
    total = total_of([part.total for part in parts])
    torch.testing.assert_close(total, whole.total, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(total_of([part.count for part in parts]), whole.count, rtol=1e-15, atol=0)
    wanted = gradients(whole.total, batch, loss)
    for gradient, reference in zip(gradients(total, batch, loss), wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-12)


@each_loss
def test_no_anchors_give_zero_on_the_graph(kind: type[Loss]) -> None:
    loss, empty = build(kind), embeddings([])
    for references in (None, embeddings([])):
        total, count = loss(empty, references)
        assert total.item() == 0
        assert count.item() == (1 if kind is ProxyAnchor else 0)
        assert all((gradient == 0).all() for gradient in gradients(total, empty, loss))


def test_proxy_anchor_without_a_share_reaches_all_leaves() -> None:
    """A rank without proxies, or without anchors, still takes part in the gather's backward."""
    loss, anchors, references = build(ProxyAnchor), embeddings([1, 2]), embeddings()
    total, count = loss(anchors, references, Rank(0, 2 * NUM_CLASSES))
    assert total.item() == count.item() == 0
    total.backward()
    for leaf in (anchors.z_ND, references.z_ND, *loss.parameters()):
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()
    loss, nobody, references = build(ProxyAnchor), embeddings([]), embeddings()
    loss(nobody, references, ALONE).total.backward()
    assert nobody.z_ND.grad is not None
    assert references.z_ND.grad is not None
    assert references.z_ND.grad.abs().max() > 0


@each_loss
def test_one_class_in_all(kind: type[Loss]) -> None:
    """No other class: nothing to tell apart, so only Proxy-Anchor's pull and SoftTriple's spread remain."""
    loss, batch = build(kind, num_classes=1).double(), embeddings([0, 0, 0])
    total, count = loss(batch)
    found = gradients(total, batch, loss)
    if kind in (ProxyAnchor, SoftTriple):
        expected = REFERENCES[kind][0](loss, batch.z_ND, batch.y_N)
        torch.testing.assert_close(total / count, expected, rtol=1e-10, atol=1e-10)
    else:
        assert total.item() == 0
        assert all((gradient == 0).all() for gradient in found)


EXTREME = [
    *((kind, {}) for kind in LOSSES),
    (ProxyNCA, {"temperature": 1e-4}),
    (ProxyNCAPlusPlus, {"temperature": 1e-4}),
    (ProxyAnchor, {"alpha": 1e4, "delta": 1.0}),
    (SoftTriple, {"scale": 1e4, "gamma": 1e-4, "tau": 100.0}),
    (ArcFace, {"margin": 90.0, "scale": 1e4}),
    (CosFace, {"margin": 2.0, "scale": 1e4}),
]


@each_dtype
@pytest.mark.parametrize("side", [1, -1], ids=["on the proxy", "opposite"])
@pytest.mark.parametrize(("kind", "params"), EXTREME)
def test_extreme_positions_are_finite(
    kind: type[Loss], params: dict[str, float], side: int, dtype: torch.dtype
) -> None:
    """Embeddings on their proxy or opposite to it, and coinciding proxies and centres of two classes."""
    loss = build(kind, **params).to(dtype)
    with torch.no_grad():
        (parameter,) = loss.parameters()
        parameter[1] = parameter[0]
        if parameter.ndim == 3:
            parameter[:] = parameter[:, :1]
        z_ND = side * parameter.reshape(NUM_CLASSES, -1, DIM)[:, 0]
    batch = embeddings([0, 1, 2, 3, 4, 3], torch.cat([z_ND, z_ND[:1]]), dtype)
    total, _ = loss(batch)
    assert total.isfinite()
    gradients(total, batch, loss)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-5, math.pi - 1e-5, math.pi])
def test_arcface_is_smooth_at_its_poles(angle: float) -> None:
    """At theta = 0 and 180 degrees the value is that of cos(theta + m), and acos never divides by zero."""
    loss = build(ArcFace, margin=20.0, scale=2.0).double()
    with torch.no_grad():
        loss.proxies_CD[:] = torch.eye(NUM_CLASSES, DIM, dtype=torch.float64)
        loss.proxies_CD[4] = -loss.proxies_CD[3]
    z = torch.tensor([[math.cos(angle), math.sin(angle), 0.0, 0.0]], dtype=torch.float64)
    batch = embeddings([0], z)
    m = math.radians(20.0)
    own = math.cos(angle + m) if angle + m <= math.pi else math.cos(angle) - m * math.sin(m)
    logits = 2 * torch.tensor([own, math.sin(angle), 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(loss(batch).total, -logits.log_softmax(0)[0], rtol=0, atol=2e-6)
    gradients(loss(batch).total, batch, loss)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ProxyNCA, {}),
        (ProxyNCAPlusPlus, {"temperature": 1.0}),
        (ProxyAnchor, {"alpha": 2.0}),
        (SoftTriple, {"scale": 2.0}),
        (ArcFace, {"scale": 2.0}),
        (ArcFace, {"scale": 2.0, "margin": 90.0}),
        (CosFace, {"scale": 2.0}),
    ],
)
def test_value_rises_all_the_way_from_the_own_proxy(kind: type[Loss], params: dict[str, float]) -> None:
    """The other proxies stand at right angles to the way, so only the own one's part changes."""
    loss = build(kind, num_classes=3, **params).double()
    with torch.no_grad():
        (parameter,) = loss.parameters()
        axes = torch.eye(DIM, dtype=torch.float64)[[0, 2, 3]]
        parameter[:] = axes if parameter.ndim == 2 else axes[:, None]
    angles = torch.linspace(0, math.pi, 100, dtype=torch.float64)
    z_ND = torch.stack([angles.cos(), angles.sin(), 0 * angles, 0 * angles], dim=1)
    values = torch.stack([loss(embeddings([0], z[None])).total for z in z_ND])
    assert (values.diff() > 0).all()


@each_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_computed_in_full(kind: type[Loss], dtype: torch.dtype) -> None:
    loss, batch = build(kind), embeddings(dtype=torch.float32)
    plain = loss(batch).total
    with torch.autocast("cpu", dtype=dtype):
        under = loss(batch).total
    rounded = Embeddings(batch.z_ND.detach().to(dtype), batch.y_N, batch.id_N)
    exact = loss(rounded._replace(z_ND=rounded.z_ND.float())).total
    half = loss(rounded).total
    own_half = loss.to(dtype)(rounded)
    assert plain.dtype == under.dtype == half.dtype == own_half.total.dtype == own_half.count.dtype
    assert plain.dtype == torch.float32
    torch.testing.assert_close(under, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(half, exact, rtol=1e-6, atol=1e-6)
    own_half.total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loss.parameters())


@each_loss
def test_proxies_depend_on_the_seed_alone_and_lie_on_the_sphere(kind: type[Loss]) -> None:
    def proxies(seed: int) -> Tensor:
        (parameter,) = kind(num_classes=4, dim=3, seed=seed).parameters()
        return parameter.detach()

    torch.manual_seed(1)
    first = proxies(0)
    torch.manual_seed(2)
    assert torch.equal(first, proxies(0))
    assert not torch.equal(first, proxies(1))
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(first.shape[:-1]))


@each_loss
def test_only_the_direction_of_proxies_counts(kind: type[Loss]) -> None:
    loss, batch = build(kind).double(), embeddings()
    value = loss(batch).total
    torch.testing.assert_close(stretched(loss)(batch).total, value, rtol=1e-12, atol=1e-13)


@each_loss
def test_constructors_are_plain(kind: type[Loss]) -> None:
    parameters = inspect.signature(kind).parameters
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert list(parameters)[:2] == ["num_classes", "dim"]
    for name, parameter in parameters.items():
        if name == "share":  # of the classes, which the trial gives
            assert parameter.default is None
            continue
        whole = name in ("num_classes", "dim", "seed", "centers")
        assert parameter.default is inspect.Parameter.empty or isinstance(
            parameter.default, (float, int)[whole]
        )


@each_loss
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (embeddings([0, NUM_CLASSES]), "labels run from 0 to 5, .*num_classes=5"),
        (embeddings([-1, 0]), "labels run from -1"),
        (Embeddings(torch.ones(1, 7), torch.tensor([0]), torch.tensor([0])), "size 7, proxies 4; build"),
    ],
    ids=["beyond", "negative", "size"],
)
def test_what_does_not_fit_the_proxies_is_refused(kind: type[Loss], batch: Embeddings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind)(batch)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (ProxyNCA, {"temperature": 0.0}, "temperature=0.0 must be a finite number > 0"),
        (ProxyNCAPlusPlus, {"temperature": math.nan}, "temperature=nan"),
        (ProxyAnchor, {"alpha": 0.0}, "alpha=0.0 must be a finite number > 0"),
        (ProxyAnchor, {"delta": -2.0}, "delta=-2.0 must be a finite number >= -1"),
        (SoftTriple, {"scale": -1.0}, "scale=-1.0"),
        (SoftTriple, {"gamma": 0.0}, "gamma=0.0"),
        (SoftTriple, {"tau": -0.1}, "tau=-0.1"),
        (SoftTriple, {"margin": -0.1}, "margin=-0.1"),
        (SoftTriple, {"centers": 0}, "centers=0 must be a finite number >= 1"),
        (ArcFace, {"margin": -1.0}, "margin=-1.0"),
        (ArcFace, {"margin": 91.0}, "margin=91.0 must be an angle of at most 90 degrees"),
        (ArcFace, {"scale": 0.0}, "scale=0.0"),
        (CosFace, {"margin": math.inf}, "margin=inf"),
        (CosFace, {"scale": 0.0}, "scale=0.0"),
        (CosFace, {"num_classes": 0}, "num_classes=0"),
    ],
)
def test_impossible_parameters_are_refused(kind: type[Loss], params: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind, **params)
