"""A model as one file for other runtimes, ONNX or a program of ``torch.export``, compared with the model it is of.

What a user could get wrong is inside: images go in as they are decoded, of the size that the model was built for,
``images`` uint8 (N, H, W, C) from 0 to 255, and vectors as the model takes them, ``vectors`` float32 (N, F).

Out come ``embedding`` (N, D), and of a model with a structure head ``structure`` (N, D); N is free.

The file says so itself (``about``), with all that is done to a picture before: ONNX in its metadata, under
``dmlstudy``, a program in its extra file ``dmlstudy.json``.

``torch.export.load`` can unpickle what a program holds beside its graph, so load programs of people you trust alone;
one that is written here has numbers and text in it, and nothing that needs pickle.
Shapes: N items, H height, W width, C channels, F features, D embedding size, E a layer's size, L layers.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmlstudy import embedders, online, saved
from dmlstudy.data import preprocessing
from dmlstudy.embedders.program import exported
from dmlstudy.files import ZIP, check_output, written_whole
from dmlstudy.hashing.program import Codes
from dmlstudy.online.program import LearnedLayers
from dmlstudy.records import HYPERBOLIC
from dmlstudy.saved import Model
from dmlstudy.text import first_line

Format: TypeAlias = Literal["onnx", "torch_export"]
Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Run: TypeAlias = Callable[[NDArray[Any]], Arrays]

SUFFIXES: Mapping[Format, str] = {"onnx": ".onnx", "torch_export": ".pt2"}

FORMATS: tuple[Format, ...] = get_args(Format)

NEEDED = ("onnx", "onnxscript", "onnxruntime")

TOLERANCE = 1e-5
"""Largest difference of a number from the model's, as a share of the largest number where that is above 1."""

ABOUT = "dmlstudy.json"
BEGINS: Mapping[Format, bytes] = {"onnx": b"\x08", "torch_export": ZIP}  # ONNX: the field ir_version


class Exported(NamedTuple):
    """A file that was written, what it says of itself, and its largest difference from the model."""

    path: Path
    about: Mapping[str, Any]
    difference: float


def export(model: Model, output: str | Path, form: str) -> Exported:
    """Write a model that is on the CPU to ``output``, whole or not at all, an earlier export being replaced.

    The file is read back (by onnxruntime on the CPU, or ``torch.export.load``) and compared with the model, on the
    example that was saved with it and on random inputs, one alone and several.

    Raises ValueError for a model that has no such form, an output that may not be written, a library that is missing,
    and, naming the difference, for a file that computes other numbers.
    """
    output, kind = Path(output), _format(form)
    if output.suffix != SUFFIXES[kind]:
        raise ValueError(f"{output}: a file of --format {kind} ends in {SUFFIXES[kind]}; name it so")
    check_output(output, f"a file of --format {kind}", BEGINS[kind])
    if output.resolve().is_relative_to(model.folder.resolve()):
        raise ValueError(f"{output}: lies in the model's folder, which is sealed; name another place")
    if kind == "onnx":
        _check_installed()
    program = PROGRAMS[model.kind](model)
    batches = _batches(model)
    name = "images" if model.takes.image_size is not None else "vectors"
    wanted = [_outputs(*model.query(batch_N)) for batch_N in batches]
    about = _about(model, name, batches[0], wanted[0])
    with _refusing(f"{model.name}: has no form of --format {kind}"):
        content = WRITERS[kind](program, name, batches[-1], about)
    with written_whole(output) as file:
        file.write(content)
        file.flush()
        with _refusing(f"{output}: cannot be read back"):
            got = [READERS[kind](content)(batch_N) for batch_N in batches]
        difference = max(map(_difference, wanted, got))
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{output}: differs from the model by {difference:.1e}, more than {TOLERANCE:.0e}; nothing is kept of"
                " it: export with other versions of torch and onnxruntime, or take another --format"
            )
    return Exported(output, about, difference)


def default_output(model: str, form: str) -> Path:
    """A file in this folder that is called as the model is. Raises ValueError for a format that there is none of."""
    name = Path(model).resolve().name if saved.is_model(model) else re.sub("[@/]", "-", model)
    return Path(name + SUFFIXES[_format(form)])


def _format(name: str) -> Format:
    known: dict[str, Format] = {each: each for each in FORMATS}
    if name not in known:
        raise ValueError(f"--format {name}: choose from {', '.join(known)}")
    return known[name]


class _Embedder(nn.Module):
    """Images or vectors to z_ND, and omega_ND where there is a structure head."""

    def __init__(self, embedder: embedders.Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, x_N: Tensor) -> dict[str, Tensor]:
        z_ND, omega_ND = self.embedder.embed_with_structure(x_N)
        return {"embedding": z_ND} if omega_ND is None else {"embedding": z_ND, "structure": omega_ND}


ITEMS = "N"
"""The name that files give to the number of items."""


class _Learned(nn.Module):
    """Points to a learner's embeddings of a gallery."""

    def __init__(self, learned: online.Learned) -> None:
        super().__init__()
        self.layers = LearnedLayers(learned)

    def forward(self, x_ND: Tensor) -> dict[str, Tensor]:
        return {"embedding": self.layers(x_ND)}


def _of_embedder(model: Model) -> nn.Module:
    return _Embedder(model.loaded.network).eval()


def _of_codes(model: Model) -> nn.Module:
    return Codes(model.loaded.network).eval()


