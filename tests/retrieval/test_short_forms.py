"""Short forms and the search by them against plain loops in float64, ties by place."""

from __future__ import annotations

import numpy as np
import pytest

from dmlstudy import retrieval
from dmlstudy.retrieval import CodeIndex, short_forms

RNG = np.random.default_rng(0)


def unit(num: int, dim: int) -> np.ndarray:
    z_ND = RNG.normal(size=(num, dim))
    return (z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True)).astype(np.float32)


def by_cosine(query_QE: np.ndarray, gallery_ME: np.ndarray, k: int) -> np.ndarray:
    """Places by q.g / |g| in float64, ties by place."""
    q, g = query_QE.astype(np.float64), gallery_ME.astype(np.float64)
    norm_M = np.sqrt((g**2).sum(axis=1))
    cosine_QM = (q @ g.T) / np.where(norm_M > 0, norm_M, 1)
    return np.stack([np.lexsort((np.arange(len(g)), -row))[:k] for row in cosine_QM])


@pytest.mark.parametrize(("dim", "num"), [(3, 400), (16, 300), (1100, 40)])
def test_search_of_8_bits_is_the_plain_loop(dim: int, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_forms, "_TILE", 64)
    monkeypatch.setattr(short_forms, "_HITS_PER_ROW", 1)
    z_MD, z_QD = unit(num, dim), unit(7, dim)
    z_MD[num // 2 :] = z_MD[: num - num // 2]  # each item twice: ties by place
    gallery, query = short_forms.whole_numbers(z_MD), short_forms.whole_numbers(z_QD)
    square = short_forms.squared_norms(gallery)
    for k in (1, 9, num, num + 5):
        place_QK, distance_QK = short_forms.nearest_of_8_bits(query, gallery, square, k)
        np.testing.assert_array_equal(place_QK, by_cosine(query, gallery, k))
        apart_QM = np.linalg.norm(
            short_forms.eight_bits(z_QD)[:, None].astype(np.float64) - short_forms.eight_bits(z_MD), axis=2
        )
        np.testing.assert_allclose(distance_QK, np.take_along_axis(apart_QM, place_QK, 1), atol=2e-6)


def test_search_of_8_bits_is_as_scored_in_a_verdict() -> None:
    z_MD, z_QD = unit(200, 12), unit(6, 12)
    gallery = short_forms.whole_numbers(z_MD)
    found = short_forms.nearest_of_8_bits(
        short_forms.whole_numbers(z_QD), gallery, short_forms.squared_norms(gallery), 20
    )
    scored = retrieval.retrieve(short_forms.eight_bits(z_QD), short_forms.eight_bits(z_MD), 20)
    np.testing.assert_allclose(found[1], scored[1], atol=2e-6)
    np.testing.assert_array_equal(found[0], scored[0])


def test_zeros_and_empty_sets() -> None:
    zeros = short_forms.whole_numbers(np.zeros((3, 4), np.float32))
    assert not zeros.any()
    place_QK, distance_QK = short_forms.nearest_of_8_bits(
        zeros[:1], zeros, short_forms.squared_norms(zeros), 2
    )
    assert place_QK.tolist() == [[0, 1]]
    np.testing.assert_allclose(distance_QK, np.sqrt(2))
    with pytest.raises(ValueError, match="needs k >= 1 and an item to find"):
        short_forms.nearest_of_8_bits(zeros, zeros[:0], np.empty(0, np.int32), 1)
    with pytest.raises(ValueError, match="queries of size 3, the gallery's are of 4"):
        short_forms.nearest_of_8_bits(zeros[:, :3], zeros, short_forms.squared_norms(zeros), 1)


def test_forms_as_files_keep_them() -> None:
    z_ND = unit(5, 11)
    assert short_forms.kept(z_ND, None, 32) is z_ND
    np.testing.assert_array_equal(short_forms.kept(z_ND, 4, 32), short_forms.leading(z_ND, 4))
    assert short_forms.kept(z_ND, 9, 1).shape == (5, 2)
    np.testing.assert_array_equal(np.unpackbits(short_forms.kept(z_ND, 9, 1), axis=1)[:, :9], z_ND[:, :9] > 0)
    eight = short_forms.kept(z_ND, 4, 8)
    assert (np.abs(eight).max(axis=1) == 127).all()
    for size, bits, message in (
        (11, 8, "give a size from 1 to 10"),
        (0, 8, "size 0"),
        (4, 2, "choose from 32"),
    ):
        with pytest.raises(ValueError, match=message):
            short_forms.kept(z_ND, size, bits)  # type: ignore[arg-type]


def test_a_flat_index_of_codes_has_ties_by_place() -> None:
    bits_ND = RNG.integers(0, 2, (300, 5))  # 32 codes, each many times
    codes = retrieval.pack_codes(bits_ND)
    index = CodeIndex("flat", 5, model_version="a").train(codes).add(codes, np.arange(300))
    place_QK, distance_QK = index.nearest(codes[:9], 40)
    for query in range(9):
        apart_N = (bits_ND != bits_ND[query]).sum(axis=1)
        order_N = np.lexsort((np.arange(300), apart_N))[:40]
        np.testing.assert_array_equal(place_QK[query], order_N)
        np.testing.assert_array_equal(distance_QK[query], apart_N[order_N])
    with pytest.raises(ValueError, match="does not find all ties"):
        CodeIndex("hnsw", 5, model_version="a").add(codes, np.arange(300)).nearest(codes, 1)
