"""Items, read as they are needed, pickled in batches, and put into the queue.

They may come while a map goes on, such as an executor's tasks.
"""

from __future__ import annotations

import abc
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Protocol

from ...errors import CallTimeout, InvalidType, SessionError, WorkerDied, how_to_await, line_of, reason
from ...ipc.queue import ALONE, EACH, MOST, TOGETHER, Dispatcher, Pickles, Stored, Ticket
from ...packing import fingerprint
from ...packing.pickles import OUT_OF_BAND, check_cause
from ...storage.checkpoint import Checkpoint
from ..engine.engine import Engine


class ItemPickler(Protocol):
    """What pickles items: as ``Values`` does."""

    def pickled(self, value: Any) -> tuple[bytes, list[memoryview], bool]: ...

    def together(self, columns: list[list[Any]]) -> tuple[bytes, int, bool] | None: ...

    def introduce(self, classes: set[type]) -> None: ...

    def settle(self) -> None: ...


class Item:
    """An item of a source; its ``repr`` is what errors call it."""

    __slots__ = ()

    def remember(self, error: BaseException) -> None:
        """Keep with an *error* how to do the item once more, of which it was."""


class ItemSource(Iterator[Item]):
    """Items that come while the map goes on: the iterator ends where there is none, and goes on later.

    It pickles its items, too.
    """

    @property
    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether there is an item, or there will be none any more."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether there will be no item any more."""

    @abc.abstractmethod
    def pickler(self, least: int) -> ItemPickler:
        """What pickles the items; buffers of *least* bytes are kept apart."""


_AT_FIRST = 4  # items a worker that are read ahead
_MOST = 512  # … and at most, if they come from the program's code, or may be withdrawn for its calls
_ALL = 1 << 14  # … and at most, if they are there, and all results are waited for
_SHORT = 5e-3  # seconds; if half of the items were done sooner, more are read ahead
_IN_ORDER = 16  # items of a batch, if results are wanted in order: the next one may be the last of it
_OVER_HOSTS = 1 << 8  # … and with several hosts: a part of a batch comes with the rest of it
_BYTES = 1 << 26  # of items and results together that wait, beyond two items a worker
_FOUND = 1 << 6  # results of a checkpoint that are taken together
_BATCH = 1 << 17  # bytes of items from which on a batch gets no more
_LONG_ENOUGH = 2e-4  # seconds of reading items, after which they are published, and results looked for
_LONG = 100  # characters of an item in a sentence


Arguments = tuple[Any, ...]


