"""Pinned memory of the host."""

from __future__ import annotations

import mmap
import sys

import numpy as np

from . import _host, _machine

_POISON = bytes([0xAB])


class _Pages(mmap.mmap):
    """Whole pages, pinned for as long as any array on them lives."""

    def __init__(self, *args):
        self.address = np.frombuffer(self, np.uint8).ctypes.data
        self[:] = _POISON * len(self)
        _host.add_allocation(self.address, len(self))

    def __del__(self):
        if not sys.is_finalizing():
            _host.drop_allocation(self.address)


class PinnedMemory:
    """A block of pinned memory, full of poison."""

    def __init__(self, size, flags=0):
        self.size, self.ptr, self._pages = size, 0, b""
        if size:
            _machine.check()
            _machine.touch(_machine.current_device())
            self._pages = _Pages(-1, size)
            self.ptr = self._pages.address

    def __int__(self):
        return self.ptr


class PinnedMemoryPointer(np.ndarray):
    """A place in a block, which offers the rest of the block as a buffer.

    It is an array of bytes only because before Python 3.12 nothing else written in Python can offer
    a buffer; the real one is not.
    """

    __slots__ = ("mem", "ptr")

    def __new__(cls, mem, offset):
        pointer = np.ndarray(mem.size, np.int8, mem._pages)[offset:].view(cls)
        pointer.mem, pointer.ptr = mem, mem.ptr + offset
        return pointer

    def __int__(self):
        return self.ptr

    def __add__(self, offset):
        return PinnedMemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def size(self):
        """How many bytes there are from here."""
        return self.mem.size - (self.ptr - self.mem.ptr)


class PinnedMemoryPool:
    """Lends blocks of at least 512 bytes in powers of two; it keeps none of those that are freed."""

    __slots__ = ("__weakref__", "_allocator")

    def __init__(self, allocator=None):
        self._allocator = allocator or (lambda size: PinnedMemoryPointer(PinnedMemory(size), 0))

    def malloc(self, size):
        """Memory of at least `size` bytes."""
        return self._allocator(max(512, 1 << (size - 1).bit_length()) if size else 0)

    def free_all_blocks(self):
        """Nothing to do: there are none."""

    def n_free_blocks(self):
        """None are kept."""
        return 0


_default_pool = PinnedMemoryPool()


def get_default_pinned_memory_pool():
    """The pool that `alloc_pinned_memory` takes from."""
    return _default_pool


def alloc_pinned_memory(size):
    """Pinned memory of at least `size` bytes."""
    return _default_pool.malloc(size)
