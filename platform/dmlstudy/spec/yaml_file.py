"""YAML as study and search-space files have it: plain mappings, lists and values, each key once, and no more than fits.

YAML has more than that: aliases that write a value out a thousand times over, tags that make other objects, merges,
dates. None of it is needed here, and each has been a way to hang a reader, so it is refused in one line that says what
to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dmlstudy.text import one_line, shown

MAX_BYTES = 2**20
"""A file's size; the largest of those that come with the package has 7 KB."""

MAX_NODES = 20_000
"""Keys, values, lists and mappings of a file together."""

MAX_DEPTH = 40
"""Lists and mappings within each other."""

LEFT_OUT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
"""Types that plain text is not converted to: a date stays text."""


class YamlError(ValueError):
    """A file that cannot be read as YAML: its name, the line, what is wrong and the fix, in one line."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's loader without aliases, anchors, tags, merges, dates and repeated keys, and with bounds.

    Its scanner and parser keep stacks of their own, so that no depth of a file is one of Python's before
    ``compose_node`` has refused it.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in LEFT_OUT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node; raises RefusedYaml for what this loader leaves out and what is beyond its bounds."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _refused(
                f"aliases and anchors are not read ({shown(sign + event.anchor)}); write the value out", event
            )
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise _refused(f"tags are not read ({shown(tag)}); write the plain value", event)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _refused(f"more than {MAX_NODES} keys and values; make it smaller", event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(
                f"more than {MAX_DEPTH} lists and mappings within each other; take some away", event
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping; raises RefusedYaml for a repeated key, of which PyYAML takes the last."""
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _refused("merges (<<) are not read; write the keys out", key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused("a list or mapping cannot be a key; write text", key_node)
            key = self.construct_object(key_node)
            if key in seen:
                raise _refused(f"the key {shown(key)} stands there twice; leave one out", key_node)
            seen.add(key)
        return dict(super().construct_mapping(node, deep=deep))


class RefusedYaml(yaml.MarkedYAMLError):
    """YAML, but none that is read here."""

    problem: str
    problem_mark: yaml.Mark


def _refused(problem: str, at: Any) -> RefusedYaml:
    return RefusedYaml(problem=problem, problem_mark=at.start_mark)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write out twice a list that occurs twice, as ``StrictLoader`` requires."""
        return True


def read(path: Path, what: str) -> Mapping[str, Any]:
    """The mapping in a file; raises YamlError, which says ``what`` a missing file should be."""
    return mapping(_text(path, what), str(path))


def mapping(text: str, place: str) -> Mapping[str, Any]:
    """The mapping that YAML text is; raises YamlError that begins with ``place``."""
    raw = value(text, place)
    if not isinstance(raw, Mapping):
        raise YamlError(f"{place}: expected a mapping at the top, got {type(raw).__name__}")
    return raw


def value(text: str, place: str) -> Any:
    """The value of YAML text; raises YamlError that begins with ``place``."""
    try:
        loader = StrictLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(
            f"{place}, line {line}: not YAML: the character {error.character:#x} cannot be read; remove it"
        ) from None
    except RefusedYaml as error:
        raise YamlError(f"{place}, line {error.problem_mark.line + 1}: {error.problem}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_of = f", line {mark.line + 1}" if mark else ""
        problem = one_line(getattr(error, "problem", None) or "cannot be parsed", 200)
        raise YamlError(f"{place}{line_of}: not YAML: {problem}") from None
    except (ValueError, OverflowError) as error:  # a number with more digits than Python takes
        raise YamlError(f"{place}: not YAML: {one_line(error, 120)}; write it shorter") from None


def dump(raw: Mapping[str, Any]) -> str:
    """A mapping as YAML text that ``mapping`` reads again."""
    return str(yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False))


def _text(path: Path, what: str) -> str:
    try:
        if path.is_dir():
            raise YamlError(f"{path}: is a folder; name the YAML file in it{_files_in(path)}")
        size = path.stat().st_size
        if not path.is_file():
            raise YamlError(f"{path}: is a pipe or device; name a file ({what})")
        if size > MAX_BYTES:
            raise YamlError(f"{path}: has {size / 2**20:.1f} MiB, and at most 1 is read; name {what}")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise YamlError(f"{path}: no such file ({what})") from None
    except UnicodeDecodeError as error:
        raise YamlError(
            f"{path}: cannot be read: byte {error.start} is no UTF-8 text; save it as UTF-8, or name {what}"
        ) from None
    except OSError as error:
        raise YamlError(f"{path}: cannot be read: {error.strerror or one_line(error, 120)}") from None
    except ValueError as error:
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"{shown(str(path))}: is no file's name ({what})") from None  # a NUL in it


def _files_in(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.y*ml"))
    return f", as {folder / found[0]}" if found else ", there is none"
