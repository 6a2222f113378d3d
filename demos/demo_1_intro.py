"""
One function, all workers
=========================

This is the introductory program. It runs one array function on all workers at once.

``fork`` starts the workers. ``function`` says what to run, and how its outputs are reduced.
``distribute`` sends it to the workers. ``data`` puts arrays where all workers see them. The rest is an
ordinary serial program: nothing in it can race, and nothing in it waits for a message.
"""

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

# %%
# This starts one worker process for each GPU, or for each CPU core where there is no GPU. The workers
# are fresh interpreters that never import this script: it needs no ``if __name__ == "__main__"``.

n = synk.fork()

# %%
# The function is plain NumPy. It knows nothing of workers.


def mean_projection(x, y):
    """The mean over the rows of x, projected on y."""
    return x.dot(y).mean(axis=0)


# %%
# The rows of ``x`` are scattered over the workers, and every worker sees the whole of ``y``. The
# workers' results are averaged: ``"mean"`` is also what happens where nothing is said.

f = synk.function(mean_projection, bcast_inputs=["y"], outputs="mean")
synk.distribute()  # a function made later is sent at its first call

# %%
# The inputs live in shared memory. A call sends no data, only a small message to each worker.

rng = np.random.default_rng(0)
x = synk.data(rng.standard_normal((100, 10)).astype("float32"))
y = synk.data(rng.standard_normal(10).astype("float32"))

result = f(x, y)
expected = mean_projection(x[:], y[:])  # or f.as_serial(x, y)
print(f"100 rows on {n} workers: {result:.6f}, serially: {expected:.6f}")
assert np.allclose(result, expected)

# Plain arrays are taken too, and copied into shared memory first.
assert np.allclose(f(x[:50].copy(), y[:]), mean_projection(x[:50], y[:]))

# %%
# The mean stays exact where the rows cannot be divided evenly: each worker's result weighs as much as
# the rows that it saw.

x.set_length(97)
result = f(x, y)
print(f" 97 rows on {n} workers: {result:.6f}, serially: {f.as_serial(x, y):.6f}")
assert np.allclose(result, f.as_serial(x, y))

# %%
# The picture asks every row for the worker that it went to. ``synk.close()`` would end the workers; it
# runs at exit by itself.

worker = synk.function(lambda x: 0 * x[:, 0] + synk.rank(), outputs="gather")(x)
figure, axes = plt.subplots()
for rank in range(n):
    (rows,) = np.nonzero(worker == rank)
    values = x[rows].dot(y)
    axes.bar(rows, values, color=f"C{rank}", alpha=0.5)
    axes.hlines(values.mean(), rows[0], rows[-1], color=f"C{rank}", linewidth=3)
axes.axhline(result, color="black", linestyle="--", label="mean of all rows: the result")
axes.set(title="Each worker takes its rows; their means are averaged", xlabel="row of x", ylabel="x · y")
axes.legend(loc="upper right")
save(figure)

print("All assertions passed.")
