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

Before a call is planned, ``Controller.wake_early`` wakes workers that have slept for long: a sleeper
needs some 50 us to come to itself, and has most of them behind it when the command comes.

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
worker that lacks one reads the socket until it has it.  What it logs goes there the other way
(``ipc.logs``), and LOGGED says that something has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .block import (
    ANSWERED,
    COMMAND,
    EACH,
    LOGGED,
    MAIN_SLEEPS,
    REPLY_EDITION,
    SENT,
    SLEEPS,
    WOKEN,
    Block,
)
from .descriptors import Inherited
from .waiting import Condition, Deadline, Nap, Patience, clock, polling, sleep_until

OnTick = Callable[[], None] | None

_FIRST_NAP = 1  # milliseconds after which a sleeper looks once more, in case a wake-up was lost
_LATER_NAP = 20  # … where it sleeps for so long again and again
_NAP = 1000  # and the main process from then on: a fork of it may have been woken in its place


class Controller(Block):
    """The main process's end of the channel.

    Attributes:
        everyone: the lane of all ranks.
        numbers: those of commands, and editions, of all lanes.
    """

    def __init__(self, memory: memoryview, size: int, inherited: Inherited) -> None:
        super().__init__(memory, size, inherited)
        self.numbers: Final = itertools.count(1)
        self._lanes: dict[tuple[int, ...], Lane] = {}
        self._on_gpus = False
        self.everyone: Final = self.lane(tuple(range(size)))

    def lane(self, ranks: tuple[int, ...]) -> Lane:
        """The lane of *ranks*, which are in ascending order."""
        lane = self._lanes.get(ranks)
        if lane is None:
            lane = self._lanes[ranks] = Lane(self, ranks, polling(len(ranks), self._on_gpus))
        return lane

    def wait_for_gpus(self) -> None:
        """The workers compute on GPUs: it pays to poll longer for their answers."""
        self._on_gpus = True
        self.everyone.poll(polling(len(self.everyone.ranks), True))

    def displace(self, lane: Lane) -> None:
        """What other lanes have written for the ranks of *lane* counts no more."""
        for other in tuple(self._lanes.values()):
            if not lane.members.isdisjoint(other.members):
                other.displaced()

    def begin_anew(self, rank: int) -> None:
        super().begin_anew(rank)
        self.displace(self.lane((rank,)))  # it has read no command

    def is_doing(self, rank: int, number: int) -> bool:
        """Whether *rank* does command *number*, and it is wanted."""
        words, head = self.words, self.heads[rank]
        answered = words[self.lines[rank] + ANSWERED]
        return words[head + COMMAND] == number != answered and not self.unwanted(rank)

    def wake_early(self) -> None:
        """Wake the workers, if they have slept for long: a command will follow at once.

        They wake while the main process prepares it, and then poll for it.  The last rank stands for
        all: this is a hint, and ``send`` wakes those that sleep all the same.
        """
        words = self.words
        if words[self._sleeps[-1]] > 1:
            words[WOKEN] += 1
            self.fence()  # that they are woken is stored before they wake and load it
            self.wake_all()

    def sleeping(self, lanes: Sequence[Lane], news: Condition, nap: Nap) -> None:
        """Do *nap*, unless there is *news*: it ends when one of the descriptors that it gets is
        readable, as a rank of *lanes* has answered."""
        words, firsts = self.words, [lane.ranks[0] for lane in lanes]
        heads = [self.heads[first] for first in firsts]
        wakes = [self.wakes_main[first] for first in firsts]
        try:
            for head in heads:
                words[head + MAIN_SLEEPS] = 1
            self.fence()  # "it sleeps" is stored before the loads of who has answered
            if not news():
                nap(wakes)
        finally:
            for head, wake in zip(heads, wakes, strict=True):
                words[head + MAIN_SLEEPS] = 0
                with contextlib.suppress(BlockingIOError):  # nobody has woken it
                    os.eventfd_read(wake)

    def take_logged(self) -> bool:
        """Whether ranks have logged something since this was asked: it is about to be read."""
        if not self.words[LOGGED]:
            return False
        self.words[LOGGED] = 0
        self.fence()  # before it is read: what comes later is told again
        return True

    def note_answered(self, numbers: Mapping[int, int]) -> None:
        """Ranks of other hosts have answered these commands, by rank: the workers here may look."""
        for rank, number in numbers.items():
            self.words[self.lines[rank] + ANSWERED] = number


