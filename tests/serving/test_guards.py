"""Who is answered: names, pages, tokens; what is logged, counted and described."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from PIL import Image
from starlette.testclient import TestClient

from dmlstudy.saved import Model
from dmlstudy.serving import guards
from dmlstudy.serving.guards import Access, Limits, Memory
from dmlstudy.serving.server import Service, app

TOKEN = "0123456789abcdef-a-token"


@pytest.fixture(scope="module")
def service(models: dict[str, Path]) -> Service:
    return Service(Model.open(models["plain"]), None, Limits(), name="digits-embedder/3")


def png() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.zeros((12, 12), np.uint8)).save(content, "PNG")
    return content.getvalue()


def client(service: Service, access: Access, monkeypatch: pytest.MonkeyPatch, **named: Any) -> TestClient:
    monkeypatch.setattr(service, "close", lambda: None)  # it is asked again
    return TestClient(app(service, access, **named), base_url="http://127.0.0.1:8080")


LOCAL = Access.of("127.0.0.1", None)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8080", "localhost:1", "LOCALHOST", "[::1]:8080", "[::1]"]
)
def test_on_loopback_its_own_names_are_answered(host: str) -> None:
    LOCAL.check_host(host)
    Access.of("::1", None).check_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8080",
        "[::2]",
        "127.0.0.1@evil",
        "x:y",
    ],
)
def test_on_loopback_other_names_are_refused(
    host: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(service, LOCAL, monkeypatch) as asked:
        for path in ("/health", "/embed", "/docs"):
            answer = asked.get(path, headers={"host": host})
            assert answer.status_code == 421
            assert "--allowed-host" in answer.json()["error"]
        assert asked.get("/health").status_code == 200


def test_names_are_added_and_beyond_loopback_any_will_do() -> None:
    Access.of("127.0.0.1", None, ["models.example"]).check_host("models.example:80")
    Access.of("0.0.0.0", TOKEN).check_host("anything")
    only = Access.of("0.0.0.0", TOKEN, ["models.example"])
    only.check_host("Models.Example")
    with pytest.raises(guards.RefusedRequest, match=r"other\.example"):
        only.check_host("other.example")


def test_pages_of_other_origins_may_not_ask_unless_they_are_named(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = {"origin": "https://page.example"}
    with client(service, LOCAL, monkeypatch) as asked:
        answer = asked.post("/embed", content=png(), headers=page)
        assert (answer.status_code, "--cors-origin" in answer.json()["error"]) == (403, True)
        assert "access-control-allow-origin" not in answer.headers
        assert asked.post("/embed", content=png(), headers={"origin": "null"}).status_code == 403
        own = {"origin": "http://127.0.0.1:8080"}
        assert asked.post("/embed", content=png(), headers=own).status_code == 200
        assert asked.post("/embed", content=png()).status_code == 200
    with client(service, Access.of("127.0.0.1", None, (), ["https://page.example"]), monkeypatch) as asked:
        answer = asked.post("/embed", content=png(), headers=page)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in answer.headers
        preflight = {**page, "access-control-request-method": "POST"}
        assert asked.options("/embed", headers=preflight).status_code == 200
        preflight["origin"] = "https://other.example"
        assert asked.options("/embed", headers=preflight).status_code == 400
    with client(service, Access.of("127.0.0.1", None, (), ["*"]), monkeypatch) as asked:
        answer = asked.post("/embed", content=png(), headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["page.example", "https://page.example/", "file://x", "https://*.example", ""]
)
def test_an_origin_is_a_scheme_and_a_name(origin: str) -> None:
    with pytest.raises(ValueError, match="expected https://name"):
        Access.of("127.0.0.1", None, (), [origin])


def test_the_log_has_a_line_for_each_request_and_nothing_secret(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dmlstudy.serve")
    monkeypatch.setattr(logging.getLogger("dmlstudy.serve"), "propagate", True)
    access = Access.of("127.0.0.1", TOKEN)
    with client(service, access, monkeypatch, is_logged=True) as asked:
        headers = {"authorization": f"Bearer {TOKEN}"}
        asked.post("/embed?token=secret", content=png(), headers=headers)
        asked.post("/embed", content=png(), headers={"authorization": "Bearer wrong-secret"})
        asked.get("/a%0Ab%1b%20c")
        counts = asked.get("/metrics", headers=headers).text
        assert asked.get("/metrics").status_code == 401
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5
    first = lines[0].split()
    assert first[:4] == ["testclient", "POST", "/embed", "200"]
    assert first[5:] == ["ms", "1", "item"]
    assert lines[1].split()[2:4] == ["/embed", "401"]
    assert lines[2].split()[1] == "GET"
    text = "".join(lines)
    assert text.isprintable()
    assert "secret" not in text
    assert TOKEN not in text
    assert 'dmlstudy_requests_total{path="/embed",status="200"} 1.0' in counts
    assert 'dmlstudy_requests_total{path="other",status="404"} 1.0' in counts
    assert 'dmlstudy_items_total{path="/embed"} 1.0' in counts


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("name", ["plain", "learner"])
def test_the_description_is_openapi_and_answers_are_as_it_says(
    name: str, token: str | None, models: dict[str, Path]
) -> None:
    service = Service(Model.open(models[name]), None, Limits())
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with TestClient(app(service, Access(token))) as asked:
        described = asked.get("/openapi.json").json()
        validate(described)
        assert described["openapi"].startswith("3.1")
        assert set(described["paths"]) == {"/embed", "/health", "/ready", "/model", "/metrics"}
        body = {"image": "AAAA"} if name == "plain" else {"vector": [0.5] * 10}
        good = asked.post(
            "/embed", headers=headers, **({"content": png()} if name == "plain" else {"json": body})
        )
        assert good.status_code == 200
        bad = asked.post("/embed", json={}, headers=headers)
        for answer in (
            good,
            bad,
            asked.get("/ready"),
            asked.get("/health"),
            asked.get("/model", headers=headers),
        ):
            path, method = answer.request.url.path, answer.request.method.lower()
            said = described["paths"][path][method]["responses"][str(answer.status_code)]
            schema = said["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": described["components"]}).validate(answer.json())


def test_the_page_tells_the_bodies_and_loads_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(service, LOCAL, monkeypatch) as asked:
        answer = asked.get("/")  # which leads there
        assert answer.url.path == "/docs"
        assert "script-src 'none'" in answer.headers["content-security-policy"]
        assert "curl -F image=@x.jpg -F image=@y.png http://127.0.0.1:8080/embed" in answer.text
        assert "digits-embedder/3" in answer.text
        assert "src=" not in answer.text
    with client(service, Access(), monkeypatch) as asked:
        assert "<b>" not in asked.get("/docs", headers={"host": "<b>"}).text
    assert service.name == "digits-embedder/3"


def test_what_requests_hold_together_is_limited() -> None:
    memory = Memory(100)
    with memory.share() as take:
        take(60)
        with memory.share() as other:
            other(40)
            with pytest.raises(guards.RefusedRequest, match="holds as much as it may"):
                take(1)
        take(40)
    with memory.share() as take:
        take(100)
