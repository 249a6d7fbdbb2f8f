"""Galleries and search by example: exact against plain loops, re-ranked where the model has a head, faults named."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest
from typer.testing import CliRunner

from dmlstudy import data, embedders, hashing, online
from dmlstudy.cli.app import app
from dmlstudy.files import draft_folder
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files
from dmlstudy.serving import gallery as galleries
from dmlstudy.serving.contact_sheet import Shown, write_sheet
from dmlstudy.serving.embed import EmbedJob, embed_into
from dmlstudy.serving.gallery import Gallery, build, open_gallery
from dmlstudy.serving.retrieve import own_items, retrieve, write_contact_sheet
from dmlstudy.serving.retriever import Layers, Retriever, by_layers

from .conftest import X, embedder


def embedded(model: Path, inputs: Path, folder: Path) -> Path:
    output = folder / "z.parquet"
    embed_into(EmbedJob(str(model), str(inputs), str(output), device="cpu"))
    return output


def made(model: Path, inputs: Path, folder: Path, kind: str = "flat") -> Gallery:
    return build(embedded(model, inputs, folder), folder / "gallery", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["plain", "codes", "learner"])
def test_search_is_the_loop_over_items(
    kind: str, models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    inputs = pictures if kind == "plain" else vectors
    gallery = made(models[kind], inputs, tmp_path)
    queries = of_files(Model.open(models[kind]), inputs)
    z_ND = Model.open(models[kind]).compute(queries.read(range(len(queries)))).astype(np.float64)
    hits = retrieve(Retriever(Model.open(models[kind]), gallery, rerank="none"), queries, 5)
    for query, own in enumerate(hits):
        difference = ((z_ND - z_ND[query]) ** 2).sum(axis=1)
        expected = np.sort(difference / 4 if kind == "codes" else np.sqrt(difference))[:5]
        assert [hit.rank for hit in own] == [1, 2, 3, 4, 5]
        np.testing.assert_allclose([hit.distance for hit in own], expected, atol=1e-5)
        assert own[0].distance == pytest.approx(0, abs=1e-5)
        assert all(hit.id == queries.ids[hit.place] for hit in own)
        assert queries.labels is not None
        assert all(hit.label == queries.labels[hit.place] for hit in own)


@pytest.fixture(scope="module")
def ball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings are points of a ball, from its middle to its rim."""
    folder = tmp_path_factory.mktemp("ball")
    embedder(folder / "model", space="ball", curvature=2.0, clip_radius=3.0)
    return folder / "model"


