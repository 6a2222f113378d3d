"""Rows of an array in a file, by chunks: each is read once, in the order in which they lie there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..plan.batch import Indexed, Selection, Strided
from ..values.arrays import Array
from .opened import Opened, go_on, is_dense

_TOGETHER = 1 << 22
"""Bytes of chunks that are read together, if one chunk does not have more."""

_BLOCKS, _ROWS = 16, 512
"""How many blocks at most, and about how many rows, are read together where few of their rows are."""


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
    many = max(1, _TOGETHER // max(1, stored.chunk * prod(shape[1:]) * dtype.itemsize)) * stored.chunk
    if isinstance(selection, Strided) and abs(selection.step) == 1 and selection.count:
        first, last = selection.start, selection.start + selection.step * (selection.count - 1)
        return file.span(min(first, last), max(first, last) + 1, many, stopped)[:: selection.step]
    target = np.empty((selection.count, *shape[1:]), dtype)
    if not selection.count:
        return target
    if isinstance(selection, Strided):
        selection = Indexed(
            selection.start + selection.step * np.arange(selection.count, dtype=np.int64)
        )
    order = np.argsort(selection.indices, kind="stable")
    wanted = selection.indices[order]
    rows = np.unique(wanted)
    for part in _together(rows, many, file.gap):
        go_on(stopped)
        some = rows[part]
        here = slice(*np.searchsorted(wanted, [some[0], some[-1] + 1]))
        target[order[here]] = file.rows(some)[np.searchsorted(some, wanted[here])]
    return target


def _together(rows: NDArray[np.int64], many: int, gap: int) -> Iterator[slice]:
    """Which of the *rows*, ascending, are read together: those of a block of *many*; where they lie
    further apart than *gap*, those of some blocks.
    """
    edges = [0, *(np.flatnonzero(np.diff(rows // many)) + 1).tolist(), len(rows)]
    first, blocks = 0, 0
    for start, stop in itertools.pairwise(edges):
        close = stop - start > 1 and is_dense(rows[start:stop], gap)
        if blocks and (close or blocks == _BLOCKS or stop - first > _ROWS):
            yield slice(first, start)
            first, blocks = start, 0
        if close:
            yield slice(start, stop)
            first = stop
        else:
            blocks += 1
    if blocks:
        yield slice(first, len(rows))
