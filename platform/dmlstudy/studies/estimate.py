"""The size of a study before it runs: its number of trials, and about how long they will take."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from dmlstudy import data
from dmlstudy.data import ClosedSet
from dmlstudy.records import SeedRange, TrialConfig, TrialReport
from dmlstudy.registry.search_luck import too_few
from dmlstudy.search.stop_rule import FEWEST
from dmlstudy.spec.study_file import SpecError, StudySpec, default_values
from dmlstudy.studies import checks, retention
from dmlstudy.studies.pilots import power
from dmlstudy.studies.wall_time import (
    Machine,
    Seconds,
    in_words,
    num_at_once,
    room,
    this_machine,
    total_seconds,
)
from dmlstudy.text import first_line
from dmlstudy.training.interface import TrialData
from dmlstudy.training.trial import TrialStopped, run_trial
from dmlstudy.verdict.power import ASSUMED, Pilot

NO_POSITIVE = "a batch holds no two images of one class"
"""The beginning of a loss's warning about a batch without positive pairs."""

START_S = 20.0
"""Starting Ray and the first workers."""


def describe(
    spec: StudySpec,
    dataset: TrialData,
    *,
    measure: bool,
    pilot: Pilot = ASSUMED,
    tell: Callable[[str], object] = lambda line: None,
) -> list[str]:
    """Lines for people: trials, data, power, and the duration if ``measure`` may train a few batches.

    ``pilot`` says how much scores vary. ``tell`` gets a line before each family is measured, which takes seconds to
    minutes. Raises SpecError where a family cannot be trained for a few batches here.
    """
    protocol, resources = spec.file.protocol, spec.file.resources
    machine = this_machine()
    at_most = "at most " if isinstance(protocol.verdict_seeds, SeedRange) else ""
    rule = spec.file.search.stop_when
    lines = [
        f"trials: {'at most ' if rule else ''}{spec.num_search_trials} to search ({spec.search_in_words()}),"
        f" {at_most}{spec.num_verdict_trials} for the verdict"
        f" ({protocol.verdict_seeds} seeds x {len(spec.families) + spec.num_untrained}, what is untrained included)",
        f"search.sampler: {spec.sampler_in_words}",
        *_of_stop_rule(spec),
        *of_searches(spec),
        *_of_data(spec, dataset),
        *data.remarks(dataset, spec.data.path),
        *retention.lines(spec, dataset),
        *checks.slowness(spec),
        *power(spec, dataset, pilot).told(),
        f"a trial: {resources.workers} worker{'s' * (resources.workers > 1)} x {resources.cpus_per_worker:g} CPU"
        f" x {resources.gpus_per_worker:g} GPU",
        room(resources, machine),
        *(f"note: {note}" for note in _notes(spec, dataset)),
    ]
    if measure:
        with _noting() as noted:
            trials = _all_measured(spec, dataset, machine, tell)
        lines += [*noted, in_words(spec, trials, START_S, machine, _measured_on(spec))]
    return lines


def _of_stop_rule(spec: StudySpec) -> list[str]:
    """A line on searches that may end early."""
    rule, num = spec.file.search.stop_when, spec.file.search.trials_per_family
    if rule is None:
        return []
    if spec.file.search.families == "adaptive":
        whose, num = "the search of all families", spec.num_search_trials
    else:
        whose = "a family's search"
    line = f"search.stop_when: {whose} ends before its {num} trials when the others would {rule.in_words}"
    if num <= FEWEST:
        return [f"{line}; it has too few for that, more than {FEWEST} are needed"]
    return [f"{line}; after {FEWEST} at the earliest, the default and earlier studies' not counted"]


def of_searches(spec: StudySpec) -> list[str]:
    """Lines on the searches that are done again: the estimated time does not hold them, and they may decide little."""
    protocol = spec.file.protocol
    if protocol.searches == 1:
        return []
    again = protocol.searches - 1
    num_search = again * protocol.search_leaders * spec.file.search.trials_per_family
    num_verdict = (
        again
        * protocol.search_seeds
        * (protocol.search_leaders + min(protocol.search_leaders, spec.num_untrained))
    )
    is_chosen = not isinstance(protocol.pairs, str)
    num_pairs = len(protocol.pairs) if is_chosen else math.comb(protocol.search_leaders, 2)
    return [
        f"after that the {protocol.search_leaders} leading families are searched {again} times more:"
        f" {'at most ' if spec.file.search.stop_when else ''}{num_search} trials to search and up to"
        f" {num_verdict} for their verdicts, which the estimated time leaves out",
        *too_few(protocol.searches, num_pairs),
    ]


