"""Names of the metrics that trials report and MLflow stores, built and read here.

A bare name such as ``map_at_r`` is a score on validation classes, the mean over folds. From it are made:

| name | meaning |
|---|---|
| ``map_at_r_stderr`` | standard error of the mean over folds |
| ``fold_0_map_at_r`` | score of one fold |
| ``wise_ft``, ``wise_ft_0.5_map_at_r`` | chosen share of the trained weights, of several; score with this one |
| ``tau_at_fmr_1e-3``, ``fold_0_tau_at_fmr_1e-3`` | threshold for a rate of accepted impostors: median of folds, one's |
| ``test_map_at_r`` | score on the test classes |
| ``test_separate_map_at_r`` | mean over the folds' models on the test classes |
| ``test_concatenated_map_at_r`` | the folds' models as one embedding on the test classes |
| ``test_map_at_r_low``, ``test_map_at_r_high`` | ends of an interval, in a leaderboard's row |
| ``test_map_at_r_dim64_int8`` | the first 64 numbers of each embedding, of 8 bits each; ``_binary``: of 1 bit |
| ``retention_map_at_r`` | score on the test classes of the retention data |
| ``omega_deviation``, ``test_omega_deviation`` | how far structure embeddings are from one and the same for all items |
| ``omega_saturated`` | share of their weights at a bound |
| ``test_fmr_at_tau_1e-3`` | impostors of the test classes that this threshold accepts |
| ``prequential_error``, ``prequential_error_07`` | error on a stream's rows before learning from them; in window 7 |
| ``prequential_width`` | constraints of such a window |
| ``energy_wh`` | electrical energy of a trial, in Wh, where its workers can read it |
| ``test_num_queries`` | a count that tells how a score came about |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Literal, NamedTuple

TRAIN_LOSS = "train_loss"
IMAGES_PER_SECOND = "images_per_second"
LATENCY_MS = "embed_ms_per_image"
ENERGY_WH = "energy_wh"
OMEGA_DEVIATION = "omega_deviation"
OMEGA_SATURATED = "omega_saturated"
WISE_FT = "wise_ft"
"""The share of the trained weights that the folds have chosen, of several."""
VALIDATION = "validation"
"""The objective on validation classes, in a leaderboard's row."""

_TEST = "test_"
_TAU = "tau_at_fmr_"
_RETENTION = "retention_"
_COUNT = "num_"
_SEPARATE, _CONCATENATED = "separate_", "concatenated_"
_OF_FOLD_MODELS = (_SEPARATE, _CONCATENATED)


Bits = Literal[32, 8, 1]
_BITS: dict[Bits, str] = {32: "", 8: "_int8", 1: "_binary"}
_SHORT = re.compile(r"(.+?)(?:_dim([0-9]+))?(_int8|_binary)?")


