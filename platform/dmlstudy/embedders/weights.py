"""Parameters from files and hubs, fitted to a network by name and shape; nothing that is read can run code."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmlstudy.text import first_line

CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "network", "module")
"""Under these keys training code in the wild keeps a network's parameters beside other things."""

# Files of torchvision's DenseNet from before 2018 say `norm.1` where the module is called `norm1`.
OLD_DENSENET = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_\w+))$")


def read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file by name: safetensors, or what torch.save wrote of a state_dict or a mapping around one.

    Raises ValueError for a file that is missing, damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise ValueError(f"embedder.weights: no file {path}; give 'default', a file, or leave it out")
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


def fit(network: nn.Module, state: Mapping[str, Tensor], origin: str, ignore: tuple[str, ...] = ()) -> None:
    """Load ``state`` into the network; ``ignore`` names what may be there beside it (a classifier).

    A prefix that all names share (``module.``, ``backbone.``, ``base_model.``, ``model.``) is taken off, and so is
    a leading 1 of a shape (1, C) where (C,) is wanted, as in old files of BN-Inception.

    Names that do not begin as one of the network's parts do (other heads, auxiliary classifiers) are left out.
    Raises ValueError that names the first parameter that is missing, too much, or of another shape.
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
    if not prefix and hasattr(state, "_metadata"):  # versions, from which MNASNet tells its old layers
        chosen = OrderedDict(chosen)
        chosen._metadata = state._metadata  # type: ignore[attr-defined]
    try:
        network.load_state_dict(chosen, strict=False)
    except RuntimeError as error:
        raise refuse(str(error).strip().replace("\n", " ")) from error


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
