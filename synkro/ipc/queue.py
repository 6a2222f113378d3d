"""The queue of tasks: items go to whichever worker is free, results come back, both in batches.

::

    main process            shared file, and pipes               worker that is free
    ────────────            ──────────────────────               ───────────────────
    Dispatcher.put     ─▶ [ slots: batches of items ] ──────────▶ Taker.take: draws a ticket, and reads
    Dispatcher.issue   ─▶ [ pipe of tickets ] ──────────────────▶   the batch
                                              ◀────────────────── Taker.put_back: what it will not begin
    Dispatcher.collect ◀─ [ pipe of results ] ◀────────────────── Taker.give

A ticket stands for some items of a batch, from one place in it to another.  One read of the pipe takes
one whole ticket, and no two workers the same (pipe(7)), so there is no lock that a dead worker could
hold.  Whoever has drawn a ticket may put a part of it back, for others.

Batches of items lie in *blocks* of the file, which are used again when all their results are there.  So
do large results, until the main process has read them; small ones lie in the pipe.

Each worker writes down what it *holds*, for the case that it dies: never more than that.  Where it dies
between a step and its note of it, the main process finds the rest by itself, when nobody holds anything.
It also counts what it has *given*, so that a look for results needs no system call while there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct
import termios
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from ..machine import disown_in_children
from ..memory.arena import PART, Arena, part_of
from ..memory.interrupts import call_off, call_with_last, uninterrupted
from ..memory.mapping import give_back, map_file
from ..memory.segment import memory_file
from ..plan.call import Access
from ..values.arrays import Array
from .waiting import Condition, new_fence

TOGETHER, EACH, ALONE, FAILED = range(4)
"""How a batch is pickled: a list of all values; each value; or one value, beside its large buffers.

