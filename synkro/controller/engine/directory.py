"""What the workers know by number: segments, functions and variables, and which of them are gone."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from ...errors import InternalError
from ...memory.interrupts import call_with_last
from ...memory.segment import Segment
from ...messages import Attach, Command, Housekeeping
from ...plan.call import Access

_AT_A_TIME = 2000  # how many departures one command can tell the workers


class News(NamedTuple):
    """What the workers are to hear with the next command.

    Attributes:
        new: the segments that they do not have yet, by number.
        gone: the numbers of what they are to drop.
        housekeeping: the message to them, pickled.
    """

    new: dict[int, tuple[Segment, Access]]
    gone: tuple[int, ...]
    housekeeping: bytes


class Directory:
    """Gives things numbers for the workers, and notices when the user has dropped them.

    Ranks are bits of a number here: bit r stands for rank r.

    Attributes:
        gone: by number what is gone, of which workers are to hear; empty if there is nothing.
    """

    def __init__(self, size: int) -> None:
        self._numbers = count(1)
        self._everyone = (1 << size) - 1
        self._attached: dict[int, tuple[int, Access]] = {}  # the workers' segments: bytes by number
        self._having: dict[int, int] = {}  # the ranks that have them
        self._told: dict[int, int] = {}  # of what is gone: the ranks that know
        self._called: dict[int, str] = {}
        self._segments: dict[int, weakref.ref[Segment]] = {}  # also some that are gone
        self.gone: dict[int, object] = {}  # garbage collection may add to it; list() of it starts none

    def number(self) -> int:
        """A number that nothing of this session has had."""
        return next(self._numbers)

    def watch(self, owner: object, number: int, called: str = "") -> None:
        """Tell the workers that what they know as *number* is gone when *owner* is.

        *called* is what messages call it.
        """
        call_with_last(owner, self.gone.__setitem__, number)
        if called:
            self._called[number] = called

    def allocate(self, nbytes: int, called: str = "") -> Segment:
        """A new segment, which commands may name from now on.  Raises: SharedMemoryError."""
        return self.adopt(Segment.create(self.number(), nbytes), called)

    def opened(self, fd: int, nbytes: int, access: Access, called: str = "") -> Segment:
        """A segment of the file *fd*, which commands may name from now on."""
        return self.adopt(Segment(self.number(), fd, nbytes, access), called)

    def adopt(self, segment: Segment, called: str = "") -> Segment:
        """``watch`` a segment, which commands may name from now on; returns it."""
        self.watch(segment, segment.number, called)
        self._segments[segment.number] = weakref.ref(segment)
        return segment

    def segments(self, command: Command) -> list[tuple[Segment, Access]]:
        """The segments that *command* names, and how ranks map each."""
        found = []
        for number, access in dict(command.names()).items():
            segment = self._segments[number]()
            if segment is None:
                raise InternalError(f"{command!r} names segment {number}, which is gone.")
            found.append((segment, access))
        return found

    def called(self, number: int) -> str:
        """What messages call a segment: what it holds, or "memory" if nobody has said that."""
        return self._called.get(number, "memory")

    @property
    def freed(self) -> int:
        """The bytes of segments that are gone, and that the workers still have."""
        return sum(self._attached.get(number, (0,))[0] for number in list(self.gone))

    def forget(self, rank: int) -> list[tuple[Segment, Access]]:
        """Another worker takes the place of that of *rank*, and knows nothing; returns what it is to
        have: the segments that the one before had, and that are still there."""
        had = [number for number, ranks in self._having.items() if ranks >> rank & 1]
        for number in had:
            self._having[number] &= ~(1 << rank)
        found = ((self._segments[n](), self._attached[n][1]) for n in had if n in self._segments)
        return [(segment, access) for segment, access in found if segment is not None]

    def news(self, segments: Iterable[tuple[Segment, Access]], ranks: Sequence[int]) -> News | None:
        """What *ranks* are to hear with a command that names *segments*; None for nothing."""
        wanted, having, told = _bits(ranks), self._having, self._told
        new = {s.number: (s, access) for s, access in segments if wanted & ~having.get(s.number, 0)}
        gone = list(self.gone)
        if wanted != self._everyone:
            gone = [number for number in gone if wanted & ~told.get(number, 0)]
        if not new and not gone:
            return None
        del gone[_AT_A_TIME:]
        attach = tuple(
            Attach(s.number, s.nbytes, access, not s.base.flags.writeable) for s, access in new.values()
        )
        return News(new, tuple(gone), pickle.dumps(Housekeeping(attach, tuple(gone)), 5))

    def has(self, rank: int, number: int) -> bool:
        """Whether *rank* has segment *number*."""
        return bool(self._having.get(number, 0) >> rank & 1)

    def heard(self, news: News, ranks: Sequence[int]) -> None:
        """*ranks* have been sent *news*."""
        hearing = _bits(ranks)
        for number in news.gone:
            told = self._told.get(number, 0) | hearing
            if self._having.get(number, self._everyone) & ~told:
                self._told[number] = told
                continue
            for known in (self._attached, self._having, self._told):
                known.pop(number, None)
            self._called.pop(number, None)
            self._segments.pop(number, None)
            del self.gone[number]
        for number, (segment, access) in news.new.items():
            self._attached[number] = segment.nbytes, access
            self._having[number] = self._having.get(number, 0) | hearing


def _bits(ranks: Sequence[int]) -> int:
    return sum([1 << rank for rank in ranks])
