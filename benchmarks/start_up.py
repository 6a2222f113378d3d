"""How long do two workers take to start, and what does ``import synkro`` add to NumPy's import?

Floor: a bare interpreter, which then imports NumPy, twice at the same time.  The rest of a worker is
Synkro's own modules and cloudpickle, a few mappings, and one command and its answer.

Peers, until two processes have answered a first task that needs NumPy: ``multiprocessing.Pool(2)`` and
``ProcessPoolExecutor(2)``, started with *spawn* and with *fork* (which copies this process, NumPy and
all, and is unsafe in one with threads or CUDA); joblib, ipyparallel, Ray, Dask, two ranks of MPI and of
torch.distributed (gloo), and JAX on two CPU devices.  (Pools count as started when *one* process has
done both tasks.)

Every figure comes from a fresh interpreter, which has imported what it uses before its clock starts.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time

import numpy as np

from synkro import machine

from .common import Report, Side, main, paired
from .peers import Peer, missing

FORK = """
import time, numpy, synkro
start = time.perf_counter()
synkro.fork(2, verbose=False)
print(time.perf_counter() - start)
"""
FIRST_RESULT = """
import time, numpy as np, synkro
start = time.perf_counter()
synkro.fork(2, verbose=False)
total = synkro.function(lambda x: x.sum(), outputs="sum")
assert total(np.ones(2)) == 2
print(time.perf_counter() - start)
"""
POOL = """
import multiprocessing, time, numpy as np
start = time.perf_counter()
with multiprocessing.get_context({method!r}).Pool(2) as pool:
    assert pool.map(np.sum, [np.ones(1)] * 2, chunksize=1) == [1, 1]
    print(time.perf_counter() - start)
"""
EXECUTOR = """
import multiprocessing, time, numpy as np
from concurrent.futures import ProcessPoolExecutor
start = time.perf_counter()
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
    assert list(executor.map(np.sum, [np.ones(1)] * 2)) == [1, 1]
    print(time.perf_counter() - start)
"""
PEERS = {
    "joblib": (
        "joblib",
        """
import time, numpy as np, joblib
from joblib.externals.loky import get_reusable_executor
start = time.perf_counter()
with joblib.Parallel(n_jobs=2) as parallel:
    assert parallel(joblib.delayed(np.sum)(np.ones(1)) for _ in range(2)) == [1, 1]
    print(time.perf_counter() - start)
get_reusable_executor().shutdown(wait=True)
""",
    ),
    "ipyparallel": (
        "ipyparallel",
        """
import time, numpy as np, ipyparallel
start = time.perf_counter()
with ipyparallel.Cluster(n=2, log_level=40) as client:
    assert client[:].map_sync(np.sum, [np.ones(1)] * 2) == [1, 1]
    print(time.perf_counter() - start)
""",
    ),
    "Ray": (
        "ray",
        """
import time, numpy as np, ray
start = time.perf_counter()
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
total = ray.remote(lambda x: float(x.sum()))
assert ray.get([total.remote(np.ones(1)) for _ in range(2)]) == [1, 1]
print(time.perf_counter() - start)
ray.shutdown()
""",
    ),
    "Dask": (
        "distributed",
        """
import time, numpy as np, dask.distributed as dd
if __name__ == "__main__":
    start = time.perf_counter()
    with dd.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster:
        with dd.Client(cluster) as client:
            assert client.gather(client.map(np.sum, [np.ones(1)] * 2)) == [1, 1]
            print(time.perf_counter() - start)
""",
    ),
    "JAX, one process": (
        "jax",
        """
import os, time, numpy as np
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
start = time.perf_counter()
x = jax.device_put(np.ones(2), NamedSharding(jax.make_mesh((2,), ("rows",)), P("rows")))
assert jax.jit(lambda x: x.sum())(x) == 2
print(time.perf_counter() - start)
""",
    ),
}
"""What has to be installed, and what a fresh interpreter runs."""
IMPORT = """
import time, numpy
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


