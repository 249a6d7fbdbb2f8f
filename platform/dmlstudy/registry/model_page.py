"""The description of a registered model on MLflow's page: what is in use, how it is loaded, what was decided.

It is rewritten with each decision as long as it ends with ``WRITTEN``; a text that a person wrote stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmlstudy import metric_names
from dmlstudy.registry.ancestry import markdown_line
from dmlstudy.registry.models import CHAMPION, RegisteredVersion

WRITTEN = "*Kept up to date by dmlstudy; replace this text by one of your own and it stays.*"

MOST = 10
"""Versions and decisions in the text; `dmlstudy models NAME` lists all."""


def text(name: str, versions: Sequence[RegisteredVersion], decisions: Sequence[tuple[str, str]]) -> str:
    """Markdown. ``decisions`` are when and what, oldest first."""
    champion = next((each for each in versions if CHAMPION in each.aliases), None)
    in_use = "No version is in use yet." if champion is None else f"In use: {_said(champion)}."
    of_studies = ", ".join(dict.fromkeys(each.study for each in versions if each.study))
    newest = sorted(versions, key=lambda each: -each.version)[:MOST]
    return "\n".join(
        [
            f"{in_use} Each version is the model of a family of losses, trained and judged in a study ({of_studies}).",
            "",
            "```python",
            "import mlflow  # with numpy and torch, not dmlstudy",
            "",
            f'mlflow.pyfunc.load_model("models:/{name}@{CHAMPION}").predict(x)',
            "```",
            "",
            f"What `x` is, and all scores, are in the version's description. Files, verified:"
            f" `dmlstudy pull {name} --to model`.",
            "",
            "**Versions**",
            "",
            *(f"* {_said(each)}" for each in newest),
            "",
            "**Decisions**",
            "",
            *(f"* {at[:10]}: {what}" for at, what in list(decisions)[::-1][:MOST]),
            "",
            WRITTEN,
        ]
    )


def _said(version: RegisteredVersion) -> str:
    alias = "".join(
        f" `@{each}`" for each in sorted(version.aliases)
    )  # bare, MLflow links it as someone's name
    score = version.metrics.get(metric_names.on_test(version.objective))
    scored = "" if score is None else f", test {version.objective} {score:.4f}"
    started = f", trained from {markdown_line(version.ancestry)}" if version.ancestry else ""
    return f"**version {version.version}**{alias}, {version.family} of {version.study}{scored}{started}"
