"""The claims of the papers: the file is whole, its studies are valid, and a leaderboard says what became of each."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.registry.search_luck import Procedure, SearchLuck
from dmlstudy.spec import claims as spec
from dmlstudy.spec import study_file
from dmlstudy.spec.claims import Claim
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks, estimate
from dmlstudy.studies.claims import ClaimFinding, cost, findings, spec_of, untested, write
from dmlstudy.studies.wall_time import Seconds
from dmlstudy.verdict.comparison import Comparison, compare, holm

FILE = spec.read()
OWN = spec.data_at(())
STUDIES = spec.studies_of(FILE, FILE.claims, OWN, {})


def test_the_file_is_whole() -> None:
    ids = [claim.id for claim in FILE.claims]
    assert len(ids) == len(set(ids)) >= 70
    assert {claim.paper for claim in FILE.claims} == set(FILE.papers) == {"gpw", "cgml", "nasa", "oahu"}
    assert len({claim.claim for claim in FILE.claims}) == len(ids)
    for claim in FILE.claims:
        assert claim.id.startswith(f"{claim.paper}-")
        assert any(word in claim.place for word in ("Table", "Fig", "Sec", "Experiments", "Relations")), (
            claim.id
        )
    used = {
        (claim.study, family) for claim in FILE.claims if claim.study is not None for family in claim.pair
    }
    leaders = {
        (name, str(entry["like"]))
        for name, study in FILE.studies.items()
        for entry in study.families.values()
        if "like" in entry
    }
    assert used | leaders == {
        (name, family) for name, study in FILE.studies.items() for family in study.families
    }


def test_claims_on_networks_that_have_learned_are_tested_where_there_are_weights() -> None:
    claims = spec.chosen(FILE, ["gpw-pretrained", "gpw-pk"])
    assert [claim.id for claim in claims if spec.why_not(claim, STUDIES)] == [
        "gpw-frozen-batch-norm",
        "gpw-frozen-backbone",
    ]
    assert "--set embedder.weights=default" in spec.why_not(claims[-1], STUDIES)
    with_weights = spec.studies_of(FILE, claims, OWN, {}, ["embedder.weights=default"])
    assert not any(spec.why_not(claim, with_weights) for claim in claims)
    trees = spec_of(with_weights["gpw-pretrained"]).spec.tree
    assert trees("trained-norm")[-1].strip() == "differs: embedder.freeze_bn False; frozen-norm: True"
    assert trees("late-backbone")[-1].strip() == "differs: training.freeze_backbone_epochs 2; frozen-norm: 0"
    with pytest.raises(SpecError, match="embedder"):
        spec_of(spec.studies_of(FILE, claims, OWN, {}, ["embedder=3"])["gpw-pretrained"])


def test_the_time_is_that_of_each_loss_and_term_not_of_the_first_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes by SSDH take four times as long as by GreedyHash."""
    measured: list[str] = []

    def stand_in(spec: Any, dataset: Any, name: str, machine: Any) -> Seconds:
        measured.append(name)
        return Seconds(1000.0, 1000.0) if name == "ssdh" else Seconds(1.0, 1.0)

    monkeypatch.setattr(estimate, "_measured", stand_in)
    written = spec_of(STUDIES["nasa-codes"]).spec
    line = cost(written, checks.check_parts(written), measure=True)
    losses = ("sgh", "ssdh", "greedyhash", "tbh")
    assert sorted(measured) == sorted([*losses, *(f"{loss}-nasa" for loss in losses)])
    assert re.search(r"time: at most about \S+ (min|h)\b.* of it is ssdh", line), line


def test_the_time_of_another_embedder_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gpw-pretrained's three families two have one embedder."""
    measured: list[str] = []

    def stand_in(spec: Any, dataset: Any, name: str, machine: Any) -> Seconds:
        measured.append(name)
        return Seconds(1.0, 1.0)

    monkeypatch.setattr(estimate, "_measured", stand_in)
    claims = spec.chosen(FILE, ["gpw-pretrained"])
    small = ["embedder.weights=default", "data.image_size=32"]
    written = spec_of(spec.studies_of(FILE, claims, OWN, {}, small)["gpw-pretrained"]).spec
    cost(written, checks.check_parts(written), measure=True)
    assert measured == ["frozen-norm", "trained-norm"]


