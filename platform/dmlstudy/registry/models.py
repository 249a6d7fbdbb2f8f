"""Registered models: register a winner, list, resolve a reference, pull a verified copy.

Listing waits for no torch: what needs a model imports it.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from dmlstudy import model_folder
from dmlstudy.records import Record
from dmlstudy.registry import kinds, tracking
from dmlstudy.registry.environment import installed
from dmlstudy.registry.store import Store, StoreError

CHAMPION = "champion"
CARD = "card.md"

UNKNOWN = (400, 404)
"""What MLflow answers of an alias, and of a model or version, that it does not know."""

TOLERANCE = 1e-3
"""By how much an example's embedding may differ on other hardware; a code may not at all."""


class RegisteredVersion(Record):
    """One version of a registered embedder."""

    name: str
    version: int
    aliases: list[str]
    study: str
    family: str
    metrics: dict[str, float]
    sha256: str
    run_id: str


def register(
    store: Store,
    name: str,
    folder: Path,
    *,
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    card: str,
) -> RegisteredVersion:
    """Log the saved model in ``folder`` as the run's MLflow model, and register it.

    Its ``card`` (Markdown) is kept in the folder and as the version's description; its signature and input example are
    those of the example that was saved with it. The registered version carries the SHA-256 of the folder's manifest,
    which lists the SHA-256 of every file: ``pull`` checks both. What it is for ``promotion`` decides. Killed before the
    end it leaves a version that ``note_scores`` completes, or none.
    Raises ValueError for a folder without an example.
    """
    from mlflow.models import infer_signature

    kind = kinds.kind_of(folder)
    example_N = model_folder.example(folder)
    if example_N is None:
        raise ValueError(f"{folder}: has no example; save the model with one")
    if kind.add_program is not None:
        kind.add_program(folder)
    (folder / CARD).write_text(card)
    model_folder.seal(folder)
    compute = kinds.verified(folder)
    digest = _sha256(folder / "manifest.json")
    tracking.connect(store)
    signature = infer_signature(example_N, compute(example_N))
    with _run(run_id):
        info = mlflow.pyfunc.log_model(
            name="model",
            loader_module="dmlstudy.registry.pyfunc",
            data_path=str(folder),
            signature=signature,
            input_example=example_N,
            pip_requirements=_requirements(),
        )
    version = mlflow.register_model(info.model_uri, name, tags={**tags, "sha256": digest})
    mlflow.MlflowClient().update_model_version(name, version.version, card)
    return note_scores(store, name, int(version.version), metrics)


def note_scores(store: Store, name: str, number: int, metrics: Mapping[str, float]) -> RegisteredVersion:
    """Note a version's scores with it; once more changes nothing."""
    client = tracking.connect(store)
    for metric, value in metrics.items():
        client.set_model_version_tag(name, str(number), f"metric_{metric}", f"{value:.6f}")
    return _version(client.get_model_version(name, str(number)))


def of_run(store: Store, name: str, run_id: str) -> RegisteredVersion | None:
    """The version of ``name`` that was registered from this run, if there is one."""
    return next((v for v in versions(store) if v.name == name and v.run_id == run_id), None)


@tracking.in_one_line
def versions(store: Store) -> list[RegisteredVersion]:
    """Every version of every registered embedder in the store, newest last."""
    client = tracking.connect(store)
    names = sorted(model.name for model in client.search_registered_models())
    found = [v for name in names for v in client.search_model_versions(f"name = '{name}'")]
    detailed = [client.get_model_version(v.name, v.version) for v in found]
    return sorted((_version(v) for v in detailed), key=lambda v: (v.name, v.version))


