"""The winner on test items: neighbours it finds, a map of its embeddings, distances of pairs.

These sections need the model and the data here; where one is missing, each says so in a line in its place.
Shapes: N items, D embedding size, Q queries, K neighbours, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.manifold import TSNE  # type: ignore[import-untyped]

from dmlstudy import retrieval
from dmlstudy.data import ZeroShotData
from dmlstudy.html import Html, element
from dmlstudy.records import TrialConfig
from dmlstudy.registry.history import model_of
from dmlstudy.registry.leaderboard import Leaderboard
from dmlstudy.registry.models import fetched
from dmlstudy.report import figures
from dmlstudy.report.figures import PairDistances
from dmlstudy.report.page import Plot, Section, paragraph, table
from dmlstudy.saved import Model
from dmlstudy.search.verdict_trials import SHIPPED_SEED
from dmlstudy.serving.contact_sheet import LEAST_SIDE, data_uri
from dmlstudy.store import Store
from dmlstudy.text import one_line
from dmlstudy.training import dataset_cache
from dmlstudy.training.tasks import task_of

Vectors = NDArray[Any]
Ints = NDArray[np.int64]

MOST_ITEMS = 20_000
"""Test items that are embedded; of more, whole classes are drawn."""
MOST_POINTS = 1_000
"""Points of the map."""
NUM_STEPS = 750
"""Steps of t-SNE; from principal components on, a thousand or two keep no more neighbours together."""
MOST_PAIRS = 50_000
"""Pairs of each kind whose distances are shown."""
MOST_SHOWN = 10
"""Classes of the map that have a colour of their own and a mark; all others are grey."""
FEWEST_CLASSES = 20
"""The fewest whole classes; where there would be fewer, items are drawn one by one."""
NUM_QUERIES, NUM_WRONG, NUM_NEIGHBOURS = 6, 4, 7
LOOKED_AT = 500
"""Queries among which ones with a wrong first neighbour are sought."""
BATCH = 256
SEED = 0

TITLES = {"examples": "Retrieval examples", "map": "Map of the embeddings", "distances": "Distances of pairs"}


class Items(NamedTuple):
    """Test items: ``place_N`` are their rows on the test side, ``query`` and ``gallery`` places among the items.

    ``relevance`` is a class of each, or which concepts it shows, (N, concepts).
    """

    rows: Any
    place_N: Ints
    relevance: NDArray[Any]
    names: list[str]
    query: Ints
    gallery: Ints
    num_all: int

    def alike(self, one: Ints, other: Ints) -> NDArray[np.bool_]:
        """True where items belong together."""
        a, b = self.relevance[one], self.relevance[other]
        if self.relevance.ndim == 2:
            return np.asarray((a & b).any(axis=-1))
        return np.asarray(a == b)


class Trained(NamedTuple):
    """The model that is shown: what it computes of items, and what its distances are called.

    ``curvature`` is that of the ball that its embeddings are points of, None of others.
    """

    config: TrialConfig
    embed: Any
    unit: str
    curvature: float | None = None


def absent(why: str) -> list[Section]:
    """The three sections, each with the line that says why it is not there."""
    return [Section(name, title, [paragraph(f"Not shown: {why}")]) for name, title in TITLES.items()]


def sections(
    store: Store, study: str, board: Leaderboard, tags: Mapping[str, str], cwd: str | None
) -> list[Section]:
    """The three sections on the winner. ``tags`` are those of the study's run, ``cwd`` is where it was started."""
    if board.winner is None:
        return absent("the study has no winner yet.")
    with ExitStack() as stack:
        try:
            model = opened(
                stack.enter_context(fetched(store, board.model, device="auto", batch_size=BATCH))
                if board.model
                else of_folder(stack.enter_context(model_of(store, study, board.winner, SHIPPED_SEED)))
            )
            items = test_items(model.config, tags.get("test_sha256"), cwd)
            z_ND = embedded(model, items)
        except (ValueError, OSError) as error:
            return absent(f"{one_line(error).rstrip('.')}.")
        before: Vectors | str = "the untrained embedder was not judged."
        untrained = next((row.untrained for row in board.rows if row.family == board.winner), None)
        if untrained is not None:
            try:
                folder = stack.enter_context(model_of(store, study, untrained, SHIPPED_SEED))
                before = embedded(opened(of_folder(folder)), items)
            except (ValueError, OSError) as error:
                before = f"{one_line(error).rstrip('.')}."
    name = f"{board.winner} ({board.model or 'not registered'}, seed {SHIPPED_SEED})"
    made: dict[str, Callable[[], list[str | Plot]]] = {
        "examples": lambda: neighbours(name, model, items, z_ND),
        "map": lambda: map_of(name, items, z_ND, model.curvature),
        "distances": lambda: distances(name, model, items, z_ND, before),
    }
    return [Section(own, TITLES[own], _unless_impossible(make)) for own, make in made.items()]


