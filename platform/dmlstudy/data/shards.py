"""Pictures in tar shards of the WebDataset layout, read by their places in the files, without unpacking.

A shard is a plain ``.tar`` whose members ``KEY.jpg`` and ``KEY.cls``, or ``KEY.json``, belong together. Its index holds
the place of each picture and its label, and is made once, in a file below the cache folder.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from dmlstudy.data.decoding import suffixes
from dmlstudy.data.layouts import Parts
from dmlstudy.data.parquet import Column, read_columns, write_table
from dmlstudy.data.pictures import Listing, by_listed_name, class_disjoint, halved, in_order
from dmlstudy.files import FileState, cache_folder
from dmlstudy.heartbeat import beat
from dmlstudy.text import first_line

LABELS = ("label", "class", "cls", "identity")
"""Keys of a ``.json`` member that are looked up for a label, the first that is there."""

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

MOST_SIDECAR_BYTES = 2**24
"""The most that a ``.cls`` or ``.json`` member may have."""

BLOCK = tarfile.BLOCKSIZE

_VERSION = "1"
_SIDES = {"train": "train", "development": "train", "test": "test", "validation": "test", "val": "test"}
_SIDE = re.compile(rf"(?:^|[-_.])({'|'.join(_SIDES)})(?=[-_.]|$)")


class ShardPicture(NamedTuple):
    """A picture's member, its place in the shard, its label, and the plain values of its ``.json``."""

    name: str
    offset: int
    size: int
    label: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Shards:
    """Pictures of several shards, one after the other.

    Reading one raises ValueError if its shard was changed after it was indexed. Threads may read at once.
    """

    paths: Sequence[Path]
    states: Sequence[FileState]
    samples: Sequence[ShardPicture]
    first_row: Sequence[int] = field(repr=False)
    """Of each shard, the number of its first sample."""

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Shards:
        """The shards with their indexes, which are made where there are none.

        Raises ValueError naming a shard that is damaged, compressed or cut off, and a sample without picture or label.
        """
        states = [_state(path) for path in paths]
        of_shards = [_index(path, state) for path, state in zip(paths, states, strict=True)]
        first_row = [0, *itertools.accumulate(map(len, of_shards))][:-1]
        return cls(paths, states, [sample for each in of_shards for sample in each], first_row)

    def __len__(self) -> int:
        return len(self.samples)

    def place(self, row: int) -> str:
        number = self._shard(row)
        return f"{self.paths[number]}, row {row - self.first_row[number]} ({self.samples[row].name})"

    def encoded(self, row: int) -> bytes:
        number, sample = self._shard(row), self.samples[row]
        descriptor = os.open(self.paths[number], os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            state = FileState(found.st_ino, found.st_size, found.st_mtime_ns)
            content = os.pread(descriptor, sample.size, sample.offset)
        finally:
            os.close(descriptor)
        if state != self.states[number] or len(content) != sample.size:
            raise ValueError(f"{self.paths[number]}: changed since its pictures were listed; start again")
        return content

    def column(self, name: str) -> list[Any] | None:
        """A value of each sample's ``.json``, None where it has no such; None if no sample has it."""
        values = [sample.fields.get(name) for sample in self.samples]
        return None if all(value is None for value in values) else values

    def _shard(self, row: int) -> int:
        return bisect.bisect_right(self.first_row, row) - 1


def shards(folder: Path) -> Parts:
    """The shards of a folder: ``*.tar``, with ``train``, ``test`` or ``val`` in their names or as their folders.

    Without these words the first half of the classes is development; with them the sides are as ``class_disjoint``
    says. Classes are in the order of their numbers, or else of their names.

    Raises ValueError where there are no shards, where only some have a side, and as ``Shards.of``.
    """
    of_sides = _by_side(folder)
    if None in of_sides or "test" not in of_sides:
        return Parts(*halved(_listed(sorted(itertools.chain(*of_sides.values())))))
    if "train" not in of_sides:
        raise ValueError(f"data.path: {folder} has shards to test on and none to train on; add some")
    return Parts(*class_disjoint(str(folder), _listed(of_sides["train"]), _listed(of_sides["test"])))


def _by_side(folder: Path) -> dict[str | None, list[Path]]:
    """The shards that say train or test, and those that do not (None)."""
    files = {None: sorted(folder.glob("*.tar"))}
    named = {word: sorted((folder / word).glob("*.tar")) for word in _SIDES if (folder / word).is_dir()}
    of_sides: dict[str | None, list[Path]] = {}
    for word, paths in [*files.items(), *named.items()]:
        for path in paths:
            if path.name.startswith("."):
                continue
            told = word or ((found := _SIDE.search(path.stem)) and found[1])
            of_sides.setdefault(_SIDES[told] if told else None, []).append(path)
    if not of_sides:
        packed = next((path for path in sorted(folder.iterdir()) if path.name.endswith(COMPRESSED)), None)
        if packed is not None:
            raise ValueError(
                f"{packed}: a compressed shard, of which no picture can be read alone; uncompress it to .tar"
            )
        raise ValueError(f"data.path: {folder} has no .tar shards, nor have train/ and test/ in it")
    if None in of_sides and len(of_sides) > 1:
        side = next(each for each in of_sides if each is not None)
        raise ValueError(
            f"{of_sides[None][0]}: says neither train nor test, but {of_sides[side][0].name} does; name all, or none"
        )
    return of_sides


def _listed(paths: Sequence[Path]) -> Listing:
    pictures = Shards.of(paths)
    labels = [sample.label for sample in pictures.samples]
    return by_listed_name(pictures, labels, in_order(labels))


def _state(path: Path) -> FileState:
    try:
        return FileState.at(path)
    except OSError as error:
        raise ValueError(f"{path}: not readable ({error.strerror}); repair or remove it") from None


def _index(path: Path, state: FileState) -> list[ShardPicture]:
    """The samples of a shard, from its index if there is one of just this state of it, else as they are found now."""
    folder = cache_folder() / "shards"
    own = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:24]
    now = hashlib.sha256(repr((_VERSION, tuple(state), sorted(suffixes()))).encode()).hexdigest()[:16]
    kept = folder / f"{own}.{now}.parquet"
    if (samples := _read_index(kept)) is not None:
        return samples
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{own}.lock"):
            if (samples := _read_index(kept)) is not None:  # another process has made it meanwhile
                return samples
            samples = scan(path)
            if FileState.at(path) != state:
                raise ValueError(f"{path}: changed while it was read; start again when it is whole")
            _write_index(kept, samples)
            for earlier in folder.glob(f"{own}.*.parquet"):
                if earlier != kept:
                    earlier.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: cannot be written or read ({error.strerror or first_line(error)}); set"
            " XDG_CACHE_HOME to a folder with room, in which shards are indexed"
        ) from error
    return samples


