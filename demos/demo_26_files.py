"""
Rows where they lie
===================

Arrays are in files, and the workers read them by themselves. A ``.npy`` file is mapped by all workers.
Of an HDF5 file and a zarr array each worker reads its rows, a piece ahead of the function. The standard
deviations of columns are found in one pass, over files that this program makes. Where h5py or zarr is
not installed, it says so and goes on.
"""

import importlib.util
import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS, COLUMNS, SLICES = 100_000, 12, 8

rng = np.random.default_rng(0)
table = rng.normal(5.0, 2.0, (ROWS, COLUMNS))

synk.fork()

# %%
# A worker gets its rows in pieces. The sums of the moments of the pieces make those of all rows. When a
# worker has done a piece is something to gather.


@synk.function(outputs="sum")
def moments(x):
    return len(x), x.sum(axis=0), (x**2).sum(axis=0)


@synk.function(outputs="gather")
def progress(x):
    assert x.sum() > 0
    return np.array([[synk.rank(), len(x), time.perf_counter()]])


synk.distribute()
progresses = {}


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
    progress(x)  # a first time
    begin = time.perf_counter()
    progresses[name] = progress(x, num_slices=SLICES) - [0, 0, begin]


# %%
# One table, in three forms.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder)
    np.save(path / "table.npy", table)
    check("npy", synk.data(path / "table.npy"))

    if importlib.util.find_spec("h5py"):
        import h5py

        with h5py.File(path / "table.h5", "w") as file:
            file.create_dataset("table", data=table, chunks=(5000, COLUMNS), compression="gzip")
        with h5py.File(path / "table.h5", "r") as file:
            stored = synk.data(file["table"])
        check("HDF5", stored)  # the workers open the file by its path
    else:
        print("h5py is not installed: no HDF5 file")

    if importlib.util.find_spec("zarr"):
        import zarr

        made = zarr.create_array(
            path / "table.zarr", shape=table.shape, chunks=(5000, COLUMNS), dtype="f8"
        )
        made[:] = table
        check("zarr", synk.data(zarr.open_array(path / "table.zarr", mode="r")))
    else:
        print("zarr is not installed: no zarr array")

# %%
# All workers read at the same time, each from where its rows begin.

figure, panels = plt.subplots(1, len(progresses), sharey=True, squeeze=False, figsize=(6.4, 3.4))
for axes, (name, pieces) in zip(panels[0], progresses.items(), strict=True):
    ranks, counts, seconds = pieces.T
    for rank in np.unique(ranks):
        mine, rows = ranks == rank, counts.cumsum()
        axes.plot(1000 * seconds[mine], rows[mine], "o-", clip_on=False, label=f"worker {rank:.0f}")
    axes.set(title=name, xlabel="ms", xlim=0, ylim=0)
figure.suptitle("Each worker reads its own rows")
panels[0, 0].set(ylabel="rows done")
panels[0, 0].legend(frameon=False)
save(figure)

print("All assertions passed.")
