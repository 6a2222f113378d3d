"""The block of shared memory between the main process and its workers: what lies where.

::

    words      of all: TRACED, WOKEN, LOGGED, AWAITED, ENOUGH, SENT
    of a rank  its head, which the main process writes: COMMAND, FIRST, UNWANTED …
               its line, which the worker writes: ANSWERED, PHASE, SLICE …
    areas      for commands and for replies, one of each a rank
    marks      of each rank, during a trace

What the words mean is in ``ipc.channel``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from ..plan.call import ALIGNMENT
from .descriptors import Inherited
from .waiting import new_fence

AREA = 1 << 17
"""Bytes of the command area and of each reply area; a longer payload goes through its own segment."""

WORD = 8
LINE = ALIGNMENT // WORD  # words in a cache line; each party writes to lines of its own
TRACED, WOKEN, LOGGED = range(3)
AWAITED, ENOUGH = range(LINE, LINE + 2)
SENT = 2 * LINE
RANKS = 3 * LINE
# of each rank two lines: its head, which the main process writes, and its own
COMMAND, FIRST, UNWANTED = range(3)  # and, of the lane whose first rank it is:
COMMAND_SIZE, HOUSEKEEPING_SIZE, COMMAND_EDITION, MAIN_SLEEPS, EACH = range(3, LINE)
ANSWERED, REPLY_SIZE, REPLY_EDITION, SLEEPS, PHASE, SLICE, MARKED, READ = range(LINE)

MARKS = 1 << 12
"""How many marks of each rank the block holds; new marks overwrite the oldest."""

MARK = struct.Struct("=3Q")

_NEVER = (1 << 64) - 1  # a number that no item has


def block_bytes(size: int) -> int:
    """The size of the shared block for *size* workers."""
    return (RANKS + 2 * size * LINE) * WORD + 2 * size * AREA + size * MARKS * MARK.size


class Block:
    """The shared block, as one process sees it: what is written and read there, rank by rank.

    Attributes:
        words: all of them, of 8 bytes.
        heads, lines: where the two lines of each rank begin, among the words.
        commands: the areas of commands, by the first rank of a lane.
        fence: makes what was stored visible to all before later loads and stores.
        wakes_main: the eventfds that wake the main process, by the first ranks of lanes.
    """

    def __init__(self, memory: memoryview, size: int, inherited: Inherited) -> None:
        words = (RANKS + 2 * size * LINE) * WORD
        self.words: Final = memory[:words].cast("Q")
        self.heads: Final = [RANKS + 2 * rank * LINE for rank in range(size)]
        self.lines: Final = [head + LINE for head in self.heads]
        areas = [memory[words + at * AREA : words + (at + 1) * AREA] for at in range(2 * size)]
        self.commands: Final = areas[:size]
        self._replies = areas[size:]
        marks = memory[words + 2 * size * AREA :]
        room = MARKS * MARK.size
        self._marks = [marks[rank * room : (rank + 1) * room] for rank in range(size)]
        self.fence: Final = new_fence()
        self.wakes_main: Final = inherited.wakes_main
        self._wake_workers = inherited.wake_workers
        self._sleeps = [line + SLEEPS for line in self.lines]
        self._read: dict[int, tuple[int, bytes]] = {}  # the last commands, by the first ranks of lanes

    def close(self) -> None:
        """Let go of the memory; the block cannot be used after that."""
        del self.words, self.commands, self._replies, self._marks

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def form_lane(self, ranks: Sequence[int]) -> None:
        """From now on *ranks* get the commands of the first of them.  If they are not all, each of
        their answers wakes the main process."""
        for rank in ranks:
            self.words[self.heads[rank] + FIRST] = ranks[0]
        self.words[self.heads[ranks[0]] + EACH] = len(ranks) < len(self.heads)

    def write_command(self, first: int, command: bytes, housekeeping: bytes, edition: int) -> None:
        """Leave a command for the lane whose first rank is *first*."""
        words, head, area = self.words, self.heads[first], self.commands[first]
        middle = len(command)
        end = middle + len(housekeeping)
        area[:middle] = command
        area[middle:end] = housekeeping
        words[head + COMMAND_SIZE], words[head + HOUSEKEEPING_SIZE] = middle, end - middle
        words[head + COMMAND_EDITION] = edition

    def read_command(self, first: int) -> tuple[int, bytes, bytes]:
        """The edition of that lane's command, the command, and its housekeeping, which comes once."""
        words, head = self.words, self.heads[first]
        edition, command = self._read.get(first, (0, b""))
        if words[head + COMMAND_EDITION] == edition:
            return edition, command, b""
        middle = words[head + COMMAND_SIZE]
        end = middle + words[head + HOUSEKEEPING_SIZE]
        area = self.commands[first]
        self._read[first] = read = words[head + COMMAND_EDITION], bytes(area[:middle])
        return *read, bytes(area[middle:end])

    def number(self, rank: int) -> int:
        """The number of the last command of a rank."""
        return self.words[self.heads[rank] + COMMAND]

    def give_up(self, rank: int) -> None:
        """Say that nobody wants the last command of a rank any more."""
        head = self.heads[rank]
        self.words[head + UNWANTED] = self.words[head + COMMAND]

    def unwanted(self, rank: int) -> bool:
        """Whether the main process no longer wants a rank's last command."""
        head = self.heads[rank]
        return self.words[head + UNWANTED] == self.words[head + COMMAND]

    # ── replies ──────────────────────────────────────────────────────────────────────────────────

    def write_reply(self, rank: int, payload: bytes) -> None:
        """Leave a new reply of a rank."""
        words, line = self.words, self.lines[rank]
        self._replies[rank][: len(payload)] = payload
        words[line + REPLY_SIZE] = len(payload)
        words[line + REPLY_EDITION] += 1

    def read_reply(self, rank: int) -> bytes:
        """The last reply of a rank."""
        return bytes(self._replies[rank][: self.words[self.lines[rank] + REPLY_SIZE]])

    def answered(self, rank: int) -> int:
        """The number of the last command that a rank has answered."""
        return self.words[self.lines[rank] + ANSWERED]

    def wake_for(self, number: int, first: int) -> None:
        """Wake the main process, if it sleeps until that lane's ranks have answered command *number*."""
        words, head = self.words, self.heads[first]
        if words[head + MAIN_SLEEPS] and (words[head + EACH] or self._is_answered(number)):
            os.eventfd_write(self.wakes_main[first], 1)

    def _is_answered(self, number: int) -> bool:
        """Whether all ranks have answered command *number*."""
        words = self.words
        return all(words[line + ANSWERED] == number for line in self.lines)

    def begin_anew(self, rank: int) -> None:
        """Another worker takes the place of that of *rank*, which owes no answer."""
        words, line = self.words, self.lines[rank]
        words[line + SLEEPS] = words[line + PHASE] = words[line + SLICE] = 0
        words[line + ANSWERED] = words[self.heads[rank] + COMMAND]

    # ── in the middle of a command ───────────────────────────────────────────────────────────────

    def expect(self, number: int | None = None, enough: int | None = None) -> None:
        """Have workers wake the main process with the result of item *number*, and of items from
        *enough* on; None: with none."""
        words = self.words
        words[AWAITED] = _NEVER if number is None else number
        words[ENOUGH] = _NEVER if enough is None else enough

    def is_expected(self, first: int, count: int) -> bool:
        """Whether the main process waits for one of the results of *count* items, the first of which has
        number *first*."""
        words, stop = self.words, first + count
        return first <= words[AWAITED] < stop or stop > words[ENOUGH]

    def wake_main(self) -> None:
        """Wake the main process, if it sleeps."""
        if self.words[self.heads[0] + MAIN_SLEEPS]:
            os.eventfd_write(self.wakes_main[0], 1)

    def wake_sleepers(self) -> None:
        """Wake the workers, if one of them sleeps: what is there for them has been stored."""
        self.fence()  # that is stored before the loads of who sleeps
        words = self.words
        for sleeps in self._sleeps:
            if words[sleeps]:
                self.wake_all()
                break

    def wake_all(self) -> None:
        """Wake all workers in one system call: the first that is awake may take this process's core."""
        os.eventfd_write(self._wake_workers, 1)

    def read_block(self, rank: int) -> None:
        """One more block of *rank* with a result has been read."""
        self.words[self.lines[rank] + READ] += 1

    def blocks_read(self, rank: int) -> int:
        """How many blocks of a rank with results the main process has read."""
        return self.words[self.lines[rank] + READ]

    # ── what ranks do ────────────────────────────────────────────────────────────────────────────

    def report(self, rank: int, phase: int, count: int) -> None:
        """Say what a rank does: for timeouts, progress bars and traces."""
        line = self.lines[rank]
        self.words[line + PHASE], self.words[line + SLICE] = phase, count

    def whereabouts(self, rank: int) -> tuple[int, int]:
        """The phase that *rank* reported last, and its count in that phase."""
        line = self.lines[rank]
        return self.words[line + PHASE], self.words[line + SLICE]

    def note_logged(self) -> None:
        """Say that this process has logged something."""
        self.words[LOGGED] = 1

    def trace(self, on: bool) -> None:
        """Make the workers leave marks from now on, or stop it."""
        self.words[TRACED] = on

    @property
    def traced(self) -> bool:
        """Whether the workers are to leave marks."""
        return bool(self.words[TRACED])

    def mark(self, rank: int, marks: Iterable[tuple[int, int, int]]) -> None:
        """Leave the next marks of a rank: ns, phase and count."""
        words, memory = self.words, self._marks[rank]
        place = self.lines[rank] + MARKED
        for mark in marks:
            number = words[place]
            MARK.pack_into(memory, number % MARKS * MARK.size, *mark)
            words[place] = number + 1

    def marked(self, rank: int) -> int:
        """How many marks *rank* has left until now."""
        return self.words[self.lines[rank] + MARKED]

    def marks(self, rank: int, since: int) -> list[tuple[int, int, int]]:
        """The marks of *rank* from number *since* on that are still there: ns, phase and count."""
        end, marks = self.marked(rank), self._marks[rank]
        numbers = range(max(since, end - MARKS), end)
        return [MARK.unpack_from(marks, number % MARKS * MARK.size) for number in numbers]
