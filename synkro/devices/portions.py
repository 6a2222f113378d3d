"""Arrays in portions: rows that are not one pinned block pass through small pinned buffers.

A portion is as much of an array as fits into one buffer; several threads fill or empty it.  Whole rows
make a portion, or a part of a single row where that is larger than the buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan.split import split
from .base import Source

_THREAD_BYTES = 1 << 20  # each thread copies at least so much


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
    """Copy the rows of *portion*, in native byte order, to the beginning of *buffer*."""
    array, indices = portion.array, portion.indices
    target: NDArray[Any] = np.ndarray(portion.shape, array.dtype, buffer=buffer)

    def copy(span: Any) -> None:
        if indices is None:
            target[span] = array[span]
        else:
            # the indices have been checked; "clip" spares a second check and a buffer
            np.take(array, indices[span], axis=0, out=target[span], mode="clip")
        if not array.dtype.isnative:
            target[span].byteswap(inplace=True)

    _share(copy, portion, threads, workers)


def empty(buffer: NDArray[np.uint8], portion: Source, threads: Executor, workers: int) -> None:
    """Copy the beginning of *buffer* to where the rows of *portion* lie."""
    array = portion.array
    source: NDArray[Any] = np.ndarray(array.shape, array.dtype, buffer=buffer)

    def copy(span: Any) -> None:
        array[span] = source[span]

    _share(copy, portion, threads, workers)


def _share(copy: Callable[[Any], None], portion: Source, threads: Executor, workers: int) -> None:
    """Let several threads *copy* rows of *portion*, if it is worth it."""
    rows = portion.shape[0] if portion.shape else 1
    parts = min(workers, -(-portion.nbytes // _THREAD_BYTES), rows)
    if parts <= 1:
        copy(...)
        return
    over, waiting = threading.Event(), []

    def run(span: slice) -> None:
        if not over.is_set():
            copy(span)

    try:
        for start, stop in split(0, rows, parts):
            waiting.append(threads.submit(run, slice(start, stop)))
        for done in waiting:
            done.result()
    finally:
        wait(waiting)
        over.set()  # submit() may queue a part and then fail to start a thread: it must not run later
