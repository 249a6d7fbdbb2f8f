"""Decoded pictures in one file that all processes of a machine map into their memory: what views are cut from.

    4,096 bytes  a line of JSON: format, number of pictures, bytes of the file, SHA-256 of the index
    index        int64 (N, 4): where a picture's pixels begin, their height, their width, their CRC-32
    pixels       uint8 RGB, one picture after the other; one that could not be decoded has height 0

``disk`` is below the cache folder, ``memory`` in the machine's shared memory. Shapes: N pictures, H height, W width.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dmlstudy.data.loader import in_threads
from dmlstudy.files import cache_folder, is_private, reserve, too_little_room, written_whole
from dmlstudy.heartbeat import beat

Kind: TypeAlias = Literal["none", "memory", "disk"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FORMAT = 1
PAGE = 4096
GIB = 2**30
LOOK_S = 2.0
"""Seconds after which who waits for another process looks whether that has come further."""

SHARED_MEMORY = Path("/dev/shm")
SUFFIX, DRAFTS = ".canvas", ".*.canvas*.draft"


class Sheet:
    """Pixels with the part of Pillow's interface that a box is cut by; only what is cut out is copied."""

    def __init__(self, image_HWC: NDArray[np.uint8]) -> None:
        self._image_HWC = image_HWC
        self.height, self.width = image_HWC.shape[:2]

    def crop(self, box: tuple[int, int, int, int]) -> Any:
        """The picture within (left, top, right, bottom), which lies in the whole."""
        from PIL import Image

        left, top, right, bottom = box
        assert 0 <= left <= right <= self.width
        assert 0 <= top <= bottom <= self.height
        return Image.fromarray(self._image_HWC[top:bottom, left:right])


class Decoder(NamedTuple):
    """Pictures by row: all that tells their canvases from others, the bytes of one, and its pixels (H, W, 3).

    ``num_bytes`` looks at the header alone, and is 0 for a damaged picture; ``pixels`` raises ValueError for it.
    """

    key: Callable[[], str]
    num_bytes: Callable[[int], int]
    pixels: Callable[[int], NDArray[np.uint8]]


