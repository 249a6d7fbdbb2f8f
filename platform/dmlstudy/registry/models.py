"""Registered models: register a winner, list, resolve a reference, pull a verified copy.

Listing waits for no torch: what needs a model imports it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.models import Model as MLmodel
from mlflow.models import ModelSignature
from numpy.typing import NDArray

from dmlstudy import model_folder
from dmlstudy.files import sha256, temporary_folder
from dmlstudy.records import Ancestor, Record
from dmlstudy.registry import ancestry, connection, drafts, runs, standalone_file
from dmlstudy.registry.card import usage
from dmlstudy.registry.environment import installed
from dmlstudy.saved import Model, is_model
from dmlstudy.saved.model import kind_of, notes_of
from dmlstudy.store import Store, StoreError
from dmlstudy.training.lineage import told

CHAMPION = "champion"
CARD = "card.md"

UNKNOWN = (400, 404)
"""MLflow's statuses for an unknown alias, and for an unknown model or version."""

TOLERANCE = 1e-3
"""By how much an example's embedding may differ on other hardware; a code may not at all."""

LOGGED = "model"
"""MLflow's name for a run's model and for its folder."""

VERSIONS = "mlflow.modelVersions"
"""MLflow's own tag of a logged model: the versions that it is registered as, which its page links to."""


class RegisteredVersion(Record):
    """One version of a registered embedder; ``model_id`` is MLflow's, of the logged model that it is a version of."""

    name: str
    version: int
    aliases: list[str]
    study: str
    family: str
    metrics: dict[str, float]
    sha256: str
    run_id: str
    model_id: str = ""
    objective: str = ""
    """The objective of its study; empty for old ones."""
    ancestry: tuple[Ancestor, ...] = ()
    """Its ancestors, nearest first; empty for old ones, and where no weights are started from."""
    seen: str = ""
    """The classes of its study that its start had seen, in words."""


def register(
    store: Store,
    name: str,
    fetch: Callable[[Path], Path],
    *,
    run_id: str,
    tags: Mapping[str, str],
    card: Callable[[Path], str],
    threshold: Mapping[str, Any] | None = None,
) -> RegisteredVersion:
    """Log the saved model that ``fetch`` brings into a folder as the run's MLflow model, and register it.

    Its ``card`` (Markdown, made of the model's folder) is kept in the folder and as the version's description, each
    with how it is used from there; its signature and input example are those of the example that was saved with it. It
    computes with MLflow and torch alone (``standalone``).

    A ``threshold`` (``description.ThresholdDescription``) is kept in the folder too.

    The version carries the SHA-256 of the folder's manifest, which lists that of every file: ``pull`` checks
    both; and the model's ancestry. What it is for ``promotion`` decides.

    Called again for the same run it writes what is missing and nothing twice, and fetches the model only if one of its
    files or its description is not there. Raises ValueError for a folder without an example.
    """
    client = connection.connect(store)
    model = _logged(client, run_id)
    with temporary_folder() as scratch:
        fetched = functools.cache(lambda: fetch(Path(scratch)))
        if model is None or model.status != LoggedModelStatus.READY or "sha256" not in model.tags:
            model = _log(client, model, run_id, fetched(), name, card, threshold)
        version = _of_run(client, name, run_id)
        if version is None:
            # There is one already, of an earlier study or just made by another.
            with contextlib.suppress(MlflowException):
                client.create_registered_model(name)
            version = client.create_model_version(
                name,
                f"models:/{model.model_id}",
                run_id,
                {**tags, **ancestry.tags(told(notes_of(fetched()))), "sha256": model.tags["sha256"]},
                model_id=model.model_id,
            )
        if VERSIONS not in model.tags:
            link = json.dumps([{"name": name, "version": int(version.version)}])
            client.set_logged_model_tags(model.model_id, {VERSIONS: link})
        if not version.description:
            signature = mlflow.models.get_model_info(f"models:/{model.model_id}").signature
            text = card(fetched())
            text += usage(name, int(version.version), *_formats(signature))
            client.update_model_version(name, version.version, text)
    return _version(client, client.get_model_version(name, version.version))


def _logged(client: mlflow.MlflowClient, run_id: str) -> Any | None:
    """The MLflow model of a run, complete or not; None where it was not begun."""
    experiment_id = runs.read(client, run_id).experiment_id
    query = f"source_run_id = '{run_id}' AND name = '{LOGGED}'"
    return next(iter(client.search_logged_models([experiment_id], query)), None)


