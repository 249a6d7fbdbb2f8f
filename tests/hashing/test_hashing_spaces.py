"""The search spaces of hashing: every default and every edge builds, with and without NASA alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlstudy import bundled
from dmlstudy.hashing import METHODS, build
from dmlstudy.hashing.methods import HashMethod
from dmlstudy.records import CodesConfig, HashingConfig, LossConfig, TrainingConfig
from dmlstudy.spec import space as spaces

FILES = sorted((bundled.folder("search_spaces") / "hashing").glob("*.yaml"))


def space_of(file: Path) -> tuple[str, spaces.Space]:
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    paper = raw.pop("paper")
    return paper, {
        f"{section}.{name}": domain
        for section, mapping in raw.items()
        for name, domain in spaces.parse_space(mapping, section).items()
    }


def config_at(space: spaces.Space, point: dict[str, Any]) -> HashingConfig:
    """The configuration at a point of the space, its fixed values included."""
    sections: dict[str, dict[str, Any]] = {}
    for full_name, domain in space.items():
        section, _, name = full_name.partition(".")
        value = domain.value if isinstance(domain, spaces.Fixed) else point[full_name]
        sections.setdefault(section, {})[name] = value
    named = {
        section: LossConfig(name=values.pop("name"), params=values)
        for section, values in sections.items()
        if section in ("loss", "regularizer")
    }
    return HashingConfig(
        **named, hashing=CodesConfig(**sections["hashing"]), training=TrainingConfig(**sections["training"])
    )


def test_every_method_has_two_files() -> None:
    assert {file.stem for file in FILES} == {
        f"{prefix}{name}" for name in METHODS for prefix in ("", "nasa_")
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_defaults_and_edges_build(file: Path) -> None:
    paper, space = space_of(file)
    assert paper
    default = spaces.defaults(space)
    for change in ({}, *spaces.corners(space)):
        config = config_at(space, default | change)
        term = config.regularizer
        model = build(
            config.loss.name,
            config.hashing.num_bits,
            12,
            config.loss.params,
            term=(term.name, term.params) if term else None,
        )
        assert (model.structure is not None) == file.stem.startswith("nasa_")
    assert config_at(space, default).loss.name == file.stem.removeprefix("nasa_")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nasa_searches_what_the_method_searches_and_more(name: str) -> None:
    plain, nasa = (
        space_of(bundled.folder("search_spaces") / "hashing" / f"{prefix}{name}.yaml")[1]
        for prefix in ("", "nasa_")
    )
    same = {key for key in plain if key != "hashing.rerank"}
    assert {key: plain[key] for key in same} == {key: nasa[key] for key in same}
    assert spaces.defaults(nasa)["regularizer.neighbours"] == 8
    assert spaces.defaults(nasa)["regularizer.margin"] == 0.03
    assert spaces.defaults(nasa)["regularizer.weight"] == 1.0


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_files_defaults_are_the_methods(name: str) -> None:
    _, space = space_of(bundled.folder("search_spaces") / "hashing" / f"{name}.yaml")
    explicit = config_at(space, spaces.defaults(space)).loss.params
    one, other = build(name, 16, 5, explicit).method, build(name, 16, 5, {}).method
    for part in (lambda m: {k: v for k, v in vars(m).items() if isinstance(v, int | float)}, _shapes):
        assert part(one) == part(other)


def _shapes(method: HashMethod) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in method.state_dict().items()}
