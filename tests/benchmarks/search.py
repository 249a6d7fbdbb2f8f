"""Regret against epochs spent, of samplers and schedulers, on learning curves of real trials.

    python tests/benchmarks/search.py                                  # all, 200 searches each: hours
    python tests/benchmarks/search.py --samplers random tpe --schedulers none asha --searches 20
    python tests/benchmarks/search.py --samplers tpe --trials 3 6 19 40 --searches 20    # at equal numbers of trials
    python tests/benchmarks/search.py --samplers tpe qmc --trials 19 --generations 1 10 19    # drawn so many at a time
    python tests/benchmarks/search.py --samplers tpe --trials 60 --gains 0 0.002 0.005    # ended early by stop_when
    python tests/benchmarks/search.py --surrogate forest --searches 40    # by trees in the place of a Gaussian process
    python tests/benchmarks/search.py --draws 40 150    # seconds of the driver's for a point, after so many trials
    python tests/benchmarks/search.py --surrogate forest --cross-validate    # how well it predicts recorded trials
    python tests/benchmarks/search.py --record recorded-omniglot=STORE recorded-tiny-imagenet=STORE

A search has the epochs of 30 whole trials, one trial at a time. A drawn point has the curve of a surrogate of 409
recorded trials, with their noise (``support/recorded_curves.py``). **Regret** is the best score of the surrogate's
mean, less its score where the search would stop now: at its best finished trial, or, where none has finished, the best
by its last report. Searches differ in their seeds; intervals are 95% t-intervals over them.

The platform's own search runs (``StudySearch``), with Optuna in memory. In the same run Optuna's ``Study`` runs with
its own pruners (``optuna:``), and Ray Tune's ASHA with random points (``ray:``).

Results are kept in the file ``--results`` as they come; what is there is not computed again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import optuna
import pyarrow.parquet as pq
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import recorded_curves
from support.recorded_curves import RecordedCurves

from dmlstudy.search import samplers, subsearch
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import StudySpec

WHOLE_TRIALS = 30
MARKS = (5, 10, 20, 30)
"""Whole trials' epochs after which regret is told."""

SAMPLERS = ("random", "qmc", "tpe", "tpe-ungrouped", "cma", "gp")
SCHEDULERS = ("none", "median", "halving", "asha", "hyperband")
PRUNERS = ("none", "median", "halving", "hyperband")
ETA = 3
STOP_PROBABILITY = 0.05
"""Of ``stop_when``."""

FIRST_SEED = 1000
"""The recorded points were drawn with seed 0, which would meet them again."""


class Handed(NamedTuple):
    """The quality of what a search would hand over after so many epochs."""

    epochs: int
    quality: float


class Budget(NamedTuple):
    """Trials of a search that runs to its end, how many are drawn at a time, and the gain of ``stop_when``, if any."""

    num_trials: int
    generation_size: int = 1
    gain: float = 0.0


class Search:
    """One search on a table: the epochs that it spends, and what it would hand over after each trial's turn."""

    def __init__(self, table: RecordedCurves, seed: int) -> None:
        self.table = table
        self.limit = WHOLE_TRIALS * table.epochs
        self.spent = 0
        self.path: list[Handed] = []
        self._seed = seed
        self._curves: dict[int, Any] = {}
        self._finished: tuple[float, float] | None = None
        self._going: tuple[float, float] | None = None

    @property
    def is_spent(self) -> bool:
        return self.spent >= self.limit

    def trained(self, number: int, params: Mapping[str, Any], step: int) -> float:
        """The score of a trial after an epoch, which is spent."""
        self.spent += 1
        if number not in self._curves:
            seed = samplers.seed_of(self._seed, number)
            self._curves[number] = self.table.curve(params, seed), self.table.quality(params)
        curve_E, quality = self._curves[number]
        score = float(curve_E[step - 1])
        self._going = max(self._going or (-math.inf, 0.0), (score, quality))
        if step == self.table.epochs:
            self._finished = max(self._finished or (-math.inf, 0.0), (score, quality))
        return score

    def note(self) -> None:
        """Note what would be handed over now."""
        best = self._finished or self._going
        assert best is not None
        self.path.append(Handed(self.spent, best[1]))

    def regrets(self) -> list[float]:
        """At each mark."""
        found = []
        for mark in MARKS:
            handed = [each for each in self.path if each.epochs <= mark * self.table.epochs]
            found.append(self.table.best - (handed or self.path)[-1 if handed else 0].quality)
        return found


