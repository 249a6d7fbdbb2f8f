"""A running trial's state on disk, so that a killed one goes on from there and ends with the same digits.

One file, ``trial.safetensors``, holds everything: nothing is pickled, and nothing in it is executed. Rank 0 writes
it, whole or not at all, so a kill at any moment leaves the old file or the new one.

Every rank reads it: the folder lies where all of them see it, on a shared file system or in an object store
(``data.state_file``).

There is no global generator's state in it, because training draws nothing from those: batches are a function
of (seed, epoch, number), and initial parameters and random losses have their own seeds. A generator of a trainer's own
is part of its state.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from dmlstudy import distributed
from dmlstudy.data import state_file
from dmlstudy.records import TrialReport, UnitScores

FORMAT_VERSION = 2

MIN_SECONDS_BETWEEN = 5.0
"""A trial is not written more often than this, so that one of short epochs does not spend its time writing."""

MAX_SHARE = 0.05
"""Nor so often that writing takes a larger share of the time, unless it is to be written always."""


class Progress(NamedTuple):
    """A trial's progress: ``epoch`` epochs of its model number ``fold`` are done, what is needed to go on, and what it
    has reported."""

    fold: int = 0
    epoch: int = 0
    scores: tuple[dict[str, float], ...] = ()
    tensors: Mapping[str, Tensor] = {}
    reports: tuple[TrialReport, ...] = ()
    of_shares: tuple[list[dict[str, float]], ...] = ()
    """The last scores of each fold with each of several shares of the trained weights."""
    of_folds: tuple[UnitScores, ...] = ()
    """The last scores of each fold by unit."""


class Checkpoint:
    """The state of one trial in ``folder``, a path or a URI (made if missing); without one nothing is kept."""

    def __init__(
        self, folder: str | Path | None, fingerprint: str, min_seconds_between: float = MIN_SECONDS_BETWEEN
    ) -> None:
        self.file = None if folder is None else state_file.at(folder)
        self.fingerprint = fingerprint
        self.min_seconds_between = min_seconds_between
        self._pause = min_seconds_between
        self._last = time.monotonic()
        self._has_warned = False

    def load(self) -> Progress:
        """The kept state, or the start; the same on every rank, each of which must call this.

        A file that is damaged, of another version of this package or of torch (the digits would not be those of
        an unbroken trial), or not seen by all ranks, is ignored with a RuntimeWarning. Raises ValueError,
        on every rank, for the state of another configuration.
        """
        if self.file is None:
            return Progress()
        if distributed.rank() == 0:
            with contextlib.suppress(OSError):
                self.file.remove_drafts()
        place = self.file.place
        header: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        problem: str | None = None
        try:
            with self.file.local_copy() as copy:
                header, tensors = _read(copy)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            problem = f"it cannot be read ({type(error).__name__}: {error})"
        if not distributed.any_rank(bool(header) or problem is not None):
            return Progress()
        own = torch.frombuffer(bytearray.fromhex(header.get("sha256", "00" * 32)), dtype=torch.uint8).long()
        of_rank_0 = distributed.sum_over_ranks(own if distributed.rank() == 0 else torch.zeros_like(own))
        if not torch.equal(own, of_rank_0):
            problem = problem or (
                "the ranks do not see the same file; put it on a shared file system or into an object store"
            )
        elif header and header["made_by"] != _made_by():
            problem = f"it was made by {header['made_by']}, this is {_made_by()}"
        if distributed.any_rank(problem is not None):
            if problem is not None:
                self._warn(f"{place}: the trial starts over: {problem}")
            return Progress()
        if header["config"] != self.fingerprint:
            raise ValueError(
                f"{place}: the state of another configuration (fingerprint {header['config']}, this one's is "
                f"{self.fingerprint}); give each trial a folder of its own"
            )
        reports = tuple(TrialReport(step=step, metrics=metrics) for step, metrics in header["reports"])
        of_shares = tuple(header.get("of_shares", ()))
        of_folds = tuple(UnitScores(**each) for each in header.get("of_folds", ()))
        scores = tuple(header["scores"])
        return Progress(header["fold"], header["epoch"], scores, tensors, reports, of_shares, of_folds)

    def offer(
        self,
        fold: int,
        epoch: int,
        scores: list[dict[str, float]],
        tensors: Callable[[], Mapping[str, Tensor]],
        reports: Sequence[TrialReport] = (),
        *,
        of_shares: Sequence[list[dict[str, float]]] = (),
        of_folds: Sequence[UnitScores] = (),
        is_required: bool = False,
        is_shared: bool = False,
    ) -> None:
        """Write the state, on rank 0 and if it is time to, as it is for a required one; a place that refuses costs a
        RuntimeWarning only. With ``is_shared`` every rank has a part of the tensors, and must call this."""
        started = time.monotonic()
        if self.file is None:
            return
        is_due = is_required or started - self._last >= self._pause
        if is_shared:
            is_due = distributed.agree(is_due)
        if not is_due or not (is_shared or distributed.rank() == 0):
            return
        found = tensors()
        if distributed.rank() != 0:
            return
        header = {"config": self.fingerprint, "fold": fold, "epoch": epoch, "scores": scores}
        header["reports"] = [(report.step, report.metrics) for report in reports]
        header |= {"of_shares": list(of_shares)} if of_shares else {}
        header |= {"of_folds": [each.model_dump() for each in of_folds]} if of_folds else {}
        content = _packed(header | {"made_by": _made_by()}, found)
        try:
            self.file.write(content)
        except OSError as error:
            self._warn(f"{self.file.place}: the trial goes on, but its state could not be kept: {error}")
        self._last = time.monotonic()
        if self.min_seconds_between > 0:
            self._pause = max(self.min_seconds_between, (self._last - started) / MAX_SHARE)

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _made_by() -> dict[str, str]:
    return {
        "format": str(FORMAT_VERSION),
        "dmlstudy": importlib.metadata.version("dmlstudy"),
        "torch": torch.__version__,
    }


def _packed(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file whose metadata is the header and a digest of it and the tensors."""
    text = json.dumps(header, sort_keys=True)
    own = {  # copies, because tensors that share memory are refused
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(own, metadata={"trial": text, "sha256": _digest(text, own)})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if _digest(metadata["trial"], tensors) != metadata["sha256"]:
        raise ValueError("its content is not what was written (SHA-256)")
    header: dict[str, Any] = json.loads(metadata["trial"])
    return header | {"sha256": metadata["sha256"]}, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
