"""Embedders: unit norm, initialised by their seed, the folder on disk and what happens when it is altered."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dmlstudy import embedders, model_folder
from dmlstudy.embedders.backbones import build_backbone


def small(**changes: Any) -> embedders.Embedder:
    arguments: dict[str, Any] = {"dim": 6, "width": 4, "in_channels": 1, "image_size": 8, "seed": 3}
    return embedders.build("small_conv", **(arguments | changes))


def pictures(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    embedders.save(small(), folder, {"data": {"fingerprint": "f00"}})
    return folder


@pytest.fixture(scope="module")
def with_program(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("program") / "embedder")
    embedders.add_program(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.parametrize(
    ("backbone", "channels", "size"),
    [
        ("small_conv", 1, (8, 8)),
        ("small_conv", 3, (9, 13)),
        ("resnet18", 1, (32, 32)),
        ("resnet18", 3, (40, 32)),
    ],
)
def test_unit_norm_float32(backbone: str, channels: int, size: tuple[int, int]) -> None:
    embedder = embedders.build(backbone, 16, width=8, in_channels=channels, image_size=size, seed=0)
    images = pictures(3, *size, channels)
    z = embedders.embed(embedder, images)
    assert z.shape == (3, 16)
    assert z.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    with torch.no_grad():
        as_float = embedder.eval()(torch.tensor(images).float()).numpy()
    np.testing.assert_allclose(as_float, z, atol=1e-6)


def test_grey_is_rgb_of_equal_channels() -> None:
    grey = embedders.build("resnet18", 8, in_channels=1, image_size=32, seed=0)
    colour = embedders.build("resnet18", 8, in_channels=3, image_size=32, seed=0)
    images = pictures(2, 32, 32, 1)
    z = embedders.embed(grey, images)
    np.testing.assert_allclose(z, embedders.embed(colour, np.repeat(images, 3, axis=3)), atol=1e-6)


def test_preprocessing_is_inside() -> None:
    embedder, images = small(), pictures(2, 8, 8, 1)
    x = (torch.tensor(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        z = embedder.head(embedder.backbone(x))
    expected = (z / z.norm(dim=1, keepdim=True)).numpy()
    np.testing.assert_allclose(embedders.embed(embedder, images), expected, atol=1e-6)


@pytest.mark.parametrize(("backbone", "channels"), [("small_conv", 3), ("resnet18", 3), ("resnet18", 1)])
def test_images_lie_in_memory_as_the_weights_do(backbone: str, channels: int) -> None:
    """cuDNN and MKL run channels last where either is."""
    embedder = embedders.build(backbone, 8, width=4, in_channels=channels, image_size=32, seed=0).eval()
    first = next(module for module in embedder.backbone.modules() if isinstance(module, torch.nn.Conv2d))
    seen: list[tuple[int, ...]] = []
    first.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].stride()))
    images = pictures(2, 32, 32, channels)
    planar = embedders.embed(embedder, images)
    embedder.backbone.to(memory_format=torch.channels_last)
    interleaved = embedders.embed(embedder, images)
    assert seen == [(3 * 32 * 32, 32 * 32, 32, 1), (3 * 32 * 32, 1, 3 * 32, 3)]
    np.testing.assert_allclose(planar, interleaved, atol=1e-5)


def test_initialisation_depends_on_the_seed_only() -> None:
    torch.manual_seed(0)
    first = small()
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.rand(1) == after  # the global generator is untouched
    again, other = small(), small(seed=4)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_small_conv_has_no_batch_statistics() -> None:
    embedder, images = small(), torch.tensor(pictures(4, 8, 8, 1))
    torch.testing.assert_close(embedder.train()(images)[:1], embedder.train()(images[:1]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("freeze_bn", [True, False])
def test_freeze_bn_holds_from_the_start_and_in_training(freeze_bn: bool) -> None:
    embedder = embedders.build("resnet18", 4, in_channels=3, image_size=32, seed=0, freeze_bn=freeze_bn)
    norms = [m for m in embedder.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert all(m.training is not freeze_bn for m in norms)
    embedder.eval()
    embedder.train()
    assert embedder.training
    assert all(m.training is not freeze_bn for m in norms)
    before = norms[0].running_mean.clone()
    embedder(torch.tensor(pictures(2, 32, 32, 3)))
    assert torch.equal(before, norms[0].running_mean) is freeze_bn
    assert norms[0].weight.requires_grad


def test_embed_restores_every_mode_and_takes_any_batch_size() -> None:
    embedder, images = small(), pictures(7, 8, 8, 1)
    images.flags.writeable = False  # as arrays from a shared object store are
    embedder.train()
    embedder.backbone.eval()
    z = embedders.embed(embedder, images)
    assert embedder.training
    assert embedder.head.training
    assert not embedder.backbone.training
    np.testing.assert_allclose(z, embedders.embed(embedder, images, batch_size=2, device="cpu"), atol=1e-6)
    assert embedders.embed(embedder, images[:0]).shape == (0, 6)


def test_a_blank_image_stays_finite() -> None:
    embedder = small()
    torch.nn.init.zeros_(embedder.head.weight)
    torch.nn.init.zeros_(embedder.head.bias)
    z = embedder(torch.zeros(2, 8, 8, 1, dtype=torch.uint8))
    z.sum().backward()
    assert z.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in embedder.parameters())


def test_faults_in_building() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'resnet18'\? known are: small_conv, bn_inception"):
        embedders.build("resnet-18", 4, in_channels=3, image_size=32, seed=0)
    with pytest.raises(ValueError, match="2 channels"):
        small(in_channels=2)
    with pytest.raises(ValueError, match=r"no file nowhere\.pth"):
        small(weights="nowhere.pth")
    with pytest.raises(ValueError, match="no 'default' weights"):
        small(weights="default")
    with pytest.raises(ValueError, match=r"this embedder takes \(8, 8, 1\)"):
        embedders.embed(small(), pictures(2, 9, 8, 1))


def test_weights_from_a_file(tmp_path: Path) -> None:
    donor = small(seed=9).backbone.state_dict()
    torch.save(donor, tmp_path / "w.pth")
    save_file(donor, tmp_path / "w.safetensors")
    for name in ("w.pth", "w.safetensors"):
        loaded = small(weights=str(tmp_path / name)).backbone.state_dict()
        assert all(torch.equal(loaded[key], donor[key]) for key in donor)
    (tmp_path / "junk.pth").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.pth does not fit this backbone"):
        small(weights=str(tmp_path / "junk.pth"))
    with pytest.raises(ValueError, match=r"w\.pth does not fit this backbone"):
        small(weights=str(tmp_path / "w.pth"), width=8)


def test_a_classifier_in_the_file_is_left_out(tmp_path: Path) -> None:
    from torchvision.models import get_model

    torch.save(get_model("resnet18").state_dict(), tmp_path / "r.pth")
    network = build_backbone("resnet18", 3, 0, str(tmp_path / "r.pth")).network
    assert not any(key.startswith("fc") for key in network.state_dict())


def test_save_and_load(saved: Path) -> None:
    embedder, images = small(), pictures(5, 8, 8, 1)
    loaded = embedders.load(saved)
    assert not loaded.training
    assert loaded.architecture == embedder.architecture
    np.testing.assert_array_equal(embedders.embed(loaded, images), embedders.embed(embedder, images))
    description = json.loads((saved / "embedder.json").read_text())
    assert description["format_version"] == 1
    assert description["preprocessing"] == {
        "dtype": "uint8",
        "layout": "NHWC",
        "channels": 1,
        "image_size": [8, 8],
        "range": [0, 255],
        "colours": "grey",
        "orientation": "exif",
        "background": "#ffffff",
        "bits": "upper 8 of 16, floats from 0 to 1 times 255",
        "frame": "first",
        "resize": {"rule": "image_size", "to": [8, 8], "filter": "bilinear", "antialias": True},
        "crop": "none",
        "scale": 1 / 255,
        "mean": [0.5],
        "std": [0.5],
        "network_order": "RGB",
    }
    assert description["output"] == {"dim": 6, "unit_norm": True, "distance": "euclidean"}
    assert description["extra"] == {"data": {"fingerprint": "f00"}}


def test_saving_leaves_the_embedder_as_it_was(tmp_path: Path) -> None:
    embedder = small().train()
    before = {key: value.clone() for key, value in embedder.state_dict().items()}
    embedders.save(embedder, tmp_path / "new" / "folder")
    assert embedder.training
    assert all(torch.equal(before[key], value) for key, value in embedder.state_dict().items())


def test_batch_norm_travels(tmp_path: Path) -> None:
    embedder = embedders.build("resnet18", 4, in_channels=3, image_size=32, seed=0, freeze_bn=False)
    images = pictures(3, 32, 32, 3)
    embedder.train()(torch.tensor(images))  # moves the running statistics
    embedders.save(embedder, tmp_path)
    embedders.add_program(tmp_path)
    z = embedders.embed(embedder, images)
    np.testing.assert_array_equal(embedders.embed(embedders.load(tmp_path), images), z)
    program = torch.export.load(tmp_path / "embedder.pt2").module()
    for count in (1, 3):
        with torch.no_grad():
            np.testing.assert_allclose(program(torch.tensor(images[:count])).numpy(), z[:count], atol=1e-5)


def test_save_writes_no_program(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "weights.safetensors",
        "embedder.json",
        "manifest.json",
    }


@pytest.mark.parametrize("name", ["weights.safetensors", "embedder.json", "embedder.pt2"])
def test_a_missing_or_altered_file_is_refused(name: str, with_program: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(with_program, tmp_path / "altered")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(ValueError, match=rf"{name}: altered"):
        embedders.load(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: listed in the manifest, but missing"):
        embedders.verify(folder)


def test_extra_files_are_sealed_too(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "card.md").write_text("trained on digits")
    model_folder.seal(folder)
    embedders.verify(folder)
    (folder / "notes" / "card.md").write_text("trained on everything")
    with pytest.raises(ValueError, match=r"notes/card\.md: altered"):
        embedders.load(folder)


def test_manifest_faults(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"../secret": "0"}))
    with pytest.raises(ValueError, match="outside the folder"):
        embedders.load(folder)
    del manifest["embedder.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"does not list embedder\.json"):
        embedders.load(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json: not valid JSON"):
        embedders.load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="is this the folder of a saved model"):
        embedders.load(folder)
    assert embedders.load(folder, verify=False).architecture.dim == 6


def test_a_save_that_fails_leaves_nothing_to_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["dmlstudy.embedders.folder"], "_describe", torn)
    with pytest.raises(OSError, match="disk full"):
        embedders.save(small(seed=5), folder)
    with pytest.raises(ValueError, match=r"manifest\.json: no such file"):
        embedders.load(folder)


def test_a_program_that_differs_is_refused_and_leaves_the_folder_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    exported = torch.export.export

    def another(embedder: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return exported(small(seed=99).eval(), *arguments, **named)

    monkeypatch.setattr(torch.export, "export", another)
    with pytest.raises(RuntimeError, match=r"embedder\.pt2: the exported program differs from the model by"):
        embedders.add_program(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_program_is_only_added_to_an_intact_folder(folder: Path) -> None:
    with open(folder / "weights.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"weights\.safetensors: altered"):
        embedders.add_program(folder)
    assert not (folder / "embedder.pt2").exists()


def test_saving_again_does_not_keep_the_program_of_the_embedder_before(
    with_program: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(with_program, tmp_path / "again")
    embedders.save(small(seed=9), folder)
    assert not (folder / "embedder.pt2").exists()


def test_descriptions_not_understood(folder: Path) -> None:
    description = json.loads((folder / "embedder.json").read_text())
    for change, message in (
        ({"format_version": 2}, "format version 2"),
        (
            {"architecture": {"backbone": "small_conv"}},
            r"not understood \(architecture\.dim: Field required\)",
        ),
        ({"architecture": description["architecture"] | {"width": 8}}, r"weights\.safetensors: does not fit"),
    ):
        (folder / "embedder.json").write_text(json.dumps(description | change))
        with pytest.raises(ValueError, match=message):
            embedders.load(folder, verify=False)


TORCH_ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"dmlstudy", "ray", "mlflow", "safetensors", "torchvision", "optuna", "faiss"}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Refuse())
import numpy, torch
folder = sys.argv[1]
embed = torch.export.load(folder + "/embedder.pt2").module()
with torch.no_grad():
    numpy.save(folder + "/z.npy", embed(torch.from_numpy(numpy.load(folder + "/x.npy"))).numpy())
assert "dmlstudy" not in sys.modules and "torchvision" not in sys.modules
"""


def test_the_folder_works_with_torch_alone(with_program: Path, tmp_path: Path) -> None:
    embedders.verify(with_program)
    folder = shutil.copytree(with_program, tmp_path / "alone")
    images = pictures(11, 8, 8, 1)
    np.save(folder / "x.npy", images)
    subprocess.run([sys.executable, "-c", TORCH_ALONE, str(folder)], check=True, timeout=120)
    np.testing.assert_allclose(np.load(folder / "z.npy"), embedders.embed(small(), images), atol=1e-6)
