"""Parcels: bytes on their way from one host to another, from memory to memory.

A message has a head.  What is small travels in it, one message less: pieces of segments and pickled
values alike.  The rest are *loads* behind it: bodies that are received together.  They are cut into
chunks, which go one after the other; then comes their digest, if the load is *sealed* (``seals``).  Both
sides digest while others travel::

    sender      digest 1 │ digest 2 │ digest 3 │ …                   │ digest of all
    on the way           │ chunk 1  │ chunk 2  │ chunk 3  │ …        │ digest of all
    receiver                        │ digest 1 │ digest 2 │ digest 3 │ compare

The sender digests, and sends, copies: the memory may change meanwhile, by ranks that nobody waits for
any more or by the program, and that must not look like somebody's forgery.  A copy stays in a cache, and
takes a tenth of the time of its digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ipc.queue import Pickles
from ..ipc.waiting import Condition
from ..plan.extents import Extent, PickedRows
from .seals import Buffer, Digest

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

CHUNK = 1 << 21  # bytes of a chunk: these stay in a cache, and each tells that its sender is there
_SMALL = 1 << 16  # bytes up to which a copy is made anew
_AHEAD = 4 * CHUNK  # bytes of sealed chunks on their way to one process at a time
_SLICE = 1 << 18  # bytes that are digested between two looks at what travels

Look = Callable[[], object]  # what is done again and again while loads travel

STREAMED = 2
"""Chunks of a stream that are awaited at the same time."""


# ── loads ────────────────────────────────────────────────────────────────────────────────────────────


class Load(NamedTuple):
    """Some bodies of a message."""

    bodies: Sequence[Buffer]
    sealed: bool = True


def in_chunks(load: Load) -> list[memoryview]:
    """The chunks of a load; none of empty bodies."""
    views = [memoryview(body).cast("B") for body in load.bodies if len(body)]
    return [view[at : at + CHUNK] for view in views for at in range(0, len(view), CHUNK)]


def are_apart(chunks: Sequence[Buffer]) -> bool:
    """Whether no two *chunks* share memory: else one has to be digested before the next comes."""
    spans = sorted((np.frombuffer(chunk, np.uint8).ctypes.data, len(chunk)) for chunk in chunks)
    return all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))


def add(digest: Digest, chunk: Buffer, look: Look) -> None:
    """Digest a chunk, too; *look* has what travels go on."""
    for at in range(0, len(chunk), _SLICE):
        digest.update(chunk[at : at + _SLICE])
        look()


class _Going(NamedTuple):
    """A chunk on its way, in *memory*; if that is a *copy*, others need it next."""

    request: Any
    memory: Buffer
    copy: NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of *memory* if that is a copy; else 0."""
        return 0 if self.copy is None else len(self.memory)


class Conveyor:
    """The loads for one process, which go in their order, and as fast as they are taken there."""

    def __init__(
        self, begin: Callable[[Buffer, bool], Any], look: Look, spare: list[NDArray[np.uint8]]
    ) -> None:
        """``begin(chunk, is_digest)`` sends a chunk, *look* has what travels go on.

        *spare* is memory for copies, which the loads for other processes use, too.
        """
        self._begin = begin
        self._look = look
        self._spare = spare
        self._waiting: deque[Iterator[_Going]] = deque()  # messages, from which the next chunks come
        self._going: list[tuple[Iterator[_Going], _Going]] = []  # chunks, each with its message

    def add(self, loads: Sequence[tuple[Load, Digest | None]]) -> Condition:
        """Send the loads of a message, each with what digests it, or None.

        Returns what says whether a part of them is on its way.
        """
        message = self._begun(loads)
        self._waiting.append(message)
        self.push()
        return lambda: message in self._waiting or any(each is message for each, _ in self._going)

    def push(self) -> bool:
        """Begin what takes a moment; returns whether all is sent."""
        going = []
        for message, chunk in self._going:
            if not chunk.request.Test():
                going.append((message, chunk))
            elif chunk.copy is not None:
                self._spare.append(chunk.copy)
        self._going = going
        under_way, most = sum(chunk.nbytes for _, chunk in going), CHUNK
        while self._waiting and under_way < _AHEAD and most > 0:
            message = self._waiting[0]
            begun = next(message, None)
            if begun is None:
                self._waiting.popleft()
                continue
            going.append((message, begun))
            under_way += begun.nbytes
            most -= begun.nbytes
        return not (going or self._waiting)

    def _begun(self, loads: Sequence[tuple[Load, Digest | None]]) -> Iterator[_Going]:
        for load, digest in loads:
            for chunk in in_chunks(load):
                if digest is None:
                    yield _Going(self._begin(chunk, False), chunk)
                elif len(chunk) <= _SMALL:
                    memory = bytes(chunk)
                    digest.update(memory)
                    yield _Going(self._begin(memory, False), memory)
                else:
                    copy = self._spare.pop() if self._spare else np.empty(CHUNK, np.uint8)
                    there = copy[: len(chunk)].data
                    there[:] = chunk
                    add(digest, there, self._look)
                    yield _Going(self._begin(there, False), there, copy)
            if digest is not None:
                said = digest.digest()
                yield _Going(self._begin(said, True), said)


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
            _by_rows(piece, memory(piece.segment))[piece.rows] = place.reshape(len(piece.rows), -1)


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