def roughly(spec: StudySpec, dataset: TrialData) -> str:
    """The line on the time that the study takes.

    Of families alike in loss, term, embedder and batch only the first is measured.
    """
    machine, of_kind, trials = this_machine(), dict[Hashable, Seconds](), dict[str, Seconds]()
    for name, family in spec.families.items():
        config = spec.trial_config(family, default_values(family))
        term = config.regularizer and config.regularizer.name
        kind = config.loss.name, term, config.embedder, config.batch
        if kind not in of_kind:
            of_kind[kind] = _measured(spec, dataset, name, machine)
        trials[name] = of_kind[kind]
    return in_words(spec, trials, START_S, machine, _measured_on(spec))


def device_of(spec: StudySpec) -> torch.device:
    """The device that a little training is measured on: a GPU if the study's trials have one and there is one here."""
    has_gpu = spec.file.resources.gpus_per_worker > 0 and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def _measured_on(spec: StudySpec) -> str:
    if not spec.file.resources.gpus_per_worker:
        return ""
    if device_of(spec).type == "cuda":
        return f" on {torch.cuda.get_device_name()}"
    return " on this machine's CPU, for it has no GPU"


@contextlib.contextmanager
def _noting() -> Iterator[list[str]]:
    """Collect our own warnings, each once and in one line; those of libraries are passed on unchanged."""
    noted: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield noted
    for each in caught:
        text = str(each.message)
        if not text.startswith(NO_POSITIVE):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif f"training: {text}" not in noted:
            noted.append(f"training: {text}")


def facts(
    spec: StudySpec,
    dataset: TrialData,
    *,
    measure: bool,
    pilot: Pilot = ASSUMED,
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """The same for programs, as JSON takes it: numbers of trials, images and classes, spaces, power, and seconds."""
    machine = this_machine()
    with _noting() as noted:
        trials = _all_measured(spec, dataset, machine, tell) if measure else {}
    sides = {"development": dataset.development, "test": dataset.test}
    if (elsewhere := retention.loaded(spec)) is not None:
        sides["retention"] = elsewhere.test
    return {
        "study": spec.name,
        "fingerprint": spec.fingerprint(),
        "families": {
            name: {"source": family.paper, "space": spec.tree(name)} for name, family in spec.families.items()
        },
        "num_search_trials": spec.num_search_trials,
        "num_verdict_trials": spec.num_verdict_trials,
        "is_bound": spec.is_bound,
        "power": power(spec, dataset, pilot).facts(),
        "num_images": {name: len(side) for name, side in sides.items()},
        "num_classes": {name: len(set(side.labels_N.tolist())) for name, side in sides.items()},
        "num_at_once": num_at_once(spec.file.resources, machine),
        "seconds": total_seconds(spec, trials, START_S, machine) if measure else None,
        "seconds_of_a_trial": {name: each._asdict() for name, each in trials.items()},
        "notes": [
            *data.remarks(dataset, spec.data.path),
            *retention.lines(spec, dataset),
            *checks.slowness(spec),
            *_notes(spec, dataset),
            *noted,
        ],
    }


def _all_measured(
    spec: StudySpec, dataset: TrialData, machine: Machine, tell: Callable[[str], object]
) -> dict[str, Seconds]:
    """Each family's trials, one family after another."""
    seconds = {}
    for number, name in enumerate(spec.families, 1):
        tell(f"measuring {name}, family {number} of {len(spec.families)}")
        seconds[name] = _measured(spec, dataset, name, machine)
    return seconds


FLOAT32_BYTES = 4

SMALL = 64
"""Pixels of a side up to which small_conv is meant to be used."""


def _notes(spec: StudySpec, dataset: TrialData) -> list[str]:
    """Notes on settings that are allowed and may surprise."""
    notes = list(spec.notes)
    first, *_ = configs = [
        spec.trial_config(family, default_values(family)) for family in spec.families.values()
    ]
    if not first.training.epochs:
        notes.append(
            "training.epochs is 0: nothing is trained, each family scores what its untrained model does"
        )
    shape = dataset.development.image_shape if "embedder" in spec.task.sections else ()
    if max(shape, default=0) > SMALL and any(each.embedder.backbone == "small_conv" for each in configs):
        notes.append(
            f"embedder.backbone: small_conv is made for sides of up to {SMALL} pixels, and these have {max(shape)}: it"
            " is slow there and sees little; set data.image_size: 64, or a backbone such as resnet18"
        )
    return notes


def _measured(spec: StudySpec, dataset: TrialData, name: str, machine: Machine) -> Seconds:
    """Seconds of a family's trials, measured with as many threads as the workers of one trial have."""
    resources = spec.file.resources
    _check_memory(spec, dataset, name)
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(int(resources.workers * resources.cpus_per_worker), int(machine.cpus))))
    try:
        return _seconds(spec, dataset, name)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise SpecError(f"families.{name}: {_why(error)}") from None
    finally:
        torch.set_num_threads(before)


