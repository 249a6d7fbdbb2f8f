"""Full float32 where it is promised, on a GPU that is emulated: one whose convolutions round their operands to the 10
bits of TensorFloat-32 unless PyTorch is told otherwise. No GPU is asked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmlstudy import embedders, model_folder
from dmlstudy.embedders.precision import full_float32, full_products, in_force
from dmlstudy.registry.models import TOLERANCE

BACKENDS = torch.backends


def as_tf32(x: Tensor) -> Tensor:
    """The nearest numbers with 10 bits of mantissa, ties to even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def test_the_emulation_keeps_ten_bits() -> None:
    kept = torch.tensor([1.0, 1 + 2**-10, -1.5, 0.0, 3.140625])
    assert torch.equal(as_tf32(kept), kept)
    assert as_tf32(torch.tensor(1 + 2**-11 + 2**-20)) == 1 + 2**-10
    assert as_tf32(torch.tensor(1 + 2**-11)) == 1


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Rounds in every convolution whose id is in the set, whatever PyTorch is told, and in others as it is told."""
    always: set[int] = set()
    convolve: Callable[..., Tensor] = nn.Conv2d._conv_forward

    def rounded(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv: Any = BACKENDS.cudnn.conv
        if id(self) in always or conv.fp32_precision == "tf32":
            x, weight = as_tf32(x), as_tf32(weight)
        return convolve(self, x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", rounded)
    return always


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def resnet50(images: np.ndarray) -> embedders.Embedder:
    """With the batch statistics of its images, as if trained on such."""
    embedder = embedders.build("resnet50", 64, in_channels=3, image_size=64, seed=0, freeze_bn=False)
    for module in embedder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        embedder.train()(torch.from_numpy(images))
    return embedder.eval()


def test_what_is_embedded_does_not_take_the_shortcut(
    resnet50: embedders.Embedder, images: np.ndarray, tf32: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        plain = resnet50(torch.from_numpy(images)).numpy()
    in_full = embedders.embed(resnet50, images)
    assert np.abs(plain - in_full).max() > TOLERANCE, "the emulation makes no difference"
    monkeypatch.undo()  # a machine without the shortcut
    assert np.array_equal(in_full, embedders.embed(resnet50, images))


def test_pull_would_refuse_the_example_of_such_a_device_and_takes_ours(
    resnet50: embedders.Embedder, images: np.ndarray, tf32: set[int], tmp_path: Path
) -> None:
    tf32 |= {id(module) for module in resnet50.modules()}
    embedders.save(resnet50, tmp_path, None, images)
    deviation = embedders.largest_deviation(tmp_path)
    assert deviation is not None
    assert deviation <= TOLERANCE / 100
    model_folder.add_example(tmp_path, images, functools.partial(embedders.embed, resnet50))
    model_folder.seal(tmp_path)
    deviation = embedders.largest_deviation(tmp_path)
    assert deviation is not None
    assert deviation > TOLERANCE


def settings() -> dict[str, object]:
    """All that PyTorch can be asked of it, in its older interface and in its newer one."""
    asked: dict[str, Callable[[], object]] = {
        "products": lambda: BACKENDS.cuda.matmul.fp32_precision,
        "products on CPUs": lambda: BACKENDS.mkldnn.matmul.fp32_precision,
        "convolutions": lambda: BACKENDS.cudnn.conv.fp32_precision,
        "convolutions on CPUs": lambda: BACKENDS.mkldnn.conv.fp32_precision,
        "recurrences": lambda: BACKENDS.cudnn.rnn.fp32_precision,
        "old products": torch.get_float32_matmul_precision,
        "old TF32 in products": lambda: BACKENDS.cuda.matmul.allow_tf32,
        "old TF32 in convolutions": lambda: BACKENDS.cudnn.allow_tf32,
    }
    answers: dict[str, object] = {}
    for name, getter in asked.items():
        try:
            answers[name] = getter()
        except RuntimeError:
            answers[name] = "no answer, for the two differ"
    return answers


def set_by_the_new_interface(value: str) -> None:
    BACKENDS.cuda.matmul.fp32_precision = value
    BACKENDS.cudnn.conv.fp32_precision = value


@pytest.mark.parametrize(
    "beforehand",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
        lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
        lambda: set_by_the_new_interface("tf32"),
        lambda: set_by_the_new_interface("ieee"),
        lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    ],
    ids=["untouched", "high", "medium", "no TF32", "TF32", "new TF32", "new full", "TF32 everywhere"],
)
def test_whatever_was_set_is_set_aside_and_comes_back(beforehand: Callable[[], None]) -> None:
    kept = settings()
    try:
        beforehand()
        before = settings()
        with full_products():
            within = settings()
            assert (within["products"], within["old TF32 in products"]) == ("ieee", False)
            assert within["convolutions"] == before["convolutions"]
            with full_float32():
                assert in_force() == {"matrix_products": "ieee", "convolutions": "ieee"}
                assert "no answer, for the two differ" not in settings().values()
            assert settings() == within
        assert settings() == before
    finally:
        BACKENDS.fp32_precision = "none"  # type: ignore[assignment]
        torch.set_float32_matmul_precision("highest")
        BACKENDS.cuda.matmul.fp32_precision = BACKENDS.mkldnn.matmul.fp32_precision = "none"
        BACKENDS.mkldnn.conv.fp32_precision = "none"
        BACKENDS.cudnn.allow_tf32 = True
    assert settings() == kept


def test_one_thread_that_leaves_takes_it_from_no_other() -> None:
    left, asked = threading.Event(), threading.Event()
    seen: list[dict[str, str]] = []

    def stay() -> None:
        with full_float32():
            asked.set()
            left.wait(10)
            seen.append(in_force())

    before = in_force()
    thread = threading.Thread(target=stay)
    with full_float32():
        thread.start()
        asked.wait(10)
    left.set()
    thread.join()
    assert seen == [{"matrix_products": "ieee", "convolutions": "ieee"}]
    assert in_force() == before
