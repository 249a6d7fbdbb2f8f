"""Parameters from files and hubs, fitted to a network by name and shape; nothing that is read can run code."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dmlstudy import description, model_folder
from dmlstudy.description import ArchitectureFields
from dmlstudy.text import first_line

EMBEDDER = "embedder.json"
"""The description in the folder of a saved embedder."""

CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "network", "module")
"""Under these keys training code in the wild keeps a network's parameters beside other things."""

# Files of torchvision's DenseNet from before 2018 say `norm.1` where the module is called `norm1`.
OLD_DENSENET = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_\w+))$")


def read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file by name: safetensors, or what torch.save wrote of a state_dict or a mapping around one.

    Of the folder of a saved embedder they are the backbone's. Raises ValueError for a file that is missing, damaged,
    or holds more than tensors and plain values, and for a folder of anything else.
    """
    if path.is_dir():
        return saved_parts(path).backbone
    if not path.is_file():
        raise ValueError(
            f"embedder.weights: no file {path}; give 'default', a file, a folder that was pulled, a registered model"
            " as models:/NAME@champion, or leave it out"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format fails with its own types, all mean the same to the user
        raise ValueError(
            f"embedder.weights: {path} does not fit this backbone: it is no file of tensors ({first_line(error)}); save"
            " the network's state_dict with torch.save or as safetensors"
        ) from error
    for key in CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise ValueError(
            f"embedder.weights: {path} does not fit this backbone: it holds a {type(content).__name__}, not"
            " parameters by name; save the network's state_dict"
        )
    return content


class SavedParts(NamedTuple):
    """The tensors of a saved embedder by their part, and how it was built."""

    backbone: Mapping[str, Tensor]
    head: Mapping[str, Tensor]
    structure_head: Mapping[str, Tensor]
    normalisation: Mapping[str, Tensor]
    architecture: ArchitectureFields

    @property
    def head_sha256(self) -> str:
        """``digest`` of all that is not the backbone's: head, structure head and normalisation."""
        heads = {"head": self.head, "structure_head": self.structure_head, "": self.normalisation}
        return digest({f"{part}.{name}": value for part, of in heads.items() for name, value in of.items()})


def saved_parts(folder: Path) -> SavedParts:
    """The tensors of a saved embedder, whose files are verified. Raises ValueError for a folder of anything else."""
    from safetensors.torch import load_file

    path = folder / EMBEDDER
    if not path.is_file():
        raise ValueError(
            f"embedder.weights: {folder} is no folder of a saved embedder (it has no {EMBEDDER}); give one that"
            " `dmlstudy pull` made, or a file of weights"
        )
    try:
        model_folder.verify(folder, EMBEDDER)
        mend = "pull it again"
        architecture = description.described(path, description.EmbedderDescription, mend).architecture
        state = load_file(folder / model_folder.WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"embedder.weights: {first_line(error)}") from None

    def part(name: str) -> dict[str, Tensor]:
        return {
            key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")
        }

    normalisation: dict[str, Tensor] = {name: state[name] for name in ("mean_C", "std_C") if name in state}
    return SavedParts(part("backbone"), part("head"), part("structure_head"), normalisation, architecture)


def fit(network: nn.Module, state: Mapping[str, Tensor], origin: str, ignore: tuple[str, ...] = ()) -> None:
    """Load ``state`` into the network; ``ignore`` names what may be there beside it (a classifier).

    A prefix that all names share (``module.``, ``backbone.``, ``base_model.``, ``model.``) is taken off, and so is
    a leading 1 of a shape (1, C) where (C,) is wanted, as in old files of BN-Inception.

    Names that do not begin as one of the network's parts do (other heads, auxiliary classifiers) are left out.
    Raises ValueError that names the first parameter that is missing, too much, of another shape, or not finite.
    """

    def refuse(reason: str) -> ValueError:
        return ValueError(
            f"embedder.weights: {origin} does not fit this backbone: {reason}; give the weights of this architecture"
        )

    wanted = network.state_dict()
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    given = {OLD_DENSENET.sub(r"\1\2", name): value for name, value in state.items() if _is_tensor(value)}
    prefix = _prefix(needed, given)
    own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    for name in needed:
        if name not in own:
            raise refuse(f"{name} is missing")
    chosen: dict[str, Tensor] = {}
    parts = {name.partition(".")[0] for name in wanted}
    for name, value in own.items():
        if name not in wanted:
            if name.partition(".")[0] in parts and name not in ignore and not name.endswith("_tracked"):
                raise refuse(f"{name} belongs to no part of it")
            continue
        shape = wanted[name].shape
        if value.shape != shape and value.shape == (1, *shape):
            value = value[0]
        if value.shape != shape:
            raise refuse(f"{name} has shape {tuple(value.shape)} there and {tuple(shape)} here")
        chosen[name] = value
    check_finite(chosen, origin)
    if not prefix and hasattr(state, "_metadata"):  # versions, from which MNASNet tells its old layers
        chosen = OrderedDict(chosen)
        chosen._metadata = state._metadata  # type: ignore[attr-defined]
    try:
        network.load_state_dict(chosen, strict=False)
    except RuntimeError as error:
        raise refuse(str(error).strip().replace("\n", " ")) from error


def check_finite(state: Mapping[str, Tensor], origin: str) -> None:
    """Raise ValueError that names the first tensor with NaN or infinity in it: no training leads away from there."""
    for name, value in state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(
                f"embedder.weights: {origin} holds NaN or infinity in {name}, so its training went wrong; give the"
                " weights of an earlier epoch"
            )


def digest(state: Mapping[str, Tensor]) -> str:
    """The SHA-256 (hex) of tensors: in the order of their names, each one's name, type, shape and bytes.

    It is the same for the same tensors in a file of whatever format. Values that are no tensors are left out.
    """
    whole = hashlib.sha256()
    for name in sorted(name for name, value in state.items() if _is_tensor(value)):
        tensor = state[name].detach().cpu().contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _prefix(needed: list[str], given: Mapping[str, Tensor]) -> str:
    """The prefix of the network's names in the file: the candidate under which most of them are found."""
    if not needed:
        return ""
    first = needed[0]
    candidates = {name.removesuffix(first) for name in given if name == first or name.endswith(f".{first}")}
    candidates.add("")
    return max(sorted(candidates), key=lambda prefix: sum(f"{prefix}{name}" in given for name in needed))
