"""Names of registered models in a study file: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, of any store.

``?store=FOLDER`` or ``?tracking-uri=http://HOST:PORT`` behind it, as the options of the command line are called, name
another store than the study's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from dmlstudy.records import REGISTERED
from dmlstudy.text import nearest, shown

ELSEWHERE = ("store", "tracking-uri")

SECRET = re.compile(r"://[^@?]*:[^@?]*@|[?&][^=&]*(secret|token|passw|sig|key)[^=&]*=", re.IGNORECASE)
"""A password or a key in a URI, which may hold a / that should have been quoted."""

USER = re.compile(r"://.*@", re.DOTALL)
"""A user's name before a server's, which may be a token; a password may hold any character."""


class Reference(NamedTuple):
    """A registered model: ``model`` as ``dmlstudy pull`` takes it, and its store where that is not the study's own."""

    model: str
    store: str | None = None
    server: str | None = None

    def __str__(self) -> str:
        where = {"store": self.store, "tracking-uri": self.server}
        query = "&".join(f"{name}={value}" for name, value in where.items() if value)
        return f"{REGISTERED}{self.model}{'?' if query else ''}{query}"


def parse(text: str) -> Reference:
    """The model that ``models:/...`` names. Raises ValueError for another form, and for a password, not shown."""
    if SECRET.search(text) or USER.search(text):
        raise ValueError(
            "embedder.weights: holds a user's name, password or key, which would be written down with the study; leave"
            " it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the study is started"
        )
    model, _, query = text.removeprefix(REGISTERED).partition("?")
    if re.fullmatch(r"[^@/?]+(@[^@/]+|/\d+)?", model) is None:
        raise ValueError(
            f"embedder.weights: {shown(text)} names no registered model; write models:/NAME@champion or models:/NAME/3"
        )
    name, equals, value = query.partition("=")
    if not query:
        return Reference(model)
    if name not in ELSEWHERE or not equals or not value:
        raise ValueError(
            f"embedder.weights: {shown(text)}: what follows the ? is not understood{nearest(name, ELSEWHERE)}; write"
            " ?store=FOLDER or ?tracking-uri=http://HOST:PORT"
        )
    return Reference(model, value, None) if name == "store" else Reference(model, None, value)


def with_absolute_store(text: str, lead: Callable[[str], str]) -> str:
    """The same name, with the absolute path of its store. Raises ValueError as ``parse``."""
    reference = parse(text)
    if reference.store is None:
        return text
    return str(reference._replace(store=lead(reference.store)))
