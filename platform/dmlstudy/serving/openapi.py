"""The server's requests and answers, for programs (OpenAPI 3.1) and for people (a page that loads nothing)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from dmlstudy.html import Html, element
from dmlstudy.html import page as whole_page
from dmlstudy.saved import Takes
from dmlstudy.serving.guards import Limits

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:52rem;padding:1rem}
pre{background:#8881;border-radius:6px;padding:.7rem;overflow-x:auto;font-size:.85rem}
h2{margin-top:2rem;font-size:1.2rem}
"""

ERRORS = {
    "400": "not understood",
    "401": "no token, or another",
    "403": "a web page of another origin",
    "404": "no gallery",
    "408": "the body came too slowly",
    "413": "too large",
    "415": "not what the model takes",
    "421": "asked under another host's name",
    "422": "not an image, or of the wrong size",
    "503": "too busy, or ending; ask again",
}


def description(
    takes: Takes,
    has_gallery: bool,
    limits: Limits,
    token: str | None,
    *,
    has_threshold: bool = False,
    is_watched: bool = False,
) -> dict[str, Any]:
    """The server's interface as OpenAPI 3.1; with a threshold, matches and queries are accepted or not."""
    body = _images(limits) if takes.image_size is not None else _vectors(takes.num_features, limits)
    guarded: dict[str, Any] = {} if token is None else {"security": [{"token": []}]}
    paths: dict[str, Any] = {
        "/embed": {
            "post": {
                "operationId": "embed",
                "summary": "Embed pictures or vectors",
                "requestBody": body,
                "responses": _answers("Embedded", *(each for each in ERRORS if each != "404")),
                **guarded,
            }
        }
    }
    if has_gallery:
        paths["/retrieve"] = {
            "post": {
                "operationId": "retrieve",
                "summary": "The nearest items of the gallery",
                "parameters": [
                    {
                        "name": "k",
                        "in": "query",
                        "description": "items for each query",
                        "schema": {"type": "integer", "minimum": 1, "maximum": limits.max_k, "default": 10},
                    }
                ],
                "requestBody": body,
                "responses": _answers("Retrieved", *ERRORS),
                **guarded,
            }
        }
    for path, summary in (
        ("/health", "Whether the process answers"),
        ("/ready", "Whether it takes requests"),
    ):
        paths[path] = {
            "get": {
                "operationId": path[1:],
                "summary": summary,
                "responses": _answers("State", *(("503",) if path == "/ready" else ()), error="State"),
            }
        }
    about = {"operationId": "model", "summary": "What the model was trained on and from", **guarded}
    paths["/model"] = {"get": {**about, "responses": _answers("About", *(("401",) if token else ()))}}
    metrics = {
        "200": {"description": "as Prometheus reads them", "content": {"text/plain": {"schema": _TEXT}}}
    }
    if token is not None:
        metrics["401"] = _error("401")
    paths["/metrics"] = {
        "get": {"operationId": "metrics", "summary": "Counts of requests", "responses": metrics, **guarded}
    }
    schemas = _with_threshold(_SCHEMAS) if has_threshold else _SCHEMAS
    components: dict[str, Any] = {"schemas": _with_watch(schemas) if is_watched else schemas}
    if token is not None:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dmlstudy serve", "version": version("dmlstudy")},
        "paths": paths,
        "components": components,
    }


def page(
    name: str,
    takes: Takes,
    has_gallery: bool,
    token: str | None,
    address: str,
    *,
    accepts: Sequence[str] = (),
    forms: Sequence[str] = (),
) -> str:
    """The page that tells the bodies, each as a line for a shell that asks at ``address``, and what is accepted.

    ``forms`` are lines on the vectors: their numbers, bits and bytes.
    """
    header = "" if token is None else ' -H "Authorization: Bearer $TOKEN"'
    if takes.image_size is not None:
        asked = [
            ("A picture's bytes", f"curl{header} --data-binary @x.jpg {address}/embed"),
            ("Files of a form", f"curl{header} -F image=@x.jpg -F image=@y.png {address}/embed"),
            (
                "JSON with base64, data URIs too",
                f"curl{header} --json '{{\"images\": [\"'$(base64 -w0 x.jpg)'\"]}}' {address}/embed",
            ),
        ]
    else:
        example = ", ".join(["0.5"] * min(3, takes.num_features)) + (
            ", ..." if takes.num_features > 3 else ""
        )
        asked = [("JSON", f"curl{header} --json '{{\"vectors\": [[{example}]]}}' {address}/embed")]
    sections = [Html(element("h2", title) + element("pre", element("code", line))) for title, line in asked]
    if has_gallery:
        line = asked[0][1].replace("/embed", "'/retrieve?k=5'").replace(address + "'", "'" + address)
        sections.append(Html(element("h2", "The nearest items") + element("pre", element("code", line))))
        sections.append(
            element(
                "p",
                "An item's label is text, or null where the gallery has none. A smaller distance and a larger score"
                " are nearer; the answer's order says what both are, and what the ranks are by.",
            )
        )
    if forms:
        sections.append(Html(element("h2", "Vectors")))
        sections += [element("p", line) for line in forms]
    if accepts:
        said = (
            "A match is accepted if its score reaches the threshold, a query if any match in its answer does."
        )
        sections.append(Html(element("h2", "Accepted matches") + element("p", said)))
        sections += [element("p", line) for line in accepts]
    about = element(
        "p",
        f"This server answers with {name}. ",
        "Beside these: GET /health, /ready, /model, /metrics, and ",
        element("a", "/openapi.json", href="/openapi.json"),
        ', the same for programs. What is refused is answered with one line, {"error": ...}, that says what to do.',
    )
    return whole_page(f"{name} by dmlstudy", STYLE, element("h1", name), about, *sections)


