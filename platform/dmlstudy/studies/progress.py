"""What a person sees while a study runs: a line per trial, and none of the engines' noise."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dmlstudy.studies.duration import duration
from dmlstudy.studies.search import Assignment
from dmlstudy.studies.wishes import BY_HAND

Tell = Callable[[str], None]


@contextmanager
def engine_noise_to(path: Path) -> Iterator[None]:
    """Send everything this process and its libraries print to a file, for the length of the block.

    File descriptors 1 and 2 themselves are turned, so that the C++ parts of Ray are heard there too.
    ``terminal`` made before the block still reaches the terminal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(path, "ab", buffering=0) as noise:
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
        try:
            yield
        except Exception:
            noise.write(traceback.format_exc().encode())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def terminal() -> IO[str]:
    """A stream to where standard output leads now, whatever happens to it later."""
    return open(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)


class Progress:
    """Tells of each trial that ends: its score, the best so far and the time left."""

    def __init__(self, tell: Tell, objective: str, num_done: int, num_total: int, width: int) -> None:
        self._tell = tell
        self._objective = objective
        self._num_done = num_done
        self._num_total = num_total
        self._width = width
        self._ended_at: list[float] = []

    def tell(self, line: str) -> None:
        """Something else worth knowing."""
        self._tell(line)

    def ended(self, assignment: Assignment, seconds: float, best: tuple[float, str] | None) -> None:
        """One line for a trial that has ended."""
        if assignment.status == "interrupted":
            why = f", goes on later: {_shortened(assignment.reason)}" if assignment.reason else ""
            self._tell(
                f"{'':>{2 * len(str(self._num_total))}}   {assignment.label:<{self._width}}  interrupted{why}"
            )
            return
        self._num_done += 1
        self._ended_at.append(time.monotonic())
        count = f"{self._num_done:>{len(str(self._num_total))}}/{self._num_total}"
        champion = f"best {best[0]:.4f} {best[1]}" if best else "no best yet"
        line = (
            f"{count}  {assignment.label:<{self._width}}  {self._outcome(assignment):<28}"
            f" {seconds:5.1f} s  {champion:<{self._width + 8}}  left {self._time_left()}"
        )
        self._tell(line)

    def _outcome(self, assignment: Assignment) -> str:
        if assignment.status == "failed":
            return f"failed: {_shortened(assignment.reason)}"
        prefix = "" if assignment.config.phase == "search" else "test_"
        name = f"{prefix}{self._objective}"
        score = assignment.metrics.get(name, float("nan"))
        spread = assignment.metrics.get(f"{name}_stderr")
        text = f"{name} {score:.4f}" + ("" if spread is None else f" ± {spread:.4f}")
        if assignment.status == "pruned":
            how = BY_HAND if assignment.reason.startswith(BY_HAND) else "stopped"
            text = f"{text} {how}, epoch {len(assignment.curve)}"
        return text

    def _time_left(self) -> str:
        """From the pace since the first trial ended, for that one paid for starting the workers."""
        if len(self._ended_at) < 2:
            return "..."
        pace = (self._ended_at[-1] - self._ended_at[0]) / (len(self._ended_at) - 1)
        return duration(pace * (self._num_total - self._num_done))


def _shortened(reason: str, length: int = 90) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
