"""Does a call cost more for larger inputs?

Floor: nothing.  The inputs lie in shared memory, the workers map them once, and a command names them:
a function that touches one element a rank moves one cache line a rank, however large its ``Data``.

Peer: ``multiprocessing.Pool.map`` over the two halves of the array, which are pickled and go through
pipes: the whole array is copied several times.  It is shown up to 64 MB.
"""

from __future__ import annotations

import contextlib
import multiprocessing

import numpy as np

import synkro
from synkro.machine import readable_bytes

from .common import Report, Side, main, paired


def first(x):
    return x[0]


def ask(report: Report, runs: int, calls: int, sizes: list[int], pool_sizes: list[int]) -> None:
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(2))
        session = stack.enter_context(synkro.Session(2, verbose=False))
        function = session.function(first, outputs="sum")
        sides = []
        for nbytes in sizes:
            data = session.data(shape=nbytes // 4, dtype="float32")
            name = f"Synkro, {readable_bytes(nbytes)}"
            sides.append(Side(name, lambda x=data: function(x), calls, warm=20))
        samples = paired(sides, runs)
        title = "a call that looks at one element a rank, by the size of its input"
        report.table(title, samples, x="bytes")
        small, large = samples[sides[0].name], samples[sides[-1].name]
        report.ratio(f"{sides[-1].name} ÷ {sides[0].name}", large, small, at_most=1.2)

        peers = []
        for nbytes in pool_sizes:
            halves = np.array_split(np.zeros(nbytes // 4, np.float32), 2)
            name = f"Pool.map, {readable_bytes(nbytes)}"
            few = 20 if nbytes < 1 << 20 else 1
            peers.append(
                Side(name, lambda parts=halves: sum(pool.map(first, parts, chunksize=1)), few, warm=1)
            )
        report.table("the same with the array sent to a pool", paired(peers, runs), x="bytes")


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 30,
            "calls": 300,
            "sizes": [1 << 10, 1 << 20, 1 << 26, 1 << 30],
            "pool_sizes": [1 << 10, 1 << 20, 1 << 26],
        },
        quick={"runs": 10, "calls": 100},
        smoke={"runs": 2, "calls": 10, "sizes": [1 << 10, 1 << 20], "pool_sizes": [1 << 10, 1 << 16]},
    )