In place of a result there may be the failure of its task.
"""


class Pickles(NamedTuple):
    """The values of a batch, pickled.

    *by_us* says whether a pickler of our own has written them.
    """

    kind: int
    parts: Sequence[Any]
    by_us: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(map(len, self.parts))


class Stored(NamedTuple):
    """A batch of items as it can be put into a slot; *memory* holds it there.

    *way* has the number of its parts, how they are pickled, and by whom.
    """

    place: int
    nbytes: int
    way: int
    memory: Array


class Ticket(NamedTuple):
    """Items of the batch in a *slot*: from place *start* in the batch to place *stop*."""

    slot: int
    start: int
    stop: int


_NO_TICKET = Ticket(0, 0, 0)


class Batch(NamedTuple):
    """Items as a worker has them: the number of the first one, and all of them, pickled."""

    first: int
    pickles: Pickles


class Given(NamedTuple):
    """Results of items that follow each other, of the batch in a *slot*: *length* of them, and *first*
    is the first one's number.

    *rank* is that of the worker in whose block they lay; -1: in none.
    """

    slot: int
    first: int
    length: int
    rank: int
    pickles: Pickles


MOST = 1 << 12
"""How many items a batch can have."""

_SLOTS = 1 << 10
_END, _WANTED = 0, 8  # words of the table, in lines of the cache of their own
_WITHDRAWN = 1  # beside the end: whether nobody is to begin what was taken
_HEAD = 16 * 8  # bytes before the slots
_SLOT = struct.Struct("=4q")  # the first item's number, place, bytes, way
_TICKET = struct.Struct("=3H2x")
_HELD = struct.Struct("=q3H2x")  # the first item's number, and a ticket; nothing where that is empty
_EACH = _HELD.size + 8  # bytes of a rank: what it holds, and how often it has given something
_TABLE = _HEAD + _SLOTS * _SLOT.size  # where those of the first rank begin
_RESULT = struct.Struct("=6q")  # slot, the first item's number, how many, place, bytes, way
_INSIDE = -1  # the place of what follows the record in the pipe
_SMALL = select.PIPE_BUF - _RESULT.size
_BLOCK = 1 << 18  # bytes of a block with several batches
_ALIGNED = 16  # bytes: as malloc aligns
_READ = 1 << 16  # bytes to read at once
_AHEAD = 1 << 26  # bytes of large results that a worker may leave unread, beside one
_PAUSE = 1e-3  # seconds between two looks of a worker whether these were read


# It ignores the third argument that callbacks get.  Threads do not change in a function of a PyDLL: none
# can open the queue for another reader after one has gone, and before this is done.
_set_to_zero = ctypes.PyDLL(None)["bzero"]
_set_to_zero.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]


class _Table:
    """The words, the slots, and what ranks hold and have given, as one process has them mapped."""

    def __init__(self, file: int, size: int) -> None:
        """Map what is there of *size* ranks."""
        array = map_file(file, _TABLE + size * _EACH, Access.WRITE)
        self.address: int = array.ctypes.data
        memory = array.data
        self.words = memory[:_HEAD].cast("Q")
        self.slots = memory[_HEAD:_TABLE]
        self.held = memory[_TABLE : _TABLE + size * _EACH]
        self.given = self.held.cast("Q")[_HELD.size // 8 :: _EACH // 8]
        self.fence = new_fence()

    def hold(self, rank: int, first: int, ticket: Ticket) -> None:
        """Note that *rank* holds *ticket*, of the batch whose first item has number *first*."""
        _HELD.pack_into(self.held, rank * _EACH, first, *ticket)


class Dispatcher:
    """The main process's end of the queue of tasks.

    Attributes:
        descriptors: what the workers need for their end.
    """

    def __init__(self, size: int) -> None:
        """The queue of *size* workers.  Raises: OSError."""
        with uninterrupted(), contextlib.ExitStack() as closing:
            self._tickets, self._put = _pipe(closing)
            self._results, given = _pipe(closing)
            self._file = memory_file("synkro-tasks", _TABLE + size * _EACH)
            closing.callback(os.close, self._file)
            # pages count as full until all of them is read; a ticket that does not fit begins another
            pages = fcntl.fcntl(self._put, fcntl.F_GETPIPE_SZ) // mmap.PAGESIZE - 1
            room = pages * mmap.PAGESIZE // _TICKET.size // 2 - size
            if room <= 0:
                raise OSError(
                    errno.EAGAIN,
                    "this user has so many pipes that new ones have a single page of memory: close "
                    "some, or raise /proc/sys/fs/pipe-user-pages-soft",
                )
            self._closing = closing.pop_all()
        self.descriptors: Final = (self._tickets, self._put, given, self._file)
        self._most = min(_SLOTS, room)
        self._free: list[int] = []  # slots
        self._block: Array = np.empty(0, np.uint8)  # with room for batches of some size …
        self._start = self._end = 0  # … which begins here in the file, and has so many bytes of them
        self._table = _Table(self._file, size)
        self._arena = Arena(self._file, size)
        self._reader: weakref.ref[object] | None = None
        self._leaving = 0  # the handle of what is done when the reader is gone
        _dispatchers.add(self)
        self._rest = b""
        self._seen = b""  # how often each rank had given something, when results were collected

    def close(self) -> None:
        """Give the descriptors back, and the memory, but for what somebody has views of."""
        self.disown()
        self._closing.close()
        self._block = np.empty(0, np.uint8)
        self._table = self._arena = None  # type: ignore[assignment]

    def open(self, reader: object) -> None:
        """Let the workers draw tickets; none of them does now, and nobody wants what is in the queue.

        They stop when *reader*, if there is one, is gone.
        """
        words = self._table.words
        self.disown()
        words[_WANTED] = 1
        if reader is not None:
            self._reader = weakref.ref(reader)
            self._leaving = call_with_last(reader, _set_to_zero, self._table.address + 8 * _WANTED, 8)
        _all_in(self._tickets)
        _all_in(self._results)
        self._rest = self._seen = b""
        self._free = list(range(self._most))
        words[_END] = words[_WITHDRAWN] = 0

    def disown(self) -> None:
        """The workers no longer stop when the last reader of this process is gone."""
        reader = None if self._reader is None else self._reader()
        if reader is not None:  # else the handle is no longer one, and others may have it
            call_off(self._leaving)
        self._reader = None

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def stored(self, items: Pickles) -> Stored:
        """A batch of items, in a block.  Raises: SharedMemoryError."""
        nbytes, way = _size(items), _way(items)
        if nbytes > _BLOCK // 4:
            with uninterrupted():
                block, place = _new_block(self._arena, nbytes)
            _write(block.data, items)
            return Stored(place, nbytes, way, block)
        if self._end + nbytes > len(self._block):
            with uninterrupted():
                self._block, self._start = _new_block(self._arena, _BLOCK)
            self._end = 0
        _write(self._block.data[self._end : self._end + nbytes], items)
        place = self._start + self._end
        self._end += nbytes
        return Stored(place, nbytes, way, self._block)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def put(self, first: int, items: Stored) -> int:
        """Put a batch into a free slot, and return that; its first item has number *first*."""
        slot = self._free.pop()
        _SLOT.pack_into(self._table.slots, slot * _SLOT.size, first, *items[:3])
        return slot

    def free(self, slot: int) -> None:
        """All results of the batch in *slot* are there."""
        self._free.append(slot)

    def issue(self, tickets: Iterable[Ticket]) -> None:
        """Let workers draw *tickets*, whose batches lie in their slots."""
        self._table.fence()  # the slots are stored before the tickets
        os.write(self._put, b"".join([_TICKET.pack(*ticket) for ticket in tickets]))

    def end(self) -> None:
        """Have the workers end their command when no ticket is left."""
        self._table.words[_END] = 1

    def stop(self) -> None:
        """Have each worker end the command after the task that it runs."""
        if self._table is not None:  # a signal handler may have closed it
            self._table.words[_WANTED] = 0

    def withdraw(self) -> list[Ticket]:
        """Have the workers end the command after the task that each runs; returns the tickets that
        nobody has drawn.

        What they put back comes by another call, after they have ended it.
        """
        self._table.words[_WITHDRAWN] = 1
        self.end()
        return self.take_back()

    def take_back(self) -> list[Ticket]:
        """The tickets that nobody has drawn, and nobody will."""
        return [Ticket(*each) for each in _TICKET.iter_unpack(_all_in(self._tickets))]

    @property
    def is_dry(self) -> bool:
        """Whether there is no ticket to draw."""
        return _is_empty(self._tickets)

    def left_by(self, rank: int) -> tuple[int, Ticket]:
        """What the dead worker of *rank* held: the number of the first item of a batch, and the part of
        that; all results of it have been collected.  Its memory is given back."""
        first, *ticket = _HELD.unpack_from(self._table.held, rank * _EACH)
        self._table.hold(rank, 0, _NO_TICKET)
        give_back(self._file, *part_of(rank))
        return first, Ticket(*ticket)

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    @property
    def has_news(self) -> bool:
        """Whether workers have told of results since some were collected."""
        return self._table.given.tobytes() != self._seen

    def collect(self, told: bool = True) -> list[Given]:
        """The results that have come; if *told*, those that workers have told of: one that has died may
        have given some more."""
        found: list[Given] = []
        given = self._table.given.tobytes()
        if told and given == self._seen:
            return found
        self._seen = given
        self._table.fence()  # how many there are is loaded before they are
        data, size, came = b"", _RESULT.size, _READ
        while came == _READ or self._rest:  # the rest of a record is there: it was written at once
            try:
                read = os.read(self._results, _READ)
            except BlockingIOError:
                return found
            data, came, at = self._rest + read, len(read), 0
            while len(data) - at >= size:
                slot, first, count, place, nbytes, way = _RESULT.unpack_from(data, at)
                start = stop = at + size
                if place == _INSIDE:
                    stop += nbytes
                    if stop > len(data):
                        break
                    rank, pickles = -1, _apart(memoryview(data)[start:stop], way)
                else:
                    rank, pickles = place // PART - 1, _read(self._file, place, nbytes, way)
                found.append(Given(slot, first, count, rank, pickles))
                at = stop
            self._rest = data[at:]
        return found


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
disown_in_children(_dispatchers)


def _pipe(closing: contextlib.ExitStack) -> tuple[int, int]:
    """The ends of a pipe, which *closing* closes."""
    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for end in ends:
        closing.callback(os.close, end)
    return ends


class Taker:
    """A worker's end of the queue of tasks."""

    def __init__(self, rank: int, descriptors: Sequence[int], blocks_read: Callable[[], int]) -> None:
        """*descriptors* are those of the ``Dispatcher``, which this end owns; *blocks_read* says how
        many blocks of this *rank* with results the main process has read."""
        self._tickets, self._put, self._results, self._file = descriptors
        self._rank = rank
        self._table = _Table(self._file, rank + 1)
        self._arena = Arena(self._file, rank)
        self._room = select.poll()
        self._room.register(self._results, select.POLLOUT)
        self._blocks_read = blocks_read
        self._unread: deque[Array] = deque()  # blocks of results
        self._read = 0  # how many blocks the main process had read, when the last ones were dropped
        self._drawn: Ticket | None = None
        self._batch: tuple[int, Batch] | None = None  # that was read last, and where it lies in the file
        self._first = 0  # the number of the first item of the batch that was taken last
        self._held = _NO_TICKET

    def begin(self) -> None:
        """A command begins: nobody wants results of the last one."""
        self._unread.clear()
        self._read = self._blocks_read()
        self._drawn = self._batch = None
        self.hold(_NO_TICKET)

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def take(self, wait: Callable[[Condition], None]) -> tuple[Ticket, Batch] | None:
        """The next ticket and its batch; None when there will be none.

        *wait* waits for a condition: until the main process, or another worker, wakes this one, having
        made it true.
        """
        if self.withdrawn or not self.wanted:
            return None
        if not self._is_decided():
            wait(self._is_decided)
        ticket, self._drawn = self._drawn, None
        if ticket is None:
            return None
        self._first = self._slot(ticket)[0]
        self.hold(_NO_TICKET)  # so that never one number is there with another's ticket
        self.hold(ticket)
        return ticket, self.batch(ticket)

    def hold(self, ticket: Ticket) -> None:
        """Note that this worker holds *ticket*: what it has taken last, or the rest of that."""
        self._held = ticket
        self._table.hold(self._rank, self._first, ticket)

    def advance(self, start: int) -> None:
        """Note that this worker holds nothing before place *start* of the batch."""
        self.hold(self._held._replace(start=start))

    def _is_decided(self) -> bool:
        """Whether a ticket is drawn, or there will be none."""
        ended = self.ended  # before the look for a ticket: all are there when the end is said
        if self._drawn is None:
            self._drawn = self._draw()
        return self._drawn is not None or ended

    def take_now(self, most: int) -> tuple[Ticket, Batch, bool] | None:
        """The next ticket and its batch; None if there is none now.

        Of the last ticket in the queue only so many items are taken at *most*; what is left is put back,
        which the third value says: others may wait for it.  Behind other tickets it would come late.
        """
        ticket, self._drawn = self._drawn or self._draw(), None
        if ticket is None:
            return None
        rest = ticket._replace(start=ticket.start + most)
        left = rest.start < rest.stop and self.is_dry and self.put_back(rest)
        if left:
            ticket = ticket._replace(stop=rest.start)
        return ticket, self.batch(ticket), left

    def _draw(self) -> Ticket | None:
        try:
            return Ticket(*_TICKET.unpack(os.read(self._tickets, _TICKET.size)))
        except BlockingIOError:
            return None

    def batch(self, ticket: Ticket) -> Batch:
        """The batch that a ticket is for; the same object if it is the one of the last ticket."""
        first, place, nbytes, way = self._slot(ticket)
        if self._batch is None or self._batch[0] != place or self._batch[1].first != first:
            self._batch = place, Batch(first, _read(self._file, place, nbytes, way))
        return self._batch[1]

    def _slot(self, ticket: Ticket) -> tuple[int, int, int, int]:
        self._table.fence()  # the ticket is loaded before the slot
        return _SLOT.unpack_from(self._table.slots, ticket.slot * _SLOT.size)

    def put_back(self, ticket: Ticket) -> bool:
        """Let others draw *ticket*, the end of what this worker holds, of which nothing has begun; False
        if there is no room for it."""
        held = self._held
        self.hold(held._replace(stop=ticket.start))
        there = _wrote(self._put, _TICKET.pack(*ticket))
        if not there:
            self.hold(held)
        return there

    @property
    def is_dry(self) -> bool:
        """Whether there is no ticket to draw."""
        return _is_empty(self._tickets)

    @property
    def wanted(self) -> bool:
        """Whether results are wanted."""
        return bool(self._table.words[_WANTED])

    @property
    def ended(self) -> bool:
        """Whether the main process will issue no more tickets."""
        return bool(self._table.words[_END])

    @property
    def withdrawn(self) -> bool:
        """Whether nobody is to begin what was taken."""
        return bool(self._table.words[_WITHDRAWN])

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def give(
        self, slot: int, first: int, count: int, results: Pickles, wake: Callable[[], None]
    ) -> None:
        """Hand over the results of *count* items of the batch in *slot*, from number *first* on.

        *wake* wakes the main process where it has to read some.  Raises: SharedMemoryError.
        """
        while (record := self.record(slot, first, count, results)) is None:
            wake()
            time.sleep(_PAUSE)
        while not self.write(record):
            wake()
            self._room.poll()

    def record(self, slot: int, first: int, count: int, results: Pickles) -> bytes | None:
        """The record of results, which lie in a block if they are large; None while too many blocks are
        unread."""
        nbytes, way = _size(results), _way(results)
        if nbytes <= _SMALL:
            memory = bytearray(nbytes)
            _write(memoryview(memory), results)
            return _RESULT.pack(slot, first, count, _INSIDE, nbytes, way) + memory
        read = self._blocks_read()
        while self._read < read:
            self._unread.popleft()
            self._read += 1
        if self._unread and sum(map(len, self._unread)) + nbytes > _AHEAD:
            return None
        block, place = _new_block(self._arena, nbytes)
        _write(block.data, results)
        self._unread.append(block)
        return _RESULT.pack(slot, first, count, place, nbytes, way)

    def write(self, record: bytes) -> bool:
        """Hand a record over, and tell; False if there is no room for it."""
        if not _wrote(self._results, record):
            return False
        self._table.given[self._rank] += 1
        self._table.fence()  # it is told before the load of what the main process waits for
        return True