@dataclass(eq=False)
class Canvas:
    """The canvases of a data set's pictures ``row_N`` (sorted), which are there once ``open`` was called.

    ``kind``: 'disk' or 'memory'. In memory it may have ``most_bytes``, and is gone when the last process that has it
    open ends.
    """

    row_N: NDArray[np.int64]
    decoder: Decoder
    kind: Kind
    most_bytes: float
    _file: _Map | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> None:
        """Map the file, which is made if it is not there, by one process while others wait.

        Raises ValueError where there is no room for it, or it cannot be written or read, or others could reach it.
        """
        with self._lock:
            if self._file is not None:
                return
            folder = _folder(self.kind)
            path = folder / f"{self.decoder.key()}{SUFFIX}"
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if self.kind == "memory" and not is_private(folder):
                    raise ValueError(
                        f"data.canvas: {folder} is not a folder of this user alone (mode 0700, no link); remove it, or"
                        " set data.canvas: disk"
                    )
                self._file = self._mapped(path) or self._made(path)
            except OSError as error:
                raise ValueError(
                    f"data.canvas: {path} cannot be written or read ({error.strerror or error}); make room for it, or"
                    " set data.canvas: none"
                ) from error

    def read(self, row: int) -> NDArray[np.uint8] | None:
        """The pixels of a picture; None where they are not there and it has to be decoded."""
        file = self._file
        return None if file is None else file.read(int(np.searchsorted(self.row_N, row)))

    def _mapped(self, path: Path) -> _Map | None:
        """The file, if it is there and whole."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        index = _index(file, len(self.row_N))
        if index is None:
            file.close()
            return None
        found = _Map(file, index, path if self.kind == "memory" else None)
        return found if os.fstat(file.fileno()).st_nlink else None  # deleted before its lock was taken

    def _made(self, path: Path) -> _Map:
        with _only_one(path):
            if found := self._mapped(path):
                return found
            for left in path.parent.glob(DRAFTS):  # only the lock's holder writes
                left.unlink()
            if self.kind == "memory":
                _remove_unused(path.parent)
            self._write(path)
            made = self._mapped(path)
        assert made is not None
        return made

    def _write(self, path: Path) -> None:
        rows = self.row_N.tolist()
        size_N = np.array(in_threads(self.decoder.num_bytes, rows), dtype=np.int64)
        begins = _pages(PAGE + 32 * len(rows))
        offset_N = begins + np.cumsum(size_N) - size_N
        num_bytes = begins + int(size_N.sum())
        self._check_room(num_bytes, path.parent)
        with written_whole(path) as file:
            reserve(file, num_bytes)

            def write(position: int) -> tuple[int, int, int, int]:
                offset = int(offset_N[position])
                try:
                    image_HWC = np.ascontiguousarray(self.decoder.pixels(rows[position]))
                except ValueError:  # whoever reads it is told why
                    return offset, 0, 0, 0
                if image_HWC.nbytes != size_N[position]:
                    return offset, 0, 0, 0
                _write_at(file, image_HWC.data.cast("B"), offset)
                return offset, *image_HWC.shape[:2], zlib.crc32(image_HWC.data)

            index_N4 = np.array(in_threads(write, range(len(rows))), dtype="<i8").reshape(-1, 4)
            _write_at(file, memoryview(index_N4.tobytes()), PAGE)
            _write_at(file, memoryview(_header(index_N4.tobytes(), len(rows), num_bytes)), 0)

    def _check_room(self, num_bytes: int, folder: Path) -> None:
        needed = f"data.canvas: {self.kind} needs {num_bytes / GIB:.2f} GiB for {len(self.row_N)} pictures"
        mend = (
            "set data.canvas: disk" if self.kind == "memory" else "set XDG_CACHE_HOME to a folder with more"
        )
        if self.kind == "memory" and num_bytes > self.most_bytes:
            raise ValueError(
                f"{needed}, more than data.canvas_gib: {self.most_bytes / GIB:g}; raise that, or {mend}"
            )
        free = too_little_room(folder, num_bytes)
        if free is not None:
            raise ValueError(
                f"{needed} and a tenth more, and {folder} has {free / GIB:.2f} free; make room, {mend}, or leave"
                " data.canvas out"
            )


class _Map:
    """An open file of canvases.

    Where its ``path`` is given, the last process that closes it deletes it: each holds a lock as long as it lives.
    """

    def __init__(self, file: IO[bytes], index_N4: NDArray[np.int64], path: Path | None) -> None:
        if path is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        self._offset_N, self._height_N, self._width_N, self._crc_N = index_N4.T
        self._is_checked_N = np.zeros(len(index_N4), dtype=np.bool_)
        self._pixels = np.memmap(file, dtype=np.uint8, mode="r")
        weakref.finalize(self, *((file.close,) if path is None else (_let_go, path, file)))

    def read(self, position: int) -> NDArray[np.uint8] | None:
        """The pixels (H, W, 3), whose CRC-32 is compared the first time; None if there are none, or others."""
        height, width = int(self._height_N[position]), int(self._width_N[position])
        if height == 0:
            return None
        offset = int(self._offset_N[position])
        flat = self._pixels[offset : offset + 3 * height * width]
        if not self._is_checked_N[position]:
            if zlib.crc32(flat.data) != self._crc_N[position]:
                return None
            self._is_checked_N[position] = True
        return flat.view(np.ndarray).reshape(height, width, 3)


def remove_unused() -> None:
    """Delete canvases in shared memory that no process uses any more: those of processes that were killed."""
    folder = _folder("memory")
    with contextlib.suppress(OSError, Timeout):
        if is_private(folder):
            with FileLock(folder / "lock", timeout=0):
                _remove_unused(folder)


def _folder(kind: Kind) -> Path:
    if kind == "disk":
        return cache_folder() / "canvases"
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return shared / f"dmlstudy-{os.getuid()}"


def _index(file: IO[bytes], num_pictures: int) -> NDArray[np.int64] | None:
    """The index of a file; None of one that is not whole."""
    header, index = file.read(PAGE), file.read(32 * num_pictures)
    if header != _header(index, num_pictures, os.fstat(file.fileno()).st_size):
        return None
    return np.frombuffer(index, dtype="<i8").reshape(-1, 4).astype(np.int64)


def _header(index: bytes, num_pictures: int, num_bytes: int) -> bytes:
    content = {
        "format": FORMAT,
        "pictures": num_pictures,
        "bytes": num_bytes,
        "index": hashlib.sha256(index).hexdigest(),
    }
    return f"{json.dumps(content)}\n".encode().ljust(PAGE, b"\0")


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the folder's lock; who waits for it lives as long as the holder writes."""
    lock, seen = FileLock(path.parent / "lock"), 0
    while True:
        try:
            lock.acquire(timeout=LOOK_S)
            break
        except Timeout:
            with contextlib.suppress(OSError):
                written = max((each.stat().st_mtime_ns for each in path.parent.glob(DRAFTS)), default=0)
                if written != seen:
                    seen = written
                    beat()
    try:
        yield
    finally:
        lock.release()


def _write_at(file: IO[bytes], content: memoryview, offset: int) -> None:
    while len(content):
        written = os.pwrite(file.fileno(), content, offset)
        content, offset = content[written:], offset + written


def _let_go(path: Path, file: IO[bytes]) -> None:
    """Close a file in shared memory, and delete it if no other process has it open."""
    with contextlib.suppress(OSError), file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:  # else the name may be another file's by now
            path.unlink()


def _remove_unused(folder: Path) -> None:
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            _let_go(path, path.open("rb"))


def key_of(contents: Sequence[bytes], settings: object) -> str:
    """The first 32 hex digits of the SHA-256 over pictures' digests, how they are read, and what decodes them."""
    import PIL
    from PIL import features

    versions = [PIL.__version__, *(str(features.version(name)) for name in ("jpg", "webp", "avif", "zlib"))]
    with contextlib.suppress(ImportError):
        import pillow_heif

        versions.append(pillow_heif.__version__)
    digest = hashlib.sha256(repr((FORMAT, settings, versions)).encode())
    for each in contents:
        digest.update(each)
    return digest.hexdigest()[:32]
