"""Embedding on Ray: parts by several processes are those of one, and the Ray that was started here ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmlstudy import data
from dmlstudy.records import ResourcesConfig
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files
from dmlstudy.serving import embed
from dmlstudy.serving.embed import EmbedJob, embed_into

on_ray = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # those of Ray's own modules, which are imported in this process
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("auto", [{"CPU": 8.0}], ("cpu", 0)),
        ("auto", [{"CPU": 8.0, "GPU": 2.0}], ("cuda", 1)),
        ("auto", [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}], ("cuda", 1)),
        ("cuda", [{"CPU": 8.0, "GPU": 2.0}], ("cuda", 1)),
        ("cpu", [{"CPU": 8.0, "GPU": 2.0}], ("cpu", 0)),
        (
            "auto",
            [{"CPU": 8.0, "GPU": 1.0}],
            "--workers 2: each takes a GPU and 1 CPU, of which the cluster has 1 GPU",
        ),
        (
            "cuda",
            [{"CPU": 8.0}],
            "--workers 2: each takes a GPU .* has 0 GPU; set --workers lower, or --device cpu",
        ),
    ],
)
def test_each_process_has_a_gpu_of_its_own_where_there_are_gpus(
    device: str,
    nodes: list[dict[str, float]],
    expected: tuple[str, int] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On what a cluster tells of itself; no GPU is used here."""
    from dmlstudy.engine import cluster
    from dmlstudy.engine.embed_on_ray import placed

    monkeypatch.setattr(cluster, "_nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "_ceiling", list)
    resources = ResourcesConfig(workers=2)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            placed(device, resources)
        return
    found, own = placed(device, resources)
    assert (found, own.gpus_per_worker, own.workers) == (*expected, 2)


def marked(test: Callable[..., None]) -> Callable[..., None]:
    for mark in on_ray:
        test = mark(test)
    return test


@marked
def test_parts_by_two_processes_are_those_of_one(models: dict[str, Path], tmp_path: Path) -> None:
    import ray

    from dmlstudy.engine.embed_on_ray import on_cluster

    num = 2 * embed.PART + 1
    x_NF = np.random.default_rng(0).normal(size=(num, 10)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x_NF, y=np.arange(num) % 7)
    output = tmp_path / "z.parquet"
    job = EmbedJob(str(models["codes"]), str(tmp_path / "x.npz"), str(output), device="cpu")
    told: list[int] = []

    def follow(parts: object, number: int) -> list[int]:
        told.extend(parts)  # type: ignore[call-overload]
        assert number == len(job.parts) >= 2
        return told

    run = on_cluster(None, ResourcesConfig(workers=2, cpus_per_worker=0.5))
    assert embed_into(job, run, follow)[:3] == (num, 16, [])
    assert sorted(told) == list(range(len(job.parts)))
    assert not ray.is_initialized()
    ids, labels, z_ND = data.read_embeddings(output)
    items = of_files(Model.open(models["codes"]), tmp_path / "x.npz")
    assert (ids, labels) == (list(items.ids), items.labels)
    np.testing.assert_array_equal(z_ND, Model.open(models["codes"]).compute(x_NF))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "z.parquet"]


@marked
def test_what_a_process_refuses_is_told_and_the_parts_that_are_there_stay(
    models: dict[str, Path], tmp_path: Path
) -> None:
    import ray

    from dmlstudy.engine.embed_on_ray import on_cluster

    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"no picture")
    job = EmbedJob(
        str(models["plain"]), str(tmp_path / "pictures"), str(tmp_path / "z.parquet"), device="cpu"
    )
    with pytest.raises(ValueError, match=r"a\.png: not a readable image") as caught:
        embed_into(job, on_cluster(None, ResourcesConfig(workers=1, cpus_per_worker=0.5)))
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()
    assert not (tmp_path / "z.parquet").exists()
