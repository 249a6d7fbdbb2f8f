"""Searches in a PostgreSQL that stores share: the digits of a file, to each store its own, and no login in a file."""

from __future__ import annotations

import math
import multiprocessing
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState
from support.ports import free_port
from support.postgres import Postgres, running_postgres, stoppable_postgres
from support.tune_simulator import Tune, by_number, hill, in_memory, study

from dmlstudy import patience
from dmlstudy.records import TrialConfig
from dmlstudy.search.rows import RowsTogether, end_trial
from dmlstudy.search.storage import SharedStorage, claim, open_storage, study_id_of, trials_of
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import OPTUNA_URL, Store, StoreError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_postgres() as address:
        yield f"postgresql+psycopg://{address}"


def store_at(folder: Path, url: str | None) -> Store:
    folder.mkdir(exist_ok=True)
    return Store(folder, search_database=url)


OPENED: list[optuna.storages.RDBStorage] = []


def opened(store: Store) -> optuna.storages.RDBStorage:
    """The storage, whose connections are closed with the test."""
    OPENED.append(open_storage(store))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().engine.dispose()


def begun(store: Store, spec: StudySpec) -> StudySearch:
    """A driver's session, as ``studies.run`` begins one."""
    storage = opened(store)
    claim(storage, store, spec.name)
    return StudySearch(spec, storage, set())


def drive(store: Store, spec: StudySpec) -> list[object]:
    """What a driver finds that takes a study to its end."""
    return by_number(Tune(begun(store, spec), hill, at_once=2).run().search)


def test_two_drivers_of_two_studies_find_what_a_file_gives(url: str, tmp_path: Path) -> None:
    """Both go on at once, one of them after a death without a word."""
    specs = [
        study(name=name, search={"trials_per_family": 6, "seed": seed})
        for seed, name in enumerate(("a", "b"))
    ]
    stores = [store_at(tmp_path / spec.name, url) for spec in specs]
    Tune(begun(stores[0], specs[0]), hill).run(20)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as drivers:
        found = drivers.map(drive, stores, specs)
        for store, spec, of_driver in zip(stores, specs, found, strict=True):
            assert of_driver == by_number(Tune(in_memory(spec), hill).run().search)
            assert len(trials_of(store, spec.name)) == 12
    assert trials_of(stores[0], "b") == [], "of another store"


def test_a_name_that_another_store_has_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    spec = study(name="shared")
    first, second = (store_at(tmp_path / name, url) for name in ("first", "second"))
    Tune(begun(first, spec), hill).run(9)
    with pytest.raises(
        StoreError, match=r"has a study 'shared' of another store; give this one another name"
    ):
        begun(second, spec)
    with pytest.raises(KeyError):
        study_id_of(opened(second), second, "shared")
    assert begun(first, spec).study.trials


def test_a_driver_that_died_before_it_signed_goes_on(url: str, tmp_path: Path) -> None:
    store, spec = store_at(tmp_path / "own", url), study(name="unsigned")
    plain = optuna.storages.RDBStorage(url)
    OPENED.append(plain)
    optuna.create_study(study_name="unsigned", storage=plain, direction="maximize")
    assert begun(store, spec).suggest("t0")


def test_a_warm_start_knows_the_studies_of_its_own_store_only(url: str, tmp_path: Path) -> None:
    first, second = (store_at(tmp_path / name, url) for name in ("one", "two"))
    Tune(begun(first, study(name="elsewhere")), hill).run()
    warm = study(name="warm", search={"trials_per_family": 4, "warm_start": "auto"})
    assert begun(second, warm).study.user_attrs["warm_start"] == {"red": [], "blue": []}
    own = study(name="own", search={"trials_per_family": 4, "warm_start": "auto"})
    assert begun(first, own).study.user_attrs["warm_start"]["red"]


def test_no_file_and_no_text_has_the_login(url: str, tmp_path: Path) -> None:
    store = store_at(tmp_path / "quiet", url)
    begun(store, study(name="quiet"))
    password = url.split(":")[2].split("@")[0]
    assert password not in repr(store)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or password.encode() not in path.read_bytes()
    assert store.optuna_place.read_text() == url.rpartition("@")[2] + "\n"
    assert not store.optuna_file.exists()
    assert store.has_searches


def test_another_database_than_the_stores_is_refused(url: str, tmp_path: Path) -> None:
    there, here = store_at(tmp_path / "there", url), store_at(tmp_path / "here", None)
    begun(there, study(name="placed"))
    opened(here)
    other = url.replace(url.rpartition(":")[2], f"{free_port()}/postgres")
    for store, said in (
        (
            Store(there.root, search_database=None),
            f"its searches are in the PostgreSQL at .*; set {OPTUNA_URL}",
        ),
        (Store(here.root, search_database=url), f"its searches are in .*optuna.db; unset {OPTUNA_URL}"),
        (Store(there.root, search_database=other), "its searches are in the PostgreSQL at .*, not at"),
    ):
        with pytest.raises(StoreError, match=said):
            trials_of(store, "placed")


@pytest.mark.parametrize("given", ["mysql://a:b@c/d", "postgresql://host", "no url", "sqlite:///x.db"])
def test_what_is_no_postgresql_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"^{OPTUNA_URL}: expected postgresql\+psycopg://USER:PASSWORD@"):
        open_storage(store_at(tmp_path, given))


