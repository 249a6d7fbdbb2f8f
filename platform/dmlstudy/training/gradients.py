"""The gradient of a training step on every rank: of the whole batch at once, or exactly the same one in chunks.

In chunks a batch may be larger than memory (Gao et al. 2021, gradient cache): a loss of pairs needs the embeddings of
all images, but the activations of only those that are being backpropagated.

Shapes: N images of this rank, c images of a chunk, H height, W width, C channels, F features, D embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dmlstudy import distributed
from dmlstudy.distributed import GlobalLabels
from dmlstudy.heartbeat import beat
from dmlstudy.losses.interface import LossSum
from dmlstudy.training.step import Compared, Step
from dmlstudy.transfers import ReadLater, placed

Scale = Callable[[Tensor], Tensor]
"""Makes the objective the number that is backpropagated, larger in fp16 (``GradScaler.scale``)."""


Told: TypeAlias = tuple[Tensor, Tensor]
"""The mean loss, and of each rank the number of its embeddings that are not finite and the first of them, (W, 2)."""


def as_it_is(objective: Tensor) -> Tensor:
    """The objective itself."""
    return objective


class Gradients(Protocol):
    """The gradient of the mean loss of a batch."""

    def __call__(self, images_NHWC: Tensor, labels: GlobalLabels, scale: Scale = as_it_is) -> MeanLoss:
        """Give every trained parameter the gradient of the global batch's mean loss, scaled; the mean loss.

        Parameters must have no gradient yet. Each rank gives the images of its own share, which may be empty; they may
        lie on the CPU. No device is waited for.
        """
        ...


class MeanLoss:
    """The global mean loss of a step, which a device may find only later."""

    def __init__(self, told: Told, labels: GlobalLabels, images_NHWC: Tensor) -> None:
        mean, unsound_W2 = told
        self._numbers = ReadLater(torch.cat([mean[None], unsound_W2.flatten()]))
        self._labels = labels
        self._images_NHWC = images_NHWC  # which a device may still be copying

    def read(self) -> float:
        """The mean. Raises Refused, on every rank alike, where it or embeddings are not finite."""
        mean, *unsound = self._numbers.read()
        if words := self._labels.words(list(zip(unsound[::2], unsound[1::2], strict=True))):
            raise distributed.Refused(words)
        if not math.isfinite(mean):
            raise distributed.Refused(f"the loss is {mean}")
        return mean


def gradients_of(step: Step, chunk: int | None = None) -> Gradients:
    """The gradient of a step: in chunks of so many images, or at once where none is given.

    Every rank must call this. Which parameters are trained is seen now: change ``requires_grad`` before, and keep no
    earlier one of the same step.
    """
    return AtOnce(step) if chunk is None else InChunks(step, chunk)


class AtOnce(Gradients):
    """One forward and one backward of the whole share, averaged by data parallel."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.parallel = distributed.data_parallel(step)

    def __call__(self, images_NHWC: Tensor, labels: GlobalLabels, scale: Scale = as_it_is) -> MeanLoss:
        placed_NHWC = placed(images_NHWC, labels.device)
        self.step.begin([placed_NHWC])
        told = _backpropagated(Compared(*self.parallel(placed_NHWC, labels)), scale)
        self.step.renew()
        return MeanLoss(told, labels, images_NHWC)


