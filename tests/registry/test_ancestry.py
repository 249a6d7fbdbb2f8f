"""A model's ancestry as strangers read it: in order, in plain words, without folders, and never as markup."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dmlstudy.records import Ancestor, StartConfig
from dmlstudy.registry import ancestry, model_page
from dmlstudy.registry.markdown import code, verbatim
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.registry.tracking import MOST_IN_A_TAG
from dmlstudy.training.lineage import KeptNotes, as_facts, facts, kept, told, without_folders

FIRST = Ancestor(
    source="models:/birds/3?store=/home/someone/store",
    sha256="b" * 64,
    data="image_folder, <b>`wild`</b>",
    data_sha256="d" * 64,
    num_images=901,
    num_classes=5,
)
SECOND = Ancestor(source="/home/someone/a*b_c.pt", sha256="f" * 64)
HUB = Ancestor(
    source="default of timm:resnet18",
    entry="timm timm/resnet18.a1_in1k",
    url="https://there/resnet18.pth",
    licence="apache-2.0",
    num_classes=1000,
)
RANDOM = Ancestor(source="random")
SEEN = "was trained on 2 of the 4 test classes, so test scores are not of unseen classes"


def notes(*ancestors: Ancestor, seen: str = "") -> KeptNotes:
    raw = {"start": [each.model_dump() for each in ancestors], "config": {"start": {"seen": seen}}}
    return kept(raw, "model")


def test_the_card_tells_each_ancestor_in_order() -> None:
    text = "\n".join(ancestry.section(notes(FIRST, HUB, seen=SEEN)))
    assert text.startswith("## Ancestry\n\nThe training of this model began with the weights of number 1")
    one, two = [line for line in text.splitlines() if line[:2] in ("1.", "2.")]
    assert one == (
        "1. `models:/birds/3 of another store`; SHA-256 of its weights bbbbbbbbbbbb;"
        " `` trained on image_folder, <b>`wild`</b>: 901 images of 5 classes, SHA-256 dddddddddddd ``"
    )
    assert two == (
        "2. `default of timm:resnet18`; digest not known; `timm timm/resnet18.a1_in1k, 1000 classes, licence"
        " apache-2.0`; `https://there/resnet18.pth`"
    )
    assert f"* classes seen before: number 1, itself or by an ancestor, {SEEN}" in text
    assert "* not known: what number 2 was trained on" in text
    assert "someone" not in text
    assert "`apache-2.0`" in ancestry.licence_line(notes(FIRST, HUB))
    assert ancestry.licence_line(notes(FIRST, RANDOM)).endswith("none is noted here")


def test_a_lineage_without_an_unknown_says_that_no_class_was_seen() -> None:
    text = "\n".join(ancestry.section(notes(FIRST, RANDOM)))
    assert "2. random weights" in text.splitlines()
    assert "* classes seen before: none of this study's" in text
    assert "not known" not in text


@pytest.mark.parametrize("given", [None, KeptNotes(), notes(RANDOM)])
def test_a_model_that_starts_from_no_weights_has_no_section(given: KeptNotes | None) -> None:
    assert ancestry.section(given) == []


def test_a_version_keeps_it_for_people_and_for_programs() -> None:
    tags = ancestry.tags(notes(FIRST, RANDOM, seen=SEEN))
    assert tags["start"] == f"{FIRST.source} (SHA-256 bbbbbbbbbbbb) <- random"
    assert tags["start_seen"] == SEEN
    assert ancestry.of_tags(tags) == (FIRST, RANDOM)
    assert ancestry.of_tags({}) == ()
    assert ancestry.tags(KeptNotes()) == {}
    many = [FIRST.model_copy(update={"source": f"models:/{'x' * 60}/{number}"}) for number in range(100)]
    long = ancestry.tags(notes(*many))
    assert max(map(len, long.values())) <= MOST_IN_A_TAG
    assert [each.source for each in ancestry.of_tags(long)][:2] == [each.source for each in many[:2]]


def test_the_models_page_and_the_command_line_tell_it_in_a_line() -> None:
    version = RegisteredVersion(
        name="birds",
        version=4,
        aliases=["champion"],
        study="s",
        family="ms",
        metrics={},
        sha256="",
        run_id="",
        ancestry=(FIRST, SECOND, RANDOM),
    )
    page = model_page.text("birds", [version], [])
    assert (
        "ms of s, trained from `models:/birds/3 of another store`, from `a*b_c.pt`, from random weights"
        in page
    )
    assert ancestry.line((FIRST, HUB)) == "models:/birds/3 of another store, from default of timm:resnet18"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/home/someone/models of birds/w.pt", "w.pt"),
        ("models:/a/1", "models:/a/1"),
        ("models:/a/1?tracking-uri=http://me:secret@host", "models:/a/1 of another server"),
        ("default of timm:local-dir:/home/someone/net", "default of timm:local-dir:net"),
        ("default of timm:hf-hub:owner/net", "default of timm:hf-hub:owner/net"),
        ("IMAGENET1K_V1 of resnet18", "IMAGENET1K_V1 of resnet18"),
        ("random", "random"),
    ],
)
def test_a_source_names_no_folder_and_no_address(source: str, shown: str) -> None:
    assert without_folders(source) == shown


def test_facts_say_what_is_not_known() -> None:
    assert facts(SECOND) == facts(RANDOM) == ""
    assert facts(Ancestor(source="x", data="digits")) == "trained on digits"
    silent = HUB.model_copy(update={"licence": "", "num_classes": None})
    assert facts(silent) == "timm timm/resnet18.a1_in1k, its library states no licence"
    (told_one, told_two) = as_facts([FIRST, SECOND])
    assert told_one["source"] == "models:/birds/3 of another store"
    assert told_one["about"].startswith("trained on image_folder")
    assert "about" not in told_two


def test_notes_of_another_form_are_one_line_or_nothing() -> None:
    strange: dict[str, Any] = {"start": [{"source": 3}]}
    with pytest.raises(ValueError, match=r"model: its notes .* not understood \(start\.0\.source") as error:
        kept(strange, "model")
    assert "\n" not in str(error.value)
    assert told(strange) == KeptNotes()


def test_earlier_notes_count_the_classes_of_a_first_model() -> None:
    before = {"trained_on": "digits", "trained_classes": [["a", "b"], ["c", "d"]]}
    assert told({**before, "start": [{"source": "random"}]}).trained_on_facts()["num_classes"] == 2
    assert told({**before, "start": [{"source": "w.pt"}]}).trained_on_facts()["num_classes"] is None


def test_earlier_records_are_written_as_they_were() -> None:
    assert SECOND.model_dump() == {"source": SECOND.source, "sha256": SECOND.sha256}
    assert set(StartConfig(source="w.pt").model_dump()) == {"source", "sha256", "place", "ancestors", "seen"}
    start = StartConfig(**FIRST.model_dump(), ancestors=(RANDOM,))
    assert start.lineage == (FIRST, RANDOM)
    assert StartConfig.model_validate(json.loads(start.model_dump_json())) == start


@pytest.mark.parametrize("text", ["birds", "birds 2, large", "v1.2-b"])
def test_harmless_names_stay(text: str) -> None:
    assert verbatim(text) == text


@pytest.mark.parametrize(
    "text", ["<b>x</b>", "a*b*c", "[x](y)", "_x_", "www.there.com", "a|b", "a\nb", "`x`", "- x", "x://y"]
)
def test_other_names_are_code(text: str) -> None:
    assert verbatim(text) == code(text)
    assert "\n" not in code(text)


def test_backticks_end_no_code() -> None:
    assert code("a`b") == "`` a`b ``"
    assert code("```") == "```` ``` ````"
    assert code("") == ""
