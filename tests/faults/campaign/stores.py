"""What a store holds of a study, without what differs from one run of it to the next, and how two stores differ."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dmlstudy.files import sha256
from dmlstudy.store import SIDE_FILES

from ..conftest import DMLSTUDY, trials_of

STUDY = "tiny"
Contents = dict[str, Any]

COUNTS = {"finished", "pruned", "failed"}
"""Statuses of runs that count; those that a kill has interrupted remain beside them."""

OF_ONE_RUN = {"images_per_second", "embed_ms_per_image", "energy_wh"}
"""Metrics that are times or rates."""

OF_LEADERS = "/validation_classes.parquet"
"""Search trials keep it that were the best when they ended, and of several at once any may end first."""

COMPARED_TAGS = {
    "comparison",
    "config_fingerprint",
    "decision",
    "dmlstudy_kind",
    "family",
    "model",
    "objective",
    "objective_values",
    "rank",
    "reason",
    "seed",
    "spec_fingerprint",
    "start",
    "status",
    "thresholds",
    "trial_number",
    "units_sha256",
    "winner",
}


def asked(store: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of the store's MLflow; none where it has no database yet."""
    path = store / "mlflow.db"
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as database:
        return database.execute(query).fetchall()


def rows_of_runs(store: Path, query: str) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of the store's MLflow by their first column, a run, without it."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for run, *row in asked(store, query):
        found.setdefault(run, []).append(tuple(row))
    return found


POINTS = "SELECT run_uuid, key, step, value, is_nan FROM metrics ORDER BY 1, 2, 3, 4"


def tags_of(store: Path) -> dict[str, dict[str, str]]:
    """The tags of each run."""
    return {
        run: dict(tags) for run, tags in rows_of_runs(store, "SELECT run_uuid, key, value FROM tags").items()
    }


def ended(store: Path) -> dict[str, tuple[str, tuple[tuple[Any, ...], ...]]]:
    """Status and metrics of each run of a trial that has ended for good."""
    tags = {
        run: own
        for run, own in tags_of(store).items()
        if own.get("dmlstudy_kind") in ("search", "verdict") and own.get("status") in COUNTS
    }
    metrics = rows_of_runs(store, POINTS)  # after the tags, for a driver writes both at once meanwhile
    return {run: (own["status"], tuple(metrics.get(run, []))) for run, own in tags.items()}


def contents(store: Path) -> Contents:
    """What there is of the study: runs, registered versions, searches, files and leaderboard, as JSON would have it."""
    files = sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())
    names = dict(_named(store))
    found = {
        "runs": _runs(store, names),
        "runs left open": [row[0] for row in asked(store, "SELECT name FROM runs WHERE status = 'RUNNING'")],
        "versions": _versions(store, names),
        "logged models": sorted(
            [names.get(run, run), status]
            for run, status in asked(store, "SELECT source_run_id, status FROM logged_models")
        ),
        "search": [
            [t.number, t.state.name, t.params, t.values, t.intermediate_values]
            for t in trials_of(store, STUDY)
        ],
        "files": _files(store, files, names),
        "state": json.loads((store / "studies" / STUDY / "study.json").read_text())["state"],
    }
    return dict(json.loads(json.dumps(found)))