class InChunks(Gradients):
    """The same gradient with the activations of ``size`` images in memory, for a second forward pass.

    1. Each chunk is embedded, and its activations are dropped. 2. The loss of all embeddings gives g = dL/dz, and the
    gradient of its own parameters. 3. Each chunk is embedded again, from the same state of random numbers, and g is
    backpropagated through it. Then gradients are averaged over ranks.

    Both passes run the same kernels in the same mode, with gradients, so that z is the same number in both. Dropout
    draws its masks chunk by chunk, as one forward of each chunk would.

    Where no parameter of the backbone is trained, features are found once, and only the head is backpropagated through.

    Nothing is wrapped for data parallel, which wants one backward of every rank: here ranks have different numbers
    of chunks, or none.
    """

    def __init__(self, step: Step, size: int) -> None:
        assert size >= 1
        self.step, self.size = step, size
        self.has_frozen_backbone = not any(
            parameter.requires_grad for parameter in step.embedder.backbone.parameters()
        )
        self.is_checked = False
        distributed.take_over_rank_0(step)

    def __call__(self, images_NHWC: Tensor, labels: GlobalLabels, scale: Scale = as_it_is) -> MeanLoss:
        self.step.begin(self._chunks(images_NHWC, labels.device))
        of_batch = self._through_the_head if self.has_frozen_backbone else self._twice
        told = of_batch(images_NHWC, labels, scale)
        self.step.renew()
        self.step.weigh_layers()  # not before the second pass, which must find the weights of the first
        distributed.average_gradients(distributed.averaged_parameters(self.step))
        return MeanLoss(told, labels, images_NHWC)

    def _through_the_head(self, images_NHWC: Tensor, labels: GlobalLabels, scale: Scale) -> Told:
        """The mean loss, after a backward from it to the features."""
        with self._unchanged_buffers():
            features_NF = torch.cat(
                [self.step.features(images) for images in self._chunks(images_NHWC, labels.device)]
            )
        return _backpropagated(self.step.compare(self.step.embed_features(features_NF), labels), scale)

    def _twice(self, images_NHWC: Tensor, labels: GlobalLabels, scale: Scale) -> Told:
        """The mean loss, after a backward from it to the embeddings and another from these to the images."""
        device = labels.device
        states: list[_Randomness] = []
        found: list[tuple[Tensor, Tensor | None]] = []
        with self._unchanged_buffers():
            for images in self._chunks(images_NHWC, device):
                states.append(_Randomness.of(device))
                found.append(_detached(*self.step.encode(images)))
        z_ND, omega_ND = _leaf([z for z, _ in found]), None
        if found[0][1] is not None:
            omega_ND = _leaf([omega for _, omega in found if omega is not None])
        told = _backpropagated(self.step.compare((z_ND, omega_ND), labels), scale)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for number, images in enumerate(self._chunks(images_NHWC, device)):
                states[number].restore()
                rows = slice(number * self.size, (number + 1) * self.size)
                self._backpropagate(images, _gradient(z_ND, rows), _gradient(omega_ND, rows))
        return told

    def _backpropagate(self, images: Tensor, of_z_ND: Tensor | None, of_omega_ND: Tensor | None) -> None:
        """Embed a chunk again and take the gradient of its embeddings to the parameters."""
        if not len(images):
            return
        z_ND, omega_ND = self.step.encode(images)
        known = [
            (output, gradient)
            for output, gradient in ((z_ND, of_z_ND), (omega_ND, of_omega_ND))
            if output is not None and gradient is not None
        ]
        if known:
            torch.autograd.backward([output for output, _ in known], [gradient for _, gradient in known])

    def _chunks(self, images_NHWC: Tensor, device: torch.device) -> Iterator[Tensor]:
        """The chunks, on the device one at a time; one empty chunk of an empty share."""
        for images in torch.split(images_NHWC, self.size):
            yield placed(images, device)
            beat()

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Raise Refused, on every rank alike, where the first forward of the block changes a buffer.

        Such a module, as batch norm that trains, would see each image twice, and a chunk for the batch.
        """
        if self.is_checked:
            yield
            return
        before = {name: buffer.clone() for name, buffer in self.step.named_buffers()}
        yield
        now = dict(self.step.named_buffers())
        is_changed_B = torch.tensor([int(not _are_same(now[name], old)) for name, old in before.items()])
        num_ranks_B = distributed.sum_over_ranks(is_changed_B).tolist()
        changed = [name for name, number in zip(before, num_ranks_B, strict=True) if number]
        if changed:
            raise distributed.Refused(
                f"batch.chunk: {self.size} needs an embedder that training images change by their gradient alone, and"
                f" they change {changed[0].removeprefix('embedder.')}; set embedder.freeze_bn: true, or leave"
                " batch.chunk out"
            )
        self.is_checked = True


def _backpropagated(compared: Compared, scale: Scale) -> Told:
    """The global mean loss, after a backward from it, and each rank's embeddings that are not finite."""
    loss = LossSum(compared.total, compared.count)
    objective, *told = distributed.scaled_for_mean(loss, compared.unsound_2)
    scale(objective).backward()  # type: ignore[no-untyped-call]
    return told[0], told[1]


def _detached(z_ND: Tensor, omega_ND: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The numbers alone; what they were computed from is let go of before the next chunk."""
    return z_ND.detach(), None if omega_ND is None else omega_ND.detach()


def _leaf(parts: list[Tensor]) -> Tensor:
    """The parts as one tensor that backward stops at."""
    return torch.cat(parts).requires_grad_()


def _gradient(leaf: Tensor | None, rows: slice) -> Tensor | None:
    """The gradient of the loss to some rows; None where there is none."""
    return None if leaf is None or leaf.grad is None else leaf.grad[rows]


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


class _Randomness(NamedTuple):
    """States of the global generators that dropout draws from."""

    device: torch.device
    of_cpu: Tensor
    of_device: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> _Randomness:
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        torch.set_rng_state(self.of_cpu)
        if self.of_device is not None:
            torch.cuda.set_rng_state(self.of_device, self.device)
