"""A model's card: what it was trained on, how it was judged, its scores with intervals, and where that ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import pytest

from dmlstudy.data import Fit, preprocessing
from dmlstudy.records import DataConfig
from dmlstudy.registry.card import SHOWN, card, usage
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.training.lineage import KeptNotes, told
from dmlstudy.training.tasks import TASKS
from dmlstudy.verdict.comparison import compare
from dmlstudy.verdict.thresholds import Errors, Rate

SCORES = {
    "red": {1: 0.6, 2: 0.61, 3: 0.62},
    "blue": {1: 0.5, 2: 0.53, 3: 0.5},
    "green": {1: 0.1, 2: 0.2, 3: 0.3},
}
BIRDS = DataConfig(name="image_folder", path="/home/someone/birds", image_size=64, resize_to=72)

ORIGIN = {
    "num_development_classes": "5",
    "num_development_images": "901",
    "development_sha256": "d" * 64,
    "num_test_images": "896",
    "test_sha256": "t" * 64,
    "num_shared_images": "3",
}


def made(
    family: str = "red",
    task: str = "embedding",
    further: tuple[str, ...] = (),
    described: Mapping[str, Any] | None = None,
    data: DataConfig = BIRDS,
    notes: KeptNotes | None = None,
    threshold: Errors | None = None,
    omega: float = 0.25,
) -> str:
    rows = [
        Row(
            family=name,
            num_finished=3,
            num_pruned=2,
            num_failed=1,
            num_judged=3,
            validation=0.7,
            validation_stderr=None,
            params={},
            untrained=None,
            test={each: Estimate.of([omega]) for each in further}
            | {"test_map_at_r": Estimate.of(list(scores.values()))},
        )
        for name, scores in SCORES.items()
    ]
    board = Leaderboard(
        study="s",
        objective="map_at_r",
        second_objective=None,
        status="finished",
        winner="red",
        model=None,
        rows=rows,
        front=[],
        comparisons=compare(SCORES, resolution=1e-3),
    )
    row = next(row for row in rows if row.family == family)
    protocol = {"recall_at": (1, 2), "map_at": (), "clusters": False, "full_map": True, "num_folds": 4}
    return card(
        board,
        row,
        limits=TASKS[task].limits,
        data=data,
        trained="2026-01-31",
        origin=ORIGIN,
        protocol=protocol,
        name="digits-embedder",
        preprocessing=described,
        notes=notes,
        threshold=threshold,
    )


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_it_says_what_the_model_is_of_and_how_it_was_judged() -> None:
    text = made()
    assert text.startswith("# digits-embedder: red\n")
    for line in (
        "Of the family **red** in the study **s**, trained on 2026-01-31.",
        "* data: image_folder, birds",
        "* picture size: 64 x 64 pixels, cut from 72",
        "* development: 901 images of 5 classes, SHA-256 dddddddddddddddd",
        "* test: 896 images, SHA-256 tttttttttttttttt",
        "* images in both: 3",
        "* recall at: 1, 2",
        "* full map: yes",
        "* num folds: 4",
    ):
        assert line in text.splitlines()
    assert "The search tried 6 configurations (3 finished)" in text
    assert "map at:" not in text, "what was not asked for is no part of the protocol"
    assert "clusters" not in text
    assert "someone" not in text, "a path tells who works where"
    assert "VERSION" not in text


def test_scores_have_intervals_and_the_objective_is_the_first() -> None:
    further = ("test_recall_at_1", "test_concatenated_num_x", "test_num_queries", "test_separate_map_at_r")
    rows = table(made(further=further))
    assert [row[0] for row in rows] == ["map_at_r", "recall_at_1", "separate_map_at_r"]
    low, high = map(float, re.findall(r"[\d.]+", rows[0][2]))
    estimate = Estimate.of(list(SCORES["red"].values()))
    assert float(rows[0][1]) == pytest.approx(estimate.mean, abs=5e-5)
    assert (low, high) == pytest.approx((estimate.low, estimate.high), abs=5e-5)
    assert rows[1][2] == "one seed"
    assert len(table(made(further=tuple(f"test_recall_at_{k}" for k in range(1, 40))))) == SHOWN


def test_its_comparisons_are_those_of_its_own_family() -> None:
    own = [
        line
        for line in made("green").splitlines()
        if " by " in line or "distinguishable" in line or "than" in line
    ]
    compared = [line for line in own if line.startswith("* ")]
    assert len(compared) == 2
    assert all("green" in line for line in compared)
    assert any("red better than green" in line for line in compared)


def test_it_says_of_a_structure_head_that_did_nothing_that_it_was_not_tested() -> None:
    idle = "The structure head of red did nothing"
    assert idle in made(further=("test_omega_deviation",), omega=0.004)
    assert idle not in made(further=("test_omega_deviation",), omega=0.25)


@pytest.mark.parametrize(
    ("task", "limit"),
    [
        ("embedding", "classes of the same data set that were not trained on"),
        ("online", "its constraints were of"),
    ],
)
def test_it_says_where_its_scores_end(task: str, limit: str) -> None:
    assert limit in made(task=task)


def test_it_says_how_the_model_is_used_from_where_it_is_read() -> None:
    of_version = usage("birds-embedder", 3, "uint8 (N, 64, 64, 3)", "float32 (N, 128)").splitlines()
    assert "dmlstudy pull birds-embedder/3 --to model" in of_version
    assert any(line.startswith('mlflow.pyfunc.load_model("models:/birds-embedder/3")') for line in of_version)
    assert "* takes: images, values 0 to 255: uint8 (N, 64, 64, 3)" in of_version
    of_folder = usage("birds-embedder", None, "float32 (N, 10)", "int8 (N, 16)")
    assert "* takes: vectors: float32 (N, 10)" in of_folder
    assert "birds-embedder/" not in of_folder, "a folder does not know its version's number"


def test_it_tells_what_a_picture_goes_through_in_words_and_as_code() -> None:
    described = preprocessing.described(
        Fit(8, 10), image_size=(8, 8), channels=3, mean=[0.5] * 3, std=[0.5] * 3, network_order="RGB"
    )
    text = made(described=described)
    section = text.partition("## Preprocessing\n")[2].partition("\n## Limits")[0]
    for step in preprocessing.words(described):
        assert f"* {step}" in section.splitlines()
    assert preprocessing.code(described) in section.partition("```python\n")[2]
    assert section.count("```") == 2
    vectors = made(described={"layout": "NF", "features": 7})
    assert "## Preprocessing\n\n* vectors float32 (N, 7), as they are\n\n## Limits" in vectors
    assert "Preprocessing" not in made()


@pytest.mark.parametrize("number", [3, None])
def test_its_python_needs_nothing_that_it_does_not_import(number: int | None) -> None:
    code = usage("birds-embedder", number, "float32 (N, 10)", "int8 (N, 16)").partition("```python\n")[2]
    nodes = list(ast.walk(ast.parse(code.partition("```")[0])))
    imported = {
        alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    assert {node.id for node in nodes if isinstance(node, ast.Name)} == {*imported, "x"}


def test_a_folders_name_is_no_markup() -> None:
    data = DataConfig(name="image_folder", path="/home/someone/<img src=x>*birds*")
    assert "* data: image_folder, `<img src=x>*birds*`" in made(data=data).splitlines()


def test_it_tells_its_ancestors_with_the_data_and_none_of_random_weights() -> None:
    first = {"source": "models:/birds/3", "sha256": "b" * 64, "data": "digits", "num_classes": 5}
    of_weights = made(notes=told({"start": [first, {"source": "random"}]}))
    trained, ancestry = of_weights.index("## Trained on"), of_weights.index("## Ancestry")
    assert trained < ancestry < of_weights.index("## Judged")
    assert "started from" not in of_weights
    assert (
        "1. `models:/birds/3`; SHA-256 of its weights bbbbbbbbbbbb; `trained on digits: 5 classes`"
        in of_weights
    )
    of_random = made(notes=told({"start": [{"source": "random"}]}))
    assert "* started from: random weights" in of_random.splitlines()
    assert "## Ancestry" not in of_random
    assert made(notes=told({})) == made()


def test_a_threshold_has_a_section_with_its_errors_and_warnings() -> None:
    assert "## Threshold" not in made()
    fmr = Rate(644, 495_000, 100, 0.0007, 0.0026, 0.0005, 0.0035)
    found = Errors(0.612, 1e-3, fmr, Rate(80, 1000, 100, 0.06, 0.11), ["one class is in 30% of it"])
    text = made(threshold=found)
    section = text.partition("## Threshold")[2].partition("## ")[0]
    assert (
        "* tau 0.612, set for FMR 1e-3 on held-out development classes; on 100 unseen classes FMR 1.3e-3"
        " [0.7e-3, 2.6e-3], FNMR 0.08 [0.06, 0.11]\n"
    ) in section
    assert "* 100 new classes of the kind will show a FMR from 0.5e-3 to 3.5e-3 (95%).\n" in section
    assert "* **Warning**: one class is in 30% of it.\n" in section
