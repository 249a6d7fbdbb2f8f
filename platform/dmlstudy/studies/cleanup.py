"""Deleting studies, and what killed commands have left."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmlstudy.files import DRAFT, FOLDER_DRAFT, MARK, TEMPORARY, draft_of, is_held
from dmlstudy.records import Record
from dmlstudy.store import (
    LOCK,
    SIDE_FILES,
    Store,
    StoreError,
    driver_drafts,
    sole_driver,
    sole_maker,
)


class Extent(Record):
    """Everything kept of a study and of its searches done again: in MLflow, in Optuna, and in files."""

    study: str
    searches: list[str]
    """Names of the studies that did its search again."""
    num_runs: int
    versions: list[str]
    in_use: list[str]
    """Those of the versions that have an alias, as a champion has."""
    num_trials: int
    num_bytes: int


class Leftover(Record):
    """Something that a command has left, and that nothing needs any more."""

    what: str
    path: str
    num_bytes: int


def extent(store: Store, name: str) -> Extent:
    """Find everything kept of a study; raises StoreError if there is nothing."""
    from dmlstudy.registry import deletion

    place = _served(store, name)
    found = deletion.held(place, name)
    num_trials = _num_trials(store, name)
    folders = [folder for folder in _folders(store, name) if folder.exists()]
    if not (found.experiment_ids or num_trials or folders):
        store.read_state(name)  # says which there are
    again = {each: extent(store, each) for each in _searches(store, name)}
    return Extent(
        study=name,
        searches=list(again),
        num_runs=len(found.run_ids) + sum(each.num_runs for each in again.values()),
        versions=[f"{each.name}/{each.version}" for each in found.versions],
        in_use=[f"{each.name}/{each.version}" for each in found.versions if each.aliases],
        num_trials=num_trials + sum(each.num_trials for each in again.values()),
        num_bytes=sum(map(size, folders)) + sum(each.num_bytes for each in again.values()),
    )


def delete(store: Store, name: str, *, with_models: bool = False) -> Extent:
    """Delete a study: its runs and registered versions, its search, its artifacts and its folder; what it was.

    The studies that did its search again go first. Killed in between, the same again deletes the rest.

    Raises StoreError where there is no such study, where it or a search of it runs, and where a version of its models
    is in use, unless ``with_models``.
    """
    was = extent(store, name)
    if was.in_use and not with_models:
        raise StoreError(
            f"study {name!r} has models in use (champion or challenger): {', '.join(was.in_use)}; promote others,"
            " or delete them with it: --models"
        )
    with sole_driver(store, name):
        for each in was.searches:
            with sole_driver(store, each):
                _delete(store, each)
        _delete(store, name)
    return was


def _delete(store: Store, name: str) -> None:
    """Delete one study, which this process holds."""
    from dmlstudy.registry import deletion

    place = _served(store, name)
    deletion.delete(place, name, deletion.held(place, name))
    if store.has_searches:
        _delete_search(store, name)
    _delete_states(store, name)
    own, artifacts = _folders(store, name)
    shutil.rmtree(artifacts, ignore_errors=True)
    # Its state goes last, for it says which server the study's runs are on.
    for path in sorted(own.iterdir(), key=lambda path: path.name == "study.json"):
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _searches(store: Store, name: str) -> list[str]:
    """The studies of the store that say that they did this one's search again."""
    found = []
    for each in store.studies():
        protocol = _state(store, each).get("spec", {}).get("protocol") or {}
        if (protocol.get("replicate_of") or {}).get("study") == name:
            found.append(each)
    return found


def _folders(store: Store, name: str) -> tuple[Path, Path]:
    return store.study_folder(name), store.root / "artifacts" / name


def _state(store: Store, name: str) -> dict[str, Any]:
    with suppress(StoreError):
        return store.read_state(name)
    return {}


def _served(store: Store, name: str) -> Store:
    return replace(store, server=store.server or _state(store, name).get("server"))


def _num_trials(store: Store, name: str) -> int:
    if not store.has_searches:
        return 0
    from dmlstudy.search.storage import trials_of

    return len(trials_of(store, name))


def _delete_search(store: Store, name: str) -> None:
    from dmlstudy.search.storage import open_storage, study_id_of

    storage = open_storage(store)
    with suppress(KeyError):
        storage.delete_study(study_id_of(storage, store, name))


def _delete_states(store: Store, name: str) -> None:
    """Delete the states of trials that lie elsewhere (``resources.storage_path``)."""
    root = (_state(store, name).get("spec", {}).get("resources") or {}).get("storage_path")
    if root:
        from dmlstudy.data import state_file

        state_file.at(state_file.join(str(root), name)).remove()


