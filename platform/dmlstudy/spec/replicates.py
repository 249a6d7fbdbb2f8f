"""A study's search done again from another seed, as a study of its own: the luck of the search, made visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SEARCHES_APART, StudySpec, replicate_name

SEEDS_END = 2**32


def replicate(spec: StudySpec, number: int, leaders: Sequence[str]) -> StudySpec:
    """The study that does the search of these families again, as number 2 or higher.

    It differs from its study in the seeds of sampling, folds and training, those of the verdict included. It has these
    families alone, in the file's order, judges each one's best with ``protocol.search_seeds`` seeds, and registers no
    model.
    """
    assert number > 1
    wanted = set(leaders)
    while followed := {spec.file.families[name].like for name in wanted} - wanted - {None}:
        wanted |= {name for name in followed if name is not None}  # whose points those of a leader are
    raw: dict[str, Any] = dict(spec.raw)
    protocol = {
        key: value
        for key, value in dict(raw.get("protocol") or {}).items()
        if key not in ("searches", "search_leaders", "search_seeds", "decide_on", "give_up", "compare")
    }
    protocol |= {
        "verdict_seeds": spec.file.protocol.search_seeds,
        "fold_models": False,
        "replicate_of": {"study": spec.name, "number": number},
    }
    search = dict(raw.get("search") or {})
    search["seed"] = (spec.file.search.seed + SEARCHES_APART * (number - 1)) % SEEDS_END
    families = {name: entry for name, entry in raw["families"].items() if name in wanted}
    raw |= {
        "name": replicate_name(spec.name, number),
        "families": families,
        "search": search,
        "protocol": protocol,
    }
    raw.pop("model_name", None)
    return study_file.parse(raw, spec.places)
