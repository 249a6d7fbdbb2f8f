"""Building losses by name: what reaches the constructor, and what a user is told when it cannot."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

from dmlstudy.losses import catalogue
from dmlstudy.records import Scalar


@pytest.mark.parametrize("name", list(catalogue.CATALOGUE))
def test_every_entry_is_built_copied_and_pickled(name: str) -> None:
    loss = catalogue.build(name, catalogue.parameters_of(name), num_classes=4, dim=3)
    assert type(loss) is catalogue.CATALOGUE[name]
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        torch.testing.assert_close(twin.state_dict(), loss.state_dict())
    kinds = {parameter.kind for parameter in inspect.signature(type(loss)).parameters.values()}
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
    assert catalogue.parameters_of("margin") == {"alpha": 0.2, "beta": 1.2}
    assert catalogue.parameters_of("triplet_weighting")["margin"] == 0.1


def test_proxies_depend_on_the_seed_alone() -> None:
    def proxies(seed: int) -> torch.Tensor:
        return catalogue.build("proxy_nca", {}, num_classes=4, dim=3, seed=seed).state_dict()["proxies_CD"]

    torch.manual_seed(1)
    first = proxies(0)
    torch.manual_seed(2)
    assert torch.equal(first, proxies(0))
    assert not torch.equal(first, proxies(1))
    torch.testing.assert_close(first.norm(dim=1), torch.ones(4))
