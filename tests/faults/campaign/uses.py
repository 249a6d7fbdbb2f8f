"""Commands that use a finished study's store, killed at a random moment of theirs and called again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

from dmlstudy.files import sha256

from ...support.ports import free_port
from ..conftest import DMLSTUDY, Driver, left
from .plan import COMMAND, KilledCommand
from .record import EQUAL, OVER, CampaignRecord, Row
from .stores import STUDY, Contents, asked, contents, differences

MODEL = f"{STUDY}-embedder"
LONGEST_S = 300.0


class Place(NamedTuple):
    """What a command is given: the store, a folder of inputs, and a free port."""

    store: Path
    inputs: Path
    port: int


class Use(NamedTuple):
    """A command of use: its words, what it writes, and whether that is the same byte for byte each time."""

    words: Callable[[Place], list[str]]
    output: str = ""
    is_exact: bool = True
    is_server: bool = False
    changes: bool = False
    """True of a command after which the store holds something else."""
    again: tuple[int, ...] = (0,)
    """Exit codes of the second call, which may find its work done."""


def _at(place: Place) -> list[str]:
    return ["--store", str(place.store)]


def _board(kind: str) -> Use:
    output = f"board.{kind}"
    return Use(lambda place: ["leaderboard", STUDY, "--format", kind, "-o", output, *_at(place)], output)


def _on_model(*words: str, output: str, is_exact: bool = True, again: tuple[int, ...] = (0,)) -> Use:
    """A command on the pulled model; PICTURES, EMBEDDED and GALLERY stand for the inputs of these names."""

    def named(place: Place) -> list[str]:
        there = {
            name.upper(): str(place.inputs / name) for name in ("model", "pictures", "gallery", "classes")
        }
        there["EMBEDDED"] = str(place.inputs / "z.parquet")
        return [there.get(word, word) for word in words]

    return Use(named, output, is_exact, again=again)


USES = {
    "leaderboard --format csv": _board("csv"),
    "leaderboard --format json": _board("json"),
    "leaderboard --format parquet": _board("parquet"),
    "report": Use(lambda place: ["report", STUDY, "-o", "page.html", *_at(place)], "page.html", False),
    "report --without-examples": Use(
        lambda place: ["report", STUDY, "-o", "page.html", "--without-examples", *_at(place)],
        "page.html",
        False,
    ),
    "pull": Use(lambda place: ["pull", f"{MODEL}/1", "--to", "got", *_at(place)], "got", False, again=(0, 2)),
    "pull --force": Use(
        lambda place: ["pull", f"{MODEL}/1", "--to", "got", "--force", *_at(place)], "got", False
    ),
    "embed": _on_model(
        "embed", "MODEL", "PICTURES", "-o", "z.parquet", "--device", "cpu", output="z.parquet"
    ),
    "embed by name": Use(
        lambda place: ["embed", f"{MODEL}/1", str(place.inputs / "pictures"), "-o", "z.parquet", *_at(place)],
        "z.parquet",
    ),
    "embed --workers": _on_model(
        "embed",
        "MODEL",
        "PICTURES",
        "-o",
        "z.parquet",
        "--device",
        "cpu",
        "--workers",
        "2",
        output="z.parquet",
    ),
    "index": _on_model("index", "EMBEDDED", "-o", "made", output="made", again=(0, 2)),
    "index of short vectors": _on_model(
        "index", "EMBEDDED", "-o", "made", "--size", "4", "--bits", "8", output="made", again=(0, 2)
    ),
    "retrieve --sheet": _on_model(
        "retrieve", "MODEL", "GALLERY", "PICTURES", "-k", "3", "--sheet", "found.html", output="found.html"
    ),
    "export --format torch_export": _on_model(
        "export", "MODEL", "--format", "torch_export", "-o", "e.pt2", output="e.pt2", is_exact=False
    ),
    "export --format onnx": _on_model("export", "MODEL", "--format", "onnx", "-o", "e.onnx", output="e.onnx"),
    "push": Use(
        lambda place: ["push", str(place.inputs / "model"), "--to", "published", "--with-code"],
        "published",
        again=(0, 2),
    ),
    "init": Use(
        lambda place: ["init", str(place.inputs / "classes"), "-o", "study.yaml"], "study.yaml", again=(0, 2)
    ),
    "claims --write": Use(
        lambda place: ["claims", "--only", "gpw", "--write", "claims"], "claims", again=(0, 2)
    ),
    "compare --save-maps": Use(
        lambda place: ["compare", f"{MODEL}/2", f"{MODEL}/1", "--save-maps", "maps", *_at(place)],
        "maps",
        False,
        again=(0, 2),
    ),
    "promote": Use(
        lambda place: ["promote", f"{MODEL}/2", "--anyway", "to see it", *_at(place)],
        changes=True,
        again=(0, 1, 2),
    ),
    "rollback": Use(lambda place: ["rollback", MODEL, *_at(place)], changes=True, again=(0, 1, 2)),
    "prune": Use(lambda place: ["prune", "--older-than", "0s", "--also", ".", *_at(place)]),
    "serve": Use(
        lambda place: [
            *("serve", str(place.inputs / "model"), "--gallery", str(place.inputs / "gallery")),
            *("--port", str(place.port), "--watch", WATCHED),
        ],
        is_server=True,
    ),
    "ui": Use(lambda place: ["ui", "--port", str(place.port), *_at(place)], is_server=True),
    "delete": Use(
        lambda place: ["delete", STUDY, "--yes", "--models", *_at(place)], changes=True, again=(0, 2)
    ),
}
"""The commands; the last one leaves nothing to the others."""

ONLY_ONCE = "delete"
WATCHED = "watch.jsonl"
ALIASES = 5
"""The place of a version's aliases in what ``contents`` says of it."""

