"""The plan of a round: which study it runs and what is killed when, a function of the seed and the round alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

STUDY_KINDS = ("driver", "group", "machine", "worker", "actor", "raylet", "gcs")
"""What is killed of a study: its driver, the driver's process group, everything at once, or a process of Ray's."""

COMMAND = "command"
KINDS = (*STUDY_KINDS, COMMAND)

MOST_KILLS = 10
"""The most kills of one round's study, and the most commands that use its store."""

MOST_CALLS = 4
"""The most calls of one command that are killed before it may come to its end."""

SOON = 0.5
"""A study is killed within this share of what is left of it, so that a life has several kills, and its end some."""

AS_IT_STARTS = 0.2
"""So many kills of a study fall before a life has got anywhere; the others after its first epoch or result."""

SPEC = """
name: tiny
data: {{name: digits}}
embedder: {{dim: 8, width: 4}}
batch: {{classes: all, images_per_class: 4, per_epoch: 10}}
training: {{epochs: {epochs}, head_lr_mult: 1, lr: {{float: [1.0e-4, 1.0e-2], log: true, default: 1.0e-3}}}}
families:
  red: {{space: multi_similarity}}
  blue: {{space: triplet_weighting}}
search: {{scheduler: {scheduler}, {search}}}
protocol: {{num_folds: {num_folds}, verdict_seeds: 2, fold_models: {fold_models}}}
resources: {{workers: {workers}, retries: 100}}
"""

FEW = "trials_per_family: 4, generation_size: 2"
FOLD_TEST = "trials_per_family: 14, generation_size: 4, reduction_factor: 2, fold_test: 0.6"
ADAPTIVE = f"{FOLD_TEST}, families: adaptive, sampler: tpe"
EARLY = (
    "trials_per_family: 24, generation_size: 5, reduction_factor: 2, stop_when: {gain: 0.2, probability: 0.5}"
)
"""No score is above 1, so that a search ends soon after a trial has 0.8."""


def _spec(
    scheduler: str,
    num_folds: int,
    *,
    search: str = FEW,
    workers: int = 1,
    epochs: int = 6,
    keeps: bool = True,
) -> str:
    return SPEC.format(
        scheduler=scheduler,
        search=search,
        epochs=epochs,
        num_folds=num_folds,
        fold_models=str(keeps).lower(),
        workers=workers,
    )


VARIATIONS = {
    "asha": _spec("asha", 1, workers=2, keeps=False),
    "halving": _spec("halving", 2),
    "asha-folds": _spec("asha", 2),
    "halving-one": _spec("halving", 1, workers=2, keeps=False),
    "fold-test": _spec("hyperband", 2, search=FOLD_TEST, epochs=4),
    "adaptive": _spec("asha", 2, search=ADAPTIVE, epochs=4),
    "early-end": _spec("asha", 1, search=EARLY, epochs=4, keeps=False),
}
"""The study files. A trial may lose any number of workers, for that is no fault of its own."""


class Kill(NamedTuple):
    """One kill: at which share of the start, or of the work that is then left, and which of several processes."""

    kind: str
    share: float
    which: float
    as_it_starts: bool


class KilledCommand(NamedTuple):
    """A command, which of all, and at which shares of its time one call after the other is killed."""

    which: float
    shares: tuple[float, ...]


class Round(NamedTuple):
    """A study's variation, the kills while it runs, and the commands that use its store afterwards."""

    variation: str
    kills: tuple[Kill, ...]
    commands: tuple[KilledCommand, ...]


def planned(
    seed: int, number: int, kinds: Sequence[str] = KINDS, variations: Sequence[str] = tuple(VARIATIONS)
) -> Round:
    """The round of this number."""
    draw = random.Random(f"{seed}/{number}")
    of_study = [kind for kind in STUDY_KINDS if kind in kinds]
    variation = draw.choice(sorted(variations))
    num_kills, num_commands = draw.randint(4, MOST_KILLS), draw.randint(3, MOST_KILLS)
    kills = [
        Kill(draw.choice(of_study), draw.random(), draw.random(), draw.random() < AS_IT_STARTS)
        for _ in range(num_kills)
        if of_study
    ]
    commands = [
        KilledCommand(draw.random(), tuple(draw.random() for _ in range(draw.randint(1, MOST_CALLS))))
        for _ in range(num_commands)
        if COMMAND in kinds
    ]
    return Round(variation, tuple(kills), tuple(commands))