def seconds_of(script: str) -> float:
    """What a fresh interpreter that runs *script* prints last."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def seconds_of_ranks(kind: str) -> float:
    """From starting two ranks of MPI or torch.distributed until they have reduced a number.

    Their imports are in it: what they are to compute with, they import themselves.
    """
    start = time.perf_counter()
    peer = Peer(kind)
    try:
        peer.seconds("all_reducer", count=1)
        return time.perf_counter() - start
    finally:
        peer.close()


def two_at_once(statement: str) -> float:
    """Seconds until two interpreters, started as workers are, have run *statement*."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"{statement}; print(flush=True)"
    processes = [machine.start(code, environment=environment) for _ in range(2)]
    for process in processes:
        process.stdout.readline()
    seconds = time.perf_counter() - start
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    return seconds


def import_costs(statement: str) -> dict[str, float]:
    """Seconds of each module's import with all that it imports, by ``-X importtime``."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = re.findall(r"import time: +\d+ \| +(\d+) \| +(\S+)", done.stderr)
    return {module: int(microseconds) * 1e-6 for microseconds, module in lines}


def fresh(name: str, script: str) -> Side:
    return Side(name, lambda: seconds_of(script), own_clock=True)


def ask(report: Report, runs: int, peer_runs: int, first: bool) -> None:
    sides = [
        fresh("synkro.fork(2)", FORK),
        fresh("Synkro, first result", FIRST_RESULT),
        fresh("Pool(2), fork", POOL.format(method="fork")),
        fresh("Pool(2), spawn", POOL.format(method="spawn")),
        fresh("ProcessPoolExecutor(2), spawn", EXECUTOR),
    ]
    starting = paired(sides, runs, first)
    bare = Side(
        "floor: two interpreters with NumPy", lambda: two_at_once("import numpy"), own_clock=True
    )
    floor = paired([bare], runs)
    report.table("starting two workers, until a first result", {**starting, **floor})
    report.figure("synkro.fork(2)", float(np.median(starting["synkro.fork(2)"])), "s", at_most=0.4)
    for peer in ("Pool(2), spawn", "ProcessPoolExecutor(2), spawn"):
        report.ratio(f"{peer} ÷ Synkro", starting[peer], starting["Synkro, first result"], at_least=1)
    if peer_runs:
        _against_libraries(report, peer_runs)
    _ask_for_parts(report, runs, first)


def _against_libraries(report: Report, runs: int) -> None:
    sides = [fresh("Synkro", FIRST_RESULT)]
    for name, (module, script) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            report.absent(name, f"{module} is not installed")
        else:
            sides.append(fresh(name, script))
    for kind, name in (("mpi", "MPI, two ranks"), ("gloo", "torch.distributed, two ranks")):
        if why := missing(kind):
            report.absent(name, why)
        else:
            sides.append(Side(name, lambda kind=kind: seconds_of_ranks(kind), own_clock=True))
    samples = paired(sides, runs)
    report.table("starting two workers of a library, until a first result", samples)
    for name in samples:
        if name == "JAX, one process":
            report.ratio(f"{name} (starts no process) ÷ Synkro", samples[name], samples["Synkro"])
        elif name != "Synkro":
            report.ratio(f"{name} ÷ Synkro", samples[name], samples["Synkro"], at_least=1)


def _ask_for_parts(report: Report, runs: int, first: bool) -> None:
    parts = {
        "an interpreter": "pass",
        "an interpreter and NumPy": "import numpy",
        "an interpreter and a worker's imports": "import numpy, synkro.worker",
    }
    sides = [
        Side(name, lambda code=code: two_at_once(code), own_clock=True) for name, code in parts.items()
    ]
    report.table("where it goes: two at once, until they have run it", paired(sides, runs, first))

    imports = paired([fresh("synkro", IMPORT.format(module="synkro"))], runs, first)
    report.table("import after NumPy", imports)
    report.figure("import synkro beyond NumPy", float(np.median(imports["synkro"])), "s", at_most=0.15)

    repeated = [import_costs("import numpy, synkro") for _ in range(runs)]
    costs = {m: [some.get(m, 0.0) for some in repeated] for m in repeated[0]}
    dearest = sorted(costs, key=lambda module: -float(np.median(costs[module])))[:15]
    report.table(
        "the dearest imports (-X importtime, with all they import)", {m: costs[m] for m in dearest}
    )


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 20, "peer_runs": 5, "first": True},
        quick={"runs": 5, "peer_runs": 2},
        smoke={"runs": 1, "peer_runs": 0, "first": False},
    )
