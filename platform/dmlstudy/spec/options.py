"""Every key of a study file with its values, default and meaning, read from the records that check it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dmlstudy.records import DataConfig, Record, ResourcesConfig
from dmlstudy.spec.study_file import SECTIONS, FamilyEntry, ProtocolConfig, SearchConfig, SpecError, StudyFile
from dmlstudy.text import nearest

FAMILY = "families.NAME"

SECTION_RECORDS: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    **SECTIONS,
    FAMILY: FamilyEntry,
    "search": SearchConfig,
    "protocol": ProtocolConfig,
    "resources": ResourcesConfig,
}


class Option(Record):
    """One key: its values, its default and its meaning."""

    key: str
    values: str
    default: str
    is_searchable: bool
    description: str


def options(section: str | None = None) -> list[Option]:
    """The keys of a section, or those of all after those of the top; raises SpecError for an unknown section."""
    if section is None:
        top = {name: field for name, field in _fields(StudyFile).items() if name not in _NESTED}
        return _rows("", top, StudyFile) + [row for name in SECTION_RECORDS for row in options(name)]
    section = FAMILY if section == "families" else section
    if section not in SECTION_RECORDS:
        raise SpecError(f"options: no section {section!r}{nearest(section, SECTION_RECORDS, listed=True)}")
    record = SECTION_RECORDS[section]
    return _rows(section, _fields(record), record)


_NESTED = {"families", *SECTION_RECORDS}


def _fields(record: type[BaseModel]) -> dict[str, Mapping[str, Any]]:
    schema = record.model_json_schema()
    return dict(schema["properties"])


def _rows(section: str, fields: Mapping[str, Mapping[str, Any]], record: type[BaseModel]) -> list[Option]:
    required = record.model_json_schema().get("required", [])
    return [
        Option(
            key=f"{section}.{name}" if section else name,
            values=_values(schema),
            default="needed" if name in required else _default(schema.get("default")),
            is_searchable=section in SECTIONS and f"{section}.{name}" != "training.epochs",
            description=schema.get("description", ""),
        )
        for name, schema in fields.items()
    ]


def _default(value: object) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_default, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(schema: Mapping[str, Any]) -> str:
    """The values a key takes: names, or a type and its range."""
    if several := schema.get("anyOf", schema.get("oneOf")):
        parts = [_values(part) for part in several]
        return " or ".join(part for part in parts if part != "none")
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"[{', '.join(_values(part) for part in schema['prefixItems'])}]"
    if kind == "array":
        return f"list of: {_values(schema.get('items', {}))}"
    words = {
        "integer": "integer",
        "number": "number",
        "boolean": "true | false",
        "string": "text",
        "null": "none",
    }
    return " ".join([words.get(str(kind), "section"), *_range(schema)])


def _range(schema: Mapping[str, Any]) -> list[str]:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {schema[name]:g}" if abs(schema[name]) < 10**6 else f"{sign} {schema[name]}"
              for name, sign in signs.items() if name in schema]  # fmt: skip
    steps = [f"in steps of {schema['multipleOf']}"] if "multipleOf" in schema else []
    return [", ".join([*bounds, *steps])] if bounds or steps else []