class Lane:
    """One command after the other to the same ranks, and one reply from each.

    Attributes:
        ranks: in ascending order.
        members: the same, as a set.
    """

    def __init__(self, block: Controller, ranks: tuple[int, ...], seconds: float) -> None:
        """*seconds* are how long it polls for answers before sleeping."""
        self.ranks = ranks
        self.members: Final = frozenset(ranks)
        self._block = block
        self._fence = block.fence
        self._wake_main = block.wakes_main[ranks[0]]
        self._numbers = block.numbers
        self._head = block.heads[ranks[0]]
        self._commands = [block.heads[rank] + COMMAND for rank in ranks]
        self._last_first = self._commands[::-1]
        lines = [block.lines[rank] for rank in ranks]
        self._answered = [line + ANSWERED for line in lines]
        self._places = [*zip(self._answered, self._commands, strict=True)]
        self._sleeps = [line + SLEEPS for line in lines]
        self._editions = [line + REPLY_EDITION for line in lines]
        self._number = 0  # of the last command
        self._command: bytes | None = None  # what lies in the block; None while it is being written
        self._read: list[int] = []  # the editions of the replies
        self._replies: list[bytes] = []
        self.poll(seconds)

    def poll(self, seconds: float) -> None:
        """Poll for answers so long before sleeping, from now on."""
        self._patience = Patience(seconds)

    def displaced(self) -> None:
        """Other lanes may have written to the block what this one had written there."""
        self._command = None

    def send_late(self, rank: int, command: bytes, housekeeping: bytes) -> None:
        """Hand a command to one *rank* of the lane, when all others have begun the same one."""
        self._write(command, housekeeping)
        self._fence()  # as in ``send``
        self._block.words[self._block.heads[rank] + COMMAND] = number = next(self._numbers)
        self._fence()
        self._block.words[SENT] = number
        self._block.wake_all()

    def send(self, command: bytes, housekeeping: bytes, number: int | None = None) -> None:
        """Hand a command to all ranks of the lane; together at most ``AREA`` bytes.

        *number* is its number, if it has one already.
        """
        words = self._block.words
        if command is not self._command or housekeeping:
            self._write(command, housekeeping)
        if number is None:
            number = next(self._numbers)
        self._fence()  # the payload, and what the user has written to Data, before the number
        for place in self._last_first:
            words[place] = number  # from here on it is sent
        self._number = number
        self._fence()  # the number before the loads of who sleeps, and before SENT
        words[SENT] = number  # for the proxy of ranks on other hosts
        for sleeps in self._sleeps:
            if words[sleeps]:
                self._block.wake_all()
                break

    def _write(self, command: bytes, housekeeping: bytes) -> None:
        if self._command is None:
            self._block.displace(self)
            self._block.form_lane(self.ranks)
        self._command = None  # an interrupt may leave a half-written command in the block
        self._block.write_command(self.ranks[0], command, housekeeping, next(self._numbers))
        self._command = command

    def give_up(self) -> None:
        """Say that nobody wants the last command any more: a worker that has not begun it skips it."""
        for rank in self.ranks:
            self._block.give_up(rank)
        self._fence()  # it is stored before the workers are interrupted

    def unanswered(self) -> list[int]:
        """The ranks that still have to answer their last command."""
        words = self._block.words
        places = zip(self.ranks, self._places, strict=True)
        return [rank for rank, (answered, command) in places if words[answered] != words[command]]

    def has_answers(self) -> bool:
        """Whether some rank has answered its last command."""
        words = self._block.words
        for answered, command in self._places:  # noqa: SIM110 - as below
            if words[answered] == words[command]:
                return True
        return False

    def all_answered(self) -> bool:
        """Whether all ranks have answered the last command of the lane."""
        words, number = self._block.words, self._number
        for answered in self._answered:  # noqa: SIM110 - a generator takes twice as long
            if words[answered] != number:
                return False
        return True

    def wait(self, deadline: Deadline, sentinels: Sequence[int], on_tick: OnTick = None) -> list[int]:
        """Wait until all ranks have answered, one of *sentinels* is ready, or the *deadline* is over.

        *deadline* is on the ``clock``.  *on_tick* is called every 50 ms.
        Returns the sentinels that are ready, when not all ranks have answered.
        """
        if on_tick is None and self._patience.poll(self.all_answered):
            return []
        with self._patience:
            return self._sleep(self.all_answered, deadline, sentinels, on_tick)

    def wait_for(
        self, condition: Condition, deadline: Deadline, sentinels: Sequence[int], on_tick: OnTick = None
    ) -> list[int]:
        """Sleep until *condition* holds, which a rank's answer, or a result that was expected, may make
        true, one of *sentinels* is ready, or the *deadline* is over."""
        words, each = self._block.words, self._head + EACH
        before = words[each]
        words[each] = 1
        try:
            return self._sleep(condition, deadline, sentinels, on_tick, _LATER_NAP)
        finally:
            words[each] = before

    def look_again(self) -> None:
        """Have whoever sleeps by ``wait_for`` look at its condition; another thread has changed that."""
        self._fence()  # the change is stored before the load of who sleeps
        if self._block.words[self._head + MAIN_SLEEPS]:
            os.eventfd_write(self._wake_main, 1)

    def _sleep(
        self,
        condition: Condition,
        deadline: Deadline,
        sentinels: Sequence[int],
        on_tick: OnTick,
        first: int = _FIRST_NAP,
    ) -> list[int]:
        poll = select.poll()
        for fd in (self._wake_main, *sentinels):
            poll.register(fd, select.POLLIN)
        naps = itertools.chain([first], itertools.repeat(_NAP if on_tick is None else 50))
        ready: list[int] = []

        def nap() -> bool:
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
            return deadline is not None and clock() >= deadline

        sleep_until(condition, self._block.words, self._head + MAIN_SLEEPS, self._fence, nap)
        return ready

    def replies(self) -> list[bytes]:
        """The replies to the last command, in the order of ``ranks``: the same list as long as none has
        changed."""
        words = self._block.words
        self._fence()  # the numbers of the answers are loaded before the replies
        editions = [words[edition] for edition in self._editions]
        if editions != self._read:
            self._replies = [self._block.read_reply(rank) for rank in self.ranks]
            self._read = editions
        return self._replies


def _poll_ms(nap: int, deadline: Deadline) -> int:
    """Milliseconds to sleep, rounded up, no further than the deadline."""
    if deadline is None:
        return nap
    return min(nap, max(0, int((deadline - clock()) * 1000) + 1))