def _unless_impossible(make: Callable[[], list[str | Plot]]) -> list[str | Plot]:
    """A section's content, or a line on the fault of the embeddings."""
    try:
        return make()
    except ValueError as error:
        return [paragraph(f"Not shown: {one_line(error).rstrip('.')}.")]


def of_folder(folder: Path) -> Model:
    """The model in a folder. Raises ValueError for one that is damaged."""
    return Model.open(folder, device="auto", batch_size=BATCH)


def opened(model: Model) -> Trained:
    """The model with what it was trained on. Raises ValueError for one that does not say that."""
    compute, noted = model.compute, model.notes.get("config")
    if noted is None:
        raise ValueError("the model does not say what it was trained on")
    config = TrialConfig.model_validate(noted)
    task = task_of(config)
    features = task.features(config)
    curvature = None if task.has_codes else config.embedder.ball_curvature
    unit = "Hamming distance (bits)" if task.has_codes else "Euclidean distance"
    if curvature is not None:
        unit = f"hyperbolic distance (curvature {curvature:g})"

    def embed(rows: Any, places: Ints) -> Vectors:
        if features is not None:
            return compute(dataset_cache.features_of(rows.select(places), features))
        batches = [places[start : start + BATCH] for start in range(0, len(places), BATCH)]
        return np.concatenate([compute(rows.read(batch)) for batch in batches])

    return Trained(config, embed, unit, curvature)


def test_items(config: TrialConfig, fingerprint: str | None, cwd: str | None) -> Items:
    """Items that the model was neither trained nor chosen on, at most ``MOST_ITEMS``.

    Raises ValueError where the data are not here, or are others than the study's.
    """
    own = dataset_cache.found_from(config.data, cwd)
    task = task_of(config)
    source = task.dataset(own)
    kept = task.test_rows(config.model_copy(update={"data": own}))
    query = gallery = None
    relevance: NDArray[Any] = source.test.labels_N
    if isinstance(source, ZeroShotData):
        query, gallery = source.test_query, source.test_gallery
    else:
        relevance = source.relevance[1]
    if fingerprint is not None and source.test_fingerprint != fingerprint:
        raise ValueError("the test data here are not those of the study; bring these back")
    place_N = kept[drawn(relevance[kept], MOST_ITEMS, np.random.default_rng(SEED))]
    number_N = np.arange(len(place_N))
    return Items(
        source.test,
        place_N,
        relevance[place_N],
        _names(source.test, relevance, place_N),
        number_N if query is None else number_N[np.isin(place_N, query)],
        number_N if gallery is None else number_N[np.isin(place_N, gallery)],
        len(kept),
    )


def drawn(relevance: NDArray[Any], most: int, rng: np.random.Generator) -> Ints:
    """Sorted places of at most so many items: of whole classes, unless these would be few, and else any."""
    num = len(relevance)
    if num <= most:
        return np.arange(num)
    if relevance.ndim == 1:
        order = rng.permutation(np.unique(relevance))
        counts = np.bincount(relevance)[order]
        classes = order[np.cumsum(counts) <= most]
        if len(classes) >= FEWEST_CLASSES:
            return np.flatnonzero(np.isin(relevance, classes))
    return np.sort(rng.permutation(num)[:most])


def embedded(model: Trained, items: Items) -> Vectors:
    """``z_ND``: embeddings of real numbers, or codes of +1 and -1."""
    return np.asarray(model.embed(items.rows, items.place_N))


