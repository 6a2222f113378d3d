"""Inputs in portions: rows that are not one pinned block pass through small pinned buffers.

A portion is as much of an input as fits into one buffer; several threads fill it.  Whole rows make a
portion, or a part of a single row where that is larger than the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan.split import split
from .base import Source

_THREAD_BYTES = 1 << 20  # that a thread should have to copy, at least


class Portion(NamedTuple):
    """Rows of an array: a view of them, or with *indices* what they are taken from."""

    array: NDArray[Any]
    indices: NDArray[np.int64] | None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.indices is None:
            return self.array.shape
        return (len(self.indices), *self.array.shape[1:])

    @property
    def nbytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.array.itemsize

    def fill(self, buffer: NDArray[np.uint8], threads: Executor, workers: int) -> None:
        """Copy the rows to the beginning of *buffer*."""
        target: NDArray[Any] = np.ndarray(self.shape, self.array.dtype, buffer=buffer)
        parts = min(workers, -(-self.nbytes // _THREAD_BYTES), len(target) if target.ndim else 1)
        if parts <= 1:
            self._copy(target, slice(None))
            return
        spans = [slice(*span) for span in split(0, len(target), parts)]
        for done in [threads.submit(self._copy, target[span], span) for span in spans]:
            done.result()

    def _copy(self, target: NDArray[Any], span: slice) -> None:
        if self.indices is None:
            target[...] = self.array[span] if self.array.ndim else self.array
        else:
            # the indices have been checked; "clip" spares a second check and a buffer
            np.take(self.array, self.indices[span], axis=0, out=target, mode="clip")


def portions(source: Source, limit: int) -> Iterator[Portion]:
    """*source* in portions of at most *limit* bytes, in the order of its bytes."""
    yield from _portions(source.array, source.indices, limit)


def _portions(array: NDArray[Any], indices: NDArray[np.int64] | None, limit: int) -> Iterator[Portion]:
    whole = Portion(array, indices)
    if not whole.nbytes:
        return
    if whole.nbytes <= limit:
        yield whole
        return
    if indices is None and array.flags.c_contiguous:
        array = array.reshape(-1)
    row = array[:1].nbytes
    step = limit // row
    if not step:  # a row is larger than a buffer
        for index in range(len(array)) if indices is None else indices:
            yield from _portions(array[index], None, limit)
        return
    for start in range(0, whole.shape[0] if indices is not None else len(array), step):
        part = slice(start, start + step)
        yield Portion(array[part], None) if indices is None else Portion(array, indices[part])
