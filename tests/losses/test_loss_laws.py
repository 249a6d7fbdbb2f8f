"""What holds for every catalogue entry, whatever its formula."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.proxies import ProxyLoss
from dmlstudy.records import Scalar

pytestmark = pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")

NUM_CLASSES, DIM = 6, 8
PROXIES = {name for name in catalogue.CATALOGUE if issubclass(catalogue.kind_of(name), ProxyLoss)}
PROXIES |= {"potential_field"}
"""Entries with proxies: an image of a class is enough for them."""

MEANS = {"binomial_deviance", "potential_field", "proxy_anchor", "tcm"}
"""Entries that are a sum over anchors only with what all ranks know; tests/distributed holds their law."""

EXTREME: dict[str, list[dict[str, Scalar]]] = {
    "pair_weighting": [
        {"alpha": 60.0, "beta": 60.0, "negative_margin": 2.0},
        {"alpha": 60.0, "beta": 60.0, "negative_margin": 2.0, "normalize": "none"},
        {"weighting": "power", "p": 0.5, "q": 0.5, "negative_margin": 2.0},
        {"weighting": "power", "p": 5.0, "q": 5.0, "distance": "squared_euclidean"},
        {"weighting": "power", "p": 0.5, "q": 0.5, "negative_margin": 2.0, "detach_weights": False},
        {"alpha": 60.0, "beta": 60.0, "detach_weights": False, "mining": "margin+batch_hard"},
        {"alpha": 60.0, "beta": 60.0, "detach_weights": False, "normalize": "none"},
        {"distance": "hyperbolic", "negative_margin": 9.0},
    ],
    "triplet_weighting": [
        {"alpha": 60.0},
        {"alpha": 60.0, "normalize": "none"},
        {"weighting": "power", "p": 0.5},
        {"weighting": "power", "p": 5.0, "distance": "squared_euclidean"},
        {"weighting": "power", "p": 0.5, "detach_weights": False},
        {"alpha": 60.0, "detach_weights": False, "mining": "semi_hard"},
        {"alpha": 60.0, "mining": "margin+batch_hard"},
        {"distance": "hyperbolic"},
    ],
    "triplet": [
        {"mining": "semi_hard"},
        {"mining": "batch_hard"},
        {"mining": "distance_weighted"},
        {"distance": "squared_euclidean", "margin": 2.0},
        {"distance": "hyperbolic"},
    ],
    "multi_similarity": [{"alpha": 60.0, "beta": 80.0}],
    "lifted_structure_gpw": [{"margin": 60.0}],
    "multi_similarity_distance": [{"alpha": 60.0, "beta": 80.0}, {"alpha": 60.0, "version": "v2"}],
    "binomial_deviance": [{"alpha": 60.0, "negative_weight": 50.0}],
    "margin": [{"mining": "distance_weighted"}, {"nu": 0.01}],
    "n_pair": [{"scale": 100.0}, {"positive": "all"}, {"positive": "one_per_class"}],
    "ranked_list": [{"negative_temperature": 60.0, "positive_temperature": 60.0}],
    "circle": [{"gamma": 1000.0}],
    "angular": [{"angle": 89.0}],
    "supcon": [{"temperature": 0.001}, {"temperature": 0.01, "learn": True, "denominator": "negatives"}],
    "siglip": [{"scale": 100.0, "bias": 20.0}, {"scale": 1000.0, "learn": False}],
    "tcm": [{"positive_margin": 1.0, "negative_margin": -1.0}],
    "smooth_ap": [{"tau": 0.001}, {"count_self": True}],
    "sup_ap": [{"rho": 1e4, "delta": 0.0}, {"tau": 0.001}],
    "recall_at_k": [{"tau": 0.001, "k_temperature": 0.01}, {"k_temperature_mode": "k"}, {"simix": True}],
    "proxy_nca": [{"temperature": 0.001}],
    "proxy_nca_pp": [{"temperature": 0.001}],
    "proxy_anchor": [{"alpha": 640.0}],
    "soft_triple": [{"scale": 400.0, "gamma": 0.001}, {"centers": 1}],
    "potential_field": [{"alpha": 6.0, "delta": 0.1}, {"delta": 2.0}, {"proxies": 0}],
    "arcface": [{"scale": 640.0, "margin": 90.0}],
    "cosface": [{"scale": 640.0}],
    "norm_softmax": [{"temperature": 0.001}],
    "subcenter_arcface": [
        {"scale": 640.0, "margin": 90.0},
        {"margin_by": "class_size"},
        {"margin_by": "power"},
        {"centers": 1},
    ],
    "curricularface": [{"scale": 640.0, "margin": 1.5}],
    "adaface": [{"scale": 640.0, "margin": 3.0}, {"t_alpha": 1.0}],
    "magface": [{"scale": 640.0}, {"easy": False}, {"norm_bounds": "absolute"}],
    "graph_consistency": [
        {"sigma": 0.001},
        {"term": "gc"},
        {"sigma_mode": "median"},
    ],
    "structure": [
        {"alpha": 60.0},
        {"preset": "paper", "eta_source": "adaptive"},
    ],
}

ENTRIES = list(dict.fromkeys([*catalogue.CATALOGUE, *catalogue.REGULARIZERS]))
each_entry = pytest.mark.parametrize("name", ENTRIES)
each_setting = pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param(name, params, id=f"{name}-{n}")
        for name in ENTRIES
        for n, params in enumerate([{}, *EXTREME.get(name, [])])
    ],
)


def build(name: str, params: dict[str, Scalar] | None = None) -> Loss:
    """The loss; a regulariser stands beside a loss that is silent on its own."""
    if name in catalogue.REGULARIZERS:
        silent: dict[str, Scalar] = {"negative_margin": 0.0, "positive_margin": 0.0, "mining": "batch_hard"}
        regularizer = (name, params or {})
        return catalogue.build(
            "pair_weighting", silent, regularizer=regularizer, num_classes=NUM_CLASSES, dim=DIM
        )
    sizes = range(1, NUM_CLASSES + 1)
    return catalogue.build(name, params or {}, num_classes=NUM_CLASSES, class_sizes=sizes, dim=DIM)


def embeddings(
    labels: list[int], *, z_ND: Tensor | None = None, ids: list[int] | None = None, dtype: torch.dtype
) -> Embeddings:
    if z_ND is None:
        z_ND = torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    omega_ND = 0.5 + torch.rand(len(labels), DIM, generator=generator, dtype=torch.float64).to(dtype)
    norm_N = 0.5 + torch.rand(len(labels), generator=generator, dtype=torch.float64).to(dtype)
    return Embeddings(
        functional.normalize(z_ND.to(dtype)).requires_grad_(),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(ids if ids is not None else range(len(labels)), dtype=torch.int64),
        omega_ND,
        norm_N,
        drift_N=torch.rand(len(labels), generator=generator, dtype=torch.float64).to(dtype),
    )


def mean_and_gradient(loss: Loss, batch: Embeddings) -> tuple[Tensor, Tensor]:
    total, count = loss(batch)
    assert total.requires_grad, "the sum has left the graph"
    assert total.shape == count.shape == ()
    value = total / count.clamp(min=1)
    value.backward()
    assert batch.z_ND.grad is not None
    for x in (value, batch.z_ND.grad, *(p.grad for p in loss.parameters())):
        assert x is not None
        assert x.isfinite().all()
    return value.detach(), batch.z_ND.grad


LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 3, 5]


@each_entry
def test_permuting_the_batch_changes_nothing(name: str) -> None:
    loss, other = build(name).double(), build(name).double()  # a loss may have a state that each batch moves
    batch = embeddings(LABELS, dtype=torch.float64)
    order = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(2))
    permuted = batch.rows(order)
    permuted = permuted._replace(z_ND=permuted.z_ND.detach().requires_grad_())
    value, gradient = mean_and_gradient(loss, batch)
    other_value, other_gradient = mean_and_gradient(other, permuted)
    torch.testing.assert_close(other_value, value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(other_gradient, gradient[order], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", sorted(set(catalogue.CATALOGUE) - MEANS))
def test_the_loss_is_a_sum_over_anchors(name: str) -> None:
    """In use; in training a loss may have a state that each batch moves."""
    loss = build(name).double().eval()
    batch = embeddings(LABELS, dtype=torch.float64)
    whole = loss(batch)
    parts = [loss(batch.rows(rows), batch) for rows in (slice(5), slice(5, 5), slice(5, 12))]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total, rtol=1e-12, atol=1e-13)
    assert sum(part.count for part in parts) == whole.count


@each_setting
def test_one_class_has_no_negatives(name: str, params: dict[str, Scalar]) -> None:
    batch = embeddings([2] * 6, dtype=torch.float32)
    value, gradient = mean_and_gradient(build(name, params), batch)
    if name in ("triplet_weighting", "multi_similarity"):
        assert value == 0
        assert (gradient == 0).all()
    if name in ("pair_weighting", "contrastive"):
        generous = {**params, "negative_margin": 2.0}
        assert mean_and_gradient(build(name, generous), batch)[0] == value, "a negative where there is none"


@each_setting
def test_singletons_have_no_positives(name: str, params: dict[str, Scalar]) -> None:
    batch = embeddings(list(range(NUM_CLASSES)), dtype=torch.float32)
    value, gradient = mean_and_gradient(build(name, params), batch)
    if name in ("triplet_weighting", "multi_similarity"):
        assert value == 0
        assert (gradient == 0).all()


@each_setting
def test_coinciding_points_are_finite(name: str, params: dict[str, Scalar]) -> None:
    """Distance 0 within a class (two images alike) and across classes."""
    z_ND = torch.randn(1, DIM, generator=torch.Generator().manual_seed(3)).expand(6, DIM)
    mean_and_gradient(build(name, params), embeddings([0, 0, 0, 1, 1, 2], z_ND=z_ND, dtype=torch.float32))


@each_setting
def test_antipodal_points_are_finite(name: str, params: dict[str, Scalar]) -> None:
    """Positives at distance 2, negatives at 0: the largest exponents a batch on the sphere can have."""
    north = functional.one_hot(torch.tensor(0), DIM).float()
    z_ND = torch.stack([north, -north, north, -north])
    batch = embeddings([0, 0, 1, 1], z_ND=z_ND, dtype=torch.float32)
    value, _ = mean_and_gradient(build(name, params), batch)
    if name == "triplet_weighting" and params == {"alpha": 60.0}:
        torch.testing.assert_close(value, torch.tensor(2.1))


@each_entry
@pytest.mark.parametrize("num_anchors", [0, 1])
def test_nothing_selected_still_backpropagates(name: str, num_anchors: int) -> None:
    loss = build(name)
    batch = embeddings([1] * num_anchors, dtype=torch.float32)
    value, gradient = mean_and_gradient(loss, batch)
    if num_anchors == 0 or name not in PROXIES | {"n_pair", "retention"}:
        assert value == 0
        assert (gradient == 0).all()


@pytest.mark.parametrize(
    "name",
    sorted(set(ENTRIES) - {"potential_field", "proxy_anchor"}),  # which sum over proxies
)
def test_no_local_anchor_still_reaches_the_references(name: str) -> None:
    """A rank without rows takes part in the gather's backward, with zero gradients."""
    loss = build(name)
    references = embeddings(LABELS, dtype=torch.float32)
    total, count = loss(references.rows(slice(0)), references)
    assert total == 0
    assert count == 0
    total.backward()
    assert references.z_ND.grad is not None
    assert (references.z_ND.grad == 0).all()
    assert all(p.grad is not None and (p.grad == 0).all() for p in loss.parameters())


