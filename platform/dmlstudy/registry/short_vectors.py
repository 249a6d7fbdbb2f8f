"""Short forms of a study's embeddings, read from its runs: their scores, and each beside the whole embedding.

A pair is one model's embeddings in a short form and as they are, paired by seed. These pairs are corrected for their
own number: the verdict's comparisons stay what they are without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dmlstudy import metric_names
from dmlstudy.metric_names import ShortForm
from dmlstudy.records import Record
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.runs import Run, StudyRuns
from dmlstudy.registry.units import NamedMetric, units
from dmlstudy.training.tasks import task_of_params
from dmlstudy.verdict.comparison import Comparison, compare


class ShortVectors(Record):
    """A family's embeddings in a short form: numbers and bits of each, bytes of a vector, the objective.

    ``beside_whole`` compares it with the same models' whole embeddings, of ``whole_bytes``, and ``beside_winner`` with
    the winner's in the same form; None if no seed has both.
    """

    family: str
    size: int
    bits: int
    num_bytes: int
    whole_bytes: int
    score: Estimate
    beside_whole: Comparison | None
    beside_winner: Comparison | None

    @property
    def form(self) -> str:
        """The form in words: ``64 x 8 bit``."""
        return f"{self.size} x {self.bits} bit"


def short_vectors(runs: StudyRuns, families: Sequence[str]) -> list[ShortVectors]:
    """The short forms of these families by the objective, largest first; none in a study that scored no such."""
    objective = metric_names.on_test(runs.study.objective)
    found: list[tuple[str, ShortForm, int, list[Run]]] = []
    for family in families:
        judged = [run for run in runs.judged(family) if objective in run.metrics]
        if judged and (forms := _forms(judged, objective)):
            whole = task_of_params(judged[0].params).size(judged[0].params)
            found += [(family, form, whole, judged) for form in forms]
    compared = {(each.first, each.second): each for each in _compared(runs, objective, found)}
    winner = runs.study.winner or ""
    return [
        ShortVectors(
            family=family,
            size=form.size or whole,
            bits=form.bits,
            num_bytes=form.num_bytes(whole),
            whole_bytes=ShortForm(None, 32).num_bytes(whole),
            score=Estimate.of([run.metrics[form.of(objective)] for run in judged]),
            beside_whole=compared.get((_name(family, form), family)),
            beside_winner=compared.get((_name(family, form), _name(winner, form))),
        )
        for family, form, whole, judged in found
    ]


def _forms(judged: list[Run], objective: str) -> list[ShortForm]:
    """The forms that all of a family's runs have the objective of, largest vectors first."""
    named = filter(None, map(metric_names.short_form, judged[0].metrics))
    forms = {
        form
        for metric, form in named
        if metric == objective and all(form.of(objective) in run.metrics for run in judged)
    }
    return sorted(forms, key=lambda form: (-(form.size or math.inf), -form.bits))


def _compared(
    runs: StudyRuns, objective: str, found: list[tuple[str, ShortForm, int, list[Run]]]
) -> list[Comparison]:
    winner = runs.study.winner
    of_winner = {form for family, form, _, _ in found if family == winner}
    scored = {
        (family, run.id): NamedMetric(family, run, objective)
        for family, _, _, judged in found
        for run in judged
    }
    pairs = []
    for family, form, _, judged in found:
        name = _name(family, form)
        pairs.append((name, family))
        if winner and family != winner and form in of_winner:
            pairs.append((name, _name(winner, form)))
        scored |= {(name, run.id): NamedMetric(name, run, form.of(objective)) for run in judged}
    scores: dict[str, dict[int, float]] = {}
    for name, run, metric in scored.values():
        scores.setdefault(name, {})[run.seed] = run.metrics[metric]
    return compare(scores, pairs=pairs, resolution=runs.study.resolution, **units(runs, scored.values()))


def _name(family: str, form: ShortForm) -> str:
    return form.of(f"{family} as")
