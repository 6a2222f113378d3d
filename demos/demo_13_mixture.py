"""
A Gaussian mixture
==================

This is expectation maximization: the E-step on the workers, the M-step at home. All that the M-step
needs are sums over the rows. So the E-step is a function with ``outputs="sum"``, and an iteration is
one call. The fit is the serial one, to rounding.
"""

import itertools

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS, FEATURES, PARTS, ITERATIONS = scaled(40_000), 4, 6, 20

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
centres = rng.normal(0, 4, (PARTS, FEATURES))
scales = rng.uniform(0.5, 1.5, (PARTS, FEATURES, FEATURES))
labels = rng.integers(PARTS, size=ROWS)
table = centres[labels] + np.einsum("ni,nij->nj", rng.standard_normal((ROWS, FEATURES)), scales[labels])


# %%
# Both steps are plain functions of NumPy.


def expectation(x, weights, means, covariances):
    """Sums over the rows of *x*: log-likelihoods, chances, chances times x, and times x xᵀ."""
    scores = np.empty((len(weights), len(x)))  # log p(part, row)
    for k, factor in enumerate(np.linalg.cholesky(covariances)):
        z = np.linalg.solve(factor, (x - means[k]).T)
        constant = np.log(weights[k]) - np.log(np.diag(factor)).sum() - np.log(2 * np.pi) * len(z) / 2
        scores[k] = constant - (z * z).sum(axis=0) / 2
    top = scores.max(axis=0)
    chances = np.exp(scores - top)
    total = chances.sum(axis=0)
    chances /= total
    products = np.einsum("kn,ni,nj->kij", chances, x, x, optimize=True)
    return (top + np.log(total)).sum(), chances.sum(axis=1), chances @ x, products


def maximization(counts, sums, products):
    means = sums / counts[:, None]
    covariances = products / counts[:, None, None] - np.einsum("ki,kj->kij", means, means)
    return counts / counts.sum(), means, covariances


def fit(e_step):
    """The parameters, and the log-likelihood before each of the iterations."""
    parameters = np.full(PARTS, 1 / PARTS), table[:PARTS], np.array([np.cov(table.T)] * PARTS)
    track = []
    for _ in range(ITERATIONS):
        likelihood, *sums = e_step(*parameters)
        parameters = maximization(*sums)
        track.append(likelihood)
    return parameters, track


def by_joblib(in_two):
    halves = np.array_split(table, 2)

    def e_step(*parameters):
        parts = in_two(expectation, halves, *([each, each] for each in parameters))
        return [sum(each) for each in zip(*parts, strict=True)]

    return fit(e_step)


# %%
# The table lies in shared memory, where each worker finds its rows. Only parameters and sums travel.

everywhere = synk.function(expectation, bcast_inputs=["weights", "means", "covariances"], outputs="sum")
synk.distribute()
rows = synk.data(table)

expected, track = timed("serial", fit, lambda *parameters: expectation(table, *parameters))
beside, _ = timed_by_joblib(by_joblib, (expected, track))
found, ours = timed("Synkro (2 workers)", fit, lambda *parameters: everywhere(rows, *parameters))

for one, two, three in zip(expected, beside, found, strict=True):
    assert np.allclose(two, one, rtol=1e-6)
    assert np.allclose(three, one, rtol=1e-6)
assert np.allclose(ours, track, rtol=1e-9)
assert all(after > before for before, after in itertools.pairwise(ours))
print(f"log-likelihood a row {ours[0] / ROWS:.4f} at first, {ours[-1] / ROWS:.4f} at last")

# %%
# The parts that the fit found, each as an ellipse, on rows in the colours of the parts that made them.

figure, axes = plt.subplots()
axes.scatter(*table[:300, ::2].T, 9, labels[:300], cmap="Dark2", linewidths=0)
angles = np.linspace(0, 2 * np.pi, 100)
for mean, covariance in zip(*found[1:], strict=True):
    factor = 2 * np.linalg.cholesky(covariance[::2, ::2])  # two standard deviations
    axes.fill(*(mean[::2, None] + factor @ [np.cos(angles), np.sin(angles)]), "black", alpha=0.12)
axes.set(title=f"The fit finds all {PARTS} parts", xlabel="first feature", ylabel="third feature")
save(figure)

print("All assertions passed.")
