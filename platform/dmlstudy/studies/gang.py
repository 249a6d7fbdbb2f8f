"""A gang: Ray Train workers that are started once and then serve one trial after another.

Starting a TorchTrainer costs 13 to 25 s on 2 cores, most of it processes and imports. So a Tune actor
(``GangTrainable``) starts one TorchTrainer whose workers wait for configurations, and Tune reuses the
actor for the next trial: a switch costs milliseconds, for trials stopped early too. Metrics travel through
a ``Mailbox`` actor, since ``ray.train.report`` blocks to one report in two seconds.

    Tune driver -- step() --> GangTrainable -- next_reply --> Mailbox <-- reply -- rank 0
                                            -- post ------->         -- command -> every rank

A trial that fails on every rank alike (its loss is no longer finite) leaves the gang in good order. After
any other error the actor is not reused: Tune ends it, its workers die with it, and the next trial starts a
fresh gang, so nothing broken is inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray import tune

from dmlstudy.records import ResourcesConfig, TrialConfig, TrialReport

STOP_TIMEOUT_S = 10.0
REPORTS_AHEAD = 1


class Command(NamedTuple):
    """What the workers are told: run this trial, or go home (``config`` is None)."""

    trial: str
    config: dict[str, Any] | None


class Reply(NamedTuple):
    """What comes back: an epoch's report, the result with the files it left, or the reason of a failure.

    After ``failed`` every rank has left the trial in good order; after ``broken`` the gang is lost.
    """

    kind: Literal["report", "finished", "failed", "broken"]
    metrics: dict[str, float] = {}
    files: dict[str, bytes] = {}
    reason: str = ""


@ray.remote(num_cpus=0)
class Mailbox:
    """Between one Tune actor and its workers; every wait is an await, so no call blocks another."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._posted = asyncio.Condition()
        self._replies: dict[str, asyncio.Queue[Reply]] = {}
        self._cancelled: set[str] = set()

    async def post(self, command: Command) -> None:
        """Tell every rank, in order."""
        async with self._posted:
            self._replies[command.trial] = asyncio.Queue(maxsize=REPORTS_AHEAD)
            self._commands.append(command)
            self._posted.notify_all()

    async def command(self, position: int) -> Command:
        """The command at ``position``, waited for."""
        async with self._posted:
            await self._posted.wait_for(lambda: len(self._commands) > position)
        return self._commands[position]

    async def reply(self, trial: str, reply: Reply) -> bool:
        """Deliver a reply; False if the trial was cancelled. Waits until the one before was read, so that
        training runs at most ``REPORTS_AHEAD`` epochs ahead of the scheduler's decision."""
        while trial not in self._cancelled:
            try:
                await asyncio.wait_for(self._replies[trial].put(reply), timeout=0.05)
                return trial not in self._cancelled
            except TimeoutError:
                continue
        return False

    async def next_reply(self, trial: str) -> Reply:
        """The trial's next reply, waited for."""
        return await self._replies[trial].get()

    async def cancel(self, trial: str) -> None:
        """The trial's replies are no longer wanted; its workers end it at their next report."""
        self._cancelled.add(trial)


