"""A function in the main process by itself: its collectives act as in a world of one.

Worker variables are read from the master rank when the function first uses them; what it has written is
sent to all ranks when it has returned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np

from ... import here
from ...comms.shm import ShmCommunicator, shared_file
from ...worker.group import Group


@contextlib.contextmanager
def alone(rng: Callable[[], np.random.Generator]) -> Iterator[None]:
    """Until the end of the block, in this thread, this process is the only rank of a call.

    *rng* gives its random generator.
    """
    with contextlib.ExitStack() as stack:
        wake = os.eventfd(0)
        stack.callback(os.close, wake)
        file = shared_file(1)
        stack.callback(os.close, file)
        comm = ShmCommunicator(0, 1, file, [wake])
        comm.begin(1, (0,))
        group = Group(comm, rng)
        token = here.group.set(group)
        try:
            yield
        finally:
            here.group.reset(token)
        for variable, before, replica in group.stand_ins.values():
            value = replica.value
            if value.shape != before.shape or value.tobytes() != before.tobytes():
                variable.value = value
