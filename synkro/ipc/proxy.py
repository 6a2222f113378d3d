"""The end of the channel for workers on other hosts: it hears their commands, and answers for them."""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .block import ANSWERED, COMMAND, FIRST, SENT, SLEEPS, Block
from .descriptors import Inherited
from .waiting import Nap

_LONG_ASLEEP = 2  # what SLEEPS says of one that should be woken before the next command


class Order(NamedTuple):
    """A command for some of the ranks.

    *edition* is that of the *command*: the same one means the same bytes.  *housekeeping* comes once.
    """

    number: int
    ranks: tuple[int, ...]
    edition: int
    command: bytes
    housekeeping: bytes


class Proxy(Block):
    """Stands in for *ranks* of other hosts."""

    def __init__(
        self, memory: memoryview, size: int, ranks: Sequence[int], inherited: Inherited
    ) -> None:
        super().__init__(memory, size, inherited)
        self._places = [(rank, self.heads[rank], self.lines[rank]) for rank in ranks]
        self._numbers = dict.fromkeys(ranks, 0)  # of the last commands that it has heard
        self._sent = 0
        self._given: dict[int, bytes] = {}  # what lies in the reply areas
        self._wakes = select.epoll()
        self._wakes.register(inherited.wake_workers, select.EPOLLIN | select.EPOLLET)

    def called(self) -> bool:
        """Whether a command has been sent since the last look, perhaps to others."""
        return self.words[SENT] != self._sent

    def hear(self) -> Iterator[Order]:
        """The commands that have come since the last look.

        The first rank of a lane gets its number last: whoever sees it there sees the others, too.
        """
        words, found = self.words, dict[int, list[int]]()
        self._sent = words[SENT]
        self.fence()  # SENT is loaded before the numbers, which were stored before it
        for rank, head, _ in self._places:
            number = words[head + COMMAND]
            if number != self._numbers[rank]:
                first = self.heads[words[head + FIRST]]
                if words[first + COMMAND] == number:
                    found.setdefault(number, [])
        if not found:
            return
        self.fence()  # the numbers are loaded before the other ranks', and their payload
        for rank, head, _ in self._places:
            number = words[head + COMMAND]
            if number in found and number != self._numbers[rank]:
                self._numbers[rank] = number
                found[number].append(rank)
        for number, ranks in sorted(found.items()):
            first = words[self.heads[ranks[0]] + FIRST]
            yield Order(number, tuple(ranks), *self.read_command(first))

    def lane(self, number: int) -> list[int]:
        """All ranks, of this host and of others, whose last command has this number."""
        words = self.words
        return [rank for rank, head in enumerate(self.heads) if words[head + COMMAND] == number]

    def busy(self, ranks: Sequence[int]) -> bool:
        """Whether one of *ranks* has not answered its last command."""
        return any(self.answered(rank) != self.number(rank) for rank in ranks)

    def answer(self, number: int, replies: Mapping[int, bytes]) -> None:
        """Answer command *number* for some ranks."""
        words = self.words
        for rank, payload in replies.items():
            if self._given.get(rank) != payload:
                self.write_reply(rank, payload)
                self._given[rank] = payload
        self.fence()  # the payloads before the numbers
        for rank in replies:
            words[self.lines[rank] + ANSWERED] = number
        self.fence()  # the numbers are stored before the load of whether the main process sleeps
        for first in {words[self.heads[rank] + FIRST] for rank in replies}:
            self.wake_for(number, first)

    def wake_main(self) -> None:
        self.fence()  # what is there for it is stored before the load of whether it sleeps
        super().wake_main()

    def sleeping(self, nap: Nap) -> None:
        """Do *nap*, unless there is a command: it ends when one of the descriptors that it gets is
        readable, as there is one."""
        words = self.words
        try:
            for _, _, line in self._places:
                words[line + SLEEPS] = _LONG_ASLEEP
            self.fence()  # "they sleep" is stored before the commands are loaded
            if all(words[head + COMMAND] == self._numbers[rank] for rank, head, _ in self._places):
                nap([self._wakes.fileno()])
                self._wakes.poll(0)
        finally:
            for _, _, line in self._places:
                words[line + SLEEPS] = 0

    def close(self) -> None:
        """Let go of the memory, and give the descriptor back."""
        super().close()
        self._wakes.close()
