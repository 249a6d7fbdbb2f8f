"""A learner on a stream: watched for drift, saved as it goes, and the same after a kill as without one.

Memory does not grow with the stream; what is kept of each constraint is its loss, 8 bytes in a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import safetensors
from river import drift
from safetensors.numpy import save

from dmlstudy.data.state_file import written_whole
from dmlstudy.online.learner import Constraints, Floats, OnlineLearner

FORMAT_VERSION = 1
STATE, LOSSES = "stream.safetensors", "losses.f64"

BLOCK = 240
"""Constraints given to a learner at once, always from a multiple of this: so that sums are made in one order."""

OnDrift: TypeAlias = Literal["ignore", "reopen"]
Source: TypeAlias = Callable[[int], Iterator[Constraints]]
"""The stream's constraints from the given number on, in blocks of ``BLOCK`` or, the last one, fewer."""


class Moment(NamedTuple):
    """How things stand after ``position`` constraints."""

    position: int
    loss: float
    """Mean over the constraints since the last report."""
    utilization: float
    """U since the beginning."""
    layer_weights: Floats
    drifts: tuple[int, ...]
    """The positions at which the loss was found to have risen."""


@runtime_checkable
class CanReopen(Protocol):
    """A learner that can begin anew where the world has changed."""

    def reopen(self, number: int) -> None:
        """Begin anew, for the ``number``-th time, from 1."""


def learn(
    learner: OnlineLearner,
    source: Source,
    report: Callable[[Moment], None] | None = None,
    *,
    report_every: int = 1000,
    on_drift: OnDrift = "ignore",
    sensitivity: float = 0.002,
    folder: str | Path | None = None,
    save_every: int = 1000,
    about: Mapping[str, Any] | None = None,
) -> Moment:
    """Give the learner the whole stream, one constraint after another, and say how things stand at its end.

    With ``on_drift="reopen"`` ADWIN (Bifet and Gavalda 2007; river's) watches the losses, and where their mean has
    risen, with a probability of at most about ``sensitivity`` that it has not, the learner is reopened at the
    end of the block. In ``folder`` its state is kept, whole or not at all, every ``save_every`` constraints (rounded up
    to blocks) and at the end: a call with the same learner, source and folder goes on from there, and ends with the
    same parameters as an unbroken one, bit for bit. ``about`` is what else must be the same for that.

    Raises ValueError for an empty stream, for a folder of something else, for ``reopen`` of a learner that cannot,
    and as ``partial_fit``; what was saved stays.
    """
    if on_drift not in ("ignore", "reopen"):
        raise ValueError(f"on_drift={on_drift!r}: choose ignore or reopen")
    if on_drift == "reopen" and not isinstance(learner, CanReopen):
        raise ValueError(f"on_drift='reopen': {type(learner).__name__} cannot begin anew; set ignore")
    watch = _Watch(sensitivity) if on_drift == "reopen" else None
    with contextlib.ExitStack() as stack:
        kept = None
        if folder is not None:
            about = {**(about or {}), "on_drift": on_drift, "sensitivity": sensitivity}
            kept = stack.enter_context(_Kept(Path(folder), learner, about))
        return _learn(learner, source, report or (lambda _: None), report_every, watch, kept, save_every)


def _learn(
    learner: OnlineLearner,
    source: Source,
    report: Callable[[Moment], None],
    report_every: int,
    watch: _Watch | None,
    kept: _Kept | None,
    save_every: int,
) -> Moment:
    position, drifts = (0, []) if kept is None else kept.restore(learner)
    if kept is not None and watch is not None:
        for losses in kept.losses():
            watch.update(losses)
    since_report: list[Floats] = []
    last_saved = position

    def moment() -> Moment:
        losses = np.concatenate(since_report) if since_report else np.empty(0)
        known = losses[~np.isnan(losses)]
        mean = float(known.mean()) if len(known) else float("nan")
        return Moment(position, mean, learner.counts.utilization, learner.layer_weights, tuple(drifts))

    for block in source(position):
        losses = learner.partial_fit(block)
        position += len(losses)
        since_report.append(losses)
        if watch is not None and watch.update(losses):
            drifts.append(position)
            assert isinstance(learner, CanReopen)
            learner.reopen(len(drifts))
        if kept is not None:
            kept.add(losses)
            if position - last_saved >= save_every:
                kept.save(learner, position, drifts)
                last_saved = position
        if sum(map(len, since_report)) >= report_every:
            report(moment())
            since_report.clear()
    if not position:
        raise ValueError("the stream is empty: there is nothing to learn from")
    if kept is not None and position > last_saved:
        kept.save(learner, position, drifts)
    return moment()


class _Watch:
    """Hears when the mean of what it is told has risen."""

    def __init__(self, sensitivity: float) -> None:
        if not 0 < sensitivity < 1:
            raise ValueError(f"sensitivity={sensitivity} must lie between 0 and 1")
        self._detector = drift.ADWIN(delta=sensitivity)  # type: ignore[no-untyped-call]

    def update(self, losses: Floats) -> bool:
        has_risen = False
        for loss in losses[~np.isnan(losses)].tolist():
            before = self._detector.estimation
            self._detector.update(loss)  # type: ignore[no-untyped-call]
            has_risen |= self._detector.drift_detected and self._detector.estimation > before
        return has_risen


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

    def restore(self, learner: OnlineLearner) -> tuple[int, list[int]]:
        """Set the learner to what was kept, if anything was; the position, and where the loss had risen."""
        path = self._folder / STATE
        position, drifts = 0, []
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
            position, drifts = header["position"], header["drifts"]
        size = self._losses.tell()
        if size < 8 * position:
            raise ValueError(
                f"{self._folder / LOSSES}: has {size // 8} losses of {position}; remove the folder to begin anew"
            )
        self._losses.truncate(8 * position)  # what came after the last state is learned again
        return position, drifts

    def losses(self) -> Iterator[Floats]:
        """What was kept, in parts."""
        with (self._folder / LOSSES).open("rb") as file:
            while part := file.read(8 << 16):
                yield np.frombuffer(part, np.float64)

    def add(self, losses: Floats) -> None:
        self._losses.write(losses.astype("<f8").tobytes())

    def save(self, learner: OnlineLearner, position: int, drifts: list[int]) -> None:
        """Keep the losses first, then the state that counts on them."""
        self._losses.flush()
        os.fsync(self._losses.fileno())
        header = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self._fingerprint,
            "position": position,
            "drifts": drifts,
        }
        content = save(learner.state(), {"stream": json.dumps(header)})
        with written_whole(self._folder / STATE, self._folder / f".{STATE}.draft") as file:
            file.write(content)
