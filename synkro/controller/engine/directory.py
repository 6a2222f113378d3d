"""What the workers know by number: segments, functions and variables, and which of them are gone."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from ...memory.departures import call_with_last
from ...memory.segment import Segment
from ...messages import Attach, Housekeeping
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

    Attributes:
        gone: by number what is gone, of which the workers are to hear; empty if there is nothing.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._attached: dict[int, int] = {}  # the workers' segments: bytes by number
        self.gone: dict[int, object] = {}  # garbage collection may add to it; list() of it starts none

    def number(self) -> int:
        """A number that nothing of this session has had."""
        return next(self._numbers)

    def watch(self, owner: object, number: int) -> None:
        """Tell the workers that what they know as *number* is gone when *owner* is."""
        call_with_last(owner, self.gone.__setitem__, number)

    @property
    def freed(self) -> int:
        """The bytes of segments that are gone, and that the workers still have."""
        return sum(self._attached.get(number, 0) for number in list(self.gone))

    def news(self, segments: Iterable[tuple[Segment, Access]]) -> News | None:
        """What the workers are to hear with a command that names *segments*; None for nothing."""
        new = {s.number: (s, access) for s, access in segments if s.number not in self._attached}
        if not new and not self.gone:
            return None
        gone = tuple(list(self.gone)[:_AT_A_TIME])
        attach = tuple(Attach(s.number, s.nbytes, access) for s, access in new.values())
        return News(new, gone, pickle.dumps(Housekeeping(attach, gone), 5))

    def heard(self, news: News) -> None:
        """The workers have been sent *news*."""
        for number in news.gone:
            self._attached.pop(number, None)
            del self.gone[number]
        self._attached |= {number: segment.nbytes for number, (segment, _) in news.new.items()}
