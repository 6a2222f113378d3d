"""
Digits with PyTensor
====================

A network of PyTensor learns to read digits. It is trained three ways, with the same losses.

serial
    One compiled function, in this process.
classic
    Three functions: the gradient on every worker, an all-reduce, the update.
one call
    ``make_train_function`` makes the three of them one.

This needs PyTensor, and on GPUs also JAX.
"""

import numpy as np
import pytensor
import pytensor.tensor as T
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import synkro as synk
from synkro import extensions

RATE, EPOCHS, BATCHES, HIDDEN = 0.2, 30, 10, 32

n = synk.fork()
digits = load_digits()  # 8 x 8 pixels from 0 to 16
x_train, x_test, t_train, t_test = train_test_split(digits.data / 16, digits.target, random_state=0)
x_data, t_data = synk.data(x_train), synk.data(t_train)
x, t = T.matrix("x", dtype="float64"), T.lvector("t")


class Network:
    """Two layers, their loss and its gradient; every network has the same first parameters."""

    def __init__(self):
        rng = np.random.default_rng(0)
        shapes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
        self.params = [pytensor.shared(rng.normal(0, 0.3, shape)) for shape in shapes]
        w1, b1, w2, b2 = self.params
        scores = T.tanh(x.dot(w1) + b1).dot(w2) + b2
        chances = T.special.log_softmax(scores, axis=1)
        self.loss = -chances[T.arange(t.shape[0]), t].mean()
        self.right = T.eq(scores.argmax(axis=1), t).mean(dtype="float64")
        self.gradients = T.grad(self.loss, self.params)


def batches():
    """The rows of all batches; the same in every training."""
    rng = np.random.default_rng(1)
    for _ in range(EPOCHS):
        yield from np.array_split(rng.permutation(len(x_train)), BATCHES)


# %%
# Serial: what PyTensor does by itself.

net = Network()
steps = [(p, p - RATE * g) for p, g in zip(net.params, net.gradients, strict=True)]
f = pytensor.function([x, t], net.loss, updates=steps)
serial = [f(x_train[rows], t_train[rows]) for rows in batches()]

# %%
# Classic: the gradient of all parameters is one shared vector, so that one all-reduce suffices.

classic = Network()
flat = T.concatenate([g.flatten() for g in classic.gradients])
total = pytensor.shared(np.zeros(sum(p.get_value().size for p in classic.params)), name="gradient")
ends = np.cumsum([0] + [p.get_value().size for p in classic.params])
steps = [
    (p, p - RATE * total[start:stop].reshape(p.shape))
    for p, start, stop in zip(classic.params, ends, ends[1:], strict=False)
]
f_gradient = synk.function(inputs=[x, t], outputs=classic.loss, updates=[(total, flat)])
f_update = synk.function(inputs=[], updates=steps)
f_right = synk.function(inputs=[x, t], outputs=classic.right)
synk.distribute()
losses = []
for rows in batches():
    even = rows[: len(rows) // n * n]  # as many rows on each rank: the mean of ranks is that of rows
    losses.append(f_gradient(x_data, t_data, batch=even))
    synk.all_reduce(total)
    f_update()

# %%
# One call: it takes any batch, also where the ranks have different numbers of rows.

whole = Network()
rule = extensions.sgd(whole.params, RATE)
train = extensions.make_train_function(whole.loss, whole.params, x, t, rule)
parallel = [train(x_data, t_data, batch=rows) for rows in batches()]
assert np.allclose(parallel, serial)
for ours, theirs in zip(whole.params, net.params, strict=True):
    assert np.allclose(ours.get_value(), theirs.get_value())

right = f_right(x_test, t_test)
assert losses[-1] < losses[0] / 5
assert abs(right - f_right.as_serial(x_test, t_test)) < 1e-12
print(f"{right:.1%} of {len(t_test)} others read right")

figure, axes = plt.subplots()
serial, losses, parallel = np.reshape([serial, losses, parallel], (3, EPOCHS, BATCHES)).mean(axis=2)
axes.semilogy(serial, linewidth=7, alpha=0.3, label="serial")
axes.semilogy(losses, "o", fillstyle="none", label=f"three functions, on {n} workers")
axes.semilogy(parallel, "C2.", label=f"one call, on {n} workers")
axes.set(title="A network trained three ways has the same losses", xlabel="epoch", ylabel="loss")
axes.legend()
save(figure)

print("All assertions passed.")
