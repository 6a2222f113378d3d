"""``Data``, the inputs of functions, by hand: arrays in shared memory that behave like NumPy's.

Creation, reading, writing, arithmetic, growth, casts, files that are mapped instead of read, and
giving the memory back.

    python demos/demo_2_data.py
"""

import tempfile
from pathlib import Path

import numpy as np

import synkro as synk

synk.fork()

# Creation: from a value, of a shape (zeros), or empty with a number of dimensions.
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

# Reading and writing, by any index that NumPy knows.  x[:] is a view: writing to it writes to x.
x[0] = [100, 200]
x[x[:] < 4] = -1
x[:][5] += 0.5
print(f"{x.name} after writing:", *x, sep="\n  ")
assert x[0, 1] == 200
assert x[1, 0] == -1
assert x[5, 1] == 11.5

# Arithmetic goes through NumPy and gives plain arrays; in place, it stays where it is.
total = x + 1
assert type(total) is np.ndarray
assert np.array_equal(total, x[:] + 1)
assert np.sqrt(abs(x)).mean(axis=0).shape == (2,)
x *= 2
assert isinstance(x, synk.Data)
assert x[0, 0] == 200

# Growth keeps the old rows, and new ones are zero.  oversize=1.5 takes half as much again, so that
# the next growth finds its memory there already.
before = x[:].copy()
x.set_length(8, oversize=1.5)
print(f"grown to {len(x)} rows: {x.size} elements, and memory for {x.alloc_size}")
assert np.array_equal(x[:6], before)
assert not x[6:].any()
assert x.alloc_size == 24
x.set_length(12)
assert x.alloc_size == 24
assert np.array_equal(x[:6], before)
x.set_value(np.ones((2, 5)))  # any shape of two dimensions
assert x.shape == (2, 5)

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

# A memory-mapped file is not copied: the workers map the same file, so it may be larger than memory.
row_sums = synk.function(lambda rows, scale: scale * rows.sum(axis=1), "rows", "gather", "scale")
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "table.npy"
    np.save(path, np.arange(3000.0).reshape(1000, 3))
    table = synk.data(np.load(path, mmap_mode="r"))
    sums = row_sums(table, 10.0)
print(f"the sums of {len(table)} rows of a file: {sums[:3]} ...")
assert np.array_equal(sums, 10 * np.arange(3000.0).reshape(1000, 3).sum(axis=1))
assert not table[:].flags.writeable

# build_inputs makes Data for the arguments of a function, in their order and with their names.
rows, scale = row_sums.build_inputs(np.eye(5), 2.0)
print(rows, scale, sep="\n")
assert (rows.name, scale.name) == ("rows", "scale")
assert np.array_equal(row_sums(rows, scale), [2, 2, 2, 2, 2])

# The memory of a Data goes back when nobody refers to it any more, at the latest at exit; or now:
rows.free_memory()
assert len(rows) == 0
assert rows.alloc_size == 0
rows.set_value(np.ones((4, 3)))  # it can be filled again
assert np.array_equal(row_sums(rows, 1), [3, 3, 3, 3])

print("All assertions passed.")
