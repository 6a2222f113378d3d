"""Rows of an array in a file, by chunks: each is read once, in the order in which they lie there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..plan.batch import Indexed, Selection, Strided
from ..values.arrays import Array
from .opened import Opened

_TOGETHER = 1 << 22
"""Bytes of chunks that are read together, if one chunk does not have more."""


def rows_of(file: Opened, selection: Selection, stopped: Callable[[], bool]) -> Array:
    """The rows of a *selection*, in its order, as an array of its own.

    Raises: OSError as ``Opened.read``; CancelledError between two chunks once *stopped* says so.
    """
    stored = file.stored
    dtype = np.dtype(stored.dtype)
    shape = stored.shape
    if not shape:
        scalar = np.empty((), dtype)
        file.read(scalar, 0, 1)
        return scalar
    target = np.empty((selection.count, *shape[1:]), dtype)
    if not selection.count:
        return target
    many = max(1, _TOGETHER // max(1, stored.chunk * prod(shape[1:]) * dtype.itemsize)) * stored.chunk
    if isinstance(selection, Strided) and abs(selection.step) == 1:
        first, last = selection.start, selection.start + selection.step * (selection.count - 1)
        low, high = min(first, last), max(first, last) + 1
        for start, stop in _parts(low, high, many):
            _go_on(stopped)
            file.read(target[start - low : stop - low], start, stop)
        return target[:: selection.step]
    if isinstance(selection, Strided):
        selection = Indexed(
            selection.start + selection.step * np.arange(selection.count, dtype=np.int64)
        )
    order = np.argsort(selection.indices, kind="stable")
    wanted = selection.indices[order]
    for group in _groups(wanted, stored.chunk, many):
        _go_on(stopped)
        start, stop = int(wanted[group][0]), int(wanted[group][-1]) + 1
        rows = np.empty((stop - start, *shape[1:]), dtype)
        file.read(rows, start, stop)
        target[order[group]] = rows[wanted[group] - start]
    return target


def _parts(start: int, stop: int, many: int) -> Iterator[tuple[int, int]]:
    """The rows from *start* to *stop*, cut at multiples of *many*."""
    while start < stop:
        end = min(stop, (start // many + 1) * many)
        yield start, end
        start = end


def _groups(wanted: NDArray[np.int64], chunk: int, many: int) -> Iterator[slice]:
    """Which of the *wanted* rows, ascending, are read together: neighbouring chunks of *many* rows."""
    chunks, parts = wanted // chunk, wanted // many
    edges = np.flatnonzero((np.diff(chunks) > 1) | (np.diff(parts) > 0)) + 1
    bounds = [0, *edges.tolist(), len(wanted)]
    yield from map(slice, bounds[:-1], bounds[1:])


def _go_on(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise CancelledError
