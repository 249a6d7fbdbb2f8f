"""The weights that a study starts from, settled once by its driver: a version, a copy, a digest, an ancestry.

Workers have no registry: a registered model is copied into the study's folder, or below ``resources.storage_path``
where that is a folder, and they load the copy. A study that is resumed keeps the versions it began with, wherever their
aliases point by then; weights that have changed since are refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dmlstudy import embedders
from dmlstudy.data import ZeroShotData, known_classes
from dmlstudy.embedders import starting, weights
from dmlstudy.embedders.backbones import TIMM, build_backbone
from dmlstudy.embedders.hub import DEFAULT, entry_of
from dmlstudy.files import temporary_folder
from dmlstudy.model_folder import read_extra, verify
from dmlstudy.records import REGISTERED, Ancestor, EmbedderConfig, StartConfig
from dmlstudy.registry import models
from dmlstudy.saved import is_model
from dmlstudy.spec import registered
from dmlstudy.spec.registered import Reference
from dmlstudy.spec.study_file import SpecError, StudySpec, default_values
from dmlstudy.store import Store, StoreError
from dmlstudy.text import first_line
from dmlstudy.training.interface import TrialData
from dmlstudy.training.lineage import RANDOM, SHOWN, facts, in_words, kept

FOLDER = "starts"
"""The folder of copies of registered models."""

UNTOLD = "was saved by an earlier version, which does not tell the classes it was trained on"
"""Said of a start whose notes name no classes."""


class Present(NamedTuple):
    """A study's data as starts are compared with it: the images' shape, and the classes of both sides."""

    image_shape: tuple[int, ...]
    development: known_classes.Known
    test: known_classes.Known


def present(spec: StudySpec, dataset: TrialData) -> Present | None:
    """The same of a data set; None where no embedder of the study starts from given weights."""
    if not isinstance(dataset, ZeroShotData) or not _wanted(spec):
        return None
    sides = (known_classes.of_images(side) for side in (dataset.development, dataset.test))
    return Present(dataset.development.image_shape, *sides)


def settle(spec: StudySpec, store: Store, found: Present | None) -> list[str]:
    """Have the study's trials start from what its weights stand for now, or stood for when it began.

    Returns lines for people. Raises SpecError for a model that is not there or of another backbone, and StoreError
    where weights are others than when the study began.
    """
    if found is None:
        return []
    state = store.read_state(spec.name) if spec.name in store.studies() else {}
    before = {(each["backbone"], each["weights"]): each["start"] for each in state.get("starts", [])}
    return _settle(spec, store, found, _copies(spec, store), before, is_fetched=True)


@contextmanager
def looked_at(spec: StudySpec, store: Store, found: Present | None) -> Iterator[list[str]]:
    """The same for a study that is only validated: copies are gone after the block, and no hub is asked."""
    with temporary_folder() as scratch:
        yield [] if found is None else _settle(spec, store, found, Path(scratch), {}, is_fetched=False)
        spec.starts.clear()


def entries(spec: StudySpec) -> list[dict[str, Any]]:
    """The settled starts as study.json keeps them."""
    return [
        {"backbone": backbone, "weights": written, "start": start.model_dump()}
        for (backbone, written), start in spec.starts.items()
    ]


def remove_copies(spec: StudySpec, store: Store) -> None:
    """Remove the copies of registered models, which no trial needs any more."""
    shutil.rmtree(_copies(spec, store), ignore_errors=True)


def _copies(spec: StudySpec, store: Store) -> Path:
    root = spec.file.resources.storage_path
    own = Path(root) / spec.name if root and "://" not in root else store.study_folder(spec.name)
    return own / FOLDER


def _wanted(spec: StudySpec) -> dict[tuple[str, str], EmbedderConfig]:
    """An embedder of each backbone and weights that the families' spaces allow at their defaults and bounds."""
    if "embedder" not in spec.task.sections:
        return {}
    configs = (
        spec.trial_config(family, values).embedder
        for family in spec.families.values()
        for values in spec.corners(family)
    )
    return {(each.backbone, each.weights): each for each in configs if each.weights is not None}


def _settle(
    spec: StudySpec,
    store: Store,
    found: Present,
    copies: Path,
    before: dict[tuple[str, str], dict[str, Any]],
    *,
    is_fetched: bool,
) -> list[str]:
    """Fill ``spec.starts``; a hub's entries are fetched, and so have a digest, if ``is_fetched``."""
    lines: list[str] = []
    for key, embedder in _wanted(spec).items():
        try:
            if key in before:
                start = _again(spec.name, StartConfig.model_validate(before[key]), store, copies)
            else:
                start = _begun(embedder, store, found, copies, is_fetched=is_fetched)
        except StoreError:
            raise
        except ValueError as error:
            raise SpecError(error) from None
        spec.starts[key] = start
        lines += _lines(spec, key, start)
    return list(dict.fromkeys(lines))


def _begun(
    embedder: EmbedderConfig, store: Store, found: Present, copies: Path, *, is_fetched: bool
) -> StartConfig:
    """The start that a new study's weights stand for at this moment."""
    written = embedder.weights
    assert written is not None
    if written.startswith(REGISTERED):
        reference = registered.parse(written)
        version = models.resolve(_store_of(reference, store), reference.model)
        fixed = reference._replace(model=f"{version.name}/{version.version}")
        return _of_folder(embedder, _copied(fixed, store, copies), str(fixed), found)
    path = Path(written)
    if path.is_dir():
        return _of_folder(embedder, path, written, found)
    if path.is_file():
        return StartConfig(source=written, sha256=weights.digest(weights.read(path)), place=written)
    return _of_hub(embedder, found, is_fetched=is_fetched)