def neighbours(name: str, model: Trained, items: Items, z_ND: Vectors) -> list[str | Plot]:
    """Queries with the nearest items, right and wrong ones marked: some at random, and some whose first is wrong."""
    rng = np.random.default_rng(SEED)
    query_Q = with_something_to_find(items, rng.permutation(items.query)[:LOOKED_AT])
    if not len(query_Q):
        return [paragraph("Not shown: no test item has another one of its class to find.")]
    found_QK, distance_QK = nearest(z_ND, query_Q, items.gallery, NUM_NEIGHBOURS, model.curvature)
    is_right_QK = np.stack([items.alike(query_Q, column) for column in found_QK.T], axis=1)
    any_Q = np.arange(min(NUM_QUERIES, len(query_Q)))
    wrong_Q = np.flatnonzero(~is_right_QK[:, 0])
    wrong_Q = wrong_Q[~np.isin(wrong_Q, any_Q)][:NUM_WRONG]
    rerank = model.config.retrieval.rerank
    plain = (
        "" if rerank == "none" else f" Before re-ranking ({rerank}), which the scores of the study include."
    )
    has_pictures = items.rows.read(items.place_N[:1]).ndim == 4
    parts: list[str | Plot] = [
        paragraph(
            f"{name}: {NUM_NEIGHBOURS} nearest of {_some(len(items.gallery), items.num_all)}, the query itself left"
            f" out; below each its class and its {model.unit}.{plain} ✓ is right: of the query’s class; ✗ is wrong."
        ),
        paragraph(
            f"{items.num_all:,} test items in the study; scores of it are in the leaderboard.", kind="quiet"
        )
        if len(items.place_N) < items.num_all
        else "",
    ]
    groups = (
        (f"{len(any_Q)} queries drawn at random", any_Q),
        (f"{len(wrong_Q)} queries drawn of those whose nearest item is wrong", wrong_Q),
    )
    for title, own_Q in groups:
        parts.append(element("h3", title))
        for row in own_Q.tolist():
            ranked = list(
                zip(found_QK[row].tolist(), distance_QK[row].tolist(), is_right_QK[row].tolist(), strict=True)
            )
            show = _pictures if has_pictures else _ranked_table
            parts.append(show(items, int(query_Q[row]), ranked, task_of(model.config).has_codes))
    if not len(wrong_Q):
        parts.append(paragraph(f"None among the {len(query_Q)} that were looked at."))
    return parts


def with_something_to_find(items: Items, query_Q: Ints) -> Ints:
    """Those queries to which an item of the gallery other than themselves belongs."""
    gallery = items.gallery
    return np.array(
        [
            query
            for query in query_Q.tolist()
            if (items.alike(np.full(len(gallery), query), gallery) & (gallery != query)).any()
        ],
        np.int64,
    )


def nearest(
    z_ND: Vectors, query_Q: Ints, gallery_M: Ints, k: int, curvature: float | None = None
) -> tuple[Ints, NDArray[np.float64]]:
    """The k nearest items of the gallery for each query, itself left out, and their distances."""
    place_of = np.full(len(z_ND), -1)
    place_of[gallery_M] = np.arange(len(gallery_M))
    self_index = place_of[query_Q]
    k = min(k, len(gallery_M) - int((self_index >= 0).any()))
    if z_ND.dtype == np.int8:
        packed_NP = retrieval.pack_codes(z_ND)
        ranked = list(retrieval.hamming_neighbours(packed_NP[query_Q], packed_NP[gallery_M], k, self_index))
        index_QK = np.concatenate([index for _, index, _ in ranked])
        distance_QK: NDArray[Any] = np.concatenate([distance for _, _, distance in ranked])
    else:
        z_ND = np.ascontiguousarray(z_ND, np.float32)
        index_QK, distance_QK = retrieval.retrieve(
            z_ND[query_Q], z_ND[gallery_M], k, self_index, curvature=curvature
        )
    return gallery_M[index_QK], distance_QK.astype(np.float64)


