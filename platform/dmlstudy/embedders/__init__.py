"""Embedders: backbones by name, the image -> unit sphere module, and its folder on disk."""

from dmlstudy.embedders.backbones import BACKBONES
from dmlstudy.embedders.embedder import Architecture, Embedder, build, embed, latency_ms
from dmlstudy.embedders.folder import add_program, largest_deviation, load, save, seal, verify

__all__ = [
    "BACKBONES",
    "Architecture",
    "Embedder",
    "add_program",
    "build",
    "embed",
    "largest_deviation",
    "latency_ms",
    "load",
    "save",
    "seal",
    "verify",
]
