"""Compatibility of a new model with an old one's gallery: scores across both, and of maps between their spaces.

A new model seldom meets a new gallery. On the test classes, which neither model has seen, queries of one model are
scored against items of the other, as they are and through a map that was fitted on development items. The rate at which
the new model embeds pictures here tells the cost of embedding a gallery anew.

Shapes: N items, D embedding size.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from dmlstudy import retrieval
from dmlstudy.data import ZeroShotData
from dmlstudy.records import Record, TrialConfig
from dmlstudy.registry import map_fitting, models, tracking
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.retrieval import Scores
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import MapKind, SpaceMap
from dmlstudy.store import Store
from dmlstudy.text import duration, reason, shown
from dmlstudy.training import dataset_cache
from dmlstudy.training.tasks import task_of
from dmlstudy.verdict.comparison import ModelComparison, UnitMeans, compare_models

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

MOST_ITEMS = 20_000
"""Test items, and development items, that are embedded; of more, every so many-th."""
BATCH = 256
MILLION = 1_000_000
NEW_TO_OLD, OLD_TO_NEW = "new-to-old", "old-to-new"
"""Folders of the two maps."""


class CrossScore(Record):
    """Queries of one model against items of a model on unseen classes; ``map`` tells what went through a map.

    ``beside`` is its MAP@R beside old queries in the old gallery, with the interval for other classes like these; None
    of these themselves, and where ``not_compared`` says why.
    """

    queries: str
    gallery: str
    map: str = ""
    map_at_r: float
    recall_at_1: float
    beside: ModelComparison | None = None
    not_compared: str = ""

    def __str__(self) -> str:
        through = f", {self.map}" if self.map else ""
        said = f"MAP@R {self.map_at_r:.4f}, R@1 {self.recall_at_1:.4f}"
        beside = "" if self.beside is None else f"; beside old in old {self.beside}"
        return f"{self.queries} queries in {self.gallery} gallery{through}: {said}{beside}"


class Reembedding(Record):
    """Rates measured here, and what a gallery of ``num_items`` takes at them."""

    images_per_second: float
    mapped_per_second: float
    num_items: int
    device: str

    @property
    def reembed_s(self) -> float:
        return self.num_items / self.images_per_second

    @property
    def map_s(self) -> float:
        return self.num_items / self.mapped_per_second

    def __str__(self) -> str:
        return (
            f"embedding {self.num_items:,} pictures anew takes {duration(self.reembed_s)}"
            f" ({self.images_per_second:,.0f} pictures/s, measured here on {self.device}); mapping their old vectors"
            f" {duration(self.map_s)} ({self.mapped_per_second:,.0f} vectors/s)"
        )


class Compatibility(Record):
    """Scores of two models within and across their spaces, with the maps of a kind."""

    new: str
    old: str
    kind: str
    num_items: int
    num_classes: int
    num_fitted: int
    scores: list[CrossScore]
    not_crossed: str = ""
    """The reason why the spaces cannot meet without a map; empty where they can."""
    cost: Reembedding

    def of(self, queries: str, gallery: str, map: str = "") -> CrossScore | None:
        """The score of this combination, where there is one."""
        asked = (queries, gallery, map)
        return next((each for each in self.scores if (each.queries, each.gallery, each.map) == asked), None)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        base = self.of("old", "old")
        assert base is not None
        found = [
            f"compatibility of {self.new} (new) with {self.old} (old), {self.num_items} test items of"
            f" {self.num_classes} classes that neither has seen; {self.kind} maps fitted on {self.num_fitted}"
            " development items:"
        ]
        for each in self.scores:
            is_told = each == base or each.beside is not None
            beside = "" if is_told else f" ({each.map_at_r - base.map_at_r:+.4f} beside old in old)"
            found.append(f"  {each}{beside}")
        reasons = dict.fromkeys(each.not_compared for each in self.scores if each.not_compared)
        found += [f"  no interval for classes like these: {reason}" for reason in reasons]
        if self.not_crossed:
            found.append(f"  without a map: {self.not_crossed}")
        return [*found, f"  {self.cost}"]


class Maps(NamedTuple):
    """The fitted maps of both directions."""

    new_to_old: SpaceMap
    old_to_new: SpaceMap

    def save(self, folder: Path) -> Maps:
        """The same below a new folder, each whole or not at all.

        One of them alone is what a killed call has left, and is made again. Raises ValueError where it is another.
        """
        check_place(folder)
        for name, own in ((NEW_TO_OLD, self.new_to_old), (OLD_TO_NEW, self.old_to_new)):
            if not (folder / name).exists():
                continue
            there = SpaceMap.open(folder / name)
            if (there.source, there.target, there.described.kind) != (
                own.source,
                own.target,
                own.described.kind,
            ):
                raise ValueError(f"{folder / name}: is another map; name a new folder")
            shutil.rmtree(folder / name)
        return Maps(self.new_to_old.save(folder / NEW_TO_OLD), self.old_to_new.save(folder / OLD_TO_NEW))


def check_place(folder: Path) -> None:
    """Raise ValueError where maps cannot be saved."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is no folder; name another")
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if there >= {NEW_TO_OLD, OLD_TO_NEW}:
        raise ValueError(f"{folder}: holds maps already; name a new folder")
    if further := sorted(name for name in there - {NEW_TO_OLD, OLD_TO_NEW} if not name.startswith(".")):
        raise ValueError(f"{folder}: holds {shown(further[0])}, which is no map; name a new folder")


