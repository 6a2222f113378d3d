"""A photograph in 32 colours: k-means over its pixels, one call of a function an iteration.

The pixels stay in shared memory, each worker's rows with it; an iteration hands the centroids to all
workers and gets sums over the pixels back.  It is also run serially, to compare results and times.
Before and after go to ``demos/output/kmeans_photo.png``, or to a folder of your choice:

    python demos/demo_5_kmeans_photo.py [folder [times as large]]

Most of the work (each pixel's best score, and counting) NumPy does on one core and in its caches, so
that it profits from as many cores as are free.
"""

import itertools
import sys
import time
from pathlib import Path

import numpy as np
from cookbook import scaled
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image
from threadpoolctl import threadpool_info

import synkro as synk

K, ITERATIONS, COPIES = 32, 15, scaled(8)
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "output"

n_workers = synk.fork()
photo = load_sample_image("flower.jpg")
height, width, _ = photo.shape

# Several copies of the photograph, one after the other, stand for a larger one.
pixels = synk.data(np.tile(photo.reshape(-1, 3), (COPIES, 1)).astype("float32"), name="pixels")


def nearest(pixels, centroids):
    """The number of the centroid nearest to each pixel: |pixel|² is the same for all of them."""
    scores = pixels @ centroids.T
    scores -= np.square(centroids).sum(axis=1) / 2
    return scores.argmax(axis=1)


@synk.function(bcast_inputs="centroids", outputs="sum")
def clusters(pixels, centroids):
    """Of each centroid's pixels the sums (k, 3) and counts (k,), and the sum of all squares."""
    xp, k = synk.xp(), len(centroids)  # NumPy, or CuPy on GPUs
    sums, counts, squares = xp.zeros((k, 3)), xp.zeros(k), 0.0
    for start in range(0, len(pixels), 2048):  # so many scores fit in a core's cache
        block = pixels[start : start + 2048]
        labels = nearest(block, centroids)
        counts += xp.bincount(labels, minlength=k)
        for channel in range(3):
            sums[:, channel] += xp.bincount(labels, block[:, channel], minlength=k)
        squares += float(xp.vdot(block, block))
    return sums, counts, squares


def lloyd(call, centroids):
    """One iteration: the means of the clusters, the mean squared distance before, and the seconds."""
    start = time.perf_counter()
    sums, counts, squares = call(pixels, centroids)
    old = centroids.astype("float64")
    inertia = squares - 2 * np.sum(old * sums) + counts @ np.square(old).sum(axis=1)
    means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], old)
    return means.astype("float32"), inertia / len(pixels), time.perf_counter() - start


colours = np.unique(photo.reshape(-1, 3), axis=0)
parallel = np.random.default_rng(1).choice(colours, K, replace=False).astype("float32")
serial = parallel
clusters(pixels, parallel)  # the first call sends the function; it is not timed

print(f"{len(pixels):,} pixels, {K} colours, {n_workers} workers")
inertias, seconds = [], []
for iteration in range(ITERATIONS):
    parallel, inertia, here = lloyd(clusters, parallel)
    serial, expected, there = lloyd(clusters.as_serial, serial)
    assert np.isclose(inertia, expected)
    inertias.append(inertia)
    seconds.append((here, there))
    if iteration % 7 == 0:
        print(f"iteration {iteration:2}: mean squared distance {inertia:.2f}, serially {expected:.2f}")
assert np.allclose(parallel, serial, rtol=1e-4)
assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(inertias))

here, there = np.median(seconds, axis=0)
threads = max((lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"), default=1)
print(f"an iteration on {n_workers} workers: {here * 1e3:.0f} ms; serially: {there * 1e3:.0f} ms")
print(f"speed-up: {there / here:.2f} (the serial run's BLAS may use {threads} threads)")

# The first copy is the photograph: batch=int.  The labels come back in the order of the pixels.
palette = parallel[np.argsort(parallel.sum(axis=1))].round().astype("uint8")
paint = synk.function(nearest, bcast_inputs="centroids", outputs="gather")
after = palette[paint(pixels, palette.astype("float32"), batch=height * width)].reshape(photo.shape)

# Both side by side and the palette below, on paper of its darkest colour.
margin, strip = 20, 36
canvas = np.full((height + strip + 3 * margin, 2 * width + 4 * margin, 3), palette[0])
left, right = np.s_[margin : margin + width], np.s_[-margin - width : -margin]
canvas[margin : margin + height, left] = photo
canvas[margin : margin + height, right] = after
canvas[-margin - strip : -margin, right] = palette[np.arange(width) * K // width]
figure = Figure((canvas.shape[1] / 100, canvas.shape[0] / 100), dpi=100)
figure.figimage(canvas, origin="upper")
where = {"y": (margin + strip / 2) / canvas.shape[0], "va": "center", "color": palette[-1] / 255}
figure.text(left.start / canvas.shape[1], s=f"{len(colours):,} colours", size=17, **where)
figure.text(left.stop / canvas.shape[1], s=f"{K} colours  \u2192", size=17, ha="right", **where)
folder.mkdir(parents=True, exist_ok=True)
FigureCanvasAgg(figure).print_png(folder / "kmeans_photo.png")
print(f"before and after: {folder / 'kmeans_photo.png'}")

print("All assertions passed.")
