"""Damaged study files: each is sound or refused in one short line, whatever was done to it.

``python tests/spec/test_mutants.py 5000`` tries as many, and says what came of each kind.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks
from dmlstudy.text import LINE
from dmlstudy.training import dataset_cache

NUM = 300
"""Mutants that are tried each time."""

STUDY = """
name: small
model_name: small-model
data: {name: digits, image_size: 16}
embedder: {backbone: small_conv, dim: 8, width: {choice: [4, 8], default: 4}, weights: null}
batch: {draw: pk, classes: all, images_per_class: 4, per_epoch: 3, memory_size: 0}
training: {epochs: 2, lr: {float: [1.0e-5, 1.0e-3], log: true, default: 1.0e-4}, optimizer: adam, weight_decay: 0.0}
augmentation: {crop: none, flip: 0.5, padding: 0}
retrieval: {rerank: none, first: 8}
families:
  contrastive: {space: contrastive, override: {loss.negative_margin: {float: [0.4, 0.9]}, training.head_lr_mult: 10}}
  power: {space: pair_weighting, override: {loss.weighting: power, loss.q: 2}}
  structure: {space: structure, override: {loss.name: triplet, regularizer.weight: {int: [1, 5], step: 2}}}
search: {trials_per_family: 3, wall_time: 30min, sampler: tpe, scheduler: halving, warm_start: [other], seed: 1}
protocol: {num_folds: 2, verdict_seeds: 2, recall_at: [1, 2], map_at: [5], objective: map_at_r}
resources: {workers: 1, cpus_per_worker: 1, gpus_per_worker: 0, storage_path: /tmp/state, retries: 1}
"""

NESTED: list[Any] = []
for _ in range(200):
    NESTED = [NESTED]

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e-300, 1e300, 10**12, 10**30, 10**400, -(10**400), float("inf"),
    float("nan"), "", "x", "1e-5", "1e5", "é" * 50, "x" * 100_000, "a\nb", "a\0b", "\u202e", "../x", "~",
    "~x/y", "/dev/zero", "/proc/self/mem", "s3://b/k", "default", "none", "all", [], [1], ["a"], [[]], [None], {},
    {"a": 1}, list(range(2000)),
    {"float": [0, 1]}, {"float": [1, 0]}, {"float": ["1e-5", "1e-3"]}, {"float": [0, 10**400]}, {"int": [1, 3]},
    {"int": [0, 10**18]}, {"choice": [1, 2]}, {"choice": []}, {"choice": {"a": {"b": {"choice": {"c": {}}}}}},
    {"choice": list(range(5000))}, {"choice": [None]}, {"name": "margin"}, {1: 2}, {"space": "margin"}, NESTED,
]  # fmt: skip

TEXTS = [
    "&a ", "*a", "!!timestamp ", "!!python/object/apply:os.system ", "<<: ", "\t", "\0", "\ufeff", "- ", ": ", "{", "}",
    "[" * 60, "'", '"', "#", "|", ">", "? ", "---\n", "...\n", "%YAML 9.9\n", "1:30", "2020-01-01", "0x", "1_", "\x7f",
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += [(value, key), *places(child)]
    return found


def with_other_values(rng: random.Random) -> Any:
    raw = yaml.safe_load(STUDY)
    for _ in range(rng.choice([1, 1, 2])):
        container, key = rng.choice(places(raw))
        action = rng.randrange(5)
        if action < 3:
            container[key] = copy.copy(rng.choice(HOSTILE))
        elif action == 3 or not isinstance(container, dict):
            del container[key]
        else:
            new = rng.choice(
                [f"{key}x", str(key)[1:], "x" * 5000, 7, None, True, "a.b", "@", "name@", "loss.margin"]
            )
            container[new] = container.pop(key)
        if not raw:
            break
    return raw


def with_other_text(rng: random.Random) -> str:
    text = STUDY
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, length = rng.randrange(len(text)), rng.choice([0, 0, 1, 3, 40])
        middle = rng.choice(
            [rng.choice(TEXTS), chr(rng.randrange(1, 0x3000)), text[at : at + length] * 2, ""]
        )
        text = text[:at] + middle + text[at + length :]
    return text


def outcome(rng: random.Random, folder: Path) -> str:
    """What came of a mutant: sound, refused, or what is wrong with that."""
    try:
        if rng.random() < 0.5:
            found = study_file.parse(with_other_values(rng))
        else:
            file = folder / "study.yaml"
            file.write_text(with_other_text(rng), encoding="utf-8", errors="surrogatepass")
            found = study_file.load(file)
        checks.check_parts(found)
        found.fingerprint()
    except SpecError as error:
        message = str(error)
        if "\n" in message or not message:
            return f"not one line: {message!r}"
        return "refused" if len(message) <= LINE else f"too long: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "sound"


def tried(num: int, seed: int, folder: Path) -> dict[str, list[int]]:
    """The numbers of the mutants by what came of them."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for number in range(num):
        found[outcome(random.Random(f"{seed}/{number}"), folder)].append(number)
    return found


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are read once, which is most of the time."""
    forget: Callable[[], None] = lambda: None  # noqa: E731
    monkeypatch.setattr(dataset_cache, "forget", forget)


@pytest.mark.usefixtures("once")
def test_a_damaged_study_is_sound_or_refused_in_one_line(tmp_path: Path) -> None:
    found = tried(NUM, 0, tmp_path)
    assert found.keys() == {"sound", "refused"}
    assert len(found["sound"]) > NUM // 20
    assert len(found["refused"]) > NUM // 3


def main() -> None:
    import tempfile

    dataset_cache.forget = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        found = tried(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, Path(folder))
    for what, numbers in sorted(found.items(), key=lambda item: -len(item[1])):
        sys.stdout.write(f"{len(numbers):6}  {what[:300]!r}  e.g. {numbers[:3]}\n")


if __name__ == "__main__":
    main()
