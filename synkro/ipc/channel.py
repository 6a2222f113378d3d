"""Commands to all workers and their replies, through one shared block.

::

    main process                        shared block                        worker r
    ────────────                        ────────────                        ────────
    Controller.send   ── payload ──▶  [ command area ]
                      ── number  ──▶  [ COMMAND ]          ◀── polls ──  Listener.receive
                      ── eventfd of all, if one said that it sleeps ──▶  (spins, then sleeps)

    Controller.wait   ── polls ───▶   [ ANSWERED r ]       ◀── number ──  Listener.reply
     (spins, then                     [ reply area r ]     ◀── payload ─
      sleeps)         ◀──── eventfd of main, if it said that it sleeps, from the last to answer

A number is written after its payload, so whoever sees the number sees the payload.  Whoever goes to
sleep says so first and then looks once more; whoever writes a number looks afterwards whether the
other sleeps.  Between the store and the look stands a fence, so one of the two always notices.

While somebody traces (``Controller.trace``), workers also leave marks in the block, each a time, a
phase and a count: from then on this rank does that.  All clocks are the machine's monotonic one.

The numbers in the block are the only state: what was sent, and who has answered, can be read there
at any time, also after Ctrl-C interrupted this module half-way.

Descriptors cannot travel through memory: they come over a Unix socket, each with its number, and a
worker that misses one reads the socket until it has it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..memory.segment import ALIGNMENT

AREA = 1 << 17
"""Bytes of the command area and of each reply area; longer ones go through a segment of their own."""

SPIN = 100e-6
"""Seconds to poll before sleeping: about what being woken costs."""

_WORD = 8
_LINE = ALIGNMENT // _WORD  # words in a cache line; each party writes to lines of its own
_COMMAND, _COMMAND_SIZE, _HOUSEKEEPING_SIZE, _UNWANTED, _TRACED = 0, 1, 2, 3, 4
_MAIN_SLEEPS = _LINE
_RANKS = 2 * _LINE
_ANSWERED, _REPLY_SIZE, _SLEEPS, _PHASE, _SLICE, _MARKED = 0, 1, 2, 3, 4, 5

MARKS = 1 << 12
"""How many marks of a rank there is room for between two looks at them; the oldest give way."""

_MARK = struct.Struct("=3Q")

_FIRST_NAP = 1  # milliseconds after which a sleeper looks once more, whatever was lost
_MAX_DESCRIPTORS = 250  # a Unix socket takes at most 253 in a message


def block_bytes(size: int) -> int:
    """The size of the shared block for *size* workers."""
    return (_RANKS + size * _LINE) * _WORD + (1 + size) * AREA + size * MARKS * _MARK.size


class _Block:
    """The layout of the shared block, for one process's mapping of it."""

    def __init__(self, memory: memoryview, size: int) -> None:
        words = (_RANKS + size * _LINE) * _WORD
        self.words = memory[:words].cast("Q")
        self.lines = [_RANKS + rank * _LINE for rank in range(size)]
        self.command = memory[words : words + AREA]
        replies = memory[words + AREA :]
        self.replies = [replies[rank * AREA : (rank + 1) * AREA] for rank in range(size)]
        marks = memory[words + (1 + size) * AREA :]
        room = MARKS * _MARK.size
        self.marks = [marks[rank * room : (rank + 1) * room] for rank in range(size)]
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Make what was stored before visible before anything that is read or stored after.

        Taking a free lock is an atomic read-modify-write, which is a full barrier.
        """
        with self._lock:
            pass


class _Patience:
    """Whether polling is worth while: after a short wait always, else rarely.

    A wait counts as short by its whole length, however it was waited: if only polls that saw something
    counted, two parties that put each other to sleep would stay asleep.  Polls in vain after long waits
    may take half a percent of the time that goes by.  (Polling itself takes little from who computes:
    it gives its core away between any two looks.)
    """

    _SHORT = 4 * SPIN
    _SHARE = 0.005
    _SAVED = 10 * SPIN  # what can be saved up of it

    def __init__(self) -> None:
        self._length = 0.0  # of the last wait
        self._credit = self._SAVED
        self._start = time.perf_counter()

    def spins(self) -> bool:
        """Whether to poll in the wait that begins now."""
        now = time.perf_counter()
        self._credit = min(self._SAVED, self._credit + self._SHARE * (now - self._start))
        self._start = now
        return self._length < self._SHORT or self._credit >= SPIN

    def waited(self, polled_in_vain: bool) -> None:
        """The wait is over."""
        self._length = time.perf_counter() - self._start
        if polled_in_vain and self._length >= self._SHORT:
            self._credit -= SPIN


class Controller:
    """The main process's end: one command to all workers, one reply from each."""

    def __init__(
        self,
        memory: memoryview,
        wake_main: int,
        wake_workers: int,
        sockets: Sequence[socket.socket],
    ) -> None:
        self._block = _Block(memory, len(sockets))
        self._wake_main = wake_main
        self._wake_workers = wake_workers
        self._sockets = sockets
        self._last_command = b""  # what lies in the block
        self._patience = _Patience()

    def send(self, command: bytes, housekeeping: bytes) -> None:
        """Hand a command to all workers; together at most ``AREA`` bytes."""
        block, words = self._block, self._block.words
        size = len(command)
        if command is not self._last_command:
            block.command[:size] = command
            self._last_command = command
        if housekeeping:
            block.command[size : size + len(housekeeping)] = housekeeping
        words[_COMMAND_SIZE] = size
        words[_HOUSEKEEPING_SIZE] = len(housekeeping)
        block.fence()
        words[_COMMAND] += 1  # from here on it is sent
        block.fence()
        for line in block.lines:
            if words[line + _SLEEPS]:
                self.wake_all()
                break

    def close(self) -> None:
        """Let go of the block; the controller cannot be used after that."""
        del self._block

    def disclaim(self) -> None:
        """Say that nobody wants the last command's answers: who has not begun it need not."""
        self._block.words[_UNWANTED] = self._block.words[_COMMAND]
        self._block.fence()

    def wake_all(self) -> None:
        """Wake every worker: in one go, as the first that is awake may take this process's core."""
        os.eventfd_write(self._wake_workers, 1)

    def send_descriptors(self, rank: int, numbered: Sequence[tuple[int, int]]) -> None:
        """Pass descriptors to a worker, as pairs ``(number, fd)``."""
        for first in range(0, len(numbered), _MAX_DESCRIPTORS):
            some = numbered[first : first + _MAX_DESCRIPTORS]
            body = struct.pack(f"<{len(some)}q", *(number for number, _ in some))
            head = struct.pack("<q", len(some))
            socket.send_fds(self._sockets[rank], [head + body], [fd for _, fd in some])

    def unanswered(self) -> list[int]:
        """The ranks that still have to answer the last command."""
        words = self._block.words
        number = words[_COMMAND]
        return [rank for rank, line in enumerate(self._block.lines) if words[line + _ANSWERED] != number]

    def wait(
        self,
        deadline: float | None,
        sentinels: Sequence[int],
        on_tick: Callable[[], None] | None = None,
    ) -> list[int]:
        """Wait until all workers have answered, one of *sentinels* is ready, or the *deadline* is over.

        *deadline* is on the clock of ``time.monotonic``.  *on_tick* is called every 50 ms.
        Returns the sentinels that are ready, when not all workers have answered.
        """
        spins = self._patience.spins() and on_tick is None
        if spins and self._spin():
            self._patience.waited(polled_in_vain=False)
            return []
        try:
            return self._sleep(deadline, sentinels, on_tick)
        finally:
            self._patience.waited(polled_in_vain=spins)

    def _sleep(
        self,
        deadline: float | None,
        sentinels: Sequence[int],
        on_tick: Callable[[], None] | None,
    ) -> list[int]:
        words = self._block.words
        poll = select.poll()
        for fd in (self._wake_main, *sentinels):
            poll.register(fd, select.POLLIN)
        nap = _FIRST_NAP
        try:
            while True:
                words[_MAIN_SLEEPS] = 1
                self._block.fence()
                if not self.unanswered():
                    return []
                ready = [fd for fd, _ in poll.poll(_poll_ms(nap, deadline))]
                if self._wake_main in ready:
                    os.eventfd_read(self._wake_main)
                    ready.remove(self._wake_main)
                if ready and self.unanswered():
                    return ready
                if on_tick is not None:
                    on_tick()
                if deadline is not None and time.monotonic() >= deadline:
                    return []
                nap = -1 if on_tick is None else 50
        finally:
            words[_MAIN_SLEEPS] = 0

    def _spin(self) -> bool:
        """Poll for the answers; True if all have come."""
        words = self._block.words
        number = words[_COMMAND]
        give_up = time.perf_counter() + SPIN
        for line in self._block.lines:
            answered = line + _ANSWERED
            while words[answered] != number:
                os.sched_yield()
                if time.perf_counter() > give_up:
                    return False
        self._block.fence()
        return True

    def reply(self, rank: int) -> bytes:
        """The reply of *rank* to the last command."""
        size = self._block.words[self._block.lines[rank] + _REPLY_SIZE]
        return bytes(self._block.replies[rank][:size])

    def trace(self, on: bool) -> None:
        """Let the workers leave marks from now on, or no longer."""
        self._block.words[_TRACED] = on

    def marked(self, rank: int) -> int:
        """How many marks *rank* has left until now."""
        return self._block.words[self._block.lines[rank] + _MARKED]

    def marks(self, rank: int, since: int) -> list[tuple[int, int, int]]:
        """The marks of *rank* from number *since* on that are still there: ns, phase and count."""
        end = self.marked(rank)
        marks = self._block.marks[rank]
        numbers = range(max(since, end - MARKS), end)
        return [_MARK.unpack_from(marks, number % MARKS * _MARK.size) for number in numbers]

    def whereabouts(self, rank: int) -> tuple[int, int]:
        """What *rank* has last said that it does: a phase, and a count in it."""
        line = self._block.lines[rank]
        return self._block.words[line + _PHASE], self._block.words[line + _SLICE]


