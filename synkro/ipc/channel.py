"""Commands to workers and their replies, through one shared block.

::

    main process                        shared block                        worker r
    ────────────                        ────────────                        ────────
    Lane.send         ── payload ──▶  [ command area f ]
                      ── number  ──▶  [ COMMAND r ]        ◀── polls ──  Listener.receive
                      ── eventfd of all, if one said that it sleeps ──▶  (spins, then sleeps)

    Lane.wait         ── polls ───▶   [ ANSWERED r ]       ◀── number ──  Listener.reply
     (spins, then                     [ reply area r ]     ◀── payload ─
      sleeps)         ◀──── eventfd f, if main said that it sleeps, from the last to answer

A *lane* is a set of ranks that get the same commands, most often all.  Each command has a number, which
is written for each of its ranks.  Its payload, its wake-ups and what the main process says of its wait
belong to the first rank of the lane, *f*.  So lanes that share no rank share nothing, and several
threads of the main process may wait at the same time, each for a lane.

Before a call is planned, ``Controller.rouse`` wakes workers that have slept for long: a sleeper needs
some 50 us to come to itself, and has most of them behind it when the command comes.

A number is written after its payload, so whoever sees the number sees the payload.  How the two sides
wait for each other, and where the fences stand, is in ``ipc.waiting``.

An *edition* counts how often a payload has changed.  If the same command is sent again, or the same
reply given again, its edition stays, and the other side uses what it has read before.

During a trace (``Controller.trace``) workers also leave *marks* in the block.  A mark is a time, a phase
and a count: since that time the rank is in that phase.  All clocks are the machine's monotonic one.

The words in the block are the only state: what was sent, and who has answered, can be read there
at any time, also after Ctrl-C interrupted this module half-way.

In the middle of a command that lasts (a map) the two sides wake each other, too: the main process says
which items' results it sleeps for (``Controller.expect``), and wakes workers that sleep for an item.

Descriptors cannot travel through memory: they come over a Unix socket, each with its number.  A
worker that lacks one reads the socket until it has it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from ..memory.segment import ALIGNMENT
from .waiting import SPIN, Fence, Patience, sleep_until, spin

AREA = 1 << 17
"""Bytes of the command area and of each reply area; a longer payload goes through its own segment."""

_WORD = 8
_LINE = ALIGNMENT // _WORD  # words in a cache line; each party writes to lines of its own
_TRACED, _ROUSED = range(2)
_AWAITED, _ENOUGH = range(_LINE, _LINE + 2)
_RANKS = 2 * _LINE
# of each rank two lines: its orders, which the main process writes, and its own
_COMMAND, _FIRST, _UNWANTED = range(3)  # and, of the lane whose first rank it is:
_COMMAND_SIZE, _HOUSEKEEPING_SIZE, _COMMAND_EDITION, _MAIN_SLEEPS, _EACH = range(3, _LINE)
_ANSWERED, _REPLY_SIZE, _REPLY_EDITION, _SLEEPS, _PHASE, _SLICE, _MARKED, _READ = range(_LINE)

MARKS = 1 << 12
"""How many marks of each rank the block holds; new marks overwrite the oldest."""

_MARK = struct.Struct("=3Q")
_NEVER = (1 << 64) - 1  # a number that no item has
_FD = struct.Struct("i")

_FIRST_NAP = 1  # milliseconds after which a sleeper looks once more, in case a wake-up was lost
_LOOK, _LOOKS = 5e-5, 20  # seconds between two looks for an item, and how many before it sleeps
_NAP = 1000  # and the main process from then on: a fork of it may have been woken in its place
_MAX_DESCRIPTORS = 250  # a Unix socket takes at most 253 in a message


def block_bytes(size: int) -> int:
    """The size of the shared block for *size* workers."""
    return (_RANKS + 2 * size * _LINE) * _WORD + 2 * size * AREA + size * MARKS * _MARK.size


class _Block:
    """The layout of the shared block, for one process's mapping of it."""

    def __init__(self, memory: memoryview, size: int) -> None:
        words = (_RANKS + 2 * size * _LINE) * _WORD
        self.words = memory[:words].cast("Q")
        self.orders = [_RANKS + 2 * rank * _LINE for rank in range(size)]
        self.lines = [order + _LINE for order in self.orders]
        areas = [memory[words + at * AREA : words + (at + 1) * AREA] for at in range(2 * size)]
        self.commands, self.replies = areas[:size], areas[size:]
        marks = memory[words + 2 * size * AREA :]
        room = MARKS * _MARK.size
        self.marks = [marks[rank * room : (rank + 1) * room] for rank in range(size)]
        self.fence = Fence()