class _Seen(NamedTuple):
    """Items embedded by one model: test and development, with what is needed to score and fit."""

    test_ND: Floats
    development_ND: Floats
    label_N: Ints
    development_label_N: Ints
    query: Ints
    gallery: Ints
    digests: tuple[str, str]
    images_per_second: float


def measured(
    store: Store,
    new: str,
    old: str,
    kind: MapKind = "linear",
    *,
    num_items: int | None = None,
    device: str = "auto",
) -> tuple[Compatibility, Maps]:
    """The compatibility of two registered versions, and the maps between them.

    Both are embedders, and the data of their studies are here: each sees the items as in its own training. Maps are
    fitted on the new model's development items. ``num_items`` is the gallery's, by default a million.

    Raises ValueError for models of codes, streams and points of a ball, for studies of other test data, and for data
    that are not here or have changed.
    """
    versions = [models.resolve(store, each) for each in (new, old)]
    names = [f"{each.name}/{each.version}" for each in versions]
    with ExitStack() as held:
        opened = [
            held.enter_context(models.fetched(store, name, device=device, batch_size=BATCH)) for name in names
        ]
        for name, model in zip(names, opened, strict=True):
            check_mappable(name, model)
        seen = [
            _seen(store, version, model, name)
            for version, model, name in zip(versions, opened, names, strict=True)
        ]
        facts = [(each.fingerprint, each.gives_unit_vectors) for each in opened]
        place = next(opened[0].loaded.network.parameters()).device.type
    _check_same(names, seen)
    return _measured(names, facts, seen, kind, num_items or MILLION, place)


def check_mappable(name: str, model: Model) -> None:
    """Raise ValueError for a model whose embeddings no map leads to or from."""
    if model.kind != "embedder":
        raise ValueError(
            f"{name}: is a {model.kind}; maps are between embedders, embed and index its items anew"
        )
    if model.curvature is not None:
        raise ValueError(
            f"{name}: embeds into a ball, and maps are between Euclidean spaces; embed and index its items anew"
        )
    if model.notes.get("config", {}).get("embedder", {}).get("code", "none") != "none":
        raise ValueError(
            f"{name}: embeds into codes; maps are between embedders, embed and index its items anew"
        )


def _measured(
    names: list[str],
    facts: list[tuple[str, bool]],
    seen: list[_Seen],
    kind: MapKind,
    num_items: int,
    place: str,
) -> tuple[Compatibility, Maps]:
    new, old = seen
    fitted = {
        "data": {"development_sha256": new.digests[0], "num_items": len(new.development_ND)},
        "test_sha256": new.digests[1],
    }
    maps = []
    for first, second in ((0, 1), (1, 0)):
        maps.append(
            map_fitting.fit_map(
                kind,
                seen[first].development_ND,
                seen[second].development_ND,
                new.development_label_N,
                names=(names[first], names[second]),
                fingerprints=(facts[first][0], facts[second][0]),
                is_unit=facts[second][1],
                told=fitted,
            )
        )
    started = time.perf_counter()
    mapped = {"old": maps[1](old.test_ND), "new": maps[0](new.test_ND)}
    elapsed = max(time.perf_counter() - started, 1e-9)
    asked: list[tuple[str, str, str, Floats, Floats]] = [
        ("old", "old", "", old.test_ND, old.test_ND),
        ("new", "new", "", new.test_ND, new.test_ND),
    ]
    is_crossed = new.test_ND.shape[1] == old.test_ND.shape[1]
    if is_crossed:
        asked.append(("new", "old", "", new.test_ND, old.test_ND))
    asked.append(("new", "old", "queries mapped new to old", mapped["new"], old.test_ND))
    asked.append(("new", "old", "gallery mapped old to new", new.test_ND, mapped["old"]))
    of_asked = [_scores(z_QD, z_MD, new) for *_, z_QD, z_MD in asked]
    scores = [
        _cross_score(each[:3], own, None if number == 0 else of_asked[0], new)
        for number, (each, own) in enumerate(zip(asked, of_asked, strict=True))
    ]
    found = Compatibility(
        new=names[0],
        old=names[1],
        kind=kind,
        num_items=len(new.label_N),
        num_classes=len(np.unique(new.label_N)),
        num_fitted=len(new.development_ND),
        scores=scores,
        not_crossed=""
        if is_crossed
        else f"embeddings of {new.test_ND.shape[1]} and {old.test_ND.shape[1]} numbers have no distance",
        cost=Reembedding(
            images_per_second=new.images_per_second,
            mapped_per_second=(len(old.test_ND) + len(new.test_ND)) / elapsed,
            num_items=num_items,
            device=place,
        ),
    )
    told = {"unseen": [each.model_dump() for each in scores]}
    return found, Maps(
        *(
            SpaceMap(
                each.described.model_copy(update={"told": {**each.described.told, **told}}), each.weights
            )
            for each in maps
        )
    )


