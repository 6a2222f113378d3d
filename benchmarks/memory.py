"""How much memory do n workers take that share the inputs, and how much have they to themselves?

Floor: the inputs once, and n interpreters that have imported NumPy.  The figure is the proportional
set size (PSS): a page that k processes map counts 1/k in each, so the sum over processes is what the
machine spends.

Peers: the same rows given to each process of a ``multiprocessing.Pool`` through its initializer, and
bare interpreters that import NumPy.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import synkro
from synkro.machine import readable_bytes

from .common import Report, main

_given: list[np.ndarray] = []


def pss(pids: Sequence[int]) -> int:
    """Bytes that these processes take of the machine's memory."""
    whole = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                whole += int(line.split()[1]) * 1024
    return whole


def bare(count: int) -> float:
    """The PSS of *count* interpreters with NumPy, which share its files."""
    code = "import numpy, sys; print(flush=True); sys.stdin.read()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            process.stdout.readline()
        return pss([process.pid for process in processes])
    finally:
        for process in processes:
            process.communicate()


def keep(rows: np.ndarray) -> None:
    _given.append(rows)


def sum_kept(_: int) -> float:
    return float(_given[0].sum())


def in_a_pool(count: int, nbytes: int) -> float:
    """The PSS of a pool's processes, each with its share of the rows."""
    rows = np.ones(nbytes // 8 // count)
    with multiprocessing.get_context("spawn").Pool(count, keep, (rows,)) as pool:
        pool.map(sum_kept, range(count), chunksize=1)
        return pss([os.getpid(), *(child.pid for child in multiprocessing.active_children())])


def ask(report: Report, sizes: list[int], nbytes: int) -> None:
    samples: dict[str, list[float]] = {}
    alone = pss([os.getpid()])
    for count in sizes:
        floor = bare(count)
        with synkro.Session(devices=["cpu"] * count, verbose=False) as session:
            x = session.data(np.ones(nbytes // 8))
            f = session.function(lambda x: x.sum(), outputs="sum")
            for _ in range(2):
                f(x)
            mine = pss([os.getpid(), *session.pids]) - alone
            del x, f
        samples[f"Synkro, {count}"] = [mine]
        samples[f"floor: inputs and bare interpreters, {count}"] = [floor + nbytes]
        report.figure(
            f"beyond bare interpreters, over the inputs, with {count} worker{'s' if count > 1 else ''}",
            (mine - floor) / nbytes,
            "×",
            at_most=1.05,
        )
    size = readable_bytes(nbytes)
    report.table(f"PSS of n workers that have read {size}", samples, unit="bytes", x="workers")
    pooled = in_a_pool(2, nbytes) - alone
    report.table(
        f"PSS of two processes that have read {size}",
        {"Synkro": samples["Synkro, 2"], "Pool, rows sent": [pooled]},
        unit="bytes",
    )


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"sizes": [1, 2, 4, 8], "nbytes": 1 << 30},
        quick={},
        smoke={"sizes": [1, 2], "nbytes": 1 << 24},
    )
