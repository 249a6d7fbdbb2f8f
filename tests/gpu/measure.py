"""Measurements of dmlstudy on one GPU: a table, and the same as JSON.

    python tests/gpu/measure.py                       ten minutes on one card; needs torch and torchvision alone
    python tests/gpu/measure.py --only large,exact    some of the sections
    python tests/gpu/measure.py --cpu                 all of it at tiny sizes, to see that it runs

Each section is a process of its own with a time of its own, so that one that fails, hangs or breaks the GPU's context
loses nothing but its further rows. ``!!`` marks a row that misses its target or found something wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import stand_ins

HERE = Path(__file__).resolve().parent
PLATFORM = HERE.parents[1] / "platform"

BUDGETS_S = {
    "machine": 25,
    "exact": 60,
    "ranks": 60,
    "training": 150,
    "large": 100,
    "evaluation": 55,
    "steps": 30,
}
"""Sections, in their order, and the most seconds of each on a GPU."""


def main() -> int:
    arguments = _arguments()
    # This process looks for no GPU, since whoever has done so cannot hand it on by a fork; nor should what it imports.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    stand_ins.install(always=arguments.stand_ins)
    sys.path.insert(0, str(PLATFORM))
    import torch
    from bench import Row

    device = torch.device("cpu" if arguments.cpu else "cuda:0")
    modules = [
        importlib.import_module(f"sections.{name}") for name in arguments.only
    ]  # once, for all processes
    print(
        f"torch {torch.__version__} on {device.type}, {os.cpu_count()} cores; stand-ins: {stand_ins.used()}"
    )
    print(f"   section    {'what':58} {'value':>10} {'unit':9} {'target':>7}")
    rows: list[Row] = []
    ends = time.monotonic() + 60 * arguments.minutes
    for module in modules:
        name = module.__name__.partition(".")[2]
        left = ends - time.monotonic()
        budget = left if device.type == "cpu" else min(BUDGETS_S[name], left)
        for row in _measured(module.measure, name, device, budget):
            print(row, flush=True)
            rows.append(row)
        if arguments.out is not None:
            found = [dataclasses.asdict(row) for row in rows]
            (arguments.out / "gpu.json").write_text(json.dumps(found, indent=1))
    failed = [row.section for row in rows if row.what == FAILED]
    print(f"{len(rows)} rows; sections that failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


FAILED = "FAILED"


def _measured(measure, name, device, budget_s):  # type: ignore[no-untyped-def]
    """Rows of a section's process, as they come; the last one says so where it fails or has to be ended."""
    from bench import Row

    if budget_s <= 0:
        yield Row(name, FAILED, 0, "s", problem="no time is left")
        return
    context = multiprocessing.get_context("fork")  # what is imported is there, and no GPU is in use yet
    ours, theirs = context.Pipe(duplex=False)
    started = time.monotonic()
    process = context.Process(target=_section, args=(measure, name, device, started + budget_s, theirs))
    process.start()
    theirs.close()
    problem = f"ended after {budget_s:.0f} s"
    try:
        while ours.poll(max(0.0, started + budget_s - time.monotonic())):
            row = ours.recv()
            if row is None:
                problem = ""
                break
            yield row
    except EOFError:
        process.join()
        problem = f"its process died with code {process.exitcode}"
    if problem:
        yield Row(name, FAILED, time.monotonic() - started, "s", problem=problem)
    process.join(0 if problem else 20)
    if process.is_alive():
        process.terminate()
        process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _section(measure, name, device, deadline, pipe: Connection) -> None:  # type: ignore[no-untyped-def]
    from bench import Bench, Row

    started = time.monotonic()
    try:
        measure(Bench(name, device, deadline, pipe.send))
        pipe.send(Row(name, "whole section", time.monotonic() - started, "s"))
    except Exception as error:
        traceback.print_exc()
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        pipe.send(Row(name, FAILED, time.monotonic() - started, "s", problem=words))
    pipe.send(None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--stand-ins", action="store_true", help="also for packages that are installed")
    parser.add_argument(
        "--only", type=_sections, default=list(BUDGETS_S), help="sections, with commas between them"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="the most for all sections")
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT"), help="folder of gpu.json; default: $OUT"
    )
    arguments = parser.parse_args()
    if arguments.out is not None:
        arguments.out = Path(arguments.out)
        arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def _sections(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in BUDGETS_S]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; there are {', '.join(BUDGETS_S)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
