"""Features of a frozen backbone, kept: the same scores, one computation for all trials, nothing torn is used."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import config, failing_trial, trial

from dmlstudy import data, embedders, heartbeat
from dmlstudy.records import TrialConfig
from dmlstudy.training import feature_cache, feature_store
from dmlstudy.training.feature_cache import ChosenImages, WholeSides, of_trainer
from dmlstudy.training.interface import Share
from dmlstudy.training.tasks import task_of

NOISY = ("images_per_second", "loader_images_per_second", "loader_wait_share")
VIEWS = {"augmentation": {"flip": 0.5}, "training__cached_views": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dmlstudy" / "features"


def frozen(how: str = "auto", **changes: Any) -> dict[str, Any]:
    return config(training__freeze_backbone_epochs=2, training__feature_cache=how, **changes)


def kept_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.exists() else []


def numbers(found: tuple[list[dict[str, float]], dict[str, float]]) -> list[float]:
    reports, result = found
    return [value for row in (*reports, result) for name, value in row.items() if name not in NOISY]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"training__feature_cache": "off"}, False),
        ({"training__freeze_backbone_epochs": 1}, False),
        ({"training__epochs": 0, "training__freeze_backbone_epochs": 0}, False),
        ({"augmentation": {"flip": 0.5}}, False),
        (VIEWS, True),
    ],
)
def test_what_is_frozen_and_has_fixed_views_is_kept(changes: dict[str, Any], expected: bool) -> None:
    raw = frozen()
    for name, value in changes.items():
        section, _, key = name.partition("__")
        raw[section] = {**raw[section], key: value} if key else value
    assert feature_cache.applies(TrialConfig.model_validate(raw)) is expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"phase": "verdict"},
        {"embedder__fusion": "heads", "embedder__pooling": "max"},
        VIEWS,
        {"training__precision": "bf16"},
        {
            "regularizer": {"name": "structure", "params": {}},
            "retrieval": {"rerank": "structure", "first": 4},
        },
    ],
    ids=["search", "verdict", "stages", "views", "bf16", "structure"],
)
def test_scores_are_those_without_the_cache(changes: dict[str, Any], cache: Path) -> None:
    plain = numbers(trial(frozen("off", **changes)))
    assert kept_in(cache) == []
    np.testing.assert_allclose(numbers(trial(frozen(**changes))), plain, rtol=0, atol=1e-6)
    there = kept_in(cache)
    assert numbers(trial(frozen(**changes))) == pytest.approx(plain, rel=0, abs=1e-6)
    assert kept_in(cache) == there


def test_folds_trials_and_ranks_share_the_matrices_of_a_side(
    cache: Path, pool: GlooPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(network(seed=3).backbone.state_dict(), weights)
    alone = trial(frozen(embedder__weights=str(weights)))
    assert len(kept_in(cache)) == 1  # of both folds' training and held-out images
    trial(frozen(embedder__weights=str(weights), seed=5, training__lr=1e-3))
    assert len(kept_in(cache)) == 1
    together = pool.run(2, two_ranks, frozen(embedder__weights=str(weights)), str(cache.parents[1]))
    assert len(kept_in(cache)) == 1
    for each in together:
        np.testing.assert_allclose(numbers(each), numbers(alone), rtol=1e-4, atol=1e-6)


def two_ranks(raw: dict[str, Any], folder: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        return trial(raw)


def network(seed: int = 0, **more: Any) -> embedders.Embedder:
    return embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=seed, **more)


def test_features_in_float64_are_those_of_the_images() -> None:
    given = TrialConfig.model_validate(frozen())
    own = network().double()
    dataset = data.load("digits")
    some = np.array([700, 3, 4, 5])
    sides = WholeSides(ChosenImages(dataset.development, some), ChosenImages(dataset.test, None))
    features = of_trainer(given, own, torch.device("cpu"), sides)
    assert features is not None
    own.eval()
    with torch.no_grad():
        wanted = own.features(torch.from_numpy(dataset.development.read(some))).numpy()
        z_ND = own(torch.from_numpy(dataset.test.read(np.arange(50)))).numpy()
    found = features.in_training(0).read(np.arange(4))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        features.embedded_held_out(own, slice(0, 50), structure=False), z_ND, atol=1e-12
    )


def test_whatever_the_features_depend_on_makes_another_key(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(**changes: Any) -> int:
        given = TrialConfig.model_validate(frozen(**changes))
        task = task_of(given)
        fold = task.folds(given)[0]
        share = Share(0, fold.train_indices, fold.validation_indices)
        task.fit(given, share, torch.device("cpu")).score()
        return len(kept_in(cache))

    assert [scored(), scored()] == [1, 1]
    assert scored(training__lr=1.0, embedder__dim=4) == 1
    assert scored(data={"name": "digits", "image_size": 10}) == 2
    assert scored(seed=1) == 3  # other random weights
    assert scored(embedder__fusion="features") == 4
    versions = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "0" if name == "pillow" else versions(name)
    )
    monkeypatch.setattr(feature_cache, "_versions", feature_cache._versions.__wrapped__)  # else seen once
    assert scored() == 5


def test_views_that_are_kept_are_views_of_the_image_whatever_the_fold() -> None:
    given = TrialConfig.model_validate(frozen(**VIEWS))
    dataset = data.load("digits")
    chosen = ChosenImages(dataset.development, np.array([9, 2]))
    own = feature_cache.loader(
        given, WholeSides(chosen, chosen), dataset.development, data.Augmentation(flip=0.5), 0
    )
    whole = data.Loader(dataset.development, data.Augmentation(flip=0.5), feature_cache.VIEWS_SEED)
    (some,) = own.epoch([np.array([0, 1])], 1)
    (all_,) = whole.epoch([np.array([9, 2])], 1)
    np.testing.assert_array_equal(some, all_)
    assert [feature_cache.view_of(given.training, epoch) for epoch in range(4)] == [0, 1, 0, 1]


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil_usage(free=100))
    said = failing_trial(frozen())
    assert said.startswith("training.feature_cache: the features take")
    assert "\n" not in said


class shutil_usage:
    def __init__(self, free: int) -> None:
        self.free = free


PARTS = {"what": "a test"}


def pieces(num: int = 7) -> Iterator[Any]:
    for start in range(0, num, 3):
        yield np.arange(2 * start, 2 * min(start + 3, num), dtype=np.float32).reshape(-1, 2)


WHOLE = np.arange(14, dtype=np.float32).reshape(7, 2)


def test_of_several_at_once_one_computes_and_the_others_wait(tmp_path: Path) -> None:
    computed, beats, results = [], [], []
    begun, others_wait = threading.Event(), threading.Event()

    def compute() -> Iterator[Any]:
        computed.append(threading.get_ident())
        begun.set()
        for piece in pieces():
            others_wait.wait(10)
            yield piece

    def ask() -> None:
        results.append(np.array(feature_store.kept(PARTS, 7, compute, folder=tmp_path)))

    def listener() -> None:
        beats.append(threading.get_ident())
        if len(set(beats) - set(computed)):
            others_wait.set()

    with heartbeat.heard_by(listener, every_s=0):
        asking = [threading.Thread(target=ask) for _ in range(3)]
        asking[0].start()
        assert begun.wait(10)
        for each in asking[1:]:
            each.start()
        for each in asking:
            each.join(30)
    assert len(computed) == 1
    assert len(set(beats)) > 1
    assert len(results) == 3
    assert all((each == WHOLE).all() for each in results)


BESIDE = """
import json, sys
from support.ranks import trial
from dmlstudy.training import feature_store

