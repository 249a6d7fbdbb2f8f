"""An embedder that begins as a saved one, and takes over more than the backbone's weights.

The backbone must be the same; ``weights.fit`` names the parameter where it is not. The head is taken over where the
settings of ``HEAD`` agree, and is new and random where one does not: an embedding of another size has no use for it.

A structure head is taken over where the saved one has the same. The normalisation of pixels is always the saved one's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dmlstudy.embedders import weights as weight_files

if TYPE_CHECKING:
    from dmlstudy.embedders.backbones import Backbone
    from dmlstudy.embedders.embedder import Embedder

HEAD = ("head", "dim", "fusion", "pooling", "head_norm", "head_depth", "head_width")
"""Settings of the embedder that a head depends on."""

STRUCTURE_HEAD = ("structure", "structure_input")
"""Those that a structure head depends on as well."""


def begun_with(embedder: Embedder, weights: str | None, backbone: Backbone) -> Embedder:
    """The embedder, with what its ``weights`` hold beside the backbone, and the digests of what was loaded."""
    embedder.loaded_sha256 = backbone.sha256
    if backbone.name:
        embedder.architecture = dataclasses.replace(embedder.architecture, backbone=backbone.name)
    if weights in (None, "default") or not (Path(str(weights)) / weight_files.EMBEDDER).is_file():
        return embedder
    saved = weight_files.saved_parts(Path(str(weights)))
    embedder.loaded_head_sha256 = saved.head_sha256
    weight_files.check_finite({**saved.normalisation, **saved.head, **saved.structure_head}, str(weights))
    with torch.no_grad():
        embedder.mean_C.copy_(saved.normalisation["mean_C"])
        embedder.std_C.copy_(saved.normalisation["std_C"])
    if not differing(saved.architecture, embedder.architecture):
        embedder.head.load_state_dict(dict(saved.head))
        embedder.begun_parts += ("head",)
    has_same_structure = all(
        getattr(saved.architecture, name) == getattr(embedder.architecture, name) for name in STRUCTURE_HEAD
    )
    if embedder.structure_head is not None and has_same_structure:
        embedder.structure_head.load_state_dict(dict(saved.structure_head))
        embedder.begun_parts += ("structure_head",)
    return embedder


def differing(saved: Any, wanted: Any) -> Sequence[str]:
    """Settings, as ``dim 128, there 64``, for which the head of a saved architecture cannot be taken over."""
    return [
        f"{name} {getattr(wanted, name)}, there {getattr(saved, name)}"
        for name in HEAD
        if getattr(saved, name) != getattr(wanted, name)
        and not (name == "head_width" and saved.head_depth == wanted.head_depth == 0)
    ]
