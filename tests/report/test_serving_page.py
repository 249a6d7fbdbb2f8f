"""The page of a watched server: windows and alarms as recorded, one line for a record that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.loaded_page import parsed
from typer.testing import CliRunner

from dmlstudy.cli.app import app
from dmlstudy.report import serving_page
from dmlstudy.report.serving_page import read_stretches, write_serving_report
from dmlstudy.serving.drift import DistanceRange
from dmlstudy.serving.watch import HEAD, Served, WatchStart, Window, window_of

HOSTILE = "<a href='x'>"
RANGE = DistanceRange.of("gallery", np.arange(200) / 200, np.array([1.5, 2.0]), is_bound=True)


def served(model: str) -> Served:
    return Served(
        model=model, model_digest="a" * 64, gallery="birds", gallery_digest="b" * 64, distance="euclidean"
    )


def windows(
    model: str, first: int, distances: Sequence[float], accepted: int | None = None
) -> list[WatchStart | Window]:
    """A start, and a window of 50 equal queries for each distance."""
    start = WatchStart(at="2026-01-01T00:00:00Z", served=served(model), range=RANGE, window=50, seconds=600.0)
    found: list[WatchStart | Window] = [start]
    for number, distance in enumerate(distances, first):
        at = f"2026-01-{1 + number // 24:02}T{number % 24:02}"
        found.append(
            window_of(
                number,
                np.full(50, distance),
                RANGE,
                served(model),
                start=f"{at}:00:00Z",
                end=f"{at}:10:00Z",
                accepted=accepted,
            )
        )
    return found


def record(path: Path, lines: Sequence[WatchStart | Window], tail: bytes = b"") -> Path:
    path.write_bytes(HEAD + b"".join(each.model_dump_json().encode() + b"\n" for each in lines) + tail)
    return path


def test_the_page_shows_windows_and_alarms_of_several_servers(tmp_path: Path) -> None:
    lines = windows(HOSTILE, 1, [0.4, 0.5]) + windows(HOSTILE, 3, [0.5, 3.0, 3.0], accepted=30)
    path = record(tmp_path / "w.jsonl", lines, tail=b'{"kind":"window","num')
    written = write_serving_report(path, tmp_path / "page.html")
    assert written == (5, 2)
    text = (tmp_path / "page.html").read_text()
    found = parsed(text)
    assert found.loaded == []
    assert found.handlers == []
    assert "2 windows leave the range, of 5; the first ended 2026-01-01T04:10:00Z" in text
    assert "Of 2 queries of new classes at least 100% are beyond it" in text
    assert HOSTILE not in text
    assert text.count(">leaves<") == 2
    plots = found.scripts[1]
    assert '"leaves the range"' in plots
    assert "windows 3 to 5" in text
    record(path, windows("m", 1, [0.4]))
    assert write_serving_report(path, tmp_path / "page.html") == (1, 0)
    assert "None of 1 window leaves the range." in (tmp_path / "page.html").read_text()


def test_of_many_windows_all_alarms_are_marked_and_some_drawn(tmp_path: Path) -> None:
    distances = [3.0 if number % 400 == 7 else 0.4 for number in range(700)]
    own = read_stretches(record(tmp_path / "w.jsonl", windows("m", 1, distances)))
    figure = serving_page._distances(own).figure
    drawn = {trace.name: len(trace.x) for trace in figure.data}
    assert drawn["50%"] == 350
    assert drawn["leaves the range"] == 2
    assert figure.data[2].x[-1] == own[0].windows[-1].end


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"x\n", "no record of"),
        (HEAD, "holds no window yet"),
        (HEAD + b"{}\n", "line 2 is damaged"),
        (HEAD + b'{"kind":"window"}\n', "line 2 is damaged"),
    ],
)
def test_a_record_that_cannot_be_read_is_one_line(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        write_serving_report(path, tmp_path / "page.html")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "page.html").exists()


def test_times_that_are_none_are_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "w.jsonl", windows("m", 1, [0.4]))
    path.write_bytes(path.read_bytes().replace(b"2026-01-01T01:10:00Z", b"<b>2026-01-01</b>"))
    with pytest.raises(ValueError, match="line 3 is damaged"):
        read_stretches(path)


def test_the_command(tmp_path: Path) -> None:
    path, page = record(tmp_path / "w.jsonl", windows("m", 1, [0.4, 3.0])), tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", "--serving", str(path), "--output", str(page)])
    assert done.exit_code == 0, done.output
    assert "2 windows, 1 leaves the range" in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, ["report", "--serving", str(path), "-o", str(page), "--json"])
    assert json.loads(done.stdout) == {"file": str(page), "num_windows": 2, "num_outside": 1}
    for words, message in (
        (["report", "digits", "--serving", str(path)], "leave STUDY, --verify"),
        (["report"], "name a study, or a file of"),
    ):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)
