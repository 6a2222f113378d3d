"""Maps over several hosts: the gateway takes items for the workers of a host, whose leader has a queue
for these.

::

    main process's queue ─▶ RemoteTasks (gateway) ── Offered ──▶ LocalTasks (leader) ─▶ queue ─▶ workers
             results     ◀──                      ◀─ Returned ──                    ◀──
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ..errors import SharedMemoryError
from ..ipc.channel import Controller
from ..ipc.proxy import Proxy
from ..ipc.queue import EACH, Dispatcher, Pickles, Taker, Ticket
from ..messages import Phase
from .parcels import Fill, Load, ValueParcel, pack_values, unpack_values
from .protocol import Halt, Offered, Recall, Returned, Undone, refusal
from .wire import GATEWAY, Wire

_SECONDS = 10e-3  # of work that a host gets beyond an item for each worker
_MOST_EACH, _MOST = 256, 1024  # … and how many items: a worker, and a host
_STALE = 25e-3  # seconds without a result, after which items that have not begun are recalled
_INERTIA = 16  # results in which a long task is forgotten
_AHEAD = 1 << 26  # bytes of large results that may be on their way, beside the last ones


class _Sent(NamedTuple):
    """An item at a host: the slot of its batch and its place there, and when it was sent."""

    slot: int
    place: int
    at: float


class RemoteTasks:
    """The gateway's part of a map on one host.

    It draws tickets as workers do, while fewer items are on their way than there are workers, or some
    more if tasks are short.  What has not begun when the map is paused is put back.

    Attributes:
        number: the number of the command.
    """

    def __init__(self, wire: Wire, host: int, ranks: range, proxy: Proxy, queue: Sequence[int]) -> None:
        """*ranks* are those of the host; *queue* are the descriptors of the queue."""
        self._wire = wire
        self._host = host
        self._ranks = ranks
        self._others = [rank for rank in range(len(proxy.lines)) if rank not in ranks]
        self._proxy = proxy
        self._taker = Taker(ranks.start, queue, partial(proxy.blocks_read, ranks.start))

    def begin(self, number: int) -> None:
        """The map, or the rest of it, begins with command *number*."""
        self.number = number
        self._halted = Halt.NOT
        self._sent: dict[int, _Sent] = {}  # items without a result, by number
        self._latest = 0.0  # when the last results came, or items were recalled
        self._results: deque[tuple[ValueParcel, Pickles]] = deque()  # not handed over
        self._record: bytes | None = None  # that of the first of them
        self._nbytes = 0  # of results that were, and of which the leader does not know
        self._seconds = math.inf  # that a task takes, as the last ones did
        self._replies: dict[int, bytes] = {}  # which follow on the results
        self._waiting = set(self._ranks)  # those that have not answered
        self._problem: SharedMemoryError | None = None
        self._taker.begin()

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Hand over what has come, and send what is wanted; returns whether there was something."""
        if not self._waiting:
            return False
        news = self._hand_over()
        halt = self._halt()
        if not halt and self._is_stale():
            self._wire.send(self._host, Recall(self.number))
        batches, bodies = ([], []) if halt else self._take()
        if batches or self._nbytes or halt > self._halted:
            offered = Offered(self.number, tuple(batches), self._nbytes, halt)
            self._wire.send(self._host, offered, Load(bodies))
            self._halted, self._nbytes = halt, 0
            news = True
        return news

    def _halt(self) -> Halt:
        if self._taker.withdrawn or self._problem is not None:
            return Halt.WITHDRAW
        if not self._taker.wanted:
            return Halt.STOP
        return Halt.END if self._taker.ended else Halt.NOT

    def _take(self) -> tuple[list[ValueParcel], list[Any]]:
        """Items for the host, as many as it should get now, and their bodies."""
        batches: list[ValueParcel] = []
        bodies: list[Any] = []
        while (most := self._most() - len(self._sent)) > 0:
            taken = self._taker.take_now(most)
            if taken is None:
                break
            (slot, start, stop), batch, left = taken
            if left:
                self._proxy.wake_sleepers()
            now = time.perf_counter()
            for place in range(start, stop):
                self._sent[batch.first + place] = _Sent(slot, place, now)
            pickles, at = batch.pickles, start
            if pickles.kind == EACH:  # else its items go together
                pickles, at = pickles._replace(parts=pickles.parts[start:stop]), 0
            batches.append(pack_values(bodies, slot, batch.first + start, stop - start, pickles, at))
        return batches, bodies

    def _most(self) -> int:
        """How many items may be at the host now."""
        count = len(self._ranks)
        ahead = min(_MOST_EACH, int(_SECONDS / self._seconds + 0.5)) * count
        return min(_MOST, count + ahead)

    def _is_stale(self) -> bool:
        """Whether items wait for long at the host, while workers of others have nothing to do."""
        if len(self._sent) <= len(self._ranks):
            return False
        now = time.perf_counter()
        since = max(self._latest, next(iter(self._sent.values())).at)
        idle = any(self._proxy.whereabouts(rank)[0] == Phase.TAKING for rank in self._others)
        if now - since < _STALE or not idle:
            return False
        self._latest = now
        self._seconds = max(self._seconds, now - since)
        return True

    def regain(self, undone: Undone) -> None:
        """Items have not begun at the host."""
        if undone.number != self.number or not self._waiting:
            return
        back: dict[int, _Sent] = {}
        for first, length in undone.items:
            back |= {item: self._sent.pop(item) for item in range(first, first + length)}
        self._put_back(back)
        self._proxy.wake_sleepers()

    def _put_back(self, items: dict[int, _Sent]) -> None:
        """Put *items*, by number, back into the queue: in as few tickets as there can be."""
        tickets: list[Ticket] = []
        for _, (slot, place, _) in sorted(items.items()):
            if tickets and (tickets[-1].slot, tickets[-1].stop) == (slot, place):
                tickets[-1] = tickets[-1]._replace(stop=place + 1)
            else:
                tickets.append(Ticket(slot, place, place + 1))
        for ticket in tickets:
            self._taker.put_back(ticket)

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def hear(self, results: Returned, fill: Fill) -> None:
        """Results have come."""
        found = unpack_values(results.values, fill)
        if results.number != self.number or not self._waiting:
            return
        self._results.extend(found)
        count, workers = sum(batch.length for batch, _ in found), len(self._ranks)
        self._latest = now = time.perf_counter()
        oldest = self._sent.get(found[0][0].first)
        since = now if oldest is None else oldest.at
        seconds = (now - since) * workers / max(workers, len(self._sent))
        if seconds > self._seconds or math.isinf(self._seconds):
            self._seconds = seconds
        else:
            self._seconds += (seconds - self._seconds) * min(1.0, count / _INERTIA)

    def _hand_over(self) -> bool:
        """Give the main process the results that it has room for."""
        urgent = news = False
        while self._results:
            batch, pickles = self._results[0]
            if not self._give(batch, pickles):
                self._proxy.wake_main()
                break
            self._results.popleft()
            self._nbytes += pickles.nbytes
            for item in range(batch.first, batch.first + batch.length):
                self._sent.pop(item, None)
            idle = len(self._sent) < len(self._ranks)
            urgent |= idle or self._proxy.is_expected(batch.first, batch.length)
            news = True
        if urgent:
            self._proxy.wake_main()
        return news

    def _give(self, batch: ValueParcel, results: Pickles) -> bool:
        if not self._taker.wanted or self._problem is not None:
            return True  # to nobody
        try:
            if self._record is None:
                self._record = self._taker.record(*batch[:3], results)
        except SharedMemoryError as error:
            self._problem = error
            return True
        if self._record is None or not self._taker.write(self._record):
            return False
        self._record = None
        return True

    # ── replies ──────────────────────────────────────────────────────────────────────────────────

    def answered(self, replies: dict[int, bytes]) -> None:
        """Ranks have answered the command."""
        self._replies |= replies

    def replies(self) -> dict[int, bytes]:
        """The replies for which it is time: none while results wait."""
        if not self._replies or self._results:
            return {}
        found, self._replies = self._replies, {}
        self._waiting -= found.keys()
        if not self._waiting:
            self._put_back(self._sent)
        return found if self._problem is None else dict.fromkeys(found, refusal(self._problem))


