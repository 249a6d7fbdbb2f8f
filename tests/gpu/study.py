"""A study on GPUs from its pictures to a served model, by the command line alone: a table of what it took and found.

    python tests/gpu/study.py                a card, some four minutes; needs the whole environment
    python tests/gpu/study.py --cpu          the same at tiny sizes on a CPU, to see that it runs

Where measure.py asks what losses and trainers do on a card, this asks what the engine does there: gangs on shares of a
GPU, a law that two ranks on one card keep, a worker killed in the middle of a trial, memory given back, and a model that
computes on the CPU what it computed on the card. ``!!`` marks what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from bench import Row
from PIL import Image

PLATFORM = Path(__file__).resolve().parents[2] / "platform"

STUDY = """\
name: {name}
data: {{name: image_folder, path: {data}, image_size: {size}}}
embedder: {{backbone: {backbone}, dim: 64}}
augmentation: {{crop: random_resized, flip: 0.5}}
batch: {{classes: 8, images_per_class: 4}}
training: {{epochs: {epochs}, precision: bf16, channels_last: true}}
families: {{similarity: {{space: multi_similarity}}, anchor: {{space: proxy_anchor}}}}
search: {{trials_per_family: {trials}, scheduler: none, seed: 0}}
protocol: {{num_folds: 1, verdict_seeds: 2}}
resources: {{workers: {workers}, cpus_per_worker: {cpus}, gpus_per_worker: {gpus}}}
"""

DIFFERENCE = 1e-3
"""The most that a model's vectors may differ between card and CPU: what ``dmlstudy pull`` allows."""


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.wrong = False

    def add(self, what: str, value: float, unit: str, problem: str = "", note: str = "") -> None:
        row = Row("study", what, value, unit, problem=problem, note=note)
        self.wrong |= bool(problem)
        self.rows.append(row)
        print(row, flush=True)


class Commands:
    """``dmlstudy`` with one store, timed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "DMLSTUDY_STORE": str(folder / "store"),
            "PYTHONPATH": os.pathsep.join([str(PLATFORM), os.environ.get("PYTHONPATH", "")]),
            "COLUMNS": "160",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dmlstudy", *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *arguments: str) -> tuple[str, float]:
        """What it printed and the seconds it took; RuntimeError with its last lines if it failed."""
        began = time.monotonic()
        process = self.start(*arguments)
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"dmlstudy {arguments[0]}: exit code {process.returncode}\n{out[-3000:]}")
        return out, time.monotonic() - began


def make_pictures(folder: Path, classes: int, each: int) -> None:
    """JPEGs of many sizes: a class is a direction, a width and a colour of stripes, its pictures differ in the rest."""
    draws = np.random.default_rng(0)
    for label in range(classes):
        angle, period, colour = draws.uniform(0, np.pi), draws.uniform(8, 40), draws.uniform(60, 255, 3)
        (folder / f"class{label:02}").mkdir(parents=True)
        for k in range(each):
            height, width = draws.integers(160, 320, 2)
            y, x = np.mgrid[:height, :width]
            turned = angle + draws.normal(0, 0.15)
            stripes = np.sin(2 * np.pi * (x * np.cos(turned) + y * np.sin(turned)) / period + draws.uniform(0, 6))
            pixels = (0.5 + 0.5 * stripes)[..., None] * colour + draws.normal(0, 30, (height, width, 3))
            picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(folder / f"class{label:02}" / f"{k}.jpg", quality=90)


def gpu_mib() -> float:
    """Memory that is taken on the first GPU, in MiB; 0 without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 2**20
    except pynvml.NVMLError:
        return 0.0


