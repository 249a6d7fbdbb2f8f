"""A study's duration on this machine, from the seconds of single trials: what ``validate`` says beforehand."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from dmlstudy.engine import cluster
from dmlstudy.records import ResourcesConfig
from dmlstudy.spec.study_file import StudySpec, default_values
from dmlstudy.text import duration, money

LONG_S = 3600.0
"""Longer studies come with advice on a quicker first look."""

FEW_TRIALS = 2
"""Trials of each family in a first look."""


MANY = 10_000
"""Trials of which it does not matter any more in which order they begin."""


class Seconds(NamedTuple):
    """Seconds of one trial of a family, alone, in the search and in the verdict."""

    search: float
    verdict: float


class Machine(NamedTuple):
    """This machine's resources as Ray would count them."""

    node: cluster.Node

    @property
    def cpus(self) -> float:
        return self.node["CPU"]

    @property
    def gpus(self) -> float:
        return self.node["GPU"]


def this_machine() -> Machine:
    """The CPUs that Ray counts here, a container's limit included, and the GPUs."""
    return Machine(cluster.this_machine())


def num_at_once(resources: ResourcesConfig, machine: Machine) -> int:
    """Trials that ``run`` has going at once on this machine; 0 where it cannot hold a single one."""
    held = cluster.num_trials_held(resources, [machine.node])
    return min(held, resources.max_concurrent_trials or held)


def room(resources: ResourcesConfig, machine: Machine) -> str:
    """A line on how many trials run at once here, or why none does."""
    own = f"{machine.cpus:g} CPU and {f'{machine.gpus:g}' if machine.gpus else 'no'} GPU"
    if at_once := num_at_once(resources, machine):
        return f"here: {at_once} at once on {own}"
    return f"this machine ({own}) cannot hold a trial: it needs a cluster that can (--address), or smaller resources"


def wall_seconds(spec: StudySpec, trials: Mapping[str, Seconds], at_once: int, num_trials: int) -> float:
    """Seconds of ``num_trials`` of each family and its verdict, with so many trials at once.

    A generation of the search ends with its last trial; where there are none, only the end of the search waits.
    """
    search = spec.file.search
    width = min(search.generation_size, num_trials) if search.deterministic else num_trials
    generation = _until_done([each.search for each in trials.values()], width, at_once)
    verdict = _until_done([each.verdict for each in trials.values()], spec.file.protocol.most_seeds, at_once)
    return generation * num_trials / width + verdict


def _until_done(seconds: list[float], times: int, at_once: int) -> float:
    """Seconds until trials of these lengths, each so many times, are done; one begins as soon as there is room."""
    longest = max(seconds, default=0.0)
    if len(seconds) * times > MANY:
        return max(longest, sum(seconds) * times / at_once)
    free = [0.0] * min(at_once, max(1, len(seconds) * times))
    for each in seconds * times:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def total_seconds(spec: StudySpec, trials: Mapping[str, Seconds], start_s: float, machine: Machine) -> float:
    """Seconds of the whole study here; one trial after another where this machine cannot hold one."""
    at_once = num_at_once(spec.file.resources, machine) or 1
    return start_s + wall_seconds(spec, trials, at_once, spec.file.search.trials_per_family)


def in_words(
    spec: StudySpec, trials: Mapping[str, Seconds], start_s: float, machine: Machine, device: str = ""
) -> str:
    """The line on the time that the study takes: in all, what most of it is, and how to have a first look.

    ``device`` says what it was measured on, where that needs to be said.
    """
    resources, search = spec.file.resources, spec.file.search
    here = num_at_once(resources, machine)
    at_once = here or 1
    total = total_seconds(spec, trials, start_s, machine)
    where = f"{at_once} at once on this machine" if here else "one trial at a time on a machine like this one"
    line = (
        f"time: at most about {duration(total)}, {where} (measured on a few batches in one process{device};"
        " early stopping makes it less)"
    )
    work = {
        name: search.trials_per_family * each.search + spec.file.protocol.most_seeds * each.verdict
        for name, each in trials.items()
    }
    if resources.cost_per_hour is not None:
        hours = sum(work.values()) * resources.workers / 3600
        line += f"; cost: at most about {money(hours * resources.cost_per_hour)} of worker time"
    slowest = max(work, key=work.__getitem__)
    if len(work) > 1 and work[slowest] > 0.5 * sum(work.values()):
        line += f"; {work[slowest] / sum(work.values()):.0%} of it is {slowest}"
    epochs = max(1, _epochs(spec))
    if total > LONG_S:
        short = {name: Seconds(each.search / epochs, each.verdict / epochs) for name, each in trials.items()}
        num = min(FEW_TRIALS, search.trials_per_family)
        first_look = start_s + wall_seconds(spec, short, at_once, num)
        line += (
            f"; a first look takes {duration(first_look)}: --name first-look --set training.epochs=1"
            f" --set search.trials_per_family={num}"
        )
    return line


def _epochs(spec: StudySpec) -> int:
    family = next(iter(spec.families.values()))
    return spec.trial_config(family, default_values(family)).training.epochs
