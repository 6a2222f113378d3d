"""Several hosts in one process: each has an arena of its own, and a thread that carries batches to it.

The threads hold some batches back, and copy what these show when they arrive, as late as MPI might.
"""

import collections
import contextlib
import functools
import itertools
import os
import random
import select
import threading
import time

import numpy as np

from synkro.comms.board import board_bytes
from synkro.comms.journal import Journal, reserve_journals
from synkro.hosts.relay import Relay
from synkro.ipc.descriptors import Inherited
from synkro.memory.arena import arena_file

_LATE = 2e-3  # seconds that a batch may be held back
_NAP = 1e-3


class Mirrors:
    """*layout* is the number of ranks of each host; *late* says which part of the batches is held back.

    Attributes:
        size: the number of all ranks.
        hosts: the ranks of each host.
        files: the arena of each.
        wakes: of each, the eventfds that its ranks sleep on, by rank; -1 for ranks elsewhere.
        beds: of each, the eventfd that its relay sleeps on.
        relays: of each.
        carried: the bytes that were shown, from host to host.
    """

    def __init__(self, layout, late=0.1, carry=True):
        self.size = sum(layout)
        starts = np.cumsum([0, *layout]).tolist()
        self.hosts = tuple(range(*span) for span in itertools.pairwise(starts))
        self.carried = collections.Counter()
        self._late, self._random = late, random.Random(0)
        self._links = collections.defaultdict(collections.deque)  # from host to host: (when due, batch)
        self._closing = False
        with contextlib.ExitStack() as stack:

            def owned(fd):
                stack.callback(os.close, fd)
                return fd

            behind = board_bytes(self.size)
            self.files = [owned(arena_file(behind)) for _ in self.hosts]
            self.beds = [owned(os.eventfd(0, os.EFD_NONBLOCK)) for _ in self.hosts]
            self._bells = [owned(os.eventfd(0, os.EFD_NONBLOCK)) for _ in self.hosts]
            self.wakes = [
                [
                    owned(os.eventfd(0, os.EFD_NONBLOCK)) if rank in ranks else -1
                    for rank in range(self.size)
                ]
                for ranks in self.hosts
            ]
            for file, ranks in zip(self.files, self.hosts, strict=True):
                reserve_journals(file, behind, ranks, self.size)
            self._closer = stack.pop_all()
        ends = zip(self.files, range(len(self.hosts)), self.wakes, self.beds, strict=True)
        self.relays = [
            Relay(self.hosts, host, Inherited(-1, file, -1, (), tuple(wakes), bed))
            for file, host, wakes, bed in ends
        ]
        self._threads = [
            threading.Thread(target=self._carry, args=each, daemon=True)
            for each in enumerate(self.relays if carry else ())
        ]
        for thread in self._threads:
            thread.start()

    def host_of(self, rank):
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)

    def journal(self, rank):
        """The one of *rank*."""
        host = self.host_of(rank)
        return Journal(self.files[host], board_bytes(self.size), rank, self.hosts, self.beds[host])

    def blocks(self):
        """The memory that each host's file takes, in blocks of 512 bytes."""
        return np.array([os.fstat(file).st_blocks for file in self.files])

    def _carry(self, here, relay):
        others = [host for host in range(len(self.hosts)) if host != here]
        while not self._closing:
            moved = self._send(here, relay)
            for source in others:
                moved = self._receive(self._links[source, here], relay) or moved
            if not moved:
                bell = self._bells[here]
                relay.sleeping(lambda wakes: select.select([*wakes, bell], [], [], _NAP))
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bells[here])

    def _send(self, here, relay):
        passed = relay.outgoing()
        for to, (shown, load) in passed.items():
            self.carried[here, to] += sum(map(len, load.bodies))
            late = _LATE * self._random.random() if self._random.random() < self._late else 0
            self._links[here, to].append((time.perf_counter() + late, shown, load))
            os.eventfd_write(self._bells[to], 1)
        return bool(passed)

    @staticmethod
    def _receive(link, relay):
        if not link or link[0][0] > time.perf_counter():
            return False
        _, shown, load = link[0]
        relay.apply(shown.entries, functools.partial(_copy, load.bodies))
        link.popleft()
        return True

    def close(self):
        self._closing = True
        for bed in self.beds:
            os.eventfd_write(bed, 1)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self.relays.clear()
        self._closer.close()


def _copy(shown, views):
    for source, target in zip(shown, views, strict=True):
        target[:] = source
