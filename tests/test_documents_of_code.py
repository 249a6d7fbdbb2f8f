"""The documents beside the code: nothing names one that is missing, and every key of a study file is described."""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from test_layout import DOORS, FLOORS, PACKAGE, ROOT

from dmlstudy.cli.app import app
from dmlstudy.spec import options
from dmlstudy.spec.study_file import StudyFile

SOURCES = [
    path
    for folder in ("platform", "jobs", "tests", "search_spaces")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".yaml", ".sh")
] + [ROOT / "cluster.yaml", ROOT / "pyproject.toml"]

READMES = sorted(PACKAGE.rglob("README.md"))

HAVE_A_README = (
    "losses",
    "hashing",
    "online",
    "retrieval",
    "data",
    "embedders",
    "search",
    "registry",
    "serving",
)

WRITTEN = {"card.md"}
"""Documents that the program itself writes."""

MOST_WORDS = 60
"""In a paragraph of a docstring, rows of tables left out."""

BARE_OPENING = re.compile(r"\s*(What|Which|Who|Whom|Where|When|Why|How|Whether|That)\b")

DOCUMENT = re.compile(r"[\w./-]+\.(?:md|rst|pdf)\b")

SECTION = re.compile(
    r"\b[A-Z]{6,}'?(?: section)? (?:[A-Z]-[A-Z]?\d+|\d+(?:\.\d+)*)(?![,\d])|\([A-Z]{6,}, [a-z]+\)"
)
"""A section of a document that is called by one word in capitals."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that stands as a statement: docstrings, and those of attributes."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def told(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a file says to its readers: docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from docstrings(text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    else:
        lines = enumerate(text.splitlines(), 1)
        yield from ((number, line[line.index("#") :]) for number, line in lines if "#" in line)


def missing(text: str, folder: Path) -> list[str]:
    """Documents that a text names and that are not there, from its own folder, the package's or the repository's."""
    named = [match.group() for match in DOCUMENT.finditer(text)]
    places = (folder, PACKAGE, ROOT)
    unknown = [name for name in named if not any((place / name).exists() for place in places)]
    return [name for name in unknown if name not in WRITTEN] + [
        match.group() for match in SECTION.finditer(text)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_or_comment_names_a_missing_document(path: Path) -> None:
    found = [(line, name) for line, text in told(path) for name in missing(text, path.parent)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Counts: see NOTHERE.md, section 7.", ["NOTHERE.md"]),
        ("As in ``losses/NOTHERE.md``.", ["losses/NOTHERE.md"]),
        ("The usual loss (Wang et al. 2019; FORMULAS 2.2).", ["FORMULAS 2.2"]),
        ("Detached (FORMULAS A-G2), one for each image.", ["FORMULAS A-G2"]),
        ("Corrected for how many there are (CUSTOMS, verdict).", ["(CUSTOMS, verdict)"]),
        ("The folder holds card.md; see ``losses/README.md``.", []),
        ("NASA Eq. 8, OAHU 4.3.2, and all of MIR-FLICKR 25,000.", []),
    ],
)
def test_a_missing_document_is_noticed(text: str, found: Sequence[str]) -> None:
    assert missing(text, PACKAGE / "data") == found


def words_of_paragraphs(docstring: str) -> list[int]:
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^ *\|.*$", "", docstring, flags=re.M))
    return [len(paragraph.split()) for paragraph in paragraphs]


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_paragraph_of_a_docstring_is_long(path: Path) -> None:
    found = [
        (line, max(words_of_paragraphs(text))) for line, text in docstrings(path.read_text(encoding="utf-8"))
    ]
    assert [each for each in found if each[1] > MOST_WORDS] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_begins_with_a_noun_phrase_or_a_verb(path: Path) -> None:
    found = docstrings(path.read_text(encoding="utf-8"))
    assert [(line, text) for line, text in found if BARE_OPENING.match(text)] == []


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, num in names.items() if num > 1} == set()


def test_floors_and_doors_of_the_readme_are_those_that_hold() -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    order = [name for floor in FLOORS for name in floor if name not in ("__main__", "description")]
    places = {
        name: next((n for n, row in enumerate(rows) if re.search(rf"\b{name}\b", row)), None)
        for name in order
    }
    assert [name for name, place in places.items() if place is None] == []
    height = [min(place for name in floor if (place := places.get(name)) is not None) for floor in FLOORS]
    assert height == sorted(height)
    doors = text.partition("## Doors")[2].partition("\n## ")[0].splitlines()
    for library, door in DOORS.items():
        assert any(re.search(rf"(?<![\w.]){re.escape(library)}\b.*\|.*`{door}", line) for line in doors), (
            library
        )


def test_floors_that_hold_decisions_have_a_readme() -> None:
    assert [name for name in HAVE_A_README if not (PACKAGE / name / "README.md").exists()] == []


def blocks(language: str) -> list[Any]:
    """The samples of a language in the package's READMEs."""
    return [
        pytest.param(block, id=f"{path.parent.name}-{number}")
        for path in READMES
        for number, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
        )
    ]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_keys_of_samples_are_keys_of_a_study(block: str) -> None:
    known = {option.key for option in options.options()}
    for section, values in yaml.safe_load(block).items():
        if section in ("families", "regularizer", "loss"):
            continue
        assert {f"{section}.{key}" for key in values} <= known


@pytest.mark.parametrize("block", blocks("python"))
def test_samples_of_python_are_python(block: str) -> None:
    compile(block, "sample", "exec")


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_and_options_of_samples_are_there(block: str) -> None:
    group: Any = typer.main.get_command(app)
    for line in block.splitlines():
        words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
        if words[:1] != ["dmlstudy"]:
            continue
        command = group.commands[words[1]]
        known = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words[2:] if word.startswith("-")} <= known


def bounds_of(field: FieldInfo) -> Iterator[float]:
    """The bounds that a key's value is checked against, wherever in its type they stand."""

    def within(kind: Any) -> Iterator[Any]:
        yield from getattr(kind, "__metadata__", ())
        for part in getattr(kind, "__args__", ()):
            yield from within(part)

    for each in [*field.metadata, *within(field.annotation)]:
        if isinstance(each, FieldInfo):
            yield from bounds_of(each)
        for name in ("ge", "gt", "le", "lt"):
            kinds = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)
            if isinstance(each, kinds) and hasattr(each, name):
                yield getattr(each, name)


RECORDS: dict[str, type[BaseModel]] = {"": StudyFile, **options.SECTION_RECORDS}


@pytest.mark.parametrize("section", RECORDS)
def test_each_key_is_described_and_shown_with_type_default_and_range(section: str) -> None:
    shown = {option.key: option for option in options.options(section or None)}
    nested = {"families", *RECORDS} if not section else set()
    num_bounds = 0
    for name, field in RECORDS[section].model_fields.items():
        if name in nested:
            continue
        option = shown[f"{section}.{name}" if section else name]
        assert field.description
        assert option.description == field.description
        assert option.values
        assert option.default
        for bound in bounds_of(field):
            num_bounds += 1
            written = "|".join(map(re.escape, (f"{bound:g}", str(bound))))
            assert re.search(rf"[<>]=? ({written})(?!\d|\.\d)", option.values), (name, bound, option.values)
    assert num_bounds or section in ("", "families.NAME")
