"""An embedder as files that ``sentence_transformers.SentenceTransformer(folder)`` reads.

In the plain form the library's own modules compute: the timm model of the folder, its head and the unit norm. In the
form with code a module of the folder reads pictures and runs the exported program; whoever loads it passes
``trust_remote_code=True``, and no other file asks for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from dmlstudy.data import preprocessing
from dmlstudy.embedders import Embedder
from dmlstudy.serving.timm_form import WEIGHTS

CODE, PROGRAM = "modeling_dmlstudy.py", "embedder.pt2"

DENSE, NORMALIZE = "1_Dense", "2_Normalize"

MODULES, TRANSFORMER, SETTINGS = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)

LIBRARY = "sentence_transformers."

OPENER = "_opened(path)"

MODULE = '''"""Pictures to embeddings, as dmlstudy computes them; needs torch, NumPy and Pillow. On the CPU."""

import contextlib
import shutil

import torch
from sentence_transformers.base.modules import InputModule

{code}

def _opened(path):
    if isinstance(path, np.ndarray):
        return Image.fromarray(path)
    return contextlib.nullcontext(path) if isinstance(path, Image.Image) else Image.open(path)


class Embedder(InputModule):
    modalities = ["image"]

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.program = [torch.export.load(path).module()]  # in a list: it stays on the CPU

    def preprocess(self, inputs, prompt=None, **kwargs):
        return {{"images": torch.from_numpy(np.stack([read(each) for each in inputs]))}}

    def forward(self, features, **kwargs):
        images = features["images"]
        with torch.no_grad():
            features["sentence_embedding"] = self.program[0](images.cpu())["embedding"].to(images.device)
        return features

    def get_embedding_dimension(self):
        return {dim}

    def save(self, output_path, *args, **kwargs):
        shutil.copy(self.path, output_path)

    @classmethod
    def load(cls, model_name_or_path, subfolder="", token=None, cache_folder=None, revision=None,
             local_files_only=False, **kwargs):
        return cls(cls.load_file_path(
            model_name_or_path, "{program}", subfolder=subfolder, token=token, cache_folder=cache_folder,
            revision=revision, local_files_only=local_files_only,
        ))
'''


def write_plain(folder: Path, embedder: Embedder) -> None:
    """Write the files beside those of ``timm_form`` that name the library's modules, and the head's weights."""
    transformer = {
        "transformer_task": "feature-extraction",
        "modality_config": {"image": {"method": "forward", "method_output_name": "pooler_output"}},
        "module_output_name": "sentence_embedding",
    }
    modules = [("", f"{LIBRARY}base.modules.transformer.Transformer")]
    _write(folder / TRANSFORMER, transformer)
    if isinstance(embedder.head, nn.Linear):
        modules.append((DENSE, f"{LIBRARY}base.modules.dense.Dense"))
        _write_head(folder / DENSE, embedder.head)
    if embedder.architecture.unit_norm:
        modules.append((NORMALIZE, f"{LIBRARY}base.modules.normalize.Normalize"))
        _write(folder / NORMALIZE / "config.json", {"module_input_name": "sentence_embedding"})
    _write_modules(folder, modules, embedder)


def write_code(folder: Path, embedder: Embedder, described: Mapping[str, Any]) -> None:
    """Write the module beside ``PROGRAM``; ``described`` is the preprocessing that it reads pictures by."""
    code = preprocessing.code(described, OPENER)
    text = MODULE.format(code=code, dim=embedder.architecture.dim, program=PROGRAM)
    (folder / CODE).write_text(text, encoding="utf-8")
    _write_modules(folder, [("", f"{CODE.removesuffix('.py')}.Embedder")], embedder)


def _write_head(folder: Path, head: nn.Linear) -> None:
    config = {
        "in_features": head.in_features,
        "out_features": head.out_features,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    }
    _write(folder / "config.json", config)
    save_file({f"linear.{name}": value.detach() for name, value in head.named_parameters()}, folder / WEIGHTS)


def _write_modules(folder: Path, modules: Sequence[tuple[str, str]], embedder: Embedder) -> None:
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(modules)
    ]
    _write(folder / MODULES, listed)
    similarity = "cosine" if embedder.architecture.unit_norm else "euclidean"
    config = {"model_type": "SentenceTransformer", "similarity_fn_name": similarity}
    _write(folder / SETTINGS, config)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
