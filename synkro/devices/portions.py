"""Arrays in portions: rows that are not one pinned block pass through small pinned buffers.

A portion is as much of an array as fits into one buffer: whole rows, or a part of a single row where
that is larger than the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Source

Bytes = NDArray[np.uint8]


def portions(source: Source, limit: int) -> Iterator[Source]:
    """*source* in portions of at most *limit* bytes, in the order of its bytes."""
    array, indices = source.array, source.indices
    if source.nbytes <= limit:
        if source.nbytes:
            yield source
        return
    if indices is None and array.flags.c_contiguous:
        array = array.reshape(-1)
    rows = range(len(array)) if indices is None else indices
    step = limit // array[:1].nbytes
    if not step:  # a row is larger than a buffer
        for row in rows:
            yield from portions(Source(array[row]), limit)
        return
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        yield Source(array[part]) if indices is None else Source(array, indices[part])


def fill(buffer: Bytes, portion: Source) -> None:
    """Copy the rows of *portion*, in native byte order, to the beginning of *buffer*."""
    array = portion.array
    target: NDArray[Any] = np.ndarray(portion.shape, array.dtype, buffer=buffer)
    if portion.indices is None:
        target[...] = array
    else:
        # the indices have been checked; "clip" spares a second check and a buffer
        np.take(array, portion.indices, axis=0, out=target, mode="clip")
    if not array.dtype.isnative:
        target.byteswap(inplace=True)


def empty(buffer: Bytes, portion: Source) -> None:
    """Copy the beginning of *buffer* to where the rows of *portion* lie."""
    array = portion.array
    array[...] = np.ndarray(array.shape, array.dtype, buffer=buffer)
