"""What does a call cost against process pools and actors, by workers and by inputs?

Every side sums arrays of eight numbers a worker that lie there already, and returns the total: what is
measured is how a call gets to the workers, and the answer back.

Floor: one wake-up a worker and one of the caller, where they sleep; four cache lines' way where they
poll (see ``call_overhead``).

Peers, each as its documentation recommends: ``multiprocessing.Pool`` and ``concurrent.futures`` over
``multiprocessing.shared_memory``, mapped once in every process; joblib (loky, kept open), which sends
the arrays; ipyparallel (a cluster whose engines hold the rows); Ray (actors that hold them); Dask
(actors on a local cluster); mpi4py over MPICH (pickled bcast and gather, which spin); JAX
(``shard_map`` over two CPU devices of one process, which sends nothing at all).
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

import synkro

from . import peers
from .common import Report, Side, main, paired

WIDTH = 8  # numbers a worker
JAX = """
import os, sys, time, numpy as np
workers, calls = int(sys.argv[1]), int(sys.argv[2])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={workers}"
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((workers,), ("rows",))
def total(x):
    return jax.lax.psum(x.sum(), "rows")
f = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("rows"), out_specs=P()))
x = jax.device_put(np.ones(8 * workers, np.float32), NamedSharding(mesh, P("rows")))
seconds = []
for _ in range(calls + 5):
    start = time.perf_counter()
    f(x).block_until_ready()
    seconds.append(time.perf_counter() - start)
