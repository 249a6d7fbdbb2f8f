"""Galleries of short vectors: found by the short form, put in order by larger vectors, as plain loops say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dmlstudy import data
from dmlstudy.retrieval import short_forms
from dmlstudy.saved import Model
from dmlstudy.serving.embed import EmbedJob, embed_into
from dmlstudy.serving.gallery import build, open_gallery
from dmlstudy.serving.retriever import Retriever

from .test_gallery import embedded

FORMS = [(None, 8), (None, 1), (4, 32), (4, 8), (4, 1)]


def plain(short_QE: np.ndarray, short_ME: np.ndarray) -> np.ndarray:
    """Euclidean distances of unit vectors in float64."""
    a, b = (short_forms.unit(each.astype(np.float64)).astype(np.float64) for each in (short_QE, short_ME))
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))


def signs(z_ND: np.ndarray) -> np.ndarray:
    return np.where(z_ND > 0, 1.0, -1.0)


def shortened(z_ND: np.ndarray, size: int | None, bits: int) -> np.ndarray:
    part = z_ND if size is None else z_ND[:, :size]
    if bits == 1:
        return signs(part)
    if bits == 8:
        part = short_forms.unit(part.astype(np.float64)) if size is not None else part
        return np.rint(127.0 * part.astype(np.float64) / np.abs(part).max(axis=1, keepdims=True))
    return part


@pytest.mark.parametrize(("size", "bits"), FORMS)
@pytest.mark.parametrize("beside", ["float", "int8", "none"])
def test_search_is_the_plain_loop(
    size: int | None, bits: int, beside: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    build(z, tmp_path / "gallery", size=size, bits=bits, beside=beside)  # type: ignore[arg-type]
    gallery = open_gallery(tmp_path / "gallery", device="cpu")
    _, _, z_ND = data.read_embeddings(z)
    k, among = 3, 7
    place_QK, distance_QK = gallery.search(z_ND, k, among=among)
    apart_NN = np.round(plain(shortened(z_ND, size, bits), shortened(z_ND, size, bits)), 6)
    whole = z_ND if beside == "float" else shortened(z_ND, None, 8)
    again_NN = plain(whole, whole)
    has_beside = beside != "none" and (beside, size, bits) != ("int8", None, 8)
    for query in range(len(z_ND)):
        found = np.lexsort((np.arange(len(z_ND)), apart_NN[query]))[: among if has_beside else k]
        own_N = again_NN[query] if has_beside else apart_NN[query]
        expected = found[np.lexsort((found, np.round(own_N[found], 6)))][:k]
        np.testing.assert_array_equal(place_QK[query], expected)
        np.testing.assert_allclose(distance_QK[query], own_N[expected], atol=2e-6)
    facts = json.loads((tmp_path / "gallery" / "gallery.json").read_text())
    assert facts["bytes_per_vector"] == -(-(size or 6) * bits // 8) == gallery.facts["bytes_per_vector"]
    assert ((tmp_path / "gallery" / "vectors.npy").is_file()) == has_beside
    assert f"{size or 6} x {bits} bit: {facts['bytes_per_vector']} bytes for each vector" in gallery.line


@pytest.mark.parametrize(("size", "bits"), FORMS)
def test_a_short_file_makes_the_same_gallery(
    size: int | None, bits: int, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    made = embed_into(
        EmbedJob(
            str(models["plain"]),
            str(pictures),
            str(tmp_path / "s.parquet"),
            device="cpu",
            size=size,
            bits=bits,
        )
    )
    assert made.dim == (size or 6)
    assert (made.bits, made.bytes_per_vector) == (bits, -(-(size or 6) * bits // 8))
    _, _, z_ND = data.read_embeddings(z)
    _, _, kept_NE = data.read_embeddings(tmp_path / "s.parquet")
    np.testing.assert_array_equal(kept_NE, short_forms.kept(z_ND, size, bits))  # type: ignore[arg-type]
    own = build(tmp_path / "s.parquet", tmp_path / "own")
    other = build(z, tmp_path / "other", size=size, bits=bits, beside="none")
    for one, two in zip(own.search(z_ND, 5), other.search(z_ND, 5), strict=True):
        np.testing.assert_array_equal(one, two)


def test_what_has_no_short_form_is_refused(
    models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    for name, inputs, why in (
        ("structure", pictures, "the model has a structure head"),
        ("depth", pictures, "embeddings are of several layers"),
        ("codes", vectors, r"embeddings are of no embedder \(hashing model\)"),
        ("learner", vectors, r"embeddings are of no embedder \(online learner\)"),
    ):
        with pytest.raises(ValueError, match=f"--size and --bits: {why}, which have no short form"):
            embed_into(
                EmbedJob(str(models[name]), str(inputs), str(tmp_path / "s.parquet"), device="cpu", bits=8)
            )
        assert not (tmp_path / "s.parquet").exists()
    z = embedded(models["plain"], pictures, tmp_path)
    for named, message in (
        ({"size": 7}, "--size 7: the embeddings have 6 numbers"),
        ({"bits": 4}, "--bits 4: choose from 32, 8, 1"),
        ({"beside": "int8"}, "nothing is kept beside whole vectors"),
        ({"bits": 8, "kind": "hnsw"}, "vectors of 8 bits are searched one by one"),
        ({"bits": 1, "kind": "ivf_pq"}, "ivf_pq is for numbers of 32 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            build(z, tmp_path / "gallery", **named)  # type: ignore[arg-type]
        assert not (tmp_path / "gallery").exists()
    model = Model.open(models["plain"])
    short = build(z, tmp_path / "short", bits=8)
    assert Retriever(model, short).rerank == "none"
    with pytest.raises(ValueError, match="mapped or short ones; set none"):
        Retriever(model, short, rerank="structure")
    with pytest.raises(ValueError, match="queries of size 5, the gallery's are short forms of 6"):
        short.search(np.zeros((1, 5), np.float32), 1)
    (tmp_path / "short" / "short.npy").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"short\.npy: altered since the gallery was made"):
        open_gallery(tmp_path / "short")
