"""Layouts of re-identification: identities, cameras, junk and distractors; published counts; cameras in general."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import PartSize

MARKET = {
    "development": PartSize(2, 4),
    "query": PartSize(2, 2),
    "gallery": PartSize(3, 5),
}
OTHERS = MARKET | {"gallery": PartSize(2, 4)}
COUNTS = {"market1501": MARKET, "veri776": OTHERS, "msmt17": OTHERS}


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 8), (shade, 0, 255 - shade)).save(path)


def write_market(root: Path) -> None:
    for shade, name in enumerate(
        [
            "bounding_box_train/0002_c1s1_000451_03.jpg",
            "bounding_box_train/0002_c2s1_000451_03.jpg",
            "bounding_box_train/0007_c1s1_000001_00.jpg",
            "bounding_box_train/0007_c6s3_000001_00.jpg",
            "query/0001_c1s1_001051_00.jpg",
            "query/0003_c2s1_001051_00.jpg",
            "bounding_box_test/-1_c1s1_000401_03.jpg",
            "bounding_box_test/-1_c2s1_000401_03.jpg",
            "bounding_box_test/0000_c1s1_000151_01.jpg",
            "bounding_box_test/0001_c1s1_001052_00.jpg",
            "bounding_box_test/0001_c3s1_001052_00.jpg",
            "bounding_box_test/0003_c2s1_001051_02.jpg",
            "bounding_box_test/0003_c4s1_001051_02.jpg",
        ]
    ):
        picture(root / name, 10 * shade)
    (root / "bounding_box_test" / "Thumbs.db").write_bytes(b"x")


def write_veri(root: Path) -> None:
    names = ["image_train/0001_c001_00016450_0.jpg", "image_train/0001_c012_00016450_0.jpg",
             "image_train/0004_c001_00016450_0.jpg", "image_train/0004_c002_00016450_0.jpg",
             "image_query/0002_c002_00030600_0.jpg", "image_query/0005_c003_00030600_0.jpg",
             "image_test/0002_c002_00030605_1.jpg", "image_test/0002_c004_00030600_1.jpg",
             "image_test/0005_c003_00030600_1.jpg", "image_test/0005_c020_00030600_1.jpg"]  # fmt: skip
    for shade, name in enumerate(names):
        picture(root / name, 10 * shade)


def write_msmt(root: Path, sides: tuple[str, str] = ("train", "test")) -> None:
    lists = {
        "train": ["0000/0000_000_01_0303morning_0015_0.jpg 0", "0000/0000_001_02_0303noon_0015_0.jpg 0",
                  "0001/0001_000_01_0303morning_0015_0.jpg 1"],
        "val": ["0001/0001_001_14_0303morning_0016_0.jpg 1"],
        "query": ["0000/0000_000_05_0303noon_0200_1.jpg 0", "0001/0001_000_06_0303noon_0200_1.jpg 1"],
        "gallery": ["0000/0000_001_05_0303noon_0201_1.jpg 0", "0000/0000_002_07_0303noon_0200_1.jpg 0",
                    "0001/0001_001_06_0303noon_0200_1.jpg 1", "0001/0001_002_09_0303noon_0200_1.jpg 1"],
    }  # fmt: skip
    for part, lines in lists.items():
        root.mkdir(parents=True, exist_ok=True)
        (root / f"list_{part}.txt").write_text("\n".join(lines) + "\n")
        for shade, line in enumerate(lines):
            picture(root / sides[part in ("query", "gallery")] / line.split()[0], 10 * shade + len(part))


WRITE = {"market1501": write_market, "veri776": write_veri, "msmt17": write_msmt}
INNER = {"market1501": "Market-1501-v15.09.15", "veri776": "VeRi", "msmt17": "MSMT17_V1"}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", WRITE)
def test_queries_gallery_and_cameras_of_each_layout(name: str, is_inside: bool, tmp_path: Path) -> None:
    WRITE[name](tmp_path / INNER[name] if is_inside else tmp_path)
    found = data.load(name, str(tmp_path), expected=COUNTS)
    assert found.test_query is not None
    assert found.test_gallery is not None
    assert found.test_query.tolist() == [0, 1]
    assert len(found.test_gallery) == COUNTS[name]["gallery"].images
    assert found.test_camera_N is not None
    assert found.development_camera_N is not None
    camera_N, labels_N = found.test_camera_N, found.test.labels_N
    for query in (0, 1):
        same = [
            int(camera_N[g] == camera_N[query])
            for g in found.test_gallery.tolist()
            if labels_N[g] == labels_N[query]
        ]
        assert sorted(same) == [0, 1]  # one by the same camera, one by another
    assert len(set(found.development_camera_N.tolist())) == 3
    plain = data.ZeroShotData(found.name, found.development, found.test, found.test_query, found.test_gallery)
    assert found.test_fingerprint != plain.test_fingerprint
    assert found.development_fingerprint != plain.development_fingerprint


def test_market_leaves_junk_out_and_keeps_distractors_in_the_gallery(tmp_path: Path) -> None:
    write_market(tmp_path)
    found = data.load("market1501", str(tmp_path), expected=COUNTS)
    assert "distractors" in found.test.class_names
    assert found.test_query is not None
    assert "-1" not in found.test.class_names
    assert "left out: 2 junk pictures of the gallery (identity -1)" in data.remarks(found, str(tmp_path))


def test_the_second_version_of_msmt17_is_known(tmp_path: Path) -> None:
    write_msmt(tmp_path / "MSMT17_V2", ("mask_train_v2", "mask_test_v2"))
    assert len(data.load("msmt17", str(tmp_path), expected=COUNTS).development) == 4


def test_published_counts_are_asked_for(tmp_path: Path) -> None:
    write_market(tmp_path)
    with pytest.raises(
        ValueError, match="market1501 has 751 development classes with 12936 images, this folder 2 with 4"
    ):
        data.load("market1501", str(tmp_path))


def test_what_is_no_such_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="no layout of veri776 that is known; it needs image_train, image_query"
    ):
        data.load("veri776", str(tmp_path), expected=COUNTS)
    write_market(tmp_path / "m")
    picture(tmp_path / "m" / "query" / "portrait.jpg", 3)
    with pytest.raises(ValueError, match=r"portrait.jpg: no name of market1501"):
        data.load("market1501", str(tmp_path / "m"), expected=COUNTS)
    write_msmt(tmp_path / "s")
    (tmp_path / "s" / "list_val.txt").write_text("0001/no.jpg 1")
    with pytest.raises(ValueError, match=r"no.jpg: msmt17 lists this picture, which is not there"):
        data.load("msmt17", str(tmp_path / "s"), expected=COUNTS)
    (tmp_path / "s" / "list_val.txt").write_text("nonsense")
    with pytest.raises(ValueError, match=r"list_val.txt, line 1: 'nonsense' is no picture with an identity"):
        data.load("msmt17", str(tmp_path / "s"), expected=COUNTS)
    write_market(tmp_path / "n")
    with pytest.raises(ValueError, match=r"data.camera: market1501 has cameras of its own; leave it out"):
        data.load("market1501", str(tmp_path / "n"), expected=COUNTS, camera="_c(.)")


def write_folders(root: Path) -> None:
    for number in range(4):
        for camera in "ab":
            for shot in range(2):
                picture(
                    root / f"k{number}" / f"cam_{camera}_{shot}.png", 40 * number + 5 * shot + (camera == "b")
                )


def test_a_regular_expression_of_paths_tells_the_camera(tmp_path: Path) -> None:
    write_folders(tmp_path / "cam_x_9")  # what is above data.path is not looked at
    found = data.load("image_folder", str(tmp_path / "cam_x_9"), camera=r"cam_(\w)_")
    assert found.test_camera_N is not None
    assert found.test_camera_N.tolist() == [0, 0, 1, 1] * 2
    without = data.load("image_folder", str(tmp_path / "cam_x_9"))
    assert without.test_camera_N is None
    assert without.test.fingerprint() == found.test.fingerprint()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("(", "data.camera: '\\(' is no regular expression"),
        ("(a)(b)", "has 2 groups; put the camera, and nothing else, in parentheses"),
        ("(?:a)", "has 0 groups"),
        ("cam_(z)_", "does not fit .*cam_a_0.png; mend it, or the name"),
        ("camera", "no column 'camera' beside the pictures"),
        ("(z?)", "is empty for all pictures of image_folder"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_in_one_line(rule: str, message: str, tmp_path: Path) -> None:
    write_folders(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        data.load("image_folder", str(tmp_path), camera=rule)
    assert "\n" not in str(caught.value)


def test_a_column_of_a_table_tells_the_camera_and_may_be_empty(tmp_path: Path) -> None:
    write_folders(tmp_path)
    lines = ["label,path,lens"]
    for number in range(4):
        lines += [
            f"k{number},k{number}/cam_{c}_{s}.png,{'' if s and c == 'b' else c}" for c in "ab" for s in (0, 1)
        ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = data.load("table", str(tmp_path / "t.csv"), camera="lens")
    assert found.test_camera_N is not None
    assert found.test_camera_N.tolist() == [0, 0, 1, -1] * 2
    assert "test: 2 of 8 images without a camera, which are left out of no ranking" in data.remarks(
        found, None
    )
    (tmp_path / "k3" / "cam_a_0.png").write_bytes(b"damaged")
    kept = data.load("table", str(tmp_path / "t.csv"), on_corrupt="skip", camera="lens")
    assert kept.test_camera_N is not None
    assert kept.test_camera_N.tolist() == [0, 0, 1, -1, 0, 1, -1]


@pytest.mark.parametrize("name", ["digits", "features"])
def test_data_without_cameras_refuse_them(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", x=np.eye(8), y=np.arange(8) // 2)
    with pytest.raises(ValueError, match=rf"data.camera: {name} .*; leave it out"):
        data.load(name, str(tmp_path / "f.npz"), camera="c")
    with pytest.raises(ValueError, match=r"data.camera: digits is judged by all rows"):
        data.load_closed("digits", camera="c")
