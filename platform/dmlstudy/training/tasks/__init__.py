"""The tasks: each kind of thing that a study can learn, and everything that depends on which it is.

Whoever needs to know asks the task. A module here imports what computes only where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dmlstudy.records import TrialConfig
from dmlstudy.training.interface import Task
from dmlstudy.training.tasks.embedding import Embedding
from dmlstudy.training.tasks.hashing import Hashing
from dmlstudy.training.tasks.online import Online

TASKS: dict[str, Task] = {task.name: task for task in (Embedding(), Hashing(), Online())}
"""Every task by name; the first is that of trials without a section of another's."""

OWN_SECTIONS = tuple(task.section for task in TASKS.values() if task.section)
"""Sections that make a trial one of a task."""


def task_with(has: Callable[[str], bool]) -> Task:
    """The task whose own section is there."""
    first, *others = TASKS.values()
    return next((task for task in others if task.section and has(task.section)), first)


def task_of(config: TrialConfig) -> Task:
    """The task of a trial."""
    return task_with(lambda section: getattr(config, section) is not None)


def task_of_params(params: Mapping[str, Any]) -> Task:
    """The task of a run, by the parameters that it logged."""
    return task_with(lambda section: any(name.startswith(f"{section}.") for name in params))


def untrained_key(config: TrialConfig) -> frozenset[tuple[str, Any]]:
    """The model before training: equal for families that share an untrained row."""
    task = task_of(config)
    return task.untrained_key(task.logged_params(config))
