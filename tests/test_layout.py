"""The house rules: the top level, floors that import downwards only, one door for each heavy library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "platform" / "dmlstudy"

TOP_LEVEL = {"pyproject.toml", "platform", "search_spaces", "jobs", "tests", "cluster.yaml", "README.md"}

FLOORS = (  # top to bottom
    ("cli", "__main__", "interface", "models", ""),  # "": the package itself, which looks the interface up
    ("studies",),
    ("report",),
    ("engine",),
    ("serving",),
    ("registry",),
    ("search",),
    ("verdict",),
    ("spec",),
    ("training",),
    ("saved",),
    ("hashing",),
    ("online",),
    ("retrieval",),
    ("embedders",),
    ("data",),
    ("distributed",),
    ("losses",),
    ("store", "patience"),
    ("records", "description"),
    ("model_folder",),
    ("text", "heartbeat", "html", "files", "trials", "metric_names", "transfers", "journal", "packed"),
)
HEIGHT = {name: -level for level, names in enumerate(FLOORS) for name in names}
ANYWHERE = {"bundled"}

DOORS = {
    "ray": "engine",
    "optuna": "search",
    "mlflow": "registry",
    "faiss": "retrieval",
    "pyarrow": "data",
    "onnx": "serving",
    "onnxruntime": "serving",
    "onnxscript": "serving",
    "torch.onnx": "serving",
    "triton": "losses",
    "timm": "embedders",
    "huggingface_hub": "serving",
    "torch.distributed": "distributed",
    "torch.nn.parallel": "distributed",
}

LARGEST_ROOM = 0.15
"""The most of the package's lines that one folder may hold."""


