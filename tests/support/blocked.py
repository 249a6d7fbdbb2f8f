"""Embeds with a model where there is no Ray, MLflow or Optuna and nothing can be unpickled: by API and by command.

``python blocked.py MODEL INPUTS FOLDER`` writes ``api.npy`` and ``command.parquet`` into the folder.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, NoReturn

BLOCKED = {"ray", "mlflow", "optuna"}


class Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")


class Refusing(pickle._Unpickler):  # type: ignore[name-defined, misc]
    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise RuntimeError("something was to be unpickled")


def refuse(*arguments: Any, **named: Any) -> NoReturn:
    raise RuntimeError("something was to be unpickled")


def main(model: str, inputs: str, folder: str) -> None:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    import numpy as np
    import torch

    pickle.Unpickler = pickle._Unpickler = Refusing  # type: ignore[misc, attr-defined]
    pickle.load = pickle.loads = torch.load = refuse

    from dmlstudy import cli
    from dmlstudy.saved import Model
    from dmlstudy.saved.items import of_files

    opened = Model.open(model)
    items = of_files(opened, inputs)
    np.save(Path(folder) / "api.npy", opened.compute(items.read(range(len(items)))))
    sys.argv = ["dmlstudy", "embed", model, inputs, "-o", str(Path(folder) / "command.parquet")]
    try:
        cli.main()
    finally:
        loaded = BLOCKED & {name.split(".")[0] for name in sys.modules}
        assert not loaded, loaded


if __name__ == "__main__":
    main(*sys.argv[1:])
