"""Published models: each library computes the model's own numbers of pictures in files, and reads nothing else."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.nn.functional import normalize

from dmlstudy import cli, embedders, model_folder
from dmlstudy.data import Fit, Reading
from dmlstudy.saved import Model
from dmlstudy.serving import publish as publishing
from dmlstudy.serving.hub_card import TABLE, scores
from dmlstudy.serving.publish import Published, Target, publish

SIDE = 64
SMALL = "test_resnet"
"""A network of timm's own tests, of half a million parameters."""
ATOL = 1e-6

CARD = """# birds: margin

Of the family **margin** in the study **birds <b>**.

| metric | mean | 95% t-interval |
|---|---:|---|
| Recall@1 | 0.6250 | 0.6000 to 0.6500 |
| mAP@R | 0.3125 | one seed |

## Limits

Unseen classes.

## Use

old
"""

TIMM_CASES: list[tuple[str, dict[str, Any], Fit]] = [
    ("resnet18", {"dim": 6}, Fit(SIDE)),
    (f"timm:{SMALL}", {"dim": 96, "head": "none"}, Fit(SIDE, 72)),
    (f"timm:{SMALL}", {"dim": 6, "unit_norm": False, "structure": "official"}, Fit(SIDE, 72, False)),
    ("timm:test_vit", {"dim": 6}, Fit(SIDE)),
    ("timm:test_convnext", {"dim": 6}, Fit(SIDE, 72)),
]
LARGE: list[tuple[str, dict[str, Any], Fit]] = [
    ("vit_b_32", {"dim": 6}, Fit(SIDE)),
    ("timm:mobilenetv3_small_050", {"dim": 6}, Fit(SIDE)),
    ("resnet50", {"dim": 2048, "head": "none"}, Fit(SIDE)),
    ("convnext_tiny", {"dim": 6}, Fit(SIDE)),
    ("resnext50_32x4d", {"dim": 6}, Fit(SIDE)),
]
CODE_CASES: list[tuple[str, dict[str, Any], int, Fit]] = [
    ("small_conv", {"dim": 6, "width": 4}, 1, Fit(16, 21)),
    ("bn_inception", {"dim": 9, "fusion": "heads"}, 3, Fit(SIDE, 70, True, Reading("exif", (255, 0, 9)))),
    (f"timm:{SMALL}", {"dim": 6, "space": "ball"}, 3, Fit(SIDE, 72, False)),
]


def saved(
    folder: Path, backbone: str, options: dict[str, Any], fit: Fit, channels: int = 3, card: str = CARD
) -> Model:
    """An embedder in a folder as ``dmlstudy pull`` makes it, with a card."""
    made = embedders.build(backbone, in_channels=channels, image_size=fit.image_size, seed=1, **options)  # type: ignore[arg-type]
    shape = (2, *made.architecture.image_size, channels)
    example = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    embedders.save(made, folder, {"config": {"data": {"name": "cub200"}}}, example, fit)
    (folder / "card.md").write_text(card, encoding="utf-8")
    model_folder.seal(folder)
    return Model.open(folder, name="birds@champion")


@pytest.fixture
def photographs(tmp_path: Path) -> list[Path]:
    """Pictures of three shapes; the longer sides of the latter do not end in whole pixels when they are resized."""
    rng, paths = np.random.default_rng(3), []
    for number, size in enumerate([(80, 80), (96, 144), (90, 131)]):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8))
        path = tmp_path / f"photograph {number}.png"
        coarse.resize(size, Image.Resampling.BICUBIC).save(path)
        paths.append(path)
    return paths


