"""What a worker of a gang does: one trial after another, until it is sent home.

This module is imported by every worker before its first trial, so it imports little.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import ray

from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.studies.mailbox import Command, Reply

SIGNS_OF_ANOTHERS_END = ("by peer", "remote process exited", "Broken pipe")
"""What gloo and NCCL say on a rank that only hears that another is gone."""


def serve(loop_config: dict[str, Any]) -> None:
    """What each worker of a gang does until it is sent home."""
    import torch
    from ray.train.torch import get_device

    from dmlstudy import distributed
    from dmlstudy.training.learner import TrialFailed
    from dmlstudy.training.trial import TrialStopped, run_trial

    torch.set_num_threads(loop_config["threads"])
    mailbox = loop_config["mailbox"]
    device = get_device()
    rank = distributed.rank()
    if rank == 0:
        ray.get(mailbox.enlist.remote(ray.util.get_current_placement_group()))
    position = 0
    while True:
        command: Command = ray.get(mailbox.command.remote(position, rank, resident_mib()))
        position += 1
        if command.config is None:
            return
        if rank == 0:
            ray.get(mailbox.reply.remote(command.trial, Reply("begun")))

        def report(report: TrialReport, trial: str = command.trial) -> None:
            wanted = True
            if rank == 0:
                reply = Reply("report", {**report.metrics, "step": report.step})
                wanted = ray.get(mailbox.reply.remote(trial, reply))
            if not distributed.agree(wanted):
                raise TrialStopped

        try:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "embedder"
                config = TrialConfig.model_validate(command.config)
                result = run_trial(
                    config,
                    report,
                    device=device,
                    save_to=target if config.keep_embedder else None,
                    checkpoint=command.checkpoint,
                )
                if rank == 0:
                    files = {file.name: file.read_bytes() for file in target.glob("*")}
                    ray.get(mailbox.reply.remote(command.trial, Reply("finished", result.metrics, files)))
        except TrialStopped:
            continue
        except TrialFailed as error:
            if rank == 0:
                ray.get(mailbox.reply.remote(command.trial, Reply("failed", reason=str(error))))
        except Exception as error:
            kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
            reason = f"{kind}: {error} (rank {rank})"
            lost = any(sign in str(error) for sign in SIGNS_OF_ANOTHERS_END)
            traceback.print_exc()
            ray.get(mailbox.reply.remote(command.trial, Reply("lost" if lost else "broken", reason=reason)))
            raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was asked for that is not there; torch has a type for that on a GPU only."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def resident_mib() -> float:
    """What this process holds of the machine's memory, in MiB; where there is no /proc, the most it has held."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
