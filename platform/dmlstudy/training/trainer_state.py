"""The state of modules and optimisers as plain tensors by name, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

OPTIMIZER = "optimizer"
"""The first part of an optimiser's names; those of modules begin with what these are called."""


def state_of(modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and what the optimiser knows of each parameter; the tensors themselves, not copies."""
    state = dict(_tensors(modules))
    for index, of_parameter in optimizer.state_dict()["state"].items():
        for name, value in of_parameter.items():
            if value is not None:  # SGD's momentum before a parameter's first gradient
                state[f"{OPTIMIZER}.{index}.{name}"] = value
    return state


def restore(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Take over what ``state_of`` gave. Raises ValueError if the modules' tensors are others than these."""
    own = dict(_tensors(modules))
    saved = {name: value for name, value in state.items() if name.partition(".")[0] in modules}
    check_same(own, saved)
    with torch.no_grad():
        for name, value in own.items():
            if value.dtype == saved[name].dtype:  # in place: data parallel and the optimizer hold them
                value.copy_(saved[name])
            else:  # a buffer that its module has replaced (pml:LargeMarginSoftmaxLoss)
                part, _, path = name.partition(".")
                owner, _, leaf = path.rpartition(".")
                setattr(modules[part].get_submodule(owner), leaf, saved[name].to(value.device))
    of_parameters: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part == OPTIMIZER:
            index, _, key = rest.partition(".")
            of_parameters[int(index)][key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(of_parameters), "param_groups": groups})


def check_same(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both have the same names and, under each, the same shape."""
    differing = {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape}
    if wrong := sorted(differing | (own.keys() ^ saved.keys())):
        raise ValueError(f"a trial's state does not fit its configuration: {', '.join(wrong[:5])}")


def _tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those that a state_dict leaves out."""
    for part, module in modules.items():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            yield f"{part}.{name}", value
