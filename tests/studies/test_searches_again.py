"""A study whose searches are done again runs them after itself, as studies of their own, and goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.made_study import Maker

from dmlstudy.engine.interruption import StudyInterrupted
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import Store
from dmlstudy.studies import checks, estimate, run


def study(**protocol: Any) -> StudySpec:
    raw = {
        "name": "s",
        "data": {"name": "digits"},
        "batch": {"classes": "all", "images_per_class": 4},
        "training": {"epochs": 1},
        "families": {name: {"space": "triplet"} for name in ("low", "high", "middle")},
        "search": {"trials_per_family": 4},
        "protocol": {"num_folds": 2, "searches": 3, **protocol},
    }
    return study_file.parse(raw)


class Runner:
    """Ends each study at once, as one whose families have these validation scores."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.run: list[StudySpec] = []
        self.broken_at = ""

    def __call__(self, spec: StudySpec, store: Store, **rest: Any) -> Any:
        if spec.name == self.broken_at:
            raise StudyInterrupted
        self.run.append(spec)
        protocol = spec.file.protocol
        origin = {"replicate_of": protocol.replicate_of.study} if protocol.replicate_of else {}
        maker = Maker(store, spec.name, **origin)
        for family in spec.families:
            maker.search(
                family, "finished", {"low": 0.1, "high": 0.9, "middle": 0.5}[family], training__lr=1e-3
            )
            for seed in (1, 2):
                maker.judge(family, seed, 0.5)
        maker.end("high")
        store.write_state(spec.name, "finished", fingerprint=spec.fingerprint())
        return leaderboard(store, spec.name)


def test_the_leaders_are_searched_again_and_a_resumed_study_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    store.prepare()
    runner = Runner(store)
    monkeypatch.setattr(run, "_run_one", runner)
    runner.broken_at = "s.search3"
    told: list[str] = []
    with pytest.raises(StudyInterrupted):
        run.run_study(study(), store, address=None, tell=told.append)
    assert [spec.name for spec in runner.run] == ["s", "s.search2"]
    assert list(runner.run[1].families) == ["high", "middle"]
    assert told == [
        "search 2 of 3, of high and middle: study s.search2",
        "search 3 of 3, of high and middle: study s.search3",
    ]
    runner.broken_at, runner.run = "", []
    monkeypatch.setattr(runner, "run", [])

    def resumed(spec: StudySpec, store: Store, **rest: Any) -> Any:
        return leaderboard(store, "s") if spec.name == "s" else runner(spec, store, **rest)

    monkeypatch.setattr(run, "_run_one", resumed)
    board = run.run_study(study(), store, address=None, tell=told.append)
    assert [spec.name for spec in runner.run] == ["s.search3"]
    assert board.luck is not None
    assert board.luck.num_searches == 3
    assert [each.family for each in board.luck.procedures] == ["high", "middle"]


def test_validate_tells_what_the_searches_cost() -> None:
    spec = study()
    lines = estimate.describe(spec, checks.check_parts(spec), measure=False)
    assert (
        "after that the 2 leading families are searched 2 times more: 16 trials to search and up to 12 for their"
        " verdicts, which the estimated time leaves out"
    ) in lines
    assert not [line for line in lines if "decide little" in line]
    named = [["high", "low"], ["high", "middle"], ["middle", "low"]]
    _, second = estimate.of_searches(study(compare=named, search_leaders=3))
    assert second.startswith(
        "3 searches decide little among 3 differences at once: one counts from 7.6 standard"
    )
