"""Claims of papers as pairs of families (``search_spaces/claims.yaml``), and the ordinary study files they become.

Claims of one study share data, embedder and recipe. Its families are ``like`` one another, so that two of them differ
in the switch that a claim is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from dmlstudy import bundled
from dmlstudy.data import DATASETS, has_parquet
from dmlstudy.records import Record
from dmlstudy.spec import yaml_file
from dmlstudy.spec.assignments import assigned
from dmlstudy.spec.study_file import CLAIMS, Name, SpecError, StudyFile
from dmlstudy.text import nearest

Kind = Literal["unseen", "closed"]
"""Data whose test classes are not learned, as in retrieval; or whose classes are all known, as of codes, streams."""

CLOSED = (
    "digits",
    "cifar10",
    "cifar100",
    "mnist",
    "fashion_mnist",
    "kmnist",
    "emnist",
    "flickr25k",
    "nuswide21",
)
"""Data sets by name that are taken for studies of known classes."""

BUNDLED: Mapping[Kind, Mapping[str, Any]] = {
    "unseen": {"name": "hf_parquet", "image_size": 28},
    "closed": {"name": "digits"},
}
"""The data that come with the package: 300 of Omniglot's characters, and 8x8 digits."""

WEIGHTS = "needs a network that has learned already: --set embedder.weights=default, a file or models:/NAME@champion"
"""The reason for which claims of a study that needs weights are not tested without them."""

SIDE, SIDE_OF_PICTURES = 28, 64
"""Pixels of a side of drawings, as of Omniglot's, and of other pictures."""


class Check(Record):
    """A metric below which a switch has done nothing, so that its claim is not tested."""

    metric: str
    at_least: float


class Claim(Record):
    """A statement of a paper, in our words, with its place, and the pair of families that tests it.

    ``expected`` is what ``first`` is to be beside ``second``. A claim without families says why it is not tested.
    """

    id: Name
    paper: str
    place: str
    claim: str
    study: str | None = None
    first: Name | None = None
    second: Name | None = None
    expected: Literal["better", "worse"] | None = None
    check: Check | None = None
    not_tested: str | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Both families of a claim that can be tested."""
        assert self.first is not None
        assert self.second is not None
        return self.first, self.second


class ClaimStudy(Record):
    """A study that claims share: its file without data and families, and what differs with the data's size.

    ``small`` and ``large`` are further sections, beside the package's own data and beside the user's. One that
    ``needs_weights`` asks what to do with a network that has learned already.
    """

    data: Kind
    needs_weights: bool = False
    file: dict[str, Any]
    small: dict[str, Any] = {}
    large: dict[str, Any] = {}
    families: Annotated[dict[Name, dict[str, Any]], Field(min_length=2)]


class ClaimsFile(Record):
    """All claims, the papers they are from, and the studies that test them."""

    papers: dict[str, str]
    studies: dict[Name, ClaimStudy]
    claims: tuple[Claim, ...]


class Data(NamedTuple):
    """The ``data`` section of a study, and whether it is the package's own."""

    section: Mapping[str, Any]
    is_bundled: bool


class ClaimsOf(NamedTuple):
    """The study of some claims as a study file's mapping, and these claims."""

    raw: Mapping[str, Any]
    claims: tuple[Claim, ...]
    data: Data


def read() -> ClaimsFile:
    """The claims that come with the package; raises SpecError for what is inconsistent in them."""
    path = bundled.folder("search_spaces") / CLAIMS
    try:
        found = ClaimsFile.model_validate(yaml_file.read(path, "the claims of the papers"))
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"{CLAIMS}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for claim in found.claims:
        _check(claim, found)
    return found


def _check(claim: Claim, file: ClaimsFile) -> None:
    where = f"{CLAIMS}: {claim.id}"
    if claim.paper not in file.papers:
        raise SpecError(f"{where}: paper: no {claim.paper!r}{nearest(claim.paper, file.papers)}")
    parts = (claim.study, claim.first, claim.second, claim.expected)
    if claim.not_tested is not None:
        if any(part is not None for part in (*parts, claim.check)):
            raise SpecError(f"{where}: not_tested: stands beside what tests it; leave one of the two out")
        return
    if any(part is None for part in parts):
        raise SpecError(f"{where}: needs study, first, second and expected, or not_tested with the reason")
    assert claim.study is not None
    if claim.study not in file.studies:
        raise SpecError(f"{where}: study: no {claim.study!r}{nearest(claim.study, file.studies)}")
    families = file.studies[claim.study].families
    for family in claim.pair:
        if family not in families:
            raise SpecError(f"{where}: no family {family!r} in {claim.study}{nearest(family, families)}")


