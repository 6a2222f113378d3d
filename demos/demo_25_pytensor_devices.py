"""A graph of PyTensor over two devices, as in Theano's guide to using several GPUs.

The lines with ``shared`` are others: ``pytensor.shared`` takes no ``target=`` any more, ``place`` says
where a variable is; and ``fork(devices=…)`` has the map of names.  An operation runs where its first
placed input is.  What it needs from another device is sent there, and ``f.placement()`` shows it.

    python demos/demo_25_pytensor_devices.py
"""

import numpy as np
import pytensor
import pytensor.tensor as T

import synkro as synk

synk.fork(devices="dev0->cpu;dev1->cpu")  # "dev0->cuda0;dev1->cuda1" on a machine with two GPUs
random = np.random.default_rng(0).random


def placed(target):
    return synk.place(pytensor.shared(random((1024, 1024)).astype("float32")), target)


v01, v02 = placed("dev0"), placed("dev0")
v11, v12 = placed("dev1"), placed("dev1")
f = synk.function([], [T.dot(v01, v02), T.dot(v11, v12)])
first, second = f()
assert np.allclose(first, v01.get_value() @ v02.get_value(), rtol=1e-5)
assert np.allclose(second, v11.get_value() @ v12.get_value(), rtol=1e-5)
print(f.placement())

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

w.set_value(begun[0])
v.set_value(begun[1])
alone = pytensor.function([x, t], loss, updates=updates)  # in this process: transfers are nothing there
assert np.allclose(losses, [alone(rows, answers) for _ in range(50)])
assert all(map(np.allclose, trained, (w.get_value(), v.get_value())))
moved = sum(row.nbytes for row in train.placement())
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; a step moves {moved} bytes")

print("All assertions passed.")