def used(folder: Path, title: str) -> str:
    """The Python code of the published card below a title, for the folder itself."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    code = re.search(rf"### {title}\n\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    return code[1].replace("FOLDER", str(folder))


def run(folder: Path, title: str, path: Path, wanted: str, before: str = "") -> Any:
    names: dict[str, Any] = {}
    exec(before + "\n" + used(folder, title).replace("x.jpg", str(path)), names)
    return names[wanted]


def by_each(folder: Path, path: Path) -> dict[str, np.ndarray]:
    """The embedding of a picture by the code of the published card, for each library."""
    pixels = run(folder, "transformers", path, "x", used(folder, "timm").partition("import timm")[0])
    import timm

    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        h_ND = network(pixels)
    if (folder / "2_Normalize").exists():
        h_ND = normalize(h_ND)
    opened = used(folder, "timm").partition("import timm")[0]
    return {
        "timm": run(folder, "timm", path, "embedding").numpy()[0],
        "transformers": h_ND.numpy()[0],
        "sentence-transformers": run(folder, "sentence-transformers", path, "embedding", opened)[0],
    }


def check_plain(case: tuple[str, dict[str, Any], Fit], tmp_path: Path, photographs: list[Path]) -> None:
    backbone, options, fit = case
    model = saved(tmp_path / "model", backbone, options, fit)
    made = publish(model, Target(tmp_path / "out"))
    assert made.difference <= ATOL
    assert made.libraries == ("timm", "transformers", "sentence-transformers")
    exact = photographs[:2] if fit.resize_to and fit.keep_aspect else photographs
    for path in exact:
        (own,) = model.embed(path)
        for library, got in by_each(tmp_path / "out", path).items():
            np.testing.assert_allclose(got, own, atol=ATOL * max(1, abs(own).max()), err_msg=library)


@pytest.mark.parametrize("case", TIMM_CASES, ids=[f"{each[0]}-{each[2].resize_to}" for each in TIMM_CASES])
def test_three_libraries_compute_the_same(
    case: tuple[str, dict[str, Any], Fit], tmp_path: Path, photographs: list[Path]
) -> None:
    check_plain(case, tmp_path, photographs)


@pytest.mark.long
@pytest.mark.parametrize("case", LARGE, ids=[each[0] for each in LARGE])
def test_of_larger_networks_too(
    case: tuple[str, dict[str, Any], Fit], tmp_path: Path, photographs: list[Path]
) -> None:
    check_plain(case, tmp_path, photographs)


@pytest.mark.parametrize("case", CODE_CASES, ids=[each[0] for each in CODE_CASES])
def test_any_embedder_has_a_form_with_code_that_reads_files_exactly(
    case: tuple[str, dict[str, Any], int, Fit], tmp_path: Path, photographs: list[Path]
) -> None:
    from sentence_transformers import SentenceTransformer

    backbone, options, channels, fit = case
    model = saved(tmp_path / "model", backbone, options, fit, channels)
    with pytest.raises(ValueError, match=r"^birds@champion: has no form without code \(.*--with-code"):
        publish(model, Target(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    made = publish(model, Target(tmp_path / "out"), with_code=True)
    assert any("trust_remote_code=True" in note for note in made.notes)
    clear = tmp_path / "clear.png"
    rgba = np.random.default_rng(0).integers(0, 256, (70, 90, 4), dtype=np.uint8)
    Image.fromarray(rgba).save(clear)
    turned = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(photographs[2]).save(turned, exif=exif)
    paths = [*photographs, clear, turned]
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path / "out"), device="cpu")
    network = SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=True)
    wanted = np.stack([model.embed(path)[0] for path in paths])
    np.testing.assert_allclose(network.encode(list(map(str, paths))), wanted, atol=ATOL)
    np.testing.assert_allclose(network.encode([Image.open(path) for path in paths]), wanted, atol=ATOL)
    pixels = run(tmp_path / "out", "transformers", photographs[0], "x")  # also without a timm model
    assert pixels.shape[-2:] == embedders.load(model.folder).architecture.image_size


def test_a_grey_model_is_told_what_colours_become(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", f"timm:{SMALL}", {"dim": 6}, Fit(SIDE), channels=1)
    made = publish(model, Target(tmp_path / "out"))
    assert any(note.startswith("Pictures are grey") for note in made.notes)
    path = tmp_path / "grey.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 96), dtype=np.uint8)).save(path)
    for got in by_each(tmp_path / "out", path).values():
        np.testing.assert_allclose(got, model.embed(path)[0], atol=ATOL)


def test_a_longer_side_that_is_rounded_otherwise_is_told(tmp_path: Path, photographs: list[Path]) -> None:
    model = saved(tmp_path / "model", f"timm:{SMALL}", {"dim": 6}, Fit(SIDE, 73))
    made = publish(model, Target(tmp_path / "out"))
    assert any("round a picture's longer side down" in note for note in made.notes)
    (own,) = model.embed(photographs[2])  # 131 / 90 * 73 = 106.26 is rounded alike, 96 x 145 is not
    odd = tmp_path / "odd.png"
    Image.open(photographs[1]).resize((96, 145)).save(odd)  # 110.26; 96 x 148: 112.54
    Image.open(photographs[1]).resize((96, 148)).save(odd)
    assert abs(by_each(tmp_path / "out", odd)["timm"] - model.embed(odd)[0]).max() > ATOL
    np.testing.assert_allclose(by_each(tmp_path / "out", photographs[2])["timm"], own, atol=ATOL)


def test_a_published_folder_is_a_backbone_to_start_from(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", f"timm:{SMALL}", {"dim": 6}, Fit(SIDE))
    publish(model, Target(tmp_path / "out"))
    name = f"timm:local-dir:{tmp_path / 'out'}"
    again = embedders.build(name, 4, weights="default", in_channels=3, image_size=SIDE, seed=0)
    assert again.architecture.backbone == f"timm:{SMALL}"
    images = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)
    own, given = model.loaded.network.eval(), again.eval()
    with torch.no_grad():
        wanted, got = (each.features(torch.from_numpy(images)) for each in (own, given))
    torch.testing.assert_close(got, wanted, atol=ATOL, rtol=0)


def test_the_head_of_the_card_is_the_hubs(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    model = saved(tmp_path / "model", f"timm:{SMALL}", {"dim": 6}, Fit(SIDE))
    publish(model, Target(tmp_path / "out"), licence="mit")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("timm", "image-feature-extraction", "mit")
    assert set(data.tags or ()) >= {"timm", "transformers", "sentence-transformers", "dmlstudy"}
    results = {each.metric_type: (each.metric_value, each.dataset_name) for each in data.eval_results or ()}
    assert results == {"recall_1": (0.625, "cub200"), "map_r": (0.3125, "cub200")}
    assert "# birds: margin" in text
    assert "\nold\n" not in text
    assert re.findall(r"^### (.*)", text, re.MULTILINE) == ["timm", "transformers", "sentence-transformers"]


def test_a_model_without_a_card_has_no_scores(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", f"timm:{SMALL}", {"dim": 6}, Fit(SIDE), card="")
    publish(model, Target(tmp_path / "out"))
    head = (tmp_path / "out" / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    assert "model-index" not in yaml.safe_load(head)


def test_scores_are_those_of_the_table_alone() -> None:
    table = f"\n{TABLE}\n|---|---:|---|\n| a | 0.5 | one seed |\n\n| b | 0.7 | one seed |\n"
    assert scores(table) == {"a": 0.5}
    assert scores("| b | 0.7 | one seed |") == {}


@pytest.fixture
def plain(tmp_path: Path) -> Model:
    return saved(tmp_path / "model", f"timm:{SMALL}", {"dim": 6}, Fit(SIDE))


class Hub:
    """A hub that keeps what it is sent."""

    def __init__(self, *, is_away: bool = False, **named: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.is_away = is_away

    def create_repo(self, repo_id: str, **named: Any) -> None:
        if self.is_away:
            raise OSError("401 Client Error:\nUnauthorized")
        self.calls.append(("create", (repo_id, named)))

    def upload_folder(self, folder_path: Path, **named: Any) -> None:
        files = {path.name for path in Path(folder_path).rglob("*") if path.is_file()}
        self.calls.append(("upload", (files, named)))


@pytest.mark.parametrize("is_public", [False, True])
def test_a_repository_is_made_and_sent_in_one_commit(
    plain: Model, is_public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **named: hub)
    made = publish(plain, Target.of("hub:me/birds"), is_public=is_public)
    assert made.url == "https://huggingface.co/me/birds"
    (_, created), (_, (files, sent)) = hub.calls
    assert created == ("me/birds", {"private": not is_public, "exist_ok": True})
    assert files == {Path(name).name for name in made.files}
    assert sent["repo_id"] == "me/birds"
    assert "modeling_dmlstudy.py" in sent["delete_patterns"]


def test_a_hub_that_refuses_is_one_line(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **named: Hub(is_away=True))
    with pytest.raises(ValueError, match=r"^--to hub:me/birds: not uploaded \(401 Client Error") as error:
        publish(plain, Target.of("hub:me/birds"))
    assert "\n" not in str(error.value)


def never(folder: Path, repository: str, is_public: bool) -> str:
    raise AssertionError("nothing is sent")


def test_a_dry_run_lists_the_files_and_keeps_none(plain: Model, tmp_path: Path) -> None:
    made = publish(plain, Target.of("hub:me/birds"), is_dry=True, upload=never)
    here = publish(plain, Target(tmp_path / "out"), is_dry=True)
    assert not (tmp_path / "out").exists()
    assert made.files.keys() == here.files.keys() >= {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "text", ["hub:birds", "hub:", "hub:a/b/c", "hub:a b/c", "hub:a/../b", "hub:a/b--c", "hub:a/b\n"]
)
def test_what_is_no_repository_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no repository; write hub:OWNER/REPOSITORY"):
        Target.of(text)


def test_a_place_that_is_taken_is_left_alone(plain: Model, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("taken", "file", "link"):
        with pytest.raises(ValueError, match="exists already; name a new folder with --to"):
            publish(plain, Target(tmp_path / name))
    with pytest.raises(ValueError, match="lies in the model's folder"):
        publish(plain, Target(plain.folder / "out"))
    assert (tmp_path / "taken" / "mine").read_text() == "x"
    (tmp_path / "empty").mkdir()
    publish(plain, Target(tmp_path / "empty"))
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.parametrize("licence", ["MIT license", "a\nb", ""])
def test_a_licence_is_an_identifier(plain: Model, tmp_path: Path, licence: str) -> None:
    with pytest.raises(ValueError, match="is no identifier of the hub"):
        publish(plain, Target(tmp_path / "out"), licence=licence)


@pytest.mark.parametrize("kind", ["codes", "learner"])
def test_models_of_vectors_are_refused(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match="takes vectors, and timm, transformers and sentence-transformers"):
        publish(Model.open(models[kind]), Target(tmp_path / "out"))


def test_other_numbers_are_refused(plain: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.timm_form, "computed", lambda folder, embedder, x: np.ones((len(x), 6)))
    with pytest.raises(ValueError, match="timm's model differs from it by"):
        publish(plain, Target(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_description_becomes_no_code(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "small_conv", {"dim": 6, "width": 4}, Fit(16), 1)
    described = json.loads((model.folder / "embedder.json").read_text())
    described["preprocessing"]["background"] = 'red"); import os; ("'
    (model.folder / "embedder.json").write_text(json.dumps(described))
    model_folder.seal(model.folder)
    with pytest.raises(ValueError, match="preprocessing is not understood"):
        publish(Model.open(model.folder), Target(tmp_path / "out"), with_code=True)


def test_the_command_lists_files_and_notes(
    plain: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["dmlstudy", "push", str(plain.folder), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert ended.value.code in (0, None), shown.err
        return shown.out

    shown = called("--to", tmp_path / "out", "--dry-run")
    assert "model.safetensors" in shown
    assert "9 files would be written to" in shown.replace("\n", " ")
    facts = json.loads(called("--to", tmp_path / "out", "--json"))
    made = Published(**{name: facts[name] for name in Published._fields})
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")} == set(
        made.files
    )
    shutil.rmtree(tmp_path / "out")