_NONE = bytes(4)  # no bytes, as a C int


def _is_empty(pipe: int) -> bool:
    return fcntl.ioctl(pipe, termios.FIONREAD, _NONE) == _NONE


def fits(results: Pickles) -> bool:
    """Whether *results* need no block."""
    return _size(results) <= _SMALL


def _wrote(pipe: int, record: bytes) -> bool:
    """Write a *record* to a pipe; False if there is no room for it."""
    try:
        os.write(pipe, record)
    except BlockingIOError:
        return False
    return True


def _all_in(pipe: int) -> bytes:
    """What there is to read in a *pipe*."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(os.read(pipe, _READ))
    return b"".join(found)


def _new_block(arena: Arena, nbytes: int) -> tuple[Array, int]:
    """A new block, and its place in the file."""
    block = arena.empty((nbytes,), np.uint8)
    return block, arena.place(block)


# ── batches in memory: how long each part is, and the parts ──────────────────────────────────────────


def _way(pickles: Pickles) -> int:
    return len(pickles.parts) << 3 | pickles.by_us << 2 | pickles.kind


def _starts(lengths: Sequence[int], kind: int) -> list[int]:
    """Where parts of these *lengths* begin, and where the last one ends."""
    if kind == ALONE:  # buffers become arrays where they lie
        return list(accumulate(lengths, _aligned_end, initial=8 * len(lengths)))
    return list(accumulate(lengths, initial=8 * len(lengths)))


def _aligned_end(start: int, length: int) -> int:
    return -(-(start + length) // _ALIGNED) * _ALIGNED


def _size(pickles: Pickles) -> int:
    return _starts([len(part) for part in pickles.parts], pickles.kind)[-1]


def _write(memory: memoryview, pickles: Pickles) -> None:
    """Write a batch into *memory* of its size."""
    lengths = [len(part) for part in pickles.parts]
    struct.pack_into(f"={len(lengths)}q", memory, 0, *lengths)
    for part, start, length in zip(pickles.parts, _starts(lengths, pickles.kind), lengths, strict=False):
        memory[start : start + length] = part


def _apart(memory: memoryview, way: int) -> Pickles:
    """The batch that lies in *memory*."""
    kind, lengths = way & 3, struct.unpack_from(f"={way >> 3}q", memory)
    pairs = zip(_starts(lengths, kind), lengths, strict=False)
    return Pickles(kind, [memory[start : start + length] for start, length in pairs], bool(way & 4))


def _read(file: int, place: int, nbytes: int, way: int) -> Pickles:
    """A batch that lies in the file, as a copy."""
    memory = np.empty(nbytes, np.uint8).data
    done = 0
    while done < nbytes:  # one call reads 2 GB at most
        done += os.preadv(file, [memory[done:]], place + done)
    return _apart(memory, way)
