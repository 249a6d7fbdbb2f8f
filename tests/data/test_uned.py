"""UnED's info files: one domain, several with a common gallery, counts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import PartSize

ANY: dict[str, Any] = {"uned": {}}


def write(root: Path, domain: str, split: str, rows: list[tuple[str, Any]]) -> None:
    (root / "info_files" / domain).mkdir(parents=True, exist_ok=True)
    told = [{"path": f"{domain}/{name}", "class_id": label} for name, label in rows]
    (root / "info_files" / domain / f"{split}.json").write_text(json.dumps(told))
    for shade, (name, _) in enumerate(rows):
        place = root / "images" / domain / name
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (shade, len(split), len(domain))).save(place, "PNG")


def write_domain(root: Path, domain: str, with_index: bool) -> None:
    for split in ("train", "val", "test", *(["index"] if with_index else [])):
        # Numbers begin at 0 in each split: of other classes, but for the gallery's.
        write(root, domain, split, [(f"{split}/{n}.jpg", [n // 2] if n % 2 else n // 2) for n in range(4)])


def test_one_domain_is_named_by_its_folder(tmp_path: Path) -> None:
    write_domain(tmp_path, "cars", False)
    found = data.load("uned", str(tmp_path / "info_files" / "cars"), expected=ANY)
    assert found.development.class_names == ("cars train 0", "cars train 1", "cars val 0", "cars val 1")
    assert found.test.class_names == ("cars test 0", "cars test 1")
    assert found.test_query is None


def test_domains_have_one_gallery_together(tmp_path: Path) -> None:
    write_domain(tmp_path, "cars", False)
    write_domain(tmp_path, "inshop", True)
    write_domain(tmp_path, "met", True)
    found = data.load("uned", str(tmp_path), expected=ANY)
    assert len(found.development) == 16
    assert found.test_query is not None
    assert found.test_gallery is not None
    assert (len(found.test_query), len(found.test_gallery)) == (8, 8)
    names = [found.test.class_names[label] for label in found.test.labels_N]
    asked = [names[row] for row in found.test_query.tolist()]
    ranked = [names[row] for row in found.test_gallery.tolist()]
    assert (
        sorted(set(asked))
        == sorted(set(ranked))
        == ["cars test 0", "cars test 1", "inshop test 0", "inshop test 1"]
    )
    assert np.intersect1d(found.test_query, found.test_gallery).size == 4  # the cars, which have no index
    assert "left out: met, whose galleries have classes of training" in data.remarks(found, None)


def test_published_counts_are_asked_for_and_may_be_others(tmp_path: Path) -> None:
    write_domain(tmp_path, "sop", False)
    place = str(tmp_path / "info_files" / "sop")
    with pytest.raises(ValueError, match=r"sop/train.json: 4 pictures, UnED has 48942 there"):
        data.load("uned", place)
    with pytest.raises(ValueError, match=r"sop/val.json: 4 pictures, UnED has 5 there"):
        data.load("uned", place, expected={"uned": {"sop val": PartSize(2, 5)}})


def test_several_classes_and_escaped_names(tmp_path: Path) -> None:
    write_domain(tmp_path, "rp2k", False)
    write(tmp_path, "rp2k", "train", [(f"train/小{n}.jpg", [0, 1] if n == 3 else n // 3) for n in range(6)])
    for n in range(6):
        (tmp_path / "images" / "rp2k" / "train" / f"小{n}.jpg").rename(
            tmp_path / "images" / "rp2k" / "train" / f"#U5c0f{n}.jpg"
        )
    found = data.load("uned", str(tmp_path), expected=ANY)
    assert len(found.development) == 9
    assert "left out: 1 picture of several classes" in data.remarks(found, None)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs info_files/ and images/ of UnED in it"):
        data.load("uned", str(tmp_path), expected=ANY)
    write_domain(tmp_path, "met", True)
    with pytest.raises(ValueError, match=r"has none of the domains cars, .*; met and gldv2 are not taken"):
        data.load("uned", str(tmp_path / "info_files" / "met"), expected=ANY)
    write_domain(tmp_path, "cars", False)
    info = tmp_path / "info_files" / "cars"
    (tmp_path / "images" / "cars" / "val" / "2.jpg").unlink()
    with pytest.raises(ValueError, match=r"val.json, entry 2: no file .*val/2.jpg; unpack"):
        data.load("uned", str(tmp_path), expected=ANY)
    (info / "val.json").write_text('[{"path": "a.jpg", "class_id": "x"}]')
    with pytest.raises(ValueError, match=r"val.json, entry 0: needs a path and a class_id, a number"):
        data.load("uned", str(tmp_path), expected=ANY)
    (info / "val.json").write_text("[")
    with pytest.raises(ValueError, match=r"val.json: not readable"):
        data.load("uned", str(tmp_path), expected=ANY)
    (info / "val.json").unlink()
    with pytest.raises(ValueError, match=r"val.json: no such file; get the info files of UnED"):
        data.load("uned", str(tmp_path), expected=ANY)
