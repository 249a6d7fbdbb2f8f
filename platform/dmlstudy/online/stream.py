"""A learner on a stream: watched for drift, saved as it goes, and the same after a kill as without one.

Memory does not grow with the stream; what is kept of each constraint is its loss, 8 bytes in a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import safetensors
from safetensors.numpy import save

from dmlstudy.files import written_whole
from dmlstudy.heartbeat import beat
from dmlstudy.online.drift import CanReopen, Race, Score, Watch
from dmlstudy.online.learner import Constraints, Floats, OnlineLearner

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

    With ``on_drift="reopen"`` the losses are watched (``drift.Watch``, by ``sensitivity``). Where their mean has risen
    a fresh learner goes along for the next ``probation`` constraints, and takes the old one's place if in the second
    half of these its losses are less (``drift.Race``); none other is begun meanwhile.

    In ``folder`` the state of all this is kept, whole or not at all, every ``save_every`` constraints (rounded up to
    blocks) and at the end: a call with the same learner, source and folder goes on from there, and ends with the same
    parameters as an unbroken one, bit for bit. ``about`` is what else must be the same for that.

    Raises ValueError for an empty stream, for a folder of something else, for ``reopen`` of a learner that cannot, for
    a probation below 2, and as ``partial_fit``; what was saved stays.
    """
    if on_drift not in ("ignore", "reopen"):
        raise ValueError(f"on_drift={on_drift!r}: choose ignore or reopen")
    if on_drift == "reopen" and not isinstance(learner, CanReopen):
        raise ValueError(f"on_drift='reopen': {type(learner).__name__} cannot begin anew; set ignore")
    if probation < 2:
        raise ValueError(f"probation={probation} must be at least 2 constraints")
    watch = Watch(sensitivity) if on_drift == "reopen" else None
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
        return _learn(
            learner, source, report or (lambda _: None), report_every, watch, probation, kept, save_every
        )


@dataclass
class _Progress:
    """The position in a stream, what was heard in it, and the race that is under way."""

    position: int = 0
    drifts: list[int] = field(default_factory=list)
    reopened: list[int] = field(default_factory=list)
    race: Race | None = None


def _learn(
    learner: OnlineLearner,
    source: Source,
    report: Callable[[Moment], None],
    report_every: int,
    watch: Watch | None,
    probation: int,
    kept: _Kept | None,
    save_every: int,
) -> Moment:
    progress = _Progress() if kept is None else kept.restore(learner, probation)
    if kept is not None and watch is not None:
        for losses in kept.losses():
            watch.update(losses)
    since_report: list[Floats] = []
    last_saved = progress.position

    def moment() -> Moment:
        losses = np.concatenate(since_report) if since_report else np.empty(0)
        known = losses[~np.isnan(losses)]
        mean = float(known.mean()) if len(known) else float("nan")
        heard = tuple(progress.drifts), tuple(progress.reopened)
        return Moment(progress.position, mean, learner.counts.utilization, learner.layer_weights, *heard)

    for block in source(progress.position):
        losses = learner.partial_fit(block)
        beat()
        progress.position += len(losses)
        since_report.append(losses)
        if watch is not None:
            _mind_drift(learner, block, losses, watch, probation, progress)
        if kept is not None:
            kept.add(losses)
            if progress.position - last_saved >= save_every:
                kept.save(learner, progress)
                last_saved = progress.position
        if sum(map(len, since_report)) >= report_every:
            report(moment())
            since_report.clear()
    if not progress.position:
        raise ValueError("the stream is empty: there is nothing to learn from")
    if kept is not None and progress.position > last_saved:
        kept.save(learner, progress)
    return moment()


def _mind_drift(
    learner: OnlineLearner,
    block: Constraints,
    losses: Floats,
    watch: Watch,
    probation: int,
    progress: _Progress,
) -> None:
    """Go on with the race under way, or begin one where the losses have risen."""
    has_risen, race = watch.update(losses), progress.race
    if race is not None:
        race.follow(block, losses)
        if race.is_over:
            if race.is_won:
                learner.restore({**race.challenger.state(), "counts": learner.state()["counts"]})
                progress.reopened.append(progress.position)
            progress.race = None
    elif has_risen:
        progress.drifts.append(progress.position)
        progress.race = _race(learner, len(progress.drifts), probation)


def _race(learner: OnlineLearner, number: int, probation: int, score: Score | None = None) -> Race:
    assert isinstance(learner, CanReopen)
    return Race(learner.anew(number), probation, score)


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

    def restore(self, learner: OnlineLearner, probation: int) -> _Progress:
        """Set the learner to what was kept, if anything was."""
        path = self._folder / STATE
        progress = _Progress()
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
            learner.restore(state)
            progress = _Progress(header["position"], header["drifts"], header["reopened"])
            if header["race"] is not None:
                progress.race = _race(learner, len(progress.drifts), probation, Score(*header["race"]))
                progress.race.restore(state)
        position = progress.position
        size = self._losses.tell()
        if size < 8 * position:
            raise ValueError(
                f"{self._folder / LOSSES}: has {size // 8} losses of {position}; remove the folder to begin anew"
            )
        self._losses.truncate(8 * position)  # what came after the last state is learned again
        return progress

    def losses(self) -> Iterator[Floats]:
        """The kept losses, in parts."""
        with (self._folder / LOSSES).open("rb") as file:
            while part := file.read(8 << 16):
                yield np.frombuffer(part, np.float64)

    def add(self, losses: Floats) -> None:
        self._losses.write(losses.astype("<f8").tobytes())

    def save(self, learner: OnlineLearner, progress: _Progress) -> None:
        """Keep the losses first, then the state that counts on them."""
        self._losses.flush()
        os.fsync(self._losses.fileno())
        header = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self._fingerprint,
            "position": progress.position,
            "drifts": progress.drifts,
            "reopened": progress.reopened,
            "race": None if progress.race is None else progress.race.score,
        }
        state = learner.state() | ({} if progress.race is None else progress.race.state())
        content = save(state, {"stream": json.dumps(header)})
        with written_whole(self._folder / STATE) as file:
            file.write(content)
