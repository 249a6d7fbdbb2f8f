"""Tiny folders of each known layout: all layouts of a set give the same data; wrong counts are refused."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import savemat

from dmlstudy import data
from dmlstudy.data import PartSize, pictures
from dmlstudy.data.datasets import TORCHVISION
from dmlstudy.data.layouts import EXPECTED, EXPECTED_CLOSED, Expected

COUNTS: Mapping[str, Expected] = {
    "cub200": {"development": PartSize(2, 4), "test": PartSize(2, 5)},
    "cars196": {"development": PartSize(2, 4), "test": PartSize(2, 5)},
    "sop": {"development": PartSize(2, 4), "test": PartSize(2, 5)},
    "inshop": {"development": PartSize(2, 4), "query": PartSize(2, 2), "gallery": PartSize(2, 3)},
    "inaturalist2018": {"development": PartSize(2, 4), "test": PartSize(2, 5)},
    "omniglot": {"development": PartSize(2, 4), "test": PartSize(2, 5)},
}
OF_CLASS = (0, 0, 1, 1, 2, 2, 3, 3, 3)
"""The class of each of nine pictures; picture i has the grey i * 20 + 5."""


def draw(path: Path, number: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (20 * number + 5,) * 3).save(path.with_suffix(".png"))
    path.with_suffix(".png").rename(path)
    return path.name


def cub_lists(folder: Path) -> None:
    root = folder / "CUB_200_2011"
    names = [f"{c + 1:03}.Bird_{c}/b_{i}.jpg" for i, c in enumerate(OF_CLASS)]
    for i, name in enumerate(names):
        draw(root / "images" / name, i)
    (root / "images.txt").write_text("".join(f"{i + 1} {name}\n" for i, name in enumerate(names)))
    (root / "image_class_labels.txt").write_text(
        "".join(f"{i + 1} {c + 1}\n" for i, c in enumerate(OF_CLASS))
    )


def cub_folders(folder: Path) -> None:
    for i, c in enumerate(OF_CLASS):
        draw(folder / "images" / f"{c + 1:03}.Bird_{c}" / f"b_{i}.jpg", i)


def annotations(path: Path, names: list[str], classes: list[int], column: str, **more: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.zeros(len(names), dtype=[(column, object), ("class", object), *((key, object) for key in more)])
    rows[column], rows["class"] = names, classes
    for key, values in more.items():
        rows[key] = values
    savemat(path, {"annotations": rows})


def cars_annos(folder: Path) -> None:
    names = [draw(folder / "car_ims" / f"{i:06}.jpg", i) for i in range(9)]
    annotations(
        folder / "cars_annos.mat", [f"car_ims/{n}" for n in names], [c + 1 for c in OF_CLASS], "relative_im_path",
        test=[i % 2 for i in range(9)],
    )  # fmt: skip


def cars_devkit(folder: Path) -> None:
    for side, ids, annos in (
        ("cars_train", range(0, 9, 2), "devkit/cars_train_annos.mat"),
        ("cars_test", range(1, 9, 2), "cars_test_annos_withlabels.mat"),
    ):
        names = [draw(folder / side / f"{i:05}.jpg", i) for i in ids]
        annotations(folder / annos, names, [OF_CLASS[i] + 1 for i in ids], "fname")


def cars_kaggle(folder: Path) -> None:
    names = ["Zeta 2012", "Ram C/V Cargo Van 2012", "Beta 2011", "Alpha 2010"]  # not in alphabetical order
    with (folder / "names.csv").open("w", newline="") as file:
        csv.writer(file).writerows([name] for name in names)
    for i, c in enumerate(OF_CLASS):
        draw(
            folder / "car_data/car_data" / ("train", "test")[i % 2] / names[c].replace("/", "-") / f"{i}.jpg",
            i,
        )


def sop(folder: Path) -> None:
    root = folder / "Stanford_Online_Products"
    for name, ids in (("Ebay_train.txt", range(4)), ("Ebay_test.txt", range(4, 9))):
        lines = ["image_id class_id super_class_id path"]
        for i in ids:
            draw(root / "bicycle_final" / f"11{i}.JPG", i)
            lines.append(f"{i + 1} {OF_CLASS[i] + 1} 1 bicycle_final/11{i}.JPG")
        (root / name).write_text("\n".join(lines) + "\n")


def inshop(folder: Path, pictures: str = "Img", lists: str = "Eval") -> None:
    status = ["train"] * 4 + ["query", "gallery", "gallery", "query", "gallery"]
    lines = ["9", "image_name item_id evaluation_status"]
    for i, c in enumerate(OF_CLASS):
        draw(folder / pictures / "img/WOMEN" / f"id_{c}" / f"{i}.jpg", i)
        lines.append(f"img/WOMEN/id_{c}/{i}.jpg   id_{c}   {status[i]}")
    (folder / lists).mkdir(exist_ok=True)
    (folder / lists / "list_eval_partition.txt").write_text("\n".join(lines))


def inshop_flat(folder: Path) -> None:
    inshop(folder, "", "")


def inaturalist(folder: Path, lists: str = "") -> None:
    for name, ids in (("train", range(4)), ("test", range(4, 9))):
        entries = [f"train_val2018/Aves/{OF_CLASS[i] + 4000}/{i}.jpg" for i in ids]
        for i, entry in zip(ids, entries, strict=True):
            draw(folder / entry, i)
        (folder / lists).mkdir(exist_ok=True)
        (folder / lists / f"Inaturalist_{name}_set1.txt").write_text("\n".join(entries) + "\n")


def inaturalist_splits(folder: Path) -> None:
    inaturalist(folder, "Inat_dataset_splits")


def omniglot(folder: Path) -> None:
    for i, c in enumerate(OF_CLASS):
        side = "images_background" if c < 2 else "images_evaluation"
        draw(folder / "omniglot-py" / side / "Greek" / f"character{c:02}" / f"{i}.png", i)


LAYOUTS: list[tuple[str, Callable[[Path], None]]] = [
    ("cub200", cub_lists),
    ("cub200", cub_folders),
    ("cars196", cars_annos),
    ("cars196", cars_devkit),
    ("cars196", cars_kaggle),
    ("sop", sop),
    ("inshop", inshop),
    ("inshop", inshop_flat),
    ("inaturalist2018", inaturalist),
    ("inaturalist2018", inaturalist_splits),
    ("omniglot", omniglot),
]
IDS = [layout.__name__ for _, layout in LAYOUTS]


def greys(images: data.LabelledImages) -> list[tuple[int, int]]:
    """(grey, class) of each picture."""
    seen = images.read(np.arange(len(images)))
    return sorted(zip(seen[:, 0, 0, 0].tolist(), images.labels_N.tolist(), strict=True))


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=IDS)
def test_every_picture_has_its_class_and_side(
    name: str, layout: Callable[[Path], None], tmp_path: Path
) -> None:
    layout(tmp_path)
    for where in [
        tmp_path,
        *(p for p in tmp_path.iterdir() if p.name in ("CUB_200_2011", "Stanford_Online_Products")),
    ]:
        found = data.load(name, str(where), 4, expected=COUNTS)
        assert greys(found.development) == [(20 * i + 5, OF_CLASS[i]) for i in range(4)]
        assert greys(found.test) == [(20 * i + 5, OF_CLASS[i] - 2) for i in range(4, 9)]
        if name == "inshop":
            assert found.test_query is not None
            assert found.test_gallery is not None
            grey_N = found.test.read(np.arange(5))[:, 0, 0, 0]
            assert grey_N[found.test_query].tolist() == [85, 145]
            assert grey_N[found.test_gallery].tolist() == [105, 125, 165]
        else:
            assert found.test_query is None


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=IDS)
def test_counts_that_differ_are_refused(name: str, layout: Callable[[Path], None], tmp_path: Path) -> None:
    layout(tmp_path)
    part = "gallery" if name == "inshop" else "test"
    wrong = COUNTS[name][part]._replace(images=7)
    with pytest.raises(
        ValueError, match=rf"{name} has 2 {part} classes with 7 images, this folder 2 with \d"
    ):
        data.load(name, str(tmp_path), 4, expected={name: {**COUNTS[name], part: wrong}})
    with pytest.raises(ValueError, match=rf"{name} has \d+ development classes .*, this folder \d with \d"):
        data.load(name, str(tmp_path), 4)


@pytest.mark.parametrize(
    ("name", "layout"), [x for x in LAYOUTS if x[1] not in (cub_folders, cars_kaggle, omniglot)]
)
def test_a_listed_picture_that_is_missing_is_named(
    name: str, layout: Callable[[Path], None], tmp_path: Path
) -> None:
    layout(tmp_path)
    lost = sorted(p for p in tmp_path.rglob("*") if p.suffix.lower() == ".jpg")[3]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"{lost.name}: {name} lists this picture"):
        data.load(name, str(tmp_path), 4, expected=COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_a_folder_of_no_layout_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"no layout of|this folder 0 with 0"):
        data.load(name, str(tmp_path), 4, expected=COUNTS)


def test_in_shop_needs_the_list_of_its_queries(tmp_path: Path) -> None:
    """Parquet has no way to say what is a query; it is no substitute, and no hindrance where the list is there."""
    row = {"img": {"bytes": b"x", "path": None}, "label": 0}
    for side in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{side}.parquet")
    with pytest.raises(
        ValueError, match=r"no layout of inshop.*list_eval_partition\.txt .*which says what is query"
    ):
        data.load("inshop", str(tmp_path), 4, expected=COUNTS)
    inshop(tmp_path)
    assert data.load("inshop", str(tmp_path), 4, expected=COUNTS).test_query is not None


def test_lists_that_are_damaged_are_named(tmp_path: Path) -> None:
    cars_annos(tmp_path)
    (tmp_path / "cars_annos.mat").write_bytes(b"MATLAB 5.0, or not")
    with pytest.raises(ValueError, match=r"cars_annos\.mat: not a MATLAB file"):
        data.load("cars196", str(tmp_path), 4, expected=COUNTS)
    sop(tmp_path)
    (tmp_path / "Stanford_Online_Products" / "Ebay_test.txt").write_text("header\n1 2 3\n")
    with pytest.raises(ValueError, match=r"Ebay_test\.txt, line 2: 3 words, expected 4"):
        data.load("sop", str(tmp_path), 4, expected=COUNTS)


PUBLISHED = """
cub200           development    100   5864   test     100   5924
cars196          development     98   8054   test      98   8131
sop              development  11318  59551   test   11316  60502
inshop           development   3997  25882   query   3985  14218   gallery  3985  12612
inaturalist2018  development   5690 325846   test    2452 136093
omniglot         development    964  19280   test     659  13180
market1501       development    751  12936   query    750   3368   gallery   751  15913
msmt17           development   1041  32621   query   3060  11659   gallery  3060  82161
veri776          development    576  37778   query    200   1678   gallery   200  11579
cifar10          development      5  30000   test       5  30000
cifar100         development     50  30000   test      50  30000
mnist            development      5  35735   test       5  34265
fashion_mnist    development      5  35000   test       5  35000
kmnist           development      5  35000   test       5  35000
emnist           development     24  67200   test      23  64400
"""
PUBLISHED_CLOSED = """
cifar10          training        10  50000   test      10  10000
cifar100         training       100  50000   test     100  10000
mnist            training        10  60000   test      10  10000
fashion_mnist    training        10  60000   test      10  10000
kmnist           training        10  60000   test      10  10000
emnist           training        47 112800   test      47  18800
flickr25k        concepts        24  25000
nuswide21        concepts        21 195834
"""
"""The table of data/README.md, where a set is there, else what its authors publish; see ``EXPECTED`` of NUS-WIDE."""


@pytest.mark.parametrize(("table", "expected"), [(PUBLISHED, EXPECTED), (PUBLISHED_CLOSED, EXPECTED_CLOSED)])
def test_published_counts(table: str, expected: Mapping[str, Expected]) -> None:
    published = {}
    for name, *words in map(str.split, table.strip().splitlines()):
        published[name] = {
            part: PartSize(int(classes), int(images))
            for part, classes, images in zip(words[::3], words[1::3], words[2::3], strict=True)
        }
    assert expected == published


def test_both_cuts_of_a_set_have_the_same_images() -> None:
    """Two tables that were written apart: classes cut in half, and the authors' training and test images."""
    both = EXPECTED.keys() & EXPECTED_CLOSED.keys()
    assert both == set(TORCHVISION)
    for name in both:
        zero_shot, closed = EXPECTED[name], EXPECTED_CLOSED[name]
        images = [sum(part.images for part in parts.values()) for parts in (zero_shot, closed)]
        assert images[0] == images[1], name
        assert sum(part.classes for part in zero_shot.values()) == closed["training"].classes, name


