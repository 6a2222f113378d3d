"""
Batches and slices
==================

A function is called in many ways. ``batch=`` chooses rows, ``num_slices=`` does the work in pieces, and
outputs come in many shapes. Here one function computes a loss. Each way to call it is held against
plain NumPy on the same rows.
"""

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

synk.fork(2)
rng = np.random.default_rng(0)
n_rows = 1000
x_all = rng.standard_normal((n_rows, 5))
t_all = rng.standard_normal(n_rows)
w = rng.standard_normal(5)
x, t = synk.data(x_all, name="x"), synk.data(t_all, name="t")


@synk.function(bcast_inputs="w")
def loss(x, t, w):
    """The mean squared error of a linear model."""
    return np.square(x.dot(w) - t).mean()


# %%
# ``batch=`` chooses rows of all scattered inputs. Each worker takes its own from shared memory.

permutation = rng.permutation(n_rows)
batches = {
    "all rows": None,
    "an int, the first so many": 101,
    "a slice": slice(100, 300),
    "a slice with a step": slice(None, None, -7),
    "an index array": permutation[:64],
    "a mask": t_all > 1,
}
for kind, batch in batches.items():
    rows = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
    value = loss(x, t, w, batch=batch)
    print(f"loss over {kind:26} {len(x_all[rows]):5} rows: {value:.6f}")
    assert np.isclose(value, loss.as_serial(x_all[rows], t_all[rows], w))

# %%
# Minibatch data hold just the rows of a batch, for what is loaded or computed as the program goes. The
# same ``batch=`` fits them and whole data: it counts from its lowest index in them.

t_mini = synk.data(shape=(100,), minibatch=True, name="t_mini")
for start in range(0, n_rows, 100):
    batch = slice(start, start + 100)
    t_mini[:] = t_all[batch]
    assert np.isclose(loss(x, t_mini, w, batch=batch), loss(x, t, w, batch=batch))

# %%
# With ``num_slices=k``, each worker computes its rows in k pieces, so that what the function allocates
# is that much smaller. The result is the same, to rounding.

for k in (1, 3, 10):
    assert np.isclose(loss(x, t, w, num_slices=k), loss.as_serial(x, t, w))

# %%
# ``outputs=`` says how each output is reduced. It is one operation for all of them, or one each, nested
# as the result is: a tuple, a list or a dict.

spread = synk.function(lambda x: (x.min(axis=0), x.min()), outputs="min")
assert np.array_equal(spread(x)[0], x_all.min(axis=0))


def describe(x):
    return {"mean": x.mean(axis=0), "max": x.max(), "norm": np.linalg.norm(x, axis=1), "rows": len(x)}


f = synk.function(describe, outputs={"mean": "mean", "max": "max", "norm": "gather", "rows": None})
result = f(x, num_slices=2)
serial = f.as_serial(x)
print(f"rows of each worker's two slices: {[int(rows) for rows in result['rows']]}")
assert np.allclose(result["mean"], serial["mean"])
assert result["max"] == serial["max"]
assert np.allclose(result["norm"], serial["norm"])  # in the order of the rows
assert result["rows"] == [250, 250, 250, 250]  # no reduction: every piece's value

# %%
# ``"gather"`` keeps the order of the batch, and ``output_subset=`` reduces only what is asked for.

chosen = f(x, batch=permutation, output_subset=["norm"])
assert list(chosen) == ["norm"]
assert np.allclose(chosen["norm"], serial["norm"][permutation])

# %%
# ``submit()`` calls in the background. Submitted calls run one after the other, in their order, while
# this program does something else: here it computes the same, serially.

futures = [loss.submit(x, t, w, batch=slice(start, start + 250)) for start in range(0, n_rows, 250)]
expected = loss.as_serial(x, t, w)
quarters = [future.result() for future in futures]
print("loss over quarters, in the background:", *(f"{value:.4f}" for value in quarters))
assert np.isclose(np.mean(quarters), expected)

# %%
# The picture asks every row for the worker that it went to, in each kind of batch.

worker = synk.function(lambda x: 0 * x[:, 0] + synk.rank(), outputs="gather")
figure, axes = plt.subplots()
for height, batch in enumerate(batches.values()):
    rows = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
    rows, workers = np.arange(n_rows)[rows], worker(x, batch=batch)
    for rank in (0, 1):
        axes.eventplot(rows[workers == rank], lineoffsets=height, linelengths=0.7, colors=f"C{rank}")
axes.set(title="The rows of a batch that each of two workers takes", xlabel="row")
axes.set_yticks(range(len(batches)), batches)
axes.invert_yaxis()
save(figure)

print("All assertions passed.")