def _cross_score(told: tuple[str, str, str], own: Scores, base: Scores | None, seen: _Seen) -> CrossScore:
    """The score of a combination, and what it is beside ``base``."""
    means = own.means()
    queries, gallery, through = told
    found = CrossScore(
        queries=queries,
        gallery=gallery,
        map=through,
        map_at_r=means["map_at_r"],
        recall_at_1=means["recall_at_1"],
    )
    if base is None:
        return found
    compared = compare_models(_by_class(own, seen), _by_class(base, seen), "class")
    update = {"not_compared": compared} if isinstance(compared, str) else {"beside": compared}
    return found.model_copy(update=update)


def _by_class(scores: Scores, seen: _Seen) -> UnitMeans:
    sums = scores.sums(seen.label_N[seen.query])
    return UnitMeans("", sums.count_U.tolist(), sums.sums["map_at_r"] / sums.count_U)


def _scores(z_ND: Floats, gallery_ND: Floats, seen: _Seen) -> Scores:
    """MAP@R and Recall@1; a query's own item, which the other model may have embedded, is left out."""
    place_of = {item: place for place, item in enumerate(seen.gallery.tolist())}
    self_index = np.array([place_of.get(item, -1) for item in seen.query.tolist()], np.int64)
    return retrieval.gallery_scores(
        z_ND[seen.query],
        seen.label_N[seen.query],
        gallery_ND[seen.gallery],
        seen.label_N[seen.gallery],
        (1,),
        self_index=None if (self_index < 0).all() else self_index,
    )


def _seen(store: Store, version: RegisteredVersion, model: Model, name: str) -> _Seen:
    """The items of a version's study, embedded by it."""
    noted = model.notes.get("config")
    if noted is None:
        raise ValueError(f"{name}: does not say what it was trained on")
    try:
        config = TrialConfig.model_validate(noted)
    except ValidationError as error:
        raise ValueError(f"{name}: its configuration is not understood ({reason(error)})") from None
    own = dataset_cache.found_from(config.data, _cwd_of(store, version.study))
    dataset = task_of(config).dataset(own)
    if not isinstance(dataset, ZeroShotData):
        raise ValueError(f"{name}: its study has no unseen classes; embed and index its items anew")
    if tracking.runs_of(store, version.study).study.test_sha256 != dataset.test_fingerprint:
        raise ValueError(f"{name}: the test data here are not those of its study; bring these back")
    test, development = dataset.test, dataset.development
    place_N = _some(len(test))
    number_N = np.arange(len(place_N))
    query, gallery = (
        number_N if side is None else number_N[np.isin(place_N, side)]
        for side in (dataset.test_query, dataset.test_gallery)
    )
    model.compute(test.read(place_N[:1]))  # the network is loaded
    started = time.perf_counter()
    test_ND = _embedded(model, test, place_N)
    rate = len(place_N) / max(time.perf_counter() - started, 1e-9)
    fit_N = _some(len(development))
    return _Seen(
        test_ND,
        _embedded(model, development, fit_N),
        np.asarray(test.labels_N)[place_N],
        np.asarray(development.labels_N)[fit_N],
        query,
        gallery,
        (dataset.development_fingerprint, dataset.test_fingerprint),
        rate,
    )


def _some(num: int) -> Ints:
    """Places of at most ``MOST_ITEMS`` items, evenly over all."""
    return np.unique(np.linspace(0, num - 1, min(num, MOST_ITEMS)).astype(np.int64))


def _embedded(model: Model, rows: Any, place_N: Ints) -> Floats:
    parts = [place_N[start : start + BATCH] for start in range(0, len(place_N), BATCH)]
    return np.concatenate([model.compute(rows.read(part)) for part in parts])


def _cwd_of(store: Store, study: str) -> str | None:
    """The folder in which a study was started; None of one whose store is elsewhere."""
    try:
        return store.read_state(study).get("cwd")
    except ValueError:
        return None


def _check_same(names: list[str], seen: list[_Seen]) -> None:
    """Raise ValueError where two models were not shown the same items."""
    new, old = seen
    if new.digests[1] != old.digests[1] and not np.array_equal(new.label_N, old.label_N):
        raise ValueError(f"{names[0]} and {names[1]} were judged on other test data: they cannot be compared")
    if not np.array_equal(new.development_label_N, old.development_label_N):
        raise ValueError(
            f"{names[0]} and {names[1]} have other development data: no map can be fitted on items of both"
        )
