"""A function in the main process by itself: its collectives act as in a world of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np

from . import world
from .comms.shm import ShmCommunicator, shared_file
from .group import Group


@contextlib.contextmanager
def alone(rng: np.random.Generator) -> Iterator[None]:
    """Until the end of the block, in this thread, this process is the only rank of a call."""
    wake, file = os.eventfd(0), shared_file(1)
    comm = ShmCommunicator(0, 1, file, [wake])
    comm.begin(1, (0,))
    token = world.group.set(Group(comm, rng))
    try:
        yield
    finally:
        world.group.reset(token)
        comm.end(failed=False)
        os.close(wake)
        os.close(file)