class _Columns(Sequence[Arguments]):
    """Items of which each argument is in a list of its own."""

    def __init__(self, columns: list[list[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, place: Any) -> Any:
        return tuple(column[place] for column in self.columns)

    def part(self, start: int, stop: int | None = None) -> _Columns:
        """The items from place *start* to place *stop*."""
        return _Columns([column[start:stop] for column in self.columns])

    def __iter__(self) -> Iterator[Arguments]:
        return zip(*self.columns, strict=True)


class _Batch:
    """Items that were put into the queue together.

    Attributes:
        first: the number of the first one.
        items: their arguments.
        slot: where they are in the queue; None if they wait for a slot.
        stored: what is in the queue, which keeps it there.
        nbytes: of the items without a result.
        left: how many these are.
    """

    __slots__ = ("_there", "first", "items", "left", "nbytes", "slot", "stored")

    def __init__(self, first: int, items: Sequence[Arguments], stored: Stored, nbytes: int) -> None:
        self.first, self.items, self.stored = first, items, stored
        self.slot: int | None = None
        self.nbytes, self.left = nbytes, len(items)
        self._there: list[range] = []  # the numbers of items with results

    def put(self, slot: int | None) -> None:
        """Note the *slot* that has the batch now."""
        self.slot = slot

    def done(self, first: int, count: int) -> int:
        """Note that *count* items from number *first* on have results; returns how many bytes no longer
        wait."""
        nbytes = self.nbytes * count // self.left
        self.nbytes -= nbytes
        self.left -= count
        self._there.append(range(first, first + count))
        return nbytes

    def pending(self) -> list[int]:
        """The numbers of the items without a result."""
        return sorted(set(range(self.first, self.first + len(self.items))).difference(*self._there))

    def parts(self, numbers: Sequence[int]) -> Iterator[tuple[_Batch, int, int]]:
        """The items of these *numbers*, which ascend, as parts from one place to another."""
        for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            places = [number - self.first for _, number in run]
            yield self, places[0], places[-1] + 1


@dataclass(eq=False, repr=False)
class Feed:
    """The items of one map, from its iterables to the workers.

    *name* is the function's.  *iterators* have the items, of which there are *length* at most, if that
    is known.  If *instant*, nobody waits for them; *at_once*: the program waits for all results.  A
    batch has at most so many items *together*.  *values* gives what pickles what pickle itself does not
    take.  Items whose results are in the *checkpoint* do not go to the workers.  They may come from a
    *source*, which is the iterator then.

    Attributes:
        count: how many items have a result.
        exhausted: whether there are no more.
        error: what ended them, if they ended by an error.
    """

    _name: str
    _iterators: Sequence[Iterator[Any]]
    length: InitVar[int | None]
    _instant: bool
    at_once: InitVar[bool]
    together: InitVar[int | None]
    _queue: Dispatcher
    _values: Callable[[int], ItemPickler]
    _engine: Engine
    _checkpoint: Checkpoint | None
    _source: ItemSource | None = None

    def __post_init__(self, length: int | None, at_once: bool, together: int | None) -> None:
        self.count: int = 0
        self.exhausted: bool = False
        self.error: Exception | None = None
        self._found: list[tuple[int, Any, int]] = []  # results of the checkpoint
        self._items: Iterator[Arguments] = zip(*self._iterators, strict=False)
        if self._checkpoint is not None:
            self._instant = False  # each is looked at as it is read
            self._digest = fingerprint.values()
            self._items = itertools.starmap(self._noted, enumerate(self._items))
        self._rest = _Columns([[] for _ in self._iterators])  # of those that were read, and come before
        self._size = size = self._engine.size
        there = self._instant and at_once
        # items of a source can be cancelled until they are read: no more of them than are needed
        self._most = _ALL if there else 2 * size if self._source else _MOST
        self._ahead = self._most if there or self._source else _AT_FIRST * size
        most = _OVER_HOSTS if self._engine.has_hosts else MOST
        self._together = min(together or most, most if at_once else _IN_ORDER)
        self._read = 0  # how many items were read
        self._taken = 0  # how many items the program's code has made
        self._length = length or 0  # how many there are, if that is known
        self._share = self._together if length is None else max(1, length // (2 * size))
        self._batches: dict[int, _Batch] = {}  # by their slots, those with items that wait for a result
        self._nbytes = 0  # of waiting items
        self._each = 0.0  # bytes of an item, as the last ones had
        self._results = 0.0  # bytes of a result, as the last ones had
        self._fed = 0.0  # when items were offered last
        self._open = False  # whether the workers take items
        self._pickler: ItemPickler | None = None  # of the last batch
        self._wanted: weakref.ref[object] | None = None
        self._back: list[tuple[_Batch, int, int]] = []  # what waits for a slot, or for the next time

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def awaits(self, slot: int) -> bool:
        """Whether somebody waits for the results of the batch in *slot*."""
        return slot in self._batches

    def done(self, slot: int, first: int, count: int, nbytes: int) -> None:
        """*count* items of the batch in *slot*, from number *first* on, have results, of so many
        bytes."""
        batch = self._batches[slot]
        self._nbytes -= batch.done(first, count)
        self.count += count
        each = nbytes / count
        self._results = max(each, self._results + (each - self._results) / 16)
        if not batch.left:
            del self._batches[slot]
            self._queue.free(slot)

    def again(self, slot: int, number: int) -> None:
        """Let a worker do an item of the batch in *slot* once more."""
        if (batch := self._batches.get(slot)) is not None:
            self._back.append((batch, number - batch.first, number - batch.first + 1))

    def take_back(self, first: int, ticket: Ticket, running: int | None) -> bool:
        """Let others have what a dead worker held of the batch that begins with number *first*, but for
        the item that was *running*; returns whether that was among it."""
        batch = self._batches.get(ticket.slot)
        if batch is None or batch.first != first:
            return False
        numbers = [n for n in batch.pending() if ticket.start <= n - first < ticket.stop]
        self._back += batch.parts([number for number in numbers if number != running])
        return running in numbers

    def recover(self) -> None:
        """Nobody holds anything: let workers have all items that have no result."""
        for batch in self._batches.values():
            there = set[int]().union(*[range(*part) for of, *part in self._back if of is batch])
            self._back += batch.parts([n for n in batch.pending() if n - batch.first not in there])
        self._back.sort(key=lambda part: part[0].first + part[1])

    def pending(self) -> list[int]:
        """The numbers of items without a result: of all if it is known how many there are, else of those
        that were read."""
        batches = {id(each): each for each in (*self._batches.values(), *(b for b, _, _ in self._back))}
        found = [number for batch in batches.values() for number in batch.pending()]
        is_over = self.exhausted and self.error is None
        unread = range(self._read, 0 if is_over else max(self._length, self._taken))
        return [*sorted(found), *unread]

    @property
    def waiting(self) -> int:
        """How many items wait for a result."""
        return self._read - self.count

    @property
    def is_done(self) -> bool:
        """Whether all items were read, and have results."""
        return self.exhausted and not self.waiting

    @property
    def is_lost(self) -> bool:
        """Whether no result will come for items that wait for one, when all ranks have answered."""
        return sum(stop - start for _, start, stop in self._back) < self.waiting

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for results any more."""
        return self._wanted is not None and self._wanted() is None

    def drop(self) -> None:
        """Nobody waits for results any more."""
        self._batches = {}
        self.end_before(0)

    def end_before(self, number: int) -> None:
        """Nobody waits for results of item *number* and those after it any more.

        A generator of items is closed if nobody else has it.
        """
        self._back = [
            (batch, start, min(stop, number - batch.first))
            for batch, start, stop in self._back
            if batch.first + start < number
        ]
        self._read = self.count + sum(stop - start for _, start, stop in self._back)
        self.exhausted, self.error = True, None
        self._iterators, self._rest = (), _Columns([[]])
        self._items = zip()

    def want(self, reader: object) -> None:
        """Results are wanted as long as there is *reader*; without it, no other task begins."""
        self._wanted = weakref.ref(reader, self._leave)

    def _leave(self, _: object) -> None:
        self._iterators, self._items = (), zip()  # so that a generator is closed

    def item(self, number: int) -> Arguments | None:
        """An item that waits for a result."""
        for batch in (*self._batches.values(), *(batch for batch, _, _ in self._back)):
            if 0 <= number - batch.first < len(batch.items):
                return batch.items[number - batch.first]
        return None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def threshold(self, held: int) -> int | None:
        """The number from which on results mean that items should be read; None if there are none."""
        if self.exhausted:
            return None
        if self._is_full(held) or not self._queue.has_room:
            return 0
        return max(0, self._read - 1 - self._ahead // 2)

    def due(self, held: int) -> bool:
        """Whether to read items now, where results of *held* bytes wait for the program."""
        if self._open and self._back:
            self._put_in()
        enough = self._ahead // 2 if self._source is None else self._ahead - 1
        if self.exhausted or self.waiting > enough or self._is_full(held):
            return False
        return self._queue.has_room and (self._source is None or self._source.is_ready)

    def _is_full(self, held: int) -> bool:
        full = self._nbytes + held + self.waiting * self._results > _BYTES
        return full and (held > _BYTES or self.waiting >= 2 * self._size)

    def read(self, held: int, enough: Callable[[], bool]) -> None:
        """Read items and publish them, until as many wait as should, or *enough* says so; where no
        worker takes items, one batch."""
        now = time.perf_counter()
        if now - self._fed < _SHORT and self.count >= self._ahead // 2:  # so that their size is known
            self._ahead = min(2 * self._ahead, self._most)
        try:
            while (left := self._ahead - self.waiting) > 0 and self._queue.has_room:
                if self._is_full(held):
                    break
                count = min(left, self._together, self._share, int(_BATCH / (1 + self._each)))
                if self._find_some():
                    if not self._open or enough():
                        break
                    continue
                known = self._read >= self._size  # how many bytes an item has
                self._offer(self._several(max(1, count) if known else 1), held)
                if not self._open:
                    break
                if time.perf_counter() - now > _LONG_ENOUGH:
                    if enough():
                        break
                    now = time.perf_counter()
        except StopIteration:
            self.exhausted = self._source is None or self._source.is_over
        except SessionError:  # the program has ended the session, or this is a fork of it
            raise
        except Exception as error:
            self.exhausted, self.error = True, error
        self._fed = time.perf_counter()

    def take_found(self) -> list[tuple[int, Any, int]]:
        """The results that the checkpoint has, each with the number of its item, and its bytes; once."""
        found, self._found = self._found, []
        return found

    def _noted(self, number: int, args: Arguments) -> Arguments:
        assert self._checkpoint is not None
        self._length = max(self._length, number + 1)
        try:
            digest = self._digest(args)
        except Exception as error:
            raise InvalidType(
                f"item {number} of map(), {shown(args)}, cannot be known again by a checkpoint, as "
                f"pickle does not take it: {reason(error)}."
            ) from error
        self._checkpoint.note(number, digest)
        return args

    def _find_some(self) -> bool:
        """Take the results of the next items that the checkpoint has; whether it has some.

        Raises: StopIteration, as there are no more items.
        """
        checkpoint, count, nbytes = self._checkpoint, 0, 0
        while checkpoint is not None and checkpoint.has(self._read) and count < _FOUND:
            self._next()
            value, size = checkpoint.result(self._read)
            self._found.append((self._read, value, size))
            self._read += 1
            self.count += 1
            count, nbytes = count + 1, nbytes + size
            if nbytes > _BATCH:
                break
        return count > 0

    def _several(self, count: int) -> Iterable[Arguments]:
        """The next items: at most so many, and as many as are there soon.

        Raises: StopIteration, and all else that the first of them raises.
        """
        if self._checkpoint is not None:
            numbers = range(self._read, self._read + count)
            count = next((n - self._read for n in numbers if self._checkpoint.has(n)), count)
        if not self._instant:
            return itertools.chain([self._next()], self._more(count - 1))
        if self._rest:
            some, self._rest = self._rest.part(0, count), self._rest.part(count)
            return some
        columns = [list(itertools.islice(each, count)) for each in self._iterators]
        count = min(map(len, columns), default=0)
        if not count:
            raise StopIteration
        found = _Columns(columns)
        return found.part(0, count) if len(columns) > 1 else found

    def _more(self, count: int) -> Iterator[Arguments]:
        """Items that the program's code makes: each is pickled before the next one is asked for, as they
        may be one object."""
        until = time.perf_counter() + _LONG_ENOUGH
        try:
            while count > 0 and time.perf_counter() < until:
                yield self._next()
                count -= 1
        except SessionError:
            raise
        except Exception as error:
            self._items = zip(_ended_by(error), strict=False)

    def _next(self) -> Arguments:
        """The next item.  While the program's code makes it, other threads may use the session.

        Raises: StopIteration if there are no more, or nobody wants them any more; SessionError.
        """
        args = self._engine.turns.released(self._items.__next__)
        self._taken += 1
        self._engine.wait_until_ready()
        if self.exhausted:  # the program has closed the iterator of results meanwhile
            raise StopIteration
        return args

    def _offer(self, items: Iterable[Arguments], held: int) -> None:
        """Publish items, in as few batches as they can be pickled in; those for which there is no room
        are read again."""
        values = self._pickler or self._values(OUT_OF_BAND)  # by what the workers have now
        self._pickler = None  # it keeps what it has seen
        if isinstance(items, _Columns) and (found := values.together(items.columns)):
            self._pickler = values
            stream, count, by_us = found
            rest = items.part(count)
            some = items.part(0, count) if rest else items
            self._publish(some, Pickles(TOGETHER, [stream], by_us), values)
            self._read_again(rest)
            return
        pending: list[Arguments] = []
        parts: list[Any] = []
        nbytes, by_us, left = 0, False, iter(items)
        for args in left:
            try:
                stream, buffers, ours = values.pickled(args)
            except (CallTimeout, SessionError, WorkerDied):  # as classes are sent
                raise
            except Exception as error:
                self._publish(pending, Pickles(EACH, parts, by_us), values)
                raise _refused(self._read, args, self._name, error) from None
            if buffers or ours != by_us or nbytes > _BATCH:
                self._publish(pending, Pickles(EACH, parts, by_us), values)
                pending, parts, nbytes, by_us = [], [], 0, ours
            if not buffers:
                pending.append(args)
                parts.append(stream)
                nbytes += len(stream)
                continue
            self._publish([args], Pickles(ALONE, [stream, *buffers], ours), values)
            if self._is_full(held):
                if isinstance(items, _Columns) and (unread := [*left]):
                    self._read_again(_Columns([*map(list, zip(*unread, strict=True))]))
                return
        self._publish(pending, Pickles(EACH, parts, by_us), values)

    def _read_again(self, items: _Columns) -> None:
        """Items that were read come before all others."""
        pairs = zip(items.columns, self._rest.columns, strict=True)
        self._rest = _Columns([new + old for new, old in pairs]) if self._rest else items

    def _publish(self, items: Sequence[Arguments], pickles: Pickles, values: ItemPickler) -> None:
        """Put a batch, pickled by *values* or by pickle, into the queue, as soon as the workers take
        items."""
        if not items or self.exhausted:  # nobody wants them any more, as the program has closed it
            return
        if pickles.by_us:
            values.settle()  # which may pause the map, and see a task that has failed
        if self.exhausted:
            return
        batch = _Batch(self._read, items, self._queue.stored(pickles), pickles.nbytes)
        self._read += len(items)
        self._nbytes += batch.nbytes
        self._each += (pickles.nbytes / len(items) - self._each) / 2
        self._back.append((batch, 0, len(items)))
        if self._open:
            self._put_in()

    def _put_in(self) -> None:
        """Let the workers take what waits for that, as far as there are slots."""
        tickets: list[Ticket] = []
        for batch, start, stop in self._back:
            slot = batch.slot
            if slot is None:
                if not self._queue.has_room:
                    break
                slot = self._queue.put(batch.first, batch.stored)
                batch.put(slot)
                self._batches[slot] = batch
            tickets.append(Ticket(slot, start, stop))
        del self._back[: len(tickets)]
        if tickets:
            self._queue.issue(tickets)
            self._engine.channel.wake_sleepers()

    # ── pauses ───────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """The workers begin to take items: first those that wait for it."""
        self._pickler = None  # the program may have called others meanwhile
        self._queue.open(None if self._wanted is None else self._wanted())
        for batch in self._batches.values():
            batch.put(None)
        self._batches = {}
        self._open = True
        self._put_in()

    def close(self) -> None:
        """The workers end, as all items have results."""
        self._open = False
        self._queue.end()
        self._engine.channel.wake_sleepers()

    def withdraw(self) -> None:
        """The workers take no more items: those that have not begun are withdrawn.

        Once more when the workers have ended: they put back what they had taken.
        """
        self._open = False
        for slot, start, stop in self._queue.withdraw():
            if slot in self._batches:
                self._back.append((self._batches[slot], start, stop))
        self._back.sort(key=lambda part: part[0].first + part[1])
        self._engine.channel.wake_sleepers()


def _refused(number: int, args: Arguments, name: str, error: Exception) -> InvalidType:
    """What to raise as *error* came when an item of the function *name* was pickled.

    Raises: as ``check_cause``.
    """
    item = f"item {number} of map()"
    check_cause(error, item)
    advice = how_to_await(*args) or "Give what it is made of, or make it in the function."
    return InvalidType(
        f"{item}, {shown(args)}, for the function {name!r}, cannot be pickled: {reason(error)}. {advice}"
    )


def _ended_by(error: Exception) -> Iterator[Any]:
    """What ends by *error*, at once."""
    if not isinstance(error, StopIteration):
        raise error
    yield from ()


def shown(args: Arguments) -> str:
    """An item in a sentence."""
    try:
        return line_of(args[0] if len(args) == 1 else args, _LONG)
    except Exception:  # it is the user's
        return "of the type " + type(args[0]).__name__
