"""Lets Ray Tune run what is left of a study on the connected cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray import tune

from dmlstudy.data import state_file
from dmlstudy.engine import preflight
from dmlstudy.engine.cluster import busy, concurrency, idle_gpus
from dmlstudy.engine.cluster_watch import HEAD, ClusterWatch
from dmlstudy.engine.gang import KILL_TIMEOUT_ON_GPUS_S, GangTrainable
from dmlstudy.engine.interruption import Interruption, StudyInterrupted
from dmlstudy.engine.progress import ProgressLines, Tell
from dmlstudy.engine.ray_private import tune_mended
from dmlstudy.engine.recorder import Recorder, Vault
from dmlstudy.engine.stop_requests import Desk
from dmlstudy.engine.tune_adapter import StudyScheduler, TuneSearch
from dmlstudy.records import UNTRAINED, ResourcesConfig
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import Store

HEAD_NODE = {HEAD: 0.001}
"""The reservation of a Tune actor: no CPU, because it waits for workers with their own reservation, and a place beside
the driver, where it does not end with a spot node."""

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


def run_trials(
    spec: StudySpec,
    store: Store,
    tell: Tell,
    tracker: StudyTracker,
    search: StudySearch,
    interruption: Interruption,
    watch: ClusterWatch,
    known: Mapping[str, str],
) -> None:
    """Let Tune run what is left of the search and the verdict."""
    resources = spec.file.resources
    num_at_once = concurrency(resources)
    num_total = spec.num_search_trials + spec.num_verdict_trials
    is_bound, may_end_early = search.plan.is_in_steps, spec.file.search.stop_when is not None
    at_most = "at most " if is_bound else ""
    to_search = f"{'at most ' if may_end_early else ''}{spec.search_in_words(' trials')} by {spec.file.search.sampler}"
    tell(
        f"{spec.name}: {to_search} + {at_most}{spec.num_verdict_trials} for the verdict;"
        f" {resources.workers} workers per trial, {num_at_once} at once"
    )
    idle = [idle_gpus(resources), search.idle_places(num_at_once), busy(resources)]
    for line in filter(None, [*idle, *search.take_notes()]):
        tell(line)
    if is_bound:  # families may be left out of later looks
        num_total = search.num_ended + search.num_left
    elif may_end_early:
        num_total += sum(search.num_planned_of.values()) - spec.num_search_trials
    num_done = num_total - search.num_left
    if num_done:
        tell(f"{num_done} of {at_most}{num_total} trials are done; going on with the others")
    tell("starting the workers; they stay for all trials, so only the first trial waits for them")
    vault_name = f"vault-{spec.name}-{time.time_ns()}"
    vault = Vault.options(name=vault_name, resources=HEAD_NODE).remote()  # type: ignore[attr-defined]
    width = max(len(name) for name in (*spec.families, UNTRAINED)) + len(" verdict seed 99")
    objective = spec.file.protocol.objective
    progress = ProgressLines(
        tell,
        objective,
        search.left,
        num_total,
        width,
        spec.work,
        num_at_once,
        is_bound=is_bound,
        is_search_bound=may_end_early,
    )
    ray_folder = str(store.study_folder(spec.name) / "ray")
    checkpoints = checkpoints_folder(spec, store)

    def note_bound(num_all: int, num_untrained: int) -> None:
        store.write_state(
            spec.name, "running", num_verdict_trials=num_all, num_untrained_trials=num_untrained
        )

    def note_planned(num_of: Mapping[str, int]) -> None:
        own = dict(num_of) if num_of.keys() == spec.families.keys() else {}
        store.write_state(spec.name, "running", num_search_trials=sum(num_of.values()), num_trials_of=own)

    recorder = Recorder(
        search,
        tracker,
        progress,
        vault,
        checkpoints,
        interruption.is_requested,
        watch,
        note_bound,
        note_planned if may_end_early else None,
    )
    search.record_given_up = recorder.file_given_up
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
            search_alg=TuneSearch(search),
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
            # The one for notebooks, which is silent too, would clear the lines that a cell shows.
            progress_reporter=tune.CLIReporter(),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False, checkpoint_frequency=0),
        ),
    )
    with interruption.looked_at(), tune_mended():
        try:
            tuner.fit()
        except Exception:
            if not (recorder.failure or interruption.is_requested()):
                raise
        finally:
            recorder.end_open_runs()
    if interruption.is_requested():
        raise StudyInterrupted
    if recorder.failure:
        raise recorder.failure


def checkpoints_folder(spec: StudySpec, store: Store) -> str:
    """The folder, or its URI, below which each trial of the study keeps its state."""
    root = spec.file.resources.storage_path
    return state_file.join(root, spec.name) if root else str(store.study_folder(spec.name) / "checkpoints")
