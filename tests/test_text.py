"""The hint at the end of a message about an unknown name, and what keeps messages short."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from dmlstudy.text import (
    FIRST,
    LINE,
    LISTED,
    REASON,
    VALUE,
    counted,
    energy,
    first_line,
    last_line,
    money,
    nearest,
    one_line,
    reason,
    shown,
)


def test_the_nearest_known_name() -> None:
    assert nearest("digit", ["image_folder", "digits"]) == "; did you mean 'digits'?"
    assert nearest("digit", ["x", "digits"], listed=True) == "; did you mean 'digits'? known are: x, digits"


def test_what_is_known_where_no_name_is_near() -> None:
    assert nearest("zzz", {"b", "a"}) == "; known: a, b"
    assert nearest(3, ["b", "a"], listed=True) == "; known are: b, a"


def test_a_long_list_of_known_names_is_cut_and_counted() -> None:
    names = [f"name{number:02d}" for number in range(60)]
    hint = nearest("zzz", names)
    assert len(hint) < LISTED + 30
    assert hint.startswith("; known: name00, name01, ")
    num = hint.count("name")
    assert hint.endswith(f"name{num - 1:02d} and {60 - num} more")
    assert nearest("zzz", ["x" * 500]) == f"; known: {'x' * 500}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("red", "'red'"),
        (0.5, "0.5"),
        ([1, "a", None], "[1, 'a', None]"),
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
        ([], "[]"),
        ({}, "{}"),
        (10**400, "a number of 1329 bits"),
    ],
)
def test_a_value_as_messages_repeat_it(value: object, text: str) -> None:
    assert shown(value) == text


def test_no_value_is_long_and_none_is_written_out_first() -> None:
    bomb: list[object] = ["x"] * 9
    for _ in range(12):
        bomb = [bomb] * 9  # 9 ** 13 items, were it written out, which would not end
    itself: list[object] = []
    itself.append(itself)
    for value in ("x" * 10**7, list(range(10**6)), bomb, itself, {str(n): n for n in range(10**5)}, 10**5000):
        assert len(shown(value)) <= VALUE
    assert len(shown("x" * 100, 20)) == 20


def test_a_message_is_one_line_that_keeps_its_ends() -> None:
    assert one_line("a:\n  b\tc ") == "a: b c"
    assert one_line("a\x1b[31m \u202eé") == "a\\x1b[31m \\u202eé"
    long = one_line(f"key.{'x' * 10**6}: set it lower")
    assert len(long) == LINE
    assert long.startswith("key.xxx")
    assert long.endswith("xxx: set it lower")


def test_one_is_no_plural() -> None:
    told = [counted(number, "query", "queries") for number in range(3)]
    assert told == ["0 queries", "1 query", "2 queries"]


def test_of_anothers_message_the_first_line_is_repeated() -> None:
    assert first_line(ValueError(" no\x1b[2J such\ntable\n")) == "no\\x1b[2J such"
    assert first_line(ValueError(" \n")) == "ValueError"
    flushed = "(raised as a result of Query-invoked autoflush; consider ...)\ndisk full\n[SQL: ...]"
    assert first_line(OSError(flushed)) == "disk full"
    assert len(first_line(ValueError("x" * 10**6))) == FIRST
    assert first_line("said\nby a library") == "said"


def test_of_a_traceback_the_last_line_is_repeated() -> None:
    assert last_line(ValueError("Traceback:\n  File x\nKeyError: 3\n")) == "KeyError: 3"
    assert last_line(ValueError("one")) == "one"
    assert last_line(ValueError(" \n")) == "ValueError"
    assert len(last_line("x" * 10**6)) == LINE


class Sides(BaseModel):
    size: list[int]


def test_a_reason_names_the_first_field_that_is_wrong() -> None:
    with pytest.raises(ValidationError) as caught:
        Sides.model_validate({"size": [1, "x", None]})
    assert reason(caught.value).startswith("size.1: Input should be a valid integer")
    assert "\n" not in reason(caught.value)
    assert reason(ValueError("a\nb")) == "a b"
    assert reason(MemoryError()) == "MemoryError"
    assert len(reason(ValueError("x" * 1000))) <= REASON


@pytest.mark.parametrize(
    ("watt_hours", "words"), [(0.0042, "0.0042 Wh"), (9.87, "9.9 Wh"), (412.3, "412 Wh"), (3120, "3.1 kWh")]
)
def test_energy(watt_hours: float, words: str) -> None:
    assert energy(watt_hours) == words


@pytest.mark.parametrize(("amount", "words"), [(0.0042, "0.0042"), (3.1, "3.10"), (1250.4, "1,250")])
def test_money(amount: float, words: str) -> None:
    assert money(amount) == words
