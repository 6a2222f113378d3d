"""A real job: how much faster are the iterations of k-means over a photograph's pixels?

Lloyd's algorithm with 16 centres over the 273 280 pixels of scikit-learn's sample photograph: each
worker assigns its pixels to the nearest centre and adds them up for each centre; the sums and counts
are reduced, and the main process moves the centres, which are broadcast ``Data``.

Floor: half the time of one process.  3.3 MB of pixels are read and 17 MB of distances written and read
an iteration; what comes back is 0.5 KB a rank.

Peers: the same step in one process on all pixels, with one BLAS thread and with as many as cores.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_sample_image
from threadpoolctl import threadpool_limits

import synkro

from .common import Report, Side, main, paired

_PAUSE = 0.1  # seconds before each call, in which the BLAS threads of the one before stop to poll
CENTRES = 16


def step(pixels, centres):
    """Sums, shape (CENTRES, 3), and counts, shape (CENTRES,), of the pixels nearest to each centre."""
    distances = pixels @ centres.T
    distances *= -2
    distances += (centres**2).sum(axis=1)
    nearest = distances.argmin(axis=1)
    sums = [np.bincount(nearest, channel, CENTRES) for channel in pixels.T]
    return np.stack(sums, axis=1), np.bincount(nearest, minlength=CENTRES)


def moved(centres, sums, counts):
    """Each centre at the mean of its pixels; one that has none stays."""
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)


def ask(report: Report, runs: int, iterations: int) -> None:
    pixels = load_sample_image("china.jpg").reshape(-1, 3).astype(np.float32) / 255
    begin = np.random.default_rng(0).choice(pixels, CENTRES, replace=False)

    with synkro.Session(2, threads_per_worker=1, verbose=False) as session:
        x, c = session.data(pixels), session.data(begin)
        parallel_step = session.function(step, bcast_inputs="centres", outputs="sum")

        def parallel():
            c[...] = begin
            for _ in range(iterations):
                sums, counts = parallel_step(x, c)
                c[...] = moved(c[:], sums, counts)
            return c[:].copy()

        def serial(threads):
            with threadpool_limits(threads):
                centres = begin
                for _ in range(iterations):
                    centres = moved(centres, *step(pixels, centres)).astype(np.float32)
                return centres

        assert np.allclose(parallel(), serial(1), atol=1e-3)
        samples = paired(
            [
                Side("Synkro, two workers", parallel, idle=_PAUSE),
                Side("one process, one thread", lambda: serial(1), idle=_PAUSE),
                Side("one process, all threads", lambda: serial(None), idle=_PAUSE),
            ],
            runs,
        )
    floor = {"floor: half of one thread": [float(np.median(samples["one process, one thread"])) / 2]}
    report.table(f"{iterations} iterations of k-means, {len(pixels)} pixels", samples | floor)
    for peer in ("one thread", "all threads"):
        over, under = samples[f"one process, {peer}"], samples["Synkro, two workers"]
        report.ratio(f"speed-up over {peer}", over, under)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 30, "iterations": 10},
        quick={"runs": 6},
        smoke={"runs": 2, "iterations": 2},
    )