write, written = feature_store._write, []
feature_store._write = lambda place, *rest: (written.append(place.name), write(place, *rest))
print("ready", flush=True)
sys.stdin.readline()
_, result = trial(json.loads(sys.argv[1]))
print(json.dumps([written, result]))
"""


def test_studies_at_once_on_one_machine_share_one_computation(cache: Path) -> None:
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(tests)}
    command = [sys.executable, "-c", BESIDE, json.dumps(frozen())]
    both = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for each in both:
        assert each.stdout is not None
        assert each.stdin is not None
        assert each.stdout.readline() == "ready\n"
    for each in both:
        print("go", file=each.stdin, flush=True)
    (written, first), (written_too, second) = (json.loads(each.communicate(timeout=120)[0]) for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert sorted(written + written_too) == kept_in(cache)
    assert numbers(([], first)) == numbers(([], second)) == numbers(([], trial(frozen("off"))[1]))


def test_what_a_killed_process_was_writing_is_taken_over(tmp_path: Path) -> None:
    key = feature_store.key_of(PARTS)
    dies = (
        "import os, sys, pathlib; from filelock import FileLock\n"
        "lock = FileLock(sys.argv[1] + '.lock'); lock.acquire()\n"
        "draft = pathlib.Path(sys.argv[1] + '.draft'); draft.mkdir()\n"
        "(draft / 'features.npy').write_bytes(b'half'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", dies, str(tmp_path / key)], check=False).returncode == 9
    assert (tmp_path / f"{key}.draft").is_dir()
    np.testing.assert_array_equal(feature_store.kept(PARTS, 7, pieces, folder=tmp_path), WHOLE)
    assert kept_in(tmp_path) == [key]


@pytest.mark.parametrize("harm", ["flipped", "short", "no manifest", "other parts"])
def test_a_torn_matrix_is_computed_again(tmp_path: Path, harm: str) -> None:
    place = tmp_path / feature_store.key_of(PARTS)
    matrix = place / feature_store.MATRIX
    feature_store.kept(PARTS, 7, pieces, folder=tmp_path)
    content = matrix.read_bytes()
    if harm == "flipped":
        matrix.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "short":
        matrix.write_bytes(content[:-8])
    elif harm == "no manifest":
        (place / feature_store.MANIFEST).unlink()
    else:
        text = (place / feature_store.MANIFEST).read_text()
        (place / feature_store.MANIFEST).write_text(text.replace("a test", "another"))
    computed = []

    def compute() -> Iterator[Any]:
        computed.append(1)
        return pieces()

    for _ in range(2):
        np.testing.assert_array_equal(feature_store.kept(PARTS, 7, compute, folder=tmp_path), WHOLE)
    assert len(computed) == 1


def test_a_computation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def breaks() -> Iterator[Any]:
        yield WHOLE[:3]
        raise ValueError("picture 4 cannot be decoded")

    with pytest.raises(ValueError, match="picture 4"):
        feature_store.kept(PARTS, 7, breaks, folder=tmp_path)
    assert kept_in(tmp_path) == []


@pytest.mark.parametrize("what", ["file", "link", "no folder"])
def test_what_is_in_the_way_is_named_in_one_line(tmp_path: Path, what: str) -> None:
    folder, key = tmp_path / "features", feature_store.key_of(PARTS)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes").write_text("kept")
    if what == "no folder":
        folder.write_text("a file")
    else:
        folder.mkdir()
        if what == "file":
            (folder / key).write_text("a file")
        else:
            (folder / key).symlink_to(precious)
    with pytest.raises(ValueError, match=r"^training\.feature_cache: .*off$") as no:
        feature_store.kept(PARTS, 7, pieces, folder=folder)
    assert str(folder) in str(no.value)
    assert "\n" not in str(no.value)
    assert (precious / "notes").read_text() == "kept"


def test_a_limit_on_files_is_told_before_a_row_is_computed(tmp_path: Path) -> None:
    limited = """
