"""What do libraries that take a pool gain, or lose, by ``synk.Executor``?

Tasks that compute for 5 ms, on two workers, through each library as its users write it: with one line
changed.  Where a library is not installed, its row is left out.

Floor: half of the tasks' seconds.  A task costs the main process some 0.2 to 0.5 ms, as with the peers:
it is pickled, its worker is woken, and so is whoever waits for it.  On two cores that the main process
shares with both workers, half of this adds to each task.

Peers: the same library over ``ProcessPoolExecutor``; pymoo over ``multiprocessing.Pool``, as it wants a
``starmap``; joblib and scikit-learn over loky.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import numpy as np

import synkro

from .common import Report, Side, main, paired

BUSY = 5e-3  # seconds of a task
MOST = 1.1  # times the peer's seconds


def busy(x: Any = 0.0) -> float:
    """A task: computes for 5 ms."""
    until = time.process_time() + BUSY
    while time.process_time() < until:
        pass
    return float(np.sum(np.square(x)))


def column(table: Any, number: int) -> float:
    busy()
    return float(table[number].sum())


def negative(x: Any) -> float:
    return -busy(x)


def cube(u: Any) -> Any:
    return 10 * (2 * u - 1)


def submitted(executor: Executor, count: int) -> None:
    futures = [executor.submit(busy, n) for n in range(count)]
    for future in futures:
        future.result()


def one_by_one(executor: Executor, count: int) -> None:
    for n in range(count // 2):
        executor.submit(busy, n).result()


def with_a_table(executor: Executor, count: int) -> None:
    """Each task gets the same table, of 8 MB."""
    futures = [executor.submit(column, TABLE, n) for n in range(count)]
    for future in futures:
        future.result()


TABLE = np.ones((1000, 1000))


def with_asyncio(executor: Executor, count: int) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(executor, busy, n) for n in range(count)))

    asyncio.run(run())


def with_dask(executor: Executor, count: int) -> None:
    import dask

    dask.compute(*[dask.delayed(busy)(n) for n in range(count)], scheduler=executor)


def with_scipy(executor: Executor, count: int) -> None:
    from scipy.optimize import differential_evolution

    how = {"updating": "deferred", "maxiter": max(1, count // 20), "popsize": 5, "polish": False}
    differential_evolution(busy, [(-1, 1)] * 2, workers=executor.map, seed=0, tol=0, **how)


def with_emcee(executor: Executor, count: int) -> None:
    import emcee

    sampler = emcee.EnsembleSampler(10, 2, negative, pool=executor)
    sampler.run_mcmc(np.random.default_rng(0).random((10, 2)), count // 10)


def with_dynesty(executor: Executor, count: int) -> None:
    import dynesty

    how = {"nlive": 20, "queue_size": 2, "sample": "unif", "rstate": np.random.default_rng(0)}
    sampler = dynesty.NestedSampler(negative, cube, 2, pool=executor, **how)
    sampler.run_nested(maxcall=count, print_progress=False)


def with_pymoo(pool: Any, count: int) -> None:
    from pymoo.algorithms.soo.nonconvex.ga import GA
    from pymoo.optimize import minimize
    from pymoo.parallelization.starmap import StarmapParallelization
    from pymoo.problems.functional import FunctionalProblem

    spread = StarmapParallelization(pool.starmap)
    problem = FunctionalProblem(2, [busy], xl=-1, xu=1, elementwise_runner=spread)
    minimize(problem, GA(pop_size=20), ("n_gen", max(1, count // 20)), seed=0)


def with_joblib(backend: str, count: int) -> None:
    from joblib import Parallel, delayed, parallel_config

    with parallel_config(backend=backend, n_jobs=2):
        Parallel()(delayed(busy)(n) for n in range(count))


def with_scikit_learn(backend: str, count: int) -> None:
    from joblib import parallel_config
    from sklearn.datasets import make_classification
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    x, y = make_classification(600, 20, random_state=0)
    grid = {"C": np.logspace(-2, 2, max(1, count // 10))}
    with parallel_config(backend=backend, n_jobs=2):
        GridSearchCV(SVC(), grid, cv=3).fit(x, y)


LIBRARIES: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "submit": (submitted, ""),
    "submit, one after the other": (one_by_one, ""),
    "submit, with a table of 8 MB": (with_a_table, ""),
    "asyncio": (with_asyncio, ""),
    "Dask": (with_dask, "dask"),
    "SciPy": (with_scipy, "scipy"),
    "emcee": (with_emcee, "emcee"),
    "dynesty": (with_dynesty, "dynesty"),
    "pymoo": (with_pymoo, "pymoo"),
    "joblib": (with_joblib, "joblib"),
    "scikit-learn": (with_scikit_learn, "sklearn"),
}


def ask(report: Report, runs: int, count: int) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)  # of samplers: the chains are short
    with ProcessPoolExecutor(2) as theirs, multiprocessing.Pool(2) as pool:
        submitted(theirs, 4)  # its processes are forks, made before there are threads
        with synkro.Executor(2) as ours:
            for name, (run, library) in LIBRARIES.items():
                if library and importlib.util.find_spec(library) is None:
                    continue
                mine: Any = "synkro" if library in ("joblib", "sklearn") else ours
                other: Any = {"joblib": "loky", "sklearn": "loky", "pymoo": pool}.get(library, theirs)
                sides = [
                    Side("Synkro", lambda run=run, it=mine: run(it, count), warm=1),
                    Side("peer", lambda run=run, it=other: run(it, count), warm=1),
                ]
                times = paired(sides, runs)
                report.table(f"{name}: tasks of 5 ms", times)
                report.ratio(f"{name}: Synkro ÷ peer", times["Synkro"], times["peer"], at_most=MOST)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 11, "count": 200},
        quick={"runs": 5, "count": 100},
        smoke={"runs": 1, "count": 20},
    )