LEFT = ("SELECT name FROM runs", "SELECT name FROM model_versions", "SELECT name FROM logged_models")


def use_store(
    own: Path,
    home: Path,
    seed: int,
    number: int,
    commands: tuple[KilledCommand, ...],
    record: CampaignRecord,
    scratch: str,
) -> list[str]:
    """Kill commands that use the round's store, and call them again; lines on what differs."""
    given = _given(home, scratch)
    names = [list(USES)[int(command.which * len(USES))] for command in commands]
    before = contents(own / "store")
    for count, (name, command) in sorted(
        enumerate(zip(names, commands, strict=True)), key=lambda each: each[1][0] == ONLY_ONCE
    ):
        folder = own / f"use-{count}"
        (folder / "made").mkdir(parents=True)
        use = USES[name]
        seconds, expected = _expected(use, name, given, home, scratch)
        place = Place(own / "store", given, free_port())
        rows, found = _killed(use, name, command.shares, place, folder, (seconds, expected), scratch)
        lines = _rest(own / "store") if name == ONLY_ONCE else _changed(name, own / "store", before)
        rows[-1] = rows[-1]._replace(
            num_lost=sum(line.startswith(("runs:", "versions:")) for line in lines),
            num_bricked=sum("refused" in line for line in lines),
            result="; ".join([*found, *lines])[:2000] or EQUAL,
        )
        for row in rows:
            record.add(row._replace(seed=seed, round=number))
        if rows[-1].result != EQUAL:
            return [f"{name}: {rows[-1].result}"]
        if name == ONLY_ONCE:
            return []
        before = contents(own / "store")
    return []


def _given(home: Path, scratch: str) -> Path:
    """Inputs of the commands, made once of the unbroken store."""
    inputs = home / "inputs"
    if (inputs / "gallery").exists():
        return inputs
    shutil.rmtree(inputs, ignore_errors=True)
    digits = load_digits()
    for label in range(10):
        for kind in ("pictures", f"classes/{label}"):
            (inputs / kind).mkdir(parents=True, exist_ok=True)
        for count, pixels in enumerate(digits.images[digits.target == label][:40]):
            picture = Image.fromarray((pixels * 15).astype(np.uint8))
            picture.save(inputs / "pictures" / f"{label}-{count}.png")
            picture.save(inputs / f"classes/{label}" / f"{count}.png")
    for words in (
        ["pull", f"{MODEL}/1", "--to", "model", "--store", str(home / "store")],
        ["embed", "model", "pictures", "-o", "z.parquet", "--device", "cpu"],
        ["index", "z.parquet", "-o", "gallery"],
    ):
        subprocess.run(
            [*DMLSTUDY, *words], cwd=inputs, check=True, capture_output=True, env=_environment(scratch)
        )
    return inputs


def _environment(scratch: str) -> dict[str, str]:
    return os.environ | {"TMPDIR": scratch}


def _expected(use: Use, name: str, given: Path, home: Path, scratch: str) -> tuple[float, Path]:
    """The seconds and the folder of an unbroken call, which is made once on the unbroken store."""
    folder = home / "expected" / re.sub(r"\W+", "-", name)
    told = folder / "seconds"
    if not told.exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "made").mkdir(parents=True)
        began = time.monotonic()
        if not use.changes:
            call = _Call(
                use, Place(home / "store", given, free_port()), folder / "made", folder / "shown", scratch
            )
            call.finish((0,))
            (folder / "made" / WATCHED).unlink(missing_ok=True)
        told.write_text(str(time.monotonic() - began if not use.changes else 4.0))
    return float(told.read_text()), folder / "made"


