"""A worker's end of the channel: it hears commands, replies to them, and says what it does meanwhile."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

from .block import (
    ANSWERED,
    AWAITED,
    COMMAND,
    COMMAND_EDITION,
    COMMAND_SIZE,
    EACH,
    ENOUGH,
    FIRST,
    HOUSEKEEPING_SIZE,
    MAIN_SLEEPS,
    MARK,
    MARKED,
    MARKS,
    PHASE,
    READ,
    REPLY_EDITION,
    REPLY_SIZE,
    ROUSED,
    SLEEPS,
    SLICE,
    TRACED,
    UNWANTED,
    Block,
)
from .waiting import Patience, polling, sleep_until, spin

_FIRST_NAP = 1  # milliseconds after which a sleeper looks once more, in case a wake-up was lost
_LOOK, _LOOKS = 5e-5, 20  # seconds between two looks for an item, and how many before it sleeps


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
    ) -> None:
        self._block = Block(memory, size)
        self._order = self._block.orders[rank]
        self._line = self._block.lines[rank]
        self._first = 0  # of the lane of the last command
        self._head = self._block.orders[0]
        self._area = self._block.replies[rank]
        self._marks = self._block.marks[rank]
        self._wakes_main = wakes_main
        self._wakes = select.epoll()
        self._wakes.register(wake_workers, select.EPOLLIN | select.EPOLLET)
        self._home = _home(rank, size)
        self._parent = os.getppid()
        self._fence = self._block.fence
        self._roused = 0  # how often the main process had roused the workers
        self._edition = 0  # of the command that was read last
        self._command = b""
        self._reply = b""  # what lies in the reply area
        self._patience = Patience(polling(size))

    def receive(self, phase: int) -> tuple[bytes, bytes]:
        """Wait for the next command, which begins *phase*; returns it and its housekeeping."""
        if not self._patience.poll(self._has_command):
            with self._patience:
                self._sleep()
        self._fence()  # the number of the command is loaded before its payload
        words = self._block.words
        if words[TRACED]:
            self._leave_mark(phase, words[self._line + SLICE])
        if words[self._order + FIRST] != self._first:
            self._first = words[self._order + FIRST]
            self._head = self._block.orders[self._first]
        head = self._head
        edition = words[head + COMMAND_EDITION]
        if edition == self._edition:
            return self._command, b""
        middle = words[head + COMMAND_SIZE]
        end = middle + words[head + HOUSEKEEPING_SIZE]
        area = self._block.commands[self._first]
        self._command, self._edition = bytes(area[:middle]), edition
        return self._command, bytes(area[middle:end])

    def _sleep(self) -> None:
        """Sleep until there is a command; when one is about to come, poll for it."""
        words = self._block.words
        while True:
            allowed = _confine(self._home)
            sleep_until(self._is_wanted, words, self._line + SLEEPS, self._fence, self._doze)
            if allowed and os.sched_getaffinity(0) == {self._home}:  # unless somebody has changed it
                _allow(allowed)
            self._roused = words[ROUSED]
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
        sleep_until(condition, self._block.words, self._line + SLEEPS, self._fence, self._doze)

    def _is_wanted(self) -> bool:
        """Whether a command is there, or about to come."""
        return self._has_command() or self._block.words[ROUSED] != self._roused

    def _has_command(self) -> bool:
        words = self._block.words
        return words[self._order] != words[self._line]  # COMMAND and ANSWERED

    def _doze(self) -> bool:
        first = self._block.words[self._line + SLEEPS] == 1
        self._wakes.poll(_FIRST_NAP / 1000 if first else None)
        if first and os.getppid() != self._parent:  # in case a function has closed the lifeline
            raise EOFError("the main process has gone")
        return False

    @property
    def number(self) -> int:
        """The number of the last command."""
        return self._block.words[self._order + COMMAND]

    def answered(self, rank: int, number: int) -> bool:
        """Whether *rank* has answered command *number*."""
        return self._block.words[self._block.lines[rank] + ANSWERED] == number

    def unwanted(self) -> bool:
        """Whether the main process no longer wants the last command."""
        words = self._block.words
        return words[self._order + UNWANTED] == words[self._order + COMMAND]

    def reply(self, payload: bytes, phase: int) -> None:
        """Answer the last command, with at most ``AREA`` bytes; *phase* begins."""
        self.report(phase, 0)
        words, line = self._block.words, self._line
        if payload is not self._reply:
            self._area[: len(payload)] = payload
            words[line + REPLY_SIZE] = len(payload)
            words[line + REPLY_EDITION] += 1
            self._reply = payload
        self._fence()  # the payload before the number
        number = words[self._order]  # COMMAND
        words[line] = number  # ANSWERED
        self._fence()  # the number is stored before the load of whether the main process sleeps
        head = self._head
        if words[head + MAIN_SLEEPS] and (words[head + EACH] or self._block.all_answered(number)):
            os.eventfd_write(self._wakes_main[self._first], 1)
        os.sched_yield()  # to the main process, which may wait for this core

    def is_expected(self, number: int) -> bool:
        """Whether the main process waits for the result of item *number*, or will."""
        words = self._block.words
        return number == words[AWAITED] or number >= words[ENOUGH]

    def wake_main(self) -> None:
        """Wake the main process, if it sleeps."""
        if self._block.words[self._block.orders[0] + MAIN_SLEEPS]:
            os.eventfd_write(self._wakes_main[0], 1)

    def blocks_read(self) -> int:
        """How many blocks of this rank with results the main process has read."""
        return self._block.words[self._line + READ]

    def report(self, phase: int, count: int) -> None:
        """Say what this worker does: for timeouts, progress bars and traces."""
        words = self._block.words
        words[self._line + PHASE] = phase
        words[self._line + SLICE] = count
        if words[TRACED]:
            self._leave_mark(phase, count)

    def mark(self, phase: int) -> None:
        """As ``report``, but for traces only; the count stays that of the last report."""
        words = self._block.words
        if words[TRACED]:
            self._leave_mark(phase, words[self._line + SLICE])

    def _leave_mark(self, phase: int, count: int) -> None:
        words, marked = self._block.words, self._line + MARKED
        number = words[marked]
        MARK.pack_into(self._marks, number % MARKS * MARK.size, time.perf_counter_ns(), phase, count)
        words[marked] = number + 1
