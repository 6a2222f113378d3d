"""Rows where they lie: arrays in files, which the workers read by themselves.

A ``.npy`` file is mapped by all workers.  Of an HDF5 file and a zarr array each worker reads its rows, a
piece ahead of the function.  Standard deviations of columns, in one pass, over files that this program
makes.  Where h5py or zarr is not installed, it says so and goes on.

    python demos/demo_26_files.py
"""

import importlib.util
import tempfile
from pathlib import Path

import numpy as np

import synkro as synk

ROWS, COLUMNS, SLICES = 20_000, 12, 8

rng = np.random.default_rng(0)
table = rng.normal(5.0, 2.0, (ROWS, COLUMNS))

synk.fork()


@synk.function(outputs="sum")
def moments(x):  # of a piece of the rows; sums of them make the moments of all
    return len(x), x.sum(axis=0), (x**2).sum(axis=0)


def deviations(x, **options):
    """The standard deviation of each column of *x*."""
    count, total, squares = moments(x, **options)
    return np.sqrt(squares / count - (total / count) ** 2)


def check(name, x):
    """Compare *x* with the table, by rows and by batches."""
    found = deviations(x, num_slices=SLICES)
    print(f"{name}: {x}")
    print(f"  deviations from {found.min():.3f} to {found.max():.3f}")
    assert np.allclose(found, table.std(axis=0))
    picked = rng.integers(0, ROWS, 500)
    assert np.allclose(deviations(x, batch=picked), table[picked].std(axis=0))
    assert np.array_equal(x[::-1000], table[::-1000])


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder)
    np.save(path / "table.npy", table)
    check("npy", synk.data(path / "table.npy"))

    if importlib.util.find_spec("h5py"):
        import h5py

        with h5py.File(path / "table.h5", "w") as file:
            file.create_dataset("table", data=table, chunks=(1000, COLUMNS), compression="gzip")
        with h5py.File(path / "table.h5", "r") as file:
            stored = synk.data(file["table"])
        check("HDF5", stored)  # the workers open the file by its path
    else:
        print("h5py is not installed: no HDF5 file")

    if importlib.util.find_spec("zarr"):
        import zarr

        made = zarr.create_array(
            path / "table.zarr", shape=table.shape, chunks=(1000, COLUMNS), dtype="f8"
        )
        made[:] = table
        check("zarr", synk.data(zarr.open_array(path / "table.zarr", mode="r")))
    else:
        print("zarr is not installed: no zarr array")

print("All assertions passed.")
