"""What is taken for a dead cluster and when; Ray's table is played."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util.queue
import requests

from dmlstudy.engine import cluster_watch, embed_on_ray, selfcheck
from dmlstudy.engine.cluster import ClusterError
from dmlstudy.engine.cluster_watch import HEAD, ClusterWatch, dead_node
from dmlstudy.records import ResourcesConfig
from dmlstudy.serving.embed import EmbedJob


class Table:
    """Ray's table of nodes: the driver is on ``own``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: Callable[[], list[dict[str, Any]]] = lambda: [node("own", is_head=True)]
        context = SimpleNamespace(get_node_id=lambda: "own")
        monkeypatch.setattr(cluster_watch.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(cluster_watch.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(cluster_watch.ray, "nodes", lambda: self.nodes())
        for name, seconds in (("DEAD_S", 0.1), ("SILENT_S", 0.3), ("LAST_S", 0.5)):
            monkeypatch.setattr(cluster_watch, name, seconds)


def node(name: str, *, alive: bool = True, is_head: bool = False) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {HEAD: 1.0} if is_head and alive else {}}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def test_a_node_that_is_not_needed_may_die_and_the_drivers_own_and_the_head_may_not(table: Table) -> None:
    head, own, other = node("head", is_head=True), node("own"), node("other", alive=False)
    table.nodes = lambda: [head, own, other]
    assert dead_node() == ""
    table.nodes = lambda: [head, node("own", alive=False)]
    assert dead_node() == "its raylet on the driver's node is gone"
    table.nodes = lambda: [node("head", alive=False, is_head=True), own]
    assert dead_node() == "its head node is gone"


def test_a_dead_raylet_is_told_and_at_last_the_process_is_ended(table: Table) -> None:
    ended: list[str] = []
    with ClusterWatch(None, ended.append, every_s=0.02) as watch:
        time.sleep(0.3)
        assert watch.why_gone() == ""
        table.nodes = lambda: [node("own", alive=False)]
        reason = until(watch.why_gone)
        assert reason == "Ray on this machine has died: its raylet on the driver's node is gone"
        assert until(lambda: ended) == [reason]


def test_one_that_comes_back_was_not_dead(table: Table) -> None:
    ended: list[str] = []
    with ClusterWatch(None, ended.append, every_s=0.02) as watch:
        table.nodes = lambda: [node("own", alive=False)]
        until(watch.why_gone)
        table.nodes = lambda: [node("own", is_head=True)]
        until(lambda: not watch.why_gone())
        time.sleep(0.6)
    assert ended == []


@pytest.mark.parametrize("refuses", [True, False])
def test_a_control_service_that_does_not_answer_is_dead(table: Table, refuses: bool) -> None:
    """Ray's call then hangs: the driver hears of it all the same."""
    hangs, ended = threading.Event(), list[str]()

    def never() -> list[dict[str, Any]]:
        if refuses:
            raise RuntimeError("unavailable")
        hangs.wait(60)
        return []

    table.nodes = never
    with ClusterWatch("10.0.0.1:6379", ended.append, every_s=0.02) as watch:
        reason = until(watch.why_gone)
        assert reason == "the Ray cluster at 10.0.0.1:6379 has died: its control service does not answer"
        assert until(lambda: ended) == [reason]
    hangs.set()


def test_a_study_that_has_ended_is_not_ended_again(table: Table) -> None:
    ended: list[str] = []
    table.nodes = lambda: [node("own", alive=False)]
    with ClusterWatch(None, ended.append, every_s=0.02) as watch:
        until(watch.why_gone)
    time.sleep(0.8)
    assert ended == []


def test_a_start_that_fails_while_a_death_is_looked_into_ends_by_itself(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watch would tell then goes to a log that is closed."""
    ended: list[str] = []
    is_asked, has_left = threading.Event(), threading.Event()

    def ended_services(since: float) -> list[str]:
        is_asked.set()
        assert has_left.wait(30)
        return ["its control service"]

    monkeypatch.setattr(cluster_watch, "ended_services", ended_services)
    with ClusterWatch(None, ended.append, every_s=0.02):
        assert is_asked.wait(30)
        judging = [each for each in threading.enumerate() if each.name == "cluster-watch_judge"]
    has_left.set()
    for each in judging:
        each.join(30)
    assert ended == []


def test_the_block_does_not_end_under_what_is_told_at_last(table: Table) -> None:
    told, order = threading.Event(), list[str]()

    def at_last(reason: str) -> None:
        told.set()
        time.sleep(0.3)
        order.append("told")

    table.nodes = lambda: [node("own", alive=False)]
    with ClusterWatch(None, at_last, every_s=0.02):
        assert told.wait(30)
    assert order == ["told"]


def test_a_service_that_ends_while_ray_is_started_is_told(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself waits for it, and ends the process without a word after a minute."""
    monkeypatch.setattr(cluster_watch.ray, "is_initialized", lambda: False)
    program = shutil.copy(str(shutil.which("sleep")), tmp_path / "gcs_server")
    ended: list[str] = []
    with ClusterWatch(None, ended.append, every_s=0.02):
        service = subprocess.Popen([program, "60"])
        time.sleep(0.3)
        assert ended == []
        service.kill()
        until(lambda: ended)
    service.wait()
    assert ended == ["Ray on this machine has died: its control service ended as it started"]


def test_a_service_of_its_own_ray_that_ends_is_told_at_once_unless_ray_is_shut_down(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Ray's own calls some would not return for a minute, and then end the process without a word."""
    program = shutil.copy(str(shutil.which("sleep")), tmp_path / "gcs_server")
    monkeypatch.setattr(cluster_watch, "LAST_S", 1e9)
    for is_up, wanted in ((True, ["Ray on this machine has died: its control service ended"]), (False, [])):
        ended: list[str] = []
        monkeypatch.setattr(cluster_watch.ray, "is_initialized", lambda: True)
        with (
            ClusterWatch(None, ended.append, every_s=0.02) as watch,
            subprocess.Popen([program, "60"]) as service,
        ):
            watch.note_connected()
            time.sleep(0.3)
            monkeypatch.setattr(cluster_watch.ray, "is_initialized", lambda is_up=is_up: is_up)
            service.kill()
            if is_up:
                until(lambda ended=ended: ended)
            time.sleep(0.3)
        assert ended == wanted


def test_a_ray_that_is_shut_down_as_soon_as_it_is_connected_has_not_died(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the cluster can never hold one trial: that is what is to be told."""
    program = shutil.copy(str(shutil.which("sleep")), tmp_path / "gcs_server")
    monkeypatch.setattr(cluster_watch.ray, "is_initialized", lambda: False)
    ended: list[str] = []
    with (
        ClusterWatch(None, ended.append, every_s=0.02) as watch,
        subprocess.Popen([program, "60"]) as service,
    ):
        watch.note_connected()  # and shut down before anything was asked of it
        service.kill()
        time.sleep(0.5)
    assert ended == []


def test_before_ray_is_started_nothing_is_dead(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_watch.ray, "is_initialized", lambda: False)
    table.nodes = list
    with ClusterWatch(None, lambda reason: None, every_s=0.02) as watch:
        time.sleep(0.4)
        assert watch.why_gone() == ""


def test_doubt_is_settled_by_an_answer_to_a_question_that_was_asked_later(table: Table) -> None:
    with ClusterWatch("auto", lambda reason: None, every_s=0.02) as watch:
        assert not watch.is_doubtful()
        table.nodes = lambda: [node("own", alive=False)]
        time.sleep(0.05)
        assert watch.is_doubtful()
        assert until(watch.why_gone).startswith("the Ray cluster of this node has died: ")


def test_what_a_dead_ray_makes_of_the_work_is_told_as_its_death(table: Table) -> None:
    with ClusterWatch(None, lambda reason: None, every_s=0.02) as watch:
        with pytest.raises(ValueError, match=r"^a bad picture$"), watch.told_if_dead("again"):
            raise ValueError("a bad picture")
        with pytest.raises(KeyError), watch.told_if_dead("again"):
            raise KeyError("of living workers")
        broken = r"has died: it does not answer; again$"
        with pytest.raises(ClusterError, match=broken), watch.told_if_dead("again"):
            exec("raise BrokenPipeError", {"__name__": "ray.util.client"})
        table.nodes = lambda: [node("own", alive=False)]
        with pytest.raises(ClusterError) as caught, watch.told_if_dead("again"):
            raise ray.exceptions.RaySystemError("noise")
    assert str(caught.value) == "Ray on this machine has died: its raylet on the driver's node is gone; again"


def of_a_task(error: Exception) -> Exception:
    """What Ray raises here for an error that a task has raised there."""
    cause: Exception = ray.exceptions.RayTaskError("task", f"traceback: {error}", error).as_instanceof_cause()
    return cause


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("the MLflow server"),
        requests.exceptions.ConnectionError("the MLflow server"),
        of_a_task(ConnectionResetError("the MLflow server")),
    ],
)
def test_a_lost_connection_to_another_server_is_not_rays_death(table: Table, error: Exception) -> None:
    with ClusterWatch(None, lambda reason: None, every_s=0.02) as watch:
        with pytest.raises(type(error), match="the MLflow server") as caught, watch.told_if_dead("again"):
            raise error
        assert caught.value is error
        table.nodes = lambda: [node("own", alive=False)]
        with pytest.raises(ClusterError, match="has died"), watch.told_if_dead("again"):
            raise error


def test_the_death_of_the_drivers_raylet_is_heard_at_once(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    with ClusterWatch(None, ended.append) as watch:
        for dies in (False, True):
            ours, raylets = socket.socketpair()
            monkeypatch.setattr(cluster_watch, "raylet_connection", lambda own=ours: own)
            with watch.told_if_dead("again"):
                raylets.send(b"something")
                assert ended == []
                if dies:
                    raylets.close()
                    assert until(lambda: ended)
            raylets.close()
            time.sleep(0.05)
            assert len(ended) == dies, "a raylet that lives longer than the work is not heard"
    assert ended == ["Ray on this machine has died: its raylet on the driver's node is gone"]


STUCK = """
import sys
from functools import partial
from dmlstudy.engine.cluster_watch import told_at_last
from dmlstudy.files import temporary_folder
try:
    with temporary_folder() as folder:
        print(folder)
        told_at_last(partial(print, flush=True), "again")("Ray has died")
finally:
    print("the process goes on")
"""


def test_a_process_that_waits_for_a_dead_ray_is_ended_with_one_line() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    folder, *lines = ended.stdout.splitlines()
    assert (ended.returncode, lines) == (2, ["error: Ray has died; again"])
    assert not Path(folder).exists()


def test_a_selfcheck_ends_with_its_ray(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers neither find anything nor break."""

    class Silent:
        def get(self, timeout: float) -> Any:
            time.sleep(0.02)
            table.nodes = lambda: [node("own", alive=False)]
            raise ray.util.queue.Empty

    is_over = threading.Event()
    monkeypatch.setattr(ray.util.queue, "Queue", Silent)
    monkeypatch.setattr(ClusterWatch.__init__, "__kwdefaults__", {"every_s": 0.02})
    monkeypatch.setattr(cluster_watch, "end_process", lambda: None)
    monkeypatch.setattr(selfcheck, "connected", lambda *_: nullcontext())
    monkeypatch.setattr(selfcheck, "_run", lambda *_: is_over.wait(10))
    with pytest.raises(ClusterError, match=r"^Ray on this machine has died: .* is gone; run the same again$"):
        selfcheck.run_selfcheck(
            ["one"], ResourcesConfig(), address=None, on_finding=lambda _: None, tell=lambda _: None
        )
    is_over.set()


def test_an_embedding_by_workers_ends_with_its_ray(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: Any) -> Any:
        table.nodes = lambda: [node("own", alive=False)]
        raise ray.exceptions.LocalRayletDiedError

    monkeypatch.setattr(ClusterWatch.__init__, "__kwdefaults__", {"every_s": 0.02})
    monkeypatch.setattr(cluster_watch, "end_process", lambda: None)
    monkeypatch.setattr(embed_on_ray, "connected", lambda *_: nullcontext())
    monkeypatch.setattr(embed_on_ray, "placed", break_off)
    job = EmbedJob("model", "items", "z.parquet")
    with pytest.raises(ClusterError, match=r"died: .* run the same again, which goes on from its parts$"):
        list(embed_on_ray.on_cluster(None, ResourcesConfig(workers=2))(job, [0, 1]))