def test_points_of_a_ball_are_searched_by_hyperbolic_distance(
    ball: Path, pictures: Path, tmp_path: Path
) -> None:
    made(ball, pictures, tmp_path)
    gallery = open_gallery(tmp_path / "gallery", device="cpu")
    assert gallery.curvature == 2.0
    model = Model.open(ball)
    queries = of_files(model, pictures)
    retriever = Retriever(model, gallery)
    assert retriever.measure.distance == "hyperbolic, curvature 2"
    z = model.compute(queries.read(range(len(queries)))).astype(np.float64)
    lambda_N = 1 / (1 - 2 * (z**2).sum(axis=1))
    for query, own in enumerate(retrieve(retriever, queries, 5)):
        a_N = lambda_N * lambda_N[query] * ((z - z[query]) ** 2).sum(axis=1)
        apart_N = 2**0.5 * np.arcsinh(np.sqrt(2 * a_N))
        np.testing.assert_allclose([hit.distance for hit in own], np.sort(apart_N)[:5], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            apart_N[[hit.place for hit in own]], np.sort(apart_N)[:5], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose([hit.score for hit in own], [1 / (1 + hit.distance) for hit in own])


def test_points_of_a_ball_have_no_other_index_and_no_other_distance(
    ball: Path, pictures: Path, tmp_path: Path
) -> None:
    z = embedded(ball, pictures, tmp_path)
    with pytest.raises(
        ValueError, match=r"hnsw is by Euclidean distance, .* points of a ball.*; choose flat"
    ):
        build(z, tmp_path / "gallery", "hnsw")
    gallery = build(z, tmp_path / "gallery")
    flat = dataclasses.replace(gallery, curvature=None)
    with pytest.raises(ValueError, match=r"another distance than its model's \(curvature None, .* 2\.0\)"):
        Retriever(Model.open(ball), flat)
    with pytest.raises(ValueError, match="outside the ball of curvature 2"):
        gallery.search(np.ones((1, 6), np.float32), 3)


def test_structure_puts_them_in_the_querys_order(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["structure"], pictures, tmp_path)
    queries = of_files(Model.open(models["structure"]), pictures)
    retriever = Retriever(Model.open(models["structure"]), gallery, among=12)
    assert retriever.rerank == "structure"
    hits = retrieve(retriever, queries, 4)
    z_ND, omega_ND = embedders.embed_with_structure(
        embedders.load(models["structure"]), queries.read(range(30))
    )
    assert omega_ND is not None
    for query, own in enumerate(hits):
        plain = np.argsort(((z_ND - z_ND[query]) ** 2).sum(axis=1), kind="stable")[:12]
        weighted = (omega_ND[query] * (z_ND[plain] - z_ND[query]) ** 2).sum(axis=1)
        assert [hit.place for hit in own] == plain[np.argsort(weighted, kind="stable")][:4].tolist()
        for hit in own:
            assert hit.distance == pytest.approx(np.linalg.norm(z_ND[hit.place] - z_ND[query]), abs=1e-5)


def test_codes_are_put_in_order_by_weighted_bits(
    models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    gallery = made(models["codes"], vectors, tmp_path)
    queries = of_files(Model.open(models["codes"]), vectors)
    hits = retrieve(Retriever(Model.open(models["codes"]), gallery, rerank="structure"), queries, 30)
    model = hashing.load(models["codes"])
    x_NF = queries.read(range(30))
    z_ND, omega_ND = model.codes(x_NF), model.omega(x_NF)
    for query, own in enumerate(hits):
        weighted = [
            float(omega_ND[query][z_ND[hit.place] != z_ND[query]].astype(np.float64).sum()) for hit in own
        ]
        assert weighted == sorted(weighted)
        assert sorted(hit.place for hit in own) == list(range(30))


def test_layers_put_them_in_the_order_of_their_similarities(
    models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    gallery = made(models["learner"], vectors, tmp_path)
    queries = of_files(Model.open(models["learner"]), vectors)
    retriever = Retriever(Model.open(models["learner"]), gallery, among=30)
    assert retriever.rerank == "layers"
    hits = retrieve(retriever, queries, 30)
    learned = online.load(models["learner"])
    layers = learned.learner.embed(learned.preparation(queries.read(range(30))))
    for query, own in enumerate(hits):
        similarity = np.zeros(30)
        for alpha, f_NE in zip(learned.learner.layer_weights, layers, strict=True):
            distance = np.linalg.norm(f_NE - f_NE[query], axis=1)
            similarity = np.maximum(similarity, alpha * np.exp(-distance / distance.max()))
        found = similarity[[hit.place for hit in own]]
        assert (np.diff(found) <= 1e-6).all()


def test_a_similarity_that_is_no_distance_is_searched_by(vectors: Path, tmp_path: Path) -> None:
    """OASIS embeds queries otherwise than a gallery; with one embedding for both nothing learned would count."""
    learner = online.build("oasis", {}, num_features=10)
    learner.partial_fit(online.Constraints(X.reshape(10, 3, 10)))
    matrix_DD = learner.state()["oasis_similarity"]
    assert not np.allclose(matrix_DD, np.eye(10))
    learned = online.Learned(learner, online.Preparation.of("none", X), "oasis", {})
    online.save(learned, tmp_path / "model", {}, X[:2])
    gallery = made(tmp_path / "model", vectors, tmp_path)
    hits = retrieve(
        Retriever(Model.open(tmp_path / "model"), gallery),
        of_files(Model.open(tmp_path / "model"), vectors),
        30,
    )
    similarity_NN = X.astype(np.float64) @ matrix_DD @ X.T
    for query, own in enumerate(hits):
        found = similarity_NN[query, [hit.place for hit in own]]
        assert (np.diff(found) <= 1e-4).all()
        assert sorted(hit.place for hit in own) == list(range(30))


def test_equal_distances_in_a_layer_weigh_alpha() -> None:
    layers = Layers([1, 1], np.array([0.75, 0.25]))
    gallery = np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 1.0]])
    order = by_layers(np.zeros((1, 2)), gallery, np.array([[1, 2, 0, -1]]), layers)
    assert order.tolist() == [
        [1, 2, 0, -1]
    ]  # the first layer tells them nothing apart, and outweighs the other
    layers = Layers([1, 1], np.array([0.1, 0.9]))
    assert by_layers(np.zeros((1, 2)), gallery, np.array([[1, 2, 0, -1]]), layers).tolist() == [[0, 2, 1, -1]]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_other_indexes_find_the_item_itself(
    kind: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["plain"], pictures, tmp_path, kind)
    queries = of_files(Model.open(models["plain"]), pictures)
    hits = retrieve(Retriever(Model.open(models["plain"]), gallery), queries, 1)
    assert [own[0].place for own in hits] == list(range(30))


