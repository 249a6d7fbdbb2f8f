"""A store with a finished study, made without a driver."""

from __future__ import annotations

import pytest
from support.made_study import Maker

from dmlstudy import data
from dmlstudy.registry import connection
from dmlstudy.store import Store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("report") / "store")
    made.prepare()
    connection.connect(made, create=True)
    return made


@pytest.fixture(scope="session")
def small(store: Store) -> Maker:
    """A finished study: ``alpha`` wins over ``beta``, ``gamma`` failed always; models of the winner are kept."""
    test = data.load("digits")
    maker = Maker(store, "small", test_sha256=test.test_fingerprint, development_sha256="d" * 64)
    for score, lr, margin, weighting in (
        (0.50, 1e-3, 0.2, "power"),
        (0.60, 2e-3, 0.3, "exponential"),
        (0.55, 5e-4, 0.1, "power"),
        (0.70, 4e-3, 0.4, "exponential"),
        (0.65, 8e-3, 0.5, "power"),
    ):
        curve = {1: score - 0.1, 2: score}
        maker.search(
            "alpha", "finished", score, curve, training__lr=lr, loss__margin=margin, loss__weighting=weighting
        )
    maker.search(
        "alpha", "pruned", None, {1: 0.3}, training__lr=1e-4, loss__margin=0.1, loss__weighting="power"
    )
    maker.search("beta", "finished", 0.4, {1: 0.4})
    maker.search("gamma", "failed", None, reason="loss is not finite <b>", training__lr=1e-2)
    for seed, (alpha, beta, plain) in enumerate(
        ((0.60, 0.50, 0.1), (0.62, 0.53, 0.2), (0.61, 0.50, 0.15)), 1
    ):
        ids = {
            family: maker.judge(family, seed, score, (2.0, 1.0) if family != "untrained" else ())
            for family, score in (("alpha", alpha), ("beta", beta), ("untrained", plain))
        }
        if seed == 1:
            maker.keep_embedder(ids["alpha"], "alpha", 1)
            maker.keep_embedder(ids["untrained"], "untrained", 2)
    maker.end("alpha")
    return maker
