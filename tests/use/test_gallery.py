"""Galleries and search by example: exact against plain loops, re-ranked where the model has a head, faults named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dmlstudy import data, embedders, hashing, online
from dmlstudy.registry import kinds
from dmlstudy.use import gallery as galleries
from dmlstudy.use.embedding import Job, embed_into, opened
from dmlstudy.use.gallery import Gallery, build, open_gallery
from dmlstudy.use.retrieving import retrieve, write_contact_sheet
from dmlstudy.use.search import Layers, Searcher, by_layers

from .conftest import X


def embedded(model: Path, inputs: Path, folder: Path) -> Path:
    output = folder / "z.parquet"
    embed_into(Job(str(model), str(inputs), str(output), device="cpu"))
    return output


def made(model: Path, inputs: Path, folder: Path, kind: str = "flat") -> Gallery:
    return build(embedded(model, inputs, folder), folder / "gallery", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["plain", "codes", "learner"])
def test_search_is_the_loop_over_items(
    kind: str, models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    inputs = pictures if kind == "plain" else vectors
    gallery = made(models[kind], inputs, tmp_path)
    queries = opened(models[kind], inputs)
    z_ND = kinds.verified(models[kind])(queries.read(range(len(queries)))).astype(np.float64)
    hits = retrieve(Searcher(models[kind], gallery, rerank="none"), queries, 5)
    for query, own in enumerate(hits):
        difference = ((z_ND - z_ND[query]) ** 2).sum(axis=1)
        expected = np.sort(difference / 4 if kind == "codes" else np.sqrt(difference))[:5]
        assert [hit.rank for hit in own] == [1, 2, 3, 4, 5]
        np.testing.assert_allclose([hit.distance for hit in own], expected, atol=1e-5)
        assert own[0].distance == pytest.approx(0, abs=1e-5)
        assert all(hit.id == queries.ids[hit.place] for hit in own)
        assert queries.labels is not None
        assert all(hit.label == queries.labels[hit.place] for hit in own)


def test_structure_puts_them_in_the_querys_order(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["structure"], pictures, tmp_path)
    queries = opened(models["structure"], pictures)
    searcher = Searcher(models["structure"], gallery, among=12)
    assert searcher.rerank == "structure"
    hits = retrieve(searcher, queries, 4)
    z_ND, omega_ND = embedders.embed_with_structure(
        embedders.load(models["structure"]), queries.read(range(30))
    )
    assert omega_ND is not None
    for query, own in enumerate(hits):
        plain = np.argsort(((z_ND - z_ND[query]) ** 2).sum(axis=1), kind="stable")[:12]
        weighted = (omega_ND[query] * (z_ND[plain] - z_ND[query]) ** 2).sum(axis=1)
        assert [hit.place for hit in own] == plain[np.argsort(weighted, kind="stable")][:4].tolist()
        for hit in own:
            assert hit.distance == pytest.approx(np.linalg.norm(z_ND[hit.place] - z_ND[query]), abs=1e-5)


def test_codes_are_put_in_order_by_weighted_bits(
    models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    gallery = made(models["codes"], vectors, tmp_path)
    queries = opened(models["codes"], vectors)
    hits = retrieve(Searcher(models["codes"], gallery, rerank="structure"), queries, 30)
    model = hashing.load(models["codes"])
    x_NF = queries.read(range(30))
    z_ND, omega_ND = model.codes(x_NF), model.omega(x_NF)
    for query, own in enumerate(hits):
        weighted = [
            float(omega_ND[query][z_ND[hit.place] != z_ND[query]].astype(np.float64).sum()) for hit in own
        ]
        assert weighted == sorted(weighted)
        assert sorted(hit.place for hit in own) == list(range(30))


def test_layers_put_them_in_the_order_of_their_similarities(
    models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    gallery = made(models["learner"], vectors, tmp_path)
    queries = opened(models["learner"], vectors)
    searcher = Searcher(models["learner"], gallery, among=30)
    assert searcher.rerank == "layers"
    hits = retrieve(searcher, queries, 30)
    learned = online.load(models["learner"])
    layers = learned.learner.embed(learned.preparation(queries.read(range(30))))
    for query, own in enumerate(hits):
        similarity = np.zeros(30)
        for alpha, f_NE in zip(learned.learner.layer_weights, layers, strict=True):
            distance = np.linalg.norm(f_NE - f_NE[query], axis=1)
            similarity = np.maximum(similarity, alpha * np.exp(-distance / distance.max()))
        found = similarity[[hit.place for hit in own]]
        assert (np.diff(found) <= 1e-6).all()


def test_a_similarity_that_is_no_distance_is_searched_by(vectors: Path, tmp_path: Path) -> None:
    """OASIS embeds queries otherwise than a gallery; with one embedding for both nothing learned would count."""
    learner = online.build("oasis", {}, num_features=10)
    learner.partial_fit(online.Constraints(X.reshape(10, 3, 10)))
    matrix_DD = learner.state()["oasis_similarity"]
    assert not np.allclose(matrix_DD, np.eye(10))
    learned = online.Learned(learner, online.Preparation.of("none", X), "oasis", {})
    online.save(learned, tmp_path / "model", {}, X[:2])
    gallery = made(tmp_path / "model", vectors, tmp_path)
    hits = retrieve(Searcher(tmp_path / "model", gallery), opened(tmp_path / "model", vectors), 30)
    similarity_NN = X.astype(np.float64) @ matrix_DD @ X.T
    for query, own in enumerate(hits):
        found = similarity_NN[query, [hit.place for hit in own]]
        assert (np.diff(found) <= 1e-4).all()
        assert sorted(hit.place for hit in own) == list(range(30))


def test_equal_distances_in_a_layer_weigh_alpha() -> None:
    layers = Layers([1, 1], np.array([0.75, 0.25]))
    gallery = np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 1.0]])
    order = by_layers(np.zeros((1, 2)), gallery, np.array([[1, 2, 0, -1]]), layers)
    assert order.tolist() == [
        [1, 2, 0, -1]
    ]  # the first layer tells them nothing apart, and outweighs the other
    layers = Layers([1, 1], np.array([0.1, 0.9]))
    assert by_layers(np.zeros((1, 2)), gallery, np.array([[1, 2, 0, -1]]), layers).tolist() == [[0, 2, 1, -1]]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_other_indexes_find_the_item_itself(
    kind: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["plain"], pictures, tmp_path, kind)
    queries = opened(models["plain"], pictures)
    hits = retrieve(Searcher(models["plain"], gallery), queries, 1)
    assert [own[0].place for own in hits] == list(range(30))


def test_a_contact_sheet_shows_what_was_found(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["plain"], pictures, tmp_path)
    queries = opened(models["plain"], pictures / "class0")
    searcher = Searcher(models["plain"], gallery)
    hits = retrieve(searcher, queries, 3)
    write_contact_sheet(tmp_path / "sheet.html", models["plain"], searcher, queries, hits)
    page = (tmp_path / "sheet.html").read_text()
    assert page.count("<section>") == 10
    assert page.count("<img") == 40
    assert page.count("src='data:image/png;base64,") == 40
    assert "http" not in page
    with pytest.raises(ValueError, match="no such folder; make it or name another output"):
        write_contact_sheet(tmp_path / "none" / "s.html", models["plain"], searcher, queries, hits)


def test_what_is_refused(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    gallery = build(z, tmp_path / "gallery")
    with pytest.raises(ValueError, match="exists already"):
        build(z, tmp_path / "gallery")
    with pytest.raises(ValueError, match="the gallery was made by another model"):
        Searcher(models["structure"], gallery)
    with pytest.raises(ValueError, match="the model has no head for it"):
        Searcher(models["plain"], gallery, rerank="structure")
    with pytest.raises(ValueError, match="queries of size 3, the gallery's are of 6"):
        gallery.search(np.zeros((1, 3), np.float32), 1)
    data.write_embeddings(tmp_path / "bare.parquet", ["a"], None, np.ones((1, 6), np.float32))
    with pytest.raises(ValueError, match="does not say which model made it"):
        build(tmp_path / "bare.parquet", tmp_path / "other")
    (tmp_path / "half.parquet").write_bytes(z.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"half\.parquet: not a readable Parquet file"):
        build(tmp_path / "half.parquet", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (galleries.ABOUT, None, r"gallery\.json: no such file"),
        (galleries.ABOUT, b"{", r"gallery\.json: not understood"),
        (galleries.INDEX, b"half", "is not an index, or is damaged or half-written"),
        (galleries.INDEX, None, r"index\.faiss: no such file"),
        (galleries.VECTORS, b"half", r"vectors\.npy: cannot be read"),
        (galleries.ITEMS, b"half", r"items\.parquet: not a readable"),
    ],
)
def test_a_damaged_gallery_is_refused(
    name: str, content: bytes | None, message: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    path = tmp_path / "gallery" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_gallery(tmp_path / "gallery")


def test_a_gallery_of_fewer_names_than_vectors_is_refused(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    path = tmp_path / "gallery" / galleries.ABOUT
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "items": 29}))
    with pytest.raises(ValueError, match="29 items of size 6, but 30 names and vectors of shape"):
        open_gallery(tmp_path / "gallery")
