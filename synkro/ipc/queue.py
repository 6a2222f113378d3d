"""The queue of tasks: items go to whichever worker is free, results come back.

::

    main process            pipes, and a shared file            worker that is free
    ────────────            ────────────────────────            ───────────────────
    Dispatcher.put  ─ pickles ─▶ [ blocks of the file ] ────────────▶ Taker.take
                    ─ records ─▶ [ pipe of items: one record each ] ─▶
    Dispatcher.collect ◀── records, with small pickles ── [ pipe of results ] ◀─ Taker.give
                       ◀── large pickles ── [ blocks of the file ] ◀───────────

The records have one size, so that a read of the pipe takes a whole one, and no two workers the same
(pipe(7): what is read or written by one call is not mixed with other calls').  A worker that dies or is
interrupted holds no lock.  A block of the file belongs to the process that wrote it, until the other
side has read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.arena import PART, Arena
from ..memory.interrupts import uninterrupted
from ..values.arrays import Array

Packed = tuple[bytes, Sequence[Any], bool]
"""A pickled value: the stream, its buffers, and whether a pickler of our own has written it."""

_RECORD = struct.Struct("=4q")  # number, place in the file, bytes of the stream, way
_END = -1  # the number of a record that ends a worker's command
_INSIDE = -1  # the place of a stream that follows in the pipe itself
_SMALL = select.PIPE_BUF - _RECORD.size  # bytes that can follow
_READ = 1 << 16  # bytes to read at once: a multiple of a record
_AHEAD = 1 << 26  # bytes of large results that a worker may leave unread, beside one
_PAUSE = 1e-3  # seconds between two looks of a worker whether these were read


class Dispatcher:
    """The main process's end.

    Attributes:
        descriptors: what the workers need for their end.
        capacity: how many items may wait to be taken.
    """

    def __init__(self, size: int) -> None:
        """The queue of *size* workers.  Raises: OSError."""
        self._closing = contextlib.ExitStack()
        with uninterrupted():
            self._items, self._put = self._pipe()
            self._results, given = self._pipe()
            self._file = os.memfd_create("synkro-tasks", os.MFD_CLOEXEC)
            self._closing.callback(os.close, self._file)
        os.fchmod(self._file, 0o600)
        self.descriptors = (self._items, given, self._file)
        room = fcntl.fcntl(self._put, fcntl.F_GETPIPE_SZ) - mmap.PAGESIZE
        self.capacity = max(1, room // _RECORD.size - size)  # of the workers' ends, each has one
        self._room = select.poll()
        self._room.register(self._put, select.POLLOUT)
        self._arena = Arena(self._file, size)
        self._rest = b""

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for end in ends:
            self._closing.callback(os.close, end)
        return ends

    def close(self) -> None:
        self._closing.close()

    def store(self, first: int, items: Sequence[Packed]) -> tuple[Array, list[bytes]]:
        """Put the items from number *first* on into a block of the file; returns it, and their records.

        The memory is used again when nothing refers to the block any more.  Raises: SharedMemoryError.
        """
        parts: list[Any] = []
        places = []
        end = 0
        for stream, buffers, own in items:
            places.append((end, len(stream), len(buffers) << 1 | own))
            parts.append(stream)
            end += len(stream)
            if buffers:
                end += _add(parts, buffers)
        block, start = _placed(self._arena, end, parts)
        records = [
            _RECORD.pack(number, start + place, nbytes, way)
            for number, (place, nbytes, way) in enumerate(places, first)
        ]
        return block, records

    def put(self, records: Sequence[bytes]) -> None:
        """Offer items to the workers: not more than there is *capacity* for."""
        data = b"".join(records)
        while data:
            try:
                data = data[os.write(self._put, data) :]
            except BlockingIOError:
                self._room.poll()

    def end(self, workers: int) -> None:
        """Have so many workers end their command, when all that was offered before is taken."""
        self.put([_RECORD.pack(_END, 0, 0, 0)] * workers)

    def withdraw(self) -> list[bytes]:
        """Take back the records that no worker has taken, in their order."""
        data = b"".join(_chunks(self._items))
        found = [data[at : at + _RECORD.size] for at in range(0, len(data), _RECORD.size)]
        return [record for record in found if _RECORD.unpack(record)[0] != _END]

    def collect(self) -> list[tuple[int, int, Packed]]:
        """The results that have come: number, the rank whose block it lay in (-1: none), and value."""
        data = self._rest + b"".join(_chunks(self._results))
        found: list[tuple[int, int, Packed]] = []
        at = 0
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
        return found

    def clear(self) -> None:
        """Drop what was offered and what has come: nobody wants it any more."""
        self.withdraw()
        self.collect()
        self._rest = b""


class Taker:
    """A worker's end."""

    def __init__(self, rank: int, descriptors: Sequence[int]) -> None:
        """*descriptors* are those of the ``Dispatcher``, which this end owns."""
        self._items, self._results, self._file = descriptors
        self._arena = Arena(self._file, rank)
        self._hungry = select.poll()
        self._hungry.register(self._items, select.POLLIN)
        self._room = select.poll()
        self._room.register(self._results, select.POLLOUT)
        self._unread: deque[Array] = deque()  # blocks of results
        self._read = 0  # how many blocks the main process had read, when the last ones were dropped

    def begin(self, read: int) -> None:
        """A command begins: nobody wants results of the last one.  *read* blocks were read until now."""
        self._unread.clear()
        self._read = read

    def take(self, idle: Callable[[], None]) -> tuple[int, Packed] | None:
        """The next item, with its number; None when there will be none.  Before it waits: *idle*."""
        while True:
            try:
                record = os.read(self._items, _RECORD.size)
                break
            except BlockingIOError:
                idle()
                self._hungry.poll()
        number, place, nbytes, way = _RECORD.unpack(record)
        return None if number == _END else (number, _load(self._file, place, nbytes, way))

    def give(
        self, number: int, result: Packed, read: Callable[[], int], rouse: Callable[[], None]
    ) -> None:
        """Hand a result over.  *read* says how many blocks of this rank the main process has read;
        *rouse* wakes it where it has to read some.

        Raises: SharedMemoryError.
        """
        stream, buffers, own = result
        if not buffers and len(stream) <= _SMALL:
            data = _RECORD.pack(number, _INSIDE, len(stream), own) + stream
        else:
            data = self._in_block(number, result, read, rouse)
        while True:
            try:
                os.write(self._results, data)
                return
            except BlockingIOError:
                rouse()
                self._room.poll()

    def _in_block(
        self, number: int, result: Packed, read: Callable[[], int], rouse: Callable[[], None]
    ) -> bytes:
        stream, buffers, own = result
        parts: list[Any] = [stream]
        nbytes = len(stream) + (_add(parts, buffers) if buffers else 0)
        while True:
            for _ in range(read() - self._read):
                self._unread.popleft()
                self._read += 1
            if not self._unread or sum(map(len, self._unread)) + nbytes <= _AHEAD:
                break
            rouse()
            time.sleep(_PAUSE)
        block, place = _placed(self._arena, nbytes, parts)
        self._unread.append(block)
        return _RECORD.pack(number, place, len(stream), len(buffers) << 1 | own)


def _chunks(pipe: int) -> list[bytes]:
    """What there is to read."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(os.read(pipe, _READ))
            if len(found[-1]) < _READ:
                break
    return found


def _add(parts: list[Any], buffers: Sequence[Any]) -> int:
    """Add *buffers* to *parts*, and before them their lengths; returns the bytes of all that."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = struct.pack(f"={len(views)}q", *map(len, views))
    parts += [lengths, *views]
    return len(lengths) + sum(map(len, views))


def _placed(arena: Arena, nbytes: int, parts: Sequence[Any]) -> tuple[Array, int]:
    """A new block that holds *parts*, and its place in the file."""
    block = arena.empty((nbytes,), np.uint8)
    place = arena.locate(block)
    assert place is not None
    memory, end = block.data, 0
    for part in parts:
        memory[end : end + len(part)] = part
        end += len(part)
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