def opened(store: Path) -> Contents:
    """What commands say that open the store: the leaderboard, and the state of studies."""
    said: Contents = {}
    for name, arguments in {"leaderboard": ["leaderboard", STUDY], "status": ["status"]}.items():
        command = [*DMLSTUDY, *arguments, "--json", "--store", str(store)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said[f"{name} refused"] = done.stderr
        elif name == "leaderboard":
            said[name] = json.loads(done.stdout)
    return said


def _named(store: Path) -> Iterator[tuple[str, str]]:
    """Run ids, with names by which the same runs of another store are called."""
    for run, tags in tags_of(store).items():
        words = [tags.get(key, "") for key in ("dmlstudy_kind", "family", "seed", "trial_number", "fold")]
        if tags.get("status") in COUNTS or words[0] not in ("search", "verdict"):
            yield run, " ".join(words).strip()


def _runs(store: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """By name, what the runs that count hold."""
    tags = tags_of(store)
    metrics = rows_of_runs(store, POINTS)
    params = rows_of_runs(store, "SELECT run_uuid, key, value FROM params ORDER BY 1, 2")
    status = dict(asked(store, "SELECT run_uuid, status FROM runs"))
    doubles = [name for name, count in Counter(names.values()).items() if count > 1]
    found: dict[str, Any] = {f"twice: {name}": True for name in doubles}
    for run, name in names.items():
        found[name] = {
            "tags": {
                key: value
                for key, value in tags[run].items()
                if key in COMPARED_TAGS and (key, tags[run]["dmlstudy_kind"]) != ("units_sha256", "search")
            },
            "metrics": [point for point in metrics.get(run, []) if point[0] not in OF_ONE_RUN],
            "params": params.get(run, []),
            "status": status[run],
        }
    return found


def _versions(store: Path, names: Mapping[str, str]) -> list[Any]:
    """The registered versions, with the digests of their weights and their aliases."""
    aliases: dict[tuple[str, int], list[str]] = {}
    for alias, name, version in asked(
        store, "SELECT alias, name, version FROM registered_model_aliases ORDER BY 1"
    ):
        aliases.setdefault((name, version), []).append(alias)
    query = "SELECT name, version, run_id, source, status, length(description) > 0 FROM model_versions ORDER BY 1, 2"
    return [
        [
            name,
            version,
            names.get(run, run),
            status,
            told,
            aliases.get((name, version), []),
            _weights(store, source),
        ]
        for name, version, run, source, status, told in asked(store, query)
    ]


def _weights(store: Path, source: str) -> list[str]:
    folder = store / "artifacts" / STUDY / "models" / source.removeprefix("models:/")
    return [sha256(path) for path in sorted(folder.rglob("weights.safetensors"))]


def _files(store: Path, files: list[str], names: Mapping[str, str]) -> list[str]:
    """Paths of files, without those of interrupted runs and of Ray's sessions; a run's id in them is its name."""
    runs = {row[0] for row in asked(store, "SELECT run_uuid FROM runs")}
    models = dict(asked(store, "SELECT model_id, source_run_id FROM logged_models"))
    found = set()
    for file in files:
        ids = [part for part in file.split("/") if re.fullmatch(r"(m-)?[0-9a-f]{32}", part)]
        run = models.get(ids[0], ids[0]) if ids else ""
        is_of_kill = run in runs and run not in names
        if is_of_kill or file.startswith(f"studies/{STUDY}/ray/") or file.endswith((*SIDE_FILES, OF_LEADERS)):
            continue
        named = file.replace(ids[0], names.get(run, "unknown")) if ids else file
        found.add(re.sub(r"/environment(-\d+)?\.json$", "/environment.json", named))
    return sorted(found)


def differences(broken: Contents, whole: Contents) -> list[str]:
    """Lines on what differs; none where both are alike."""
    found: list[str] = []
    for key in sorted(broken.keys() | whole.keys()):
        found += _differing(key, broken.get(key), whole.get(key))
    return found


def _differing(where: str, here: Any, there: Any) -> list[str]:
    if here == there:
        return []
    if isinstance(here, dict) and isinstance(there, dict):
        keys = sorted(here.keys() | there.keys(), key=str)
        return [line for key in keys for line in _differing(f"{where}: {key}", here.get(key), there.get(key))]
    if isinstance(here, list) and isinstance(there, list):
        more = [each for each in here if each not in there]
        less = [each for each in there if each not in here]
        if more or less:
            return [f"{where}: more {_short(more)}, less {_short(less)}"]
        return [f"{where}: {len(here)} in place of {len(there)}, or in another order"]
    return [f"{where}: {_short(here)} in place of {_short(there)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
