"""What does a call cost that computes nothing?

Floor: no bytes worth counting; the main process tells every worker, every worker tells it back.  In a
hot loop nobody needs to sleep, so that is four cache lines' way for two workers.  After idleness
everybody sleeps: one wake-up a worker, and one of the main process.

The floors are measured: two bare processes that poll for a number and write it back, and two with a
posix_ipc semaphore each, which wait for it and release another.

Peers: ``multiprocessing.Pool.map``, ``ProcessPoolExecutor.map`` and joblib (loky, kept open), each with
two tasks for two processes.

Hot: each side calls in a loop; also beside one and two busy neighbours, processes that compute all the
time.  In turns: one call a side.  Idle: 5 ms of sleep before each call, the sides in turn.  At last,
what a trace adds to a call of 1 ms.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import posix_ipc

import synkro

from .bare import LINE, start, stop
from .common import Report, Side, main, neighbours, paired


class BareSemaphores:
    """Processes that wait for a semaphore and release another.

    The semaphores have no names any more before the processes start, which inherit them.
    """

    def __init__(self, size: int) -> None:
        self.go, self.done = ([_nameless() for _ in range(size)] for _ in range(2))
        self.processes = [start(_echo, *pair) for pair in zip(self.go, self.done, strict=True)]

    def round_trip(self) -> None:
        for semaphore in self.go:
            semaphore.release()
        for semaphore in self.done:
            semaphore.acquire()

    def close(self) -> None:
        stop(self.processes)
        for semaphore in (*self.go, *self.done):
            semaphore.close()


def _nameless() -> posix_ipc.Semaphore:
    semaphore = posix_ipc.Semaphore(None, posix_ipc.O_CREX)
    semaphore.unlink()
    return semaphore


def _echo(go: posix_ipc.Semaphore, done: posix_ipc.Semaphore) -> None:
    while True:
        go.acquire()
        done.release()


class BarePolling:
    """Processes that poll for a number in shared memory, and write it back: no hot call is faster."""

    def __init__(self, size: int) -> None:
        self.words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self.lines = [LINE * (rank + 1) for rank in range(size)]
        self.processes = [start(self._serve, line) for line in self.lines]

    def _serve(self, line: int) -> None:
        while True:
            before = self.words[line]
            while self.words[0] == before:
                if self.words[1]:
                    time.sleep(1e-3)  # others are being timed
                else:
                    os.sched_yield()
            self.words[line] = self.words[0]

    def round_trip(self) -> None:
        self.words[0] += 1
        for line in self.lines:
            while self.words[line] != self.words[0]:
                os.sched_yield()

    def seconds(self, rounds: int) -> float:
        """Seconds a round trip, the median, with the processes awake only meanwhile."""
        self.words[1] = 0
        self.round_trip()
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            self.round_trip()
            seconds.append(time.perf_counter() - begin)
        self.words[1] = 1
        return float(np.median(seconds))

    def close(self) -> None:
        stop(self.processes)


def nothing(x):
    return None


def total(x):
    return x.sum()


def busy(x):
    stop = time.perf_counter() + 1e-3
    while time.perf_counter() < stop:
        pass


def ask(report: Report, runs: int, calls: int, idle_runs: int) -> None:
    import joblib  # not above: the children of the pools import this module, too
    from joblib.externals.loky import get_reusable_executor

    with contextlib.ExitStack() as stack:
        bare, polling = BareSemaphores(2), BarePolling(2)
        stack.callback(bare.close)
        stack.callback(polling.close)
        context = multiprocessing.get_context("spawn")
        pool = stack.enter_context(context.Pool(2))
        executor = stack.enter_context(ProcessPoolExecutor(2, mp_context=context))
        stack.callback(lambda: get_reusable_executor().shutdown(wait=True))
        parallel = stack.enter_context(joblib.Parallel(n_jobs=2))
        sessions = {
            size: stack.enter_context(synkro.Session(devices=["cpu"] * size, verbose=False))
            for size in (1, 2, 4)
        }
        x = {size: session.data(np.ones(size)) for size, session in sessions.items()}
        empty = {n: session.function(nothing, outputs=[]) for n, session in sessions.items()}
        reduced = sessions[2].function(total, outputs="sum")

        few = max(2, calls // 30)
        hot = paired(
            [
                Side("Synkro, empty", lambda: empty[2](x[2]), calls, warm=20),
                Side("Synkro, reduced scalar", lambda: reduced(x[2]), calls, warm=20),
                Side("floor: bare polling", lambda: polling.seconds(calls), own_clock=True),
                Side("bare semaphores", bare.round_trip, calls, warm=20),
                Side("Pool.map", lambda: pool.map(nothing, (0, 1), chunksize=1), calls, warm=5),
                Side("ProcessPoolExecutor", lambda: list(executor.map(nothing, (0, 1))), calls, warm=5),
                Side(
                    "joblib", lambda: parallel(joblib.delayed(nothing)(i) for i in (0, 1)), few, warm=2
                ),
            ],
            runs,
        )
        report.table("a call to two workers, hot loop", hot)
        for mine in ("Synkro, empty", "Synkro, reduced scalar"):
            report.ratio(f"Pool.map ÷ {mine}", hot["Pool.map"], hot[mine], at_least=10)
            report.figure(f"aim for {mine}", float(np.median(hot[mine])), "s", at_most=25e-6)

        ours = [
            Side("Synkro, empty", lambda: empty[2](x[2])),
            Side("Synkro, reduced scalar", lambda: reduced(x[2])),
            Side("Pool.map", lambda: pool.map(nothing, (0, 1), chunksize=1)),
        ]
        report.table("a call to two workers, single calls in turns", paired(ours, idle_runs))
        for count in (1, 2):
            with neighbours(count):
                beside = paired([replace(side, calls=few, warm=5) for side in ours], runs)
            busy_ones = "a busy neighbour" if count == 1 else f"{count} busy neighbours"
            report.table(f"a call to two workers, hot loop beside {busy_ones}", beside)

        cold = paired(
            [
                Side("Synkro, empty", lambda: empty[2](x[2]), idle=5e-3),
                Side("floor: bare semaphores", bare.round_trip, idle=5e-3),
            ],
            idle_runs,
        )
        report.table("a call to two workers after 5 ms of idleness", cold)
        report.ratio(
            "Synkro ÷ bare semaphores",
            cold["Synkro, empty"],
            cold["floor: bare semaphores"],
            at_most=1.3,
        )

        sides = [
            Side(f"{n} worker{'s' if n > 1 else ''}", lambda n=n: empty[n](x[n]), calls, warm=20)
            for n in sessions
        ]
        report.table("an empty call, hot loop, by workers", paired(sides, runs))
        _ask_for_traces(report, sessions[2], x[2], runs, few)
    report.note(
        "Why a call after a pause is slower than bare semaphores: the Python code of both sides "
        "runs from cold caches. Why a reduced scalar is slower than an empty call: 10 us of "
        "arithmetic and bookkeeping in Python."
    )


def _ask_for_traces(report: Report, session, x, runs: int, calls: int) -> None:
    function = session.function(busy, outputs=[])

    def traced() -> float:
        with session.trace():
            return plain()

    def plain() -> float:
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            function(x)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))

    sides = [Side("plain", plain, own_clock=True), Side("traced", traced, own_clock=True)]
    samples = paired(sides, 2 * runs)
    report.table("a call that computes for 1 ms", samples)
    report.ratio("traced ÷ plain", samples["traced"], samples["plain"], at_most=1.02)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 30, "calls": 300, "idle_runs": 500},
        quick={"runs": 10, "calls": 100, "idle_runs": 100},
        smoke={"runs": 2, "calls": 10, "idle_runs": 10},
    )
