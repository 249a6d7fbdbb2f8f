"""What a worker of a gang does: one trial after another, until it is sent home.

This module is imported by every worker before its first trial, so it imports little.
"""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path
from typing import Any

import ray

from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.studies.mailbox import Command, Reply


def serve(loop_config: dict[str, Any]) -> None:
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
                config = TrialConfig.model_validate(command.config)
                result = run_trial(
                    config, report, device=device, save_to=target if config.keep_embedder else None
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
