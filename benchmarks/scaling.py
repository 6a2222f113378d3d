"""How do functions scale with the workers, and which part of a call does not?

Floor: a call of n workers takes 1/n of the time of one where only computing counts (compute-bound), and
the time that the memory needs for the bytes where that is the limit (memory-bound).

The serial fraction s is fitted by least squares to Amdahl's law (1967), T(n) = T(1) (s + (1 - s)/n),
over the numbers of workers that have a core of their own: whatever does not shrink with n is in it,
the call itself, waiting for the slowest, and cores that slow each other down.

Peers: one process with one BLAS thread, without Synkro.
"""

from __future__ import annotations

import contextlib

import numpy as np
from threadpoolctl import threadpool_limits

import synkro
from synkro.machine import available_cores

from .common import Report, Side, main, paired


def chain(x, w):
    """Compute-bound: products of small matrices, 2 · 64³ FLOPs each, that stay in the cache."""
    total = 0.0
    for row in x:
        product = w * row[0]
        for _ in range(20):
            product = product @ w
        total += product[0, 0]
    return total


def largest(x):
    """Memory-bound: every byte is read once."""
    return x.max()


def ask(report: Report, runs: int, matrices: int, nbytes: int) -> None:
    w = np.eye(64) * 0.99
    scalars = np.ones((matrices, 1))
    table = np.ones((nbytes // 8 // 128, 128))  # zeros would be one page, again and again
    counts = sorted({1, 2, 4, available_cores()})
    with contextlib.ExitStack() as stack:
        stack.enter_context(threadpool_limits(1))
        computing = [Side("NumPy, 1", lambda: chain(scalars, w))]
        reading = [Side("NumPy, 1", lambda: largest(table))]
        for count in counts:
            options = {"devices": ["cpu"] * count, "threads_per_worker": 1, "verbose": False}
            session = stack.enter_context(synkro.Session(**options))
            f = session.function(chain, bcast_inputs="w", outputs="sum")
            g = session.function(largest, outputs="max")
            x, v, rows = session.data(scalars), session.data(w), session.data(table)
            computing.append(Side(f"Synkro, {count}", lambda f=f, x=x, v=v: f(x, v), warm=1))
            reading.append(Side(f"Synkro, {count}", lambda g=g, rows=rows: g(rows), warm=1))
        for title, sides in (("compute-bound", computing), ("memory-bound", reading)):
            samples = paired(sides, runs)
            one = float(np.median(samples["NumPy, 1"]))
            floor = {f"perfect scaling, {n}": [one / min(n, available_cores())] for n in counts}
            report.table(f"a {title} function by workers", {**samples, **floor}, x="workers")
            _fit(report, title, samples, [n for n in counts if n <= available_cores()])


def _fit(report: Report, title: str, samples: dict[str, list[float]], counts: list[int]) -> None:
    one = float(np.median(samples["NumPy, 1"]))
    most = max(counts)
    if most > 1:
        speed = one / float(np.median(samples[f"Synkro, {most}"]))
        least = 0.95 if title == "compute-bound" else None
        name = f"{title}: efficiency of {most} workers, over NumPy in one process"
        report.figure(name, speed / most, "", at_least=least)
        single = float(np.median(samples["Synkro, 1"]))
        times = np.array([np.median(samples[f"Synkro, {n}"]) for n in counts]) / single
        shares = 1 / np.array(counts, float)
        weights = 1 - shares
        serial = float((weights * (times - shares)).sum() / (weights**2).sum())
        within = min(1.0, max(0.0, serial))  # noise, and workers in each other's way, reach beyond
        report.figure(f"{title}: serial fraction, of Synkro's one worker", within, "")


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 15, "matrices": 2000, "nbytes": 1 << 29},
        quick={"runs": 5},
        smoke={"runs": 1, "matrices": 20, "nbytes": 1 << 20},
    )
