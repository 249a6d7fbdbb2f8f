"""The data and the ancestors of a served model, for people who ask its server."""

from __future__ import annotations

from typing import Any

from dmlstudy.records import Ancestor
from dmlstudy.saved import Model
from dmlstudy.training.lineage import as_facts, facts, told


def of(model: Model) -> dict[str, Any]:
    """``trained``, in words, and the ``ancestry``, nearest first, of a model by the notes kept with it.

    Null where the notes do not tell.
    """
    notes = told(model.notes)
    own = Ancestor(source=model.name, **notes.trained_on_facts())
    ancestors = None if notes.start is None else as_facts(notes.start)
    return {"trained": facts(own) or None, "ancestry": ancestors, "seen": notes.seen or None}
