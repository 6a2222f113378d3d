"""What the main process and every rank did, and when: the marks of a trace, made into spans.

A mark says "from now on this"; the next one ends it.  The main process marks its own steps, workers
leave theirs in the shared block (``ipc.channel``), from where they are fetched now and then::

    main     plan │ send │ wait ────────────────────────────────│ collect │
    rank 0        │ wake │ begin │ inputs │ compute │ outputs │ wait for others
    rank 1        │ wake   │ begin │ inputs │ compute ───│ outputs │
                                     └──── once a slice ───┘

All clocks are ``time.perf_counter_ns``, which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from .ipc.channel import MARKS
from .messages import Phase

MAIN = -1
"""The main process's lane; those of the ranks are their numbers."""

_KEPT = 200_000  # marks a lane; older ones give way
_ENOUGH = MARKS // 4  # marks of a rank to be fetched at once

_NAMES = {
    Phase.LOADING: "load",
    Phase.BEGINNING: "begin",
    Phase.FEEDING: "inputs",
    Phase.RUNNING: "compute",
    Phase.MERGING: "outputs",
    Phase.COMMUNICATING: "collective",
    Phase.STORING: "store",
    Phase.REDUCING: "reduce",
}


class Marks(Protocol):
    """What this needs of the ``Controller``."""

    def trace(self, on: bool) -> None: ...

    def marked(self, rank: int) -> int: ...

    def marks(self, rank: int, since: int) -> list[tuple[int, int, int]]: ...


@dataclass(frozen=True)
class Span:
    """What a lane did from *start* to *stop* (ns), in which *piece* (slice) of its rows."""

    lane: int
    start: int
    stop: int
    what: str
    piece: int = 0


class Called(NamedTuple):
    """A call of a function, or a command that the main process sent by itself."""

    name: str
    start: int
    stop: int


class Trace:
    """The marks of a session, from ``begin`` to ``end``.

    Attributes:
        size: how many ranks there are.
        calls: what was called, in its order.
        within: whether a call is going on.
        lost: how many marks came too fast to be fetched.
    """

    def __init__(self, size: int, marks: Marks) -> None:
        self.size = size
        self.calls: deque[Called] = deque(maxlen=_KEPT)
        self.lost = 0
        self._marks = marks
        self._seen = [0] * size
        self._main: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._ranks: list[deque[tuple[int, int, int]]] = [deque(maxlen=_KEPT) for _ in range(size)]
        self.within = False

    def begin(self) -> None:
        self._seen = [self._marks.marked(rank) for rank in range(self.size)]
        self._marks.trace(True)

    def end(self) -> None:
        self._marks.trace(False)
        self._fetch()

    def mark(self, what: str) -> None:
        """From now on the main process does *what*."""
        self._main.append((time.perf_counter_ns(), what))

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call of *name*."""
        self.within = True
        self.mark("plan")
        start = self._main[-1][0]
        try:
            yield
        finally:
            self.within = False
            self.mark("")
            self.calls.append(Called(name, start, self._main[-1][0]))
            if self._marks.marked(0) - self._seen[0] > _ENOUGH:
                self._fetch()

    def _fetch(self) -> None:
        """Bring what the ranks have marked."""
        for rank, lane in enumerate(self._ranks):
            end = self._marks.marked(rank)
            fetched = self._marks.marks(rank, self._seen[rank])
            self.lost += end - self._seen[rank] - len(fetched)
            self._seen[rank] = end
            lane.extend(fetched)

    def spans(self) -> Iterator[Span]:
        """What all lanes did, lane by lane."""
        commands: list[tuple[int, int]] = []  # from when each was sent, and until all had answered
        sent = 0
        for (start, what), (stop, _) in pairwise(self._main):
            if what:
                yield Span(MAIN, start, stop, what)
            if what == "send":
                sent = start
            elif what == "wait":
                commands.append((sent, stop))
        for rank, lane in enumerate(self._ranks):
            yield from _rank_spans(rank, list(lane), commands)


def _rank_spans(
    rank: int, marks: list[tuple[int, int, int]], commands: list[tuple[int, int]]
) -> Iterator[Span]:
    """One rank's spans; between two commands it waits for the other ranks, and later is woken."""
    begun = [start for start, _ in commands]
    for index, (start, phase, number) in enumerate(marks):
        if phase == Phase.BEGINNING:
            at = bisect_right(begun, start) - 1
            if at >= 0:
                yield Span(rank, begun[at], start, "wake")
        if index + 1 == len(marks) and phase != Phase.WAITING:
            return
        stop = marks[index + 1][0] if index + 1 < len(marks) else start
        if phase != Phase.WAITING:
            yield Span(rank, start, stop, _NAMES[Phase(phase)], number)
            continue
        at = bisect_right(begun, start) - 1
        if at >= 0 and commands[at][1] > start:
            yield Span(rank, start, commands[at][1], "wait for others")
