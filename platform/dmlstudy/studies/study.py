"""Run a study: search over all families, verdict on each family's best, register the winner."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import optuna
from ray import tune

from dmlstudy import data
from dmlstudy.data import state_file
from dmlstudy.records import UNTRAINED, ResourcesConfig, is_untrained
from dmlstudy.registry import models, promotion, tracking
from dmlstudy.registry.board import publish, publish_study
from dmlstudy.registry.card import card
from dmlstudy.registry.folds import publish_folds
from dmlstudy.registry.leaderboard import Leaderboard, Row, leaderboard
from dmlstudy.registry.store import STOPPING, Store, StoreError, sole_driver
from dmlstudy.studies import checks, preflight, provenance
from dmlstudy.studies.cluster import ClusterError, busy, concurrency, connected, idle_gpus, variables
from dmlstudy.studies.cluster_watch import ClusterWatch, end_process
from dmlstudy.studies.gang import KILL_TIMEOUT_ON_GPUS_S, GangTrainable
from dmlstudy.studies.ledger import commit_recorded
from dmlstudy.studies.progress import Progress, Tell, engine_noise_to
from dmlstudy.studies.recorder import Recorder, Vault
from dmlstudy.studies.scheduler import StudyScheduler
from dmlstudy.studies.search import StudySearch
from dmlstudy.studies.spec import StudySpec
from dmlstudy.studies.storage import open_storage
from dmlstudy.studies.tune_mends import tune_mended
from dmlstudy.studies.verdict import SHIPPED_SEED
from dmlstudy.studies.wishes import Desk
from dmlstudy.training import loaded

HEAD_NODE = {"node:__internal_head__": 0.001}
"""What a Tune actor reserves: it waits for workers that have their own reservation, so it takes no CPU, and
it stays beside the driver, where it does not end with a spot node."""

ENGINE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # MLflow is the log
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the search reads nested metrics
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # the storage is the state
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ``Interruption`` hears it
    "RAY_AIR_NEW_OUTPUT": "0",
}


def engine_settings(resources: ResourcesConfig) -> dict[str, str]:
    """Tune's variables for a study; an actor whose workers have GPUs gets the time that these take to be freed."""
    patience_s = KILL_TIMEOUT_ON_GPUS_S + 15 if resources.gpus_per_worker else 15
    return ENGINE_SETTINGS | {"TUNE_FORCE_TRIAL_CLEANUP_S": f"{patience_s:g}"}


class StudyInterrupted(Exception):
    """The study was stopped before its end; what was finished is kept, and running it again goes on."""


class StudyFailed(RuntimeError):
    """A study without a single finished trial, with the first reason."""


def run_study(spec: StudySpec, store: Store, *, address: str | None, tell: Tell) -> Leaderboard:
    """Run the study, or the rest of it, and return its leaderboard.

    A study of this name in the store is continued if its file says the same, and only read if it is
    finished. ``address`` is a Ray cluster's; by default Ray is started here for the time of the study.

    ``tell`` gets the progress lines; it must not write to file descriptors 1 and 2, which are turned to
    the study's engine.log meanwhile (see ``progress.terminal``).

    Raises SpecError, StoreError and ClusterError for what is wrong before it starts, also data that have changed
    since the study began; StudyInterrupted when it is stopped (Ctrl-C or SIGTERM), StudyFailed when no trial finishes.
    """
    dataset = checks.check_parts(spec)
    origin, description = provenance.origin(spec, dataset), provenance.description(spec, dataset)
    remarks = data.remarks(dataset, spec.data.path)
    known = origin | {preflight.FILES: data.files_digest(dataset, spec.data.path)}
    del dataset
    loaded.forget()  # trials run in other processes
    store.prepare()
    with sole_driver(store, spec.name):
        if _is_finished(spec, store, origin):
            tell(f"study {spec.name} is finished already; run it under another --name to repeat it")
            return leaderboard(store, spec.name)
        checks.check_storage(spec)
        folder = store.study_folder(spec.name)
        with (
            variables(engine_settings(spec.file.resources)),
            engine_noise_to(folder / "engine.log"),
            _kept(folder / "progress.log", tell) as said,
            ClusterWatch(address, lambda reason: _end_at_once(spec, store, said, reason)) as watch,
            connected(address, spec.file.resources),
            Interruption(folder / STOPPING) as interruption,
        ):
            for remark in remarks:
                said(remark)
            try:
                return _run_here(spec, store, said, interruption, origin, known, description, watch)
            except KeyboardInterrupt:
                raise StudyInterrupted from None


