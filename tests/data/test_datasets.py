"""Data sets by name and images of any origin: exact counts, disjoint classes, and faults in the input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data.images import Fit, with_channels

CHARACTERS = Path(__file__).resolve().parents[2] / "search_spaces" / "characters"


def picture(seed: int, shape: tuple[int, ...] = (6, 6)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def png(seed: int, shape: tuple[int, ...] = (6, 6)) -> bytes:
    import io

    buffer = io.BytesIO()
    picture(seed, shape).save(buffer, "png")
    return buffer.getvalue()


def write_hf(path: Path, labels: list[int] | None, seed: int = 0, names: list[str] | None = None) -> None:
    num = 4 if labels is None else len(labels)
    columns = {"image": [{"bytes": png(seed + i), "path": f"{seed + i}.png"} for i in range(num)]}
    table = pa.table(columns if labels is None else columns | {"label": labels})
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, path, row_group_size=3)


def write_classes(folder: Path, names: str, images: int = 2, offset: int = 0) -> None:
    for c, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(images):
            picture(offset + 100 * c + i).save(folder / name / f"{i}.png")


def test_digits_are_cut_by_class() -> None:
    digits = data.load("digits")
    assert digits.development.images_NHWC.shape == (901, 8, 8, 1)
    assert digits.test.images_NHWC.shape == (896, 8, 8, 1)
    assert digits.development.class_names == tuple("01234")
    assert digits.test.class_names == tuple("56789")
    assert digits.development.images_NHWC.max() == 255
    assert set(np.unique(digits.test.labels_N)) == set(range(5))
    assert digits.num_shared_images == 0
    assert data.load("digits", None, 16).test.images_NHWC.shape == (896, 16, 16, 1)


def test_fingerprint_sees_pixels_labels_and_shapes() -> None:
    images = data.load("digits").test
    pixels = images.images_NHWC.copy()
    pixels[3, 2, 2, 0] ^= 1
    labels = images.labels_N.copy()
    labels[0] = (labels[0] + 1) % 5
    wide = images.images_NHWC.reshape(-1, 4, 16, 1)
    variants = [
        images,
        data.ImageSet(pixels, images.labels_N, images.class_names),
        data.ImageSet(images.images_NHWC, labels, images.class_names),
        data.ImageSet(wide, images.labels_N, images.class_names),
    ]
    assert len({v.fingerprint() for v in variants}) == 4
    assert images.fingerprint() == data.load("digits").test.fingerprint()


def test_of_classes_renumbers_in_the_given_order_and_select_does_not() -> None:
    images = data.load("digits").test
    chosen = images.of_classes([3, 1])
    assert chosen.class_names == ("8", "6")
    assert len(chosen) == np.isin(images.labels_N, [1, 3]).sum()
    np.testing.assert_array_equal(
        chosen.images_NHWC[chosen.labels_N == 0], images.images_NHWC[images.labels_N == 3]
    )
    some = images.select(np.array([5, 0]))
    assert some.class_names == images.class_names
    np.testing.assert_array_equal(some.labels_N, images.labels_N[[5, 0]])


def test_image_folder_halves_the_sorted_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, "dbeca")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    folder = data.load("image_folder", str(tmp_path))
    assert folder.development.class_names == ("a", "b", "c")
    assert folder.test.class_names == ("d", "e")
    assert folder.development.images_NHWC.shape == (6, 6, 6, 1)
    np.testing.assert_array_equal(folder.test.labels_N, [0, 0, 1, 1])
    np.testing.assert_array_equal(folder.test.images_NHWC[0, ..., 0], np.asarray(picture(0)))


def test_image_folder_with_train_and_test(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", "xyz")
    write_classes(tmp_path / "test", "ab")  # the same pictures: a leak that has to be seen
    folder = data.load("image_folder", str(tmp_path))
    assert folder.development.class_names == ("x", "y", "z")
    assert folder.test.class_names == ("a", "b")
    assert folder.num_shared_images == 4


def test_shared_images_are_counted_not_hidden() -> None:
    images = data.load("digits").test
    twice = data.ZeroShotData("x", images.of_classes([0, 1]), images.of_classes([2, 3]))
    assert twice.num_shared_images == 0
    renamed = data.ImageSet(images.images_NHWC[:7], images.labels_N[:7], tuple("abcde"))
    assert data.ZeroShotData("x", images, renamed).num_shared_images == 7


def test_images_of_two_development_classes_may_be_on_both_sides_of_a_fold() -> None:
    digits = data.load("digits")
    assert digits.num_shared_between_folds == 0
    images_NHWC, labels_N = digits.development.images_NHWC.copy(), digits.development.labels_N
    zeros, ones = np.flatnonzero(labels_N == 0), np.flatnonzero(labels_N == 1)
    images_NHWC[zeros[:2]] = images_NHWC[zeros[0]]  # twice in one class: always on one side
    images_NHWC[ones[:3]] = images_NHWC[zeros[5]]
    changed = data.ImageSet(images_NHWC, labels_N, digits.development.class_names)
    assert data.ZeroShotData("x", changed, digits.test).num_shared_between_folds == 4


def test_the_fingerprint_of_a_side_sees_who_is_query_and_gallery() -> None:
    digits = data.load("digits")
    assert digits.development_fingerprint == digits.development.fingerprint()
    assert digits.test_fingerprint == digits.test.fingerprint()
    query, gallery = np.arange(100), np.arange(50, 896)
    variants = [
        data.ZeroShotData("x", digits.development, digits.test, *roles)
        for roles in (
            (None, None),
            (query, gallery),
            (query[:-1], gallery),
            (query, gallery[1:]),
            (gallery, query),
        )
    ]
    assert len({each.test_fingerprint for each in variants}) == 5
    assert {each.development_fingerprint for each in variants} == {digits.development.fingerprint()}


def test_zero_shot_data_refuses_a_shared_class() -> None:
    images = data.load("digits").test
    with pytest.raises(ValueError, match="classes are in development and test, as '7'"):
        data.ZeroShotData("x", images.of_classes([0, 1, 2]), images.of_classes([2, 3]))


def test_parquet_pair_that_shares_classes_is_cut_by_class(tmp_path: Path) -> None:
    names = ["ant", "bee", "cat", "dog"]
    write_hf(tmp_path / "train.parquet", [3, 2, 1, 0, 3], names=names)
    write_hf(tmp_path / "test.parquet", [0, 1, 2, 3], seed=50, names=names)
    pair = data.load("hf_parquet", str(tmp_path))
    assert pair.development.class_names == ("ant", "bee")
    assert pair.test.class_names == ("cat", "dog")
    assert (len(pair.development), len(pair.test)) == (4, 5)
    np.testing.assert_array_equal(pair.test.labels_N, [1, 0, 1, 0, 1])


def test_parquet_pair_of_class_ids_alone_is_cut_only_if_the_ids_are_the_same(tmp_path: Path) -> None:
    write_hf(tmp_path / "train.parquet", [7, 5, 9, 12, 7])
    write_hf(tmp_path / "test.parquet", [12, 9, 5, 7], seed=50)
    pair = data.load("hf_parquet", str(tmp_path))
    assert (pair.development.class_names, pair.test.class_names) == (("5", "7"), ("9", "12"))
    write_hf(tmp_path / "test.parquet", [0, 1, 5, 12], seed=50)
    with pytest.raises(
        ValueError,
        match=r"2 of 4 training and 4 test classes are in both splits, as '5'; give the splits other",
    ):
        data.load("hf_parquet", str(tmp_path))


def test_splits_that_share_some_classes_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", "abcd")
    write_classes(tmp_path / "test", "defg", offset=500)
    with pytest.raises(ValueError, match=r"1 of 4 training and 4 test classes are in both splits, as 'd'"):
        data.load("image_folder", str(tmp_path))
    (tmp_path / "test" / "d").rename(tmp_path / "test" / "h")
    assert data.load("image_folder", str(tmp_path)).test.class_names == ("e", "f", "g", "h")


def test_parquet_splits_of_which_one_names_its_classes_are_refused(tmp_path: Path) -> None:
    write_hf(tmp_path / "train.parquet", [0, 1], names=["ant", "bee", "cat", "dog"])
    write_hf(tmp_path / "test.parquet", [0, 1], seed=50)
    complaint = "train has class names in its metadata, test has ids alone; write both with names"
    for load in (data.load, data.load_closed):
        with pytest.raises(ValueError, match=complaint):
            load("hf_parquet", str(tmp_path))
    write_hf(tmp_path / "test.parquet", [2, 3], seed=50, names=["ant", "bee", "cat", "dog"])
    assert data.load("hf_parquet", str(tmp_path)).test.class_names == ("cat", "dog")


def test_parquet_one_file_and_numbered_parts(tmp_path: Path) -> None:
    write_hf(tmp_path / "all.parquet", [7, 7, 5, 5, 9, 9, 12])
    one = data.load("hf_parquet", str(tmp_path / "all.parquet"))
    assert one.development.class_names == ("5", "7")
    assert one.test.class_names == ("9", "12")  # by class id, not by spelling
    write_hf(tmp_path / "train-00000-of-00002.parquet", [0, 1])
    write_hf(tmp_path / "train-00001-of-00002.parquet", [2, 0], seed=10)
    write_hf(tmp_path / "test-00000-of-00001.parquet", [3, 4], seed=20)
    parts = data.load("hf_parquet", str(tmp_path))
    assert (len(parts.development), len(parts.test)) == (4, 2)


def test_parts_have_to_be_all_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_hf(tmp_path / "data" / "test-00000-of-00001-0a1b2c.parquet", [3, 4], seed=20)
    first, second = (tmp_path / "data" / f"train-0000{i}-of-00002-0a1b2c.parquet" for i in (0, 1))
    write_hf(first, [0, 1])
    write_hf(second, [2, 0], seed=10)
    assert len(data.load("hf_parquet", str(tmp_path)).development) == 4
    for lost in (first, second):
        content = lost.read_bytes()
        lost.unlink()
        name = lost.name.removesuffix("-0a1b2c.parquet")
        for load in (data.load, data.load_closed):
            with pytest.raises(
                ValueError, match=rf"1 of 2 parts of train, without {name}\.parquet; get all parts"
            ):
                load("hf_parquet", str(tmp_path))
        lost.write_bytes(content)
    extra = tmp_path / "data" / "train-00000-of-00002-f00.parquet"
    write_hf(extra, [5, 6])
    with pytest.raises(
        ValueError, match=r"3 files for 2 parts of train \(train-00000.*f00.*keep one of each"
    ):
        data.load("hf_parquet", str(tmp_path))
    extra.rename(tmp_path / "data" / "train-00000-of-00003.parquet")
    with pytest.raises(
        ValueError, match=r"3 files for 2 parts of train \(train-00000.* train-00000-of-00003"
    ):
        data.load("hf_parquet", str(tmp_path))


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'digits'\? known are: digits, image_folder"):
        data.load("digit")


@pytest.mark.parametrize("name", ["image_folder", "hf_parquet"])
def test_missing_folder_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "p.tar").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"p\.tar is a file; shards needs a folder, of an archive the one that it"
    ):
        data.load("shards", str(tmp_path / "p.tar"))
    (tmp_path / "p.tar").unlink()
    with pytest.raises(ValueError, match="nowhere does not exist"):
        data.load(name, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"set data\.path"):
        data.load(name)
    with pytest.raises(ValueError, match=r"no train\.parquet|0 class folders"):
        data.load(name, str(tmp_path))


def test_corrupt_image_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path, "abcd")
    broken = tmp_path / "b" / "1.png"
    broken.write_bytes(broken.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"b/1\.png: not a readable image"):
        data.load("image_folder", str(tmp_path))
    broken.write_bytes(b"")
    items = data.open_images(tmp_path, Fit(), 1)
    with pytest.raises(ValueError, match=r"b/1\.png: not a readable image"):
        items.read(range(len(items)))


def test_sizes_that_differ_need_image_size(tmp_path: Path) -> None:
    write_classes(tmp_path, "abcd")
    picture(0, (9, 5)).save(tmp_path / "c" / "0.png")
    with pytest.raises(ValueError, match=r"c/0\.png: image is \(9, 5\).*set data\.image_size"):
        data.load("image_folder", str(tmp_path))
    assert data.load("image_folder", str(tmp_path), 8).test.images_NHWC.shape == (4, 8, 8, 1)


def test_one_colour_image_makes_all_rgb(tmp_path: Path) -> None:
    write_classes(tmp_path, "abcd")
    picture(0, (6, 6, 3)).save(tmp_path / "b" / "0.png")
    folder = data.load("image_folder", str(tmp_path))
    assert folder.development.images_NHWC.shape == (4, 6, 6, 3)
    grey = folder.development.images_NHWC[0]
    np.testing.assert_array_equal(grey[..., 0], np.asarray(picture(0)))
    np.testing.assert_array_equal(grey[..., 0], grey[..., 2])


def test_parquet_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable Parquet"):
        data.load("hf_parquet", str(path))
    pq.write_table(pa.table({"image": [{"bytes": b"junk", "path": "p"}], "label": [0]}), path)
    with pytest.raises(ValueError, match=r"x\.parquet, row 0: not a readable image"):
        data.load("hf_parquet", str(path))
    pq.write_table(pa.table({"pixels": [1], "label": [0]}), path)
    with pytest.raises(ValueError, match="no column image or img"):
        data.load("hf_parquet", str(path))
    write_hf(path, None)
    with pytest.raises(ValueError, match="no column label"):
        data.load("hf_parquet", str(path))
    write_hf(path, [0, -1])
    with pytest.raises(ValueError, match="row 1: label is -1"):
        data.load("hf_parquet", str(path))


def test_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_hf(path, list(range(8)))
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"x\.parquet"):
        data.load("hf_parquet", str(path))


def test_luma_is_pillows() -> None:
    rgb = np.asarray(picture(0, (20, 20, 3)))
    np.testing.assert_array_equal(
        with_channels(rgb[None], 1)[0, ..., 0], np.asarray(Image.fromarray(rgb).convert("L"))
    )


@pytest.mark.parametrize("labels", [["a", "b", "a"], None])
def test_embeddings_round_trip(labels: list[str] | None, tmp_path: Path) -> None:
    z = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    path = tmp_path / "z.parquet"
    data.write_embeddings(path, ["x", "y", "w"], labels, z)
    ids, read_labels, read_z = data.read_embeddings(path)
    assert (ids, read_labels) == (["x", "y", "w"], labels)
    np.testing.assert_array_equal(read_z, z)
    assert read_z.dtype == np.float32
    assert pq.read_schema(path).field("embedding").type == pa.list_(pa.float32(), 5)


def test_embeddings_faults_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.ones((2, 3), np.float32)
    path = tmp_path / "z.parquet"
    data.write_embeddings(path, ["x", "y"], None, z)

    def torn(table: pa.Table, draft: Path) -> None:
        draft.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", torn)
        with pytest.raises(OSError, match="disk full"):
            data.write_embeddings(path, ["x", "y"], None, 2 * z)
    assert [p.name for p in tmp_path.iterdir()] == ["z.parquet"]
    np.testing.assert_array_equal(data.read_embeddings(path)[2], z)

    with pytest.raises(ValueError, match="1 ids"):
        data.write_embeddings(path, ["x"], None, z)
    with pytest.raises(ValueError, match="does not exist; create it first"):
        data.write_embeddings(tmp_path / "no" / "z.parquet", ["x", "y"], None, z)
    with pytest.raises(ValueError, match="no such file"):
        data.read_embeddings(tmp_path / "no.parquet")
    with pytest.raises(ValueError, match="is a folder; name a file that `dmlstudy embed` wrote"):
        data.read_embeddings(tmp_path)
    write_hf(tmp_path / "x.parquet", [0, 1])
    for table, has in (
        (None, "image struct"),
        ({"id": ["a"], "label": ["x"], "embedding": [[1.0]]}, "embedding list<element: double>$"),
    ):
        if table is not None:
            pq.write_table(pa.table(table), tmp_path / "x.parquet")
        with pytest.raises(ValueError, match=f"embedding, a list of fixed size; it has .*{has}"):
            data.read_embeddings(tmp_path / "x.parquet")


def test_digits_are_scikit_learn_s() -> None:
    """The file is read without the library; the library reads the same."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch, found = load_digits(), data.load("digits")
    for part, is_its in ((found.development, bunch.target < 5), (found.test, bunch.target >= 5)):
        np.testing.assert_array_equal(part.images_NHWC[..., 0], np.round(bunch.images[is_its] * 255 / 16))
        names = [part.class_names[label] for label in part.labels_N]
        assert names == [str(label) for label in bunch.target[is_its]]


def test_the_quickstart_s_characters_lie_in_the_repository() -> None:
    """200 characters to learn from and 100 others, 20 drawings each; ink is dark on white, as in Omniglot."""
    found = data.load("hf_parquet", str(CHARACTERS), 28)
    for side, count in ((found.development, 200), (found.test, 100)):
        assert np.bincount(side.labels_N).tolist() == [20] * count
        images_NHWC = side.read(np.arange(0, len(side), 10))
        assert images_NHWC.shape[1:] == (28, 28, 1)
        assert np.median(images_NHWC) == 255
        assert images_NHWC.min(axis=(1, 2, 3)).max() < 140
    assert found.num_shared_images == 0
