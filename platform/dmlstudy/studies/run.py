"""Run a study: search over all families, verdict on each family's best, register the winner."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dmlstudy import data
from dmlstudy.data import state_file
from dmlstudy.engine import preflight
from dmlstudy.engine.cluster import ClusterError, connected, variables
from dmlstudy.engine.cluster_watch import ClusterWatch, end_process, told_at_last
from dmlstudy.engine.interruption import Interruption, StudyInterrupted, interrupted
from dmlstudy.engine.progress import Tell, engine_noise_to
from dmlstudy.engine.tune_run import checkpoints_folder, engine_settings, run_trials
from dmlstudy.registry import search_luck, tracking
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.search.ledger import commit_recorded
from dmlstudy.search.storage import SharedStorage, storage_of_driver
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec import study_file
from dmlstudy.spec.replicates import replicate
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import STOPPING, Driver, Store, StoreError, sole_driver
from dmlstudy.studies import checks, pilots, provenance, retention, sealing, starts
from dmlstudy.studies.conclude import conclude
from dmlstudy.training import dataset_cache
from dmlstudy.verdict.power import PlanPower
from dmlstudy.verdict.sequential import Plan


def run_study(spec: StudySpec, store: Store, *, address: str | None, tell: Tell) -> Leaderboard:
    """Run the study, or the rest of it, with the searches that are done again, and return its leaderboard.

    A study of this name in the store is continued if its file says the same. If it is finished, its leaderboard is
    read, and its data are not. ``address`` is a Ray cluster's; by default Ray is started here meanwhile.

    ``tell`` gets the progress lines; it must not write to file descriptors 1 and 2, which are turned to
    the study's engine.log meanwhile (see ``progress.terminal``).

    Raises SpecError, StoreError and ClusterError for faults found before it starts, such as data that have changed
    since the study began; StudyInterrupted when it is stopped (Ctrl-C or SIGTERM), StudyFailed when no trial
    finishes.
    """
    spec = _as_begun(spec, store, tell)
    board = _run_one(spec, store, address=address, tell=tell)
    if spec.file.protocol.searches == 1:
        return board
    leaders = search_luck.leaders(board, spec.file.protocol.search_leaders)
    for number in range(2, spec.file.protocol.searches + 1):
        again = replicate(spec, number, leaders)
        if not _is_finished(again, store):
            tell(
                f"search {number} of {spec.file.protocol.searches}, of {' and '.join(leaders)}: study {again.name}"
            )
            _run_one(again, store, address=address, tell=tell)
    return leaderboard(store, spec.name)


@dataclass(frozen=True)
class _Findings:
    """Facts of a study's data, found before it runs.

    ``origin`` and ``description`` are of the data's identity (``provenance``), ``digests`` of its files, and ``power``
    is what the plan can see.
    """

    origin: Mapping[str, str]
    digests: Mapping[str, str]
    description: Mapping[str, str]
    power: PlanPower


def _run_one(spec: StudySpec, store: Store, *, address: str | None, tell: Tell) -> Leaderboard:
    """Run one study, or the rest of it."""
    if _is_finished(spec, store):  # for good, so nobody need hold it
        return _told_finished(spec, store, tell)
    dataset = checks.check_parts(spec)
    found = _Findings(
        origin=provenance.origin(spec, dataset),
        digests={
            preflight.FILES: data.files_digest(dataset, spec.data.path),
            preflight.RETENTION_FILES: retention.files_digest(spec),
        },
        description=provenance.description(spec, dataset),
        power=pilots.power(spec, dataset, pilots.best_pilot(store, spec, dataset)),
    )
    remarks = data.remarks(dataset, spec.data.path)
    present = starts.present(spec, dataset)
    remarks += [*retention.lines(spec, dataset), *checks.slowness(spec)]
    del dataset
    dataset_cache.forget()  # trials run in other processes
    store.prepare()
    with sole_driver(store, spec.name) as hold:
        if _is_finished(spec, store):  # by another process, meanwhile
            return _told_finished(spec, store, tell)
        left_at = store.last_sign(spec.name)
        _check_data(spec, store, found.origin)
        checks.check_storage(spec)
        remarks += starts.settle(spec, store, present)
        folder = store.study_folder(spec.name)
        interruption = Interruption(folder / STOPPING)
        try:
            with (
                ExitStack() as at_the_end,
                variables(engine_settings(spec.file.resources)),
                engine_noise_to(folder / "engine.log"),
                _kept(folder / "progress.log", tell) as said,
                ClusterWatch(
                    address, lambda why: _end_at_once(spec, store, said, interruption, why)
                ) as watch,
                connected(address, spec.file.resources, watch.note_connected),
                interruption,
                hold.watched(lambda other: _end_for(other, spec, said)),
            ):
                at_the_end.callback(data.remove_unused)  # workers are ended by force
                for remark in remarks:
                    said(remark)
                return _run_here(spec, store, said, interruption, watch, found, left_at)
        except KeyboardInterrupt:
            raise StudyInterrupted from None


def _run_here(
    spec: StudySpec,
    store: Store,
    tell: Tell,
    interruption: Interruption,
    watch: ClusterWatch,
    found: _Findings,
    left_at: float | None,
) -> Leaderboard:
    """Run the study on the connected cluster, and record how it ends."""
    tracker = tracking.StudyTracker(
        store,
        spec.name,
        found.description,
        tell,
        origin=found.origin,
        environment=provenance.surroundings(spec),
        trial_tags=provenance.trial_tags(spec, found.origin),
        left_at=left_at,
    )
    tracker.patiently.server.gives_up = interruption.is_requested
    store.write_state(
        spec.name,
        "running",
        left_at,
        fingerprint=spec.fingerprint(),
        origin=dict(found.origin),
        spec=dict(spec.raw),
        folders=list(spec.places.folders),
        num_search_trials=spec.num_search_trials,
        num_trials_of={name: spec.num_trials_of(name) for name in spec.likenesses},
        num_verdict_trials=spec.num_verdict_trials,
        num_untrained_trials=spec.file.protocol.most_seeds * spec.num_untrained,
        is_bound=Plan.of(spec.file.protocol).is_in_steps,
        is_search_bound=spec.file.search.stop_when is not None,
        work=spec.work,
        started=time.time(),
        job=os.environ.get("DMLSTUDY_JOB", ""),
        starts=starts.entries(spec),
        reason="",
    )
    try:
        with storage_of_driver(store, spec.name, tell, interruption.is_requested) as storage:
            paused = tracker.paused_numbers()
            commit_recorded(storage, spec.name, tracker, paused)
            is_in_steps = Plan.of(spec.file.protocol).is_in_steps
            search = StudySearch(
                spec,
                storage,
                tracker.finished_verdicts(),
                tracker.judged() if is_in_steps else None,
                paused=paused,
            )
            search.before_verdict = lambda: sealing.seal(
                spec,
                store,
                tracker,
                search,
                found.origin,
                found.description.get("folds.json", ""),
                found.power,
                tell,
            )
            tracker.note_search(search.counts(), search.best_numbers())
            if search.num_left:
                known = {**found.origin, **found.digests}
                with _patience_of(storage):
                    run_trials(spec, store, tell, tracker, search, interruption, watch, known)
            if not search.is_over:
                raise StudyInterrupted
            _remove_checkpoints(checkpoints_folder(spec, store), tell)
            board = tracker.patiently(lambda: conclude(spec, store, tracker, search))
    except BaseException as error:
        is_asked_for = isinstance(error, StudyInterrupted | KeyboardInterrupt) or (
            isinstance(error, ClusterError) and interruption.is_requested()
        )  # what asks for it may end Ray's processes as well
        if is_asked_for:
            _record_end(spec, store, tracker, "interrupted")
            raise StudyInterrupted from None
        if isinstance(error, ClusterError):
            _record_end(spec, store, tracker, "interrupted", str(error))
        else:
            _record_end(spec, store, tracker, "failed", f"{type(error).__name__}: {error}")
        raise
    starts.remove_copies(spec, store)
    store.write_state(spec.name, "finished")
    return board


def _patience_of(storage: object) -> AbstractContextManager[None]:
    """Has a database that stays away end the study with its own words."""
    patience = storage.patience if isinstance(storage, SharedStorage) else None
    return nullcontext() if patience is None else patience.speaks_first()


def _record_end(
    spec: StudySpec,
    store: Store,
    tracker: tracking.StudyTracker,
    state: Literal["interrupted", "failed"],
    reason: str = "",
) -> None:
    """Note how the study ended, where other shells look first; what does not take it may be why it ended."""
    with suppress(OSError):
        store.write_state(spec.name, state, reason=reason[:2000])
    with suppress(StoreError):
        tracker.end_study(state, {})


def _end_for(other: Driver, spec: StudySpec, tell: Tell) -> None:
    """End this process, which has lost the study to another and must write nothing more of it."""
    told_at_last(tell, "this one ends")(
        f"study {spec.name!r} is driven by process {other.pid} on {other.host} now, which took it over when"
        " the lock of this one was lost"
    )


def _end_at_once(spec: StudySpec, store: Store, tell: Tell, interruption: Interruption, reason: str) -> None:
    """End this process, whose main thread waits for a Ray that has died; the study is to be resumed.

    One that has finished, and only takes leave of its Ray, stays so. Of one that has not begun nothing is written.

    SIGTERM for a whole process group, as of ``timeout`` and batch systems, ends Ray too: that is an interruption.
    """
    is_asked_for = interruption.is_requested()
    again, line = "the same command", f"{reason}; run the same again"
    with suppress(OSError, StoreError):
        state = store.read_state(spec.name)["state"]
        again = f"`{store.command('resume', spec.name)}`"
        line = f"{reason}; {again} goes on"
        if state != "finished":
            store.write_state(spec.name, "interrupted", reason="" if is_asked_for else line)
    tell(interrupted(again) if is_asked_for else f"error: {line}")
    end_process(130 if is_asked_for else 2)


def _as_begun(spec: StudySpec, store: Store, tell: Tell) -> StudySpec:
    """The study with the defaults that it began with, where it is in the store already."""
    if spec.name not in store.studies():
        return spec
    begun = study_file.as_begun(spec, store.read_state(spec.name).get("fingerprint", ""))
    before, now = begun.file.search, spec.file.search
    others = [
        f"search.{name}: {getattr(before, name)}"
        for name in ("sampler", "scheduler")
        if getattr(before, name) != getattr(now, name)
    ]
    if others:
        tell(f"{' and '.join(others)}, by default when this study began; for a new one it would be otherwise")
    return begun


def _is_finished(spec: StudySpec, store: Store) -> bool:
    """True if the study has ended. Raises StoreError for a study of this name from another study file."""
    if spec.name not in store.studies():
        return False
    state = store.read_state(spec.name)
    if state.get("fingerprint") != spec.fingerprint():
        raise StoreError(
            f"study {spec.name!r} is in the store {store.root} already, from another study file or version; "
            "give this one another name (--name) or store (--store)"
        )
    return bool(state["state"] == "finished")


def _told_finished(spec: StudySpec, store: Store, tell: Tell) -> Leaderboard:
    tell(f"study {spec.name} is finished already; run it under another --name to repeat it")
    return leaderboard(store, spec.name)


def _check_data(spec: StudySpec, store: Store, origin: Mapping[str, str]) -> None:
    """Raise StoreError where a study that goes on would see other data than it has seen."""
    if spec.name in store.studies():
        provenance.check_data(spec.name, store.read_state(spec.name).get("origin", {}), origin)


def _remove_checkpoints(checkpoints: str, tell: Tell) -> None:
    """Remove what trials have left, now that none continues."""
    try:
        state_file.at(checkpoints).remove()
    except OSError as error:
        tell(f"what trials kept below {checkpoints} could not be removed: {error}")


@contextmanager
def _kept(path: Path, tell: Tell) -> Iterator[Tell]:
    """Tell, and keep what was told, for ``dmlstudy logs``."""
    with open(path, "ab", buffering=0) as file:  # which keeps nothing back that the end would write

        def tell_and_keep(line: str) -> None:
            with suppress(OSError):  # as of a full disk, which a trial's record tells of
                file.write(f"{line.rstrip()}\n".encode())
            tell(line)

        yield tell_and_keep
