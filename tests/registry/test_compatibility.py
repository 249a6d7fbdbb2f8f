"""Scores across two models against plain loops, the card's section, and models that no map leads to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dmlstudy import embedders, hashing
from dmlstudy.cli.results import Beside, compatibility_of
from dmlstudy.registry import card, compatibility
from dmlstudy.registry.compatibility import Compatibility
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import SpaceMap
from dmlstudy.store import Store

LABELS = np.arange(48) % 6


def unit(values: np.ndarray) -> np.ndarray:
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def seen(dim: int, seed: int, **changed: Any) -> compatibility._Seen:
    rng = np.random.default_rng(seed)
    places = np.arange(48)
    facts: dict[str, Any] = {
        "test_ND": unit(rng.normal(size=(48, dim)) + 2 * rng.normal(size=(6, dim))[LABELS]),
        "development_ND": unit(rng.normal(size=(40, dim))),
        "label_N": LABELS,
        "development_label_N": np.arange(40) % 4,
        "query": places,
        "gallery": places,
        "digests": ("dev", "test"),
        "images_per_second": 100.0,
    }
    return compatibility._Seen(**{**facts, **changed})


def plain(query_ND: np.ndarray, gallery_ND: np.ndarray) -> tuple[float, float]:
    """MAP@R and Recall@1, each query's own item left out."""
    precision, first = [], []
    for query, own in enumerate(query_ND.astype(np.float64)):
        apart = np.linalg.norm(gallery_ND.astype(np.float64) - own, axis=1)
        apart[query] = np.inf
        relevant = LABELS[np.argsort(apart)] == LABELS[query]
        r = int((LABELS[query] == LABELS).sum()) - 1
        hits = relevant[:r]
        precision.append((np.cumsum(hits) / np.arange(1, r + 1) * hits).sum() / r)
        first.append(hits[0])
    return float(np.mean(precision)), float(np.mean(first))


def of_two(dim: int, kind: Any = "linear") -> tuple[Compatibility, compatibility.Maps, list[Any]]:
    both = [seen(dim, 1), seen(5, 2)]
    found, maps = compatibility._measured(
        ["a/2", "a/1"], [("new", True), ("old", True)], both, kind, 1_000_000, "cpu"
    )
    return found, maps, both


@pytest.mark.parametrize("dim", [5, 7])
def test_scores_across_are_the_plain_loops(dim: int) -> None:
    found, maps, (new, old) = of_two(dim)
    pairs = {
        ("old", "old", ""): (old.test_ND, old.test_ND),
        ("new", "new", ""): (new.test_ND, new.test_ND),
        ("new", "old", "queries mapped new to old"): (maps.new_to_old(new.test_ND), old.test_ND),
        ("new", "old", "gallery mapped old to new"): (new.test_ND, maps.old_to_new(old.test_ND)),
    }
    if dim == 5:
        pairs["new", "old", ""] = (new.test_ND, old.test_ND)
    assert {(each.queries, each.gallery, each.map) for each in found.scores} == pairs.keys()
    assert bool(found.not_crossed) == (dim != 5)
    for combination, (query_ND, gallery_ND) in pairs.items():
        own = found.of(*combination)
        assert own is not None
        assert (own.map_at_r, own.recall_at_1) == pytest.approx(plain(query_ND, gallery_ND), abs=1e-12)
    assert found.cost.reembed_s == 10_000
    assert "takes 2:46 h (100 pictures/s" in found.lines[-1]
    assert (maps.new_to_old.source, maps.new_to_old.target) == ("new", "old")
    assert maps.old_to_new.described.told["unseen"] == [each.model_dump() for each in found.scores]


def test_queries_beside_their_gallery_are_never_left_out() -> None:
    new = seen(5, 1, query=np.arange(8), gallery=np.arange(8, 48))
    scores = compatibility._scores(new.test_ND, new.test_ND, new)
    apart = np.linalg.norm(new.test_ND[:8, None] - new.test_ND[None, 8:], axis=2)
    assert scores.means()["recall_at_1"] == (LABELS[8:][apart.argmin(axis=1)] == LABELS[:8]).mean()