def _log(
    client: mlflow.MlflowClient,
    begun: Any | None,
    run_id: str,
    folder: Path,
    name: str,
    card: Callable[[Path], str],
    threshold: Mapping[str, Any] | None,
) -> Any:
    """Write the model's files, into the one that was ``begun`` if there is one; it is ready when all are there."""
    kept = model_folder.read_example(folder)
    if kept is None:
        raise ValueError(f"{folder}: has no example; save the model with one")
    kind_of(folder).add_program(folder)
    example_N, z_N = kept
    signature = mlflow.models.infer_signature(example_N, z_N)
    text = card(folder) + usage(name, None, *_formats(signature))
    (folder / CARD).write_text(text, encoding="utf-8")
    if threshold is not None:
        model_folder.add_threshold(folder, threshold)
    model_folder.seal(folder)
    digest = sha256(folder / model_folder.MANIFEST)
    if begun is None:
        experiment_id = runs.read(client, run_id).experiment_id
        begun = client.create_logged_model(experiment_id, LOGGED, run_id, {"sha256": digest})
    else:
        client.set_logged_model_tags(begun.model_id, {"sha256": digest})
    with temporary_folder() as scratch:
        path = Path(scratch) / LOGGED
        _save(
            path,
            folder,
            signature,
            example_N,
            MLmodel(run_id=run_id, model_id=begun.model_id, model_uuid=begun.model_id),
        )
        client.log_model_artifacts(begun.model_id, str(path))
    if begun.model_id not in runs.read(client, run_id).models:
        client.log_outputs(run_id, [LoggedModelOutput(begun.model_id, 0)])
    client.finalize_logged_model(begun.model_id, LoggedModelStatus.READY)
    return client.get_logged_model(begun.model_id)


def _save(
    path: Path, folder: Path, signature: ModelSignature, example_N: NDArray[Any], about: MLmodel
) -> None:
    """The folder as a model of MLflow that needs nothing of ours."""
    with standalone_file.copied() as code:
        mlflow.pyfunc.save_model(
            path,
            loader_module=code.stem,
            data_path=str(folder),
            code_paths=[str(code)],
            mlflow_model=about,
            signature=signature,
            input_example=example_N,
            pip_requirements=requirements(),
        )


def requirements() -> list[str]:
    """Requirements of the MLflow model beside MLflow, as pip finds them: without a build's own label (+cu130)."""
    return [f"{name}=={version.partition('+')[0]}" for name, version in installed(("torch", "numpy")).items()]


def _formats(signature: ModelSignature) -> tuple[str, str]:
    """Input and output, each as ``uint8 (N, 8, 8, 1)``."""
    (entry,), (result,) = signature.inputs.inputs, signature.outputs.inputs
    return tuple(  # type: ignore[return-value]
        f"{each.type.name} ({', '.join(map(str, ('N', *each.shape[1:])))})" for each in (entry, result)
    )


def _of_run(client: mlflow.MlflowClient, name: str, run_id: str) -> Any | None:
    found = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    return min(found, key=lambda version: int(version.version), default=None)


@connection.in_one_line
def versions(store: Store, only: str | None = None) -> list[RegisteredVersion]:
    """Every version of every registered embedder in the store, or of the ``only`` one named, newest last."""
    client = connection.connect(store)
    names = [only] if only else sorted(model.name for model in client.search_registered_models())
    found = [v for name in names for v in client.search_model_versions(f"name = '{name}'")]
    detailed = [client.get_model_version(v.name, v.version) for v in found]
    return sorted((_version(client, v) for v in detailed), key=lambda v: (v.name, v.version))


@connection.in_one_line
def with_alias(store: Store, name: str, alias: str) -> RegisteredVersion | None:
    """The version of ``name`` that has the alias, if there is one."""
    client = connection.connect(store)
    try:
        return _version(client, client.get_model_version_by_alias(name, alias))
    except MlflowException as error:
        if error.get_http_status_code() not in UNKNOWN:  # type: ignore[no-untyped-call]
            raise
        return None


