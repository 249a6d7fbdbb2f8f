"""A study on GPUs from its pictures to a served model, by the command line alone: a table of what it took and found.

    python tests/gpu/study.py                a card, some six minutes; needs the whole environment
    python tests/gpu/study.py --cpu          the same at tiny sizes on a CPU, to see that it runs

Where measure.py asks what losses and trainers do on a card, this asks what the engine does there. Gangs have shares of
a GPU. Two ranks on one card keep the law. A worker and a driver are killed. Memory is given back. A model computes on
the CPU what it computed on the card. ``!!`` marks what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests
from bench import Row
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.ports import free_port

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

LARGE: dict[str, object] = {"size": 112, "backbone": "resnet18", "epochs": 3, "trials": 2, "cpus": 2}
SMALL: dict[str, object] = {"size": 32, "backbone": "small_conv", "epochs": 1, "trials": 1, "cpus": 0.5}
"""What a study is like on a GPU, and on a CPU."""

DIFFERENCE = 1e-3
"""The most that a model's vectors may differ between card and CPU: what ``dmlstudy pull`` allows."""


class Table:
    """Rows, printed as they come."""

    def __init__(self) -> None:
        self.wrong = False

    def add(self, what: str, value: float, unit: str, problem: str = "", note: str = "") -> None:
        self.wrong |= bool(problem)
        print(Row("study", what, value, unit, problem=problem, note=note), flush=True)


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
            stripes = np.sin(
                2 * np.pi * (x * np.cos(turned) + y * np.sin(turned)) / period + draws.uniform(0, 6)
            )
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


def processes_below(pid: int, word: str) -> list[psutil.Process]:
    """Processes that this one has started, or what it started has, with the word in their command line."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Run:
    """``dmlstudy run`` of one study, in a store of its own; killed once by -9 where ``victim`` says what of it."""

    def __init__(
        self, commands: Commands, name: str, plan: dict[str, object], victim: str | None, logs: Path
    ) -> None:
        self.commands, self.name, self.victim = commands, name, victim
        self.note, self.problem, self.seconds = "", "", 0.0
        self._log = logs / f"{name}.log"
        (commands.folder / f"{name}.yaml").write_text(STUDY.format(name=name, **plan))
        self._thread = threading.Thread(target=self._go)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def _go(self) -> None:
        began = time.monotonic()
        try:
            code = self._once(began)
            if self.victim == "driver":
                code = self._once(began)
        except (OSError, psutil.Error) as error:
            code = repr(error)
        self.seconds = time.monotonic() - began
        if code:
            self.problem = f"ended by {code}"
        elif self.victim is not None and not self.note:
            self.problem = f"no {self.victim} was killed"

    def _once(self, began: float) -> object:
        """Run it to its end, and write its lines down with the second at which they came."""
        process = self.commands.start("run", f"{self.name}.yaml")
        assert process.stdout is not None
        with open(self._log, "a") as log:
            for line in process.stdout:
                log.write(f"{time.monotonic() - began:6.1f} {line}")
                log.flush()
                if "no best yet" in line or " best " in line:
                    self._kill(process)
        return process.wait()

    def _kill(self, process: subprocess.Popen[str]) -> None:
        """After the first trial: while others train."""
        if self.victim is None or self.note:
            return
        doomed = [process] if self.victim == "driver" else processes_below(process.pid, "RayTrainWorker")[:1]
        for one in doomed:
            one.send_signal(signal.SIGKILL)
            self.note = f"1 {self.victim} killed"


def scores(commands: Commands, name: str) -> dict[str, float]:
    """Every number of a study's leaderboard by its family and metric."""
    out, _ = commands.run("leaderboard", name, "--json")
    found = {}
    for row in json.loads(out)["rows"]:
        found[f"{row['family']} validation"] = row["validation"]
        for metric, interval in row["test"].items():
            found |= {f"{row['family']} {metric} {key}": value for key, value in interval.items()}
    return {key: float("nan") if value is None else value for key, value in found.items()}


def difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest difference of two leaderboards' numbers; infinite where one has a number that the other lacks."""
    if one.keys() != other.keys():
        return float("inf")
    return max(0.0 if np.isnan([one[key], other[key]]).all() else abs(one[key] - other[key]) for key in one)


PLANS = {"one": None, "again": "worker", "resumed": "driver", "two": None}
"""Studies, and what is killed of them. All but the last are the same; that one has two ranks a trial."""


