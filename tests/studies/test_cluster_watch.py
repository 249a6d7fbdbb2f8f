"""What is taken for a dead cluster and when; Ray's table is played."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dmlstudy.studies import cluster_watch
from dmlstudy.studies.cluster_watch import HEAD, ClusterWatch, dead_node


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
