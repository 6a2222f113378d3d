"""
A network of PyTorch's
======================

A network is trained on the workers, and ``synk.fetch()`` brings its weights back. A step is one call:
every worker computes the gradients over its rows of the batch, averages them with the others by rows,
and steps. The module here is not trained meanwhile. What is fetched is a copy of what it has become:
the module that serial training gives, to rounding.
"""

import copy

import numpy as np
import torch
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save
from torch import nn

import synkro as synk

BATCH = scaled(1_000)
ROWS, EPOCHS, RATE = 8 * BATCH, 3, 0.05

synk.fork(2, devices="cpu")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(ROWS, 20)
targets = torch.sin(inputs[:, :1]) + inputs[:, 1:2].abs()
order = np.random.default_rng(0)
batches = [rows for _ in range(EPOCHS) for rows in order.permutation(ROWS).reshape(-1, BATCH)]

model = nn.Sequential(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

# %%
# The step refers to the module and to its optimizer. Each worker has its own copies of them.


@synk.function
def step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad = synk.all_reduce(p.grad, weight=len(x))
    optimizer.step()
    return loss


# %%
# For comparison: the same in one process, and with joblib, whose tasks compute gradients.


def alone():
    """The same training in one process."""
    mine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for rows in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(mine(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return mine, losses


def gradients(model, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    return torch.autograd.grad(loss, list(model.parameters()))


def by_joblib(in_two):
    mine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE, momentum=0.9)
    for rows in batches:
        halves = inputs[rows].chunk(2), targets[rows].chunk(2)
        one, two = in_two(gradients, [mine, mine], *halves)
        for p, a, b in zip(mine.parameters(), one, two, strict=True):
            p.grad = (a + b) / 2  # the halves are equally long
        optimizer.step()
    return mine


# %%
# On the workers. Before that, ``push`` sends them the module and the optimizer as they are here.


def on_the_workers():
    losses = [step(x, y, batch=rows) for rows in batches]
    return synk.fetch(model), losses


x, y = synk.data(inputs), synk.data(targets)
step(x, y)  # not timed: in its first step PyTorch loads the rest of itself
synk.push(model)
synk.push(optimizer)
expected, expected_losses = timed("serial", alone)
beside = timed_by_joblib(by_joblib, expected, "torch")
trained, losses = timed("Synkro (2 workers)", on_the_workers)

for one, two, three in zip(
    expected.parameters(), beside.parameters(), trained.parameters(), strict=True
):
    assert torch.allclose(two, one, rtol=1e-6, atol=1e-9)
    assert torch.allclose(three, one, rtol=1e-6, atol=1e-9)
before, after = (nn.functional.mse_loss(each(inputs), targets).item() for each in (model, trained))
assert np.allclose(losses, expected_losses, rtol=1e-6)
assert after < before * 0.6
print(f"{len(batches)} steps: mean squared error {before:.3f} before, {after:.3f} after")

figure, axes = plt.subplots()
axes.plot(expected_losses, linewidth=6, color="lightsteelblue", label="in one process")
axes.plot(losses, "o-", color="C1", label="on two workers")
axes.set(title="The same training", xlabel="step", ylabel="mean squared error of the batch", ylim=0)
axes.legend(frameon=False)
save(figure)

print("All assertions passed.")
