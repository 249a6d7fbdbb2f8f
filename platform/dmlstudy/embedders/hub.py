"""Facts of pretrained weights as their hub states them: their own name, their place, their licence.

It is in the library's lists, so no hub is asked; a repository's own is in the network that was built from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from dmlstudy.embedders.backbones import BACKBONES, TIMM, is_elsewhere

DEFAULT = "default"
"""The weights that a hub, or timm's name, gives a backbone if no others are named."""

NO_FACTS: Mapping[str, Any] = {}


class HubEntry(NamedTuple):
    """Pretrained weights as their hub's library states them; empty is what it does not say."""

    entry: str = ""
    url: str = ""
    licence: str = ""
    num_classes: int | None = None


def entry_of(backbone: str, weights: str, network: nn.Module | None = None) -> HubEntry:
    """The facts stated of ``weights``, 'default' or a name of torchvision's, of a backbone.

    ``network`` is what was built of them: of a repository's model nothing is known without it.
    """
    if backbone.startswith(TIMM):
        return _of_timm(backbone.removeprefix(TIMM), network)
    if backbone in BACKBONES:
        return HubEntry()
    from torchvision.models import get_model_weights  # type: ignore[import-untyped]

    known = get_model_weights(backbone)
    found = known.DEFAULT if weights == DEFAULT else known[weights]
    licence, classes = str(found.meta.get("license", "")), found.meta.get("categories", ())
    return HubEntry(f"torchvision {found}", str(found.url), licence, len(classes) or None)


def _of_timm(name: str, network: nn.Module | None) -> HubEntry:
    """Of timm's own list, or of the configuration that a built network carries."""
    stated = getattr(network, "pretrained_cfg", NO_FACTS)
    if network is None and not is_elsewhere(name):
        import timm

        listed = timm.get_pretrained_cfg(name)
        stated = NO_FACTS if listed is None else dataclasses.asdict(listed)
    hub, tag = stated.get("hf_hub_id"), stated.get("tag")
    own = hub or ".".join(str(each) for each in (stated.get("architecture") or name, tag) if each)
    return HubEntry(
        f"timm {own}",
        str(stated.get("url") or stated.get("origin_url") or ""),
        str(stated.get("license") or ""),
        stated.get("num_classes") or None,
    )
