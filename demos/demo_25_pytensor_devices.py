"""
A graph over two devices
========================

A graph of PyTensor runs on two devices, as in Theano's guide to using several GPUs. The lines with
``shared`` are others: ``pytensor.shared`` takes no ``target=`` any more, ``place`` says where a
variable is, and ``fork(devices=…)`` has the map of names. An operation runs where its first placed
input is. What it needs from another device is sent there, and ``f.placement()`` shows it.
"""

import numpy as np
import pytensor
import pytensor.tensor as T
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

synk.fork(devices="dev0->cpu;dev1->cpu")  # "dev0->cuda0;dev1->cuda1" on a machine with two GPUs
random = np.random.default_rng(0).random

# %%
# Two products of matrices, one on each device, at the same time.


def placed(target):
    return synk.place(pytensor.shared(random((1024, 1024)).astype("float32")), target)


v01, v02 = placed("dev0"), placed("dev0")
v11, v12 = placed("dev1"), placed("dev1")
f = synk.function([], [T.dot(v01, v02), T.dot(v11, v12)])
first, second = f()
assert np.allclose(first, v01.get_value() @ v02.get_value(), rtol=1e-5)
assert np.allclose(second, v11.get_value() @ v12.get_value(), rtol=1e-5)
print(f.placement())

# %%
# A network with a layer on each device, trained by its gradients, which go back through the transfer.

x, t = T.matrix("x"), T.vector("t")
w = synk.place(pytensor.shared(random((10, 50)) - 0.5, name="w"), "dev0")
v = synk.place(pytensor.shared(random(50) - 0.5, name="v"), "dev1")
hidden = T.tanh(x.dot(w)).transfer("dev1")
loss = ((hidden.dot(v) - t) ** 2).mean()
updates = [(each, each - 0.05 * T.grad(loss, each)) for each in (w, v)]
train = synk.function([x, t], loss, updates=updates)

rows = random((200, 10))
answers = np.sin(rows.sum(axis=1))
begun = w.get_value(), v.get_value()
losses = [train(rows, answers) for _ in range(50)]
trained = w.get_value(), v.get_value()

# %%
# The same in this process, where transfers are nothing.

w.set_value(begun[0])
v.set_value(begun[1])
alone = pytensor.function([x, t], loss, updates=updates)
expected = [alone(rows, answers) for _ in range(50)]
assert np.allclose(losses, expected)
assert all(map(np.allclose, trained, (w.get_value(), v.get_value())))
moved = sum(row.nbytes for row in train.placement())
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; a step moves {moved} bytes")

# %%
# The operations of a step, where they run, and what goes from device to device. Below, what the steps
# do.

figure, (graph, training) = plt.subplots(2, 1, height_ratios=[1, 2])
for i, row in enumerate(train.placement()):
    if row.nbytes:
        graph.plot([i, i], row.device, "k-", linewidth=2)
        graph.text(i + 0.5, 0.4, f"{row.nbytes:,} bytes")
    else:
        graph.plot(i, row.device, "s", color="C0" if row.device == "dev0" else "C1")
graph.set(title="A graph on two devices", xlabel="operation", ylim=(-0.5, 1.5))
training.plot(expected, linewidth=6, color="lightsteelblue", label="in one process")
training.plot(losses, ".-", color="C1", label="a layer on each device")
training.set(xlabel="step", ylabel="loss", ylim=0)
training.legend(frameon=False)
save(figure)

print("All assertions passed.")
