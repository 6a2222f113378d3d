"""Results where they are wanted: images are smoothed into an array, a Data, a file, and a zarr array.

The function returns the smoothed images and the brightest pixel of each.  The images go to one target
after the other, which the workers write by themselves; the pixels go to a column of a table.

    python demos/demo_29_results.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np

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
        begin = time.perf_counter()
        found = everywhere.options(out={"images": target, "brightest": table[:, 1]})(images)
        print(f"{name:<12} {time.perf_counter() - begin:6.3f} s")
        assert found["images"] is target
        assert np.array_equal(target[:], expected["images"])
        assert np.array_equal(table[:, 1], expected["brightest"])
    assert np.array_equal(np.load(Path(folder, "x.npy")), expected["images"])

# shapes and dtypes have to be equal, and nothing is written where they are not
wrong = np.zeros(pixels.shape)  # float64
try:
    everywhere.options(out={"images": wrong, "brightest": None})(images)
except ValueError as error:
    print(str(error).partition(":")[0])
assert not wrong.any()

print("All assertions passed.")