class Controller:
    """The main process's end.

    Attributes:
        everyone: the lane of all ranks.
    """

    def __init__(
        self, memory: memoryview, size: int, wakes_main: Sequence[int], wake_workers: int
    ) -> None:
        """*wakes_main* are the eventfds that wake this process, by the first ranks of lanes."""
        self._block = _Block(memory, size)
        self._wakes_main = wakes_main
        self._wake_workers = wake_workers
        self._fence = self._block.fence
        self._sleeps = [line + _SLEEPS for line in self._block.lines]
        self._numbers = itertools.count(1)
        self._lanes: dict[tuple[int, ...], Lane] = {}
        self.everyone = self.lane(tuple(range(size)))

    def lane(self, ranks: tuple[int, ...]) -> Lane:
        """The lane of *ranks*, which are in ascending order."""
        lane = self._lanes.get(ranks)
        if lane is None:
            wake = self._wakes_main[ranks[0]]
            lane = self._lanes[ranks] = Lane(self, self._block, ranks, wake, self._numbers)
        return lane

    def displace(self, lane: Lane) -> None:
        """What other lanes have written for the ranks of *lane* counts no more."""
        for other in tuple(self._lanes.values()):
            if not lane.members.isdisjoint(other.members):
                other.displaced()

    def rouse(self) -> None:
        """Wake the workers, if they have slept for long: a command will follow at once.

        They wake while the main process prepares it, and then poll for it.  The last rank stands for
        all: this is a hint, and ``send`` wakes those that sleep all the same.
        """
        words = self._block.words
        if words[self._sleeps[-1]] > 1:
            words[_ROUSED] += 1
            self._fence()  # that they are roused is stored before they wake and load it
            self.wake_all()

    def wake_sleepers(self) -> None:
        """Wake the workers, if one of them sleeps: what is there for them has been stored."""
        self._fence()  # that is stored before the loads of who sleeps
        words = self._block.words
        for sleeps in self._sleeps:
            if words[sleeps]:
                self.wake_all()
                break

    def wake_all(self) -> None:
        """Wake all workers in one system call: the first that is awake may take this process's core."""
        os.eventfd_write(self._wake_workers, 1)

    def close(self) -> None:
        """Let go of the block; the controller cannot be used after that."""
        for lane in self._lanes.values():
            lane.close()
        del self._block

    def expect(self, number: int | None = None, enough: int | None = None) -> None:
        """Have workers wake this process with the result of item *number*, and of items from *enough*
        on; None: with none."""
        words = self._block.words
        words[_AWAITED] = _NEVER if number is None else number
        words[_ENOUGH] = _NEVER if enough is None else enough

    def read_block(self, rank: int) -> None:
        """One more block of *rank* with a result has been read."""
        self._block.words[self._block.lines[rank] + _READ] += 1

    def trace(self, on: bool) -> None:
        """Make the workers leave marks from now on, or stop it."""
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
        """The phase that *rank* reported last, and its count in that phase."""
        line = self._block.lines[rank]
        return self._block.words[line + _PHASE], self._block.words[line + _SLICE]