def test_scores_across_have_the_interval_over_classes() -> None:
    """With as many queries of each class it is Student's, of the classes' mean differences."""
    labels = np.repeat(np.arange(12), 4)
    old, new = (seen(5, number, label_N=labels) for number in (1, 2))
    found, _ = compatibility._measured(
        ["a/2", "a/1"], [("new", True), ("old", True)], [new, old], "linear", 1_000, "cpu"
    )
    across = found.of("new", "old")
    assert across is not None
    assert across.beside is not None
    by_class = [
        (own.sums(labels).sums["map_at_r"] / 4)
        for own in (
            compatibility._scores(new.test_ND, old.test_ND, new),
            compatibility._scores(old.test_ND, old.test_ND, new),
        )
    ]
    expected = stats.ttest_1samp(by_class[0] - by_class[1], 0)
    interval = expected.confidence_interval(0.95)
    assert (across.beside.low, across.beside.high) == pytest.approx(tuple(interval))
    assert across.beside.p_value == pytest.approx(expected.pvalue)
    assert across.beside.effect == pytest.approx(across.map_at_r - found.scores[0].map_at_r)
    assert f"beside old in old {across.beside.effect:+.4f} [" in str(across)
    assert found.scores[0].beside is None


def test_few_classes_give_no_interval_and_the_reason() -> None:
    found, _, _ = of_two(5)
    assert all(each.beside is None for each in found.scores)
    assert "  no interval for classes like these: fewer than 10 classes" in found.lines


def test_maps_are_saved_together(tmp_path: Path) -> None:
    _, maps, (new, _) = of_two(7)
    kept = maps.save(tmp_path / "my maps")
    again = SpaceMap.open(tmp_path / "my maps" / "new-to-old")
    assert again.digest == kept.new_to_old.digest
    np.testing.assert_array_equal(again(new.test_ND), maps.new_to_old(new.test_ND))
    with pytest.raises(ValueError, match="holds maps already; name a new folder"):
        maps.save(tmp_path / "my maps")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").touch()
    with pytest.raises(ValueError, match=r"pictures: holds 'a\.png', which is no map; name a new folder"):
        maps.save(tmp_path / "pictures")
    shutil.rmtree(tmp_path / "my maps" / "old-to-new")  # as where the call was killed before it
    assert [each.digest for each in maps.save(tmp_path / "my maps")] == [each.digest for each in kept]
    shutil.rmtree(tmp_path / "my maps" / "new-to-old")
    with pytest.raises(ValueError, match="old-to-new: is another map; name a new folder"):
        compatibility.Maps(maps.old_to_new, maps.new_to_old).save(tmp_path / "my maps")
    assert (tmp_path / "my maps" / "old-to-new").exists()


def test_other_data_have_no_common_score() -> None:
    new, old = seen(5, 1), seen(5, 2)
    for other, message in (
        (old._replace(digests=("dev", "other"), label_N=LABELS[::-1]), "judged on other test data"),
        (old._replace(development_label_N=np.arange(39)), "other development data: no map"),
    ):
        with pytest.raises(ValueError, match=message):
            compatibility._check_same(["a/2", "a/1"], [new, other])


def test_codes_and_points_of_a_ball_are_refused(tmp_path: Path) -> None:
    hashing.save(hashing.build("ssdh", 16, 10, {"hidden": 8}).eval(), tmp_path / "codes", {})
    ball = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0, space="ball")
    embedders.save(ball, tmp_path / "ball", {})
    for name, message in (
        ("codes", "is a hashing model; maps are between embedders"),
        ("ball", "into a ball"),
    ):
        with pytest.raises(ValueError, match=f"a/1: .*{message}") as caught:
            compatibility.check_mappable("a/1", Model.open(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_the_cards_section_is_there_once_and_before_the_use() -> None:
    section = card.compatibility(of_two(7)[0])
    assert "| new | old | queries mapped new to old |" in section
    assert "Without a map: embeddings of 7 and 5 numbers have no distance." in section
    written = "# a\n\n## Limits\n\nnone\n\n## Use\n\n* x\n"
    once = card.with_compatibility(written, section)
    assert once.index(card.COMPATIBILITY) < once.index("## Use")
    assert card.with_compatibility(once, section) == once
    assert once.replace(f"{section}\n", "") == written


def test_a_model_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = compatibility_of(store, "a/2", "a/1", "linear", None, None, is_left_out=False)
    assert isinstance(found, Beside)
    assert len(found.lines) == 1
    assert found.lines[0].startswith("compatibility is not told: ")
    assert compatibility_of(store, "a/2", "a/1", "mlp", None, None, is_left_out=True) is None
    with pytest.raises(ValueError, match="choose from linear, orthogonal, mlp"):
        compatibility_of(store, "a/2", "a/1", "x", None, None, is_left_out=True)
    with pytest.raises(ValueError, match="leave --without-compatibility out"):
        compatibility_of(store, "a/2", "a/1", "mlp", tmp_path, None, is_left_out=True)
