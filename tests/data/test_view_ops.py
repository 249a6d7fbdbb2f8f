"""Ops of views: functions of (seed, epoch, image) alone, torchvision's own pixels, no draw of one op by another."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode

from dmlstudy.data import Augmentation, ImageSet, Loader, check_channels, fill_for
from dmlstudy.data.view_ops import AREAS, LOG_RATIOS, OPS, RANDAUGMENT, ViewOps, one_thread
from dmlstudy.records import AugmentationConfig

ALL = Augmentation(
    "random_resized",
    flip=0.5,
    rotate=20,
    randaugment=2,
    magnitude=9,
    jitter=0.4,
    hue=0.1,
    grey=0.2,
    blur=0.5,
    erase=0.5,
    fill=(124, 116, 104),
)
SINGLE = {
    "rotate": ViewOps(rotate=30),
    "randaugment": ViewOps(randaugment=3, magnitude=20),
    "jitter": ViewOps(jitter=0.5, hue=0.2),
    "grey": ViewOps(grey=0.5),
    "blur": ViewOps(blur=0.7),
    "erase": ViewOps(erase=0.7),
}
SEED = (3, 1, 4, 1)


def images(num_images: int = 200, channels: int = 3) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (num_images, 24, 20, channels), dtype=np.uint8)
    return ImageSet(pixels, np.arange(num_images) % 2, ("a", "b"))


def picture(seed: int = 0, mode: str = "RGB") -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((40, 48), Image.Resampling.BILINEAR).convert(mode)


def sha_of_200_views(threads: int, ranks: int = 1) -> str:
    """Of an epoch of 200 images in batches of 40, which so many ranks share."""
    read = []
    for rank in range(ranks):
        batches = [np.array_split(np.arange(i, i + 40), ranks)[rank] for i in range(0, 200, 40)]
        read.append(list(Loader(images(), ALL, 11, threads).epoch(batches, 2)))
    whole = np.concatenate([part for of_batch in zip(*read, strict=True) for part in of_batch])
    assert whole.shape == (200, 24, 20, 3)
    assert whole.dtype == np.uint8
    return hashlib.sha256(whole.tobytes()).hexdigest()


def test_200_views_are_the_same_on_any_ranks_threads_and_after_a_restart() -> None:
    expected = sha_of_200_views(threads=1)
    assert sha_of_200_views(threads=3) == expected
    assert sha_of_200_views(threads=2, ranks=2) == expected
    ask = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_view_ops as t"
    again = subprocess.run(
        [sys.executable, "-c", f"{ask}; print(t.sha_of_200_views(2))"], capture_output=True, text=True
    )
    assert again.stdout.strip() == expected, again.stderr


def test_no_global_generator_is_read_or_moved() -> None:
    torch.manual_seed(0)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = [np.asarray(ALL.changed(picture(), (1, 2, n, 3))) for n in range(20)]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    torch.manual_seed(5)
    np.testing.assert_array_equal(
        first, [np.asarray(ALL.changed(picture(), (1, 2, n, 3))) for n in range(20)]
    )


def test_at_strength_0_nothing_changes() -> None:
    assert not ViewOps().has_ops
    assert Augmentation().is_off
    same = picture()
    assert ViewOps(jitter_p=0, jitter=0.5, hue=0.1, magnitude=30, fill=(1, 2, 3)).changed(same, SEED) is same
    for name, ops in SINGLE.items():
        assert ops.has_ops, name
        assert not replace(ops, rotate=0, randaugment=0, jitter=0, hue=0, grey=0, blur=0, erase=0).has_ops
    # A factor of 1 and a shift of 0, drawn at the least strength, are the identity too.
    np.testing.assert_array_equal(ViewOps(jitter=1e-9, jitter_p=1).changed(same, SEED), same)


def test_no_op_moves_the_draws_of_another() -> None:
    """An op that changes nothing visible is added: the crop, the flip and each other op draw as before."""
    for augmentation in (Augmentation("random_resized", flip=0.5), Augmentation("random", 0.5, padding=3)):
        plain = Loader(images(9), augmentation, 7, 1)
        unseen = replace(augmentation, jitter=1e-9, blur=1e-12, erase=1e-12, grey=1e-12)
        assert unseen.has_ops
        for one, other in zip(
            plain.epoch([np.arange(9)], 1),
            Loader(images(9), unseen, 7, 1).epoch([np.arange(9)], 1),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
    for name, ops in SINGLE.items():
        beside = replace(ops, **{k: 1e-12 for k in ("grey", "blur", "erase") if k != name})
        for image in range(10):
            seed = (0, 0, image, 1)
            np.testing.assert_array_equal(ops.changed(picture(), seed), beside.changed(picture(), seed))
    assert len({op.number for op in OPS.values()}) == len(OPS)


def rng_of(op: str, image: int) -> np.random.Generator:
    return np.random.default_rng((0, 0, image, 1, OPS[op].number))


def test_jitter_is_color_jitter_fed_the_same_draws() -> None:
    ops = ViewOps(jitter=0.4, hue=0.1, jitter_p=0.8)
    theirs, num_changed = v2.ColorJitter(0.4, 0.4, 0.4, 0.1), 0
    for image in range(60):
        rng = rng_of("jitter", image)
        is_changed, order, shifts = rng.random() < 0.8, rng.permutation(4), rng.uniform(-1, 1, 4)
        factors = 1 + 0.4 * shifts[:3]
        assert (np.abs(factors - 1) <= 0.4).all()
        keys = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        params = {
            "fn_idx": torch.from_numpy(order),
            **dict(zip(keys, [*factors, 0.1 * shifts[3]], strict=True)),
        }
        expected = theirs.transform(picture(image), params) if is_changed else picture(image)
        np.testing.assert_array_equal(ops.changed(picture(image), (0, 0, image, 1)), expected)
        num_changed += is_changed
    assert 36 <= num_changed <= 58


def test_randaugment_is_torchvision_s_fed_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = (10, 20, 30)
    assert list(RANDAUGMENT) == list(v2.RandAugment._AUGMENTATION_SPACE)
    seen: set[str] = set()
    for magnitude in (0, 9, 17, 30):
        ops = ViewOps(randaugment=2, magnitude=magnitude, fill=fill)
        theirs = v2.RandAugment(2, magnitude, interpolation=InterpolationMode.BILINEAR, fill=fill)
        for image in range(40):
            rng = rng_of("randaugment", image)

            def item(space: dict[str, Any], rng: np.random.Generator = rng) -> tuple[str, Any]:
                name = list(space)[rng.integers(len(space))]
                seen.add(name)
                return name, space[name]

            def coin(size: Any, rng: np.random.Generator = rng) -> torch.Tensor:
                return torch.tensor(rng.random(), dtype=torch.float64)

            with monkeypatch.context() as patch:
                patch.setattr(theirs, "_get_random_item", item)
                patch.setattr(torch, "rand", coin)
                expected = theirs(picture(image))
            np.testing.assert_array_equal(ops.changed(picture(image), (0, 0, image, 1)), expected)
    assert seen == set(RANDAUGMENT)


def test_blur_and_rotation_are_torchvision_s_fed_the_same_draws() -> None:
    blur, rotate = ViewOps(blur=0.5), ViewOps(rotate=25, fill=(9, 8, 7))
    num_blurred = 0
    for image in range(40):
        rng = rng_of("blur", image)
        is_changed, sigma = rng.random() < 0.5, rng.uniform(0.1, 2)
        assert 0.1 <= sigma <= 2
        theirs = v2.GaussianBlur(2 * int(np.ceil(3 * sigma)) + 1, sigma)
        expected = (
            theirs.transform(picture(image), {"sigma": [sigma, sigma]}) if is_changed else picture(image)
        )
        np.testing.assert_array_equal(blur.changed(picture(image), (0, 0, image, 1)), expected)
        num_blurred += is_changed
        angle = 25 * rng_of("rotate", image).uniform(-1, 1)
        turned = v2.RandomRotation(25, InterpolationMode.BILINEAR, fill=(9, 8, 7))
        np.testing.assert_array_equal(
            rotate.changed(picture(image), (0, 0, image, 1)),
            turned.transform(picture(image), {"angle": angle}),
        )
    assert 10 <= num_blurred <= 30


def test_erasing_is_random_erasing_s_rule_and_shows_the_fill() -> None:
    ops = ViewOps(erase=0.6, fill=(1, 2, 3))
    theirs = v2.RandomErasing(1.0, value=(1, 2, 3))
    assert theirs.scale == AREAS
    assert theirs._log_ratio.tolist() == pytest.approx(LOG_RATIOS)
    white, shares = Image.new("RGB", (40, 48), "white"), []
    for image in range(300):
        changed = np.asarray(ops.changed(white, (0, 0, image, 1)))
        erased = (changed == (1, 2, 3)).all(axis=2)
        assert (changed[~erased] == 255).all()
        shares.append(erased.mean())
        if erased.any():
            rows, columns = np.flatnonzero(erased.any(1)), np.flatnonzero(erased.any(0))
            assert erased.sum() == len(rows) * len(columns)
            box = {"i": rows[0], "j": columns[0], "h": len(rows), "w": len(columns)}
            fill = torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]
            np.testing.assert_array_equal(changed, theirs.transform(white, {**box, "v": fill}))
    assert 0.5 < np.mean(np.array(shares) > 0) < 0.7
    assert 0.015 < min(share for share in shares if share) < 0.04
    assert 0.28 < max(shares) < 0.36


def test_grey_views_come_as_often_as_asked_and_have_luma() -> None:
    changed = [np.asarray(ViewOps(grey=0.3).changed(picture(), (0, 0, n, 1))) for n in range(300)]
    is_grey = [(x == x[..., :1]).all() for x in changed]
    assert 0.2 < np.mean(is_grey) < 0.4
    np.testing.assert_array_equal(changed[is_grey.index(True)][..., 0], picture(mode="L"))


@pytest.mark.parametrize("name", [name for name in SINGLE if name != "grey"])
@pytest.mark.parametrize("size", [(40, 48), (8, 8)])
def test_grey_pictures_stay_grey(name: str, size: tuple[int, int]) -> None:
    ops = replace(SINGLE[name], hue=0.0, fill=(77,))
    for image in range(20):
        changed = ops.changed(picture(image, "L").resize(size), (0, 0, image, 1))
        assert (changed.mode, changed.size) == ("L", size)
    grey = Loader(images(9, 1), replace(ALL, hue=0, grey=0, fill=(77,)), 1, 2)
    assert next(grey.epoch([np.arange(9)])).shape == (9, 24, 20, 1)


def test_what_has_no_meaning_is_refused() -> None:
    for key in ("hue", "grey"):
        with pytest.raises(ValueError, match=rf"^augmentation\.{key}: the images are grey .* leave it out$"):
            check_channels(ViewOps(**{key: 0.1}), 1)
        check_channels(ViewOps(**{key: 0.1}), 3)
    check_channels(ViewOps(jitter=0.5, erase=1), 1)


def test_the_fill_is_what_a_network_sees_as_its_mean() -> None:
    assert fill_for((0.485, 0.456, 0.406), 3) == (124, 116, 104)
    assert fill_for((128 / 255, 117 / 255, 104 / 255), 3) == (128, 117, 104)
    assert fill_for((0.485, 0.456, 0.406), 1) == (114,)
    assert fill_for((0.5,), 3) == (128, 128, 128)


def test_an_op_s_threads_are_none_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads runs torch's kernels alone; threads that begin later have what they had before."""
    found: list[int] = []

    def in_a_thread(work: Callable[[], object]) -> None:
        import threading

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        in_a_thread(lambda: (one_thread(), found.append(torch.get_num_threads())))
        in_a_thread(lambda: found.append(torch.get_num_threads()))
        found.append(torch.get_num_threads())
        assert found == [1, 2, 2]
        blurred = [np.asarray(ViewOps(blur=1).changed(picture().resize((300, 300)), SEED))]
        torch.set_num_threads(1)
        blurred.append(np.asarray(ViewOps(blur=1).changed(picture().resize((300, 300)), SEED)))
        np.testing.assert_array_equal(*blurred)
    finally:
        torch.set_num_threads(before)


def test_a_study_s_keys_are_those_of_the_ops() -> None:
    written = AugmentationConfig(rotate=5, jitter=0.2, erase=0.1)
    assert written.model_dump() == {
        **AugmentationConfig().model_dump(),
        "rotate": 5,
        "jitter": 0.2,
        "erase": 0.1,
    }
    assert set(AugmentationConfig().model_dump()) == {
        "crop",
        "flip",
        "padding",
        "scale_min",
        "scale_max",
        "ratio_min",
    }
    made = Augmentation(**written.model_dump())
    assert (made.rotate, made.jitter, made.erase, made.jitter_p) == (5, 0.2, 0.1, 0.8)
    defaults = {key: AugmentationConfig.model_fields[key].default for key in AugmentationConfig.LATER}
    assert {key: getattr(Augmentation(), key) for key in defaults} == defaults