print(np.median(seconds[5:]))
"""

_attached: dict[str, tuple[SharedMemory, Any]] = {}


def attach(name: str, size: int) -> None:
    """In a process of a pool: map the arrays, once."""
    memory = SharedMemory(name)
    _attached["x"] = memory, np.ndarray(size, np.float64, memory.buf)


def shared_total(span: tuple[int, int]) -> float:
    return float(_attached["x"][1][slice(*span)].sum())


def total(*arrays):
    return sum(array.sum() for array in arrays)


@contextlib.contextmanager
def shared(size: int) -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=8 * size)
    np.ndarray(size, np.float64, memory.buf)[:] = 1
    try:
        yield memory
    finally:
        memory.close()
        memory.unlink()


@contextlib.contextmanager
def synkro_call(workers: int, inputs: int = 1) -> Iterator[Callable[[], float]]:
    with synkro.Session(devices=["cpu"] * workers, verbose=False) as session:
        f = session.function(total, outputs="sum")
        data = [session.data(np.ones(WIDTH * workers)) for _ in range(inputs)]
        yield lambda: f(*data)


@contextlib.contextmanager
def pool_call(workers: int) -> Iterator[Callable[[], float]]:
    context = multiprocessing.get_context("spawn")
    spans = [(WIDTH * rank, WIDTH * rank + WIDTH) for rank in range(workers)]
    with (
        shared(WIDTH * workers) as memory,
        context.Pool(workers, attach, (memory.name, WIDTH * workers)) as pool,
    ):
        yield lambda: sum(pool.map(shared_total, spans, chunksize=1))
        pool.close()
        pool.join()


@contextlib.contextmanager
def executor_call(workers: int) -> Iterator[Callable[[], float]]:
    context = multiprocessing.get_context("spawn")
    spans = [(WIDTH * rank, WIDTH * rank + WIDTH) for rank in range(workers)]
    with shared(WIDTH * workers) as memory:
        arguments = (memory.name, WIDTH * workers)
        with ProcessPoolExecutor(workers, context, attach, arguments) as executor:
            yield lambda: sum(executor.map(shared_total, spans))


@contextlib.contextmanager
def joblib_call(workers: int) -> Iterator[Callable[[], float]]:
    import joblib
    from joblib.externals.loky import get_reusable_executor

    parts = [np.ones(WIDTH) for _ in range(workers)]
    with joblib.Parallel(n_jobs=workers) as parallel:
        yield lambda: sum(parallel(joblib.delayed(total)(part) for part in parts))
    get_reusable_executor().shutdown(wait=True)


@contextlib.contextmanager
def ipyparallel_call(workers: int) -> Iterator[Callable[[], float]]:
    import ipyparallel

    cluster = ipyparallel.Cluster(n=workers, log_level=40)
    with cluster as client:
        view = client[:]
        view.execute("import numpy; x = numpy.ones(8)", block=True)
        ask = ipyparallel.Reference("x")
        yield lambda: sum(view.apply_sync(lambda x: float(x.sum()), ask))


@contextlib.contextmanager
def ray_call(workers: int) -> Iterator[Callable[[], float]]:
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=1)
    class Holder:
        def __init__(self, x: Any) -> None:
            self.x = x

        def total(self) -> float:
            return float(self.x.sum())

    holders = [Holder.remote(ray.put(np.ones(WIDTH))) for _ in range(workers)]
    try:
        yield lambda: sum(ray.get([holder.total.remote() for holder in holders]))
    finally:
        ray.shutdown()


class DaskHolder:
    def __init__(self) -> None:
        self.x = np.ones(WIDTH)

    def total(self) -> float:
        return float(self.x.sum())


@contextlib.contextmanager
def dask_call(workers: int) -> Iterator[Callable[[], float]]:
    import dask.distributed as dd

    cluster = dd.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
    with cluster, dd.Client(cluster) as client:
        made = [client.submit(DaskHolder, actor=True, pure=False) for _ in range(workers)]
        holders = [future.result() for future in made]
        yield lambda: sum([future.result() for future in [holder.total() for holder in holders]])


@contextlib.contextmanager
def mpi_call(workers: int) -> Iterator[Callable[[], float]]:
    peer = peers.Peer("mpi")
    try:
        yield lambda: peer.seconds("caller", rounds=50)
    finally:
        peer.close()


@contextlib.contextmanager
def jax_call(workers: int) -> Iterator[Callable[[], float]]:
    def seconds() -> float:
        command = [sys.executable, "-W", "ignore", "-c", JAX, str(workers), "50"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return float(done.stdout)

    yield seconds


PEERS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "Pool.map": ("", pool_call, "each"),
    "ProcessPoolExecutor": ("", executor_call, "each"),
    "joblib": ("joblib", joblib_call, "each"),
    "ipyparallel": ("ipyparallel", ipyparallel_call, "few"),
    "Ray": ("ray", ray_call, "each"),
    "Dask": ("distributed", dask_call, "few"),
    "mpi4py, spinning": ("mpi4py", mpi_call, "own"),
    "JAX, one process": ("jax", jax_call, "own"),
}
"""What has to be installed, what makes a call, and how often: the last two time themselves."""


def ask(report: Report, runs: int, calls: int, sizes: list[int], named: list[str]) -> None:
    warnings.simplefilter("ignore")
    _against_peers(report, runs, calls, named)
    report.note("MPI's ranks spin in C and never sleep: a process that waits for a call takes a core.")
    with contextlib.ExitStack() as stack:
        sides = []
        for workers in sizes:
            for name, make in (("Synkro", synkro_call), ("Pool.map", pool_call)):
                call = stack.enter_context(make(workers))
                sides.append(Side(f"{name}, {workers}", call, calls, warm=10))
        samples = paired(sides, runs)
    report.table("a call by workers", samples, x="workers")
    with contextlib.ExitStack() as stack:
        sides = [
            Side(f"Synkro, {n}", stack.enter_context(synkro_call(2, n)), calls, warm=10)
            for n in (1, 2, 4, 8, 16)
        ]
        samples = paired(sides, runs)
    report.table("a call of two workers by inputs", samples, x="inputs")


def _against_peers(report: Report, runs: int, calls: int, named: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        sides = [Side("Synkro", stack.enter_context(synkro_call(2)), calls, warm=20)]
        for name in named:
            module, make, often = PEERS[name]
            missing = peers.missing("mpi") if make is mpi_call else None
            if module and importlib.util.find_spec(module) is None:
                missing = f"{module} is not installed"
            if missing:
                report.absent(name, missing)
                continue
            call = stack.enter_context(make(2))
            if often == "own":
                sides.append(Side(name, call, own_clock=True))
            else:
                many = calls if often == "each" else max(2, calls // 10)
                sides.append(Side(name, call, many, warm=3))
        samples = paired(sides, runs)
    report.table("a call of two workers with a reduced number", samples)
    for name in samples:
        if name in ("Synkro", "JAX, one process"):
            continue
        if name == "mpi4py, spinning":
            report.ratio(f"Synkro ÷ {name}", samples["Synkro"], samples[name], at_most=3)
        else:
            least = 25 if name == "Ray" else 10
            report.ratio(f"{name} ÷ Synkro", samples[name], samples["Synkro"], at_least=least)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 15, "calls": 100, "sizes": [1, 2, 4, 8], "named": list(PEERS)},
        quick={"runs": 5, "calls": 50},
        smoke={"runs": 1, "calls": 3, "sizes": [1, 2], "named": ["Pool.map", "ProcessPoolExecutor"]},
    )
