"""A learner on a stream: watched for drift, saved as it goes, and the same after a kill as without one.

Memory does not grow with the stream; what is kept of each constraint is its loss, 8 bytes in a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save

from dmlstudy.files import written_whole
from dmlstudy.heartbeat import beat
from dmlstudy.online.drift import CanReopen, Race, Score, Watch
from dmlstudy.online.learner import Constraints, Floats, OnlineLearner, State

FORMAT_VERSION = 1
STATE, LOSSES = "stream.safetensors", "losses.f64"

BLOCK = 240
"""Constraints given to a learner at once, always from a multiple of this: so that sums are made in one order."""

OnDrift: TypeAlias = Literal["ignore", "reopen"]
Source: TypeAlias = Callable[[int], Iterator[Constraints]]
"""The stream's constraints from the given number on, in blocks of ``BLOCK`` or, the last one, fewer."""


class Moment(NamedTuple):
    """The state of affairs after ``position`` constraints."""

    position: int
    loss: float
    """Mean over the constraints since the last report."""
    utilization: float
    """U since the beginning."""
    layer_weights: Floats
    drifts: tuple[int, ...]
    """The positions at which the loss was found to have risen."""
    reopened: tuple[int, ...]
    """And those at which a fresh learner had proved better since."""


def learn(
    learner: OnlineLearner,
    source: Source,
    report: Callable[[Moment], None] | None = None,
    *,
    report_every: int = 1000,
    on_drift: OnDrift = "ignore",
    sensitivity: float = 0.002,
    probation: int = 3000,
    folder: str | Path | None = None,
    save_every: int = 1000,
    about: Mapping[str, Any] | None = None,
) -> Moment:
    """Give the learner the whole stream, one constraint after another, and say how things stand at its end.

    ``on_drift``, ``sensitivity`` and ``probation`` are ``Course``'s.

    In ``folder`` the state of all this is kept, whole or not at all, every ``save_every`` constraints (rounded up to
    blocks) and at the end: a call with the same learner, source and folder goes on from there, and ends with the same
    parameters as an unbroken one, bit for bit.

    ``about`` is what else must be the same for that.

    Raises ValueError for an empty stream, for a folder of something else, as ``Course`` and as ``partial_fit``; what
    was saved stays.
    """
    course = Course(learner, on_drift=on_drift, sensitivity=sensitivity, probation=probation)
    with contextlib.ExitStack() as stack:
        kept = None
        if folder is not None:
            about = {
                **(about or {}),
                "on_drift": on_drift,
                "sensitivity": sensitivity,
                "probation": probation,
            }
            kept = stack.enter_context(_Kept(Path(folder), learner, about))
        return _learn(course, source, report or (lambda _: None), report_every, kept, save_every)


class Course:
    """A learner on its way along a stream: watched for drift, and with the race that is under way.

    With ``on_drift="reopen"`` the losses are watched (``drift.Watch``, by ``sensitivity``). Where their mean has risen
    a fresh learner goes along for the next ``probation`` constraints, and takes the old one's place if in the second
    half of these its losses are less (``drift.Race``); none other is begun meanwhile.

    Raises ValueError for ``reopen`` of a learner that cannot, and for a probation below 2.
    """

    def __init__(
        self,
        learner: OnlineLearner,
        *,
        on_drift: OnDrift = "ignore",
        sensitivity: float = 0.002,
        probation: int = 3000,
    ) -> None:
        if on_drift not in ("ignore", "reopen"):
            raise ValueError(f"on_drift={on_drift!r}: choose ignore or reopen")
        if on_drift == "reopen" and not isinstance(learner, CanReopen):
            raise ValueError(f"on_drift='reopen': {type(learner).__name__} cannot begin anew; set ignore")
        if probation < 2:
            raise ValueError(f"probation={probation} must be at least 2 constraints")
        self.learner, self.probation = learner, probation
        self.watch = Watch(sensitivity) if on_drift == "reopen" else None
        self.position = 0
        self.drifts: list[int] = []
        self.reopened: list[int] = []
        self.race: Race | None = None
        self.since_report: list[Floats] = []
        """Losses since the last report."""

    def follow(self, block: Constraints) -> Floats:
        """Learn from the next constraints of the stream, and return their losses."""
        losses = self.learner.partial_fit(block)
        beat()
        self.position += len(losses)
        self.since_report.append(losses)
        if self.watch is not None:
            self._mind_drift(self.watch, block, losses)
        return losses

    @property
    def num_since_report(self) -> int:
        return sum(map(len, self.since_report))

    def moment(self) -> Moment:
        """The state of the stream now."""
        losses = np.concatenate(self.since_report) if self.since_report else np.empty(0)
        known = losses[~np.isnan(losses)]
        mean = float(known.mean()) if len(known) else float("nan")
        heard = tuple(self.drifts), tuple(self.reopened)
        learner = self.learner
        return Moment(self.position, mean, learner.counts.utilization, learner.layer_weights, *heard)

    def state(self) -> State:
        """Parameters of the learner and of the one that races it; ``restore`` needs ``progress`` and the losses too."""
        return self.learner.state() | ({} if self.race is None else self.race.state())

    @property
    def progress(self) -> StreamProgress:
        score = None if self.race is None else self.race.score
        return StreamProgress(self.position, tuple(self.drifts), tuple(self.reopened), score)

    def restore(
        self, state: Mapping[str, NDArray[Any]], progress: StreamProgress, losses: Iterable[Floats] = ()
    ) -> None:
        """Go on as the course whose ``state`` and ``progress`` these are.

        ``losses`` are all that it has seen, in parts of any length; they are needed by a course that is watched.
        Raises ValueError for the state of another kind or size of learner.
        """
        self.learner.restore(state)
        self.position = progress.position
        self.drifts, self.reopened = list(progress.drifts), list(progress.reopened)
        self.race = None
        if progress.race is not None:
            self.race = self._begun_race(Score(*progress.race))
            self.race.restore(state)
        if self.watch is not None:
            for part in losses:
                self.watch.update(part)

    def _mind_drift(self, watch: Watch, block: Constraints, losses: Floats) -> None:
        """Go on with the race under way, or begin one where the losses have risen."""
        has_risen, race, learner = watch.update(losses), self.race, self.learner
        if race is not None:
            race.follow(block, losses)
            if race.is_over:
                if race.is_won:
                    learner.restore({**race.challenger.state(), "counts": learner.state()["counts"]})
                    self.reopened.append(self.position)
                self.race = None
        elif has_risen:
            self.drifts.append(self.position)
            self.race = self._begun_race()

    def _begun_race(self, score: Score | None = None) -> Race:
        assert isinstance(self.learner, CanReopen)
        return Race(self.learner.anew(len(self.drifts)), self.probation, score)


