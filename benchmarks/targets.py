"""What does it cost to have results where they are wanted, by ``f.options(out=target)``?

400 images of 512 × 512 (float32) go through a Gaussian filter, and the smoothed images into a target.
Floor: the call whose outputs stay on the workers (``outputs="keep"``), which moves nothing.  A Data and
a file that is mapped are written by the workers, each its rows; an array is copied in the main process;
of a zarr array (one chunk an image, not compressed) each worker writes chunks.  All targets but one have
been written before, so that their memory has its pages; "a fresh Data" is made anew for each call.

Peers: the result as the call returns it without a target, and then assigned: ``x[...] = f(images)``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from scipy import ndimage

import synkro

from .common import Report, Side, main, paired


def smoothed(images):
    result = np.empty_like(images)
    for image, smooth in zip(images, result, strict=True):
        ndimage.gaussian_filter(image, 1, output=smooth)
    return result


def ask(report: Report, runs: int, images: int, side: int) -> None:
    pixels = np.random.default_rng(0).random((images, side, side), dtype=np.float32)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
        synkro.Session(2, verbose=False) as session,
    ):
        x = session.data(pixels)
        kept = session.function(smoothed, outputs="keep")
        f = session.function(smoothed, outputs="gather")

        def empty():
            return session.data(shape=x.shape, dtype=np.float32)

        def assigned():
            data[...] = f(x)

        data, array = empty(), np.zeros_like(pixels)
        targets = {
            "a Data": data,
            "a mapped file": np.lib.format.open_memmap(Path(folder, "x.npy"), "w+", np.float32, x.shape),
            "an array": array,
        }
        try:
            import zarr
        except ImportError:
            report.absent("a zarr array", "zarr is not installed")
        else:
            targets["a zarr array"] = zarr.create_array(
                Path(folder, "x.zarr"),
                shape=x.shape,
                chunks=(1, side, side),
                dtype=np.float32,
                compressors=None,
            )
        sides = [Side("kept on the workers", lambda: kept(x))]
        for name, target in targets.items():
            sides.append(Side(name, lambda out=target: f.options(out=out)(x)))
        sides += [
            Side("a fresh Data", lambda out: f.options(out=out)(x), prepare=lambda: [empty()]),
            Side("no target", lambda: f(x)),
            Side("a Data, assigned", assigned),
        ]
        samples = paired(sides, runs)
        assert np.array_equal(array, data)
        report.table(f"{images} images of {side} × {side}", samples)
        for name in list(samples)[1:]:
            target = {"at_most": 1.2} if name == "a Data" else {}
            over, under = samples[name], samples["kept on the workers"]
            report.ratio(f"{name} ÷ kept on the workers", over, under, **target)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 7, "images": 400, "side": 512},
        quick={"runs": 3, "images": 100},
        smoke={"runs": 1, "images": 5, "side": 32},
    )
