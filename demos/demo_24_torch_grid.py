"""
Two by two
==========

The network lies in halves within each pair of workers, and the rows are split over the pairs::

    workers 0, 1   one half each   the first rows of the batch      ┐ gradients are averaged over the
    workers 2, 3   one half each   the other rows                   ┘ pairs: 0 with 2, and 1 with 3

``synk.split(color)`` makes worlds of the workers of one color. Within its ``pair`` a worker adds up the
halves of the network, as in demo 22. ``across`` the pairs it averages its gradients with the worker
that has the same half, weighted by rows. The losses are those of the whole network, in one process.
"""

import warnings

import numpy as np
import torch
from matplotlib import pyplot as plt
from pictures import WORKERS, save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import synkro as synk

EPOCHS, BATCH, UNITS, RATE = 3, 64, 100, 0.003

warnings.filterwarnings("ignore", "4 CPU workers")  # on a small machine they take turns
synk.fork(4, devices="cpu")
digits = load_digits()  # 8 x 8 pixels from 0 to 16
x_train, x_test, t_train, t_test = map(
    torch.tensor, train_test_split(digits.data / 16, digits.target, random_state=0)
)

# %%
# The workers 0 and 2 have one half, 1 and 3 the other.


def half(number):
    """One half of the units of two layers."""
    torch.manual_seed(number)
    return nn.ModuleList([nn.Linear(64, UNITS), nn.Linear(UNITS, 10)]).double()


mine = {}  # what each worker has for itself


@synk.function(outputs=[])
def begin():
    mine["half"] = half(synk.rank() % 2)
    mine["optimizer"] = torch.optim.Adam(mine["half"].parameters(), lr=RATE)


# %%
# In a pair, both workers gather the rows of both. Each puts them through its half.


def scores(x, pair):
    first, second = mine["half"]
    return pair.all_reduce(second(torch.relu(first(x))), "sum")


@synk.function
def step(x, t):
    pair, across = synk.split(synk.rank() // 2), synk.split(synk.rank() % 2)
    x, t = pair.all_gather(x), pair.all_gather(t)  # the rows of both
    mine["optimizer"].zero_grad()
    loss = nn.functional.cross_entropy(scores(x, pair), t)
    (loss / pair.size()).backward()  # the gradients are those of the sum of both losses
    for weights in mine["half"].parameters():
        weights.grad = across.all_reduce(weights.grad, weight=len(x))
    mine["optimizer"].step()
    return loss


@synk.function
def right(x, t):
    pair = synk.split(synk.rank() // 2)
    x, t = pair.all_gather(x), pair.all_gather(t)
    with torch.no_grad():
        return (scores(x, pair).argmax(dim=1) == t).double().mean()


# %%
# The same network in one process is trained along. The losses are equal, to rounding, in all steps.


class Whole(nn.Module):
    """Both halves of the network."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList([half(0), half(1)])

    def forward(self, x):
        return sum(second(torch.relu(first(x))) for first, second in self.halves)


begin()
whole = Whole()
optimizer = torch.optim.Adam(whole.parameters(), lr=RATE)
rng = np.random.default_rng(0)
for epoch in range(EPOCHS):
    for rows in np.array_split(rng.permutation(len(x_train)), len(x_train) // BATCH):
        loss = step(x_train[rows], t_train[rows])
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(whole(x_train[rows]), t_train[rows])
        expected.backward()
        optimizer.step()
        assert np.isclose(loss, expected.item(), rtol=1e-6)
    print(f"epoch {epoch + 1}: loss {loss:.6f}, in one process {expected.item():.6f}")

# %%
# So are the halves in the end, and what they read.

for rank in range(4):
    trained = synk.fetch(mine, rank=rank)["half"]
    for one, other in zip(trained.parameters(), whole.halves[rank % 2].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)
score = right(x_test, t_test)
assert np.isclose(score, (whole(x_test).argmax(dim=1) == t_test).double().mean().item())
assert score > 0.9
print(f"2 x 2 workers read {score:.1%} of {len(t_test)} other digits")

# %%
# Of a batch, each worker computes a quarter of the hidden units: those of its half, for the rows of its
# pair.


@synk.function(outputs="gather")
def hidden(x):
    x = synk.split(synk.rank() // 2).all_gather(x)
    with torch.no_grad():
        return torch.relu(mine["half"][0](x))


figure, axes = plt.subplots()
quarters = hidden(x_test[:16]).reshape(2, 2, 8, UNITS)  # pairs, halves, rows, units
units = np.vstack([np.hstack(pair) for pair in quarters])
axes.imshow(units, cmap="gray_r", aspect="auto", interpolation="nearest")
for rank, color in enumerate(WORKERS):
    left, top = rank % 2 * UNITS - 0.5, rank // 2 * 8 - 0.5
    axes.add_patch(plt.Rectangle((left, top), UNITS, 8, color=color, alpha=0.4, linewidth=0))
    axes.text(left + 32, top + 4, f"worker {rank}", color="white", size=16, backgroundcolor=color)
axes.set(title="Who computes which hidden units", xlabel="200 units, in halves")
axes.set(ylabel="16 rows of a batch, over pairs")
save(figure)

print("All assertions passed.")