def _of_learner(model: Model) -> nn.Module:
    learned = model.loaded.network
    if learned.name == "oasis":
        raise ValueError(
            f"{model.name}: oasis embeds queries otherwise than a gallery, and a file holds one of both; load it with"
            " dmlstudy.online.load and give learner.embed the side"
        )
    return _Learned(learned).eval()


PROGRAMS: Mapping[str, Callable[[Model], nn.Module]] = {
    "embedder": _of_embedder,
    "hashing model": _of_codes,
    "online learner": _of_learner,
}
"""By the kind of model (``saved.KINDS``)."""


def _torch_export(module: nn.Module, name: str, batch_N: NDArray[Any], about: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    program = exported(module, torch.from_numpy(batch_N), ITEMS)
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about, indent=1)})
    return content.getvalue()


def _read_torch_export(content: bytes) -> Run:
    module = torch.export.load(io.BytesIO(content)).module()

    def run(x_N: NDArray[Any]) -> Arrays:
        with torch.no_grad():
            return {name: out.numpy() for name, out in module(torch.from_numpy(x_N)).items()}

    return run


def _onnx(module: nn.Module, name: str, batch_N: NDArray[Any], about: Mapping[str, Any]) -> bytes:
    program = torch.onnx.export(
        exported(module, torch.from_numpy(batch_N), ITEMS),
        input_names=[name],
        output_names=list(about["outputs"]),
        dynamic_shapes=({0: torch.export.Dim(ITEMS)},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props["dmlstudy"] = json.dumps(about)
    for key in ("preprocessing_steps", "preprocessing_code"):  # by themselves too, for viewers of such files
        if key in about:
            program.model.metadata_props[key] = (
                about[key] if isinstance(about[key], str) else "\n".join(about[key])
            )
    content: bytes = program.model_proto.SerializeToString()
    return content


def _read_onnx(content: bytes) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (only,) = session.get_inputs()
    names = [output.name for output in session.get_outputs()]
    return lambda x_N: dict(zip(names, session.run(names, {only.name: x_N}), strict=True))


WRITERS: Mapping[Format, Callable[[nn.Module, str, NDArray[Any], Mapping[str, Any]], bytes]] = {
    "onnx": _onnx,
    "torch_export": _torch_export,
}
READERS: Mapping[Format, Callable[[bytes], Run]] = {"onnx": _read_onnx, "torch_export": _read_torch_export}


def _batches(model: Model) -> list[NDArray[Any]]:
    """The model's example if it has one, random inputs of one item, and of several, not as many as the example's."""
    kept = [] if model.example is None else [model.example[0]]
    rng = np.random.default_rng(0)
    return kept + [_random(rng, model, number) for number in (1, 3 if not kept or len(kept[0]) != 3 else 4)]


def _random(rng: np.random.Generator, model: Model, number: int) -> NDArray[Any]:
    if model.takes.image_size is None:
        return rng.normal(size=(number, model.takes.num_features)).astype(np.float32)
    size = model.loaded.network.architecture.image_size
    return rng.integers(0, 256, (number, *size, model.takes.channels), dtype=np.uint8)


def _outputs(z_ND: NDArray[Any], omega_ND: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    return {"embedding": z_ND} if omega_ND is None else {"embedding": z_ND, "structure": omega_ND}


def _about(model: Model, name: str, batch_N: NDArray[Any], outputs: Arrays) -> dict[str, Any]:
    """A description of the input and the outputs."""
    is_image = name == "images"
    return {
        "model": model.fingerprint,
        "input": {
            "name": name,
            "dtype": str(batch_N.dtype),
            "layout": "NHWC" if is_image else "NF",
            "shape": ["N", *batch_N.shape[1:]],
            "range": [0, 255] if is_image else None,
        },
        "outputs": {
            each: {"dtype": str(value.dtype), "shape": ["N", *value.shape[1:]]}
            for each, value in outputs.items()
        },
        **_distance(model, outputs["embedding"]),
        **_preprocessing(model),
    }


def _distance(model: Model, z_ND: NDArray[Any]) -> dict[str, Any]:
    """The distance by which two embeddings are compared."""
    if model.curvature is not None:
        return {"distance": HYPERBOLIC, "curvature": model.curvature}
    return {"distance": "hamming" if z_ND.dtype == np.int8 else "euclidean"}


def _preprocessing(model: Model) -> dict[str, Any]:
    """From a picture's file to what goes in: as it is described, in words, and as code."""
    described = model.preprocessing
    steps, code = preprocessing.words(described), preprocessing.code(described)
    if not steps:
        return {}
    told = {"preprocessing": described, "preprocessing_steps": steps}
    return told | ({"preprocessing_code": code} if code else {})


def _difference(wanted: Arrays, got: Arrays) -> float:
    """The largest; infinite where an output is missing, or of another type or shape."""
    if wanted.keys() != got.keys():
        return float("inf")
    return max(_apart(wanted[name], got[name]) for name in wanted)


def _apart(wanted: NDArray[Any], got: NDArray[Any]) -> float:
    if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
        return float("inf")
    largest = float(np.abs(wanted.astype(np.float64)).max(initial=1))
    return float(np.abs(wanted.astype(np.float64) - got).max(initial=0)) / largest


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """One line for whatever the exporters and runtimes raise, which is of many kinds; their warnings are silent."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise ValueError(
            f"{what} ({first_line(error)}); take another --format, or `dmlstudy serve` it"
        ) from error
    finally:
        log.setLevel(level)


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--format onnx needs {', '.join(missing)}: pip install 'dmlstudy[export]'")