_TEXT = {"type": "string"}
_BYTES = {"type": "string", "contentEncoding": "base64"}
_NUMBERS = {"type": "array", "items": {"type": "number"}}


def _images(limits: Limits) -> dict[str, Any]:
    many = {"type": "array", "items": _BYTES, "minItems": 1, "maxItems": limits.max_items}
    return {
        "required": True,
        "description": f"Pictures of at most {limits.max_pixels} pixels, {limits.max_pixels_in_all} all together,"
        f" in a body of at most {limits.max_bytes} bytes.",
        "content": {
            "application/json": {"schema": _one_or_many("image", _BYTES, "images", many)},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
                    "required": ["image"],
                },
                "encoding": {"image": {"contentType": "image/*"}},
            },
            "image/*": {"schema": {}},
        },
    }


def _vectors(num_features: int, limits: Limits) -> dict[str, Any]:
    one = {**_NUMBERS, "minItems": num_features, "maxItems": num_features}
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": limits.max_items}
    return {
        "required": True,
        "content": {"application/json": {"schema": _one_or_many("vector", one, "vectors", many)}},
    }


def _one_or_many(one: str, of_one: dict[str, Any], many: str, of_many: dict[str, Any]) -> dict[str, Any]:
    return {
        "oneOf": [
            {"type": "object", "properties": {many: of_many}, "required": [many]},
            {"type": "object", "properties": {one: of_one}, "required": [one]},
        ]
    }


def _answers(schema: str, *errors: str, error: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {
        "200": {"description": "done", "content": content},
        **{code: _error(code, error) for code in errors},
    }


def _error(code: str, schema: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": ERRORS[code], "content": content}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _with_threshold(schemas: dict[str, Any]) -> dict[str, Any]:
    """The same answers with a threshold, and with what it says of each match and each query."""
    schemas = copy.deepcopy(schemas)
    accept_at = {"type": "number", "description": "the least score that is accepted"}
    match = schemas["Retrieved"]["properties"]["results"]["items"]["items"]
    for schema, properties in (
        (match, {"accept": {"type": "boolean", "description": "its score reaches the threshold"}}),
        (
            schemas["Retrieved"],
            {
                "accept_at": accept_at,
                "accept": {
                    "type": "array",
                    "description": "of each query, whether any of its matches is accepted: known, or unknown",
                    "items": {"type": "boolean"},
                },
            },
        ),
        (
            schemas["About"],
            {
                "threshold": {
                    "type": "object",
                    "description": "the threshold, and its errors on unseen classes where they are known",
                    "properties": {"accept_at": accept_at},
                    "required": ["accept_at"],
                }
            },
        ),
    ):
        schema["properties"] |= properties
        schema["required"] += properties
    return schemas


def _with_watch(schemas: dict[str, Any]) -> dict[str, Any]:
    """The same answers with the last window of queries."""
    schemas = copy.deepcopy(schemas)
    count = {"type": "integer", "minimum": 0}
    watch = _object(
        is_outside={"type": "boolean", "description": "the last window is outside the range"},
        windows=count,
        windows_outside=count,
        upper={"type": "number", "description": "the distance at which the range ends"},
        last={"type": ["object", "null"], "description": "the last window, null before there is one"},
    )
    schemas["About"]["properties"] |= {
        "watch": watch | {"description": "distances of queries to their nearest items"}
    }
    schemas["About"]["required"] += ["watch"]
    return schemas


_SCHEMAS: dict[str, Any] = {
    "Error": _object(error={"type": "string", "description": "what is wrong and what to do, in one line"}),
    "State": {
        "type": "object",
        "properties": {"status": _TEXT, "model": _TEXT, "digest": _TEXT},
        "required": ["status"],
    },
    "About": _object(
        model={"type": "string", "description": "the model's name and version"},
        digest={"type": "string", "description": "the SHA-256 of its manifest"},
        kind=_TEXT,
        trained={"type": ["string", "null"], "description": "on what, in words; null where it is not known"},
        ancestry={
            "type": ["array", "null"],
            "description": "what it was trained from, nearest first; null where it is not known",
            "items": {"type": "object", "properties": {"source": _TEXT}, "required": ["source"]},
        },
        seen={"type": ["string", "null"], "description": "classes of its study that its start had seen"},
    )
    | {
        "description": "with a gallery also its items, form and bytes of a vector; of short answers their form"
    },
    "Embedded": _object(
        model={"type": "string", "description": "the model's name and version"},
        digest={"type": "string", "description": "the SHA-256 of its manifest"},
        dim={"type": "integer", "description": "numbers of an embedding; of 1 bit each, packed in bytes"},
        embeddings={"type": "array", "items": _NUMBERS},
    ),
    "Retrieved": _object(
        model={"type": "string", "description": "the model's name and version"},
        digest={"type": "string", "description": "the SHA-256 of its manifest"},
        order=_object(
            by={"type": "string", "description": "what the ranks are by"},
            distance={"type": "string", "description": "what distances are"},
            score={"type": "string", "description": "what scores are"},
        ),
        results={
            "type": "array",
            "description": "of each query its items, best first",
            "items": {
                "type": "array",
                "items": _object(
                    rank={"type": "integer", "minimum": 1},
                    id=_TEXT,
                    label={"type": ["string", "null"], "description": "null where none is known"},
                    distance={"type": "number"},
                    score={"type": "number"},
                ),
            },
        },
    ),
}