class ShortForm(NamedTuple):
    """A short form of embeddings: their first ``size`` numbers (None: all), of so many bits each."""

    size: int | None
    bits: Bits

    def of(self, metric: str) -> str:
        """The name of a metric of embeddings in this form."""
        return f"{metric}{'' if self.size is None else f'_dim{self.size}'}{_BITS[self.bits]}"

    def num_bytes(self, whole: int) -> int:
        """Bytes of a vector whose embedding has ``whole`` numbers."""
        return -(-(self.size or whole) * self.bits // 8)


def short_form(name: str) -> tuple[str, ShortForm] | None:
    """The metric and the form of a name of short embeddings; None of any other name."""
    found = _SHORT.fullmatch(name)
    if found is None or found.group(2) is found.group(3) is None:
        return None
    bits = next(each for each, word in _BITS.items() if word == (found.group(3) or ""))
    return found.group(1), ShortForm(None if found.group(2) is None else int(found.group(2)), bits)


def on_test(metric: str) -> str:
    """The name of a score on the test classes."""
    return f"{_TEST}{metric}"


def all_on_test(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores under their names on the test classes."""
    return {on_test(name): score for name, score in scores.items()}


def is_on_test(name: str) -> bool:
    """True for the name of a score on the test classes."""
    return name.startswith(_TEST)


def on_retention(metric: str) -> str:
    """The name of a score on the test classes of the retention data."""
    return f"{_RETENTION}{metric}"


def all_on_retention(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores under their names on the test classes of the retention data."""
    return {on_retention(name): score for name, score in scores.items()}


def is_on_retention(name: str) -> bool:
    """True for the name of a score on the test classes of the retention data."""
    return name.startswith(_RETENTION)


def metric_of(name: str) -> str:
    """The metric whose score on test classes, the study's or the retention data's, has this name; a bare name stays
    unchanged."""
    return name.removeprefix(_TEST).removeprefix(_RETENTION)


def micro(metric: str) -> str:
    """The metric whose mean over queries becomes this one, by mean over classes; of other metrics themselves."""
    return metric.replace("macro_", "")


def for_people(name: str) -> str:
    """A name as axes and columns show it: ``test map_at_r``."""
    if is_on_retention(name):
        return f"retention {metric_of(name)}"
    return f"test {metric_of(name)}" if is_on_test(name) else name


def separate(metric: str) -> str:
    """A metric's mean over the folds' models."""
    return f"{_SEPARATE}{metric}"


def concatenated(metric: str) -> str:
    """A metric of the folds' models as one embedding."""
    return f"{_CONCATENATED}{metric}"


def is_of_fold_models(name: str) -> bool:
    """True for a score on the test classes of the folds' models, not of the shipped one."""
    return is_on_test(name) and metric_of(name).startswith(_OF_FOLD_MODELS)


def is_count(name: str) -> bool:
    """True for a name among the test scores that is a count, of queries or pictures."""
    return (is_on_test(name) or is_on_retention(name)) and f"_{_COUNT}" in name


def stderr(metric: str) -> str:
    """The name of a score's standard error over folds."""
    return f"{metric}_stderr"


def of_fold(fold: int, metric: str) -> str:
    """The name of one fold's score."""
    return f"fold_{fold}_{metric}"


def of_share(share: float, metric: str) -> str:
    """The name of a score with this share of the trained weights."""
    return f"{WISE_FT}_{share}_{metric}"


def is_of_share(name: str) -> bool:
    """True for a score with one of several shares of the trained weights."""
    return name.startswith(f"{WISE_FT}_")


def rate_name(rate: float) -> str:
    """A rate as names have it: ``1e-3``, ``2.5e-2``."""
    digits, _, exponent = f"{Decimal(repr(rate)).normalize():e}".lower().partition("e")
    return f"{digits}e{int(exponent)}"


def tau_at(rate: float) -> str:
    """A threshold that lets this share of impostors of held-out classes through."""
    return f"{_TAU}{rate_name(rate)}"


def is_tau(name: str) -> bool:
    """True for such a threshold, which is set by the median over folds."""
    return name.startswith(_TAU)


def rate_of(tau: str) -> str:
    """The rate in a threshold's name."""
    return tau.removeprefix(_TAU)


def fmr_at_tau(rate: float) -> str:
    """The share of impostors that the threshold for this rate accepts."""
    return f"fmr_at_tau_{rate_name(rate)}"


def fnmr_at_tau(rate: float) -> str:
    """The share of genuine pairs that it rejects."""
    return f"fnmr_at_tau_{rate_name(rate)}"


def num_folds(names: Iterable[str], metric: str) -> int:
    """Number of folds with a score of the metric among ``names``."""
    return sum(re.fullmatch(rf"fold_\d+_{re.escape(metric)}", name) is not None for name in names)


def low(name: str) -> str:
    """The name of the lower end of a score's interval."""
    return f"{name}_low"


def high(name: str) -> str:
    """The name of the upper end of a score's interval."""
    return f"{name}_high"