class Lane:
    """One command after the other to the same ranks, and one reply from each.

    Attributes:
        ranks: in ascending order.
        members: the same, as a set.
    """

    def __init__(
        self,
        controller: Controller,
        block: _Block,
        ranks: tuple[int, ...],
        wake_main: int,
        numbers: Iterator[int],
    ) -> None:
        """*numbers* are those of commands, and editions, of all lanes."""
        self.ranks = ranks
        self.members = frozenset(ranks)
        self._controller = controller
        self._block = block
        self._fence = block.fence
        self._wake_main = wake_main
        self._numbers = numbers
        self._area = block.commands[ranks[0]]
        self._head = block.orders[ranks[0]]
        self._commands = [block.orders[rank] + _COMMAND for rank in ranks]
        self._lines = [block.lines[rank] for rank in ranks]
        self._answered = [line + _ANSWERED for line in self._lines]
        self._sleeps = [line + _SLEEPS for line in self._lines]
        self._editions = [line + _REPLY_EDITION for line in self._lines]
        self._whole = len(ranks) == len(block.lines)
        self._number = 0  # of the last command
        self._command: bytes | None = None  # what lies in the block; None while it is being written
        self._read: list[int] = []  # the editions of the replies
        self._replies: list[bytes] = []
        self._patience = Patience(_spin(len(ranks)))

    def close(self) -> None:
        """Let go of the block."""
        del self._block, self._area

    def displaced(self) -> None:
        """Other lanes may have written to the block what this one had written there."""
        self._command = None

    def send(self, command: bytes, housekeeping: bytes) -> None:
        """Hand a command to all ranks of the lane; together at most ``AREA`` bytes."""
        words = self._block.words
        if command is not self._command or housekeeping:
            self._write(command, housekeeping)
        number = next(self._numbers)
        self._fence()  # the payload, and what the user has written to Data, before the number
        for place in self._commands:
            words[place] = number  # from here on it is sent
        self._number = number
        self._fence()  # the number before the loads of who sleeps
        for sleeps in self._sleeps:
            if words[sleeps]:
                self._controller.wake_all()
                break

    def _write(self, command: bytes, housekeeping: bytes) -> None:
        words, area, head = self._block.words, self._area, self._head
        if self._command is None:
            self._controller.displace(self)
            for rank in self.ranks:
                words[self._block.orders[rank] + _FIRST] = self.ranks[0]
            words[head + _EACH] = not self._whole
        self._command = None  # an interrupt may leave a half-written command in the block
        middle = len(command)
        end = middle + len(housekeeping)
        area[:middle] = command
        area[middle:end] = housekeeping
        words[head + _COMMAND_SIZE], words[head + _HOUSEKEEPING_SIZE] = middle, end - middle
        words[head + _COMMAND_EDITION] = next(self._numbers)
        self._command = command

    def disclaim(self) -> None:
        """Say that nobody wants the last command any more: a worker that has not begun it skips it."""
        words = self._block.words
        for rank in self.ranks:
            order = self._block.orders[rank]
            words[order + _UNWANTED] = words[order + _COMMAND]
        self._fence()  # it is stored before the workers are interrupted

    def unanswered(self) -> list[int]:
        """The ranks that still have to answer their last command."""
        words = self._block.words
        places = zip(self.ranks, self._answered, self._commands, strict=True)
        return [rank for rank, answered, command in places if words[answered] != words[command]]

    def all_answered(self) -> bool:
        """Whether all ranks have answered the last command of the lane."""
        words, number = self._block.words, self._number
        for answered in self._answered:  # noqa: SIM110 - a generator takes twice as long
            if words[answered] != number:
                return False
        return True

    def wait(
        self,
        deadline: float | None,
        sentinels: Sequence[int],
        on_tick: Callable[[], None] | None = None,
    ) -> list[int]:
        """Wait until all ranks have answered, one of *sentinels* is ready, or the *deadline* is over.

        *deadline* is on the clock of ``time.monotonic``.  *on_tick* is called every 50 ms.
        Returns the sentinels that are ready, when not all ranks have answered.
        """
        if on_tick is None and self._patience.poll(self.all_answered):
            return []
        with self._patience:
            return self._sleep(self.all_answered, deadline, sentinels, on_tick)

    def wait_for(
        self,
        condition: Callable[[], bool],
        deadline: float | None,
        sentinels: Sequence[int],
        on_tick: Callable[[], None] | None = None,
    ) -> list[int]:
        """As ``wait``, but sleep until *condition* holds, which a rank's answer, or a result that was
        expected, may make true."""
        words, each = self._block.words, self._head + _EACH
        before = words[each]
        words[each] = 1
        try:
            return self._sleep(condition, deadline, sentinels, on_tick)
        finally:
            words[each] = before

    def _sleep(
        self,
        condition: Callable[[], bool],
        deadline: float | None,
        sentinels: Sequence[int],
        on_tick: Callable[[], None] | None,
    ) -> list[int]:
        poll = select.poll()
        for fd in (self._wake_main, *sentinels):
            poll.register(fd, select.POLLIN)
        naps = itertools.chain([_FIRST_NAP], itertools.repeat(_NAP if on_tick is None else 50))
        ready: list[int] = []

        def doze() -> bool:
            found = [fd for fd, _ in poll.poll(_poll_ms(next(naps), deadline))]
            if self._wake_main in found:
                with contextlib.suppress(BlockingIOError):  # a fork of this process has read it
                    os.eventfd_read(self._wake_main)
                found.remove(self._wake_main)
            if found and not condition():
                ready.extend(found)
                return True
            if on_tick is not None:
                on_tick()
            return deadline is not None and time.monotonic() >= deadline

        sleep_until(condition, self._block.words, self._head + _MAIN_SLEEPS, self._fence, doze)
        return ready

    def replies(self) -> list[bytes]:
        """The replies to the last command, in the order of ``ranks``: the same list as long as none has
        changed."""
        words = self._block.words
        self._fence()  # the numbers of the answers are loaded before the replies
        editions = [words[edition] for edition in self._editions]
        if editions != self._read:
            self._replies = [
                bytes(self._block.replies[rank][: words[line + _REPLY_SIZE]])
                for rank, line in zip(self.ranks, self._lines, strict=True)
            ]
            self._read = editions
        return self._replies


