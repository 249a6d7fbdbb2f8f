"""A study's leaderboard, times and texts in a sentence and in tables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dmlstudy import metric_names
from dmlstudy.html import Html, element, joined
from dmlstudy.metric_names import ENERGY_WH
from dmlstudy.records import UNTRAINED, is_untrained
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.history import History
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.registry.runs import Run, RunKind
from dmlstudy.registry.search_luck import luck_lines
from dmlstudy.report.page import facts, paragraph, table
from dmlstudy.text import duration, energy, money
from dmlstudy.training.tasks import task_of_params
from dmlstudy.trials import Status
from dmlstudy.verdict.comparison import PLURALS, Comparison, remarks

MINUS = "\N{MINUS SIGN}"


def news(board: Leaderboard) -> str:
    """A sentence on the gain from training: the winner on the test classes against the same embedder untrained.

    Where the winner does not beat it: who does, or how near anyone came. Empty if no family was compared with it.
    """
    known: dict[str, tuple[str, Comparison]] = {}
    for row in board.rows:
        outcome, found = comparison_of(board, row.family, row.untrained) if row.untrained else ("", None)
        if found is not None:
            known[row.family] = outcome, found
    if not known:
        return ""
    leader = board.winner or next(row.family for row in board.rows if row.validation is not None)
    wins = f"{leader} {'wins' if board.winner else 'leads so far'}"
    params = next(row.params for row in board.rows if row.family in known)
    untrained = f"the untrained {task_of_params(params).untrained}"
    metric = f"test {board.objective}"

    def by(family: str) -> str:
        return f"{difference(known[family][1], family)}, {p_value(known[family][1])}"

    better = [family for family, (outcome, _) in known.items() if outcome == "better"]
    best = max(better or known, key=lambda family: _effect(known[family][1], family))
    if leader in better:
        others, so_do = len(known) - 1, len(better) - 1
        also = f"; {so_do or 'none'} of the {others} other families {'does' if so_do < 2 else 'do'}"
        if others < 2:
            also = f"; the other family {'does too' if so_do else 'does not'}" if others else ""
        where = known[leader][1].where
        return f"{wins} and beats {untrained}{where} by {by(leader).removeprefix('+')} {metric}{also}."
    if better:
        return f"{wins}, but does not measurably beat {untrained} on {metric}; {best} does: {by(best)}."
    outcome = known[best][0]
    nearest = f"{best} {'comes nearest with' if len(known) > 1 else 'has'} {by(best)}"
    return f"{wins}, but no family measurably beats {untrained} on {metric}: {nearest}, {outcome}."


def _effect(each: Comparison, family: str) -> float:
    return each.effect if each.first == family else -each.effect


def verdict(board: Leaderboard) -> str:
    """The winning family with its score on the test classes, and whether it differs from the runner-up.

    The winner is that of the validation classes, the runner-up the next there that was judged; what the test classes
    say against the winner is said too.
    """
    trained = [row for row in board.rows if not is_untrained(row.family) and row.validation is not None]
    if not trained:
        return "No trial has finished, so there is nothing to tell families by."
    winner = next((row for row in trained if row.family == board.winner), trained[0])
    metric = metric_names.on_test(board.objective)
    spread = "" if winner.validation_stderr is None else f" ± {winner.validation_stderr:.4f}"
    wins = "leads so far" if board.winner is None else "wins"
    chosen = f"{winner.family} {wins} by validation {board.objective} {winner.validation:.4f}{spread}"
    if metric not in winner.test:
        return f"{chosen}; it was not judged on the test classes yet."
    sentence = f"{chosen}; on the test classes it has {interval(winner.test[metric])}"
    others = [row.family for row in trained if row.family != winner.family and metric in row.test]
    if not others:
        rival, what = winner.untrained, "its embedder untrained"
    else:
        rival, what = others[0], f"the runner-up {others[0]}"
    outcome, each = comparison_of(board, winner.family, rival) if rival else ("", None)
    if each is None:
        why = "there is nothing to compare it with"
        if others:
            is_compared = any(winner.family in (one.first, one.second) for one in board.comparisons)
            why = f"it was not compared with {what}" if is_compared else "no pair that it is in was compared"
        sentence += f", and {why}{' yet' if board.status != 'finished' else ''}"
    else:
        preposition = "from" if outcome == "not distinguishable" else "than"
        sentence += f" and is {outcome} {preposition} {what}{each.where}:"
        sentence += f" {difference(each, winner.family)}, {p_value(each)}"
    stronger = [name for name in others if comparison_of(board, winner.family, name)[0] == "worse"]
    if stronger and stronger != [rival]:
        sentence += f"; {' and '.join(stronger)} did better there"
    return f"{sentence}."


def comparison_of(board: Leaderboard, family: str, rival: str) -> tuple[str, Comparison | None]:
    """A family's comparison with another, from its side; an empty outcome if they were not compared."""
    for each in board.comparisons:
        if (each.first, each.second) == (family, rival):
            return each.outcome, each
        if (each.second, each.first) == (family, rival):
            return each.opposite, each
    return "", None


