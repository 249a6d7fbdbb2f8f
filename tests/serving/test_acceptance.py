"""What a threshold accepts: in answers, tables and the interface's description; models without one answer as ever."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.testclient import TestClient
from typer.testing import CliRunner

from dmlstudy import model_folder
from dmlstudy.cli.app import app as app_of_commands
from dmlstudy.records import PairCounts
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files
from dmlstudy.serving.embed import EmbedJob, embed_into
from dmlstudy.serving.gallery import build, open_gallery
from dmlstudy.serving.guards import Limits
from dmlstudy.serving.retrieve import retrieve
from dmlstudy.serving.retriever import Retriever
from dmlstudy.serving.server import Service, app
from dmlstudy.verdict.thresholds import errors, fields

COUNTS = PairCounts(
    units=[0, 1, 2, 3],
    impostors=[90] * 4,
    genuine=[6] * 4,
    shipped="1e-2",
    thresholds={"1e-2": 0.0},
    accepted={"1e-2": [2, 1, 1, 0]},
    rejected={"1e-2": [1, 0, 2, 1]},
    class_pairs={"1e-2": 2},
)


def with_threshold(folder: Path, to: Path, tau: float) -> Path:
    """A copy of a model that has a threshold."""
    shutil.copytree(folder, to)
    counts = COUNTS.model_copy(update={"thresholds": {"1e-2": tau}})
    model_folder.add_threshold(to, fields(errors(counts, "1e-2")))
    model_folder.seal(to)
    return to


class Shop:
    """A model with a threshold that accepts some matches and not others, and its gallery."""

    def __init__(self, models: dict[str, Path], pictures: Path, folder: Path, name: str) -> None:
        scores = []
        for turn in (0, 1):  # the threshold lies amid the scores, which a first gallery tells
            self.tau = float(np.median(scores)) if turn else 0.0
            self.model = with_threshold(models[name], folder / f"model{turn}", self.tau)
            embed_into(
                EmbedJob(str(self.model), str(pictures), str(folder / f"z{turn}.parquet"), device="cpu")
            )
            self.gallery = folder / f"gallery{turn}"
            build(folder / f"z{turn}.parquet", self.gallery)
            retriever = Retriever(Model.open(self.model), open_gallery(self.gallery))
            self.hits = retrieve(retriever, of_files(Model.open(self.model), pictures), 5)
            scores = [hit.score for own in self.hits for hit in own[1:]]


@pytest.fixture(scope="module", params=["plain", "structure"])
def shop(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    pictures: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Shop:
    return Shop(models, pictures, tmp_path_factory.mktemp("shop"), request.param)


@pytest.fixture
def client(shop: Shop) -> Iterator[TestClient]:
    with TestClient(app(Service(Model.open(shop.model), shop.gallery, Limits(), name="b/1"))) as client:
        yield client


def asked(client: TestClient, pictures: Path, k: int = 5) -> Any:
    files = [("image", path.read_bytes()) for path in sorted(pictures.rglob("*.png"))]
    return client.post(f"/retrieve?k={k}", files=files).json()


def test_matches_and_queries_are_accepted_by_their_scores(
    shop: Shop, client: TestClient, pictures: Path
) -> None:
    answer = asked(client, pictures)
    assert answer["accept_at"] == shop.tau
    matches = [match for own in answer["results"] for match in own]
    assert {match["accept"] for match in matches} == {True, False}
    for match in matches:
        assert match["accept"] is (match["score"] >= shop.tau)
    assert answer["accept"] == [any(match["accept"] for match in own) for own in answer["results"]]
    assert [[hit.accept for hit in own] for own in shop.hits] == [
        [match["accept"] for match in own] for own in answer["results"]
    ]


def test_the_threshold_can_be_replaced(shop: Shop, pictures: Path) -> None:
    for at, expected in ((-1.5, True), (1.5, False)):
        service = Service(Model.open(shop.model), shop.gallery, Limits(), accept_at=at)
        with TestClient(app(service)) as client:
            answer = asked(client, pictures, 3)
            assert answer["accept_at"] == at
            assert set(answer["accept"]) == {expected}
            assert client.get("/model").json()["threshold"] == {"accept_at": at}
            assert "no errors are known of this threshold" in client.get("/docs").text
    with pytest.raises(ValueError, match=r"--accept-at nan: give a score, as 0\.6"):
        Service(Model.open(shop.model), shop.gallery, Limits(), accept_at=float("nan"))


def test_the_server_tells_the_errors_of_the_threshold(shop: Shop, client: TestClient) -> None:
    told = client.get("/model").json()["threshold"]
    assert told["accept_at"] == shop.tau
    assert (told["wanted_fmr"], told["num_classes"]) == (0.01, 4)
    assert (told["fmr"]["num"], told["fmr"]["total"]) == (2, 180)
    assert 0 <= told["fmr"]["low"] < 2 / 180 < told["fmr"]["high"] <= 1
    assert told["fmr"]["new_high"] >= told["fmr"]["high"]
    assert [warning[:25] for warning in told["warnings"]] == [
        "one class is in 100% of t",
        "2 pairs of classes hold a",
        "4 classes have genuine pa",
    ]
    page = client.get("/docs").text
    assert "set for FMR 0.01 on held-out development classes" in page
    assert "warning: one class is in 100%" in page


def test_the_description_says_what_answers_are(shop: Shop, client: TestClient, pictures: Path) -> None:
    described = client.get("/openapi.json").json()
    validate(described)
    for path, answer in (
        ("/retrieve", asked(client, pictures)),
        ("/model", client.get("/model").json()),
    ):
        (method,) = described["paths"][path]
        said = described["paths"][path][method]["responses"]["200"]
        schema = {**said["content"]["application/json"]["schema"], "components": described["components"]}
        Draft202012Validator(schema).validate(answer)
    retrieved = described["components"]["schemas"]["Retrieved"]
    assert {"accept", "accept_at"} <= set(retrieved["required"])
    assert "accept" in retrieved["properties"]["results"]["items"]["items"]["required"]


def test_models_without_a_threshold_answer_as_ever(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    embed_into(EmbedJob(str(models["plain"]), str(pictures), str(tmp_path / "z.parquet"), device="cpu"))
    build(tmp_path / "z.parquet", tmp_path / "gallery")
    model = Model.open(models["plain"])
    assert model.threshold is None
    with TestClient(app(Service(model, tmp_path / "gallery", Limits()))) as client:
        answer = asked(client, pictures)
        assert set(answer) == {"model", "digest", "order", "results"}
        assert set(answer["results"][0][0]) == {"rank", "id", "label", "distance", "score"}
        assert "threshold" not in client.get("/model").json()
        assert "accept" not in client.get("/openapi.json").text
        assert "Accepted" not in client.get("/docs").text
    # even here a threshold of one's own may be given
    with TestClient(app(Service(model, tmp_path / "gallery", Limits(), accept_at=0.9))) as client:
        assert (
            client.get("/openapi.json").json()["components"]["schemas"]["About"]["required"][-1]
            == "threshold"
        )
        assert asked(client, pictures)["accept"] == [True] * 30
    hits = retrieve(Retriever(model, open_gallery(tmp_path / "gallery")), of_files(model, pictures), 2)
    assert "accept" not in json.loads(hits[0][0].as_json())


def test_the_command_shows_what_is_accepted(shop: Shop, pictures: Path) -> None:
    query = next(iter(sorted(pictures.rglob("*.png"))))
    command = ["retrieve", str(shop.model), str(shop.gallery), str(query), "-k", "5", "--device", "cpu"]
    shown = CliRunner().invoke(app_of_commands, command)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0].split()[-2:] == ["score", "accept"]
    first = shop.hits[0]
    assert [line.split()[-1] for line in lines[1:]] == ["yes" if hit.accept else "no" for hit in first]
    assert "set for FMR 0.01" in shown.stderr
    as_json = CliRunner().invoke(app_of_commands, [*command, "--json", "--accept-at", "2"])
    assert [json.loads(line)["accept"] for line in as_json.stdout.splitlines()] == [False] * 5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tau": "0.5"}, "tau"),
        ({"tau": 7.0}, "tau"),
        ({"words": "a" * 501}, "words"),
        ({"fmr": {"num": 1}}, "fmr"),
        ({"warnings": ["a"] * 11}, "warnings"),
        ({"format_version": 2}, "format version 2"),
    ],
)
def test_a_threshold_that_is_not_understood_is_refused(
    change: dict[str, Any], field: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = with_threshold(models["plain"], tmp_path / "model", 0.5)
    path = folder / model_folder.THRESHOLD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"threshold\.json: altered"):
        Model.open(folder)
    model_folder.seal(folder)
    with pytest.raises(ValueError, match=rf"threshold\.json: .*{field}") as caught:
        Model.open(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("pull the model again")


def test_a_model_saved_over_another_has_not_its_threshold(models: dict[str, Path], tmp_path: Path) -> None:
    folder = with_threshold(models["plain"], tmp_path / "model", 0.5)
    assert Model.open(folder).threshold is not None
    model_folder.clear(folder)
    assert not (folder / model_folder.THRESHOLD).exists()
