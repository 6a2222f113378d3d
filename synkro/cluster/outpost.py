"""A host's workers, as its leader sees them: commands come with what they read, answers go with what
they have written.

The leader drives the same engine room as the main process does on its host: a crew, and the channel to
it.  In the place of the main process's segments there are mirrors.
"""

from __future__ import annotations

import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..devices.gpus import showing
from ..errors import SessionError, SharedMemoryError, SynkroError
from ..ipc.channel import Lane
from ..messages import Command, Housekeeping, Reduce, Reply, Start, Work
from ..values.cache import Cache
from .cargo import discarded, large, unpacked, whole
from .cargo import packed as loaded
from .crew import LeaderCrew
from .depot import Depot
from .mirrors import Mirrors
from .orders import (
    Answered,
    Begin,
    Died,
    Ended,
    Looked,
    Marks,
    Offered,
    Ordered,
    Printed,
    Shown,
    Standing,
    Wanted,
    refusal,
)
from .sharing import Sharing
from .traffic import Extent, Partial, Traffic
from .wire import GATEWAY, Buffer, Wire, in_pieces

_PATIENCE = 5e-3  # seconds that ranks which have answered wait for the others of their host
_GRACE = 1.0  # seconds in which workers can leave by themselves
_LOOK = 5e-3  # seconds after which a leader that does not sleep looks around
_REPORT = 50e-3  # seconds between two reports of what the ranks do


class _Running:
    """A command that has not been answered by all ranks of the host."""

    def __init__(self, lane: Lane, command: Command) -> None:
        self.lane = lane
        self.command = command
        self._told: set[int] = set()  # the ranks whose answers have been sent
        self._since: float | None = None  # when the first of the others was seen

    def has_news(self) -> bool:
        """Whether a rank has answered whose answer has not been sent."""
        return len(self.lane.unanswered()) + len(self._told) < len(self.lane.ranks)

    @property
    def done(self) -> bool:
        """Whether no rank's answer is missing any more."""
        return len(self._told) == len(self.lane.ranks)

    def answers(self) -> list[int]:
        """The ranks whose answers are to be sent now.

        Those of all ranks go together, if that does not take long: what they reduce is theirs together.
        """
        late = self.lane.unanswered()
        answered = [r for r in self.lane.ranks if r not in late and r not in self._told]
        if late and answered:
            now = time.monotonic()
            if self._since is None:
                self._since = now
            if now - self._since < _PATIENCE or isinstance(self.command, Reduce):
                return []
        self._told.update(answered)
        self._since = None
        return answered