def interval(estimate: Estimate | None) -> str:
    """A mean with its 95% t-interval."""
    if estimate is None:
        return "–"
    if estimate.half_width is None:
        return f"{estimate.mean:.4f} (one seed, so no interval)"
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    return f"{estimate.mean:.4f} [{low:.4f}, {high:.4f}]".replace("-", MINUS)


def difference(each: Comparison, family: str) -> str:
    """The mean difference from a family's side, with the interval of the population that the outcome is of."""
    sign = 1 if family == each.first else -1
    text = _signed(sign * each.effect)
    if each.interval is None:
        return text
    low, high = sorted(sign * end for end in each.interval)
    return f"{text} [{_signed(low)}, {_signed(high)}]"


def p_value(each: Comparison) -> str:
    """Holm's p-value of the population that the outcome is of."""
    return _p(each.p)


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def leaderboard_table(board: Leaderboard) -> Html:
    """Families by validation: the objective on the test classes, and how that differs from the untrained embedder's.

    Before any was judged, the objective on the validation classes.
    """
    metric = metric_names.on_test(board.objective)
    if not any(metric in row.test for row in board.rows):
        rows = [[_named(board, row), _validation(row)] for row in board.rows]
        caption = "Best on the validation classes first, mean over folds ± standard error; no test score yet."
        return table(caption, ["family", f"validation {board.objective}"], rows, "ln")
    elsewhere = [metric_names.on_retention(board.objective)] if board.retention else []
    compared = {
        row.family: comparison_of(board, row.family, row.untrained) if row.untrained else ("", None)
        for row in board.rows
    }
    is_compared = any(each for _, each in compared.values())
    rows = []
    for row in board.rows:
        outcome, each = compared[row.family]
        told = ["–", "–"] if is_compared else []
        if each is not None:
            against = "" if row.untrained == UNTRAINED else f" ({row.untrained})"
            told = [
                two_lines(difference(each, row.family)),
                f"{outcome}{each.where}, {p_value(each)}{against}",
            ]
        kept = [two_lines(interval(row.retention.get(name))) for name in elsewhere]
        rows.append([_named(board, row), two_lines(interval(row.test.get(metric))), *told, *kept])
    caption = "Best on the validation classes first. Test: mean over seeds, each scored once, with its 95% t-interval."
    if is_compared:
        caption += (
            " Less untrained: paired by seed, against the same embedder before training, with an interval that holds"
            " for all pairs at once (95%); better or worse is what has p ≤ 0.05 adjusted for all pairs."
        )
    if board.retention:
        caption += " Retention: the same models on other data."
    head = [
        "family",
        metric_names.for_people(metric),
        *(["less untrained", "verdict"] if is_compared else []),
    ]
    head += [metric_names.for_people(name) for name in elsewhere]
    return table(caption, head, rows, "ln" + ("nl" if is_compared else "") + "n" * len(elsewhere))


def search_table(board: Leaderboard) -> Html:
    """Each family's search: its best on the validation classes, and numbers of trials and seeds."""
    rows = [
        [
            _named(board, row),
            _validation(row),
            f"{row.num_finished} + {row.num_pruned} + {row.num_failed}" if row.num_tried else "–",
            str(row.num_judged or "–"),
        ]
        for row in board.rows
    ]
    caption = (
        "Validation: mean over folds ± standard error. Trials: finished + stopped early + failed. Seeds: models that"
        " were judged on the test classes."
    )
    return table(caption, ["family", f"validation {board.objective}", "trials", "seeds"], rows, "lnnn")


