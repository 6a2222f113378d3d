"""The gateway's part of a session: it brings commands to the leaders, and their answers back.

In the block of the main process it stands in for the ranks of the other hosts.  Before a command it
sends each host what its ranks read and the host does not have yet; after it what they have written is
here before the main process sees that they have answered.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..errors import InternalError
from ..ipc.deputy import Deputy, Order
from ..ipc.descriptors import Descriptors, Inherited
from ..ipc.waiting import spin
from ..messages import Command, Housekeeping, Phase, Start, Work
from ..values.arrays import Array
from ..values.cache import Cache
from .cargo import Piece, packed, size_of, unpacked
from .clocks import Clocks
from .merging import HERE, Merging
from .orders import (
    Answered,
    Begin,
    Died,
    Ended,
    GiveUp,
    Interrupt,
    Looked,
    Marks,
    Missing,
    Ordered,
    Printed,
    Pushing,
    Returned,
    Shown,
    Standing,
    Tick,
    Tock,
    Traced,
    Undone,
    Wanted,
)
from .porter import Porter
from .questions import End
from .segments import Segments
from .sharing import Sharing
from .stock import Stock
from .traffic import Partial, Traffic
from .wire import Wire

_PATIENCE = 5e-3  # seconds in which this host can come before others, whose parts then need no memory
_LONG = 2.0  # seconds after which the user hears that inputs are on their way


class _Pending:
    """A command that some ranks of other hosts have not answered.

    Attributes:
        waiting: these ranks.
        replies: of ranks whose answer waits until partial results are merged.
        merging: of each target, by where it lies: the parts of the hosts.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.waiting = set(ranks)
        self.replies: dict[int, bytes] = {}
        self.merging: dict[tuple[int, int], Merging] = {}

    def take(self, replies: dict[int, bytes]) -> None:
        """These ranks have answered."""
        self.waiting -= replies.keys()
        self.replies |= replies

    def hand_over(self) -> dict[int, bytes]:
        """The replies until now."""
        replies, self.replies = self.replies, {}
        return replies


class _Route:
    """Where a command goes, which may come again.

    Attributes:
        edition: of the command.
        parts: the hosts, each with those of its ranks that are to do it.
        work: the command itself, if it is a map.
        versions: by host, those of all segments of which it has what its ranks read.
    """

    def __init__(
        self, edition: int, command: Command, parts: list[tuple[int, tuple[int, ...]]], work: Work | None
    ) -> None:
        self.edition, self.command, self.parts, self.work = edition, command, parts, work
        self.versions: dict[int, dict[int, int]] = {}


