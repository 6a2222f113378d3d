"""
Training on the devices
=======================

This network never leaves the devices: rows, parameters and gradients all live on the workers. With GPUs
the workers compute with CuPy and exchange gradients by NCCL. Without them they use NumPy and shared
memory. The program is the same.

The rows are scattered once. From then on a training step is one call, which says only which rows to
take: each worker picks its own, on its device.
"""

import numpy as np
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import synkro as synk
from synkro.extensions import adam, make_train_function

n = synk.fork(seed=0)
digits = load_digits()
x_train, x_test, t_train, t_test = train_test_split(
    digits.data.astype("float32") / 16, digits.target, random_state=0
)
rng = np.random.default_rng(0)
start = [
    rng.normal(0, 1 / 8, (64, 64)).astype("float32"),
    np.zeros(64, "float32"),
    rng.normal(0, 1 / 8, (64, 10)).astype("float32"),
    np.zeros(10, "float32"),
]
parameters = [synk.shared(value, name=f"p{index}") for index, value in enumerate(start)]
rows, answers = synk.shared(x_train[:0], name="rows"), synk.shared(t_train[:0], name="answers")
synk.scatter([rows, answers], [x_train, t_train])


def loss_and_gradients(x, t, w1, b1, w2, b2):
    """The mean cross-entropy of a two-layer network, and its derivatives by the parameters."""
    xp = synk.xp()  # NumPy, or CuPy on GPUs
    h = xp.tanh(x @ w1 + b1)
    scores = h @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    log_p = scores - xp.log(xp.exp(scores).sum(axis=1, keepdims=True))
    hits = xp.eye(10, dtype="float32")[t]
    slope = (xp.exp(log_p) - hits) / len(t)
    below = slope @ w2.T * (1 - h**2)
    return -(log_p * hits).sum() / len(t), [x.T @ below, below.sum(0), h.T @ slope, slope.sum(0)]


# %%
# ``make_train_function`` makes the step: the gradients of each worker's rows, their mean over all rows,
# and the rule that moves the parameters.


def on_the_worker():
    return loss_and_gradients(rows.value, answers.value, *[p.value for p in parameters])


train = make_train_function(
    on_the_worker, parameters, adam(parameters, 0.01), sliceable_shareds=[rows, answers]
)


@synk.function(outputs="mean")
def accuracy(x, t):
    w1, b1, w2, b2 = (p.value for p in parameters)
    return ((synk.xp().tanh(x @ w1 + b1) @ w2 + b2).argmax(axis=1) == t).mean()


# %%
# The same in NumPy alone: a step of Adam's rule on some rows, which returns their loss before.

serial = [value.copy() for value in start]
first, second = [np.zeros_like(v) for v in start], [np.zeros_like(v) for v in start]
shares = np.array_split(np.arange(len(x_train)), n)  # the rows of each worker


def train_alone(step, taken):
    loss, gradients = loss_and_gradients(x_train[taken], t_train[taken], *serial)
    for value, gradient, m, v in zip(serial, gradients, first, second, strict=True):
        m[...] += 0.1 * (gradient - m)
        v[...] += 0.001 * (gradient**2 - v)
        value[...] -= 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 1e-8)
    return loss


# %%
# Three steps on the first 50 rows of each worker give the same parameters.

for step in range(1, 4):
    expected = train_alone(step, np.concatenate([share[:50] for share in shares]))
    assert np.isclose(train(batch_s=50), expected, rtol=1e-4)
assert all(
    np.allclose(p.get_value(), value, atol=1e-3) for p, value in zip(parameters, serial, strict=True)
)

# %%
# From then on, each worker takes its own rows in an order of their own.

before = accuracy(x_test, t_test)
losses, losses_alone = [], []
lengths = synk.get_lengths(rows)
for _ in range(20):
    orders = [np.array_split(rng.permutation(length), 10) for length in lengths]
    for batch in zip(*orders, strict=True):
        losses.append(train(batch_s=list(batch)))
        step += 1
        taken = [share[chosen] for share, chosen in zip(shares, batch, strict=True)]
        losses_alone.append(train_alone(step, np.concatenate(taken)))
after = accuracy(x_test, t_test)
print(f"{len(x_train)} digits on {n} workers; right on others: {before:.1%} before, {after:.1%} after")
assert after > 0.94
for p in parameters:  # the replicas are equal, to the bit
    replicas = synk.gather(p)
    assert all(np.array_equal(replica, replicas[0]) for replica in replicas)

figure, axes = plt.subplots()
axes.semilogy(losses_alone, linewidth=5, alpha=0.3, label="NumPy alone")
axes.semilogy(losses, "C1", label=f"{n} workers, which keep the rows")
axes.set(title=f"The losses are the same; {after:.1%} of other digits are read right")
axes.set(xlabel="step", ylabel="loss")
axes.legend()
save(figure)

print("All assertions passed.")
