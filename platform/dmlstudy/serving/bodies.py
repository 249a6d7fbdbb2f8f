"""The content of a request's body: pictures or vectors, in whatever form clients send them.

A picture's format is what its bytes say; the type that a client gives it is not looked at. Shapes: N items, F features.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

JSON_FORMS = '{"images": ["<base64>", ...]} or {"image": "<base64>"}'
VECTOR_FORMS = '{"vectors": [[...], ...]} or {"vector": [...]}'


class RefusedRequest(HTTPException):
    """A request that is answered with an error."""

    def __init__(self, status_code: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status_code, " ".join(detail.split()), headers)


def vectors(content_type: str, body: bytes, num_features: int, max_items: int) -> NDArray[np.float32]:
    """The vectors in a body of JSON. Raises RefusedRequest naming what is wrong."""
    if not _is_json(content_type, body):
        raise RefusedRequest(415, f"the model takes vectors; send {VECTOR_FORMS} as application/json")
    rows = _listed(body, "vectors", "vector", VECTOR_FORMS, max_items)
    try:
        with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
            x_NF = np.array(rows, dtype=np.float64).astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        raise RefusedRequest(422, "vectors must be numbers, equally many in each") from None
    if x_NF.ndim != 2 or x_NF.shape[1] != num_features or not np.isfinite(x_NF).all():
        raise RefusedRequest(
            422, f"vectors of shape {x_NF.shape}; send finite ones of {num_features} numbers"
        )
    return x_NF


def pictures(content_type: str, body: bytes, max_items: int) -> list[bytes]:
    """The files of the pictures in a body: JSON, a form with files, or the one picture itself.

    Raises RefusedRequest naming what is wrong.
    """
    if _kind(content_type) == "multipart/form-data":
        return _of_form(content_type, body, max_items)
    if not _is_json(content_type, body):
        if not body:
            raise RefusedRequest(
                400, f"the body is empty; send a picture's bytes, a form with files, or {JSON_FORMS}"
            )
        return [body]
    return [_decoded(each) for each in _listed(body, "images", "image", JSON_FORMS, max_items)]


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_json(content_type: str, body: bytes) -> bool:
    """True if a body is, or is meant to be, JSON; no picture begins with a brace."""
    kind = _kind(content_type)
    return kind == "application/json" or kind.endswith("+json") or body[:64].lstrip()[:1] == b"{"


def _listed(body: bytes, many: str, one: str, forms: str, max_items: int) -> list[Any]:
    """The items that an object lists under ``many``, or the one that it has under ``one``."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedRequest(400, "the body is not valid JSON") from None
    if not isinstance(content, dict) or (many in content) == (one in content):
        raise RefusedRequest(400, f"expected {forms}")
    rows = [content[one]] if one in content else content[many]
    if not isinstance(rows, list) or not rows:
        raise RefusedRequest(400, f"expected {forms}, with one item at least")
    if len(rows) > max_items:
        raise RefusedRequest(413, f"{len(rows)} items; at most {max_items} in one request")
    return rows


def _decoded(text: Any) -> bytes:
    """The bytes of base64, also within a data URI."""
    if isinstance(text, str) and text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RefusedRequest(400, "images: a data URI must be data:image/...;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise RefusedRequest(400, "images must be base64 strings") from None


@dataclass
class _Form:
    """The parts of a form, as a parser comes upon them; all that has a filename is a picture."""

    max_items: int
    files: list[bytes] = field(default_factory=list)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: bytes = b""
    value: bytes = b""
    content: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self.begin,
            "on_header_field": self.add_name,
            "on_header_value": self.add_value,
            "on_header_end": self.end_header,
            "on_headers_finished": self.check,
            "on_part_data": self.add,
            "on_part_end": self.end,
            "on_end": self.end_form,
        }

    def begin(self) -> None:
        if len(self.files) == self.max_items:
            raise RefusedRequest(413, f"more than {self.max_items} items in one request; send fewer")
        self.headers, self.content = {}, bytearray()

    def add_name(self, data: bytes, start: int, end: int) -> None:
        self.name += data[start:end]

    def add_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def end_header(self) -> None:
        self.headers[self.name.lower()] = self.value
        self.name = self.value = b""

    def check(self) -> None:
        given = self.headers.get(b"content-disposition", b"")
        if not re.search(rb";\s*filename\*?\s*=", given, re.IGNORECASE):
            name = parse_options_header(given)[1].get(b"name", b"").decode("utf-8", "replace")[:40]
            raise RefusedRequest(
                400, f"the form's field {name!r} is no file; send pictures as in curl -F image=@x.jpg"
            )

    def add(self, data: bytes, start: int, end: int) -> None:
        self.content += data[start:end]

    def end(self) -> None:
        self.files.append(bytes(self.content))

    def end_form(self) -> None:
        self.is_whole = True


def _of_form(content_type: str, body: bytes, max_items: int) -> list[bytes]:
    """The files of a form, which is in memory already: nothing is written to a disk."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise RefusedRequest(400, "the form's content type has no boundary; let the client make it")
    form = _Form(max_items)
    try:
        parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RefusedRequest(400, f"the form is not understood ({error})") from None
    if not form.is_whole:
        raise RefusedRequest(400, "the form has no end: its last boundary is missing")
    if not form.files:
        raise RefusedRequest(400, "the form has no file; send pictures as in curl -F image=@x.jpg")
    return form.files
