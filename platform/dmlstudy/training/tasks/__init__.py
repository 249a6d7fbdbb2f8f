"""The tasks: each kind of thing that a study can learn, and everything that depends on which it is.

Whoever needs to know asks the task. A module here imports what computes only where it is called.
"""

from __future__ import annotations

from dmlstudy.records import TrialConfig
from dmlstudy.training.interface import Task
from dmlstudy.training.tasks.embedding import Embedding
from dmlstudy.training.tasks.hashing import Hashing
from dmlstudy.training.tasks.online import Online

TASKS: dict[str, Task] = {task.name: task for task in (Embedding(), Hashing(), Online())}
"""Every task by name; the first is that of a trial without a section of another's."""


def task_of(config: TrialConfig) -> Task:
    """The task of a trial."""
    first, *others = TASKS.values()
    own = (task for task in others if task.section and getattr(config, task.section) is not None)
    return next(own, first)
