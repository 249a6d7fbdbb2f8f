"""Several shares of the trained weights: one training serves all, and the verdict has what the folds chose."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.storages import InMemoryStorage
from pydantic import ValidationError
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, steady, trial
from support.tune_simulator import Tune, in_memory, study

from dmlstudy import embedders
from dmlstudy.records import RecordedEnd, TrainingConfig, TrialConfig
from dmlstudy.search.ledger import commit_recorded
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.spec.study_file import SpecError
from dmlstudy.training.shares import settle, with_settled
from dmlstudy.training.tasks import embedding_checks
from dmlstudy.training.trial import run_trial

SHARES = (0.0, 0.4, 1.0)
LIST = {"training__wise_ft": list(SHARES)}


@pytest.fixture
def started(tmp_path: Path) -> dict[str, Any]:
    """A trial whose backbone begins with weights from a file."""
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    file = tmp_path / "start.pt"
    torch.save(embedder.backbone.state_dict(), file)
    return {"embedder": {"dim": 8, "width": 4, "weights": str(file)}}


def test_one_training_scores_each_share_as_a_trial_of_its_own(started: dict[str, Any]) -> None:
    reports, result = trial(config(**started, **LIST))
    alone = {share: trial(config(**started, training__wise_ft=share)) for share in SHARES}
    means = {share: found[1]["map_at_r"] for share, found in alone.items()}
    assert {share: result[f"wise_ft_{share}_map_at_r"] for share in SHARES} == means
    best = max(means, key=means.__getitem__)
    assert best != SHARES[-1], "else the test shows nothing"
    assert result["wise_ft"] == best
    of_best = steady(alone[best][1])
    assert {name: value for name, value in result.items() if name in of_best} == of_best
    assert not {name for name in result if not name.startswith("wise_ft")} - alone[best][1].keys()
    assert result["map_at_r"] == statistics.fmean(result[f"fold_{fold}_map_at_r"] for fold in range(2))
    of_largest = alone[SHARES[-1]][0]
    assert [*map(steady, reports[:-1])] == [*map(steady, of_largest[:-1])], "reports have one fixed rule"
    assert reports[-1]["map_at_r"] == result["map_at_r"], "the last one is what the trial is taken for"
    assert reports[-1]["train_loss"] == of_largest[-1]["train_loss"]


def test_scores_by_class_of_another_share_are_not_told(started: dict[str, Any]) -> None:
    """Sums are of the largest share, and the metrics of the one that the folds choose."""
    given = TrialConfig.model_validate(config(**started, **LIST))
    assert run_trial(given, lambda report: None).of_folds == ()
    one = TrialConfig.model_validate(config(**started, training__wise_ft=SHARES[1]))
    assert len(run_trial(one, lambda report: None).of_folds) == 2


def test_the_best_mean_over_the_folds_is_chosen_and_of_equals_the_largest() -> None:
    first = [{"s": 0.9, "other": 1.0}, {"s": 0.5, "other": 2.0}, {"s": 0.6, "other": 3.0}]
    second = [{"s": 0.1, "other": 4.0}, {"s": 0.7, "other": 5.0}, {"s": 0.6, "other": 6.0}]
    share, scores = settle((0.2, 0.5, 1.0), [first, second], "s")
    assert (share, [score["other"] for score in scores]) == (1.0, [3.0, 6.0])  # 0.5, 0.6, 0.6
    assert settle((0.2, 0.5, 1.0), [first], "s") == (0.2, [first[0]])
    assert settle((0.2, 0.5, 1.0), [first, second], "other").share == 1.0


@pytest.mark.parametrize("where", ["epoch", "report"])
def test_a_trial_that_was_broken_off_chooses_the_same(
    started: dict[str, Any], tmp_path: Path, where: str
) -> None:
    raw = config(**started, **LIST)
    reports, result = trial(raw)
    again, broken, attempts = broken_trial(raw, str(tmp_path / "kept"), where)
    assert attempts > 1
    assert steady(broken) == steady(result)
    for report in again:
        assert steady(report) == steady(reports[int(report["step"]) - 1])


def test_two_ranks_choose_as_one(pool: GlooPool, started: dict[str, Any]) -> None:
    raw = config(**started, **LIST, training__epochs=1)
    ((_, alone),) = pool.run(1, trial, raw)
    first, second = pool.run(2, trial, raw)
    assert steady(first[1]) == steady(second[1])
    assert first[1]["wise_ft"] == alone["wise_ft"]
    for share in SHARES:
        name = f"wise_ft_{share}_map_at_r"
        assert first[1][name] == pytest.approx(alone[name], abs=5e-3)


def test_with_an_average_it_is_the_average_that_is_mixed(started: dict[str, Any]) -> None:
    average = {"training__ema_decay": 0.9, "num_folds": 1}
    _, result = trial(config(**started, **LIST, **average))
    _, alone = trial(config(**started, training__wise_ft=0.4, **average))
    assert result["wise_ft_0.4_map_at_r"] == alone["map_at_r"]


def test_nothing_is_chosen_on_unseen_classes(started: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^training\.wise_ft: 0\.0 0\.4 1\.0 is chosen from on validation folds"
    ):
        trial(config(**started, **LIST, phase="verdict"))


# In a file


@pytest.mark.parametrize(
    "given", [[1.0, 0.3, 0.5], (0.3, 0.5, 1), "0.3 0.5 1", "1, 0.5 0.3", ["0.3", 0.5, 1.0, 0.5]]
)
def test_a_list_is_read_in_rising_order_without_repetitions(given: object) -> None:
    training = TrainingConfig.model_validate({"wise_ft": given})
    assert training.wise_ft == "0.3 0.5 1.0"
    assert TrainingConfig.model_validate(training.model_dump(mode="json")) == training


@pytest.mark.parametrize("given", [0.5, [0.5], "0.5", ["0.5"], [0.5, 0.5]])
def test_a_list_of_one_is_the_number(given: object) -> None:
    assert TrainingConfig.model_validate({"wise_ft": given}) == TrainingConfig(wise_ft=0.5)
    found = TrialConfig.model_validate(config(training__wise_ft=given))
    assert found.fingerprint() == "34e215ca4725f203", "as before there were lists"


def test_fingerprints_without_a_list_are_as_they_were() -> None:
    changes: list[dict[str, Any]] = [{}, *({"training__wise_ft": value} for value in (1, [1.0], 0))]
    found = [TrialConfig.model_validate(config(**change)).fingerprint() for change in changes]
    assert found == ["56e5b34d93e44cf8"] * 3 + ["d3186be9f9572a85"]


@pytest.mark.parametrize(
    "given", [1.5, -0.1, [0.5, 2], [], "", "much", [True], None, math.nan, [[0.5]], {"a": 1}]
)
def test_what_is_no_share_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match="expected a number from 0 to 1, or a list of them"):
        TrainingConfig.model_validate({"wise_ft": given})


@pytest.mark.parametrize(
    ("embedder", "message"),
    [
        ({}, r"0\.0 0\.4 1\.0 mixes the trained weights with those they began as"),
        ({"weights": "some.pt", "freeze_bn": False}, r"0\.0 0\.4 1\.0 would mix weights of different batch"),
    ],
)
def test_shares_that_mean_nothing_are_refused(embedder: dict[str, Any], message: str) -> None:
    given = TrialConfig.model_validate(config(**LIST, embedder=embedder))
    with pytest.raises(ValueError, match=rf"^families\.x\.training\.wise_ft: {message}"):
        embedding_checks.check(given, "families.x")


STARTED = {"embedder": {"weights": "default", "backbone": "resnet18"}}


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        ([0.3, 0.5, 1.0], {"0.3 0.5 1.0"}),
        ([0.5], {0.5}),
        ({"float": [0, 1]}, {0.0, 1.0}),
        ({"choice": [0.5, "0.3 0.6"]}, {0.5, "0.3 0.6"}),
    ],
    ids=["list", "list of one", "domain", "choice"],
)
def test_a_list_is_a_value_and_a_domain_is_searched(domain: object, values: set[object]) -> None:
    of_file = study(**STARTED, training__wise_ft=domain)
    override = {"a": {"space": "contrastive", "override": {"training.wise_ft": domain}}}
    for spec in (of_file, study(**STARTED, families=override)):
        family = next(iter(spec.families.values()))
        found = {spec.trial_config(family, point).training.wise_ft for point in spec.corners(family)}
        assert found == values


def test_a_wrong_list_is_one_line_of_the_file() -> None:
    message = r"^families\.red\.training\.wise_ft: expected a number from 0 to 1, or a list of them .*, got '0\.5 2'$"
    with pytest.raises(SpecError, match=message):
        study(**STARTED, training__wise_ft=[0.5, 2])


# From the search to the verdict

CHOSEN = {"wise_ft": 0.5, "wise_ft_0.5_map_at_r": 0.7}


def searching(storage: InMemoryStorage | None = None) -> StudySearch:
    return in_memory(study(**STARTED, training__wise_ft=[0.3, 0.5, 1.0]), storage=storage)


def test_the_verdict_has_what_the_folds_chose() -> None:
    tune = Tune(searching(), final=CHOSEN).run()
    by_phase = {phase: [c for _, c in tune.started if c.phase == phase] for phase in ("search", "verdict")}
    assert {c.training.wise_ft for c in by_phase["search"]} == {"0.3 0.5 1.0"}
    assert {c.training.wise_ft for c in by_phase["verdict"]} == {0.5}
    assert {c.training.epochs for c in by_phase["verdict"]} == {0, 4}, "the untrained row's too"
    for name, best in tune.search.best_configs().items():
        number = tune.search.best_numbers()[name]
        tried = next(c for n, c in tune.started if n == number)
        assert best == with_settled(tried, CHOSEN)
        assert tune.search.study.trials[number].user_attrs["settled"] == {"wise_ft": 0.5}


def test_a_later_session_has_what_the_folds_chose() -> None:
    storage = InMemoryStorage()
    unbroken = Tune(searching(), final=CHOSEN).run().search
    for death in (("commit", 2), ("observe", 9), ("commit", 3)):
        Tune(searching(storage), final=CHOSEN, dies_before=death).run()
    Tune(searching(storage), final=CHOSEN).run()
    later = searching(storage)
    assert later.best_configs() == unbroken.best_configs()
    assert [t.user_attrs for t in later.study.trials] == [t.user_attrs for t in unbroken.study.trials]


def test_a_choice_that_was_recorded_but_not_committed_is_kept() -> None:
    ends: dict[int, list[RecordedEnd]] = {}

    class Runs:
        def recorded_ends(self, number: int) -> list[RecordedEnd]:
            return ends.get(number, [])

        def supersede(self, run_id: str) -> None:
            raise AssertionError(run_id)

    def record(assignment: Assignment, values: list[float]) -> None:
        if assignment.number is not None:
            # Some stores keep fewer digits.
            end = RecordedEnd("r", assignment.status, "", values, {"wise_ft": 0.5 + 1e-9})
            ends.setdefault(assignment.number, []).append(end)

    storage = InMemoryStorage()
    Tune(searching(storage), final=CHOSEN, dies_before=("commit", 1), record=record).run()
    assert commit_recorded(storage, "simulated", Runs()) == [0]
    search = searching(storage)
    assert search.study.trials[0].user_attrs["settled"]["wise_ft"] == pytest.approx(0.5)
    assert {c.training.wise_ft for c in search.best_configs().values()} == {0.5}