def test_a_database_that_does_not_answer_is_named_without_its_login(tmp_path: Path) -> None:
    place = f"127.0.0.1:{free_port()}/postgres"
    with pytest.raises(StoreError, match=f"the PostgreSQL at {place} does not answer") as raised:
        open_storage(store_at(tmp_path, f"postgresql+psycopg://tests:secret@{place}"))
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_variable_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OPTUNA_URL, "postgresql://a:b@c/d")
    assert Store(tmp_path).optuna_url == "postgresql://a:b@c/d"
    monkeypatch.delenv(OPTUNA_URL)
    assert Store(tmp_path).optuna_url.startswith("sqlite:///")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Postgres]:
    monkeypatch.setattr(patience, "PAUSE_S", 0.05)
    with stoppable_postgres() as found:
        yield found


def test_a_server_that_goes_away_again_and_again_changes_nothing(server: Postgres, tmp_path: Path) -> None:
    spec = study(name="a", search={"trials_per_family": 6, "seed": 3})
    store = store_at(tmp_path / "own", f"postgresql+psycopg://{server.address}")
    told: list[str] = []
    OPENED.append(storage := open_storage(store, told.append))
    moments, back = random.Random(1), [threading.Timer(0, print, [""])]
    num_outages = 0

    def hill_and_outages(config: TrialConfig, step: int) -> float:
        nonlocal num_outages
        if moments.random() < 0.15 and back[0].finished.is_set():
            num_outages += 1
            server.stop()
            back[0] = threading.Timer(0.3, server.start)
            back[0].start()
        return hill(config, step)

    back[0].start()
    search = Tune(StudySearch(spec, storage, set()), hill_and_outages, at_once=2).run().search
    back[0].join()
    assert by_number(search) == by_number(Tune(in_memory(spec), hill, at_once=2).run().search)
    assert num_outages > 2
    assert len(trials_of(store, "a")) == 12
    assert any(line.startswith("the PostgreSQL is back after") for line in told)


@pytest.mark.parametrize("method", ["create_new_trial", "end_trial"])
def test_what_was_stored_when_the_connection_broke_is_not_stored_again(
    method: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.0)
    spec = study(name=f"broken-{method}", search={"trials_per_family": 4, "seed": 3})
    store = store_at(tmp_path / "own", url)
    OPENED.append(storage := open_storage(store, print))
    whole, num_calls = getattr(RowsTogether, method), 0

    def breaks(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        answer = whole(*given)
        if num_calls % 2:
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, OSError("the connection was closed"))
        return answer

    monkeypatch.setattr(RowsTogether, method, breaks)
    found = by_number(Tune(StudySearch(spec, storage, set()), hill).run().search)
    assert found == by_number(Tune(in_memory(spec), hill).run().search)
    assert num_calls >= 8


def test_scores_and_ends_are_what_optuna_keeps_of_them(url: str, tmp_path: Path) -> None:
    """Each score twice, as after an outage; of infinite ones, and of none, too."""
    OPENED.append(ours := open_storage(store_at(tmp_path / "own", url), print))
    optunas = optuna.storages.InMemoryStorage()
    found = []
    for storage in (ours, optunas):
        study_id = optuna.create_study(storage=storage, study_name="ends")._study_id
        for values in ([0.5], [math.inf], [-math.inf], None):
            trial_id = storage.create_new_trial(study_id)
            for step, score in enumerate([0.25, math.nan, math.inf, -math.inf] * 2):
                storage.set_trial_intermediate_value(trial_id, step % 4, score)
            state = TrialState.FAIL if values is None else TrialState.COMPLETE
            end_trial(storage, trial_id, state, values, {"reason": "<b>", "settled": {"lr": 0.1}})
            with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
                end_trial(storage, trial_id, state, values, {"reason": "again"})
            with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
                storage.set_trial_intermediate_value(trial_id, 9, 0.5)
        found.append(
            [
                repr((trial.state, trial.values, sorted(trial.intermediate_values.items()), trial.user_attrs))
                for trial in storage.get_all_trials(study_id)
            ]
        )
    assert found[0] == found[1]


def test_a_server_that_stays_away_ends_the_study_in_one_line(server: Postgres, tmp_path: Path) -> None:
    store = replace(store_at(tmp_path / "own", f"postgresql+psycopg://{server.address}"), patience_s=1.5)
    told: list[str] = []
    OPENED.append(storage := open_storage(store, told.append))
    assert isinstance(storage, SharedStorage)
    assert storage.patience is not None
    search = StudySearch(study(name="a"), storage, set())
    server.stop()
    place = server.address.partition("@")[2]
    lost = (
        rf"^no PostgreSQL at {place} for \d s; when it is back, run the study again, it goes on from there$"
    )
    with pytest.raises(RuntimeError, match="Tune's own"), storage.patience.speaks_first():
        raise RuntimeError("Tune's own")
    with pytest.raises(StoreError, match=lost):
        search.suggest("t0")
    with pytest.raises(StoreError, match=lost), storage.patience.speaks_first():
        raise RuntimeError("what Tune makes of it")
    assert told == [f"the PostgreSQL at {place} does not answer; the study waits up to 2 s for it"]
    server.start()
