"""What does a task of ``synk.map`` cost, and are the workers kept busy in the best order?

Jobs for two workers: 10 000 tasks that return their item, by ``map`` and by ``imap``; two items, 1000
arrays of 10 KB, instances, dataclasses and dicts, also beside ``Pool.map`` with its own chunks; uneven
ones, which sleep 15 times 20 ms and then 5 times 200 ms; 100 that compute for 20 ms of their process's
time; and 50 that each sum a row of a table of 400 MB, which all have in common: sent by each map, and
there already. Every answer is compared.

Floor: an item and its result, a few bytes each, go through memory that two processes share, and Python
pickles both. Synkro sends items in batches, and a worker hands results over when they have taken a
millisecond. Numbers are pickled together, 0.02 us each on either side. So are dicts, lists and instances
that hold numbers and short strings; each is a copy of its own. Items that hold nothing else, each once,
need no copy before they are pickled (0.2 us to see that, 0.7 to pickle, 0.4 to unpickle an instance with
two attributes); a result does (1 us), as the next task may change it; and an instance with a list of 30
numbers takes 1.7 us to copy, 1.2 to pickle and 1.6 to unpickle, on its way there and on its way back.
All else is pickled one by one. ``Pool.map`` pickles a chunk, an eighth of the items, as one object, and
copies nothing: items that are one object stay one. So a map of numbers can take as long as with
``Pool.map``, but for its wake-ups (0.3 ms), and one of instances half as long again. Predicted for 10
000 numbers: 1.2 ms in the main process (the next item, its type, its place in a pickle, its result),
0.15 us a task in a worker (``Pool.map`` 0.05: it does not know on which item a worker died), so 2 to 3
ms on two cores that slow each other, where ``Pool.map`` takes 1 to 2 and ``Pool.imap`` 100 to 160 ms.
The uneven tasks take 0.74 s, if each worker that is free takes the next one; the even ones 1 s. A table
is copied once, 400 MB to new pages of shared memory: 0.1 to 0.2 s. The tasks read it once: 30 ms. A copy
for each worker, through a pipe, takes 0.5 s and more. joblib, once its batches have grown, pays for a
few messages only: 2 to 4 us a task. A turn begins when the threads of this process are idle: Dask's go
on for seconds after 10 000 tasks, and slow whoever comes next.

Peers, each as its documentation recommends: ``multiprocessing.Pool.imap`` and ``concurrent.futures``,
one item at a time, which get the table by their initializers, so that each map starts new processes (a
forked pool inherits the table; it is measured in a process of its own, as one that has threads must not
be forked); joblib (loky, kept open), which sends short tasks in batches, as long as the last ones allow,
and maps large arrays from a file in shared memory; Ray (``put``); Dask (``scatter`` to all workers).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import synkro

from .common import Report, Side, main, paired, settled

WORKERS = 2

Look = Callable[[Sequence[int]], list[Any]]
"""Sums these rows of a table."""

Way = tuple[Callable[..., list[Any]], Callable[[Any], AbstractContextManager[Look]]]
"""How a side runs a function on items, and how it sends a table, to look at its rows."""


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def same(item):
    return item


class Individual:
    def __init__(self, genes):
        self.genes, self.fitness = genes, None

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Point:
    x: float
    y: float
    name: str


def total(array):
    return float(array.sum())


def evaluated(individual):
    individual.fitness = sum(individual.genes)
    return individual


def moved(point):
    return Point(point.x + 1, point.y, point.name)


def counted(record):
    return {"count": record["count"] + 1, "values": record["values"]}


def rest(seconds):
    time.sleep(seconds)
    return seconds


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))
    return seconds


def row_total(row, table):
    return float(table[row].sum())


_held: list[Any] = []


def hold(table):
    """In a process of a pool: keep the table."""
    _held[:] = [table]


def held_total(row):
    return row_total(row, _held[0])


def made(rows: int, width: int) -> Any:
    """A table of whole numbers, the sums of which are exact in any order."""
    return np.arange(rows * width, dtype=np.float64).reshape(rows, width) % 1021


# ── sides ────────────────────────────────────────────────────────────────────────────────────────


def synkro_way(session: synkro.Session) -> Way:
    @contextlib.contextmanager
    def sent(table: Any) -> Iterator[Look]:
        yield lambda rows: session.map(row_total, rows, common={"table": table})

    return session.map, sent


@contextlib.contextmanager
def pool_way() -> Iterator[Way]:
    context = multiprocessing.get_context("spawn")

    @contextlib.contextmanager
    def sent(table: Any) -> Iterator[Look]:
        with context.Pool(WORKERS, hold, (table,)) as holders:
            yield lambda rows: list(holders.imap(held_total, rows, chunksize=1))
            holders.close()
            holders.join()

    with context.Pool(WORKERS) as pool:
        yield lambda fn, items: list(pool.imap(fn, items, chunksize=1)), sent
        pool.close()
        pool.join()


@contextlib.contextmanager
def executor_way() -> Iterator[Way]:
    context = multiprocessing.get_context("spawn")

    @contextlib.contextmanager
    def sent(table: Any) -> Iterator[Look]:
        with ProcessPoolExecutor(WORKERS, context, hold, (table,)) as holders:
            yield lambda rows: list(holders.map(held_total, rows))

    with ProcessPoolExecutor(WORKERS, context) as executor:
        yield lambda fn, items: list(executor.map(fn, items)), sent


@contextlib.contextmanager
def joblib_way() -> Iterator[Way]:
    import joblib
    from joblib.externals.loky import get_reusable_executor

    @contextlib.contextmanager
    def sent(table: Any) -> Iterator[Look]:
        with joblib.Parallel(n_jobs=WORKERS) as own:
            yield lambda rows: own(joblib.delayed(row_total)(row, table) for row in rows)

    with joblib.Parallel(n_jobs=WORKERS) as parallel:
        yield lambda fn, items: parallel(joblib.delayed(fn)(item) for item in items), sent
    get_reusable_executor().shutdown(wait=True)


@contextlib.contextmanager
def ray_way() -> Iterator[Way]:
    import ray

    remote = functools.cache(ray.remote)

    @contextlib.contextmanager
    def sent(table: Any) -> Iterator[Look]:
        there = ray.put(table)
        yield lambda rows: ray.get([remote(row_total).remote(row, there) for row in rows])

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield lambda fn, items: ray.get([remote(fn).remote(item) for item in items]), sent
    finally:
        ray.shutdown()


@contextlib.contextmanager
def dask_way() -> Iterator[Way]:
    import dask.distributed as dd

    cluster = dd.LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None)
    with cluster, dd.Client(cluster) as client:

        @contextlib.contextmanager
        def sent(table: Any) -> Iterator[Look]:
            there = client.scatter(table, broadcast=True, hash=False)
            yield lambda rows: client.gather(client.map(row_total, rows, table=there, pure=False))

        yield lambda fn, items: client.gather(client.map(fn, items, pure=False)), sent


PEERS: dict[str, tuple[str, Callable[[], AbstractContextManager[Way]]]] = {
    "Pool.imap": ("", pool_way),
    "ProcessPoolExecutor": ("", executor_way),
    "joblib": ("joblib", joblib_way),
    "Ray": ("ray", ray_way),
    "Dask": ("distributed", dask_way),
}
"""What has to be installed, and what makes a way."""


@functools.cache
def forked_table(rows: int, width: int) -> tuple[Any, list[float]]:
    table = made(rows, width)
    return table, table.sum(axis=1).tolist()


def forked(rows: int, width: int) -> float:
    """Seconds of a pool that inherits the table, from before it starts."""
    table, want = forked_table(rows, width)
    start = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(WORKERS, hold, (table,)) as pool:
        got = list(pool.imap(held_total, range(rows), chunksize=1))
        seconds = time.perf_counter() - start
    assert got == want
    return seconds


def in_a_process(apart: ProcessPoolExecutor, rows: int, width: int) -> float:
    return apart.submit(forked, rows, width).result()


# ── the question ─────────────────────────────────────────────────────────────────────────────────


def side(name: str, run: Callable[..., list[Any]], *args: Any, want: Sequence[Any]) -> Side:
    """A side that runs this, and has to return what is wanted."""

    def seconds() -> float:
        start = time.perf_counter()
        got = run(*args)
        taken = time.perf_counter() - start
        assert list(got) == list(want), f"{name} returned something else"
        return taken

    return Side(name, seconds, prepare=settled, own_clock=True)


def sending(name: str, sent: Callable[[Any], Any], table: Any, want: Sequence[float]) -> Side:
    """A side that sends the table, and looks at its rows: from the start until it has the sums."""

    def seconds() -> float:
        start = time.perf_counter()
        with sent(table) as look:
            got = look(range(len(table)))
            taken = time.perf_counter() - start
        assert got == list(want), f"{name} returned something else"
        return taken

    return Side(name, seconds, prepare=settled, own_clock=True)


def ask(
    report: Report, runs: int, count: int, pause: float, even: int, width: int, named: list[str]
) -> None:
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(synkro.Session(WORKERS, threads_per_worker=1, verbose=False))
        ways: dict[str, Way] = {"Synkro": synkro_way(session)}
        for name in named:
            module, make = PEERS[name]
            if module and importlib.util.find_spec(module) is None:
                report.absent(name, f"{module} is not installed")
            else:
                ways[name] = stack.enter_context(make())
        empty(report, runs, count, ways, session)
        kinds(report, runs, count // 10, ways)
        lasting(report, runs, pause, even, ways)
        common_table(report, runs, width, ways, session)


def empty(report: Report, runs: int, count: int, ways: dict[str, Way], session: synkro.Session) -> None:
    items = range(count)
    sides = [side(name, run, same, items, want=items) for name, (run, _) in ways.items()]
    sides.append(side("Synkro, imap", lambda: list(session.imap(same, items)), want=items))
    samples = paired(sides, runs)
    report.table(f"{count} tasks that return their item", samples)
    report.figure("a task of map()", float(np.median(samples["Synkro"])) / count, "s")
    against(report, samples, "empty tasks", {"Pool.imap": 5}, 1)
    report.ratio("empty tasks: Pool.imap ÷ Synkro, imap", samples["Pool.imap"], samples["Synkro, imap"])


def kinds(report: Report, runs: int, count: int, ways: dict[str, Way]) -> None:
    """Items of some kinds, beside ``Pool.map``, which sends chunks, and others."""
    jobs: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "two integers": (same, [1, 2]),
        f"{10 * count} integers": (same, list(range(10 * count))),
        f"{count} arrays of 10 KB": (total, [np.arange(1250.0) + n for n in range(count)]),
        f"{count} instances": (evaluated, [Individual([float(n)] * 30) for n in range(count)]),
        f"{count} dataclasses": (moved, [Point(1.0 * n, 2.0, f"p{n}") for n in range(count)]),
        f"{count} dicts": (counted, [{"count": n, "values": [1, 2, 3]} for n in range(count)]),
    }
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        chosen = [name for name in ("Synkro", "joblib", "ProcessPoolExecutor") if name in ways]
        for title, (fn, items) in jobs.items():
            want = [fn(copy.deepcopy(item)) for item in items]
            sides = [side(name, ways[name][0], fn, items, want=want) for name in chosen]
            sides.append(side("Pool.map", pool.map, fn, items, want=want))
            samples = paired(sides, runs)
            report.table(title, samples)
            report.ratio(f"{title}: Pool.map ÷ Synkro", samples["Pool.map"], samples["Synkro"])
            for name in chosen[1:]:
                report.ratio(f"{title}: {name} ÷ Synkro", samples[name], samples["Synkro"], at_least=1)
        pool.close()
        pool.join()


def lasting(report: Report, runs: int, pause: float, even: int, ways: dict[str, Way]) -> None:
    uneven = [pause] * 15 + [10 * pause] * 5
    samples = paired([side(n, run, rest, uneven, want=uneven) for n, (run, _) in ways.items()], runs)
    report.table("uneven tasks that sleep: 15 short, 5 ten times as long", samples)
    best = 37 * pause  # one worker has seven short ones and three long ones
    report.figure(
        "uneven tasks: Synkro ÷ the best in this order",
        float(np.median(samples["Synkro"])) / best,
        "×",
        at_most=0.78 / 0.74,
    )
    items = [pause] * even
    samples = paired([side(n, run, compute, items, want=items) for n, (run, _) in ways.items()], runs)
    report.table(f"{even} tasks that compute for as long as a short one sleeps", samples)
    best = pause * even / WORKERS
    report.figure(
        "even tasks: Synkro ÷ half of their time", float(np.median(samples["Synkro"])) / best, "×"
    )
    against(report, samples, "even tasks", {}, None)


def common_table(
    report: Report, runs: int, width: int, ways: dict[str, Way], session: synkro.Session
) -> None:
    rows = 50
    table = made(rows, width)
    want = table.sum(axis=1).tolist()
    size = f"a table of {table.nbytes / 1e6:.3g} MB"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as apart:
        sides = [sending(name, sent, table, want) for name, (_, sent) in ways.items()]
        seconds = functools.partial(in_a_process, apart, rows, width)
        sides.append(Side("Pool.imap, forked", seconds, own_clock=True))
        samples = paired(sides, runs)
    report.table(f"{rows} tasks with {size}, which each map sends", samples)
    against(report, samples, "with a table that each map sends", {}, None)
    with contextlib.ExitStack() as stack:
        data = session.data(table)
        sides = []
        for name, (_, sent) in ways.items():
            look = stack.enter_context(sent(data if name == "Synkro" else table))
            sides.append(side(name, look, range(rows), want=want))
        samples = paired(sides, runs)
        data.free_memory()
    report.table(f"{rows} tasks with {size}, which is there already", samples)
    against(report, samples, "with a table that is there", {}, None)


def against(
    report: Report, samples: Any, title: str, targets: dict[str, float], least: float | None
) -> None:
    for name in samples:
        if not name.startswith("Synkro"):
            over, target = samples[name], targets.get(name, least)
            report.ratio(f"{title}: {name} ÷ Synkro", over, samples["Synkro"], at_least=target)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 9,
            "count": 10_000,
            "pause": 0.02,
            "even": 100,
            "width": 1_000_000,
            "named": list(PEERS),
        },
        quick={"runs": 3},
        smoke={
            "runs": 1,
            "count": 100,
            "pause": 0.001,
            "even": 4,
            "width": 1000,
            "named": ["Pool.imap", "ProcessPoolExecutor", "joblib"],
        },
    )
