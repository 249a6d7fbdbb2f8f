"""Batches that are embedded one after another: the numbers of each alone, up to the last one that comes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dmlstudy import embedders
from dmlstudy.transfers import sent

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (23, 12, 12, 1), dtype=np.uint8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("structure", ["none", "official"])
def test_batches_give_what_each_gives_alone(structure: str) -> None:
    embedder = embedders.build(
        "small_conv", 6, width=4, in_channels=1, image_size=12, structure=structure, seed=0
    ).train()
    sizes = (10, 4, 9)
    starts = np.cumsum([0, *sizes[:-1]])
    batches = [IMAGES[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    found = embedders.embed_batches(embedder, iter(batches), 23)
    alone = [embedders.embed_with_structure(embedder, batch) for batch in batches]
    np.testing.assert_array_equal(found[0], np.concatenate([z for z, _ in alone]))
    assert (found[1] is None) == (structure == "none")
    if found[1] is not None:
        np.testing.assert_array_equal(found[1], np.concatenate([omega for _, omega in alone]))
    assert embedder.training
    assert torch.is_grad_enabled()


def test_fewer_than_were_announced_are_those_that_came() -> None:
    embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=12, seed=0)
    z_ND, _ = embedders.embed_batches(embedder, iter([IMAGES[:5]]), 23)
    np.testing.assert_array_equal(z_ND, embedders.embed(embedder, IMAGES[:5]))
    assert embedders.embed_batches(embedder, iter(()), 0)[0].shape == (0, 6)


def test_batches_are_made_outside_of_inference() -> None:
    """For whatever makes them may keep tensors for training."""
    embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=12, seed=0)

    def made() -> Iterator[np.ndarray]:
        assert not torch.is_inference_mode_enabled()
        yield IMAGES[:5]
        assert not torch.is_inference_mode_enabled()

    embedders.embed_batches(embedder, made(), 5)


def test_what_is_sent_is_a_copy() -> None:
    read_only = IMAGES.copy()
    read_only.flags.writeable = False
    for tensor, batch in zip(
        sent([read_only[:3], read_only[3:5]], CPU), [IMAGES[:3], IMAGES[3:5]], strict=True
    ):
        assert tensor.device == CPU
        np.testing.assert_array_equal(tensor.numpy(), batch)
        tensor.zero_()
    np.testing.assert_array_equal(read_only, IMAGES)


@pytest.mark.needs("gpu")
def test_a_gpu_has_every_batch_in_its_turn() -> None:
    gpu = torch.device("cuda")
    batches = [RNG.integers(0, 256, (size, 64, 64, 3), dtype=np.uint8) for size in (200, 7, 256, 1, 256, 99)]
    sums = [batch.double().sum() for batch in sent(batches, gpu)]
    assert [total.item() for total in sums] == [float(batch.sum(dtype=np.int64)) for batch in batches]
