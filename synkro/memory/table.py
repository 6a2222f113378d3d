"""From a segment's number to its memory, in whichever process, and to the version of what lies there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..plan.call import Region
from .interrupts import uninterrupted
from .segment import Segment, array_in

T = TypeVar("T")
Bytes = NDArray[np.uint8]

_VERSIONS = 1 << 12


class SegmentTable(Generic[T]):
    """The segments that a process knows; each is mapped at its first use.

    If that fails, the next use tries again.
    """

    def __init__(self, mapped: Callable[[int, T], Bytes], release: Callable[[int], object]) -> None:
        """*mapped* maps a segment, by its number and what was said of it; *release* gives back what it
        was to be mapped by."""
        self._mapped = mapped
        self._release = release
        self._memory: dict[int, Bytes] = {}
        self._unmapped: dict[int, T] = {}
        self._kept: set[int] = set()

    def attach(self, number: int, wanted: T) -> bool:
        """There is a segment, of which *wanted* is said; returns whether it is new."""
        new = number not in self._memory and number not in self._unmapped
        if new:
            self._unmapped[number] = wanted
        return new

    def put(self, number: int, memory: Bytes) -> None:
        """There is a segment, which is mapped already."""
        self._memory[number] = memory

    def is_mapped(self, number: int) -> bool:
        """Whether a segment has been used."""
        return number in self._memory

    def keep(self, number: int) -> None:
        """Keep a segment until the end: the ranks write to it although its number is gone."""
        self._kept.add(number)

    def drop(self, number: int) -> bool:
        """Segment *number* is gone in the main process; returns whether it is gone here."""
        if number in self._kept:
            return False
        if self._unmapped.pop(number, None) is not None:
            self._release(number)
        self._memory.pop(number, None)
        return True

    def memory(self, number: int) -> Bytes:
        """All of a segment.  Raises: as what maps it."""
        memory = self._memory.get(number)
        if memory is None:
            with uninterrupted():
                memory = self._memory[number] = self._mapped(number, self._unmapped[number])
                del self._unmapped[number]
                self._release(number)
        return memory

    def array(self, region: Region) -> NDArray[np.generic]:
        """The array that *region* describes, as a view."""
        return array_in(self.memory(region.segment), region)


class Versions:
    """A version for each segment, also this one, which grows when its contents may have changed.

    Versions are hashed by the number of the segment: a collision causes a needless copy, never a stale
    one.

    Attributes:
        segment, region: the memory of the versions.
    """

    NBYTES = 8 * _VERSIONS

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.region: Final = Region(segment.number, 0, (_VERSIONS,), "<u8")
        self._numbers = segment.array(self.region)
        self._own = segment.number % _VERSIONS

    def touch(self, number: int) -> None:
        """Say that the contents of segment *number* may have changed since the last call."""
        self._numbers[number % _VERSIONS] += 1
        self._numbers[self._own] += 1
