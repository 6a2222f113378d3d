"""What do compiled functions gain and cost: a call, their distribution, and training with them?

Floor of a call: the compiled function itself on half of the rows, and the call of a function that
computes nothing (``call_overhead``).  Of ``distribute()``: reading compiled code from the disk, once a
worker.  Of training: half of the arithmetic, and one all-reduce of the gradient.

Peers: the same graph of PyTensor's, compiled in one process and run with one thread.

Distribution: five functions, made, distributed and called in a fresh interpreter, whose cache of
compiled code is cold or warm; and the same five in one process without Synkro.  Training: a network of
784, 512 and 10 units, SGD with batches of 4096 rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as T
from threadpoolctl import threadpool_limits

import synkro
from synkro import extensions

from .common import Report, Side, main, paired

FIVE = """
import time, numpy as np, pytensor, pytensor.tensor as T
x, w = T.matrix("x"), T.matrix("w")
graphs = [T.tanh(x.dot(w)).mean(), (x**2).sum(axis=0), T.exp(-x).max(axis=0),
          T.special.softmax(x.dot(w), axis=1).mean(axis=0), T.log1p(x**2).mean(axis=0) + x.min(axis=0)]
rows, weights = np.ones((10, 4)), np.ones((4, 3))
"""
ALONE = (
    FIVE
    + """
start = time.perf_counter()
for graph in graphs:
    pytensor.function([x, w], graph, on_unused_input="ignore")(rows, weights)
print(time.perf_counter() - start)
"""
)
SYNKRO = (
    FIVE
    + """
import synkro
synkro.fork(2, verbose=False)
start = time.perf_counter()
functions = [
    synkro.function(inputs=[x], bcast_inputs=[w], outputs=graph, on_unused_input="ignore")
    for graph in graphs
]
synkro.distribute()
for function in functions:
    function(rows, weights)
print(time.perf_counter() - start)
"""
)


def seconds_of(script: str, folder: str) -> float:
    """What a fresh interpreter prints that runs *script* with its compiled code in *folder*."""
    flags = f"{os.environ.get('PYTENSOR_FLAGS', '')},base_compiledir={folder}".lstrip(",")
    environ = {**os.environ, "PYTENSOR_FLAGS": flags}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    return float(done.stdout)


def ask(report: Report, runs: int, rows: int, calls: int, cold_runs: int, steps: int) -> None:
    _ask_for_calls(report, runs, rows, calls)
    if cold_runs:
        _ask_for_distribution(report, cold_runs)
    _ask_for_training(report, runs, steps)


def _ask_for_calls(report: Report, runs: int, rows: int, calls: int) -> None:
    x, w = T.matrix("x"), T.matrix("w")
    graph = T.tanh(x.dot(w)).mean(axis=0)
    alone = pytensor.function([x, w], graph, trust_input=True)
    table, weights = np.random.default_rng(0).standard_normal((rows, 32)), np.ones((32, 32))
    half = table[: rows // 2]
    with threadpool_limits(1), synkro.Session(2, verbose=False) as session:
        f = session.function(inputs=[x], bcast_inputs=[w], outputs=graph)
        data = session.data(table), session.data(weights)
        samples = paired(
            [
                Side("Synkro, two workers", lambda: f(*data), calls, calls // 4),
                Side(
                    "floor: half of the rows in one process",
                    lambda: alone(half, weights),
                    calls,
                    calls // 4,
                ),
            ],
            runs,
        )
    report.table(f"a call of a compiled graph, {rows} rows", samples)
    more = np.subtract(*samples.values())
    report.figure("more than half of the rows", float(np.median(more)), "s", at_most=60e-6)
    report.note(
        "Why a call takes longer than half of its rows: 60 us wake the main process, which leaves "
        "the cores to the workers while they compute."
    )


def _ask_for_distribution(report: Report, runs: int) -> None:
    cold: dict[str, list[float]] = {"Synkro, two workers": [], "one process": []}
    warm: dict[str, list[float]] = {name: [] for name in cold}
    for _ in range(runs):
        for name, script in zip(cold, (SYNKRO, ALONE), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                cold[name].append(seconds_of(script, folder))
                warm[name].append(seconds_of(script, folder))
    report.table("five functions, cold cache", cold)
    report.ratio("cold, over one process", *cold.values(), at_most=1.3)
    report.table("five functions, warm cache", warm)
    seconds = float(np.median(warm["Synkro, two workers"]))
    report.figure("warm", seconds, "s", at_most=2.0)


def _network() -> tuple[list[Any], Any, Any, Any]:
    """Parameters, inputs and loss."""
    rng = np.random.default_rng(0)
    shapes = [(784, 512), (512,), (512, 10), (10,)]
    params = [pytensor.shared(rng.normal(0, 0.05, s).astype("float32")) for s in shapes]
    x, t = T.fmatrix("x"), T.lvector("t")
    scores = T.tanh(x.dot(params[0]) + params[1]).dot(params[2]) + params[3]
    chances = T.special.log_softmax(scores, axis=1)
    return params, x, t, -chances[T.arange(t.shape[0]), t].mean()


def _ask_for_training(report: Report, runs: int, steps: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4096, 784)).astype("float32")
    digits = rng.integers(0, 10, 4096)
    rate = np.float32(0.1)
    params, x, t, loss = _network()
    updates = [(p, p - rate * g) for p, g in zip(params, T.grad(loss, params), strict=True)]
    alone = pytensor.function([x, t], loss, updates=updates)
    synkro.fork(2, verbose=False)
    try:
        params, x, t, loss = _network()
        train = extensions.make_train_function(loss, params, x, t, extensions.sgd(params, 0.1))
        data = synkro.data(images), synkro.data(digits)
        with threadpool_limits(1):
            samples = paired(
                [
                    Side("Synkro, two workers", lambda: train(*data), steps),
                    Side("PyTensor, one thread", lambda: alone(images, digits), steps),
                ],
                runs,
            )
    finally:
        synkro.close()
    report.table("a step of SGD, 4096 rows", samples)
    over, under = samples["PyTensor, one thread"], samples["Synkro, two workers"]
    report.ratio("speed-up over one thread", over, under, at_least=1.8)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # PyTensor's, of a missing compiler
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 20, "rows": 4000, "calls": 200, "cold_runs": 3, "steps": 3},
        quick={"runs": 5, "cold_runs": 1},
        smoke={"runs": 1, "rows": 100, "calls": 2, "cold_runs": 0, "steps": 1},
    )
