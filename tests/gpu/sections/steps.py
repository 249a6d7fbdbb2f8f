"""A profile of training steps: the kernels that take longest, and the share of the time in which the GPU computes."""

from __future__ import annotations

import time

from bench import Bench
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sections.trainers import config, pixels, trainer
from sections.training import FAST

NUM_KERNELS = 12


def measure(bench: Bench) -> None:
    on_gpu = bench.device.type == "cuda"
    own = trainer(bench, pixels(bench), config(bench, num_batches=8, **bench.sized({}, FAST)))
    own.train_epoch(0)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as told:
        started = time.perf_counter()
        own.train_epoch(1)
        bench.wait()
        wall_us = 1e6 * (time.perf_counter() - started)
    events = told.key_averages()
    if on_gpu:  # without the operators that have launched the kernels, and without marked stretches of time
        events = [
            each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation
        ]

    def own_us(event) -> float:  # type: ignore[no-untyped-def]
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    num_steps = len(own.batches)
    whole_us = sum(map(own_us, events))
    bench.row("a step, profiled", wall_us / num_steps / 1e3, "ms")
    bench.row("of it computing", 100 * whole_us / wall_us, "%")
    num_calls = sum(event.count for event in events if own_us(event))
    bench.row("kernels of a step" if on_gpu else "calls of a step", num_calls / num_steps, "")
    for event in sorted(events, key=own_us, reverse=True)[:NUM_KERNELS]:
        name = event.key.replace("void ", "").replace("at::native::", "")
        bench.row(name, own_us(event) / num_steps / 1e3, "ms", note=f"{event.count / num_steps:g} a step")
