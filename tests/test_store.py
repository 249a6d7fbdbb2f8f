"""The store's folder: states, the lock of a study's driver, and errors that name the mend."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dmlstudy import store as stores
from dmlstudy.store import Driver, Store, StoreError, sole_driver

DRIVER = """
import sys
from pathlib import Path
from dmlstudy.store import Store, StoreError, sole_driver
store = Store(Path(sys.argv[1]))
try:
    with sole_driver(store, "s"):
        store.write_state("s", "running", started=1.0)
        print("held", flush=True)
        sys.stdin.readline()
except StoreError as error:
    print(error, flush=True)
"""


TAKEN_OVER = """
import os, sys
from pathlib import Path
from dmlstudy.store import Store, sole_driver

def end(other):
    print(f"lost to {other.pid}", flush=True)
    os._exit(3)

store = Store(Path(sys.argv[1]))
with sole_driver(store, "s") as hold, hold.watched(end):
    store.write_state("s", "running", started=1.0)
    print("held", flush=True)
    sys.stdin.readline()
"""


def driver(folder: Path, script: str = DRIVER) -> tuple[subprocess.Popen[str], str]:
    """Another process that drives study ``s`` until it reads a line, and what it said first."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=60)
    return process.returncode


def test_where_things_lie(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert store.optuna_url == f"sqlite:///{tmp_path}/optuna.db"
    assert store.artifacts == f"file://{tmp_path}/artifacts"
    assert store.study_folder("s") == tmp_path / "studies" / "s"
    served = Store(tmp_path, "http://127.0.0.1:5000")
    assert served.tracking_uri == "http://127.0.0.1:5000"
    assert served.artifacts is None


def test_a_store_knows_itself(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "first"), Store(tmp_path / "second", "http://127.0.0.1:5000")
    for store in (first, second):
        store.root.mkdir()
    assert first.identity() == first.identity() == Store(first.root).identity()
    assert first.identity() != second.identity()
    (first.root / "store.id").write_text("")  # killed as it was made
    assert len(first.identity()) == 16


@pytest.mark.parametrize(
    "uri", ["http://me:pa55@host:5000", "me:pa55@host", "http://me:pa55/x@host", "https://pa55@host"]
)
def test_a_login_in_the_address_is_refused_and_not_repeated(uri: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store(tmp_path, uri)
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in str(caught.value)
    assert "pa55" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prepare_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    store.prepare()
    store.prepare()
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place_of_the_folder(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(StoreError) as caught:
        Store(file / below).prepare()
    assert str(file) in str(caught.value)
    assert "the store cannot be written (" in str(caught.value)
    assert str(caught.value).endswith("; name another with --store")
    assert "\n" not in str(caught.value)
    assert file.read_text() == "not a folder"


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(StoreError, match=r"^/proc/nowhere: the store cannot be written"):
        Store(Path("/proc/nowhere")).prepare()


def test_states_are_kept_and_details_add_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with sole_driver(store, "s"):
        store.write_state("s", "running", fingerprint="f00", started=1.0)
        store.write_state("s", "running", started=2.0)
    store.write_state("s", "finished")
    state = store.read_state("s")
    assert state["state"] == "finished"
    assert (state["fingerprint"], state["started"], state["pid"]) == ("f00", 2.0, os.getpid())
    assert {path.name for path in store.study_folder("s").iterdir()} <= {"study.json", "lock"}


def test_studies_are_listed_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.studies() == []
    for name in ("b", "a"):
        store.write_state(name, "finished")
    (tmp_path / "studies" / "c").mkdir()  # a driver that died before it wrote
    assert store.studies() == ["a", "b"]


def test_an_unknown_study_names_the_known_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError) as caught:
        store.read_state("x")
    assert str(caught.value) == (
        f"no study 'x' in the store {tmp_path}; it is empty; start one with `dmlstudy run`"
    )
    for name in ("digits", "birds"):
        store.write_state(name, "finished")
    with pytest.raises(StoreError) as caught:
        store.read_state("x")
    assert str(caught.value) == f"no study 'x' in the store {tmp_path}; there are: birds, digits"


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with sole_driver(store, "s"):
        second, said = driver(tmp_path)
        assert said == "study 's' is running already; see `dmlstudy status s`"
        assert ended(second) == 0
        with sole_driver(store, "another"):
            pass
    third, said = driver(tmp_path)
    assert said == "held"
    with pytest.raises(StoreError, match="is running already"), sole_driver(store, "s"):
        pytest.fail("two drivers")
    assert store.read_state("s")["state"] == "running"
    assert store.read_state("s")["state"] == "running"  # to look does not take the lock
    assert ended(third) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_ends_with_a_killed_driver(how: signal.Signals, tmp_path: Path) -> None:
    store = Store(tmp_path)
    process, said = driver(tmp_path)
    assert said == "held"
    assert store.read_state("s")["state"] == "running"
    process.send_signal(how)
    assert ended(process) == -how
    assert store.read_state("s")["state"] == "interrupted"
    assert json.loads((store.study_folder("s") / "study.json").read_text())["state"] == "running"
    with sole_driver(store, "s"):
        store.write_state("s", "running")


def test_the_lock_ends_with_an_error_in_the_block(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="in between"), sole_driver(store, "s"):
        raise RuntimeError("in between")
    with sole_driver(store, "s"):
        pass


def test_the_lock_names_its_holder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.driver("s") is None
    with sole_driver(store, "s"):
        store.write_state("s", "running")
        assert store.driver("s") == Driver.own()
        assert Driver.own()[:2] == (os.getpid(), socket.gethostname())
    assert store.driver("s") is None
    with sole_driver(store, "s"):
        assert store.driver("s") is not None
        assert json.loads((store.study_folder("s") / "lock").read_text())["pid"] == os.getpid()


def test_a_driver_whose_lock_was_lost_ends_before_another_begins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    process, said = driver(tmp_path, TAKEN_OVER)
    assert said == "held"
    lock = store.study_folder("s") / "lock"
    known = lock.read_text()
    lock.unlink()  # as a file server does that has lost the connection
    lock.write_text(known)
    with sole_driver(store, "s") as hold:
        assert process.poll() == 3
        assert hold.lost_to() is None
    assert process.communicate(timeout=60)[0].strip() == f"lost to {os.getpid()}"


@pytest.mark.parametrize(("last_written", "waits"), [(0.0, True), (1000.0, False)])
def test_a_driver_of_another_machine_is_waited_for_while_it_writes(
    last_written: float, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LOST_S", 0.5)
    store = Store(tmp_path)
    with sole_driver(store, "s"):
        store.write_state("s", "running")
    folder = store.study_folder("s")
    (folder / "lock").write_text(json.dumps(Driver(1, "elsewhere", 5.0)._asdict()))
    os.utime(folder / "study.json", (time.time() - last_written,) * 2)
    began = time.monotonic()
    with sole_driver(store, "s"):
        assert (time.monotonic() - began > 0.4) == waits


def test_a_later_process_of_the_same_id_is_another() -> None:
    own = Driver.own()
    assert not own.has_ended()
    assert own._replace(began=own.began - 100).has_ended()
    assert not own._replace(host="elsewhere").has_ended()


def test_a_lock_that_was_cleared_away_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that never began removes the folder, while a second one waits with the lock file open."""
    monkeypatch.setattr(stores, "LOCK_PATIENCE_S", 20.0)
    store = Store(tmp_path / "store")
    first, second = ExitStack(), ExitStack()
    first.enter_context(sole_driver(store, "s"))
    waits, try_lock = threading.Event(), stores._try_lock

    def late(*arguments: Any) -> bool:  # between its opening of the file and its lock, the first driver ends
        if threading.current_thread() is waiter and not waits.is_set():
            waits.set()
            assert is_over.wait(20)
        return try_lock(*arguments)

    monkeypatch.setattr(stores, "_try_lock", late)
    is_over = threading.Event()
    waiter = threading.Thread(target=lambda: second.enter_context(sole_driver(store, "s")))
    waiter.start()
    assert waits.wait(20)
    first.close()
    assert not store.root.exists(), "it leaves nothing behind"
    is_over.set()
    waiter.join(20)
    monkeypatch.setattr(stores, "LOCK_PATIENCE_S", 0.1)
    with pytest.raises(StoreError, match="is running already"), sole_driver(store, "s"):
        pytest.fail("two drivers")
    second.close()