def chosen(file: ClaimsFile, only: Sequence[str]) -> tuple[Claim, ...]:
    """The claims with these ids, or of these papers or studies; all without any. Raises SpecError for unknown ones."""
    if not only:
        return file.claims
    known = {*(claim.id for claim in file.claims), *file.papers, *file.studies}
    for each in only:
        if each not in known:
            raise SpecError(f"--only {each}: no such claim, paper or study{nearest(each, known)}")
    return tuple(claim for claim in file.claims if {claim.id, claim.paper, claim.study} & set(only))


def data_at(places: Sequence[str]) -> dict[Kind, Data]:
    """Data by kind: the package's own, and in their place those that are given as PATH or NAME=PATH.

    Without a name a folder is Omniglot, Hugging Face Parquet or pictures in a folder for each class, by what is in it.
    Raises SpecError for a folder that is not there, and for two of one kind.
    """
    found = {kind: Data(_own(kind), is_bundled=True) for kind in BUNDLED}
    for place in places:
        name, is_named, path = place.partition("=")
        folder = Path(path if is_named else place).expanduser().absolute()
        if not folder.exists():
            raise SpecError(f"--data {place}: {folder} does not exist; give a folder, or NAME=FOLDER")
        if is_named and name not in DATASETS:
            raise SpecError(f"--data {place}: no data set {name!r}{nearest(name, DATASETS)}")
        name = name if is_named else _kind_of(folder)
        kind: Kind = "closed" if name in CLOSED else "unseen"
        if not found[kind].is_bundled:
            raise SpecError(f"--data {place}: a second data set for the same claims; give one of them")
        section: dict[str, Any] = {"name": name, "path": str(folder)}
        if kind == "unseen":
            section["image_size"] = SIDE if name == "omniglot" else SIDE_OF_PICTURES
        found[kind] = Data(section, is_bundled=False)
    return found


def _own(kind: Kind) -> Mapping[str, Any]:
    section = BUNDLED[kind]
    return (
        section
        if kind == "closed"
        else {**section, "path": str(bundled.folder("search_spaces") / "characters")}
    )


def _kind_of(folder: Path) -> str:
    if any((folder / below / "images_background").is_dir() for below in ("", "omniglot-py")):
        return "omniglot"
    return "hf_parquet" if has_parquet(folder) else "image_folder"


def studies_of(
    file: ClaimsFile,
    claims: Iterable[Claim],
    data: Mapping[Kind, Data],
    settings: Mapping[str, Any],
    assignments: Sequence[str] = (),
) -> dict[str, ClaimsOf]:
    """Study files of these claims, by study; ``assignments`` (``key=value``) and ``settings`` replace some values.

    A study holds the families of its claims and those that these are like, and compares the claims' pairs alone. With
    ``protocol.searches`` the search of each of its families is done again. One that needs weights is left out where
    its embedder has none. Raises SpecError for what is no assignment.
    """
    found: dict[str, ClaimsOf] = {}
    for name, study in file.studies.items():
        own = tuple(claim for claim in claims if claim.study == name)
        if not own:
            continue
        wanted = {family for claim in own for family in claim.pair}
        for family in list(wanted):
            while (family := study.families[family].get("like", "")) and family not in wanted:
                wanted.add(family)
        its_data = data[study.data]
        raw: dict[str, Any] = {
            "name": f"claims-{name}",
            "data": dict(its_data.section),
            **study.file,
            **(study.small if its_data.is_bundled else study.large),
            "families": {family: entry for family, entry in study.families.items() if family in wanted},
        }
        raw = _changed(raw, assignments)
        raw = _changed(raw, settings)
        protocol = {**raw.get("protocol", {}), "compare": _pairs(own)}
        if protocol.get("searches", 1) != 1:
            protocol["search_leaders"] = len(raw["families"])
        raw["protocol"] = protocol
        if study.needs_weights and not _has_weights(raw["embedder"]):
            continue
        found[name] = ClaimsOf(raw, own, its_data)
    return found


def why_not(claim: Claim, studies: Mapping[str, ClaimsOf]) -> str:
    """The reason for which none of these studies tests a claim; empty where one does."""
    return claim.not_tested or ("" if claim.study in studies else WEIGHTS)


def _changed(raw: Mapping[str, Any], assignments: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    try:
        return assigned(raw, assignments, StudyFile.model_fields)
    except ValueError as error:
        raise SpecError(error) from None


def _has_weights(embedder: object) -> bool:
    """True also for what is no section, which the study's own check refuses."""
    return not isinstance(embedder, Mapping) or bool(embedder.get("weights"))


def _pairs(claims: Iterable[Claim]) -> list[list[str]]:
    """The pairs that test these claims, each once."""
    return [list(pair) for pair in {frozenset(claim.pair): claim.pair for claim in claims}.values()]
