"""Losses of pytorch-metric-learning: its values, exact at any number of ranks, and what a user is told."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from pytorch_metric_learning import losses as foreign_losses
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import pml
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.pml import ForeignLoss
from dmlstudy.records import Scalar

# The library under NumPy 2 (SphereFaceLoss and its parent) and under recent torch (HistogramLoss).
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional:UserWarning"),
]

NUM_CLASSES, DIM = 4, 5

SETTINGS: dict[str, dict[str, Scalar]] = {
    "pml:AngularLoss": {},
    "pml:ArcFaceLoss": {"margin": 20, "scale": 32.5},
    "pml:CircleLoss": {},
    "pml:ContrastiveLoss": {"neg_margin": 1.2},
    "pml:CosFaceLoss": {"scale": 16},
    "pml:FastAPLoss": {},
    "pml:GeneralizedLiftedStructureLoss": {},
    "pml:HistogramLoss": {"n_bins": 20},
    "pml:InstanceLoss": {},
    "pml:IntraPairVarianceLoss": {},
    "pml:LargeMarginSoftmaxLoss": {},
    "pml:LiftedStructureLoss": {},
    "pml:MarginLoss": {"learn_beta": True, "nu": 0.01},
    "pml:MultiSimilarityLoss": {"base": 0.4},
    "pml:NCALoss": {},
    "pml:NPairsLoss": {},
    "pml:NTXentLoss": {},
    "pml:NormalizedSoftmaxLoss": {},
    "pml:P2SGradLoss": {},
    "pml:PNPLoss": {"variant": "Ds"},
    "pml:ProxyAnchorLoss": {},
    "pml:ProxyNCALoss": {"softmax_scale": 3},
    "pml:RankedListLoss": {"margin": 0.4, "Tn": 2, "alpha": 1.3},
    "pml:SignalToNoiseRatioContrastiveLoss": {"neg_margin": 2.0},
    "pml:SoftTripleLoss": {"centers_per_class": 2},
    "pml:SphereFaceLoss": {},
    "pml:SubCenterArcFaceLoss": {"sub_centers": 2},
    "pml:SupConLoss": {},
    "pml:ThresholdConsistentMarginLoss": {},
    "pml:TripletMarginLoss": {"margin": 0.2, "triplets_per_anchor": 2},
    "pml:TupletMarginLoss": {},
}
SIZES = {"num_classes": NUM_CLASSES, "embedding_size": DIM, "descriptors_dim": DIM}

each_name = pytest.mark.parametrize("name", list(SETTINGS))


def build(name: str, params: dict[str, Scalar] | None = None, seed: int = 0) -> ForeignLoss:
    settings = SETTINGS.get(name, {}) if params is None else params
    return pml.build(name, settings, num_classes=NUM_CLASSES, dim=DIM, seed=seed)


def embeddings(
    num_rows: int = 16, dtype: torch.dtype = torch.float64, labels: list[int] | None = None
) -> Embeddings:
    """Four classes, an equal number each, the rows of a class together: what the pickiest loss asks for."""
    y_N = torch.arange(num_rows) // max(1, num_rows // NUM_CLASSES) % NUM_CLASSES
    if labels is not None:
        y_N = torch.tensor(labels)
    z_ND = torch.randn(len(y_N), DIM, dtype=dtype, generator=torch.Generator().manual_seed(0))
    z_ND = z_ND + 0.5 * functional.one_hot(y_N, DIM)
    return Embeddings(functional.normalize(z_ND).requires_grad_(), y_N, torch.arange(len(y_N)))


def gradients(total: Tensor, *leaves: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found)
    return list(found)


def test_every_loss_of_labelled_embeddings_is_covered() -> None:
    usable = set()
    for key in vars(foreign_losses):
        try:
            pml.parameters_of(f"pml:{key}")
        except ValueError:
            continue
        usable.add(f"pml:{key}")
    assert usable == SETTINGS.keys()


@each_name
def test_value_and_gradients_are_the_library_s(name: str) -> None:
    loss, batch = build(name).double(), embeddings()
    library = copy.deepcopy(loss.library_loss)
    total, count = loss(batch)
    assert count.item() == 1
    assert total.shape == count.shape == ()
    assert total.dtype == torch.float64
    got = gradients(total, batch.z_ND, *loss.parameters())
    if SETTINGS[name].get("triplets_per_anchor"):
        return
    expected = library(batch.z_ND, batch.y_N).reshape(())
    assert expected.item() > 0
    torch.testing.assert_close(total, expected.to(total), rtol=1e-13, atol=0)
    wanted = gradients(expected, batch.z_ND, *library.parameters())
    for gradient, reference in zip(got, wanted, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-14)


@each_name
def test_settings_reach_the_library(name: str) -> None:
    """Built by hand with the same arguments and random state: the same parameters, the same value."""
    kind = getattr(foreign_losses, name.removeprefix("pml:"))
    asked = pml._accepted(kind)
    torch.manual_seed(5)
    library = kind(**{key: size for key, size in SIZES.items() if key in asked}, **SETTINGS[name])
    loss = build(name, seed=5)
    torch.testing.assert_close(loss.library_loss.state_dict(), library.state_dict(), rtol=0, atol=0)
    if not SETTINGS[name].get("triplets_per_anchor"):
        batch = embeddings(dtype=torch.float32)
        torch.testing.assert_close(
            loss(batch).total, library(batch.z_ND, batch.y_N).reshape(()), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("split", [(6, 5, 5), (15, 0, 1), (0, 0, 16)], ids=str)
@each_name
def test_ranks_add_up_to_one_process(name: str, split: tuple[int, ...]) -> None:
    """Three ranks with a copy of the loss each, twice: total, count and gradients sum to those of one."""
    one, batch = build(name).double(), embeddings()
    ranks = [copy.deepcopy(one) for _ in split]
    for _ in range(2):
        whole, start, parts = one(batch), 0, []
        wanted = gradients(whole.total, batch.z_ND, *one.parameters())
        summed = [torch.zeros_like(gradient) for gradient in wanted]
        for rank, size in zip(ranks, split, strict=True):
            torch.manual_seed(start)
            parts.append(rank(batch.rows(slice(start, start + size)), batch))
            for i, part in enumerate(gradients(parts[-1].total, batch.z_ND, *rank.parameters())):
                summed[i] = summed[i] + part
            start += size
        torch.testing.assert_close(sum(p.total for p in parts), whole.total, rtol=1e-13, atol=0)
        torch.testing.assert_close(sum(p.count for p in parts), whole.count, rtol=1e-13, atol=0)
        for gradient, reference in zip(summed, wanted, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-14)


@each_name
def test_steps_can_be_taken_one_after_another(name: str) -> None:
    loss, batch = build(name), embeddings(dtype=torch.float32)
    optimizer = torch.optim.SGD([batch.z_ND, *loss.parameters()], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss(batch).total.backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in (batch.z_ND, *loss.parameters()))


def test_random_choices_change_from_call_to_call_and_leave_others_alone() -> None:
    loss, batch = build("pml:TripletMarginLoss", {"triplets_per_anchor": 1}), embeddings(dtype=torch.float32)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    values = [loss(batch).total.item() for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(values)) > 1
    resumed = build("pml:TripletMarginLoss", {"triplets_per_anchor": 1})
    next_value = loss(batch).total
    resumed.load_state_dict({"calls": torch.tensor(4)})
    torch.manual_seed(2)
    assert torch.equal(resumed(batch).total, next_value)


@each_name
def test_no_rows_give_zero_on_the_graph(name: str) -> None:
    loss, empty, references = build(name), embeddings(0, torch.float32), embeddings(dtype=torch.float32)
    for others in (None, embeddings(0, torch.float32)):
        total, count = loss(empty, others)
        assert total.item() == count.item() == 0
        assert all((g == 0).all() for g in gradients(total, empty.z_ND, *loss.parameters()))
    total, count = loss(references.rows(slice(0)), references)
    assert total.item() == count.item() == 0
    found = gradients(total, references.z_ND, *loss.parameters())
    assert all((gradient == 0).all() for gradient in found)


@pytest.mark.parametrize("name", ["pml:TripletMarginLoss", "pml:MarginLoss", "pml:NCALoss", "pml:NPairsLoss"])
def test_a_constant_of_the_library_stays_on_the_graph(name: str) -> None:
    """One row has no pairs, and the library's zero knows nothing of its own parameters."""
    loss, batch = build(name), embeddings(1, torch.float32)
    total, count = loss(batch)
    assert total.item() == 0
    assert count.item() == 1
    assert all((g == 0).all() for g in gradients(total, batch.z_ND, *loss.parameters()))


