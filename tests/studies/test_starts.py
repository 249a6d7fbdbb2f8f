"""What embedder.weights stand for: settled once, by version and digest; heads, ancestors, classes that were seen."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import config
from support.verdict_trials import verdict_trial

from dmlstudy import cli, data, embedders
from dmlstudy.embedders import weights
from dmlstudy.model_folder import seal
from dmlstudy.records import LossConfig, StartConfig, TrialConfig
from dmlstudy.registry import connection, models
from dmlstudy.registry.card import _start
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.spec import registered, study_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.store import Store, StoreError
from dmlstudy.studies import starts
from dmlstudy.training import lineage, started
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.trial import run_trial


def network(seed: int = 0, dim: int = 6, **more: Any) -> embedders.Embedder:
    return embedders.build("small_conv", dim, width=4, in_channels=1, image_size=8, seed=seed, **more)


def trained(folder: Path, **changes: Any) -> Path:
    """A model of the digits' development classes, as a verdict trial leaves it."""
    given = {"phase": "verdict", "training__epochs": 1, "embedder__dim": 6, "keep_embedder": True, **changes}
    run_trial(TrialConfig.model_validate(config(**given)), lambda report: None, save_to=folder)
    return folder


@pytest.fixture(scope="module")
def generations(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model from random weights, one from that model, and one from that."""
    made: list[Path] = []
    for number in range(3):
        folder = tmp_path_factory.mktemp("trained") / f"model{number}"
        changes: dict[str, Any] = {"seed": number}
        if made:
            spec = study(str(made[-1]))
            starts.settle(spec, Store(folder.parent), found(spec))
            start = next(iter(spec.starts.values()))
            changes |= {"embedder__weights": str(made[-1]), "start": start.model_dump()}
        made.append(trained(folder, **changes))
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, generations: list[Path]) -> Store:
    """A store in which the first two models are versions of ``digits``, the first one the champion."""
    made = Store(tmp_path_factory.mktemp("store") / "store")
    made.prepare()
    connection.connect(made, create=True)
    tracker = StudyTracker(made, "models", {})
    for seed, folder in enumerate(generations[:2]):
        run_id = tracker.start_trial(f"power verdict seed {seed}", verdict_trial("power"), None)
        tracker.end_trial(run_id, "finished", [], {"test_map_at_r": 0.5})
        models.register(
            made, "digits", lambda _, f=folder: f, run_id=run_id, tags={}, card=lambda _: "# card"
        )
    tracker.client.set_registered_model_alias("digits", "champion", "1")
    return made


def study(weights: str | None, **embedder: Any) -> StudySpec:
    return study_file.parse(
        {
            "name": "small",
            "data": {"name": "digits"},
            "embedder": {"backbone": "small_conv", "dim": 6, "width": 4, "weights": weights, **embedder},
            "families": {"ms": {"space": "multi_similarity"}},
        }
    )


def found(spec: StudySpec) -> starts.Present | None:
    return starts.present(spec, data.load("digits"))


def the_start(spec: StudySpec) -> StartConfig:
    (start,) = spec.starts.values()
    return start


def begun(spec: StudySpec, store: Store) -> list[str]:
    """Settle as a driver does, and keep it as it keeps it."""
    lines = starts.settle(spec, store, found(spec))
    store.write_state(spec.name, "interrupted", starts=starts.entries(spec))
    return lines


@pytest.fixture
def own(store: Store, tmp_path: Path) -> Store:
    """A store of its own for studies, without models."""
    made = Store(tmp_path / "own")
    made.prepare()
    return made


def test_a_study_keeps_the_version_it_began_with(store: Store, own: Store) -> None:
    written = f"models:/digits@champion?store={store.root}"
    first = study(written)
    (line, note) = begun(first, own)
    start = the_start(first)
    assert start.source == f"models:/digits/1?store={store.root}"
    assert line.startswith(f"embedder.weights: {written} is models:/digits/1")
    assert line.endswith(f"(SHA-256 {start.sha256[:12]}) <- random; its head is kept")
    assert "was trained on 5 of the 5 development classes, so validation scores are of classes it" in note
    place = Path(str(start.place))
    assert start.sha256 == weights.digest(weights.read(place))
    client = connection.connect(store)
    client.set_registered_model_alias("digits", "champion", "2")
    try:
        again = study(written)
        begun(again, own)
        assert the_start(again) == start
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
        begun(again, own)
        assert the_start(again) == start
        assert place.is_dir()
        fresh = study(written)
        with starts.looked_at(fresh, own, found(fresh)):
            assert "models:/digits/2" in the_start(fresh).source
        assert fresh.starts == {}
    finally:
        client.set_registered_model_alias("digits", "champion", "1")
    starts.remove_copies(again, own)
    assert not place.exists()


def test_weights_that_have_changed_are_refused(own: Store, tmp_path: Path, generations: list[Path]) -> None:
    path = tmp_path / "weights.pt"
    torch.save(network(1).backbone.state_dict(), path)
    first = study(str(path))
    assert begun(first, own) == [
        f"embedder.weights: {path} is {path} (SHA-256 {weights.digest(weights.read(path))[:12]})"
    ]
    torch.save(network(2).backbone.state_dict(), path)
    with pytest.raises(
        StoreError, match=r"study 'small': embedder\.weights: .* is not what the study began"
    ) as no:
        begun(study(str(path)), own)
    assert "\n" not in str(no.value)
    given = config(embedder__weights=str(path), start=the_start(first).model_dump())
    with pytest.raises(TrialFailed, match="holds other weights than when the study began"):
        run_trial(TrialConfig.model_validate(given), lambda report: None)
    path.unlink()
    with pytest.raises(StoreError, match=r"now embedder\.weights: no file"):
        begun(study(str(path)), own)


def with_another_head(source: Path, folder: Path) -> Path:
    """A saved copy of the model that differs in its head alone."""
    other = embedders.load(source)
    with torch.no_grad():
        for parameter in other.head.parameters():
            parameter.add_(1.0)
    embedders.save(other, folder, embedders.extra(source), np.zeros((2, 8, 8, 1), np.uint8))
    return folder


def test_another_head_is_another_start(own: Store, tmp_path: Path, generations: list[Path]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(generations[0], folder)
    first = study(str(folder))
    begun(first, own)
    start = the_start(first)
    shutil.rmtree(folder)
    with_another_head(generations[0], folder)
    assert weights.digest(weights.read(folder)) == start.sha256
    with pytest.raises(StoreError, match=r"not what the study began with \(head and normalisation: SHA-256"):
        begun(study(str(folder)), own)
    given = config(embedder__weights=str(folder), embedder__dim=6, start=start.model_dump())
    with pytest.raises(TrialFailed, match="holds another head or normalisation than when the study began"):
        run_trial(TrialConfig.model_validate(given), lambda report: None)
    trials = [
        TrialConfig.model_validate(config()).model_copy(
            update={"start": StartConfig(source="models:/a/1", sha256="1", head_sha256=head)}
        )
        for head in ("", "2", "3")
    ]
    assert len({each.fingerprint() for each in trials}) == 3


def test_a_start_of_before_heads_counted_is_compared_without(
    own: Store, tmp_path: Path, generations: list[Path]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(generations[0], folder)
    first = study(str(folder))
    begun(first, own)
    earlier = the_start(first).model_copy(update={"head_sha256": ""})
    assert "head_sha256" not in earlier.model_dump()
    own.write_state(
        "small", "interrupted", starts=[{**starts.entries(first)[0], "start": earlier.model_dump()}]
    )
    shutil.rmtree(folder)
    with_another_head(generations[0], folder)
    again = study(str(folder))
    starts.settle(again, own, found(again))
    assert the_start(again) == earlier


def test_a_resumed_study_with_its_copy_needs_no_registry(
    store: Store, own: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = f"models:/digits@champion?store={store.root}"
    first = study(written)
    begun(first, own)

    def gone(*_: object) -> None:
        raise ValueError("digits/1: no such version")

    monkeypatch.setattr(models, "resolve", gone)
    again = study(written)
    begun(again, own)
    assert the_start(again) == the_start(first)
    (Path(str(the_start(first).place)) / "weights.safetensors").unlink()
    with pytest.raises(SpecError, match="no such version"):
        begun(study(written), own)


def test_an_edited_copy_is_made_anew(store: Store, own: Store) -> None:
    written = f"models:/digits@champion?store={store.root}"
    first = study(written)
    begun(first, own)
    with_another_head(Path(str(the_start(first).place)), Path(str(the_start(first).place)) / "other")
    place = Path(str(the_start(first).place))
    for path in (place / "other").iterdir():
        path.replace(place / path.name)
    again = study(written)
    begun(again, own)
    assert the_start(again) == the_start(first)
    assert weights.saved_parts(place).head_sha256 == the_start(first).head_sha256


def test_a_saved_model_is_taken_over_whole_or_without_its_head(generations: list[Path]) -> None:
    saved = embedders.load(generations[1])
    images = data.load("digits").test.read(np.arange(20))
    same = network(seed=9, weights=str(generations[1]))
    np.testing.assert_array_equal(embedders.embed(same, images), embedders.embed(saved, images))
    assert same.loaded_sha256 == weights.digest(weights.read(generations[1]))
    other = network(seed=9, dim=4, weights=str(generations[1]))
    for name, tensor in saved.backbone.state_dict().items():
        assert torch.equal(other.backbone.state_dict()[name], tensor)
    assert torch.equal(other.head.weight, network(seed=9, dim=4).head.weight)  # type: ignore[arg-type]
    fused = network(seed=9, weights=str(generations[1]), fusion="features")
    assert torch.equal(
        fused.backbone.state_dict()["stages.network.0.0.weight"], saved.backbone.state_dict()["0.0.weight"]
    )
    spec = study(str(generations[1]), dim=4, head_depth=1)
    (line, _) = starts.settle(spec, Store(generations[1].parent / "none"), found(spec))
    assert line.endswith("its head is new (dim 4, there 6, head_depth 1, there 0)")


def test_ancestors_go_back_to_the_first(generations: list[Path]) -> None:
    notes = embedders.extra(generations[2])
    one, two, three = notes["start"]
    assert [one["source"], two["source"], three] == [
        str(generations[1]),
        str(generations[0]),
        {"source": "random", "sha256": ""},
    ]
    assert one["sha256"] == weights.digest(weights.read(generations[1]))
    assert two["sha256"] == weights.digest(weights.read(generations[0])) != one["sha256"]
    assert len(notes["trained_classes"]) == 5
    given = TrialConfig.model_validate(notes["config"])
    tags = lineage.tags(given)
    assert tags["start_sha256"] == one["sha256"]
    assert tags["start"].count(" <- ") == 2
    shown = _start(tags)
    assert shown["started from"].startswith("model1 (SHA-256 ")
    assert shown["started from"].endswith(" <- random")
    assert "development classes" in shown["the start"]


def test_a_run_says_random_and_files_by_their_digest(tmp_path: Path) -> None:
    assert lineage.tags(TrialConfig.model_validate(config())) == {"start": "random"}
    path = tmp_path / "weights.pt"
    torch.save(network(1).backbone.state_dict(), path)
    own = study(str(path))
    starts.settle(own, Store(tmp_path), found(own))
    values = study_file.default_values(own.families["ms"])
    given = own.trial_config(own.families["ms"], values)
    assert lineage.tags(given)["start_sha256"] == weights.digest(weights.read(path))
    assert started.weights_of(given) == str(path)


def test_trials_without_a_start_are_what_they_were() -> None:
    plain = TrialConfig.model_validate(config())
    assert "start" not in plain.model_dump()
    of_file, moved, other = (
        plain.model_copy(update={"start": StartConfig(source=source, sha256=digest)})
        for source, digest in (("/a/file", "1"), ("models:/a/1", "1"), ("models:/a/2", "2"))
    )
    assert of_file.fingerprint() == plain.fingerprint()
    assert len({each.fingerprint() for each in (plain, moved, other)}) == 3
    assert TrialConfig.model_validate(moved.model_dump(mode="json")) == moved


def test_a_start_that_has_seen_the_test_classes_says_so(generations: list[Path], tmp_path: Path) -> None:
    other = data.load("digits")
    swapped = data.ZeroShotData("digits", other.test, other.development)
    spec = study(str(generations[0]))
    (_, note) = starts.settle(spec, Store(tmp_path), starts.present(spec, swapped))
    assert note.endswith("was trained on 5 of the 5 test classes, so test scores are not of unseen classes")
    assert (
        the_start(spec).seen
        in lineage.tags(
            spec.trial_config(spec.families["ms"], study_file.default_values(spec.families["ms"]))
        ).values()
    )


def test_what_cannot_be_a_start_is_one_line(
    store: Store, own: Store, generations: list[Path], tmp_path: Path
) -> None:
    def refused(written: str, place: Store, **embedder: Any) -> str:
        spec = study(written, **embedder)
        with pytest.raises(ValueError, match=r"\w") as error:
            starts.settle(spec, place, found(spec))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there are: digits/1 @champion, digits/2" in refused("models:/birds", store)
    assert "no studies in the store" in refused(f"models:/digits?store={tmp_path}", own)
    assert "has the backbone small_conv, and embedder.backbone is mlp1" in refused(
        str(generations[0]), own, backbone="mlp1"
    )
    assert "is no folder of a saved embedder" in refused(str(tmp_path), own)
    assert "no file nowhere.pt; give 'default'" in refused("nowhere.pt", own)
    with pytest.raises(SpecError, match="names no registered model; write models:/NAME@champion"):
        study("models:/a@b@c")
    with pytest.raises(SpecError, match=r"what follows the \? is not understood.*; write \?store=FOLDER"):
        study("models:/a?stor=/x")


def test_a_changed_folder_is_refused(generations: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(generations[0], folder)
    (folder / "weights.safetensors").write_bytes(b"x" + (folder / "weights.safetensors").read_bytes()[1:])
    with pytest.raises(ValueError, match=r"embedder\.weights: .*altered since it was saved"):
        weights.read(folder)
    described = json.loads((folder / "embedder.json").read_text())
    described["architecture"]["dim"] = "8"
    (folder / "embedder.json").write_text(json.dumps(described))
    seal(folder)
    with pytest.raises(ValueError, match=r"embedder\.weights: .*not understood"):
        weights.read(folder)


@pytest.mark.parametrize("part", ["backbone.0.0.weight", "backbone.2.1.bias", "head.weight", "mean_C"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_has_lost_its_numbers_is_no_start(
    generations: list[Path], tmp_path: Path, part: str, value: float
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(generations[0], folder)
    state = load_file(folder / "weights.safetensors")
    name = (
        part if part in state else next(key for key in state if key.startswith("head.") and "weight" in key)
    )
    state[name].view(-1)[-1] = value
    save_file(state, folder / "weights.safetensors")
    seal(folder)
    with pytest.raises(ValueError, match=r"holds NaN or infinity in \S+, so its training") as error:
        network(weights=str(folder))
    assert "\n" not in str(error.value)


def test_stores_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    assert registered.parse("models:/a/3?tracking-uri=http://h:5000") == ("a/3", None, "http://h:5000")
    assert registered.parse("models:/a@b?store=/at@home") == ("a@b", "/at@home", None)
    for secret in ("://u:pw@h", "://token@h", "://u:p/w@h", "://u:p?w@h", "://h?token=pw"):
        with pytest.raises(
            ValueError, match="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        ) as no:
            registered.parse(f"models:/a@b?tracking-uri=http{secret}")
        assert "pw" not in str(no.value)
        assert "token" not in str(no.value).replace("tokens", "")
    spec = study_file.parse(dict(study("models:/a@b?store=there").raw), study_file.Places(tmp_path))
    given = spec.trial_config(spec.families["ms"], study_file.default_values(spec.families["ms"]))
    assert given.embedder.weights == f"models:/a@b?store={tmp_path / 'there'}"
    assert given.loss != LossConfig(name="none")


def test_claims_on_a_registered_model_are_timed_from_its_weights(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(model: str) -> int:
        embedder = f"embedder={{backbone: small_conv, width: 4, dim: 6, weights: 'models:/{model}@champion'}}"
        options = ["--set", embedder, "--set", "batch.per_epoch=2", "--store", str(store.root)]
        monkeypatch.setattr(
            sys, "argv", ["dmlstudy", "claims", "--list", "--only", "gpw-pretrained", *options]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert listed("digits") == 0
    assert "time: at most about" in capsys.readouterr().out
    assert listed("nobody") == 2
    assert "no model 'nobody@champion'" in capsys.readouterr().err
