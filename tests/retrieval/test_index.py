"""Indexes: one contract for every kind, what a file refuses, and the way to a GPU."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from dmlstudy import retrieval
from dmlstudy.retrieval import CodeIndex, EmbeddingIndex, Index, Tuning

NUM, DIM = 700, 16
TUNING = Tuning(num_cells=8, num_probes=8, code_bytes=8, search_effort=300)  # all cells probed: IVF is exact
EMBEDDING_KINDS = ("flat", "ivf", "ivf_pq", "hnsw")
CODE_KINDS = ("flat", "ivf", "hnsw")


def vectors(rows: int, seed: int) -> np.ndarray:
    z = np.random.default_rng(seed).normal(size=(rows, DIM)).astype(np.float32)
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def new(name: str) -> Index:
    family, kind, metric = name.split("/")
    if family == "codes":
        return CodeIndex(kind, 8 * DIM, model_version="m1", tuning=TUNING)  # type: ignore[arg-type]
    return EmbeddingIndex(kind, DIM, model_version="m1", metric=metric, tuning=TUNING)  # type: ignore[arg-type]


def content(name: str, rows: int, seed: int) -> np.ndarray:
    if name.startswith("codes"):
        return np.random.default_rng(seed).integers(0, 256, (rows, DIM), dtype=np.uint8)
    return vectors(rows, seed)


NAMES = [
    *(f"embeddings/{kind}/{metric}" for kind in EMBEDDING_KINDS for metric in ("l2", "inner_product")),
    *(f"codes/{kind}/hamming" for kind in CODE_KINDS),
]
IDS = np.random.default_rng(7).permutation(NUM) + 2**53 + 1  # float64 would merge them


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def index(name: str) -> Index:
    items = content(name, NUM, 0)
    return new(name).train(items).add(items[:300], IDS[:300]).add(items[300:], IDS[300:])


def test_nearest_are_found_under_their_ids(name: str, index: Index) -> None:
    items, queries = content(name, NUM, 0), content(name, 25, 1)
    assert len(index) == NUM
    found, distance = index.search(queries, 10)
    assert (found.dtype, distance.dtype) == (np.int64, np.float32)
    if name.startswith("codes"):
        exact = np.bitwise_count(queries[:, None] ^ items).sum(axis=2).astype(np.float64)
    elif name.endswith("l2"):
        exact = np.linalg.norm(queries[:, None].astype(np.float64) - items, axis=2)
    else:
        exact = 1 - queries.astype(np.float64) @ items.T
    nearest = np.sort(exact, axis=1)[:, :10]
    assert (np.diff(distance, axis=1) >= 0).all()
    if "ivf_pq" in name:
        best = IDS[np.argsort(exact, axis=1)[:, :10]]
        assert np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(found, best, strict=True)]) > 0.4
    else:
        place = np.argsort(IDS)[np.searchsorted(np.sort(IDS), found)]
        measured = np.take_along_axis(exact, place, axis=1)
        np.testing.assert_allclose(distance, measured, atol=2e-6)
        assert (np.abs(measured - nearest) < 2e-6).mean() > (0.95 if "hnsw" in name else 0.999)


def test_a_saved_index_answers_as_before(name: str, index: Index, tmp_path) -> None:  # type: ignore[no-untyped-def]
    queries = content(name, 9, 1)
    path = tmp_path / "deep" / "index"
    index.save(path)
    identity = index.identity
    loaded = type(index).load(path, model_version="m1", dim=identity.dim, metric=identity.metric)
    assert (loaded.identity, loaded.tuning, len(loaded)) == (identity, index.tuning, NUM)
    for ours, theirs in zip(index.search(queries, 5), loaded.search(queries, 5), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    more = content(name, 3, 2)
    assert loaded.add(more, np.arange(3)).search(more, 1)[0].shape == (3, 1)
    assert [p.name for p in path.parent.iterdir()] == ["index"]


def test_k_beyond_the_index_and_batches(name: str, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = content(name, 40, 1)
    whole = index.search(queries, NUM + 5)
    assert (whole[0][:, NUM:] == -1).all()
    assert np.isinf(whole[1][:, NUM:]).all()
    assert (whole[0][:, :100] >= 0).all()
    monkeypatch.setattr("dmlstudy.retrieval.index._ROWS_AT_ONCE", 7)
    # of codes many tie, in an order that is faiss's own
    np.testing.assert_allclose(index.search(queries, 4)[1], whole[1][:, :4], atol=1e-6)


def test_effort_trades_recall_for_time() -> None:
    items, queries = vectors(3000, 0), vectors(100, 1)
    exact, _ = retrieval.retrieve(queries, items, 10)
    for kind, efforts in (("ivf", (1, 8, 50)), ("hnsw", (10, 20, 200))):
        tuning = Tuning(num_cells=50, num_links=4)
        index = EmbeddingIndex(kind, DIM, model_version="m", tuning=tuning)  # type: ignore[arg-type]
        index.train(items).add(items, np.arange(3000))
        recalls = [
            np.mean(
                [
                    np.isin(e, f).mean()
                    for e, f in zip(exact, index.search(queries, 10, effort=x)[0], strict=True)
                ]
            )
            for x in efforts
        ]
        assert recalls[0] < recalls[1] < recalls[2]
        assert recalls[2] > 0.95


def saved(tmp_path):  # type: ignore[no-untyped-def]
    path = tmp_path / "index"
    EmbeddingIndex("flat", DIM, model_version="m1").add(vectors(50, 0), np.arange(50)).save(path)
    return path


def test_another_models_index_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path, asked = saved(tmp_path), {"model_version": "m1", "dim": DIM, "metric": "l2"}
    for change in ({"model_version": "m2"}, {"dim": 32}, {"metric": "inner_product"}):
        with pytest.raises(ValueError, match=f"has {next(iter(change))} .*asked for is") as error:
            EmbeddingIndex.load(path, **{**asked, **change})  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


def test_faiss_itself_opens_the_file(name: str, index: Index, tmp_path: Path) -> None:
    """With the ids: those that are not 0, 1, 2, ... are in it."""
    index.save(tmp_path / "index.faiss")
    read = faiss.read_index_binary if name.startswith("codes") else faiss.read_index
    opened = read(str(tmp_path / "index.faiss"))
    queries = content(name, 9, 1)
    found = opened.search(queries, 1)[1]
    assert np.isin(found, IDS).all()
    if "ivf" not in name and "hnsw" not in name:
        np.testing.assert_array_equal(found, index.search(queries, 1)[0])
    plain = new(name).train(content(name, NUM, 0)).add(content(name, NUM, 0), np.arange(NUM))
    plain.save(tmp_path / "plain.faiss")
    assert "IDMap" not in type(read(str(tmp_path / "plain.faiss"))).__name__


def as_before(index: Index, path: Path) -> None:
    """A file with its header first, as an earlier version wrote it."""
    head = {"identity": asdict(index.identity), "tuning": asdict(index.tuning), "num_vectors": len(index)}
    is_code = isinstance(index, CodeIndex)
    engine = (faiss.serialize_index_binary if is_code else faiss.serialize_index)(index._engine).tobytes()
    content = (
        b"dmlstudy index 1\n"
        + json.dumps(head).encode()
        + b"\n"
        + index._id_N.astype("<i8").tobytes()
        + engine
    )
    path.write_bytes(content + hashlib.sha256(content).digest())


def test_a_file_of_an_earlier_version_is_read(name: str, index: Index, tmp_path: Path) -> None:
    as_before(index, tmp_path / "index")
    identity = index.identity
    loaded = type(index).load(
        tmp_path / "index", model_version="m1", dim=identity.dim, metric=identity.metric
    )
    queries = content(name, 9, 1)
    for ours, theirs in zip(index.search(queries, 5), loaded.search(queries, 5), strict=True):
        np.testing.assert_array_equal(ours, theirs)


HOSTILE = """
import hashlib, sys
import numpy as np
from dmlstudy.retrieval import CodeIndex, EmbeddingIndex

