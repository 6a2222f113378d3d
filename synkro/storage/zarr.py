"""Arrays of zarr, in folders on a disk.

zarr reads and writes in coroutines, which leave files and compression to threads.  Here all of that
happens in the thread that asks: no other thread is left, nor does one wait for another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr
import zarr.api.asynchronous
from numpy.typing import NDArray
from zarr.storage import LocalStore, MemoryStore

from ..errors import A_LINE, InvalidType, InvalidValue, NotAvailable, shown, with_article
from ..memory.interrupts import atomic
from ..plan.call import FileArray
from ..values.arrays import Array, code_of
from .opened import Opened, Stamp, called, part, stamp_of

KIND = "zarr array"

_UNKNOWN = (
    "has a codec that the workers do not know: register it there, too, in a function that each of them "
    "runs once, synkro.function(lambda: numcodecs.register_codec(Codec), outputs=[])()"
)


def is_array(value: Any) -> bool:
    """Whether *value* is an array of zarr's, or the group that it is in."""
    return isinstance(value, zarr.Array | zarr.Group)


def describe(value: Any, number: int) -> FileArray:
    """An array, so that another process can open it.

    Raises: InvalidType, InvalidValue for one that others cannot open and find the same; NotAvailable.
    """
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise NotAvailable(f"arrays of zarr need zarr 3 or newer; this is {zarr.__version__}.")
    if isinstance(value, zarr.Group):
        raise InvalidType(f"{shown(value, A_LINE)} is a group, and no array: give one of its arrays.")
    store = value.store
    if not isinstance(store, LocalStore):
        memory = isinstance(store, MemoryStore)
        where = "in the memory of this process" if memory else f"in {with_article(type(store).__name__)}"
        raise InvalidValue(
            f"the zarr array {value.name or ''!r} lies {where}, where the workers cannot open it: write "
            f"it to a folder, or give a copy, x[:]."
        )
    path, name = os.path.abspath(store.root), value.path
    if not value.read_only:
        raise InvalidValue(
            f"{called(KIND, path, name)} is open for writing: open it with zarr.open(path, mode='r')."
        )
    chunk = (value.shards or value.chunks or (1,))[0] if value.shape else 1
    try:
        stamp = _stamp(Path(path, name))
    except OSError as error:
        raise InvalidValue(
            f"{called(KIND, path, name)} is not there any more ({error.strerror}): open it again."
        ) from None
    if layout_at(path, name) != layout(value):
        raise InvalidValue(
            f"{called(KIND, path, name)} was replaced while it was open: open it again, with "
            f"zarr.open(path, mode='r')."
        )
    return FileArray(number, KIND, path, name, value.shape, code_of(value.dtype), chunk, stamp)


def layout(array: Any) -> str:
    """What the chunks of an *array* are, and are to be: equal where two handles show the same array."""
    metadata = array.metadata.to_dict()
    return repr({key: value for key, value in metadata.items() if key != "attributes"})


def layout_at(path: str, name: str) -> str | None:
    """The layout of the array which lies there now; None if there is none."""
    try:
        return layout(zarr.open_array(path, path=name, mode="r"))
    except (OSError, ValueError):
        return None


def _stamp(folder: Path) -> Stamp:
    """What changes with the array's metadata, and last the time by which its chunks were written.

    Chunks are files of their own, of which there may be many: none is looked at before it is read.
    """
    metadata = _metadata_stamp(folder)
    return *metadata, max(time.time_ns(), metadata[1], folder.stat().st_mtime_ns)


def _metadata_stamp(folder: Path) -> Stamp:
    new = folder / "zarr.json"
    return stamp_of(str(new if new.exists() else folder / ".zarray"))


