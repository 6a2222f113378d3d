"""Memory that a worker shares with the other workers, reserved and freed without asking anybody.

All ranks hold one sparse file, in which each has a part of its own::

    │ board │   …   │ blocks of rank 0   …   │ blocks of rank 1   …   │
    0               PART                     2 · PART

A rank reserves *blocks* in its part.  The offset of a block in the file is its name: any rank that
learns it can map the block, and read and write it in place.  Parts are so long that no offset is ever
used for two blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import InternalError
from ..plan.call import Access
from ..values.arrays import Array
from .interrupts import atomic, call_with_last
from .mapping import HUGE, give_back, map_file, take_huge_pages
from .segment import explained, memory_file, require_memory

PART = 1 << 50
"""Bytes of the file from one rank's part to the next; only what is reserved takes memory."""

_SPARE = 4  # freed blocks that are kept, as fresh pages cost more than a copy into old ones
_SPARE_BYTES = 1 << 28  # of all these blocks together, at most
_VIEWS = 256  # blocks of other ranks that are kept mapped


class _Piece:
    """A reserved part of the file, and its mapping in this process."""

    def __init__(self, offset: int, memory: NDArray[np.uint8], once: bool) -> None:
        self.offset = offset
        self.memory = memory
        self.once = once
        self.nbytes = len(memory)
        self.address: int = memory.ctypes.data

    def __lt__(self, other: _Piece) -> bool:
        return self.address < other.address


class Arena:
    """One rank's part of the file, and its view of the others'."""

    def __init__(self, fd: int, rank: int, forget: Callable[[int, int], None] | None = None) -> None:
        """*forget* is told the offset and the size of each part of the file that is given back."""
        self._fd = fd
        self._forget = forget
        self._next, _ = part_of(rank)
        self._live: list[_Piece] = []  # by address
        self._freed: dict[_Piece, object] = {}  # the keys are blocks whose array is gone
        self._spare: list[_Piece] = []  # the oldest first
        self._views: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, once: bool = False) -> Array:
        """An array of this rank's shared memory with arbitrary contents.

        Its block is used again when no view of it is left; with *once* it is used for this array only,
        and holds zeros.  Raises: SharedMemoryError.
        """
        dtype = np.dtype(dtype)
        with atomic:
            block = self._take(max(1, prod(shape) * dtype.itemsize), once)
            insort(self._live, block)
            # an owner of its own: it goes with the last view of this array, not of the mapping
            owner = (ctypes.c_uint8 * block.nbytes).from_address(block.address)
            call_with_last(owner, self._freed.__setitem__, block)
        array: Array = np.ndarray(shape, dtype, buffer=memoryview(owner))
        return array

    def locate(self, array: Array) -> int | None:
        """The offset of a C-contiguous *array* in the file; None if it is not in this rank's memory."""
        address = array.__array_interface__["data"][0]
        index = bisect_right(self._live, address, key=lambda block: block.address) - 1
        if index < 0 or not array.flags.c_contiguous:
            return None
        block = self._live[index]
        inside = address + array.nbytes <= block.address + block.nbytes
        return block.offset + address - block.address if inside else None

    def place(self, array: Array) -> int:
        """The offset of *array*, which lies in this rank's memory."""
        offset = self.locate(array)
        if offset is None:
            raise InternalError("an array that other ranks should see does not lie in shared memory.")
        return offset

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """An array in any rank's memory, at an *offset* that its owner got from ``place``."""
        dtype = np.dtype(dtype)
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = offset + max(1, prod(shape) * dtype.itemsize)
        memory = self._views.get(start)
        if memory is None or len(memory) < end - start:
            with atomic:
                memory = self._mapped(start, end - start)
        array: Array = np.ndarray(shape, dtype, buffer=memory, offset=offset - start)
        return array

    def _mapped(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        try:
            memory = self._views[start] = map_file(self._fd, nbytes, Access.WRITE, start)
        except OSError as error:
            raise explained(error, nbytes) from None
        if len(self._views) > _VIEWS:
            self._views.popitem(last=False)
        return memory

    def tidy(self) -> None:
        """Give back the memory of arrays that are gone, but for a few blocks that are kept for reuse."""
        with atomic:
            self._collect()
            self._trim()

    def _collect(self) -> None:
        for block in list(self._freed):
            del self._live[bisect_left(self._live, block)]
            if block.once:
                self._drop(block)
            else:
                self._spare.append(block)
            del self._freed[block]

    def _trim(self) -> None:
        while len(self._spare) > _SPARE or sum(block.nbytes for block in self._spare) > _SPARE_BYTES:
            self._drop(self._spare.pop(0))

    def _take(self, nbytes: int, once: bool) -> _Piece:
        """A block with room for *nbytes*: a spare one that fits well, or a new one."""
        self._collect()
        spare = () if once else self._spare
        fitting = [b for b in spare if nbytes <= b.nbytes <= 2 * nbytes + mmap.PAGESIZE]
        if fitting:
            block = min(fitting, key=lambda b: b.nbytes)
            self._spare.remove(block)
            return block
        self._trim()
        try:
            return self._reserve(nbytes, once)
        except MemoryError:
            while self._spare:
                self._drop(self._spare.pop(0))
        return self._reserve(nbytes, once)

    def _reserve(self, nbytes: int, once: bool) -> _Piece:
        """A new block.  Raises: SharedMemoryError."""
        require_memory(nbytes)
        unit = HUGE if nbytes >= HUGE else mmap.PAGESIZE
        offset = -(-self._next // unit) * unit
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._next = offset + room
        try:
            take_huge_pages(self._fd, room, offset)
            os.posix_fallocate(self._fd, offset, room)
            return _Piece(offset, map_file(self._fd, room, Access.WRITE, offset), once)
        except OSError as error:
            give_back(self._fd, offset, room)
            raise explained(error, nbytes) from None

    def _drop(self, block: _Piece) -> None:
        give_back(self._fd, block.offset, block.nbytes)
        if self._forget is not None:
            self._forget(block.offset, block.nbytes)


def part_of(rank: int) -> tuple[int, int]:
    """Where the part of *rank* begins, and how many bytes it has."""
    return (1 + rank) * PART, PART


def arena_file(nbytes: int) -> int:
    """A descriptor of a file that ranks can share, whose first *nbytes* are reserved, for a board."""
    return memory_file("synkro-arena", nbytes)
