"""Rows of arrays in files, piece by piece, in a thread of their own that is one piece ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..memory.interrupts import atomic
from ..plan.batch import Selection
from ..plan.call import FileArray
from ..values.arrays import Array
from .files import opened
from .opened import Opened

Piece = Sequence[tuple[FileArray, Selection | None]]
"""Arrays, with the rows to be read; None where it is only to be known that the array is unchanged."""


class FileReader:
    """Reads *pieces*, one ahead.

    The thread opens the files and closes them, so that an interrupt, which comes to the main thread,
    never meets their libraries.  It ends with the reader.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._files: dict[FileArray, Opened] = {}
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1, "synkro-files")
        self._next: Future[list[Array]] | None = None

    def __enter__(self) -> FileReader:
        self._next = self._thread.submit(self._read, 0)
        return self

    def take(self, number: int) -> list[Array]:
        """The arrays of a piece, once they are there; then the next one begins to be read.

        The piece before has to be let go of: two at most are in memory then.

        Raises: OSError.
        """
        assert self._next is not None
        arrays = self._next.result()
        self._next = None
        if number + 1 < len(self._pieces):
            self._next = self._thread.submit(self._read, number + 1)
        return arrays

    def _read(self, number: int) -> list[Array]:
        arrays = []
        for stored, selection in self._pieces[number]:
            if stored not in self._files:
                self._files[stored] = opened(stored)
            file = self._files[stored]
            if selection is None:
                file.check()
            else:
                array = file.take(selection, self._over.is_set)
                array.flags.writeable = False
                arrays.append(array)
        return arrays

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def __exit__(self, *error: object) -> None:
        with atomic:
            self._over.set()
            self._next = None
            closed = self._thread.submit(self._close)
            self._thread.shutdown()
            closed.result()


def read(stored: FileArray, selection: Selection | None = None) -> Array:
    """Rows of an array, or all of it.  Raises: OSError."""
    everything = range(stored.shape[0] if stored.shape else 1)
    with FileReader([[(stored, everything if selection is None else selection)]]) as reader:
        return reader.take(0)[0]


def check(stored: FileArray) -> None:
    """Raises: OSError if the array has changed, or is gone."""
    with FileReader([[(stored, None)]]) as reader:
        reader.take(0)
