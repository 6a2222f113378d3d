"""What the main process and every rank did, and when: the marks of a trace, made into spans.

A mark says "from now on this"; the next one ends it.  The main process marks its own steps, workers
leave theirs in the shared block (``ipc.channel``), from where they are fetched now and then::

    main     plan │ send │ wait ────────────────────────────────│ collect │
    rank 0        │ wake │ begin │ inputs │ compute │ outputs │ wait for others
    rank 1        │ wake   │ begin │ inputs │ compute ───│ outputs │
                                     └──── once a slice ───┘

Calls that go on at the same time, in threads of their own, have lanes of their own in the main process.
All clocks are ``time.perf_counter_ns``, which on Linux is one clock for all processes of a machine.

It is told as a file for Perfetto and Chrome, and as a table of where the time went.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import InvalidType, InvalidValue, shown
from ...ipc.block import MARKS
from ...ipc.channel import Controller
from ...messages import Phase
from ...values.arrays import Array

MAIN = -1
"""The main process's first lane; further ones have lower numbers, and a rank's is the rank."""

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
    Phase.LEAVING: "wait for others",
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
    lane: int
    ranks: frozenset[int]


class Going(NamedTuple):
    """The calls that go on in a thread, one in the other.

    Attributes:
        lane: theirs.
        ranks: for each, those that it has sent something to.
    """

    lane: int
    ranks: list[set[int]]


class Trace:
    """The marks of a session, from now to ``end``.  What happens at the same time holds a lock.

    Attributes:
        path: the file for it, or None.
        size: how many ranks there are.
    """

    def __init__(self, size: int, marks: Controller, path: Path | None) -> None:
        self.size = size
        self.path = path
        self._calls: deque[Called] = deque(maxlen=_KEPT)
        self._marks = marks
        self._on = True
        self._going: dict[int, Going] = {}  # by thread
        self._gaps: list[tuple[int, int, int]] = []
        self._seen = [marks.marked(rank) for rank in range(size)]
        self._main: dict[int, deque[tuple[int, str, Sequence[int]]]] = {MAIN: deque(maxlen=_KEPT)}
        self._ranks: list[deque[tuple[int, int, int]]] = [deque(maxlen=_KEPT) for _ in range(size)]
        marks.trace(True)

    @property
    def calls(self) -> list[Called]:
        """The calls, by their beginnings, but for those that failed before anything was sent."""
        return sorted(self._calls, key=lambda call: call.start)

    @property
    def lanes(self) -> list[int]:
        """All lanes: those of the main process, and those of the ranks."""
        return [*self._main, *range(self.size)]

    @property
    def within(self) -> bool:
        """Whether a call is going on in this thread."""
        return threading.get_ident() in self._going

    def end(self) -> None:
        self._marks.trace(False)
        self.fetch()
        self._on = False

    def mark(self, what: str, ranks: Sequence[int] = ()) -> int:
        """From now on the main process does *what*, for *ranks* if it sends; returns the time."""
        now, going = time.perf_counter_ns(), self._going.get(threading.get_ident())
        self._main[MAIN if going is None else going.lane].append((now, what, ranks))
        if going is not None:
            going.ranks[-1].update(ranks)
        return now

    @contextlib.contextmanager
    def call(self, name: str, number: int = 0) -> Iterator[None]:
        """A call of the function *name* with this *number*."""
        thread = threading.get_ident()
        going = self._going.get(thread)
        if going is None:
            going = self._going[thread] = Going(self._free_lane(), [])
        mine: set[int] = set()
        going.ranks.append(mine)
        start = self.mark("plan")
        try:
            yield
        finally:
            stop, ranks = self.mark(""), frozenset(mine)
            going.ranks[:] = [each for each in going.ranks if each is not mine]
            if not going.ranks:
                self._going.pop(thread, None)
            if ranks:
                self._calls.append(Called(name, number, start, stop, going.lane, ranks))
            if any(self._marks.marked(rank) - self._seen[rank] > _ENOUGH for rank in ranks):
                self.fetch()

    def _free_lane(self) -> int:
        """The first lane of the main process in which no call goes on."""
        taken = {going.lane for going in self._going.values()}
        lane = next(lane for lane in count(MAIN, -1) if lane not in taken)
        self._main.setdefault(lane, deque(maxlen=_KEPT))
        return lane

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
        lanes: Iterable[tuple[int, deque[Any]]] = chain(self._main.items(), enumerate(self._ranks))
        full = [(number, 0, lane[0][0]) for number, lane in lanes if len(lane) == _KEPT]
        return [*self._gaps, *full]

    def whole(self) -> list[bool]:
        """For each call, whether all of its marks are there."""
        gaps = self.gaps()
        return [not any(a < c.stop and c.start < b for _, a, b in gaps) for c in self.calls]

    def spans(self) -> Iterator[Span]:
        """What all lanes did, lane by lane."""
        commands: list[_Command] = []
        for number, main in self._main.items():
            for (start, what, ranks), (stop, _, _) in pairwise(main):
                if what:
                    yield Span(number, start, stop, what)
                if what == "send":
                    commands.append(_Command(start, ranks))
                elif what == "wait" and commands:
                    commands[-1].end(stop)
        commands.sort(key=lambda command: command.sent)
        lanes = []
        for rank, marks in enumerate(self._ranks):
            own = [command for command in commands if rank in command.ranks]
            sent, last = [command.sent for command in own], [None, *own]
            lanes.append([(mark, last[bisect_right(sent, mark[0])]) for mark in marks])
        for (time_of, phase, _), command in chain.from_iterable(lanes):
            if phase == Phase.WAITING and command is not None:
                command.answer(time_of)
        for rank, lane in enumerate(lanes):
            yield from _rank_spans(rank, lane)


@dataclass
class _Command:
    """A command to some ranks.

    Attributes:
        sent, answered: when it was sent, and when the last of them answered.
        stop: until when the main process waited.
    """

    sent: int
    ranks: Sequence[int]
    stop: int = 0
    answered: int = 0

    def end(self, stop: int) -> None:
        """The main process waits no longer."""
        self.stop = stop

    def answer(self, time_of: int) -> None:
        """One of the ranks has answered."""
        self.answered = max(self.answered, time_of)


def _rank_spans(
    rank: int, marks: Sequence[tuple[tuple[int, int, int], _Command | None]]
) -> Iterator[Span]:
    """One rank's spans, of its marks and the command that each belongs to.

    After its answer it waits for the last rank's, and then for the next command.
    """
    for index, ((start, phase, number), command) in enumerate(marks):
        if phase == Phase.WAITING:
            if command is not None and command.answered > start:
                yield Span(rank, start, command.answered, "wait for others")
            continue
        if phase == Phase.BEGINNING and command is not None:
            yield Span(rank, command.sent, start, "wake")
        if index + 1 < len(marks):
            stop = marks[index + 1][0][0]
        else:  # it never answered: it died, or the main process gave it up
            stop = start if command is None else command.stop
        yield Span(rank, start, max(start, stop), NAMES[Phase(phase)], number)


SHARES: dict[str, tuple[str, ...]] = {
    "compute": ("compute", "load"),
    "transfer": ("copy", "inputs", "outputs", "store", "collect"),
    "communication": ("collective", "reduce"),
    "waiting": ("wait for others",),
}
"""The columns of the table, and the spans that each counts; the rest of a call is overhead."""


def checked_path(path: Any) -> Path:
    """*path*, absolute.  Raises: InvalidType, InvalidValue unless a file can be written there."""
    try:
        checked = Path(path)
    except TypeError:
        raise InvalidType(f"expected the path of a file to write; got {shown(path)}.") from None
    try:
        possible = os.access(checked if checked.exists() else checked.parent, os.W_OK)
    except ValueError:  # a zero in it
        possible = False
    if not possible or checked.is_dir():
        raise InvalidValue(f"{checked} cannot be written: name a file in a folder that can be.")
    try:
        return checked.absolute()
    except OSError as error:
        raise InvalidValue(
            f"{checked} is relative to a working directory that was deleted, or cannot be reached "
            f"({error.strerror}): name an absolute path, or change to one that exists (os.chdir)."
        ) from None


def write(trace: Trace, path: Path) -> None:
    """Write *trace* in the Trace Event Format (its duration and metadata events).

    Source: "Trace Event Format", by the authors of Chrome's tracing.

    Raises: InvalidValue if the file cannot be written.
    """
    try:
        with path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(_events(trace)):  # one by one: there may be a million
                file.write(f"{',' if number else ''}\n{json.dumps(event)}")
            file.write("\n]}\n")
    except OSError as error:
        raise InvalidValue(f"the trace could not be written to {path}: {error}") from None


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    calls = trace.calls
    origin = calls[0].start if calls else 0
    pid = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "Synkro"}}
    threads = {lane: number for number, lane in enumerate(trace.lanes)}
    for lane, number in threads.items():
        common = {"ph": "M", "pid": pid, "tid": number}
        yield {**common, "name": "thread_name", "args": {"name": called(lane)}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": number}}

    def event(lane: int, start: int, stop: int, name: str, kind: str, **args: Any) -> dict[str, Any]:
        what = {"ph": "X", "pid": pid, "tid": threads[lane], "name": name, "cat": kind}
        when = {"ts": (start - origin) / 1e3, "dur": (stop - start) / 1e3}
        return {**what, **when, "args": args}

    for lane, start, stop in trace.gaps():
        yield event(lane, max(start, origin), max(stop, origin), "steps that were not kept", "gap")
    for number, call in enumerate(calls):
        yield event(call.lane, call.start, call.stop, call.name, "call", call=number)
    for span, number in placed(trace, calls):
        args: dict[str, Any] = {"function": calls[number].name, "call": number}
        if span.what in ("compute", "collective"):
            args["slice"] = span.piece
        yield event(span.lane, span.start, span.stop, span.what, "step", **args)


def table(trace: Trace) -> str:
    """A row for each function: how often it was called, how long it took, and where that time went.

    Shares are means over the ranks, or the main process's where the ranks have nothing to do;
    *imbalance* is how much longer than the mean the slowest rank computed.  Calls of which marks are
    missing are left out, and counted below.
    """
    calls, whole = trace.calls, trace.whole()
    names = labels(calls)
    elapsed: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(trace.size))
    groups = {what: share for share, whats in SHARES.items() for what in whats}
    for span, number in placed(trace, calls):
        if span.what in groups and whole[number]:
            ranks = slice(None) if span.lane <= MAIN else span.lane
            elapsed[names[number], groups[span.what]][ranks] += span.stop - span.start
    lengths: dict[str, list[int]] = defaultdict(list)
    ranks_of: dict[str, list[int]] = {}
    for label, call, known in zip(names, calls, whole, strict=True):
        if known:
            lengths[label].append(call.stop - call.start)
            ranks_of[label] = sorted(call.ranks)
    titles = ["function", "calls", "ms a call", *SHARES, "overhead", "imbalance"]
    rows = [
        _row(name, each, [elapsed[name, share][ranks_of[name]] for share in SHARES])
        for name, each in lengths.items()
    ]
    first, *others = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    pattern = "  ".join([f"{{:{first}}}", *[f"{{:>{width}}}" for width in others]])
    lines = [pattern.format(*row) for row in [titles, *rows]]
    if missing := len(calls) - sum(whole):
        left_out = "1 call is" if missing == 1 else f"{missing} calls are"
        lines.append(
            f"({left_out} left out: too long ago, or with too many slices or collectives, for all "
            f"steps to be kept.)"
        )
    return "\n".join(lines if rows else lines[1:])


def labels(calls: Sequence[Called]) -> list[str]:
    """The calls' functions by their names; those that share a name are numbered."""
    known: dict[tuple[str, int], str] = {}
    count: dict[str, int] = defaultdict(int)
    for call in calls:
        if (call.name, call.number) not in known:
            count[call.name] += 1
            suffix = f" ({count[call.name]})" if count[call.name] > 1 else ""
            known[call.name, call.number] = call.name + suffix
    return [known[call.name, call.number] for call in calls]


