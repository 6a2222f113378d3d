"""Versions of segments, in shared memory, which tell GPUs and other hosts what has changed."""

from __future__ import annotations

from ..plan.call import Region
from .segment import Segment

_COUNT = 1 << 12


class Versions:
    """A version for each segment, also this one, which grows when its contents may have changed.

    Versions are hashed by the number of the segment: a collision causes a needless copy, never a stale
    one.

    Attributes:
        segment, region: the memory of the versions.
    """

    NBYTES = 8 * _COUNT

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.region = Region(segment.number, 0, (_COUNT,), "<u8")
        self._numbers = segment.array(self.region)
        self._own = segment.number % _COUNT

    def touch(self, number: int) -> None:
        """Say that the contents of segment *number* may have changed since the last call."""
        self._numbers[number % _COUNT] += 1
        self._numbers[self._own] += 1
