"""What the workers know by number: segments, functions and variables, and which of them are gone."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import count

from ...memory.departures import Departures
from ...memory.segment import Segment
from ...messages import Attach, Housekeeping
from ...plan.call import Access

_SEGMENT, _FUNCTION, _VARIABLE = range(3)
_AT_A_TIME = 2000  # how many departures one command can tell the workers


class News:
    """What the workers are to hear with the next command.

    Attributes:
        new: the segments that they do not have yet, by number.
        housekeeping: the message to them, pickled.
        gone: how many departures are in the message.
        dropped: the numbers of the segments that they are to drop.
    """

    def __init__(
        self,
        new: dict[int, tuple[Segment, Access]],
        gone: tuple[tuple[int, int], ...],
        attached: dict[int, int],
    ) -> None:
        self.new = new
        self.gone = len(gone)
        self.dropped = _of_kind(_SEGMENT, gone, attached)
        attach = tuple(Attach(s.number, s.nbytes, access) for s, access in new.values())
        told = Housekeeping(attach, self.dropped, _of_kind(_FUNCTION, gone), _of_kind(_VARIABLE, gone))
        self.housekeeping = pickle.dumps(told, 5)


def _of_kind(
    kind: int, gone: tuple[tuple[int, int], ...], among: Iterable[int] | None = None
) -> tuple[int, ...]:
    return tuple(number for k, number in gone if k == kind and (among is None or number in among))


class Directory:
    """Gives things numbers for the workers, and notices when the user has dropped them.

    Attributes:
        gone: what is gone, of which the workers are to hear; empty if there is nothing.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._attached: dict[int, int] = {}  # the workers' segments: bytes by number
        self._departures: Departures[tuple[int, int]] = Departures()
        self.gone = self._departures.gone

    def number(self) -> int:
        """A number that nothing of this session has had."""
        return next(self._numbers)

    def watch_segment(self, segment: Segment) -> None:
        """Tell the workers when *segment* is gone."""
        self._departures.watch(segment, (_SEGMENT, segment.number))

    def watch_function(self, owner: object, number: int) -> None:
        """Tell the workers that function *number* is gone when *owner* is."""
        self._departures.watch(owner, (_FUNCTION, number))

    def watch_variable(self, owner: object, number: int) -> None:
        """Tell the workers that variable *number* is gone when *owner* is."""
        self._departures.watch(owner, (_VARIABLE, number))

    @property
    def freed(self) -> int:
        """The bytes of segments that are gone, and that the workers still have."""
        gone = self._departures.payloads()
        return sum(self._attached[n] for n in _of_kind(_SEGMENT, gone, self._attached))

    def news(self, segments: Iterable[tuple[Segment, Access]]) -> News | None:
        """What the workers are to hear with a command that names *segments*; None for nothing."""
        new = {s.number: (s, access) for s, access in segments if s.number not in self._attached}
        if not new and not self.gone:
            return None
        return News(new, self._departures.payloads()[:_AT_A_TIME], self._attached)

    def heard(self, news: News) -> None:
        """The workers have been sent *news*."""
        for number in news.dropped:
            del self._attached[number]
        self._attached |= {number: segment.nbytes for number, (segment, _) in news.new.items()}
        self._departures.forget(news.gone)