class Outpost:
    """The workers of one host other than the main process's.

    Attributes:
        over: whether they have been dismissed.
    """

    def __init__(self, wire: Wire, begin: Begin) -> None:
        """Raises: OSError, RuntimeError if they cannot be started."""
        self._wire = wire
        self._printed: deque[Printed] = deque()
        self._crew = LeaderCrew(
            begin.hosts, wire.number, lambda *printed: self._printed.append(Printed(*printed))
        )
        self._mirrors = Mirrors()
        self._traffic = Traffic(self._mirrors.array)
        self._having: dict[int, set[int]] = {}  # by segment: the ranks that have its descriptor
        self._commands: dict[tuple[int, ...], bytes] = {}  # the last one, by ranks
        self._known: Cache[bytes, Command] = Cache()
        self._replies: Cache[bytes, Reply] = Cache()
        self._writings: dict[
            Lane, tuple[list[bytes], Command, list[int], tuple[list[Extent], list[Partial]]]
        ] = {}  # what was written last: by the replies, the command, and the ranks that have answered
        self._sent: dict[int, bytes] = {}  # by rank: the last reply that went to the gateway
        self._running: dict[int, _Running] = {}
        self._marked: dict[int, int] = {}  # during a trace: by rank, how many marks have been told
        self._depot: Depot | None = None  # from the first map on
        self._doing: dict[int, tuple[int, int]] = {}
        self._looked = self._reported = 0.0
        self.over = False
        self._ends = select.poll()
        self._alive: set[int] = set()  # sentinels of workers that have not ended
        environments = [begin.environments[rank] | showing() for rank in self._crew.ranks]
        try:
            self._channel = self._crew.start(environments, begin.board)
        except BaseException:
            self._crew.close()
            raise
        inherited = self._crew.inherited
        self._sharing = Sharing(wire, begin.hosts, inherited, self._channel.answered)
        for sentinel in self._crew.sentinels:
            self._ends.register(sentinel, select.POLLIN)
            self._alive.add(sentinel)

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids, in the order of their ranks."""
        return self._crew.pids

    # ── a command ────────────────────────────────────────────────────────────────────────────────

    def order(self, ordered: Ordered) -> None:
        """Hand a command to its ranks."""
        payload = ordered.command
        if payload is None:
            payload = self._commands[ordered.ranks]
        self._commands[ordered.ranks] = payload
        command = self._known.get(payload)
        problem: SharedMemoryError | None = None
        try:
            if ordered.housekeeping:
                self._keep_house(pickle.loads(ordered.housekeeping), ordered.ranks)
            for piece in large(ordered.cargo):
                if isinstance(piece, Extent):
                    self._mirrors.reserve(piece)
        except SharedMemoryError as error:
            problem = error
        if problem is not None:
            discarded(ordered.cargo, self._fill)
            self._refuse(ordered, problem)
            return
        unpacked(ordered.cargo, self._mirrors.memory, self._fill)
        if command is None:
            command = self._known[payload] = pickle.loads(payload)
        if isinstance(command, Start):
            self._traffic.begin(command)
            self._mirrors.keep(command.outbox.segment)
        work = self._traffic.innermost(command)
        if isinstance(work, Work):
            try:
                self._begin_map(ordered.number, work)
            except SessionError as error:
                self._refuse(ordered, error)
                return
        lane = self._channel.lane(ordered.ranks)
        lane.send(payload, ordered.housekeeping, ordered.number)
        self._running[ordered.number] = _Running(lane, command)

    def look_for(self, wanted: Wanted) -> None:
        """Say whether a file is here, too; then the workers get that one."""
        there = self._mirrors.share(*wanted)
        self._wire.send(GATEWAY, Looked(wanted.segment, there))

    def _fill(self, places: Sequence[NDArray[np.uint8]]) -> None:
        self._wire.fill(GATEWAY, places)

    def _keep_house(self, news: Housekeeping, ranks: Sequence[int]) -> None:
        for number in news.drop:
            self._mirrors.drop(number)
            self._having.pop(number, None)
        for attach in news.attach:
            self._mirrors.descriptor(attach.segment, attach.nbytes)
        for rank in ranks:
            new = []
            for attach in news.attach:
                having = self._having.setdefault(attach.segment, set())
                if rank not in having:
                    having.add(rank)
                    new.append((attach.segment, self._mirrors.descriptor(attach.segment, attach.nbytes)))
            if new:
                self._crew.pass_descriptors(rank, new)

    def _begin_map(self, number: int, work: Work) -> None:
        """Open the queue of tasks.  Raises: SessionError."""
        if self._depot is None:
            ranks, size = self._crew.ranks, sum(map(len, self._crew.hosts))
            try:
                self._depot = Depot(self._wire, ranks, size, self._channel)
            except OSError as error:
                raise SessionError(
                    f"the queue of tasks of ranks {ranks[0]} to {ranks[-1]} could not be made "
                    f"({error}): raise the limit of open files there (ulimit -n)."
                ) from None
            for rank in ranks:
                queue = zip(work.queue, self._depot.descriptors, strict=True)
                self._crew.pass_descriptors(rank, list(queue))
        self._depot.begin(number)

    def accept(self, items: Offered) -> None:
        """Items of a map have come."""
        if self._depot is not None:
            self._depot.accept(items, self._fill)

    def recall(self, number: int) -> None:
        """Items that no worker has begun may be taken by others."""
        if self._depot is not None:
            self._depot.recall(number)

    def _refuse(self, ordered: Ordered, problem: SynkroError) -> None:
        """Answer for the ranks, which have not heard of the command."""
        replies: dict[int, bytes | None] = dict.fromkeys(ordered.ranks, refusal(problem))
        self._sent |= dict.fromkeys(ordered.ranks, b"")
        self._wire.send(GATEWAY, Answered(ordered.number, replies, None, ()))

    def _has_news(self) -> bool:
        """Whether a rank has answered of whom the gateway does not know."""
        return any(running.has_news() for running in self._running.values())

    def interrupt(self, number: int, ranks: Sequence[int]) -> None:
        """Have *ranks* give up command *number*."""
        running = self._running.get(number)
        if running is not None:
            if self._depot is not None:
                self._depot.stop()
            running.lane.disclaim()
            self._channel.wake_all()
            self._crew.interrupt([rank for rank in running.lane.unanswered() if rank in ranks])

    # ── what becomes of it ───────────────────────────────────────────────────────────────────────

    def called(self) -> bool:
        """Whether all ranks have answered a command, or show others something."""
        for running in self._running.values():
            if running.lane.all_answered():
                return True
        return self._sharing.called()

    def step(self) -> bool:
        """Look at the workers, and tell the gateway what is new; returns whether something was."""
        if time.monotonic() - self._looked > _LOOK:
            self._look_around()
        news = self._sharing.step(lambda: bool(self._running))
        news |= self._depot is not None and self._depot.step()
        for number, running in tuple(self._running.items()):
            news |= self._look(number, running)
        return news

    def _look(self, number: int, running: _Running) -> bool:
        answered = running.answers()
        if running.done:
            del self._running[number]
        if answered:
            if self._depot is not None:
                self._depot.flush()  # results of a map come before the answers
            self._answer(number, running, answered)
        return bool(answered)

    def _answer(self, number: int, running: _Running, ranks: list[int]) -> None:
        self._sharing.step(lambda: True)  # what these ranks have shown goes before their answers
        self._tell_marks()
        listed = running.lane.replies()
        payloads = dict(zip(running.lane.ranks, listed, strict=True))
        pieces, partials = self._written(running, ranks, listed)
        cargo, whole_bodies = loaded(pieces, self._mirrors.memory)
        bodies: list[Buffer] = list(whole_bodies)
        for partial in partials:
            extent = whole(partial.target)
            part = self._mirrors.memory(extent.segment)[extent.start : extent.stop]
            bodies += in_pieces(part)
        if self._depot is not None and self._depot.problem is not None:
            payloads |= dict.fromkeys(ranks, refusal(self._depot.problem))
        for rank in ranks:
            self._doing.pop(rank, None)  # the gateway knows that they do nothing
        said = {rank: self._news(rank, payloads[rank]) for rank in ranks}
        self._wire.send(GATEWAY, Answered(number, said, cargo, tuple(partials)), bodies)
        if bodies:
            self._wire.flush()  # the next command may write there

    def _written(
        self, running: _Running, ranks: list[int], listed: list[bytes]
    ) -> tuple[list[Extent], list[Partial]]:
        """What *ranks* have written, by the replies of their lane: *listed* as that does."""
        lane, command = running.lane, running.command
        last = self._writings.get(lane)
        if last is not None and last[0] is listed and last[1] is command and last[2] == ranks:
            return last[3]
        payloads = dict(zip(lane.ranks, listed, strict=True))
        replies = {rank: self._loaded(payloads[rank]) for rank in ranks}
        written = list(self._traffic.writes(command, replies))
        extents = [piece for piece in written if isinstance(piece, Extent)]
        found = extents, [piece for piece in written if isinstance(piece, Partial)]
        self._writings[lane] = listed, command, ranks, found
        return found

    def _loaded(self, payload: bytes) -> Reply:
        reply = self._replies.get(payload)
        if reply is None:
            reply = self._replies[payload] = pickle.loads(payload)
        return reply

    def _news(self, rank: int, payload: bytes) -> bytes | None:
        if self._sent.get(rank) == payload:
            return None
        self._sent[rank] = payload
        return payload

    def dozing(self, doze: Callable[[list[int]], object]) -> None:
        """Do *doze*, which ends when one of the descriptors that it gets is readable; then tell the
        gateway what is new."""
        lanes = [running.lane for running in self._running.values()]
        self._sharing.dozing(
            lambda wakes: self._channel.dozing(
                lanes, self._has_news, lambda more: doze([*wakes, *more, *self._alive])
            )
        )
        self._look_around()

    def _look_around(self) -> None:
        """Tell the gateway who has ended, what was printed, and what the ranks do."""
        self._looked = now = time.monotonic()
        for sentinel, _ in self._ends.poll(0):
            self._ends.unregister(sentinel)
            self._alive.remove(sentinel)
            ended = self._crew.end_of(sentinel)
            self._tell_what_was_printed()
            self._wire.send(GATEWAY, Died(ended))
        self._tell_what_was_printed()
        if self._running and now - self._reported > _REPORT:
            self._reported = now
            self._tell_marks()
            doing = {rank: self._channel.whereabouts(rank) for rank in self._crew.ranks}
            news = tuple((r, *what) for r, what in doing.items() if self._doing.get(r) != what)
            self._doing |= doing
            if news:
                self._wire.send(GATEWAY, Standing(news))

    def trace(self, on: bool) -> None:
        """Have the workers leave marks from now on, or no longer."""
        self._channel.trace(on)
        self._marked = {rank: self._channel.marked(rank) for rank in self._crew.ranks if on}

    def _tell_marks(self) -> None:
        """Tell the gateway of the marks that the ranks have left, during a trace."""
        for rank, told in self._marked.items():
            self._marked[rank] = self._channel.marked(rank)
            if self._marked[rank] > told:
                self._wire.send(GATEWAY, Marks(rank, tuple(self._channel.marks(rank, told))))

    def hear(self, source: int, message: Shown | Ended) -> None:
        """Another host has something to show."""
        if isinstance(message, Shown):
            self._sharing.take(source, message)
        else:
            self._channel.note_answered(message.numbers)

    def _tell_what_was_printed(self) -> None:
        while self._printed:
            self._wire.send(GATEWAY, self._printed.popleft())

    def dismiss(self) -> None:
        """End the workers that have not ended; the second time it does nothing."""
        if self.over:
            return
        self.over = True
        self._crew.ended(_GRACE)
        self._crew.close()
        if self._depot is not None:
            self._depot.close()
        self._tell_what_was_printed()

    def close(self) -> None:
        """End the workers that have not ended, and give everything back."""
        self.dismiss()
        self._mirrors.close()
        self._sharing.close()
