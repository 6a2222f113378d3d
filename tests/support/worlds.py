"""Worlds: ranks that run one body at the same time; here they are threads of this process."""

import contextlib
import functools
import os

import numpy as np

from synkro.comms.board import board_bytes
from synkro.comms.hosts import HostsCommunicator
from synkro.comms.ops import OPERATIONS
from synkro.comms.shm import ShmCommunicator
from synkro.memory.arena import arena_file

from .mirrors import Mirrors
from .together import together


class ShmWorld:
    """Threads over shared memory."""

    def __init__(self, size):
        self.size = size
        self.epoch = 0
        with contextlib.ExitStack() as stack:
            wakes = [os.eventfd(0) for _ in range(size)]
            file = arena_file(board_bytes(size))
            self.comms = [ShmCommunicator(rank, size, file, wakes) for rank in range(size)]
            for fd in (file, *wakes):
                stack.callback(os.close, fd)
            self.closer = stack.pop_all()

    def run(self, body, ranks=None):
        """``body(comm)`` on all *ranks*: the results, or the exceptions that were raised, by rank."""
        ranks = tuple(range(self.size)) if ranks is None else ranks
        self.epoch += 1

        def work(comm):
            comm.begin(self.epoch, ranks)
            failed = True
            try:
                result = body(comm)
                failed = False
                return result
            finally:
                comm.end(failed)

        return together(*[functools.partial(work, self.comms[rank]) for rank in ranks])

    def total(self, operation, arrays, weights):
        """A large reduction, in the order in which it is done."""
        return serial(operation, arrays, weights)

    def close(self):
        del self.comms
        self.closer.close()


class HostsWorld(ShmWorld):
    """Threads over the shared memory of several hosts, with so many ranks each."""

    def __init__(self, layout, **options):
        self.mirrors = Mirrors(layout, **options)
        self.size = self.mirrors.size
        self.epoch = 0
        self.comms = []
        mirrors = self.mirrors
        for rank in range(self.size):
            host = mirrors.host_of(rank)
            file, journal = mirrors.files[host], mirrors.journal(rank)
            self.comms.append(
                HostsCommunicator(rank, self.size, file, mirrors.wakes[host], None, journal)
            )

    def total(self, operation, arrays, weights):
        """A large reduction: each host's first."""
        arrays = [OPERATIONS[operation].lift(*each) for each in zip(arrays, weights, strict=True)]
        of_hosts = [
            functools.reduce(OPERATIONS[operation].merge, [arrays[rank] for rank in ranks])
            for ranks in self.mirrors.hosts
        ]
        total = functools.reduce(OPERATIONS[operation].merge, of_hosts)
        return OPERATIONS[operation].finish(total, sum(weights))

    def close(self):
        self.comms.clear()
        self.mirrors.close()


def serial(operation, arrays, weights):
    """The reduction as NumPy would do it, in the order of the ranks."""
    operation = OPERATIONS[operation]
    total = operation.lift(arrays[0], weights[0])
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total = operation.merge(total, operation.lift(array, weight))
    total = operation.finish(np.array(total), sum(weights))
    return np.asarray(total).astype(operation.result_dtype(arrays[0].dtype))
