"""Collectives through shared memory, for workers on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plan.split import split
from .base import Communicator
from .ops import Array, Operation

_BLOCK_BYTES = 1 << 18
"""Elements are reduced in blocks of this size, which stay in a core's L2 cache from one source to
the next: the target is then read and written once, however many sources there are."""


class ShmCommunicator(Communicator):
    """Every rank reduces its 1/size of the elements straight out of the sources' memory."""

    def reduce_share(
        self, operation: Operation, divisor: int, sources: Sequence[Array], target: Array
    ) -> None:
        start, stop = split(0, target.size, self.size)[self.rank]
        flat = [source.reshape(-1) for source in sources]
        into = target.reshape(-1)
        step = max(1, _BLOCK_BYTES // target.itemsize)
        for low in range(start, stop, step):
            block = slice(low, min(low + step, stop))
            out = into[block]
            if len(flat) == 1:
                np.copyto(out, flat[0][block])
            else:
                operation.merge(flat[0][block], flat[1][block], out=out)
            for source in flat[2:]:
                operation.merge(out, source[block], out=out)
            operation.finish(out, divisor, out=out)
