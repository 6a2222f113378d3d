"""
Arrays in shared memory
=======================

The inputs of functions are ``Data``: arrays in shared memory that behave like NumPy's. This demo makes
some by hand. It reads and writes them, computes with them, lets them grow, casts them, maps a file
instead of reading it, and gives the memory back.
"""

import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

synk.fork()

# %%
# A ``Data`` is made from a value, of a shape (of zeros), or empty with a number of dimensions.

x = synk.data(np.arange(12.0).reshape(6, 2), name="x")
zeros = synk.data(shape=(3, 4), dtype="float32")
later = synk.data(ndim=1, dtype="int64")
print(x, zeros, later, sep="\n")
assert x.shape == (6, 2)
assert len(x) == 6
assert x.size == 12
assert x.dtype == np.float64
assert not zeros[:].any()
assert len(later) == 0

# %%
# It is read and written by any index that NumPy knows. ``x[:]`` is a view: writing to it writes to
# ``x``.

stages = {"made": x[:].copy()}
x[0] = [100, 200]
x[x[:] < 4] = -1
x[:][5] += 0.5
assert x[0, 1] == 200
assert x[1, 0] == -1
assert x[5, 1] == 11.5
stages["written to"] = x[:].copy()

# %%
# Arithmetic goes through NumPy and gives plain arrays. In place, it stays where it is.

total = x + 1
assert type(total) is np.ndarray
assert np.array_equal(total, x[:] + 1)
assert np.sqrt(abs(x)).mean(axis=0).shape == (2,)
x *= 2
assert isinstance(x, synk.Data)
assert x[0, 0] == 200

# %%
# Growth keeps the old rows, and new ones are zero. ``oversize=1.5`` takes half as much again, so that
# the next growth finds its memory there already.

stages["x *= 2"] = before = x[:].copy()
x.set_length(8, oversize=1.5)
print(f"grown to {len(x)} rows: {x.size} elements, and memory for {x.alloc_size}")
assert np.array_equal(x[:6], before)
assert not x[6:].any()
assert x.alloc_size == 24
stages["grown"] = x[:].copy()
x.set_length(12)
assert x.alloc_size == 24
assert np.array_equal(x[:6], before)
x.set_value(np.ones((2, 5)))  # any shape of two dimensions
assert x.shape == (2, 5)

# %%
# Casts that lose information are refused, unless they are forced.

whole = synk.data([1, 2, 3])
try:
    whole.set_value(np.array([1.5, 2.5]))
except synk.InvalidType as error:
    print(f"refused: {error}")
else:
    raise AssertionError("a cast that loses information was not refused")
whole.set_value(np.array([1.5, 2.5]), force_cast=True)
assert np.array_equal(whole, [1, 2])

# %%
# A memory-mapped file is not copied. The workers map the same file, so it may be larger than memory.

row_sums = synk.function(lambda rows, scale: scale * rows.sum(axis=1), "rows", "gather", "scale")
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "table.npy"
    np.save(path, np.arange(3000.0).reshape(1000, 3))
    table = synk.data(np.load(path, mmap_mode="r"))
    sums = row_sums(table, 10.0)
print(f"the sums of {len(table)} rows of a file: {sums[:3]} ...")
assert np.array_equal(sums, 10 * np.arange(3000.0).reshape(1000, 3).sum(axis=1))
assert not table[:].flags.writeable

# %%
# ``build_inputs`` makes ``Data`` for the arguments of a function, in their order and with their names.

rows, scale = row_sums.build_inputs(np.eye(5), 2.0)
print(rows, scale, sep="\n")
assert (rows.name, scale.name) == ("rows", "scale")
assert np.array_equal(row_sums(rows, scale), [2, 2, 2, 2, 2])

# %%
# The memory of a ``Data`` goes back when nobody refers to it any more, at the latest at exit. It goes
# now if you say so.

rows.free_memory()
assert len(rows) == 0
assert rows.alloc_size == 0
rows.set_value(np.ones((4, 3)))  # it can be filled again
assert np.array_equal(row_sums(rows, 1), [3, 3, 3, 3])

# %%
# What became of ``x``, and the memory that it holds.

figure, panels = plt.subplots(1, len(stages), sharey=True)
for axes, (title, values) in zip(panels, stages.items(), strict=True):
    axes.imshow(values, cmap="Blues", vmin=-10, vmax=60, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:g}", ha="center", va="center", color="w" if value > 30 else "k")
    axes.set(title=title, xticks=[], ylim=(11.5, -0.5))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
axes.axhspan(7.5, 11.5, fill=False, hatch="//", edgecolor="gray")
axes.text(0.5, 9.5, "memory\nfor more", ha="center", va="center", backgroundcolor="w")
panels[0].set_ylabel("row of x")
figure.suptitle("One array in shared memory, step by step")
save(figure)

print("All assertions passed.")
