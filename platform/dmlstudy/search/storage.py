"""Optuna's storage, opened so that a report costs a write and not several waits for the disk."""

from __future__ import annotations

import copy
import functools
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar
from urllib.parse import quote

import optuna
import sqlalchemy
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from dmlstudy import journal
from dmlstudy.patience import ServerPatience
from dmlstudy.search.rows import RowsTogether
from dmlstudy.store import OPTUNA_URL, Store, StoreError, make_whole, sqlite_url
from dmlstudy.text import first_line

T = TypeVar("T")


def open_storage(
    store: Store, tell: Callable[[str], object] | None = None, *, is_for_a_look: bool = False
) -> optuna.storages.RDBStorage:
    """The store's Optuna storage, made if it is not there; raises StoreError for a file that cannot be read.

    In SQLite a commit goes to a write-ahead log that is synchronised with the disk at checkpoints only: what was
    committed outlives the death of any process; a loss of power may take reports since the last checkpoint, and
    never the file's order. The beginning and the end of a trial are made durable (``to_disk``), as in MLflow.

    On a file system that may be another machine's SQLite keeps its rollback journal (``journal``).

    A PostgreSQL (``Store.search_database``) is opened as Optuna does it; the store keeps its place, not its login. Who
    looks at it only keeps no connection. A driver waits ``store.patience_s`` for it, and ``tell`` gets a line on that.
    """
    check_place(store)
    storage: optuna.storages.RDBStorage
    with _readable(store):
        if store.search_database:
            kept = {"poolclass": sqlalchemy.NullPool} if is_for_a_look else ALIVE
            storage = SharedStorage(store.search_database, store.identity(), engine_kwargs=kept)
            place = place_of(store.search_database)
            make_whole(
                store, store.optuna_place, lambda draft: draft.write_text(f"{place}\n", encoding="utf-8")
            )
            if tell is not None:
                storage.patience = ServerPatience(
                    "PostgreSQL", place, store.patience_s, storage.answers, tell
                )
        else:
            make_whole(store, store.optuna_file, _make_database)
            storage = RowsTogether(store.optuna_url)
    if storage.engine.dialect.name == "sqlite":
        sqlalchemy.event.listen(
            storage.engine, "connect", _logs_ahead if journal.is_local(store.root) else _rolls_back
        )
        storage.engine.dispose()  # connections made before do not know
    return storage


ALIVE = {"pool_pre_ping": True}
"""A connection that the server has closed is replaced before it is used."""

OWNER = "store"
"""The user attribute of an Optuna study that says which store it is of, in a database that stores may share."""


def place_of(url: str) -> str:
    """The place of a database without its login: HOST:PORT/DATABASE. Raises StoreError for what is no PostgreSQL."""
    try:
        found = sqlalchemy.make_url(url)
    except sqlalchemy.exc.ArgumentError:
        found = None
    if found is None or found.get_backend_name() != "postgresql" or not found.database:
        raise StoreError(f"{OPTUNA_URL}: expected postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE")
    return f"{found.host or 'localhost'}:{found.port or 5432}/{found.database}"


def check_place(store: Store) -> None:
    """Raise StoreError where the store's searches are in another database than the one that is named."""
    there = store.optuna_place.read_text(encoding="utf-8").strip() if store.optuna_place.is_file() else ""
    elsewhere = f"{store.root}: its searches are in the PostgreSQL at {there}"
    if store.search_database is None:
        if there:
            raise StoreError(f"{elsewhere}; set {OPTUNA_URL} to its URL, with the login")
        return
    named = place_of(store.search_database)
    if store.optuna_file.is_file():
        raise StoreError(
            f"{store.root}: its searches are in {store.optuna_file}; unset {OPTUNA_URL}, or name another --store"
        )
    if there and there != named:
        raise StoreError(f"{elsewhere}, not at {named}; set {OPTUNA_URL} to its URL, with the login")


def study_id_of(storage: optuna.storages.BaseStorage, store: Store, name: str) -> int:
    """The id of a store's study; raises KeyError where there is none, or one of another store."""
    study_id = storage.get_study_id_from_name(name)
    if store.search_database and storage.get_study_user_attrs(study_id).get(OWNER) != store.identity():
        raise KeyError(name)
    return study_id


