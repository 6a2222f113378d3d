"""The introductory program: one array function, run on all workers at once.

``fork`` starts the workers, ``function`` says what to run and how its outputs are reduced,
``distribute`` sends it to the workers, ``data`` puts arrays where all of them see them.  The rest is
an ordinary serial program: nothing in it can race, and nothing in it waits for a message.

    python demos/demo_1_intro.py
"""

import numpy as np

import synkro as synk

# One worker process for each GPU, or for each CPU core on a machine without one.  They are fresh
# interpreters that never import this script: no "if __name__ == '__main__'" is needed.
n = synk.fork()


def mean_projection(x, y):
    """The mean over the rows of x, projected on y: plain NumPy that knows nothing of workers."""
    return x.dot(y).mean(axis=0)


# The rows of x are scattered over the workers; every worker sees the whole of y.  The workers'
# results are averaged: "mean" is also what happens where nothing is said.
f = synk.function(mean_projection, bcast_inputs=["y"], outputs="mean")

# Pickle the functions into the workers.  A function made later is sent at its first call.
synk.distribute()

# The inputs live in shared memory: a call sends no data, only a small message to each worker.
rng = np.random.default_rng(0)
x = synk.data(rng.standard_normal((100, 10)).astype("float32"))
y = synk.data(rng.standard_normal(10).astype("float32"))

result = f(x, y)
expected = mean_projection(x[:], y[:])  # or f.as_serial(x, y)
print(f"100 rows on {n} workers: {result:.6f}, serially: {expected:.6f}")
assert np.allclose(result, expected)

# The mean stays exact where the rows cannot be divided evenly: each worker's result weighs as much
# as the rows that it saw.
x.set_length(97)
result = f(x, y)
print(f" 97 rows on {n} workers: {result:.6f}, serially: {f.as_serial(x, y):.6f}")
assert np.allclose(result, f.as_serial(x, y))

# Plain arrays are taken too, and copied into shared memory first.
assert np.allclose(f(x[:50].copy(), y[:]), mean_projection(x[:50], y[:]))

# synk.close() would end the workers; it runs at exit by itself.
print("All assertions passed.")
