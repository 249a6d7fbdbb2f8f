"""A model, and a gallery if there is one, behind HTTP: embed, retrieve, health, readiness.

``POST /embed``        pictures or vectors, in the forms of ``bodies``
``POST /retrieve``     the same, with ``?k=10``; needs a gallery

``GET /health``        200 as long as the process answers
``GET /ready``         200 once the model has computed something, 503 while the server ends
``GET /model``         what it was trained on, its ancestry, and how far queries are
``GET /metrics``       counts, as Prometheus reads them
``GET /openapi.json``  all this as OpenAPI 3.1; ``GET /docs`` for people, where ``GET /`` leads

Answers are JSON; of what is refused ``{"error": ...}`` with 400 (not understood), 401 (no token), 403 (a page of
another origin), 404, 405, 408 (too slow), 413 (too large), 415 (not what the model takes), 421 (another host's name),
422 (not an image, or of the wrong size) or 503 (too busy, or ending).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
import uvicorn
from numpy.typing import NDArray
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dmlstudy import data, html
from dmlstudy.files import sha256
from dmlstudy.retrieval import short_forms
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import SpaceMap
from dmlstudy.serving import bodies, drift, openapi, origin, traffic
from dmlstudy.serving.acceptance import Acceptance
from dmlstudy.serving.batching import Batcher, Gone, Outputs
from dmlstudy.serving.bodies import RefusedRequest
from dmlstudy.serving.connection import BACKLOG, HEAD_SECONDS, Connection
from dmlstudy.serving.gallery import ABOUT, open_gallery
from dmlstudy.serving.guards import LOOPBACK, Access, Limits, Memory, busy, check_token, read_body
from dmlstudy.serving.retriever import Found, Retriever
from dmlstudy.serving.short_search import Short
from dmlstudy.serving.watch import QueryWatch, Served, WatchPlan

MOST_PORT = 65535

FEW_ITEMS = 4
"""Items whose embeddings are written where they are, for to hand them to a thread takes longer."""

CLIENT_GONE = 499
"""The status logged for a request whose client did not wait."""

T = TypeVar("T")


class Service:
    """The model and the gallery; what waits is computed together, on all threads torch has.

    ``name`` is what answers call the model; ``note`` is what is to be said of the gallery, if anything. ``accept_at``
    replaces the model's threshold.

    ``short`` is the form of what ``POST /embed`` answers with; a gallery has a form of its own. Queries go
    through ``space_map`` to the gallery's space. ``watch`` says where their distances are recorded.

    Raises ValueError as ``Model.loaded``, ``Retriever``, ``QueryWatch`` and ``drift.learned``, and for a map or a
    watch without a gallery.
    """

    def __init__(
        self,
        model: Model,
        gallery: str | Path | None,
        limits: Limits,
        *,
        name: str | None = None,
        rerank: str = "auto",
        among: int = 100,
        accept_at: float | None = None,
        short: Short | None = None,
        space_map: SpaceMap | None = None,
        watch: WatchPlan | None = None,
    ) -> None:
        if watch is not None and gallery is None:
            raise ValueError("--watch: distances are to items of a gallery; name one with --gallery")
        if space_map is not None and gallery is None:
            raise ValueError("--map is for queries of a gallery; name one with --gallery, or leave it out")
        self.short = short
        self.limits, self.digest = limits, model.fingerprint
        self.name = name or model.folder.resolve().name
        self.takes, self._fit = model.takes, model.fit
        self.about = {"model": self.name, "digest": self.digest, "kind": model.kind, **origin.of(model)}
        self.acceptance = Acceptance.of(model, accept_at)
        self.note = ""
        self.lines: list[str] = []
        """Lines on the vectors that are served: their form, bytes, and the map of queries."""
        if short is not None:
            self.about["embeds"] = {
                "size": short.size,
                "bits": short.form.bits,
                "bytes_per_vector": short.num_bytes,
            }
            self.lines.append(
                f"/embed answers with {short}, {short.num_bytes} bytes each (whole: {4 * short.whole})"
            )
        self._search = None
        self._lock = threading.Lock()  # an index is asked by one thread at a time
        if gallery is not None:
            opened = open_gallery(gallery, device=model.device)
            self.note = opened.note
            self._search = Retriever(
                model, opened, rerank=rerank, among=among, accept_at=accept_at, space_map=space_map
            )
            self.acceptance = self._search.acceptance
            self.about["gallery"] = opened.facts
            self.lines += [f"gallery: {opened.line}", *self._search.notes]
            if space_map is not None:
                self.about["gallery"]["query_map"] = space_map.digest
                self.lines.append(
                    f"queries go through the {space_map.described.kind} map {space_map.digest[:12]}"
                )
            self._queries = self._items = Batcher(model.query)
        if self._search is None or not model.is_symmetric:
            compute = model.compute
            self._items = Batcher(lambda x_N: (compute(x_N), None))
        if self.acceptance is not None:
            self.about["threshold"] = self.acceptance.facts
        if model.example is not None:
            for wanted in {self._items, *([self._queries] if self._search else [])}:
                wanted.submit(model.example[0][:1]).result()
        self.watch: QueryWatch | None = None
        if watch is not None and gallery is not None and self._search is not None:
            self.watch = self._watched(watch, Path(gallery), self._search)

    def _watched(self, plan: WatchPlan, gallery: Path, search: Retriever) -> QueryWatch:
        served = Served(
            model=self.name,
            model_digest=self.digest,
            gallery=gallery.resolve().name,
            gallery_digest=sha256(gallery / ABOUT),
            query_map=None if search.space_map is None else search.space_map.digest,
            distance=search.measure.distance,
        )
        return QueryWatch(
            plan,
            served,
            lambda: drift.learned(search, plan.reference),
            has_threshold=search.acceptance is not None,
        )

    @property
    def has_gallery(self) -> bool:
        return self._search is not None

    def close(self) -> None:
        """End the threads that compute; what still waits is not answered."""
        self._items.close()
        if self._search is not None:
            self._queries.close()
        if self.watch is not None:
            self.watch.close()

    def check_gallery(self) -> None:
        """Raise RefusedRequest without a gallery."""
        if self._search is None:
            raise RefusedRequest(404, "this server has no gallery; start it with --gallery")

    def items(
        self, content_type: str, body: bytes, take: Callable[[int], None], is_gone: Callable[[], bool]
    ) -> NDArray[Any]:
        """The content of a request as the model takes it; ``take`` receives the number of bytes needed.

        Raises RefusedRequest naming what is wrong, and Gone once ``is_gone``.
        """
        takes, limits = self.takes, self.limits
        if takes.image_size is None:
            return bodies.vectors(content_type, body, takes.num_features, limits.max_items)
        assert self._fit is not None
        encoded = bodies.pictures(content_type, body, limits.max_items)
        take(len(encoded) * takes.image_size**2 * takes.channels)

        def go_on() -> None:
            if is_gone():
                raise Gone

        try:
            return data.decode_images(
                encoded,
                self._fit,
                takes.channels,
                limits.max_pixels,
                max_in_all=limits.max_pixels_in_all,
                before_each=go_on,
            )
        except ValueError as error:
            raise RefusedRequest(422, str(error)) from None

    def submit(
        self, items_N: NDArray[Any], is_query: bool, is_gone: Callable[[], bool] = lambda: False
    ) -> Future[Outputs]:
        """The embeddings of items, or of queries, and of these what puts results in order, when they are there."""
        return (self._queries if is_query else self._items).submit(items_N, is_gone)

    def embedded(self, outputs: Outputs) -> dict[str, Any]:
        """The answer with these embeddings."""
        z_ND = outputs[0]
        assert z_ND is not None
        form: dict[str, Any] = {"dim": z_ND.shape[1]}
        if self.short is not None:
            form = {"dim": self.short.size, "bits": self.short.form.bits}
            z_ND = short_forms.kept(z_ND, *self.short.form)
        return {
            "model": self.name,
            "digest": self.digest,
            **form,
            "embeddings": z_ND.tolist(),
        }

    def retrieved(self, outputs: Outputs, k: int) -> dict[str, Any]:
        """The answer with the k best items of these queries."""
        search = self._search
        assert search is not None
        query_QD, omega_QD = outputs
        assert query_QD is not None
        with self._lock:
            found = search.nearest(query_QD, omega_QD, k)
        results = [_ranked(search, each) for each in found]
        accepted: dict[str, Any] = {}
        if search.acceptance is not None:
            accepted = {
                "accept_at": search.acceptance.at,
                "accept": [any(match["accept"] for match in own) for own in results],
            }
        if self.watch is not None:
            self.watch.note([each.nearest for each in found], accepted.get("accept"))
        return {
            "model": self.name,
            "digest": self.digest,
            "order": {
                "by": "distance" if search.rerank == "none" else search.rerank,
                "distance": f"{search.measure.distance}; smaller is nearer",
                "score": f"{search.measure.score}; larger is nearer",
            },
            **accepted,
            "results": results,
        }


def _ranked(search: Retriever, found: Found) -> list[dict[str, Any]]:
    gallery = search.gallery
    score_K = search.measure.score_of(found.distance_K)
    ranked = zip(found.place_K.tolist(), found.distance_K.tolist(), score_K.tolist(), strict=True)
    matches: list[dict[str, Any]] = [
        {
            "rank": rank,
            "id": gallery.ids[place],
            "label": None if gallery.labels is None else gallery.labels[place],
            "distance": distance,
            "score": score,
        }
        for rank, (place, distance, score) in enumerate(ranked, 1)
    ]
    if search.acceptance is not None:
        for match, accept in zip(matches, search.acceptance.each(score_K), strict=True):
            match["accept"] = accept
    return matches


class Front:
    """The endpoints of a service, with what is under way."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service, self.access, self.limits = service, access, service.limits
        self.is_ending = False
        self._waiting = 0
        self._memory = Memory(self.limits.max_held_bytes)
        self._threads: anyio.CapacityLimiter | None = None
        self.registry = CollectorRegistry()
        Gauge("dmlstudy_waiting", "Requests that are not answered yet.", registry=self.registry).set_function(
            lambda: self._waiting
        )
        if service.watch is not None:
            service.watch.tell(self.registry)
        self._description = openapi.description(
            service.takes,
            service.has_gallery,
            self.limits,
            access.token,
            has_threshold=service.acceptance is not None,
            is_watched=service.watch is not None,
        )

    def routes(self) -> list[Route]:
        return [
            Route("/embed", self.embed, methods=["POST"]),
            Route("/retrieve", self.retrieve, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/model", self.model),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/", self.root),
        ]

    @asynccontextmanager
    async def life(self, _: Starlette) -> AsyncIterator[None]:
        self._threads = anyio.CapacityLimiter(4)  # to decode, to search, to write answers
        yield
        self.is_ending = True
        await anyio.to_thread.run_sync(self.service.close)

    async def embed(self, request: Request) -> Response:
        self.access.check_asker(request)
        return await self._answered(request, None)

    async def retrieve(self, request: Request) -> Response:
        self.access.check_asker(request)
        self.service.check_gallery()
        asked = request.query_params.get("k", "10")
        is_number = asked.isascii() and asked.isdigit() and len(asked) <= 9
        if not is_number or not 1 <= int(asked) <= self.limits.max_k:
            raise RefusedRequest(400, f"k={asked[:20]!r}: a number from 1 to {self.limits.max_k}")
        return await self._answered(request, int(asked))

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, _: Request) -> Response:
        state = {"status": "ending" if self.is_ending else "ready", "model": self.service.name}
        return JSONResponse({**state, "digest": self.service.digest}, 503 if self.is_ending else 200)

    async def model(self, request: Request) -> Response:
        self.access.check_asker(request)
        watch = self.service.watch
        return JSONResponse(self.service.about | ({} if watch is None else {"watch": watch.facts}))

    async def metrics(self, request: Request) -> Response:
        self.access.check_asker(request)
        return Response(traffic.counts(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(self._description)

    async def docs(self, request: Request) -> Response:
        service, address = self.service, f"{request.url.scheme}://{request.url.netloc}"
        page = openapi.page(
            service.name,
            service.takes,
            service.has_gallery,
            self.access.token,
            address,
            accepts=() if service.acceptance is None else service.acceptance.lines,
            forms=service.lines,
        )
        return HTMLResponse(page, headers={"Content-Security-Policy": html.policy()})

    async def root(self, _: Request) -> Response:
        return RedirectResponse("/docs")

    async def _answered(self, request: Request, k: int | None) -> Response:
        """The answer to a request; of one whose client goes away no more is computed."""
        if self.is_ending:
            raise busy("the server ends")
        if self._waiting >= self.limits.max_waiting:
            raise busy("too many requests are waiting")
        self._waiting += 1
        try:
            with self._memory.share() as take:
                body = await read_body(request, self.limits, take)
                is_gone = threading.Event()
                watch = asyncio.create_task(_until_gone(request, is_gone))
                try:
                    content = await self._computed(request, body, k, take, is_gone.is_set)
                finally:
                    watch.cancel()
        except Gone:
            return Response(status_code=CLIENT_GONE)
        finally:
            self._waiting -= 1
        return Response(content, media_type="application/json")

    async def _computed(
        self,
        request: Request,
        body: bytes,
        k: int | None,
        take: Callable[[int], None],
        is_gone: Callable[[], bool],
    ) -> bytes:
        service, content_type = self.service, request.headers.get("content-type", "")
        items_N = await self._in_thread(lambda: service.items(content_type, body, take, is_gone))
        request.scope[traffic.ITEMS] = len(items_N)
        outputs = await asyncio.wrap_future(service.submit(items_N, k is not None, is_gone))
        if k is not None:
            return await self._in_thread(lambda: _as_json(service.retrieved(outputs, k)))
        if len(items_N) <= FEW_ITEMS:
            return _as_json(service.embedded(outputs))
        return await self._in_thread(lambda: _as_json(service.embedded(outputs)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._threads)


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _until_gone(request: Request, is_gone: threading.Event) -> None:
    """Set the event when the client of a request, whose body has been read, goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    is_gone.set()


class _OwnHost:
    """An application that is asked under its own names only."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = next((value for name, value in scope["headers"] if name == b"host"), b"")
            try:
                self._access.check_host(host.decode("latin-1"))
            except RefusedRequest as error:
                await JSONResponse({"error": error.detail}, error.status_code)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def app(service: Service, access: Access | None = None, *, is_logged: bool = False) -> ASGIApp:
    """The application; with a token every POST needs it as ``Authorization: Bearer TOKEN``."""
    access = access or Access()

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"{type(error).__name__} in the server; its log says more"}, 500)

    front = Front(service, access)
    middleware = [Middleware(_OwnHost, access)]
    if access.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        middleware.append(cors)
    routes = front.routes()
    whole = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: refused, Exception: failed},
        lifespan=front.life,
    )
    return traffic.Traffic(whole, frozenset(each.path for each in routes), is_logged, front.registry)