def _again(study: str, start: StartConfig, store: Store, copies: Path) -> StartConfig:
    """The start a study began with, copied anew if the copy is gone.

    Raises StoreError where its weights are others now.
    """
    if start.place is None:
        return start  # each trial compares what it is given by the hub
    place = Path(start.place)
    if start.source.startswith(REGISTERED):
        place = copies / place.name
        if _difference(start, place) is not None:  # the registry may have lost the version that a copy is of
            place = _copied(registered.parse(start.source), store, copies)
    difference = _difference(start, place)
    if difference is not None:
        raise StoreError(
            f"study {study!r}: embedder.weights: {start.source} is not what the study began with ({difference});"
            " bring it back, or give this study another name (--name)"
        )
    return start.model_copy(update={"place": str(place)})


def _difference(start: StartConfig, place: Path) -> str | None:
    """Words on how a file or folder differs from what a study began with; None where it does not."""
    try:
        if place.is_dir():
            saved = weights.saved_parts(place)
            now, head_now = weights.digest(saved.backbone), saved.head_sha256
        else:
            now, head_now = weights.digest(weights.read(place)), ""
    except ValueError as error:
        return f"SHA-256 {start.sha256[:SHOWN]} then, now {first_line(error)}"
    if now != start.sha256:
        return f"SHA-256 {start.sha256[:SHOWN]} then, now {now[:SHOWN]}"
    if start.head_sha256 and head_now != start.head_sha256:
        return f"head and normalisation: SHA-256 {start.head_sha256[:SHOWN]} then, now {head_now[:SHOWN]}"
    return None


def _store_of(reference: Reference, own: Store) -> Store:
    if reference.store:
        return Store(Path(reference.store))
    return Store(own.root, reference.server) if reference.server else own


def _copied(fixed: Reference, own: Store, copies: Path) -> Path:
    """The folder of a registered version, copied and verified if it is not there as it was registered."""
    store = _store_of(fixed, own)
    version = models.resolve(store, fixed.model)
    folder = copies / f"{version.name}-{version.version}-{version.sha256[:SHOWN]}"
    if is_model(folder):
        try:
            verify(folder, fingerprint=version.sha256)
            return folder
        except ValueError:
            shutil.rmtree(folder, ignore_errors=True)  # its own copy, edited or torn
    models.pull(store, fixed.model, folder)
    return folder


def _of_folder(embedder: EmbedderConfig, folder: Path, source: str, found: Present) -> StartConfig:
    saved = weights.saved_parts(folder)
    is_timm = embedder.backbone.startswith(TIMM) and saved.architecture.backbone.startswith(TIMM)
    if saved.architecture.backbone != embedder.backbone and not is_timm:
        raise ValueError(
            f"embedder.weights: {source} has the backbone {saved.architecture.backbone}, and embedder.backbone is"
            f" {embedder.backbone}; set that to {saved.architecture.backbone}, or name another model"
        )
    about = kept(read_extra(folder / weights.EMBEDDER), source)
    known = about.trained_classes
    return StartConfig(
        source=source,
        sha256=weights.digest(saved.backbone),
        head_sha256=saved.head_sha256,
        place=str(folder),
        ancestors=about.start or (Ancestor(source=saved.architecture.weights or RANDOM),),
        seen=UNTOLD if known is None else known_classes.told(known, found.development, found.test),
        **about.trained_on_facts(),
    )


def _of_hub(embedder: EmbedderConfig, found: Present, *, is_fetched: bool) -> StartConfig:
    """A hub's entry, with its digest if this machine can have it; a file that is not there is refused."""
    written = embedder.weights
    assert written is not None
    if not _is_of_hub(embedder.backbone, written):
        weights.read(Path(written))  # which says that there is no such file
    source = f"{written} of {embedder.backbone}"
    stated = entry_of(embedder.backbone, written)._asdict()
    if not is_fetched:
        return StartConfig(source=source, **stated)
    *height_width, channels = found.image_shape
    try:
        built = build_backbone(embedder.backbone, channels, embedder.width, written, tuple(height_width))
    except ValueError:  # there is no network here, or no room; workers may have both
        return StartConfig(source=source, **stated)
    stated = entry_of(embedder.backbone, written, built.network)._asdict()
    return StartConfig(source=source, sha256=built.sha256 or "", **stated)


def _is_of_hub(backbone: str, written: str) -> bool:
    if written == DEFAULT:
        return True
    if backbone in embedders.BACKBONES or backbone.startswith(TIMM):
        return False
    from torchvision.models import get_model_weights  # type: ignore[import-untyped]

    return written in get_model_weights(backbone).__members__


def _lines(spec: StudySpec, key: tuple[str, str], start: StartConfig) -> Sequence[str]:
    """Lines on a start: its origin, the fate of its head, and the classes that it has seen."""
    _, written = key
    is_saved = start.place is not None and Path(start.place).is_dir()
    what = in_words(start.lineage)
    head = f"; {_head(spec, key, Path(str(start.place)))}" if is_saved else ""
    of_hub = f"; {facts(start)}" if start.entry else ""
    lines = [f"embedder.weights: {written} is {what}{of_hub}{head}"]
    if start.seen:
        lines.append(f"note: embedder.weights: {start.source} {start.seen}")
    return lines


def _head(spec: StudySpec, key: tuple[str, str], folder: Path) -> str:
    """The fate of a saved model's head in the first family that starts from it by default."""
    saved = weights.saved_parts(folder).architecture
    for family in spec.families.values():
        config = spec.trial_config(family, default_values(family)).embedder
        if (config.backbone, config.weights) == key:
            others = starting.differing(saved, config)
            return f"its head is new ({', '.join(others)})" if others else "its head is kept"
    return "its head is kept where its settings are those of the trial"
