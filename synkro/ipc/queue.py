"""The queue of tasks: items go to whichever worker is free, results come back.

::

    main process            shared file, and pipes              worker that is free
    ────────────            ──────────────────────              ───────────────────
    Dispatcher.issue   ─▶ [ pipe of tickets: 0, 1, 2, … ] ────▶ Taker.take: draws the next ticket,
    Dispatcher.publish ─▶ [ slots: item 0, item 1, … ] ───────▶   and waits until its item is published
    Dispatcher.collect ◀─ [ pipe of results ] ◀──────────────── Taker.give

Small items can lie together in a *group* of slots: the first says so, and has one pickle of all.  Each
is still drawn by itself, and whoever draws one reads them all.

Tickets are issued before there are items for them.  One read of the pipe takes one whole ticket, and no
two workers the same (pipe(7)), so there is no lock that a dead worker could hold.  Small items lie in
their slots and small results in the pipe, larger ones in *blocks* of the file, which are used again when
the other side has read them.

For workers of another host a ``RemoteTaker`` draws tickets.  What it has taken, and nobody there has
begun, it can give back: a record says so, and the main process publishes these items anew.
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
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.arena import PART, Arena
from ..memory.departures import call_off, call_with_last
from ..memory.interrupts import uninterrupted
from ..memory.mapping import map_file
from ..plan.call import Access
from ..values.arrays import Array
from .waiting import Fence

Packed = tuple[bytes, Sequence[Any], bool]
"""A pickled value: the stream, its buffers, and whether a pickler of our own has written it."""


Stored = tuple[int, int, int, Any]
"""An item as it can be published: where its stream is, its bytes, its way, and what holds it."""

SEVERAL = -1
"""The number of a record with several results: a list of their numbers, and one of their values."""

UNDONE = -2
"""The number of a record with a list of the numbers of items that were taken and have not begun."""

CAPACITY = 1 << 13
"""How many items can be published that no worker has read."""

GROUP = 16
"""How many slots can have one pickle together: those from a multiple of it on."""

_PUBLISHED, _END, _WANTED = 0, 8, 16  # words of the table, in lines of the cache of their own
_WITHDRAWN = 9  # beside the end: whether nobody is to begin what was taken
_HEAD = 24 * 8  # bytes before the slots
_SLOT = 128
_NEVER = (1 << 64) - 1

_TICKET = struct.Struct("=q")
_ISSUED = 256  # tickets beyond those of published items, beside one a worker
_RECORD = struct.Struct("=4q")  # number, place in the file, bytes of the stream, way
_INSIDE = -1  # the place of a stream that follows the record
_TOGETHER = -2  # the place of one of several items that follows it; the way is their number
_INLINE = _SLOT - _RECORD.size
_SMALL = select.PIPE_BUF - _RECORD.size
_BLOCK = 1 << 18  # bytes of a block of several items
_READ = 1 << 16  # bytes to read at once
_AHEAD = 1 << 26  # bytes of large results that a worker may leave unread, beside one
_PAUSE = 1e-3  # seconds between two looks of a worker whether these were read


# It ignores the third argument that callbacks get.  Threads do not change in a function of a PyDLL: none
# can open the queue for another reader after one has gone, and before this is done.
_set_to_zero = ctypes.PyDLL(None)["bzero"]
_set_to_zero.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]


class _Table:
    """The words and the slots, as one process has them mapped."""

    def __init__(self, file: int) -> None:
        array = map_file(file, _HEAD + CAPACITY * _SLOT, Access.WRITE)
        self.address: int = array.ctypes.data
        memory = array.data
        self.words = memory[:_HEAD].cast("Q")
        self.slots = memory[_HEAD:]
        self.fence = Fence()


class Dispatcher:
    """The main process's end.

    Attributes:
        descriptors: what the workers need for their end.
        slot: the slot of the next item.
        most: how many items there should be at most that nobody has drawn.
    """

    def __init__(self, size: int) -> None:
        """The queue of *size* workers.  Raises: OSError."""
        self._closing = contextlib.ExitStack()
        with uninterrupted(), contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            self._tickets, self._put = self._pipe()
            self._results, given = self._pipe()
            self._file = os.memfd_create("synkro-tasks", os.MFD_CLOEXEC)
            self._closing.callback(os.close, self._file)
            os.fchmod(self._file, 0o600)
            os.posix_fallocate(self._file, 0, _HEAD + CAPACITY * _SLOT)
            undo.pop_all()
        self.descriptors = (self._tickets, given, self._file)
        self.slot = 0
        # pages count as full until all of them is read, and a ticket that does not fit begins another
        pages = fcntl.fcntl(self._put, fcntl.F_GETPIPE_SZ) // mmap.PAGESIZE - 1
        if not pages:
            self._closing.close()
            raise OSError(
                errno.EMFILE, "this user has so many pipes that new ones have a single page of memory"
            )
        room = pages * mmap.PAGESIZE // _TICKET.size // 2
        self.most = min(CAPACITY // 2, room // 2)
        self._block: Array = np.empty(0, np.uint8)  # with room for items of some size …
        self._start = self._end = 0  # … which begins here in the file, and has so many bytes of them
        self._published = self._filled = 0  # how many items were published, and put into slots
        self._table = _Table(self._file)
        self._arena = Arena(self._file, size)
        self._spare = size + min(_ISSUED, room // 4)
        self._scarce = size + min(_ISSUED, room // 4) // 2
        self._issued = 0  # the next ticket
        self._reader: weakref.ref[object] | None = None
        self._leaving = 0  # the handle of what is done when the reader is gone
        _dispatchers.add(self)
        self._rest = b""
        self._own = -1  # a ticket that this end has drawn itself

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for end in ends:
            self._closing.callback(os.close, end)
        return ends

    def close(self) -> None:
        """Give the descriptors back, and the memory, but for what somebody has views of."""
        self._stay()
        self._closing.close()
        self._block = np.empty(0, np.uint8)
        self._table = self._arena = None  # type: ignore[assignment]

    def open(self, reader: object) -> None:
        """Let the workers draw tickets; none of them does now, and nobody wants what is in the queue.

        They stop when *reader*, if there is one, is gone.
        """
        words = self._table.words
        self._stay()
        words[_WANTED] = 1
        self._filled, self.slot = self._published, self._published % CAPACITY
        if reader is not None:
            self._reader = weakref.ref(reader)
            self._leaving = call_with_last(reader, _set_to_zero, self._table.address + 8 * _WANTED, 8)
        _chunks(self._tickets)
        _chunks(self._results)
        self._rest = b""
        words[_PUBLISHED], words[_END], words[_WITHDRAWN] = self._published, _NEVER, 0
        self._issued, self._own = self._published, -1
        self._issue()

    def disown(self) -> None:
        """In a fork of the main process: its readers are not those that the workers wait for."""
        self._stay()

    def _stay(self) -> None:
        """The workers no longer stop when the last reader is gone."""
        reader = None if self._reader is None else self._reader()
        if reader is not None:  # else the handle is no longer one, and others may have it
            call_off(self._leaving)
        self._reader = None

    def _issue(self) -> None:
        """Write tickets, so that there are enough beyond those of published items."""
        stop = self._published + self._spare
        os.write(self._put, b"".join(map(_TICKET.pack, range(self._issued, stop))))
        self._issued = stop

    def stored(self, item: Packed) -> Stored:
        """An item as it can be published; if it is large, in a block.  Raises: SharedMemoryError."""
        stream, buffers, own = item
        if len(stream) <= _INLINE and not buffers:
            return _INSIDE, len(stream), own, stream
        way = len(buffers) << 1 | own
        if buffers or len(stream) > _BLOCK // 4:
            with uninterrupted():
                block, place = _placed(self._arena, stream, buffers)
            return place, len(stream), way, block
        stop = self._end + len(stream)
        if stop > len(self._block):
            with uninterrupted():
                self._block, self._start = _new_block(self._arena, _BLOCK)
            self._end, stop = 0, len(stream)
        place = self._start + self._end
        self._block.data[self._end : stop] = stream
        self._end = stop
        return place, len(stream), way, self._block

    def put(self, number: int, item: Stored) -> None:
        """Put *item* by its *number* into the next slot, the contents of which a worker has read."""
        place, nbytes, way, memory = item
        table = self._table
        at = self.slot * _SLOT
        _RECORD.pack_into(table.slots, at, number, place, nbytes, way)
        if place == _INSIDE:
            at += _RECORD.size
            table.slots[at : at + nbytes] = memory
        self._filled += 1
        self.slot = self._filled % CAPACITY

    def put_group(self, number: int, count: int, stream: bytes) -> bool:
        """Put *count* items, the first of which has this *number*, with one pickle into the next slots,
        where a group begins; returns whether it is small enough."""
        if len(stream) > GROUP * _SLOT - _RECORD.size:
            return False
        at = self.slot * _SLOT
        slots = self._table.slots
        _RECORD.pack_into(slots, at, number, _TOGETHER, len(stream), count)
        at += _RECORD.size
        slots[at : at + len(stream)] = stream
        self._filled += count
        self.slot = self._filled % CAPACITY
        return True

    def publish(self) -> None:
        """Publish the items that were put into slots."""
        self._table.fence()  # the slots are stored before the number
        self._published = self._table.words[_PUBLISHED] = self._filled
        if self._issued - self._published < self._scarce:
            self._issue()

    def end(self) -> None:
        """Have the workers end their command when all that was published is taken."""
        self._table.words[_END] = self._published

    def stop(self) -> None:
        """Have each worker end it after the task that it runs."""
        if self._table is not None:  # a signal handler may have closed it
            self._table.words[_WANTED] = 0

    def withdraw(self) -> list[int]:
        """Have them end it at once; returns the numbers of the items that nobody has taken."""
        data = b"".join(_chunks(self._tickets))
        self._table.words[_WITHDRAWN] = 1
        self.end()
        drawn = [ticket for (ticket,) in _TICKET.iter_unpack(data) if ticket < self._published]
        return [self._number(ticket) for ticket in drawn]

    def take_back(self) -> list[int]:
        """The numbers of the items that nobody has drawn, and nobody will.

        Where this draws a ticket too many, its item will come by ``taken``.
        """
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while self._own < 0:
                (self._own,) = _TICKET.unpack(os.read(self._tickets, _TICKET.size))
                numbers += self.taken()
        return numbers

    def taken(self) -> list[int]:
        """The number of the item that this end has drawn, as soon as it is published."""
        if not 0 <= self._own < self._published:
            return []
        ticket, self._own = self._own, -1
        return [self._number(ticket)]

    def _number(self, ticket: int) -> int:
        """The number of the item that this ticket is for."""
        slots, within = self._table.slots, ticket % GROUP
        first: int
        first, place, _, count = _RECORD.unpack_from(slots, (ticket - within) % CAPACITY * _SLOT)
        if place == _TOGETHER and within < count:
            return first + within
        number: int = _RECORD.unpack_from(slots, ticket % CAPACITY * _SLOT)[0]
        return number

    def collect(self) -> list[tuple[int, int, Packed]]:
        """The results that have come: number, the rank whose block it lay in (-1: none), and value.

        Number ``SEVERAL`` has several.
        """
        found: list[tuple[int, int, Packed]] = []
        try:
            data = os.read(self._results, _READ)
        except BlockingIOError:
            return found
        while True:
            data, at = self._rest + data, 0
            while len(data) - at >= _RECORD.size:
                number, place, nbytes, way = _RECORD.unpack_from(data, at)
                begin = at + _RECORD.size
                if place == _INSIDE:
                    if begin + nbytes > len(data):
                        break
                    found.append((number, -1, (data[begin : begin + nbytes], (), bool(way))))
                    at = begin + nbytes
                else:
                    found.append((number, place // PART - 1, _load(self._file, place, nbytes, way)))
                    at = begin
            self._rest = data[at:]
            if not self._rest:
                return found
            data = os.read(self._results, _READ)  # the rest of a record, which was written at once


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _in_forked_child() -> None:
    for dispatcher in tuple(_dispatchers):
        dispatcher.disown()


os.register_at_fork(after_in_child=_in_forked_child)


class Taker:
    """A worker's end."""

    def __init__(self, rank: int, descriptors: Sequence[int]) -> None:
        """*descriptors* are those of the ``Dispatcher``, which this end owns."""
        self._tickets, self._results, self._file = descriptors
        self._table = _Table(self._file)
        self._arena = Arena(self._file, rank)
        self._room = select.poll()
        self._room.register(self._results, select.POLLOUT)
        self._unread: deque[Array] = deque()  # blocks of results
        self._read = 0  # how many blocks the main process had read, when the last ones were dropped
        self._ticket = -1  # the one that was drawn last
        self._at = -1  # the ticket with which the slots begin that were looked at as a group
        self._first = self._count = 0  # the number of the first item of the group there, how many it has
        self._group: Packed = b"", (), False

    def begin(self, read: int) -> None:
        """A command begins: nobody wants results of the last one.  *read* blocks were read until now."""
        self._unread.clear()
        self._read = read

    def take(self, wait: Callable[[Callable[[], bool]], None]) -> tuple[int, Packed, int] | None:
        """The next item, or the group that it is in; None when there will be none.

        Returns its number, the pickled value, and its place in the group; -1: it is no group.  All items
        of a group come with the same object.  *wait* waits for a condition: until the main process wakes
        this one, having made it true.
        """
        if not self._table.words[_WANTED]:
            return None
        try:
            (ticket,) = _TICKET.unpack(os.read(self._tickets, 8))
        except BlockingIOError:  # they were withdrawn
            ticket = _NEVER
        words = self._table.words
        if words[_PUBLISHED] <= ticket:
            self._ticket = ticket
            wait(self._is_decided)
            if words[_PUBLISHED] <= ticket:
                return None
        return self._item(ticket)

    def _item(self, ticket: int) -> tuple[int, Packed, int]:
        """The published item that this ticket is for, as ``take`` returns it."""
        table, within = self._table, ticket % GROUP
        if ticket - within != self._at:
            table.fence()  # the number is loaded before the slot
            self._look_at(ticket - within)
        if within < self._count:
            return self._first + within, self._group, within
        table.fence()
        at, slots = ticket % CAPACITY * _SLOT, table.slots
        number, place, nbytes, way = _RECORD.unpack_from(slots, at)
        if place == _INSIDE:
            begin = at + _RECORD.size
            return number, (bytes(slots[begin : begin + nbytes]), (), bool(way)), -1
        return number, _load(self._file, place, nbytes, way), -1

    def _look_at(self, ticket: int) -> None:
        """Read the group that begins with this ticket, if there is one."""
        begin = ticket % CAPACITY * _SLOT + _RECORD.size
        slots = self._table.slots
        number, place, nbytes, count = _RECORD.unpack_from(slots, begin - _RECORD.size)
        self._at, self._count = ticket, 0
        if place == _TOGETHER:
            self._first, self._count = number, count
            self._group = bytes(slots[begin : begin + nbytes]), (), False

    def _is_decided(self) -> bool:
        """Whether the item is published, or never will be."""
        words = self._table.words
        return words[_PUBLISHED] > self._ticket or words[_END] <= self._ticket

    def give(
        self, number: int, result: Packed, read: Callable[[], int], rouse: Callable[[], None]
    ) -> None:
        """Hand a result over.  *read* says how many blocks of this rank the main process has read;
        *rouse* wakes it where it has to read some.

        Raises: SharedMemoryError.
        """
        while (data := self._record(number, result, read())) is None:
            rouse()
            time.sleep(_PAUSE)
        while not self._write(data):
            rouse()
            self._room.poll()

    def _record(self, number: int, result: Packed, read: int) -> bytes | None:
        """The record of a result, which lies in a block if it is large; None while too many blocks are
        unread: all but *read*."""
        stream, buffers, own = result
        if not buffers and len(stream) <= _SMALL:
            return _RECORD.pack(number, _INSIDE, len(stream), own) + stream
        while self._read < read:
            self._unread.popleft()
            self._read += 1
        nbytes = len(stream) + sum(map(len, buffers))
        if self._unread and sum(map(len, self._unread)) + nbytes > _AHEAD:
            return None
        block, place = _placed(self._arena, stream, buffers)
        self._unread.append(block)
        return _RECORD.pack(number, place, len(stream), len(buffers) << 1 | own)

    def _write(self, record: bytes) -> bool:
        try:
            os.write(self._results, record)
        except BlockingIOError:
            return False
        return True


