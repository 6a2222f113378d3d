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
from pathlib import Path
from typing import NamedTuple

from ...ipc.channel import MARKS, Controller
from ...messages import Phase

MAIN = -1
"""The main process's lane; those of the ranks are their numbers."""

_KEPT = 200_000  # marks a lane; newer ones replace older ones
_ENOUGH = MARKS // 4  # unfetched marks of a rank at which they are fetched

NAMES = {
    Phase.LOADING: "load",
    Phase.BEGINNING: "begin",
    Phase.FEEDING: "inputs",
    Phase.RUNNING: "compute",
    Phase.MERGING: "outputs",
    Phase.COMMUNICATING: "collective",
    Phase.STORING: "store",
    Phase.REDUCING: "reduce",
    Phase.TAKING: "wait for others",
    Phase.TASK: "compute",
}


@dataclass(frozen=True)
class Span:
    """What a lane did from *start* to *stop* (ns), in which *piece* (slice) of its rows."""

    lane: int
    start: int
    stop: int
    what: str
    piece: int = 0


class Called(NamedTuple):
    """A call of a function, by its *number*, or a command that the main process sent by itself (0)."""

    name: str
    number: int
    start: int
    stop: int


class Trace:
    """The marks of a session, from now to ``end``.

    Attributes:
        path: the file for it, or None.
        size: how many ranks there are.
        calls: the calls, in their order, but for those that failed before anything was sent.
        within: whether a call is going on.
    """

    def __init__(self, size: int, marks: Controller, path: Path | None) -> None:
        self.size = size
        self.path = path
        self.calls: deque[Called] = deque(maxlen=_KEPT)
        self._marks = marks
        self._on = True
        self._sent = False  # whether the call that goes on has sent something
        self._gaps: list[tuple[int, int, int]] = []
        self._seen = [marks.marked(rank) for rank in range(size)]
        self._main: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._ranks: list[deque[tuple[int, int, int]]] = [deque(maxlen=_KEPT) for _ in range(size)]
        self.within = False
        marks.trace(True)

    def end(self) -> None:
        self._marks.trace(False)
        self.fetch()
        self._on = False

    def mark(self, what: str) -> None:
        """From now on the main process does *what*."""
        self._main.append((time.perf_counter_ns(), what))
        if what == "send":
            self._sent = True

    @contextlib.contextmanager
    def call(self, name: str, number: int = 0) -> Iterator[None]:
        """A call of the function *name* with this *number*."""
        self.within = True
        self._sent = False
        self.mark("plan")
        start = self._main[-1][0]
        try:
            yield
        finally:
            self.within = False
            self.mark("")
            if self._sent:
                self.calls.append(Called(name, number, start, self._main[-1][0]))
            if self._marks.marked(0) - self._seen[0] > _ENOUGH:
                self.fetch()

    def fetch(self) -> None:
        """Copy the ranks' new marks out of the shared block."""
        for rank, lane in enumerate(self._ranks if self._on else ()):
            end = self._marks.marked(rank)
            fetched = self._marks.marks(rank, self._seen[rank])
            if end - self._seen[rank] > len(fetched) > 0:
                self._gaps.append((rank, lane[-1][0] if lane else 0, fetched[0][0]))
            self._seen[rank] = end
            lane.extend(fetched)

    def gaps(self) -> list[tuple[int, int, int]]:
        """Where marks are missing, as they were too old or too many: lane, from when, until when."""
        gaps = list(self._gaps)
        if len(self._main) == _KEPT:
            gaps.append((MAIN, 0, self._main[0][0]))
        return gaps + [(n, 0, lane[0][0]) for n, lane in enumerate(self._ranks) if len(lane) == _KEPT]

    def whole(self) -> list[bool]:
        """For each call, whether all of its marks are there."""
        gaps = self.gaps()
        return [not any(a < c.stop and c.start < b for _, a, b in gaps) for c in self.calls]

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
        begun = [start for start, _ in commands]
        answered = [0] * len(commands)  # when the last rank answered each
        for lane in self._ranks:
            for time_of, phase, _ in lane:
                if phase == Phase.WAITING and (at := bisect_right(begun, time_of) - 1) >= 0:
                    answered[at] = max(answered[at], time_of)
        for rank, lane in enumerate(self._ranks):
            yield from _rank_spans(rank, list(lane), begun, commands, answered)


def _rank_spans(
    rank: int,
    marks: list[tuple[int, int, int]],
    begun: list[int],
    commands: list[tuple[int, int]],
    answered: list[int],
) -> Iterator[Span]:
    """One rank's spans; after its answer it waits for the last rank's, and then for the next command."""
    for index, (start, phase, number) in enumerate(marks):
        at = bisect_right(begun, start) - 1
        if phase == Phase.WAITING:
            if at >= 0 and answered[at] > start:
                yield Span(rank, start, answered[at], "wait for others")
            continue
        if phase == Phase.BEGINNING and at >= 0:
            yield Span(rank, begun[at], start, "wake")
        if index + 1 < len(marks):
            stop = marks[index + 1][0]
        else:  # it never answered: it died, or the main process gave it up
            stop = commands[at][1] if at >= 0 else start
        yield Span(rank, start, max(start, stop), NAMES[Phase(phase)], number)
