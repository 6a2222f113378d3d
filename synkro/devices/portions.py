"""Inputs in portions: rows that are not one pinned block pass through small pinned buffers.

A portion is as much of an input as fits into one buffer; several threads fill it.  Whole rows make a
portion, or a part of a single row where that is larger than the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan.split import split
from .base import Source

_THREAD_BYTES = 1 << 20  # that a thread should have to copy, at least


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


def fill(buffer: NDArray[np.uint8], portion: Source, threads: Executor, workers: int) -> None:
    """Copy the rows of *portion* to the beginning of *buffer*."""
    target: NDArray[Any] = np.ndarray(portion.shape, portion.array.dtype, buffer=buffer)
    parts = min(workers, -(-portion.nbytes // _THREAD_BYTES), len(target) if target.ndim else 1)
    if parts <= 1:
        _copy(target, portion, slice(None))
        return
    spans = [slice(*span) for span in split(0, len(target), parts)]
    for done in [threads.submit(_copy, target[span], portion, span) for span in spans]:
        done.result()


def _copy(target: NDArray[Any], portion: Source, span: slice) -> None:
    array, indices = portion.array, portion.indices
    if indices is None:
        target[...] = array[span] if array.ndim else array
    else:
        # the indices have been checked; "clip" spares a second check and a buffer
        np.take(array, indices[span], axis=0, out=target, mode="clip")