class OpenArray(Opened):
    """An array, with an event loop of its own."""

    _loop: Any = None

    def _open(self) -> None:
        self._folder = Path(self.stored.path, self.stored.name)
        self._threads = _Here()
        self._loop = _loop_with(self._threads)
        store = LocalStore(self.stored.path, read_only=True)
        opening = zarr.api.asynchronous.open_array(store=store, path=self.stored.name, mode="r")
        self._array = self._loop.run_until_complete(opening)
        self._chunks = self._array.shards or self._array.chunks

    def _read(self, target: Array, start: int, stop: int) -> None:
        getting = self._array.getitem(part(self.stored.shape, start, stop))
        target[...] = self._loop.run_until_complete(getting)

    def _why(self, error: Exception) -> str:
        return _UNKNOWN if _is_unknown_codec(error) else super()._why(error)

    def span(self, start: int, stop: int, many: int, stopped: Callable[[], bool]) -> Array:
        """The rows from *start* to *stop*; zarr puts all of them together, which saves a copy."""
        found: list[Array] = []

        def get() -> None:
            getting = self._array.getitem(slice(start, stop))
            found.append(np.ascontiguousarray(self._loop.run_until_complete(getting), self.stored.dtype))

        self._threads.obey(stopped)
        self._try(get, self._chunks_of(start, stop))
        return found[0]

    def _read_rows(self, target: Array, rows: NDArray[np.int64]) -> None:
        self._loop.run_until_complete(self._fill(target, rows))

    async def _fill(self, target: Array, rows: NDArray[np.int64]) -> None:
        """Fill *target* with *rows*, chunk by chunk."""
        edges = np.flatnonzero(np.diff(rows // self._array.chunks[0])) + 1
        for start, stop in itertools.pairwise([0, *edges.tolist(), len(rows)]):
            some = rows[start:stop]
            found = await self._array.getitem(slice(int(some[0]), int(some[-1]) + 1))
            target[start:stop] = found[some - some[0]]

    def _is_unchanged(self, chunks: Sequence[int]) -> bool:
        *metadata, written = self.stored.stamp
        if _metadata_stamp(Path(self.stored.path, self.stored.name)) != tuple(metadata):
            return False
        return not chunks or all(_time_of(path) <= written for path in self._files(chunks))

    def _files(self, chunks: Sequence[int]) -> set[str]:
        """The files of *chunks*, and the folders in which they are, or are not."""
        found = {str(self._folder)}
        along = zip(self.stored.shape[1:], self._chunks[1:], strict=True)
        places = [range(-(-length // chunk)) for length, chunk in along]
        for place in itertools.product(*[chunks][: len(self.stored.shape)], *places):
            *folders, file = self._array.metadata.encode_chunk_key(place).split("/")
            found.update(itertools.accumulate(folders, os.path.join, initial=str(self._folder)))
            found.add(os.path.join(self._folder, *folders, file))
        return found

    def close(self) -> None:
        if self._loop is not None:
            _end(self._loop)


def _is_unknown_codec(error: Exception) -> bool:
    """Whether a codec is unknown, by the name of *error*: zarr has such an error, and numcodecs has
    another."""
    return type(error).__name__ == "UnknownCodecError"


def _time_of(path: str) -> int:
    """When a file was last written to, in ns; 0 for a chunk that is not there, and has the fill
    value."""
    try:
        return os.stat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return 0


class ChunkWriter:
    """An array to be written to, with an event loop of its own.

    Attributes:
        unit: how many rows no two writers may share: those of a shard, or of a chunk.
    """

    unit: int

    def __init__(self) -> None:
        threads = _Here()
        threads.obey(lambda: atomic.due)
        self._loop = _loop_with(threads)
        self._array: Any = None

    def open(self, store: str, path: str) -> str | None:
        """Open the array; returns its layout, or None if there is none.  Raises: OSError."""
        opening = zarr.api.asynchronous.open_array(store=LocalStore(store), path=path, mode="r+")
        try:
            with atomic:
                self._array = self._loop.run_until_complete(opening)
        except (FileNotFoundError, ValueError) as error:
            if _is_unknown_codec(error):
                raise OSError(f"it {_UNKNOWN}: {error}") from None
            return None
        self.unit = (self._array.shards or self._array.chunks)[0]
        return layout(self._array)

    def write(self, rows: Array, start: int, stop: int) -> None:
        """Write the rows from *start* to *stop* of all *rows*.  Raises: OSError."""
        with atomic:
            self._loop.run_until_complete(self._array.setitem(slice(start, stop), rows[start:stop]))

    def close(self) -> None:
        """Leave off."""
        with atomic:
            _end(self._loop)


def _loop_with(executor: ThreadPoolExecutor) -> Any:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(executor)
    return loop


def _end(loop: Any) -> None:
    left = asyncio.all_tasks(loop)  # where one chunk of several could not be read, or written
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.wait(left) if left else asyncio.sleep(0))
    loop.close()


class _Here(ThreadPoolExecutor):
    """Runs what it is to run in a thread at once, in this one, until it is stopped."""

    _stopped: Callable[[], bool] = staticmethod(bool)

    def obey(self, stopped: Callable[[], bool]) -> None:
        """From now on no step begins once *stopped* says so."""
        self._stopped = stopped

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._stopped():
            raise asyncio.CancelledError
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