OF_STRUCTURE = {"training.structure_lr_mult", "embedder.structure_input"}
"""Keys that only the head reads which the regularizer structure trains; without it they are refused."""


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_is_valid_as_it_comes_and_its_pairs_differ_in_one_switch(name: str) -> None:
    written = spec_of(STUDIES[name])
    dataset = checks.check_parts(written.spec)
    assert str(written.spec.num_search_trials) in cost(written.spec, dataset, measure=False)
    found = written.spec
    for claim in written.claims:
        first, second = claim.pair
        likenesses = [found.likenesses.get(each) for each in claim.pair]
        pair = next(
            (
                pair
                for pair, each in zip(((first, second), (second, first)), likenesses, strict=True)
                if each and each.leader == pair[1]
            ),
            None,
        )  # fmt: skip
        if pair is None or "lambda" in claim.id or name == "oahu":
            continue
        differing = [line for line in found.tree(pair[0]) if line.startswith("    differs")]
        assert differing
        keys = {line.split()[1].rstrip(":") for line in differing}
        sections = {"regularizer" if key in OF_STRUCTURE else key.partition(".")[0] for key in keys}
        assert len(sections) == 1 or claim.id in ("cgml-two-draws", "gpw-triplets") or name == "nasa-codes", (
            claim.id
        )


def test_claims_of_one_study_run_as_ordinary_study_files(tmp_path: Path) -> None:
    written = spec_of(STUDIES["cgml"])
    path = write(written, tmp_path)
    read = study_file.load(path)
    assert read.fingerprint() == written.spec.fingerprint()
    assert read.name == path.stem == written.spec.name
    assert path.read_text().startswith("# Claims cgml-triplet, cgml-n-pair")
    assert write(written, tmp_path) == path
    path.write_text("name: mine")
    with pytest.raises(ValueError, match="exists already and is not a study of claims"):
        write(written, tmp_path)


def test_only_some_claims_take_their_families_and_those_they_are_like() -> None:
    chosen = spec.chosen(FILE, ["nasa-reranking", "gpw-pk"])
    assert [claim.id for claim in chosen] == ["gpw-pk", "nasa-reranking"]
    found = spec.studies_of(FILE, chosen, OWN, {"search.trials_per_family": 2, "protocol.verdict_seeds": 7})
    assert list(found) == ["gpw", "nasa"]
    assert list(found["nasa"].raw["families"]) == ["triplet", "triplet-nasa", "triplet-nasa-reranked"]
    assert list(found["gpw"].raw["families"]) == ["pair-exponential", "pair-constant", "pair-constant-random"]
    small = spec_of(found["gpw"])
    assert small.spec.file.search.trials_per_family == 2
    assert small.spec.file.search.seed == 0
    assert small.spec.file.protocol.verdict_seeds == 7
    assert small.spec.name != spec_of(STUDIES["gpw"]).spec.name
    assert {claim.paper for claim in spec.chosen(FILE, ["oahu"])} == {"oahu"}
    assert {claim.study for claim in spec.chosen(FILE, ["nasa-codes"])} == {"nasa-codes"}
    with pytest.raises(
        SpecError, match=r"^--only gpw-kp: no such claim, paper or study; did you mean 'gpw-pk'\?$"
    ):
        spec.chosen(FILE, ["gpw-kp"])