import itertools, pathlib, resource, sys
import numpy as np
from dmlstudy.training import feature_store
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    rows = itertools.repeat(np.ones((50, 2), np.float32))
    feature_store.kept({"what": 1}, 5000, lambda: rows, folder=pathlib.Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert done.stdout == (
        f"training.feature_cache: {tmp_path} cannot be written (File too large); mend that, point XDG_CACHE_HOME"
        " elsewhere, or set it to off\n"
    )
    assert kept_in(tmp_path) == []


def test_only_this_user_can_read_what_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    before = os.umask(0)
    try:
        feature_store.kept(PARTS, 7, pieces, folder=folder)
    finally:
        os.umask(before)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_how_pictures_are_kept_makes_no_other_features() -> None:
    images = data.load("digits").test
    plain, canvas = (
        feature_cache._of_images(TrialConfig.model_validate(config(**changes)), images)
        for changes in ({}, {"data__canvas": "disk", "data__canvas_gib": 3.0})
    )
    assert plain == canvas


def test_a_frozen_backbone_that_computes_in_each_epoch_is_noted() -> None:
    note = feature_cache.note
    assert note(TrialConfig.model_validate(frozen())) is None
    assert "feature_cache: auto computes" in str(note(TrialConfig.model_validate(frozen("off"))))
    shown = note(TrialConfig.model_validate(frozen(augmentation={"flip": 0.5})))
    assert "cached_views" in str(shown)