class _Held(NamedTuple):
    """A batch in the leader's queue, which *stored* keeps there.

    *there* is its slot in the main process's queue, *first* the number of its first item; *left* of
    those here have no result.
    """

    there: int
    first: int
    left: int
    stored: Any


class LocalTasks:
    """The leader's queue of tasks, for the workers of its host.

    Attributes:
        descriptors: what the workers need for their end.
        problem: what went wrong in the running command.
    """

    def __init__(self, wire: Wire, size: int, channel: Controller) -> None:
        """*size* is the number of all ranks.  Raises: OSError."""
        self._wire = wire
        self._channel = channel
        self._queue = Dispatcher(size)
        self.descriptors: Final = self._queue.descriptors

    def begin(self, number: int) -> None:
        """Command *number* will follow."""
        self._number = number
        self.problem: SharedMemoryError | None = None
        # items for which there is no slot yet
        self._coming: deque[tuple[ValueParcel, Pickles]] = deque()
        self._batches: dict[int, _Held] = {}  # by slot
        self._unread = 0  # bytes of results that have not been handed over
        self._queue.open(None)
        self._channel.expect(enough=0)

    def close(self) -> None:
        """Give the descriptors back."""
        self._queue.close()

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def accept(self, items: Offered, fill: Fill) -> None:
        """Items have come, or the word that there will be no more."""
        found = unpack_values(items.values, fill)
        if items.number != self._number:
            return
        self._unread -= items.read
        self._coming += found
        if items.halt is Halt.STOP:
            self.stop()
        elif items.halt is Halt.WITHDRAW:
            self._coming.clear()
            self._queue.withdraw()
        elif items.halt is Halt.END:
            self._queue.end()
        self._put()

    def recall(self, number: int) -> None:
        """Give back what nobody has begun."""
        if number != self._number:
            return
        undone = [(batch.first, batch.length) for batch, _ in self._coming]
        self._coming.clear()
        for slot, start, stop in self._queue.take_back():
            undone.append((self._batches[slot].first + start, stop - start))
            self._settle(slot, stop - start)
        self._wire.send(GATEWAY, Undone(number, tuple(undone)))

    def _settle(self, slot: int, count: int) -> None:
        """Note that *count* items of the batch in *slot* have results, or went back."""
        left = self._batches[slot].left - count
        self._batches[slot] = self._batches[slot]._replace(left=left)
        if not left:
            del self._batches[slot]
            self._queue.free(slot)

    def stop(self) -> None:
        """No other task begins, as nobody wants its result."""
        self._coming.clear()
        self._queue.stop()

    def _put(self) -> None:
        """Put items into the queue, as many as there are slots for."""
        queue = self._queue
        try:
            while self._coming and queue.has_room:
                batch, pickles = self._coming.popleft()
                stored = queue.stored(pickles)
                first, place = batch.first - batch.place, batch.place
                slot = queue.put(first, stored)
                self._batches[slot] = _Held(batch.slot, first, batch.length, stored)
                queue.issue([Ticket(slot, place, place + batch.length)])
        except SharedMemoryError as error:
            self.problem = error
            self._coming.clear()
            queue.withdraw()
        self._channel.wake_sleepers()

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Send the results that have come, unless too many are on their way; returns whether there
        were some."""
        return self._unread <= _AHEAD and self._send()

    def flush(self) -> None:
        """Send all results that have come."""
        while self._send():
            pass

    def _send(self) -> bool:
        found = self._queue.collect()
        if not found:
            return False
        batches: list[ValueParcel] = []
        bodies: list[Any] = []
        for slot, first, length, rank, pickles in found:
            if rank >= 0:
                self._channel.read_block(rank)
            batches.append(pack_values(bodies, self._batches[slot].there, first, length, pickles))
            self._unread += pickles.nbytes
            self._settle(slot, length)
        self._wire.send(GATEWAY, Returned(self._number, tuple(batches)), Load(bodies))
        self._put()
        return True