@tracking.in_one_line
def resolve(store: Store, reference: str) -> RegisteredVersion:
    """The version that NAME, NAME@ALIAS or NAME/VERSION means (NAME alone: its champion).

    Raises StoreError naming what there is instead.
    """
    match = re.fullmatch(r"([^@/]+)(?:@([^@/]+)|/(\d+))?", reference)
    if match is None:
        raise StoreError(f"{reference!r}: expected NAME, NAME@ALIAS or NAME/VERSION")
    name, alias, number = match.groups()
    client = tracking.connect(store)
    try:
        if number:
            version = client.get_model_version(name, number)
        else:
            version = client.get_model_version_by_alias(name, alias or CHAMPION)
    except MlflowException as error:
        if error.get_http_status_code() not in UNKNOWN:  # type: ignore[no-untyped-call]
            raise
        known = [f"{v.name}/{v.version}" + "".join(f" @{a}" for a in v.aliases) for v in versions(store)]
        there = f"there are: {', '.join(known)}" if known else "none is registered yet"
        raise StoreError(f"no model {reference!r} in the store {store.tracking_uri}; {there}") from None
    return _version(version)


@tracking.in_one_line
def pull(store: Store, reference: str, to: Path) -> RegisteredVersion:
    """Copy a registered model into the new folder ``to``, verified.

    The folder holds weights.safetensors, its description (``kinds``), example.safetensors, manifest.json and, of an
    embedder, embedder.pt2.
    Raises StoreError where the folder exists already, the model does not, a file is not what was registered
    or the model does not reproduce its example to ``TOLERANCE``; then ``to`` is not made.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise StoreError(f"{to}: exists already; name a new folder with --to")
    version = resolve(store, reference)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".pull-") as draft:
        try:
            path = mlflow.artifacts.download_artifacts(
                f"models:/{version.name}/{version.version}", dst_path=draft
            )
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(
                f"{reference}: its files cannot be fetched ({reason}); see that its store is there"
            ) from None
        manifests = sorted(Path(path).glob("**/manifest.json"))
        if not manifests:
            raise StoreError(f"{reference}: is no model of dmlstudy (it has no manifest.json)")
        folder = manifests[0].parent
        if _sha256(folder / "manifest.json") != version.sha256:
            raise StoreError(f"{reference}: manifest.json is not the one that was registered; do not use it")
        try:
            deviation = model_folder.largest_deviation(folder, kinds.verified(folder)) or 0.0
        except ValueError as error:
            raise StoreError(f"{reference}: {error}") from None
        if not deviation <= TOLERANCE:
            raise StoreError(
                f"{reference}: makes other numbers of its own example here, by {deviation:.1e};"
                " compare the package versions with those it was trained with"
            )
        if to.exists():
            to.rmdir()
        os.replace(folder, to)
    return version


@contextmanager
def fetched(store: Store, reference: str) -> Iterator[Path]:
    """A verified copy of a model for the time being: a folder that was pulled, or a registered reference."""
    if kinds.is_model(reference):
        model_folder.verify(reference)
        yield Path(reference)
        return
    with tempfile.TemporaryDirectory() as scratch:
        pull(store, reference, Path(scratch) / "model")
        yield Path(scratch) / "model"


@contextmanager
def _run(run_id: str) -> Iterator[None]:
    """Log into a run that has ended, and leave it ended as it was."""
    client = mlflow.MlflowClient()
    before = client.get_run(run_id).info
    try:
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        client.set_terminated(run_id, before.status, before.end_time)


def _version(version: Any) -> RegisteredVersion:
    tags = version.tags
    return RegisteredVersion(
        name=version.name,
        version=int(version.version),
        aliases=list(version.aliases or []),
        study=tags.get("study", ""),
        family=tags.get("family", ""),
        metrics={
            name.removeprefix("metric_"): float(value)
            for name, value in tags.items()
            if name.startswith("metric_")
        },
        sha256=tags.get("sha256", ""),
        run_id=version.run_id or "",
    )


def _requirements() -> list[str]:
    names = ("torch", "torchvision", "safetensors", "numpy", "dmlstudy")
    return [f"{name}=={version}" for name, version in installed(names).items()]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
