"""Embedders: backbones by name, the image -> unit sphere (or ball) module, and its folder on disk."""

from dmlstudy.embedders.backbones import BACKBONES, check_backbone, check_input
from dmlstudy.embedders.ball import on_ball
from dmlstudy.embedders.embedder import (
    Architecture,
    Embedder,
    build,
    embed,
    embed_batches,
    embed_with_structure,
    latency_ms,
)
from dmlstudy.embedders.folder import add_program, extra, largest_deviation, load, save, verify
from dmlstudy.embedders.precision import full_float32, full_products, in_force

__all__ = [
    "BACKBONES",
    "Architecture",
    "Embedder",
    "add_program",
    "build",
    "check_backbone",
    "check_input",
    "embed",
    "embed_batches",
    "embed_with_structure",
    "extra",
    "full_float32",
    "full_products",
    "in_force",
    "largest_deviation",
    "latency_ms",
    "load",
    "on_ball",
    "save",
    "verify",
]
