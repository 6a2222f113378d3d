"""A worker's end of the channel: it hears commands, replies to them, and says what it does meanwhile."""

from __future__ import annotations

import os
import select
import time
from functools import partial
from typing import Final

from .block import ANSWERED, COMMAND, FIRST, PHASE, SLEEPS, SLICE, TRACED, WOKEN, Block
from .descriptors import Inherited
from .waiting import Condition, Patience, polling, sleep_until, spin

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
    """A worker's end of the channel: receive a command, reply to it.

    It passes on what ``Block`` says of its rank: ``unwanted``, ``blocks_read``, ``is_expected``,
    ``wake_main``, ``wake_sleepers`` and ``note_logged``.
    """

    def __init__(self, memory: memoryview, rank: int, size: int, inherited: Inherited) -> None:
        self._block = block = Block(memory, size, inherited)
        self._rank = rank
        self._words = block.words
        self._head, self._line = block.heads[rank], block.lines[rank]
        self._first = 0  # of the lane of the last command
        self._wakes = select.epoll()
        self._wakes.register(inherited.wake_workers, select.EPOLLIN | select.EPOLLET)
        self._home = _home(rank, size)
        self._parent = os.getppid()
        self._fence = block.fence
        self._woken = 0  # how often the main process had woken the workers
        self._reply = b""  # what lies in the reply area
        self._patience = Patience(polling(size))
        self.unwanted: Final = partial(block.unwanted, rank)
        self.blocks_read: Final = partial(block.blocks_read, rank)
        self.is_expected: Final = block.is_expected
        self.wake_main: Final = block.wake_main
        self.wake_sleepers: Final = block.wake_sleepers
        self.note_logged: Final = block.note_logged

    def receive(self, phase: int) -> tuple[bytes, bytes]:
        """Wait for the next command, which begins *phase*; returns it and its housekeeping."""
        if not self._patience.poll(self._has_command):
            with self._patience:
                self._sleep()
        self._fence()  # the number of the command is loaded before its payload
        words = self._words
        if words[TRACED]:
            self.mark(phase)
        self._first = words[self._head + FIRST]
        _, command, housekeeping = self._block.read_command(self._first)
        return command, housekeeping

    def _sleep(self) -> None:
        """Sleep until there is a command; when one is about to come, poll for it."""
        words = self._words
        while True:
            allowed = _confine(self._home)
            sleep_until(self._is_wanted, words, self._line + SLEEPS, self._fence, self._nap)
            if allowed and os.sched_getaffinity(0) == {self._home}:  # unless somebody has changed it
                _allow(allowed)
            self._woken = words[WOKEN]
            if spin(self._has_command):
                return

    def wait_for(self, condition: Condition, looks: bool) -> None:
        """In the middle of a command, wait until the main process has made *condition* true.

        If it *looks*, it does so now and then at first: to be woken for each short task would take the
        main process longer than to make one, and polling would take its core.
        """
        for _ in range(_LOOKS if looks else 0):
            if condition():
                return
            time.sleep(_LOOK)
        sleep_until(condition, self._words, self._line + SLEEPS, self._fence, self._nap)

    def _is_wanted(self) -> bool:
        """Whether a command is there, or about to come."""
        return self._has_command() or self._words[WOKEN] != self._woken

    def _has_command(self) -> bool:
        words = self._words
        return words[self._head] != words[self._line]  # COMMAND and ANSWERED

    def _nap(self) -> bool:
        first = self._words[self._line + SLEEPS] == 1
        self._wakes.poll(_FIRST_NAP / 1000 if first else None)
        if first and os.getppid() != self._parent:  # in case a function has closed the lifeline
            raise EOFError("the main process has gone")
        return False

    @property
    def count(self) -> tuple[memoryview, int]:
        """The words, and the place among them of the count in the phase that was reported last."""
        return self._words, self._line + SLICE

    @property
    def traced(self) -> bool:
        """Whether what this worker does is recorded."""
        return bool(self._words[TRACED])

    @property
    def number(self) -> int:
        """The number of the last command."""
        return self._words[self._head + COMMAND]

    def answered(self, rank: int, number: int) -> bool:
        """Whether *rank* has answered command *number*."""
        return self._block.answered(rank) == number

    def reply(self, payload: bytes, phase: int) -> None:
        """Answer the last command, with at most ``AREA`` bytes; *phase* begins."""
        self.report(phase, 0)
        words, block = self._words, self._block
        if payload is not self._reply:
            block.write_reply(self._rank, payload)
            self._reply = payload
        self._fence()  # the payload before the number
        words[self._line + ANSWERED] = number = words[self._head + COMMAND]
        self._fence()  # the number is stored before the load of whether the main process sleeps
        block.wake_for(number, self._first)
        os.sched_yield()  # to the main process, which may wait for this core

    def report(self, phase: int, count: int) -> None:
        """Say what this worker does: for timeouts, progress bars and traces."""
        words, line = self._words, self._line  # as ``Block.report``, without a call
        words[line + PHASE] = phase
        words[line + SLICE] = count
        if words[TRACED]:
            self.mark(phase)

    def mark(self, phase: int) -> None:
        """Say what this worker does, for traces only; the count stays that of the last report."""
        words = self._words
        if words[TRACED]:
            count = words[self._line + SLICE]
            self._block.mark(self._rank, [(time.perf_counter_ns(), phase, count)])
