"""Pictures that strangers send: their pixels are counted before any is decoded."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dmlstudy.data import Fit, decode_images, inputs


def png(width: int, height: int) -> bytes:
    content = io.BytesIO()
    Image.new("L", (width, height), 9).save(content, "PNG")
    return content.getvalue()


def test_pixels_are_counted_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(8)
    pictures = [png(20, 10), png(10, 20), png(10, 10)]
    assert decode_images(pictures, fit, 1, 200, max_in_all=500).shape == (3, 8, 8, 1)
    monkeypatch.setattr(inputs, "decode", pytest.fail)
    with pytest.raises(ValueError, match="3 images of 500 pixels together; at most 499: send fewer at once"):
        decode_images(pictures, fit, 1, 200, max_in_all=499)
    with pytest.raises(ValueError, match="image 0: 20 x 10 pixels; at most 199"):
        decode_images(pictures, fit, 1, 199, max_in_all=500)


def test_a_narrow_picture_may_not_grow_without_bounds() -> None:
    """2,000 pixels, of which a shorter side of 96 would make 18 million."""
    fit = Fit(64, 96)
    assert decode_images([png(50, 40)], fit, 3, 100_000).shape == (1, 64, 64, 3)
    with pytest.raises(
        ValueError, match=r"image 1: 2000 x 1 pixels, of which resizing .* makes 18432000; at most"
    ):
        decode_images([png(50, 40), png(2000, 1)], fit, 3, 100_000)
    assert decode_images([png(2000, 1)], Fit(64, 96, keep_aspect=False), 3, 100_000).shape == (1, 64, 64, 3)


def test_decoding_ends_where_the_caller_says() -> None:
    class Enough(Exception):
        pass

    calls: list[int] = []

    def before_each() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Enough

    with pytest.raises(Enough):
        decode_images([png(9, 9)] * 5, Fit(8), 1, 100, before_each=before_each)
    assert len(calls) == 2
    np.testing.assert_array_equal(decode_images([png(9, 9)], Fit(8), 1, 100), np.full((1, 8, 8, 1), 9))
