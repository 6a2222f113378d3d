"""
Digits with PyTorch
===================

A module of PyTorch learns to read digits. It travels with the functions that use it, and lives on the
workers from then on: each has its copy. A step is one call. Each worker computes the gradients over its
rows of the batch, all of them in one flat buffer. ``all_reduce`` averages them by rows, and every
worker takes the same step. So the copies stay equal, to the bit.
"""

import copy

import numpy as np
import torch
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import synkro as synk

EPOCHS, BATCH, RATE = 15, 128, 0.1

n = synk.fork()
digits = load_digits()  # 8 x 8 pixels from 0 to 16
pixels = (digits.data / 16).astype("float32")
x_train, x_test, t_train, t_test = train_test_split(pixels, digits.target, random_state=0)
x, t = synk.data(torch.tensor(x_train)), synk.data(torch.tensor(t_train))  # arrive as tensors

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
mine = copy.deepcopy(model)  # trained here, for comparison
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


# %%
# The step is that of any program of PyTorch, but for the gradients' way over ``all_reduce``.


@synk.function
def step(x, t):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), t)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    mean = synk.all_reduce(flat, "mean", weight=len(x))  # one transfer for all parameters
    for p, gradient in zip(
        model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.grad = gradient.view_as(p)
    optimizer.step()
    return loss


@synk.function(outputs="gather")
def read(x):
    return model(x).argmax(dim=1)


parameters = synk.function(lambda: list(model.parameters()), outputs=None)  # those of every worker
synk.distribute()  # all functions at once

# %%
# The other copy is trained in this process, on the same rows. The losses are the same.

alone = torch.optim.SGD(mine.parameters(), lr=RATE, momentum=0.9)
rng = np.random.default_rng(0)
for epoch in range(EPOCHS):
    order = rng.permutation(len(x_train))
    for start in range(0, len(order) - n, BATCH):
        rows = order[start : start + BATCH]
        loss = step(x, t, batch=rows)
        alone.zero_grad()
        expected = nn.functional.cross_entropy(
            mine(torch.tensor(x_train[rows])), torch.tensor(t_train[rows])
        )
        expected.backward()
        alone.step()
        assert np.isclose(loss, expected.item(), rtol=1e-2, atol=1e-3)
    copies = parameters()
    for one in copies[1:]:
        assert all(map(np.array_equal, one, copies[0]))
    print(f"epoch {epoch + 1}: loss {loss:.4f}, in one process {expected.item():.4f}")

# %%
# The workers read digits that they have not learned from.

found = read(torch.tensor(x_test))
score = (found == t_test).mean()
assert score > 0.95
print(
    f"{n} workers read {score:.1%} of {len(t_test)} other digits; their parameters are equal, to the bit"
)

# %%
# The picture begins with what is misread.

figure, panels = plt.subplots(5, 10)
for axes, row in zip(panels.flat, np.argsort(found == t_test, kind="stable"), strict=False):
    right = found[row] == t_test[row]
    axes.imshow(x_test[row].reshape(8, 8), cmap="gray_r" if right else "Oranges")
    axes.set_title(found[row], color="black" if right else "C1")
    axes.set_axis_off()
figure.suptitle(f"{score:.1%} of {len(t_test)} digits are read right, {np.sum(found != t_test)} wrong")
save(figure)

print("All assertions passed.")
