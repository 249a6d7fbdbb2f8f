"""The hint at the end of a message about an unknown name."""

from __future__ import annotations

from dmlstudy.naming import nearest


def test_the_nearest_known_name() -> None:
    assert nearest("digit", ["image_folder", "digits"]) == "; did you mean 'digits'?"
    assert nearest("digit", ["x", "digits"], listed=True) == "; did you mean 'digits'? known are: x, digits"


def test_what_is_known_where_no_name_is_near() -> None:
    assert nearest("zzz", {"b", "a"}) == "; known: a, b"
    assert nearest(3, ["b", "a"], listed=True) == "; known are: b, a"
