"""The sealed plan: kept before a test image is read, and whoever changes the study afterwards is found out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
from support.copied_store import copied
from support.tune_simulator import Tune, hill, study
from typer.testing import CliRunner

from dmlstudy import data
from dmlstudy.cli.app import app
from dmlstudy.records import TrialConfig, UnitScores
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.registry.runs import PLAN, PLAN_SHA256, Run, RunKind
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.search.verdict_trials import verdict_trial
from dmlstudy.spec import yaml_file
from dmlstudy.spec.study_file import StudySpec, default_values
from dmlstudy.store import Store
from dmlstudy.studies.sealing import NO_PLAN, seal, verify
from dmlstudy.trials import Status
from dmlstudy.verdict.power import ASSUMED, PlanPower
from dmlstudy.verdict.sealed_plan import PLAN_FILE
from dmlstudy.verdict.sequential import Plan

GAINS = {"red": 0.3, "blue": 0.001, "untrained": 0.0}
COUNTS = [5] * 12


def spec() -> StudySpec:
    return study(
        search={"trials_per_family": 1, "seed": 5},
        protocol={"num_folds": 2, "verdict_seeds": {"from": 3, "to": 10}},
    )


def by_class(family: str, seed: int) -> UnitScores:
    noise = 0.01 * ((seed * 7 + len(family)) % 5)
    sums = [n * (0.4 + GAINS[family] + noise + 0.002 * ((c * 3 + seed) % 7)) for c, n in enumerate(COUNTS)]
    return UnitScores(units=list(range(len(COUNTS))), counts=COUNTS, sums={"map_at_r": sums})


def score(config: TrialConfig, step: int) -> float:
    if config.phase == "search":
        return hill(config, step)
    return sum(by_class(config.family, config.seed).sums["map_at_r"]) / sum(COUNTS)


def origin(found: StudySpec) -> dict[str, str]:
    return {
        "spec_fingerprint": found.fingerprint(),
        "objective": "map_at_r",
        "test_sha256": "t" * 64,
        "num_test_images": str(sum(COUNTS)),
        PLAN: Plan.of(found.file.protocol).model_dump_json(),
    }


FOLDS = json.dumps({"search": [["a"], ["b"]]})


def track(store: Store, found: StudySpec) -> StudyTracker:
    texts = {"study.yaml": yaml_file.dump(found.raw), "folds.json": FOLDS}
    return StudyTracker(store, found.name, texts, origin=origin(found))


def keep(tracker: StudyTracker, folder: Path, config: TrialConfig, units: UnitScores | None = None) -> str:
    """Record a finished verdict trial, as the recorder does."""
    units = units or by_class(config.family, config.seed)
    run_id = tracker.start_trial(f"{config.family} verdict seed {config.seed}", config, None)
    file = folder / "classes.parquet"
    file.write_bytes(data.unit_scores_as_bytes(units))
    tracker.log_unit_scores(run_id, file)
    value = sum(units.sums["map_at_r"]) / sum(units.counts)
    tracker.end_trial(run_id, Status.FINISHED, [], {"test_map_at_r": value})
    return run_id


def play(store: Store, folder: Path, *, sealed: bool = True) -> tuple[StudyTracker, StudySearch, list[str]]:
    """A study without Ray, from its first trial to its last."""
    found, told = spec(), list[str]()
    store.prepare()
    tracker = track(store, found)
    store.write_state(
        found.name, "running", spec=dict(found.raw), folders=[], started=1.0, origin=origin(found)
    )
    search = StudySearch(found, optuna.storages.InMemoryStorage(), set(), tracker.judged())
    power = PlanPower(search.plan, 2, "class", tuple(COUNTS), ASSUMED)
    if sealed:
        search.before_verdict = lambda: seal(
            found, store, tracker, search, origin(found), FOLDS, power, told.append
        )

    def record(assignment: Assignment, values: list[float]) -> None:
        if assignment.number is None:
            assignment.unit_scores = by_class(assignment.config.family, assignment.config.seed)
            keep(tracker, folder, assignment.config)
        else:
            run_id = tracker.start_trial(assignment.label, assignment.config, assignment.number)
            tracker.end_trial(run_id, Status.FINISHED, assignment.curve, assignment.metrics, "", values)
            tracker.note_search(search.counts() | {"red": {}, "blue": {}}, search.best_numbers())

    Tune(search, score, record=record).run()
    assert search.is_over
    tracker.note_search(search.counts(), search.best_numbers())
    tracker.end_study("finished", {"winner": search.winner() or ""})
    store.write_state(found.name, "finished")
    return tracker, search, told


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudySearch, list[str]]:
    root = tmp_path_factory.mktemp("played")
    _, search, told = play(Store(root / "store"), root)
    return root / "store", search, told


@pytest.fixture
def store(played: tuple[Path, StudySearch, list[str]], tmp_path: Path) -> Store:
    return copied(played[0], tmp_path / "store")


def test_the_plan_is_sealed_before_the_verdict_and_says_what_it_can_see(
    played: tuple[Path, StudySearch, list[str]],
) -> None:
    root, search, told = played
    assert told[0].startswith("power: up to 10 seeds, 12 classes, 2 pairs: sees")
    runs = tracking.runs_of(Store(root), "simulated")
    digest = runs.study.tags[PLAN_SHA256]
    assert told[1].endswith(f"sha256 {digest}")
    plan = runs.sealed_plan()
    assert plan is not None
    assert plan.digest == digest
    assert min(run.started for run in runs.every(RunKind.VERDICT)) >= plan.sealed - 0.01
    assert plan.power["pilot"]["source"] == "assumed"
    assert plan.trials.keys() == {"untrained", "red", "blue"}
    assert [tuple(pair) for pair in plan.pairs] == search.pairs()


def test_the_leaderboard_is_that_of_the_looks(played: tuple[Path, StudySearch, list[str]]) -> None:
    root, search, _ = played
    board = leaderboard(Store(root), "simulated")
    winner = search.winner()
    assert {each.first for each in board.comparisons} == {winner}
    assert all(each.ended in ("decided", "seeds", "classes") for each in board.comparisons)
    seeds = {row.family: row.num_judged for row in board.rows}
    for each in board.comparisons:
        assert each.num_seeds == each.look <= seeds[each.second]
        assert each.most_seeds == 10
    assert sum(seeds.values()) < 30


def test_nothing_differs_in_a_study_as_it_was_run(store: Store) -> None:
    found = verify(store, "simulated")
    assert found.differing == []
    assert str(found).startswith("all is as the plan says")


def state_with(store: Store, **changes: Any) -> None:
    path = store.study_folder("simulated") / "study.json"
    state = json.loads(path.read_text())
    state["spec"] |= changes
    path.write_text(json.dumps(state))


def more_seeds(store: Store, _: Path) -> None:
    state_with(store, protocol={"num_folds": 2, "verdict_seeds": {"from": 3, "to": 12}})


def fewer_families(store: Store, _: Path) -> None:
    state_with(store, families={"red": spec().raw["families"]["red"]})


def another_objective(store: Store, _: Path) -> None:
    state_with(store, protocol={**spec().raw["protocol"], "objective": "recall_at_1"})


def a_broken_file(store: Store, _: Path) -> None:
    state_with(store, protocol={"verdict_seeds": "many"})


def another_copy_of_the_file(store: Store, _: Path) -> None:
    raw = {**spec().raw, "search": {"trials_per_family": 50, "seed": 5}}
    artifact(store, "study.yaml").write_text(yaml_file.dump(raw))


def other_folds(store: Store, _: Path) -> None:
    artifact(store, "folds.json").write_text("{}")


def client_of(store: Store) -> mlflow.MlflowClient:
    return connection.connect(store)


def study_run(store: Store) -> str:
    return tracking.runs_of(store, "simulated").study.id


def artifact(store: Store, name: str) -> Path:
    (found,) = [path for path in (store.root / "artifacts").rglob(name) if study_run(store) in str(path)]
    return found


def other_plan_in_the_folder(store: Store, _: Path) -> None:
    path = store.study_folder("simulated") / PLAN_FILE
    path.write_text(path.read_text().replace('"winner": "', '"winner": "x'))


def other_plan_in_the_run(store: Store, _: Path) -> None:
    path = artifact(store, PLAN_FILE)
    path.write_text(path.read_text().replace('"give_up": 0.1', '"give_up": 0.0'))


def other_plan_in_both(store: Store, folder: Path) -> None:
    other_plan_in_the_run(store, folder)
    shutil.copy(artifact(store, PLAN_FILE), store.study_folder("simulated") / PLAN_FILE)


def no_plan_in_the_folder(store: Store, _: Path) -> None:
    (store.study_folder("simulated") / PLAN_FILE).unlink()


def no_tag(store: Store, _: Path) -> None:
    client_of(store).delete_tag(study_run(store), PLAN_SHA256)


def other_data(store: Store, _: Path) -> None:
    client_of(store).set_tag(study_run(store), "test_sha256", "u" * 64)


def other_rule(store: Store, _: Path) -> None:
    rule = Plan.of(spec().file.protocol).model_copy(update={"give_up": 0.0})
    client_of(store).set_tag(study_run(store), PLAN, rule.model_dump_json())


def runs_of(store: Store) -> list[Run]:
    return list(tracking.runs_of(store, "simulated").every(RunKind.VERDICT))


def by_hand(store: Store, folder: Path, family: str, seed: int, of: str = "", gain: float = 0.0) -> None:
    """Add a verdict trial as the recorder would."""
    found = spec()
    tracker = StudyTracker(store, found.name, {}, origin=origin(found))
    base = next(run for run in runs_of(store) if run.family == (of or family))
    config = found.trial_config(found.families["red"], default_values(found.families["red"]))
    config = verdict_trial(config.model_copy(update={"family": family}), seed)
    units = by_class(of or family, seed)
    units = units.model_copy(update={"sums": {"map_at_r": [each + gain for each in units.sums["map_at_r"]]}})
    run_id = keep(tracker, folder, config, units)
    plan = tracking.runs_of(store, found.name).sealed_plan()
    assert plan is not None
    own = plan.trials.get(family)
    fingerprint = own[seed - 1] if own and seed <= len(own) else base.tags["config_fingerprint"]
    tracker.client.set_tag(run_id, "config_fingerprint", fingerprint)
    tracker.end_study("finished", {})


def unknown_family(store: Store, folder: Path) -> None:
    by_hand(store, folder, "purple", 1, of="red")


def a_seed_too_many(store: Store, folder: Path) -> None:
    by_hand(store, folder, "red", 11)


def a_seed_not_asked_for(store: Store, folder: Path) -> None:
    by_hand(store, folder, "untrained", 10)


def a_seed_twice(store: Store, folder: Path) -> None:
    by_hand(store, folder, "blue", 2, gain=1.0)


def a_better_score(store: Store, _: Path) -> None:
    run = next(run for run in runs_of(store) if (run.family, run.seed) == ("blue", 2))
    client_of(store).log_metric(run.id, "test_map_at_r", 0.99, step=5)


def another_configuration(store: Store, _: Path) -> None:
    run = next(run for run in runs_of(store) if (run.family, run.seed) == ("blue", 2))
    client_of(store).set_tag(run.id, "config_fingerprint", "0" * 16)


def a_run_deleted(store: Store, _: Path) -> None:
    run = next(run for run in runs_of(store) if (run.family, run.seed) == ("blue", 2))
    client_of(store).delete_run(run.id)


def a_family_renamed(store: Store, _: Path) -> None:
    for run in runs_of(store):
        if run.family in ("red", "blue"):
            client_of(store).set_tag(run.id, "family", "blue" if run.family == "red" else "red")


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (more_seeds, "protocol.verdict_seeds.most is 10 in the plan and 12 in study.json"),
        (fewer_families, "families.blue.space is contrastive in the plan and not there in study.json"),
        (another_objective, "protocol.objective is map_at_r in the plan and recall_at_1 in study.json"),
        (a_broken_file, "study.json: protocol.verdict_seeds: input should be a valid integer"),
        (
            another_copy_of_the_file,
            "search.trials_per_family is 1 in the plan and 50 in the run's study.yaml",
        ),
        (other_folds, "the folds are not those of the plan"),
        (other_plan_in_the_folder, "in the study's folder is not the one that was sealed"),
        (other_plan_in_the_run, "with the study's run is not the one that was sealed"),
        (other_plan_in_both, "with the study's run is not the one that was sealed"),
        (no_plan_in_the_folder, "the sealed plan is missing in the study's folder"),
        (no_tag, "the sealed plan is missing among the tags of the study's run"),
        (other_data, f"test_sha256 is {'t' * 64} in the plan and {'u' * 64} in the study's run"),
        (other_rule, "the rule of the verdict in the study's run is not that of the plan"),
        (unknown_family, "verdict seed 1 of purple is of a family that the plan does not have"),
        (a_seed_too_many, "verdict seed 11 of red is beyond the plan's 10 seeds"),
        (a_seed_not_asked_for, "verdict seed 10 of untrained is one that the rule did not ask for"),
        (a_seed_twice, "verdict seed 2 of blue has 2 finished runs"),
        (a_better_score, "verdict seed 2 of blue: its score is 0.990000, and that of its classes"),
        (another_configuration, "verdict seed 2 of blue has another configuration than the plan"),
        (a_run_deleted, "verdict seed 2 of blue is missing"),
        (a_family_renamed, "has another configuration than the plan"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_what_is_changed_afterwards_is_found(
    attack: Callable[[Store, Path], None], said: str, store: Store, tmp_path: Path
) -> None:
    attack(store, tmp_path)
    found = verify(store, "simulated")
    assert any(said in each for each in found.differing), found.differing
    assert "\n" not in str(found)


def test_the_command_says_in_one_line_what_differs_and_exits_with_1(store: Store, tmp_path: Path) -> None:
    asked = ["report", "simulated", "--verify", "--store", str(store.root)]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, done.output.count("\n")) == (0, 1)
    assert "all is as the plan says" in done.output
    more_seeds(store, tmp_path)
    another_configuration(store, tmp_path)
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert done.output.startswith(
        "simulated: protocol.verdict_seeds.most is 10 in the plan and 12 in study.json; "
    )
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 1
    assert len(json.loads(done.output)["differing"]) == 2


def test_a_study_without_a_plan_says_so_and_a_late_one_is_not_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    tracker, search, _ = play(store, tmp_path, sealed=False)
    assert verify(store, "simulated").differing == [NO_PLAN]
    power = PlanPower(search.plan, 2, "class", tuple(COUNTS), ASSUMED)
    seal(spec(), store, tracker, search, origin(spec()), FOLDS, power, lambda line: None)
    assert verify(store, "simulated").differing == [NO_PLAN]