@pytest.mark.needs("data")
@pytest.mark.parametrize("name", ["omniglot", "cifar10"])
def test_real_data_have_the_published_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)  # so that 60,000 pictures need not be decoded
    found = data.load(name, str(Path(os.environ["DMLSTUDY_TEST_DATA"]) / name), 8)
    for images, counts in zip((found.development, found.test), EXPECTED[name].values(), strict=True):
        assert (len(images.class_names), len(images)) == counts
        assert images.read(np.arange(3)).std() > 10


def test_torchvision_s_own_files(tmp_path: Path) -> None:
    """Fashion-MNIST as torchvision unpacks it, in small; and where it is not, the command that gets it."""
    with pytest.raises(ValueError, match=r"does not hold fashion_mnist.*FashionMNIST\(.*download=True\)"):
        data.load("fashion_mnist", str(tmp_path))
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for side, count in (("train", 30), ("t10k", 10)):
        pixels = np.arange(count, dtype=np.uint8).repeat(28 * 28).reshape(count, 28, 28)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        (raw / f"{side}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (raw / f"{side}-labels-idx1-ubyte").write_bytes(
            np.array([0x801, count], ">i4").tobytes() + labels.tobytes()
        )
    small = {"fashion_mnist": {"development": PartSize(5, 20), "test": PartSize(5, 20)}}
    found = data.load("fashion_mnist", str(tmp_path), expected=small)
    assert found.development.image_shape == (28, 28, 1)
    assert found.test.class_names[0] == "Sandal"
    pixel_N = found.test.read(np.arange(20))[:, 3, 3, 0]
    np.testing.assert_array_equal(pixel_N % 10 - 5, found.test.labels_N)
    with pytest.raises(ValueError, match=r"35000 images, this folder 5 with 20"):
        data.load("fashion_mnist", str(tmp_path))
