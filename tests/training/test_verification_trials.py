"""Thresholds from the folds to the verdict: set on held-out classes, medians over folds, judged on the test classes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.storages import InMemoryStorage
from support.gloo_pool import GlooPool
from support.ranks import config, counting_trial, steady, trial
from support.tune_simulator import Tune, in_memory, study

from dmlstudy import data
from dmlstudy.embedders import embed, load
from dmlstudy.records import TrialConfig
from dmlstudy.spec.study_file import SpecError, given
from dmlstudy.training.scores import mean
from dmlstudy.training.shares import params_settled, settled_of, with_settled
from dmlstudy.training.trial import run_trial
from dmlstudy.training.verification_scores import check_pairs, notes

ASKED = {"verification": True, "fmr": 1e-2}
RATES = ("1e-1", "1e-2", "1e-3")


@pytest.fixture(scope="module")
def searched() -> tuple[list[dict[str, float]], dict[str, float]]:
    return trial(config(**ASKED))


def judged(settled: dict[str, float], **changes: Any) -> TrialConfig:
    """The verdict of the trial whose folds have settled this."""
    own = TrialConfig.model_validate(config(**ASKED, **changes))
    return with_settled(own, settled).model_copy(update={"phase": "verdict", "seed": 1})


def test_each_fold_has_a_threshold_and_the_median_is_the_trial_s(
    searched: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    reports, result = searched
    for rate in RATES:
        folds = [result[f"fold_{fold}_tau_at_fmr_{rate}"] for fold in range(2)]
        assert folds[0] != folds[1]
        assert result[f"tau_at_fmr_{rate}"] == statistics.median(folds) == reports[-1][f"tau_at_fmr_{rate}"]
        assert reports[1][f"tau_at_fmr_{rate}"] == folds[0]
    assert result["tau_at_fmr_1e-1"] < result["tau_at_fmr_1e-2"] < result["tau_at_fmr_1e-3"]
    assert "tau_at_fmr_1e-4" not in result  # a fold holds out fewer than 100,000 impostors
    assert "tau_at_fmr_1e-2_stderr" not in result


def test_the_other_scores_are_those_of_a_trial_that_asks_for_none(
    searched: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    plain = trial(config())[1]
    own = {name: value for name, value in searched[1].items() if "tau" not in name}
    assert steady(own) == steady(plain)


def test_medians_are_over_folds_that_have_a_threshold_each() -> None:
    name = "tau_at_fmr_1e-2"
    scores = [{"map_at_r": 0.1, name: 0.2}, {"map_at_r": 0.3, name: 0.9}, {"map_at_r": 0.5, name: 0.3}]
    assert mean(scores) == {"map_at_r": pytest.approx(0.3), name: 0.3}
    del scores[1][name]
    assert mean(scores) == {"map_at_r": pytest.approx(0.3)}


def test_a_verdict_says_what_the_thresholds_do_on_the_test_classes(
    searched: tuple[list[dict[str, float]], dict[str, float]], tmp_path: Path
) -> None:
    own = judged(settled_of(searched[1]))
    assert own.thresholds == {rate: searched[1][f"tau_at_fmr_{rate}"] for rate in RATES}
    result = run_trial(own, lambda _: None, save_to=tmp_path / "model")
    counts, metrics = result.pair_counts, result.metrics
    assert counts is not None
    assert (counts.shipped, counts.thresholds) == ("1e-2", own.thresholds)
    test = data.load("digits").test
    z_ND = embed(load(tmp_path / "model"), test.read(np.arange(len(test))))
    first, second = np.triu_indices(len(z_ND), 1)
    score_P = np.einsum("pd,pd->p", z_ND[first].astype(np.float64), z_ND[second])
    label_P, other_P = test.labels_N[first], test.labels_N[second]
    for rate, tau in own.thresholds.items():
        clear_P = np.abs(score_P - tau) > 1e-6  # others may fall to either side by rounding
        unclear = int((~clear_P).sum())
        assert unclear < 20
        for place, unit in enumerate(counts.units):
            impostor_P = (label_P == unit) != (other_P == unit)
            genuine_P = (label_P == unit) & (other_P == unit)
            assert counts.impostors[place] == impostor_P.sum()
            assert counts.genuine[place] == genuine_P.sum()
            assert abs(counts.accepted[rate][place] - (score_P >= tau)[impostor_P].sum()) <= unclear
            assert abs(counts.rejected[rate][place] - (score_P < tau)[genuine_P].sum()) <= unclear
        fmr = sum(counts.accepted[rate]) / sum(counts.impostors)
        assert metrics[f"test_fmr_at_tau_{rate}"] == pytest.approx(fmr, abs=1e-15)
    assert metrics["test_fnmr_at_tau_1e-2"] == sum(counts.rejected["1e-2"]) / sum(counts.genuine)
    assert {"test_eer", "test_opis", "test_unknown_auroc", "test_fnmr_at_fmr_1e-4"} <= metrics.keys()
    scores, fmrs, fnmrs = zip(*counts.curve, strict=True)
    assert list(scores) == sorted(scores)
    assert list(fmrs) == sorted(fmrs, reverse=True)
    assert list(fnmrs) == sorted(fnmrs)
    assert 20 < len(scores) <= 200
    (tmp_path / "pairs.parquet").write_bytes(data.pair_counts_as_bytes(counts))
    assert data.read_pair_counts(tmp_path / "pairs.parquet") == counts


def test_scores_are_of_the_plain_cosine_also_where_results_are_re_ranked(
    searched: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    settled = settled_of(searched[1])
    plain = run_trial(judged(settled), lambda _: None)
    again = run_trial(judged(settled, retrieval={"rerank": "k_reciprocal", "first": 8}), lambda _: None)
    assert again.pair_counts == plain.pair_counts
    assert again.metrics["test_eer"] == plain.metrics["test_eer"]


def test_fold_models_are_verified_and_what_ships_is_counted(
    searched: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    settled = settled_of(searched[1])
    alone = run_trial(judged(settled), lambda _: None)
    result = run_trial(judged(settled, fold_models=True), lambda _: None)
    assert {"test_separate_eer", "test_concatenated_eer"} <= result.metrics.keys()
    assert result.pair_counts == alone.pair_counts


def test_two_processes_count_what_one_counts(
    searched: tuple[list[dict[str, float]], dict[str, float]], pool: GlooPool
) -> None:
    raw = judged(settled_of(searched[1]), training__epochs=0).model_dump(mode="json")
    alone = counting_trial(raw)
    assert pool.run(2, counting_trial, raw) == [alone, alone]


# The study


def test_the_verdict_has_the_thresholds_of_the_folds() -> None:
    final = {"tau_at_fmr_1e-2": 0.7, "tau_at_fmr_1e-1": 0.4}
    storage = InMemoryStorage()
    spec = study(protocol__verification=True)
    Tune(in_memory(spec, storage=storage), final=final, dies_before=("commit", 3)).run()
    tune = Tune(in_memory(spec, storage=storage), final=final).run()
    verdict = [c for _, c in tune.started if c.phase == "verdict"]
    assert {c.family for c in verdict} == {"red", "blue", "untrained"}
    for each in verdict:
        expected = {} if each.family == "untrained" else {"1e-2": 0.7, "1e-1": 0.4}
        assert each.thresholds == expected
    assert all(c.thresholds == {} for _, c in tune.started if c.phase == "search")
    # a parameter of the row is what was searched, not what was set afterwards
    assert params_settled({"training.lr": "1"}, final) == {"training.lr": "1"}


def test_keys_that_are_not_set_leave_fingerprints_as_they_were() -> None:
    plain = TrialConfig.model_validate(config())
    dumped = plain.model_dump(mode="json")
    assert not {"verification", "fmr", "thresholds"} & dumped.keys()
    assert plain.fingerprint() != TrialConfig.model_validate(config(**ASKED)).fingerprint()
    assert study().fingerprint() == study(protocol__verification=False).fingerprint()
    assert study().fingerprint() != study(protocol__verification=True).fingerprint()


@pytest.mark.parametrize(
    ("protocol", "line"),
    [
        ({"fmr": 0.01}, r"^protocol\.fmr: 0\.01 is of the threshold that protocol\.verification sets; set "),
        ({"verification": True, "fmr": 0.9}, r"^protocol\.fmr: .*got 0\.9$"),
        ({"verification": 3}, r"^protocol\.verification: .*got 3$"),
    ],
)
def test_bad_keys_are_refused_in_one_line(protocol: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError, match=line):
        study(protocol=protocol)


@pytest.mark.parametrize(("space", "section"), [("greedyhash", "hashing"), ("oahu", "online")])
def test_codes_and_streams_refuse_verification(space: str, section: str) -> None:
    raw: dict[str, Any] = {"name": "s", "data": {"name": "digits"}, "families": {"a": {"space": space}}}
    raw |= {"protocol": {"verification": True}, "resources": {"workers": 1}}
    with pytest.raises(SpecError, match=r"^protocol\.verification: is not measured of .*; leave it out$"):
        given(raw)


def test_folds_with_too_few_pairs_are_refused_before_anything_is_trained() -> None:
    own = TrialConfig.model_validate(config(verification=True))
    labels_N = np.repeat(np.arange(10), 20)  # 18,000 impostors
    check_pairs(own, [labels_N])
    line = (
        "protocol.fmr: 0.001 is set on 10000 pairs of two classes or more, and a fold holds 1200 out; set protocol.fmr:"
        " 0.01, or set protocol.num_folds lower"
    )
    with pytest.raises(ValueError, match="^" + line.replace(".", r"\.")):
        check_pairs(own, [labels_N, labels_N[:60]])
    with pytest.raises(ValueError, match=r"a fold holds 16 out; leave protocol\.verification out"):
        check_pairs(own, [labels_N[16:24]])
    check_pairs(TrialConfig.model_validate(config()), [labels_N[:2]])


def test_metrics_that_will_be_missing_are_told_beforehand() -> None:
    own = TrialConfig.model_validate(config(verification=True))
    labels_N = np.repeat(np.arange(10), 20)
    assert notes(own, labels_N, None, None) == [
        "protocol.verification: no fnmr_at_fmr_1e-4, for the test classes have 18000 pairs of two classes and 100000"
        " are needed"
    ]
    assert notes(own, np.repeat(np.arange(50), 20), None, None) == []
    assert notes(TrialConfig.model_validate(config()), labels_N, None, None) == []
