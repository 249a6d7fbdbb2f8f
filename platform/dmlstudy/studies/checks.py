"""Checks of a study that need the parts it names: data sets, losses, backbones, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dmlstudy.data import state_file
from dmlstudy.spec.study_file import SpecError, StudySpec, default_values
from dmlstudy.studies import pilots, retention
from dmlstudy.text import first_line, nearest
from dmlstudy.training import dataset_cache
from dmlstudy.training.interface import TrialData

PROBE = ".probe"
"""The folder of a file that is kept to see whether one can be; no trial's has this name."""


def check_parts(spec: StudySpec) -> TrialData:
    """Check everything that can be before a cluster is started, and return the data; raises SpecError.

    Every family is built at its default point and at and between the bounds of its space, so that no trial fails
    later for a value the file allows.
    """
    dataset_cache.forget()  # files may have changed since they were read last
    task, protocol = spec.task, spec.file.protocol
    _check_objective(protocol.objective, task.metrics(protocol))
    configs = [
        (key, spec.trial_config(family, values, path=key))
        for key, family in ((f"families.{name}", family) for name, family in spec.families.items())
        for values in spec.checked(family)
    ]
    with _refused():
        for key, config in configs:
            task.check(config, key)
    dataset = _loaded(spec)
    with _refused():
        task.check_data(configs, dataset)
    retention.check(spec, dataset)
    pilots.check_population(spec, dataset)
    return dataset


def slowness(spec: StudySpec) -> list[str]:
    """Lines on what makes trials needlessly slow: an emulated precision, a frozen backbone that runs in each epoch."""
    from dmlstudy.embedders.precision import is_emulated
    from dmlstudy.training import feature_cache

    if "embedder" not in spec.task.sections:
        return []
    configs = [spec.trial_config(family, default_values(family)) for family in spec.families.values()]
    found = list(dict.fromkeys(filter(None, map(feature_cache.note, configs))))
    if spec.file.resources.gpus_per_worker:
        return found
    precisions = dict.fromkeys(config.training.precision for config in configs)
    return found + [
        f"training.precision: this machine's processor only emulates {each}, about ten times slower than float32; set"
        " float32, unless other machines train"
        for each in precisions
        if is_emulated(each)
    ]


def _loaded(spec: StudySpec) -> TrialData:
    try:
        return spec.task.dataset(spec.data)
    except ValueError as error:
        where = "" if "does not exist" not in str(error) else spec.places.looked_in("data.path")
        raise SpecError(f"{error}{where}") from None


@contextmanager
def _refused() -> Iterator[None]:
    """Turn a ValueError of the block into a SpecError."""
    try:
        yield
    except ValueError as error:
        raise SpecError(error) from None


def _check_objective(objective: str, known: Sequence[str]) -> None:
    if objective not in known:
        raise SpecError(f"protocol.objective: no metric {objective!r}{nearest(objective, known)}")


def check_storage(spec: StudySpec) -> None:
    """Keep a file where the study's trials will keep theirs, read it and remove it; raises SpecError."""
    root = spec.file.resources.storage_path
    if root is None:
        return
    probe = state_file.at(state_file.join(root, spec.name, PROBE))
    try:
        probe.write(b"probe")
        with probe.local_copy() as copy:
            copy.read_bytes()
        probe.remove()
    except OSError as error:
        said, _, _ = str(error.strerror or error).partition(
            " (Request ID"
        )  # a cloud's, of a hundred characters
        reason = first_line(said.strip() or error)
        raise SpecError(
            f"resources.storage_path: {root} cannot be written and read ({reason}); make the folder or bucket, give"
            " this machine and all nodes the right to it, or name another"
        ) from None