def test_data_of_ones_own(tmp_path: Path) -> None:
    drawings, pictures = tmp_path / "omniglot", tmp_path / "birds"
    (drawings / "images_background").mkdir(parents=True)
    pictures.mkdir()
    assert spec.data_at([str(drawings)])["unseen"].section == {
        "name": "omniglot",
        "path": str(drawings),
        "image_size": 28,
    }
    found = spec.data_at([str(pictures), f"cifar10={tmp_path}"])
    assert found["unseen"] == ({"name": "image_folder", "path": str(pictures), "image_size": 64}, False)
    assert found["closed"] == ({"name": "cifar10", "path": str(tmp_path)}, False)
    raw = spec.studies_of(FILE, FILE.claims, found, {})["oahu"].raw
    assert raw["online"]["num_seeds"] == 5000
    assert STUDIES["oahu"].raw["online"]["num_seeds"] == 500
    for places, fault in (
        ([str(tmp_path / "none")], "does not exist; give a folder, or NAME=FOLDER"),
        ([f"birds={pictures}"], "no data set 'birds'"),
        ([str(pictures), str(drawings)], "a second data set for the same claims; give one of them"),
    ):
        with pytest.raises(SpecError, match=fault):
            spec.data_at(places)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"paper": "gwp"}, "claims.yaml: x: paper: no 'gwp'; did you mean 'gpw'?"),
        ({"study": "gpv"}, "claims.yaml: x: study: no 'gpv'; did you mean 'gpw'?"),
        (
            {"first": "pair-powers"},
            "claims.yaml: x: no family 'pair-powers' in gpw; did you mean 'pair-power'?",
        ),
        (
            {"expected": None},
            "claims.yaml: x: needs study, first, second and expected, or not_tested with the reason",
        ),
        (
            {"not_tested": "no"},
            "claims.yaml: x: not_tested: stands beside what tests it; leave one of the two out",
        ),
    ],
)
def test_a_claims_file_that_is_wrong_is_refused(change: dict[str, Any], fault: str) -> None:
    claim = Claim(
        id="x",
        paper="gpw",
        place="p",
        claim="c",
        study="gpw",
        first="pair-power",
        second="pair-constant",
        expected="better",
    )
    with pytest.raises(SpecError) as refused:
        spec._check(claim.model_copy(update=change), FILE)
    assert str(refused.value) == fault


def claim(id: str, expected: str = "better", **more: Any) -> Claim:
    first, second = id.split("-")
    return Claim.model_validate(
        {"id": id, "paper": "gpw", "place": "Table I", "claim": id, "study": "gpw", "first": first, "second": second,
         "expected": expected} | more
    )  # fmt: skip


def row(family: str, num_judged: int = 3, **test: float) -> Row:
    return Row(
        family=family,
        num_finished=num_judged,
        num_pruned=0,
        num_failed=3 - num_judged,
        num_judged=num_judged,
        validation=0.5,
        validation_stderr=None,
        params={},
        untrained=None,
        test={f"test_{name}": Estimate(mean=value, half_width=0.01, num=3) for name, value in test.items()},
    )


def compared(
    first: str, second: str, effect: float, p: float, like_p: float | None = None, like_unknown: str = ""
) -> Comparison:
    return Comparison(
        first=first,
        second=second,
        num_seeds=3,
        effect=effect,
        low=None,
        high=None,
        p_value=p,
        adjusted_p_value=p,
        outcome="not distinguishable",
        like_p_value=like_p,
        like_adjusted_p_value=like_p,
        like_unknown=like_unknown,
    )


def board(rows: list[Row], comparisons: list[Comparison], status: str = "finished") -> Leaderboard:
    return Leaderboard(
        study="claims-gpw",
        objective="map_at_r",
        second_objective=None,
        status=status,
        winner=None,
        model=None,
        rows=rows,
        front=[],
        comparisons=comparisons,
    )


ROWS = [row(name, map_at_r=0.3 + 0.1 * at) for at, name in enumerate("abcd")]

FAMILIES = study_file.given(
    {
        "name": "four",
        "data": {"name": "digits"},
        "families": {
            "a": {"space": "contrastive"},
            "b": {
                "space": "contrastive",
                "like": "a",
                "override": {"loss.positive_margin": {"float": [0, 0.2]}},
            },
            "c": {"space": "contrastive", "like": "a", "override": {"embedder.dim": 32}},
            "d": {"space": "triplet"},
        },
    }
).families


def found_of(claims: list[Claim], of_study: Leaderboard) -> list[ClaimFinding]:
    return findings(claims, of_study, FAMILIES)


def outcomes(found: list[ClaimFinding]) -> dict[str, tuple[str, str]]:
    return {finding.id: (finding.these, finding.like_these) for finding in found}


def test_every_outcome_for_both_populations() -> None:
    found = found_of(
        [claim("a-b"), claim("c-a"), claim("a-d"), claim("b-a", "worse"), claim("d-c", "worse")],
        board(
            ROWS,
            [
                compared("a", "b", 0.1, 0.001, 0.01),
                compared("a", "c", 0.2, 0.002, 0.3),  # the claim names them the other way round
                compared("a", "d", 0.1, 0.4, 0.5),
                compared("c", "d", 0.1, 0.003, 0.003),
            ],
        ),
    )
    assert outcomes(found) == {
        "a-b": ("reproduced", "reproduced"),
        "c-a": ("contrary", "not distinguishable"),
        "a-d": ("not distinguishable", "not distinguishable"),
        "b-a": ("reproduced", "reproduced"),
        "d-c": ("reproduced", "reproduced"),
    }
    first = found[0]
    assert (first.effect, first.first_score, first.second_score, first.num_seeds) == (0.1, 0.3, 0.4, 3)
    assert first.metric == "map_at_r"
    assert found[1].effect == -0.2


