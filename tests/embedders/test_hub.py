"""What a hub's library states of its weights, without asking the hub."""

from __future__ import annotations

from torch import nn

from dmlstudy.embedders.hub import HubEntry, entry_of


def test_torchvision_names_the_entry_its_file_and_the_licence_where_it_has_one() -> None:
    entry = entry_of("resnet18", "default")
    assert entry.entry == "torchvision ResNet18_Weights.IMAGENET1K_V1"
    assert entry.url.endswith(".pth")
    assert (entry.licence, entry.num_classes) == ("", 1000)
    assert entry == entry_of("resnet18", "IMAGENET1K_V1")
    assert "SWAG" in entry_of("vit_b_16", "IMAGENET1K_SWAG_E2E_V1").licence


def test_timm_names_the_tag_that_default_stands_for() -> None:
    entry = entry_of("timm:resnet18", "default")
    assert entry.entry.startswith("timm timm/resnet18.")
    assert entry.licence == "apache-2.0"
    assert entry.num_classes == 1000


def test_a_repository_is_what_its_network_says() -> None:
    network = nn.Identity()
    assert entry_of("timm:hf-hub:owner/net", "default", network) == HubEntry("timm hf-hub:owner/net")
    network.pretrained_cfg = {"hf_hub_id": "owner/net", "license": "mit", "num_classes": 7}  # type: ignore[assignment]
    assert entry_of("timm:hf-hub:owner/net", "default", network) == HubEntry("timm owner/net", "", "mit", 7)


def test_our_own_have_no_hub() -> None:
    assert entry_of("small_conv", "default") == HubEntry()
