"""The gateway's part of a map: it takes items for the workers of a host, and brings results back."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import SharedMemoryError
from ..ipc.deputy import Deputy
from ..ipc.queue import UNDONE, Packed, RemoteTaker
from ..messages import Phase
from .freight import Freight, loaded, unloaded, weight
from .orders import Halt, Offered, Recall, Returned, Undone, refusal
from .wire import Wire

_AHEAD = 10e-3  # seconds of work that a host gets beyond an item for each worker
_MOST_EACH, _MOST = 256, 1024  # … and how many items: a worker, and a host
_STALE = 25e-3  # seconds without a result, after which items that have not begun are recalled
_INERTIA = 16  # results in which a long task is forgotten


class Porter:
    """That of one host.

    It draws tickets as workers do.  As many items are on their way as there are workers, and if tasks
    are short, some more: a part of what nobody has taken, so that all workers end at the same time.
    What has not begun when the map is paused, or when others have nothing to do, is put back.

    Attributes:
        number: that of the command.
    """

    def __init__(
        self, wire: Wire, host: int, ranks: range, size: int, deputy: Deputy, queue: Sequence[int]
    ) -> None:
        """*ranks* are those of the host, of *size* in all; *queue* are the descriptors of the queue."""
        self.number = 0
        self._wire = wire
        self._host = host
        self._ranks = ranks
        self._size = size
        self._deputy = deputy
        self._taker = RemoteTaker(ranks.start, queue)
        self._reset()

    def _reset(self) -> None:
        self._halted = Halt.NOT
        self._sent: dict[int, float] = {}  # items without a result, and when they were sent
        self._latest = 0.0  # when the last results came, or items were recalled
        self._results: deque[tuple[int, Packed, tuple[int, ...]]] = deque()  # not handed over
        self._nbytes = 0  # of large results that were, and of which the leader does not know
        self._seconds = math.inf  # that a task takes, as the last ones did
        self._replies: dict[int, bytes] = {}  # which follow on the results
        self._waiting: set[int] = set()  # the ranks that have not answered
        self._problem: SharedMemoryError | None = None

    def begin(self, number: int) -> None:
        """The map, or the rest of it, begins with command *number*."""
        self._reset()
        self.number = number
        self._waiting = set(self._ranks)
        self._taker.begin(self._read)

    @property
    def _read(self) -> int:
        return self._deputy.blocks_read(self._ranks.start)

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Hand over what has come, and send what is wanted; returns whether there was something."""
        if not self._waiting:
            return False
        news = self._hand_over()
        halt = self._halt()
        taken = [] if halt else self._take()
        halt = max(halt, self._halt())  # the last item may be among them
        if not taken and not halt and self._is_stale():
            self._wire.send(self._host, Recall(self.number))
        if taken or self._nbytes or halt > self._halted:
            self._send(taken, halt)
            news = True
        return news

    def _halt(self) -> Halt:
        if self._taker.withdrawn or self._problem is not None:
            return Halt.WITHDRAW
        if not self._taker.wanted:
            return Halt.STOP
        return Halt.END if self._taker.ended else Halt.NOT

    def _take(self) -> list[tuple[int, Packed, int]]:
        """Items for the host, as many as it should get now."""
        taken: list[tuple[int, Packed, int]] = []
        now = time.perf_counter()
        while len(self._sent) < self._most() and (item := self._taker.take_now()) is not None:
            self._sent[item[0]] = now
            taken.append(item)
        return taken

    def _most(self) -> int:
        """How many items may be there now; others take some meanwhile, so that it is soon too many."""
        count = len(self._ranks)
        ahead = min(_MOST_EACH, int(_AHEAD / self._seconds + 0.5)) * count
        share = self._taker.waiting * count // (2 * self._size)
        return min(_MOST, count + min(ahead, share))

    def _is_stale(self) -> bool:
        """Whether items wait for long there, while workers of other hosts have nothing to do."""
        if len(self._sent) <= len(self._ranks):
            return False
        now = time.perf_counter()
        since = max(self._latest, next(iter(self._sent.values())))
        if now - since < _STALE:
            return False
        others = [rank for rank in range(self._size) if rank not in self._ranks]
        if all(self._deputy.phase(rank) != Phase.TAKING for rank in others):
            return False
        self._latest = now
        self._seconds = max(self._seconds, now - since)
        return True

    def _send(self, taken: Sequence[tuple[int, Packed, int]], halt: Halt) -> None:
        alone: list[Freight] = []
        bodies: list[Any] = []
        groups: dict[int, tuple[bytes, list[int], list[int]]] = {}
        for number, value, place in taken:
            if place < 0:
                freight, parts = loaded(number, value)
                alone.append(freight)
                bodies += parts
            else:
                _, numbers, places = groups.setdefault(id(value), (value[0], [], []))
                numbers.append(number)
                places.append(place)
        several = tuple((stream, tuple(n), tuple(p)) for stream, n, p in groups.values())
        items = Offered(self.number, tuple(alone), several, self._nbytes, halt)
        self._wire.send(self._host, items, bodies)
        self._halted, self._nbytes = halt, 0

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def hear(self, results: Returned, fill: Callable[[Sequence[Any]], None]) -> None:
        """Results have come."""
        values = unloaded(results.freights, fill)
        if results.number != self.number or not self._waiting:
            return
        count, workers = sum(map(len, results.items)), len(self._ranks)
        self._latest = now = time.perf_counter()
        since = self._sent.get(results.items[0][0], now)
        seconds = (now - since) * workers / max(workers, len(self._sent))
        if seconds > self._seconds or math.isinf(self._seconds):
            self._seconds = seconds
        else:
            self._seconds += (seconds - self._seconds) * min(1.0, count / _INERTIA)
        pairs = zip(values, results.items, strict=True)
        self._results.extend((number, value, items) for (number, value), items in pairs)

    def regain(self, undone: Undone) -> None:
        """Items have not begun at the host."""
        if undone.number == self.number and self._waiting:
            self._put_back([item for item in undone.items if item in self._sent])

    def _put_back(self, items: Sequence[int]) -> None:
        if items:
            self._results.append((UNDONE, (pickle.dumps(list(items)), (), False), tuple(items)))

    def _hand_over(self) -> bool:
        """Give the main process the results that it has room for."""
        given: list[int] = []
        urgent = False
        while self._results:
            number, value, items = self._results[0]
            if not self._give(number, value):
                self._deputy.wake_main()
                break
            self._results.popleft()
            self._nbytes += weight(value)
            given += items
            for item in items:
                self._sent.pop(item, None)
            urgent = urgent or number == UNDONE or len(self._sent) < len(self._ranks)
        if urgent or (given and self._deputy.expects(given)):
            self._deputy.wake_main()
        return bool(given)

    def _give(self, number: int, value: Packed) -> bool:
        if not self._taker.wanted or self._problem is not None:
            return True  # to nobody
        try:
            return self._taker.give_now(number, value, self._read)
        except SharedMemoryError as error:
            self._problem = error
            return True

    # ── replies ──────────────────────────────────────────────────────────────────────────────────

    def answered(self, replies: dict[int, bytes]) -> None:
        """Ranks have answered the command."""
        self._replies |= replies
        if self._waiting == self._replies.keys():
            last = self._taker.take_now()
            self._put_back([*self._sent, *([] if last is None else [last[0]])])

    def replies(self) -> dict[int, bytes]:
        """The replies for which it is time: none while results wait."""
        found: dict[int, bytes] = {}
        if self._replies and not self._results:
            found, self._replies = self._replies, found
            self._waiting -= found.keys()
        return found if self._problem is None else dict.fromkeys(found, refusal(self._problem))
