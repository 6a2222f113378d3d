"""The end of the channel for workers on other hosts: it hears their commands, and answers for them."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
    SENT,
    SLEEPS,
    SLICE,
    TRACED,
    UNWANTED,
    Block,
)

_DOZING = 2  # what SLEEPS says of one that should be roused before the next command


class Order(NamedTuple):
    """A command for some of the ranks.

    *edition* is that of the *command*: the same one means the same bytes.  *housekeeping* comes once.
    """

    number: int
    ranks: tuple[int, ...]
    edition: int
    command: bytes
    housekeeping: bytes


class Deputy:
    """Stands in for *ranks* of other hosts."""

    def __init__(
        self,
        memory: memoryview,
        size: int,
        ranks: Sequence[int],
        wakes_main: Sequence[int],
        wake_workers: int,
    ) -> None:
        self._block = Block(memory, size)
        self._fence = self._block.fence
        self._places = [(rank, self._block.orders[rank], self._block.lines[rank]) for rank in ranks]
        self._heard = {rank: 0 for rank, _, _ in self._places}
        self._sent = 0
        self._commands: dict[int, tuple[int, bytes]] = {}  # the last ones, by the first rank of the lane
        self._replies: dict[int, bytes] = {}  # what lies in the reply areas
        self._wakes_main = wakes_main
        self._wakes = select.epoll()
        self._wakes.register(wake_workers, select.EPOLLIN | select.EPOLLET)

    def called(self) -> bool:
        """Whether a command has been sent since the last look, perhaps to others."""
        return self._block.words[SENT] != self._sent

    def orders(self) -> Iterator[Order]:
        """The commands that have come since the last look.

        The first rank of a lane gets its number last: whoever sees it there sees the others, too.
        """
        words, found = self._block.words, dict[int, list[int]]()
        self._sent = words[SENT]
        self._fence()  # SENT is loaded before the numbers, which were stored before it
        for rank, order, _ in self._places:
            number = words[order + COMMAND]
            if number != self._heard[rank]:
                first = self._block.orders[words[order + FIRST]]
                if words[first + COMMAND] == number:
                    found.setdefault(number, [])
        if not found:
            return
        self._fence()  # the numbers are loaded before the other ranks', and their payload
        for rank, order, _ in self._places:
            number = words[order + COMMAND]
            if number in found and number != self._heard[rank]:
                self._heard[rank] = number
                found[number].append(rank)
        for number, ranks in sorted(found.items()):
            yield self._order(number, tuple(ranks))

    def _order(self, number: int, ranks: tuple[int, ...]) -> Order:
        words = self._block.words
        first = words[self._block.orders[ranks[0]] + FIRST]
        head, area = self._block.orders[first], self._block.commands[first]
        edition = words[head + COMMAND_EDITION]
        last, command = self._commands.get(first, (0, b""))
        if last == edition:
            return Order(number, ranks, edition, command, b"")
        middle = words[head + COMMAND_SIZE]
        end = middle + words[head + HOUSEKEEPING_SIZE]
        command = bytes(area[:middle])
        self._commands[first] = edition, command
        return Order(number, ranks, edition, command, bytes(area[middle:end]))

    def lane(self, number: int) -> list[int]:
        """All ranks, of this host and of others, whose last command has this number."""
        words = self._block.words
        pairs = enumerate(self._block.orders)
        return [rank for rank, order in pairs if words[order + COMMAND] == number]

    def number(self, rank: int) -> int:
        """That of the last command of a rank."""
        return self._block.words[self._block.orders[rank] + COMMAND]

    def unwanted(self, rank: int) -> bool:
        """Whether the main process no longer wants a rank's last command."""
        order = self._block.orders[rank]
        return self._block.words[order + UNWANTED] == self._block.words[order + COMMAND]

    def answered(self, rank: int) -> int:
        """The number of the last command that a rank, of any host, has answered."""
        return self._block.words[self._block.lines[rank] + ANSWERED]

    def busy(self, ranks: Sequence[int]) -> bool:
        """Whether one of *ranks* has not answered its last command."""
        return any(self.answered(rank) != self.number(rank) for rank in ranks)

    def answer(self, number: int, replies: Mapping[int, bytes]) -> None:
        """Answer command *number* for some ranks."""
        words, block = self._block.words, self._block
        for rank, payload in replies.items():
            line = block.lines[rank]
            if self._replies.get(rank) != payload:
                block.replies[rank][: len(payload)] = payload
                words[line + REPLY_SIZE] = len(payload)
                words[line + REPLY_EDITION] += 1
                self._replies[rank] = payload
        self._fence()  # the payloads before the numbers
        for rank in replies:
            words[block.lines[rank] + ANSWERED] = number
        self._fence()  # the numbers are stored before the load of whether the main process sleeps
        for first in {words[block.orders[rank] + FIRST] for rank in replies}:
            head = block.orders[first]
            if words[head + MAIN_SLEEPS] and (words[head + EACH] or block.all_answered(number)):
                os.eventfd_write(self._wakes_main[first], 1)

    def phase(self, rank: int) -> int:
        """What a rank, of any host, does."""
        return self._block.words[self._block.lines[rank] + PHASE]

    def report(self, rank: int, phase: int, count: int) -> None:
        """Say what a rank does."""
        line = self._block.lines[rank]
        self._block.words[line + PHASE], self._block.words[line + SLICE] = phase, count

    @property
    def traced(self) -> bool:
        """Whether the workers are to leave marks."""
        return bool(self._block.words[TRACED])

    def leave_marks(self, rank: int, marks: Sequence[tuple[int, int, int]]) -> None:
        """Leave the next marks of a rank: ns, phase and count."""
        words, memory = self._block.words, self._block.marks[rank]
        place = self._block.lines[rank] + MARKED
        for mark in marks:
            number = words[place]
            MARK.pack_into(memory, number % MARKS * MARK.size, *mark)
            words[place] = number + 1

    def expects(self, numbers: Sequence[int]) -> bool:
        """Whether the main process waits for the result of one of these items, or will."""
        words = self._block.words
        return words[AWAITED] in numbers or max(numbers) >= words[ENOUGH]

    def wake_main(self) -> None:
        """Wake the main process, if it sleeps in the middle of a command."""
        self._fence()  # what is there for it is stored before the load of whether it sleeps
        if self._block.words[self._block.orders[0] + MAIN_SLEEPS]:
            os.eventfd_write(self._wakes_main[0], 1)

    def blocks_read(self, rank: int) -> int:
        """How many blocks of a rank with results the main process has read."""
        return self._block.words[self._block.lines[rank] + READ]

    def dozing(self, doze: Callable[[list[int]], object]) -> None:
        """Do *doze*, unless there is a command: it ends when one of the descriptors that it gets is
        readable, as there is one."""
        words = self._block.words
        try:
            for _, _, line in self._places:
                words[line + SLEEPS] = _DOZING
            self._fence()  # "they sleep" is stored before the commands are loaded
            if all(words[order + COMMAND] == self._heard[rank] for rank, order, _ in self._places):
                doze([self._wakes.fileno()])
                self._wakes.poll(0)
        finally:
            for _, _, line in self._places:
                words[line + SLEEPS] = 0

    def close(self) -> None:
        """Give the descriptor back."""
        self._wakes.close()
