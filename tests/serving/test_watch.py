"""The record of a watched server: windows of whole lines, told once, and nothing of a user's in it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient
from typer.testing import CliRunner

from dmlstudy.cli.app import app as app_of_commands
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import SpaceMap
from dmlstudy.serving import watch
from dmlstudy.serving.drift import DistanceRange
from dmlstudy.serving.gallery import build
from dmlstudy.serving.guards import Limits
from dmlstudy.serving.server import Service, app
from dmlstudy.serving.watch import QueryWatch, Served, WatchFile, WatchPlan, WatchStart, Window, read_record

from .conftest import X, embedder
from .test_gallery import embedded
from .test_mapping import fitted
from .test_server import as_json, png

SERVED = Served(
    model="m/1", model_digest="a" * 64, gallery="g", gallery_digest="b" * 64, distance="euclidean"
)


def unit_range() -> DistanceRange:
    """Distances 0.00 to 0.99; none of these is beyond."""
    return DistanceRange.of("queries", np.arange(100) / 100, np.array([2.0]), is_bound=False)


def windows_of(path: Path) -> list[Window]:
    return [line for line in read_record(path) if isinstance(line, Window)]


def started(path: Path, window: int = 4, **named: object) -> QueryWatch:
    return QueryWatch(WatchPlan(path, window), SERVED, unit_range, **named)  # type: ignore[arg-type]


def test_queries_go_into_windows_and_the_last_one_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    own = started(path, has_threshold=True)
    own.note([0.1, 0.2, 0.3], [True, False, True])
    own.note([float("inf"), *[0.5] * 7], [True] * 8)
    own.close()
    start, *found = read_record(path)
    assert isinstance(start, WatchStart)
    assert (start.served, start.range) == (SERVED, unit_range())
    assert [(each.number, each.queries, each.accepted) for each in windows_of(path)] == [
        (1, 4, 3),
        (2, 4, 4),
        (3, 2, 2),
    ]
    assert found[0].quantiles["50"] == pytest.approx(0.25)  # type: ignore[union-attr]
    keys = json.loads(path.read_bytes().splitlines()[2]).keys()
    assert keys == Window.model_fields.keys()


def test_a_window_ends_by_its_time(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    own = QueryWatch(WatchPlan(path, 1000, 0.01), SERVED, unit_range)
    own.note([0.1], None)
    until(lambda: len(windows_of(path)) == 1)
    own.note([0.1, 0.2], None)
    own.close()
    assert [each.queries for each in windows_of(path)] == [1, 2]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_leaving_the_range_is_told_once_and_so_is_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(watch.LOG, "warning", lambda text, *values: lines.append(text % values))
    own = started(tmp_path / "watch.jsonl", 100)
    for distances in ([0.5] * 100, [2.0] * 100, [2.0] * 100, [0.5] * 100):
        own.note(distances, None)
    until(lambda: own.facts["windows"] == 4)
    assert own.facts["windows_outside"] == 2
    own.close()
    assert [each.is_outside for each in windows_of(tmp_path / "watch.jsonl")] == [False, True, True, False]
    assert len(lines) == 2
    assert "window 2: 100 of 100 queries are beyond 0.99, where 1% belong" in lines[0]
    assert "queries no longer leave the range" in lines[1]


def test_a_record_cut_off_anywhere_in_its_last_line_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    own = started(path)
    own.note([0.1] * 8, None)
    own.close()
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (*range(last, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [each.number for each in windows_of(path)] == [1]
        again = WatchFile(path)
        assert (again.num_windows, path.read_bytes()) == (1, whole[:last])
        again.close()
    own = started(path)
    own.note([0.1] * 4, None)
    own.close()
    assert [each.number for each in windows_of(path)] == [1, 2]
    assert [line.kind for line in read_record(path)] == ["start", "window", "start", "window"]
    for end in range(len(watch.HEAD)):
        path.write_bytes(watch.HEAD[:end])
        WatchFile(path).close()


def test_what_is_no_record_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "watch.jsonl"
    own = started(path)
    with pytest.raises(ValueError, match="another server writes to it; name another file"):
        WatchFile(path)
    own.note([0.1] * 8, None)
    own.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for content, message in (
        (b"my notes\n", "no record of `dmlstudy serve --watch`"),
        (b"".join([*lines[:2], lines[2][:50] + b"\n", lines[3]]), "line 3 is damaged"),
        (b"".join([lines[0], *lines[2:]]), "line 2 is damaged .a window before any start"),
        (lines[0] + b"x" * watch.MOST_LINE, "line 2 is damaged .it has no end"),
        (b"".join(lines[:3]).replace(b'"queries":4', b'"queries":NaN'), "line 3 is damaged"),
        (b"".join(lines[:3]).replace(b'"99.9":', b'"98":'), "line 2 is damaged .*has not the quantiles"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as refused:
            WatchFile(path)
        assert "\n" not in str(refused.value)
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match="no such folder"):
        WatchFile(tmp_path / "nowhere" / "x")
    with pytest.raises(ValueError, match="is no file"):
        WatchFile(tmp_path)
    with pytest.raises(ValueError, match="no such file; `dmlstudy serve --watch FILE` writes one"):
        read_record(tmp_path / "none")


def test_nothing_waits_and_what_comes_too_fast_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WAITING", 2)
    begun, go_on = threading.Event(), threading.Event()
    own = started(tmp_path / "watch.jsonl", 100)
    real = own._take

    def slow(*arguments: object) -> None:
        begun.set()
        go_on.wait(60)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(own, "_take", slow)
    own.note([0.1], None)
    assert begun.wait(60)
    for _ in range(5):  # two wait
        own.note([0.1] * 10, None)
    go_on.set()
    own.close()
    (window,) = windows_of(tmp_path / "watch.jsonl")
    assert (window.queries, window.unwatched) == (21, 30)


def test_a_full_disk_loses_a_window_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(watch.LOG, "warning", lambda text, *values: lines.append(text % values))
    real, left = os.write, [False]

    def write(file: int, content: bytes) -> int:
        if content.startswith(b'{"kind":"window","number":1,'):
            left[0] = True
            return real(file, content[:20])
        return real(file, content)

    monkeypatch.setattr(watch.os, "write", write)
    own = started(tmp_path / "watch.jsonl")
    own.note([0.1] * 8, None)
    own.close()
    assert left == [True]
    assert [each.number for each in windows_of(tmp_path / "watch.jsonl")] == [2]
    assert ["window 1 is not recorded" in line for line in lines] == [True]


def test_a_watch_that_cannot_begin_leaves_no_file(tmp_path: Path) -> None:
    def refuse() -> DistanceRange:
        raise ValueError("too few")

    with pytest.raises(ValueError, match="too few"):
        QueryWatch(WatchPlan(tmp_path / "w"), SERVED, refuse)
    assert not (tmp_path / "w").exists()
    for plan, message in (
        (WatchPlan(tmp_path / "w", 0), "--watch-window 0: give 1 to 100000 queries"),
        (WatchPlan(tmp_path / "w", 10, float("nan")), "--watch-minutes nan: give more than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.checked()


@pytest.mark.parametrize(("kind", "accept_at"), [("plain", 0.5), ("structure", None), ("codes", 2.0)])
def test_a_server_tells_and_records(
    kind: str, accept_at: float | None, models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    """Queries of several in one request; of a model that puts results in another order, too."""
    z = embedded(models[kind], vectors if kind == "codes" else pictures, tmp_path)
    build(z, tmp_path / "gallery")
    path = tmp_path / "watch.jsonl"
    plan = WatchPlan(path, 5)
    service = Service(
        Model.open(models[kind]), tmp_path / "gallery", Limits(), accept_at=accept_at, watch=plan
    )
    assert service.watch is not None
    body = {"vectors": X[:4].tolist()} if kind == "codes" else as_json(*(png(seed=n) for n in range(4)))
    with TestClient(app(service)) as client:
        nearest = []
        for _ in range(3):
            for own in client.post("/retrieve?k=30", json=body).json()["results"]:
                nearest.append(min(each["distance"] for each in own))
        client.post("/embed", json=body)
        watched = service.watch
        until(lambda: watched.facts["windows"] == 2)
        about = client.get("/model").json()
        schema = client.get("/openapi.json").json()
        metrics = client.get("/metrics").text
    Draft202012Validator({**schema, "$ref": "#/components/schemas/About"}).validate(about)
    assert about["watch"]["last"]["number"] == 2
    assert "dmlstudy_watch_windows_total 2.0" in metrics
    assert "dmlstudy_watch_queries_total 10.0" in metrics
    assert "dmlstudy_watch_outside 0.0" in metrics
    found = windows_of(path)
    assert [each.queries for each in found] == [5, 5, 2]
    assert found[0].quantiles["50"] == pytest.approx(np.median(nearest[:5]), abs=1e-5)
    expected = {0.5: 1.0, None: None, 2.0: 0.0}[accept_at]
    assert found[0].share_accepted == expected
    assert found[0].served.model_digest == service.digest
    assert str(tmp_path) not in path.read_text()


def test_through_a_map_a_reference_is_needed(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    embedder(tmp_path / "new", pooling="avg")
    new, old = Model.open(tmp_path / "new"), Model.open(models["plain"])
    build(embedded(models["plain"], pictures, tmp_path), tmp_path / "gallery")
    space_map = fitted(new, old, tmp_path / "map")
    assert isinstance(space_map, SpaceMap)
    plan = WatchPlan(tmp_path / "w")
    with pytest.raises(ValueError, match="by a map, which puts them apart; give --watch-reference"):
        Service(new, tmp_path / "gallery", Limits(), space_map=space_map, watch=plan)
    plan = plan._replace(reference=pictures)
    service = Service(new, tmp_path / "gallery", Limits(), space_map=space_map, watch=plan)
    assert service.watch is not None
    assert service.watch.range.num == 30
    service.close()
    (start,) = read_record(tmp_path / "w")
    assert start.served.query_map == space_map.digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--watch", "w"], "--watch: distances are to items of a gallery; name one with --gallery"),
        (
            ["--watch-window", "10"],
            "--watch-window: says how queries are watched; name the file with --watch",
        ),
        (["--watch", "w", "--watch-minutes", "0"], "--watch-minutes 0: give more than 0"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str, models: dict[str, Path]) -> None:
    done = CliRunner().invoke(
        app_of_commands, ["serve", str(models["plain"]), "--port", "0", "--device", "cpu", *options]
    )
    assert done.exit_code != 0
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert not Path("w").exists()
