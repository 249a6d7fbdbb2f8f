"""A learner of a stream of constraints in training, judged by k-NN classification with what it has been taught.

Shapes: N rows, D features, T constraints, L + 1 layers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlstudy import online
from dmlstudy.data.images import Indices, Labels
from dmlstudy.online import constraints
from dmlstudy.online.drift import Score
from dmlstudy.online.learner import Floats as Floats64
from dmlstudy.online.prequential import Prequential
from dmlstudy.online.stream import BLOCK, Course, StreamProgress
from dmlstudy.records import DataConfig, OnlineConfig, TrialConfig
from dmlstudy.training import dataset_cache
from dmlstudy.training.interface import Share, Trainer, derived_seed
from dmlstudy.training.scores import Scored, unit_scores

Floats = NDArray[np.float32]

LEARNER = "learner."
"""Before the names of the learner's own state."""


class Sides(NamedTuple):
    """Rows of all that is known, and which of them are for development and for the test."""

    x_ND: Floats
    labels_N: Labels
    development: Indices
    test: Indices


class StreamTrainer(Trainer):
    """A learner taught by constraints on some rows, and judged by others that are looked up among these.

    ``training.epochs`` is in how many parts the stream is given: an epoch is a part of it. Its scores say where in the
    stream it stands, too. With ``split: shuffled`` development and test are two halves of all rows, shuffled by
    the verdict's seed (a search has the shuffle 0), as the paper repeats its experiments.
    """

    def __init__(self, config: TrialConfig, share: Share) -> None:
        settings = config.online
        assert settings is not None
        self.config, self.settings = config, settings
        sides = rows_of(config)
        train, held_out = (
            side if rows is None else sides.development[rows]
            for rows, side in ((share.train, sides.development), (share.held_out, sides.test))
        )
        self.is_verdict = config.phase == "verdict"
        self.seed = derived_seed(config.seed, share.stream)
        self.preparation = online.Preparation.of(settings.scaling, sides.x_ND[train])
        self.x_ND, self.labels_N = self.preparation(sides.x_ND[train]), sides.labels_N[train]
        self.query_QD, self.labels_Q = self.preparation(sides.x_ND[held_out]), sides.labels_N[held_out]
        self.held_out = held_out
        self.examples = sides.x_ND[held_out[: dataset_cache.NUM_EXAMPLES]]
        self.learner = online.build(
            config.loss.name,
            config.loss.params,
            num_features=self.x_ND.shape[1],
            seed=self.seed,
            on_invalid="skip",
        )
        self.learner.prepare(self.x_ND, self.seed)
        self.course = Course(
            self.learner,
            on_drift=settings.on_drift,
            sensitivity=settings.sensitivity,
            probation=settings.probation,
        )
        self.losses: list[Floats64] = []
        """All losses, where a watch hears drift in them."""

    @functools.cached_property
    def stream(self) -> constraints.IndexedConstraints:
        """The constraints of all parts."""
        return _constraints(self.settings, self.learner, self.labels_N, self.seed)

    @functools.cached_property
    def prequential(self) -> Prequential:
        """The error on rows before they were learned from, of a verdict alone: a search need not pay for it."""
        return Prequential(self.stream)

    @property
    def part(self) -> int:
        """Constraints of a part, but for the last: whole blocks."""
        return -(-len(self.stream.index_TC) // (self.config.training.epochs * BLOCK)) * BLOCK

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """Learn from the stream's next part, and in a verdict tell the prequential errors so far.

        Where blocks are fewer than parts, the last parts are empty, and their loss is that of the constraints since
        the last whole part.
        """
        if self.config.training.epochs == 0:
            return {}
        course = self.course
        if course.num_since_report >= self.part:
            course.since_report.clear()
        for block in self._next_part():
            if self.is_verdict:
                self._predict(len(block.x_BCD))
            losses = course.follow(block)
            if course.watch is not None:
                self.losses.append(losses)
        return self.prequential.metrics() if self.is_verdict else {}

    def _predict(self, num: int) -> None:
        """Tell the classes of what the next ``num`` constraints name for the first time, before they are learned."""
        start = self.course.position
        new, known = self.prequential.newcomers(start, start + num)
        if len(new):
            predicted_Q = _classes(
                self.settings, self.learner, self.x_ND[known], self.labels_N[known], self.x_ND[new]
            )
            self.prequential.add(start, predicted_Q != self.labels_N[new])

    def _next_part(self) -> Iterator[online.Constraints]:
        stream, here = self.stream, slice(self.course.position, self.course.position + self.part)
        rest = stream.part(here)
        return rest.blocks(self.x_ND, BLOCK) if len(rest.index_TC) else iter(())

    def score(self) -> dict[str, float]:
        """Scores of the classification of others, and the learner's position in the stream."""
        return self.judge().metrics

    def judge(self) -> Scored:
        """The same, with each row's own score of what is a mean over rows."""
        scores, of_rows = _judged(
            self.settings,
            self.learner,
            self.x_ND,
            self.labels_N,
            self.query_QD,
            self.labels_Q,
            self.config.recall_at,
            self.seed,
        )
        if self.course.position:
            moment = self.course.moment()
            scores |= {
                "num_constraints": moment.position,
                "utilization": moment.utilization,
                "train_loss": moment.loss,
                "num_drifts": len(moment.drifts),
                "num_reopened": len(moment.reopened),
            }
        scores |= {f"layer_weight_{layer}": alpha for layer, alpha in enumerate(self.learner.layer_weights)}
        ones = [1] * len(self.held_out)
        sums = {name: value_Q.tolist() for name, value_Q in of_rows.items()}
        return Scored(scores, unit_scores(self.held_out.tolist(), ones, sums))

    def state(self) -> dict[str, Tensor]:
        position, drifts, reopened, race = self.course.progress
        arrays = {
            **{LEARNER + name: value for name, value in self.course.state().items()},
            "position": np.array(position),
            "drifts": np.array(drifts, np.int64),
            "reopened": np.array(reopened, np.int64),
            "race": np.array([] if race is None else race, np.float64),
            "since_report": _joined(self.course.since_report),
            "losses": _joined(self.losses),
        }
        if self.is_verdict and self.course.position:
            arrays["prequential"] = self.prequential.count_W2
        return {name: torch.from_numpy(value) for name, value in arrays.items()}

    def restore(self, state: Mapping[str, Tensor], num_epochs: int) -> None:
        arrays = {name: value.numpy() for name, value in state.items()}
        race = arrays["race"].tolist()
        progress = StreamProgress(
            int(arrays["position"]),
            tuple(arrays["drifts"].tolist()),
            tuple(arrays["reopened"].tolist()),
            Score(int(race[0]), *race[1:]) if race else None,
        )
        of_learner = {
            name.removeprefix(LEARNER): value for name, value in arrays.items() if name.startswith(LEARNER)
        }
        self.losses = [arrays["losses"]]
        self.course.restore(of_learner, progress, self.losses)
        self.course.since_report = [arrays["since_report"]]
        if "prequential" in arrays:  # an earlier version kept none
            self.prequential.restore(arrays["prequential"])

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        name, params = self.config.loss.name, self.config.loss.params
        learned = online.Learned(self.learner, self.preparation, name, params)
        online.save(learned, folder, dict(provenance), self.examples)


def _joined(parts: Sequence[Floats64]) -> Floats64:
    return np.concatenate(parts) if parts else np.empty(0)


def _constraints(
    settings: OnlineConfig, learner: online.OnlineLearner, labels_N: Labels, seed: int
) -> constraints.IndexedConstraints:
    """The constraints to learn from: the first triplets of one pass over the rows, or seeds and what they imply.

    Of a learner of labelled points as many rows, each once and in random order, or all.

    Few pairs imply few: where these are less than are wished for, more seeds are drawn in their place, a tenth of all
    at a time.
    """
    if learner.arity == 1:
        rng = np.random.default_rng(seed)
        return constraints.labelled_points(labels_N, settings.num_seeds + settings.num_implied, rng)
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


def _judged(
    settings: OnlineConfig,
    learner: online.OnlineLearner,
    x_ND: Floats,
    labels_N: Labels,
    query_QD: Floats,
    labels_Q: Labels,
    recall_at: tuple[int, ...],
    seed: int,
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """Error rate and macro F1 of classification and, if wished for, AUC of comparison and Recall@K of retrieval.

    Besides, each row's own values of those that are means over rows.
    """
    predicted_Q = _classes(settings, learner, x_ND, labels_N, query_QD)
    scores = online.judged(labels_Q, predicted_Q)
    is_wrong_Q = (labels_Q != predicted_Q).astype(np.float64)
    of_rows = {"error_rate": is_wrong_Q, "accuracy": 1 - is_wrong_Q}
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
        is_hit = {f"recall_at_{k}": hit_QK[:, :k].any(axis=1).astype(np.float64) for k in recall_at}
        scores |= {name: float(is_hit_Q.mean()) for name, is_hit_Q in is_hit.items()}
        of_rows |= is_hit
    return scores, of_rows


def _classes(
    settings: OnlineConfig, learner: online.OnlineLearner, x_ND: Floats, labels_N: Labels, query_QD: Floats
) -> Labels:
    """The classes of queries, by the learner's own rule or by their neighbours among labelled points."""
    vote = settings.vote
    if vote == "own":
        own_Q = learner.predict(query_QD)
        if own_Q is not None:
            return own_Q
        vote = "similarity" if len(learner.layer_weights) > 1 else "majority"
    return online.classify(learner, query_QD, x_ND, labels_N, settings.k, vote)


def rows_of(config: TrialConfig) -> Sides:
    """The rows of a trial: its seed shuffles those of a verdict, if they are shuffled at all."""
    settings = config.online
    assert settings is not None
    shuffle = config.seed if config.phase == "verdict" else 0
    return _sides(config.data, settings.features, shuffle if settings.split == "shuffled" else None)


@functools.lru_cache(maxsize=1)
def _rows(config: DataConfig, features: str) -> tuple[Floats, Labels, int]:
    """Features and labels of all rows, development first, and how many these are."""
    closed = dataset_cache.closed(config)
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
