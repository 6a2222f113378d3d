"""Pieces of segments on their way from one host to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan.call import Region
from .traffic import Extent, PickedRows

Bytes = NDArray[np.uint8]
Piece = Extent | PickedRows

_INLINE = 1 << 14
"""Bytes up to which all pieces travel in the head of the message: one message less."""


Cargo = tuple[tuple[tuple[Any, ...], ...], bytes | None]
"""What the head of a message says of the pieces behind it: these, and their bytes, one piece behind the
other, if they are few.  All are plain tuples, which are pickled in a tenth of the time."""


def packed(
    pieces: Sequence[Piece], memory: Callable[[int], Bytes]
) -> tuple[Cargo | None, list[memoryview[Any]]]:
    """The cargo, and the bodies of its message; *memory* shows a segment."""
    if not pieces:
        return None, []
    bodies = [_read(piece, memory(piece.segment)) for piece in pieces]
    plain = tuple(map(tuple, pieces))
    if sum(map(len, bodies)) > _INLINE:
        return (plain, None), bodies
    return (plain, b"".join(bodies)), []


def unpacked(
    cargo: Cargo | None, memory: Callable[[int], Bytes], fill: Callable[[Sequence[Bytes]], None]
) -> None:
    """Put a cargo into *memory*; *fill* receives the bodies that came with its message."""
    if cargo is None:
        return
    plain, inline = cargo
    places = list(_places(map(_piece, plain), memory))
    if inline is None:
        fill([place for place, _ in places])
    else:
        start = 0
        for place, _ in places:
            place[:] = np.frombuffer(inline, np.uint8, len(place), start)
            start += len(place)
    for place, rows in places:
        if rows is not None:
            rows[0][rows[1]] = place.reshape(len(rows[1]), -1)


def large(cargo: Cargo | None) -> list[Piece]:
    """The pieces that come as bodies."""
    if cargo is None or cargo[1] is not None:
        return []
    return [_piece(plain) for plain in cargo[0]]


def discarded(cargo: Cargo | None, fill: Callable[[Sequence[Bytes]], None]) -> None:
    """Receive the bodies of a cargo for which there is no memory."""
    for piece in large(cargo):
        fill([np.empty(size_of(piece), np.uint8)])


def size_of(piece: Piece) -> int:
    """Its bytes."""
    return piece.stop - piece.start if isinstance(piece, Extent) else len(piece.rows) * piece.nbytes


def whole(region: Region) -> Extent:
    """The bytes of an array without strides."""
    size = int(np.prod(region.shape, dtype=np.int64)) * np.dtype(region.dtype).itemsize
    return Extent(region.segment, region.offset, region.offset + size)


def _piece(plain: tuple[Any, ...]) -> Piece:
    return Extent(*plain) if len(plain) == len(Extent._fields) else PickedRows(*plain)


def _read(piece: Piece, memory: Bytes) -> memoryview[Any]:
    if isinstance(piece, Extent):
        return memory[piece.start : piece.stop].data
    return np.ascontiguousarray(_by_rows(piece, memory)[piece.rows]).reshape(-1).data


def _places(
    pieces: Iterable[Piece], memory: Callable[[int], Bytes]
) -> Iterator[tuple[Bytes, tuple[Bytes, NDArray[np.int64]] | None]]:
    """Where the bytes of each piece arrive; of rows also where they go from there."""
    for piece in pieces:
        if isinstance(piece, Extent):
            yield memory(piece.segment)[piece.start : piece.stop], None
        else:
            there = _by_rows(piece, memory(piece.segment))
            yield np.empty(len(piece.rows) * piece.nbytes, np.uint8), (there, piece.rows)


def _by_rows(piece: PickedRows, memory: Bytes) -> Bytes:
    """*memory*, as an array of rows of bytes, up to the last one that is picked."""
    count = int(piece.rows.max()) + 1
    rows: Bytes = np.ndarray(
        (count, piece.nbytes), np.uint8, memory, offset=piece.start, strides=(piece.stride, 1)
    )
    return rows
