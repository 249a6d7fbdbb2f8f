"""Names of metrics: what is built is read again, and both happen in one file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmlstudy import metric_names

PACKAGE = Path(metric_names.__file__).parent


@pytest.mark.parametrize("metric", ["map_at_r", "recall_at_1", "accuracy"])
def test_what_is_built_is_read_again(metric: str) -> None:
    of_models = [metric_names.separate(metric), metric_names.concatenated(metric)]
    for name in (metric, *of_models):
        on_test = metric_names.on_test(name)
        assert metric_names.is_on_test(on_test)
        assert not metric_names.is_on_test(name)
        assert metric_names.metric_of(on_test) == metric_names.metric_of(name) == name
        assert metric_names.is_of_fold_models(on_test) == (name in of_models)
        assert not metric_names.is_count(on_test)
        assert metric_names.for_people(on_test) == f"test {name}"
        assert metric_names.for_people(name) == name


def test_scores_on_retention_data_are_apart_from_those_on_the_test_classes() -> None:
    name = metric_names.on_retention("map_at_r")
    assert metric_names.all_on_retention({"map_at_r": 0.5}) == {name: 0.5} == {"retention_map_at_r": 0.5}
    assert metric_names.is_on_retention(name)
    assert not metric_names.is_on_test(name)
    assert not metric_names.is_on_retention(metric_names.on_test("map_at_r"))
    assert metric_names.metric_of(name) == "map_at_r"
    assert metric_names.for_people(name) == "retention map_at_r"
    assert metric_names.is_count("retention_num_queries_without_positive")
    assert not metric_names.is_count(name)


def test_names_are_those_that_studies_have_stored() -> None:
    """A name that changed would hide the scores of earlier studies."""
    assert metric_names.all_on_test({"map_at_r": 0.5}) == {"test_map_at_r": 0.5}
    assert metric_names.on_test(metric_names.separate("map_at_r")) == "test_separate_map_at_r"
    assert metric_names.on_test(metric_names.concatenated("map_at_r")) == "test_concatenated_map_at_r"
    assert metric_names.stderr("map_at_r") == "map_at_r_stderr"
    assert metric_names.of_fold(2, "map_at_r") == "fold_2_map_at_r"
    assert metric_names.low("test_map_at_r") == "test_map_at_r_low"
    assert metric_names.high("test_map_at_r") == "test_map_at_r_high"
    assert metric_names.is_count("test_num_queries_without_positive")
    assert metric_names.is_count("test_separate_num_queries_without_positive")


def test_folds_are_counted_by_their_names() -> None:
    names = [metric_names.of_fold(fold, "map_at_r") for fold in range(11)]
    others = ["map_at_r", "fold_map_at_r", "fold_3_recall_at_1", "test_map_at_r", "fold_1_map_at_r_stderr"]
    assert metric_names.num_folds([*names, *others], "map_at_r") == 11
    assert metric_names.num_folds(others, "map_at_r") == 0
    assert metric_names.num_folds(["fold_0_mapXatXr"], "map.at.r") == 0


def test_no_other_file_spells_them() -> None:
    spelled = re.compile(
        r"""["'{]test_["'{]|_stderr["']|["'](separate|concatenated)_|["']fold_\{|_(low|high)["']"""
    )
    own = re.compile(r"(effect|like)_(low|high)")  # ends of intervals, by their names in records
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "metric_names.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if spelled.search(line) and not own.search(line)
    ]
    assert found == []