def test_a_study_compares_the_pairs_of_its_claims_alone() -> None:
    chosen = spec.chosen(FILE, ["gpw-pk", "gpw-weights-power", "gpw-margin-mining"])
    (study,) = spec.studies_of(FILE, chosen, OWN, {}).values()
    pairs = spec_of(study).spec.file.protocol.pairs
    assert sorted(pairs) == sorted(claim.pair for claim in chosen)
    for other in STUDIES.values():
        pairs = spec_of(other).spec.file.protocol.pairs
        assert {frozenset(claim.pair) for claim in other.claims} == {frozenset(pair) for pair in pairs}
        assert len(json.dumps(pairs)) < 5000


def test_p_values_are_holms_among_the_claims_pairs_alone() -> None:
    """Also with a claim whose switch did nothing: its pair counts in the correction."""
    scores = {
        name: {seed: at + 0.01 * (seed * (at + 1) % 4) for seed in (1, 2, 3, 4)}
        for at, name in enumerate("abc")
    }
    pairs = [("b", "a"), ("a", "c")]
    several = compare(scores, pairs=pairs, resolution=1e-4)
    check = {"metric": "omega_deviation", "at_least": 0.01}
    rows = [row("a", map_at_r=0.4), row("b", map_at_r=0.4, omega_deviation=0.0005), ROWS[2]]
    idle, other = found_of([claim("b-a", check=check), claim("a-c")], board(rows, several))
    assert idle.p is None
    assert other.p == holm([each.p_value for each in several])[1]
    assert other.p == 2 * several[1].p_value  # the smaller one of two
    (alone,) = found_of([claim("a-c")], board(rows, compare(scores, pairs=pairs[1:], resolution=1e-4)))
    assert alone.p == several[1].p_value


def test_outcomes_by_search_stand_beside_those_by_seed() -> None:
    by_seed = [compared("a", "b", 0.1, 0.001, 0.01), compared("a", "c", 0.1, 0.001, 0.01)]
    again = [
        compared("a", "b", 0.05, 0.02, 0.4),
        compared("a", "c", -0.1, 0.9),
        compared("b", "c", 0.1, 0.001),
    ]
    searched = {"a": [0.5, 0.75, 0.5], "b": [0.25, 0.5, 0.5], "c": [1.0, 0.5, 0.5]}
    procedures = [
        Procedure(family=name, score_by_search=own, deviation=0.0) for name, own in searched.items()
    ]
    luck = SearchLuck(num_searches=3, num_seeds=2, procedures=procedures, comparisons=again)
    of_a, of_c = found_of(
        [claim("a-b"), claim("c-a")], board(ROWS, by_seed).model_copy(update={"luck": luck})
    )
    assert outcomes([of_a, of_c]) == {
        "a-b": ("reproduced", "reproduced"),
        "c-a": ("contrary", "contrary"),
    }
    assert of_a.by_search is not None
    assert of_c.by_search is not None
    assert (of_a.num_searches, of_a.by_search.effect, of_a.by_search.p) == (3, 0.05, 0.02)
    assert (of_a.by_search.these, of_a.by_search.like_these) == ("reproduced", "not distinguishable")
    assert (of_c.by_search.effect, of_c.by_search.p, of_c.by_search.like_p) == (0.1, 0.9, None)
    assert (of_c.by_search.these, of_c.by_search.like_these) == ("not distinguishable", "not tested")
    (once,) = found_of([claim("a-b")], board(ROWS, by_seed))
    assert (of_a.differences, of_c.differences) == ([0.25, 0.25, 0.0], [0.5, -0.25, 0.0])
    assert (once.num_searches, once.by_search, once.differences) == (0, None, [])


