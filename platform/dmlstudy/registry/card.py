"""A model's card: what it is, what it was trained on, how it was judged and with what scores, and where that ends.

It is kept in the model's folder, and as the version's description in MLflow, each with how the model is used from
there (``usage``, which ``models.register`` adds).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dmlstudy import metric_names
from dmlstudy.data import preprocessing as data_preprocessing
from dmlstudy.records import DataConfig
from dmlstudy.registry import ancestry
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.registry.markdown import code, verbatim
from dmlstudy.training.lineage import ARROW, RANDOM, KeptNotes
from dmlstudy.verdict.comparison import remarks
from dmlstudy.verdict.thresholds import Errors

if TYPE_CHECKING:
    from dmlstudy.registry.compatibility import Compatibility, CrossScore

SHOWN = 12
"""Test metrics in the table: the objective, then the others in their order."""


def card(
    board: Leaderboard,
    row: Row,
    *,
    limits: str,
    data: DataConfig,
    trained: str,
    origin: Mapping[str, str],
    protocol: Mapping[str, Any],
    name: str,
    preprocessing: Mapping[str, Any] | None = None,
    start: Mapping[str, str] | None = None,
    notes: KeptNotes | None = None,
    threshold: Errors | None = None,
) -> str:
    """The card of a family's model as Markdown, without its ``usage``.

    ``trained`` is the day of its training, ``origin`` the study's tags, ``preprocessing`` what the model says that it
    is to be given (``Model.preprocessing``). ``notes`` are those kept with it, on its ancestors; for those of earlier
    versions, which tell none, ``start`` are the tags of its run (``training.lineage.tags``). ``threshold`` is what the
    shipped one does, where there is one.

    Of a path only the last part is shown, and no name of a user's becomes markup.
    """
    objective = metric_names.on_test(board.objective)
    shown = sorted(
        (
            metric
            for metric in row.test
            if not metric_names.is_count(metric) and metric_names.short_form(metric) is None
        ),
        key=lambda each: each != objective,
    )[:SHOWN]
    shown += _of_retention(board, row)
    protocol = {key: value for key, value in protocol.items() if key != "retention"}
    return "\n".join(
        [
            f"# {name}: {row.family}",
            "",
            f"Of the family **{row.family}** in the study **{board.study}**, trained on {trained}.",
            "",
            "## Trained on",
            "",
            *_listed(
                {
                    "data": data.name + (f", {verbatim(PurePath(data.path).name)}" if data.path else ""),
                    **_size(data),
                    "development": _of(origin, "development"),
                    "test": _of(origin, "test"),
                    **_started(notes, start or {}),
                    **_retention(board),
                    "images in both": origin.get("num_shared_images", "not counted"),
                    "licence": ancestry.licence_line(notes),
                }
            ),
            "",
            *ancestry.section(notes),
            "## Judged",
            "",
            *_listed({key.replace("_", " "): _said(value) for key, value in protocol.items() if value}),
            "",
            f"The search tried {row.num_tried} configurations ({row.num_finished} finished) and chose by the validation"
            f" {board.objective}; the test classes or rows were looked at once by each of {row.num_judged} seeds.",
            "",
            "| metric | mean | 95% t-interval |",
            "|---|---:|---|",
            *(_score(metric, row) for metric in shown),
            "",
            *_compared(board, row.family),
            *_short(board, row.family),
            *_threshold(threshold),
            *_lost(board, row.family),
            *_preprocessing(preprocessing or {}),
            "## Limits",
            "",
            f"{limits}{_beyond(board)} The interval is over seeds of training, not over draws of the data.",
            "",
            "",
        ]
    )


def usage(name: str, number: int | None, takes: str, gives: str) -> str:
    """The card's last section, of the version ``number`` in a registry; None: of the model's folder, wherever it is.

    ``takes`` and ``gives`` are types and shapes, as ``uint8 (N, 64, 64, 3)``.
    """
    what = "images, values 0 to 255" if takes.startswith("uint8") else "vectors"
    of_version = (
        f"dmlstudy pull {name}/{number} --to model",
        "import mlflow  # with numpy and torch, not dmlstudy",
        "",
        f'mlflow.pyfunc.load_model("models:/{name}/{number}").predict(x)',
    )
    of_folder = (
        "dmlstudy embed FOLDER images/ -o embeddings.parquet",
        "from glob import glob",
        "",
        "import torch  # alone; FOLDER is this file's",
        "",
        'torch.export.load(glob("FOLDER/*.pt2")[0]).module()(torch.from_numpy(x))',
    )
    command, *python = of_folder if number is None else of_version
    return "\n".join(
        [
            "## Use",
            "",
            *_listed({"takes": f"{what}: {takes}", "gives": f"one row for each: {gives}"}),
            "",
            "```bash",
            command,
            "```",
            "",
            "```python",
            *python,
            "```",
            "",
        ]
    )


COMPATIBILITY = "## Compatibility"


def compatibility(found: Compatibility) -> str:
    """The section on queries of this model in galleries of the one before it, as Markdown."""
    base = found.of("old", "old")
    return "\n".join(
        [
            COMPATIBILITY,
            "",
            f"{found.new} (new) with galleries of {found.old} (old), on {found.num_classes} test classes that neither"
            f" has seen. The {found.kind} maps are fitted on {found.num_fitted} development items.",
            "",
            "| queries | gallery | map | MAP@R | beside old in old | R@1 |",
            "|---|---|---|---:|---:|---:|",
            *(
                f"| {each.queries} | {each.gallery} | {each.map or 'none'} | {each.map_at_r:.4f} |"
                f" {_beside(each, base)} | {each.recall_at_1:.4f} |"
                for each in found.scores
            ),
            "",
            *([f"Without a map: {found.not_crossed}.", ""] if found.not_crossed else []),
            f"Cost: {found.cost}.",
            "",
        ]
    )


def _beside(score: CrossScore, base: CrossScore | None) -> str:
    """The difference from ``base``, with its interval for classes like these where there is one."""
    if base is None:
        return ""
    effect = f"{score.map_at_r - base.map_at_r:+.4f}"
    return effect if score.beside is None else f"{effect} [{score.beside.low:+.4f}, {score.beside.high:+.4f}]"


def with_compatibility(card: str, section: str) -> str:
    """A card with this section before its use, in place of one of an earlier comparison."""
    before, found, rest = card.partition(f"{COMPATIBILITY}\n")
    if found:
        _, heading, after = rest.partition("\n## ")
        return f"{before}{section}{heading and f'{heading}{after}'}"
    before, found, after = card.partition("## Use\n")
    return f"{before}{section}\n{found}{after}" if found else f"{card}\n{section}"


def _size(data: DataConfig) -> dict[str, str]:
    if data.image_size is None:
        return {}
    before = f", cut from {data.resize_to}" if data.resize_to else ""
    return {"picture size": f"{data.image_size} x {data.image_size} pixels{before}"}


def _started(notes: KeptNotes | None, tags: Mapping[str, str]) -> dict[str, str]:
    """Its start in the list: random weights, or what the tags tell where there is no section on its ancestors."""
    if notes is None or not notes.start:
        return {name: code(text) if name == "started from" else text for name, text in _start(tags).items()}
    return {"started from": ancestry.RANDOM_WEIGHTS} if notes.start[0].source == RANDOM else {}


def _start(tags: Mapping[str, str]) -> dict[str, str]:
    """Its start, with all ancestors, and the classes of the study that the start had seen."""
    if "start" not in tags:
        return {}
    shown = ARROW.join(_without_folders(each) for each in tags["start"].split(ARROW))
    seen = tags.get("start_seen")
    return {"started from": shown, **({"the start": seen} if seen else {})}


def _without_folders(source: str) -> str:
    if source.startswith("/"):
        return PurePath(source).name
    return re.sub(r"\?store=\S+", " of another store", source)


def _listed(values: Mapping[str, Any]) -> list[str]:
    return [f"* {name}: {value}" for name, value in values.items()]


def _said(value: Any) -> str:
    """A setting as people write it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def _of(origin: Mapping[str, str], side: str) -> str:
    num_classes = origin.get(f"num_{side}_classes")
    classes = "" if num_classes is None else f" of {num_classes} classes"
    return f"{origin.get(f'num_{side}_images', '?')} images{classes}, SHA-256 {origin.get(f'{side}_sha256', '?')[:16]}"


