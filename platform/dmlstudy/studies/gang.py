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

import contextlib
import os
import threading
import time
from typing import Any

import ray
from ray import tune

from dmlstudy.records import ResourcesConfig
from dmlstudy.studies.mailbox import Command, Mailbox, Reply
from dmlstudy.studies.worker import serve

STOP_TIMEOUT_S = 10.0
TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # Train notices starts and ends of workers only then
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
}
"""Ray Train hands these on from the process that calls ``fit`` to its controller and workers."""


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
        os.environ.update(TRAIN_SETTINGS)
        import ray.train
        from ray.train.torch import TorchTrainer

        resources = ResourcesConfig.model_validate(config["resources"])
        per_worker: dict[str, float] = {"CPU": resources.cpus_per_worker}
        if resources.gpus_per_worker:
            per_worker["GPU"] = resources.gpus_per_worker
        try:
            TorchTrainer(
                serve,
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


def _last_line(error: BaseException | None) -> str:
    text = str(error or "no reason given").strip()
    return text.splitlines()[-1] if text else type(error).__name__