class StreamProgress(NamedTuple):
    """The position in a stream, what was heard in it, and the standing of the race that is under way."""

    position: int = 0
    drifts: tuple[int, ...] = ()
    reopened: tuple[int, ...] = ()
    race: Score | None = None


def _learn(
    course: Course,
    source: Source,
    report: Callable[[Moment], None],
    report_every: int,
    kept: _Kept | None,
    save_every: int,
) -> Moment:
    if kept is not None:
        kept.restore(course)
    last_saved = course.position
    for block in source(course.position):
        losses = course.follow(block)
        if kept is not None:
            kept.add(losses)
            if course.position - last_saved >= save_every:
                kept.save(course)
                last_saved = course.position
        if course.num_since_report >= report_every:
            report(course.moment())
            course.since_report.clear()
    if not course.position:
        raise ValueError("the stream is empty: there is nothing to learn from")
    if kept is not None and course.position > last_saved:
        kept.save(course)
    return course.moment()


class _Kept:
    """State and losses of a stream in a folder."""

    def __init__(self, folder: Path, learner: OnlineLearner, about: Mapping[str, Any]) -> None:
        self._folder = folder
        same = {"learner": type(learner).__name__, "settings": learner.settings, **about}
        text = json.dumps(same, sort_keys=True, default=str)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        self._losses = (folder / LOSSES).open("ab")

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._losses.close()

    def restore(self, course: Course) -> None:
        """Set the course to what was kept, if anything was."""
        path = self._folder / STATE
        progress, state = StreamProgress(), None
        if path.exists():
            try:
                with safetensors.safe_open(path, "np") as file:
                    header = json.loads(file.metadata()["stream"])
                    state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if header["format_version"] != FORMAT_VERSION:
                    raise ValueError(
                        f"format {header['format_version']}, this version reads {FORMAT_VERSION}"
                    )
            except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: cannot be read ({error}); remove it to begin anew") from None
            if header["fingerprint"] != self._fingerprint:
                raise ValueError(
                    f"{path}: the state of another learner or stream; give each a folder of its own"
                )
            progress = StreamProgress(*(header[name] for name in StreamProgress._fields))
        size = self._losses.tell()
        if size < 8 * progress.position:
            raise ValueError(
                f"{self._folder / LOSSES}: has {size // 8} losses of {progress.position};"
                " remove the folder to begin anew"
            )
        self._losses.truncate(8 * progress.position)  # what came after the last state is learned again
        if state is not None:
            course.restore(state, progress, self.losses())

    def losses(self) -> Iterator[Floats]:
        """The kept losses, in parts."""
        with (self._folder / LOSSES).open("rb") as file:
            while part := file.read(8 << 16):
                yield np.frombuffer(part, np.float64)

    def add(self, losses: Floats) -> None:
        self._losses.write(losses.astype("<f8").tobytes())

    def save(self, course: Course) -> None:
        """Keep the losses first, then the state that counts on them."""
        self._losses.flush()
        os.fsync(self._losses.fileno())
        header = {"format_version": FORMAT_VERSION, "fingerprint": self._fingerprint}
        content = save(course.state(), {"stream": json.dumps(header | course.progress._asdict())})
        with written_whole(self._folder / STATE) as file:
            file.write(content)