def ours(
    table: RecordedCurves, sampler: str, scheduler: str, seed: int, budget: Budget | None = None
) -> list[float]:
    """The platform's own search; of one of so many trials its regret at its end, and the whole trials it has cost."""
    replay = Search(table, seed)
    spec = _spec(table, sampler.removesuffix("-ungrouped"), scheduler, seed, budget)
    num_trials = budget.num_trials if budget else WHOLE_TRIALS
    if budget:
        replay.limit = 10 * num_trials * table.epochs
    with mock.patch.object(
        samplers, "sampler_for", ungrouped if sampler == "tpe-ungrouped" else samplers.sampler_for
    ):
        own = StudySearch(spec, optuna.storages.InMemoryStorage(), set())
        for turn in range(10 * num_trials * table.epochs):
            trial_id = str(turn)
            config = own.suggest(trial_id)
            if config is None or config.phase != "search" or replay.is_spent:
                break
            assignment = own.assignments[trial_id]
            trial = own.study.get_trials(deepcopy=False)[assignment.number or 0]
            _train(own, replay, trial_id, trial.params)
            replay.note()
    if budget:
        return [table.best - replay.path[-1].quality, replay.spent / table.epochs]
    return replay.regrets()


def _train(own: StudySearch, replay: Search, trial_id: str, params: Mapping[str, Any]) -> None:
    """A trial until it finishes, pauses or is stopped."""
    assignment = own.assignments[trial_id]
    metrics: dict[str, float] = {}
    for step in range(assignment.continues_after + 1, replay.table.epochs + 1):
        metrics = {"step": float(step), own.metric: replay.trained(assignment.number or 0, params, step)}
        if own.observe(trial_id, metrics):
            own.end(trial_id)
            break
        if step == assignment.pause_after:
            own.end(trial_id, is_paused=True)
            break
    else:
        own.end(trial_id, metrics)
    own.commit(trial_id)


