"""Access to the server and its limits: tokens, hosts, origins, and the bytes of a request."""

from __future__ import annotations

import hmac
import ipaddress
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from starlette.requests import ClientDisconnect, Request

from dmlstudy.serving.batching import Gone
from dmlstudy.serving.bodies import RefusedRequest

LEAST_TOKEN = 16
"""Characters of a token beyond loopback."""

LOOPBACK = "127.0.0.1"

LOOPBACK_NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})

ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


@dataclass(frozen=True)
class Limits:
    """Limits of a request's content and duration, and of the number of waiting items.

    A body has ``body_seconds`` and as long as ``body_rate`` bytes a second take, and ``max_body_seconds`` in all.
    """

    max_bytes: int = 32 << 20
    max_items: int = 256
    max_pixels: int = 50_000_000
    max_pixels_in_all: int = 250_000_000
    max_k: int = 1000
    max_waiting: int = 64
    max_held_bytes: int = 512 << 20
    body_seconds: float = 10.0
    body_rate: int = 16 << 10
    max_body_seconds: float = 120.0


@dataclass(frozen=True)
class Access:
    """Access: holders of the token, if there is one; requests to these names of the server; pages of these origins.

    ``hosts`` None: under any name.
    """

    token: str | None = None
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, host: str, token: str | None, allowed_hosts: Sequence[str] = (), origins: Sequence[str] = ()
    ) -> Access:
        """The access to a server that listens on ``host``.

        On loopback only its own names are answered, for a web page may give another name this machine's address and
        then ask in the reader's place. Raises ValueError as ``check_token``, and for an origin that is none.
        """
        check_token(host, token)
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--cors-origin {origin}: expected https://name, with a port if it has one, or *"
                )
        hosts = frozenset(_bare(each) for each in allowed_hosts)
        if is_loopback(host):
            return cls(token, hosts | LOOPBACK_NAMES | {_bare(host)}, tuple(origins))
        return cls(token, hosts or None, tuple(origins))

    def check_host(self, host: str) -> None:
        """Raise RefusedRequest for a request under another name."""
        if self.hosts is not None and host and _bare(host) not in self.hosts:
            raise RefusedRequest(
                421,
                f"Host {host[:80]!r} is no name of this server; start it with --allowed-host NAME to add one",
            )

    def check_asker(self, request: Request) -> None:
        """Raise RefusedRequest without the token; where there is none, for a web page of another origin than these."""
        if self.token is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode(), self.token.encode()
            ):
                raise RefusedRequest(
                    401,
                    "this server wants Authorization: Bearer TOKEN",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return
        origin = request.headers.get("origin")
        if origin is None or "*" in self.origins or origin in self.origins:
            return
        if origin.partition("://")[2] != request.headers.get("host"):
            raise RefusedRequest(
                403,
                f"a page of {origin[:80]!r} may not ask here; start the server with --cors-origin to allow it",
            )


def _bare(host: str) -> str:
    """A host's name without its port, an IPv6 address in brackets."""
    name = re.sub(r":[0-9]*$", "", host) if host.startswith("[") or host.count(":") == 1 else host
    return (f"[{name}]" if ":" in name and not name.startswith("[") else name).lower()


def read_token(path: Path) -> str:
    """A file's first line. Raises ValueError for a file that is missing, cannot be read, or has none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the token cannot be read ({error}); name another --token-file") from None
    if not lines[0].strip():
        raise ValueError(
            f"{path}: has no token in its first line; write one of {LEAST_TOKEN} characters or more there"
        )
    return lines[0].strip()


def check_token(host: str, token: str | None) -> None:
    """Raises ValueError for a host beyond loopback without a token, and for a short token."""
    if token is None and not is_loopback(host):
        raise ValueError(
            f"{host} is open to others: set a token (the variable DMLSTUDY_TOKEN, or --token-file), or leave --host at"
            " 127.0.0.1"
        )
    if token is not None and len(token) < LEAST_TOKEN:
        raise ValueError(f"the token has {len(token)} characters; take {LEAST_TOKEN} or more")


def is_loopback(host: str) -> bool:
    """True if an address, or a name, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Memory:
    """The bytes that all requests under way hold together, which are limited."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes for one request, which gives them all back at the end.

        It raises RefusedRequest where there are not so many left.
        """
        own = 0

        def take(count: int) -> None:
            nonlocal own
            with self._lock:
                if self._held + count > self._most:
                    raise busy("the server holds as much as it may")
                self._held += count
                own += count

        try:
            yield take
        finally:
            with self._lock:
                self._held -= own


def busy(why: str) -> RefusedRequest:
    """The refusal of what may be asked again."""
    return RefusedRequest(503, f"{why}; try again", headers={"Retry-After": "1"})


async def read_body(request: Request, limits: Limits, take: Callable[[int], None]) -> bytes:
    """The request's body, never more than may be held. Raises RefusedRequest, and Gone where the client goes away."""
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limits.max_bytes):
        raise RefusedRequest(413, f"a body of {length[:18]} bytes; at most {limits.max_bytes}")
    chunks, size, started = [], 0, time.monotonic()
    try:
        with anyio.fail_after(limits.body_seconds) as scope:
            begun = scope.deadline - limits.body_seconds
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_bytes:
                    raise RefusedRequest(413, f"a body of more than {limits.max_bytes} bytes")
                take(len(chunk))
                chunks.append(chunk)
                allowed = limits.body_seconds + size / limits.body_rate
                scope.deadline = begun + min(allowed, limits.max_body_seconds)
    except TimeoutError:
        spent = time.monotonic() - started
        raise RefusedRequest(408, f"{size} bytes of the body in {spent:.0f} s, which is too slow") from None
    except ClientDisconnect:
        raise Gone from None
    return b"".join(chunks)