def _run_here(
    spec: StudySpec,
    store: Store,
    tell: Tell,
    interruption: Interruption,
    origin: Mapping[str, str],
    known: Mapping[str, str],
    description: Mapping[str, str],
    watch: ClusterWatch,
) -> Leaderboard:
    """Run the study on the connected cluster, and record how it ends."""
    tracker = tracking.StudyTracker(
        store,
        spec.name,
        description,
        tell,
        origin=origin,
        environment=provenance.surroundings(spec),
        of_each_trial=provenance.of_each_trial(spec, origin),
    )
    tracker.patiently.gives_up = interruption.is_wished
    store.write_state(
        spec.name,
        "running",
        fingerprint=spec.fingerprint(),
        origin=dict(origin),
        spec=dict(spec.raw),
        folders=list(spec.places.folders),
        num_search_trials=spec.num_search_trials,
        num_verdict_trials=spec.num_verdict_trials,
        started=time.time(),
        job=os.environ.get("DMLSTUDY_JOB", ""),
        reason="",
    )
    try:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = open_storage(store)
        commit_recorded(storage, spec.name, tracker)
        search = StudySearch(spec, storage, tracker.finished_verdicts())
        tracker.note_search(search.counts(), search.best_numbers())
        if search.num_left:
            _run_trials(spec, store, tell, tracker, search, interruption, watch, known)
        if not search.is_over:
            raise StudyInterrupted
        _remove_checkpoints(_checkpoints(spec, store), tell)
        board = tracker.patiently(lambda: _conclude(spec, store, tracker, search))
    except (StudyInterrupted, KeyboardInterrupt):
        _record_end(spec, store, tracker, "interrupted")
        raise StudyInterrupted from None
    except ClusterError as error:
        _record_end(spec, store, tracker, "interrupted", reason=str(error)[:2000])
        raise
    except BaseException as error:
        _record_end(spec, store, tracker, "failed", reason=f"{type(error).__name__}: {error}"[:2000])
        raise
    store.write_state(spec.name, "finished")
    return board


def _record_end(
    spec: StudySpec,
    store: Store,
    tracker: tracking.StudyTracker,
    state: Literal["interrupted", "failed"],
    **details: str,
) -> None:
    """Note how the study ended, where other shells look first; what does not take it may be why it ended."""
    with suppress(OSError):
        store.write_state(spec.name, state, **details)
    with suppress(StoreError):
        tracker.end_study(state, {})


def _end_at_once(spec: StudySpec, store: Store, tell: Tell, reason: str) -> None:
    """End this process, whose main thread waits for a Ray that has died; the study is to be resumed."""
    line = f"{reason}; `{store.command('resume', spec.name)}` goes on"
    with suppress(OSError):
        store.write_state(spec.name, "interrupted", reason=line)
    tell(f"error: {line}")
    end_process()


def _is_finished(spec: StudySpec, store: Store, origin: Mapping[str, str]) -> bool:
    if spec.name not in store.studies():
        return False
    state = store.read_state(spec.name)
    if state.get("fingerprint") != spec.fingerprint():
        raise StoreError(
            f"study {spec.name!r} is in the store {store.root} already, from another study file or version; "
            "give this one another name (--name) or store (--store)"
        )
    provenance.check_data(spec.name, state.get("origin", {}), origin)
    return bool(state["state"] == "finished")


