"""Items, read as they are needed, pickled, and put into the queue."""

from __future__ import annotations

import itertools
import pickle
import reprlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...errors import InvalidType, InvalidValue, SessionError
from ...ipc.queue import CAPACITY, GROUP, Dispatcher, Packed, Stored
from ...messages import Phase
from ...packing.pickles import OUT_OF_BAND, SIMPLE, are_small, is_too_deep, simply_pickled
from ..engine.engine import Engine

_AT_FIRST = 4  # items a worker that are read ahead
_MOST = 512  # … and at most, if they come from the program's code, or may be withdrawn for its calls
_SHORT = 5e-3  # seconds; if half of the items were taken sooner, more are read ahead
_BYTES = 1 << 26  # of items and results together that wait, beyond two items a worker
_LONG_ENOUGH = 2e-4  # seconds of reading items, after which results are looked for
_LONG = 100  # characters of an item in a sentence


Arguments = tuple[Any, ...]


class Feed:
    """The items of one map, from its iterables to the workers.

    Attributes:
        exhausted: whether there are no more.
        error: what ended them, if they ended by an error.
        waiting: the items without a result, by number: arguments, bytes, and as what the item is stored,
            which keeps it there; None in a group.
    """

    def __init__(
        self,
        name: str,
        items: Iterator[Arguments],
        instant: bool,
        at_once: bool,
        queue: Dispatcher,
        dump: Callable[[Any, int], tuple[bytes, Any]],
        engine: Engine,
    ) -> None:
        """*name* is the function's.  If *instant*, nobody waits for *items*; *at_once*: the program
        waits for all results.  *dump* pickles what pickle itself does not take."""
        self.exhausted = False
        self.error: Exception | None = None
        self.waiting: dict[int, tuple[Arguments, int, Stored | None]] = {}
        self._name = name
        self._items = items
        self._instant = self._in_groups = instant
        self._queue = queue
        self._engine = engine
        self._channel = engine.channel
        self._dump = dump
        self._size = size = engine.size
        self._most = queue.most if at_once else min(_MOST, queue.most)
        self._ahead = min(_AT_FIRST * size, self._most)
        self._read = 0  # how many items were read
        self._taken = -1  # the highest number of what was taken, as far as is known
        self._nbytes = 0  # of waiting items
        self._results = 0.0  # bytes of a result, as the last ones had
        self._fed = 0.0  # when items were offered last
        self._open = False  # whether the workers take items
        self._wanted: weakref.ref[object] | None = None
        self._back: list[int] = []  # the numbers of items that were withdrawn, or read when it was not
        self._again: list[int] = []  # … that were taken and have not begun, and go back into the queue
        self._slots: list[int] = [-1] * CAPACITY  # the numbers of the items that were published there

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def done(self, number: int, nbytes: int) -> bool:
        """Item *number* has a result of so many bytes; whether it is waited for."""
        found = self.waiting.pop(number, None)
        if found is None:
            return False
        self._taken = max(self._taken, number)
        self._nbytes -= found[1]
        self._results = max(nbytes, self._results + (nbytes - self._results) / 16)
        return True

    def all_done(self, numbers: Sequence[int]) -> bool:
        """These items have small results; whether they are waited for."""
        waiting = self.waiting
        try:
            self._nbytes -= sum([waiting.pop(number)[1] for number in numbers])
        except KeyError:  # of none of them
            return False
        self._taken = max(self._taken, numbers[-1])
        return True

    @property
    def count(self) -> int:
        """How many items have a result."""
        return self._read - len(self.waiting)

    @property
    def is_done(self) -> bool:
        """Whether all items were read, and have results."""
        return self.exhausted and not self.waiting

    @property
    def is_lost(self) -> bool:
        """Whether no result will come for items that wait for one, when all ranks have answered."""
        return len(self._back) < len(self.waiting)

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for results any more."""
        return self._wanted is not None and self._wanted() is None

    def drop(self) -> None:
        """Nobody waits for results any more."""
        self.waiting.clear()
        self._back, self._again = [], []
        self.exhausted, self.error = True, None

    def want(self, reader: object) -> None:
        """Results are wanted as long as there is *reader*; without it, no other task begins."""
        self._wanted = weakref.ref(reader)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    @property
    def is_over(self) -> bool:
        """Whether nothing will be put into the queue any more."""
        return self.is_done if self._engine.has_hosts else self.exhausted

    def threshold(self, held: int) -> int | None:
        """The number from which on results mean that items should be read; None if there are none."""
        if self.exhausted:
            return None
        if self._is_full(held) or self._is_slot_in_use():
            return 0
        return max(0, self._read - 1 - self._ahead // 2)

    def put_again(self, numbers: Sequence[int]) -> None:
        """These items were taken, and have not begun."""
        self._again += [number for number in numbers if number in self.waiting]
        if self._open:
            self._put_those_again()
        else:
            self._back, self._again = [*self._again, *self._back], []

    def _put_those_again(self) -> None:
        while self._again and not self._is_slot_in_use():
            self._put_stored(self._again.pop(0))
        self._publish()

    def due(self, held: int) -> bool:
        """Whether to read items now, where results of *held* bytes wait for the program."""
        if self._again and self._open:
            self._put_those_again()
        if self.exhausted or self._is_full(held):
            return False
        for rank in range(self._size):
            phase, number = self._channel.whereabouts(rank)
            if phase == Phase.TASK and number > self._taken:
                self._taken = number
        if self._queued > self._ahead // 2:
            return False
        return not self._is_slot_in_use()

    @property
    def _queued(self) -> int:
        """How many items wait for a worker, at most."""
        return self._read - 1 - self._taken

    def _is_full(self, held: int) -> bool:
        count = len(self.waiting)
        full = self._nbytes + held + count * self._results > _BYTES
        return full and (held > _BYTES or count >= 2 * self._size)

    def fill(self, held: int, enough: Callable[[], bool]) -> None:
        """Read items and publish them, until as many wait as should, or *enough* says so."""
        now = time.perf_counter()
        if now - self._fed < _SHORT and self.count >= self._ahead // 2:  # so that their size is known
            self._ahead = min(2 * self._ahead, self._most)
        budget = _BYTES - held - self._nbytes - len(self.waiting) * self._results
        try:
            left = self._ahead - self._queued
            while left > 0 and not self._is_slot_in_use():
                if budget < 0 and self._is_full(held):
                    break
                if self._in_groups and left >= GROUP and not self._queue.slot % GROUP and self._open:
                    count = self._offer_group()
                    left -= count
                    budget -= count * self._results
                else:
                    args = self._next()
                    left -= 1
                    budget -= self._offer(args, self._packed(args)) + self._results
                if time.perf_counter() - now > _LONG_ENOUGH:
                    if enough():
                        break
                    now = time.perf_counter()
        except StopIteration:
            self.exhausted = True
        except SessionError:  # the program has ended the session, or this is a fork of it
            raise
        except Exception as error:
            self.exhausted, self.error = True, error
        if self._open:
            self._publish()
        self._fed = time.perf_counter()

    def _next(self) -> Arguments:
        """The next item.  While the program's code makes it, other threads may use the session.

        Raises: StopIteration if there are no more, or nobody wants them any more; SessionError.
        """
        if self._instant:
            return next(self._items)
        args = self._engine.turns.released(self._items.__next__)
        self._engine.turns.land()
        self._engine.require_ready()
        if self.exhausted:  # the program has closed the iterator of results meanwhile
            raise StopIteration
        return args

    def _is_slot_in_use(self) -> bool:
        """Whether the item in the next slot may not have been read yet."""
        slot, waiting = self._queue.slot, self.waiting
        stop = slot + 1 if slot % GROUP else slot + GROUP
        unread = [number for number in self._slots[slot:stop] if number in waiting]
        for rank in range(self._size if unread else 0):
            phase, number = self._channel.whereabouts(rank)
            if phase == Phase.TASK and number in unread:
                unread.remove(number)
        return bool(unread)

    def _offer(self, args: Arguments, item: Packed) -> int:
        """Publish the next item, as soon as the workers take items; returns its bytes."""
        stream, buffers, _ = item
        stored = self._queue.stored(item)
        nbytes = len(stream) + sum(map(len, buffers)) if buffers else len(stream)
        number = self._read
        self.waiting[number] = args, nbytes, stored
        self._read = number + 1
        self._nbytes += nbytes
        if self._open:
            self._put(number, stored)
            if not self._instant or not number % GROUP:
                self._publish()
        else:
            self._back.append(number)
        return nbytes

    def _offer_group(self) -> int:
        """Publish the next items with one pickle, if they are small; returns how many.

        Raises: StopIteration if there are no more.
        """
        some = list(itertools.islice(self._items, GROUP))
        if not some:
            raise StopIteration
        number, slot = self._read, self._queue.slot
        small = are_small(list(itertools.chain.from_iterable(some)))
        if not (small and self._queue.put_group(number, len(some), pickle.dumps(some, 5))):
            self._items, self._in_groups = itertools.chain(some, self._items), False
            return 0
        numbers = range(number, number + len(some))
        for each, args in zip(numbers, some, strict=True):
            self.waiting[each] = args, 0, None
        self._slots[slot : slot + len(some)] = numbers
        self._read = numbers.stop
        self._publish()
        return len(some)

    def _put(self, number: int, stored: Stored) -> None:
        self._slots[self._queue.slot] = number
        self._queue.put(number, stored)

    def _publish(self) -> None:
        self._queue.publish()
        self._channel.wake_sleepers()

    # ── pauses ───────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """The workers begin to take items: first those that wait for it."""
        self._queue.open(None if self._wanted is None else self._wanted())
        self._slots = [-1] * CAPACITY
        for number in self._back:
            self._put_stored(number)
        self._queue.publish()
        self._back, self._open = [], True

    def _put_stored(self, number: int) -> None:
        """Put an item by itself into a slot, wherever it was before."""
        args, nbytes, stored = self.waiting[number]
        if stored is None:
            stored = self._queue.stored(self._packed(args))
            self.waiting[number] = args, nbytes, stored
        self._put(number, stored)

    def close(self) -> None:
        """The workers take no more items, as all were read."""
        self._open = False
        self._queue.end()
        self._channel.wake_sleepers()

    def withdraw(self) -> None:
        """The workers take no more items: those that nobody has taken are withdrawn."""
        if self._open:
            self._queue.publish()  # what lies in slots and was not
        self._open = False
        self._back = [*self._again, *self._queue.withdraw(), *self._back]
        self._again = []
        self._channel.wake_sleepers()

    def _packed(self, args: Arguments) -> Packed:
        for each in args:
            if type(each) not in SIMPLE:
                break
        else:
            return pickle.dumps(args, 5), (), False
        if (simply := simply_pickled(args)) is not None:
            return *simply, False
        try:
            return *self._dump(args, OUT_OF_BAND), True
        except Exception as error:
            if is_too_deep(error):
                raise InvalidValue(
                    f"item {self._read} of map() is nested too deeply to be pickled."
                ) from None
            raise InvalidType(
                f"item {self._read} of map(), {shown(args)}, for the function {self._name!r}, cannot "
                f"be pickled: {type(error).__name__}: {str(error).rstrip('.')}. Give what it is made "
                f"of, or make it in the function."
            ) from None


def shown(args: Arguments) -> str:
    """An item in a sentence."""
    try:
        long = any(isinstance(each, list | tuple | dict | set) and len(each) > _LONG for each in args)
        text = (reprlib.repr if long else repr)(args[0] if len(args) == 1 else args)
    except Exception:  # it is the user's
        return "of the type " + type(args[0]).__name__
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"
