"""A model published: in a folder, or in a repository of Hugging Face's hub, as other libraries read it.

``timm`` and ``transformers`` find a timm model where the backbone has one (``embedders.timm_twin``),
``sentence_transformers`` its own modules, or with ``with_code`` a module that reads pictures exactly as dmlstudy does.
Each form that is written was compared with the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data import Fit, preprocessing
from dmlstudy.embedders import Embedder
from dmlstudy.embedders.timm_twin import TimmTwin, twin
from dmlstudy.files import temporary_folder
from dmlstudy.registry.drafts import draft, put
from dmlstudy.saved import Model
from dmlstudy.serving import sentence_form, timm_form
from dmlstudy.serving.export import export
from dmlstudy.serving.hub_card import README, hub_card
from dmlstudy.text import first_line

HUB = "hub:"

TOLERANCE = 1e-6
"""Largest difference of a number from the model's, as a share of the largest number where that is above 1."""

OURS = (
    timm_form.CONFIG,
    timm_form.WEIGHTS,
    sentence_form.CODE,
    sentence_form.PROGRAM,
    sentence_form.MODULES,
    sentence_form.TRANSFORMER,
    sentence_form.SETTINGS,
    f"{sentence_form.DENSE}/*",
    f"{sentence_form.NORMALIZE}/*",
)
"""Files of earlier uploads that are deleted where a new one has none of the name."""


class Target(NamedTuple):
    """A folder to be made, or a repository of the hub."""

    folder: Path | None
    repository: str = ""

    @classmethod
    def of(cls, text: str) -> Target:
        """Of ``hub:OWNER/REPOSITORY`` or a folder. Raises ValueError for another repository."""
        if not text.startswith(HUB):
            return cls(Path(text).absolute())
        repository = text.removeprefix(HUB)
        # A name of the hub is at most 96 characters, and holds no -- and no ..
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII) or re.search(r"--|\.\.", repository):
            raise ValueError(f"--to {text}: names no repository; write {HUB}OWNER/REPOSITORY")
        return cls(None, repository)

    def __str__(self) -> str:
        return f"{HUB}{self.repository}" if self.folder is None else str(self.folder)


class Published(NamedTuple):
    """The files and their sizes in bytes, the libraries that read them, and notes for people.

    ``difference`` is the largest from the model; ``url`` is the hub's.
    """

    files: dict[str, int]
    libraries: tuple[str, ...]
    notes: tuple[str, ...]
    difference: float
    url: str = ""


Upload = Callable[[Path, str, bool], str]


def publish(
    model: Model,
    target: Target,
    *,
    with_code: bool = False,
    licence: str | None = None,
    is_public: bool = False,
    is_dry: bool = False,
    upload: Upload | None = None,
) -> Published:
    """Write a model that is on the CPU to ``target``, whole or not at all; ``is_dry`` writes nothing there.

    ``licence`` is an identifier of the hub, such as ``mit``. A repository that is made is private unless
    ``is_public``. ``upload`` is ``to_hub``, or does what that would.

    Raises ValueError for a model that takes no pictures, one that needs ``with_code``, a folder that is there already,
    and, naming the difference, for files that compute other numbers.
    """
    if model.kind != "embedder" or model.takes.image_size is None:
        raise ValueError(
            f"{model.name}: takes vectors, and timm, transformers and sentence-transformers take pictures; write it as"
            " one file with `dmlstudy export`"
        )
    if target.folder is not None:
        _check_place(target.folder, model)
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", licence):
        raise ValueError(
            f"--license {licence}: is no identifier of the hub; write one as mit or cc-by-nc-4.0"
        )
    with temporary_folder() as scratch:
        folder = Path(scratch)
        made = _written(folder, model, target, with_code, licence)
        if is_dry:
            return made
        if target.folder is None:
            url = (upload or to_hub)(folder, target.repository, is_public)
            return made._replace(url=url)
        target.folder.parent.mkdir(parents=True, exist_ok=True)
        with draft(target.folder) as place:
            for name in made.files:
                (place / name).parent.mkdir(exist_ok=True)
                (place / name).write_bytes((folder / name).read_bytes())
            put(place, target.folder, replace=False)
    return made