def _run_trials(
    spec: StudySpec,
    store: Store,
    tell: Tell,
    tracker: tracking.StudyTracker,
    search: StudySearch,
    interruption: Interruption,
    watch: ClusterWatch,
    known: Mapping[str, str],
) -> None:
    """Let Tune run what is left of the search and the verdict."""
    resources = spec.file.resources
    num_at_once = concurrency(resources)
    num_total = spec.num_search_trials + spec.num_verdict_trials
    tell(
        f"{spec.name}: {len(spec.families)} families x {spec.file.search.trials_per_family} trials"
        f" + {spec.num_verdict_trials} for the verdict; {resources.workers} workers per trial,"
        f" {num_at_once} at once"
    )
    idle = [idle_gpus(resources), search.idle_places(num_at_once), busy(resources)]
    for line in filter(None, [*idle, *search.take_notes()]):
        tell(line)
    num_done = num_total - search.num_left
    if num_done:
        tell(f"{num_done} of {num_total} trials are done; going on with the others")
    tell("starting the workers; they stay for all trials, so only the first trial waits for them")
    vault_name = f"vault-{spec.name}-{time.time_ns()}"
    vault = Vault.options(name=vault_name, resources=HEAD_NODE).remote()  # type: ignore[attr-defined]
    width = max(len(name) for name in (*spec.families, UNTRAINED)) + len(" verdict seed 99")
    objective = spec.file.protocol.objective
    progress = Progress(tell, objective, num_done, num_total, width, num_at_once)
    ray_folder = str(store.study_folder(spec.name) / "ray")
    checkpoints = _checkpoints(spec, store)
    recorder = Recorder(search, tracker, progress, vault, checkpoints, interruption.is_wished, watch)
    tuner = tune.Tuner(
        tune.with_resources(GangTrainable, tune.PlacementGroupFactory([HEAD_NODE])),
        param_space={
            "resources": resources.model_dump(),
            "storage": ray_folder,
            "checkpoints": checkpoints,
            "vault": vault_name,
            "expected": preflight.expectations(known),
        },
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=StudyScheduler(search, Desk(store.study_folder(spec.name))),
            num_samples=-1,  # the search says when it is over
            max_concurrent_trials=num_at_once,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=ray_folder,
            callbacks=[recorder],
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False, checkpoint_frequency=0),
        ),
    )
    with interruption.looked_at(), tune_mended():
        try:
            tuner.fit()
        except Exception:
            if not (recorder.failure or interruption.is_wished()):
                raise
        finally:
            recorder.end_open_runs()
    if interruption.is_wished():
        raise StudyInterrupted
    if recorder.failure:
        raise recorder.failure


def _checkpoints(spec: StudySpec, store: Store) -> str:
    """The folder, or its URI, below which each trial of the study keeps its state."""
    root = spec.file.resources.storage_path
    return state_file.join(root, spec.name) if root else str(store.study_folder(spec.name) / "checkpoints")


def _remove_checkpoints(checkpoints: str, tell: Tell) -> None:
    """Remove what trials have left, now that none goes on any more."""
    try:
        state_file.at(checkpoints).remove()
    except OSError as error:
        tell(f"what trials kept below {checkpoints} could not be removed: {error}")