def scores_table(board: Leaderboard, names: Sequence[str]) -> Html | None:
    """Further metrics of the test classes; nothing where there are none of these."""
    names = [name for name in names if any(metric_names.on_test(name) in row.test for row in board.rows)]
    if not names:
        return None
    rows = [
        [
            _named(board, row),
            *(two_lines(interval(row.test.get(metric_names.on_test(name)))) for name in names),
        ]
        for row in board.rows
        if row.test
    ]
    caption = "Other scores on the test classes: mean over seeds with its 95% t-interval."
    return table(caption, ["family", *names], rows, "l" + "n" * len(names))


def _named(board: Leaderboard, row: Row) -> str:
    return f"{row.family} (winner)" if row.family == board.winner else row.family


def _validation(row: Row) -> str:
    if row.validation is None:
        return "–"
    return f"{row.validation:.4f}{'' if row.validation_stderr is None else f' ± {row.validation_stderr:.4f}'}"


def two_lines(text: str) -> Html:
    """A number, and what follows it in brackets on a line of its own."""
    number, space, rest = text.partition(" ")
    return joined([number, space, element("span", rest, class_="interval")] if rest else [number])


def front_table(board: Leaderboard) -> Html:
    """With a second objective: the trials that none beats in both."""
    rows = [[one.family, f"#{one.trial}", f"{one.validation:.4f}", f"{one.size:.4g}"] for one in board.front]
    return table(
        f"Trials that none beats in both {board.objective} and {board.second_objective}, smallest first.",
        ["family", "trial", f"validation {board.objective}", str(board.second_objective)],
        rows,
        "lnnn",
    )


def comparison_table(board: Leaderboard) -> Html:
    """Every pair of families that can be compared."""
    has_others = any(each.like_outcome for each in board.comparisons)
    rows: list[list[str | Html]] = [
        [
            each.first,
            f"{each.outcome} {each.preposition}",
            _above(each.second, each.where.strip()),
            _signed(each.effect),
            *(
                [
                    _above(_range(each.low, each.high), _p(each.adjusted_p_value)),
                    _above(_range(each.like_low, each.like_high), _p(each.like_adjusted_p_value)),
                ]
                if has_others
                else [
                    _range(each.low, each.high),
                    _p(each.adjusted_p_value).removeprefix("p ").removeprefix("= "),
                ]
            ),
            str(each.num_seeds),
        ]
        for each in board.comparisons
    ]
    caption = (
        f"Test {board.objective}, first less second, paired by seed. Verdicts hold at p ≤ 0.05 adjusted for all"
        f" {len(rows)} pairs (Holm). Intervals hold for all pairs at once with 95% (Bonferroni): they are wider than"
        " the test, so one may reach past 0 beside a “better”."
    )
    caption += "".join(
        f" {each[0].upper()}{each[1:]}." for each in [*remarks(board.comparisons), *board.untested]
    )
    head = ["interval", "Holm’s p"]
    if has_others:
        units = PLURALS[board.comparisons[0].unit]
        caption += " Beneath each interval: Holm’s p."
        head = [f"on these {units}", f"on {units} like these"]
    return table(caption, ["first", "is", "second", "difference", *head, "seeds"], rows, "lllnnnn")


def _above(text: str, beneath: str) -> Html:
    """A text, and another on a line of its own beneath it, where there is one."""
    return joined([text, " ", element("span", beneath, class_="interval")] if beneath else [text])


def luck(board: Leaderboard) -> list[Html]:
    """The families whose search was done again, compared as procedures; else that the search's luck is not known."""
    if board.luck is None:
        return [paragraph(f"{line[0].upper()}{line[1:]}.", kind="quiet") for line in luck_lines(board)]
    found = board.luck
    rows = [
        [each.family, ", ".join(f"{score:.4f}" for score in each.score_by_search), f"{each.deviation:.4f}"]
        for each in found.procedures
    ]
    caption = (
        f"Test {board.objective} of what each of {found.num_searches} searches shipped, as the mean over"
        f" {found.num_seeds} seeds. The deviation is that of one search, beyond that of its seeds."
    )
    lines = [str(each) for each in found.comparisons]
    return [
        element("h3", "The luck of the search"),
        table(caption, ["family", "searches", "deviation"], rows, "lln"),
        *(paragraph(f"{line}, paired by search.") for line in lines),
    ]


