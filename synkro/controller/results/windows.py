"""Windows: memory of the user's, mapped once more, so that the workers write results straight there.

    Data      the workers have it for reading, as an input; its window is the same memory, for writing
    a map     … of a file: its window is the whole file

A window has a number of its own in commands.  It lasts as long as the memory that it shows, so that the
workers map it once.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...errors import InvalidValue
from ...memory.files import file_of
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment, explained
from ...plan.call import Access, Region
from ...values.arrays import Array, code_of
from ..data.outgoing import Placed
from ..engine.engine import Engine


class Bytes(NamedTuple):
    """Bytes of a file, or of memory, which is a file without a name."""

    device: int
    inode: int
    start: int
    stop: int

    def overlap(self, other: Bytes) -> bool:
        """Whether *other* has some of the same bytes."""
        return self[:2] == other[:2] and self.start < other.stop and other.start < self.stop


class Windows:
    """The windows of one session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of_data: WeakKeyDictionary[Segment, Segment] = WeakKeyDictionary()
        self._of_maps: WeakKeyDictionary[mmap.mmap, tuple[Segment, int]] = WeakKeyDictionary()

    def on_data(self, placed: Placed) -> Placed:
        """The window on the memory of a ``Data``.  Raises: SharedMemoryError."""
        region, segment = placed
        window = self._of_data.get(segment)
        if window is None:
            with uninterrupted():
                try:
                    fd = os.dup(segment.fd)
                except OSError as error:
                    raise explained(error, segment.nbytes) from None
                window = self._engine.directory.opened(fd, segment.nbytes, Access.WRITE)
                self._of_data[segment] = window
        return Placed(replace(region, segment=window.number), window)

    def on_map(self, array: Array) -> Placed | None:
        """The window on the file which *array*, or what it is a view of, maps; None if there is none.

        Raises: InvalidValue for a file that was cut; OSError for one that its disk has no room for.
        """
        below = mapped_below(array)
        handle: Any = getattr(below, "_mmap", None)
        if below is None or array.size == 0:
            return None
        found = self._of_maps.get(handle)
        if found is None:
            with uninterrupted():
                opened = file_of(below, os.O_RDWR)
                if opened is None:
                    return None
                fd, offset = opened
                window = self._engine.directory.opened(fd, os.fstat(fd).st_size, Access.WRITE)
                found = self._of_maps[handle] = window, offset - _address(below)
        window, start = found
        low, high = _bounds(array)
        _reserve(window, low + start, high + start, below.filename)
        region = Region(
            window.number, _address(array) + start, array.shape, code_of(array.dtype), array.strides
        )
        return Placed(region, window)

    def close(self) -> None:
        """Forget all windows."""
        self._of_data.clear()
        self._of_maps.clear()


def mapped_below(array: Array) -> np.memmap[Any, Any] | None:
    """The memory-mapped array that *array* is a view of, or is itself; the whole map, not a part."""
    found = None
    below: Any = array
    while isinstance(below, np.ndarray):
        found = below if isinstance(below, np.memmap) else found
        below = below.base
    return found


def bytes_of(placed: Placed) -> Bytes:
    """Which bytes lie at *placed*, from the first to the last."""
    region, segment = placed
    return _bytes_in(segment.fd, segment.array(region), _address(segment.base))


def _bytes_in(fd: int, array: Array, start: int) -> Bytes:
    """Which bytes of a file *array* has, where that file begins at the address *start*."""
    file = os.fstat(fd)
    low, high = _bounds(array)
    return Bytes(file.st_dev, file.st_ino, low - start, high - start)


def bytes_of_map(array: np.memmap[Any, Any]) -> Bytes | None:
    """Which bytes of a file a memory-mapped array shows; None if that is not known."""
    below = mapped_below(array)
    opened = None if below is None else file_of(below)
    if below is None or opened is None:
        return None
    fd, offset = opened
    try:
        return _bytes_in(fd, array, _address(below) - offset)
    finally:
        os.close(fd)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _bounds(array: Array) -> tuple[int, int]:
    """The addresses of the first byte, and behind the last one."""
    low = high = _address(array)
    if array.size == 0:
        return low, low
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += (length - 1) * min(stride, 0)
        high += (length - 1) * max(stride, 0)
    return low, high + array.itemsize


def _reserve(window: Segment, start: int, stop: int, name: Any) -> None:
    """Have room on the disk for these bytes of a file: a full one is an error now, no SIGBUS later.

    Raises: OSError; InvalidValue for a file that was cut.
    """
    nbytes = os.fstat(window.fd).st_size
    if stop > nbytes:
        raise InvalidValue(
            f"the file {name} has {nbytes} bytes, and the array in out= reaches to byte {stop}: the "
            f"file was cut after it was mapped."
        )
    try:
        os.posix_fallocate(window.fd, start, stop - start)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(
            error.errno,
            f"{why}: there is no room for the {stop - start} bytes that out= is to take in the file "
            f"{name}. Nothing was computed, and the file holds what it held",
        ) from None
