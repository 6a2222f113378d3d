"""The leader's part of a map: a queue for the workers of its host, which the gateway fills."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import SharedMemoryError
from ..ipc.channel import Controller
from ..ipc.queue import CAPACITY, GROUP, SEVERAL, Dispatcher, Packed, Stored
from ..messages import Phase
from .freight import Freight, loaded, unloaded, weight
from .orders import Halt, Offered, Returned, Undone
from .wire import GATEWAY, Wire

_AHEAD = 1 << 26  # bytes of large results that may be on their way, beside the last ones
_FEW = 64  # items a worker; where there are fewer, each result is given back at once


class Depot:
    """That of one host.

    Attributes:
        descriptors: what the workers need for their end.
        problem: what went wrong in this command.
    """

    def __init__(self, wire: Wire, ranks: range, size: int, channel: Controller) -> None:
        """*ranks* are those of the host, of *size* in all.  Raises: OSError."""
        self._wire = wire
        self._ranks = ranks
        self._channel = channel
        self._lane = channel.lane(tuple(ranks))
        self._queue = Dispatcher(size)
        self.descriptors = self._queue.descriptors
        self._number = 0
        self._reset()

    def _reset(self) -> None:
        self.problem: SharedMemoryError | None = None
        self._coming: deque[tuple[int, Packed]] = deque()  # items for which there is no slot yet
        self._waiting: dict[int, Stored] = {}  # items in the queue without a result
        self._slots = [-1] * CAPACITY  # the numbers of the items that were put there
        self._halt = Halt.NOT
        self._unread = 0  # bytes of large results that have not been handed over

    def close(self) -> None:
        """Give the descriptors back."""
        self._queue.close()

    def begin(self, number: int) -> None:
        """Command *number* will follow."""
        self._reset()
        self._number = number
        self._queue.open(None)
        self._channel.expect(enough=0)

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def accept(self, items: Offered, fill: Callable[[Sequence[Any]], None]) -> None:
        """Items have come, or the word that there will be no more."""
        alone = unloaded(items.alone, fill)
        if items.number != self._number:
            return
        self._unread -= items.read
        self._coming += alone
        for stream, numbers, places in items.groups:
            group = pickle.loads(stream)
            pairs = zip(numbers, places, strict=True)
            self._coming += [(n, (pickle.dumps(group[place], 5), (), False)) for n, place in pairs]
        if items.halt is Halt.STOP:
            self.stop()
        else:
            self._halt = items.halt
            self._put()

    def recall(self, number: int) -> None:
        """Give back what nobody has begun."""
        if number != self._number:
            return
        undone = [each for each, _ in self._coming] + self._queue.take_back()
        self._coming.clear()
        for each in undone:
            self._waiting.pop(each, None)
        self._wire.send(GATEWAY, Undone(number, tuple(undone)))

    def stop(self) -> None:
        """No other task begins, as nobody wants its result."""
        self._coming.clear()
        self._queue.stop()

    def _withdraw(self) -> None:
        """No other task begins; but each worker begins one: what came for it counts as taken."""
        for rank in self._lane.unanswered():
            if self._channel.whereabouts(rank)[0] not in (Phase.TASK, Phase.TAKING):
                return
        self._halt = Halt.NOT
        self._coming.clear()
        self._queue.withdraw()
        self._channel.wake_sleepers()

    def _put(self) -> None:
        """Put items into the queue, as many as there are slots for; or end it."""
        queue, waiting = self._queue, self._waiting
        before = len(waiting)
        try:
            while self._coming and len(waiting) < queue.most and not self._is_slot_in_use():
                number, value = self._coming.popleft()
                waiting[number] = stored = queue.stored(value)
                self._slots[queue.slot] = number
                queue.put(number, stored)
                if not queue.slot % GROUP:
                    queue.publish()  # before there are more items than tickets
        except SharedMemoryError as error:
            self.problem = error
            self._halt = Halt.WITHDRAW
        if len(waiting) > before:
            few = len(waiting) < _FEW * len(self._ranks)
            self._channel.expect(enough=0 if few else None)
            queue.publish()
            for number in queue.taken():
                self._slots[queue.slot] = number
                queue.put(number, waiting[number])
                queue.publish()
            self._channel.wake_sleepers()
        if self._halt is Halt.WITHDRAW:
            self._withdraw()
        elif self._halt is Halt.END and not self._coming:
            self._halt = Halt.NOT
            queue.end()
            self._channel.wake_sleepers()

    def _is_slot_in_use(self) -> bool:
        """Whether the item in the next slot may not have been read yet."""
        number = self._slots[self._queue.slot]
        return number in self._waiting and all(
            self._channel.whereabouts(rank) != (Phase.TASK, number) for rank in self._ranks
        )

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Send the results that have come, unless too many are on their way; returns whether there
        were some."""
        news = self._unread <= _AHEAD and self._send()
        if self._halt or (news and self._coming):
            self._put()
        return news

    def flush(self) -> None:
        """Send all results that have come."""
        while self._send():
            pass

    def _send(self) -> bool:
        found = self._queue.collect()
        if not found:
            return False
        freights: list[Freight] = []
        items: list[tuple[int, ...]] = []
        bodies: list[Any] = []
        for number, rank, value in found:
            if rank >= 0:
                self._channel.read_block(rank)
            freight, parts = loaded(number, value)
            freights.append(freight)
            bodies += parts
            items.append(tuple(pickle.loads(value[0])[0]) if number == SEVERAL else (number,))
            self._unread += weight(value)
            for item in items[-1]:
                self._waiting.pop(item, None)
        self._wire.send(GATEWAY, Returned(self._number, tuple(freights), tuple(items)), bodies)
        return True
