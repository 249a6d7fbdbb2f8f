"""The file with which a registered model computes where there is no dmlstudy (``standalone``), as models ship it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmlstudy.files import temporary_folder

SOURCE = Path(__file__).with_name("standalone.py")

NAME = "dmlstudy_model_1.py"
"""Two models in one process share the first one's file, so another name goes with what an earlier file cannot do."""


@contextmanager
def copied() -> Iterator[Path]:
    """A copy under the name that models import it by, for the time being."""
    with temporary_folder() as scratch:
        yield Path(shutil.copyfile(SOURCE, Path(scratch) / NAME))
