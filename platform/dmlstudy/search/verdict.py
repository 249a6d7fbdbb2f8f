"""Verdict trials: each family's best, and its embedder untrained, with every seed on the test classes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from dmlstudy.records import RetrievalConfig, TrialConfig, untrained_name
from dmlstudy.training.tasks import task_of, untrained_key

SHIPPED_SEED = 1
"""The verdict seed whose embedder is kept: the first, never the one that did best on the test classes."""


class Verdicts:
    """Hands out the verdict trials; ``judged`` are the (family, seed) pairs of those that have ended."""

    def __init__(self, num_seeds: int, judged: Iterable[tuple[str, int]]) -> None:
        self._seeds = range(1, num_seeds + 1)
        self._judged = set(judged)
        self._queue: list[TrialConfig] | None = None

    def left(self, best: Mapping[str, TrialConfig]) -> list[TrialConfig]:
        """Verdict trials that have not ended, by family and seed; ``best`` are the families' best configurations.

        Families whose bests have the same embedder share an untrained one.
        """
        first_with: dict[Hashable, TrialConfig] = {}
        for config in best.values():
            first_with.setdefault(untrained_key(config), config)
        untrained = [
            config.model_copy(
                update={
                    "family": untrained_name(config.family if len(first_with) > 1 else None),
                    "training": config.training.model_copy(update={"epochs": 0}),
                    "retrieval": RetrievalConfig(),
                    "thresholds": {},
                    **task_of(config).changes_untrained,
                }
            )
            for config in first_with.values()
        ]
        return [
            config.model_copy(
                update={
                    "phase": "verdict",
                    "seed": seed,
                    "keep_embedder": seed == SHIPPED_SEED,
                }
            )
            for config in [*untrained, *best.values()]
            for seed in self._seeds
            if (config.family, seed) not in self._judged
        ]

    def next(self, best: Mapping[str, TrialConfig]) -> TrialConfig | None:
        """The next one to run in this session; None where all were handed out."""
        if self._queue is None:
            self._queue = self.left(best)
        return self._queue.pop(0) if self._queue else None

    def put_back(self, config: TrialConfig) -> None:
        """Let one that was handed out, or has ended, be the next one again."""
        assert self._queue is not None
        self._judged.discard((config.family, config.seed))
        self._queue.insert(0, config)

    def end(self, config: TrialConfig) -> None:
        """Take into account that one has ended."""
        self._judged.add((config.family, config.seed))
