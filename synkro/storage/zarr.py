"""Arrays of zarr, in folders on a disk.

zarr reads and writes in coroutines, which leave files and compression to threads.  Here all of that
happens in the thread that asks: no other thread is left, nor does one wait for another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zarr
import zarr.api.asynchronous
from zarr.storage import LocalStore, MemoryStore

from ..errors import InvalidType, InvalidValue, NotAvailable
from ..memory.interrupts import atomic
from ..plan.call import FileArray
from ..values.arrays import Array, code_of
from .opened import Opened, Stamp, called, part, stamp_of

KIND = "zarr array"


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
        raise InvalidType(f"{value!r} is a group, and no array: give one of its arrays.")
    store = value.store
    if not isinstance(store, LocalStore):
        memory = isinstance(store, MemoryStore)
        where = "in the memory of this process" if memory else f"in a {type(store).__name__}"
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
    """That of the array which lies there now; None if there is none."""
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
        self._loop = _loop_with(_Here())
        store = LocalStore(self.stored.path, read_only=True)
        opening = zarr.api.asynchronous.open_array(store=store, path=self.stored.name, mode="r")
        self._array = self._loop.run_until_complete(opening)
        self._chunks = self._array.shards or self._array.chunks

    def _read(self, target: Array, start: int, stop: int) -> None:
        getting = self._array.getitem(part(self.stored.shape, start, stop))
        target[...] = self._loop.run_until_complete(getting)

    def _is_unchanged(self, start: int, stop: int) -> bool:
        folder = Path(self.stored.path, self.stored.name)
        *metadata, written = self.stored.stamp
        if _metadata_stamp(folder) != tuple(metadata):
            return False
        if start == stop:
            return True
        return all(_time_of(path) <= written for path in self._files(start, stop))

    def _files(self, start: int, stop: int) -> set[str]:
        """The files of these rows, and the folders in which they are, or are not."""
        found = {str(self._folder)}
        for place in itertools.product(*self._places(start, stop)):
            *folders, file = self._array.metadata.encode_chunk_key(place).split("/")
            inner = itertools.accumulate(folders, os.path.join, initial=str(self._folder))
            found.update(inner)
            found.add(os.path.join(self._folder, *folders, file))
        return found

    def _places(self, start: int, stop: int) -> Iterator[range]:
        """The numbers of the chunks of these rows, for each dimension."""
        for dimension, (length, chunk) in enumerate(zip(self.stored.shape, self._chunks, strict=True)):
            low, high = (0, length) if dimension else (start, stop)
            yield range(low // chunk, -(-high // chunk))

    def close(self) -> None:
        if self._loop is not None:
            _end(self._loop)


def _time_of(path: str) -> int:
    """When it was last written to, in ns; 0 for a chunk that is not there, and has the fill value."""
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
        self._loop = _loop_with(_Interruptible())
        self._array: Any = None

    def open(self, store: str, path: str) -> str | None:
        """Open the array; returns its layout, or None if there is none.  Raises: OSError."""
        opening = zarr.api.asynchronous.open_array(store=LocalStore(store), path=path, mode="r+")
        try:
            with atomic:
                self._array = self._loop.run_until_complete(opening)
        except (FileNotFoundError, ValueError):
            return None
        self.unit = (self._array.shards or self._array.chunks)[0]
        return layout(self._array)

    def write(self, rows: Array, start: int, stop: int) -> None:
        """Write the rows from *start* to *stop* of all *rows*.  Raises: OSError."""
        with atomic:
            setting = self._array.setitem(slice(start, stop), rows[start:stop])
            self._loop.run_until_complete(setting)

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
    """Runs what it is to run in a thread at once, in this one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Interruptible(_Here):
    """… until an interrupt is due: the next step does not begin then."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if atomic.due:
            raise asyncio.CancelledError
        return super().submit(fn, *args, **kwargs)
