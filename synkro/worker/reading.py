"""Inputs in files: a rank reads its rows, piece by piece, and keeps what all ranks read whole.

::

    the file ─▶ FileReader's thread ─▶ piece k+1, in memory of its own
                                   piece k ─▶ device ─▶ the function
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from ..devices.base import Device, Source
from ..plan.call import FileArray
from ..values.arrays import Array

if TYPE_CHECKING:
    from ..storage.reading import Piece


def fed_from_files(
    device: Device, pieces: Sequence[list[Source | None]], wanted: Sequence[Piece], columns: list[int]
) -> Generator[list[Any], None, None]:
    """Yield what ``device.feed`` does of *pieces*, with what is *wanted* of files in their *columns*.

    The list that was yielded is emptied when the next one is asked for.
    """
    from ..storage.reading import FileReader  # noqa: PLC0415  few programs need it, and its threads

    with FileReader(wanted) as reader:
        for number, piece in enumerate(pieces):
            sources: list[Any] = list(piece)
            for column, array in zip(columns, reader.take(number), strict=True):
                sources[column] = Source(array)
            with contextlib.closing(device.feed([sources])) as feeding:
                fed = next(feeding)
                del array
                sources.clear()  # what is fed is all that is left of the piece
                yield fed
                fed.clear()


class WholeFiles:
    """Arrays of files that every rank reads whole: once, as long as they do not change."""

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    def whole(self, stored: FileArray) -> Source:
        """All of an array.  Raises: OSError."""
        from ..storage.reading import check, read  # noqa: PLC0415

        if stored.number in self._arrays:
            check(stored)
        else:
            self._arrays[stored.number] = read(stored)
        return Source(self._arrays[stored.number], version=(stored.number, 0))

    def drop(self, number: int) -> bool:
        """Forget an array; returns whether one had that number."""
        return self._arrays.pop(number, None) is not None
