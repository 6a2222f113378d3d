"""Does a call cost more for larger inputs?  What does it cost to pass a plain array?

The function looks at one element a rank.  Floor for ``Data``: nothing but the call; they lie in shared
memory, the workers map them once, and a command names them.  Floor for a plain array: one copy into
shared memory, by hand, and the call of that.

Peers that have the rows already, as ``Data`` are there: a pool over ``multiprocessing.shared_memory``,
and Ray with objects put once.  Peers that are sent an array with each call: ``Pool.map`` (pickled),
joblib (which writes an array of 1 MB and more to a file that its processes map, once as long as it is
the same array), and MPI over two ranks (scattered as a buffer; the root keeps its half).  They are shown
up to 64 MB.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

import synkro

from .common import Report, Side, main, paired, readable
from .peers import Peer, missing

Call = Callable[[], Any]

_mapped: dict[str, SharedMemory] = {}


def first(x):
    return x[0]


def first_shared(task: tuple[str, int]) -> float:
    """In a process of a pool: an element of shared memory, which is mapped once."""
    name, place = task
    if name not in _mapped:
        _mapped[name] = SharedMemory(name)
    return float(np.ndarray(1, np.float32, _mapped[name].buf, 4 * place)[0])


@contextlib.contextmanager
def in_shared_memory(pool: Pool, count: int) -> Iterator[Call]:
    memory = SharedMemory(create=True, size=4 * count)
    np.ndarray(count, np.float32, memory.buf)[:] = 1
    tasks = [(memory.name, 0), (memory.name, count // 2)]
    try:
        yield lambda: sum(pool.map(first_shared, tasks, chunksize=1))
    finally:
        memory.close()
        memory.unlink()


def ray_calls(stack: contextlib.ExitStack) -> Callable[[int], Call]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    stack.callback(ray.shutdown)
    remote = ray.remote(first)

    def call(count: int) -> Call:
        halves = [ray.put(half) for half in np.array_split(np.ones(count, np.float32), 2)]
        return lambda: sum(ray.get([remote.remote(half) for half in halves]))

    return call


def joblib_calls(stack: contextlib.ExitStack) -> Callable[[int], Call]:
    import joblib
    from joblib.externals.loky import get_reusable_executor

    stack.callback(lambda: get_reusable_executor().shutdown(wait=True))
    parallel = stack.enter_context(joblib.Parallel(n_jobs=2))

    def call(count: int) -> Call:
        halves = np.array_split(np.ones(count, np.float32), 2)
        return lambda: sum(parallel(joblib.delayed(first)(half) for half in halves))

    return call


def often(nbytes: int, calls: int) -> int:
    return calls if nbytes < 1 << 20 else max(1, calls // 30)


def ask(report: Report, runs: int, calls: int, sizes: list[int], peer_sizes: list[int]) -> None:
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(2))
        stack.callback(pool.join)
        stack.callback(pool.close)
        session = stack.enter_context(synkro.Session(2, verbose=False))
        function = session.function(first, outputs="sum")
        _put_once(report, stack, session, function, pool, runs, calls, sizes, peer_sizes)
        _sent_each_time(report, stack, session, function, pool, runs, calls, peer_sizes)
    report.note(
        "Why a small plain array costs more than a copy by hand: it is looked at and compared "
        "with the last one in Python, which takes 12 us."
    )


def _put_once(report, stack, session, function, pool, runs, calls, sizes, peer_sizes) -> None:
    sides = []
    for nbytes in sizes:
        data = session.data(shape=nbytes // 4, dtype="float32")
        sides.append(
            Side(f"Synkro, {readable(nbytes, 'bytes')}", lambda x=data: function(x), calls, warm=20)
        )
    samples = paired(sides, runs)
    del sides, data
    smallest, *others = samples
    for name in others:
        report.ratio(f"{name} ÷ {smallest}", samples[name], samples[smallest], at_most=1.1)
    ray_call = None
    if importlib.util.find_spec("ray") is None:
        report.absent("Ray", "ray is not installed")
    else:
        ray_call = ray_calls(stack)
    sides = []
    for nbytes in peer_sizes:
        size = readable(nbytes, "bytes")
        call = stack.enter_context(in_shared_memory(pool, nbytes // 4))
        sides.append(Side(f"Pool, shared memory, {size}", call, often(nbytes, calls), warm=2))
        if ray_call is not None:
            call = ray_call(nbytes // 4)
            sides.append(Side(f"Ray, {size}", call, often(nbytes, calls), warm=2))
    title = "a call that looks at one element a rank, by the size of what lies there"
    report.table(title, samples | paired(sides, max(2, runs // 3)), x="bytes")


def _sent_each_time(report, stack, session, function, pool, runs, calls, sizes) -> None:
    joblib_call = mpi = None
    if importlib.util.find_spec("joblib") is None:
        report.absent("joblib", "joblib is not installed")
    else:
        joblib_call = joblib_calls(stack)
    if why := missing("mpi"):
        report.absent("MPI", why)
    else:
        mpi = Peer("mpi")
        stack.callback(mpi.close)
    samples = {}
    for nbytes in sizes:
        size, count, few = readable(nbytes, "bytes"), nbytes // 4, often(nbytes, calls)
        array = np.ones(count, np.float32)
        halves = np.array_split(array, 2)
        data = session.data(array)

        def by_hand(data=data, array=array):
            np.copyto(data.data, array)
            return function(data)

        sides = [
            Side(f"Synkro, {size}", lambda array=array: function(array), few, warm=2),
            Side(f"floor: copy by hand, {size}", by_hand, few, warm=2),
            Side(
                f"Pool.map, {size}",
                lambda halves=halves: sum(pool.map(first, halves, chunksize=1)),
                max(1, few // 10),
                warm=1,
            ),
        ]
        if joblib_call is not None:
            sides.append(Side(f"joblib, {size}", joblib_call(count), max(1, few // 10), warm=1))
        if mpi is not None:
            sides.append(
                Side(
                    f"MPI, {size}",
                    lambda count=count, few=few: mpi.seconds("scatterer", count=count, rounds=few),
                    own_clock=True,
                )
            )
        found = paired(sides, runs)
        mine, floor = sides[0].name, sides[1].name
        report.ratio(f"a plain array ÷ floor, {size}", found[mine], found[floor], at_most=1.1)
        samples |= found
    report.table("the same with a plain array, by its size", samples, x="bytes")


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 30,
            "calls": 300,
            "sizes": [1 << 10, 1 << 16, 1 << 20, 1 << 26, 1 << 30],
            "peer_sizes": [1 << 10, 1 << 16, 1 << 20, 1 << 26],
        },
        quick={"runs": 6, "calls": 100},
        smoke={"runs": 2, "calls": 10, "sizes": [1 << 10, 1 << 20], "peer_sizes": [1 << 10]},
    )
