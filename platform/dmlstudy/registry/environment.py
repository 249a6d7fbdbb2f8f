"""Versions of the code and the packages, and the machine; no environment variables."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform as machine
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dmlstudy import bundled

PACKAGES = (
    "dmlstudy",
    "ray",
    "torch",
    "torchvision",
    "optuna",
    "cmaes",
    "mlflow",
    "numpy",
    "scipy",
    "scikit-learn",
    "pytorch-metric-learning",
    "faiss-gpu",
    "faiss-cpu",
    "pyarrow",
    "pillow",
    "pydantic",
    "safetensors",
)
"""Those that a score can depend on, or that keep it."""

COMMIT = "DMLSTUDY_COMMIT"
"""The environment variable with the commit from which a job's code was copied."""

ANSWER_S = 10.0


def environment() -> dict[str, Any]:
    """All of it, for people and for JSON."""
    import torch

    return {
        "code": {"commit": commit(), "source_sha256": source_sha256()},
        "packages": installed(PACKAGES),
        "python": machine.python_version(),
        "cuda": torch.version.cuda,
        "float32": _float32(),
        "platform": machine.platform(),
        "host": socket.gethostname(),
        "hardware": hardware(),
    }


def _float32() -> dict[str, dict[str, str]]:
    """The precision of float32 products in training, and where embeddings are scored, saved and searched."""
    from dmlstudy import embedders

    with embedders.full_products():
        training = embedders.in_force()
    with embedders.full_float32():
        return {"training": training, "evaluation": embedders.in_force()}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed; a job's own code is not."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit of this package's code, with ' (dirty)' where its files differ from it; None where unknown."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # not a checkout, or another project's
        return os.environ.get(COMMIT) or None
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    return head and f"{head}{' (dirty)' if changes else ''}"


def source_sha256() -> str:
    """The SHA-256 over this package's Python files and their names: the same wherever the same code lies."""
    digest = hashlib.sha256()
    for path in sorted(bundled.PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(bundled.PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def hardware() -> dict[str, Any]:
    """This machine's processor, cores, memory and GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": (_answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else machine.processor() or machine.machine()


def _git(*arguments: str) -> str | None:
    return _answer("git", "-C", str(bundled.PACKAGE), *arguments)


def _answer(program: str, *arguments: str) -> str | None:
    """A program's output; None if the program is missing, fails or does not end."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