def workers_below(pid: int) -> list[psutil.Process]:
    """Processes of training workers that a driver has started, or what it started has."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_a_worker(process: subprocess.Popen[str], after_s: float, wait_s: float) -> bool:
    """Kill a training worker by -9, some time after the first one came; false if none came."""
    ends = time.monotonic() + wait_s
    while process.poll() is None and time.monotonic() < ends:
        if workers_below(process.pid):
            time.sleep(after_s)
            for worker in workers_below(process.pid):
                worker.send_signal(signal.SIGKILL)
                return True
        time.sleep(0.1)
    return False


def leaderboard(commands: Commands, name: str) -> list[dict[str, object]]:
    out, _ = commands.run("leaderboard", name, "--json")
    rows = json.loads(out)
    return rows["rows"] if isinstance(rows, dict) else rows


def look_at(commands: Commands, table: Table, on_gpu: bool) -> None:
    """All of it, in the order in which a user would."""
    share = "0.5" if on_gpu else "0"
    small = ("multi_similarity", "proxy_anchor", "graph_consistency", "structure", "arcface")
    out, seconds = commands.run("selfcheck", *small, "--gpus-per-worker", share, "--json")
    found = json.loads(out)
    table.add(f"selfcheck, two ranks on one device, {len(found["cases"])} cases", seconds, "s", f"not exact: {found['wrong']}" if found["wrong"] else "")

    data = commands.folder / "pictures"
    make_pictures(data, classes=48, each=40 if on_gpu else 6)
    sizes = dict(data=data, size=112 if on_gpu else 32, backbone="resnet18" if on_gpu else "small_conv")
    effort = dict(epochs=3 if on_gpu else 1, trials=3 if on_gpu else 1)
    plans = {"one": dict(workers=1, gpus=0.25), "again": dict(workers=1, gpus=0.25), "two": dict(workers=2, gpus=0.5)}
    before = gpu_mib()
    boards = {}
    for name, plan in plans.items():
        plan = {**plan, "cpus": 2 if on_gpu else 0.5, "gpus": plan["gpus"] if on_gpu else 0}
        (commands.folder / f"{name}.yaml").write_text(STUDY.format(name=name, **sizes, **effort, **plan))
        began = time.monotonic()
        process = commands.start("run", f"{name}.yaml")
        killed: list[bool] = []
        killer = threading.Thread(target=lambda p=process: killed.append(kill_a_worker(p, 6 if on_gpu else 1, 120)))
        if name == "again":
            killer.start()
        out, _ = process.communicate()
        if name == "again":
            killer.join()
        (commands.folder / f"{name}.log").write_text(out)
        problem = "" if process.returncode == 0 else f"exit code {process.returncode}: {out[-1500:]}"
        note = "" if name != "again" else ("a worker was killed" if any(killed) else "NO worker was killed")
        table.add(f"study '{name}': {plan['workers']} x {plan['gpus']} GPU", time.monotonic() - began, "s", problem, note)
        if not problem:
            boards[name] = leaderboard(commands, name)
    if {"one", "again"} <= set(boards):
        table.add("leaderboards with and without a killed worker differ by", difference(boards["one"], boards["again"]), "")
    wait_until(lambda: gpu_mib() <= before + 64, 15)
    left = gpu_mib() - before
    table.add("memory of the card that is still taken", left, "MiB", "not given back" if left > 64 else "")
    if "one" in boards:
        use(commands, table, data, on_gpu)


def use(commands: Commands, table: Table, data: Path, on_gpu: bool) -> None:
    """Report, pull, embed on both devices."""
    import pyarrow.parquet as pq

    _, seconds = commands.run("report", "one", "-o", "one.html")
    table.add("report", seconds, "s")
    _, seconds = commands.run("pull", "one-embedder@champion", "--to", "model")
    table.add("pull: what it computes on the CPU is what was registered", seconds, "s")
    vectors = {}
    for device in ["cpu", "cuda"] if on_gpu else ["cpu"]:
        _, seconds = commands.run("embed", "model", str(data), "-o", f"{device}.parquet", "--device", device)
        vectors[device] = np.stack(pq.read_table(commands.folder / f"{device}.parquet")["embedding"].to_numpy())
        table.add(f"embed on {device}, {len(vectors[device])} pictures", seconds, "s")
    if len(vectors) == 2:
        most = float(np.abs(vectors["cpu"] - vectors["cuda"]).max())
        table.add("largest difference of a vector's numbers", most, "", "too large" if most > DIFFERENCE else "")


def difference(one: object, other: object) -> float:
    """The largest difference of two numbers at the same place of two JSON values; infinite where they differ else.

    Times, identifiers and names are left out.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {key for key in {*one, *other} if not re.search(r"id$|seconds|hours|name|run|version|study|kwh|watt", key)}
        return max((difference(one.get(key), other.get(key)) for key in keys), default=0.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return 0.0 if one == other else float("inf")


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends:
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--keep", type=Path, help="copy logs and the report into this folder")
    arguments = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(Path(folder))
        try:
            look_at(commands, table, on_gpu=not arguments.cpu)
        except (RuntimeError, ValueError, KeyError) as error:
            table.add("FAILED", float("nan"), "", str(error))
        if arguments.keep is not None:
            for path in [*Path(folder).glob("*.log"), *Path(folder).glob("*.html")]:
                shutil.copy(path, arguments.keep)
    return int(table.wrong)


if __name__ == "__main__":
    sys.exit(main())
