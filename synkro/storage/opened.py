"""An array in a file that is open for reading, whatever its format, and rows of it, by chunks."""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import reason
from ..memory.segment import undoing
from ..plan.batch import Selection, indices_of
from ..plan.call import FileArray
from ..values.arrays import Array

Stamp = tuple[int, ...]

_TOGETHER = 1 << 22
"""Bytes of chunks that are read together, if one chunk does not have more."""

_BLOCKS, _ROWS = 16, 512
"""How many blocks at most, and about how many rows, are read together where few of their rows are."""


def called(kind: str, path: str, name: str) -> str:
    """What errors call the array *name* of the file at *path*."""
    return f"the {kind} {name!r} of {path}" if name else f"the {kind} {path}"


def stamp_of(path: str) -> Stamp:
    """What changes when somebody writes to the file, or puts another one in its place.

    Raises: OSError if it is gone.
    """
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


class Opened(ABC):
    """An array in a file, open for reading.

    Whatever the library raises arrives as an OSError that names the file.  So does a change of the file:
    it is looked for after the rows were read, and so they are what it held when it was described.

    Attributes:
        gap: so many rows that nobody wants are read with each that somebody does, which takes less than
            to leave them out.
    """

    SKIPPED = 0
    """Bytes that are rather read with a row than left out, in files of the format."""

    def __init__(self, stored: FileArray) -> None:
        """Raises: OSError if there is no such file here, it has changed, or cannot be opened."""
        self.stored = stored
        self.called: Final = called(stored.kind, stored.path, stored.name)
        self._dtype = np.dtype(stored.dtype)
        self._row_bytes = self._dtype.itemsize * math.prod(stored.shape[1:])
        self.gap: Final = self.SKIPPED // max(1, self._row_bytes)
        self.check([])
        with undoing(self.close):
            self._try(self._open, [])

    def read(self, target: Array, start: int, stop: int) -> None:
        """Fill *target*, which is contiguous, with the rows from *start* to *stop*; without dimensions,
        with the one element.

        Raises: OSError.
        """
        if target.size:
            self._try(lambda: self._read(target, start, stop), self._chunks_of(start, stop))

    def take(self, selection: Selection, stopped: Callable[[], bool]) -> Array:
        """The rows of a *selection*, in its order, as an array of its own.

        Each chunk is read once, in the order in which they lie there.

        Raises: OSError; CancelledError between two chunks once *stopped* says so.
        """
        chunk, count = self.stored.chunk, len(selection)
        if not self.stored.shape:
            scalar = np.empty((), self._dtype)
            self.read(scalar, 0, 1)
            return scalar
        many = max(1, _TOGETHER // max(1, chunk * self._row_bytes)) * chunk
        if isinstance(selection, range):
            if abs(selection.step) == 1 and count:
                start, last = sorted((selection[0], selection[-1]))
                return self.span(start, last + 1, many, stopped)[:: selection.step]
            selection = indices_of(selection)
        target = self._empty(count)
        if not count:
            return target
        order = np.argsort(selection, kind="stable")
        wanted = selection[order]
        rows = np.unique(wanted)
        for block in _together(rows, many, self.gap):
            go_on(stopped)
            some = rows[block]
            here = slice(*np.searchsorted(wanted, [some[0], some[-1] + 1]))
            target[order[here]] = self.rows(some)[np.searchsorted(some, wanted[here])]
        return target

    def _empty(self, rows: int) -> Array:
        return np.empty((rows, *self.stored.shape[1:]), self._dtype)

    def span(self, start: int, stop: int, many: int, stopped: Callable[[], bool]) -> Array:
        """The rows from *start* to *stop*, which are read by blocks of *many*.

        Raises: OSError; CancelledError between two blocks once *stopped* says so.
        """
        target = self._empty(stop - start)
        edges = [start, *range((start // many + 1) * many, stop, many), stop]
        for at, end in itertools.pairwise(edges):
            go_on(stopped)
            self.read(target[at - start : end - start], at, end)
        return target

    def rows(self, rows: NDArray[np.int64]) -> Array:
        """Some *rows*, which are ascending.  Raises: OSError."""
        start, stop = int(rows[0]), int(rows[-1]) + 1
        if is_dense(rows, self.gap):
            between = self._empty(stop - start)
            self.read(between, start, stop)
            return between if len(between) == len(rows) else between[rows - start]
        target = self._empty(len(rows))
        if target.size:
            chunks = np.unique(rows // self.stored.chunk).tolist()
            self._try(lambda: self._read_rows(target, rows), chunks)
        return target

    def _chunks_of(self, start: int, stop: int) -> range:
        """The numbers of the chunks, along the rows, in which the rows from *start* to *stop* are."""
        return range(start // self.stored.chunk, -(-stop // self.stored.chunk))

    def check(self, chunks: Sequence[int] | None = None) -> None:
        """*chunks* are numbers of some, along the rows; None for all.

        Raises: OSError if the file, or what it has of these chunks, has changed or is gone.
        """
        if chunks is None:
            chunks = self._chunks_of(0, self.stored.shape[0] if self.stored.shape else 1)
        try:
            same = self._is_unchanged(chunks)
        except OSError as error:
            if isinstance(error, PermissionError):
                raise OSError(f"{self.called} {self._why(error)}: {error}") from None
            raise OSError(
                f"{self.called} is not there any more, or is not on this host ({error.strerror}): every "
                f"process that reads it opens it at this path. Put it there, or give the array in the "
                f"file where it is, or a copy, x[:]."
            ) from None
        if not same:
            raise OSError(
                f"{self.called} has changed since it was opened, or is another file on this host: open "
                f"it again, and give it anew, when nobody writes to it any more."
            )

    def _try(self, step: Callable[[], None], chunks: Sequence[int]) -> None:
        """Do a *step*, in which *chunks* are read; they have not changed until its end.

        Raises: OSError.
        """
        try:
            step()
        except MemoryError:
            raise
        except Exception as error:
            self.check(chunks)  # which explains it better
            why = self._why(error)
            raise OSError(f"{self.called} {why}: {reason(error)}") from error
        self.check(chunks)

    def _why(self, error: Exception) -> str:
        """What *error* means, as the end of a sentence about this array."""
        if isinstance(error, PermissionError):
            return "may not be read by this user, who runs the workers"
        return "cannot be read, so it is damaged, cut off, or open for writing elsewhere"

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abstractmethod
    def _open(self) -> None:
        """Open the file; the library may raise anything."""

    @abstractmethod
    def _read(self, target: Array, start: int, stop: int) -> None:
        """Fill *target* with the rows from *start* to *stop*; the library may raise anything."""

    @abstractmethod
    def _read_rows(self, target: Array, rows: NDArray[np.int64]) -> None:
        """Fill *target* with *rows*, ascending, few of many; the library may raise anything."""

    @abstractmethod
    def _is_unchanged(self, chunks: Sequence[int]) -> bool:
        """Whether the file, with these chunks, is as described.  Raises: OSError if it is gone."""


def go_on(stopped: Callable[[], bool]) -> None:
    """Raises: CancelledError once *stopped* says so."""
    if stopped():
        from concurrent.futures import CancelledError  # noqa: PLC0415  each worker would load it

        raise CancelledError


def is_dense(rows: NDArray[np.int64], gap: int) -> bool:
    """Whether *rows*, ascending, are read with all that lies between: no more than *gap* for each."""
    return bool(rows[-1] - rows[0] < len(rows) * (gap + 1))


def part(shape: tuple[int, ...], start: int, stop: int) -> Any:
    """The index of the rows from *start* to *stop* in an array of this *shape*."""
    return slice(start, stop) if shape else ()


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
