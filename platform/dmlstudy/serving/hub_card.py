"""A model's card as Hugging Face reads it: README.md with a head in YAML, the registered card and the model's use.

Scores in the head are those of the registered card's table, which the model's folder holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dmlstudy.registry.models import CARD
from dmlstudy.saved import Model

README = "README.md"

TASK = "image-feature-extraction"

ROW = re.compile(r"\| (?P<name>[^|]+) \| (?P<mean>-?\d+\.\d+) \| (?P<interval>[^|]+) \|")
TABLE = "| metric | mean | 95% t-interval |"


def scores(card: str) -> dict[str, float]:
    """The means in the table of scores of a registered card, by the names that people read; empty without one."""
    _, _, rest = card.partition(f"\n{TABLE}\n")
    found = {}
    for line in rest.splitlines()[1:]:
        row = ROW.fullmatch(line)
        if row is None:
            break
        found[row["name"]] = float(row["mean"])
    return found


def registered_card(model: Model) -> str:
    """The card in a model's folder without how it is used from there; a title where there is none."""
    path = model.folder / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else f"# An {model.kind} of dmlstudy\n"
    return re.split(r"^## Use$", text, flags=re.MULTILINE)[0].rstrip() + "\n"


def hub_card(
    model: Model,
    name: str,
    *,
    library: str,
    tags: Sequence[str],
    licence: str | None,
    uses: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """The text of README.md. ``uses`` are titles with their Python code, ``notes`` sentences for whoever loads it."""
    card = registered_card(model)
    head: dict[str, Any] = {
        **({"license": licence} if licence else {}),
        "library_name": library,
        "pipeline_tag": TASK,
        "tags": list(tags),
    }
    index = _index(model, name, scores(card))
    if index:
        head["model-index"] = index
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(), "---", "", card]
    lines += ["## Use", ""]
    for title, code in uses.items():
        lines += [f"### {title}", "", "```python", code.rstrip(), "```", ""]
    return "\n".join([*lines, *(f"* {note}" for note in notes), ""])


def _index(model: Model, name: str, found: Mapping[str, float]) -> list[dict[str, Any]]:
    """The scores in the hub's form."""
    if not found:
        return []
    data = str(model.notes.get("config", {}).get("data", {}).get("name", "unknown"))
    metrics = [{"type": _slug(metric), "name": metric, "value": value} for metric, value in found.items()]
    result = {
        "task": {"type": TASK, "name": "Retrieval of unseen classes"},
        "dataset": {"type": _slug(data), "name": data, "split": "test"},
        "metrics": metrics,
    }
    return [{"name": name, "results": [result]}]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unknown"
