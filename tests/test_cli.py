"""The command line's manners: an example in every help, and one line with exit code 2 for wrong input."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

import dmlstudy
from dmlstudy import cli
from dmlstudy.engine import selfcheck
from dmlstudy.engine.interruption import StudyInterrupted
from dmlstudy.engine.jobs import Job
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.leaderboard import FrontTrial, Leaderboard, Row
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import CLAIMS
from dmlstudy.store import Store
from dmlstudy.training import exactness
from dmlstudy.verdict.comparison import compare

SPEC = Path(__file__).resolve().parents[1] / "search_spaces" / "studies" / "digits.yaml"
VERBS = {
    "run", "submit", "status", "logs", "stop", "validate", "families", "leaderboard", "models", "pull",
    "embed", "ui", "selfcheck", "resume", "promote", "rollback", "compare", "index", "retrieve", "serve", "report",
    "export", "init", "options", "jobs", "delete", "prune",
    "relocate", "claims", "push",
}  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``dmlstudy`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["dmlstudy", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")]
)
def test_a_signal_ends_a_command_with_a_line(
    number: signal.Signals, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    at_start = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}[number]
    before = signal.signal(number, at_start)  # a Ray that was in this process leaves its own, which ends it
    try:
        monkeypatch.setattr(study_file, "load", told)
        assert call(monkeypatch, "run", SPEC) == 128 + number
        assert capsys.readouterr().err == f"{line}\n"
        assert signal.getsignal(number) == at_start
    finally:
        signal.signal(number, before)


def test_an_interrupt_that_a_library_wraps_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrapped(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr(study_file, "load", wrapped)
    assert call(monkeypatch, "run", SPEC) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_while_the_command_line_loads_is_a_line() -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dmlstudy.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "runpy.run_module('dmlstudy', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_empty_argument_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "embed", "model", "", "-o", "z.parquet") == 2
    assert capsys.readouterr().err.startswith(
        "error: an argument is empty, as of a variable of the shell that"
    )


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        monkeypatch.setattr(study_file, "load", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        monkeypatch.setattr(cli.studies, "_run", lambda *_, **__: None)
        assert call(monkeypatch, "run", SPEC) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_study_that_was_interrupted_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise StudyInterrupted

    monkeypatch.setattr("dmlstudy.studies.run.run_study", interrupted)
    assert call(monkeypatch, "run", SPEC, "--store", tmp_path, "--quiet") == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("interrupted; what was finished is kept, `dmlstudy resume digits")


def test_every_verb_has_an_example_that_names_it() -> None:
    commands = get_command(cli.app.app).commands  # type: ignore[attr-defined]
    assert commands.keys() == VERBS
    for name, command in commands.items():
        assert f"`dmlstudy {name}" in command.epilog


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = SPEC.read_text()
    assert old in text
    path = tmp_path / "study.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs: 5", "eopchs: 5", r"training\.eopchs: unknown key; did you mean 'epochs'\?"),
        ("epochs: 5", "epochs: -1", r"training\.epochs: .*greater than or equal to 0, got -1"),
        (
            "space: triplet_weighting",
            "space: triplet_wieghting",
            r"no family 'triplet_wieghting'; did you mean 'triplet_weighting'\?",
        ),
        ("{name: digits}", "{name: digit}", r"digit'.*did you mean 'digits'"),
        ("{name: digits}", "{name: image_folder, path: /nowhere}", r"/nowhere"),
        ("workers: 2", "workers: 0", r"resources\.workers: .*greater than 0, got 0"),
    ],
)
def test_a_wrong_study_file_is_one_line_and_leaves_nothing(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spec, store = edited(tmp_path, old, new), tmp_path / "store"
    assert call(monkeypatch, "run", spec, "--store", store) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert re.search(message, line), line
    assert not store.exists()


def test_other_wrong_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    file = tmp_path / "file"
    file.write_text("")
    relative = tmp_path / "relative.yaml"
    relative.write_text(SPEC.read_text().replace("{name: digits}", "{name: image_folder, path: birds}"))
    store = tmp_path / "store"
    at_store: list[object] = ["--store", store]
    table: list[tuple[list[object], str]] = [
        (["run", tmp_path / "none.yaml", *at_store], r"none\.yaml: no such file"),
        (
            ["run", SPEC, "--address", f"127.0.0.1:{closed}", *at_store],
            rf"no Ray cluster at 127\.0\.0\.1:{closed}",
        ),
        (["run", SPEC, "--address", "http://127.0.0.1:8265", *at_store], r"dmlstudy submit"),
        (["run", SPEC, "--store", file / "store"], r"store cannot be written"),
        (["run", SPEC, "--tracking-uri", f"http://127.0.0.1:{closed}", *at_store], r"no MLflow server at"),
        (["submit", SPEC, "--address", f"http://127.0.0.1:{closed}", *at_store], r"no Ray cluster at http"),
        (["run", SPEC, "--tracking-uri", "http://me:pa55@host", *at_store], r"MLFLOW_TRACKING_PASSWORD"),
        (
            ["submit", SPEC, "--address", "x", "--tracking-uri", "http://me:pa55@host"],
            r"MLFLOW_TRACKING_PASS",
        ),
        (
            ["submit", relative, "--address", f"http://127.0.0.1:{closed}"],
            r"data\.path: birds is relative, but a job",
        ),
        (["validate", tmp_path], r"is a folder; name the YAML file in it, as .*relative\.yaml"),
        (["validate", relative], rf"folder {tmp_path}/birds does not exist, nor birds in the current folder"),
        (["options", "nope"], r"no section 'nope'"),
        (["init", tmp_path / "nope"], r"nope: no such folder"),
        (["leaderboard", "nope", *at_store], r"no studies in the store"),
        (["status", "nope", *at_store], r"no study 'nope'"),
        (["logs", "nope", *at_store], r"no study 'nope'"),
        (["stop", "nope", *at_store], r"no study 'nope'"),
        (["stop", *at_store], r"name a study of the store .*: none yet"),
        (["stop", "nope", "--trial", "3", *at_store], r"no study 'nope'"),
        (["stop", "--job", "j", "--trial", "3", *at_store], r"leave --job away.* sees the store's folder"),
        (["logs", "nope", "--trial", "3", *at_store], r"no study 'nope'"),
        (["logs", "--job", "j", "--trial", "3", *at_store], r"leave --job away"),
        (["resume", "nope", *at_store], r"no study 'nope'"),
        (["models", *at_store], r"no studies in the store"),
        (["pull", "nope", "--to", tmp_path / "to", *at_store], r"no studies in the store"),
        (["embed", "nope", file, "-o", tmp_path / "o.parquet", *at_store], r"no studies in the store"),
        (["ui", *at_store], r"no studies in"),
        (["families", "nope"], r"no family 'nope'"),
    ]
    for arguments, message in table:
        assert call(monkeypatch, *arguments) == 2, arguments
        said = capfd.readouterr().err.strip()
        assert said.count("\n") == 0, (arguments, said)
        assert said.startswith("error: "), said
        assert re.search(message, said), said
        assert "pa55" not in said, said
    assert sorted(tmp_path.iterdir()) == [file, relative]


def test_the_status_of_a_study_closely_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    store = Store(tmp_path)
    spec = {"families": {"red": {"space": "contrastive"}}}
    store.write_state("s", "running", spec=spec, started=0.0, num_search_trials=4, num_verdict_trials=2)
    assert call(monkeypatch, "status", "s", "--store", tmp_path) == 0
    shown = capfd.readouterr().out
    assert re.search(r"^ s +interrupted +0 \+ 0 judged +0 +0 +6 +none yet ", shown, re.MULTILINE), shown
    hint = f"its process is gone; `dmlstudy resume s --store {tmp_path}` goes on"
    assert f"s: {hint}\n" in shown
    assert re.search(r"^ red +4 +0 +0 +0 +0 +0 *$", shown, re.MULTILINE), shown
    assert call(monkeypatch, "status", "--json", "--store", tmp_path) == 0
    (status,) = json.loads(capfd.readouterr().out)
    assert (status["study"], status["num_left"], status["running"]) == ("s", 6, [])
    assert call(monkeypatch, "stop", "s", "--trial", "0", "--store", tmp_path) == 2
    assert hint in capfd.readouterr().err
    monkeypatch.setenv("DMLSTUDY_STORE", str(tmp_path))
    assert call(monkeypatch, "stop", "s") == 1, "it does not run"
    shown = capfd.readouterr().out
    assert shown == "study s is not running: it is interrupted\n"
    assert call(monkeypatch, "stop", "s", "--json") == 1
    assert json.loads(capfd.readouterr().out)["was_running"] is False
    assert call(monkeypatch, "status", "s") == 0
    assert "`dmlstudy resume s` goes on" in capfd.readouterr().out, (
        "the environment names the store there too"
    )


def test_the_version_and_the_short_help(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capfd.readouterr().out == f"dmlstudy {dmlstudy.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+.*", dmlstudy.__version__)
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        _ = dmlstudy.versoin
    for verb in ([], *([verb] for verb in VERBS)):
        assert call(monkeypatch, *verb, "-h") == 0
        assert "Usage: dmlstudy" in capfd.readouterr().out
    assert call(monkeypatch, "-h") == 0
    assert "Exit codes: 0 done" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["status", "--jsn"],
            "No such option: --jsn; did you mean '--json'? (`dmlstudy status -h` tells more)",
        ),
        (
            ["run", "x", "--sett", "a=1"],
            "No such option: --sett; did you mean '--set'? (`dmlstudy run -h` tells more)",
        ),
        (["jobs", "--nothing-like-it"], r"No such option: --nothing-like-it; known: --address, .*"),
        (["stauts"], "No such command 'stauts'. Did you mean 'status'? (`dmlstudy -h` tells more)"),
        (["run"], "Missing argument 'spec'. (`dmlstudy run -h` tells more)"),
        (
            ["embed", "m", "x", "-o", "y", "--workers", "0"],
            r"Invalid value for '--workers': .* equal to 1 \(.*",
        ),
        (["run", "x", "--store"], "Option '--store' requires an argument."),
        ([], "name a command (`dmlstudy -h` tells more)"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *arguments) == 2
    error = capfd.readouterr().err
    assert error == f"error: {said}\n" or re.fullmatch(f"error: {said}\n", error)


def test_an_empty_store_has_no_studies_and_a_folder_that_is_not_there_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "status", "--json", "--store", tmp_path) == 0
    assert json.loads(capfd.readouterr().out) == []
    assert call(monkeypatch, "status", "--store", tmp_path) == 0
    assert capfd.readouterr().out.startswith(f"no studies in the store {tmp_path}; start one with")
    assert call(monkeypatch, "status", "--json", "--store", tmp_path / "tpyo") == 2
    assert capfd.readouterr().err.startswith("error: no studies in the store")


class MlflowExceptionOfOurs(Exception):
    """Stands for an error of an engine that nobody has foreseen."""


MlflowExceptionOfOurs.__module__ = "mlflow.exceptions"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(28, "No space left on device"),
            "No space left on device; free some room, then do the same again",
        ),
        (
            OSError(28, "No space left on device", "/store/x"),
            "/store/x: No space left on device; free some room, then do the same again",
        ),
        (OSError(122, "Disk quota exceeded"), "Disk quota exceeded; free some room, then do the same again"),
        (
            OSError(30, "Read-only file system", b"/x"),
            "/x: Read-only file system; name a place that can be written",
        ),
        (
            OSError(5, "Input/output error"),
            "Input/output error; see that it is there, may be used and has room",
        ),
        (OSError("of a library"), "of a library; see that it is there, may be used and has room"),
        (
            PermissionError(13, "Permission denied", "x"),
            "x: Permission denied; see that it is there, may be used and has room",
        ),
        (MemoryError(), "out of memory; free some, or take smaller batches, images or models"),
        (RecursionError("maximum"), "the input is nested too deeply"),
        (ValueError("first line\n  second\tline\n"), "first line second line"),
        (ValueError(""), "ValueError"),
        (
            MlflowExceptionOfOurs("database\nis full"),
            "MlflowExceptionOfOurs: database is full (DMLSTUDY_DEBUG=1 shows where)",
        ),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.models, "store_at", refuse)
    assert call(monkeypatch, "models") == 2
    assert capfd.readouterr().err == f"error: {said}\n"
    monkeypatch.setenv("DMLSTUDY_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["dmlstudy", "models"])
    with pytest.raises(type(error)):
        cli.main()


def test_a_mistake_of_the_program_is_no_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("never")

    monkeypatch.setattr(cli.models, "store_at", broken)
    monkeypatch.setattr(sys, "argv", ["dmlstudy", "models"])
    with pytest.raises(AssertionError):
        cli.main()


def test_a_long_message_keeps_its_beginning_and_the_advice_at_its_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError(f"families.red.space: {'x, ' * 50_000}; name one of them")

    monkeypatch.setattr(cli.models, "store_at", refuse)
    assert call(monkeypatch, "models") == 2
    said = capfd.readouterr().err
    assert len(said) < cli.app.LONGEST_ERROR + 50
    assert said.startswith("error: families.red.space: x, x")
    assert said.endswith("; name one of them\n")


def test_who_reads_no_further_and_who_presses_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = "import sys; sys.argv = ['dmlstudy', 'families']; from dmlstudy.cli import main; main()"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(piped)} | true; echo ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (shown.stdout, shown.stderr) == ("1\n", "")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.models, "store_at", interrupted)
    assert call(monkeypatch, "models") == 130
    monkeypatch.setattr(cli.app, "app", interrupted)
    assert call(monkeypatch, "models") == 130


JOBS = [
    Job(job="digits-1", study="digits", state="running", started=1000.0, ended=None, last_line=""),
    Job(job="other", study=None, state="succeeded", started=10.0, ended=70.0, last_line=""),
]


def test_the_jobs_of_a_cluster(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    monkeypatch.setattr("dmlstudy.engine.jobs.jobs", lambda address: JOBS)
    monkeypatch.setattr(
        "dmlstudy.engine.jobs.job",
        lambda name, address: JOBS[0].model_copy(update={"last_line": " 5/24  red #4  left 2:30 min"}),
    )
    for verb in ("jobs", "status"):
        assert call(monkeypatch, verb, "--address", "http://h:8265") == 0
        shown = capfd.readouterr().out
        assert re.search(r"^ digits-1 +digits +running +19\d\d-", shown, re.MULTILINE), shown
        assert re.search(r"^ other +- +succeeded .* 1:00 min *$", shown, re.MULTILINE), shown
        assert call(monkeypatch, verb, "--address", "http://h:8265", "--json") == 0
        assert [job["job"] for job in json.loads(capfd.readouterr().out)] == ["digits-1", "other"]
    assert call(monkeypatch, "status", "--job", "digits-1", "--address", "http://h:8265") == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith("job digits-1: running, for ")
    assert second == " 5/24  red #4  left 2:30 min"
    assert call(monkeypatch, "status", "digits", "--address", "http://h:8265") == 2
    assert "has jobs, not studies: name one with --job" in capfd.readouterr().err
    monkeypatch.setattr("dmlstudy.engine.jobs.jobs", lambda address: [])
    assert call(monkeypatch, "jobs", "--address", "http://h:8265") == 0
    assert capfd.readouterr().out.startswith("no jobs at http://h:8265; send one with `dmlstudy submit")


def test_submit_prints_the_job_first_and_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dmlstudy.engine.jobs.submit", lambda *_: "digits-1")
    monkeypatch.setattr("dmlstudy.engine.jobs.follow_job", lambda job, address, write: write("all\n") and 0)
    sent = ("submit", SPEC, "--address", "http://h:8265")
    assert call(monkeypatch, *sent) == 0
    assert capfd.readouterr().out == (
        "job digits-1\nfollow it: dmlstudy logs --job digits-1 --address http://h:8265 -f\n"
    )
    assert call(monkeypatch, *sent, "--json") == 0
    assert json.loads(capfd.readouterr().out) == {
        "job": "digits-1",
        "study": "digits",
        "address": "http://h:8265",
    }
    assert call(monkeypatch, *sent, "--wait") == 0
    assert capfd.readouterr().out == "job digits-1\nall\n"
    assert call(monkeypatch, *sent, "--wait", "--quiet") == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("outcome", ["finished", "interrupted", "failed"])
def test_the_end_of_a_run_names_the_store_again(
    outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from dmlstudy.engine.interruption import StudyInterrupted
    from dmlstudy.studies import run as studies
    from dmlstudy.studies.conclude import StudyFailed

    def play(spec: object, store: Store, *, address: object, tell: Any) -> Leaderboard:
        tell("a line")
        if outcome == "interrupted":
            raise StudyInterrupted
        if outcome == "failed":
            raise StudyFailed("no trial finished;\nbecause")
        return Leaderboard(
            study="digits", objective="map_at_r", second_objective=None, status="finished", winner="red",
            model=None, rows=[row("red", 4, 0.6, 0.7)], front=[], comparisons=[],
        )  # fmt: skip

    monkeypatch.setattr(studies, "run_study", play)
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    given = ("--store", tmp_path / "my store", "--address", "auto")
    code = {"finished": 0, "interrupted": 130, "failed": 1}[outcome]
    assert call(monkeypatch, "run", SPEC, *given) == code
    said = capfd.readouterr()
    assert said.out.startswith("a line\n")
    at = f"--store '{tmp_path}/my store'"
    if outcome == "finished":
        assert f"models: dmlstudy models {at}\nMLflow's page: dmlstudy ui {at}\n" in said.out
        assert f"what the engines said: dmlstudy logs digits --engine {at}\n" in said.out
    elif outcome == "interrupted":
        assert f"`dmlstudy resume digits {at} --address auto` goes on from there\n" in said.err
    else:
        assert said.err == "failed: no trial finished; because\n"
    assert call(monkeypatch, "run", SPEC, *given, "--quiet") == code
    quiet = capfd.readouterr()
    assert quiet.out == ""
    assert (quiet.err == "") is (outcome == "finished")


def row(family: str, num: int, score: float, validation: float | None = None) -> Row:
    return Row(
        family=family,
        num_finished=0 if validation is None else 2,
        num_pruned=0,
        num_failed=0,
        num_judged=num,
        validation=validation,
        validation_stderr=None,
        params={},
        untrained=None if validation is None else "untrained",
        test={"test_map_at_r": Estimate(mean=score, half_width=0.01, num=num)},
    )


def test_a_leaderboard_says_how_sure_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    scores = {
        "red": {1: 0.6, 2: 0.61, 3: 0.62, 4: 0.6},
        "blue": {1: 0.5, 2: 0.53, 3: 0.5},
        "untrained": {1: 0.49, 2: 0.53, 3: 0.52, 4: 0.5},
    }
    board = Leaderboard(
        study="s",
        objective="map_at_r",
        second_objective="embedding_dim",
        status="finished",
        winner="red",
        model=None,
        rows=[row("red", 4, 0.6075, 0.7), row("blue", 3, 0.51, 0.6), row("untrained", 4, 0.51)],
        front=[FrontTrial(family="blue", trial=3, validation=0.6, size=8)],
        comparisons=compare(scores, resolution=1e-3),
    )
    cli.tables.show_leaderboard(board)
    shown = capfd.readouterr().out
    assert re.search(r"^ red \* +0\.7000 +0\.6075 ± 0\.010 +4 +2\+0\+0", shown, re.MULTILINE), shown
    assert re.search(r"^ blue +0\.6000 +0\.5100 ± 0\.010 +3 +2\+0\+0", shown, re.MULTILINE), shown
    assert re.search(r"each family's best by map_at_r alone:\n.*\n blue +#3 +0\.6000 +8 *\n", shown), shown
    assert "paired by seed:" in shown
    assert "  red better than blue on these classes: +0.1000 [+0.0117, +0.1883] p 0.026, 3 seeds\n" in shown
    assert (
        "  red better than untrained on these classes: +0.0975 [+0.0669, +0.1281] p 0.002, 4 seeds\n" in shown
    )
    assert "adjusted for all 3 pairs (Holm)" in shown
    assert "hold for all 3 pairs at once with 95% (Bonferroni)" in shown
    cli.tables.show_leaderboard(board.model_copy(update={"front": [], "comparisons": board.comparisons[:1]}))
    shown = capfd.readouterr().out
    assert "paired by seed over 3 seeds:" in shown
    assert "embedding_dim" not in shown


def test_the_families_with_their_papers_and_parameters(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    assert call(monkeypatch, "families") == 0
    shown = capfd.readouterr().out
    for path in SPEC.parents[1].glob("*.yaml"):
        if path.name == CLAIMS:
            continue
        (row,) = re.findall(rf"^ {path.stem} .*$", shown, re.MULTILINE)
        assert row.split()[1]
    assert re.search(
        r"^ contrastive +Dimensionality .* positive_margin, negative_margin *$", shown, re.MULTILINE
    )
    assert re.search(r" binomial_deviance: alpha, beta, negative_weight *$", shown, re.MULTILINE)
    assert re.search(r" \+ structure: preset, weight, t, alpha, eta_floor *$", shown, re.MULTILINE)


def test_one_family_with_its_space(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    assert call(monkeypatch, "families", "graph_consistency") == 0
    shown = capfd.readouterr().out
    assert "CGML" in shown
    assert "    if n_pair: scale in [1, 128], log, default 100" in shown
    assert call(monkeypatch, "families", "graph_consistency", "--json") == 0
    (family,) = json.loads(capfd.readouterr().out)
    assert family["family"] == "graph_consistency"
    assert "    if gc: weight in [0.0001, 1], log, default 0.01" in family["space"]
    assert "    if gc: weight in [0.0001, 1], log, default 0.01" in shown


def test_a_study_file_for_a_folder_is_written_and_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    for label in range(8):
        (tmp_path / "pics" / str(label)).mkdir(parents=True)
        for number in range(3):
            grey = Image.new("L", (8, 8), 10 * label + number)
            grey.save(tmp_path / "pics" / str(label) / f"{number}.png")
    file = tmp_path / "study.yaml"
    assert call(monkeypatch, "init", tmp_path / "pics", "-o", file, "--budget", "quick") == 0
    shown = capfd.readouterr().out
    assert "study pics, 24 pictures of 8 classes: 4 to learn from, 4 kept for the test\n" in shown
    assert f"next: dmlstudy validate {file}   dmlstudy run {file}\n" in shown
    assert call(monkeypatch, "init", tmp_path / "pics", "-o", file) == 2
    assert "is there already" in capfd.readouterr().err
    other = tmp_path / "other.yaml"
    assert call(monkeypatch, "init", tmp_path / "pics", "-o", other, "--json") == 0
    assert json.loads(capfd.readouterr().out) == {
        "file": str(other),
        "study": "pics",
        "num_classes": {"development": 4, "test": 4},
        "num_images": {"development": 12, "test": 12},
    }
    assert call(monkeypatch, "validate", file, "--no-estimate", "--set", "search.trials_per_family=5") == 0
    shown = capfd.readouterr().out
    assert "trials: 15 to search (3 families x 5)" in shown
    assert re.search(r"^here: \d+ at once on \d+ CPU and ", shown, re.MULTILINE), shown
    assert call(monkeypatch, "validate", file, "--no-estimate", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["num_search_trials"], facts["seconds"], facts["notes"]) == (6, None, [])
    assert facts["num_classes"] == {"development": 4, "test": 4}
    assert facts["families"]["contrastive"]["space"][0] == "loss.name = contrastive"
    assert call(monkeypatch, "validate", file, "--set", "search.trial_per_family=5") == 2
    assert "search.trial_per_family: unknown key; did you mean 'trials_per_family'?" in capfd.readouterr().err


@pytest.mark.parametrize("failed", [None, "a worker died"])
def test_what_selfcheck_finds_is_valid_json(
    failed: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = [
        exactness.Finding("margin", 0.5, 0.0, 1.0, 1.0, 0.0),
        exactness.Finding("structure", math.nan, math.nan, 0.9, 1.0, 0.1),
    ]

    def run(*_: object, on_finding: Callable[[exactness.Finding], None], **__: object) -> None:
        for finding in found:
            on_finding(finding)
        if failed:
            raise selfcheck.SelfcheckFailed(failed)

    monkeypatch.setattr(selfcheck, "run_selfcheck", run)
    assert call(monkeypatch, "selfcheck", "margin", "--json") == 1
    facts = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert (facts["workers"], facts["failed"], facts["wrong"]) == (2, failed, ["structure"])
    assert [(case["case"], case["value"], case["is_exact"]) for case in facts["cases"]] == [
        ("margin", 0.5, True),
        ("structure", None, False),
    ]


def test_each_command_that_tells_facts_tells_them_as_json_too() -> None:
    lasting = {"run", "resume", "logs", "serve", "ui"}  # they print as long as they last
    commands = get_command(cli.app.app).commands  # type: ignore[attr-defined]
    assert {
        name for name, command in commands.items() if "json" not in {p.name for p in command.params}
    } <= lasting


def test_progress_is_shown_while_validate_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one = "families={pair: {space: pair_weighting}}"
    assert call(monkeypatch, "validate", SPEC, "--set", one, "--set", "embedder.width=4") == 0
    shown = capfd.readouterr()
    assert shown.err == "measuring pair, family 1 of 1\n"
    assert "time: at most about " in shown.out


def test_every_key_is_listed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.tables.console, "width", cli.tables.WIDTH)
    assert call(monkeypatch, "options", "training") == 0
    shown = capfd.readouterr().out
    assert re.search(r"^ training\.lr \* +number > 0 +1e-05 +learning rate *$", shown, re.MULTILINE), shown
    assert "data.path" not in shown
    assert call(monkeypatch, "options", "--json") == 0
    keys = {option["key"] for option in json.loads(capfd.readouterr().out)}
    assert {"name", "data.path", "training.lr", "families.NAME.override"} <= keys
    assert call(monkeypatch, "options", "trainig") == 2
    assert "did you mean 'training'?" in capfd.readouterr().err


def test_the_home_folder_in_a_store_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.app.store_at(Path("~/store")).root == tmp_path / "store"


def made_board(study: str) -> Leaderboard:
    """A finished study of three pairs: one of them clear, one the other way round, one where nothing can be told."""
    families = (
        "pair-constant",
        "pair-constant-random",
        "pair-exponential",
        "pair-constant-v0",
        "ms-v1",
        "ms-v2",
    )
    scores = dict(zip(families, (0.5, 0.3, 0.4, 0.8, 0.2, 0.21), strict=True))
    spread = {"ms-v2": (0.0, 0.4, -0.4)}
    by_seed = {
        name: {seed: scores[name] + spread.get(name, (0, 0.001, -0.001))[seed] for seed in range(3)}
        for name in families
    }
    return Leaderboard(
        study=study, objective="map_at_r", second_objective=None, status="finished", winner=None, model=None, front=[],
        rows=[
            Row(family=name, num_finished=3, num_pruned=0, num_failed=0, num_judged=3, validation=0.5,
                validation_stderr=None, params={}, untrained=None,
                test={"test_map_at_r": Estimate(mean=scores[name], half_width=0.01, num=3)})
            for name in families
        ],
        comparisons=compare(by_seed, resolution=1e-4),
    )  # fmt: skip


CHOSEN = ("gpw-pk", "gpw-normalisation-constant", "gpw-ms-one", "gpw-square")


def without_intervals(text: str) -> str:
    """A text as one line, less what stands in brackets."""
    return " ".join(re.sub(r"\[[^\]]*\]", "", text).split())


def test_claims_are_run_and_told_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from dmlstudy.registry import leaderboard
    from dmlstudy.studies import run

    ran: list[str] = []
    monkeypatch.setattr(run, "run_study", lambda spec, *_, **__: ran.append(spec.name))
    monkeypatch.setattr(leaderboard, "leaderboard", lambda _, study: made_board(study))
    only = [word for name in CHOSEN for word in ("--only", name)]
    place = ("--no-estimate", "--store", tmp_path / "store")
    assert call(monkeypatch, "claims", *only, "--trials", 2, "--seeds", 3, *place) == 0
    told = capfd.readouterr()
    assert "claims-gpw-" in told.err
    assert "6 families, 12 trials to search" in told.err
    lines = {line.split()[0]: " ".join(line.split()) for line in told.out.splitlines() if line.strip()}
    better = "gpw-pk pair-constant better than +0.2000 reproduced <0.001 not tested - pair-constant-random"
    assert lines["gpw-pk:"] == "gpw-pk: not tested on classes like these: no scores by class were kept"
    flat = without_intervals(told.out)
    assert better in flat
    assert "-0.3000 contrary <0.001 not tested -" in flat
    assert re.search(r"\+0\.2000 \[\+0\.19\d\d, \+0\.20\d\d\]", told.out)
    assert "+0.0100 not distinguishable" in flat
    assert lines["gpw-square:"].startswith("gpw-square: not tested: a claim of no difference")
    assert (
        "4 claims; on these classes 1 reproduced, 1 contrary, 1 not distinguishable, 1 not tested;"
        " on classes like these 0 reproduced, 0 contrary, 0 not distinguishable, 4 not tested"
    ) in told.out
    assert "these are small data and a small budget" in told.out
    assert call(monkeypatch, "claims", "--only", *CHOSEN, "--json", *place) == 0
    found = json.loads(capfd.readouterr().out)
    assert [each["these"] for each in found] == [
        "contrary",
        "reproduced",
        "not distinguishable",
        "not tested",
    ]
    assert len(set(ran)) == 2  # another budget is another study


@pytest.mark.parametrize("num_searches", [2, 3])
def test_claims_by_search_are_a_second_table(
    num_searches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from dmlstudy.registry import leaderboard
    from dmlstudy.registry.search_luck import Procedure, SearchLuck
    from dmlstudy.studies import run

    def with_luck(_: object, study: str) -> Any:
        board = made_board(study)
        again = [
            each.model_copy(update={"num_seeds": num_searches, "effect": each.effect / 2})
            for each in board.comparisons
        ]
        procedures = [
            Procedure(
                family=row.family,
                score_by_search=[number + 0.25 * (number == at) for at in range(num_searches)],
                deviation=0.0,
            )
            for number, row in enumerate(board.rows)
        ]
        luck = SearchLuck(num_searches=num_searches, num_seeds=2, procedures=procedures, comparisons=again)
        return board.model_copy(update={"luck": luck})

    monkeypatch.setattr(run, "run_study", lambda *_, **__: None)
    monkeypatch.setattr(leaderboard, "leaderboard", with_luck)
    place = ("--no-estimate", "--store", tmp_path / "store")
    only = ("--only", "gpw-pk", "gpw-normalisation-constant", "gpw-ms-one")
    assert call(monkeypatch, "claims", *only, "--searches", num_searches, *place) == 0
    told = capfd.readouterr()
    assert "6 families are searched" in told.err.replace("leading ", "")
    _, _, second = without_intervals(told.out).partition(
        f"by search: {num_searches} searches of each family, each with its own best "
    )
    of_each = rf"(?: [+-]\d\.\d{{4}}){{{num_searches}}}"
    assert re.search(rf"gpw-pk{of_each} \+0\.1000 reproduced <0\.001 not tested -", second)
    assert (
        "by search: on these classes 1 reproduced, 1 contrary, 1 not distinguishable, 0 not tested" in second
    )
    assert ("only describe" in second) is (num_searches == 2)
    assert ("3 searches decide little among 3 differences at once" in second) is (num_searches == 3)


def test_a_study_of_claims_that_cannot_run_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "pictures" / name / "a.png")
    place = ("--no-estimate", "--store", tmp_path / "store")
    arguments = ("claims", "--only", "gpw-pk", "--data", tmp_path / "pictures", *place)
    assert call(monkeypatch, *arguments) == 1
    out = capfd.readouterr().out
    assert "gpw-pk: not tested: " in out
    assert "1 claims; on these classes 0 reproduced, 0 contrary, 0 not distinguishable, 1 not tested" in out
    assert not (tmp_path / "store").exists()


def test_claims_are_listed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "claims", "--list", "--only", "oahu", "--no-estimate") == 0
    out = capfd.readouterr().out
    assert "Towards self-adaptive metric learning" in out
    assert "oahu better than lego" in out
    assert "claims-oahu-" in out
    assert call(monkeypatch, "claims", "--only", "gpw-fusion", "--write", tmp_path / "claims") == 0
    (path,) = (tmp_path / "claims").iterdir()
    assert "1 claims, 3 families" in capfd.readouterr().out
    assert call(monkeypatch, "claims", "--list", "--only", "gpw-pretrained", "--json") == 0
    listed = json.loads(capfd.readouterr().out)
    assert all("embedder.weights" in claim["not_tested"] for claim in listed["claims"])
    assert listed["studies"] == {}
    assert call(monkeypatch, "claims", "--only", "gpw-pretrained", "--write", tmp_path / "none") == 2
    assert "nothing to write: gpw-frozen-batch-norm: needs a network" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()
    assert call(monkeypatch, "validate", path, "--no-estimate") == 0
    tree = capfd.readouterr().out
    assert "like pair-exponential-pooled: takes its points, trial by trial:" in tree
    assert "differs: embedder.fusion heads; pair-exponential-pooled: absent" in tree
    for arguments, fault in (
        (("--only", "gpw-kp"), "error: --only gpw-kp: no such claim, paper or study; did you mean 'gpw-pk'?"),
        (("gpw-pk",), "error: gpw-pk: write --only gpw-pk, or nothing for all claims"),
        (("--seeds", "3-x"), "error: --seeds 3-x: is no number of seeds; write one as 5, or a range as 3-10"),
        (
            ("--seeds", "5-3"),
            "error: --seeds 5-3: a range begins with 3 or more and ends with more, 100 at most;",
        ),
        (("--seeds", "²"), "error: --seeds ²: is no number of seeds; write one as 5, or a range as 3-10"),
        (("--data", tmp_path / "none"), "does not exist; give a folder, or NAME=FOLDER"),
    ):
        assert call(monkeypatch, "claims", *arguments) == 2
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert fault in line