class _Call:
    """A command in a process group of its own, and in the folder to which it writes."""

    def __init__(self, use: Use, place: Place, folder: Path, log: Path, scratch: str) -> None:
        self._use, self._place = use, place
        self.driver = Driver(log, *use.words(place), environment={"TMPDIR": scratch}, folder=folder)

    def finish(self, codes: tuple[int, ...]) -> None:
        """Wait for its end, of a server for its first answer; raises AssertionError where it fails."""
        try:
            if self._use.is_server:
                self.driver.wait_until(self._answers, LONGEST_S, 0.2)
                self.driver.kill()
                return
            code = self.driver.process.wait(timeout=LONGEST_S)
            said = self.driver.log.read_text(errors="replace")
            assert code in codes and "Traceback" not in said, f"ended with {code}: {said[-500:]}"  # noqa: PT018
        finally:
            self.driver.end()

    def _answers(self) -> bool:
        path = "health" if "serve" in self._use.words(self._place) else ""
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._place.port}/{path}", timeout=5) as got,
        ):
            return bool(got.status == 200)
        return False


def _killed(
    use: Use,
    name: str,
    shares: tuple[float, ...],
    place: Place,
    folder: Path,
    unbroken: tuple[float, Path],
    scratch: str,
) -> tuple[list[Row], list[str]]:
    """One command, killed and called again: a row for each kill, and lines on what differs in what it makes."""
    seconds, expected = unbroken
    out, rows, found, calls = folder / "made", list[Row](), list[str](), list[_Call]()
    for count, share in enumerate(shares):
        call = _Call(use, place, out, folder / f"killed-{count}", scratch)
        calls.append(call)
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            call.driver.process.wait(timeout=share * seconds)
        moment = round(time.monotonic() - began, 2)
        state = f"of {seconds:.1f} s" if call.driver.process.poll() is None else OVER
        with suppress(ProcessLookupError):
            call.driver.kill()
        rows.append(Row(0, 0, COMMAND, count, moment, name, state))
        if use.output and (out / use.output).exists():
            torn = _differing(use, out / use.output, expected / use.output)
            found += [f"half written under its name: {line}" for line in torn]
    again = _Call(use, place, out, folder / "again", scratch)
    calls.append(again)
    began = time.monotonic()
    try:
        again.finish(use.again)
    except AssertionError as error:
        found.append(f"called again it {error}")
    went_on_s = round(time.monotonic() - began, 1)
    if use.is_server:
        (out / WATCHED).unlink(missing_ok=True)
    found += _differing(use, out, expected)
    orphans = [process.name() for each in calls for process in left(each.driver.mark)]
    found += [f"outlives it: {each}" for each in orphans]
    for each in calls:
        each.driver.end()
    rows[-1] = rows[-1]._replace(went_on_s=went_on_s, num_orphans=len(orphans))
    return rows, found


def _rest(store: Path) -> list[str]:
    """What a deleted study has left."""
    rest = [str(row) for query in LEFT for row in asked(store, query)]
    rest += [str(path) for path in (store / "artifacts").rglob("*") if path.is_file()]
    done = subprocess.run(
        [*DMLSTUDY, "status", "--store", store], capture_output=True, text=True, check=False
    )
    lines = [f"still there: {each}" for each in rest]
    return lines if done.returncode == 0 else [*lines, f"status refused: {done.stderr[-300:]}"]


def _changed(name: str, store: Path, before: Contents) -> list[str]:
    """What has become other in the store than the command is for."""
    after = contents(store)
    before = json.loads(json.dumps(before))
    if name in ("promote", "rollback"):
        for each in (before, after):
            if sum("champion" in version[ALIASES] for version in each["versions"]) != 1:
                return ["not one champion"]
            for version in each["versions"]:
                version[ALIASES] = []
    if name.startswith("report"):
        for each in (before, after):
            each["files"] = [file for file in each["files"] if not file.endswith("/report.html")]
    return differences(after, before)


def _differing(use: Use, made: Path, expected: Path) -> list[str]:
    """How what a command has made differs from what it makes unbroken."""
    here, there = (_digests(folder, use.is_exact) for folder in (made, expected))
    return [
        f"{path}: {here.get(path, 'missing')} in place of {there.get(path, 'nothing')}"
        for path in sorted(here.keys() | there.keys())
        if here.get(path) != there.get(path)
    ]


def _digests(folder: Path, is_exact: bool) -> dict[str, str]:
    """What is compared of each file of a folder."""
    return {
        path.relative_to(folder).as_posix(): _digest(path, is_exact)
        for path in ([folder] if folder.is_file() else sorted(folder.rglob("*")))
        if path.is_file()
    }


def _digest(path: Path, is_exact: bool) -> str:
    """What is compared: a table's rows, for it notes the model's digest; whether a page is whole; else the content."""
    if path.suffix == ".parquet":
        rows = json.dumps(pq.read_table(path).to_pydict(), default=str)
        return hashlib.sha256(rows.encode()).hexdigest()
    if path.suffix == ".html" and not is_exact:
        return "whole" if path.read_text(errors="replace").rstrip().endswith("</html>") else "torn"
    if is_exact or path.suffix == ".safetensors":
        return sha256(path)
    return "some" if path.stat().st_size else "empty"
