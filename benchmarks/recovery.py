"""How long until the program goes on, after an exception in a worker and after a worker's death?

Floor: of an exception, one call; of a death, the news of it (a wake-up), and then the start of new
workers (``start_up``), or of one, where it is replaced: an interpreter with NumPy.

Peers: ``multiprocessing.Pool``, whose exceptions come back in the same way, and
``ProcessPoolExecutor``, which notices a death and has to be made anew.  (A Pool whose worker dies in a
task waits forever: not measured.)
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

import synkro

from .common import Report, Side, main, paired


def failing(x):
    raise ValueError("on purpose")


def dying(x):
    os.kill(os.getpid(), 9)


def fine(x):
    return float(np.sum(x))


def ask(report: Report, runs: int, calls: int) -> None:
    x = np.ones(2)
    context = multiprocessing.get_context("spawn")
    with synkro.Session(2, verbose=False) as session, context.Pool(2) as pool:
        data = session.data(x)
        bad, good = session.function(failing), session.function(fine, outputs="sum")

        def ours() -> None:
            try:
                bad(data)
            except synkro.WorkerError:
                good(data)

        def pools() -> None:
            try:
                pool.map(failing, x)
            except ValueError:
                pool.map(fine, x)

        sides = [Side("Synkro", ours, calls, warm=3), Side("Pool", pools, calls, warm=3)]
        report.table("an exception, and the next call", paired(sides, runs))

    noticed: dict[str, list[float]] = {"Synkro": [], "ProcessPoolExecutor": []}
    again: dict[str, list[float]] = {name: [] for name in noticed}
    for _ in range(runs):
        for name, times in (("Synkro", _our_death()), ("ProcessPoolExecutor", _their_death(context))):
            noticed[name].append(times[0])
            again[name].append(times[1])
    report.table("a death, until the program knows", noticed)
    report.figure("a death is noticed", float(np.median(noticed["Synkro"])), "s", at_most=1.0)
    report.table("from there until the first result of new workers", again)
    report.ratio("ProcessPoolExecutor ÷ Synkro", again["ProcessPoolExecutor"], again["Synkro"])
    replaced: dict[str, list[float]] = {"in a map, retries=1": [], "in a call, replace=True": []}
    for _ in range(runs):
        replaced["in a map, retries=1"].append(_replaced_in_a_map())
        replaced["in a call, replace=True"].append(_replaced_in_a_call())
    report.table("a death, until another worker has done the work", replaced)
    for where, times in replaced.items():
        report.figure(f"… {where}", float(np.median(times)), "s", at_most=0.3)


def _our_death() -> tuple[float, float]:
    x = np.ones(2)
    session = synkro.Session(2, verbose=False)
    session.function(fine, outputs="sum")(x)
    fatal = session.function(dying)
    start = time.perf_counter()
    try:
        fatal(x)
    except synkro.WorkerDied:
        middle = time.perf_counter()
    session.close()
    with synkro.Session(2, verbose=False) as session:
        session.function(fine, outputs="sum")(x)
        return middle - start, time.perf_counter() - middle


def _replaced_in_a_map() -> float:
    """Seconds of a map of one item, which its first worker dies of, beyond those of one without."""
    with synkro.Session(2, verbose=False) as session, tempfile.TemporaryDirectory() as folder:

        def once(path: str) -> int:
            if path and not os.path.exists(path):
                open(path, "x").close()
                os._exit(1)
            return os.getpid()

        session.map(once, [""], retries=1)
        start = time.perf_counter()
        session.map(once, [""], retries=1)
        middle = time.perf_counter()
        session.map(once, [os.path.join(folder, "mark")], retries=1)
        return time.perf_counter() - middle - (middle - start)


def _replaced_in_a_call() -> float:
    x = np.ones(2)
    with synkro.Session(2, verbose=False, replace=True) as session:
        fatal, good = session.function(dying), session.function(fine, outputs="sum")
        good(x)
        start = time.perf_counter()
        try:
            fatal(x[:1])
        except synkro.WorkerDied:
            good(x)
        return time.perf_counter() - start


def _their_death(context) -> tuple[float, float]:
    with ProcessPoolExecutor(2, context) as executor:
        list(executor.map(fine, (1.0, 1.0)))
        start = time.perf_counter()
        try:
            executor.submit(dying, 1.0).result()
        except BrokenProcessPool:
            middle = time.perf_counter()
    with ProcessPoolExecutor(2, context) as executor:
        list(executor.map(fine, (1.0, 1.0)))
        return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 10, "calls": 20},
        quick={"runs": 3},
        smoke={"runs": 1, "calls": 2},
    )