def _score(metric: str, row: Row) -> str:
    estimate = (row.test | row.retention)[metric]
    half = estimate.half_width
    low_high = "one seed" if half is None else f"{estimate.mean - half:.4f} to {estimate.mean + half:.4f}"
    name = metric_names.for_people(metric).removeprefix("test ")
    return f"| {name} | {estimate.mean:.4f} | {low_high} |"


def _compared(board: Leaderboard, family: str) -> Sequence[str]:
    own = [each for each in board.comparisons if family in (each.first, each.second)]
    if not own:
        return []
    said = "Paired by seed, corrected for all pairs of the study (Holm)"
    untested = [row.untested for row in board.rows if row.family == family and row.untested]
    notes = [f"{each[0].upper()}{each[1:]}." for each in [*remarks(own), *untested]]
    return [
        f"{said}:",
        "",
        *(f"* {each}" for each in own),
        "",
        *(line for note in notes for line in (note, "")),
    ]


def _short(board: Leaderboard, family: str) -> Sequence[str]:
    """The scores of the model's embeddings in short forms, and what each loses."""
    own = [each for each in board.short if each.family == family]
    if not own:
        return []
    return [
        "## Short vectors",
        "",
        f"The first numbers of an embedding, of 32, 8 or 1 bit each; the whole takes {own[0].whole_bytes} bytes.",
        "",
        f"| form | bytes | {metric_names.for_people(metric_names.on_test(board.objective))} | less the whole's |",
        "|---|---:|---:|---|",
        *(
            f"| {each.form} | {each.num_bytes} | {each.score} |"
            f" {'' if each.beside_whole is None else each.beside_whole.told_effect()} |"
            for each in own
        ),
        "",
    ]


