"""What a host has of the main process's memory, as it is now: each byte goes there once a version."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from .traffic import Extent, PickedRows


class Stock:
    """That of one host."""

    def __init__(self, version: Callable[[int], int]) -> None:
        """*version* tells that of a segment: it grows when the contents may have changed."""
        self._version = version
        self._shelves: dict[int, _Shelf] = {}
        self._files: dict[int, bool] = {}  # whether the host has the same

    def knows(self, segment: int) -> bool:
        """Whether it has been said that the host has a file, or not."""
        return segment in self._files

    def share(self, segment: int, there: bool) -> None:
        """The host has the file that a segment is, and nothing has to go there; or it has not."""
        self._files[segment] = there

    def shares(self, segment: int) -> bool:
        """Whether it has the file that a segment is."""
        return self._files.get(segment, False)

    def lacks(self, piece: Extent | PickedRows) -> Iterator[Extent | PickedRows]:
        """What has to go there of *piece*; from now on the host has it."""
        if self.shares(piece.segment):
            return
        version = self._version(piece.segment)
        shelf = self._shelves.get(piece.segment)
        if shelf is None or shelf.version != version:
            shelf = self._shelves[piece.segment] = _Shelf(version)
        if isinstance(piece, Extent):
            for start, stop in shelf.fill(piece.start, piece.stop):
                yield Extent(piece.segment, start, stop)
        elif len(rows := shelf.pick(piece)):
            yield piece._replace(rows=rows)

    def drop(self, segment: int) -> None:
        """It is gone."""
        self._shelves.pop(segment, None)
        self._files.pop(segment, None)


class _Shelf:
    """What is there of one version of a segment: spans of bytes, and single rows."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._starts: list[int] = []  # of spans that do not touch, in order
        self._stops: list[int] = []
        self._rows: dict[tuple[int, int, int], NDArray[np.bool_]] = {}  # by start, stride and size

    def fill(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
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
        """Have these rows; returns those that were not there, each once."""
        rows = np.unique(piece.rows)
        ends = (
            [piece.start + int(row) * piece.stride for row in (rows[0], rows[-1])] if len(rows) else []
        )
        if not ends or self._holds(min(ends), max(ends) + piece.nbytes):
            return rows[:0]
        key = (piece.start, piece.stride, piece.nbytes)
        there = self._rows.get(key, np.zeros(0, bool))
        if len(there) <= rows[-1]:
            there = np.concatenate([there, np.zeros(int(rows[-1]) + 1 - len(there), bool)])
            self._rows[key] = there
        new: NDArray[np.int64] = rows[~there[rows]]
        there[new] = True
        return new

    def _holds(self, start: int, stop: int) -> bool:
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and self._stops[place] >= stop
