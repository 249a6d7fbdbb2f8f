"""Embed images or vectors into one Parquet file: part by part, on any number of processes, going on after a stop.

Beside the file ``out.parquet`` its parts are kept in ``out.parquet.parts`` until they are all there. A part is called
by a digest of the model and of the items in it, and items are cut into parts by their own digests: so where one is
removed, repaired or added, only its own part is made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dmlstudy import data
from dmlstudy.data import Inputs
from dmlstudy.data.images import Indices, RandomViews
from dmlstudy.files import written_whole
from dmlstudy.retrieval import short_forms
from dmlstudy.saved import Model
from dmlstudy.saved.items import of_files
from dmlstudy.serving.short_search import Short, wanted_of
from dmlstudy.text import one_line

PART = 4096
"""Items of a part, about: what is read and embedded between two files, and lost at most by a stop."""

MOST_TOLD = 10
"""Pictures left out that are named each in a line."""

NOTED = "job.json"
"""The file in the folder of parts that names their source."""

LOCK = "lock"
"""The file in the folder of the parts that is locked while a call writes them; the lock ends with its process."""

OnCorrupt: TypeAlias = Literal["error", "skip"]

Runner = Callable[["EmbedJob", Sequence[int]], Iterable[int]]
"""Makes the parts of these numbers, in any order, and tells of each that is there."""


class Part(NamedTuple):
    """Items of the job, and what the file with their embeddings is called."""

    rows: range
    name: str


class EmbedResult(NamedTuple):
    """The output: its rows, the size of an embedding, and items left out with the reason for each.

    ``bits`` are those of a number, ``bytes_per_vector`` what these take, of embeddings of ``whole`` numbers.
    """

    num_items: int
    dim: int
    left_out: list[tuple[str, str]]
    bits: int = 32
    bytes_per_vector: int = 0
    whole: int = 0


@dataclass(frozen=True)
class EmbedJob:
    """A model's folder, what it is to embed, and where to; each process opens the model once for itself.

    ``on_corrupt`` 'skip' leaves out pictures that cannot be decoded or are not taken. A picture may have
    ``max_pixels``, None for the bound that there is anyway. ``size`` and ``bits`` are those of a short form, None and
    32 of whole embeddings.
    """

    model: str
    inputs: str
    output: str
    batch_size: int = 256
    device: str = "auto"
    on_corrupt: OnCorrupt = "error"
    max_pixels: int | None = None
    size: int | None = None
    bits: int = 32

    @classmethod
    def of(
        cls, model: Model, inputs: Path, output: Path, *, device: str | None = None, **options: Any
    ) -> EmbedJob:
        """A job of a model that this process has opened; others, on ``device``, open it for themselves."""
        job = cls(
            str(model.folder),
            str(inputs.absolute()),
            str(output.absolute()),
            model.batch_size,
            device or model.device,
            **options,
        )
        job.__dict__["opened"] = model  # where cached_property keeps what was asked for
        return job

    @property
    def folder(self) -> Path:
        """The folder of the parts."""
        return Path(f"{self.output}.parts")

    @functools.cached_property
    def opened(self) -> Model:
        """The model. Raises ValueError naming a file that is not as it was saved."""
        return Model.open(self.model, device=self.device, batch_size=self.batch_size)

    @functools.cached_property
    def short(self) -> Short | None:
        """The form of what is written, None of whole embeddings. Raises ValueError for one that there is none of."""
        return wanted_of(self.opened, self.size, self.bits)

    @functools.cached_property
    def identity(self) -> str:
        """The model and the form of the embeddings, by which parts are told from those of others."""
        form = "" if self.short is None else f" {self.short}"
        return f"{self.opened.fingerprint}{form}"

    @functools.cached_property
    def items(self) -> Inputs:
        """The items to embed. Raises ValueError naming what is missing or of another kind than the model takes."""
        return of_files(self.opened, self.inputs, self.max_pixels)

    @functools.cached_property
    def parts(self) -> list[Part]:
        """All items in their order, cut where their digests say."""
        model = self.identity.encode()
        found, start, digest = [], 0, hashlib.blake2b(model, digest_size=16)
        num_items = len(self.items)
        for row, key in enumerate(self.items.keys()):
            own = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()
            digest.update(own)
            if row + 1 == num_items or _ends(row + 1 - start, own):
                found.append(Part(range(start, row + 1), digest.hexdigest()))
                start, digest = row + 1, hashlib.blake2b(model, digest_size=16)
        return found

    def part(self, number: int) -> Path:
        return self.folder / f"{self.parts[number].name}.parquet"

    def is_made(self, number: int) -> bool:
        """True if a part is there, whole, and has left out no item that it must hold."""
        path = self.part(number)
        return path.is_file() and (self.on_corrupt == "skip" or not data.embeddings_left_out(path))

    def make(self, numbers: Iterable[int]) -> Iterator[int]:
        """Write parts, each whole or not at all, and tell of each; pictures are read while others are computed.

        A process that finds fewer parts than the one that numbered them makes those it has: items have changed
        meanwhile, which ``embed_into`` tells.
        """
        batches = [
            (number, np.arange(start, min(start + self.batch_size, rows.stop)))
            for number in numbers
            if number < len(self.parts)
            for rows in [self.parts[number].rows]
            for start in range(rows.start, rows.stop, self.batch_size)
        ]
        reader = _Reader(self.items, is_skipping=self.on_corrupt == "skip")
        made: list[NDArray[Any]] = []
        for (number, indices), items in zip(
            batches, reader.batches(each for _, each in batches), strict=True
        ):
            z_BD = self.opened.compute(items)
            made.append(z_BD if self.short is None else short_forms.kept(z_BD, *self.short.form))
            rows = self.parts[number].rows
            if indices[-1] + 1 == rows.stop:
                self._write(number, np.concatenate(made), reader.damaged)
                made = []
                yield number

    def _write(self, number: int, z_ND: NDArray[Any], damaged: Mapping[int, str]) -> None:
        rows = self.parts[number].rows
        kept = [row for row in rows if row not in damaged]
        ids, labels = self.items.ids, self.items.labels
        data.write_embeddings(
            self.part(number),
            [ids[row] for row in kept],
            None if labels is None else [labels[row] for row in kept],
            z_ND,
            left_out=[(ids[row], damaged[row]) for row in rows if row in damaged],
        )


def _ends(size: int, digest: bytes) -> bool:
    """True if a part of so many items ends with the item of this digest, on average after three quarters of PART."""
    least, most = max(1, PART // 4), 2 * PART
    return size >= most or (size >= least and int.from_bytes(digest[:8]) % max(1, PART // 2) == 0)


class _Reader:
    """Items read ahead by threads, where they are pictures; those that are not taken are noted, or an error."""

    def __init__(self, items: Inputs, *, is_skipping: bool) -> None:
        self._items, self._is_skipping = items, is_skipping
        self.damaged: dict[int, str] = {}
        """By their numbers, the reasons of those left out of the batches that were given."""

    def batches(self, indices: Iterable[Indices]) -> Iterator[NDArray[Any]]:
        """The items at each of these indices, in order, which are of one run of numbers each."""
        if self._items.one is None:
            return (self._items.read(range(int(each[0]), int(each[-1]) + 1)) for each in indices)
        return data.Loader(self).epoch(indices)

    def read(self, indices: Indices, views: RandomViews | None = None) -> NDArray[np.uint8]:
        """The items that can be read, in order, as one thread reads them."""
        assert views is None
        one = self._items.one
        assert one is not None
        found = []
        for row in indices.tolist():
            try:
                found.append(one(row))
            except (data.DamagedImage, data.UnsuitableImage) as error:
                if not self._is_skipping:
                    raise type(error)(f"{error}, or leave it out by --on-corrupt skip") from error
                self.damaged[row] = str(error)
        assert self._items.shape is not None
        return np.stack(found) if found else np.empty((0, *self._items.shape), np.uint8)


def one_by_one(job: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
    """In this process."""
    return job.make(numbers)


def embed_into(
    job: EmbedJob,
    run: Runner = one_by_one,
    follow: Callable[[Iterable[int], int], Iterable[int]] = lambda each, _: each,
) -> EmbedResult:
    """Embed all items into ``job.output``.

    Parts that an earlier call of the same model has left are not made again where their items are still the same.
    ``follow`` is given the numbers of parts as they come to be, and how many there will be, to show progress.

    Raises ValueError naming what is missing, unreadable or of another kind, where another call is writing the output,
    where the parts of something else are in the way, and as ``data.check_table_output``. The output is replaced when
    all is done, or not at all.
    """
    output = data.check_table_output(
        job.output, "a file of embeddings", data.EMBEDDING_COLUMNS, read=[job.inputs]
    )
    _ = job.short  # what is wrong with it is told before anything is read
    numbers = range(len(job.parts))
    with _sole_writer(job):
        return _embed(job, run, follow, numbers, output)


def _embed(
    job: EmbedJob,
    run: Runner,
    follow: Callable[[Iterable[int], int], Iterable[int]],
    numbers: range,
    output: Path,
) -> EmbedResult:
    _claim(job)
    missing = [number for number in numbers if not job.is_made(number)]
    for _ in follow(run(job, missing), len(missing)):
        pass
    files = [job.part(number) for number in numbers]
    if not all(file.is_file() for file in files):
        raise ValueError(
            f"{job.inputs}: changed while it was embedded; run again, which goes on from its parts"
        )
    left_out = [each for file in files for each in data.embeddings_left_out(file)]
    num_items = len(job.items) - len(left_out)
    if num_items == 0:
        raise ValueError(f"{left_out[0][1]}; none of the {len(left_out)} pictures can be decoded")
    origin = {"model": job.opened.fingerprint, "source": job.inputs}
    if job.opened.curvature is not None:
        origin["curvature"] = repr(job.opened.curvature)
    short = job.short
    if short is not None:
        origin |= short.origin()
    elif job.opened.uncut:
        origin["uncut"] = job.opened.uncut
    dim = data.join_embeddings(files, output, origin)
    _clear(job.folder)
    if short is None:
        num_bytes = (
            dim if job.opened.kind == "hashing model" else 4 * dim
        )  # a code's bit takes a byte of the file
        return EmbedResult(num_items, dim, left_out, 32, num_bytes, dim)
    return EmbedResult(num_items, short.size, left_out, short.form.bits, short.num_bytes, short.whole)


@contextmanager
def _sole_writer(job: EmbedJob) -> Iterator[None]:
    """Hold the folder of the parts, made if missing. Raises ValueError where another call holds it.

    Processes to which a runner hands parts do not ask: they work for the call that holds it.
    """
    lock = FileLock(job.folder / LOCK, blocking=False)
    while True:
        job.folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # a call that ended has removed the folder meanwhile
            try:
                lock.acquire()
                break
            except Timeout:
                raise ValueError(
                    f"{job.output}: another dmlstudy embed is writing it; wait for its end, or name another output"
                ) from None
    try:
        yield
    finally:
        lock.release()


def _clear(folder: Path) -> None:
    """Remove the parts; the lock goes last, for from then on another call may make the folder its own."""
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / LOCK).unlink()
    with suppress(OSError):  # another call has
        folder.rmdir()


def told(job: EmbedJob, embedded: EmbedResult) -> list[str]:
    """Lines on what was left out: files of other kinds, and pictures that could not be decoded."""
    lines = [f"left out: {job.items.left_out}"] if job.items.left_out else []
    lines += [one_line(f"left out: {reason}") for _, reason in embedded.left_out[:MOST_TOLD]]
    if (num_more := len(embedded.left_out) - MOST_TOLD) > 0:
        lines.append(f"left out: {num_more} more that cannot be decoded; the file's metadata name all")
    return lines


def check_on_corrupt(text: str) -> OnCorrupt:
    """The treatment of a picture that cannot be decoded. Raises ValueError for anything else."""
    known: dict[str, OnCorrupt] = {each: each for each in get_args(OnCorrupt)}
    if text not in known:
        raise ValueError(f"--on-corrupt {text}: choose from {', '.join(known)}")
    return known[text]


def _claim(job: EmbedJob) -> None:
    """Make the folder of the parts, or take over what a broken-off call of the same job has left there."""
    about = {"model": job.identity, "inputs": job.inputs}
    noted = job.folder / NOTED
    if noted.is_file():
        known = _read_note(noted)
        if known is not None and {key: known.get(key) for key in about} != about:
            raise ValueError(
                f"{job.folder}: holds parts of another model or of other inputs ({known.get('inputs')}); remove it, or"
                " name another output"
            )
    job.folder.mkdir(exist_ok=True)
    with written_whole(noted) as file:
        file.write(json.dumps(about).encode())


def _read_note(path: Path) -> dict[str, Any] | None:
    """The noted source of the parts; None for a torn note, since parts are identified by their names."""
    try:
        known = json.loads(path.read_text())
    except ValueError:
        return None
    return known if isinstance(known, dict) else None
