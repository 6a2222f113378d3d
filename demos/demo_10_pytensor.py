"""
A graph of PyTensor
===================

This is the introductory program of Synkhronos, with Theano's successor PyTensor: only the imports are
others. A function of symbols runs on all workers. Then all workers train a parameter. It needs
PyTensor, and on GPUs also JAX.
"""

import numpy as np
import pytensor
import pytensor.tensor as T
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

synk.fork()
x = T.matrix("x")
y = T.vector("y")
z = T.mean(x.dot(y), axis=0)
f_th = pytensor.function(inputs=[x, y], outputs=z)
f = synk.function(inputs=[x], bcast_inputs=[y], outputs=z)
synk.distribute()

# %%
# Both functions of the graph give the same.

x_dat = np.random.randn(100, 10).astype("float32")
y_dat = np.random.randn(10).astype("float32")
x_synk = synk.data(x_dat)
y_synk = synk.data(y_dat)
r_th = f_th(x_dat, y_dat)
r = f(x_synk, y_synk)

assert np.allclose(r, r_th)

# %%
# The same goes for a parameter that both train. Its values in the main process are the master rank's.

w = pytensor.shared(np.zeros(10), name="w")
loss = ((x.dot(w) - x.dot(y)) ** 2).mean()
step = synk.function(
    inputs=[x], bcast_inputs=[y], outputs=loss, updates=[(w, w - 0.05 * T.grad(loss, w))]
)
losses = []
for _ in range(50):
    losses.append(step(x_synk, y_synk))
    synk.all_reduce(w)  # each rank has taken the step of its rows: the mean of them is that of all
alone = pytensor.function([x, y], loss, updates=[(w, w - 0.05 * T.grad(loss, w))])
found = w.get_value()
w.set_value(np.zeros(10))
serial = [alone(x_dat, y_dat) for _ in range(50)]
assert np.allclose(losses, serial)
assert np.allclose(found, w.get_value())

figure, axes = plt.subplots()
axes.semilogy(serial, linewidth=7, alpha=0.3, label="in one process")
axes.semilogy(losses, "C1", label="on all workers")
axes.set(title="A graph of PyTensor learns the same on all workers", xlabel="step", ylabel="loss")
axes.legend()
save(figure)

print("All assertions passed.")
