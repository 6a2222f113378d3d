"""What follows the heads of messages: bodies, which go from memory to memory.

A *load* are bodies that are received together.  They are cut into pieces, which go one after the other;
then comes their digest, if the load is *sealed* (``seals``).  Both sides digest while others travel::

    sender      digest 1 │ digest 2 │ digest 3 │ …                   │ digest of all
    on the way           │ piece 1  │ piece 2  │ piece 3  │ …        │ digest of all
    receiver                        │ digest 1 │ digest 2 │ digest 3 │ compare

The sender digests, and sends, copies: the memory may change meanwhile, by ranks that nobody waits for
any more or by the program, and that must not look like somebody's forgery.  A copy stays in a cache, and
takes a tenth of the time of its digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ipc.waiting import Condition
from .seals import Buffer, Digest

PIECE = 1 << 21  # bytes of a piece: these stay in a cache, and each tells that its sender is there
_SMALL = 1 << 16  # bytes up to which a copy is made anew
_AHEAD = 4 * PIECE  # bytes of sealed pieces on their way to one process at a time
_SLICE = 1 << 18  # bytes that are digested between two looks at what travels

Look = Callable[[], object]  # what is done again and again while loads travel

STREAMED = 2
"""Pieces of a stream that are awaited at the same time."""


class Load(NamedTuple):
    """Some bodies of a message."""

    bodies: Sequence[Buffer]
    sealed: bool = True


def in_pieces(load: Load) -> list[memoryview]:
    """The pieces of a load; none of empty bodies."""
    views = [memoryview(body).cast("B") for body in load.bodies if len(body)]
    return [view[at : at + PIECE] for view in views for at in range(0, len(view), PIECE)]


def are_apart(pieces: Sequence[Buffer]) -> bool:
    """Whether no two *pieces* share memory: else one has to be digested before the next comes."""
    spans = sorted((np.frombuffer(piece, np.uint8).ctypes.data, len(piece)) for piece in pieces)
    return all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))


def add(digest: Digest, piece: Buffer, look: Look) -> None:
    """Digest a piece, too; *look* has what travels go on."""
    for at in range(0, len(piece), _SLICE):
        digest.update(piece[at : at + _SLICE])
        look()


class _Going(NamedTuple):
    """A piece on its way, in *memory*; if that is a *copy*, others need it next."""

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
        """``begin(piece, is_digest)`` sends a piece, *look* has what travels go on.

        *spare* is memory for copies, which the loads for other processes use, too.
        """
        self._begin = begin
        self._look = look
        self._spare = spare
        self._waiting: deque[Iterator[_Going]] = deque()  # messages, from which the next pieces come
        self._going: list[tuple[Iterator[_Going], _Going]] = []  # pieces, each with its message

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
        for message, piece in self._going:
            if not piece.request.Test():
                going.append((message, piece))
            elif piece.copy is not None:
                self._spare.append(piece.copy)
        self._going = going
        under_way, most = sum(piece.nbytes for _, piece in going), PIECE
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
            for piece in in_pieces(load):
                if digest is None:
                    yield _Going(self._begin(piece, False), piece)
                elif len(piece) <= _SMALL:
                    memory = bytes(piece)
                    digest.update(memory)
                    yield _Going(self._begin(memory, False), memory)
                else:
                    copy = self._spare.pop() if self._spare else np.empty(PIECE, np.uint8)
                    there = copy[: len(piece)].data
                    there[:] = piece
                    add(digest, there, self._look)
                    yield _Going(self._begin(there, False), there, copy)
            if digest is not None:
                said = digest.digest()
                yield _Going(self._begin(said, True), said)
