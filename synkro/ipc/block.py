"""The block of shared memory between the main process and its workers: what lies where.

::

    words      of all: TRACED, ROUSED, AWAITED, ENOUGH, SENT
    of a rank  its orders, which the main process writes: COMMAND, FIRST, UNWANTED …
               its line, which the worker writes: ANSWERED, PHASE, SLICE …
    areas      for commands and for replies, one of each a rank
    marks      of each rank, during a trace

What the words mean is in ``ipc.channel``.
"""

from __future__ import annotations

import struct

from ..memory.segment import ALIGNMENT
from .waiting import Fence

AREA = 1 << 17
"""Bytes of the command area and of each reply area; a longer payload goes through its own segment."""

WORD = 8
LINE = ALIGNMENT // WORD  # words in a cache line; each party writes to lines of its own
TRACED, ROUSED = range(2)
AWAITED, ENOUGH = range(LINE, LINE + 2)
SENT = 2 * LINE
RANKS = 3 * LINE
# of each rank two lines: its orders, which the main process writes, and its own
COMMAND, FIRST, UNWANTED = range(3)  # and, of the lane whose first rank it is:
COMMAND_SIZE, HOUSEKEEPING_SIZE, COMMAND_EDITION, MAIN_SLEEPS, EACH = range(3, LINE)
ANSWERED, REPLY_SIZE, REPLY_EDITION, SLEEPS, PHASE, SLICE, MARKED, READ = range(LINE)

MARKS = 1 << 12
"""How many marks of each rank the block holds; new marks overwrite the oldest."""

MARK = struct.Struct("=3Q")


def block_bytes(size: int) -> int:
    """The size of the shared block for *size* workers."""
    return (RANKS + 2 * size * LINE) * WORD + 2 * size * AREA + size * MARKS * MARK.size


class Block:
    """The layout of the shared block, for one process's mapping of it."""

    def __init__(self, memory: memoryview, size: int) -> None:
        words = (RANKS + 2 * size * LINE) * WORD
        self.words = memory[:words].cast("Q")
        self.orders = [RANKS + 2 * rank * LINE for rank in range(size)]
        self.lines = [order + LINE for order in self.orders]
        areas = [memory[words + at * AREA : words + (at + 1) * AREA] for at in range(2 * size)]
        self.commands, self.replies = areas[:size], areas[size:]
        marks = memory[words + 2 * size * AREA :]
        room = MARKS * MARK.size
        self.marks = [marks[rank * room : (rank + 1) * room] for rank in range(size)]
        self.fence = Fence()

    def all_answered(self, number: int) -> bool:
        """Whether all ranks have answered command *number*."""
        words = self.words
        return all(words[line + ANSWERED] == number for line in self.lines)
