"""Parcels: pieces of segments, and pickled values, on their way from one host to another.

What is small travels in the head of the message, one message less; the rest in loads behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ipc.queue import Pickles
from ..plan.extents import Extent, PickedRows
from .loads import Load

Bytes = NDArray[np.uint8]
Piece = Extent | PickedRows

_INLINE = 1 << 14
"""Bytes up to which the pieces of a message, or the stream of a value, travel in the head."""

Parcel = tuple[tuple[tuple[Any, ...], ...], bytes | None]
"""What the head of a message says of the pieces behind it: these, and their bytes, one piece behind the
other, if they are few.  All are plain tuples, which are pickled in a tenth of the time."""

Memory = Callable[[int], Bytes]
"""``memory(number)`` shows a segment."""

Fill = Callable[..., None]
"""``fill(places, sealed=True)`` receives the next load of a message, which is sealed, or is not."""


# ── pieces of segments ───────────────────────────────────────────────────────────────────────────────


def pack(pieces: Sequence[Piece], memory: Memory) -> tuple[Parcel | None, list[Load]]:
    """The parcel of *pieces*, and the loads of its message."""
    if not pieces:
        return None, []
    pieces = sorted(pieces, key=attrgetter("bare"))
    bodies = [_read(piece, memory(piece.segment)) for piece in pieces]
    plain = tuple(map(tuple, pieces))
    if sum(map(len, bodies)) <= _INLINE:
        return (plain, b"".join(bodies)), []
    sealed = _count_sealed(pieces)
    return (plain, None), [Load(bodies[:sealed]), Load(bodies[sealed:], sealed=False)]


def unpack(parcel: Parcel | None, memory: Memory, fill: Fill) -> None:
    """Put the pieces of a parcel into *memory*."""
    if parcel is None:
        return
    plain, inline = parcel
    pieces = list(map(_piece, plain))
    places = [_place(piece, memory) for piece in pieces]
    if inline is None:
        _receive(pieces, places, fill)
    else:
        start = 0
        for place in places:
            place[:] = np.frombuffer(inline, np.uint8, len(place), start)
            start += len(place)
    for piece, place in zip(pieces, places, strict=True):
        if isinstance(piece, PickedRows):
            there = _by_rows(piece, memory(piece.segment))
            there[piece.rows] = place.reshape(len(piece.rows), -1)


def large(parcel: Parcel | None) -> list[Piece]:
    """The pieces that come in loads."""
    if parcel is None or parcel[1] is not None:
        return []
    return list(map(_piece, parcel[0]))


def discard(parcel: Parcel | None, fill: Fill) -> None:
    """Receive the loads of a parcel for which there is no memory."""
    pieces = large(parcel)
    _receive(pieces, [np.empty(size_of(piece), np.uint8) for piece in pieces], fill)


def size_of(piece: Piece) -> int:
    """The bytes of a piece."""
    return piece.stop - piece.start if isinstance(piece, Extent) else len(piece.rows) * piece.nbytes


def _receive(pieces: Sequence[Piece], places: Sequence[Bytes], fill: Fill) -> None:
    sealed = _count_sealed(pieces)
    fill(places[:sealed], True)
    fill(places[sealed:], False)


def _count_sealed(pieces: Sequence[Piece]) -> int:
    """How many of *pieces* have a digest: these come first."""
    return len(pieces) - sum(piece.bare for piece in pieces)


def _piece(plain: tuple[Any, ...]) -> Piece:
    return Extent(*plain) if len(plain) == len(Extent._fields) else PickedRows(*plain)


def _read(piece: Piece, memory: Bytes) -> memoryview[Any]:
    if isinstance(piece, Extent):
        return memory[piece.start : piece.stop].data
    return np.ascontiguousarray(_by_rows(piece, memory)[piece.rows]).reshape(-1).data


def _place(piece: Piece, memory: Memory) -> Bytes:
    """Where the bytes of a piece arrive, which for rows is not yet where they belong."""
    if isinstance(piece, Extent):
        return memory(piece.segment)[piece.start : piece.stop]
    return np.empty(size_of(piece), np.uint8)


def _by_rows(piece: PickedRows, memory: Bytes) -> Bytes:
    """*memory*, as an array of rows of bytes, up to the last one that is picked."""
    count = int(piece.rows.max()) + 1
    rows: Bytes = np.ndarray(
        (count, piece.nbytes), np.uint8, memory, offset=piece.start, strides=(piece.stride, 1)
    )
    return rows


# ── pickled values: the items and the results of maps ────────────────────────────────────────────────


class ValueParcel(NamedTuple):
    """Items of a batch that follow each other, or their results.

    Attributes:
        slot: the batch's in the main process's queue.
        first, length: the number of the first item, and how many they are.
        place: that of the first item among what is pickled together.
        kind, by_us: how they are pickled, as in ``ipc.queue``.
        parts: the pickles, if they are small.
        lengths: those of the bodies that come in their place.
    """

    slot: int
    first: int
    length: int
    place: int
    kind: int
    by_us: bool
    parts: tuple[bytes, ...]
    lengths: tuple[int, ...]


def pack_values(
    bodies: list[Any], slot: int, first: int, length: int, pickles: Pickles, place: int = 0
) -> ValueParcel:
    """The parcel of some values; *bodies* get what comes behind the head of the message."""
    kind, parts, by_us = pickles
    if pickles.nbytes <= _INLINE:
        return ValueParcel(slot, first, length, place, kind, by_us, tuple(map(bytes, parts)), ())
    bodies += parts
    return ValueParcel(slot, first, length, place, kind, by_us, (), tuple(map(len, parts)))


def unpack_values(parcels: Iterable[ValueParcel], fill: Fill) -> list[tuple[ValueParcel, Pickles]]:
    """The values of *parcels*; *fill* receives the bodies that came with their message."""
    found, bodies = [], []
    for parcel in parcels:
        memory: list[Any] = [np.empty(length, np.uint8).data for length in parcel.lengths]
        bodies += memory
        found.append((parcel, Pickles(parcel.kind, memory or parcel.parts, parcel.by_us)))
    if bodies:
        fill(bodies)
    return found
