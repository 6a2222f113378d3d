"""The process of MPI's beside the main process, which stays outside of MPI.

In a session it brings commands to the leaders, and their answers back.  In the block of the main process
it stands in for the ranks of the other hosts.  Before a command it sends each host what its ranks read
and the host does not have yet; after it what they have written is here before the main process sees that
they have answered.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import pickle
import select
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InternalError
from ..ipc.descriptors import Descriptors, Inherited
from ..ipc.process import ProcessEnd
from ..ipc.proxy import Order, Proxy
from ..ipc.waiting import Condition, Nap, spin
from ..memory.files import Likeness, likeness
from ..memory.mapping import map_file
from ..memory.segment import SegmentTable
from ..messages import Attach, Command, Housekeeping, Phase, Start, Work
from ..plan.call import Access
from ..plan.extents import Partial, View
from ..values.arrays import Array
from ..values.cache import Unpickled
from . import protocol
from .merging import HERE, Merging
from .mirror import CurrentBytes
from .parcels import Load, Piece, pack, size_of, unpack
from .pool import hello
from .relay import WireRelay
from .seals import LostError
from .tasks import RemoteTasks
from .wire import BEAT, Wire, library

_PATIENCE = 5e-3  # seconds in which this host can come before others, whose parts then need no memory
_LONG = 2.0  # seconds after which the user hears that inputs are on their way
_ROUNDS = 30  # messages there and back whose times are compared
_BULK = 1 << 24  # bytes by which the bandwidth is measured
_KEPT = 20  # looks that are compared: the quickest tells best, and clocks drift


class _Pending(NamedTuple):
    """A command that some ranks of other hosts have not answered.

    Attributes:
        waiting: these ranks.
        replies: of ranks whose answer waits until partial results are merged.
        merging: of each target, by where it lies: the parts of the hosts.
    """

    waiting: set[int]
    replies: dict[int, bytes]
    merging: dict[tuple[int, int], Merging]


class _Route(NamedTuple):
    """Where a command goes, which may come again.

    Attributes:
        edition: of the command.
        parts: the hosts, each with those of its ranks that are to do it.
        work: the command itself, if it is a map.
        versions: by host, those of all segments of which it has what its ranks read.
    """

    edition: int
    command: Command
    parts: list[tuple[int, tuple[int, ...]]]
    work: Work | None
    versions: dict[int, dict[int, int]]


class MainProcess(NamedTuple):
    """The main process, as the gateway hears it.

    Attributes:
        asks: where it asks, and is answered.
        printed: where it hears what workers print.
        descriptors: those of its memory, as it sends them.
    """

    asks: Connection
    printed: Connection
    descriptors: Descriptors


class GatewaySession:
    """The gateway's part of a session, from ``Begin`` to its end."""

    def __init__(self, wire: Wire, main: MainProcess, begin: protocol.Begin) -> None:
        self._wire = wire
        self._main, self._printed, self._descriptors = main
        self._hosts = begin.hosts
        self._host_of = {rank: number for number, ranks in enumerate(begin.hosts) for rank in ranks}
        size = len(self._host_of)
        taken = [main.descriptors.take(-1 - place) for place in range(Inherited.count(size))]
        inherited = Inherited.of(taken)
        remote = [rank for ranks in begin.hosts[1:] for rank in ranks]
        memory = memoryview(mmap.mmap(inherited.block, os.fstat(inherited.block).st_size))
        self._proxy = Proxy(memory, size, remote, inherited)
        self._relay = WireRelay(wire, begin.hosts, inherited, self._proxy.answered)
        self._segments = SegmentTable(self._mapped, main.descriptors.release)
        self._files: dict[int, Likeness] = {}  # of segments that are files of the user's
        self._versions: Array = np.zeros(1, np.uint64)  # until the session has some
        self._current = [CurrentBytes(self._version) for _ in begin.hosts]
        self._view = View(self._segments.array, begin.trusted)
        self._known = Unpickled[Command]()
        self._routes: dict[tuple[int, ...], _Route] = {}  # the last ones, by the ranks of the order
        self._pending: dict[int, _Pending] = {}
        self._last: dict[int, bytes] = {}  # replies, by rank
        self._traced = False
        self._unknown = itertools.count(-1, -1)  # versions that were never there
        # by host, how its clock was looked at: how long it took, and how many ns it was ahead
        self._looks: defaultdict[int, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._tasks: dict[int, RemoteTasks] = {}  # by host, from the first map on
        self._queue: list[int] = []  # its descriptors
        # by host, the last one: when it began, whether it goes on, and what it carries
        self._pushes: dict[int, tuple[float, Condition, list[Piece]]] = {}
        self._told: set[tuple[int, int]] = set()  # which segments take long to which host

    def _mapped(self, number: int, attach: Attach) -> NDArray[np.uint8]:
        """The memory of a segment of the main process's."""
        access = Access.WRITE if attach.access is Access.WRITE else Access.READ
        return map_file(self._descriptors.descriptor(number), attach.nbytes, access)

    def _version(self, segment: int) -> int:
        if segment in self._files:
            return next(self._unknown)
        return int(self._versions[segment % len(self._versions)])

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def called(self) -> bool:
        """Whether a command has come, perhaps for others, or ranks here show others something."""
        return self._proxy.called() or self._relay.called()

    def step(self) -> bool:
        """Send the commands that have come to their hosts, and what maps need; returns whether there
        was something."""
        commands = list(self._proxy.hear())
        if self._proxy.traced != self._traced:
            self._traced = not self._traced
            self._wire.tell_all(protocol.Traced(self._traced))
        for order in commands:
            self._send(order)
        news = self._relay.step(lambda: self._proxy.busy(self._hosts[0])) or bool(commands)
        for tasks in self._tasks.values():
            news |= tasks.step()
            if replies := tasks.replies():
                self._take(tasks.number, replies)
        for number, pending in tuple(self._pending.items()):
            if not pending.waiting and self._reduced_here(number):
                for merging in pending.merging.values():
                    merging.here()
                self._answer(number, pending)
        return news

    def _send(self, order: Order) -> None:
        route = self._routes.get(order.ranks)
        again = route is not None and route.edition == order.edition
        if route is None or not again:
            route = self._routes[order.ranks] = self._routed(order)
        self._pending[order.number] = _Pending(set(order.ranks), {}, {})
        payload = None if again else order.command
        for host, ranks in route.parts:
            pieces = self._lacking(route, host, ranks)
            parcel, loads = pack(pieces, self._segments.memory)
            ordered = protocol.Ordered(order.number, ranks, payload, order.housekeeping, parcel)
            sending = self._wire.send(host, ordered, *loads)
            if sending is not None:
                self._pushes[host] = time.monotonic(), sending, pieces
        if route.work is not None:
            self._begin_map(order.number, [host for host, _ in route.parts], route.work)

    def _routed(self, order: Order) -> _Route:
        """The way of a command that is not the last one once more."""
        hosts = sorted({self._host_of[rank] for rank in order.ranks})
        if order.housekeeping:
            self._keep_house(pickle.loads(order.housekeeping), hosts)
        command = self._known[order.command]
        if isinstance(command, Start):
            self._view.begin(command.outbox, command.versions if command.gpus else None)
            self._segments.keep(command.outbox.segment)
            if command.versions is not None:
                self._versions = self._segments.array(command.versions)
        parts = [(host, tuple([r for r in order.ranks if self._host_of[r] == host])) for host in hosts]
        work = command.inner(self._view)
        return _Route(order.edition, command, parts, work if isinstance(work, Work) else None, {})

    def _lacking(self, route: _Route, host: int, ranks: tuple[int, ...]) -> list[Piece]:
        """What *host* does not have yet of what *ranks*, which are there, read."""
        versions = route.versions.get(host)
        if versions is not None and all(self._version(at) == old for at, old in versions.items()):
            return []
        read, current = self._view.reads(route.command, ranks), self._current[host]
        segments = {piece.segment for piece in read if not current.shares(piece.segment)}
        route.versions[host] = {segment: self._version(segment) for segment in segments}
        return [lacking for piece in read for lacking in current.lacks(piece)]

    def _begin_map(self, number: int, hosts: Sequence[int], work: Work) -> None:
        if not self._tasks:
            queue = self._queue = [self._descriptors.take(number) for number in work.queue]
            for host in hosts:
                self._tasks[host] = RemoteTasks(self._wire, host, self._hosts[host], self._proxy, queue)
        for host in hosts:
            self._tasks[host].begin(number)

    def _keep_house(self, news: Housekeeping, hosts: Sequence[int]) -> None:
        if news.drop:
            self._routes.clear()
        for number in news.drop:
            if self._segments.drop(number):
                self._files.pop(number, None)
            for current in self._current:
                current.drop(number)
        for attach in news.attach:
            if self._segments.attach(attach.segment, attach) and attach.file:
                self._files[attach.segment] = likeness(self._descriptors.descriptor(attach.segment))
            file = self._files.get(attach.segment)
            if file is not None:
                asked = [host for host in hosts if not self._current[host].knows(attach.segment)]
                for host in asked:  # if it has the file, nothing has to go there
                    self._wire.send(host, protocol.Wanted(attach.segment, attach.nbytes, file))
                while not all(self._current[host].knows(attach.segment) for host in asked):
                    self.hear(*self._wire.next())

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    def hear(self, host: int, message: object) -> None:
        """A message of a leader's has come."""
        match message:
            case protocol.Answered():
                self._answered(host, message)
            case protocol.Returned():
                self._tasks[host].hear(message, partial(self._wire.fill, host))
            case protocol.Undone():
                self._tasks[host].regain(message)
            case protocol.Shown():
                self._relay.take(host, message)
            case protocol.Looked(segment, there):
                self._current[host].share(segment, there)
                if not there:
                    self._printed.send(protocol.Missing(host, segment))
            case protocol.Ended() | protocol.Over():  # answers tell of the one, ``Begun`` of the other
                return
            case _:
                self._hear_of_workers(host, message)

    def _hear_of_workers(self, host: int, message: object) -> None:
        """Hear from a host what its workers do, have done, print; or what its clock says."""
        match message:
            case protocol.Standing(doing):
                for rank, phase, count in doing:
                    self._proxy.report(rank, phase, count)
            case protocol.Marks(rank, marks):
                _, ahead = min(self._looks[host], default=(0, 0))  # right to half of what that took
                self._proxy.mark(rank, [(at - ahead, phase, n) for at, phase, n in marks])
            case protocol.Tock(sent, now):
                took = time.perf_counter_ns() - sent
                self._looks[host].append((took, now - sent - took // 2))
                if len(self._looks[host]) < _KEPT:
                    self._wire.send(host, protocol.Tick(time.perf_counter_ns()))
            case protocol.Printed(_, stream):
                self._printed.send(message)
                if stream == "log":
                    self._proxy.note_logged()
            case ProcessEnd():
                self._main.send(message)
            case _:
                raise InternalError(f"host {host} says {message!r}.")

    def hear_late(self, message: object) -> None:
        """A message of a leader's has come that is at its end."""
        if isinstance(message, protocol.Printed):
            with suppress(OSError):  # the main process is gone
                self._printed.send(message)

    def _answered(self, host: int, answered: protocol.Answered) -> None:
        pending = self._pending[answered.number]
        unpack(answered.parcel, self._segments.memory, partial(self._wire.fill, host))
        for part in answered.partials:
            merging = self._merging(pending, part)
            if spin(lambda: self._reduced_here(answered.number), _PATIENCE):
                merging.here()
            merging.take(host, self._wire.stream(host, merging.nbytes, sealed=not part.bare))
        self._last |= {rank: new for rank, new in answered.replies.items() if new is not None}
        replies = {rank: self._last[rank] for rank in answered.replies}
        tasks = self._tasks.get(host)
        if tasks is not None and tasks.number == answered.number:
            tasks.answered(replies)
        else:
            self._take(answered.number, replies)

    def _merging(self, pending: _Pending, part: Partial) -> Merging:
        """Where the parts of all hosts are merged."""
        place = part.target.segment, part.target.offset
        if place not in pending.merging:
            hosts = {self._host_of[rank] for rank in part.owners}
            order = sorted(hosts, key=lambda host: self._hosts[host].start)
            pending.merging[place] = Merging(part, self._segments.array(part.target), order)
        return pending.merging[place]

    def _reduced_here(self, number: int) -> bool:
        """Whether all ranks of this host have answered command *number*."""
        local = [rank for rank in self._proxy.lane(number) if self._host_of[rank] == HERE]
        return all(self._proxy.answered(rank) == number for rank in local)

    def _take(self, number: int, replies: dict[int, bytes]) -> None:
        """Ranks have answered command *number*, and what they have written is here."""
        pending = self._pending[number]
        pending.waiting.difference_update(replies)
        pending.replies.update(replies)
        for rank in replies:
            self._proxy.report(rank, Phase.WAITING, 0)
        if not pending.merging:
            self._answer(number, pending)

    def _answer(self, number: int, pending: _Pending) -> None:
        """Hand the replies that there are to the main process."""
        self._proxy.answer(number, pending.replies)
        pending.replies.clear()
        if not pending.waiting:
            del self._pending[number]

    # ── the main process ─────────────────────────────────────────────────────────────────────────

    def heed(self) -> bool:
        """Do what the main process says; returns whether the session goes on."""
        said = self._main.recv()
        if isinstance(said, protocol.Interrupt):
            self.step()  # what is to be interrupted has been sent before
            for rank in filter(self._proxy.unwanted, said.ranks):  # it may have a new command by now
                give_up = protocol.GiveUp(self._proxy.number(rank), rank)
                self._wire.send(self._host_of[rank], give_up)
        elif isinstance(said, protocol.UserAnswer):
            self._wire.send(self._host_of[said.rank], said)
        return not isinstance(said, protocol.End)

    def tick(self, hosts: Sequence[int]) -> None:
        """Look at the clocks of other *hosts*, and at what takes long to get there."""
        for host in hosts:
            self._wire.send(host, protocol.Tick(time.perf_counter_ns()))
        for host, (since, sending, pieces) in tuple(self._pushes.items()):
            if not sending():
                del self._pushes[host]
            elif time.monotonic() - since > _LONG:
                del self._pushes[host]
                largest = max(pieces, key=size_of).segment
                if (host, largest) not in self._told:
                    self._told.add((host, largest))
                    self._printed.send(protocol.Pushing(host, largest, sum(map(size_of, pieces))))

    def sleeping(self, nap: Nap) -> None:
        """Do *nap*, which ends when one of the descriptors that it gets is readable: the main process
        has something to say."""
        main = self._main.fileno()
        self._relay.sleeping(lambda wakes: self._proxy.sleeping(lambda more: nap([main, *wakes, *more])))

    def close(self) -> None:
        """Give the descriptors back."""
        self._proxy.close()
        self._relay.close()
        for fd in self._queue:
            os.close(fd)


class Gateway:
    """Stands between the main process and the leaders."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._leaders = range(1, wire.count)

    def serve(self, main: MainProcess) -> None:
        """Do what the main process asks, until it has no more questions, or is gone.

        Raises: LostError if a host is lost: the main process knows, and has hung up.
        """
        with closing(main.descriptors), main.printed, main.asks, suppress(EOFError, ConnectionError):
            while not isinstance(question := self._heard(main.asks), protocol.Begin | protocol.End):
                main.asks.send(self._answer(question))
            if isinstance(question, protocol.Begin):
                self._work(question, main)
        gc.collect()  # the main process's memory, which is mapped here

    def _heard(self, main: Connection) -> Any:
        """What the main process says next."""
        while not main.poll(BEAT):
            self.beat()
        return main.recv()

    def beat(self) -> None:
        """Let the leaders hear of this process, a second after the last time at the earliest."""
        self._wire.beat()

    def end(self) -> None:
        """End the leaders."""
        self._wire.tell_all(protocol.Leave())
        self._wire.leave()

    # ── a session ────────────────────────────────────────────────────────────────────────────────

    def _work(self, begin: protocol.Begin, main: MainProcess) -> None:
        """Serve a session until its end, or until a host is lost: then all is up to the main process."""
        try:
            with closing(GatewaySession(self._wire, main, begin)) as session:
                self._wire.tell_all(begin)
                with suppress(EOFError, ConnectionError):
                    self._pass_on(begin, main.asks, session)
                self._wire.tell_all(protocol.End())
                self._wire.part(session.hear_late)
        except LostError as error:
            with suppress(EOFError, OSError):
                main.asks.send(error)
                main.asks.recv()
            raise

    def _pass_on(self, begin: protocol.Begin, main: Connection, session: GatewaySession) -> None:
        def step() -> bool:
            return session.step() or bool(asked.poll(0))

        begun: dict[int, protocol.Begun] = {}
        asked = select.poll()  # which takes less than main.poll()
        asked.register(main.fileno(), select.POLLIN)
        if not self._leaders:
            main.send([])
        self._wire.live(begin.host_timeout)
        while True:
            while (message := self._wire.receive()) is not None:
                source, said = message
                if isinstance(said, protocol.Begun):
                    begun[source] = said
                    session.tick([source])
                    if len(begun) == len(self._leaders):
                        main.send([begun[leader] for leader in self._leaders])
                else:
                    session.hear(source, said)
            if asked.poll(0) and not session.heed():
                return
            if self._wire.rest(session.called, step, session.sleeping):
                session.tick(list(begun))

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    def _answer(self, question: Any) -> Any:
        match question:
            case protocol.Hail():
                return [hello(question, library()), *self._asked_all(question)]
            case protocol.AskGpus():
                return self._asked_all(question)
            case protocol.Distances(path):
                return [self._distance(leader, path) for leader in self._leaders]
            case protocol.Reach(leader):
                self._wire.send(leader, question)
                return self._wire.next()[1]

    def _asked_all(self, question: Any) -> list[Any]:
        """What each leader answers to a *question*."""
        self._wire.tell_all(question)
        said = dict(self._wire.next() for _ in self._leaders)
        return [said[leader] for leader in self._leaders]

    def _distance(self, leader: int, path: str) -> protocol.Distance:
        """What lies between here and a host."""
        looks = [self._look(leader, protocol.Echo(0)) for _ in range(_ROUNDS)]
        latency = statistics.median(took for took, _, _ in looks) / 2
        _, ahead, _ = min(looks)  # the quickest answer tells the time best
        took, _, _ = min(self._look(leader, protocol.Echo(_BULK)) for _ in range(3))
        _, _, sees = self._look(leader, protocol.Echo(0, path))
        return protocol.Distance(latency, 2 * _BULK / took, ahead, sees)

    def _look(self, leader: int, echo: protocol.Echo) -> tuple[float, float, bool]:
        """How long an echo takes, how far the clock there is ahead, and whether it sees a file."""
        there, back = np.zeros(echo.nbytes, np.uint8), np.empty(echo.nbytes, np.uint8)
        start, before = time.perf_counter(), time.time()
        self._wire.send(leader, echo, Load([there], sealed=False))
        _, (then, sees) = self._wire.next()
        self._wire.fill(leader, [back], sealed=False)
        took = time.perf_counter() - start
        return took, then - (before + took / 2), sees
