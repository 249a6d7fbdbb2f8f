"""The weights that are scored and kept where these are not the trained ones: averages over steps, or with the start."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dmlstudy.embedders import Embedder


class MovingAverage(nn.Module):
    """The moving average e of an embedder's weights w: e <- d_t e + (1 - d_t) w after step t = 1, 2, ...

    d_t = min(decay, (1 + t) / (10 + t)), so that the start, which e is before, is soon forgotten. Buffers are copied.
    Both tensors and t are the state of training. The loss's own parameters have no average: they are not kept.
    """

    num_steps: Tensor

    def __init__(self, embedder: Embedder, decay: float) -> None:
        super().__init__()
        assert 0 < decay < 1
        self.decay = decay
        self.embedder = copy.deepcopy(embedder).requires_grad_(False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, embedder: Embedder) -> None:
        """Take in the weights after a further step."""
        self.num_steps += 1
        step = int(self.num_steps)
        decay = min(self.decay, (1 + step) / (10 + step))
        for average, weight in zip(self.embedder.parameters(), embedder.parameters(), strict=True):
            average.lerp_(weight, 1 - decay)
        self.take_over_buffers(embedder)

    def take_over_buffers(self, embedder: Embedder) -> None:
        """Copy what is not trained, such as batch statistics."""
        for average, buffer in zip(self.embedder.buffers(), embedder.buffers(), strict=True):
            average.copy_(buffer)


class StartWeights:
    """An embedder's weights w0 from a file, and their mean with the trained ones: (1 - share) w0 + share w.

    What did not come from the file, as a new head, keeps w. Make it before training. Source: WiSE-FT, Wortsman et al.
    2022.
    """

    def __init__(self, embedder: Embedder) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in begun(embedder)}

    @torch.no_grad()
    def mixed(self, embedder: Embedder, share: float) -> Embedder:
        """A copy of the embedder with the mean in the place of what came from the file."""
        mixed = copy.deepcopy(embedder)
        for name, weight in begun(mixed):
            weight.copy_(torch.lerp(self.weights[name], weight, share))
        return mixed


def begun(embedder: Embedder) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the parts whose weights came from a file."""
    for part in embedder.begun_parts:
        for name, weight in embedder.get_submodule(part).named_parameters():
            yield f"{part}.{name}", weight
