"""Maps between spaces: what they compute, whole folders, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dmlstudy import model_folder
from dmlstudy.registry.map_fitting import fit_map
from dmlstudy.saved.space_map import MAP_KINDS, SpaceMap, check_map_kind

X = np.random.default_rng(0).normal(size=(60, 5))
Y = np.random.default_rng(1).normal(size=(60, 4))


def fitted(kind: str) -> SpaceMap:
    facts = {"names": ("a/1", "a/2"), "fingerprints": ("aa", "bb"), "is_unit": kind != "linear"}
    return fit_map(kind, X, Y, np.arange(60) % 6, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MAP_KINDS)
def test_a_saved_map_computes_the_same(kind: str, tmp_path: Path) -> None:
    made = fitted(kind)
    kept = made.save(tmp_path / "map")
    again = SpaceMap.open(tmp_path / "map")
    assert len(kept.digest) == 64
    assert again.digest == kept.digest
    assert again.described == made.described
    np.testing.assert_array_equal(again(X), made(X))
    if kind != "linear":
        np.testing.assert_allclose(np.linalg.norm(made(X), axis=1), 1, atol=1e-6)
    with pytest.raises(ValueError, match="exists already; name a new folder"):
        made.save(tmp_path / "map")
    with pytest.raises(ValueError, match="takes embeddings of size 5, not an array"):
        made(Y)
    assert made(X[:0]).shape == (0, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["map"]


def test_a_map_that_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no map\.json; name a folder"):
        SpaceMap.open(tmp_path)
    folder = tmp_path / "map"
    fitted("linear").save(folder)
    description = folder / "map.json"
    whole = json.loads(description.read_text())
    for change, message in (
        ({"format_version": 2}, "format 2, this version reads 1"),
        ({"kind": "spline"}, "not understood"),
        ({"source_dim": 6}, "expected"),
    ):
        description.write_text(json.dumps({**whole, **change}))
        with pytest.raises(ValueError, match="altered since it was saved"):
            SpaceMap.open(folder)
        model_folder.seal(folder)
        with pytest.raises(ValueError, match=message) as caught:
            SpaceMap.open(folder)
        assert "\n" not in str(caught.value)
    description.write_text(json.dumps(whole))
    weights = load_file(folder / model_folder.WEIGHTS)
    save_file({**weights, "A": weights["A"] * np.nan}, folder / model_folder.WEIGHTS)
    model_folder.seal(folder)
    with pytest.raises(ValueError, match="numbers that are not finite"):
        SpaceMap.open(folder)
    with pytest.raises(ValueError, match="--map spline: choose from linear, orthogonal, mlp"):
        check_map_kind("spline")
