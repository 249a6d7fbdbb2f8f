"""A gang: Ray Train workers that are started once and then serve one trial after another.

Starting a TorchTrainer takes 13 to 25 s on 2 cores, most of it for processes and imports. So a Tune actor
(``GangTrainable``) starts one TorchTrainer whose workers wait for configurations, and Tune reuses the actor for the
next trial. A switch takes milliseconds, also after a trial that was stopped early.

Metrics travel through a ``Mailbox`` actor, since ``ray.train.report`` allows one report in two seconds.

    Tune driver -- step() --> GangTrainable -- next_reply --> Mailbox <-- reply -- rank 0
                                            -- post ------->         -- command -> every rank

A trial that fails on every rank alike (its loss is no longer finite) leaves the gang cleanly. After any other
error the gang is killed and the next trial gets a fresh one, so nothing broken is inherited. The same holds after a
silence longer than ``resources.silence_limit_s``; reports and batches are signs of life.

A trial that lost a worker through no fault of its own continues with a fresh gang: as often as it has made progress in
between, and otherwise ``resources.retries`` times in a row.

A gang is recycled, ended cleanly and restarted, after ``resources.recycle_after`` trials (after each one
with ``isolation: process``) and when its memory has grown by ``resources.recycle_growth_mib``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dmlstudy.data import state_file
from dmlstudy.engine.mailbox import FOLD_SCORES, GO_HOME, Command, Mailbox, Reply
from dmlstudy.engine.ray_private import told_shortly
from dmlstudy.engine.worker import serve
from dmlstudy.engine.worker_group import fit
from dmlstudy.records import ResourcesConfig, TrialConfig
from dmlstudy.text import last_line

RECYCLE_GRACE_S = 10.0
START_GRACE_S = 60.0
STOP_GRACE_S = 1.0
KILL_TIMEOUT_S = 8.0
KILL_TIMEOUT_ON_GPUS_S = 45.0
"""CUDA contexts are torn down slowly, and Ray waits up to 30 s for the process group."""

CALL_TIMEOUT_S = 30.0
VAULT_PATIENCE_S = 120.0
"""Time for which a trained embedder waits for a vault that is being restarted."""

logger = logging.getLogger(__name__)  # in an actor: to its stderr, and so to the study's engine.log


class GangLost(RuntimeError):
    """The gang cannot continue its trial.

    ``blameless``: that is not the trial's doing. ``unstarted``: the workers never served it, so no configuration is to
    fail for it. ``unfit``: a node lacks what each trial needs. ``is_final``: fresh workers would fare no better.
    """

    def __init__(
        self,
        reason: str,
        *,
        blameless: bool,
        unstarted: bool = False,
        unfit: bool = False,
        is_final: bool = False,
    ) -> None:
        super().__init__(reason)
        self.blameless = blameless
        self.unstarted = unstarted or unfit
        self.unfit = unfit
        self.is_final = is_final or unfit or not blameless


class GangTrainable(tune.Trainable):
    """A Tune actor that owns a gang and hands it one trial after another.

    Config keys of a trial: ``trial`` (a TrialConfig as a dict) and ``pause_after`` (a step, or None).

    Of all: ``resources`` (a ResourcesConfig as a dict), ``storage`` (where Ray Train keeps its run), ``checkpoints``
    (the folder of the trials' checkpoints, or its URI), ``vault`` (the name of the actor that takes the trained
    embedders) and ``expected`` (what each worker is to find on its node, as ``preflight.expectations`` has it).
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._number = 0
        self._step_reported = self._step_at_loss = 0.0
        self._energy_wh: float | None = None
        self._resources = ResourcesConfig.model_validate(config["resources"])
        self._train_folder: str = config["storage"]
        self._expected: dict[str, str] = config["expected"]
        self._gang: Gang | None = None
        self._trial = ""
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        while True:
            gang = self._gang
            assert gang is not None
            try:
                reply = gang.next_reply(self._trial)
            except GangLost as lost:
                if not gang.kill():  # Tune ends this actor then, and with it all it started
                    raise RuntimeError(f"{lost}; and the workers do not end") from lost
                if self._step_reported > self._step_at_loss:
                    self._num_retries = 0
                self._step_at_loss = self._step_reported
                if lost.is_final or self._num_retries == self._resources.retries:
                    return self._given_up(lost)
                self._num_retries += 1
                logger.warning(
                    "trial %s goes on with fresh workers (retry %d of %d): %s",
                    self.trial_id,
                    self._num_retries,
                    self._resources.retries,
                    lost,
                )
                self._hand_over()
                continue
            if reply.energy_wh is not None:
                self._energy_wh = (self._energy_wh or 0.0) + reply.energy_wh
            if reply.kind == "report":
                if reply.metrics["step"] <= self._step_reported:  # said already, before the gang was lost
                    continue
                self._step_reported = reply.metrics["step"]
            if reply.files:
                is_needed = FOLD_SCORES not in reply.files
                keep_in_vault(self._vault, self.trial_id, reply.files, is_needed=is_needed)
            return {
                "metrics": reply.metrics,
                "done": reply.kind != "report",
                "failure": reply.reason,
                "paused": reply.kind == "paused",
                "energy_wh": self._energy_wh,
            }

    def cleanup(self) -> None:
        if self._gang is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self._gang.cancel(self._trial)
        self._gang.end(STOP_GRACE_S)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        raise NotImplementedError("trials leave their embedder in the vault")

    def load_checkpoint(self, checkpoint: Any) -> None:
        raise NotImplementedError("trials leave their embedder in the vault")

    def _begin(self, config: dict[str, Any]) -> None:
        """Hand over a trial that Tune has just given to this actor."""
        self._config = config["trial"]
        self._pause_after: int | None = config["pause_after"]
        self._vault: str = config["vault"]
        self._checkpoint = state_file.join(config["checkpoints"], checkpoint_name(self._config))
        self._num_retries = 0
        self._step_reported = self._step_at_loss = 0.0
        self._energy_wh = None
        self._hand_over()

    def _given_up(self, lost: GangLost) -> dict[str, Any]:
        """The last result of a trial that does not continue."""
        reason = str(lost)
        if not lost.is_final and self._num_retries:
            reason += f" ({self._num_retries + 1} times in a row, without an epoch in between)"
        return {
            "metrics": {},
            "done": True,
            "failure": reason,
            "energy_wh": self._energy_wh,
            "unstarted": lost.unstarted,
            "unfit": lost.unfit,
        }

    def _hand_over(self) -> None:
        """Give the trial to the gang, or to a fresh one where that one is gone or to be recycled."""
        self._number += 1
        before, self._trial = self._trial, f"{self.trial_id}-{self._number}"
        command = Command(self._trial, self._config, self._checkpoint, self._pause_after)
        if self._gang is not None and self._gang.is_alive():
            try:
                self._gang.cancel(before)
                reason = self._gang.why_recycle()
                if not reason:
                    self._gang.hand_over(command)
                    return
                is_gone = self._gang.end(RECYCLE_GRACE_S)
            except ray.exceptions.RayError as error:
                reason = f"they do not answer ({told_shortly(error)})"
                is_gone = self._gang.kill()
            logger.warning("the workers are started afresh: %s", reason)
            if not is_gone:  # Tune ends this actor then, and with it all it started
                raise RuntimeError(f"the workers do not end, though {reason}")
        name = f"gang-{self.trial_id}-{time.time_ns()}"
        self._gang = Gang(self._resources, self._train_folder, name, self._expected)
        try:
            self._gang.hand_over(command)
        except BaseException:  # an actor whose gang is coming up does not end, and Tune would wait for it
            self._gang.kill()
            raise