@connection.in_one_line
def resolve(store: Store, reference: str) -> RegisteredVersion:
    """The version that NAME, NAME@ALIAS or NAME/VERSION means (NAME alone: its champion).

    Raises StoreError naming what there is instead.
    """
    match = re.fullmatch(r"([^@/]+)(?:@([^@/]+)|/(\d+))?", reference)
    if match is None:
        raise StoreError(f"{reference!r}: expected NAME, NAME@ALIAS or NAME/VERSION")
    name, alias, number = match.groups()
    client = connection.connect(store)
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
    return _version(client, version)


@connection.in_one_line
def pull(store: Store, reference: str, to: Path, *, replace: bool = False) -> RegisteredVersion:
    """Copy a registered model into the folder ``to``, verified; with ``replace`` in place of a model that is there.

    The folder holds weights.safetensors, its description (``KINDS``), its program for torch alone, example.safetensors,
    card.md, manifest.json and, of a model that has a threshold, threshold.json. It is there whole or not at all.

    Raises StoreError where the folder exists already (with ``replace``: where it holds anything but a model),
    the model does not, a file is not what was registered or the model does not reproduce its example to
    ``TOLERANCE``; then ``to`` is left as it was.
    """
    to = to.absolute()
    drafts.check_place(to, replace=replace)
    version = resolve(store, reference)
    to.parent.mkdir(parents=True, exist_ok=True)
    with drafts.draft(to) as scratch:
        drafts.put(_fetched(reference, version, scratch).folder, to, replace=replace)
    return version


def _fetched(
    reference: str, version: RegisteredVersion, scratch: Path, device: str = "cpu", batch_size: int = 256
) -> Model:
    """The model, opened below ``scratch`` and loaded, for the folder may not stay; raises StoreError."""
    try:
        path = mlflow.artifacts.download_artifacts(
            f"models:/{version.name}/{version.version}", dst_path=str(scratch)
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
    try:
        model = Model.open(
            folder, device=device, batch_size=batch_size, name=reference, fingerprint=version.sha256
        )
        compute = model.loaded.compute
        # Both the network and the example are in memory from now on.
        deviation = 0.0 if model.example is None else model_folder.deviation(model.example, compute)
    except ValueError as error:
        raise StoreError(f"{reference}: {error}") from None
    if not deviation <= TOLERANCE:
        raise StoreError(
            f"{reference}: makes other numbers of its own example here, by {deviation:.1e};"
            " compare the package versions with those it was trained with"
        )
    return model


@contextmanager
def fetched(store: Store, reference: str, *, device: str = "cpu", batch_size: int = 256) -> Iterator[Model]:
    """A model, opened: from a folder that was pulled or, by a registered reference, from a copy for the time being.

    Raises ValueError naming the file at fault, and StoreError as ``pull``.
    """
    if is_model(reference):
        yield Model.open(reference, device=device, batch_size=batch_size)
        return
    with temporary_folder() as scratch:
        yield _opened(store, reference, Path(scratch), device, batch_size)


@connection.in_one_line
def _opened(store: Store, reference: str, scratch: Path, device: str, batch_size: int) -> Model:
    return _fetched(reference, resolve(store, reference), scratch, device, batch_size)


def _version(client: mlflow.MlflowClient, version: Any) -> RegisteredVersion:
    tags = version.tags
    logged = re.fullmatch(r"models:/(m-[0-9a-f]+)", version.source or "")
    model_id = logged[1] if logged else ""
    metrics = {
        name.removeprefix("metric_"): float(value)
        for name, value in tags.items()
        if name.startswith("metric_")
    }
    return RegisteredVersion(
        name=version.name,
        version=int(version.version),
        aliases=list(version.aliases or []),
        study=tags.get("study", ""),
        family=tags.get("family", ""),
        metrics=metrics or _scores(client, model_id),  # versions of old have their scores as tags
        sha256=tags.get("sha256", ""),
        run_id=version.run_id or "",
        model_id=model_id,
        objective=tags.get("objective", ""),
        ancestry=ancestry.of_tags(tags),
        seen=tags.get(ancestry.SEEN, ""),
    )


def _scores(client: mlflow.MlflowClient, model_id: str) -> dict[str, float]:
    """The metrics of a logged model; empty where it is not there any more."""
    try:
        noted = client.get_logged_model(model_id).metrics if model_id else None
    except MlflowException as error:
        if error.get_http_status_code() not in UNKNOWN:  # type: ignore[no-untyped-call]
            raise
        noted = None
    return {metric.key: metric.value for metric in noted or []}
