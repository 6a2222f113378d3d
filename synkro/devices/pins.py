"""Which memory is pinned: page-locked, so that a GPU copies it at full speed while others compute.

Pinning is slow, so a segment is pinned when it is first copied, whole, and once.  It has to be undone
before the memory is unmapped.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

PINNED_FROM = 1 << 16
"""Bytes of a segment from which on it is worth pinning; smaller ones are copied through the ring."""


class Pins:
    """The mapped segments of this process, by address, and which of them are pinned."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], None]) -> None:
        """*register* pins so many bytes from an address, or returns False; *unregister* undoes it."""
        self._register = register
        self._unregister = unregister
        # guards all that follows: segments are mapped in one thread, and inputs copied in another
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._segments: dict[int, tuple[int, int]] = {}  # by start: number and size
        self._pinned: dict[int, bool] = {}  # by start; False where it was tried in vain

    def mapped(self, number: int, memory: NDArray[np.uint8]) -> None:
        """A segment has been mapped.  Memory that is mapped read-only is never pinned."""
        start: int = memory.ctypes.data
        with self._lock:
            insort(self._starts, start)
            self._segments[start] = number, memory.nbytes
            if not memory.flags.writeable or memory.nbytes < PINNED_FROM:
                self._pinned[start] = False

    def pinned(self, array: NDArray[Any]) -> bool:
        """Whether all of *array* lies in pinned memory, after an attempt to pin it."""
        address: int = array.ctypes.data
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return False
            start = self._starts[index]
            _, size = self._segments[start]
            if address + array.nbytes > start + size:
                return False
            if start not in self._pinned:
                self._pinned[start] = self._register(start, size)
            return self._pinned[start]

    def forget(self, number: int) -> None:
        """The segment is about to be unmapped."""
        with self._lock:
            for start in [start for start, (known, _) in self._segments.items() if known == number]:
                self._starts.remove(start)
                del self._segments[start]
                if self._pinned.pop(start, False):
                    self._unregister(start)
