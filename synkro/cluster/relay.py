"""A host's relay: it passes on what the ranks of its host have written down (``comms.journal``).

It makes *batches* for the other hosts, and does here what theirs say.  The batches from one host to
another have to come in order; who carries them is not its business.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..comms.board import LINE, SLEEPS, UNAWAITED, board_bytes
from ..comms.journal import ALL, ENTRY, FORGET, HOST, SHOW, WHAT, WORD, JournalReader, bed
from ..ipc.waiting import Fence
from ..memory.arena import Arena
from ..memory.mapping import give_back, map_file
from ..memory.segment import explained, require_memory
from ..plan.call import Access

_WORD = 8


class Passed(NamedTuple):
    """What goes to another host: entries of journals, and the bytes that they show.

    These lie where the ranks have them: no copy is made.  They may be sent late: a rank changes them
    only when that host has seen what came after them, or when nobody will look at them any more.
    """

    entries: bytes
    shown: list[memoryview]


class Relay:
    """One host's.

    Attributes:
        wake: the eventfd that it sleeps on.
    """

    def __init__(
        self,
        file: int,
        size: int,
        hosts: Sequence[range],
        host: int,
        wakes: Sequence[int],
        wake: int,
    ) -> None:
        """*file* is the arena of this *host*, of *hosts* with *size* ranks in all.

        *wakes* are the eventfds that its ranks sleep on, by rank, *wake* is its own.
        """
        self._file = file
        self._arena = Arena(file, size)  # for views of what all ranks have
        self._others = [number for number in range(len(hosts)) if number != host]
        self._ranks = hosts[host]
        self._wakes, self.wake = wakes, wake
        behind = board_bytes(size)
        self._lines = size * LINE * _WORD
        self._board = map_file(file, behind, Access.WRITE).data.cast("Q")
        self._journals = [JournalReader(file, behind, rank) for rank in self._ranks]
        self._bed = bed(file, behind)
        self._fence = Fence()

    # ── what goes out ────────────────────────────────────────────────────────────────────────────

    def has_news(self) -> bool:
        """Whether a rank of this host has written something down."""
        return any(journal.any() for journal in self._journals)

    def outgoing(self) -> dict[int, Passed]:
        """What the ranks of this host have written down since the last call, by the host it is for."""
        written = [journal.read() for journal in self._journals if journal.any()]
        if not written:
            return {}
        entries = np.concatenate(written)
        shows = entries[:, WHAT] == SHOW
        passed = {}
        for host in self._others:
            mine = entries[~shows | (entries[:, HOST] == host) | (entries[:, HOST] == ALL)]
            shown = mine[mine[:, WHAT] == SHOW].tolist()
            passed[host] = Passed(mine.tobytes(), [self._bytes(at, n) for _, at, n, _ in shown])
        return passed

    def dozing(self, doze: Callable[[], object]) -> None:
        """Do *doze*, which ends when ``wake`` is readable: a rank has written something down."""
        self._bed[0] = 1
        self._fence()  # "it sleeps" is stored before the loads of what was written down
        try:
            if not self.has_news():
                doze()
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
                self._store(at, value)
                awaited = awaited or at >= self._lines or at // _WORD % LINE not in UNAWAITED
            elif what == FORGET:
                give_back(self._file, at, value)
        if awaited:
            self._fence()  # the words before the loads of who sleeps
            self._rouse()

    def _store(self, at: int, value: int) -> None:
        if at < _WORD * len(self._board):
            self._board[at // _WORD] = value
        else:  # of members, whose lines lie in the arena
            self._bytes(at, _WORD).cast("Q")[0] = value

    def _rouse(self) -> None:
        """Wake the ranks of this host that sleep."""
        for rank in self._ranks:
            if self._board[rank * LINE + SLEEPS]:
                os.eventfd_write(self._wakes[rank], 1)

    def _bytes(self, at: int, nbytes: int) -> memoryview:
        """A part of the arena: the pages where it lies stay mapped for a while."""
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(at + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._arena.view(start, (stop - start,), np.uint8).data[at - start : at - start + nbytes]

    def _reserved(self, at: int, nbytes: int) -> memoryview:
        """The same, after memory has been reserved where there is none."""
        try:
            if os.lseek(self._file, at, os.SEEK_HOLE) < at + nbytes:
                require_memory(nbytes)
                os.posix_fallocate(self._file, at, nbytes)
        except OSError as error:
            raise explained(error, nbytes) from None
        return self._bytes(at, nbytes)
