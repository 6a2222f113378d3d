"""
A model of PyMC's
=================

The logp of a PyMC model, with its gradient, over the rows on all workers: PyMC's own, to rounding. The
model is written as always, with its rows in ``pm.Data``. Its likelihood is a sum over rows: a graph in
which the rows of each worker take the place of all. The prior is counted once, in the main process.
"""

import numpy as np
import pymc as pm
import pytensor.tensor as T
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS, FEATURES, POINTS = scaled(100_000), 6, 200

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
x_all = rng.standard_normal((ROWS, FEATURES))
true_slopes = rng.normal(0, 1, FEATURES)
y_all = x_all @ true_slopes + 0.5 * rng.standard_t(4, ROWS)

with pm.Model() as model:
    x, y = pm.Data("x", x_all), pm.Data("y", y_all)
    slopes = pm.Normal("slopes", shape=FEATURES)
    sigma = pm.HalfNormal("sigma")
    tail = pm.Gamma("tail", 2, 0.1)
    pm.StudentT("seen", mu=x @ slopes, sigma=sigma, nu=tail, observed=y)

params = model.value_vars  # the slopes, and the logarithms of sigma and tail


def with_gradient(logp):
    return [logp, *T.grad(logp, params)]


# %%
# The likelihood is a graph for the workers, and ``givens=`` puts their rows into it. The prior is
# compiled for this process.

some_x, some_y = T.matrix("some_x"), T.vector("some_y")
of_rows = synk.function(
    inputs=[some_x, some_y],
    bcast_inputs=params,
    outputs=[(term, "sum") for term in with_gradient(model.logp(vars=model.observed_RVs))],
    givens=[(x, some_x), (y, some_y)],
)
prior = with_gradient(model.logp(vars=model.free_RVs))
of_prior = model.compile_fn(prior, inputs=params, point_fn=False)

# %%
# For comparison, the whole logp at once, in this process, and in those of joblib.

alone = model.compile_fn(with_gradient(model.logp()), inputs=params, point_fn=False)


def serial(points):
    return [np.hstack(alone(*point)) for point in points]


def by_joblib(in_two):
    """The points are independent; each task gets the compiled function, with all rows in it."""
    one, two = in_two(serial, [points[::2], points[1::2]])
    return [point for pair in zip(one, two, strict=True) for point in pair]


# %%
# On the workers, what they find is added to the prior.


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

# %%
# The logp near the true parameters, where one slope changes. Each derivative gives a tangent.

steps = np.linspace(-0.5, 0.5, 11)
path = [(true_slopes + step * np.eye(FEATURES)[0], np.log(0.5), np.log(4)) for step in steps]
tangents = np.array(on_the_workers(path))[:, :2]

figure, axes = plt.subplots()
axes.plot(steps, np.array(serial(path))[:, 0], linewidth=6, color="lightsteelblue", label="PyMC's logp")
for step, (height, derivative) in zip(steps, tangents, strict=True):
    ends = np.array([-0.04, 0.04])
    axes.plot(step + ends, height + derivative * ends, color="C1")
axes.plot(steps, tangents[:, 0], "C1o", label="logp and derivative from two workers")
axes.set(title="A logp with its gradient", xlabel="first slope − true slope", ylabel="logp")
axes.legend(frameon=False, loc="lower center")
save(figure)

print("All assertions passed.")