class RemoteTaker(Taker):
    """The end for workers of another host, where items and results go on: nothing in it waits."""

    def __init__(self, rank: int, descriptors: Sequence[int]) -> None:
        """Large results lie in the memory of *rank*, one of that host."""
        super().__init__(rank, descriptors)
        self._drawn = False  # whether the last ticket was drawn, and its item not taken
        self._unwritten: bytes | None = None

    def begin(self, read: int) -> None:
        super().begin(read)
        self._drawn, self._unwritten = False, None

    def take_now(self) -> tuple[int, Packed, int] | None:
        """The next item, as ``take`` returns it; None if there is none now."""
        if not self._drawn:
            try:
                (self._ticket,) = _TICKET.unpack(os.read(self._tickets, 8))
            except BlockingIOError:  # they were withdrawn
                return None
            self._drawn = True
        if self._table.words[_PUBLISHED] <= self._ticket:
            return None
        self._drawn = False
        return self._item(self._ticket)

    @property
    def waiting(self) -> int:
        """How many items are published after the last one that was taken here."""
        return max(0, self._table.words[_PUBLISHED] - self._ticket - 1)

    @property
    def wanted(self) -> bool:
        """Whether results are wanted."""
        return bool(self._table.words[_WANTED])

    @property
    def ended(self) -> bool:
        """Whether there will be no more items."""
        return self._drawn and self._table.words[_END] <= self._ticket

    @property
    def withdrawn(self) -> bool:
        """Whether nobody is to begin what was taken."""
        return bool(self._table.words[_WITHDRAWN])

    def give_now(self, number: int, result: Packed, read: int) -> bool:
        """Hand a result over, if there is room for it; as ``give``, after *read* blocks were read."""
        if self._unwritten is None:
            self._unwritten = self._record(number, result, read)
        if self._unwritten is None or not self._write(self._unwritten):
            return False
        self._unwritten = None
        return True


