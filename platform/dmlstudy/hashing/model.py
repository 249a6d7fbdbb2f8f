"""A hashing model: one method, and with NASA a structure head and the ranking loss that trains it.

Shapes: B rows of a batch, N rows, F features, D bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmlstudy.embedders.structure import StructureHead
from dmlstudy.hashing.methods import METHODS, HashMethod
from dmlstudy.hashing.ranking import PointRanking
from dmlstudy.losses.parameters import at_least, choice, constructed
from dmlstudy.records import Scalar

ROWS_AT_ONCE = 4096

TERMS = {"point_ranking": PointRanking}
"""Terms that may be added to a method's loss."""


class HashingLoss(NamedTuple):
    """L = method + weight * ranking (NASA Eq. 13), and its two parts; ranking is 0 without NASA."""

    total: Tensor
    method: Tensor
    ranking: Tensor


class Recipe(NamedTuple):
    """The arguments that ``build`` made a model of."""

    name: str
    num_bits: int
    num_features: int
    params: Mapping[str, Scalar]
    term: tuple[str, Mapping[str, Scalar]] | None


class CodeStructure(nn.Module):
    """The structure head, its ranking loss and that loss's weight lambda."""

    def __init__(self, head: StructureHead, ranking: PointRanking, weight: float) -> None:
        super().__init__()
        self.head = head
        self.ranking = ranking
        self.weight = at_least("weight", weight, 0)


class HashingModel(nn.Module):
    """Features to codes; with a ``structure``, also to structure embeddings omega, a weight for each bit.

    What it computes of x it computes of (x - mean) / scale, which ``prepare`` may set.
    """

    mean_F: Tensor
    scale: Tensor

    def __init__(self, method: HashMethod, structure: CodeStructure | None, recipe: Recipe) -> None:
        super().__init__()
        self.method = method
        self.structure = structure
        self.recipe = recipe
        self.num_features = num_features = recipe.num_features
        self.num_bits = recipe.num_bits
        self.register_buffer("mean_F", torch.zeros(num_features))
        self.register_buffer("scale", torch.ones(()))

    def prepare(self, x_NF: Tensor, *, standardize: bool) -> None:
        """Take what is needed of all training features, before the first step.

        With ``standardize`` the mean of each feature, and as scale the root of their mean variance, one for all
        (a feature that varies little stays small; all alike: 1).
        """
        if standardize:
            with torch.no_grad():
                variance_F, mean_F = torch.var_mean(x_NF.double(), dim=0, correction=0)
                self.mean_F.copy_(mean_F)
                if (mean_variance := variance_F.mean()) > 0:
                    self.scale.copy_(mean_variance.sqrt())
        self.method.prepare(self._standardised(x_NF))

    def _standardised(self, x_NF: Tensor) -> Tensor:
        return (x_NF - self.mean_F).div_(self.scale)

    def forward(self, x_BF: Tensor, generator: torch.Generator) -> HashingLoss:
        """The loss of a batch; all randomness is ``generator``'s."""
        x_BF = self._standardised(x_BF)
        z_BD, loss = self.method.step(x_BF, generator)
        if self.structure is None:
            return HashingLoss(loss, loss, torch.zeros_like(loss))
        ranking = self.structure.ranking(x_BF, z_BD, self.structure.head(x_BF).to(z_BD.dtype))
        return HashingLoss(loss + self.structure.weight * ranking, loss, ranking)

    def codes(self, x_NF: NDArray[np.float32]) -> NDArray[np.int8]:
        """Codes z_ND of +1 (logit above 0) and -1. Raises ValueError for wrong or non-finite features."""
        check_features("features", x_NF, self.num_features)
        with torch.inference_mode():
            bits_ND = np.concatenate([(self.method.logits(x) > 0).cpu().numpy() for x in self._parts(x_NF)])
        return np.where(bits_ND, 1, -1).astype(np.int8)

    def omega(self, x_NF: NDArray[np.float32]) -> NDArray[np.float32]:
        """Structure embeddings omega_ND. Raises ValueError without a structure head, and as ``codes``."""
        check_features("features", x_NF, self.num_features)
        if self.structure is None:
            raise ValueError("this hashing model has no structure head; train it with the term point_ranking")
        with torch.inference_mode():
            return np.concatenate([self.structure.head(x).cpu().numpy() for x in self._parts(x_NF)])

    def _parts(self, x_NF: NDArray[np.float32]) -> Iterator[Tensor]:
        device = next(self.parameters()).device
        for start in range(0, max(1, len(x_NF)), ROWS_AT_ONCE):
            yield self._standardised(torch.from_numpy(x_NF[start : start + ROWS_AT_ONCE]).to(device))


def build(
    name: str,
    num_bits: int,
    num_features: int,
    params: Mapping[str, Scalar],
    *,
    term: tuple[str, Mapping[str, Scalar]] | None = None,
    seed: int = 0,
) -> HashingModel:
    """The method ``name`` with these parameters, the others at their defaults.

    ``term`` ('point_ranking' and its parameters: ``neighbours``, ``margin``, ``weight``, and ``preset`` of the
    structure head, 'official' or 'paper') adds NASA; the method's initial parameters are the same without it,
    and depend on the arguments only, not on global generators.

    Raises ValueError for an unknown name or parameter (with the nearest), a value of the wrong type, and codes that
    are not whole bytes.
    """
    if num_bits < 8 or num_bits % 8:
        raise ValueError(f"num_bits={num_bits}: codes are whole bytes; set a positive multiple of 8")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        given = {"num_features": num_features, "num_bits": num_bits}
        method: HashMethod = constructed("hashing method", name, METHODS, params, given)
        structure = None if term is None else _structure(*term, num_features, num_bits)
    return HashingModel(method, structure, Recipe(name, num_bits, num_features, params, term))


def _structure(kind: str, params: Mapping[str, Scalar], num_features: int, num_bits: int) -> CodeStructure:
    """A head and its loss from the term's plain parameters."""
    choice("term", kind, TERMS)
    rest = {key: value for key, value in params.items() if key not in ("weight", "preset")}
    weight = params.get("weight", 1.0)
    if isinstance(weight, str | bool):
        raise ValueError(f"term {kind!r}: weight={weight!r} must be a number")
    ranking = constructed("term", kind, TERMS, rest, {})
    head = StructureHead(num_features, num_bits, str(params.get("preset", "official")))
    return CodeStructure(head, ranking, weight)


def check_features(role: str, x_NF: NDArray[np.float32], num_features: int) -> None:
    """Raises ValueError, naming their ``role``, unless features are finite float32 of shape (N, num_features)."""
    if x_NF.ndim != 2 or x_NF.shape[1] != num_features or x_NF.dtype != np.float32:
        raise ValueError(
            f"{role}: expected float32 of shape (N, {num_features}), got {x_NF.dtype} of shape {x_NF.shape}"
        )
    finite_N = np.isfinite(x_NF).all(axis=1)
    if not finite_N.all():
        raise ValueError(f"{role}: row {int(np.argmin(finite_N))} is not finite; repair or remove it")