def bound(host: str, port: int) -> socket.socket:
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
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind(address)
    except OSError as error:
        place.close()
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror}; name another with --port, or end what listens there"
        ) from None
    return place


def serve(
    service: Service,
    place: socket.socket,
    access: Access,
    *,
    is_logged: bool = True,
    grace_seconds: int = 30,
) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way then is answered, for at most ``grace_seconds``.

    ``access`` is that of the place (``Access.of``). Raises ValueError for a place beyond loopback without a token.
    """
    check_token(place.getsockname()[0], access.token)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(0)
    )  # uvicorn raises it again once it has ended gracefully
    traffic.log_to_stderr()
    whole = app(service, access, is_logged=is_logged)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(configured(whole, grace_seconds=grace_seconds)).run(sockets=[place])


class BackgroundServer:
    """A server that answers on loopback alone from a thread of this process, until it is closed.

    Raises ValueError for a port that is taken, as ``bound``.
    """

    def __init__(self, service: Service, port: int = 0, *, grace_seconds: int = 30) -> None:
        try:
            self._place = bound(LOOPBACK, port)
        except ValueError:
            service.close()  # else the application does, at its end
            raise
        self.service = service
        self.url = f"http://{LOOPBACK}:{self._place.getsockname()[1]}"
        whole = app(service, Access.of(LOOPBACK, None))
        self._server = uvicorn.Server(configured(whole, grace_seconds=grace_seconds))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._place]}, name="dmlstudy-server", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self._server.started:
            service.close()
            self.close()
            raise ValueError(f"{self.url}: the server could not start; name another port")

    def close(self) -> None:
        """Answer what is under way, for at most ``grace_seconds``, and end."""
        self._server.should_exit = True
        self._thread.join()
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._thread.is_alive() else ", closed"
        return f"<{self.service.name} on {self.url}{state}>"


def configured(
    whole: ASGIApp, *, connection: type[Connection] = Connection, grace_seconds: int = 30
) -> uvicorn.Config:
    """The settings of uvicorn; ``limit_concurrency`` stays off because it would turn ``/health`` away too."""
    config = uvicorn.Config(
        whole,
        http=connection,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace_seconds,
        timeout_keep_alive=int(HEAD_SECONDS),
        backlog=BACKLOG,
        server_header=False,
    )
    log = logging.getLogger("uvicorn.error")  # which the configuration has just set up
    log.filters[:] = [traffic.Rare()]
    return config
