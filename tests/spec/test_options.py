"""``dmlstudy options``: every key that the records take is there, with a meaning."""

from __future__ import annotations

import pytest

from dmlstudy.spec.options import FAMILY, SECTION_RECORDS, Option, options
from dmlstudy.spec.study_file import SECTIONS, SpecError, StudyFile


def by_key(section: str | None = None) -> dict[str, Option]:
    return {option.key: option for option in options(section)}


def test_every_key_is_there_once_and_has_a_meaning() -> None:
    found = options()
    keys = [option.key for option in found]
    assert len(set(keys)) == len(keys)
    expected = {
        f"{section}.{name}" for section, record in SECTION_RECORDS.items() for name in record.model_fields
    }
    assert expected < set(keys)
    assert {"name", "model_name", "regularizer"} == set(keys) - expected
    assert set(StudyFile.model_fields) == {"name", "model_name", "regularizer", "families"} | (
        SECTION_RECORDS.keys() - {FAMILY}
    )
    assert [option.key for option in found if not option.description] == []
    assert [option.key for option in found if not option.values] == []


def test_a_section_has_its_own_keys() -> None:
    assert all(option.key.startswith("training.") for option in options("training"))
    assert list(by_key("families")) == [
        f"families.NAME.{key}" for key in ("space", "override", "like", "fix")
    ]


@pytest.mark.parametrize(
    ("key", "values", "default"),
    [
        ("name", "text", "needed"),
        ("data.image_size", "integer > 0, <= 4096", "none"),
        ("batch.classes", "integer >= 2, <= 1000000 or all", "16"),
        ("training.lr", "number > 0", "1e-05"),
        ("training.compile", "true | false", "false"),
        ("search.sampler", "text", "auto"),
        ("search.warm_start", "list of: text or auto", "[]"),
        ("protocol.recall_at", "list of: integer > 0, <= 1000000", "[1, 2, 4, 8]"),
        ("hashing.num_bits", "integer >= 8, <= 1024, in steps of 8", "64"),
        ("regularizer", "section", "none"),
    ],
)
def test_values_and_defaults_in_words(key: str, values: str, default: str) -> None:
    option = by_key()[key]
    assert (option.values, option.default) == (values, default)


def test_what_a_search_may_choose_is_marked() -> None:
    found = by_key()
    marked = {key for key, option in found.items() if option.is_searchable}
    assert marked == {key for key in found if key.partition(".")[0] in SECTIONS} - {"training.epochs"}


def test_an_unknown_section_is_one_line() -> None:
    with pytest.raises(
        SpecError, match=r"^options: no section 'serch'; did you mean 'search'\? known are: data, "
    ):
        options("serch")