def _poll_ms(nap: int, deadline: float | None) -> int:
    """Milliseconds to sleep (-1: until woken), rounded up, no further than the deadline."""
    if deadline is None:
        return nap
    left = max(0, int((deadline - time.monotonic()) * 1000) + 1)
    return left if nap < 0 else min(nap, left)


def _home(rank: int, size: int) -> int | None:
    """The core that this worker sleeps on; None where there are more cores than workers."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)] if size >= len(cores) else None


@contextlib.contextmanager
def _at_home(core: int | None) -> Iterator[None]:
    """Sleep on *core*, and be free to go anywhere when awake.

    The kernel wakes sleepers where it thinks best, and where all cores have something to do (one of
    them the main process), that may be the same core for two: one would wait for the other to finish.
    """
    allowed = os.sched_getaffinity(0)
    if core is None or core not in allowed or len(allowed) == 1:
        yield
        return
    with contextlib.suppress(OSError):  # the cores of a container may have changed
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        if os.sched_getaffinity(0) == {core}:  # nobody has said otherwise meanwhile
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, allowed)


class Listener:
    """A worker's end: receive a command, reply to it."""

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        wake_main: int,
        wake_workers: int,
        sock: socket.socket,
    ) -> None:
        self._block = _Block(memory, size)
        self._line = self._block.lines[rank]
        self._area = self._block.replies[rank]
        self._marks = self._block.marks[rank]
        self._wake_main = wake_main
        self._wakes = select.epoll()
        self._wakes.register(wake_workers, select.EPOLLIN | select.EPOLLET)
        self._socket = sock
        self._home = _home(rank, size)
        self._parent = os.getppid()
        self._received: dict[int, int] = {}
        self._patience = _Patience()

    def close(self) -> None:
        """Let go of the socket, when no command will come any more."""
        self._socket.close()

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for the next command; returns it and its housekeeping."""
        words = self._block.words
        last = words[self._line + _ANSWERED]
        spins = self._patience.spins()
        seen = spins and self._spin(last)
        if not seen:
            with _at_home(self._home):
                self._sleep(last)
        self._patience.waited(polled_in_vain=spins and not seen)
        self._block.fence()
        middle = words[_COMMAND_SIZE]
        end = middle + words[_HOUSEKEEPING_SIZE]
        return bytes(self._block.command[:middle]), bytes(self._block.command[middle:end])

    def _spin(self, last: int) -> bool:
        words = self._block.words
        give_up = time.perf_counter() + SPIN
        while words[_COMMAND] == last:
            os.sched_yield()
            if time.perf_counter() > give_up:
                return False
        return True

    def _sleep(self, last: int) -> None:
        words = self._block.words
        sleeps = self._line + _SLEEPS
        nap = _FIRST_NAP
        while True:
            words[sleeps] = 1
            self._block.fence()
            if words[_COMMAND] != last:
                words[sleeps] = 0
                return
            self._wakes.poll(nap / 1000 if nap > 0 else None)
            if os.getppid() != self._parent:  # for functions that close what is not theirs
                raise EOFError("the main process has gone")
            nap = -1

    @property
    def number(self) -> int:
        """The number of the last command."""
        return self._block.words[_COMMAND]

    def answered(self, rank: int, number: int) -> bool:
        """Whether *rank* has answered command *number*."""
        return self._block.words[self._block.lines[rank] + _ANSWERED] == number

    def unwanted(self) -> bool:
        """Whether nobody wants the answer to the last command any more."""
        return self._block.words[_UNWANTED] == self._block.words[_COMMAND]

    def reply(self, payload: bytes) -> None:
        """Answer the last command, with at most ``AREA`` bytes."""
        block, words = self._block, self._block.words
        self._area[: len(payload)] = payload
        words[self._line + _REPLY_SIZE] = len(payload)
        block.fence()
        number = words[_COMMAND]
        words[self._line + _ANSWERED] = number
        block.fence()
        if words[_MAIN_SLEEPS] and all(words[line + _ANSWERED] == number for line in block.lines):
            os.eventfd_write(self._wake_main, 1)

    def descriptor(self, number: int) -> int:
        """The descriptor that was passed under *number*; the caller owns it from now on."""
        while number not in self._received:
            head, fds, _, _ = socket.recv_fds(self._socket, 8, _MAX_DESCRIPTORS)
            if len(head) < 8:
                raise EOFError("the main process closed the socket")
            count = struct.unpack("<q", head)[0]
            body = b""
            while len(body) < 8 * count:
                body += self._socket.recv(8 * count - len(body))
            if len(fds) < count:
                for fd in fds:
                    os.close(fd)
                raise OSError(errno.EMFILE, "this worker has too many open files to map an input")
            for name, fd in zip(struct.unpack(f"<{count}q", body), fds, strict=True):
                if name in self._received:
                    os.close(self._received[name])
                self._received[name] = fd
        return self._received.pop(number)

    def report(self, phase: int, count: int) -> None:
        """Say what this worker does, for messages about time and for progress bars."""
        words = self._block.words
        words[self._line + _PHASE] = phase
        words[self._line + _SLICE] = count
        if words[_TRACED]:
            self._leave_mark(phase, count)

    def mark(self, phase: int) -> None:
        """Say only whoever traces what this worker does, in the slice that it is in."""
        words = self._block.words
        if words[_TRACED]:
            self._leave_mark(phase, words[self._line + _SLICE])

    def _leave_mark(self, phase: int, count: int) -> None:
        words, marked = self._block.words, self._line + _MARKED
        number = words[marked]
        _MARK.pack_into(self._marks, number % MARKS * _MARK.size, time.perf_counter_ns(), phase, count)
        words[marked] = number + 1
