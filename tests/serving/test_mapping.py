"""Old galleries in a new model's space: mapped without pictures, whole or not at all; misfits are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmlstudy import data
from dmlstudy.data import embedding_files
from dmlstudy.registry.map_fitting import fit_map
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import SpaceMap
from dmlstudy.serving import mapping
from dmlstudy.serving.gallery import build, open_gallery
from dmlstudy.serving.guards import Limits
from dmlstudy.serving.mapping import map_into
from dmlstudy.serving.retriever import Retriever
from dmlstudy.serving.server import Service

from .conftest import embedder
from .test_gallery import embedded


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model for the same pictures, of more numbers."""
    folder = tmp_path_factory.mktemp("new")
    embedder(folder / "model", pooling="avg")
    return folder / "model"


def fitted(source: Model, target: Model, folder: Path) -> SpaceMap:
    x_ND = np.random.default_rng(0).normal(size=(40, 6))
    return fit_map(
        "linear",
        x_ND,
        x_ND[:, ::-1],
        np.arange(40) % 5,
        names=("a", "b"),
        fingerprints=(source.fingerprint, target.fingerprint),
        is_unit=True,
    ).save(folder)


def test_a_gallery_and_a_file_are_mapped_alike(
    new: Path, models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "BATCH", 7)
    monkeypatch.setattr(embedding_files, "BATCH", 4)
    old, target = Model.open(models["plain"]), Model.open(new)
    z = embedded(models["plain"], pictures, tmp_path)
    build(z, tmp_path / "old", "hnsw")
    space_map = fitted(old, target, tmp_path / "map")
    seen: list[int] = []

    def follow(batches, number):  # type: ignore[no-untyped-def]
        for each in batches:
            seen.append(number)
            yield each

    made = map_into(target, tmp_path / "old", tmp_path / "mapped", space_map, follow)
    assert seen == [5] * 5
    map_into(target, z, tmp_path / "mapped.parquet", space_map)
    ids, labels, z_ND = data.read_embeddings(z)
    mapped = open_gallery(tmp_path / "mapped", device="cpu")
    assert (made.num_items, made.dim) == (30, 6)
    np.testing.assert_array_equal(mapped.vectors_MD, space_map(z_ND))
    again = data.read_embeddings(tmp_path / "mapped.parquet")
    assert again[:2] == (ids, labels)
    assert (list(mapped.ids), mapped.labels) == (ids, labels)
    np.testing.assert_array_equal(again[2], space_map(z_ND))
    assert mapped.model == target.fingerprint
    assert mapped.map is not None
    assert (mapped.map.digest, mapped.map.made_by) == (space_map.digest, old.fingerprint)
    assert mapped.index is not None
    assert mapped.index.identity.kind == "hnsw"
    assert f"map {space_map.digest[:12]}" in mapped.line
    assert Retriever(target, mapped).rerank == "none"
    with pytest.raises(ValueError, match="the gallery was made by another model"):
        Retriever(old, mapped)
    with pytest.raises(ValueError, match="went through a map already"):
        map_into(target, tmp_path / "mapped", tmp_path / "x.parquet", _to_itself(target, tmp_path))
    left = {"old", "map", "self", "mapped", "mapped.parquet", "z.parquet"}
    assert {path.name for path in tmp_path.iterdir()} == left


def _to_itself(model: Model, folder: Path) -> SpaceMap:
    return fitted(model, model, folder / "self")


def test_queries_go_through_a_map_to_an_old_gallery(
    new: Path, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    old, target = Model.open(models["plain"]), Model.open(new)
    gallery = build(embedded(models["plain"], pictures, tmp_path), tmp_path / "old")
    space_map = fitted(target, old, tmp_path / "map")
    images = np.random.default_rng(3).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
    retriever = Retriever(target, gallery, space_map=space_map)
    query_QD = space_map(target.compute(images))
    apart_QM = np.linalg.norm(query_QD[:, None] - np.asarray(gallery.vectors_MD)[None], axis=2)
    for query, found in enumerate(retriever(images, 3)):
        np.testing.assert_array_equal(found.place_K, np.argsort(apart_QM[query])[:3])
    service = Service(target, tmp_path / "old", Limits(), space_map=space_map)
    assert service.about["gallery"]["query_map"] == space_map.digest
    assert service.about["gallery"]["bytes_per_vector"] == 24
    service.close()
    for model, own, message in (
        (target, None, "the gallery was made by another model .* give --map"),
        (old, space_map, "the map leads from another model's space"),
        (target, _to_itself(target, tmp_path), "the map leads to another model's space"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            Retriever(model, gallery, space_map=own)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="--map is for queries of a gallery"):
        Service(target, None, Limits(), space_map=space_map)


def test_what_cannot_be_mapped_is_refused_and_leaves_nothing(
    new: Path, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    old, target = Model.open(models["plain"]), Model.open(new)
    z = embedded(models["plain"], pictures, tmp_path)
    build(z, tmp_path / "short", bits=8, beside="none")
    build(z, tmp_path / "kept", bits=8)
    space_map = fitted(old, target, tmp_path / "map")
    map_into(target, tmp_path / "kept", tmp_path / "fine.parquet", space_map)
    (tmp_path / "text").write_text("mine")
    for model, source, output, message in (
        (target, "short", "out.parquet", "holds short vectors or codes alone"),
        (old, "z.parquet", "out.parquet", "the map leads to another model's space"),
        (target, "nowhere", "out.parquet", "nowhere: no such file"),
        (target, "text", "out.parquet", "not a readable Parquet file"),
        (target, "z.parquet", "kept", "kept: exists already"),
        (target, "z.parquet", "no/out", "no such folder"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            map_into(model, tmp_path / source, tmp_path / output, space_map)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.parquet").exists()
    with pytest.raises(ValueError, match="made by another model"):
        map_into(target, z, tmp_path / "out.parquet", _to_itself(target, tmp_path))
