"""Losses in a loop of one's own, put together from objects, and what is said of parts that do not fit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy import losses
from dmlstudy.losses import catalogue
from dmlstudy.losses.distances import Cosine, euclidean
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.mining import Thresholds, keep_all
from dmlstudy.losses.pair_weighting import PairWeighting
from dmlstudy.losses.tiles import Side
from dmlstudy.losses.unused import SWITCHES, unused
from dmlstudy.losses.weighting import Constant, Exponential, Power


def batch() -> tuple[Tensor, Tensor]:
    z_ND = torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return functional.normalize(z_ND).requires_grad_(), torch.arange(12) % 3


class Squared:
    """A weighting of one's own: u = e^2."""

    def raw(self, excess: Tensor, largest: Tensor | None) -> Tensor:
        return excess**2

    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        return 2 * excess


class WrongSlope(Squared):
    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        return excess


class WrongGradient(Cosine):
    def left_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        return -gradient_NF


def beyond(positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
    """A miner of one's own."""
    return positive.chosen & (positive.d >= 0.0), negative.chosen & (negative.d <= 0.9)


def only_one_mask(positive: Side, negative: Side) -> Tensor:
    return positive.chosen


def float_masks(positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
    return positive.chosen.float(), negative.chosen.float()


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "pair_weighting",
        {"weighting": Squared(), "normalize": "none", "detach_weights": False},
        {"weighting": "power", "p": 2.0, "q": 2.0, "normalize": "none", "detach_weights": False},
    ),
    ("pair_weighting", {"weighting": Constant()}, {"weighting": "constant"}),
    ("pair_weighting", {"mining": keep_all}, {"mining": "threshold"}),
    ("pair_weighting", {"distance": euclidean}, {}),
    (
        "triplet_weighting",
        {"weighting": Power(2.0), "mining": beyond},
        {"weighting": "power", "p": 2.0, "mining": "threshold", "negative_margin": 0.9},
    ),
    ("triplet", {"mining": keep_all, "margin": 0.5}, {"mining": "all", "margin": 0.5}),
]


@pytest.mark.parametrize(("name", "objects", "names"), SAME)
def test_an_object_computes_what_its_name_does(
    name: str, objects: dict[str, Any], names: dict[str, Any]
) -> None:
    z_ND, labels_N = batch()
    values = [losses.build(name, **params)(z_ND, labels_N) for params in (objects, names)]
    assert values[0] > 0
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, z_ND)[0] for value in values))


def test_each_sign_may_have_a_weighting_of_its_own() -> None:
    z_ND, labels_N = batch()
    parts = PairWeighting(positive_weighting=Exponential(1.0), negative_weighting=Exponential(5.0))
    total, count = parts(Embeddings(z_ND, labels_N, torch.arange(12)))
    value = losses.build("pair_weighting", alpha=1.0, beta=5.0)(z_ND, labels_N)
    torch.testing.assert_close(total / count, value)


@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
def test_rows_of_one_image_are_no_positive_pair() -> None:
    z_ND, labels_N = batch()
    loss = losses.build("triplet", margin=0.5)
    assert loss(z_ND, labels_N) > 0
    assert loss(z_ND, labels_N, labels_N) == 0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("pair_weighting", {"weighting": WrongSlope()}, "slope is not the derivative of raw; pass an object"),
        ("pair_weighting", {"weighting": object()}, r"is no Weighting; pass an object with raw\(excess"),
        ("pair_weighting", {"weighting": Power}, "is no Weighting"),
        ("pair_weighting", {"weighting": 3}, "weighting=3 must be of type str"),
        ("pair_weighting", {"mining": only_one_mask}, "it gives no pair of masks; pass a callable"),
        ("pair_weighting", {"mining": float_masks}, "a mask is torch.float32"),
        ("triplet", {"mining": Thresholds}, "is no Miner"),
        ("pair_weighting", {"distance": torch.cdist}, "is no Distance; pass an object with the methods"),
        ("triplet", {"distance": WrongGradient()}, "its gradients are not those of its values"),
        ("triplet", {"mining": "distance_weighted", "distance": Cosine()}, "draws by Euclidean distances"),
        ("margin", {"num_classes": 3, "mining": beyond}, "is no NegativeDraw"),
        ("multi_similarity", {"weighting": Squared()}, "has no parameter 'weighting'"),
        ("proxy_anchor", {}, "needs num_classes and dim; pass num_classes="),
        ("pair_weighting", {"weighting": "constant", "p": 2.0}, "p=2.0 is not used by weighting='constant'"),
        ("pair_weighting", {"weighting": Squared(), "p": 2.0}, "p=2.0 is not used by weighting="),
        ("triplet_weighting", {"epsilon": 0.2}, "epsilon=0.2 is not used by mining='all'; .* to 'margin'"),
        (
            "contrastive",
            {"regularizer": ("graph_consistency", {"sigma_mode": "median", "sigma": 2.0})},
            "regularizer 'graph_consistency': sigma=2.0 is not used by sigma_mode='median'",
        ),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        losses.build(name, **params)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_those_of_the_catalogue(name: str) -> None:
    """Defaults and parameters as in the catalogue; each option can be built with what it uses."""
    is_loss = name in catalogue.CATALOGUE
    defaults = (catalogue.parameters_of if is_loss else catalogue.parameters_of_regularizer)(name)
    sizes: dict[str, Any] = dict.fromkeys(catalogue.sizes_of(name), 3) if is_loss else {}
    for switch, (default, uses) in SWITCHES[name].items():
        assert defaults[switch] == default
        for option, own in uses.items():
            params = {switch: option} | {parameter: defaults[parameter] for parameter in own}
            assert list(unused(name, params)) == []
            if is_loss:
                losses.build(name, class_sizes=[1, 2, 3], **sizes, **params)
            else:
                losses.build("contrastive", regularizer=(name, params))


def test_joined_miners_use_what_each_does() -> None:
    params = {"mining": "threshold+margin", "epsilon": 0.1}
    assert list(unused("pair_weighting", params)) == []


def test_the_package_is_imported_without_its_heavy_parts() -> None:
    ask = (
        "import sys, dmlstudy, dmlstudy.losses.unused; dmlstudy.__version__;"
        "print(sorted({'torch', 'pandas', 'mlflow', 'ray'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"