def to_hub(folder: Path, repository: str, is_public: bool) -> str:
    """Upload a folder's files to a repository, made if missing, in one commit; returns its address.

    Who may is told by ``hf auth login`` or HF_TOKEN. Raises ValueError, with the hub's reason, where it is refused.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"--to {HUB}{repository}: needs huggingface_hub: pip install 'dmlstudy[timm]'"
        ) from None
    hub = huggingface_hub.HfApi(library_name="dmlstudy")
    try:
        hub.create_repo(repository, private=not is_public, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Model of dmlstudy",
            delete_patterns=list(OURS),
        )
    except Exception as error:  # of the hub, of its HTTP library, or of the network
        raise ValueError(
            f"--to {HUB}{repository}: not uploaded ({first_line(error)}); see `hf auth whoami`, or write a folder"
        ) from error
    return f"https://huggingface.co/{repository}"


def _check_place(folder: Path, model: Model) -> None:
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{folder}: exists already; name a new folder with --to")
    if folder.resolve().is_relative_to(model.folder.resolve()):
        raise ValueError(f"{folder}: lies in the model's folder, which is sealed; name another place")


def _written(folder: Path, model: Model, target: Target, with_code: bool, licence: str | None) -> Published:
    """Write all files into an empty folder, and compare what they compute with the model."""
    embedder: Embedder = model.loaded.network
    fit = model.fit
    assert fit is not None
    described = _described(fit, embedder)
    transform, refusal = _attempt(lambda: timm_form.preprocessing(fit, embedder))
    made, why = _attempt(lambda: twin(embedder)) if transform is not None else (None, refusal)
    if made is None and not with_code:
        raise ValueError(
            f"{model.name}: has no form without code ({why}); add --with-code to write one for sentence-transformers,"
            " which loads it with trust_remote_code=True alone"
        )
    difference = 0.0
    if made is not None and transform is not None:
        timm_form.write(folder, made, transform)
        difference = _compared(model, "timm", lambda x: timm_form.computed(folder, embedder, x))
    elif transform is not None:
        timm_form.write_transform(folder, transform)
    if with_code:
        difference = max(difference, export(model, folder / sentence_form.PROGRAM, "torch_export").difference)
        sentence_form.write_code(folder, embedder, described)
    else:
        sentence_form.write_plain(folder, embedder)
    libraries = _libraries(made, transform is not None)
    notes = _notes(embedder, fit, made, str(why), with_code)
    card = hub_card(
        model,
        target.repository.partition("/")[2] if target.folder is None else target.folder.name,
        library=libraries[0],
        tags=[*libraries, "metric-learning", "image-retrieval", "dmlstudy"],
        licence=licence,
        uses=_uses(target, embedder, described, made, transform is not None, with_code),
        notes=notes,
    )
    (folder / README).write_text(card, encoding="utf-8")
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Published(files, libraries, tuple(notes), difference)


def _attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """The made value, or None and why it cannot be made."""
    try:
        return make(), ""
    except ValueError as error:
        return None, str(error)


def _described(fit: Fit, embedder: Embedder) -> dict[str, Any]:
    """The preprocessing from values that were understood, so that no text of a description becomes code."""
    own = embedder.architecture
    height, width = own.image_size
    return preprocessing.described(
        fit,
        image_size=(height, width),
        channels=own.in_channels,
        mean=embedder.mean_C.tolist(),
        std=embedder.std_C.tolist(),
        network_order="BGR" if own.backbone == "bn_inception" else "RGB",
    )


def _compared(model: Model, what: str, compute: Callable[[NDArray[np.uint8]], NDArray[np.float32]]) -> float:
    """The largest difference on the model's example and on random images; raises ValueError if it is too large."""
    own = model.loaded.network.architecture
    shape = (3, *own.image_size, own.in_channels)
    batches = [np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)]
    if model.example is not None:
        batches.append(model.example[0])
    largest = 0.0
    for images_NHWC in batches:
        wanted = model.compute(images_NHWC)
        apart = np.abs(compute(images_NHWC) - wanted).max(initial=0)
        largest = max(largest, float(apart / np.abs(wanted).max(initial=1)))
    if not largest <= TOLERANCE:
        raise ValueError(
            f"{model.name}: {what}'s model differs from it by {largest:.1e}, more than {TOLERANCE:.0e}; nothing is"
            " written: take other versions, or `dmlstudy export`"
        )
    return largest