ASKED = (
    *("get_all_trials", "get_n_trials", "get_trial", "get_study_user_attrs", "get_study_id_from_name"),
    *("set_study_user_attr", "set_study_system_attr", "set_trial_user_attr", "set_trial_system_attr"),
    *("set_trial_param", "set_trial_intermediate_value", "_get_trials"),
)
"""Of Optuna's storage what a driver calls and may call again, whether or not the first call has been done."""


class SharedStorage(RowsTogether):
    """Optuna's storage in a database that stores share: it signs the studies it makes, and lists its store's alone.

    With ``patience`` it waits for a server that is away, and then does what was to be done, once.
    """

    def __init__(self, url: str, owner: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._owner = owner
        self._is_inside = False
        self.patience: ServerPatience | None = None

    def answers(self) -> bool:
        """True if the server is there."""
        try:
            with self.engine.connect() as connection:
                connection.execute(sqlalchemy.text("SELECT 1"))
        except sqlalchemy.exc.SQLAlchemyError:
            return False
        return True

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """As Optuna's; a trial that was stored when the connection broke is not stored again."""
        num_before = self.get_n_trials(study_id) if self.patience and template_trial else 0

        def again() -> int:
            if template_trial is not None:
                attrs = json.loads(json.dumps(template_trial.user_attrs))
                for trial in self.get_all_trials(study_id, deepcopy=False)[num_before:]:
                    if (trial.params, trial.user_attrs) == (template_trial.params, attrs):
                        return int(trial._trial_id)
            return super(SharedStorage, self).create_new_trial(study_id, template_trial)

        return self._patiently(
            lambda: super(SharedStorage, self).create_new_trial(study_id, template_trial), again
        )

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """As Optuna's; what was stored when the connection broke is not stored again."""

        def store() -> bool:
            return super(SharedStorage, self).set_trial_state_values(trial_id, state, values)

        return self._patiently(store, lambda: self.get_trial(trial_id).state == state or store())

    def end_trial(
        self,
        trial_id: int,
        state: TrialState,
        values: Sequence[float] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """As that of ``RowsTogether``; an end that was stored when the connection broke is not stored again."""

        def store() -> None:
            super(SharedStorage, self).end_trial(trial_id, state, values, attrs)

        def again() -> None:
            if self.get_trial(trial_id).state != state:
                store()

        self._patiently(store, again)

    def _patiently(self, call: Callable[[], T], again: Callable[[], T]) -> T:
        """The result of ``call``, or of ``again`` after an outage; raises StoreError after too long a one."""
        if self.patience is None or self._is_inside:
            return call()
        self._is_inside = True
        try:
            return self.patience.call(call, _is_outage, again)
        finally:
            self._is_inside = False

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        study_id = super().create_new_study(directions, study_name)
        self.set_study_user_attr(study_id, OWNER, self._owner)
        return study_id

    def get_all_studies(self) -> list[FrozenStudy]:
        return [study for study in super().get_all_studies() if study.user_attrs.get(OWNER) == self._owner]


def _may_be_asked_again(name: str) -> Callable[..., Any]:
    method = getattr(RowsTogether, name)

    @functools.wraps(method)
    def asked(self: SharedStorage, *args: Any, **named: Any) -> Any:
        call = functools.partial(method, self, *args, **named)
        return self._patiently(call, call)

    return asked


for _name in ASKED:
    setattr(SharedStorage, _name, _may_be_asked_again(_name))


def _is_outage(error: BaseException | None) -> bool:
    """True if a connection could not be made, or broke."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError):
            return True
        if isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated:
            return True
        error = error.__cause__
    return False


class Mark(NamedTuple):
    """A trial of the storage by its numbers, without what makes it large."""

    number: int
    trial_id: int
    state: TrialState
    attrs: Mapping[str, Any]
    """Those of its user attributes that were asked for."""


def marks(storage: optuna.storages.BaseStorage, study_id: int, *keys: str) -> list[Mark]:
    """All trials of a study by number, with these of their user attributes."""
    if not isinstance(storage, optuna.storages.RDBStorage):
        return [
            Mark(
                t.number,
                t._trial_id,
                t.state,
                {key: t.user_attrs[key] for key in keys if key in t.user_attrs},
            )
            for t in storage.get_all_trials(study_id, deepcopy=False)
        ]
    trial, attribute = models.TrialModel, models.TrialUserAttributeModel
    of_trial = (attribute.trial_id == trial.trial_id) & attribute.key.in_(keys)
    asked = (
        sqlalchemy.select(trial.number, trial.trial_id, trial.state, attribute.key, attribute.value_json)
        .outerjoin(attribute, of_trial)
        .where(trial.study_id == study_id)
        .order_by(trial.number)
    )

    def read() -> list[Mark]:
        found: list[Mark] = []
        with storage.engine.connect() as connection:
            for number, trial_id, state, key, value in connection.execute(asked):
                if not found or found[-1].number != number:
                    found.append(Mark(number, trial_id, state, {}))
                if key is not None:
                    found[-1] = found[-1]._replace(attrs={**found[-1].attrs, key: json.loads(value)})
        return found

    return storage._patiently(read, read) if isinstance(storage, SharedStorage) else read()


PAGE = 500
"""Trials that are read together: Optuna's objects of a trial take some 20 kB while it reads them."""

LAST_ID = 2**31 - 1
"""No trial has a higher id: the column is an integer of 32 bits."""


def in_pages(
    storage: optuna.storages.BaseStorage, study_id: int, trial_ids: Sequence[int]
) -> Iterator[FrozenTrial]:
    """The trials with these ids, in this order, of which a page is in memory at a time."""
    for begin in range(0, len(trial_ids), PAGE):
        page = trial_ids[begin : begin + PAGE]
        if isinstance(storage, optuna.storages.RDBStorage):
            trials = storage._get_trials(study_id, None, set(page), LAST_ID)
        else:
            trials = [copy.deepcopy(storage.get_trial(trial_id)) for trial_id in page]
        by_id = {trial._trial_id: trial for trial in trials}
        yield from (by_id[trial_id] for trial_id in page)


def claim(storage: optuna.storages.BaseStorage, store: Store, name: str) -> None:
    """Raise StoreError where another store has a study of this name in the same database.

    One that nobody has signed is the store's if it is empty: its driver died when it had made it.
    """
    if not store.search_database:
        return
    try:
        study_id = storage.get_study_id_from_name(name)
    except KeyError:
        return
    owner = storage.get_study_user_attrs(study_id).get(OWNER)
    if owner is None and not storage.get_n_trials(study_id):
        storage.set_study_user_attr(study_id, OWNER, store.identity())
    elif owner != store.identity():
        raise StoreError(
            f"the PostgreSQL at {place_of(store.search_database)} has a study {name!r} of another store; give this one"
            " another name (--name), or the store a database of its own"
        )


PASSING = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
"""SQLite's messages where the machine is at fault; moving the file away would lose it for nothing."""


def _make_database(draft: Path) -> None:
    storage = optuna.storages.RDBStorage(sqlite_url(draft))
    storage.remove_session()
    storage.engine.dispose()


@contextmanager
def _readable(store: Store) -> Iterator[None]:
    """StoreError in the place of what Optuna and SQLAlchemy raise of a damaged database or another version's."""
    try:
        yield
    except RuntimeError:  # Optuna's check of the schema
        raise StoreError(
            f"{store.optuna_file}: was written by another version of Optuna, this is {optuna.__version__}; keep a copy"
            f" and run `optuna storage upgrade --storage {store.optuna_url}`, or install the version that wrote it"
        ) from None
    except (
        sqlalchemy.exc.SQLAlchemyError,
        optuna.exceptions.StorageInternalError,
        AssertionError,
        KeyError,
    ) as error:
        if store.search_database:
            raise StoreError(
                f"the PostgreSQL at {place_of(store.search_database)} does not answer ({first_line(error)});"
                f" see {OPTUNA_URL}, and that it runs, then do the same again"
            ) from None
        if _is_of_the_machine(error):
            raise StoreError(
                f"{store.optuna_file}: the database is whole as far as is known, but cannot be used now"
                f" ({first_line(error)}); see that its disk has room and may be written, then do the same again"
            ) from None
        raise StoreError(
            f"{store.optuna_file}: cannot be read as Optuna's database ({first_line(error)}); put a copy of it back, or"
            " move it away, and every search of this store begins anew"
        ) from None


@contextmanager
def storage_of_driver(
    store: Store, name: str, tell: Callable[[str], object], gives_up: Callable[[], bool]
) -> Iterator[optuna.storages.RDBStorage]:
    """The storage of a study's driver, for the time of the block; raises StoreError as ``open_storage`` and ``claim``.

    Where a PostgreSQL is waited for, ``gives_up`` ends that. A SQLite file is left without a log (``journal.at_rest``).
    """
    storage = open_storage(store, tell)
    if isinstance(storage, SharedStorage) and storage.patience is not None:
        storage.patience.gives_up = gives_up
    try:
        claim(storage, store, name)
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()
        if not store.search_database:
            journal.at_rest(store.optuna_file)


def to_disk(storage: optuna.storages.BaseStorage) -> None:
    """Make what was committed outlast a loss of power: two waits for the disk, about 20 ms.

    A database that synchronises each commit has done so before.
    """
    if _is_file(storage):
        with storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")


def number_of(storage: optuna.storages.BaseStorage, trial_id: int) -> int:
    """A trial's number, from a file without the rest of the trial, which Optuna would read in five queries."""
    if not _is_file(storage):
        return storage.get_trial(trial_id).number
    with storage.engine.connect() as connection:
        asked = connection.exec_driver_sql("SELECT number FROM trials WHERE trial_id = ?", (trial_id,))
        return int(asked.scalar_one())


def _is_file(storage: optuna.storages.BaseStorage) -> TypeGuard[optuna.storages.RDBStorage]:
    """True of SQLite."""
    return isinstance(storage, optuna.storages.RDBStorage) and storage.engine.dialect.name == "sqlite"


def _is_of_the_machine(error: BaseException | None) -> bool:
    """True if SQLite blames the disk, its permissions or another process, not the contents of the file."""
    while error is not None:
        code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
        if code is not None:
            return code & 0xFF in PASSING  # the rest says more about the same
        error = error.__cause__
    return False


def read_storage(store: Store) -> optuna.storages.RDBStorage:
    """The store's Optuna storage for one who only looks: opened to be read, where that can be done."""
    check_place(store)
    if store.search_database:
        return open_storage(store, is_for_a_look=True)
    url = f"sqlite:///file:{quote(str(store.optuna_file))}?mode=ro&uri=true"
    with _readable(store):
        try:
            return optuna.storages.RDBStorage(url, skip_table_creation=True)
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError):
            return open_storage(store)  # half made, or its last writer was killed and has left work to do


def trials_of(store: Store, name: str) -> list[FrozenTrial]:
    """The trials of a study's search; none where it has not begun."""
    storage = read_storage(store)
    with _readable(store):
        try:
            study_id = study_id_of(storage, store, name)
        except KeyError:
            return []
        return list(in_pages(storage, study_id, [mark.trial_id for mark in marks(storage, study_id)]))


def user_attrs_of(store: Store, name: str) -> dict[str, Any]:
    """The user attributes of a study of the store; none where its search has not begun."""
    if not store.has_searches:
        return {}
    storage = read_storage(store)
    with _readable(store):
        try:
            return dict(storage.get_study_user_attrs(study_id_of(storage, store, name)))
        except KeyError:
            return {}


def attrs_in(storage: optuna.storages.BaseStorage, name: str) -> dict[str, Any]:
    """The user attributes of a study in a storage; none where there is no such study."""
    try:
        return dict(storage.get_study_user_attrs(storage.get_study_id_from_name(name)))
    except KeyError:
        return {}


def _logs_ahead(connection: Any, _: object) -> None:
    if journal.write_ahead(connection):
        connection.execute("PRAGMA synchronous=NORMAL")


def _rolls_back(connection: Any, _: object) -> None:
    journal.roll_back(connection)
