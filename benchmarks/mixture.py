"""Does a program that computes more than it reads gain from ``num_slices="auto"``, and do others lose?

A step of expectation and maximization of a mixture of eight Gaussians, over 500 000 rows of 16 float64:
each worker weighs its rows (responsibilities) and adds up counts, sums and squares for each component.
It is written twice, as one writes it in NumPy: by matrix products, and by broadcasting.

Floor: in one piece two workers halve the time.  For a row of 128 bytes there are temporary arrays of 64
to 1024 bytes, each of which goes to memory and comes back: 16 to 256 MB a worker.  In pieces of 2 MB and
less most of them stay in the caches, and what is left is arithmetic (exponentials, products with few
columns), and reading 64 MB once, 5 ms.  Predicted: 3 times as fast as one process, and more; flat from
pieces of 2 MB to 200 KB, below which the calls of NumPy's functions begin to count.

Peers: the same step in one process, with one BLAS thread; fixed numbers of slices.

Then: what other questions compute, at their sizes, with ``"auto"`` and in one piece.  A function that
only reads loses by each piece the 10 to 40 us in which NumPy and the memory start again.  Pieces have at
least 2 MB and 16 384 rows; of rows of 1 KB they take 1.2 ms to read: 3 % slower, by prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import synkro

from . import compute_bound, mapped, scaling, shuffled_batch, training
from .common import Report, Side, main, paired

COMPONENTS, COLUMNS = 8, 16


def by_products(x, means, variances, weights):
    precisions = 1 / variances
    squares = (
        (x**2) @ precisions.T - 2 * x @ (means * precisions).T + (means**2 * precisions).sum(axis=1)
    )
    return _sums(x, np.log(weights) - 0.5 * (squares + np.log(variances).sum(axis=1)))


def by_broadcasting(x, means, variances, weights):
    distances = x[:, None, :] - means
    squares = (distances * distances / variances + np.log(variances)).sum(axis=2)
    return _sums(x, np.log(weights) - 0.5 * squares)


def _sums(x, scores):
    """Counts, sums and squares of the components, and the log-likelihood, of *scores* by row."""
    top = scores.max(axis=1, keepdims=True)
    shares = np.exp(scores - top)
    total = shares.sum(axis=1, keepdims=True)
    shares /= total
    return shares.sum(axis=0), shares.T @ x, shares.T @ x**2, (top + np.log(total)).sum()


def nearest(pixels, centres):
    """As ``kmeans.step``, whose module needs scikit-learn's photograph."""
    distances = pixels @ centres.T
    distances *= -2
    distances += (centres**2).sum(axis=1)
    found = distances.argmin(axis=1)
    sums = [np.bincount(found, channel, len(centres)) for channel in pixels.T]
    return np.stack(sums, axis=1), np.bincount(found, minlength=len(centres))


def steps(report: Report, runs: int, rows: int, slices: list[int]) -> None:
    x = np.random.default_rng(0).standard_normal((rows, COLUMNS))
    state = x[:COMPONENTS].copy(), np.ones((COMPONENTS, COLUMNS)), np.full(COMPONENTS, 1 / COMPONENTS)
    with threadpool_limits(1), synkro.Session(2, threads_per_worker=1, verbose=False) as session:
        data = session.data(x)
        for fn in (by_products, by_broadcasting):
            f = session.function(fn, bcast_inputs=["means", "variances", "weights"], outputs="sum")
            got, want = f(data, *state, num_slices="auto"), fn(x, *state)
            assert all(np.allclose(one, other) for one, other in zip(got, want, strict=True))
            sides = [
                Side("one process, one thread", lambda fn=fn: fn(x, *state)),
                *(Side(f"Synkro, {n}", lambda f=f, n=n: f(data, *state, num_slices=n)) for n in slices),
                Side("Synkro, auto", lambda f=f: f(data, *state, num_slices="auto")),
            ]
            samples = paired(sides, runs)
            how = fn.__name__.replace("_", " ")
            report.table(f"a step over {rows} rows, {how}, by num_slices", samples)
            for n, least in ((1, None), ("auto", 3)):
                over, under = samples["one process, one thread"], samples[f"Synkro, {n}"]
                report.ratio(f"speed-up {how}, num_slices={n}", over, under, at_least=least)


def programs(session: synkro.Session, share: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What other questions compute, on 1/*share* of their rows: a name, and a call."""
    rng = np.random.default_rng(0)

    def made(fn, outputs, *inputs, bcast=(), batch=None):
        f = session.function(fn, bcast_inputs=bcast, outputs=outputs)
        given = [session.data(value) if isinstance(value, np.ndarray) else value for value in inputs]
        return lambda n: f(*given, num_slices=n, batch=batch)

    wide = np.ones(((1 << 19) // share, 128))
    yield "largest, memory-bound", made(scaling.largest, "max", wide)
    yield "sum of each column", made(lambda x: x.sum(axis=0), "sum", wide)
    yield "sum of 1024 columns", made(mapped.total, "sum", wide.reshape(-1, 1024).astype(np.float32))
    picked = rng.permutation(len(wide))[: 100_000 // share]
    yield "shuffled rows", made(shuffled_batch.column_sum, "sum", wide[:, :100].copy(), batch=picked)
    scalars = np.ones((2000 // share, 1))
    yield "chain of products", made(scaling.chain, "sum", scalars, np.eye(64), bcast="w")
    vectors = rng.standard_normal((max(2, 512 // share), 8192), np.float32)
    yield "elementwise", made(compute_bound.elementwise, "sum", vectors)
    matrices, w = (
        rng.standard_normal((max(2, 32 // share), 256, 256), np.float32),
        np.eye(256, dtype="f4"),
    )
    yield "matrix products", made(compute_bound.products, "sum", matrices, w, bcast="w")
    pixels, centres = rng.random((273_280 // share, 3), np.float32), rng.random((16, 3), np.float32)
    yield "nearest centres", made(nearest, "sum", pixels, centres, bcast="centres")
    x, labels = rng.random((4096 // share, 784), np.float32), rng.integers(0, 10, 4096 // share)
    params = training.initial(784, 512)
    yield "gradient of a network", made(training.gradient, "mean", params, x, labels, bcast="params")


def others(report: Report, runs: int, share: int) -> None:
    with synkro.Session(2, threads_per_worker=1, verbose=False) as session:
        for name, call in programs(session, share):
            sides = [Side(n, lambda call=call, n=n: call(n), 5, 1) for n in ("auto", 1)]
            sides = [Side(str(side.name), side.call, side.calls, side.warm) for side in sides]
            samples = paired(sides, runs)
            report.table(name, {f"num_slices={n}": values for n, values in samples.items()})
            report.ratio(f"{name}: auto ÷ one piece", samples["auto"], samples["1"], at_most=1.05)


def ask(report: Report, runs: int, rows: int, slices: list[int], share: int) -> None:
    steps(report, runs, rows, slices)
    others(report, runs, share)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 15,
            "rows": 500_000,
            "slices": [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024],
            "share": 1,
        },
        quick={"runs": 5, "slices": [1, 8, 32, 128]},
        smoke={"runs": 1, "rows": 2000, "slices": [1, 2], "share": 256},
    )
