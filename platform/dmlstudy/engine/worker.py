"""The loop of a gang's worker: one trial after another, until it is sent home.

This module is imported by every worker before its first trial, so it imports little.
"""

from __future__ import annotations

import itertools
import resource
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from dmlstudy.engine.mailbox import EMBEDDER, FOLD_SCORES, PAIR_COUNTS, UNIT_SCORES, Command, Reply
from dmlstudy.files import temporary_folder
from dmlstudy.records import TrialConfig, TrialReport

if TYPE_CHECKING:
    import torch

    from dmlstudy.engine.energy import EnergyMeter

SIGNS_OF_ANOTHERS_END = ("by peer", "remote process exited", "Broken pipe")
"""Messages of gloo and NCCL on a rank that only notices that another is gone."""

BEAT_S = 5.0
"""Least time between two signs of progress that a rank gives between its reports."""


class NodeUnfit(RuntimeError):
    """Ends a worker whose node lacks what its trials need."""


def serve(loop_config: dict[str, Any]) -> None:
    """Run the trials that this worker of a gang is given, until it is sent home."""
    import torch
    from ray.train.torch import get_device

    from dmlstudy import distributed, heartbeat
    from dmlstudy.engine import preflight
    from dmlstudy.engine.energy import EnergyMeter

    torch.set_num_threads(loop_config["threads"])
    mailbox, expected = loop_config["mailbox"], loop_config["expected"]
    device = get_device()
    rank = distributed.rank()
    if rank == 0:
        ray.get(mailbox.enlist.remote(ray.util.get_current_placement_group()))
    lacking = preflight.wrong_with_node(loop_config["gpus"], expected)
    meter = EnergyMeter(device, loop_config["gpus"])

    def on_beat() -> None:
        mailbox.beat.remote()
        meter.sample()

    with heartbeat.heard_by(on_beat, every_s=BEAT_S):
        for position in itertools.count():
            command: Command = ray.get(mailbox.command.remote(position, rank, resident_mib()))
            if command.config is None:
                return
            if not lacking:
                config = TrialConfig.model_validate(command.config)
                lacking = preflight.missing_file(config)
            if not lacking:
                if rank == 0:
                    ray.get(mailbox.reply.remote(command.trial, Reply("begun")))
                lacking = preflight.differing_data(config, expected)
            if lacking:
                ray.get(mailbox.reply.remote(command.trial, Reply("unfit", reason=lacking)))
                raise NodeUnfit(lacking)
            meter.take()  # what was used while it waited is no trial's
            _serve_one(command, config, mailbox, device, rank, meter)


def _serve_one(
    command: Command, config: TrialConfig, mailbox: Any, device: torch.device, rank: int, meter: EnergyMeter
) -> None:
    """Run a trial and say how it ends; raises what leaves the gang of no more use."""
    from dmlstudy import data, distributed
    from dmlstudy.engine.energy import of_all_ranks
    from dmlstudy.training.interface import TrialFailed
    from dmlstudy.training.trial import TrialPaused, TrialStopped, run_trial

    def report(report: TrialReport) -> None:
        wanted, energy = True, of_all_ranks(meter.take())
        if rank == 0:
            reply = Reply("report", {**report.metrics, "step": report.step}, energy_wh=energy)
            wanted = ray.get(mailbox.reply.remote(command.trial, reply))
        if not distributed.agree(wanted):
            raise TrialStopped

    free_gpu_memory(device)
    try:
        with temporary_folder() as folder:
            target = Path(folder) / EMBEDDER
            result = run_trial(
                config,
                report,
                device=device,
                save_to=target if config.keep_embedder else None,
                checkpoint=command.checkpoint,
                pause_after=command.pause_after,
            )
            energy = of_all_ranks(meter.take())
            if rank == 0:
                files = {f"{EMBEDDER}/{file.name}": file.read_bytes() for file in target.glob("*")}
                if config.phase == "verdict":
                    files[UNIT_SCORES] = data.unit_scores_as_bytes(result.unit_scores)
                elif result.of_folds:
                    files[FOLD_SCORES] = data.fold_scores_as_bytes(result.of_folds)
                if result.pair_counts is not None:
                    files[PAIR_COUNTS] = data.pair_counts_as_bytes(result.pair_counts)
                metrics = result.metrics | gpu_peak(device)
                ray.get(
                    mailbox.reply.remote(command.trial, Reply("finished", metrics, files, energy_wh=energy))
                )
    except TrialStopped:
        return
    except TrialPaused:
        energy = of_all_ranks(meter.take())
        if rank == 0:
            ray.get(mailbox.reply.remote(command.trial, Reply("paused", energy_wh=energy)))
    except TrialFailed as error:
        energy = of_all_ranks(meter.take())
        if rank == 0:
            reply = Reply("failed", reason=str(error), energy_wh=energy)
            ray.get(mailbox.reply.remote(command.trial, reply))
    except Exception as error:
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        reason = f"{kind}: {error} (rank {rank})"
        lost = any(sign in str(error) for sign in SIGNS_OF_ANOTHERS_END)
        traceback.print_exc()
        ray.get(mailbox.reply.remote(command.trial, Reply("lost" if lost else "broken", reason=reason)))
        raise


def free_gpu_memory(device: torch.device) -> None:
    """Release what the previous trial left in torch's cache, and restart the peak count."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def gpu_peak(device: torch.device) -> dict[str, float]:
    """The most memory of its GPU that this rank's tensors have held in the trial, in MiB; nothing without a GPU."""
    import torch

    if device.type != "cuda":
        return {}
    return {"gpu_peak_mib": torch.cuda.max_memory_allocated(device) / 2**20}


def is_out_of_memory(error: Exception) -> bool:
    """True for an error of missing memory; torch has a type for it on a GPU only."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def resident_mib() -> float:
    """Resident memory of this process in MiB; without /proc the most it has held."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
