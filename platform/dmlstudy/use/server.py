"""A model, and a gallery if there is one, behind HTTP: embed, retrieve, health, readiness.

``POST /embed``     an image's bytes, or JSON ``{"images": [base64, ...]}`` or ``{"vectors": [[...], ...]}``
``POST /retrieve``  the same, with ``?k=10``; needs a gallery
``GET /health``     200 as long as the process answers
``GET /ready``      200 once the model has computed something, 503 before that and while the server ends

Answers are JSON; of what is refused ``{"error": ...}`` with 400 (not understood), 401 (no token), 404, 405, 413 (too
large), 415 (another type), 422 (not an image, or of the wrong size) or 503 (too busy, or ending).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dmlstudy import data, model_folder
from dmlstudy.registry import kinds
from dmlstudy.use.embedding import fit_of
from dmlstudy.use.gallery import open_gallery
from dmlstudy.use.search import Searcher

MOST_PORT = 65535

LEAST_TOKEN = 16
"""Characters of a token beyond loopback."""

IMAGE_TYPES = ("image/", "application/octet-stream")


@dataclass(frozen=True)
class Limits:
    """What a request may ask: bytes of its body, items, pixels of a picture, results; and how many wait at once."""

    max_bytes: int = 32 << 20
    max_items: int = 256
    max_pixels: int = 50_000_000
    max_k: int = 1000
    max_waiting: int = 64
    body_seconds: float = 30.0


class Refused(HTTPException):
    """A request that is answered with an error."""


class Service:
    """The model and the gallery; one computation at a time, on all threads torch has.

    Raises ValueError as ``kinds.verified`` and ``Searcher``.
    """

    def __init__(
        self,
        model: str | Path,
        gallery: str | Path | None,
        limits: Limits,
        *,
        rerank: str = "auto",
        among: int = 100,
        device: str = "auto",
    ) -> None:
        self.limits, self.model = limits, kinds.fingerprint(model)
        self._takes, self._fit = kinds.takes(model), fit_of(model)
        self._compute = kinds.verified(model, device=device)
        self._search = None
        if gallery is not None:
            self._search = Searcher(model, open_gallery(gallery), rerank=rerank, among=among, device=device)
        self._lock = threading.Lock()
        example_N = model_folder.example(model)
        if example_N is not None:
            self.embed(example_N[:1])
            if self._search is not None:
                self.retrieve(example_N[:1], 1)

    def embed(self, items: NDArray[Any]) -> dict[str, Any]:
        with self._lock:
            z_ND = self._compute(items)
        return {"model": self.model, "dim": z_ND.shape[1], "embeddings": z_ND.tolist()}

    def retrieve(self, items: NDArray[Any], k: int) -> dict[str, Any]:
        """Raises Refused without a gallery."""
        if self._search is None:
            raise Refused(404, "this server has no gallery; start it with --gallery")
        gallery = self._search.gallery
        with self._lock:
            found = self._search(items, k)
        return {
            "model": self.model,
            "results": [
                [
                    {
                        "rank": rank,
                        "id": gallery.ids[place],
                        "label": None if gallery.labels is None else gallery.labels[place],
                        "distance": distance,
                    }
                    for rank, (place, distance) in enumerate(
                        zip(each.place_K.tolist(), each.distance_K.tolist(), strict=True), 1
                    )
                ]
                for each in found
            ],
        }

    def items(self, content_type: str, body: bytes) -> NDArray[Any]:
        """What a request holds, as the model takes it. Raises Refused naming what is wrong."""
        kind = content_type.partition(";")[0].strip().lower()
        if kind == "application/json":
            return self._of_json(body)
        if not kind.startswith(IMAGE_TYPES):
            raise Refused(
                415, f"content type {kind or 'none'}: send application/json, or an image's bytes as image/*"
            )
        return self._images([body])

    def _of_json(self, body: bytes) -> NDArray[Any]:
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not valid JSON") from None
        name = "vectors" if self._takes.image_size is None else "images"
        if not isinstance(content, dict) or not isinstance(content.get(name), list) or not content[name]:
            raise Refused(400, f'expected {{"{name}": [...]}} with one item at least')
        if len(content[name]) > self.limits.max_items:
            raise Refused(413, f"{len(content[name])} items; at most {self.limits.max_items} in one request")
        if name == "vectors":
            return self._vectors(content[name])
        try:
            encoded = [base64.b64decode(each, validate=True) for each in content[name]]
        except (TypeError, ValueError, binascii.Error):
            raise Refused(400, "images must be base64 strings") from None
        return self._images(encoded)

    def _vectors(self, rows: list[Any]) -> NDArray[np.float32]:
        try:
            with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
                x_NF = np.array(rows, dtype=np.float64).astype(np.float32)
        except (TypeError, ValueError, OverflowError):
            raise Refused(422, "vectors must be numbers, equally many in each") from None
        if x_NF.ndim != 2 or x_NF.shape[1] != self._takes.num_features or not np.isfinite(x_NF).all():
            raise Refused(
                422, f"vectors of shape {x_NF.shape}; send finite ones of {self._takes.num_features} numbers"
            )
        return x_NF

    def _images(self, encoded: list[bytes]) -> NDArray[np.uint8]:
        if self._takes.image_size is None:
            raise Refused(415, 'the model takes vectors; send {"vectors": [[...]]} as application/json')
        assert self._fit is not None
        try:
            return data.decode_images(encoded, self._fit, self._takes.channels, self.limits.max_pixels)
        except ValueError as error:
            raise Refused(422, str(error)) from None


def app(service: Service, token: str | None) -> Starlette:
    """The application; with a token every POST needs it as ``Authorization: Bearer TOKEN``."""
    limits = service.limits
    state = {"is_ending": False, "waiting": 0}
    limiter: list[anyio.CapacityLimiter] = []

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        limiter.append(
            anyio.CapacityLimiter(4)
        )  # decoding and computing; the service's lock lets one compute
        yield
        state["is_ending"] = True

    def answering(
        work: Callable[[Request, NDArray[Any]], dict[str, Any]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            _authorize(request, token)
            if state["waiting"] >= limits.max_waiting:
                raise Refused(503, "too many requests are waiting; try again", headers={"Retry-After": "1"})
            state["waiting"] += 1
            try:
                body = await _body(request, limits)
                content_type = request.headers.get("content-type", "")

                def whole() -> dict[str, Any]:
                    return work(request, service.items(content_type, body))

                return JSONResponse(await anyio.to_thread.run_sync(whole, limiter=limiter[0]))
            finally:
                state["waiting"] -= 1

        return endpoint

    def embed(_: Request, items: NDArray[Any]) -> dict[str, Any]:
        return service.embed(items)

    def retrieve(request: Request, items: NDArray[Any]) -> dict[str, Any]:
        asked = request.query_params.get("k", "10")
        if not asked.isdigit() or not 1 <= int(asked) <= limits.max_k:
            raise Refused(400, f"k={asked[:20]!r}: a number from 1 to {limits.max_k}")
        return service.retrieve(items, int(asked))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        return JSONResponse(
            {"status": "ending" if state["is_ending"] else "ready", "model": service.model},
            503 if state["is_ending"] else 200,
        )

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"{type(error).__name__} in the server; its log says more"}, 500)

    return Starlette(
        routes=[
            Route("/embed", answering(embed), methods=["POST"]),
            Route("/retrieve", answering(retrieve), methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
        ],
        exception_handlers={HTTPException: refused, Exception: failed},
        lifespan=life,
    )


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the port, and does not listen yet.

    Raises ValueError for a port that is taken, and an address that is not this machine's.
    """
    if not 0 <= port <= MOST_PORT:
        raise ValueError(f"--port {port}: name one from 1 to {MOST_PORT}, or 0 for any")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        place = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error}; name another") from None
    with place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind(address)
        except OSError as error:
            raise ValueError(
                f"--host {host} --port {port}: {error.strerror}; name another with --port, or end what listens there"
            ) from None
        yield place