def keep_in_vault(vault: str, trial_id: str, files: dict[str, bytes], *, is_needed: bool = True) -> None:
    """Put a trial's files into the vault of this name, waiting for one that is being started again.

    Files that are not needed are offered once, and lost without a vault.
    """
    end = time.monotonic() + VAULT_PATIENCE_S
    while True:
        try:
            actor: Any = ray.get_actor(vault)
            ray.get(actor.put.remote(trial_id, files), timeout=VAULT_PATIENCE_S)
            return
        except (ray.exceptions.RayError, ValueError):  # ValueError: no actor has the name
            if not is_needed:
                return
            if time.monotonic() > end:
                raise
            time.sleep(1)


def checkpoint_name(config: dict[str, Any]) -> str:
    """The name of a trial's checkpoint: the same in every session, another for every configuration."""
    trial = TrialConfig.model_validate(config)
    return f"{trial.family}-{trial.phase}-{trial.seed}-{trial.fingerprint()}"


class Gang:
    """Workers that come up together and serve one trial after another; nothing is left of them after
    ``end`` or ``kill``."""

    def __init__(
        self, resources: ResourcesConfig, storage: str, name: str, expected: Mapping[str, str] | None = None
    ) -> None:
        self._resources = resources
        self._storage = storage
        self._name = name
        self._expected = dict(expected or {})
        self._num_trials = 0
        self._started = time.monotonic()
        self._is_up = False
        self._has_begun = False
        self._error: BaseException | None = None
        self._placement_group: Any = None
        # Here, and not on any node: the loss of a node on which no worker is would take the trial along.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = Mailbox.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def hand_over(self, command: Command) -> None:
        """Give the workers a trial; they take it when they have ended the one before.

        While the gang comes up nothing is waited for here: ``next_reply`` does, for as long as starting may take.
        """
        self._num_trials += 1
        self._has_begun = False
        posted = self._mailbox.post.remote(command)
        if self._is_up:
            ray.get(posted, timeout=CALL_TIMEOUT_S)

    def cancel(self, trial: str) -> None:
        """Let the workers end the trial at its next report."""
        ray.get(self._mailbox.cancel.remote(trial), timeout=CALL_TIMEOUT_S)

    def next_reply(self, trial: str) -> Reply:
        """The trial's next report or end. Raises GangLost when the workers are gone, broken or silent."""
        while True:
            reply = self._next(trial)
            if reply.kind == "lost":
                raise self._loss(reply.reason)
            if reply.kind == "broken":
                raise GangLost(reply.reason, blameless=False)
            if reply.kind == "unfit":
                raise GangLost(reply.reason, blameless=True, unfit=True)
            if reply.kind != "begun":
                return reply
            self._is_up = self._has_begun = True
            self._places()

    def why_recycle(self) -> str:
        """The reason to start the workers afresh before the next trial, or nothing."""
        most = 1 if self._resources.isolation == "process" else self._resources.recycle_after
        if most and self._num_trials >= most:
            return f"they have served {self._num_trials} trials"
        growth = ray.get(self._mailbox.growth_mib.remote(), timeout=CALL_TIMEOUT_S)
        if growth > self._resources.recycle_growth_mib:
            return f"they have grown by {growth:.0f} MiB since their first trial"
        return ""

    def end(self, grace_s: float) -> bool:
        """Send the workers home, and kill them if that takes longer than ``grace_s``; as ``kill`` does, it says
        whether they have ended."""
        if self.is_alive():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._mailbox.post.remote(GO_HOME), timeout=CALL_TIMEOUT_S)
            if self._is_up:
                self._thread.join(grace_s)
        return self.kill()

    def kill(self) -> bool:
        """End the workers at once, whatever they are doing, and say whether they have.

        Taking away their placement group kills them, stopped ones too, and Ray Train then ends the rest of
        its run. It cannot be done while they are coming up.
        """
        if self.is_alive():
            held = self._places()
            if held is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.util.remove_placement_group(held)
            on_gpus = self._resources.gpus_per_worker > 0
            self._thread.join(KILL_TIMEOUT_ON_GPUS_S if on_gpus else KILL_TIMEOUT_S)
        ray.kill(self._mailbox)
        return not self.is_alive()

    def _places(self) -> Any:
        """The workers' placement group, as they said when they came up; None before. The mailbox may be gone later."""
        if self._placement_group is None:
            with contextlib.suppress(ray.exceptions.RayError):
                self._placement_group = ray.get(
                    self._mailbox.placement_group.remote(), timeout=CALL_TIMEOUT_S
                )
        return self._placement_group

    def _next(self, trial: str) -> Reply:
        limit = self._resources.silence_limit_s
        if not self._is_up:
            limit = self._resources.start_limit_s + START_GRACE_S
        end = time.monotonic() + limit
        pending = self._mailbox.next_reply.remote(trial)
        while not ray.wait([pending], timeout=min(0.5, limit))[0]:
            if not self.is_alive():
                raise self._loss("")
            if time.monotonic() > end:
                if self._is_up and (left := limit - self._silence_s()) > 0:
                    end = time.monotonic() + left
                    continue
                if self._has_begun:
                    raise GangLost(f"no sign of life for {limit:g} s", blameless=False)
                if self._is_up:
                    reason = f"the workers did not end the trial before it within {limit:g} s"
                    raise GangLost(reason, blameless=True)
                raise self._loss("")
        try:
            reply: Reply = ray.get(pending)
        except ray.exceptions.RayError as error:
            raise GangLost(
                f"the trial's mailbox was lost: {told_shortly(error)}",
                blameless=True,
                unstarted=not self._is_up,
            ) from None
        return reply

    def _silence_s(self) -> float:
        """Seconds since a worker's last sign of progress."""
        try:
            return float(ray.get(self._mailbox.silence_s.remote(), timeout=CALL_TIMEOUT_S))
        except ray.exceptions.RayError:
            return math.inf

    def _loss(self, heard: str) -> GangLost:
        """The reason why workers are gone, which Ray Train finds out within a moment."""
        self._thread.join(2.0)
        if self._is_up:
            return GangLost(f"a worker of the trial was lost: {_cause(self._error, heard)}", blameless=True)
        if time.monotonic() - self._started >= self._resources.start_limit_s:
            limit = f"resources.start_limit_s = {self._resources.start_limit_s:g}"
            return GangLost(
                f"the cluster had no room for the workers within {limit}; make room or raise it",
                blameless=True,
                unstarted=True,
                is_final=True,
            )
        return GangLost(
            f"the workers could not be started{_where(self._error)}: {_cause(self._error, heard)}",
            blameless=True,
            unstarted=True,
        )

    def _run(self) -> None:
        try:
            loop_config = {
                "mailbox": self._mailbox,
                "threads": max(1, int(self._resources.cpus_per_worker)),
                "gpus": self._resources.gpus_per_worker,
                "expected": self._expected,
            }
            fit(serve, loop_config, self._resources, name=self._name, storage=self._storage)
        except BaseException as error:
            self._error = error


def _where(error: BaseException | None) -> str:
    """The node that Ray's error names, if it names one."""
    found = re.search(r"\bip=([0-9a-fA-F.:]*[0-9a-fA-F])", str(error or ""))
    return f" on node {found[1]}" if found else ""


def _cause(error: BaseException | None, heard: str) -> str:
    """The most informative line: of a rank whose process ended, or else of one that noticed it."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    for rank, failure in sorted(failures.items()):
        died = getattr(failure, "health_check_failure", failure)
        if isinstance(died, ray.exceptions.RayError) and not isinstance(died, ray.exceptions.RayTaskError):
            return f"rank {rank}: {told_shortly(died)}"
    return last_line(heard or error or "no reason given")
