"""Small models of every kind in folders, and pictures to use them on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlstudy import embedders, hashing, online
from dmlstudy.embedders import Embedder

NUM, SIDE = 30, 12
X = np.random.default_rng(0).normal(size=(NUM, 10)).astype(np.float32)


def embedder(folder: Path, **named: object) -> Embedder:
    """A small network for grey pictures of 8 x 8, saved with an example."""
    made = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0, **named)  # type: ignore[arg-type]
    example = np.random.default_rng(1).integers(0, 256, (2, 8, 8, 1), dtype=np.uint8)
    embedders.save(made, folder, {"family": "test"}, example)
    return made


def codes(folder: Path) -> None:
    made = hashing.build("greedyhash", 16, 10, {}, term=("point_ranking", {}), seed=1).eval()
    hashing.save(made, folder, {}, X[:2])


def learner(folder: Path) -> None:
    params = {"num_hidden": 2, "width": 6, "size": 5}
    made = online.build("oahu", params, num_features=10, seed=3)
    made.partial_fit(online.Constraints(X.reshape(10, 3, 10)))
    online.save(online.Learned(made, online.Preparation.of("unit", X), "oahu", params), folder, {}, X[:2])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a plain embedder, one with a structure head, one with several depths, codes and a learner."""
    root = tmp_path_factory.mktemp("models")
    embedder(root / "plain")
    embedder(root / "structure", structure="official")
    embedder(root / "depth", head_depth=1)
    codes(root / "codes")
    learner(root / "learner")
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 pictures of 12 x 12 in three classes."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(2)
    for number in range(NUM):
        path = folder / f"class{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "x.npz"
    np.savez(path, x=X, y=np.arange(NUM) % 3)
    return path