class GangTrainable(tune.Trainable):
    """A Tune actor that owns a gang and hands it one trial after another.

    Config keys: ``trial`` (a TrialConfig as a dict), ``resources`` (a ResourcesConfig as a dict),
    ``storage`` (where Ray Train keeps its run) and ``vault`` (the name of the actor that takes the trained
    embedders).
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._number = 0
        self._start_gang(config)
        self._hand_over(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        if self._gang.is_alive():
            ray.get(self._mailbox.cancel.remote(self._trial))
        else:
            self._start_gang(new_config)
        self._hand_over(new_config)
        return True

    def step(self) -> dict[str, Any]:
        pending = self._mailbox.next_reply.remote(self._trial)
        while not ray.wait([pending], timeout=0.5)[0]:
            if not self._gang.is_alive():
                raise RuntimeError(f"the workers died: {_last_line(self._gang_error)}")
        reply: Reply = ray.get(pending)
        if reply.kind == "broken":
            raise RuntimeError(reply.reason)
        if reply.files:
            ray.get(self._vault.put.remote(self.trial_id, reply.files))
        return {"metrics": reply.metrics, "done": reply.kind != "report", "failure": reply.reason}

    def cleanup(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._mailbox.cancel.remote(self._trial), timeout=STOP_TIMEOUT_S)
            ray.get(self._mailbox.post.remote(Command("", None)), timeout=STOP_TIMEOUT_S)
            self._gang.join(STOP_TIMEOUT_S)
            ray.kill(self._mailbox)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        raise NotImplementedError("trials leave their embedder in the vault")

    def load_checkpoint(self, checkpoint: Any) -> None:
        raise NotImplementedError("trials leave their embedder in the vault")

    def _hand_over(self, config: dict[str, Any]) -> None:
        self._number += 1
        self._trial = f"{self.trial_id}-{self._number}"
        self._vault = ray.get_actor(config["vault"])
        ray.get(self._mailbox.post.remote(Command(self._trial, config["trial"])))

    def _start_gang(self, config: dict[str, Any]) -> None:
        self._mailbox = Mailbox.remote()  # type: ignore[attr-defined]
        self._gang_error: BaseException | None = None
        self._gang = threading.Thread(target=self._run_gang, args=(dict(config),), daemon=True)
        self._gang.start()

    def _run_gang(self, config: dict[str, Any]) -> None:
        import ray.train
        from ray.train.torch import TorchTrainer

        resources = ResourcesConfig.model_validate(config["resources"])
        per_worker: dict[str, float] = {"CPU": resources.cpus_per_worker}
        if resources.gpus_per_worker:
            per_worker["GPU"] = resources.gpus_per_worker
        try:
            TorchTrainer(
                _serve,
                train_loop_config={
                    "mailbox": self._mailbox,
                    "threads": max(1, int(resources.cpus_per_worker)),
                },
                scaling_config=ray.train.ScalingConfig(
                    num_workers=resources.workers,
                    use_gpu=resources.gpus_per_worker > 0,
                    resources_per_worker=per_worker,
                ),
                run_config=ray.train.RunConfig(
                    name=f"gang-{self.trial_id}-{time.time_ns()}",
                    storage_path=config["storage"],
                    failure_config=ray.train.FailureConfig(  # Tune decides what is tried again
                        max_failures=0,
                        controller_failure_limit=0,  # type: ignore[call-arg]
                    ),
                ),
            ).fit()
        except BaseException as error:
            self._gang_error = error


def _serve(loop_config: dict[str, Any]) -> None:
    """What each worker of a gang does until it is sent home."""
    import torch
    from ray.train.torch import get_device

    from dmlstudy import distributed
    from dmlstudy.training.trial import TrialFailed, TrialStopped, run_trial

    torch.set_num_threads(loop_config["threads"])
    mailbox = loop_config["mailbox"]
    device = get_device()
    position = 0
    while True:
        command: Command = ray.get(mailbox.command.remote(position))
        position += 1
        if command.config is None:
            return

        def report(report: TrialReport, trial: str = command.trial) -> None:
            wanted = True
            if distributed.rank() == 0:
                reply = Reply("report", {**report.metrics, "step": report.step})
                wanted = ray.get(mailbox.reply.remote(trial, reply))
            if not distributed.agree(wanted):
                raise TrialStopped

        try:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "embedder"
                result = run_trial(
                    TrialConfig.model_validate(command.config), report, device=device, save_to=target
                )
                if distributed.rank() == 0:
                    files = {file.name: file.read_bytes() for file in target.glob("*")}
                    ray.get(mailbox.reply.remote(command.trial, Reply("finished", result.metrics, files)))
        except TrialStopped:
            continue
        except TrialFailed as error:
            if distributed.rank() == 0:
                ray.get(mailbox.reply.remote(command.trial, Reply("failed", reason=str(error))))
        except Exception as error:
            reason = f"{type(error).__name__}: {error} (rank {distributed.rank()})"
            if "by peer" in str(error):  # this rank only heard that another is gone
                reason = f"a worker of the trial was lost; {reason}"
            traceback.print_exc()
            ray.get(mailbox.reply.remote(command.trial, Reply("broken", reason=reason)))
            raise


def _last_line(error: BaseException | None) -> str:
    text = str(error or "no reason given").strip()
    return text.splitlines()[-1] if text else type(error).__name__