def _read_index(kept: Path) -> list[ShardPicture] | None:
    if not kept.is_file():
        return None
    try:
        columns = read_columns(kept)
        columns["fields"] = [json.loads(text) if text else {} for text in columns["fields"]]
        rows = zip(*(columns[name] for name in ShardPicture._fields), strict=True)
        return list(map(ShardPicture._make, rows))
    except (ValueError, KeyError):  # damaged, and made again
        return None


def _write_index(kept: Path, samples: Sequence[ShardPicture]) -> None:
    texts = [json.dumps(dict(sample.fields)) if sample.fields else "" for sample in samples]
    write_table(
        kept,
        [
            Column("name", "string", [sample.name for sample in samples]),
            Column("offset", "int64", [sample.offset for sample in samples]),
            Column("size", "int64", [sample.size for sample in samples]),
            Column("label", "string", [sample.label for sample in samples]),
            Column("fields", "string", texts),
        ],
    )


def scan(path: Path) -> list[ShardPicture]:
    """The samples of a shard, in the order of their pictures; the whole shard's headers are read.

    Raises ValueError as ``Shards.of``.
    """
    pictures: dict[str, tarfile.TarInfo] = {}
    sidecars: dict[str, dict[str, Any]] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                beat()
                _take(path, file, member, pictures, sidecars)
                archive.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
            end = archive.offset
            file.seek(end)
            if file.read(BLOCK) != bytes(BLOCK):
                raise ValueError(f"{path}: damaged or cut off at byte {end}; copy it again")
    except tarfile.TarError as error:
        raise ValueError(
            f"{path}: not a readable .tar ({first_line(error)}); a shard is neither compressed nor cut off"
        ) from None
    if not pictures:
        raise ValueError(f"{path}: no pictures in this shard; remove it")
    alone = next((key for key in sidecars if key not in pictures), None)
    if alone is not None:
        raise ValueError(f"{path}: sample {alone} has a label and no picture; put both in one shard")
    return [
        ShardPicture(
            _shown(member.name),
            member.offset_data,
            member.size,
            _label(path, key, sidecars.get(key, {})),
            {
                name: value
                for name, value in sidecars.get(key, {}).get("json", {}).items()
                if isinstance(value, str | int | float) and len(str(value)) <= 200
            },
        )
        for key, member in pictures.items()
    ]


def _take(
    path: Path,
    file: Any,
    member: tarfile.TarInfo,
    pictures: dict[str, tarfile.TarInfo],
    sidecars: dict[str, dict[str, Any]],
) -> None:
    """Note a member that is a picture or says its label; others are none of ours."""
    folder, _, base = member.name.rpartition("/")
    stem, dot, ending = base.partition(".")
    if not stem or not dot or base.startswith("__"):
        return
    key = f"{folder}/{stem}" if folder else stem
    kind = ending.lower()
    is_picture = f".{kind.rpartition('.')[2]}" in suffixes()
    if not is_picture and kind not in ("cls", "json"):
        return
    shown = _shown(member.name)
    if not member.isreg() or member.issparse():
        if member.isdir():
            return
        raise ValueError(f"{path}: {shown} is a link or has holes; write the shard with whole files")
    if is_picture:
        if key in pictures:
            both = f"{_shown(pictures[key].name)} and {shown}"
            raise ValueError(f"{path}: sample {_shown(key)} has two pictures, {both}; keep one")
        pictures[key] = member
        return
    own = sidecars.setdefault(key, {})
    if kind in own:
        raise ValueError(f"{path}: {shown} is there twice; keep one")
    if member.size > MOST_SIDECAR_BYTES:
        raise ValueError(f"{path}: {shown} has {member.size} bytes, which is no label")
    place = file.tell()
    file.seek(member.offset_data)
    content = file.read(member.size)
    file.seek(place)
    try:
        text = content.decode("utf-8")
        own[kind] = json.loads(text) if kind == "json" else text.strip()
    except ValueError as error:
        what = "JSON" if kind == "json" else "text in UTF-8"
        raise ValueError(f"{path}: {shown} is no {what} ({first_line(error)})") from None
    if kind == "json" and not isinstance(own[kind], dict):
        raise ValueError(f'{path}: {shown} is no JSON object, as {{"label": 3}}')


def _label(path: Path, key: str, own: Mapping[str, Any]) -> str:
    if own.get("cls"):
        return str(own["cls"])
    told = own.get("json", {})
    for name in LABELS:
        value = told.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    raise ValueError(
        f"{path}: sample {_shown(key)} has no label; add {_shown(key)}.cls, or {' or '.join(LABELS)} to its .json"
    )


def _shown(name: str) -> str:
    """A member's name as text, whatever bytes it has."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
