"""How long do two workers take to start, and what does ``import synkro`` add to NumPy's import?

Floor: a bare interpreter, which then imports NumPy, twice at the same time.  The rest of a worker is
Synkro's own modules and cloudpickle, a few mappings, and one command and its answer.

Peers: ``multiprocessing.Pool(2)`` and ``ProcessPoolExecutor(2)``, started with *spawn*, until they have
answered a first task that needs NumPy.  (They count as started when *one* process has done both tasks.)

Every figure comes from a fresh interpreter, which has imported what it uses before its clock starts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import numpy as np

from .common import Report, Side, main, paired

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
with multiprocessing.get_context("spawn").Pool(2) as pool:
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
IMPORT = """
import time, numpy
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


def seconds_of(script: str) -> float:
    """What a fresh interpreter that runs *script* prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def two_at_once(statement: str) -> float:
    """Seconds until two interpreters that run *statement* have ended."""
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", statement]) for _ in range(2)]
    for process in processes:
        assert process.wait() == 0
    return time.perf_counter() - start


def import_costs(statement: str) -> dict[str, float]:
    """Seconds of each module's import with all that it imports, by ``-X importtime``."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = re.findall(r"import time: +\d+ \| +(\d+) \| +(\S+)", done.stderr)
    return {module: int(microseconds) * 1e-6 for microseconds, module in lines}


def ask(report: Report, runs: int, first: bool) -> None:
    def fresh(name, script):
        return Side(name, lambda: seconds_of(script), own_clock=True)

    starting = paired(
        [
            fresh("synkro.fork(2)", FORK),
            fresh("Synkro, first result", FIRST_RESULT),
            fresh("Pool(2), spawn, first result", POOL),
            fresh("ProcessPoolExecutor(2), spawn, first result", EXECUTOR),
        ],
        runs,
        first,
    )
    report.table("starting two workers", starting)
    report.figure("synkro.fork(2)", float(np.median(starting["synkro.fork(2)"])), "s", at_most=0.4)
    for peer in list(starting)[2:]:
        report.ratio(f"{peer} ÷ Synkro", starting[peer], starting["Synkro, first result"])

    parts = {
        "an interpreter": "pass",
        "an interpreter and NumPy": "import numpy",
        "an interpreter and a worker's imports": "import numpy, synkro.worker",
    }
    sides = [
        Side(name, lambda code=code: two_at_once(code), own_clock=True) for name, code in parts.items()
    ]
    report.table("where it goes: two at once, from start to end", paired(sides, runs, first))

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
        full={"runs": 20, "first": True},
        quick={"runs": 5},
        smoke={"runs": 1, "first": False},
    )