def _spin(size: int) -> float:
    """Seconds to poll: twice as many where the *size* workers take turns on the cores."""
    return SPIN if size <= len(os.sched_getaffinity(0)) else 2 * SPIN


def send_descriptors(sock: socket.socket, numbered: Sequence[tuple[int, int]]) -> None:
    """Pass descriptors to a worker, as pairs ``(number, fd)``."""
    for first in range(0, len(numbered), _MAX_DESCRIPTORS):
        some = numbered[first : first + _MAX_DESCRIPTORS]
        body = struct.pack(f"<{len(some)}q", *(number for number, _ in some))
        head = struct.pack("<q", len(some))
        socket.send_fds(sock, [head + body], [fd for _, fd in some])


def _poll_ms(nap: int, deadline: float | None) -> int:
    """Milliseconds to sleep, rounded up, no further than the deadline."""
    if deadline is None:
        return nap
    return min(nap, max(0, int((deadline - time.monotonic()) * 1000) + 1))


def _home(rank: int, size: int) -> int | None:
    """The core that this worker sleeps on; None where there are more cores than workers."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)] if size >= len(cores) else None


def _confine(core: int | None) -> set[int] | None:
    """Let this process run on *core* alone; returns the cores that it could run on, if they were more.

    The kernel chooses the core on which a sleeper wakes.  If all cores are busy, one of them with the
    main process, it may choose the same core for two workers: one would wait until the other is done.
    """
    allowed = os.sched_getaffinity(0)
    if core is None or core not in allowed or len(allowed) == 1:
        return None
    _allow({core})
    return allowed


def _allow(cores: set[int]) -> None:
    try:  # faster than contextlib.suppress
        os.sched_setaffinity(0, cores)
    except OSError:  # the cores of a container may have changed
        return


class Listener:
    """A worker's end: receive a command, reply to it."""

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        wakes_main: Sequence[int],
        wake_workers: int,
        sock: socket.socket,
    ) -> None:
        self._block = _Block(memory, size)
        self._order = self._block.orders[rank]
        self._line = self._block.lines[rank]
        self._first = 0  # of the lane of the last command
        self._head = self._block.orders[0]
        self._area = self._block.replies[rank]
        self._marks = self._block.marks[rank]
        self._wakes_main = wakes_main
        self._wakes = select.epoll()
        self._wakes.register(wake_workers, select.EPOLLIN | select.EPOLLET)
        self._socket = sock
        self._home = _home(rank, size)
        self._parent = os.getppid()
        self._received: dict[int, int] = {}
        self._fence = self._block.fence
        self._roused = 0  # how often the main process had roused the workers
        self._edition = 0  # of the command that was read last
        self._command = b""
        self._reply = b""  # what lies in the reply area
        self._patience = Patience(_spin(size))

    def close(self) -> None:
        """Let go of the socket, when no command will come any more."""
        self._socket.close()

    def receive(self, phase: int) -> tuple[bytes, bytes]:
        """Wait for the next command, which begins *phase*; returns it and its housekeeping."""
        if not self._patience.poll(self._has_command):
            with self._patience:
                self._sleep()
        self._fence()  # the number of the command is loaded before its payload
        words = self._block.words
        if words[_TRACED]:
            self._leave_mark(phase, words[self._line + _SLICE])
        if words[self._order + _FIRST] != self._first:
            self._first = words[self._order + _FIRST]
            self._head = self._block.orders[self._first]
        head = self._head
        edition = words[head + _COMMAND_EDITION]
        if edition == self._edition:
            return self._command, b""
        middle = words[head + _COMMAND_SIZE]
        end = middle + words[head + _HOUSEKEEPING_SIZE]
        area = self._block.commands[self._first]
        self._command, self._edition = bytes(area[:middle]), edition
        return self._command, bytes(area[middle:end])

    def _sleep(self) -> None:
        """Sleep until there is a command; when one is about to come, poll for it."""
        words = self._block.words
        while True:
            allowed = _confine(self._home)
            sleep_until(self._is_wanted, words, self._line + _SLEEPS, self._fence, self._doze)
            if allowed and os.sched_getaffinity(0) == {self._home}:  # unless somebody has changed it
                _allow(allowed)
            self._roused = words[_ROUSED]
            if spin(self._has_command):
                return

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """In the middle of a command, wait until the main process has made *condition* true.

        At first it looks now and then: to be woken for each item would take the main process longer than
        to make one, and polling would take its core.
        """
        for _ in range(_LOOKS):
            if condition():
                return
            time.sleep(_LOOK)
        sleep_until(condition, self._block.words, self._line + _SLEEPS, self._fence, self._doze)

    def _is_wanted(self) -> bool:
        """Whether a command is there, or about to come."""
        return self._has_command() or self._block.words[_ROUSED] != self._roused

    def _has_command(self) -> bool:
        words = self._block.words
        return words[self._order] != words[self._line]  # COMMAND and ANSWERED

    def _doze(self) -> bool:
        first = self._block.words[self._line + _SLEEPS] == 1
        self._wakes.poll(_FIRST_NAP / 1000 if first else None)
        if first and os.getppid() != self._parent:  # in case a function has closed the lifeline
            raise EOFError("the main process has gone")
        return False

    @property
    def number(self) -> int:
        """The number of the last command."""
        return self._block.words[self._order + _COMMAND]

    def answered(self, rank: int, number: int) -> bool:
        """Whether *rank* has answered command *number*."""
        return self._block.words[self._block.lines[rank] + _ANSWERED] == number

    def unwanted(self) -> bool:
        """Whether the main process no longer wants the last command."""
        words = self._block.words
        return words[self._order + _UNWANTED] == words[self._order + _COMMAND]

    def reply(self, payload: bytes, phase: int) -> None:
        """Answer the last command, with at most ``AREA`` bytes; *phase* begins."""
        self.report(phase, 0)
        words, line = self._block.words, self._line
        if payload is not self._reply:
            self._area[: len(payload)] = payload
            words[line + _REPLY_SIZE] = len(payload)
            words[line + _REPLY_EDITION] += 1
            self._reply = payload
        self._fence()  # the payload before the number
        number = words[self._order]  # COMMAND
        words[line] = number  # ANSWERED
        self._fence()  # the number is stored before the load of whether the main process sleeps
        head = self._head
        if words[head + _MAIN_SLEEPS] and (
            words[head + _EACH] or all(words[each + _ANSWERED] == number for each in self._block.lines)
        ):
            os.eventfd_write(self._wakes_main[self._first], 1)
        os.sched_yield()  # to the main process, which may wait for this core

    def is_expected(self, number: int) -> bool:
        """Whether the main process waits for the result of item *number*, or will."""
        words = self._block.words
        return number == words[_AWAITED] or number >= words[_ENOUGH]

    def wake_main(self) -> None:
        """Wake the main process, if it sleeps."""
        if self._block.words[self._block.orders[0] + _MAIN_SLEEPS]:
            os.eventfd_write(self._wakes_main[0], 1)

    def blocks_read(self) -> int:
        """How many blocks of this rank with results the main process has read."""
        return self._block.words[self._line + _READ]

    def descriptor(self, number: int) -> int:
        """The descriptor that was passed under *number*, open until ``release(number)``.

        Raises: OSError if this process cannot open so many files; later it can be asked for again.
        """
        while number not in self._received:
            # a look first: where there is no place for the descriptors, the message stays in the socket
            room = socket.CMSG_LEN(_MAX_DESCRIPTORS * _FD.size)
            head, control, _, _ = self._socket.recvmsg(8, room, socket.MSG_PEEK)
            fds = [fd for _, _, data in control for (fd,) in _FD.iter_unpack(data)]
            if len(head) < 8:
                raise EOFError("the main process closed the socket")
            count = struct.unpack("<q", head)[0]
            if len(fds) < count:
                for fd in fds:
                    os.close(fd)
                raise OSError(errno.EMFILE, "this worker has too many open files to map an input")
            body = b""
            while len(body) < 8 * (1 + count):
                body += self._socket.recv(8 * (1 + count) - len(body))
            for name, fd in zip(struct.unpack_from(f"<{count}q", body, 8), fds, strict=True):
                if name in self._received:
                    os.close(self._received[name])
                self._received[name] = fd
        return self._received[number]

    def release(self, number: int) -> None:
        """Close the descriptor that was passed under *number*."""
        os.close(self.descriptor(number))
        del self._received[number]

    def report(self, phase: int, count: int) -> None:
        """Say what this worker does: for timeouts, progress bars and traces."""
        words = self._block.words
        words[self._line + _PHASE] = phase
        words[self._line + _SLICE] = count
        if words[_TRACED]:
            self._leave_mark(phase, count)

    def mark(self, phase: int) -> None:
        """As ``report``, but for traces only; the count stays that of the last report."""
        words = self._block.words
        if words[_TRACED]:
            self._leave_mark(phase, words[self._line + _SLICE])

    def _leave_mark(self, phase: int, count: int) -> None:
        words, marked = self._block.words, self._line + _MARKED
        number = words[marked]
        _MARK.pack_into(self._marks, number % MARKS * _MARK.size, time.perf_counter_ns(), phase, count)
        words[marked] = number + 1
