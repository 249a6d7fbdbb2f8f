"""Examples of a winner: neighbours, pairs and distances are those of a computation by hand; what is missing is said."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made_study import Maker

from dmlstudy import data, hashing, online
from dmlstudy.data import Features
from dmlstudy.records import CodesConfig, DataConfig, OnlineConfig
from dmlstudy.registry import models
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.report import examples
from dmlstudy.report.examples import Items
from dmlstudy.report.page import Plot, Section
from dmlstudy.store import Store
from dmlstudy.training import dataset_cache

Z = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)


def items(labels: Any, rows: Any = None) -> Items:
    relevance = np.asarray(labels)
    places = np.arange(len(relevance))
    names = [str(each) for each in relevance.tolist()]
    return Items(rows, places, relevance, names, places, places, len(places))


def words(section: Section) -> str:
    return "".join(part for part in section.content if isinstance(part, str))


def plots(section: Section) -> list[Plot]:
    return [part for part in section.content if isinstance(part, Plot)]


@pytest.mark.parametrize("is_code", [False, True])
def test_neighbours_are_the_nearest_of_the_gallery(is_code: bool) -> None:
    z_ND = np.where(Z > 0, 1, -1).astype(np.int8) if is_code else Z
    query_Q, gallery_M = np.array([2, 7, 11]), np.arange(5, 30)  # item 2 is not in the gallery
    found_QK, distance_QK = examples.nearest(z_ND, query_Q, gallery_M, 3)
    for query, found, distances in zip(query_Q, found_QK, distance_QK, strict=True):
        others = [m for m in gallery_M if m != query]
        apart = examples.apart(z_ND, np.array([[query, m] for m in others]))
        assert query not in found
        np.testing.assert_allclose(distances, np.sort(apart)[:3], rtol=1e-5)
        np.testing.assert_allclose(apart[[others.index(m) for m in found]], distances, rtol=1e-5)


def test_in_a_ball_distances_are_hyperbolic() -> None:
    z_ND = (0.9 * Z / np.linalg.norm(Z, axis=1).max()).astype(np.float32)
    pairs = np.array([[0, 1], [2, 5], [3, 3]])
    a, b = z_ND.astype(np.float64)[pairs.T]
    lambdas = (1 - (a**2).sum(1)) * (1 - (b**2).sum(1))
    by_hand = 2 * np.arcsinh(np.linalg.norm(a - b, axis=1) / np.sqrt(lambdas))
    np.testing.assert_allclose(examples.apart(z_ND, pairs, 1.0), by_hand, rtol=1e-6)
    found_QK, distance_QK = examples.nearest(z_ND, np.array([2, 7]), np.arange(len(z_ND)), 4, 1.0)
    for query, found, distances in zip((2, 7), found_QK, distance_QK, strict=True):
        apart = examples.apart(z_ND, np.array([[query, other] for other in found]), 1.0)
        np.testing.assert_allclose(distances, apart, rtol=1e-5)
        assert (np.diff(distances) >= 0).all()
    labels = np.arange(len(z_ND)) % 3
    (shown,) = examples.map_of("ball", items(labels), z_ND, 1.0)
    assert isinstance(shown, Plot)


def test_distances_of_pairs_by_hand() -> None:
    pairs = np.array([[0, 1], [2, 5]])
    by_hand = [np.sqrt(((Z[a].astype(np.float64) - Z[b]) ** 2).sum()) for a, b in pairs]
    np.testing.assert_allclose(examples.apart(Z, pairs), by_hand)
    codes = np.array([[1, 1, -1], [1, -1, 1]], np.int8)
    assert examples.apart(codes, np.array([[0, 1], [0, 0]])).tolist() == [2, 0]


def test_pairs_are_alike_or_not_and_all_positive_ones_are_there() -> None:
    labels = np.arange(30) % 4
    positive, negative = examples.pairs_of(items(labels), np.random.default_rng(0))
    expected = {(a, b) for a, b in itertools.combinations(range(30), 2) if labels[a] == labels[b]}
    assert {tuple(pair) for pair in positive.tolist()} == expected
    assert len(negative) == examples.MOST_PAIRS
    assert (labels[negative[:, 0]] != labels[negative[:, 1]]).all()


def test_items_with_several_concepts_belong_together_if_they_share_one() -> None:
    shows = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool)
    own = items(shows)
    assert own.alike(np.array([0, 0, 1]), np.array([1, 2, 2])).tolist() == [True, False, False]
    positive, negative = examples.pairs_of(own, np.random.default_rng(0))
    assert {frozenset(pair) for pair in positive.tolist()} == {frozenset({0, 1})}
    assert {frozenset(pair) for pair in negative.tolist()} == {frozenset({0, 2}), frozenset({1, 2})}


def test_whole_classes_are_drawn_unless_they_would_be_few() -> None:
    rng = np.random.default_rng(0)
    many = np.arange(1000) % 100
    chosen = examples.drawn(many, 255, rng)
    counts = np.bincount(many[chosen])
    assert set(counts[counts > 0].tolist()) == {10}
    assert len(chosen) == 250
    few = np.arange(1000) % 10
    chosen = examples.drawn(few, 255, rng)
    assert len(chosen) == 255
    assert len(np.unique(few[chosen])) == 10
    assert examples.drawn(few, 1000, rng).tolist() == list(range(1000))


@pytest.fixture(scope="module")
def sections(small: Maker) -> list[Section]:
    board = leaderboard(small.store, "small")
    return examples.sections(small.store, "small", board, small.tracker.study_tags, None)


def test_the_winners_neighbours_are_marked_by_a_sign_and_a_word(sections: list[Section]) -> None:
    text = words(sections[0])
    assert text.startswith("<p>alpha (not registered, seed 1): 7 nearest of all 896 test items")
    assert text.count('<figure class="query">') == examples.NUM_QUERIES + examples.NUM_WRONG
    right, wrong = text.count('<figure class="right">'), text.count('<figure class="wrong">')
    assert right + wrong == 7 * (examples.NUM_QUERIES + examples.NUM_WRONG)
    assert right == text.count("<b>✓</b>")
    assert wrong == text.count("<b>✗</b>") == text.count('alt="wrong, rank')
    assert text.count('src="data:image/png;base64,') == 8 * (examples.NUM_QUERIES + examples.NUM_WRONG)
    second = text[text.index("4 queries drawn of those whose nearest item is wrong") :]
    assert second.count('alt="wrong, rank 1:') == 4
    assert 'alt="right, rank 1:' not in second


def test_the_map_has_all_test_items_by_class(sections: list[Section]) -> None:
    (plot,) = plots(sections[1])
    assert sum(len(trace.x) for trace in plot.figure.data) == 896
    assert [trace.name for trace in plot.figure.data] == ["5", "6", "7", "8", "9"]
    assert "t-SNE (perplexity 30, seed 0) of all 896 test items, of 5 classes" in plot.caption


def test_distances_before_and_after_training_are_of_the_same_pairs(
    small: Maker, sections: list[Section]
) -> None:
    (plot,) = plots(sections[2])
    assert len(plot.figure.data) == 4
    assert [each.text for each in plot.figure.layout.annotations] == ["before training", "after training"]
    assert "the same pairs in each panel" in plot.caption
    with examples.model_of(small.store, "small", "alpha", 1) as folder:
        model = examples.opened(examples.of_folder(folder))
        own = examples.test_items(model.config, None, None)
        z_ND = examples.embedded(model, own)
    positive, _ = examples.pairs_of(own, np.random.default_rng(examples.SEED))
    bars = plot.figure.data[2]
    counts = np.array(bars.y) * len(positive)
    middle = (np.array(bars.x) * counts).sum() / counts.sum()
    assert middle == pytest.approx(examples.apart(z_ND, positive).mean(), abs=np.max(bars.width))


def test_a_registered_winner_is_pulled_with_its_checks(small: Maker, tmp_path: Path) -> None:
    run_id = small.tracker.verdict_run("alpha", 1).id  # type: ignore[union-attr]
    folder = small.tracker.fetch_model(run_id, tmp_path)
    models.register(
        small.store, "small-embedder", lambda _: folder, run_id=run_id, tags={}, card=lambda _: ""
    )
    board = leaderboard(small.store, "small").model_copy(update={"model": "small-embedder/1"})
    found = examples.sections(small.store, "small", board, small.tracker.study_tags, None)
    assert words(found[0]).startswith("<p>alpha (small-embedder/1, seed 1): 7 nearest of all 896")


def test_queries_have_something_to_find() -> None:
    own = items([0, 0, 1, 2, 2])
    everyone = np.arange(5)
    assert examples.with_something_to_find(own, everyone).tolist() == [0, 1, 3, 4]
    apart = own._replace(query=np.array([0, 2]), gallery=np.array([1, 3, 4]))
    assert examples.with_something_to_find(apart, apart.query).tolist() == [0]


def test_embeddings_that_are_no_numbers_are_said_to_be(small: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.full((896, 8), np.nan, np.float32)
    monkeypatch.setattr(examples, "embedded", lambda *_: nothing)
    board = leaderboard(small.store, "small")
    found = examples.sections(small.store, "small", board, small.tracker.study_tags, None)
    assert all(words(each).startswith("<p>Not shown: ") for each in found)


def board_of(small: Maker, **changed: Any) -> Any:
    return leaderboard(small.store, "small").model_copy(update=changed)


def test_what_is_missing_is_said_in_each_section(small: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = small.tracker.study_tags

    def said(board: Any, own: dict[str, str] = tags) -> set[str]:
        found = examples.sections(small.store, "small", board, own, None)
        assert [each.id for each in found] == ["examples", "map", "distances"]
        return {words(each) for each in found}

    assert said(board_of(small, winner=None)) == {"<p>Not shown: the study has no winner yet.</p>"}
    (line,) = said(board_of(small, winner="beta"))
    assert line.startswith("<p>Not shown: the model of beta is not kept any more")
    (line,) = said(board_of(small, winner="gamma"))
    assert line == "<p>Not shown: gamma was not judged with seed 1 yet.</p>"
    (line,) = said(board_of(small), tags | {"test_sha256": "0" * 64})
    assert line == "<p>Not shown: the test data here are not those of the study; bring these back.</p>"
    (line,) = said(board_of(small, model="gone/3"))
    assert line.startswith("<p>Not shown: no model &#x27;gone/3&#x27; in the store")


def test_data_that_are_not_here_are_said_to_be_missing(small: Maker, tmp_path: Path) -> None:
    config = small.config("alpha").model_copy(
        update={"data": DataConfig(name="image_folder", path="birds", image_size=8)}
    )
    with pytest.raises(ValueError, match="birds"):
        examples.test_items(config, None, str(tmp_path))


def test_a_relative_path_is_looked_up_where_the_study_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "started" / "birds").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = DataConfig(name="image_folder", path="birds")
    assert dataset_cache.found_from(config, str(tmp_path / "started")).path == str(
        tmp_path / "started" / "birds"
    )
    assert dataset_cache.found_from(config, str(tmp_path)).path == "birds"
    assert dataset_cache.found_from(config, None).path == "birds"


def vectors_study(store: Store, study: str, tmp_path: Path, kind: str) -> Maker:
    """A study whose winner is a model of vectors: codes, or a learner of a stream."""
    x = np.random.default_rng(0).normal(size=(60, 10)).astype(np.float32)
    for side, rows in (("train", x), ("test", x + 1)):
        np.savez(tmp_path / f"{side}.npz", x=rows, y=np.arange(60) % 3)
    maker = Maker(store, study, with_state=False)
    maker.search("codes", "finished", 0.5)
    run_id = maker.judge("codes", 1, 0.5)
    own = maker.config("codes", "verdict", 1).model_dump(mode="json")
    own["data"] = DataConfig(name="features", path=str(tmp_path)).model_dump(mode="json")
    folder = tmp_path / "model"
    if kind == "codes":
        own["hashing"] = CodesConfig(num_bits=16).model_dump(mode="json")
        made = hashing.build("greedyhash", 16, 10, {}, seed=1).eval()
        hashing.save(made, folder, {"config": own}, x[:2])
    else:
        own["online"] = OnlineConfig(split="shuffled").model_dump(mode="json")
        params = {"num_hidden": 2, "width": 6, "size": 5}
        learner = online.build("oahu", params, num_features=10, seed=3)
        learned = online.Learned(learner, online.Preparation.of("unit", x), "oahu", params)
        online.save(learned, folder, {"config": own}, x[:2])
    maker.tracker.log_model(run_id, str(folder))
    maker.end("codes")
    return maker


def test_codes_are_ranked_by_bits_in_tables(store: Store, tmp_path: Path) -> None:
    maker = vectors_study(store, "codes", tmp_path, "codes")
    board = leaderboard(store, "codes")
    neighbours, map_of, distances = examples.sections(store, "codes", board, maker.tracker.study_tags, None)
    text = words(neighbours)
    assert "Hamming distance (bits)" in text
    assert "<caption><span>Query: test row " in text
    assert '<th scope="row">1</th><td data-label="item">row ' in text
    assert "✓ right" in text
    assert "<img" not in text
    assert len(plots(map_of)) == 1
    assert "Before training is not shown: the untrained embedder was not judged." in words(distances)
    (plot,) = plots(distances)
    assert not np.mod(plot.figure.data[0].x, 1).any()


def test_a_learner_of_a_stream_is_shown_on_rows_that_it_was_not_taught(store: Store, tmp_path: Path) -> None:
    maker = vectors_study(store, "online", tmp_path, "online")
    with examples.model_of(store, "online", "codes", 1) as folder:
        own = examples.test_items(examples.opened(examples.of_folder(folder)).config, None, None)
    held_out = np.random.default_rng(1).permutation(120)[60:]
    assert own.place_N.tolist() == sorted((held_out[held_out >= 60] - 60).tolist())
    board = leaderboard(store, "online")
    found = examples.sections(store, "online", board, maker.tracker.study_tags, None)
    assert "Euclidean distance" in words(found[0])


def test_pictures_are_no_larger_than_they_are_shown() -> None:
    large = np.zeros((300, 600, 3), np.uint8)
    assert examples._small(large).shape == (96, 192, 3)
    assert examples._small(large[..., :1]).shape == (96, 192, 1)
    assert examples._small(large[:28, :28]).shape == (28, 28, 3)


def test_queries_and_gallery_of_their_own_are_kept_apart(
    small: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = data.load("digits")
    split = data.ZeroShotData(
        "digits", whole.development, whole.test, np.arange(0, 896, 2), np.arange(1, 896, 2)
    )
    monkeypatch.setattr(examples.dataset_cache, "zero_shot", lambda _: split)
    own = examples.test_items(small.config("alpha"), None, None)
    assert own.query.tolist() == list(range(0, 896, 2))
    assert own.gallery.tolist() == list(range(1, 896, 2))
    assert isinstance(own.rows, type(whole.test))
    assert not isinstance(own.rows, Features)
