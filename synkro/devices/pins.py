"""Which memory is pinned: page-locked, so that a GPU copies and reads it at full speed.

Pinning is slow, so memory is pinned when it is first copied, once, and in parts: while a part is copied,
the next one is pinned.  No copy may cross from one part into another.  It all has to be undone before
the memory is unmapped.

Segments stay pinned.  Of files, which may be larger than the memory, only so much is pinned at a time:
parts that were not used for the longest time give way.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..machine import available_memory

PINNED_FROM = 1 << 16
"""Bytes of a segment from which on it is worth pinning; smaller ones are copied through buffers."""

PART = 1 << 28
"""Bytes of a segment that are pinned at once."""

FILE_PART = 1 << 26
"""Bytes of a file that are pinned at once: its pages are small, so that they take longer."""

SHARE = 16
"""One part in so many of the memory that is free at the start may be pinned for files."""

_start = attrgetter("start")


class Memory:
    """A segment or file as this process has mapped it.

    Attributes:
        pinned: its parts that are pinned, by number.
        refused: whether a part could not be pinned: then no more are tried.
    """

    def __init__(self, number: int, memory: NDArray[np.uint8]) -> None:
        self.number: Final = number
        self.size: Final = memory.nbytes
        self.start: int = memory.ctypes.data
        self.is_file: Final = not memory.flags.writeable
        self.part = FILE_PART if self.is_file else PART
        self.pinned: set[int] = set()
        self.refused: bool = memory.nbytes < PINNED_FROM

    def refuse(self) -> None:
        """A part could not be pinned."""
        self.refused = True

    @property
    def is_whole(self) -> bool:
        """Whether all of the memory is pinned."""
        return len(self.pinned) * self.part >= self.size

    def parts(self, address: int, nbytes: int) -> range:
        """The numbers of the parts that so many bytes lie in."""
        begin = address - self.start
        return range(begin // self.part, -(-(begin + nbytes) // self.part)) if nbytes else range(0)

    def span(self, part: int) -> tuple[int, int]:
        """Where a part begins, and its size."""
        begin = part * self.part
        return self.start + begin, min(self.part, self.size - begin)


class Pins:
    """The mapped memory of this process, by address, and which of it is pinned."""

    def __init__(
        self,
        register: Callable[[int, int, bool], bool],
        unregister: Callable[[int], None],
        wait: Callable[[], None],
    ) -> None:
        """*register* pins so many bytes from an address, read-only or not, or returns False;
        *unregister* undoes it.  *wait* returns when no file is being copied: then parts may give way.
        """
        self._register, self._unregister, self._wait = register, unregister, wait
        self._limit = available_memory() // SHARE
        # guards all that follows: segments are mapped in one thread, and inputs copied in another
        self._lock = threading.Lock()
        self._memories: list[Memory] = []  # in the order of their addresses
        self._parts_of_files: dict[tuple[Memory, int], int] = {}  # the bytes of each; oldest first

    def mapped(self, number: int, memory: NDArray[np.uint8]) -> None:
        """A segment has been mapped, or a file, which is read-only."""
        with self._lock:
            insort(self._memories, Memory(number, memory), key=_start)

    def missing(self, array: NDArray[Any]) -> int | None:
        """How many bytes have to be pinned before all of *array* is; None if that cannot be."""
        with self._lock:
            memory = self._holding(array)
            if memory is None or memory.refused:
                return None
            if memory.is_whole:
                return 0
            parts = memory.parts(array.ctypes.data, array.nbytes)
            return sum(memory.span(part)[1] for part in parts if part not in memory.pinned)

    def pinned(self, array: NDArray[Any]) -> bool:
        """Whether all of *array* is pinned at once, after an attempt to pin it."""
        with self._lock:
            memory = self._holding(array)
            if memory is None:
                return False
            if memory.is_whole and not memory.is_file:
                return True
            parts = memory.parts(array.ctypes.data, array.nbytes)
            if memory.is_file and len(parts) * memory.part > self._limit:
                return False
            return all(self._pin(memory, part) for part in parts)

    def blocks(self, array: NDArray[Any]) -> Iterator[tuple[int, int]]:
        """The memory of a contiguous *array*, from its beginning: an address and bytes in one part each.

        A block is pinned when it is yielded.  The end comes early where a part cannot be pinned.
        """
        address, left = array.ctypes.data, array.nbytes
        with self._lock:
            memory = self._holding(array)
        if memory is None:
            return
        for part in memory.parts(address, left):
            with self._lock:
                if not self._pin(memory, part):
                    return
            begin, size = memory.span(part)
            nbytes = min(left, begin + size - address)
            yield address, nbytes
            address, left = address + nbytes, left - nbytes

    def forget(self, number: int) -> None:
        """The segment or file is about to be unmapped."""
        with self._lock:
            for memory in [each for each in self._memories if each.number == number]:
                self._memories.remove(memory)
                for part in memory.pinned:
                    self._parts_of_files.pop((memory, part), None)
                    self._unregister(memory.span(part)[0])

    def _holding(self, array: NDArray[Any]) -> Memory | None:
        """The memory that all of *array* lies in."""
        address: int = array.ctypes.data
        index = bisect_right(self._memories, address, key=_start) - 1
        if index < 0:
            return None
        memory = self._memories[index]
        return memory if address + array.nbytes <= memory.start + memory.size else None

    def _pin(self, memory: Memory, part: int) -> bool:
        """Whether a part is pinned, after an attempt to pin it."""
        key = memory, part
        if part in memory.pinned:
            if memory.is_file:
                self._parts_of_files[key] = self._parts_of_files.pop(key)
            return True
        if memory.refused:
            return False
        begin, size = memory.span(part)
        if memory.is_file:
            self._make_room(size)
        if not self._register(begin, size, memory.is_file):
            memory.refuse()
            return False
        memory.pinned.add(part)
        if memory.is_file:
            self._parts_of_files[key] = size
        return True

    def _make_room(self, size: int) -> None:
        """Unpin parts of files until so many bytes may be pinned."""
        while self._parts_of_files and sum(self._parts_of_files.values()) + size > self._limit:
            self._wait()
            memory, part = next(iter(self._parts_of_files))
            del self._parts_of_files[memory, part]
            memory.pinned.remove(part)
            self._unregister(memory.span(part)[0])
