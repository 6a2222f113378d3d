"""How much faster is a training step on shuffled rows, of a softmax regression and of small networks?

Every step picks its rows out of a table in shared memory, computes the mean loss and its gradient, makes
the gradients of all ranks one, and takes a step of SGD.

Floor: the multiplications and additions of the matrix products, 6 a weight and row (forward, and twice
as many backward; 4 a weight of the first layer, which has no gradient of its inputs), over the rate at
which both cores together multiply large matrices of float32, measured in the same run.

Peers: the same NumPy code in one process, with one BLAS thread, and with as many as there are cores;
DistributedDataParallel over gloo, one thread a process; JAX on two CPU devices of one process
(``shard_map``, jitted, rows picked by NumPy).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time

import numpy as np
from threadpoolctl import threadpool_limits

import synkro
from synkro import extensions
from synkro.machine import available_cores

from .common import Report, Side, main, paired
from .peers import Peer, missing

CLASSES = 10
JAX = """
import json, os, sys, time, numpy as np
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
count, features, hidden, rows, steps = json.loads(sys.argv[1])
mesh = jax.make_mesh((2,), ("rows",))
rng = np.random.default_rng(0)
sizes = [features, *([hidden] if hidden else []), 10]
pairs = list(zip(sizes, sizes[1:]))
params = [(rng.normal(0, 0.05, pair).astype("f4"), np.zeros(pair[1], "f4")) for pair in pairs]
params = jax.device_put(params, NamedSharding(mesh, P()))
images, labels = rng.random((count, features), "f4"), rng.integers(0, 10, count)
def loss(params, x, y):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), y[:, None], axis=1))
def step(params, x, y):
    value, slope = jax.value_and_grad(loss)(params, x, y)
    slope = jax.lax.pmean(slope, "rows")
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, slope), jax.lax.pmean(value, "rows")
spec = P("rows")
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), spec, spec), out_specs=(P(), P())))
split = NamedSharding(mesh, spec)
seconds = []
for _ in range(steps + 3):
    chosen = rng.permutation(count)[:rows]
    start = time.perf_counter()
    params, value = step(params, *jax.device_put((images[chosen], labels[chosen]), split))
    float(value)
    seconds.append(time.perf_counter() - start)
print(np.median(seconds[3:]))
"""


def gradient(params, x, labels):
    """The mean loss of a model with one hidden layer, or none, and the gradient of each parameter."""
    *inner, w, b = params
    hidden = np.maximum(x @ inner[0] + inner[1], 0) if inner else x
    chances, loss = _chances(hidden @ w + b, labels)
    last = [hidden.T @ chances, chances.sum(axis=0)]
    if not inner:
        return loss, last
    back = (chances @ w.T) * (hidden > 0)
    return loss, [x.T @ back, back.sum(axis=0), *last]


def _chances(scores, labels):
    """The derivative of the mean loss by the scores, and that loss."""
    scores = scores - scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels] + 1e-12).mean()
    chances[rows, labels] -= 1
    return chances / np.float32(len(labels)), loss


def initial(features: int, hidden: int) -> list[np.ndarray]:
    sizes = [features, *([hidden] if hidden else []), CLASSES]
    rng = np.random.default_rng(0)
    params = []
    for wide, narrow in itertools.pairwise(sizes):
        params += [rng.normal(0, 0.05, (wide, narrow)).astype("f4"), np.zeros(narrow, "f4")]
    return params


def operations(features: int, hidden: int, rows: int) -> int:
    """Multiplications and additions of one step's matrix products."""
    if not hidden:
        return 4 * features * CLASSES * rows
    return (4 * features * hidden + 6 * hidden * CLASSES) * rows


def ceiling() -> float:
    """Operations a second of all cores that multiply large matrices of float32."""
    a, b = np.ones((2, 2048, 2048), np.float32)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds)


def ask(report: Report, runs: int, steps: int, models: list[tuple[int, int, int, int]]) -> None:
    speed = ceiling()
    report.note(f"all cores multiply matrices of float32 at {speed / 1e9:.0f} GFLOP/s.")
    gloo = None
    if why := missing("gloo"):
        report.absent("DistributedDataParallel", why)
    else:
        gloo = Peer("gloo")
    with_jax = importlib.util.find_spec("jax") is not None
    if not with_jax:
        report.absent("JAX", "jax is not installed")
    try:
        for model in models:
            _compare(report, runs, steps, model, gloo, with_jax, speed)
    finally:
        if gloo is not None:
            gloo.close()


def _compare(report, runs, steps, model, gloo, with_jax, speed) -> None:
    count, features, hidden, rows = model
    rng = np.random.default_rng(1)
    images = rng.random((count, features), np.float32)
    labels = rng.integers(0, CLASSES, count)
    own = initial(features, hidden)

    def serial(chosen, threads: int) -> None:
        with threadpool_limits(threads):
            _, slopes = gradient(own, images[chosen], labels[chosen])
            for value, slope in zip(own, slopes, strict=True):
                np.subtract(value, np.float32(0.01) * slope, out=value)

    def batch():
        return (rng.permutation(count)[:rows],)

    synkro.fork(2, verbose=False)
    try:
        params = [synkro.shared(value) for value in initial(features, hidden)]

        def loss_and_grad(x, labels):
            return gradient([param.value for param in params], x, labels)

        train = extensions.make_train_function(loss_and_grad, params, extensions.sgd(params, 0.01))
        x, y = synkro.data(images), synkro.data(labels)
        sides = [
            Side("Synkro", lambda i: train(x, y, batch=i), steps, warm=3, prepare=batch),
            Side("NumPy, one thread", lambda i: serial(i, 1), steps, prepare=batch),
            Side("NumPy, all threads", lambda i: serial(i, available_cores()), steps, prepare=batch),
        ]
        if gloo is not None:
            options = {"count": count, "features": features, "hidden": hidden, "rows": rows}
            ddp = lambda: gloo.seconds("trainer", rounds=steps, **options)  # noqa: E731
            sides.append(Side("DistributedDataParallel", ddp, own_clock=True))
        if with_jax:
            numbers = [count, features, hidden, rows, steps]
            sides.append(Side("JAX, one process", lambda: _in_jax(numbers), own_clock=True))
        samples = paired(sides, runs)
    finally:
        synkro.close()
    layers = " · ".join(str(size) for size in (features, hidden, CLASSES) if size)
    name = f"{layers}, {rows} rows" if hidden else f"softmax regression {layers}, {rows} rows"
    floor = {"floor: matrix products": [operations(features, hidden, rows) / speed]}
    report.table(f"a step of SGD: {name}", samples | floor)
    for peer in samples:
        if peer != "Synkro":
            least = 1 if peer == "DistributedDataParallel" else None
            report.ratio(f"{name}: {peer} ÷ Synkro", samples[peer], samples["Synkro"], at_least=least)


def _in_jax(numbers: list[int]) -> float:
    command = [sys.executable, "-W", "ignore", "-c", JAX, json.dumps(numbers)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 12,
            "steps": 20,
            "models": [(1797, 64, 256, 256), (60_000, 784, 0, 4096), (60_000, 784, 512, 4096)],
        },
        quick={"runs": 3, "steps": 10},
        smoke={"runs": 1, "steps": 1, "models": [(100, 64, 16, 32), (100, 64, 0, 32)]},
    )
