"""Embedding in parts: the same numbers however it is cut, broken off or shared out; nothing half-written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dmlstudy import data
from dmlstudy.registry import kinds
from dmlstudy.use import embedding
from dmlstudy.use.embedding import Job, embed_into, one_by_one, opened


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "PART", 7)


def job(model: Path, inputs: Path, output: Path, batch_size: int = 4) -> Job:
    return Job(str(model), str(inputs), str(output), batch_size, "cpu")


@pytest.mark.parametrize("kind", ["plain", "structure", "depth", "codes", "learner"])
def test_every_kind_of_model(
    kind: str, models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    inputs = vectors if kind in ("codes", "learner") else pictures
    told: list[tuple[list[int], int]] = []

    def follow(parts: Iterator[int], number: int) -> list[int]:
        told.append((list(parts), number))
        return told[-1][0]

    output = tmp_path / "z.parquet"
    num, dim = embed_into(job(models[kind], inputs, output), one_by_one, follow)  # type: ignore[arg-type]
    ids, labels, z_ND = data.read_embeddings(output)
    items = opened(models[kind], inputs)
    expected = kinds.verified(models[kind])(items.read(range(len(items))))
    assert (num, dim) == (len(items), expected.shape[1])
    assert (ids, labels) == (list(items.ids), items.labels)
    assert z_ND.dtype == expected.dtype
    np.testing.assert_allclose(z_ND, expected, atol=1e-6)
    assert told == [([0, 1, 2, 3, 4], 5)]
    assert data.embeddings_origin(output) == {
        "model": kinds.fingerprint(models[kind]),
        "source": str(inputs),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["z.parquet"]


def test_broken_off_it_goes_on_from_its_parts(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    own = job(models["plain"], pictures, tmp_path / "z.parquet")

    def breaking(own: Job, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers[:3]:
            yield own.make(number)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_into(own, breaking)
    assert not (tmp_path / "z.parquet").exists()
    made: list[int] = []

    def noting(own: Job, numbers: Sequence[int]) -> Iterator[int]:
        made.extend(numbers)
        return one_by_one(own, numbers)

    embed_into(job(models["plain"], pictures, tmp_path / "z.parquet"), noting)
    assert made == [3, 4]
    embed_into(job(models["plain"], pictures, tmp_path / "whole.parquet"))
    first, second = (data.read_embeddings(tmp_path / name) for name in ("z.parquet", "whole.parquet"))
    assert first[:2] == second[:2]
    np.testing.assert_array_equal(first[2], second[2])


def test_parts_of_something_else_are_refused(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    def breaking(own: Job, numbers: Sequence[int]) -> Iterator[int]:
        yield own.make(numbers[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_into(job(models["plain"], pictures, tmp_path / "z.parquet"), breaking)
    for model, inputs in (("structure", pictures), ("plain", pictures / "class0")):
        with pytest.raises(
            ValueError, match=r"z\.parquet\.parts: holds parts of another model or other items"
        ):
            embed_into(job(models[model], inputs, tmp_path / "z.parquet"))


def test_a_picture_that_is_none_is_named_and_the_output_left_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"no picture")
    output = tmp_path / "z.parquet"
    data.write_embeddings(output, ["before"], None, np.ones((1, 6), np.float32))
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"a\.png: not a readable image"):
        embed_into(job(models["plain"], folder, output))
    assert output.read_bytes() == before


def test_what_is_refused(models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; make it or name another output"):
        embed_into(job(models["plain"], pictures, tmp_path / "none" / "z.parquet"))
    with pytest.raises(ValueError, match="is a folder; name a file"):
        embed_into(job(models["plain"], pictures, tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in this folder"):
        embed_into(job(models["plain"], tmp_path / "empty", tmp_path / "z.parquet"))
    with pytest.raises(ValueError, match="vectors of size 10; the model takes 9"):
        data.open_vectors(vectors, 9)
    assert not list(tmp_path.glob("z*"))
