"""
A photograph in 32 colours
==========================

This is k-means over the pixels of a photograph; an iteration is one call of a function. The pixels stay
in shared memory. An iteration hands the centroids to all workers and gets sums over the pixels back. It
is also run serially, to compare results and times.

Most of the work is each pixel's best score, and counting. NumPy does it on one core and in its caches,
so it profits from as many cores as are free.
"""

import itertools
import time

import numpy as np
from cookbook import scaled
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_sample_image
from threadpoolctl import threadpool_info

import synkro as synk

K, ITERATIONS, COPIES = 32, 15, scaled(8)

n_workers = synk.fork()
photo = load_sample_image("flower.jpg")
height, width, _ = photo.shape

# %%
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


# %%
# Both runs begin with the same centroids: colours of the photograph.

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

# %%
# The first copy is the photograph: ``batch=`` is its number of pixels. The labels come back in the
# order of the pixels.

palette = parallel[np.argsort(parallel.sum(axis=1))].round().astype("uint8")
paint = synk.function(nearest, bcast_inputs="centroids", outputs="gather")
after = palette[paint(pixels, palette.astype("float32"), batch=height * width)].reshape(photo.shape)

# %%
# The middle of both, every other pixel, on paper of the darkest colour. The palette is below.

margin, strip, crop = 12, 24, np.s_[::2, 80:560:2]
before, after = photo[crop], after[crop]
height, width, _ = before.shape
canvas = np.full((height + strip + 3 * margin, 2 * width + 4 * margin, 3), palette[0])
left, right = np.s_[margin : margin + width], np.s_[-margin - width : -margin]
canvas[margin : margin + height, left] = before
canvas[margin : margin + height, right] = after
canvas[-margin - strip : -margin, right] = palette[np.arange(width) * K // width]
figure = plt.figure(figsize=(canvas.shape[1] / 100, canvas.shape[0] / 100), layout="none")
figure.figimage(canvas, origin="upper")
text = f"{len(colours):,} colours \u2192 {K}"
figure.text(0.25, (margin + strip / 2) / canvas.shape[0], text, ha="center", va="center", color="white")
save(figure)

print("All assertions passed.")
