"""A server under load: `dmlstudy serve` with good and bad requests mixed, and MLflow's scoring server beside it.

    python tests/benchmarks/serving.py --seconds 20 --connections 8

Drives each with wrk (`apt-get install -y wrk`) and prints a table in Markdown: requests a second, p50 and p99, how many
of each kind of request were answered as they should be, and the server's memory before and after. After the load the
server must still be healthy, embed and retrieve the very same as before, and have answered every request with the
status that is right for it; else the script fails. MLflow's server gets the same model and good requests only, for it
knows no others; so do we once more, for the ratio.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import psutil
import requests
from mlflow.models import infer_signature
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.ports import free_port

from dmlstudy import embedders
from dmlstudy.saved import Model
from dmlstudy.serving.embed import EmbedJob, embed_into
from dmlstudy.serving.gallery import build

SIDE = 28
NUM_ITEMS = 2000

ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
"""MLflow looks for uvicorn on the path, where an activated environment has it."""

WRK = """
local cases = {CASES}
local number = 0
local counts = {}
local threads = {}
local sent = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  answers = ""
end

function request()
  number = number % #cases + 1
  local case = cases[number]
  return wrk.format(case.method, case.path, case.headers, case.body)
end

function response(status, headers, body)
  counts[status] = (counts[status] or 0) + 1
  answers = ""
  for code, count in pairs(counts) do
    answers = answers .. code .. "=" .. count .. " "
  end
end