@pytest.mark.parametrize(
    "name", ["pml:ArcFaceLoss", "pml:ProxyNCALoss", "pml:ContrastiveLoss", "pml:CircleLoss"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_computed_in_full(name: str, dtype: torch.dtype) -> None:
    loss, batch = build(name), embeddings(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        under = loss(batch).total
    rounded = batch._replace(z_ND=batch.z_ND.detach().to(dtype))
    half, exact = loss(rounded).total, loss(rounded._replace(z_ND=rounded.z_ND.float())).total
    assert under.dtype == half.dtype == torch.float32
    torch.testing.assert_close(under, loss(batch).total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(half, exact, rtol=0, atol=0)


def test_the_library_does_not_change_the_dtype_of_its_parameters() -> None:
    loss = build("pml:ArcFaceLoss")
    assert loss(embeddings(dtype=torch.float64)).total.dtype == torch.float32
    assert {p.dtype for p in loss.parameters()} == {torch.float32}
    assert loss.double()(embeddings(dtype=torch.float32)).total.dtype == torch.float64
    assert {p.dtype for p in loss.parameters()} == {torch.float64}


@each_name
def test_every_loss_is_copied_and_pickled(name: str) -> None:
    loss = build(name)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        torch.testing.assert_close(twin.state_dict(), loss.state_dict())


@each_name
def test_all_of_the_library_s_tensors_move_with_the_loss(name: str) -> None:
    """On a GPU, an attribute left behind on the CPU cannot be indexed with labels (MarginLoss.beta)."""
    loss = build(name)
    assert not [key for part in loss.modules() for key, value in vars(part).items() if torch.is_tensor(value)]
    assert {tensor.device.type for tensor in loss.to("meta").state_dict().values()} <= {"meta"}


def test_parameters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build("pml:ArcFaceLoss", seed=0).library_loss.W
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first, build("pml:ArcFaceLoss", seed=0).library_loss.W)
    assert not torch.equal(first, build("pml:ArcFaceLoss", seed=1).library_loss.W)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "pml:TripletMarginLoss",
            {"margin": 0.05, "swap": False, "smooth_loss": False, "triplets_per_anchor": "all"},
        ),
        ("pml:ArcFaceLoss", {"margin": 28.6, "scale": 64}),
        ("pml:CosFaceLoss", {"margin": 0.35, "scale": 64}),
        ("pml:SphereFaceLoss", {"margin": 4, "scale": 1}),
        ("pml:SubCenterArcFaceLoss", {"margin": 28.6, "scale": 64, "sub_centers": 3}),
        ("pml:ProxyNCALoss", {"softmax_scale": 1}),
        ("pml:SignalToNoiseRatioContrastiveLoss", {"pos_margin": 0, "neg_margin": 1}),
        (
            "pml:MarginLoss",
            {"margin": 0.2, "nu": 0, "beta": 1.2, "triplets_per_anchor": "all", "learn_beta": False},
        ),
        ("pml:RankedListLoss", {"imbalance": 0.5, "Tp": 0}),
        ("pml:HistogramLoss", {}),
        ("pml:NPairsLoss", {}),
        ("pml:P2SGradLoss", {}),
    ],
)
def test_parameters_come_from_all_constructors_up_the_line(name: str, expected: dict[str, Scalar]) -> None:
    assert pml.parameters_of(name) == expected