@pytest.mark.parametrize("name", sorted(set(catalogue.CATALOGUE) - PROXIES - {"n_pair", "margin"}))
def test_rows_of_one_image_are_no_pair(name: str) -> None:
    """Two rows of one image, far apart: neither pulls the other, and nor does a row itself."""
    loss = build(name).double()
    alone = embeddings([0, 1], dtype=torch.float64)
    same = Embeddings(alone.z_ND, torch.tensor([0, 0]), torch.tensor([7, 7]))
    assert loss(same).total == 0


@each_entry
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast_computes_in_full_precision(name: str, dtype: torch.dtype) -> None:
    batch = embeddings(LABELS, dtype=torch.float32)
    plain = build(name)(batch).total
    with torch.autocast("cpu", dtype=dtype):
        under = build(name)(batch).total
    half = build(name)(batch._replace(z_ND=batch.z_ND.to(dtype))).total
    assert plain.dtype == under.dtype == half.dtype == torch.float32
    torch.testing.assert_close(under, plain, rtol=1e-6, atol=1e-6)


@each_entry
def test_malformed_input_is_refused(name: str) -> None:
    loss = build(name)
    good = embeddings(LABELS, dtype=torch.float32)
    z_ND, y_N, id_N = good.z_ND, good.y_N, good.id_N
    bad = {
        "labels must be int64": Embeddings(z_ND, y_N.int(), id_N),
        "sample ids must be int64": Embeddings(z_ND, y_N, id_N.float()),
        "labels must have one entry": Embeddings(z_ND, y_N[:3], id_N),
        r"\(N, D\)": Embeddings(z_ND[0], y_N, id_N),
    }
    for message, batch in bad.items():
        with pytest.raises(ValueError, match=f"anchors: .*{message}"):
            loss(batch)
        with pytest.raises(ValueError, match=f"references: .*{message}"):
            loss(good, batch)
    with pytest.raises(ValueError, match="embedding size 8, references 5"):
        loss(good, Embeddings(z_ND[:, :5], y_N, id_N))


@pytest.mark.parametrize("name", ["margin", *sorted(PROXIES)])
def test_labels_beyond_the_classes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_classes=6"):
        build(name)(embeddings([0, 6], dtype=torch.float32))


@pytest.mark.filterwarnings("default:a batch holds no two images of one class")
@pytest.mark.parametrize("name", sorted(set(catalogue.CATALOGUE) - PROXIES))
def test_a_batch_without_positives_is_told_once(name: str) -> None:
    loss = build(name)
    batch = embeddings([0, 1, 2, 3], dtype=torch.float32)
    with pytest.warns(UserWarning, match="no two images of one class"):
        loss(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(batch)
