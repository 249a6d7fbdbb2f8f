"""Networks that are described outside timm: a repository of a hub, of which a folder stands in, and a folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dmlstudy import embedders
from dmlstudy.embedders import weights
from dmlstudy.embedders.backbones import build_backbone

timm = pytest.importorskip("timm")


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=3).eval()


@pytest.fixture
def repository(network: Any, tmp_path: Path) -> Path:
    """A folder as timm writes a repository: config.json and model.safetensors."""
    folder = tmp_path / "repository"
    folder.mkdir()
    config = {
        "architecture": "resnet10t",
        "num_classes": 3,
        "pretrained_cfg": {
            "input_size": [3, 64, 64],
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "num_classes": 3,
            "classifier": "fc",
            "first_conv": "conv1.0",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(network.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a repository on a hub that has this one alone."""
    from huggingface_hub.errors import EntryNotFoundError
    from timm.models import _hub

    def download(repo_id: str, filename: str, **more: Any) -> str:
        if repo_id != "someone/birds":
            raise OSError(f"{repo_id} cannot be reached")
        if not (repository / filename).is_file():
            raise EntryNotFoundError(f"no {filename}", response=None)  # type: ignore[arg-type]
        return str(repository / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", download)
    return "timm:hf-hub:someone/birds"


def agree(made: embedders.Embedder, network: Any) -> bool:
    own, given = made.backbone.state_dict(), network.state_dict()
    return all(torch.equal(own[name], given[name]) for name in own)


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_a_network_outside_timm_is_built_loaded_and_saved(
    where: str, hub: str, repository: Path, network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = hub if where == "hub" else f"timm:local-dir:{repository}"
    embedders.check_backbone(name, "default")
    made = embedders.build(name, 4, weights="default", in_channels=3, image_size=64, seed=0)
    assert agree(made, network)
    assert not agree(embedders.build(name, 4, in_channels=3, image_size=64, seed=0), network)
    torch.testing.assert_close(made.mean_C, torch.tensor([0.1, 0.2, 0.3]))
    own = {key: value for key, value in network.state_dict().items() if not key.startswith("fc.")}
    assert made.loaded_sha256 == weights.digest(own)
    embedders.save(made, tmp_path / "saved")
    for path in repository.iterdir():  # a saved model needs neither the hub nor the folder
        path.unlink()
    again = embedders.load(tmp_path / "saved")
    assert again.architecture.backbone == "timm:resnet10t"
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    np.testing.assert_array_equal(embedders.embed(again, images), embedders.embed(made, images))
    start = embedders.build(
        "timm:resnet10t", 4, weights=str(tmp_path / "saved"), in_channels=3, image_size=64, seed=1
    )
    np.testing.assert_array_equal(embedders.embed(start, images), embedders.embed(made, images))


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(__file__).parent / "was_run",))


def test_nothing_that_a_repository_holds_is_run(hub: str, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    (repository / "pytorch_model.bin").write_bytes(pickle.dumps({"conv1.0.weight": Harmful()}))
    for name in (hub, f"timm:local-dir:{repository}"):
        with pytest.raises(
            ValueError, match=r"embedder\.weights: could not get the weights of timm:"
        ) as error:
            build_backbone(name, 3, 4, "default", (64, 64))
        assert "\n" not in str(error.value)
    assert not (Path(__file__).parent / "was_run").exists()


def test_what_is_not_there_is_one_line(hub: str, tmp_path: Path) -> None:
    for name, said in (
        ("timm:hf-hub:birds", "names no repository; write timm:hf-hub:OWNER/REPOSITORY"),
        ("timm:local-dir:here", "is relative, but workers have other folders"),
    ):
        with pytest.raises(ValueError, match=said):
            embedders.check_backbone(name)
    for name, given in (
        ("timm:hf-hub:no/where", None),
        ("timm:hf-hub:no/where", "default"),
        (f"timm:local-dir:{tmp_path}", "default"),
    ):
        with pytest.raises(
            ValueError, match=r"^embedder\.\w+: .*(cannot be (built|reached)|could not get)"
        ) as no:
            build_backbone(name, 3, 4, given, (64, 64))
        assert "\n" not in str(no.value)


def test_a_digest_is_of_tensors_whatever_the_file(tmp_path: Path) -> None:
    state = {"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.float16), "n": torch.tensor(7)}
    torch.save({"state_dict": state}, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    assert len({weights.digest(weights.read(path)) for path in tmp_path.iterdir()}) == 1
    others = [{**state, "b": torch.arange(3)}, {**state, "b": torch.zeros(3)}, {"c": state["b"]}]
    assert len({weights.digest(each) for each in (state, *others)}) == 4
