"""A server that cannot be occupied: slow heads, slow bodies, readers that do not read, more connections than it has."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import uvicorn
from PIL import Image

from dmlstudy.saved import Model
from dmlstudy.serving.batching import Gone
from dmlstudy.serving.connection import Connection
from dmlstudy.serving.guards import Limits
from dmlstudy.serving.server import Service, app, bound, configured
from dmlstudy.serving.traffic import Rare

PATIENCE = 30


class Hasty(Connection):
    """A second, where the real one has ten; room for 40."""

    head_seconds, pause_seconds, most = 1.0, 0.5, 40


def png(seed: int = 0) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 12), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


@contextlib.contextmanager
def running(service: Service) -> Iterator[int]:
    """The port of a server of this service."""
    with bound("127.0.0.1", 0) as place:
        server = uvicorn.Server(configured(app(service), connection=Hasty, grace_seconds=2))
        thread = threading.Thread(target=lambda: server.run(sockets=[place]))
        thread.start()
        try:
            deadline = time.monotonic() + PATIENCE
            while not server.started:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def made(models: dict[str, Path], **limits: Any) -> Service:
    return Service(Model.open(models["plain"]), None, Limits(**limits))


def sent(port: int, content: bytes = b"") -> socket.socket:
    place = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    place.sendall(content)
    return place


def is_closed(place: socket.socket) -> bool:
    """Whether the server ends the connection, before patience does."""
    try:
        while place.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return True


def healthy(port: int) -> bool:
    return requests.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).json() == {"status": "alive"}


def posted(port: int, content: bytes) -> bytes:
    head = f"POST /embed HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def test_a_head_that_does_not_come_ends_the_connection(models: dict[str, Path]) -> None:
    with running(made(models)) as port:
        silent = sent(port)
        half = sent(port, b"POST /embed HTTP/1.1\r\nX-a: ")
        again = sent(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nX-")
        refused = sent(port, b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        started = time.monotonic()
        for each in (silent, half, again, refused):
            with each:
                assert is_closed(each)
        assert time.monotonic() - started < PATIENCE
        assert healthy(port)


def test_heads_that_are_not_http_do_not_fill_the_log(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(made(models)) as port:
        for _ in range(50):
            with sent(port, b"\x00\r\n\r\n") as place:
                assert is_closed(place)
        assert healthy(port)
    assert capsys.readouterr().err.count("Invalid HTTP request received") == 1


def test_a_message_that_was_held_back_is_counted() -> None:
    now = 0.0
    rare = Rare(60.0, lambda: now)

    def told(message: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("uvicorn.error", level, "", 0, message, None, None)
        return record.getMessage() if rare.filter(record) else None

    assert told("bad") == "bad"
    assert [told("bad") for _ in range(3)] == [None] * 3
    assert told("other") == "other"
    assert [told("failed", logging.ERROR) for _ in range(2)] == ["failed"] * 2
    now = 75.0
    assert told("bad") == "bad (3 more in 75 s)"
    now = 140.0
    assert told("bad") == "bad"


def test_a_head_in_pieces_is_waited_for(models: dict[str, Path]) -> None:
    with running(made(models)) as port, sent(port, b"GET /health HT") as place:
        time.sleep(0.3)
        place.sendall(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in place.recv(1 << 16)


def test_health_answers_while_all_is_occupied(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 unfinished heads, where 40 connections may be open, and every thread at work."""
    service = made(models, max_waiting=4)
    begun, go_on = threading.Semaphore(0), threading.Event()
    real = service.items

    def slow(*arguments: Any) -> np.ndarray:
        begun.release()
        assert go_on.wait(PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(service, "items", slow)
    with running(service) as port, ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as held:
        address = f"http://127.0.0.1:{port}/embed"
        busy = [pool.submit(requests.post, address, data=png(), timeout=PATIENCE) for _ in range(4)]
        for _ in busy:
            assert begun.acquire(timeout=PATIENCE)
        for _ in range(300):
            held.enter_context(sent(port, b"POST /embed HTTP/1.1\r\nX-a: "))
        assert healthy(port)
        assert requests.post(address, data=png(), timeout=PATIENCE).status_code == 503
        go_on.set()
        assert [each.result().status_code for each in busy] == [200] * 4


@pytest.mark.parametrize("length", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
def test_a_body_that_trickles_is_cut_off(length: str, models: dict[str, Path]) -> None:
    service = made(models, body_seconds=0.5, body_rate=1 << 20)
    with running(service) as port, sent(port) as place:
        place.sendall(f"POST /embed HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        answer = b""
        for _ in range(200):
            with contextlib.suppress(OSError):
                place.sendall(b"1\r\na\r\n")
            place.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                answer = place.recv(1 << 16)
                break
        assert b"408" in answer.partition(b"\r\n")[0]
        assert healthy(port)


def test_a_steady_body_may_take_its_time(models: dict[str, Path]) -> None:
    service = made(models, body_seconds=0.5, body_rate=100)  # 0.5 s, and one more for each 100 bytes
    content = png()
    with running(service) as port, sent(port, posted(port, content)[: -len(content)]) as place:
        for start in range(0, len(content), 40):
            place.sendall(content[start : start + 40])
            time.sleep(0.15)
        assert b"200 OK" in place.recv(1 << 16)


def test_who_does_not_read_is_left(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    service = made(models)
    monkeypatch.setattr(service, "embedded", lambda _: {"much": "x" * (64 << 20)})
    with running(service) as port, sent(port) as place:
        place.sendall(posted(port, png()))
        assert place.recv(100).startswith(b"HTTP/1.1 200")
        time.sleep(2)
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := place.recv(1 << 20):
                received += len(part)
        assert received < 64 << 20
        assert healthy(port)


def waits(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_the_work_for_a_client_that_is_gone_ends(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second picture is not decoded once the client is away."""
    service = made(models)
    decoded, begun = [], threading.Event()

    from dmlstudy.data import inputs

    real = inputs.decode

    def slow(*arguments: Any) -> Any:
        decoded.append(1)
        begun.set()
        time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(inputs, "decode", slow)
    body = json.dumps({"images": [base64.b64encode(png()).decode()] * 100}).encode()
    with running(service) as port:
        with sent(port, posted(port, body)):
            assert begun.wait(PATIENCE)
        assert healthy(port)

        def has_ended() -> bool:
            count = len(decoded)
            time.sleep(1)
            return len(decoded) == count

        assert waits(has_ended)
        assert len(decoded) < 50


def test_requests_that_wait_are_embedded_together(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = made(models)
    with running(service) as port, ThreadPoolExecutor(12) as pool:

        def embedding(seed: int) -> list[float]:
            answer = requests.post(f"http://127.0.0.1:{port}/embed", data=png(seed), timeout=PATIENCE)
            (z,) = answer.json()["embeddings"]
            return z  # type: ignore[no-any-return]

        alone = [embedding(seed) for seed in range(12)]
        compute, sizes, gather = service._items._compute, [], threading.Event()

        def counted(items_N: np.ndarray) -> Any:
            sizes.append(len(items_N))
            if len(sizes) == 1:
                assert gather.wait(PATIENCE)
            return compute(items_N)

        monkeypatch.setattr(service._items, "_compute", counted)
        asked = [pool.submit(embedding, 0)]
        assert waits(lambda: sizes == [1])
        asked += [pool.submit(embedding, seed) for seed in range(1, 12)]
        assert waits(lambda: len(service._items._jobs) == 11)
        gather.set()
        together = [each.result() for each in asked]
        assert sizes == [1, 11]
        np.testing.assert_allclose(together, alone, atol=1e-6)


def test_a_gone_client_is_not_an_error(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    service = made(models)

    def gone(*arguments: Any) -> Any:
        raise Gone

    monkeypatch.setattr(service, "items", gone)
    with running(service) as port:
        assert (
            requests.post(f"http://127.0.0.1:{port}/embed", data=png(), timeout=PATIENCE).status_code == 499
        )
        assert healthy(port)
