"""
Learning to read digits
=======================

All workers train softmax regression and a two-layer network at once. The parameters are variables with
a replica on every worker. A step of gradient descent is one call: each worker computes the gradients
over its rows of the batch, ``all_reduce`` averages them, weighted by rows, and each worker takes the
same step. The data lie in shared memory, or stay on the workers.
"""

import numpy as np
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

import synkro as synk

n = synk.fork()
digits = load_digits()  # 8 x 8 pixels from 0 to 16
x_train, x_test, t_train, t_test = train_test_split(digits.data / 16, digits.target, random_state=0)
x, t = synk.data(x_train, name="pixels"), synk.data(t_train, name="digits")
rng = np.random.default_rng(0)
rows, pixels, hidden = *x.shape, 64

# %%
# A worker without rows takes no part in a call, and would miss its step. So all get some of each batch.

n_batches = min(10, rows // n)
rates = np.linspace(0.5, 0, 40, endpoint=False)  # one an epoch
softmax = [synk.shared(np.zeros(s)) for s in [(pixels, 10), 10]]
network = [synk.shared(rng.normal(0, 1 / 8, s)) for s in [(pixels, hidden), hidden, (hidden, 10), 10]]
momenta = [[synk.shared(np.zeros(p.shape)) for p in model] for model in (softmax, network)]


def cross_entropy_slope(scores, t):
    """The derivative of the mean cross-entropy by *scores* (rows, 10), for the digits *t*."""
    xp = synk.xp()  # NumPy, or CuPy on GPUs
    p = xp.exp(scores - scores.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True) - xp.eye(10)[t]) / len(t)


def descend(parameters, momenta, gradients, weight, rate):
    """The step of all ranks, along the mean of their *gradients*."""
    means = synk.all_reduce(gradients, weight=weight)
    for parameter, momentum, mean in zip(parameters, momenta, means, strict=True):
        momentum[...] = 0.9 * momentum.value - rate * mean
        parameter[...] += momentum.value


@synk.function(bcast_inputs="rate", outputs=[])
def softmax_step(x, t, rate):
    w, b = (variable.value for variable in softmax)
    slope = cross_entropy_slope(x @ w + b, t)
    by_w = x.T @ slope + w / rows  # the latter is of scikit-learn's penalty, |w|² / (2 rows)
    descend(softmax, momenta[0], [by_w, slope.sum(0)], len(x), rate)


@synk.function(bcast_inputs="rate", outputs=[])
def network_step(x, t, rate):
    w1, b1, w2, b2 = (variable.value for variable in network)
    h = np.tanh(x @ w1 + b1)
    slope = cross_entropy_slope(h @ w2 + b2, t)
    below = slope @ w2.T * (1 - h**2)
    descend(network, momenta[1], [x.T @ below, below.sum(0), h.T @ slope, slope.sum(0)], len(x), rate)


@synk.function(outputs="mean")
def accuracy(x, t):
    (w, b), (w1, b1, w2, b2) = ([variable.value for variable in each] for each in (softmax, network))
    return [np.mean(s.argmax(axis=1) == t) for s in (x @ w + b, np.tanh(x @ w1 + b1) @ w2 + b2)]


# %%
# An epoch calls both steps with the rows of each batch. scikit-learn's regression is the one to compare
# with.

track, kept_track = [], []  # what is read right after each epoch
for rate in rates:
    for batch in np.array_split(rng.permutation(rows), n_batches):
        softmax_step(x, t, rate, batch=batch)
        network_step(x, t, rate, batch=batch)
    track.append(accuracy(x_test, t_test))
with threadpool_limits(1):
    theirs = LogisticRegression(max_iter=1000).fit(x_train, t_train).score(x_test, t_test)
one, two = track[-1]
assert theirs <= one <= theirs + 0.01
assert two >= max(one, theirs)
assert np.array_equal(synk.gather(softmax[0]), [softmax[0]] * n)  # the replicas are equal, to the bit

# %%
# The same goes over rows that the workers keep. In the function, the variables are the rows of
# ``batch_s=``.

kept = [synk.shared(x_train[:0]), synk.shared(t_train[:0])]
synk.scatter(kept, [x_train, t_train])
kept_step = synk.function(
    lambda rate: softmax_step(kept[0].value, kept[1].value, rate),
    outputs=[],
    bcast_inputs="rate",
    sliceable_shareds=kept,
)

# %%
# From the same start, with the same rows (the first 5 of each worker), both end at the same place.

state = softmax + momenta[0]
zeros = [np.zeros(variable.shape) for variable in state]
synk.broadcast(state, zeros)
kept_step(1.0, batch_s=5)
expected = softmax[0].get_value()
synk.broadcast(state, zeros)
softmax_step(x, t, 1.0, batch=np.concatenate([r[:5] for r in np.array_split(np.arange(rows), n)]))
assert np.allclose(softmax[0], expected)

# %%
# Then every worker shuffles its own rows: ``batch_s=`` has a list of indices for each.

for rate in rates:
    lists = [np.array_split(rng.permutation(m), n_batches) for m in synk.get_lengths(kept[0])]
    for batch_s in zip(*lists, strict=True):
        kept_step(rate, batch_s=batch_s)
    kept_track.append(accuracy(x_test, t_test)[0])
again = kept_track[-1]
assert theirs <= again <= theirs + 0.01
print(f"{rows} digits on {n} workers; of {len(t_test)} others LogisticRegression reads {theirs:.2%},")
print(f"softmax regression {one:.2%}, with the rows on the workers {again:.2%}, two layers {two:.2%}")

figure, axes = plt.subplots()
axes.axhline(theirs, color="black", linestyle="--", label="LogisticRegression of scikit-learn")
axes.plot(np.array(track), label=["softmax regression", "two layers"])
axes.plot(kept_track, label="softmax, rows kept on the workers")
axes.set(title=f"{n} workers learn to read digits", xlabel="epoch", ylim=(0.9, 1))
axes.set_ylabel("part of other digits read right")
axes.legend(loc="lower right")
save(figure)

print("All assertions passed.")
