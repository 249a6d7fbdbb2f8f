"""A trial of online metric learning: a stream of constraints, and k-NN classification with what it has taught.

Shapes: N rows, D features, T constraints, L + 1 layers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy import data, distributed, metric_names, online
from dmlstudy.data.images import Indices, Labels
from dmlstudy.online import constraints
from dmlstudy.online.stream import BLOCK, Moment, Source, learn
from dmlstudy.records import DataConfig, OnlineConfig, TrialConfig, TrialReport, TrialResult
from dmlstudy.training import dataset_cache
from dmlstudy.training.learner import derived_seed
from dmlstudy.training.scores import mean, spread

Floats = NDArray[np.float32]


class Sides(NamedTuple):
    """Rows of all that is known, and which of them are for development and for the test."""

    x_ND: Floats
    labels_N: Labels
    development: Indices
    test: Indices


def run_online_trial(
    config: TrialConfig, report: Callable[[TrialReport], None], *, save_to: Path | None = None
) -> TrialResult:
    """Teach a learner by constraints on some rows, and judge it by others that are looked up among these.

    ``training.epochs`` is in how many parts the stream is given, with a report after each. Phase ``search``: for each
    fold of the development rows the constraints are of the other rows; what is reported is as in a trial of an
    embedder. Phase ``verdict``: the constraints are of all development rows, the test rows are judged once after each
    part, and the learner is written to ``save_to``.

    With ``split: shuffled`` development and test are two halves of all rows, shuffled by the verdict's seed (a search
    has the shuffle 0), as the paper repeats its experiments. Raises ValueError on more than one rank.
    """
    settings = config.online
    assert settings is not None
    if distributed.world_size() > 1:
        raise ValueError("a stream is learned by one process; set resources.workers: 1")
    shuffle = config.seed if config.phase == "verdict" else 0
    sides = _sides(config.data, settings.features, shuffle if settings.split == "shuffled" else None)
    if config.phase == "verdict":
        learned, scores = _taught(config, sides, sides.development, sides.test, 0, report)
        if save_to is not None:
            about: dict[str, Any] = {"family": config.family, "config": config.model_dump(mode="json")}
            online.save(learned, save_to, about, sides.x_ND[sides.test[: dataset_cache.NUM_EXAMPLES]])
        return TrialResult(
            metrics=metric_names.all_on_test(scores),
            embedder_folder=None if save_to is None else str(save_to),
        )

    finished: list[dict[str, float]] = []
    parts = max(config.training.epochs, 1)
    for number, fold in enumerate(data.row_folds(len(sides.development), config.num_folds, config.seed)):

        def tell(each: TrialReport, number: int = number) -> None:
            report(TrialReport(step=number * parts + each.step, metrics=mean([*finished, each.metrics])))

        train, held_out = sides.development[fold.train_indices], sides.development[fold.validation_indices]
        finished.append(_taught(config, sides, train, held_out, number, tell)[1])
    return TrialResult(metrics=mean(finished) | spread(finished, config.objective))


def _taught(
    config: TrialConfig,
    sides: Sides,
    train: Indices,
    held_out: Indices,
    stream: int,
    report: Callable[[TrialReport], None],
) -> tuple[online.Learned, dict[str, float]]:
    """A learner taught by constraints on the rows ``train``, and its last scores on ``held_out``."""
    settings = config.online
    assert settings is not None
    seed = derived_seed(config.seed, stream)
    preparation = online.Preparation.of(settings.scaling, sides.x_ND[train])
    x_ND, labels_N = preparation(sides.x_ND[train]), sides.labels_N[train]
    query_QD, labels_Q = preparation(sides.x_ND[held_out]), sides.labels_N[held_out]
    learner = online.build(
        config.loss.name, config.loss.params, num_features=x_ND.shape[1], seed=seed, on_invalid="skip"
    )
    learner.prepare(x_ND, seed)
    told: dict[str, float] = {}

    def judge(part: int, moment: Moment | None) -> None:
        told.update(_judged(settings, learner, x_ND, labels_N, query_QD, labels_Q, config.recall_at, seed))
        if moment is not None:
            told.update(
                num_constraints=moment.position, utilization=moment.utilization, train_loss=moment.loss
            )
            told.update(num_drifts=len(moment.drifts), num_reopened=len(moment.reopened))
        told.update({f"layer_weight_{layer}": alpha for layer, alpha in enumerate(learner.layer_weights)})
        report(TrialReport(step=part, metrics=dict(told)))

    epochs = config.training.epochs
    if epochs:
        indexed = _constraints(settings, learner, labels_N, seed)
        every = -(-len(indexed.index_TC) // (epochs * BLOCK)) * BLOCK
        part = 0

        def after(moment: Moment) -> None:
            nonlocal part
            part += 1
            judge(part, moment)

        end = learn(
            learner,
            _source(indexed, x_ND),
            after,
            report_every=every,
            on_drift=settings.on_drift,
            sensitivity=settings.sensitivity,
            probation=settings.probation,
        )
        while part < epochs:
            after(end)
    else:
        judge(1, None)
    return online.Learned(learner, preparation, config.loss.name, config.loss.params), told


def _constraints(
    settings: OnlineConfig, learner: online.OnlineLearner, labels_N: Labels, seed: int
) -> constraints.IndexedConstraints:
    """What the learner is taught by: the first triplets of one pass over the rows, or seeds and what they imply.

    Few pairs imply few: where these are less than are wished for, more seeds are drawn in their place, a tenth of all
    at a time.
    """
    if learner.makes_own_triplets:
        of_one_pass = constraints.one_pass_triplets(labels_N.tolist())
        first = itertools.islice(of_one_pass, settings.num_seeds + settings.num_implied)
        return constraints.IndexedConstraints(np.array(list(first), np.int64))
    num_seeds, num_implied = settings.num_seeds, settings.num_implied
    while num_implied and learner.arity == 2:
        seeds = constraints.sample_pairs(labels_N, num_seeds, np.random.default_rng(seed))
        if constraints.count_implied(seeds) >= num_implied:
            break
        more = min(num_implied, -(-(num_seeds + num_implied) // 10))
        num_seeds, num_implied = num_seeds + more, num_implied - more
    return constraints.stream_of(
        labels_N, learner.arity, num_seeds, num_implied, rng=np.random.default_rng(seed)
    )


def _source(indexed: constraints.IndexedConstraints, x_ND: Floats) -> Source:
    def since(position: int) -> Iterator[online.Constraints]:
        is_similar_T = indexed.is_similar_T
        rest = constraints.IndexedConstraints(
            indexed.index_TC[position:], None if is_similar_T is None else is_similar_T[position:]
        )
        return rest.blocks(x_ND, BLOCK)

    return since


def _judged(
    settings: OnlineConfig,
    learner: online.OnlineLearner,
    x_ND: Floats,
    labels_N: Labels,
    query_QD: Floats,
    labels_Q: Labels,
    recall_at: tuple[int, ...],
    seed: int,
) -> dict[str, float]:
    """Error rate and macro F1 of classification and, if wished for, AUC of comparison and Recall@K of retrieval."""
    vote = settings.vote
    if vote == "own":
        vote = "similarity" if len(learner.layer_weights) > 1 else "majority"
    predicted_Q = online.classify(learner, query_QD, x_ND, labels_N, settings.k, vote)
    scores = online.judged(labels_Q, predicted_Q)
    if settings.num_pairs:
        pairs = constraints.sample_pairs(labels_Q, settings.num_pairs, np.random.default_rng(seed))
        assert pairs.is_similar_T is not None
        one, other = query_QD[pairs.index_TC[:, 0]], query_QD[pairs.index_TC[:, 1]]
        scores["auc"] = online.roc_auc(online.dissimilarity(learner, one, other), pairs.is_similar_T)
    if settings.measure_recall:
        found_QK, _ = online.retrieve_distinct(
            learner, query_QD, query_QD, max(recall_at), self_index=np.arange(len(query_QD))
        )
        hit_QK = labels_Q[found_QK] == labels_Q[:, None]
        scores |= {f"recall_at_{k}": float(hit_QK[:, :k].any(axis=1).mean()) for k in recall_at}
    return scores


@functools.lru_cache(maxsize=1)
def _rows(config: DataConfig, features: str) -> tuple[Floats, Labels, int]:
    """Features and labels of all rows, development first, and how many these are."""
    closed = dataset_cache.closed(config)
    if closed.concepts is not None:
        raise ValueError("data.name: items with several labels have no class to be told; choose another set")
    parts = [dataset_cache.features_of(side, features) for side in (closed.development, closed.test)]
    labels = np.concatenate([closed.development.labels_N, closed.test.labels_N])
    return np.concatenate(parts), labels, len(parts[0])


@functools.lru_cache(maxsize=1)
def _sides(config: DataConfig, features: str, shuffle: int | None) -> Sides:
    x_ND, labels_N, num_development = _rows(config, features)
    return Sides(x_ND, labels_N, *sides_of(len(x_ND), num_development, shuffle))


def sides_of(num_rows: int, num_development: int, shuffle: int | None) -> tuple[Indices, Indices]:
    """Rows for development and for the test: the data's own sides, of which development comes first, or halves."""
    order = np.arange(num_rows)
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(num_rows)
        num_development = num_rows // 2
    return order[:num_development], order[num_development:]
