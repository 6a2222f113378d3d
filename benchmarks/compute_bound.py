"""Are two workers twice as fast where only computing counts, and does waiting disturb them?

Floor: half the time of one process.  Rows are worked on in pieces that stay in a core's L2 cache, and
one number comes back, so memory's speed, inputs and outputs play no part.

Peer: the same function in one process with one BLAS thread; Synkro has one thread a worker.

The second part puts the main process and one worker on the same core.  The main process polls for a
moment for each answer before it sleeps: what does that take from a worker whose calls last 1 ms?  The
CPU time of the main process is measured with its polling and without (``SPIN`` set to 0 in it alone).

Peer of that: the same function, called directly.
"""

from __future__ import annotations

import os
import time

import numpy as np
from threadpoolctl import threadpool_limits

import synkro
from synkro.ipc import waiting

from .common import Report, Side, main, paired

ROUNDS = 30


def elementwise(x):  # rows of 32 KB
    total = 0.0
    for row in x:
        value = row.copy()
        for _ in range(ROUNDS):
            np.tanh(value, out=value)
            value += row
        total += value.sum()
    return total


def products(x, w):  # matrices of 256 KB
    total = 0.0
    for value in x:
        for _ in range(8):
            value = np.maximum(value @ w, 0)  # noqa: PLW2901
        total += value.sum()
    return total


def speed_up(report: Report, runs: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((rows, 8192), np.float32)
    matrices = rng.standard_normal((rows // 16, 256, 256), np.float32)
    weights = rng.standard_normal((256, 256), np.float32) / 16
    with synkro.Session(2, threads_per_worker=1, verbose=False) as session:
        x, m, w = map(session.data, (vectors, matrices, weights))
        waves = session.function(elementwise, outputs="sum")
        layers = session.function(products, bcast_inputs="w", outputs="sum")
        assert np.isclose(waves(x), elementwise(vectors), rtol=1e-3)
        assert np.isclose(layers(m, w), products(matrices, weights), rtol=1e-3)
        samples = paired(
            [
                Side("Synkro, elementwise", lambda: waves(x)),
                Side("one process, elementwise", lambda: elementwise(vectors)),
                Side("Synkro, matrix products", lambda: layers(m, w)),
                Side("one process, matrix products", lambda: products(matrices, weights)),
            ],
            runs,
        )
    halves = {
        f"floor: half of it, {what}": [float(np.median(samples[f"one process, {what}"])) / 2]
        for what in ("elementwise", "matrix products")
    }
    report.table("compute-bound calls on two workers, one thread each", samples | halves)
    for what in ("elementwise", "matrix products"):
        over, under = samples[f"one process, {what}"], samples[f"Synkro, {what}"]
        report.ratio(f"speed-up, {what}", over, under, at_least=1.9)


def spinning(report: Report, runs: int, calls: int) -> None:
    row = np.linspace(-3, 3, 4096, dtype=np.float32)
    start = time.perf_counter()
    for _ in range(1000):
        np.tanh(row)
    loops = max(1, round(1000 * 1e-3 / (time.perf_counter() - start)))  # for 1 ms

    def work(x):
        for _ in range(loops):
            np.tanh(x)

    everywhere = os.sched_getaffinity(0)
    core = min(everywhere)
    used: dict[str, list[float]] = {"with polling": [], "without polling": []}
    with synkro.Session(devices=["cpu0"], threads_per_worker=1, verbose=False) as session:
        f = session.function(work, outputs=[])
        x = session.data(row)

        def turn(name, spin):
            waiting.SPIN, usual = spin, waiting.SPIN
            try:
                for _ in range(calls // 4):  # what polling it has saved up for is used up here
                    f(x)
                before, begun = time.process_time(), time.perf_counter()
                for _ in range(calls):
                    f(x)
                wall, cpu = time.perf_counter() - begun, time.process_time() - before
            finally:
                waiting.SPIN = usual
            used[name].append(cpu / calls)
            return wall / calls

        os.sched_setaffinity(0, {core})
        try:
            samples = paired(
                [
                    Side("called directly", lambda: work(row), calls),
                    Side("with polling", lambda: turn("with polling", waiting.SPIN), own_clock=True),
                    Side("without polling", lambda: turn("without polling", 0.0), own_clock=True),
                ],
                runs,
            )
        finally:
            os.sched_setaffinity(0, everywhere)
    report.table("a call of 1 ms, the main process and the one worker on the same core", samples)
    used = {name: values[1:] for name, values in used.items()}  # the first is the warming-up
    report.table("CPU time of the main process in it", used)
    duration = float(np.median(samples["with polling"]))
    cost = {name: float(np.median(values)) for name, values in used.items()}
    report.figure("main's CPU time a call", 100 * cost["with polling"] / duration, "% of the call")
    polling = 100 * (cost["with polling"] - cost["without polling"]) / duration
    report.figure("of it polling", polling, "% of the call", at_most=1)
    report.ratio("call with polling ÷ without", samples["with polling"], samples["without polling"])
    report.ratio("call with polling ÷ direct", samples["with polling"], samples["called directly"])


def ask(report: Report, runs: int, rows: int, spin_runs: int, spin_calls: int) -> None:
    with threadpool_limits(1):
        speed_up(report, runs, rows)
        spinning(report, spin_runs, spin_calls)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 30, "rows": 1024, "spin_runs": 20, "spin_calls": 200},
        quick={"runs": 6, "spin_runs": 4},
        smoke={"runs": 2, "rows": 64, "spin_runs": 2, "spin_calls": 10},
    )
