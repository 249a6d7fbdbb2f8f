"""Champion and challenger: a version takes the other's place only where the paired comparison says better."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from scipy import stats
from support.verdict_trials import verdict_trial

from dmlstudy.data import unit_scores_as_bytes
from dmlstudy.records import UnitScores
from dmlstudy.registry import artifact_places, connection, models, promotion
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store, StoreError

NUMBERS = itertools.count()

ORIGIN = {"objective": "map_at_r", "test_sha256": "ab", "num_test_images": "1000"}

GOOD, SAME, BETTER = (0.50, 0.52, 0.51), (0.51, 0.52, 0.50), (0.60, 0.63, 0.62)


def by_class(scores: Sequence[float], num_classes: int) -> UnitScores:
    """These scores by class of two queries each; the same again of later classes."""
    own = [2 * scores[number % len(scores)] for number in range(num_classes)]
    return UnitScores(units=list(range(num_classes)), counts=[2] * num_classes, sums={"map_at_r": own})


def registered(
    store: Store,
    name: str,
    scores: Sequence[float],
    of_classes: UnitScores | None = None,
    **origin: str,
) -> RegisteredVersion:
    """A version of a study of its own, whose family has these scores by verdict seed, and by class with each."""
    study = f"study-{next(NUMBERS)}"
    tracker = StudyTracker(store, study, {}, origin={**ORIGIN, **origin})
    run_id = ""
    for seed, score in enumerate(scores, 1):
        config = verdict_trial("red", seed)
        run_id = tracker.start_trial(f"red verdict seed {seed}", config, None)
        if of_classes is not None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "classes.parquet"
                file.write_bytes(unit_scores_as_bytes(of_classes))
                tracker.log_unit_scores(run_id, file)
        tracker.end_trial(run_id, "finished", [], {f"test_{origin.get('objective', 'map_at_r')}": score})
    client = connection.connect(store)
    if name not in {model.name for model in client.search_registered_models()}:
        client.create_registered_model(name)
    tags = {"study": study, "family": "red"}
    version = client.create_model_version(name, f"runs:/{run_id}/embedder", run_id, tags=tags)
    return models.resolve(store, f"{name}/{version.version}")


def aliases(store: Store, name: str) -> dict[str, int]:
    return {alias: v.version for v in models.versions(store) if v.name == name for alias in v.aliases}


@pytest.fixture
def name() -> str:
    return f"model-{next(NUMBERS)}"


def test_the_first_is_the_champion_and_the_second_of_its_study_the_challenger(
    store: Store, name: str
) -> None:
    first, second = registered(store, name, GOOD), registered(store, name, SAME)
    decision = promotion.offer(store, first, second)
    assert decision.is_promoted
    assert decision.before is None
    assert aliases(store, name) == {"champion": 1, "challenger": 2}
    assert promotion.history(store, name) == [decision]


def test_a_better_one_takes_over_and_is_rolled_back(store: Store, name: str) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    decision = promotion.offer(store, registered(store, name, BETTER))
    assert (decision.version, decision.champion, decision.before) == (2, 2, 1)
    assert decision.reason.startswith(f"better than {name}/1 by +0.1067 [")
    assert decision.reason.endswith(
        ", 3 seeds; the models were not compared by class: no scores by class were kept"
    )
    assert aliases(store, name) == {"champion": 2, "challenger": 1}
    found = promotion.compared(store, f"{name}@champion", f"{name}@challenger")
    comparison = found.families
    assert comparison is not None
    assert found.models is None
    assert (comparison.outcome, comparison.num_seeds) == ("better", 3)
    assert str(comparison).startswith(f"{name}/2 better than {name}/1 on these classes: +0.1067")
    assert promotion.rollback(store, name).reason == "rolled back from version 2"
    assert aliases(store, name) == {"champion": 1, "challenger": 2}
    with pytest.raises(StoreError, match=f"{name}/1: there is nothing before it to go back to"):
        promotion.rollback(store, name)
    assert aliases(store, name) == {"champion": 1, "challenger": 2}
    assert [each.champion for each in promotion.history(store, name)] == [1, 2, 1]


LOW, HIGH = (0.4, 0.5, 0.6), (0.5, 0.62, 0.7)


def test_two_models_are_compared_class_by_class_without_a_common_seed(store: Store, name: str) -> None:
    """Three times the same classes: paired t-test on 29 degrees of freedom by hand."""
    promotion.offer(store, registered(store, name, [0.5], by_class(LOW, 30)))
    decision = promotion.offer(store, registered(store, name, [0.6], by_class(HIGH, 30)))
    assert decision.is_promoted
    test = stats.ttest_rel(list(HIGH) * 10, list(LOW) * 10)
    low, high = test.confidence_interval(0.95)
    assert decision.reason == (
        f"better than {name}/1 as a model on classes like these by +0.1067 [{low:+.4f}, {high:+.4f}] p < 0.001,"
        " 30 of 30 classes differ; its family was not compared: fewer than 2 verdict seeds in common"
    )
    assert (decision.challenge, decision.test_sha256) == (1, "ab")
    again = promotion.offer(store, registered(store, name, [0.55], by_class(LOW, 30)))
    assert not again.is_promoted
    assert again.reason.startswith(f"worse than {name}/2 as a model on classes like these by -0.1067 [")
    assert again.challenge == 2
    assert promotion.said(again, name).endswith(" (challenge 2 on this test set)")
    assert [each.challenge for each in promotion.history(store, name)] == [None, 1, 2]


def test_a_better_model_of_a_worse_family_stays_the_challenger(store: Store, name: str) -> None:
    promotion.offer(store, registered(store, name, BETTER, by_class(LOW, 30)))
    decision = promotion.offer(store, registered(store, name, GOOD, by_class(HIGH, 30)))
    assert not decision.is_promoted
    assert decision.reason.startswith(f"better than {name}/1 as a model")
    assert "; its family worse by -0.1067 [" in decision.reason


def test_a_family_that_is_better_on_these_classes_alone_gives_no_better_model(
    store: Store, name: str
) -> None:
    """Of 30 classes the new model wins ten and loses ten, by as much."""
    promotion.offer(store, registered(store, name, GOOD, by_class((0.4, 0.5, 0.6), 30)))
    decision = promotion.offer(store, registered(store, name, BETTER, by_class((0.6, 0.5, 0.4), 30)))
    assert not decision.is_promoted
    assert decision.reason.startswith(f"not distinguishable from {name}/1 as a model on classes like these")
    assert "; its family better by +0.1067" in decision.reason


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (by_class(LOW, 9), by_class(HIGH, 9), "fewer than 10 classes"),
        (by_class(LOW, 30), by_class(HIGH, 31), "they were not judged by the same classes"),
        (None, by_class(HIGH, 30), "no scores by class were kept"),
    ],
)
def test_where_models_cannot_be_compared_the_families_decide(
    store: Store, name: str, before: UnitScores | None, after: UnitScores, reason: str
) -> None:
    promotion.offer(store, registered(store, name, GOOD, before))
    decision = promotion.offer(store, registered(store, name, BETTER, after))
    assert decision.is_promoted
    assert decision.reason.startswith(f"better than {name}/1 by +0.1067 [")
    assert decision.reason.endswith(f"; the models were not compared by class: {reason}")


def test_rolled_back_again_it_goes_further_back(store: Store, name: str) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    for _ in range(3):
        version = registered(store, name, SAME)
        promotion.promote(store, f"{name}/{version.version}", "by hand")
    assert [promotion.rollback(store, name).champion for _ in range(2)] == [3, 2]
    promotion.promote(store, f"{name}/4", "after all")
    assert [promotion.rollback(store, name).champion for _ in range(2)] == [2, 1]
    with pytest.raises(StoreError, match="nothing before"):
        promotion.rollback(store, name)


def test_rolled_back_from_an_alias_set_by_hand_past_a_version_that_is_deleted(
    store: Store, name: str
) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    for _ in range(2):
        version = registered(store, name, SAME)
        promotion.promote(store, f"{name}/{version.version}", "by hand")
    client = connection.connect(store)
    by_hand = registered(store, name, SAME)
    client.set_registered_model_alias(name, "champion", str(by_hand.version))
    assert promotion.rollback(store, name).champion == 3
    client.delete_model_version(name, "2")
    assert promotion.rollback(store, name).champion == 1


def test_decisions_of_an_older_store_are_read_and_taken_over(store: Store, name: str) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    registered(store, name, SAME)
    client = connection.connect(store)
    entry = {
        "at": "2025-01-01T00:00:00+00:00",
        "version": 1,
        "champion": 1,
        "before": None,
        "reason": "first",
    }
    later = {**entry, "version": 2, "champion": 2, "before": 1, "reason": "by hand"}
    client.delete_registered_model_tag(name, promotion.HISTORY)
    client.set_registered_model_tag(name, "history", json.dumps([entry, later]))
    client.set_registered_model_alias(name, "champion", "2")
    assert [each.reason for each in promotion.history(store, name)] == ["first", "by hand"]
    assert promotion.rollback(store, name).champion == 1
    assert client.get_registered_model(name).tags.keys() == {promotion.HISTORY}
    assert [each.champion for each in promotion.history(store, name)] == [1, 2, 1]


class Died(BaseException):
    """The process, at a write."""


@pytest.mark.parametrize("what", ["promote", "rollback", "offer"])
def test_killed_before_any_write_it_is_completed_by_the_next_call(
    what: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writes, client = 0, connection.connect(store)
    while True:
        name = f"model-{next(NUMBERS)}"
        client.create_registered_model(name)
        first, _, third = (
            client.create_model_version(name, "runs:/0/model", tags={"study": "gone", "family": "red"})
            for _ in range(3)
        )
        third = models.resolve(store, f"{name}/{third.version}")
        promotion.offer(store, models.resolve(store, f"{name}/{first.version}"))
        promotion.promote(store, f"{name}/2", "by hand")
        act = {
            "promote": lambda name=name: promotion.promote(store, f"{name}/3", "half the size"),
            "rollback": lambda name=name: promotion.rollback(store, name),
            "offer": lambda third=third: promotion.offer(store, third),
        }[what]
        with monkeypatch.context() as kill:
            left = [num_writes]
            for call in WRITES:
                kill.setattr(mlflow.MlflowClient, call, dying(getattr(mlflow.MlflowClient, call), left))
            try:
                act()
            except Died:
                pass
            else:
                break
        decision = act()
        expected = {"promote": (3, 2), "rollback": (1, 2), "offer": (2, 3)}[what]
        assert aliases(store, name) == dict(zip(("champion", "challenger"), expected, strict=True)), (
            num_writes
        )
        assert decision == promotion.history(store, name)[-1], num_writes
        assert not decision.is_open
        assert len(promotion.history(store, name)) == 3, num_writes
        assert client.get_model_version(name, str(decision.version)).tags["decision"] == decision.reason
        assert decision.reason in client.get_registered_model(name).description, num_writes
        num_writes += 1
    assert num_writes == 6


WRITES = (
    "set_registered_model_tag",
    "set_registered_model_alias",
    "set_model_version_tag",
    "update_registered_model",
)


def dying(call: Any, left: list[int]) -> Any:
    """The same, that dies in place of a write once ``left`` have been."""

    def write(*arguments: Any, **named: Any) -> Any:
        if not left[0]:
            raise Died
        left[0] -= 1
        return call(*arguments, **named)

    return write


def test_a_description_of_one_s_own_stays(store: Store, name: str) -> None:
    client = connection.connect(store)
    promotion.offer(store, registered(store, name, GOOD))
    written = client.get_registered_model(name).description
    assert written.startswith("In use: **version 1** `@champion`, red of study-")
    assert f'mlflow.pyfunc.load_model("models:/{name}@champion")' in written
    client.update_registered_model(name, "ours")
    promotion.promote(store, f"{name}/{registered(store, name, SAME).version}", "by hand")
    assert client.get_registered_model(name).description == "ours"


def test_one_that_is_no_better_stays_the_challenger_unless_someone_says_why(store: Store, name: str) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    decision = promotion.offer(store, registered(store, name, SAME))
    assert not decision.is_promoted
    assert decision.reason.startswith(f"not distinguishable from {name}/1 by +0.0000 [")
    assert aliases(store, name) == {"champion": 1, "challenger": 2}
    assert promotion.promote(store, f"{name}@challenger").champion == 1
    forced = promotion.promote(store, f"{name}/2", "half the size")
    assert forced.is_promoted
    assert forced.reason == "without a comparison: half the size"
    assert aliases(store, name) == {"champion": 2, "challenger": 1}
    client = connection.connect(store)
    assert client.get_model_version(name, "2").tags["decision"] == forced.reason
    with pytest.raises(StoreError, match=f"{name}/2 is the champion already"):
        promotion.promote(store, name)


@pytest.mark.parametrize(
    ("scores", "origin", "reason"),
    [
        (BETTER, {"test_sha256": "cd"}, "judged by other test data: they cannot be compared"),
        (BETTER, {"objective": "recall_at_1"}, r"other metrics \(test_recall_at_1, test_map_at_r\)"),
        (BETTER[:1], {}, "fewer than 2 verdict seeds in common"),
    ],
)
def test_what_cannot_be_compared_is_not_promoted(
    store: Store, name: str, scores: Sequence[float], origin: dict[str, str], reason: str
) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    decision = promotion.offer(store, registered(store, name, scores, **origin))
    assert not decision.is_promoted
    assert aliases(store, name) == {"champion": 1, "challenger": 2}
    with pytest.raises(StoreError, match=reason) as raised:
        promotion.compared(store, f"{name}/2", f"{name}/1")
    assert decision.reason == str(raised.value)


def test_offered_again_after_a_kill_it_is_decided_once(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    better = registered(store, name, BETTER)

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as kill:
        kill.setattr(mlflow.MlflowClient, "set_registered_model_alias", killed)
        with pytest.raises(KeyboardInterrupt):
            promotion.offer(store, better)
    assert aliases(store, name) == {"champion": 1}
    for _ in range(2):
        assert promotion.offer(store, better).is_promoted
        assert aliases(store, name) == {"champion": 2, "challenger": 1}
    assert len(promotion.history(store, name)) == 2


def test_the_history_keeps_to_the_size_of_a_tag(store: Store, name: str) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    registered(store, name, SAME)
    for number in range(25):
        promotion.promote(store, f"{name}/{2 - number % 2}", "because " * 40 + str(number))
    kept = promotion.history(store, name)
    assert 5 < len(kept) <= promotion.MOST_KEPT
    assert kept[-1].reason.endswith("24")


def test_what_is_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="no model"):
        promotion.rollback(store, name)
    promotion.offer(store, registered(store, name, GOOD))
    with pytest.raises(StoreError, match="there is nothing before"):
        promotion.rollback(store, name)
    with pytest.raises(StoreError, match="no model"):
        promotion.promote(store, f"{name}/9")
    with pytest.raises(StoreError, match="same family of one study"):
        promotion.compared(store, name, name)


def test_a_store_that_may_only_be_read_is_one_line_without_a_traceback(
    name: str, tmp_path: Path, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    registered(store, name, SAME)
    own = Store(tmp_path / "store")
    own.root.mkdir()
    with contextlib.closing(sqlite3.connect(store.root / "mlflow.db")) as database:
        database.execute("VACUUM INTO ?", (str(own.root / "mlflow.db"),))
    artifact_places.relocate(own)
    with contextlib.closing(sqlite3.connect(own.root / "mlflow.db")) as database:  # root may write any file
        for change in ("INSERT", "UPDATE", "DELETE"):
            database.execute(
                f"CREATE TRIGGER refuse_{change} BEFORE {change} ON registered_model_tags"
                " BEGIN SELECT missing_function(); END"
            )
        database.commit()
    capfd.readouterr()
    with pytest.raises(StoreError, match=r"^the MLflow store .* refuses: .*OperationalError") as raised:
        promotion.promote(own, f"{name}/2", "anyway")
    assert "\n" not in str(raised.value)
    assert "Traceback" not in capfd.readouterr().err
    connection.connect(store)


def test_a_reason_is_a_line_of_text_whatever_was_typed(store: Store, name: str) -> None:
    """Bytes of another encoding, control characters and markup: nothing is obeyed, and nothing blocks the model."""
    promotion.offer(store, registered(store, name, GOOD))
    promotion.offer(store, registered(store, name, SAME))
    for empty in ("", " \n"):
        with pytest.raises(StoreError, match="--anyway: no reason is given"):
            promotion.promote(store, f"{name}/2", empty)
    assert len(promotion.history(store, name)) == 2
    promotion.promote(store, f"{name}/2", "caf\udce9\x1b[2J\n# <script>alert(1)</script> `x` [a](b)")
    assert promotion.history(store, name)[-1].reason == (
        r"without a comparison: caf\udce9\x1b[2J # <script>alert(1)</script> `x` [a](b)"
    )
    page = connection.connect(store).get_registered_model(name).description
    (line,) = [each for each in page.splitlines() if "<script" in each]
    assert line.startswith("* ")
    assert "without a comparison: `` caf" in line
    promotion.rollback(store, name)
    assert aliases(store, name)["champion"] == 1


def test_a_decision_that_could_not_be_written_is_completed(store: Store, name: str) -> None:
    """Earlier versions noted a reason that is no text, and then could not set it: every decision broke on it."""
    promotion.offer(store, registered(store, name, GOOD))
    promotion.offer(store, registered(store, name, SAME))
    before = promotion.history(store, name)
    open_one = before[-1].model_copy(
        update={"version": 2, "champion": 2, "reason": "x \udcff", "is_open": True}
    )
    promotion._write(store, name, [*before, open_one])
    promotion.rollback(store, name)
    reasons = [each.reason for each in promotion.history(store, name)]
    assert r"x \udcff" in reasons
    assert aliases(store, name)["champion"] == 1


@pytest.mark.parametrize("call", ["get_registered_model", "set_registered_model_tag"])
def test_what_the_store_refuses_is_one_line_and_nothing_of_before_is_lost(
    call: str, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promotion.offer(store, registered(store, name, GOOD))
    promotion.offer(store, registered(store, name, SAME))
    before = promotion.history(store, name), aliases(store, name)

    def refuses(*arguments: Any, **named: Any) -> None:
        raise MlflowException("Permission denied", error_code=PERMISSION_DENIED)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, call, refuses)
        with pytest.raises(
            StoreError, match=r"^the MLflow store .* refuses: Permission denied; see that you may"
        ):
            promotion.promote(store, f"{name}/2", "anyway")
    assert (promotion.history(store, name), aliases(store, name)) == before


def test_a_reference_that_may_not_be_read_is_not_called_unknown(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(store, name, GOOD)

    def refuses(*arguments: Any, **named: Any) -> None:
        raise MlflowException("Permission denied", error_code=PERMISSION_DENIED)

    monkeypatch.setattr(mlflow.MlflowClient, "get_model_version", refuses)
    with pytest.raises(StoreError, match="refuses: Permission denied"):
        models.resolve(store, f"{name}/1")