def map_of(name: str, items: Items, z_ND: Vectors, curvature: float | None = None) -> list[str | Plot]:
    """The embeddings in the plane by t-SNE, seeded."""
    rng = np.random.default_rng(SEED)
    chosen = drawn(items.relevance, MOST_POINTS, rng)
    names = [items.names[number] for number in chosen.tolist()]
    if len(chosen) < 4:
        return [paragraph("Not shown: it takes four test items.")]
    perplexity = min(30.0, (len(chosen) - 1) / 3)
    how: dict[str, Any] = {"perplexity": perplexity, "max_iter": NUM_STEPS, "random_state": SEED}
    if curvature is None:
        plane = TSNE(init="pca", **how).fit_transform(z_ND[chosen].astype(np.float32))
    else:
        plane = TSNE(metric="precomputed", init="random", **how).fit_transform(
            _all_apart(z_ND[chosen], curvature)
        )
    classes = sorted(set(names))
    shown = classes
    if len(classes) > MOST_SHOWN:
        shown = sorted(rng.permutation(np.array(classes, dtype=object))[:MOST_SHOWN].tolist())
    some = (
        ""
        if len(shown) == len(classes)
        else f" {len(shown)} classes drawn at random have a colour and a mark."
    )
    caption = (
        f"{name}: t-SNE (perplexity {perplexity:.0f}, seed {SEED}) of {_some(len(chosen), items.num_all)}, of"
        f" {len(classes)} classes.{some} Groups tell of neighbours; distances between groups and their sizes tell"
        " nothing."
    )
    figure = figures.embedding_map(np.asarray(plane, np.float64), names, shown)
    label = f"Scatter plot of {len(chosen)} test embeddings in the plane, by class"
    return [Plot(figure, caption, label, 560, has_one_scale=True)]


def distances(
    name: str, model: Trained, items: Items, z_ND: Vectors, before: Vectors | str
) -> list[str | Plot]:
    """Histograms of positive and negative pairs, before training above after (NASA, figure 4)."""
    positive_P2, negative_P2 = pairs_of(items, np.random.default_rng(SEED))
    if not len(positive_P2) or not len(negative_P2):
        return [paragraph("Not shown: there are no pairs of both kinds among the test items.")]
    after = PairDistances(
        apart(z_ND, positive_P2, model.curvature), apart(z_ND, negative_P2, model.curvature)
    )
    sides = [("after training", after)]
    parts: list[str | Plot] = []
    if isinstance(before, str):
        parts.append(paragraph(f"Before training is not shown: {before}"))
    else:
        sides.insert(
            0,
            (
                "before training",
                PairDistances(
                    apart(before, positive_P2, model.curvature), apart(before, negative_P2, model.curvature)
                ),
            ),
        )
    edges = figures.bins([pairs for _, pairs in sides])
    common = ", ".join(f"{figures.overlap(pairs, edges):.1%} {what}" for what, pairs in sides)
    caption = (
        f"{name}: {model.unit} of {len(positive_P2):,} pairs of test items that belong together and of"
        f" {len(negative_P2):,} that do not, the same pairs in each panel. The histograms have in common: {common}."
    )
    figure = figures.histograms(sides, model.unit)
    label = f"Histograms of distances of positive and negative pairs; in common {common}"
    return [*parts, Plot(figure, caption, label, 260 + 200 * len(sides))]


