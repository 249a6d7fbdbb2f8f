"""Near-duplicates across the split: copies with other bytes are found, exactly as plain loops find them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from dmlstudy import data, embedders
from dmlstudy.cli.app import app
from dmlstudy.saved import Model
from dmlstudy.studies import near_duplicates as subject

CLASSES = 8
EACH = 3
STUDY = """
name: near
data: {{name: image_folder, path: {path}, image_size: 24}}
embedder: {{backbone: small_conv, dim: 8, width: 8}}
batch: {{classes: 2, images_per_class: 2}}
training: {{epochs: 1}}
families:
  contrastive: {{space: contrastive}}
protocol: {{num_folds: 2, verdict_seeds: 3}}
"""


def picture(seed: int) -> Image.Image:
    """A soft pattern, as photographs have it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return small.resize((64, 64), Image.Resampling.BICUBIC)


def write(root: Path) -> None:
    """The first picture of class 6 is a recompressed, smaller one of class 1; one of class 7 is flat, as one of 0."""
    for number in range(CLASSES):
        (root / f"k{number}").mkdir(parents=True)
        for shot in range(EACH):
            picture(10 * number + shot).save(root / f"k{number}" / f"{shot}.png")
    sink = io.BytesIO()
    picture(11).resize((40, 40)).save(sink, "JPEG", quality=70)
    (root / "k6" / "0.png").unlink()
    (root / "k6" / "0 <b>.jpg").write_bytes(sink.getvalue())
    for number in (0, 7):
        Image.new("RGB", (64, 64), (9, 9, 9)).save(root / f"k{number}" / "2.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "set")
    return tmp_path / "set"


def test_a_recompressed_smaller_copy_is_found_and_nothing_else(folder: Path) -> None:
    dataset = data.load("image_folder", str(folder), 24)
    assert dataset.num_shared_images == 1  # the flat ones alone: equal bytes do not tell the copy
    found = subject.near_duplicates(dataset)
    assert [(pair.test, pair.development) for pair in found.pairs] == [
        (str(folder / "k6" / "0 <b>.jpg"), str(folder / "k1" / "1.png"))
    ]
    assert (found.num_test, found.num_searched, found.num_flat) == (1, 4 * EACH - 1, 2)
    assert (found.pairs[0].test_class, found.pairs[0].development_class) == ("k6", "k1")
    assert found.lines()[0].startswith("near-duplicates: 1 of 11 test images nearly one of development")


def test_pairs_are_those_of_plain_loops(folder: Path) -> None:
    dataset = data.load("image_folder", str(folder), 24)
    vectors: list[list[NDArray[np.float64] | None]] = []
    for side in (dataset.development, dataset.test):
        of_side: list[NDArray[np.float64] | None] = []
        for row in range(len(side)):
            grey_HW = np.asarray(Image.fromarray(side.read(np.array([row]))[0]).convert("L"), np.float64)
            # 24 is 1.5 times 16: each small pixel is the mean of the pixels that it touches.
            cuts = [(24 * n // 16, -(-24 * (n + 1) // 16)) for n in range(16)]
            small = np.array([[grey_HW[a:b, c:d].mean() for c, d in cuts] for a, b in cuts])
            of_side.append(
                None if small.std() < 1 else (small - small.mean()) / np.linalg.norm(small - small.mean())
            )
        vectors.append(of_side)
    expected = {}
    for row, own in enumerate(vectors[1]):
        scores = [
            (float((own * other).sum()), number)
            for number, other in enumerate(vectors[0])
            if own is not None and other is not None
        ]
        for score, number in sorted(scores, reverse=True)[: subject.MOST_EACH]:
            if score >= 0.3:
                assert dataset.places is not None
                expected[dataset.places(12 + row), dataset.places(number)] = score
    found = subject.near_duplicates(dataset, 0.3)
    assert len(expected) > 5
    assert {(pair.test, pair.development) for pair in found.pairs} == set(expected)
    for pair in found.pairs:
        assert pair.similarity == pytest.approx(expected[pair.test, pair.development], abs=1e-4)
    assert [p.similarity for p in found.pairs] == sorted((p.similarity for p in found.pairs), reverse=True)


def test_a_model_is_asked_at_its_own_size(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    embedder = embedders.build("small_conv", 8, width=8, in_channels=1, image_size=16, seed=0)
    embedders.save(
        embedder, tmp_path / "model", example_NHWC=np.zeros((2, 16, 16, 1), np.uint8), fit=data.Fit(16)
    )
    model = Model.open(tmp_path / "model")
    dataset = data.load("image_folder", str(folder), 24)
    found = subject.near_duplicates(dataset, 1 - 1e-9, model)
    assert found.by == f"cosine of {tmp_path / 'model'}"
    flat = [(pair.test, pair.development) for pair in found.pairs if pair.test_class == "k7"]
    assert flat == [(str(folder / "k7" / "2.png"), str(folder / "k0" / "2.png"))]
    features = data.Features(np.eye(4, dtype=np.float32), np.arange(4) // 2, ("a", "b"))
    others = data.Features(np.eye(4, dtype=np.float32), np.arange(4) // 2, ("c", "d"))
    with pytest.raises(ValueError, match=r"model: takes images, and f has \(4,\); name another model"):
        subject.near_duplicates(data.ZeroShotData("f", features, others), None, model)


def test_features_are_compared_as_they_are() -> None:
    x_ND = np.eye(8, dtype=np.float32) + np.float32(0.01)
    x_ND[7] = 2 * x_ND[0]
    found = subject.near_duplicates(
        data.ZeroShotData(
            "f",
            data.Features(x_ND[:4], np.arange(4) // 2, ("a", "b")),
            data.Features(x_ND[4:], np.arange(4) // 2, ("c", "d")),
        )
    )
    assert [(pair.test, pair.development) for pair in found.pairs] == [
        ("test image 3", "development image 0")
    ]
    assert found.by == "cosine"


@pytest.mark.parametrize("threshold", [0.0, 1.5, -1.0, float("nan")])
def test_a_threshold_that_is_no_cosine_is_refused(threshold: float, folder: Path) -> None:
    with pytest.raises(ValueError, match="give a number above 0, and 1 at most"):
        subject.near_duplicates(data.load("image_folder", str(folder), 24), threshold)


def study_file(folder: Path, tmp_path: Path) -> str:
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.format(path=folder))
    return str(file)


def test_validate_tells_the_pairs_when_it_is_asked_to(folder: Path, tmp_path: Path) -> None:
    spec = study_file(folder, tmp_path)
    store = ["--store", str(tmp_path / "store")]
    told = CliRunner().invoke(app, ["validate", spec, "--no-estimate", "--near-duplicates", *store])
    assert told.exit_code == 0, told.output
    assert "near-duplicates: 1 of 11 test images nearly one of development" in told.output
    assert "k6/0 <b>.jpg" in told.output
    assert "k1/1.png" in told.output
    refused = CliRunner().invoke(app, ["validate", spec, "--no-estimate", "--near-threshold", "0.9", *store])
    assert refused.exit_code != 0
