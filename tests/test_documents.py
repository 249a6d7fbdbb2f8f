"""The documents: links lead somewhere, command lines and study files in them are read as the package reads them."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.core
import typer.main
import yaml

from dmlstudy.cli.app import app
from dmlstudy.spec import study_file

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(
        path
        for room in ("platform", "search_spaces", "jobs", "tests")
        for path in (ROOT / room).rglob("*.md")
    ),
]
ABOVE = [document for document in DOCUMENTS if (ROOT / "platform") not in document.parents]
"""What a user reads before anything of the package's own."""

TOP_LINES = 155
PARAGRAPH_WORDS = 60

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
STUDY: Mapping[str, Any] = {
    "name": "fragment",
    "data": {"name": "digits"},
    "families": {"only": {"space": "triplet_weighting"}},
}
"""What a fragment of a study file is completed with."""


class Block(NamedTuple):
    """A fenced block: its document, its line there, its language and its text."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name_of(self.document)}:{self.line}"


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(*languages: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(document, line, match[2], match[3]))
    return [block for block in found if block.language in languages]


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in HEADING.findall(text):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def broken_links(document: Path) -> list[str]:
    text = CODE_SPAN.sub(lambda code: "" if "](" in code[0] else code[0], prose(document))
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        is_there = file.exists() and file.is_relative_to(ROOT)
        if not is_there or (anchor and (file.suffix != ".md" or anchor not in anchors(prose(file)))):
            broken.append(target)
    return broken


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each command of shell text, without comments and without variables set before it."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word in (";", "&&", "||", "|"):
                while command and re.match(r"[A-Z_]+=", command[0]):
                    del command[0]
                if command:
                    yield command
                command = []
            else:
                command.append(word)


@functools.cache
def group() -> typer.core.TyperGroup:
    """The command line, without callbacks: parsing it changes nothing."""
    found = typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    for command in [found, *found.commands.values()]:
        for parameter in command.params:
            parameter.callback = None
    return found


def parse(words: list[str]) -> None:
    """Parse ``dmlstudy ...`` without running it; raises ValueError."""
    cli = group()
    context = cli.context_class(cli, info_name="dmlstudy")
    verb, *rest = words[1:]
    try:
        if verb.startswith("-"):
            cli.make_parser(context).parse_args([verb, *rest])
        else:
            cli.commands[verb].make_context(verb, rest, parent=context)
    except KeyError:
        raise ValueError(f"no command {verb}") from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # the errors of a command line have it
            raise
        raise ValueError(error.format_message()) from None


def check_yaml(text: str, folder: Path) -> None:
    """Read a YAML sample as the package would: a study, a fragment of one, or a family; raises SpecError."""
    raw = yaml.safe_load(text)
    assert isinstance(raw, dict), "a mapping was expected"
    if "loss" in raw:
        file = folder / "family.yaml"
        file.write_text(text, encoding="utf-8")
        raw = {"families": {"only": {"space": str(file)}}}
    study_file.parse({**STUDY, **raw})


def words_of_paragraphs(document: Path) -> Iterator[tuple[int, str]]:
    """The number of words and the beginning of each paragraph and each point of a list."""
    text = re.sub(r"<!--.*?-->", "", prose(document), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[*-]|\d+\.) )", text):
        lines = [line for line in paragraph.strip().splitlines() if not line.lstrip().startswith(("|", "#"))]
        yield len(" ".join(lines).split()), " ".join(lines)[:60]


def test_the_documents_are_there() -> None:
    names = {name_of(document) for document in DOCUMENTS}
    assert names >= {
        "README.md",
        "search_spaces/README.md",
        "search_spaces/studies/README.md",
        "jobs/README.md",
        "tests/README.md",
        "tests/benchmarks/README.md",
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("document", ABOVE, ids=name_of)
def test_paragraphs_are_short(document: Path) -> None:
    assert [found for found in words_of_paragraphs(document) if found[0] > PARAGRAPH_WORDS] == []


def test_the_top_document_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= TOP_LINES


@pytest.mark.parametrize("block", blocks("bash", "sh"), ids=lambda block: block.where)
def test_command_lines_are_understood(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, capture_output=True)
    for words in command_lines(block.text):
        if Path(words[0]).name == "dmlstudy":
            parse(words)


@pytest.mark.parametrize("block", blocks("bash", "sh"), ids=lambda block: block.where)
def test_scripts_that_are_called_exist_with_their_options(block: Block) -> None:
    for words in command_lines(block.text):
        for place, word in enumerate(words):
            if re.match(r"(tests|jobs)/\S+\.(py|sh)$", word):
                source = (ROOT / word).read_text(encoding="utf-8")
                options = [each for each in words[place + 1 :] if each.startswith("--")]
                assert [each for each in options if word.endswith(".py") and f'"{each}"' not in source] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"`dmlstudy ([a-z][a-z-]*)", prose(document))
    assert set(named) <= set(group().commands)


def test_the_top_document_lists_every_command() -> None:
    section = prose(ROOT / "README.md").partition("## Commands")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    named = [name for row in rows for name in re.findall(r"`([a-z]+)`", row)]
    assert len(rows) == 5
    assert sorted(named) == sorted(name for name, each in group().commands.items() if not each.hidden)


@pytest.mark.parametrize("block", blocks("yaml", "yml"), ids=lambda block: block.where)
def test_yaml_samples_are_read(block: Block, tmp_path: Path) -> None:
    check_yaml(block.text, tmp_path)


def test_python_samples_compile() -> None:
    for block in blocks("python"):
        compile(block.text, block.where, "exec")


def test_every_family_study_and_benchmark_is_named() -> None:
    families = (ROOT / "search_spaces" / "README.md").read_text(encoding="utf-8")
    bases = {name.removeprefix("nasa_") for name in study_file.family_files()}
    assert {name for name in bases if f"`{name}`" not in families} == set()
    top = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(study_file.family_files())} loss families" in top
    for folder, kind in (("search_spaces/studies", "*.yaml"), ("tests/benchmarks", "*.py")):
        text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        assert [file.name for file in (ROOT / folder).glob(kind) if f"`{file.stem}" not in text] == []


def test_completion_of_the_shell_is_on() -> None:
    assert {"install_completion", "show_completion"} <= {str(each.name) for each in group().params}


def test_the_package_brings_its_licence_and_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "MIT"
    for name in project["license-files"]:
        assert (ROOT / name).read_text(encoding="utf-8").startswith("MIT License\n")
        assert name.startswith("platform/dmlstudy/")
    assert (ROOT / project["readme"]).is_file()


def test_the_workflow_and_the_hooks_call_scripts_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yaml").read_text(encoding="utf-8"))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    called = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called += [hook["entry"] for repository in hooks["repos"] for hook in repository["hooks"]]
    assert set(called) == {"bash tests/run.sh", "bash tests/lint.sh"}
    assert "bash tests/lint.sh" in (ROOT / "tests/run.sh").read_text(encoding="utf-8")
    assert all((ROOT / command.split()[1]).is_file() for command in called)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("dmlstudy nothing", "no command nothing"),
        ("dmlstudy run", "Missing argument"),
        ("dmlstudy run a.yaml --no-such-option", "--no-such-option"),
        ("dmlstudy jobs --address", "requires an argument"),
    ],
)
def test_a_planted_command_is_found(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(next(command_lines(f"A=1 {line}  # a comment")))


def test_planted_links_and_samples_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    document = tmp_path / "README.md"
    document.write_text(
        "# One: `two`\n[a](#one-two) [b](#three) [c](gone.md) [d](README.md#one-two) [e](../x) ![f](https://x.y)\n"
        "```bash\n[g](inside.md)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(document) == ["#three", "gone.md", "../x"]
    with pytest.raises(study_file.SpecError, match=r"training\.epocs"):
        check_yaml("training: {epocs: 3}", tmp_path)
