"""Reading by processes: pictures are decoded beside the process that trains, not in it.

Many threads that decode in one process hold Python's lock in turn, and the thread that launches a GPU's work waits for
it each time. Processes are those of PyTorch's DataLoader: they hand images over in shared memory, live through all
epochs, and end when their parent does, however that ends.
"""

from __future__ import annotations

import shutil
import signal
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dmlstudy.data.images import Indices, Inputs

if TYPE_CHECKING:
    from dmlstudy.data.augmentation import Augmentation
    from dmlstudy.data.loader import Readable

SHARES = 4
"""Parts of a batch that are read at once: the first batch of an epoch comes so much sooner."""

ROOM = 2**30
"""Bytes of shared memory that must be free: what is read ahead lies there."""

SHARED = Path("/dev/shm")


def can_share_memory() -> bool:
    """True if there is shared memory enough; containers often have 64 MiB."""
    return SHARED.is_dir() and shutil.disk_usage(SHARED).free >= ROOM


class ReadShare(NamedTuple):
    """Images of a share, and how long reading them took."""

    images: Inputs
    seconds: float


class Processes:
    """A pool of processes that begin when the first images are asked of them."""

    def __init__(
        self, images: Readable, augmentation: Augmentation | None, seed: int, num_processes: int
    ) -> None:
        self._source = _Source(images, augmentation, seed)
        self._num_processes = num_processes
        self._keys = _Keys()
        self._held: list[Any] = []  # the loader, which this holds until it goes, whatever cycles it is in
        weakref.finalize(self, self._held.clear)

    def read(self, keys: Iterable[tuple[int, Indices]]) -> Generator[ReadShare]:
        """The images at each share's indices, as they are seen in its epoch, in order; reading begins at once.

        An error of a picture is raised where its share would have been given.
        """
        self._keys.keys = keys
        if not self._held:
            import torch
            from torch.utils.data import DataLoader

            loader: Any = DataLoader(
                self._source,  # type: ignore[arg-type]  # has all of a Dataset that is asked for
                batch_size=None,
                sampler=self._keys,
                num_workers=self._num_processes,
                collate_fn=_as_it_is,
                worker_init_fn=_begin,
                persistent_workers=True,
                multiprocessing_context="fork",
                generator=torch.Generator(),  # not the one that training draws from
            )
            self._held.append(loader)
        return _shares(iter(self._held[0]))


def _shares(read: Iterator[Any]) -> Generator[ReadShare]:
    for found in read:
        if isinstance(found, BaseException):
            raise found
        images, seconds = found
        yield ReadShare(images.numpy(), seconds)


class _Source:
    """Images by epoch and indices, as a process reads them."""

    def __init__(self, images: Readable, augmentation: Augmentation | None, seed: int) -> None:
        self._images, self._augmentation, self._seed = images, augmentation, seed

    def __getitem__(self, key: tuple[int, Indices]) -> Any:
        import torch

        epoch, indices = key
        views = None if self._augmentation is None else self._augmentation.views(self._seed, epoch)
        started = time.perf_counter()
        try:
            images = torch.from_numpy(self._images.read(indices, views))
        except Exception as error:  # DataLoader would put a traceback into its words
            return error
        return images, time.perf_counter() - started


class _Keys:
    """The keys of the present epoch, as a sampler."""

    keys: Iterable[tuple[int, Indices]] = ()

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        return iter(self.keys)


def _as_it_is(found: Any) -> Any:
    return found


def _begin(_: int) -> None:
    """Leave Ctrl-C to the parent, which ends its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
