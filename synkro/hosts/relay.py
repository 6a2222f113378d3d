"""A host's relay: it passes on what the ranks of its host have written down (``comms.journal``).

It makes *batches* for the other hosts, and does here what theirs say.  The batches from one host to
another have to come in order; who carries them is not its business.  A ``WireRelay`` sends them by MPI.

Whether a rank has answered a command is not in the journals: it says so in the block of its host.  Ranks
that wait in a collective have to know.  So the hosts tell each other, when there is something in the
journals at all.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..comms.board import LINE, UNAWAITED, Line, board_bytes
from ..comms.journal import ALL, ENTRY, FORGET, HOST, SHOW, WHAT, WORD, JournalReader, bed
from ..ipc.descriptors import Inherited
from ..ipc.waiting import Condition, Nap, new_fence
from ..memory.arena import Arena
from ..memory.mapping import give_back, map_file
from ..memory.segment import explained, require_memory
from ..plan.call import Access
from .parcels import Load
from .protocol import Ended, Shown

if TYPE_CHECKING:
    from .wire import Wire  # which begins MPI

_WORD = 8


class Relay:
    """The relay of one host.

    Attributes:
        wake: the eventfd that it sleeps on.
    """

    def __init__(self, hosts: Sequence[range], host: int, inherited: Inherited) -> None:
        """*hosts* are the ranks of each; *inherited* is what those of this *host* inherit."""
        size = sum(map(len, hosts))
        self._file = file = inherited.arena
        self._arena = Arena(file, size)  # for views of what all ranks have
        self._others = [number for number, ranks in enumerate(hosts) if ranks and number != host]
        self._ranks = hosts[host]
        self._inherited = inherited
        self.wake: Final = inherited.wake_relay
        behind = board_bytes(size)
        self._lines = size * LINE * _WORD
        self._board = map_file(file, behind, Access.WRITE).data.cast("Q")
        self._journals = [JournalReader(file, behind, rank) for rank in self._ranks]
        self._bed = bed(file, behind)
        self._fence = new_fence()

    # ── what goes out ────────────────────────────────────────────────────────────────────────────

    def has_news(self) -> bool:
        """Whether a rank of this host has written something down."""
        return any(journal.any() for journal in self._journals)

    def outgoing(self) -> dict[int, tuple[Shown, Load]]:
        """What the ranks of this host have written down since the last call, by the host it is for; and
        the bytes that it shows.

        These lie where the ranks have them: no copy is made.  They may be sent late: a rank changes them
        only when that host has seen what came after them, or when nobody will look at them any more.
        """
        written = [journal.read() for journal in self._journals if journal.any()]
        if not written:
            return {}
        entries = np.concatenate(written)
        shows = entries[:, WHAT] == SHOW
        passed = {}
        for host in self._others:
            mine = entries[~shows | (entries[:, HOST] == host) | (entries[:, HOST] == ALL)]
            shown = mine[mine[:, WHAT] == SHOW].tolist()
            passed[host] = Shown(mine.tobytes()), Load([self._bytes(at, n) for _, at, n, _ in shown])
        return passed

    def sleeping(self, nap: Nap) -> None:
        """Do *nap*, which ends when one of the descriptors that it gets is readable: a rank has written
        something down."""
        self._bed[0] = 1
        self._fence()  # "it sleeps" is stored before the loads of what was written down
        try:
            if not self.has_news():
                nap([self.wake])
        finally:
            self._bed[0] = 0
            with contextlib.suppress(BlockingIOError):  # nobody has woken it
                os.eventfd_read(self.wake)

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    def apply(self, entries: bytes, fill: Callable[[list[memoryview]], object]) -> None:
        """Do what the *entries* of a batch say; ``fill(views)`` receives the bytes that they show.

        All bytes come before the words, also before those that were written earlier: a rank changes
        bytes when nobody reads them any more, so they may come early.  Raises: SharedMemoryError.
        """
        listed = list(ENTRY.iter_unpack(entries))
        shown = [self._reserved(at, nbytes) for what, at, nbytes, _ in listed if what == SHOW]
        if shown:
            fill(shown)
        awaited = False
        for what, at, value, _ in listed:
            if what == WORD:
                self._fence()  # what came before it is there before it
                if at < _WORD * len(self._board):
                    self._board[at // _WORD] = value
                else:  # of members, whose lines lie in the arena
                    self._bytes(at, _WORD).cast("Q")[0] = value
                awaited = awaited or at >= self._lines or at // _WORD % LINE not in UNAWAITED
            elif what == FORGET:
                give_back(self._file, at, value)
        if awaited:
            self._fence()  # the words before the loads of who sleeps
            for rank in self._ranks:
                if self._board[rank * LINE + Line.SLEEPS]:
                    os.eventfd_write(self._inherited.wakes[rank], 1)

    def _bytes(self, at: int, nbytes: int) -> memoryview:
        """A part of the arena: the pages where it lies stay mapped for a while."""
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(at + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._arena.view(start, (stop - start,), np.uint8).data[at - start : at - start + nbytes]

    def _reserved(self, at: int, nbytes: int) -> memoryview:
        """A part of the arena, after memory has been reserved where there is none."""
        try:
            if os.lseek(self._file, at, os.SEEK_HOLE) < at + nbytes:
                require_memory(nbytes)
                os.posix_fallocate(self._file, at, nbytes)
        except OSError as error:
            raise explained(error, nbytes) from None
        return self._bytes(at, nbytes)


class WireRelay(Relay):
    """A host's relay that exchanges batches with the others by a wire."""

    def __init__(
        self, wire: Wire, hosts: Sequence[range], inherited: Inherited, answered: Callable[[int], int]
    ) -> None:
        """*hosts* are the ranks of each process of MPI's; *inherited* what the workers of this host
        inherit, which this object closes; *answered* tells the last command that a rank has answered."""
        # in the order of the ranks, as journals name hosts; one without ranks comes last
        order = sorted(range(len(hosts)), key=lambda number: (not hosts[number], hosts[number].start))
        super().__init__([hosts[number] for number in order], order.index(wire.number), inherited)
        self._wire = wire
        self._numbers = order
        self._answered = answered
        self._told: dict[int, int] = {}
        self._active = False

    def called(self) -> bool:
        """Whether ranks of this host have shown something, while collectives go on."""
        return self._active and self.has_news()

    def step(self, busy: Condition) -> bool:
        """Pass on what is new; *busy* says whether a command goes on.  Returns whether something was."""
        if not (self._active or self.has_news()):
            return False
        # read before the journals are: what a rank has written down comes before its answer
        answered = {rank: self._answered(rank) for rank in self._ranks} if self._active else {}
        passed = self._pass_on()
        news = {rank: number for rank, number in answered.items() if self._told.get(rank) != number}
        if news:
            self._told |= news
            for host in self._others:
                self._wire.send(self._numbers[host], Ended(news))
        if not (passed or news or busy()):
            self._active = False
        return passed or bool(news)

    def _pass_on(self) -> bool:
        """Send what the ranks of this host have shown; returns whether there was something."""
        passed = self.outgoing()
        for host, (shown, load) in passed.items():
            self._wire.send(self._numbers[host], shown, load)
            self._active = True
        return bool(passed)

    def take(self, source: int, shown: Shown) -> None:
        """What another host has passed on has come.  Raises: SharedMemoryError.

        While it comes, what is shown here goes: both ways at the same time.
        """
        self._active = True
        fill = functools.partial(self._wire.fill, source, meanwhile=self._pass_on)
        self.apply(shown.entries, fill)

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in self._inherited.listed():
            os.close(fd)
