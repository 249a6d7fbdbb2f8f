"""The structure head (NASA 4.1): beside its embedding, an image gets a weight for every dimension.

Shapes: N images, F features, D embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from dmlstudy.text import nearest

HIDDEN = 512

NO_STRUCTURE = "none"

PRESETS: Mapping[str, str] = {
    NO_STRUCTURE: "no structure head",
    "official": "0.5 + sigmoid, as in the authors' code",
    "paper": "D * softmax, as printed",
}


class StructureHead(nn.Module):
    """omega = a(W2 . + b2) of features_NF, positive weights of mean about 1 for each image.

    'official', as in the authors' code: linear to 512, batch norm, linear to D, batch norm, 0.5 + sigmoid, so
    in (0.5, 1.5). 'paper': linear to 512, batch norm, ReLU, linear to D, and D times the softmax, so that the
    mean is exactly 1 (raw softmax weights would shrink each distance by sqrt(D)).

    Batch norm keeps its initial statistics in training too, as in the authors' code, and is an affine map: statistics
    of a rank's part of the batch would make training depend on the number of ranks. Float32 out. Raises ValueError
    for another preset.
    """

    def __init__(self, features: int, dim: int, preset: str) -> None:
        super().__init__()
        self.preset = preset
        first = [nn.Linear(features, HIDDEN), nn.BatchNorm1d(HIDDEN)]
        if preset == "official":
            self.layers = nn.Sequential(*first, nn.Linear(HIDDEN, dim), nn.BatchNorm1d(dim))
        elif preset == "paper":
            self.layers = nn.Sequential(*first, nn.ReLU(), nn.Linear(HIDDEN, dim))
        else:
            raise ValueError(f"a structure head has preset 'official' or 'paper', not {preset!r}")
        self.train()

    def forward(self, features_NF: Tensor) -> Tensor:
        """Structure embeddings omega_ND."""
        x_ND: Tensor = self.layers(features_NF).float()
        if self.preset == "official":
            return 0.5 + x_ND.sigmoid()
        return x_ND.shape[1] * x_ND.softmax(dim=1)

    def train(self, mode: bool = True) -> StructureHead:
        """Set the mode; batch norm stays in eval mode."""
        super().train(mode)
        for module in self.layers:
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def check_structure(structure: str) -> str:
    """``structure`` if it names a preset or none; raises ValueError with the nearest name otherwise."""
    if structure not in PRESETS:
        raise ValueError(
            f"embedder.structure: unknown {structure!r}{nearest(structure, PRESETS, listed=True)}"
        )
    return structure
