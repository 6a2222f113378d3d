"""What a rank changes in shared memory, written down in order for the other hosts of a session.

Each host has an arena file of its own, of the same layout: what a rank changes in its host's file
happens a moment later in the others, its *mirrors*.  A rank writes down what it changes in a ring behind
the board, and a process of its host, the *relay* (``hosts.relay``), reads it there and passes it on::

    rank                     ring                        relay                  other hosts
    ────                     ────                        ─────                  ───────────
    words[i] = value  ──▶  [ WORD    where  value ]  ─ to all hosts ────▶  the same word
    show              ──▶  [ SHOW    where  size  ]  ─ with the bytes ──▶  the same bytes
    forget            ──▶  [ FORGET  where  size  ]  ─ to all hosts ────▶  a hole in the file

*where* is an offset in the file.  Every word has one writer, which also writes it down, and what one
rank has written down takes effect in its order.  So another host sees each rank as it was a moment ago,
and never as it was not: bytes that are shown before a word are there when the word is.  What different
ranks have done may be seen in any order.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..ipc.waiting import Words, new_fence, spin
from ..memory.arena import PART
from ..memory.interrupts import atomic
from ..memory.mapping import map_file
from ..plan.call import Access

WORD, SHOW, FORGET = range(3)
WHAT, AT, VALUE, HOST = range(4)  # words of an entry; VALUE is a size where the entry is no WORD
ENTRY = struct.Struct("=4Q")
ALL = (1 << 64) - 1  # HOST of an entry for all other hosts

ENTRIES = 1 << 10  # of a ring
_HEAD, _TAIL = 0, 8  # how many have been written, and read: a cache line each
_LINES = 128  # their bytes
_NAP = 50e-6  # seconds between two looks whether the relay has read


def _page_up(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_RING = _page_up(_LINES + ENTRIES * ENTRY.size)


def _ring_at(behind: int, rank: int) -> int:
    return _page_up(behind) + mmap.PAGESIZE + rank * _RING


def reserve_journals(file: int, behind: int, ranks: range, size: int) -> None:
    """Make room for the rings of *ranks*, those of this host, and for all that *size* ranks may share.

    The rings lie in *file* behind so many bytes.
    """
    os.ftruncate(file, (1 + size) * PART)  # a hole: nothing that a rank may look at lies behind the end
    os.posix_fallocate(file, _page_up(behind), mmap.PAGESIZE)
    for rank in ranks:
        os.posix_fallocate(file, _ring_at(behind, rank), _RING)


def bed(file: int, behind: int) -> memoryview:
    """The word that says whether the relay of this host sleeps."""
    return map_file(file, mmap.PAGESIZE, Access.WRITE, _page_up(behind)).data.cast("Q")


def _ring(file: int, behind: int, rank: int) -> tuple[memoryview, NDArray[np.uint8]]:
    """One rank's ring: how many entries have been written, and how many read; the entries."""
    memory = map_file(file, _RING, Access.WRITE, _ring_at(behind, rank))
    return memory[:_LINES].data.cast("Q"), memory[_LINES : _LINES + ENTRIES * ENTRY.size]


class JournaledWords:
    """Words whose changes are written down."""

    __slots__ = ("_at", "_journal", "_memory")

    def __init__(self, memory: memoryview, at: int, journal: Journal) -> None:
        self._memory, self._at, self._journal = memory, at, journal

    def __getitem__(self, index: Any, /) -> Any:
        return self._memory[index]

    def __setitem__(self, index: int, value: int, /) -> None:
        with atomic:
            self._memory[index] = value
            self._journal.stored(self._at + 8 * index, value)


class Journal:
    """One rank's end of its journal: it writes.

    Attributes:
        hosts: the ranks of each host of the session.
        host, near: the number of this rank's host, and the ranks there.
    """

    def __init__(
        self, file: int, behind: int, rank: int, hosts: Sequence[range], wake_relay: int
    ) -> None:
        """The rings lie in *file* behind so many bytes; *wake_relay* is the eventfd of the relay."""
        self.hosts: Final = tuple(hosts)
        self.host: Final = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        self.near: Final = hosts[self.host]
        self._counts, entries = _ring(file, behind, rank)
        self._entries = entries.data
        self._written = self._counts[_HEAD]
        self._bed = bed(file, behind)
        self._wake_relay = wake_relay
        self._fence = new_fence()

    def stored(self, at: int, value: int) -> None:
        """The word at this offset has changed."""
        self._write(WORD, at, value, ALL)

    def show(self, at: int, nbytes: int, hosts: Sequence[int] | None = None) -> None:
        """*nbytes* bytes have changed, and *hosts*, or all, shall see them; this rank's own need not be
        told.

        They may be read until those hosts have seen what is written down after this.
        """
        if nbytes and len(self.hosts) > 1:
            for host in (ALL,) if hosts is None else hosts:
                if host != self.host:
                    self._write(SHOW, at, nbytes, host)

    def forget(self, at: int, nbytes: int) -> None:
        """*nbytes* bytes have been given back, and will not be used again."""
        self._write(FORGET, at, nbytes, ALL)

    def _write(self, what: int, at: int, value: int, host: int) -> None:
        with atomic:
            written, counts = self._written, self._counts
            if written - counts[_TAIL] >= ENTRIES:
                # wait until the relay has read: it never waits for a rank
                while not spin(lambda: written - counts[_TAIL] < ENTRIES):
                    time.sleep(_NAP)
            ENTRY.pack_into(self._entries, written % ENTRIES * ENTRY.size, what, at, value, host)
            self._fence()  # the entry, and what it tells of, before the count
            self._written = counts[_HEAD] = written + 1
            self._fence()  # the count before the load of whether the relay sleeps
            if self._bed[0]:
                os.eventfd_write(self._wake_relay, 1)


def shared_words(memory: memoryview, at: int, journal: Journal | None) -> Words:
    """*memory*, which lies *at* this offset; where there is a *journal*, changes are written down."""
    return memory if journal is None else JournaledWords(memory, at, journal)


class JournalReader:
    """The relay's end of one rank's ring."""

    def __init__(self, file: int, behind: int, rank: int) -> None:
        self._counts, entries = _ring(file, behind, rank)
        self._entries = entries.view(np.uint64).reshape(ENTRIES, -1)
        self._read = self._counts[_TAIL]
        self._fence = new_fence()

    def any(self) -> bool:
        """Whether there are entries to read."""
        return self._counts[_HEAD] != self._read

    def read(self) -> NDArray[np.uint64]:
        """All entries that have not been read: a row each."""
        written = self._counts[_HEAD]
        self._fence()  # the count is loaded before the entries
        entries = self._entries[np.arange(self._read, written) % ENTRIES]
        self._fence()  # the entries are loaded before TAIL gives their room back
        self._read = self._counts[_TAIL] = written
        return entries
