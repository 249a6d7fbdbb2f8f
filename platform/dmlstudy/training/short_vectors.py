"""Scores of embeddings that are made shorter: by their first numbers, and by 8 bits or 1 bit for each number.

The forms are defined in ``retrieval.short_forms``, for files and galleries too.

Shapes: N items, D embedding size, E size of the leading part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy import distributed, retrieval
from dmlstudy.data.images import Indices, Labels
from dmlstudy.metric_names import ShortForm
from dmlstudy.records import TrialConfig
from dmlstudy.retrieval.short_forms import eight_bits, leading, one_bit
from dmlstudy.training.exclusions import check_alone
from dmlstudy.training.scores import Scored, joined, unit_scores

Floats = NDArray[np.float32]

METRICS = ("map_at_r", "recall_at_1")
"""Metrics of short vectors, beside the objective."""


def forms(z_ND: Floats, sizes: tuple[int, ...]) -> Iterator[tuple[ShortForm, Floats]]:
    """Each size, and the whole, of 32, 8 and 1 bit a number; but for the whole of 32 bits, which is not short."""
    for size in (*sizes, z_ND.shape[1]):
        is_whole = size == z_ND.shape[1]
        part_NE = z_ND if is_whole else leading(z_ND, size)
        if not is_whole:
            yield ShortForm(size, 32), part_NE
        yield ShortForm(None if is_whole else size, 8), eight_bits(part_NE)
        yield ShortForm(None if is_whole else size, 1), one_bit(part_NE)


def sizes_of(config: TrialConfig) -> tuple[int, ...]:
    """Sizes below the embedding's that the trial's verdict is scored with, ascending."""
    wanted = config.short_vectors or config.embedder.parts
    return tuple(sorted(size for size in set(wanted) if size < config.embedder.size))


def short_vector_scores(
    z_ND: Floats,
    labels_N: Labels,
    query: Indices | None,
    gallery: Indices | None,
    config: TrialConfig,
    *,
    camera_N: Indices | None = None,
    device: torch.device | None = None,
) -> Scored:
    """The objective, MAP@R and Recall@1 of each short form, with sums by class; every rank must call this.

    Names are as ``map_at_r_dim64_int8``. Each rank ranks its share of the queries, as in ``retrieval_scores``. Empty in
    a search, and where neither ``protocol.short_vectors`` nor ``embedder.matryoshka`` asks for them.
    """
    if config.phase != "verdict" or not (config.short_vectors or config.embedder.parts):
        return Scored({})

    def own_share() -> list[tuple[ShortForm, retrieval.Ranked]]:
        return [
            (form, _ranked(short_NE, labels_N, query, gallery, config, camera_N, device))
            for form, short_NE in forms(z_ND, sizes_of(config))
        ]

    of_ranks = distributed.computed_by_each(own_share)
    by_form = [
        (of_form[0][0], retrieval.Ranked.joined([ranked for _, ranked in of_form]))
        for of_form in zip(*of_ranks, strict=True)
    ]
    return distributed.computed_once(
        lambda: joined([_scored(form, ranked, labels_N, config) for form, ranked in by_form])
    )


def check(config: TrialConfig) -> None:
    """Raise ValueError, beginning with the key, where leading parts of the trial's embedding have no meaning."""
    embedder, regularizer = config.embedder, config.regularizer
    key, given = (
        ("protocol.short_vectors", config.short_vectors)
        if config.short_vectors
        else ("embedder.matryoshka", embedder.parts)
    )
    if not given:
        return
    shown = f"{key}: [{', '.join(map(str, given))}]"
    others = {
        "embedder.unit_norm": not embedder.unit_norm and "false",
        "embedder.space": embedder.space != "sphere" and embedder.space,
        "embedder.code": embedder.code != "none" and embedder.code,
        "embedder.head_depth": embedder.head_depth,
        "embedder.fusion": embedder.fusion in ("heads", "unit_heads") and embedder.fusion,
        "regularizer.name": regularizer is not None and regularizer.name == "structure" and regularizer.name,
    }
    check_alone(f"{shown} cuts embeddings, which", others)
    if embedder.parts and (
        list(embedder.parts) != sorted(set(embedder.parts)) or embedder.parts[-1] >= embedder.size
    ):
        raise ValueError(
            f"embedder.matryoshka: [{', '.join(map(str, embedder.parts))}] must be ascending sizes below the"
            f" embedding's {embedder.size}; leave the whole out, for it is always trained"
        )


def _ranked(
    short_NE: Floats,
    labels_N: Labels,
    query: Indices | None,
    gallery: Indices | None,
    config: TrialConfig,
    camera_N: Indices | None,
    device: torch.device | None,
) -> retrieval.Ranked:
    """The rankings of this rank's share of the queries."""
    return retrieval.rank(
        short_NE,
        labels_N,
        {},
        1,
        config.recall_at,
        query=query,
        gallery=gallery,
        macro=config.macro,
        reid=config.reid,
        camera_N=camera_N,
        device=device,
        share=distributed.own_slice,
    )


def _scored(form: ShortForm, ranked: retrieval.Ranked, labels_N: Labels, config: TrialConfig) -> Scored:
    scores = ranked.scores["none"]
    wanted = {config.objective, *METRICS}
    metrics = {form.of(name): value for name, value in scores.means().items() if name in wanted}
    unit_U, count_U, sums = scores.sums(labels_N[ranked.query_Q])
    named = {form.of(name): sum_U.tolist() for name, sum_U in sums.items() if name in wanted}
    return Scored(metrics, unit_scores(unit_U.tolist(), count_U.tolist(), named))
