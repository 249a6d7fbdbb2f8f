"""What Tune does otherwise than a study of gangs needs, put right for as long as the study runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray
from ray.air.execution._internal import RayActorManager
from ray.tune.execution import class_cache, tune_controller
from ray.tune.utils.object_cache import _ObjectCache


@contextmanager
def tune_mended() -> Iterator[None]:
    """Let Tune keep every gang, survive an actor that is lost for another reason than its own death, and keep the
    driver's cloud keys to itself."""
    told = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")}
    with (
        # Tune's own list puts them into every actor's runtime environment, which Ray writes into a log for all to read.
        patch.object(class_cache, "ENV_VARS_TO_PROPAGATE", told),
        patch.object(tune_controller, "_ObjectCache", AllActors),
        patch.object(RayActorManager, "_actor_task_failed", _as_lost_actor),
    ):
        yield


class AllActors(_ObjectCache):
    """Keeps every actor until the end of the search.

    Tune's own keeps as many as trials are waiting at that moment, but one: between generations it would end all gangs
    but one. There are never more of them than trials at once, for an actor that is kept is used before a new
    one is started.
    """

    def cache_object(self, key: Any, obj: Any) -> bool:
        self._cached_objects[key].append(obj)
        self._num_cached_objects += 1
        return True

    def flush_cached_objects(self, force_all: bool = False) -> Generator[Any, None, None]:
        if force_all:
            yield from super().flush_cached_objects(force_all=True)


_task_failed = RayActorManager._actor_task_failed


def _as_lost_actor(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
    """Take an actor that Ray has killed for memory, or whose node is gone, for a lost one.

    By itself Tune does so for ``RayActorError`` only, and ends the whole study at Ray's other errors.
    """
    known = (ray.exceptions.RayActorError, ray.exceptions.RayTaskError)
    if isinstance(exception, ray.exceptions.RayError) and not isinstance(exception, known):
        reason = f"{type(exception).__name__}: {told_shortly(exception)}"
        exception = ray.exceptions.RayActorError(error_msg=reason)
    _task_failed(self, tracked_actor_task, exception)


def told_shortly(error: ray.exceptions.RayError) -> str:
    """The line of Ray's message that says why, for such messages begin with ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "memory" in line or "died" in line or "killed" in line]
    return (telling or lines or [type(error).__name__])[-1][:200]
