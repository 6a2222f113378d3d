"""
Logistic regression
===================

This is logistic regression with a penalty, and all of the data in every step. It is the exercise of
Theano's guide to the GPU: 400 random rows of 784 features with random answers, an L2 penalty of 0.01
times the square of the weights, and plain gradient descent (there 10 000 steps, of a tenth of this
learning rate).

NumPy does it alone. Then the workers do it: they hold the weights as variables, and exchange their
gradients in every step. All losses are the same. Where a step takes as little as 0.1 milliseconds, the
exchange costs more time than the workers save.
"""

import time

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS, FEATURES, STEPS, PER_CALL, RATE, PENALTY = 400, 784, 1000, 100, 0.1, 0.01

n = synk.fork()
rng = np.random.default_rng(0)
x_all = rng.standard_normal((ROWS, FEATURES))
y_all = rng.integers(2, size=ROWS).astype("float64")
start = rng.standard_normal(FEATURES)


def gradients(x, y, w, b):
    """The loss, and its derivatives by *w* (features,) and *b*."""
    scores = x @ w + b
    # log(1 + e^s) - y s is the cross-entropy of 1 / (1 + e^-s), without its overflows.
    loss = np.mean(np.logaddexp(0, scores) - y * scores) + PENALTY * np.sum(w * w)
    slope = (1 / (1 + np.exp(-scores)) - y) / len(y)
    return loss, x.T @ slope + 2 * PENALTY * w, slope.sum()


def sequential(steps):
    w, b, losses = start.copy(), 0.0, []
    for _ in range(steps):
        loss, by_w, by_b = gradients(x_all, y_all, w, b)
        w -= RATE * by_w
        b -= RATE * by_b
        losses.append(loss)
    return np.array(losses), w, b


# %%
# A call may hold one step, or many: the workers meet in every ``all_reduce``. The losses of their rows
# are averaged when they are returned, once a call. The mean is weighted by rows, as the gradients' is.

w = synk.shared(start, name="w")
b = synk.shared(0.0, name="b")


@synk.function(bcast_inputs="steps")
def descend(x, y, steps):
    losses = []
    for _ in range(steps):
        loss, by_w, by_b = gradients(x, y, w.value, b.value)
        by_w, by_b = synk.all_reduce((by_w, by_b), weight=len(x))
        w[...] -= RATE * by_w
        b[...] -= RATE * by_b
        losses.append(loss)
    return synk.xp().stack(losses)  # of NumPy, or of CuPy on GPUs


def parallel(per_call):
    synk.broadcast([w, b], [start, 0.0])
    losses = [descend(x, y, per_call) for _ in range(STEPS // per_call)]
    return np.concatenate(losses), w.get_value(), b.get_value()


def timed(run, argument):
    begin = time.perf_counter()
    result = run(argument)
    return result, time.perf_counter() - begin


# %%
# The same steps, alone and together.

x, y = synk.data(x_all), synk.data(y_all)
descend(x, y, 1)  # the first call sends the function; it is not timed
sequential(1)

(expected, w_expected, b_expected), alone = timed(sequential, STEPS)
print(f"{STEPS} steps: loss {expected[0]:.4f} at first, {expected[-1]:.4f} at last")
times = {"NumPy alone": alone}
for per_call in (1, PER_CALL):
    (losses, w_found, b_found), together = timed(parallel, per_call)
    times[f"{n} workers,\n{per_call} to a call"] = together
    assert len(losses) == STEPS
    assert np.allclose(losses, expected)
    assert np.allclose(w_found, w_expected)
    assert np.allclose(b_found, b_expected)
assert expected[-1] < expected[0]

figure, (left, right) = plt.subplots(1, 2, width_ratios=[3, 2])
left.loglog(expected, linewidth=7, alpha=0.3, label="NumPy alone")
left.loglog(losses, "C1", label=f"{n} workers")
left.set(title="Both have the same losses", xlabel="step", ylabel="loss")
left.legend()
bars = right.bar(list(times), np.array([*times.values()]) / STEPS * 1e3, color=["C0", "C1", "C1"])
right.bar_label(bars, fmt="%.2f")
right.set_title("Milliseconds a step")
right.tick_params(axis="x", labelsize=7)
save(figure)

print("All assertions passed.")
