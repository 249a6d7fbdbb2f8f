"""A study's retention data and what its families keep there, read from its runs: scores, and what is lost.

What is lost is a family's score less that of the same embedder before training, paired by seed. These pairs are
corrected for their own number: the verdict's comparisons stay what they are without retention data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dmlstudy import metric_names
from dmlstudy.records import Record
from dmlstudy.registry.runs import Run, StudyRun, StudyRuns
from dmlstudy.verdict.comparison import Comparison, compare


class RetentionSet(Record):
    """The retention data of a study; ``seen`` says what of them it trains or is tested on, and is empty if nothing."""

    name: str
    num_images: int
    num_queries: int
    num_classes: int
    seen: str

    @classmethod
    def of(cls, study: StudyRun) -> RetentionSet | None:
        """The record by the tags of the study's run; None of a study without retention data."""
        tags = study.tags
        if "retention" not in tags:
            return None
        numbers = {name: int(tags[f"num_retention_{name}"]) for name in ("images", "queries", "classes")}
        return cls(
            name=tags["retention"],
            **{f"num_{name}": number for name, number in numbers.items()},
            seen=tags.get("retention_seen", ""),
        )

    def __str__(self) -> str:
        return f"{self.name}: {self.num_images} images of {self.num_classes} classes"


def names(judged: Sequence[Run]) -> list[str]:
    """Names of the scores on the retention data, counts last."""
    found = dict.fromkeys(
        name for run in judged for name in run.metrics if metric_names.is_on_retention(name)
    )
    return sorted(found, key=metric_names.is_count)


def lost(
    runs: StudyRuns, untrained: Mapping[str, str], found: RetentionSet | None, objective: str
) -> list[Comparison]:
    """Each family against its embedder untrained (``untrained``), by the objective on the retention data."""
    if found is None:
        return []
    metric = metric_names.on_retention(objective)
    scores = {
        family: {run.seed: run.metrics[metric] for run in runs.judged(family) if metric in run.metrics}
        for family in {**untrained, **dict.fromkeys(untrained.values())}
    }
    pairs = [pair for pair in untrained.items() if all(scores[family] for family in pair)]
    return compare(scores, pairs=pairs, resolution=1 / max(found.num_queries, 1))