def _conclude(
    spec: StudySpec,
    store: Store,
    tracker: tracking.StudyTracker,
    search: StudySearch,
) -> Leaderboard:
    """Register the winner and end the study's run."""
    board = leaderboard(store, spec.name)
    winner = search.winner()
    if winner is None:
        reasons = search.failure_reasons()
        raise StudyFailed(
            f"no trial finished; the first failed with: {reasons[0] if reasons else 'no reason'}"
        )
    trained = [row for row in board.rows if not is_untrained(row.family)]
    shipped = {row.family: tracker.verdict_run(row.family, SHIPPED_SEED) for row in trained}
    if shipped.get(winner) is None:
        raise StudyFailed(f"the retraining of {winner} failed; see `{store.command('logs', spec.name)}`")
    versions = {
        row.family: _registered(spec, store, tracker, board, row, shipped[row.family])
        for row in sorted(trained, key=lambda row: row.family != winner)
        if shipped.get(row.family) is not None
    }
    own, *others = versions.values()
    decision = promotion.offer(store, own, *others[:1])
    with_winner = board.model_copy(update={"winner": winner, "model": f"{own.name}/{own.version}"})
    publish(tracker.client, tracker.experiment_id, tracker.parent_id, with_winner, versions)
    publish_folds(
        tracker.client, tracker.experiment_id, versions, spec.file.protocol.objective, tracker.of_each_trial
    )
    promotion.describe(store, own.name)  # again, for now the scores are there
    publish_study(
        tracker.client, tracker.experiment_id, tracker.parent_id, with_winner, versions, _settings(spec)
    )
    # Last of all, for a finished study is not gone on with.
    tracker.end_study("finished", {"winner": winner, "model": with_winner.model, "decision": decision.reason})
    return leaderboard(store, spec.name)


def _settings(spec: StudySpec) -> dict[str, str]:
    """What of the study's file its run in MLflow is found and compared by."""
    data, search, protocol = spec.data, spec.file.search, spec.file.protocol
    values = {
        "data": data.name,
        "families": ", ".join(spec.families),
        **{
            f"search.{name}": getattr(search, name)
            for name in ("sampler", "scheduler", "trials_per_family", "seed")
        },
        **{
            f"protocol.{name}": getattr(protocol, name)
            for name in ("num_folds", "verdict_seeds", "objective")
        },
    }
    return {name: str(value) for name, value in values.items()}


def _registered(
    spec: StudySpec, store: Store, tracker: tracking.StudyTracker, board: Leaderboard, row: Row, run: Any
) -> models.RegisteredVersion:
    """The version of a family's model of the run, registered now or by an earlier sitting."""
    objective = spec.file.protocol.objective
    return models.register(
        store,
        spec.model_name,
        lambda scratch: tracker.fetch_model(run.info.run_id, scratch),
        run_id=run.info.run_id,
        tags={
            "study": spec.name,
            "family": row.family,
            "objective": objective,
            "spec_fingerprint": spec.fingerprint(),
        },
        card=lambda preprocessing: card(
            board,
            row,
            kind=spec.kind,
            data=spec.data,
            trained=f"{datetime.fromtimestamp(run.info.end_time / 1000, UTC):%Y-%m-%d}",
            origin=tracker.study_tags,
            protocol=spec.file.protocol.model_dump(),
            name=spec.model_name,
            preprocessing=preprocessing,
        ),
    )


@contextmanager
def _kept(path: Path, tell: Tell) -> Iterator[Tell]:
    """Tell, and keep what was told, for ``dmlstudy logs``."""
    with open(path, "a", encoding="utf-8", buffering=1) as file:

        def tell_and_keep(line: str) -> None:
            file.write(line.rstrip() + "\n")
            tell(line)

        yield tell_and_keep


class Interruption:
    """Hears, in its block, who wishes that the study ends: Ctrl-C, `dmlstudy stop`, or SIGTERM as of `ray job stop`.

    While the wish is ``looked_at`` it is only noted at first, so that Tune ends its trials in good order. A second
    one, and any at another time, is a KeyboardInterrupt. In a thread other than the main one nothing is heard. The
    first is noted in the file ``noted_in``, for who asks may not wait until the study has recorded its end.
    """

    def __init__(self, noted_in: Path | None = None) -> None:
        self._noted_in = noted_in
        self._is_wished = False
        self._is_looked_at = False

    def is_wished(self) -> bool:
        return self._is_wished

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        self._is_looked_at = True
        try:
            yield
        finally:
            self._is_looked_at = False

    def __enter__(self) -> Interruption:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        is_first, self._is_wished = not self._is_wished, True
        if is_first and self._noted_in is not None:
            with suppress(OSError):
                self._noted_in.touch()
        if not (is_first and self._is_looked_at):
            raise KeyboardInterrupt