path, name, dim, metric = sys.argv[1:5]
whole = open(path, "rb").read()[:-32]
rng = np.random.default_rng(0)
refused = used = 0
for number in range(int(sys.argv[5])):
    content = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(len(content) if number % 2 else min(400, len(content))))
        kind = rng.integers(4)
        if kind == 0:
            content[place] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            content[place : place + 8] = rng.integers(0, 256, 8, dtype=np.uint8).tobytes()
        elif kind == 2:
            content[place : place + 8] = (2 ** int(rng.integers(16, 63))).to_bytes(8, "little")
        else:
            del content[place : place + int(rng.integers(1, 64))]
    open(path, "wb").write(content + hashlib.sha256(content).digest())
    made = CodeIndex if name.startswith("codes") else EmbeddingIndex
    try:
        index = made.load(path, model_version="m1", dim=int(dim), metric=metric, device="cpu")
        codes = rng.integers(0, 256, (3, int(dim) // 8), dtype=np.uint8)
        queries = codes if made is CodeIndex else np.ones((3, int(dim)))
        index.search(queries / 4 if metric == "inner_product" else queries, 5)
        used += 1
    except ValueError as error:
        assert "\\n" not in str(error) and len(str(error)) < 600, str(error)
        refused += 1
print(refused, used)
"""


@pytest.mark.parametrize(
    "name",
    [
        "embeddings/flat/l2",
        "embeddings/ivf_pq/l2",
        "embeddings/hnsw/inner_product",
        "codes/hnsw/hamming",
    ],
)
def test_a_hostile_file_is_refused_in_one_line(name: str, index: Index, tmp_path: Path) -> None:
    """Changed and sealed anew, as whoever can write it can: in a process of its own, which must not crash."""
    path = tmp_path / "index"
    index.save(path)
    command = [
        sys.executable,
        "-c",
        HOSTILE,
        str(path),
        name,
        str(index.identity.dim),
        index.identity.metric,
        "150",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, used = map(int, done.stdout.split())
    assert refused > 30
    assert refused + used == 150


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_refused(damage: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = saved(tmp_path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(
        {
            "cut": whole[:-1],
            "longer": whole + b"x",
            "flipped": bytes(flipped),
            "empty": b"",
            "foreign": b"PK" * 500,
        }[damage]
    )
    with pytest.raises(ValueError, match="not an index, or is damaged or half-written"):
        EmbeddingIndex.load(path, model_version="m1", dim=DIM, metric="l2")


def test_a_save_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    path = saved(tmp_path)
    before = path.read_bytes()

    def no_space(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("faiss.write_index", no_space)
    with pytest.raises(OSError, match="no space"):
        saved(tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def breaking(engine: Any, at_call: int, *, adds_first: bool) -> Any:
    """The engine's add, which breaks off at this call: before it adds, or after."""
    whole, calls = engine.add, []

    def add(items: np.ndarray) -> None:
        calls.append(len(items))
        if len(calls) != at_call:
            return whole(items)
        if adds_first:
            whole(items[:5])
        raise KeyboardInterrupt

    return add


def test_an_add_broken_off_between_batches_keeps_the_whole_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmlstudy.retrieval.index._ROWS_AT_ONCE", 50)
    items = content(name, NUM, 0)
    index = new(name).train(items).add(items[:300], IDS[:300])
    with monkeypatch.context() as patch:
        patch.setattr(index._engine, "add", breaking(index._engine, 3, adds_first=False))
        with pytest.raises(KeyboardInterrupt):
            index.add(items[300:], IDS[300:])
    assert len(index) == 400
    index.add(items[400:], IDS[400:])
    whole = new(name).train(items).add(items, IDS)
    for ours, theirs in zip(index.search(items[::9], 3), whole.search(items[::9], 3), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_index_with_vectors_without_an_id_refuses_to_be_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmlstudy.retrieval.index._ROWS_AT_ONCE", 50)
    items = content(name, NUM, 0)
    index = new(name).train(items).add(items[:100], IDS[:100])
    with monkeypatch.context() as patch:
        patch.setattr(index._engine, "add", breaking(index._engine, 2, adds_first=True))
        with pytest.raises(KeyboardInterrupt):
            index.add(items[100:], IDS[100:])
    refusal = r"holds 155 vectors and 150 ids: an add\(\) was broken off; build it anew, or load"
    with pytest.raises(ValueError, match=refusal):
        index.add(items[200:], IDS[200:])
    with pytest.raises(ValueError, match=refusal):
        index.search(items[:2], 3)
    with pytest.raises(ValueError, match=refusal):
        index.save(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


class Gpus:
    """Two GPUs of no hardware: what is put on one is a clone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.moved: list[str] = []
        self.float16: list[bool] = []
        for known, stand_in in (
            ("GpuParameterSpace", faiss.ParameterSpace),
            ("GpuClonerOptions", types.SimpleNamespace),
        ):
            if not hasattr(faiss, known):  # faiss-cpu
                patch.setattr(faiss, known, stand_in, raising=False)
        patch.setattr(faiss, "StandardGpuResources", lambda: None, raising=False)
        patch.setattr(faiss, "get_num_gpus", lambda: 2)
        patch.setattr(faiss, "index_cpu_to_gpu", self.up, raising=False)
        patch.setattr(faiss, "index_gpu_to_cpu", self.down, raising=False)

    def up(self, resources: Any, number: int, engine: Any, options: Any) -> Any:
        self.moved.append(f"up {number}")
        self.float16.append(options.useFloat16)
        assert getattr(engine, "nprobe", 1) <= 2048  # as GpuIndexIVF.copyFrom has it
        return faiss.clone_index(engine)

    def down(self, engine: Any) -> Any:
        self.moved.append("down")
        return faiss.clone_index(engine)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def test_a_gpu_is_taken_where_there_is_one(gpus: Gpus, tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert gpus.moved == ["up 0", "down"]
    loaded = EmbeddingIndex.load(path, model_version="m1", dim=DIM, metric="l2")
    assert gpus.moved == ["up 0", "down", "up 0"]
    assert loaded.device == "gpu"
    for kind, device in (("flat", "cpu"), ("hnsw", "auto")):
        index = EmbeddingIndex(kind, DIM, model_version="m", device=device)  # type: ignore[arg-type]
        assert index.add(vectors(5, 0), np.arange(5)).device == "cpu"
    assert CodeIndex("flat", 64, model_version="m").device == "cpu"
    assert len(gpus.moved) == 3
    for device in ("gpu:1", "auto:1", "cuda:1"):
        EmbeddingIndex("flat", DIM, model_version="m", device=device).add(vectors(5, 0), np.arange(5))
    assert gpus.moved[3:] == ["up 1"] * 3
    with pytest.raises(ValueError, match="device gpu:2: faiss sees 2 GPU, numbered from 0"):
        EmbeddingIndex("flat", DIM, model_version="m", device="gpu:2")
    with pytest.raises(ValueError, match="device 'tpu': choose from"):
        EmbeddingIndex("flat", DIM, model_version="m", device="tpu")
    with pytest.raises(ValueError, match="hnsw has no GPU form"):
        EmbeddingIndex("hnsw", DIM, model_version="m", device="gpu")


@pytest.mark.parametrize("kind", ["flat", "ivf", "ivf_pq"])
def test_an_index_on_a_gpu_answers_as_one_on_the_cpu(kind: str, gpus: Gpus, tmp_path: Path) -> None:
    """Also where a search asks for other cells than the one before."""
    items, queries = vectors(NUM, 0), vectors(21, 1)
    tuning = Tuning(num_cells=40, num_probes=3, code_bytes=8)
    there, here = (
        EmbeddingIndex(kind, DIM, model_version="m", tuning=tuning, device=device)  # type: ignore[arg-type]
        .train(items)
        .add(items[:500], IDS[:500])
        .add(items[500:], IDS[500:])
        for device in ("gpu", "cpu")
    )
    assert (there.device, here.device) == ("gpu", "cpu")
    for effort in (None, 1, 40, None):
        for ours, theirs in zip(
            there.search(queries, 9, effort=effort), here.search(queries, 9, effort=effort), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    there.save(tmp_path / "index")
    loaded = EmbeddingIndex.load(tmp_path / "index", model_version="m", dim=DIM, metric="l2", device="gpu")
    np.testing.assert_array_equal(loaded.search(queries, 9)[0], here.search(queries, 9)[0])


def test_what_a_gpu_cannot_is_refused_or_stays_on_the_cpu(gpus: Gpus, tmp_path: Path) -> None:
    dim = 320

    def pq(device: str, **options: int) -> EmbeddingIndex:
        tuning = Tuning(num_cells=2, **options)
        return EmbeddingIndex("ivf_pq", dim, model_version="m", tuning=tuning, device=device)  # type: ignore[arg-type]

    for code_bytes in (10, 80, 160):  # no kernel is made for them
        assert pq("auto", code_bytes=code_bytes).device == "cpu"
        with pytest.raises(ValueError, match=f"code_bytes = {code_bytes}: choose from 1, 2, .* device cpu"):
            pq("gpu", code_bytes=code_bytes)
    items = np.random.default_rng(0).normal(size=(300, dim)).astype(np.float32)
    for code_bytes in (4, 40, 64):  # tables of 64 x 256 numbers fit in float16 only
        assert pq("auto", code_bytes=code_bytes).train(items).device == "gpu"
    assert gpus.float16 == [False, False, True]

    assert pq("auto", num_probes=2049).device == "cpu"
    with pytest.raises(ValueError, match="num_probes = 2049: 2048 at most, or take device cpu"):
        pq("gpu", num_probes=2049)
    for kind in ("flat", "ivf"):
        many = np.repeat(vectors(60, 0), 50, axis=0)
        tuning = Tuning(num_cells=4)
        index = EmbeddingIndex(kind, DIM, model_version="m", tuning=tuning).train(many)  # type: ignore[arg-type]
        index.add(many, np.arange(3000))
        assert index.search(many[:1], 2048)[0].shape == (1, 2048)
        with pytest.raises(ValueError, match=r"k = 2049: a GPU takes 2048 at most.* device='cpu'"):
            index.search(many[:1], 2049)
        if kind == "ivf":
            with pytest.raises(ValueError, match=r"effort = 2049: a GPU takes 2048 at most.* device='cpu'"):
                index.search(many[:1], 1, effort=2049)
            on_cpu = EmbeddingIndex(kind, DIM, model_version="m", tuning=tuning, device="cpu").train(many)
            on_cpu.add(many, np.arange(3000)).search(many[:1], 3000, effort=5000)  # faiss keeps the 5000
            on_cpu.save(tmp_path / "index")
            loaded = EmbeddingIndex.load(tmp_path / "index", model_version="m", dim=DIM, metric="l2")
            assert loaded.device == "gpu"
            assert loaded.search(many[:1], 9)[0].shape == (1, 9)


def test_code_books_are_of_the_seed_and_need_their_words() -> None:
    items = vectors(NUM, 0)
    tuning = Tuning(num_cells=1, code_bytes=8)

    def books(seed: int) -> np.ndarray:
        index = EmbeddingIndex("ivf_pq", DIM, model_version="m", tuning=tuning, device="cpu")
        return faiss.vector_to_array(index.train(items, seed=seed)._engine.pq.centroids)

    np.testing.assert_array_equal(books(0), books(0))
    assert (books(0) != books(1)).mean() > 0.5  # of one cell, so that nothing else depends on the seed
    short = EmbeddingIndex("ivf_pq", DIM, model_version="m", tuning=tuning)
    with pytest.raises(
        ValueError, match="255 training vectors for 1 cells and code books of 256 words: needs"
    ):
        short.train(items[:255])
    assert short.train(items[:256]).is_trained


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("kind", ["flat", "ivf", "ivf_pq"])
def test_a_gpu_answers_as_the_cpu_does(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    items, queries, found = vectors(NUM, 0), vectors(20, 1), []
    for device in ("cpu", "gpu"):
        index = EmbeddingIndex(kind, DIM, model_version="m", tuning=TUNING, device=device)  # type: ignore[arg-type]
        index.train(items).add(items, IDS).save(tmp_path / device)
        found.append(index.search(queries, 5, effort=None if kind == "flat" else 8)[0])
        loaded = EmbeddingIndex.load(tmp_path / device, model_version="m", dim=DIM, metric="l2", device="cpu")
        assert (loaded.search(queries, 5)[0] == found[-1]).mean() > 0.95
    assert (found[0] == found[1]).mean() > (0.7 if kind == "ivf_pq" else 0.99)


def test_index_faults_are_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    z = vectors(20, 0)

    def flat(metric: str = "l2") -> EmbeddingIndex:
        return EmbeddingIndex("flat", DIM, model_version="m", metric=metric)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="choose from flat, ivf, ivf_pq, hnsw"):
        EmbeddingIndex("tree", DIM, model_version="m")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose from l2, inner_product"):
        flat("cosine")
    with pytest.raises(ValueError, match="does not divide dim"):
        EmbeddingIndex("ivf_pq", 15, model_version="m")
    with pytest.raises(ValueError, match="num_probes = 0"):
        Tuning(num_probes=0)
    with pytest.raises(ValueError, match="needs train"):
        EmbeddingIndex("ivf", DIM, model_version="m").add(z, np.arange(20))
    with pytest.raises(ValueError, match="20 training vectors for 30 cells: needs 30 at least"):
        EmbeddingIndex("ivf", DIM, model_version="m", tuning=Tuning(num_cells=30)).train(z)
    with pytest.raises(ValueError, match="vector 3 has norm 2: normalise"):
        flat("inner_product").add(z * np.where(np.arange(20) == 3, 2, 1)[:, None], np.arange(20))
    with pytest.raises(ValueError, match="vector 0 has norm nan: not finite"):
        flat().add(np.full((1, DIM), np.nan), np.arange(1))
    with pytest.raises(ValueError, match="dim 16"):
        flat().add(z[:, :4], np.arange(20))
    with pytest.raises(ValueError, match="an id is given twice"):
        flat().add(z, np.zeros(20, np.int64))
    with pytest.raises(ValueError, match="already in the index"):
        flat().add(z, np.arange(20)).add(z, np.arange(20))
    with pytest.raises(ValueError, match="one integer each"):
        flat().add(z, np.arange(20.0))
    with pytest.raises(ValueError, match="5 neighbours of 0 vectors"):
        flat().search(z, 5)
    with pytest.raises(ValueError, match="without vectors"):
        flat().save(tmp_path / "index")
    with pytest.raises(ValueError, match="pack_codes"):
        CodeIndex("flat", 64, model_version="m").add(z, np.arange(20))
    if faiss.get_num_gpus() == 0:
        with pytest.raises(ValueError, match="faiss sees no GPU"):
            EmbeddingIndex("flat", DIM, model_version="m", device="gpu")
