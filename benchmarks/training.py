"""How much faster is a training step, of a softmax regression and of a network with one hidden layer?

Floor: half of the arithmetic, and one all-reduce of the gradient, which lies in a worker variable: its
bytes are read once by each of two ranks.

Peers: the same NumPy code in one process, with one BLAS thread, and with as many as there are cores.
(DistributedDataParallel over gloo is beside Synkro in ``collectives``.)
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

import synkro
from synkro import extensions
from synkro.machine import available_cores

from .common import Report, Side, main, paired

CLASSES = 10


def softmax_step(params, x, labels):
    """The mean loss, and the gradient of each parameter."""
    w, b = params
    chances, loss = _chances(x @ w + b, labels)
    return loss, [x.T @ chances, chances.sum(axis=0)]


def network_step(params, x, labels):
    w1, b1, w2, b2 = params
    hidden = np.maximum(x @ w1 + b1, 0)
    chances, loss = _chances(hidden @ w2 + b2, labels)
    back = (chances @ w2.T) * (hidden > 0)
    return loss, [x.T @ back, back.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]


def _chances(scores, labels):
    """The derivative of the mean loss by the scores, and that loss."""
    scores = scores - scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels] + 1e-12).mean()
    chances[rows, labels] -= 1
    return chances / np.float32(len(labels)), loss


def initial(shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.05, shape).astype("float32") for shape in shapes]


def ask(report: Report, runs: int, steps: int, rows: int, hidden: int) -> None:
    rng = np.random.default_rng(1)
    images = rng.standard_normal((rows, 784), np.float32)
    labels = rng.integers(0, CLASSES, rows)
    network = [(784, hidden), (hidden,), (hidden, CLASSES), (CLASSES,)]
    for title, step, shapes in (
        ("softmax regression", softmax_step, [(784, CLASSES), (CLASSES,)]),
        (f"a network with {hidden} hidden units", network_step, network),
    ):
        _compare(report, title, step, initial(shapes), images, labels, runs, steps)


def _compare(report, title, step, start, images, labels, runs, steps) -> None:
    synkro.fork(2, verbose=False)
    try:
        params = [synkro.shared(value) for value in start]
        rule = extensions.sgd(params, 0.01)

        def loss_and_grad(x, labels):
            return step([param.value for param in params], x, labels)

        train = extensions.make_train_function(loss_and_grad, params, rule)
        data = synkro.data(images), synkro.data(labels)
        mine = [value.copy() for value in start]

        def serial(threads: int) -> None:
            with threadpool_limits(threads):
                _, gradients = step(mine, images, labels)
                for value, gradient in zip(mine, gradients, strict=True):
                    np.subtract(value, np.float32(0.01) * gradient, out=value)

        samples = paired(
            [
                Side("Synkro, two workers", lambda: train(*data), steps, warm=1),
                Side("NumPy, one thread", lambda: serial(1), steps),
                Side("NumPy, all threads", lambda: serial(available_cores()), steps),
            ],
            runs,
        )
    finally:
        synkro.close()
    report.table(f"a step of SGD, {len(images)} rows: {title}", samples)
    ours = samples["Synkro, two workers"]
    for peer in ("NumPy, one thread", "NumPy, all threads"):
        report.ratio(f"{title}: {peer} ÷ Synkro", samples[peer], ours)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 20, "steps": 5, "rows": 4096, "hidden": 512},
        quick={"runs": 5, "steps": 3},
        smoke={"runs": 1, "steps": 1, "rows": 64, "hidden": 16},
    )
