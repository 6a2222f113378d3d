"""Mirrors: a host's copies of the main process's segments, of the same numbers and sizes.

The mirror of a memory-mapped file is the same file, where the host has it.  The gateway knows which
bytes of them are current, and sends the others when they are read.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..memory.files import Likeness, same_file
from ..memory.mapping import HUGE, map_file, take_huge_pages
from ..memory.segment import SegmentTable, explained
from ..plan.call import Access
from ..plan.extents import Extent, PickedRows


class Mirrors(SegmentTable[None]):
    """The mirrors of one host.  Only what is used of them takes memory."""

    def __init__(self) -> None:
        super().__init__(self._unknown, self._unknown)  # all are put
        self._files: dict[int, int] = {}

    def descriptor(self, number: int, nbytes: int) -> int:
        """The descriptor of a mirror, which is made at the first time.  Raises: SharedMemoryError."""
        if number not in self._files:
            try:
                file = self._files[number] = os.memfd_create("synkro-mirror", os.MFD_CLOEXEC)
                os.fchmod(file, 0o600)
                os.ftruncate(file, nbytes)
                self.put(number, map_file(file, nbytes, Access.WRITE))
            except OSError as error:
                raise explained(error, nbytes) from None
        return self._files[number]

    def share(self, number: int, nbytes: int, wanted: Likeness) -> bool:
        """Be the file of this host that looks as *wanted*; returns whether there is one."""
        file = same_file(wanted)
        if file is None:
            return False
        try:
            self.put(number, map_file(file, nbytes, Access.READ))
        except OSError:
            os.close(file)
            return False
        self._files[number] = file
        return True

    def reserve(self, extent: Extent) -> None:
        """Have memory for these bytes: a full machine is an error here, and no SIGBUS later.

        Raises: SharedMemoryError.
        """
        file, page = self._files[extent.segment], mmap.PAGESIZE
        start = extent.start // page * page
        nbytes = min(-(-extent.stop // page) * page, os.fstat(file).st_size) - start
        try:
            if nbytes >= 2 * HUGE:
                low = -(-start // HUGE) * HUGE
                take_huge_pages(file, (start + nbytes - low) // HUGE * HUGE, low)
            os.posix_fallocate(file, start, nbytes)
        except OSError as error:
            raise explained(error, nbytes) from None

    def _unknown(self, number: int, *_: None) -> NDArray[np.uint8]:
        raise KeyError(number)

    def drop(self, number: int) -> bool:
        gone = super().drop(number)
        if gone and number in self._files:
            os.close(self._files.pop(number))
        return gone

    def close(self) -> None:
        """Drop all mirrors."""
        self._kept.clear()
        for number in tuple(self._files):
            self.drop(number)


class CurrentBytes:
    """Which bytes of a host's mirrors are current: each goes there once a version."""

    def __init__(self, version: Callable[[int], int]) -> None:
        """*version* tells that of a segment: it grows when the contents may have changed."""
        self._version = version
        self._segments: dict[tuple[int, bool], _SegmentBytes] = {}  # by number, and if bare
        self._files: dict[int, bool] = {}  # whether the host has the same

    def knows(self, segment: int) -> bool:
        """Whether the host has said if it has the file that a segment is."""
        return segment in self._files

    def share(self, segment: int, there: bool) -> None:
        """The host has the file that a segment is, and nothing has to go there; or it has not."""
        self._files[segment] = there

    def shares(self, segment: int) -> bool:
        """Whether the host has the file that a segment is."""
        return self._files.get(segment, False)

    def lacks(self, piece: Extent | PickedRows) -> Iterator[Extent | PickedRows]:
        """What of *piece* has to go to the host, which has it from now on."""
        if self.shares(piece.segment):
            return
        version = self._version(piece.segment)
        key = piece.segment, piece.bare
        there = self._segments.get(key)
        if there is None or there.version != version:
            there = self._segments[key] = _SegmentBytes(version)
        if isinstance(piece, Extent):
            for start, stop in there.add(piece.start, piece.stop):
                yield Extent(piece.segment, start, stop, piece.bare)
        elif len(rows := there.pick(piece)):
            yield piece._replace(rows=rows)

    def drop(self, segment: int) -> None:
        """A segment is gone."""
        for bare in (False, True):
            self._segments.pop((segment, bare), None)
        self._files.pop(segment, None)


class _SegmentBytes:
    """What a host has of one version of a segment: spans of bytes, and single rows."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._starts: list[int] = []  # of spans that do not touch, in order
        self._stops: list[int] = []
        self._rows: dict[tuple[int, int, int], NDArray[np.bool_]] = {}  # by start, stride and size

    def add(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Have the bytes from *start* to *stop*; returns the spans that were not there."""
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        at = start
        for low, high in zip(self._starts[first:last], self._stops[first:last], strict=True):
            if at < low:
                yield at, min(low, stop)
            at = max(at, high)
        if at < stop:
            yield at, stop
        low = min([start, *self._starts[first:last]])
        high = max([stop, *self._stops[first:last]])
        self._starts[first:last], self._stops[first:last] = [low], [high]

    def pick(self, piece: PickedRows) -> NDArray[np.int64]:
        """Have the rows of *piece*; returns those that were not there, each once."""
        rows = np.unique(piece.rows)
        if not len(rows):
            return rows
        ends = [piece.start + int(row) * piece.stride for row in (rows[0], rows[-1])]
        span = bisect_right(self._starts, min(ends)) - 1
        if span >= 0 and self._stops[span] >= max(ends) + piece.nbytes:
            return rows[:0]
        key = (piece.start, piece.stride, piece.nbytes)
        there = self._rows.get(key, np.zeros(0, bool))
        if len(there) <= rows[-1]:
            there = np.concatenate([there, np.zeros(int(rows[-1]) + 1 - len(there), bool)])
            self._rows[key] = there
        new: NDArray[np.int64] = rows[~there[rows]]
        there[new] = True
        return new