def _chunks(pipe: int) -> list[bytes]:
    """What there is to read."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(os.read(pipe, _READ))
            if len(found[-1]) < _READ:
                break
    return found


def _new_block(arena: Arena, nbytes: int) -> tuple[Array, int]:
    """A new block, and its place in the file."""
    block = arena.empty((nbytes,), np.uint8)
    place = arena.locate(block)
    assert place is not None
    return block, place


def _placed(arena: Arena, stream: bytes, buffers: Sequence[Any]) -> tuple[Array, int]:
    """A new block with a stream, the lengths of its buffers, and these; and its place in the file."""
    lengths = struct.pack(f"={len(buffers)}q", *map(len, buffers))
    block, place = _new_block(arena, len(stream) + len(lengths) + sum(map(len, buffers)))
    memory, start = block.data, 0
    for part in (stream, lengths, *buffers):
        memory[start : start + len(part)] = part
        start += len(part)
    return block, place


def _load(file: int, place: int, nbytes: int, way: int) -> Packed:
    """What lies in the file, as copies."""
    stream = os.pread(file, nbytes, place)
    while len(stream) < nbytes:  # one call reads 2 GB at most
        stream += os.pread(file, nbytes - len(stream), place + len(stream))
    if way < 2:
        return stream, (), bool(way)
    place += nbytes
    table = os.pread(file, 8 * (way >> 1), place)
    place += len(table)
    buffers = []
    for length in struct.unpack(f"={way >> 1}q", table):
        buffer = np.empty(length, np.uint8).data
        done = 0
        while done < length:
            done += os.preadv(file, [buffer[done:]], place + done)
        buffers.append(buffer)
        place += length
    return stream, buffers, bool(way & 1)
