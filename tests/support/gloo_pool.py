"""Real processes that speak gloo on this machine: started once, with a fresh group for every task."""

from __future__ import annotations

import multiprocessing
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=30)
START_SECONDS, TASK_SECONDS = 120, 120


class GlooPool:
    """``run`` calls one function on ranks 0..W-1 of a new group and returns what each rank returned."""

    def __init__(self, num_processes: int, folder: Path) -> None:
        self.folder = folder
        self.workers = []
        context = multiprocessing.get_context("spawn")
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        for _, pipe in self.workers:
            assert pipe.poll(START_SECONDS), "a process did not start"
            assert pipe.recv() == "ready"

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results in rank order; raises AssertionError with the traceback of every rank that failed."""
        pipes = [pipe for _, pipe in self.workers[:world_size]]
        assert len(pipes) == world_size
        meeting = f"file://{self.folder / uuid.uuid4().hex}"
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, world_size, meeting, function, args))
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TASK_SECONDS), f"rank {rank} of {world_size} gave no answer"
            answers.append(pipe.recv())
        errors = [f"rank {rank}:\n{answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """Ends the processes."""
        for _, pipe in self.workers:
            pipe.close()
        for process, _ in self.workers:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            rank, world_size, meeting, function, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
            )
            dist.barrier()  # a function without a collective could end before another rank has met all
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
