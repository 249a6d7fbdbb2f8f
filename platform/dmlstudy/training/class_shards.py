"""Class vectors of which each rank has a share: whole in a trial's state, which any number of ranks can read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dmlstudy import distributed
from dmlstudy.losses.class_softmax import ClassSoftmax
from dmlstudy.training.trainer_state import OPTIMIZER


class ClassShards:
    """The shared out parameters of a trainer's modules, with what the optimiser knows of them; none, for most."""

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.shares: dict[str, slice] = {}
        """This rank's share of the classes of each such parameter, and of its optimiser's state, by first name."""
        own = {
            parameter: share for module in modules.values() for parameter, share in shared_out(module).items()
        }
        for part, module in modules.items():
            for name, parameter in module.named_parameters():
                if parameter in own:
                    self.shares[f"{part}.{name}"] = own[parameter]
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for index, parameter in enumerate(trained):
            if parameter in own:
                self.shares[f"{OPTIMIZER}.{index}"] = own[parameter]

    def gathered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with whole tensors, on rank 0; every rank must call this."""
        return {
            name: value if self._share(name, value) is None else distributed.rows_on_rank_0(value)
            for name, value in state.items()
        }

    def cut(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with this rank's share of whole tensors."""
        found = dict(state)
        for name, value in state.items():
            share = self._share(name, value)
            if share is not None:
                found[name] = value[share]
        return found

    def _share(self, name: str, value: Tensor) -> slice | None:
        if value.ndim < 2:  # of an optimiser's state what is not of rows, as a number of steps
            return None
        return self.shares.get(name) or self.shares.get(name.rpartition(".")[0])


def shared_out(module: nn.Module) -> dict[nn.Parameter, slice]:
    """Parameters that hold a share of the classes, with that share."""
    return {
        parameter: part.share
        for part in module.modules()
        if isinstance(part, ClassSoftmax) and part.share is not None
        for parameter in part.parameters()
    }