class Dispatch:
    """From ``Begin`` to the end of a session."""

    def __init__(
        self,
        wire: Wire,
        main: Connection,
        printed: Connection,
        descriptors: Descriptors,
        begin: Begin,
    ) -> None:
        self._wire = wire
        self._main = main
        self._printed = printed
        self._hosts = begin.hosts
        self._host_of = {rank: number for number, ranks in enumerate(begin.hosts) for rank in ranks}
        places = range(Inherited.count(begin.size))
        inherited = Inherited.of([descriptors.take(-1 - place) for place in places])
        remote = [rank for ranks in begin.hosts[1:] for rank in ranks]
        memory = memoryview(mmap.mmap(inherited.block, os.fstat(inherited.block).st_size))
        wakes = inherited.wakes_main, inherited.wake_workers
        self._deputy = Deputy(memory, begin.size, remote, *wakes)
        self._sharing = Sharing(wire, begin.hosts, inherited, self._deputy.answered)
        self._segments = Segments(descriptors)
        self._versions: Array = np.zeros(1, np.uint64)  # until the session has some
        self._stocks = [Stock(self._version) for _ in begin.hosts]
        self._traffic = Traffic(self._segments.array)
        self._known: Cache[bytes, Command] = Cache()
        self._routes: dict[tuple[int, ...], _Route] = {}  # the last ones, by the ranks of the order
        self._pending: dict[int, _Pending] = {}
        self._last: dict[int, bytes] = {}  # replies, by rank
        self._traced = False
        self._unknown = itertools.count(-1, -1)  # versions that were never there
        self._clocks = Clocks()
        self._descriptors = descriptors
        self._porters: dict[int, Porter] = {}  # by host, from the first map on
        self._queue: list[int] = []  # its descriptors
        self._pushes: dict[int, tuple[float, list[Any], list[Piece]]] = {}  # by host, the last one
        self._told: set[tuple[int, int]] = set()  # which segments take long to which host

    def _version(self, segment: int) -> int:
        if self._segments.file(segment) is not None:
            return next(self._unknown)
        return int(self._versions[segment % len(self._versions)])

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def called(self) -> bool:
        """Whether a command has come, perhaps for others, or ranks here show others something."""
        return self._deputy.called() or self._sharing.called()

    def step(self) -> bool:
        """Send the commands that have come to their hosts, and what maps need; returns whether there
        was something."""
        orders = list(self._deputy.orders())
        if self._deputy.traced != self._traced:
            self._traced = not self._traced
            for host in range(1, len(self._hosts)):
                self._wire.send(host, Traced(self._traced))
        for order in orders:
            self._send(order)
        news = self._sharing.step(lambda: self._deputy.busy(self._hosts[0])) or bool(orders)
        for porter in self._porters.values():
            news |= porter.step()
            if replies := porter.replies():
                self._take(porter.number, replies)
        for number, pending in tuple(self._pending.items()):
            if not pending.waiting:
                self._merge(number, pending)
        return news

    def _send(self, order: Order) -> None:
        route = self._routes.get(order.ranks)
        again = route is not None and route.edition == order.edition
        if route is None or not again:
            route = self._routes[order.ranks] = self._routed(order)
        self._pending[order.number] = _Pending(order.ranks)
        payload = None if again else order.command
        for host, ranks in route.parts:
            pieces = self._lacking(route, host, ranks)
            cargo, bodies = packed(pieces, self._segments.memory)
            ordered = Ordered(order.number, ranks, payload, order.housekeeping, cargo)
            sending = self._wire.send(host, ordered, bodies)
            if sending:
                self._pushes[host] = time.monotonic(), sending, pieces
        if route.work is not None:
            self._begin_map(order.number, [host for host, _ in route.parts], route.work)

    def _routed(self, order: Order) -> _Route:
        """The way of a command that is not the last one once more."""
        hosts = sorted({self._host_of[rank] for rank in order.ranks})
        if order.housekeeping:
            self._keep_house(pickle.loads(order.housekeeping), hosts)
        command = self._known.get(order.command)
        if command is None:
            command = self._known[order.command] = pickle.loads(order.command)
        if isinstance(command, Start):
            self._begin(command)
        parts = [(host, tuple([r for r in order.ranks if self._host_of[r] == host])) for host in hosts]
        work = self._traffic.innermost(command)
        return _Route(order.edition, command, parts, work if isinstance(work, Work) else None)

    def _begin(self, start: Start) -> None:
        self._traffic.begin(start)
        self._segments.keep(start.outbox.segment)
        if start.versions is not None:
            self._versions = self._segments.array(start.versions)

    def _lacking(self, route: _Route, host: int, ranks: tuple[int, ...]) -> list[Piece]:
        """What *host* does not have yet of what *ranks*, which are there, read."""
        versions = route.versions.get(host)
        if versions is not None and all(self._version(at) == old for at, old in versions.items()):
            return []
        read, stock = list(self._traffic.reads(route.command, ranks)), self._stocks[host]
        segments = {piece.segment for piece in read if not stock.shares(piece.segment)}
        route.versions[host] = {segment: self._version(segment) for segment in segments}
        return [lacking for piece in read for lacking in stock.lacks(piece)]

    def _begin_map(self, number: int, hosts: Sequence[int], work: Work) -> None:
        if not self._porters:
            queue = self._queue = [self._descriptors.take(number) for number in work.queue]
            size = len(self._host_of)
            for host in hosts:
                ranks = self._hosts[host]
                self._porters[host] = Porter(self._wire, host, ranks, size, self._deputy, queue)
        for host in hosts:
            self._porters[host].begin(number)

    def _keep_house(self, news: Housekeeping, hosts: Sequence[int]) -> None:
        if news.drop:
            self._routes.clear()
        for number in news.drop:
            self._segments.drop(number)
            for stock in self._stocks:
                stock.drop(number)
        for attach in news.attach:
            self._segments.attach(attach)
            file = self._segments.file(attach.segment)
            if file is not None:
                asked = [host for host in hosts if not self._stocks[host].knows(attach.segment)]
                self._look_for(Wanted(attach.segment, attach.nbytes, file), asked)

    def _look_for(self, wanted: Wanted, hosts: Sequence[int]) -> None:
        """Ask *hosts* whether they have a file: nothing has to go there then."""
        for host in hosts:
            self._wire.send(host, wanted)
        while not all(self._stocks[host].knows(wanted.segment) for host in hosts):
            self.hear(*self._wire.next())

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    def hear(self, host: int, message: object) -> None:
        """A message of a leader's has come."""
        match message:
            case Answered():
                self._answered(host, message)
            case Returned():
                self._porters[host].hear(message, lambda places: self._wire.fill(host, places))
            case Undone():
                self._porters[host].regain(message)
            case Shown():
                self._sharing.take(host, message)
            case Looked(segment, there):
                self._stocks[host].share(segment, there)
                if not there:
                    self._tell(Missing(host, segment))
            case Ended():  # of which the answers tell, too
                return
            case _:
                self._hear_of_workers(host, message)

    def _hear_of_workers(self, host: int, message: object) -> None:
        """What they do, have done, print; and what their clock says."""
        match message:
            case Standing(doing):
                for rank, phase, count in doing:
                    self._deputy.report(rank, phase, count)
            case Marks(rank, marks):
                ahead = self._clocks.ahead(host)
                self._deputy.leave_marks(rank, [(at - ahead, phase, n) for at, phase, n in marks])
            case Tock(sent, now):
                if self._clocks.heard(host, sent, now):
                    self._wire.send(host, Tick(time.perf_counter_ns()))
            case Printed():
                self._tell(message)
            case Died():
                self._main.send(message)
            case _:
                raise InternalError(f"host {host} says {message!r}.")

    def hear_late(self, message: object) -> None:
        """A message of a leader's has come that is at its end."""
        if isinstance(message, Printed):
            with contextlib.suppress(OSError):  # the main process is gone
                self._tell(message)

    def _tell(self, news: Printed | Missing | Pushing) -> None:
        """Have the main process print it."""
        self._printed.send(news)

    def _answered(self, host: int, answered: Answered) -> None:
        pending = self._pending[answered.number]
        unpacked(answered.cargo, self._segments.memory, lambda places: self._wire.fill(host, places))
        for partial in answered.partials:
            merging = self._merging(pending, partial)
            if spin(lambda: self._reduced_here(answered.number), _PATIENCE):
                merging.here()
            merging.take(host, self._wire.stream(host, merging.nbytes))
        for rank, payload in answered.replies.items():
            self._last[rank] = self._last[rank] if payload is None else payload
        replies = {rank: self._last[rank] for rank in answered.replies}
        porter = self._porters.get(host)
        if porter is not None and porter.number == answered.number:
            porter.answered(replies)
        else:
            self._take(answered.number, replies)

    def _merging(self, pending: _Pending, partial: Partial) -> Merging:
        """Where the parts of all hosts are merged."""
        place = partial.target.segment, partial.target.offset
        if place not in pending.merging:
            hosts = {self._host_of[rank] for rank in partial.owners}
            order = sorted(hosts, key=lambda host: self._hosts[host].start)
            target = self._segments.array(partial.target)
            pending.merging[place] = Merging(partial, target, order)
        return pending.merging[place]

    def _reduced_here(self, number: int) -> bool:
        """Whether all ranks of this host have answered command *number*."""
        local = [rank for rank in self._deputy.lane(number) if self._host_of[rank] == HERE]
        return all(self._deputy.answered(rank) == number for rank in local)

    def _take(self, number: int, replies: dict[int, bytes]) -> None:
        """Ranks have answered command *number*, and what they have written is here."""
        pending = self._pending[number]
        pending.take(replies)
        for rank in replies:
            self._deputy.report(rank, Phase.WAITING, 0)
        if not pending.merging:
            self._deputy.answer(number, pending.hand_over())
            if not pending.waiting:
                del self._pending[number]

    def _merge(self, number: int, pending: _Pending) -> None:
        """The parts of all other hosts are here; if this one has its own, too, answer."""
        if not self._reduced_here(number):
            return
        for merging in pending.merging.values():
            merging.here()
        self._deputy.answer(number, pending.hand_over())
        del self._pending[number]

    # ── the main process ─────────────────────────────────────────────────────────────────────────

    def heed(self) -> bool:
        """Do what the main process says; returns whether the session goes on."""
        said = self._main.recv()
        if isinstance(said, Interrupt):
            self.step()  # what is to be interrupted has been sent before
            given_up: dict[tuple[int, int], list[int]] = {}
            for rank in filter(self._deputy.unwanted, said.ranks):  # it may have a new command by now
                key = self._host_of[rank], self._deputy.number(rank)
                given_up.setdefault(key, []).append(rank)
            for (host, number), ranks in given_up.items():
                self._wire.send(host, GiveUp(number, tuple(ranks)))
        return not isinstance(said, End)

    def tick(self, hosts: Sequence[int]) -> None:
        """Look at the clocks of other *hosts*, and at what takes long to get there."""
        for host in hosts:
            self._wire.send(host, Tick(time.perf_counter_ns()))
        for host, (since, sending, pieces) in tuple(self._pushes.items()):
            if not any(sending):
                del self._pushes[host]
            elif time.monotonic() - since > _LONG:
                del self._pushes[host]
                largest = max(pieces, key=size_of).segment
                if (host, largest) not in self._told:
                    self._told.add((host, largest))
                    self._tell(Pushing(host, largest, sum(map(size_of, pieces))))

    def dozing(self, doze: Callable[[list[int]], object]) -> None:
        """Do *doze*, which ends when one of the descriptors that it gets is readable: the main process
        has something to say."""
        main = self._main.fileno()
        self._sharing.dozing(lambda wakes: self._deputy.dozing(lambda more: doze([main, *wakes, *more])))

    def close(self) -> None:
        """Give the descriptors back."""
        self._deputy.close()
        self._sharing.close()
        for fd in self._queue:
            os.close(fd)