def test_margin_loss_learns_a_boundary_per_class() -> None:
    (beta,) = build("pml:MarginLoss", {"learn_beta": True}).parameters()
    assert beta.shape == (NUM_CLASSES,)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "pml:TripletMarginLos",
            {},
            "loss='pml:TripletMarginLos' is unknown; did you mean 'pml:TripletMarginLoss'",
        ),
        ("pml:contrastive", {}, "is unknown; did you mean 'pml:ContrastiveLoss'"),
        ("contrastive", {}, "is unknown; .*known are: pml:AngularLoss"),
        ("ContrastiveLoss", {}, "did you mean 'pml:ContrastiveLoss'"),
        ("pml:CrossBatchMemory", {}, "cannot be used: it is no subclass of .*losses.BaseMetricLossFunction"),
        ("pml:SelfSupervisedLoss", {}, "cannot be used: it is no subclass of"),
        ("pml:MultipleLosses", {}, "cannot be used: it is no subclass of"),
        ("pml:BaseMetricLossFunction", {}, "cannot be used: it is abstract"),
        ("pml:GenericPairLoss", {}, "cannot be used: it is abstract"),
        ("pml:VICRegLoss", {}, "cannot be used: it takes no labels"),
        ("pml:SmoothAPLoss", {}, "cannot be used: it mixes classes"),
        ("pml:DynamicSoftMarginLoss", {}, "cannot be used: its histogram keeps the graph"),
        ("pml:ContrastiveLoss", {"margin": 1.0}, "has no parameter 'margin'; did you mean 'pos_margin'"),
        ("pml:ArcFaceLoss", {"num_classes": 3}, "has no parameter 'num_classes'"),
        ("pml:ArcFaceLoss", {"embedding_size": 3}, "has no parameter 'embedding_size'"),
        ("pml:ArcFaceLoss", {"distance": "cosine"}, "has no parameter 'distance'"),
        ("pml:NPairsLoss", {"margin": 1.0}, "there is none to choose"),
        ("pml:ArcFaceLoss", {"scale": "64"}, "scale='64' must be of type number, like 64"),
        ("pml:ArcFaceLoss", {"scale": True}, "scale=True must be of type number"),
        ("pml:ArcFaceLoss", {"scale": float("nan")}, "scale=nan must be a finite number"),
        ("pml:TripletMarginLoss", {"swap": 1}, "swap=1 must be of type bool, like False"),
        ("pml:TripletMarginLoss", {"triplets_per_anchor": True}, "must be of type str or number, like 'all'"),
        ("pml:RankedListLoss", {}, "needs a value for margin, Tn: there is no default"),
        ("pml:RankedListLoss", {"Tn": 1}, "needs a value for margin: there is no default"),
        (
            "pml:RankedListLoss",
            {"margin": 0.4, "Tn": 1, "imbalance": 2},
            "refuses .*Imbalance must be between",
        ),
        ("pml:PNPLoss", {"variant": "X"}, "refuses .*variant=X but must be one of"),
    ],
)
def test_mistakes_are_named_with_their_mend(name: str, params: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, params)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (embeddings(labels=[0, NUM_CLASSES]), "labels run from 0 to 4, .*num_classes=4"),
        (Embeddings(torch.ones(1, 7), torch.tensor([0]), torch.tensor([0])), "size 7, the loss's dim is 5"),
    ],
    ids=["labels", "size"],
)
def test_what_does_not_fit_the_loss_is_refused(batch: Embeddings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("pml:ArcFaceLoss")(batch)


def test_a_missing_library_is_named_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)
    for ask in (build, pml.parameters_of):
        with pytest.raises(ValueError, match=r"'pml:ArcFaceLoss' needs .*pip install dmlstudy\[pml\]"):
            ask("pml:ArcFaceLoss")