def test_a_contact_sheet_shows_what_was_found(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["plain"], pictures, tmp_path)
    queries = of_files(Model.open(models["plain"]), pictures / "class0")
    retriever = Retriever(Model.open(models["plain"]), gallery)
    hits = retrieve(retriever, queries, 3)
    write_contact_sheet(tmp_path / "sheet.html", retriever, queries, hits)
    page = (tmp_path / "sheet.html").read_text()
    assert page.count("<section>") == 10
    assert page.count("<img") == 40
    assert page.count('src="data:image/png;base64,') == 40
    assert "http:" not in page
    assert "https:" not in page
    with pytest.raises(ValueError, match="no such folder; make it or name another output"):
        write_contact_sheet(tmp_path / "none" / "s.html", retriever, queries, hits)


def test_what_is_refused(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    gallery = build(z, tmp_path / "gallery")
    with pytest.raises(ValueError, match="exists already"):
        build(z, tmp_path / "gallery")
    with pytest.raises(ValueError, match="the gallery was made by another model"):
        Retriever(Model.open(models["structure"]), gallery)
    with pytest.raises(ValueError, match="the model has no head for it"):
        Retriever(Model.open(models["plain"]), gallery, rerank="structure")
    with pytest.raises(ValueError, match="queries of size 3, the gallery's are of 6"):
        gallery.search(np.zeros((1, 3), np.float32), 1)
    data.write_embeddings(tmp_path / "bare.parquet", ["a"], None, np.ones((1, 6), np.float32))
    with pytest.raises(ValueError, match="does not say which model made it"):
        build(tmp_path / "bare.parquet", tmp_path / "other")
    (tmp_path / "half.parquet").write_bytes(z.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"half\.parquet: not a readable Parquet file"):
        build(tmp_path / "half.parquet", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (galleries.ABOUT, None, r"gallery\.json: no such file"),
        (galleries.ABOUT, b"{", r"gallery\.json: not understood"),
        (galleries.ABOUT, b'{"format_version": 4}', "format 4, this version reads 3"),
        (
            galleries.ABOUT,
            b'{"format_version": 2, "model": 7, "items": 3, "dim": 6}',
            "not understood .model: ",
        ),
        (galleries.ABOUT, b"[" * 100_000, r"gallery\.json: not understood"),
        (galleries.ABOUT, b"[]", r"gallery\.json: not understood"),
        (galleries.INDEX, b"half", r"index\.faiss: altered since the gallery was made"),
        (galleries.INDEX, None, r"index\.faiss: no such file"),
        (galleries.VECTORS, b"half", r"vectors\.npy: altered since the gallery was made"),
        (galleries.VECTORS, None, r"vectors\.npy: no such file"),
        (galleries.ITEMS, b"half", r"items\.parquet: altered since the gallery was made"),
    ],
)
def test_a_damaged_gallery_is_refused(
    name: str, content: bytes | None, message: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    path = tmp_path / "gallery" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_gallery(tmp_path / "gallery")
    assert "\n" not in str(caught.value)


def test_every_changed_byte_of_a_gallery_is_noticed(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    rng = np.random.default_rng(0)
    for name in galleries.FILES:
        path = tmp_path / "gallery" / name
        whole = path.read_bytes()
        for _ in range(40):
            content = bytearray(whole)
            content[int(rng.integers(len(whole)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{name}: altered since the gallery was made"):
                open_gallery(tmp_path / "gallery")
        path.write_bytes(whole)
    assert open_gallery(tmp_path / "gallery").note == ""


def unsealed(folder: Path) -> None:
    """As an earlier version left it, or one who changes files and takes the digests away."""
    path = folder / galleries.ABOUT
    about = json.loads(path.read_text())
    del about["files"]
    path.write_text(json.dumps({**about, "format_version": 1}))


def test_a_gallery_of_an_earlier_version_is_read_and_says_so(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    gallery = made(models["plain"], pictures, tmp_path)
    unsealed(tmp_path / "gallery")
    again = open_gallery(tmp_path / "gallery")
    assert "made by an earlier version, without digests" in again.note
    assert "\n" not in again.note
    queries = np.asarray(gallery.vectors_MD[:3])
    np.testing.assert_array_equal(again.search(queries, 4)[0], gallery.search(queries, 4)[0])


def refusal(folder: Path) -> str:
    """Why a gallery is not opened; empty where it is."""
    try:
        open_gallery(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_gallery_that_was_changed_and_is_not_sealed_is_refused_in_one_line(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    unsealed(tmp_path / "gallery")
    rng = np.random.default_rng(0)
    refused = 0
    for name in (*galleries.FILES, galleries.ABOUT):
        path = tmp_path / "gallery" / name
        whole = path.read_bytes()
        for number in range(40):
            content = bytearray(whole)
            place = int(rng.integers(min(len(whole), 200) if number % 2 else len(whole)))
            content[place : place + 4] = rng.integers(0, 256, 4, dtype=np.uint8).tobytes()
            path.write_bytes(content[:place] if number % 5 == 0 else content)
            said = refusal(tmp_path / "gallery")
            assert "\n" not in said
            assert len(said) < 700
            refused += said != ""
        path.write_bytes(whole)
    assert refused > 80
    np.save(tmp_path / "gallery" / galleries.VECTORS, np.zeros((30, 6), np.complex64))
    with pytest.raises(ValueError, match=r"complex64 of shape \(30, 6\), expected rows of float32"):
        open_gallery(tmp_path / "gallery")
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 6), }" % 10**24
    (tmp_path / "gallery" / galleries.VECTORS).write_bytes(header.ljust(127) + b"\n")
    with pytest.raises(ValueError, match=r"vectors\.npy: cannot be read"):
        open_gallery(tmp_path / "gallery")


def test_faiss_opens_a_gallerys_index(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    gallery = made(models["plain"], pictures, tmp_path)
    opened_by_faiss = faiss.read_index(str(tmp_path / "gallery" / galleries.INDEX))
    queries = np.asarray(gallery.vectors_MD[:3])
    np.testing.assert_array_equal(opened_by_faiss.search(queries, 4)[1], gallery.search(queries, 4)[0])


KILLED = """
import os, sys
from dmlstudy import data
from dmlstudy.serving import gallery
left = int(sys.argv[3])

def counted(real):
    def call(*args, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return real(*args, **named)
    return call

gallery.embedding_files.write_item_batches = counted(gallery.embedding_files.write_item_batches)
gallery._write_rows = counted(gallery._write_rows)
gallery.sha256 = counted(gallery.sha256)
gallery.put_in_place = counted(gallery.put_in_place)
gallery.build(sys.argv[1], sys.argv[2])
"""


def test_a_kill_leaves_no_half_gallery(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    for number in (1, 5):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, z, tmp_path / "gallery", str(number)], timeout=250
        )
        assert done.returncode == -9
        assert not (tmp_path / "gallery").exists()
    assert len(build(z, tmp_path / "gallery")) == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gallery", "z.parquet"]


def test_two_calls_of_one_folder_do_not_mix(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    """The second is refused while the first is at work, however the first ends; its leavings are cleared away."""
    file = embedded(models["plain"], pictures, tmp_path)
    folder = tmp_path / "gallery"
    with draft_folder(folder) as first:
        (first / "items.parquet").write_bytes(b"of the first")
        with pytest.raises(ValueError, match=r"gallery: is being made by another call; wait for that"):
            build(file, folder)
        assert (first / "items.parquet").read_bytes() == b"of the first"
    assert not first.exists()
    (first / "deep").mkdir(parents=True)
    (first / "deep" / "left.bin").write_bytes(b"by a killed call")
    build(file, folder)
    open_gallery(folder)
    assert not first.exists()
    assert not list(folder.rglob("*left*"))


def test_a_draft_that_took_its_place_is_not_removed_with_the_next_ones(tmp_path: Path) -> None:
    """Whoever ends after another has begun leaves the other's draft alone."""
    with draft_folder(tmp_path / "a") as first:
        first.rename(tmp_path / "a")
        second = draft_folder(tmp_path / "a")
        draft = second.__enter__()
    assert draft.is_dir()
    second.__exit__(None, None, None)
    assert not draft.exists()
    assert (tmp_path / "a").is_dir()


def test_the_index_is_put_where_the_gallery_is_asked_to_be(
    models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(models["plain"], pictures, tmp_path)
    asked = []
    real = galleries.EmbeddingIndex.load.__func__  # type: ignore[attr-defined]

    def load(cls: type, path: Path, *, device: str, **named: object) -> object:
        asked.append(device)
        return real(cls, path, device="cpu", **named)

    monkeypatch.setattr(galleries.EmbeddingIndex, "load", classmethod(load))
    for device in ("auto", "cpu", "cuda", "cuda:1"):
        open_gallery(tmp_path / "gallery", device=device)
    assert asked == ["auto", "cpu", "auto", "auto:1"]


def test_the_querys_own_item_is_left_out(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    gallery = made(models["plain"], pictures, tmp_path)
    retriever = Retriever(Model.open(models["plain"]), gallery)
    queries = of_files(Model.open(models["plain"]), pictures)
    with_own = retrieve(retriever, queries, 6)
    without = retrieve(retriever, queries, 5, is_own=own_items(gallery, pictures, queries))
    for query, (all_of, others) in enumerate(zip(with_own, without, strict=True)):
        assert [hit.rank for hit in others] == [1, 2, 3, 4, 5]
        expected = [hit.place for hit in all_of if hit.place != query]
        assert [hit.place for hit in others] == expected[:5]
    single = sorted((pictures / "class1").iterdir())[2]
    query = of_files(Model.open(models["plain"]), single)
    (own,) = retrieve(retriever, query, 1, is_own=own_items(gallery, single, query))
    assert own[0].id != f"class1/{single.name}"
    below = of_files(Model.open(models["plain"]), pictures / "class1")
    for name, own in zip(
        below.ids,
        retrieve(retriever, below, 30, is_own=own_items(gallery, pictures / "class1", below)),
        strict=True,
    ):
        assert len(own) == 29
        assert f"class1/{name}" not in [hit.id for hit in own]


def test_items_of_a_table_are_known_by_their_ids(
    models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    gallery = made(models["codes"], vectors, tmp_path)
    queries = of_files(Model.open(models["codes"]), vectors)
    hits = retrieve(
        Retriever(Model.open(models["codes"]), gallery),
        queries,
        30,
        is_own=own_items(gallery, vectors, queries),
    )
    assert all(
        len(own) == 29 and hit.id != name for name, own in zip(queries.ids, hits, strict=True) for hit in own
    )


def test_scores_are_larger_for_what_is_nearer(
    models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    for kind in ("plain", "codes", "learner"):
        (tmp_path / kind).mkdir()
        inputs = pictures if kind == "plain" else vectors
        gallery = made(models[kind], inputs, tmp_path / kind)
        queries = of_files(Model.open(models[kind]), inputs)
        z_ND = Model.open(models[kind]).compute(queries.read(range(30))).astype(np.float64)
        for query, own in enumerate(
            retrieve(Retriever(Model.open(models[kind]), gallery, rerank="none"), queries, 30)
        ):
            scores = [hit.score for hit in own]
            assert scores == sorted(scores, reverse=True)
            if kind != "learner":
                unit_ND = z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True)
                cosine = [float(unit_ND[query] @ unit_ND[hit.place]) for hit in own]
                np.testing.assert_allclose(scores, cosine, atol=1e-5)


class Started(html.parser.HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


HOSTILE = (
    "x onload=document.title=1337 y.png",
    "<img src=x onerror=document.title=1337>",
    "\"'><script>document.title=1337</script>",
    "' onmouseover='alert(1)",
)


def hostile_sheet(path: Path) -> None:
    picture = np.zeros((8, 8, 1), np.uint8)
    rows = [(Shown(picture, name), [Shown(picture, f"1. {name} (0.5)", True)]) for name in HOSTILE]
    write_sheet(path, HOSTILE[2], rows)


def test_names_of_files_are_no_markup_of_a_sheet(tmp_path: Path) -> None:
    hostile_sheet(tmp_path / "sheet.html")
    page = (tmp_path / "sheet.html").read_text()
    parsed = Started()
    parsed.feed(page)
    assert {tag for tag, _ in parsed.found} == {
        "html", "head", "meta", "title", "style", "body", "h1", "p", "section", "figure", "img", "figcaption", "b",
    }  # fmt: skip
    for tag, attributes in parsed.found:
        assert set(attributes) <= {
            "html": {"lang"}, "meta": {"charset", "name", "content", "http-equiv"}, "figure": {"class"},
            "img": {"alt", "src"},
        }.get(tag, set())  # fmt: skip
    assert [each["alt"] for tag, each in parsed.found if tag == "img"][::2] == list(HOSTILE)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'none'"
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": policy}) in parsed.found


def test_no_name_of_a_file_runs_in_a_browser(tmp_path: Path, dom: Callable[..., str]) -> None:
    hostile_sheet(tmp_path / "sheet.html")
    shown = dom((tmp_path / "sheet.html").as_uri())
    assert "<title>\"'&gt;&lt;script&gt;document.title=1337&lt;/script&gt;</title>" in shown
    assert shown.count("<script") == 0
    assert shown.count("<img") == 2 * len(HOSTILE)


def test_the_command_leaves_the_querys_own_item_out_and_tells_of_an_old_gallery(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    unsealed(tmp_path / "gallery")
    query = sorted((pictures / "class1").iterdir())[2]
    command = ["retrieve", str(models["plain"]), str(tmp_path / "gallery"), str(query), "-k", "3", "--json"]
    for more, first in ([], f"class1/{query.name}"), (["--exclude-self", "--device", "cpu"], None):
        done = CliRunner().invoke(app, [*command, *more])
        assert done.exit_code == 0, done.output
        assert done.stderr.startswith("note: ")
        hits = [json.loads(line) for line in done.stdout.splitlines()]
        assert [hit["rank"] for hit in hits] == [1, 2, 3]
        assert (hits[0]["id"] == f"class1/{query.name}") == (first is not None)
        assert hits[0]["score"] > hits[2]["score"]


def test_a_gallery_of_fewer_names_than_vectors_is_refused(
    models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    made(models["plain"], pictures, tmp_path)
    path = tmp_path / "gallery" / galleries.ABOUT
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "items": 29}))
    with pytest.raises(ValueError, match="29 items of size 6, but 30 names and vectors of shape"):
        open_gallery(tmp_path / "gallery")