def serve(service: Service, place: socket.socket, token: str | None, *, grace_seconds: int = 30) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way then is answered, for at most ``grace_seconds``.

    Raises ValueError for a place beyond loopback without a token, or with a short one.
    """
    check_token(place.getsockname()[0], token)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(0)
    )  # uvicorn raises it again once it has ended gracefully
    config = uvicorn.Config(
        app(service, token),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace_seconds,
        timeout_keep_alive=10,
        limit_concurrency=4 * service.limits.max_waiting,
        server_header=False,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[place])


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
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"{host} is open to others: set a token (the variable DMLSTUDY_TOKEN, or --token-file), or leave --host at"
            " 127.0.0.1"
        )
    if token is not None and len(token) < LEAST_TOKEN:
        raise ValueError(f"the token has {len(token)} characters; take {LEAST_TOKEN} or more")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _authorize(request: Request, token: str | None) -> None:
    if token is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refused(
            401, "this server wants Authorization: Bearer TOKEN", headers={"WWW-Authenticate": "Bearer"}
        )


async def _body(request: Request, limits: Limits) -> bytes:
    """The request's body, never more than may be held. Raises Refused."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.max_bytes:
        raise Refused(413, f"a body of {length} bytes; at most {limits.max_bytes}")
    chunks, size, started = [], 0, time.monotonic()
    try:
        with anyio.fail_after(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_bytes:
                    raise Refused(413, f"a body of more than {limits.max_bytes} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise Refused(408, f"the body took more than {time.monotonic() - started:.0f} s") from None
    except ClientDisconnect:
        raise Refused(400, "the client went away") from None
    return b"".join(chunks)