def mentioned(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of every module that source text in ``package`` imports or reaches by attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the source text of ``module`` (a full name below dmlstudy) imports that it may not."""
    own = module.split(".")[1] if "." in module else ""
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for line, name in mentioned(source, package):
        head, _, rest = name.partition(".")
        if head == "dmlstudy":
            floor = rest.partition(".")[0]
            if not floor or floor.startswith("_") or floor in ANYWHERE:
                continue
            if floor not in HEIGHT:
                found.append(f"{module}:{line}: {name} is on no floor")
            elif own not in HEIGHT or HEIGHT[floor] > HEIGHT[own]:
                found.append(f"{module}:{line}: {name} lies above")
        for library, door in DOORS.items():
            if (name == library or name.startswith(f"{library}.")) and own != door:
                found.append(f"{module}:{line}: {library} has its door in {door}")
    return found


def modules() -> list[tuple[str, Path]]:
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        named.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return named


def test_top_level_is_as_given() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    top = {name.partition("/")[0] for name in listed if name}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


def test_platform_stays_beside_the_standard_library() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    ask = "import platform, uuid; print(platform.__file__); print(platform.python_version())"
    for flags in (["-c", ask], ["-P", "-c", ask]):
        shown = subprocess.run([sys.executable, *flags], cwd=ROOT, check=True, capture_output=True, text=True)
        file, version = shown.stdout.split()
        assert Path(file).name == "platform.py"
        assert not Path(file).is_relative_to(ROOT)
        assert version == sys.version.split()[0]


def test_every_module_is_on_a_floor() -> None:
    names = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert names - {"__init__"} <= set(HEIGHT) | ANYWHERE
    assert len(modules()) > 30


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_down_and_through_the_doors(module: str, path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


def test_no_room_is_larger_than_it_may_be() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for _, path in modules()}
    rooms: dict[str, int] = {}
    for path, count in lines.items():
        if path.parent != PACKAGE:
            rooms[path.parent.name] = rooms.get(path.parent.name, 0) + count
    total = sum(lines.values())
    assert {name: count for name, count in rooms.items() if count > LARGEST_ROOM * total} == {}


def test_private_parts_of_ray_are_called_in_one_file() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for _, path in modules()
        for line, name in mentioned(path.read_text(encoding="utf-8"), "")
        if re.match(r"ray(\.\w+)*\._\w", name)
    ]
    assert {each.partition(":")[0] for each in found} == {"engine/ray_private.py"}, found


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("dmlstudy.losses.interface", "import dmlstudy.distributed", "dmlstudy.distributed lies above"),
        ("dmlstudy.data.folds", "from dmlstudy import embedders, records", "dmlstudy.embedders lies above"),
        ("dmlstudy.data.folds", "from .. import training", "dmlstudy.training lies above"),
        ("dmlstudy.data.folds", "from ..registry.store import Store", "registry.store.Store lies"),
        ("dmlstudy.store", "def f():\n    from dmlstudy.studies import spec", "spec lies above"),
        ("dmlstudy.records", "if True:\n    from dmlstudy.losses import catalogue", "losses.catalogue lies"),
        ("dmlstudy.bundled", "from dmlstudy.records import Record", "Record lies above"),
        ("dmlstudy.text", "from dmlstudy.records import Scalar", "records.Scalar lies above"),
        ("dmlstudy.cli", "from dmlstudy.tools import x", "dmlstudy.tools.x is on no floor"),
        ("dmlstudy.cli", "import ray", "ray has its door in engine"),
        ("dmlstudy.training.trial", "def f():\n    import mlflow.artifacts as a", "mlflow has its door"),
        ("dmlstudy.training.trial", "from optuna.trial import Trial", "optuna has its door in search"),
        ("dmlstudy.embedders.folder", "import importlib\nimportlib.import_module('faiss')", "faiss has its"),
        ("dmlstudy.registry.models", "import pyarrow.parquet as pq", "pyarrow has its door in data"),
        ("dmlstudy.training.trial", "from torch import distributed", "torch.distributed has its door"),
        ("dmlstudy.training.trial", "import torch\ntorch.distributed.barrier()", "torch.distributed has its"),
        ("dmlstudy.training.trial", "from torch.nn.parallel import X", "torch.nn.parallel has its door"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    found = violations(source, module)
    assert len(found) >= 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dmlstudy.cli", "from dmlstudy import data, bundled, __version__"),
        ("dmlstudy.data.folds", "from dmlstudy.data.images import Labels"),
        ("dmlstudy.data.folds", "from . import images\nfrom .images import Labels"),
        ("dmlstudy.engine.cluster", "import ray"),
        ("dmlstudy.search.storage", "from optuna import trial"),
        ("dmlstudy.distributed", "import torch.distributed as dist\nimport torch.nn.parallel"),
        ("dmlstudy.losses.pair_weighting", "import rayon, torch.distributions, mlflowing"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


ONLY_IN = {
    "registry.runs": (
        r"\.data\.(tags|params|metrics)\b",
        r"\.info\.(?!pop\b)\w",
        r"\.(search_runs|get_run|create_run|get_metric_history)\(",
    ),
    "metric_names": (
        r"""["'](test_|fold_)\{""",
        r"""\{[\w.]+\}_(stderr|low|high)["']""",
        r"""(with|fix|match)\(r?f?["'](test|fold|separate|concatenated)_""",
    ),
    "trials": (r"key=lambda(?!.*\b_?rank\().*(\.score\b|\.values\[0\]|\.metrics\[)",),
    "files": (r"\bfile_digest\b", r"sha256\(.*read_bytes\("),
    "text": (r"def _?one_line\(",),
}
"""What stands in one file alone: MLflow's raw runs, which others would read untyped; the parts of a metric's name; how
trials are ranked; a file's digest, so that who counts them sees each; a line made of many."""

SHIPPED = "registry.standalone"
"""The file that goes with each registered model, and so imports nothing of the package."""


@pytest.mark.parametrize("home", ONLY_IN)
def test_what_belongs_to_one_file_stands_nowhere_else(home: str) -> None:
    found = {
        module.removeprefix("dmlstudy.")
        for module, path in modules()
        if any(re.search(pattern, path.read_text(encoding="utf-8")) for pattern in ONLY_IN[home])
    }
    assert found - {SHIPPED} <= {home}
