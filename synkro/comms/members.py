"""The ranks that meet: all of a call, or those of one colour, which ``split`` has parted from the rest.

The lines of all ranks of a call are on the board.  Those of fewer are in the arena of their first rank,
until its next call, behind a header that names them: so ranks of other colours can see, too, whether one
that waits there can go on::

    header   how many they are, the number of each
    lines    REACHED, ·, RECORDS: a cache line for each of them

On another host the header may be late: until it is there, they are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..errors import ranks_in_words
from ..ipc.waiting import Words
from ..memory.arena import Arena
from ..values.arrays import Array
from .journal import Journal, shared_words

REACHED = 0  # how far the rank has come, in steps
_RECORDS = 2  # two, each an offset and a size: a rank that is ahead must not overwrite what others read
_LINE = 8  # words of a line, which is a cache line


class OwnRecord:
    """Memory for a record of this rank, and the record that lies there."""

    def __init__(self, arena: Arena, nbytes: int, journal: Journal | None) -> None:
        array = arena.empty((nbytes,), np.uint8)
        self.at: Final = arena.place(array)
        self.memory: Final = array.data
        self.payload: bytes = b""
        self.journal = journal

    def write(self, payload: bytes) -> None:
        """Show *payload* from now on, to whichever ranks this one meets."""
        self.payload = b""  # an interrupt may come before all is done
        self.memory[: len(payload)] = payload
        if self.journal is not None:
            self.journal.show(self.at, len(payload))
        self.payload = payload


@dataclass(eq=False)
class Members:
    """Ranks that meet, as one of them sees them.

    Attributes:
        rank: the number of this rank in the session.
        ranks: their numbers there, in order.
        words, lines: the memory of the lines, and where the line of each begins.
        own: this rank's two records.
        at: where the header lies in the arena; 0 for all ranks of a call.
        place: the index of this rank among them; -1 if it is not one.
        others: the number and the line of each other rank.
        line: this rank's.
        count: how many collectives this rank has entered with them.
    """

    rank: int
    ranks: tuple[int, ...]
    words: Words
    lines: Sequence[int]
    own: list[OwnRecord]
    at: int = 0

    def __post_init__(self) -> None:
        self.place: int = self.ranks.index(self.rank) if self.rank in self.ranks else -1
        self.line: int = self.lines[self.place] if self.lines else -1
        self.others: list[tuple[int, int]] = [
            e for e in zip(self.ranks, self.lines, strict=True) if e[0] != self.rank
        ]
        self.count: int = 0

    def begin(self) -> None:
        """A call begins."""
        self.count = 0

    def enter(self, payload: bytes, arena: Arena) -> None:
        """This rank enters its next collective, and shows *payload*."""
        self.count += 1
        turn = self.count % 2
        record = self.own[turn]
        if payload is not record.payload:
            if len(payload) > len(record.memory):
                record = self.own[turn] = OwnRecord(arena, 2 * len(payload), record.journal)
            record.write(payload)
        word = self.line + _RECORDS + 2 * turn
        self.words[word], self.words[word + 1] = record.at, len(payload)

    def shown_at(self, line: int) -> tuple[int, int]:
        """Where the record of the rank with this *line* lies, and its size."""
        word = line + _RECORDS + 2 * (self.count % 2)
        return self.words[word], self.words[word + 1]

    def reached(self, rank: int) -> int:
        """How far the rank with this number has come."""
        return self.words[self.lines[self.ranks.index(rank)] + REACHED]

    def shown(self) -> bytes:
        """All lines."""
        return b"".join(bytes(self.words[line : line + _LINE]) for line in self.lines)

    def called(self) -> str:
        """The members, in words."""
        return f"the world of {ranks_in_words(self.ranks)}" if self.at else "this call"


def board_words(size: int) -> int:
    """The words of the header and the lines of *size* ranks."""
    return _header(size) + _LINE * size


def new_board(arena: Arena, size: int) -> Array:
    """Memory for the header and the lines of up to *size* ranks; nobody has come anywhere yet.

    It is used once, as on another host the last words of ranks may come when all have long parted.
    """
    return arena.empty((board_words(size),), np.uint64, once=True)


def name(words: Words, ranks: Sequence[int]) -> None:
    """Write the header; the ranks before their number, which makes them count."""
    for place, rank in enumerate(ranks, 1):
        words[place] = rank
    words[0] = len(ranks)


def found(
    arena: Arena, at: int, rank: int, own: list[OwnRecord], journal: Journal | None = None
) -> Members:
    """The members whose header is *at*; none if it is not there yet."""
    size = int(arena.view(at, (1,), np.uint64)[0])
    start = _header(size)
    memory = arena.view(at, (board_words(size),), np.uint64).data.cast("B").cast("Q")
    ranks = tuple(memory[1 : 1 + size])
    words = shared_words(memory, at, journal)
    return Members(rank, ranks, words, range(start, board_words(size), _LINE), own, at)


def _header(size: int) -> int:
    return -(-(1 + size) // _LINE) * _LINE