def _libraries(made: TimmTwin | None, has_transform: bool) -> tuple[str, ...]:
    if made is not None:
        return "timm", "transformers", "sentence-transformers"
    return ("sentence-transformers", "transformers") if has_transform else ("sentence-transformers",)


def _notes(embedder: Embedder, fit: Fit, made: TimmTwin | None, why: str, with_code: bool) -> list[str]:
    """Sentences for whoever uses the files."""
    own = embedder.architecture
    notes = []
    if with_code:
        notes.append(
            f"sentence-transformers runs {sentence_form.CODE} of this repository, and so needs trust_remote_code=True;"
            " it computes on the CPU."
        )
    if made is None:
        notes.append(f"There is no timm model: {why}.")
    else:
        end = "divide its rows by their norm" if own.unit_norm else "compare by Euclidean distance"
        what = "features" if made.classifier is None else "classifier's numbers"
        notes.append(f"timm's {what} are the embedding before any normalisation: {end}.")
        if not with_code:
            notes.append("sentence-transformers is given pictures, not paths, as picture(path) opens them.")
            if own.unit_norm and made.classifier is not None:
                notes.append(
                    "sentence-transformers reports the classifier as unexpected, and has it in 1_Dense."
                )
        if fit.resize_to is not None and fit.keep_aspect:
            notes.append(
                "timm and transformers round a picture's longer side down where dmlstudy rounds to the nearest: a"
                " picture that is not square may be cut half a pixel beside, and then has other numbers."
                " What --with-code writes is exact."
            )
        if own.in_channels == 1:
            notes.append(
                "Pictures are grey: timm and transformers are given them without colour before resizing, dmlstudy takes"
                " colour away after it; grey files give the same numbers."
            )
    if embedder.structure_head is not None:
        notes.append("The structure head is left out: re-ranking by it needs dmlstudy.")
    if own.space == "ball":
        notes.append("Embeddings are points of a ball: compare them by hyperbolic distance.")
    return notes


def _uses(
    target: Target,
    embedder: Embedder,
    described: dict[str, Any],
    made: TimmTwin | None,
    has_transform: bool,
    with_code: bool,
) -> dict[str, str]:
    place = target.repository or "FOLDER"
    uses = {}
    picture = preprocessing.picture_code(described)
    if made is not None:
        name = f"hf-hub:{place}" if target.repository else f"local-dir:{place}"
        unit = "torch.nn.functional.normalize(model(x))" if embedder.architecture.unit_norm else "model(x)"
        uses["timm"] = "\n".join(
            [
                picture,
                "import timm",
                "import torch",
                "",
                f'model = timm.create_model("{name}", pretrained=True).eval()',
                "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
                'x = transform(picture("x.jpg"))[None]',
                "with torch.no_grad():",
                f"    embedding = {unit}",
            ]
        )
    if has_transform:
        uses["transformers"] = "\n".join(
            [
                *([] if made is not None else [picture]),
                "from transformers import AutoImageProcessor",
                "",
                f'x = AutoImageProcessor.from_pretrained("{place}")(picture("x.jpg"))["pixel_values"]',
            ]
        )
    trusted = ", trust_remote_code=True" if with_code else ""
    given = '"x.jpg"' if with_code else 'picture("x.jpg")'
    uses["sentence-transformers"] = "\n".join(
        [
            "from sentence_transformers import SentenceTransformer",
            "",
            f'model = SentenceTransformer("{place}"{trusted})',
            f"embedding = model.encode([{given}])",
        ]
    )
    return uses


def told(made: Published, target: Target, *, is_dry: bool) -> Sequence[str]:
    """Lines for people: each file with its size, the notes, and what was done."""
    width = max(map(len, made.files))
    lines = [f"{name.ljust(width)}  {size:>12,} bytes" for name, size in made.files.items()]
    lines += [f"note: {note}" for note in made.notes]
    done = "would be written to" if is_dry else "written to"
    where = made.url or str(target)
    ends = f"; differs from the model by {made.difference:.1e} at most"
    return [*lines, f"{len(made.files)} files {done} {where} for {', '.join(made.libraries)}{ends}"]