def pairs_of(items: Items, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Pairs of different items that belong together, and that do not: (P, 2) each, all or ``MOST_PAIRS`` drawn."""
    num = len(items.place_N)
    if num < 2:
        return np.empty((0, 2), np.int64), np.empty((0, 2), np.int64)
    one = rng.integers(0, num, 4 * MOST_PAIRS)
    other = (one + rng.integers(1, num, len(one))) % num
    is_alike = items.alike(one, other)
    negative_P2 = np.stack([one, other], axis=1)[~is_alike][:MOST_PAIRS]
    if items.relevance.ndim == 2:
        return np.stack([one, other], axis=1)[is_alike][:MOST_PAIRS], negative_P2
    positive_P2 = np.concatenate([np.empty((0, 2), np.int64), *_within(items.relevance)])
    if len(positive_P2) > MOST_PAIRS:
        positive_P2 = positive_P2[np.sort(rng.permutation(len(positive_P2))[:MOST_PAIRS])]
    return positive_P2, negative_P2


def apart(z_ND: Vectors, pair_P2: Ints, curvature: float | None = None) -> NDArray[np.float64]:
    """Distances of pairs: Euclidean, of points of a ball hyperbolic, of codes the number of differing bits."""
    a_PD, b_PD = z_ND[pair_P2[:, 0]], z_ND[pair_P2[:, 1]]
    if z_ND.dtype == np.int8:
        return np.asarray((a_PD != b_PD).sum(axis=1), np.float64)
    if curvature is not None:
        return retrieval.hyperbolic_distances(a_PD, b_PD, curvature).astype(np.float64)
    return np.asarray(np.linalg.norm(a_PD.astype(np.float64) - b_PD, axis=1))


def _all_apart(z_ND: Vectors, curvature: float) -> NDArray[np.float64]:
    """Hyperbolic distances of all pairs, (N, N)."""
    return np.stack(
        [retrieval.hyperbolic_distances(np.broadcast_to(z_D, z_ND.shape), z_ND, curvature) for z_D in z_ND]
    ).astype(np.float64)


def _within(labels_N: Ints) -> Iterator[Ints]:
    """All pairs within each class."""
    for label in np.unique(labels_N).tolist():
        own = np.flatnonzero(labels_N == label)
        first, second = np.triu_indices(len(own), 1)
        yield np.stack([own[first], own[second]], axis=1)


def _pictures(items: Items, query: int, ranked: Sequence[tuple[int, float, bool]], is_code: bool) -> Html:
    shown = [_picture(items, query, "query", element("b", "query"), items.names[query])]
    for rank, (found, distance, is_right) in enumerate(ranked, 1):
        mark, kind = ("✓", "right") if is_right else ("✗", "wrong")
        below = f" {rank}. {items.names[found]} ({_told(distance, is_code)})"
        shown.append(_picture(items, found, kind, element("b", mark), below, f"{kind}, rank {rank}: "))
    return element("div", *shown, class_="examples")


def _picture(items: Items, number: int, kind: str, mark: Html, below: str, before: str = "query: ") -> Html:
    image_HWC = _small(items.rows.read(items.place_N[number : number + 1])[0])
    alt = f"{before}{items.names[number]}"
    return element(
        "figure",
        element("img", src=data_uri(image_HWC), alt=alt, loading="lazy"),
        element("figcaption", mark, " ", below),
        class_=kind,
    )


def _ranked_table(items: Items, query: int, ranked: Sequence[tuple[int, float, bool]], is_code: bool) -> Html:
    rows = [
        [
            str(rank),
            f"row {items.place_N[found]}",
            items.names[found],
            _told(distance, is_code),
            "✓ right" if is_right else "✗ wrong",
        ]
        for rank, (found, distance, is_right) in enumerate(ranked, 1)
    ]
    caption = f"Query: test row {items.place_N[query]}, class {items.names[query]}."
    return table(caption, ["rank", "item", "class", "distance", ""], rows, "lllnl")


def _small(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """No larger than it is shown."""
    if max(image_HWC.shape[:2]) <= LEAST_SIDE:
        return image_HWC
    picture = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[2] == 1 else image_HWC)
    scale = LEAST_SIDE / min(picture.size)
    shrunk = np.asarray(picture.resize([max(1, round(side * scale)) for side in picture.size]))
    return shrunk if shrunk.ndim == 3 else shrunk[..., None]


def _told(distance: float, is_code: bool) -> str:
    return f"{distance:.0f}" if is_code else f"{distance:.3f}"


def _names(rows: Any, relevance: NDArray[Any], place_N: Ints) -> list[str]:
    if relevance.ndim == 2:
        return [
            f"concepts {', '.join(map(str, np.flatnonzero(relevance[n]).tolist()))}" for n in place_N.tolist()
        ]
    names, labels = rows.class_names, relevance[place_N].tolist()
    return [str(names[label]) for label in labels]


def _some(num: int, num_all: int) -> str:
    return f"all {num:,} test items" if num == num_all else f"{num:,} drawn of {num_all:,} test items"
