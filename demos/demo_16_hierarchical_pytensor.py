"""
A hierarchical regression
=========================

A logistic regression, whose likelihood is a graph of PyTensor, and scipy fits it. Each group has an
intercept of its own, drawn from a common normal distribution (partial pooling). The log-likelihood is a
sum over rows, and so is its gradient: both are outputs with the operation ``"sum"``. The prior is no
sum over rows. It is added once, in the main process. The fit is the serial one, to rounding.
"""

import numpy as np
import pytensor
import pytensor.tensor as T
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save
from scipy import special
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

import synkro as synk

ROWS, FEATURES, GROUPS = scaled(100_000), 8, 40

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
true_slopes, true_effects = rng.normal(0, 1, FEATURES), rng.normal(-0.5, 0.8, GROUPS)
x_all, groups = rng.standard_normal((ROWS, FEATURES)), rng.integers(GROUPS, size=ROWS)
y_all = rng.binomial(1, special.expit(x_all @ true_slopes + true_effects[groups])).astype("float64")

# %%
# All parameters are in one vector: the slopes, the effects of the groups, and their mean and logarithm
# of spread.

params = T.vector("params")
slopes, effects = params[:FEATURES], params[FEATURES : FEATURES + GROUPS]
mean, log_spread = params[-2], params[-1]

x, group, y = T.matrix("x"), T.lvector("group"), T.vector("y")
scores = x @ slopes + effects[group]
likelihood = (y * scores - T.softplus(scores)).sum()
terms = [likelihood, T.grad(likelihood, params)]

# %%
# The prior is a graph of its own.

z = (effects - mean) / T.exp(log_spread)
prior = -(z**2).sum() / 2 - GROUPS * log_spread - (slopes**2).sum() / 8 - (mean**2 + log_spread**2) / 2
of_prior = pytensor.function([params], [prior, T.grad(prior, params)])

# %%
# The same terms: of all rows here, and of the rows of each worker there.

serial = pytensor.function([x, group, y, params], terms)
everywhere = synk.function(
    inputs=[x, group, y], bcast_inputs=[params], outputs=[(term, "sum") for term in terms]
)
synk.distribute()
start = np.zeros(FEATURES + GROUPS + 2)


def fit(of_rows):
    """The most probable parameters, where *of_rows* is the log-likelihood with its gradient."""

    def minus_logp(params):
        terms = zip(of_rows(params), of_prior(params), strict=True)
        logp, gradient = (rows + alone for rows, alone in terms)
        return -logp, -gradient

    exact = {"ftol": 1e-14, "gtol": 1e-4}
    found = minimize(minus_logp, start, method="L-BFGS-B", jac=True, options=exact)
    assert found.success, found.message
    return found


# %%
# joblib's tasks have the likelihood by hand: they would compile a graph anew in each of them.


def by_numpy(x, group, y, params):
    """The log-likelihood, and its gradient."""
    scores = x @ params[:FEATURES] + params[FEATURES:-2][group]
    slope = y - special.expit(scores)
    by_effects = np.bincount(group, slope, minlength=GROUPS)
    likelihood = (y * scores - np.logaddexp(0, scores)).sum()
    return likelihood, np.concatenate([x.T @ slope, by_effects, [0, 0]])


def by_joblib(in_two):
    halves = [np.array_split(whole, 2) for whole in (x_all, groups, y_all)]

    def of_rows(params):
        one, two = in_two(by_numpy, *halves, [params, params])
        return [a + b for a, b in zip(one, two, strict=True)]

    return fit(of_rows)


# %%
# Each of the three fits makes the same steps.

rows = synk.data(x_all), synk.data(groups), synk.data(y_all)
for first in (serial(x_all, groups, y_all, start), everywhere(*rows, start)):
    assert np.isclose(first[0], -ROWS * np.log(2))  # not timed: numba compiles in the first call
expected = timed("serial", fit, lambda params: serial(x_all, groups, y_all, params))
with threadpool_limits(1):  # scipy's other BLAS thread would poll for work on a core of a worker's
    beside = timed_by_joblib(by_joblib, expected, "scipy.special")
    found = timed("Synkro (2 workers)", fit, lambda params: everywhere(*rows, params))

assert np.allclose(beside.x, expected.x, atol=1e-4)
assert np.allclose(found.x, expected.x, atol=1e-4)
assert np.isclose(found.fun, expected.fun, rtol=1e-10)
assert np.allclose(found.x[:FEATURES], true_slopes, atol=0.1)
print(f"{found.nfev} evaluations, log-probability {-found.fun:.3f}, in one process {-expected.fun:.3f}")
print(f"the groups' effects: mean {found.x[-2]:.2f}, spread {np.exp(found.x[-1]):.2f}")

# %%
# The fit finds the parameters that the data were made with.

figure, axes = plt.subplots()
axes.axline((0, 0), slope=1, color="lightgray", zorder=0)
axes.plot(true_effects, found.x[FEATURES:-2], "o", label=f"effects of {GROUPS} groups")
axes.plot(true_slopes, found.x[:FEATURES], "s", label=f"{FEATURES} slopes")
axes.plot([*true_slopes, *true_effects], expected.x[:-2], "k.", markersize=2, label="the serial fit")
axes.set(title=f"The fit of {ROWS:,} rows, on two workers", xlabel="true", ylabel="found")
axes.legend(frameon=False)
save(figure)

print("All assertions passed.")
