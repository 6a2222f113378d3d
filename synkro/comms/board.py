"""The board: what each rank of a call shows the others, and what can be read from it.

It lies at the beginning of the arena's file; each rank writes only its own line, and its side of boxes::

    a line    EPOCH, LEFT, SLEEPS, DOES, FOR, AMONG, and its line as a member (``members``)
    a box     of each pair of ranks: SENT, FIRST, RECEIVED, and slots for messages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ipc.waiting import Fence, Words
from ..memory.arena import Arena
from .members import Members, found

KINDS = (
    "nothing",
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
    "split",
)
RECV, SEND = KINDS.index("recv"), KINDS.index("send")

LINE = 16  # words of a rank's line: two cache lines
STEPS = 1 << 16  # of REACHED, a collective, at most
RETURNED, FAILED = 1, 2  # LEFT of a rank that has ended its function
SLOTS = 8  # messages from one rank to another that may wait to be received


class Line:
    """The words of a rank's line; from MEMBER on, its line as a member of all ranks of a call."""

    EPOCH, LEFT, SLEEPS, DOES, FOR, AMONG, MEMBER = range(7)


class Box:
    """The words of a pair's box, up to its first slot; a cache line a writer."""

    SENT, FIRST, RECEIVED, FIRST_SLOT = 0, 1, 8, 16


class BoxSlot:
    """The words of a slot, and their number."""

    AT, OF_EPOCH, NUMBER, WORDS = range(4)


UNAWAITED = (Line.SLEEPS, Line.DOES, Line.FOR, Line.AMONG)
"""Words of a line which nobody sleeps for."""

_BOX = Box.FIRST_SLOT + BoxSlot.WORDS * SLOTS
_WORD = 8


def board_bytes(size: int) -> int:
    """The size of the board for *size* ranks."""
    return (size * LINE + size * size * _BOX) * _WORD


@dataclass(eq=False)
class Board:
    """What the ranks of the running call show.

    Attributes:
        words: the memory of the board.
        size: how many ranks there are in the session.
        answered: *answered(rank, epoch)* tells whether a rank has replied to the command of that call.
        epoch: the number of the call.
        all: the ranks that take part in it.
    """

    words: Words
    size: int
    arena: Arena
    fence: Fence
    answered: Callable[[int, int], bool] | None

    def begin(self, epoch: int, ranks: Members) -> None:
        """A call begins."""
        self.epoch: int = epoch
        self.all: Members = ranks

    def here(self, rank: int) -> bool:
        """Whether *rank* has come to the board in this call."""
        return self.words[rank * LINE + Line.EPOCH] == self.epoch

    def left(self, rank: int) -> bool:
        """Whether the function of *rank* has ended."""
        return self.words[rank * LINE + Line.LEFT] != 0 if self.here(rank) else self.never_came(rank)

    def failed(self, rank: int) -> bool:
        """Whether the function of *rank* has failed."""
        return self.here(rank) and self.words[rank * LINE + Line.LEFT] == FAILED

    def never_came(self, rank: int) -> bool:
        """Whether *rank* has ended this call without having come to the board."""
        if self.answered is None or not self.answered(rank, self.epoch):
            return False
        self.fence()  # the answer is loaded before EPOCH, which was stored before it
        return not self.here(rank)

    # ── boxes ────────────────────────────────────────────────────────────────────────────────────

    def box(self, source: int, to: int) -> int:
        """Where the box for messages from one rank to another begins."""
        return self.size * LINE + (source * self.size + to) * _BOX

    def full(self, box: int) -> bool:
        """Whether the sender has to wait until a message is received."""
        words = self.words
        return words[box + Box.SENT] - max(words[box + Box.RECEIVED], words[box + Box.FIRST]) >= SLOTS

    # ── standstill ───────────────────────────────────────────────────────────────────────────────

    def standstill(self) -> bool:
        """Whether nothing can change any more: all ranks have left, or wait for what cannot come.

        A rank on another host is seen as it was some time ago, each at another time: that does no harm.
        What ranks wait for are words that only grow, and ranks that have left.  Assume that all wait as
        they are seen here, and think of the first that then goes on.  It has seen no other further than
        is seen here, so what it waited for is seen here, too, and it is not one that waits.
        """
        before = self._seen()
        stuck = all(self.left(rank) or self._waits(rank) for rank in self.all.ranks)
        return stuck and self._seen() == before

    def _seen(self) -> bytes:
        """All that the ranks of this call show; others may be busy with calls of their own."""
        words, ranks = self.words, self.all.ranks
        lines = [words[rank * LINE : (rank + 1) * LINE] for rank in ranks]
        boxes = [self.box(source, to) for source in ranks for to in ranks]
        shown = [words[start : start + _BOX] for start in boxes]
        parted = [self._among(rank).shown() for rank in ranks if self.here(rank)]
        return b"".join(map(bytes, [*lines, *shown, *parted]))

    def _among(self, rank: int) -> Members:
        """Whom *rank*, which is here, meets now."""
        at = self.words[rank * LINE + Line.AMONG]
        return found(self.arena, at, rank, []) if at else self.all

    def _waits(self, rank: int) -> bool:
        words, line = self.words, rank * LINE
        if not (self.here(rank) and words[line + Line.SLEEPS]):
            return False
        kind, wanted = words[line + Line.DOES], words[line + Line.FOR]
        if kind == RECV:
            box = self.box(wanted, rank)
            return words[box + Box.SENT] == words[box + Box.RECEIVED] and not self.left(wanted)
        if kind == SEND:
            return self.full(self.box(rank, wanted)) and not self.left(wanted)
        members = self._among(rank)
        late = [other for other in members.ranks if members.reached(other) < wanted]
        return bool(late) and not any(self.left(other) for other in late)

    def who_waits(self) -> str:
        """What to say at a standstill."""
        words = self.words
        doing = []
        for rank in self.all.ranks:
            kind, wanted = words[rank * LINE + Line.DOES], words[rank * LINE + Line.FOR]
            if self.left(rank):
                doing.append(f"rank {rank} has returned")
            elif kind in (SEND, RECV):
                way = "to" if kind == SEND else "from"
                doing.append(f"rank {rank} is in {KINDS[kind]} {way} rank {wanted}")
            else:
                members = self._among(rank)
                of = f" of {members.called()}" if members.at else ""
                doing.append(f"rank {rank} is in {KINDS[kind]}, collective {wanted // STEPS}{of}")
        return (
            f"the ranks of this call wait for each other, and none can go on: {'; '.join(doing)}. Every "
            f"rank must enter the same collectives in the same order, and receive what is sent to it."
        )