def _row(name: str, lengths: Sequence[int], elapsed: Sequence[Array]) -> list[str]:
    """The row of a function with calls of these *lengths*, and its shares of them on each rank."""
    whole = sum(lengths)
    shares = [share.mean() / whole for share in elapsed]
    compute = elapsed[0]
    imbalance = f"{compute.max() / compute.mean() - 1:.0%}" if compute.any() else "-"
    percent = [f"{share:.0%}" for share in [*shares, max(0.0, 1 - sum(shares))]]
    return [name, str(len(lengths)), f"{whole / len(lengths) / 1e6:.3f}", *percent, imbalance]


def placed(trace: Trace, calls: Sequence[Called]) -> list[tuple[Span, int]]:
    """The spans that lie in a call, each with the number of that."""
    own: dict[int, list[int]] = defaultdict(list)  # by lane: the numbers of its calls
    for number, call in enumerate(calls):
        for lane in (call.lane, *call.ranks):
            own[lane].append(number)
    starts = {lane: [calls[number].start for number in numbers] for lane, numbers in own.items()}
    placed = []
    for span in trace.spans():
        at = bisect_right(starts.get(span.lane, []), span.start) - 1
        if at >= 0 and span.start < (end := calls[number := own[span.lane][at]].stop):
            placed.append((span if span.stop <= end else replace(span, stop=end), number))
    return placed


def called(lane: int) -> str:
    """What a lane is called."""
    if lane >= 0:
        return f"rank {lane}"
    return "main process" if lane == MAIN else f"main {MAIN - lane + 1}"
