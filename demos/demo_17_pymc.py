"""The logp of a PyMC model, with its gradient, over the rows on all workers: PyMC's own, to rounding.

The model is written as always, with its rows in pm.Data.  Its likelihood is a sum over rows: a graph in
which the rows of each worker take the place of all.  The prior is counted once, in the main process.

    python demos/demo_17_pymc.py [times as large]
"""

import numpy as np
import pymc as pm
import pytensor.tensor as T
from cookbook import scaled, timed, timed_by_joblib

import synkro as synk

ROWS, FEATURES, POINTS = scaled(100_000), 6, 200

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
x_all = rng.standard_normal((ROWS, FEATURES))
y_all = x_all @ rng.normal(0, 1, FEATURES) + 0.5 * rng.standard_t(4, ROWS)

with pm.Model() as model:
    x, y = pm.Data("x", x_all), pm.Data("y", y_all)
    slopes = pm.Normal("slopes", shape=FEATURES)
    sigma = pm.HalfNormal("sigma")
    tail = pm.Gamma("tail", 2, 0.1)
    pm.StudentT("seen", mu=x @ slopes, sigma=sigma, nu=tail, observed=y)

params = model.value_vars  # the slopes, and the logarithms of sigma and tail


def with_gradient(logp):
    return [logp, *T.grad(logp, params)]


some_x, some_y = T.matrix("some_x"), T.vector("some_y")
of_rows = synk.function(
    inputs=[some_x, some_y],
    bcast_inputs=params,
    outputs=[(term, "sum") for term in with_gradient(model.logp(vars=model.observed_RVs))],
    givens=[(x, some_x), (y, some_y)],
)
prior = with_gradient(model.logp(vars=model.free_RVs))
of_prior = model.compile_fn(prior, inputs=params, point_fn=False)
alone = model.compile_fn(with_gradient(model.logp()), inputs=params, point_fn=False)


def serial(points):
    return [np.hstack(alone(*point)) for point in points]


def by_joblib(in_two):
    """The points are independent; each task gets the compiled function, with all rows in it."""
    one, two = in_two(serial, [points[::2], points[1::2]])
    return [point for pair in zip(one, two, strict=True) for point in pair]


def on_the_workers(points):
    return [np.hstack(of_rows(*rows, *point)) + np.hstack(of_prior(*point)) for point in points]


rows = synk.data(x_all), synk.data(y_all)
points = [(rng.normal(0, 1, FEATURES), *rng.normal(0, 0.5, 2)) for _ in range(POINTS)]
serial(points[:1]), on_the_workers(points[:1])  # not timed: numba compiles in the first call

expected = timed("serial", serial, points)
beside = timed_by_joblib(by_joblib, expected, "pymc")
found = timed("Synkro (2 workers)", on_the_workers, points)

assert np.allclose(beside, expected, rtol=1e-9)
assert np.allclose(found, expected, rtol=1e-9)
logp = model.compile_logp()
for point, values in zip(points[:5], found, strict=False):
    named = {variable.name: value for variable, value in zip(params, point, strict=True)}
    assert np.isclose(values[0], logp(named), rtol=1e-9)
print(f"logp and its {FEATURES + 2} derivatives at {POINTS} points; the first logp is {found[0][0]:.1f}")

print("All assertions passed.")
