"""Items, read as they are needed, pickled, and put into the queue."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import InvalidType, InvalidValue
from ...ipc.queue import Dispatcher, Packed
from ...packing.pickles import OUT_OF_BAND, is_simple, kept_apart
from ...values.arrays import shortened

_AT_FIRST = 4  # items a worker that are read ahead
_SHORT = 5e-3  # seconds; if half of the items were taken sooner, more are read ahead
_BYTES = 1 << 26  # of items and results together that wait, beyond two items a worker
_LINGER = 2e-4  # seconds that an item may wait for others before it is offered
_TOGETHER = 1 << 20  # bytes of items that are offered together

Arguments = tuple[Any, ...]


class Feed:
    """The items of one map, from its iterables to the workers.

    Attributes:
        read: how many items were read.
        exhausted: whether there are no more.
        error: what ended them, if they ended by an error.
        waiting: the items without a result, by number: arguments, bytes, and the memory they lie in.
    """

    def __init__(
        self,
        name: str,
        items: Iterator[Arguments],
        queue: Dispatcher,
        size: int,
        dump: Callable[[Any, int], tuple[bytes, Any]],
    ) -> None:
        """*name* is the function's; *dump* pickles what pickle itself does not take."""
        self.read = 0
        self.exhausted = False
        self.error: Exception | None = None
        self.waiting: dict[int, tuple[Arguments, int, Any]] = {}
        self._name = name
        self._items = items
        self._queue = queue
        self._dump = dump
        self._few = 2 * size
        self._ahead = min(_AT_FIRST * size, queue.capacity)
        self._taken = -1  # the highest number with a result: those before it were taken
        self._nbytes = 0  # of waiting items
        self._results = 0.0  # bytes of a result, on the average
        self._fed = 0.0  # when items were offered last
        self._back: list[bytes] = []  # records that are not in the queue: they were withdrawn, say
        self._paused = True  # whether records go there

    def done(self, number: int, nbytes: int) -> bool:
        """Item *number* has a result of so many bytes; whether it is waited for."""
        found = self.waiting.pop(number, None)
        if found is None:
            return False
        self._taken = max(self._taken, number)
        self._nbytes -= found[1]
        self._results += (nbytes - self._results) / 16
        return True

    def drop(self) -> None:
        """Nobody waits for results any more."""
        self.waiting.clear()
        self.exhausted = True

    def threshold(self, held: int) -> int | None:
        """The number from which on results mean that items should be read; None if there are none."""
        if self.exhausted:
            return None
        return 0 if self._is_full(held) else max(0, self.read - 1 - self._ahead // 2)

    def due(self, held: int) -> bool:
        """Whether to read items now, where results of *held* bytes wait for the program."""
        return not self.exhausted and self._queued <= self._ahead // 2 and not self._is_full(held)

    @property
    def _queued(self) -> int:
        """How many items wait for a worker, at most."""
        return self.read - 1 - self._taken

    def _is_full(self, held: int) -> bool:
        count = len(self.waiting)
        return count >= self._few and self._nbytes + held + count * self._results > _BYTES

    def fill(self, held: int, enough: Callable[[], bool]) -> None:
        """Read items and offer them, until as many wait as should, or *enough* says so."""
        now = time.perf_counter()
        if now - self._fed < _SHORT:
            self._ahead = min(2 * self._ahead, self._queue.capacity)
        batch: list[tuple[Arguments, Packed]] = []
        nbytes = 0
        for _ in range(self._ahead - self._queued):
            try:
                args = next(self._items)
                packed = self._packed(args, self.read + len(batch))
            except StopIteration:
                self.exhausted = True
                break
            except Exception as error:
                self.exhausted, self.error = True, error
                break
            batch.append((args, packed))
            nbytes += len(packed[0]) + sum(map(len, packed[1]))
            if nbytes > _TOGETHER or time.perf_counter() - now > _LINGER:
                self._offer(batch, nbytes)
                batch, nbytes = [], 0
                if self._is_full(held) or enough():
                    break
                now = time.perf_counter()
        self._offer(batch, nbytes)
        self._fed = time.perf_counter()

    def _offer(self, batch: list[tuple[Arguments, Packed]], nbytes: int) -> None:
        if not batch:
            return
        block, records = self._queue.store(self.read, [packed for _, packed in batch])
        share = nbytes // len(batch)
        for number, (args, _) in enumerate(batch, self.read):
            self.waiting[number] = args, share, block
        self.read += len(batch)
        self._nbytes += share * len(batch)
        if self._paused:
            self._back += records
        else:
            self._queue.put(records)

    def _packed(self, args: Arguments, number: int) -> Packed:
        if is_simple(args):
            buffers: list[Any] = []
            return pickle.dumps(args, 5, buffer_callback=kept_apart(buffers)), buffers, False
        try:
            return *self._dump(args, OUT_OF_BAND), True
        except RecursionError:
            raise InvalidValue(f"item {number} of map() is nested too deeply to be pickled.") from None
        except Exception as error:
            raise InvalidType(
                f"item {number} of map(), {shown(args)}, which is to go to the function {self._name!r}, "
                f"cannot be pickled: {type(error).__name__}: {error}. Give what it is made of, or make "
                f"it in the function."
            ) from None

    def withdraw(self) -> None:
        """Take the items back that no worker has taken, and offer no more."""
        self._paused = True
        self._back = [*self._queue.withdraw(), *self._back]

    def offer_again(self) -> None:
        """Offer the items that were not offered, or were taken back, and go on offering."""
        self._paused = False
        self._queue.put(self._back)
        self._back = []


def shown(args: Arguments) -> str:
    """An item in a sentence."""
    return shortened(args[0] if len(args) == 1 else args)
