"""LFW's files: attributes and lists of pairs as they are published, made small; whatever is wrong is one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmlstudy.data.lfw import DEV_TEST, DEV_TRAIN, TEN_FOLDS, load_lfw

COUNTS = {DEV_TRAIN: 4, DEV_TEST: 2, TEN_FOLDS: 8}
FACES = [(name, n) for name in ("Ann Lee", "Bo", "Cy Van Dam", "Di") for n in (1, 2, 10)]
ATTRIBUTES = "# lfw_attributes.txt - 2 attributes\n#\tperson\timagenum\tMale\tSmiling\n"
DEV_TRAIN_TEXT = "2\nAnn_Lee\t1\t2\nBo\t1\t10\nAnn_Lee\t1\tBo\t1\nBo\t2\tAnn_Lee\t2\n"
DEV_TEST_TEXT = "1\nDi\t1\t2\nDi\t1\tCy_Van_Dam\t10\n"
TEN_FOLDS_TEXT = (
    "2\t2\nAnn_Lee\t1\t10\nBo\t1\t2\nAnn_Lee\t1\tDi\t1\nBo\t1\tDi\t1\n"
    "Cy_Van_Dam\t1\t2\nDi\t2\t10\nCy_Van_Dam\t2\tBo\t10\nCy_Van_Dam\t1\tDi\t2\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = "".join(f"{name}\t{n}\t{row}.5\t-{row}e-1\n" for row, (name, n) in enumerate(FACES))
    (tmp_path / "lfw_attributes.txt").write_text(ATTRIBUTES + rows)
    for name, text in ((DEV_TRAIN, DEV_TRAIN_TEXT), (DEV_TEST, DEV_TEST_TEXT), (TEN_FOLDS, TEN_FOLDS_TEXT)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_faces_and_pairs_are_those_of_the_files(folder: Path) -> None:
    found = load_lfw(folder, expected=COUNTS)
    np.testing.assert_allclose(found.x_ND, [[row + 0.5, -row / 10] for row in range(12)], rtol=1e-6)
    assert found.class_names == ("Ann_Lee", "Bo", "Cy_Van_Dam", "Di")
    assert found.labels_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found.pictures[2] == "Ann_Lee/Ann_Lee_0010.jpg"
    assert found.view1_train.index_P2.tolist() == [[0, 1], [3, 5], [0, 3], [4, 1]]
    assert found.view1_train.is_similar_P.tolist() == [True, True, False, False]
    assert found.view1_test.index_P2.tolist() == [[9, 10], [9, 8]]
    assert [fold.index_P2.tolist() for fold in found.view2] == [
        [[0, 2], [3, 4], [0, 9], [3, 9]],
        [[6, 7], [10, 11], [7, 5], [6, 10]],
    ]
    for pairs in (found.view1_train, found.view1_test, *found.view2):
        of_pair_P2 = found.labels_N[pairs.index_P2]
        assert (pairs.is_similar_P == (of_pair_P2[:, 0] == of_pair_P2[:, 1])).all()
    assert len(found.held_out_K2) == 14
    assert found.num_left_out == 0


def test_pairs_of_faces_without_attributes_are_left_out_and_counted(folder: Path) -> None:
    lines = (folder / "lfw_attributes.txt").read_text().splitlines(keepends=True)
    (folder / "lfw_attributes.txt").write_text(
        "".join(each for each in lines if not each.startswith("Bo\t1\t"))
    )
    found = load_lfw(folder, expected=COUNTS)
    assert found.num_left_out == 4
    assert [len(fold.is_similar_P) for fold in found.view2] == [2, 4]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (DEV_TEST, None, "pairsDevTest.txt: no such file; LFW needs lfw_attributes.txt, pairsDevTrain.txt"),
        (DEV_TEST, "", "line 1: expected how many pairs there are of either kind, got 'nothing'"),
        (DEV_TEST, "one\n", "line 1: expected how many pairs"),
        (DEV_TEST, "1\nDi\t1\t2\n", "1 pairs, but its first line says 2"),
        (DEV_TEST, "1\nDi\t1\tBo\t2\nDi\t1\tBo\t1\n", "line 2: expected name, number, number, got 'Di 1 Bo 2'"),
        (DEV_TEST, "1\nDi\t1\t2\nDi\t1\t2\n", "line 3: expected name, number, name, number"),
        (DEV_TEST, "1\nDi\t1\tx\nDi\t1\tBo\t2\n", "line 2: expected name, number, number"),
        (DEV_TEST, "2\nDi\t1\t2\nDi\t1\t10\nDi\t1\tBo\t2\nDi\t1\tBo\t1\n", "4 pairs, expected 2"),
        (DEV_TEST, "1\nEd\t1\t2\nDi\t1\tBo\t2\n", "no pairs of both kinds whose faces are in lfw_attributes"),
        ("lfw_attributes.txt", "# none\n", "lfw_attributes.txt: no faces in it"),
        ("lfw_attributes.txt", "Di 1 2 3\n", "line 1: expected a name, a number and attributes, with tabs"),
        ("lfw_attributes.txt", "Di\t1\t2\t3\nBo\t1\t2\n", "line 2: 1 attributes, expected 2 finite"),
        ("lfw_attributes.txt", "Di\t1\tnan\n", "line 1: 1 attributes, expected finite"),
        ("lfw_attributes.txt", "Di\t1\t2\nDi\t1\t3\n", "a face stands in two lines"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(folder: Path, name: str, text: str | None, message: str) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_lfw(folder, expected=COUNTS)
    assert "\n" not in str(caught.value)


def test_the_published_counts_are_asked_for(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"pairsDevTrain.txt: 4 pairs, expected 2200"):
        load_lfw(folder)
    assert len(load_lfw(folder, expected=None).view2) == 2
