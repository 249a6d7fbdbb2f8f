"""Fits of maps against their closed forms, and what they recover."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import orthogonal_procrustes

from dmlstudy.registry import map_fitting
from dmlstudy.registry.map_fitting import fit_map, procrustes, ridge

RNG = np.random.default_rng(0)


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=1, keepdims=True)


X = unit(RNG.normal(size=(200, 6)))
LABELS = np.arange(200) % 8
FACTS = {"names": ("a", "b"), "fingerprints": ("aa", "bb")}


def test_ridge_is_the_minimum_of_its_sum() -> None:
    y = RNG.normal(size=(200, 3))
    mean_D, a_DE, b_E = ridge(X, y, 0.1)
    penalty = 0.1 * np.trace((X - mean_D).T @ (X - mean_D)) / 6
    gradient = (X - mean_D).T @ ((X - mean_D) @ a_DE + b_E - y) + penalty * a_DE
    np.testing.assert_allclose(gradient, 0, atol=1e-10)


def test_procrustes_is_scipys_and_recovers_a_rotation() -> None:
    rotation, _ = np.linalg.qr(RNG.normal(size=(6, 6)))
    np.testing.assert_allclose(procrustes(X, X @ rotation), rotation, atol=1e-10)
    noisy = X @ rotation + 0.1 * RNG.normal(size=X.shape)
    np.testing.assert_allclose(procrustes(X, noisy), orthogonal_procrustes(X, noisy)[0], atol=1e-10)
    found = fit_map("orthogonal", X, X @ rotation, LABELS, is_unit=True, **FACTS)  # type: ignore[arg-type]
    np.testing.assert_allclose(found(X), X @ rotation, atol=1e-6)


@pytest.mark.parametrize(("dim", "other"), [(6, 4), (4, 6)])
def test_sizes_may_differ(dim: int, other: int) -> None:
    x, y = unit(RNG.normal(size=(50, dim))), unit(RNG.normal(size=(50, other)))
    a = procrustes(x, y)
    np.testing.assert_allclose(a.T @ a if dim > other else a @ a.T, np.eye(min(dim, other)), atol=1e-10)
    for kind in ("linear", "orthogonal", "mlp"):
        assert fit_map(kind, x, y, LABELS[:50], is_unit=True, **FACTS)(x).shape == (50, other)  # type: ignore[arg-type]


def test_the_mlp_finds_what_a_line_does_not_and_the_same_twice() -> None:
    y = unit(np.abs(X))
    errors = {}
    for kind in ("linear", "mlp"):
        found = fit_map(kind, X, y, LABELS, is_unit=True, **FACTS)  # type: ignore[arg-type]
        errors[kind] = float(((found(X) - y) ** 2).mean())
    assert errors["mlp"] < 0.5 * errors["linear"]
    again = fit_map("mlp", X, y, LABELS, is_unit=True, **FACTS)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again(X), found(X))


def test_the_penalty_is_chosen_on_other_classes() -> None:
    noise = RNG.normal(size=(200, 4))
    assert map_fitting._best_share(X, noise, LABELS % 2 == 0) >= 1
    assert map_fitting._best_share(X, X[:, :4], LABELS % 2 == 0) <= 1e-5
    with pytest.raises(ValueError, match="1 development items; a map needs at least 2"):
        fit_map("linear", X[:1], X[:1], LABELS[:1], is_unit=True, **FACTS)  # type: ignore[arg-type]
