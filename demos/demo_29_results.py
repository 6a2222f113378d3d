"""
Results into files and arrays
=============================

Images are smoothed into an array, a ``Data``, a file, and a zarr array. The function returns the
smoothed images and the brightest pixel of each. The images go to one target after the other, which the
workers write by themselves; the pixels go to a column of a table.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

try:
    import zarr
except ImportError:
    zarr = None

IMAGES, SIDE = 200, 128

synk.fork(2, devices="cpu")
pixels = np.random.default_rng(0).random((IMAGES, SIDE, SIDE), dtype="float32")


def smoothed(images):
    """The images, each pixel averaged with its neighbours above and below, and the brightest of each."""
    result = images.copy()
    result[:, 1:-1] = (images[:, :-2] + images[:, 1:-1] + images[:, 2:]) / 3
    return {"images": result, "brightest": result.max(axis=(1, 2))}


everywhere = synk.function(smoothed, outputs="gather")
synk.distribute()
images = synk.data(pixels)
expected = smoothed(pixels)
seconds = {}


def timed(name, call):
    """The result of the second of two calls with all images."""
    call(images)
    begin = time.perf_counter()
    result = call(images)
    seconds[name] = time.perf_counter() - begin
    print(f"{name:<12} {seconds[name]:6.3f} s")
    return result


# %%
# Without a target, the results are new arrays. A target is whatever has their shape and dtype.

found = timed("no target", everywhere)
assert np.array_equal(found["images"], expected["images"])

with tempfile.TemporaryDirectory() as folder:
    targets = {
        "an array": np.zeros_like(pixels),
        "a Data": synk.data(np.zeros_like(pixels)),
        "a file": np.lib.format.open_memmap(Path(folder, "x.npy"), "w+", "float32", pixels.shape),
    }
    if zarr is None:
        print("zarr is not installed: there is no array of zarr's")
    else:
        targets["a zarr array"] = zarr.create_array(
            Path(folder, "x.zarr"), shape=pixels.shape, chunks=(10, SIDE, SIDE), dtype="float32"
        )
    for name, target in targets.items():
        table = np.zeros((IMAGES, 2), "float32")
        found = timed(name, everywhere.options(out={"images": target, "brightest": table[:, 1]}))
        assert found["images"] is target
        assert np.array_equal(target[:], expected["images"])
        assert np.array_equal(table[:, 1], expected["brightest"])
    assert np.array_equal(np.load(Path(folder, "x.npy")), expected["images"])

# %%
# Shapes and dtypes have to be equal, and nothing is written where they are not.

wrong = np.zeros(pixels.shape)  # float64
try:
    everywhere.options(out={"images": wrong, "brightest": None})(images)
except ValueError as error:
    print(str(error).partition(":")[0])
assert not wrong.any()

figure, axes = plt.subplots(figsize=(6.4, 3.0))
bars = axes.barh(list(seconds), [1000 * each for each in seconds.values()])
axes.bar_label(bars, fmt="%.0f", padding=3)
axes.set(title=f"{pixels.nbytes / 1e6:.0f} MB of results, from two workers", xlabel="ms")
axes.invert_yaxis()
save(figure)

print("All assertions passed.")
