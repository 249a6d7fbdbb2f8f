"""Building losses by name: what reaches the constructor, and what a user is told when it cannot."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings
from dmlstudy.records import Scalar


@pytest.mark.parametrize("name", list(catalogue.CATALOGUE))
def test_every_entry_is_built_copied_and_pickled(name: str) -> None:
    loss = catalogue.build(name, catalogue.parameters_of(name), num_classes=4, dim=3)
    assert type(loss) is catalogue.kind_of(name)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        torch.testing.assert_close(twin.state_dict(), loss.state_dict())
    kinds = {parameter.kind for parameter in inspect.signature(catalogue.CATALOGUE[name]).parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("pair_wieghting", {}, "loss='pair_wieghting' is unknown; did you mean 'pair_weighting'"),
        ("margin", {"betta": 1.0}, "'margin' has no parameter 'betta'; did you mean 'beta'"),
        ("margin", {"num_classes": 3}, "has no parameter 'num_classes'"),
        ("margin", {"beta": "1.2"}, "beta='1.2' must be of type number"),
        ("margin", {"beta": True}, "beta=True must be of type number"),
        ("proxy_nca", {"seed": 1}, "has no parameter 'seed'"),
        (
            "pair_weighting",
            {"weighting": "exp"},
            "weighting='exp' is unknown; .*constant, exponential, power",
        ),
        ("pair_weighting", {"normalize": "batch"}, "normalize='batch' is unknown; .*anchor, none"),
        ("pair_weighting", {"mining": "hard"}, "mining='hard' is unknown"),
        ("pair_weighting", {"distance": "euclid"}, "did you mean 'euclidean'"),
        ("pair_weighting", {"positive_margin": 0.9}, "negative_margin=0.8 must be a finite number >= 0.9"),
        ("pair_weighting", {"q": -1.0}, "q=-1.0 must be a finite number >= 0"),
        ("triplet_weighting", {"alpha": float("nan")}, "alpha=nan must be a finite number"),
        ("multi_similarity", {"beta": 0}, "beta=0 must be a finite number > 0"),
        ("proxy_nca", {"temperature": 0.0}, "temperature=0.0 must be a finite number > 0"),
    ],
)
def test_mistakes_are_named_with_their_mend(name: str, params: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalogue.build(name, params, num_classes=4, dim=3)


def test_parameters_of_lists_hyperparameters_only() -> None:
    assert catalogue.parameters_of("margin") == {
        "alpha": 0.2,
        "beta": 1.2,
        "nu": 0.0,
        "mining": "all",
        "precision": "float32",
    }
    assert catalogue.parameters_of("triplet_weighting")["margin"] == 0.1
    assert catalogue.parameters_of_regularizer("structure")["weight"] == 1.0
    assert catalogue.parameters_of("pml:ContrastiveLoss") == {"pos_margin": 0, "neg_margin": 1}


def test_proxies_depend_on_the_seed_alone() -> None:
    def proxies(seed: int) -> torch.Tensor:
        return catalogue.build("proxy_nca", {}, num_classes=4, dim=3, seed=seed).state_dict()["proxies_CD"]

    torch.manual_seed(1)
    first = proxies(0)
    torch.manual_seed(2)
    assert torch.equal(first, proxies(0))
    assert not torch.equal(first, proxies(1))
    torch.testing.assert_close(first.norm(dim=1), torch.ones(4))


def test_a_regularizer_is_added_with_its_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    z_ND = torch.nn.functional.normalize(torch.randn(12, 3, generator=generator))
    batch = Embeddings(z_ND, torch.arange(12) % 3, torch.arange(12))

    def mean(regularizer: tuple[str, dict[str, Scalar]] | None) -> float:
        loss = catalogue.build("contrastive", {}, regularizer=regularizer, num_classes=3, dim=3)
        total, count = loss(batch)
        return float(total / count)

    alone, once, twice = (
        mean(None),
        mean(("graph_consistency", {"weight": 1.0})),
        mean(("graph_consistency", {"weight": 2.0})),
    )
    assert once > alone
    assert twice - alone == pytest.approx(2 * (once - alone), rel=1e-5)


@pytest.mark.parametrize(
    ("regularizer", "message"),
    [
        (("graph_consistancy", {}), "is unknown; did you mean 'graph_consistency'"),
        (("structure", {"tt": 1.0}), "regularizer 'structure' has no parameter 'tt'"),
        (("structure", {"t": "3"}), "regularizer 'structure': t='3' must be of type number"),
        (
            ("structure", {"weight": -1.0}),
            "regularizer 'structure': weight=-1.0 must be a finite number >= 0",
        ),
        (("structure", {"weight": "high"}), "regularizer 'structure': weight='high' must be a number"),
        (("structure", {"preset": "oficial"}), "regularizer 'structure': preset='oficial' is unknown"),
    ],
)
def test_mistakes_in_a_regularizer_are_named(
    regularizer: tuple[str, dict[str, Scalar]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        catalogue.build("contrastive", {}, regularizer=regularizer, num_classes=4, dim=3)


@pytest.mark.parametrize("name", ["proxy_anchor", "lifted_structure", "pml:ContrastiveLoss"])
def test_a_memory_is_refused_where_it_has_no_meaning(name: str) -> None:
    with pytest.raises(ValueError, match=f"loss '{name}' cannot use a cross-batch memory; .*contrastive"):
        catalogue.build(name, {}, memory=True, num_classes=4, dim=3)


def test_a_foreign_loss_is_built_by_its_prefix() -> None:
    loss = catalogue.build("pml:ContrastiveLoss", {"neg_margin": 0.7}, num_classes=4, dim=3)
    batch = Embeddings(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 0]), torch.arange(3))
    total, count = loss(batch)
    assert total / count > 0