def test_values_of_a_study_are_replaced_as_in_its_file() -> None:
    chosen = spec.chosen(FILE, ["gpw-pk", "cgml-triplet"])
    frozen = [
        "embedder={backbone: resnet18, dim: 48}",
        "training.lr.default=2.0e-3",
        "training.freeze_backbone_epochs=2",
    ]
    found = spec.studies_of(FILE, chosen, OWN, {"training.epochs": 2}, frozen)
    for study in found.values():
        assert study.raw["embedder"] == {"backbone": "resnet18", "dim": 48}
        assert study.raw["training"]["lr"]["default"] == 2e-3
        assert (study.raw["training"]["epochs"], study.raw["training"]["freeze_backbone_epochs"]) == (2, 2)
        assert spec_of(study).spec.name != spec_of(STUDIES[study.claims[0].study or ""]).spec.name
    with pytest.raises(SpecError, match="--set bogus: unknown key"):
        spec.studies_of(FILE, chosen, OWN, {}, ["bogus=1"])


def test_a_claim_tells_what_else_its_families_were_judged_at() -> None:
    shared = {"training.lr": "0.001", "loss.negative_margin": "0.8", "batch.classes": "8"}
    chosen = {
        "a": {**shared, "loss.positive_margin": "0.0"},
        "b": {**shared, "loss.positive_margin": "0.1"},  # searched by it alone
        "c": {**shared, "training.lr": "0.002", "embedder.dim": "32"},  # the switch
        "d": {**shared, "loss.margin": "0.2"},
    }
    rows = [each.model_copy(update={"params": chosen[each.family]}) for each in ROWS]
    pairs = [compared("a", second, 0.1, 0.01, 0.01) for second in "bcd"]
    of_b, of_c, of_d = found_of([claim("a-b"), claim("a-c"), claim("d-a")], board(rows, pairs))
    assert (of_b.apart, of_c.apart, of_d.apart) == ([], ["training.lr"], [])


def test_searches_are_done_again_for_each_family() -> None:
    settings = {"protocol.searches": 3, "protocol.verdict_seeds": 5}
    found = spec.studies_of(FILE, spec.chosen(FILE, ["gpw-fusion", "cgml"]), spec.data_at(()), settings)
    for name, study in found.items():
        protocol = spec_of(study).spec.file.protocol
        assert (protocol.searches, protocol.search_leaders) == (3, len(study.raw["families"])), name
    assert "search_leaders" not in FILE.studies["gpw"].file["protocol"]


def test_a_claim_that_could_not_be_tested_says_why() -> None:
    failed = row("b", num_judged=0)
    (found,) = found_of([claim("a-b")], board([ROWS[0], failed], []))
    assert outcomes([found]) == {"a-b": ("not tested", "not tested")}
    assert found.why == "b was not judged, 3 of its 3 trials failed"
    (found,) = found_of([claim("a-b")], board([ROWS[0]], []))
    assert found.why == "b was not judged"
    (found,) = found_of([claim("a-b")], board(ROWS, [compared("a", "b", 1, 0.001, 0.001)], "interrupted"))
    assert (found.these, found.why) == ("not tested", "study claims-gpw is interrupted")
    (found,) = found_of([claim("a-b")], board(ROWS, []))
    assert found.why == "its families were not compared"
    (found,) = found_of(
        [claim("a-b")], board(ROWS, [compared("a", "b", 1, 0.001, None, "fewer than 5 classes")])
    )
    assert outcomes([found]) == {"a-b": ("reproduced", "not tested")}
    assert found.why == "fewer than 5 classes"
    assert untested(claim("a-b"), "no data").why == "no data"


@pytest.mark.parametrize(
    ("deviation", "is_tested"), [(0.0005, False), (0.01, True), (0.2, True), (math.nan, True), (None, True)]
)
def test_a_switch_that_did_nothing_is_not_a_test(deviation: float | None, is_tested: bool) -> None:
    check = {"metric": "omega_deviation", "at_least": 0.01}
    own = row("a", map_at_r=0.4) if deviation is None else row("a", map_at_r=0.4, omega_deviation=deviation)
    rows = [own, ROWS[1], ROWS[2]]
    comparisons = [compared("a", "b", 0.1, 0.02, 0.02), compared("a", "c", 0.1, 0.03, 0.03)]
    first, other = found_of([claim("a-b", check=check), claim("a-c")], board(rows, comparisons))
    assert (first.these != "not tested") is is_tested
    assert is_tested or first.why == "the switch did nothing: omega_deviation of a is 0.0005, below 0.01"
    assert other.p == 0.03