def _range(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{_signed(low)} to {_signed(high)}"


def cost(board: Leaderboard, history: History, seconds: float | None) -> list[Html]:
    """Trials by state with the time they took, and what time passed in which none ran; ``seconds`` is all sessions'."""
    rows = []
    for row in board.rows:
        own = [run for run in history.runs if run.family == row.family]
        judged = [run for run in own if run.kind == RunKind.VERDICT]
        times = [
            _seconds([run for run in own if run.kind == kind]) for kind in (RunKind.SEARCH, RunKind.VERDICT)
        ]
        rows.append(
            [
                row.family,
                *(str(number) for number in (row.num_finished, row.num_pruned, row.num_failed, len(judged))),
                str(sum(run.status == Status.INTERRUPTED for run in own)),
                *(duration(each) for each in times),
                duration(_worker_seconds(own)),
            ]
        )
    head = ["family", "finished", "stopped early", "failed", "of the verdict", "broken off"]
    head += ["search", "verdict", "worker time"]
    for title, told, in_words in _priced(history.runs):
        head.append(title)
        for cells in rows:
            cells.append(_total([run for run in history.runs if run.family == cells[0]], told, in_words))
    trials = table(
        "Trials, and their time from being begun to being recorded, without pauses; of those on several workers, each"
        " worker's.",
        head,
        rows,
        f"l{'n' * (len(head) - 1)}",
    )
    return [trials, facts("The study as a whole.", _times(history, seconds))]


def _times(history: History, seconds: float | None) -> list[tuple[str, str]]:
    runs = [run for run in history.runs if run.ended is not None]
    total, busy = _worker_seconds(runs), busy_seconds(runs)
    devices = sorted({f"{run.workers} × {run.device}" for run in runs})
    known = [
        ("wall time, all sessions", "not known: the study’s folder is not in this store"),
        ("trials on", ", ".join(devices) or "–"),
        ("worker time, all trials", duration(total)),
        ("trials at once, on average", f"{_seconds(runs) / busy:.2f}" if busy else "–"),
        ("time with a trial running", duration(busy)),
    ]
    known += [
        (f"{title}, all trials", _total(runs, told, in_words)) for title, told, in_words in _priced(runs)
    ]
    if seconds is not None:
        idle = max(0.0, seconds - busy)
        share = f" ({idle / seconds:.1%} of the wall time)" if seconds else ""
        known[0] = ("wall time, all sessions", duration(seconds))
        known.append(("engine: time with no trial running", f"{duration(idle)}{share}"))
    known.append(
        (
            "not known",
            "how much of a trial’s time was training, and how much starting its workers, reading data and scoring",
        )
    )
    return known


def _priced(runs: Sequence[Run]) -> list[tuple[str, dict[str, float], Callable[[float], str]]]:
    """Energy and money of the runs, by ids, where it is known of any: a title, the amounts, an amount in words."""
    energies = {run.id: run.metrics[ENERGY_WH] for run in runs if ENERGY_WH in run.metrics}
    moneys = {run.id: run.money for run in runs if run.money is not None}
    return [each for each in (("energy", energies, energy), ("cost", moneys, money)) if each[1]]


def busy_seconds(runs: Sequence[Run]) -> float:
    """Seconds in which one trial or more was at work."""
    total, until = 0.0, 0.0
    for started, ended in sorted(span for run in runs for span in run.spans):
        total += max(0.0, ended - max(started, until))
        until = max(until, ended)
    return total


def reproduction(board: Leaderboard, history: History, state: Mapping[str, Any]) -> list[Html]:
    """The study's file, what it was of and computed with, and the commands that do it again."""
    tags, texts = history.tags, history.texts
    environments = {name: _json(text) for name, text in texts.items() if name.startswith("environment")}
    first = environments.get("environment.json", {})
    spec = texts.get("study.yaml")
    seeds = sorted({run.seed for run in history.runs if run.kind == RunKind.VERDICT})
    search = sorted({run.seed for run in history.runs if run.kind == "search"})
    data = state.get("spec", {}).get("data", {})
    known = [
        ("study file’s fingerprint", tags.get("spec_fingerprint", "not recorded")),
        ("data", ", ".join(f"{key}: {value}" for key, value in data.items()) or "see the study’s file"),
        ("development", _side(tags, "development")),
        ("test", _side(tags, "test")),
        ("images in both", tags.get("num_shared_images", "not counted")),
        ("seeds", f"search {_listed(search)}; verdict {_listed(seeds)}"),
        ("commit", str(first.get("code", {}).get("commit") or "not known")),
        ("source, SHA-256", str(first.get("code", {}).get("source_sha256") or "not known")),
        ("machine", _machine(first)),
        ("sessions", tags.get("sittings", "1")),
        ("started in", str(state.get("cwd", "not known"))),
    ]
    packages = first.get("packages", {})
    commands = _commands(board, first, spec is not None)
    parts = [
        paragraph(
            "The same file and seed on the same machine give the same leaderboard, unless the file says"
            " deterministic: false. Save it as study.yaml; a relative path in it begins in"
            f" {next(iter(state.get('folders', ())), None) or 'the folder where the study was started'}."
        ),
        element("pre", element("code", "\n".join(commands))),
        facts("Where the numbers come from.", known),
        table(
            f"Packages of the first session, with Python {first.get('python', '(not known)')}.",
            ["package", "version"],
            [(name, str(version)) for name, version in packages.items()] or [("not recorded", "")],
        ),
        element("h3", "study.yaml"),
        element("pre", element("code", spec), tabindex="0", aria_label="The study’s file")
        if spec is not None
        else paragraph("The study’s file is not among the artifacts of its run any more."),
    ]
    changed = [
        name
        for name, each in environments.items()
        if any(each.get(key) != first.get(key) for key in ("code", "packages", "hardware"))
    ]
    if changed:
        parts.insert(
            3,
            paragraph(f"Another code, package or machine was there in later sessions: {', '.join(changed)}."),
        )
    return parts


def _commands(board: Leaderboard, environment: Mapping[str, Any], has_spec: bool) -> list[str]:
    commit = str(environment.get("code", {}).get("commit") or "")
    name = shlex.quote(board.study)
    lines = []
    if commit:
        dirty = "   # with changes that were not committed" if commit.endswith("(dirty)") else ""
        lines.append(f"git checkout {commit.removesuffix(' (dirty)')}{dirty}")
    if has_spec:
        lines += [
            "dmlstudy validate study.yaml",
            f"dmlstudy run study.yaml --name {shlex.quote(f'{board.study}-again')}",
        ]
    lines += [f"dmlstudy leaderboard {name}", f"dmlstudy report {name} -o report.html"]
    if board.model:
        lines.append(f"dmlstudy pull {shlex.quote(board.model)} --to model")
    return lines


def _seconds(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs)


def _worker_seconds(runs: Sequence[Run]) -> float:
    return 3600 * sum(run.worker_hours for run in runs)


def _total(runs: Sequence[Run], told: Mapping[str, float], in_words: Callable[[float], str]) -> str:
    """The sum of what is told of runs, by id, with how many they are where that is not of all."""
    ended = [run.id for run in runs if run.ended is not None]
    known = [told[each] for each in ended if each in told]
    if not known:
        return "–"
    of = "" if len(known) == len(ended) else f" (of {len(known)} of {len(ended)})"
    return f"{in_words(sum(known))}{of}"


def _side(tags: Mapping[str, str], side: str) -> str:
    digest = tags.get(f"{side}_sha256")
    return f"{tags.get(f'num_{side}_images', '?')} images, SHA-256 {digest}" if digest else "not recorded"


def _machine(environment: Mapping[str, Any]) -> str:
    hardware = environment.get("hardware", {})
    if not hardware:
        return "not known"
    gpus = ", ".join(hardware.get("gpus") or []) or "no GPU"
    return f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gib')} GiB, {gpus}"


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "none yet"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", MINUS)