def look_at(folder: Path, logs: Path, table: Table, on_gpu: bool) -> None:
    """All of it, in the order in which a user would; the studies side by side."""
    commands = Commands(folder)
    small = ("multi_similarity", "proxy_anchor", "graph_consistency", "structure", "arcface")
    out, seconds = commands.run("selfcheck", *small, "--gpus-per-worker", "0.5" if on_gpu else "0", "--json")
    found = json.loads(out)
    problem = f"not exact: {found['wrong']}" if found["wrong"] else ""
    table.add(f"selfcheck, two ranks on one device, {len(found['cases'])} cases", seconds, "s", problem)

    data = folder / "pictures"
    make_pictures(data, classes=48, each=16 if on_gpu else 6)
    before = gpu_mib()
    runs = []
    for name, victim in PLANS.items():
        workers = 2 if name == "two" else 1
        plan = (LARGE if on_gpu else SMALL) | {"data": data, "workers": workers}
        plan["gpus"] = 0.25 * workers if on_gpu else 0
        own = folder / name
        own.mkdir()
        runs.append(Run(Commands(own), name, plan, victim, logs))
        runs[-1].start()
        if not on_gpu:
            runs[-1].wait()
    boards = {}
    for run in runs:
        run.wait()
        table.add(f"study '{run.name}'", run.seconds, "s", run.problem, run.note)
        if not run.problem:
            boards[run.name] = scores(run.commands, run.name)
    for name in ("again", "resumed"):
        if {"one", name} <= set(boards):
            most = difference(boards["one"], boards[name])
            problem = "scores differ" if most and not on_gpu else ""
            table.add(f"leaderboards of 'one' and '{name}' differ by", most, "", problem)
    wait_until(lambda: gpu_mib() <= before + 64, 15)
    left = gpu_mib() - before
    table.add("memory of the card that is still taken", left, "MiB", "not given back" if left > 64 else "")
    if "one" in boards:
        use(runs[0].commands, table, data, on_gpu)


def use(commands: Commands, table: Table, data: Path, on_gpu: bool) -> None:
    """Report, pull, embed on both devices, a gallery, and a server of it."""
    import pyarrow.parquet as pq

    _, seconds = commands.run("report", "one", "-o", "one.html")
    table.add("report", seconds, "s")
    _, seconds = commands.run("pull", "one-embedder@champion", "--to", "model")
    table.add("pull: what it computes on the CPU is what was registered", seconds, "s")
    vectors = {}
    for device in ["cpu", "cuda"] if on_gpu else ["cpu"]:
        _, seconds = commands.run("embed", "model", str(data), "-o", f"{device}.parquet", "--device", device)
        vectors[device] = np.stack(
            pq.read_table(commands.folder / f"{device}.parquet")["embedding"].to_numpy()
        )
        table.add(f"embed on {device}, {len(vectors[device])} pictures", seconds, "s")
    if len(vectors) == 2:
        add_difference(table, "largest difference of a vector's numbers", vectors["cpu"], vectors["cuda"])
    _, seconds = commands.run("index", "cpu.parquet", "-o", "gallery")
    table.add("index of the CPU's vectors", seconds, "s")
    stored = pq.read_table(commands.folder / "cpu.parquet")
    device = "cuda" if on_gpu else "cpu"
    began = time.monotonic()
    with served(commands, device) as address:
        table.add(f"serve on {device}, until it is ready", time.monotonic() - began, "s")
        ask(address, table, data, stored["id"].to_pylist(), vectors["cpu"])


def ask(address: str, table: Table, data: Path, ids: list[str], vectors: np.ndarray) -> None:
    """Each picture of the gallery, sixteen at a time: its nearest item must be itself, by the vector on disk."""

    def post(path: str, picture: str) -> Any:
        answer = requests.post(
            f"{address}{path}",
            (data / picture).read_bytes(),
            headers={"Content-Type": "image/jpeg"},
            timeout=60,
        )
        answer.raise_for_status()
        return answer.json()

    def nearest(picture: str) -> str:
        return str(post("/retrieve?k=1", picture)["results"][0][0]["id"])

    for picture in ids[:16]:
        nearest(picture)  # it has begun
    waits = []
    for picture in ids[:100]:
        began = time.monotonic()
        nearest(picture)
        waits.append(1e3 * (time.monotonic() - began))
    table.add("a picture to its nearest item over HTTP, one at a time, median", float(np.median(waits)), "ms")
    began = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(nearest, ids))
    rate = len(ids) / (time.monotonic() - began)
    wrong = sum(ours != theirs for ours, theirs in zip(found, ids, strict=True))
    problem = f"{wrong} were answered with another picture" if wrong else ""
    table.add(f"{len(ids)} pictures by 16 connections", rate, "a second", problem)
    few = [post("/embed", picture)["embeddings"][0] for picture in ids[:50]]
    add_difference(table, "the server's vectors beside those on disk", np.array(few), vectors[:50])


def add_difference(table: Table, what: str, one: np.ndarray, other: np.ndarray) -> None:
    most = float(np.abs(one - other).max())
    table.add(what, most, "", "too large" if most > DIFFERENCE else "")


@contextmanager
def served(commands: Commands, device: str) -> Iterator[str]:
    """The address of ``dmlstudy serve``, which is ended after it; RuntimeError if it does not come up."""
    port = str(free_port())
    process = commands.start(
        "serve", "model", "--gallery", "gallery", "--device", device, "--port", port, "--no-access-log"
    )
    address = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return requests.get(f"{address}/ready", timeout=5).ok
        except requests.ConnectionError:
            return process.poll() is not None

    try:
        wait_until(is_ready, 120)
        if process.poll() is not None:
            raise RuntimeError(f"dmlstudy serve ended: {process.communicate()[0][-3000:]}")
        yield address
    finally:
        process.terminate()
        process.wait()


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends:
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument(
        "--keep", type=Path, help="write the studies' logs into this folder, each line with its second"
    )
    arguments = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        try:
            look_at(Path(folder), arguments.keep or Path(folder), table, on_gpu=not arguments.cpu)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            table.add("FAILED", float("nan"), "", str(error))
    return int(table.wrong)


if __name__ == "__main__":
    sys.exit(main())