def _check_memory(spec: StudySpec, dataset: TrialData, name: str) -> None:
    """Raises SpecError where a batch alone fills this machine, on which the system would end the process unasked."""
    if isinstance(dataset, ClosedSet):
        return
    config = spec.trial_config(spec.families[name], default_values(spec.families[name]))
    classes = len(set(dataset.development.labels_N.tolist()))
    num = (classes if config.batch.classes == "all" else config.batch.classes) * config.batch.images_per_class
    shape = dataset.development.image_shape
    # The batch, and the distances of all its pairs; of a batch in chunks the pixels, and a chunk as numbers.
    pixels, at_once = math.prod(shape), min(num, config.batch.chunk or num)
    needed = FLOAT32_BYTES * (at_once * pixels + num * num) + (num - at_once) * pixels
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there / 2:
        raise SpecError(
            f"families.{name}: a batch of {num} items of {' x '.join(map(str, shape))} and the distances of its pairs"
            f" take {needed / 2**30:.0f} GiB before anything is computed, and this machine has {there / 2**30:.0f}; set"
            " batch.classes, batch.images_per_class or data.image_size lower, or leave the time out by --no-estimate"
        )


def _why(error: Exception) -> str:
    """A line on what went wrong in a few batches, and what to change."""
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return (
            "a batch does not fit this machine's memory; set batch.classes, batch.images_per_class, data.image_size,"
            " batch.memory_size or embedder.width lower, or leave the time out by"
            " --no-estimate"
        )
    return f"a few batches could not be trained: {first_line(error)}"


def _of_data(spec: StudySpec, dataset: TrialData) -> list[str]:
    """Lines on the data and how they are split."""
    development, test, num_folds = dataset.development, dataset.test, spec.file.protocol.num_folds
    num_classes, num_test_classes = (len(set(side.labels_N.tolist())) for side in (development, test))
    shared = f"{dataset.num_shared_images} images in both"
    if not isinstance(dataset, ClosedSet):
        return [
            f"data: {dataset.name}, {len(development)} images of {num_classes} development classes in {num_folds}"
            f" fold(s), {len(test)} images of {num_test_classes} test classes; {shared}"
            + (f"; {dataset.num_damaged} damaged ones left out" if dataset.num_damaged else "")
        ]
    lines = [
        f"data: {dataset.name}, {len(development)} images of {num_classes} classes for development, {len(test)} of"
        f" {num_test_classes} for the test; {shared}"
    ]
    family = next(iter(spec.families.values()))
    config = spec.trial_config(family, default_values(family))
    return lines + spec.task.notes(config, len(development) + len(test))


def _seconds(spec: StudySpec, dataset: TrialData, name: str) -> Seconds:
    """Seconds of a family's trials, from a little training at its default point."""
    family = spec.families[name]
    config = spec.trial_config(family, default_values(family))
    if not config.training.epochs:
        return Seconds(0.0, 0.0)
    begun = functools.partial(first_reports, device=device_of(spec))
    labels_N, num_test = dataset.development.labels_N, len(dataset.test.labels_N)
    return Seconds(*spec.task.seconds(config, labels_N, num_test, begun))


def first_reports(config: TrialConfig, device: torch.device) -> list[tuple[float, TrialReport]]:
    """The times of a trial's first reports, two at most, and the reports."""
    reports: list[tuple[float, TrialReport]] = []

    def listen(report: TrialReport) -> None:
        reports.append((time.perf_counter(), report))
        if report.step >= min(2, config.training.epochs):
            raise TrialStopped

    with contextlib.suppress(TrialStopped):
        run_trial(config, listen, device=device)
    return reports