def _threshold(found: Errors | None) -> Sequence[str]:
    """The shipped threshold with its errors on unseen classes, and what is to be said against these."""
    if found is None:
        return []
    return [
        "## Threshold",
        "",
        f"* {found}",
        *([f"* {found.on_new_classes}"] if found.on_new_classes else []),
        *(f"* **Warning**: {each}." for each in found.warnings),
        "",
        "Two items match if the cosine of their embeddings is tau or more. FMR: pairs of two classes that match; FNMR:"
        " pairs of one class that do not; in brackets 95% intervals for classes like these.",
        "",
    ]


def _retention(board: Leaderboard) -> dict[str, str]:
    """The retention data, for the list of what the model was trained on and judged by."""
    if board.retention is None:
        return {}
    seen = f"; {board.retention.seen}" if board.retention.seen else ""
    return {"retention": f"{board.retention}, for scores alone{seen}"}


def _of_retention(board: Leaderboard, row: Row) -> list[str]:
    """Scores on the retention data in the table: the objective and Recall@1."""
    wanted = dict.fromkeys(map(metric_names.on_retention, (board.objective, "recall_at_1")))
    return [name for name in wanted if name in row.retention]


def _lost(board: Leaderboard, family: str) -> Sequence[str]:
    lost = board.lost_by(family)
    if lost is None:
        return []
    said = f"Retention {board.objective}, against the embedder untrained, paired by seed, corrected for all families:"
    return [said, "", f"* {lost}", ""]


def _beyond(board: Leaderboard) -> str:
    return "" if board.retention is None else " Beyond them only the retention data were looked at."


def _preprocessing(described: Mapping[str, Any]) -> Sequence[str]:
    """From a file to the model's input, in words and as code; nothing where nothing is described."""
    steps = data_preprocessing.words(described)
    if not steps:
        return []
    code = data_preprocessing.code(described)
    return [
        "## Preprocessing",
        "",
        *(f"* {step}" for step in steps),
        "",
        *(["```python", code.rstrip(), "```", ""] if code else []),
    ]