# What killed commands have left


def prune(
    store: Store,
    older_than_s: float,
    *,
    dry_run: bool = False,
    also: Iterable[Path] = (),
    with_parts: bool = False,
) -> list[Leftover]:
    """Delete what killed commands have left so long ago, and say what it was; with ``dry_run`` only say it.

    Drafts of the store and of studies without a driver, states of trials of finished studies, runs that were
    deleted in MLflow; in the folders ``also`` drafts of models, galleries, maps and files of results that no process
    holds, and ``with_parts`` the parts of an interrupted ``embed``, which could resume from them; temporary files, and
    meeting places of workers.

    Raises ValueError for a folder that is not there, and StoreError for a store that is not, where it was named.
    """
    also = list(also)
    for folder in also:
        if not folder.is_dir():
            raise ValueError(f"--also {folder}: no such folder")
    if "--store" in store.given and not store.root.is_dir():
        raise StoreError(f"no store in {store.root}; name another with --store")
    found = [
        *_old(_of_store(store), older_than_s),
        *_old(_elsewhere(also, with_parts), older_than_s),
    ]
    if not dry_run:
        for each in found:
            _remove(store, Path(each.path))
    return [*found, *_deleted_runs(store, older_than_s, dry_run)]


def _of_store(store: Store) -> Iterator[tuple[str, Path]]:
    files = [draft_of(store.root / name) for name in ("mlflow.db", "optuna.db", "store.id")]
    yield from (("draft of the store", Path(f"{path}{end}")) for path in files for end in ("", *SIDE_FILES))
    for folder in sorted((store.root / "studies").glob("*")):
        if store.driver(folder.name) is not None:
            continue
        yield from (("draft of a study", path) for path in driver_drafts(folder))
        if _state(store, folder.name).get("state") == "finished":
            yield "states of ended trials", folder / "checkpoints"


def _elsewhere(also: Iterable[Path], with_parts: bool) -> Iterator[tuple[str, Path]]:
    from dmlstudy.registry import drafts

    temporary = Path(tempfile.gettempdir())
    for what, begins in (("meeting place of workers", "dmlstudy-meeting-"), ("temporary files", TEMPORARY)):
        yield from ((what, path) for path in sorted(temporary.glob(f"{begins}*-*")) if _is_forsaken(path))
    for folder in also:
        yield from (
            ("draft of a model", path)
            for path in sorted(folder.glob(f"{drafts.PREFIX}*"))
            if drafts.is_left(path)
        )
        for what, pattern in (
            ("draft of a folder", f".*{FOLDER_DRAFT}"),
            ("draft of a file", f".*.{MARK}{DRAFT}"),
        ):
            yield from ((what, path) for path in sorted(folder.glob(pattern)) if not is_held(path))
        if with_parts:
            parts = sorted(path for path in folder.glob("*.parts") if (path / "job.json").is_file())
            yield from (("parts of an embed", path) for path in parts)


def _is_forsaken(folder: Path) -> bool:
    """True if the process that made it, whose id is in its name, is gone; it is in use while that lives."""
    pid = folder.name.split("-")[2]
    if not pid.isdigit() or folder.stat().st_uid != os.getuid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return False


def _old(found: Iterable[tuple[str, Path]], older_than_s: float) -> list[Leftover]:
    """Those not written to for so long."""
    before = time.time() - older_than_s
    return [
        Leftover(what=what, path=str(path), num_bytes=size(path))
        for what, path in found
        if path.exists() and _newest(path) <= before
    ]


def _remove(store: Store, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.parent == store.root:
        with sole_maker(store):  # so that it is not one that is being written
            path.unlink(missing_ok=True)
    else:
        path.unlink(missing_ok=True)


def _deleted_runs(store: Store, older_than_s: float, dry_run: bool) -> list[Leftover]:
    from dmlstudy.registry import deletion

    run_ids = deletion.deleted_runs(store, older_than_s)
    if not run_ids:
        return []
    freed = 0 if dry_run else deletion.forget_runs(store, run_ids)
    return [Leftover(what=f"{len(run_ids)} deleted runs", path=str(store.mlflow_file), num_bytes=freed)]


def _newest(path: Path) -> float:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    times = []
    for file in files:
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return max(times, default=0.0)


def size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def age(text: str) -> float:
    """Seconds of ``12h`` or ``7d``; raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise ValueError(f"--older-than {text}: expected a number and s, m, h or d, as 12h or 7d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def bytes_told(num: int) -> str:
    """``812 B``, ``1.4 KiB`` or ``3.0 GiB``."""
    amount, unit = float(num), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{num} B" if unit == "B" else f"{amount:.1f} {unit}"