function done(summary, latency, requests)
  local total = {}
  for _, thread in ipairs(threads) do
    for code, count in string.gmatch(thread:get("answers"), "(%d+)=(%d+)") do
      total[code] = (total[code] or 0) + tonumber(count)
    end
  end
  local shown = {}
  for code, count in pairs(total) do
    table.insert(shown, '"' .. code .. '": ' .. count)
  end
  local errors = summary.errors
  io.write(string.format(
    '\\nRESULT {"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "broken": %d, "answers": {%s}}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.timeout, table.concat(shown, ", ")))
end
"""


class Case(NamedTuple):
    """A request, and the status that is right for it."""

    kind: str
    status: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Load(NamedTuple):
    """What wrk saw."""

    per_second: float
    p50_ms: float
    p99_ms: float
    broken: int
    answers: Mapping[int, int]


def png(seed: int) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


AS_PNG, AS_JSON = {"content-type": "image/png"}, {"content-type": "application/json"}
AS_FORM = {"content-type": "multipart/form-data; boundary=b"}


def valid() -> list[Case]:
    images = {"images": [base64.b64encode(png(seed)).decode() for seed in range(4)]}
    return [
        Case("embed", 200, "POST", "/embed", AS_PNG, png(1)),
        Case("embed 4 as JSON", 200, "POST", "/embed", AS_JSON, json.dumps(images).encode()),
        Case("retrieve", 200, "POST", "/retrieve?k=10", AS_PNG, png(2)),
    ]


def bad() -> list[Case]:
    return [
        Case("a form without a file", 400, "POST", "/embed", AS_FORM, b"--b\r\n\r\n\r\n--b--\r\n"),
        Case("too many items", 413, "POST", "/embed", AS_JSON, json.dumps({"images": [""] * 257}).encode()),
        Case("no JSON", 400, "POST", "/retrieve", AS_JSON, b'{"images": ['),
        Case("no image", 422, "POST", "/embed", AS_PNG, b"\x89PNG but no more of it"),
        Case("another method", 405, "GET", "/embed", {}, b""),
    ]


def lua(text: bytes | str) -> str:
    """A string as Lua reads it, whatever its bytes."""
    return '"' + "".join(f"\\{byte:03}" for byte in (text.encode() if isinstance(text, str) else text)) + '"'


def script(cases: list[Case], folder: Path) -> Path:
    rows = []
    for case in cases:
        headers = ", ".join(f"[{lua(name)}] = {lua(value)}" for name, value in case.headers.items())
        parts = (f"method = {lua(case.method)}", f"path = {lua(case.path)}", f"body = {lua(case.body)}")
        rows.append(f"{{{', '.join(parts)}, headers = {{{headers}}}}}")
    path = folder / "cases.lua"
    path.write_text(WRK.replace("{CASES}", "{" + ",\n".join(rows) + "}"))
    return path


def drive(address: str, cases: list[Case], seconds: int, connections: int, folder: Path) -> Load:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s"]
    shown = subprocess.run(
        [*command, "-s", str(script(cases, folder)), address], capture_output=True, text=True, check=True
    ).stdout
    (line,) = re.findall(r"^RESULT (.*)$", shown, re.MULTILINE)
    found = json.loads(line)
    return Load(
        found["requests"] / found["seconds"],
        found["p50_ms"],
        found["p99_ms"],
        found["broken"],
        {int(code): count for code, count in found["answers"].items()},
    )


def memory(process: subprocess.Popen[bytes]) -> float:
    """MiB of the process and all that it has started."""
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return sum(each.memory_info().rss for each in tree) / 2**20


@contextmanager
def served(command: list[str], port: int, ready: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers; it is ended with all that it has started."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ACTIVATED)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                if requests.get(f"http://127.0.0.1:{port}{ready}", timeout=5).status_code == 200:
                    break
            except requests.ConnectionError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command[:4])} does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield process
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        for each in tree:
            if each.is_running():
                each.kill()


def answers(address: str, cases: list[Case]) -> list[Any]:
    """What the server makes of each, asked once."""
    made = []
    for case in cases:
        answer = requests.request(
            case.method, address + case.path, headers=dict(case.headers), data=case.body, timeout=60
        )
        if answer.status_code != case.status:
            raise SystemExit(
                f"{case.kind}: {answer.status_code}, expected {case.status}: {answer.text[:200]}"
            )
        made.append(answer.json() if case.status == 200 else None)
    return made


def wrong(cases: list[Case], load: Load) -> list[str]:
    """What was not answered as it should be: cases come round in turn, so each has its share to a few requests."""
    total = sum(load.answers.values())
    share = total / len(cases)
    expected: dict[int, float] = {}
    for case in cases:
        expected[case.status] = expected.get(case.status, 0) + share
    found = [f"{load.broken} connections or requests broke"] if load.broken else []
    for status in sorted(expected.keys() | load.answers.keys()):
        if abs(load.answers.get(status, 0) - expected.get(status, 0)) > 2 * len(cases):
            found.append(
                f"{load.answers.get(status, 0)} answers {status}, expected {expected.get(status, 0):.0f}"
            )
    return found


def made_model(folder: Path) -> tuple[Path, Path]:
    """A small model and a gallery of its embeddings."""
    model = embedders.build("small_conv", 64, width=32, in_channels=1, image_size=SIDE, seed=0)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_ITEMS, SIDE, SIDE, 1), dtype=np.uint8)
    embedders.save(model, folder / "model", {}, images[:8])
    np.savez(folder / "items.npz", images=images)
    embed_into(
        EmbedJob(str(folder / "model"), str(folder / "items.npz"), str(folder / "z.parquet"), device="cpu")
    )
    build(folder / "z.parquet", folder / "gallery")
    return folder / "model", folder / "gallery"


def saved_for_mlflow(model: Path, folder: Path) -> Path:
    """The same model as ``registry.models`` logs it."""
    images = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 1), dtype=np.uint8)
    mlflow.pyfunc.save_model(
        folder / "mlflow",
        loader_module="dmlstudy.registry.pyfunc",
        data_path=str(model),
        signature=infer_signature(images, Model.open(model).compute(images)),
        pip_requirements=["dmlstudy"],
    )
    return folder / "mlflow"


def row(name: str, load: Load, before: float, after: float) -> str:
    kinds_of_answers = ", ".join(f"{count} x {code}" for code, count in sorted(load.answers.items()))
    return (
        f"| {name} | {load.per_second:.0f} | {load.p50_ms:.1f} | {load.p99_ms:.1f} | {kinds_of_answers}"
        f" | {before:.0f} | {after:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--connections", type=int, default=8)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install -y wrk")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, gallery = made_model(folder)
        print("| server, requests | requests/s | p50 ms | p99 ms | answers | MiB before | after |")
        print("|---|---:|---:|---:|---|---:|---:|")
        ours = load_ours(model, gallery, folder, options.seconds, options.connections)
        theirs = load_mlflow(model, folder, options.seconds, options.connections)
    print(
        f"\nof one image in a request: {ours.per_second / theirs.per_second:.1f} times MLflow's requests/s, p50"
        f" {theirs.p50_ms / ours.p50_ms:.1f} times shorter"
    )


def load_ours(model: Path, gallery: Path, folder: Path, seconds: int, connections: int) -> Load:
    """Both loads, with all that must hold after them; the one of single images."""
    port, mixed, good = free_port(), [*valid(), *bad()], valid()
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "dmlstudy",
        "serve",
        str(model),
        "--gallery",
        str(gallery),
        "--port",
        str(port),
    ]
    with served([*command, "--device", "cpu"], port, "/ready", folder / "ours.log") as process:
        expected = answers(address, mixed)
        drive(address, mixed, 2, connections, folder)  # to warm up
        before = memory(process)
        load = drive(address, mixed, seconds, connections, folder)
        print(row("dmlstudy, good and bad", load, before, after := memory(process)), flush=True)
        found = wrong(mixed, load)
        if requests.get(f"{address}/health", timeout=10).json() != {"status": "alive"}:
            found.append("/health does not answer")
        if answers(address, mixed) != expected:
            found.append("other vectors or items than before the load")
        if after - before > 50:
            found.append(f"memory grew by {after - before:.0f} MiB")
        before = memory(process)
        single = drive(address, good[:1], seconds, connections, folder)
        print(row("dmlstudy, one image", single, before, memory(process)), flush=True)
        found += wrong(good[:1], single)
    if found:
        raise SystemExit("\n".join(found))
    return single


def load_mlflow(model: Path, folder: Path, seconds: int, connections: int) -> Load:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    image = np.asarray(Image.open(io.BytesIO(png(1))))[None, :, :, None]
    body = json.dumps({"inputs": image.tolist()}).encode()
    case = Case("invocations", 200, "POST", "/invocations", AS_JSON, body)
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(saved_for_mlflow(model, folder))]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with served(command, port, "/ping", folder / "mlflow.log") as process:
        (made,) = answers(address, [case])
        np.testing.assert_allclose(made["predictions"], Model.open(model).compute(image), atol=1e-5)
        drive(address, [case], 2, connections, folder)
        before = memory(process)
        load = drive(address, [case], seconds, connections, folder)
        print(row("MLflow, one image", load, before, memory(process)), flush=True)
        if found := wrong([case], load):
            raise SystemExit("\n".join(found))
    return load


if __name__ == "__main__":
    main()
