"""The server: right answers, every bad request refused in one line, a token beyond loopback, and a graceful end."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image
from starlette.testclient import TestClient
from support.ports import free_port
from typer.testing import CliRunner

from dmlstudy import cli
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files
from dmlstudy.serving import guards
from dmlstudy.serving.embed import EmbedJob, embed_into
from dmlstudy.serving.gallery import build
from dmlstudy.serving.guards import Access, Limits
from dmlstudy.serving.retrieve import retrieve
from dmlstudy.serving.retriever import Retriever
from dmlstudy.serving.server import Service, app

TOKEN = "0123456789abcdef-a-token"
AS_PNG = {"content-type": "image/png"}
AS_FORM = {"content-type": "multipart/form-data"}
AS_JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def gallery(models: dict[str, Path], pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    embed_into(EmbedJob(str(models["structure"]), str(pictures), str(folder / "z.parquet"), device="cpu"))
    build(folder / "z.parquet", folder / "gallery")
    return folder / "gallery"


@pytest.fixture(scope="module")
def client(models: dict[str, Path], gallery: Path) -> TestClient:
    limits = Limits(max_bytes=200_000, max_items=4, max_pixels=10_000, max_pixels_in_all=15_000, max_k=50)
    with TestClient(app(Service(Model.open(models["structure"]), gallery, limits))) as client:
        yield client  # type: ignore[misc]


def png(side: int = 12, seed: int = 0) -> bytes:
    content = io.BytesIO()
    rng = np.random.default_rng(seed)
    Image.fromarray(rng.integers(0, 256, (side, side), dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


def as_json(*images: bytes) -> dict[str, list[str]]:
    return {"images": [base64.b64encode(image).decode() for image in images]}


def test_embed_is_what_the_model_computes(
    client: TestClient, models: dict[str, Path], pictures: Path
) -> None:
    files = sorted(pictures.rglob("*.png"))[:3]
    items = of_files(Model.open(models["structure"]), pictures)
    expected = Model.open(models["structure"]).compute(items.read(range(3)))
    answer = client.post("/embed", json=as_json(*(file.read_bytes() for file in files))).json()
    assert (answer["model"], answer["digest"]) == ("structure", Model.open(models["structure"]).fingerprint)
    assert answer["dim"] == 6
    np.testing.assert_allclose(answer["embeddings"], expected, atol=1e-6)
    alone = client.post("/embed", content=files[0].read_bytes(), headers=AS_PNG).json()
    np.testing.assert_allclose(alone["embeddings"], expected[:1], atol=1e-6)


def test_retrieve_is_what_the_searcher_finds(
    client: TestClient, models: dict[str, Path], gallery: Path, pictures: Path
) -> None:
    from dmlstudy.serving.gallery import open_gallery

    queries = of_files(Model.open(models["structure"]), pictures)
    expected = retrieve(Retriever(Model.open(models["structure"]), open_gallery(gallery)), queries, 7)
    file = sorted(pictures.rglob("*.png"))[4]
    answer = client.post("/retrieve?k=7", content=file.read_bytes(), headers=AS_PNG).json()
    (found,) = answer["results"]
    assert [each["id"] for each in found] == [hit.id for hit in expected[4]]
    assert [each["label"] for each in found] == [hit.label for hit in expected[4]]
    assert found[0] == {
        "rank": 1,
        "id": queries.ids[4],
        "label": "class0",
        "distance": pytest.approx(0, abs=1e-5),
        "score": pytest.approx(1, abs=1e-5),
    }
    assert answer["order"] == {
        "by": "structure",
        "distance": "euclidean; smaller is nearer",
        "score": "cosine, 1 - distance^2 / 2; larger is nearer",
    }
    assert len(client.post("/retrieve", json=as_json(png())).json()["results"][0]) == 10


@pytest.mark.parametrize("kind", ["codes", "learner"])
def test_models_of_vectors_retrieve_too(
    kind: str, models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    """Also where queries are embedded otherwise than items, as a learner may do."""
    embed_into(EmbedJob(str(models[kind]), str(vectors), str(tmp_path / "z.parquet"), device="cpu"))
    found = build(tmp_path / "z.parquet", tmp_path / "gallery")
    queries = of_files(Model.open(models[kind]), vectors)
    expected = retrieve(Retriever(Model.open(models[kind]), found), queries, 4)
    x = queries.read(range(3))
    with TestClient(app(Service(Model.open(models[kind]), tmp_path / "gallery", Limits()))) as client:
        answer = client.post("/retrieve?k=4", json={"vectors": x.tolist()}).json()
        assert [[each["id"] for each in own] for own in answer["results"]] == [
            [hit.id for hit in own] for own in expected[:3]
        ]
        scores = [[each["score"] for each in own] for own in answer["results"]]
        np.testing.assert_allclose(scores, [[hit.score for hit in own] for own in expected[:3]], atol=1e-6)
        one = client.post("/embed", json={"vector": x[0].tolist()}).json()
        np.testing.assert_allclose(one["embeddings"], Model.open(models[kind]).compute(x[:1]), atol=1e-6)


def test_more_than_the_server_may_hold_is_sent_away(models: dict[str, Path]) -> None:
    with TestClient(app(Service(Model.open(models["plain"]), None, Limits(max_held_bytes=100)))) as client:
        for _ in range(2):
            answer = client.post("/embed", content=png())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "holds as much as it may" in answer.json()["error"]


def test_a_registered_model_is_called_by_its_version(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias is resolved once; what it means later is another matter."""
    served: list[Service] = []
    asked: list[str] = []

    @contextlib.contextmanager
    def fetched(reference: str, *_: object, device: str) -> Iterator[Model]:
        asked.append(reference)
        yield Model.open(models["plain"], device=device)

    found = types.SimpleNamespace(name="digits-embedder", version=7)
    monkeypatch.setattr("dmlstudy.registry.models.resolve", lambda store, reference: found)
    monkeypatch.setattr(cli.models, "model_at", fetched)
    monkeypatch.setattr("dmlstudy.serving.server.serve", lambda service, *_, **__: served.append(service))
    done = CliRunner().invoke(
        cli.app.app, ["serve", "digits-embedder@champion", "--port", "0", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    assert asked == ["digits-embedder/7"]
    assert "digits-embedder/7 on http://127.0.0.1:" in done.stdout
    assert served[0].name == "digits-embedder/7"
    served[0].close()


def bomb() -> bytes:
    """A PNG of a few bytes that would be 30,000 x 30,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = (30_000).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("path", "named", "status", "message"),
    [
        (
            "/embed",
            {"content": b"junk", "headers": AS_PNG},
            422,
            "image 0: not a readable image",
        ),
        ("/embed", {"content": bomb(), "headers": AS_PNG}, 422, "image 0: "),
        (
            "/embed",
            {"content": png(120), "headers": AS_PNG},
            422,
            "120 x 120 pixels; at most 10000",
        ),
        ("/embed", {"content": b"", "headers": AS_PNG}, 400, "the body is empty; send"),
        (
            "/embed",
            {"content": b"<p>", "headers": {"content-type": "text/html"}},
            422,
            "image 0: not a readable image",
        ),
        ("/embed", {"content": png(90) + b" ", "headers": AS_JSON}, 400, "not valid JSON"),
        ("/embed", {"content": b"{", "headers": AS_JSON}, 400, "not valid JSON"),
        (
            "/embed",
            {"content": b"[" * 100_000, "headers": AS_JSON},
            400,
            "not valid JSON",
        ),
        ("/embed", {"json": {"vectors": [[1.0]]}}, 400, 'expected {"images": ["<base64>", ...]}'),
        ("/embed", {"json": {"images": []}}, 400, "with one item at least"),
        ("/embed", {"json": {"images": [], "image": ""}}, 400, 'expected {"images": ["<base64>"'),
        ("/embed", {"json": {"image": "data:image/png,x"}}, 400, "a data URI must be"),
        (
            "/embed",
            {"json": as_json(*[png(80)] * 3)},
            422,
            "3 images of 19200 pixels together; at most 15000",
        ),
        ("/embed", {"files": [("image", png())] * 5}, 413, "more than 4 items"),
        ("/embed", {"data": {"k": "3"}, "files": {"image": png()}}, 400, "field 'k' is no file"),
        ("/embed", {"content": b"--x", "headers": AS_FORM}, 400, "the form's content type has no boundary"),
        (
            "/embed",
            {"content": b"--b\r\n\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            400,
            "is no file",
        ),
        (
            "/embed",
            {"content": b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            400,
            "the form",
        ),
        ("/embed", {"json": {"images": [7]}}, 400, "must be base64 strings"),
        ("/embed", {"json": {"images": ["?"]}}, 400, "must be base64 strings"),
        ("/embed", {"json": as_json(*[png()] * 5)}, 413, "5 items; at most 4"),
        (
            "/embed",
            {"content": b"0" * 300_000, "headers": AS_PNG},
            413,
            "at most 200000",
        ),
        ("/retrieve?k=0", {"json": as_json(png())}, 400, "k='0': a number from 1 to 50"),
        ("/retrieve?k=51", {"json": as_json(png())}, 400, "a number from 1 to 50"),
        ("/retrieve?k=x", {"json": as_json(png())}, 400, "a number from 1 to 50"),
        ("/retrieve?k=%C2%B2", {"json": as_json(png())}, 400, "a number from 1 to 50"),
        ("/retrieve?k=" + "9" * 5000, {"json": as_json(png())}, 400, "a number from 1 to 50"),
        ("/nothing", {"json": {}}, 404, "Not Found"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    path: str, named: dict[str, Any], status: int, message: str, client: TestClient
) -> None:
    answer = client.post(path, **named)
    assert answer.status_code == status
    assert message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    assert client.post("/embed", json=as_json(png())).status_code == 200


def test_a_body_of_unknown_length_is_cut_off(client: TestClient) -> None:
    chunks = (b"0" * 50_000 for _ in range(100))
    answer = client.post("/embed", content=chunks, headers=AS_PNG)
    assert answer.status_code == 413
    assert client.get("/embed").status_code == 405


def test_models_of_vectors(models: dict[str, Path]) -> None:
    x = np.random.default_rng(0).normal(size=(2, 10)).astype(np.float32)
    with TestClient(app(Service(Model.open(models["learner"]), None, Limits()))) as client:
        answer = client.post("/embed", json={"vectors": x.tolist()}).json()
        np.testing.assert_allclose(answer["embeddings"], Model.open(models["learner"]).compute(x), atol=1e-6)
        for vectors in ([[1.0]], [["a"]], [[1.0] * 10, [1.0]], [[1e300] * 10], [[float("nan")] * 10]):
            content = str({"vectors": vectors}).replace("'", '"').replace("nan", "NaN")
            answer = client.post("/embed", content=content, headers=AS_JSON)
            assert answer.status_code == 422, vectors
        answer = client.post("/embed", content=png(), headers=AS_PNG)
        assert (answer.status_code, "takes vectors" in answer.json()["error"]) == (415, True)
        answer = client.post("/retrieve", json={"vectors": x.tolist()})
        assert (answer.status_code, "has no gallery" in answer.json()["error"]) == (404, True)


def test_a_token_is_asked_for(models: dict[str, Path]) -> None:
    with TestClient(app(Service(Model.open(models["plain"]), None, Limits()), Access(TOKEN))) as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
            answer = client.post("/embed", json=as_json(png()), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert client.post("/embed", json=as_json(png()), headers=headers).status_code == 200


def test_beyond_loopback_a_token_is_needed() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        guards.check_token(host, None)
    for host in ("0.0.0.0", "192.0.2.1", "example.org"):
        with pytest.raises(ValueError, match="is open to others: set a token"):
            guards.check_token(host, None)
        guards.check_token(host, TOKEN)
    with pytest.raises(ValueError, match="the token has 5 characters; take 16 or more"):
        guards.check_token("127.0.0.1", "short")


def test_too_many_waiting_are_sent_away(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(Model.open(models["plain"]), None, Limits(max_waiting=2))
    begun, go_on = threading.Barrier(3), threading.Event()
    real = service.items

    def slow(*arguments: Any) -> np.ndarray:
        begun.wait(10)
        go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(service, "items", slow)
    with TestClient(app(service)) as client, ThreadPoolExecutor(2) as pool:
        under_way = [pool.submit(client.post, "/embed", json=as_json(png())) for _ in range(2)]
        begun.wait(10)
        answer = client.post("/embed", json=as_json(png()))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        go_on.set()
        assert [each.result().status_code for each in under_way] == [200, 200]


def test_the_command_serves_and_ends_gracefully(
    models: dict[str, Path], gallery: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "dmlstudy", "serve", str(models["structure"]), "--gallery", str(gallery)]
    command += ["--port", str(port), "--name", "digits-embedder/1", "--allowed-host", "models.example"]
    environment = {**os.environ, "DMLSTUDY_TOKEN": TOKEN}
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([*command, "--device", "cpu"], env=environment, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while True:
            try:
                assert requests.get(f"{address}/ready", timeout=5).json()["status"] == "ready"
                break
            except requests.ConnectionError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
        headers = {"authorization": f"Bearer {TOKEN}"}
        found = requests.post(
            f"{address}/retrieve?k=3", files={"image": png()}, headers=headers, timeout=30
        ).json()
        assert found["model"] == "digits-embedder/1"
        assert len(found["results"][0]) == 3
        for host, status in (("models.example", 200), ("evil.example", 421)):
            assert requests.get(f"{address}/health", headers={"host": host}, timeout=30).status_code == status
        with ThreadPoolExecutor(4) as pool:
            under_way = [
                pool.submit(
                    requests.post, f"{address}/embed", json=as_json(png()), headers=headers, timeout=30
                )
                for _ in range(16)
            ]
            process.send_signal(signal.SIGTERM)
            finished = [each for each in under_way if each.exception() is None]
        assert {each.result().status_code for each in finished} <= {200, 503}
        assert process.wait(timeout=40) == 0
    finally:
        process.kill()
        process.wait()
        log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert any(re.search(r"Z 127\.0\.0\.1 POST /retrieve 200 [0-9.]+ ms 1 item$", line) for line in lines)
    assert TOKEN not in "".join(lines)