def ungrouped(search: Any, number: int, *_: Any) -> optuna.samplers.BaseSampler:
    """TPE as the platform has it, without groups."""
    startup = min(10, max(2, WHOLE_TRIALS // 3))
    return optuna.samplers.TPESampler(
        seed=samplers.seed_of(search.seed, number),
        multivariate=True,
        n_startup_trials=startup,
        warn_independent_sampling=False,
    )


def _spec(
    table: RecordedCurves, sampler: str, scheduler: str, seed: int, budget: Budget | None = None
) -> StudySpec:
    num_trials = WHOLE_TRIALS if scheduler == "none" else ETA * WHOLE_TRIALS
    num_trials, generation_size, gain = budget or Budget(num_trials)
    search: dict[str, Any] = {
        "sampler": sampler,
        "scheduler": scheduler,
        "seed": seed,
        "reduction_factor": ETA,
        "generation_size": generation_size,
        **({"stop_when": {"gain": gain, "probability": STOP_PROBABILITY}} if gain else {}),
    }
    return study_file.parse(
        {"name": "replayed", "data": {"name": "digits"}, **table.study}
        | {
            "protocol": {"num_folds": 1, "verdict_seeds": 1},
            "search": search | {"trials_per_family": num_trials},
        }
    )


def _space(table: RecordedCurves, seed: int) -> subsearch.Subsearch:
    """The table's space, with its default point as the first one."""
    return subsearch.subsearches_of(_spec(table, "random", "none", seed))[0]


def optunas(table: RecordedCurves, sampler: str, pruner: str, seed: int) -> list[float]:
    """Optuna's study and pruner, as their documentation shows them."""
    replay, space = Search(table, seed), _space(table, seed)
    made: dict[str, optuna.samplers.BaseSampler] = {
        "random": optuna.samplers.RandomSampler(seed=seed),
        "tpe": optuna.samplers.TPESampler(seed=seed),
    }
    rungs = {"min_resource": max(1, table.epochs // ETA), "reduction_factor": ETA}
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "none": optuna.pruners.NopPruner(),
        "median": optuna.pruners.MedianPruner(n_warmup_steps=table.epochs // ETA),
        "halving": optuna.pruners.SuccessiveHalvingPruner(**rungs),
        "hyperband": optuna.pruners.HyperbandPruner(max_resource=table.epochs, **rungs),
    }
    study = optuna.create_study(direction="maximize", sampler=made[sampler], pruner=pruners[pruner])
    study.enqueue_trial(space.queue[0][0])

    def train(trial: optuna.Trial) -> float:
        space.sample(trial)
        score = math.nan
        for step in range(1, table.epochs + 1):
            score = replay.trained(trial.number, trial.params, step)
            trial.report(score, step)
            if step < table.epochs and trial.should_prune():
                raise optuna.TrialPruned
        return score

    def stop_where_spent(study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
        replay.note()
        if replay.is_spent:
            study.stop()

    study.optimize(train, callbacks=[stop_where_spent])
    return replay.regrets()


def rays(table: RecordedCurves, seed: int) -> list[float]:
    """Ray Tune's ASHA, which stops, with random points."""
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    replay, space = Search(table, seed), _space(table, seed)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    study.enqueue_trial(space.queue[0][0])
    scheduler = ASHAScheduler(
        metric="score",
        mode="max",
        max_t=table.epochs,
        grace_period=max(1, table.epochs // ETA),
        reduction_factor=ETA,
    )
    while not replay.is_spent:
        asked = study.ask()
        space.sample(asked)
        trial: Any = SimpleNamespace(trial_id=str(asked.number))
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]
        for step in range(1, table.epochs + 1):
            result = {"training_iteration": step, "score": replay.trained(asked.number, asked.params, step)}
            if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:  # type: ignore[arg-type]
                break
        replay.note()
    return replay.regrets()


def seconds_of_draw(table: RecordedCurves, sampler: str, num_trials: int) -> float:
    """Of a trial of the search after so many, the median of nine."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    spec = _spec(table, sampler, "none", FIRST_SEED, Budget(num_trials + 9))
    own, replay = StudySearch(spec, optuna.storages.InMemoryStorage(), set()), Search(table, FIRST_SEED)
    times = []
    for turn in range(num_trials + 9):
        begin = time.perf_counter()
        own.suggest(str(turn))
        times.append(time.perf_counter() - begin)
        trial = own.study.get_trials(deepcopy=False)[own.assignments[str(turn)].number or 0]
        _train(own, replay, str(turn), trial.params)
    return statistics.median(times[-9:])


def methods(own_samplers: Sequence[str], schedulers: Sequence[str]) -> list[str]:
    """Their names: SAMPLER+SCHEDULER, and references as LIBRARY:SAMPLER+SCHEDULER."""
    own = [f"{sampler}+{scheduler}" for sampler in own_samplers for scheduler in schedulers]
    references = [
        f"optuna:{s}+{p}" for s in ("random", "tpe") if s in own_samplers for p in PRUNERS if p in schedulers
    ]
    return own + references + ["ray:random+halving"] * ("random" in own_samplers and "halving" in schedulers)


def regrets(table: str, method: str, seed: int) -> list[float]:
    """Of one search, at each mark."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    library, _, pair = method.rpartition(":")
    pair, _, trials = pair.partition("@")
    sampler, scheduler = pair.split("+")
    curves = TABLES[table]
    if library == "ray":
        return rays(curves, seed)
    if trials:
        num_trials, generation_size, *gain = trials.split("/")
        budget = Budget(int(num_trials), int(generation_size), *map(float, gain))
        return ours(curves, sampler, scheduler, seed, budget)
    return (optunas if library == "optuna" else ours)(curves, sampler, scheduler, seed)


TABLES: dict[str, RecordedCurves] = {}
"""By name; filled by ``_fill``."""


def _fill(surrogate: str) -> None:
    TABLES.update(recorded_curves.load(surrogate=surrogate))


def computed(
    wanted: Sequence[tuple[str, str, int]], file: Path, workers: int, surrogate: str
) -> dict[str, list[float]]:
    """The regrets of all searches that are wanted, kept in the file a line each."""
    kept: dict[str, list[float]] = {}
    if file.exists():
        kept = dict(json.loads(line) for line in file.read_text().splitlines())
    missing = [each for each in wanted if _key(*each) not in kept]
    pool = concurrent.futures.ProcessPoolExecutor(workers, initializer=_fill, initargs=(surrogate,))
    with open(file, "a") as lines, pool:
        futures = {pool.submit(regrets, *each): _key(*each) for each in missing}
        for number, future in enumerate(concurrent.futures.as_completed(futures), start=1):
            kept[futures[future]] = future.result()
            lines.write(json.dumps([futures[future], future.result()]) + "\n")
            if number % 100 == 0:
                lines.flush()
                sys.stderr.write(f"{number} of {len(missing)} searches\n")
    return kept


def _key(table: str, method: str, seed: int) -> str:
    return f"{table} | {method} | {seed}"


def show(
    kept: dict[str, list[float]], tables: Sequence[str], names: Sequence[str], num_searches: int
) -> None:
    """A table, in hundredths of the objective: the mean over tables, with its interval over searches."""
    heads = "".join(f"{f'{mark} trials':>16}" for mark in MARKS)
    print(f"{'search':32}{heads}")
    for name in names:
        regret_SM = np.mean(
            [
                [kept[_key(t, name, seed)] for seed in range(FIRST_SEED, FIRST_SEED + num_searches)]
                for t in tables
            ],
            axis=0,
        )
        half = stats.t.ppf(0.975, num_searches - 1) * stats.sem(regret_SM, axis=0)
        cells = [
            f"{100 * mean:.2f} ± {100 * h:.2f}" for mean, h in zip(regret_SM.mean(axis=0), half, strict=True)
        ]
        print(f"{name:32}" + "".join(f"{cell:>16}" for cell in cells))


def show_by_trials(
    kept: dict[str, list[float]], tables: Sequence[str], names: Sequence[str], num_searches: int
) -> None:
    """The same at the end of searches of equal numbers of trials, with what they have cost.

    **Less the first** is the difference from the first sampler's without ``stop_when``, all else equal, paired.
    **Wrongly** is the share of searches that the same one without ``stop_when`` beats by more than its gain.
    """
    seeds = range(FIRST_SEED, FIRST_SEED + num_searches)
    heads = f"{'regret':>16}{'whole trials':>16}{'less the first':>20}{'wrongly':>10}"
    print(f"{'search @ trials/generation/gain':34}{heads}")
    first: dict[str, np.ndarray] = {}
    for name in names:
        regret_ST, spent_ST = np.moveaxis([[kept[_key(t, name, s)] for t in tables] for s in seeds], -1, 0)
        whole, *gain = name.rsplit("/", 1) if name.count("/") == 2 else [name]
        less_S = regret_ST.mean(axis=1) - first.setdefault(whole.partition("+")[2], regret_ST.mean(axis=1))
        cells = [_interval(regret_ST.mean(axis=1)), f"{spent_ST.mean():.1f}"]
        cells.append(_interval(less_S, sign="+") if less_S.any() else "")
        whole_ST = np.array([[kept[_key(t, whole, s)][0] for t in tables] for s in seeds])
        cells.append(f"{np.mean(regret_ST - whole_ST > float(gain[0])):.1%}" if gain else "")
        print(f"{name:34}{cells[0]:>16}{cells[1]:>16}{cells[2]:>20}{cells[3]:>10}")


def _interval(value_S: np.ndarray, sign: str = "") -> str:
    """Hundredths: the mean over searches, with its interval."""
    half = stats.t.ppf(0.975, len(value_S) - 1) * stats.sem(value_S)
    return f"{100 * value_S.mean():{sign}.2f} ± {100 * half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=SCHEDULERS)
    parser.add_argument("--surrogate", choices=recorded_curves.SURROGATES, default="process")
    parser.add_argument("--tables", nargs="+", help="of the recorded curves; all, unless given")
    parser.add_argument(
        "--trials", nargs="+", type=int, help="searches of so many trials instead, to their ends"
    )
    parser.add_argument(
        "--generations", nargs="+", type=int, default=[1], help="their trials are drawn so many at a time"
    )
    parser.add_argument(
        "--gains", nargs="+", type=float, default=[0.0], help="of stop_when, which ends them; 0: without it"
    )
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=Path("search_regrets.jsonl"))
    parser.add_argument("--by-table", action="store_true", help="a table for each table of curves, too")
    parser.add_argument(
        "--draws", nargs="+", type=int, default=[], help="time draws after so many trials instead"
    )
    parser.add_argument("--cross-validate", action="store_true", help="judge the surrogate instead")
    parser.add_argument("--record", nargs="+", metavar="STUDY=STORE", help="keep the curves of these studies")
    options = parser.parse_args()
    if options.record:
        studies = {name: Path(folder) for name, folder in (each.split("=") for each in options.record)}
        pq.write_table(recorded_curves.record(studies), recorded_curves.FILE, compression="zstd")
        return
    _fill(options.surrogate)
    tables = options.tables or list(TABLES)
    if unknown := sorted({*tables} - TABLES.keys()):
        parser.error(f"--tables: no {unknown[0]!r}; there are {', '.join(map(repr, TABLES))}")
    if options.draws or options.cross_validate:
        for name in tables:
            if options.cross_validate:
                print(f"{name}: rank correlation {TABLES[name].rank_correlation():.2f}")
            for sampler, num_trials in itertools.product(options.samplers, options.draws):
                cell = f"{1000 * seconds_of_draw(TABLES[name], sampler, num_trials):.0f} ms"
                print(f"{name}: {sampler} after {num_trials} trials, a draw {cell}", flush=True)
        return
    names = methods(options.samplers, options.schedulers)
    if options.trials:
        names = [
            f"{sampler}+{scheduler}@{num_trials}/{size}{f'/{gain:g}' if gain else ''}"
            for num_trials in options.trials
            for size in options.generations
            for scheduler in options.schedulers
            for sampler in options.samplers
            for gain in options.gains
        ]
    wanted = [
        (t, name, seed)
        for name in names
        for t in tables
        for seed in range(FIRST_SEED, FIRST_SEED + options.searches)
    ]
    kept = computed(wanted, options.results, options.workers, options.surrogate)
    for chosen in [tables, *([t] for t in tables if options.by_table)]:
        print(f"{', '.join(chosen)}: {options.searches} searches, regret in hundredths")
        (show_by_trials if options.trials else show)(kept, chosen, names, options.searches)


if __name__ == "__main__":
    main()
