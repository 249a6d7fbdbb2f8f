"""Trials of online learners: streams of constraints, from a study file to scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier  # type: ignore[import-untyped]

from dmlstudy import data, online
from dmlstudy.data import row_folds
from dmlstudy.online import constraints
from dmlstudy.records import TrialReport, TrialResult
from dmlstudy.search.verdict_trials import VerdictTrials
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks
from dmlstudy.studies.estimate import describe
from dmlstudy.training import stream_trainer
from dmlstudy.training.interface import derived_seed
from dmlstudy.training.trial import TrialPaused, run_trial
from dmlstudy.verdict.sequential import Plan

BASELINES = ("slda", "nearest_class_mean", "whitening")
LEARNERS = ("oahu", "lego", "rdml", "oasis", "opml", "pair_hinge", "triplet_hinge", "euclidean", *BASELINES)
SMALL = {"loss.num_hidden": 2, "loss.width": 20, "loss.size": 10}


def study(**changes: Any) -> study_file.StudySpec:
    raw: dict[str, Any] = {
        "name": "streams",
        "data": {"name": "digits"},
        "training": {"epochs": 2},
        "online": {"num_seeds": 300, "num_implied": 100, "scaling": "centred_unit"},
        "families": {name: {"space": name, "override": SMALL if name == "oahu" else {}} for name in LEARNERS},
        "protocol": {"num_folds": 2, "verdict_seeds": 2, "objective": "accuracy"},
        "resources": {"workers": 1},
    }
    return study_file.parse(raw | changes)


def trial(
    family: str, save_to: Path | None = None, of: study_file.StudySpec | None = None, **changes: Any
) -> tuple[list[TrialReport], TrialResult]:
    of = of or study()
    config = of.trial_config(of.families[family], study_file.default_values(of.families[family]))
    reports: list[TrialReport] = []
    return reports, run_trial(config.model_copy(update=changes), reports.append, save_to=save_to)


def pixels() -> tuple[np.ndarray, np.ndarray]:
    closed = data.load_closed("digits")
    x = np.concatenate([data.as_features(side) for side in (closed.development, closed.test)])
    return x, np.concatenate([closed.development.labels_N, closed.test.labels_N])


@pytest.mark.parametrize("family", LEARNERS)
def test_a_trial_reports_each_part_of_each_fold_and_means_over_folds(family: str) -> None:
    reports, result = trial(family)
    assert [report.step for report in reports] == [1, 2, 3, 4]
    for report in reports:
        scores = report.metrics
        assert scores["accuracy"] + scores["error_rate"] == pytest.approx(1)
        assert 0.5 < scores["accuracy"] <= 1
        assert 0 <= scores["utilization"] <= 1
        assert scores["layer_weight_0"] > 0
    assert result.metrics["accuracy"] == pytest.approx(reports[-1].metrics["accuracy"])
    if family not in ("opml", "euclidean"):
        assert [report.metrics["num_constraints"] for report in reports] == [240, 400, 320, 400]
    assert trial(family)[1].metrics == result.metrics


def test_a_verdict_is_what_its_parts_give_by_hand(tmp_path: Path) -> None:
    """The seed shuffles all rows and halves them; the learner sees one half, and is judged by the other."""
    reports, result = trial("oahu", tmp_path / "learner", phase="verdict", seed=3)
    x, labels = pixels()
    order = np.random.default_rng(3).permutation(len(x))
    development, test = order[: len(x) // 2], order[len(x) // 2 :]
    mean = x[development].mean(axis=0, dtype=np.float64)

    def prepared(rows: np.ndarray) -> np.ndarray:
        centred = (x[rows] - mean).astype(np.float32)
        return centred / np.linalg.norm(centred, axis=1, keepdims=True)

    seed = derived_seed(3, 0)
    stream = constraints.stream_of(labels[development], 3, 300, 100, rng=np.random.default_rng(seed))
    learner = online.OAHU(64, seed=seed, num_hidden=2, width=20, size=10)
    for block in stream.blocks(prepared(development), 240):
        learner.partial_fit(block)
    predicted = online.classify(learner, prepared(test), prepared(development), labels[development], 5)
    assert result.metrics["test_accuracy"] == pytest.approx((predicted == labels[test]).mean())
    assert reports[-1].metrics["accuracy"] == result.metrics["test_accuracy"]
    assert result.metrics["test_layer_weight_2"] == pytest.approx(learner.layer_weights[2])

    kept = online.load(tmp_path / "learner")
    for name, value in learner.state().items():
        np.testing.assert_array_equal(kept.learner.state()[name], value)
    z = kept.embed(x[test])
    assert z.shape == (len(test), 30)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-5)


def test_plain_neighbours_are_those_of_a_plain_classifier() -> None:
    of = study(online={"split": "own", "k": 3})
    _, result = trial("euclidean", of=of, phase="verdict", seed=1)
    closed = data.load_closed("digits")
    plain = KNeighborsClassifier(3).fit(data.as_features(closed.development), closed.development.labels_N)
    accuracy = plain.score(data.as_features(closed.test), closed.test.labels_N)
    assert result.metrics["test_accuracy"] == pytest.approx(accuracy)
    x, labels = pixels()
    shuffled = np.random.default_rng(0).permutation(len(x))[: len(x) // 2]
    (fold, *_), accuracies = row_folds(len(shuffled), 2, 0), []
    for one in row_folds(len(shuffled), 2, 0):
        train, held_out = shuffled[one.train_indices], shuffled[one.validation_indices]
        plain = KNeighborsClassifier(3).fit(x[train], labels[train])
        accuracies.append(plain.score(x[held_out], labels[held_out]))
    _, searched = trial("euclidean", of=study(online={"k": 3}))
    assert len(fold.train_indices) in (len(shuffled) // 2, len(shuffled) - len(shuffled) // 2)
    assert searched.metrics["accuracy"] == pytest.approx(np.mean(accuracies), abs=2e-3)


def test_pairs_and_ranks_are_measured_where_wished_for() -> None:
    of = study(online={"num_pairs": 200, "measure_recall": True, "num_seeds": 200, "num_implied": 0})
    _, result = trial("oahu", of=of)
    assert 0.5 < result.metrics["auc"] < 1
    recalls = [result.metrics[f"recall_at_{k}"] for k in (1, 2, 4, 8)]
    assert recalls == sorted(recalls)
    assert recalls[0] > 0.5


def test_untrained_learners_are_judged_as_they_begin() -> None:
    found = study()
    best = {
        name: found.trial_config(family, study_file.default_values(family))
        for name, family in found.families.items()
    }
    left = VerdictTrials(Plan.of(found.file.protocol), []).left(best)
    assert sum(config.family.startswith("untrained") for config in left) == 2 * found.num_untrained
    of_oahu = next(config for config in left if config.family == "untrained (oahu)")
    reports: list[TrialReport] = []
    result = run_trial(of_oahu, reports.append)
    assert len(reports) == 1
    assert result.metrics["test_layer_weight_0"] == pytest.approx(1 / 3)
    assert 0.3 < result.metrics["test_accuracy"] < 1


def test_it_is_estimated_and_described() -> None:
    found = study()
    lines = describe(found, checks.check_parts(found), measure=True)
    assert lines[-1].startswith("time: at most about")
    (line,) = (line for line in lines if line.startswith("split: "))
    assert line.startswith(
        "split: all 1797 are shuffled by each verdict seed and cut in halves; the search has 2 fold(s)"
    )
    assert [line for line in lines if line.startswith("device: ")] == [
        "device: one CPU, for a stream is learned one constraint after another"
    ]
    own = study(online={"split": "own"})
    lines = describe(own, checks.check_parts(own), measure=False)
    assert not [line for line in lines if line.startswith("split: ")]


def test_what_is_done_after_a_drift_is_the_studys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    whole = stream_trainer.Course
    monkeypatch.setattr(
        stream_trainer, "Course", lambda *given, **named: told.append(named) or whole(*given, **named)
    )
    choice = {"on_drift": "reopen", "sensitivity": 0.5, "probation": 100}
    reports, _ = trial("oahu", of=study(online={**study().file.online, **choice}))
    assert told[0] == choice
    assert {"num_drifts", "num_reopened"} <= reports[-1].metrics.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resources": {"workers": 2}}, r"resources\.workers: one process trains a learner of a stream"),
        (
            {"resources": {"workers": 1, "gpus_per_worker": 1}},
            r"resources\.gpus_per_worker: .* computes on a CPU",
        ),
        ({"embedder": {"dim": 8}}, "embedder: means nothing to a learner of a stream"),
        ({"hashing": {"num_bits": 8}}, "means nothing to"),
        (
            {"families": {"a": {"space": "oahu"}, "b": {"space": "triplet"}}, "online": {}},
            r"families\.b: trains an embedder, but a a learner of a stream",
        ),
        ({"protocol": {"objective": "map"}}, r"protocol\.objective: no metric 'map'"),
        ({"protocol": {"objective": "auc"}}, r"protocol\.objective: auc needs online\.num_pairs"),
        ({"protocol": {"objective": "recall_at_1"}}, r"needs online\.measure_recall"),
        ({"protocol": {"full_map": True}}, r"protocol\.full_map: is not measured"),
        ({"online": {"on_drift": "reopen"}}, r"families\.lego\.online\.on_drift: lego cannot begin anew"),
        ({"online": {"features": "/no/such"}}, r"families\.oahu\.online\.features: "),
        ({"families": {"a": {"space": "oahu", "override": {"loss.tau": 2.5}}}}, r"families\.a: tau=2\.5"),
        ({"families": {"a": {"space": "oahu", "override": {"loss.taus": 1}}}}, "taus"),
        ({"regularizer": {"name": "graph_consistency"}}, "regularizer: means nothing to an online learner"),
        (
            {"search": {"sampler": "nsga2", "second_objective": "embedding_dim", "scheduler": "none"}},
            r"search\.second_objective: embedding_dim is not measured",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        checks.check_parts(study(**changes))


def long_study() -> study_file.StudySpec:
    return study(
        online={"num_seeds": 1000, "num_implied": 200, "k": 3},
        families={name: {"space": name, "override": SMALL if name == "oahu" else {}} for name in LEARNERS},
    )


@pytest.mark.parametrize("family", ["oahu", "opml", "slda", "whitening", "euclidean"])
def test_rows_are_told_before_they_are_learned_from(family: str) -> None:
    """By hand: of each block the rows that are new to the stream, by what was learned before."""
    of = long_study()
    reports, result = trial(family, of=of, phase="verdict", seed=2)
    x, labels = pixels()
    rows = np.random.default_rng(2).permutation(len(x))[: len(x) // 2]
    x, labels = x[rows].astype(np.float32), labels[rows]
    seed = derived_seed(2, 0)
    params = {"num_hidden": 2, "width": 20, "size": 10} if family == "oahu" else {}
    learner = online.build(family, params, num_features=64, seed=seed)
    settings = of.trial_config(of.families[family], study_file.default_values(of.families[family])).online
    assert settings is not None
    stream = stream_trainer._constraints(settings, learner, labels, seed)
    seen: list[int] = []
    wrong: dict[int, list[bool]] = {}
    for number, block in enumerate(stream.blocks(x, 240)):
        named = stream.index_TC[number * 240 : (number + 1) * 240].ravel().tolist()
        new = [row for row in dict.fromkeys(named) if row not in seen]
        if seen and new:
            known = seen[-1000:]
            told = learner.predict(x[new])
            if told is None:
                vote = "similarity" if family == "oahu" else "majority"
                told = online.classify(learner, x[new], x[known], labels[known], 3, vote)  # type: ignore[arg-type]
            wrong[number] = (told != labels[new]).tolist()
        seen += new
        learner.partial_fit(block)
    last = reports[-1].metrics
    assert last["prequential_width"] == 240
    got = {name: value for name, value in last.items() if name.startswith("prequential_error_")}
    assert got == {
        f"prequential_error_{number:02d}": pytest.approx(np.mean(own)) for number, own in wrong.items()
    }
    assert last["prequential_error"] == pytest.approx(np.mean(np.concatenate(list(wrong.values()))))
    assert not [name for name in result.metrics if "prequential" in name]


def test_a_search_pays_nothing_for_them() -> None:
    reports, _ = trial("slda", of=long_study())
    assert not [name for name in reports[-1].metrics if "prequential" in name]


@pytest.mark.parametrize("family", ["oahu", "slda"])
def test_prequential_errors_go_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    of = study(**{**long_study().raw, "training": {"epochs": 3}})
    config = of.trial_config(of.families[family], study_file.default_values(of.families[family]))
    config = config.model_copy(update={"phase": "verdict", "seed": 1})
    whole: list[TrialReport] = []
    run_trial(config, whole.append)
    parts: list[TrialReport] = []
    for step in (1, 2):
        with pytest.raises(TrialPaused):
            run_trial(config, parts.append, checkpoint=tmp_path, min_seconds_between=0, pause_after=step)
    parts.clear()
    run_trial(config, parts.append, checkpoint=tmp_path, min_seconds_between=0)
    assert [report.metrics for report in parts] == [report.metrics for report in whole]


def test_whose_rule_tells_classes_is_the_studys_choice() -> None:
    x, labels = pixels()
    rows = np.random.default_rng(0).permutation(len(x))
    half, rest = rows[: len(x) // 2], rows[len(x) // 2 :]
    means = np.stack([x[half][labels[half] == c].mean(axis=0) for c in range(10)])
    nearest = np.linalg.norm(x[rest][:, None] - means, axis=2).argmin(axis=1)
    _, own = trial("nearest_class_mean", of=study(online={}), phase="verdict", seed=0)
    assert own.metrics["test_accuracy"] == pytest.approx((nearest == labels[rest]).mean())
    override = {"online.vote": "majority", "online.k": 3}
    names = ("nearest_class_mean", "euclidean")
    by_neighbours = study(online={}, families={each: {"space": each, "override": override} for each in names})
    one, plain = (trial(each, of=by_neighbours, phase="verdict", seed=0)[1] for each in names)
    assert one.metrics["test_accuracy"] == plain.metrics["test_accuracy"] != own.metrics["test_accuracy"]


def test_a_study_without_baselines_is_told_so_and_one_with_them_searches_them_once() -> None:
    assert study().notes == []
    (note,) = study(families={"a": {"space": "oahu"}, "b": {"space": "slda"}}).notes
    assert note == (
        "families: none is nearest_class_mean, whitening, which cost little and are what the others have to beat; add"
        " them, as nearest-class-mean: {space: nearest_class_mean}"
    )
    for name in ("cifar10_online", "cifar10_online_choices"):
        shipped = study_file.load(f"search_spaces/studies/{name}.yaml")
        assert shipped.notes == []
        for family in ("slda", "nearest-class-mean", "whitening"):
            assert len(shipped.families[family].corners()) == 1
