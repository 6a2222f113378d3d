"""
A network in halves
===================

This is model-parallel: the halves of a network lie on two workers, and meet after its third and sixth
layers. Chainer's guide to GPUs trains this network on two of them::

    worker 0   x ──┬── l1 ── l2 ── l3 ──┬── l4 ── l5 ── l6 ──┬── scores
    worker 1       └── l1 ── l2 ── l3 ──┴── l4 ── l5 ── l6 ──┘

Each worker makes its own half of the units, and no process has the whole network. Where the halves
meet, ``all_reduce`` adds them up. It is differentiable: its gradient is an ``all_reduce`` of the
gradients.
"""

import numpy as np
import torch
from matplotlib import pyplot as plt
from pictures import WORKERS, save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import synkro as synk

EPOCHS, BATCH, UNITS, RATE = 6, 64, 100, 0.003

n = synk.fork(2, devices="cpu")
digits = load_digits()  # 8 x 8 pixels from 0 to 16
x_train, x_test, t_train, t_test = map(
    torch.tensor, train_test_split(digits.data / 16, digits.target, random_state=0)
)

# %%
# What a worker has lies in a dict, which the functions refer to. Each worker fills its own.


def three_layers(inputs, outputs):
    first, second, third = nn.Linear(inputs, UNITS), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, outputs)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).double()


def half(number):
    """One half of the network: its two blocks of three layers."""
    torch.manual_seed(number)
    return nn.ModuleList([three_layers(64, UNITS), three_layers(UNITS, 10)])


mine = {}  # what each worker has for itself


@synk.function(outputs=[])
def begin():
    mine["half"] = half(synk.rank())
    mine["optimizer"] = torch.optim.Adam(mine["half"].parameters(), lr=RATE)


# %%
# Both workers get all rows of a batch. What a half says of them are parts of scores, which add up.


def part(x):
    first, second = mine["half"]
    return second(torch.relu(synk.all_reduce(first(x), "sum")))


def scores(x):
    return synk.all_reduce(part(x), "sum")


@synk.function(bcast_inputs=["x"], outputs="gather")
def parts(x):
    with torch.no_grad():
        return part(x)


# %%
# Every worker computes the same loss, of all rows of the batch, so each takes 1/size() of it.


@synk.function(bcast_inputs=["x", "t"])
def step(x, t):
    mine["optimizer"].zero_grad()
    loss = nn.functional.cross_entropy(scores(x), t)
    (loss / synk.size()).backward()  # the gradients are those of the sum of all ranks' losses
    mine["optimizer"].step()
    return loss


@synk.function(bcast_inputs=["x", "t"])
def right(x, t):
    with torch.no_grad():
        return (scores(x).argmax(dim=1) == t).double().mean()


# %%
# The same network in one process is trained along. The losses are equal, to rounding, in all steps.


class Whole(nn.Module):
    """Both halves of the network."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList([half(number) for number in range(n)])

    def forward(self, x):
        h = torch.relu(sum(first(x) for first, _ in self.halves))
        return sum(second(h) for _, second in self.halves)


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

for rank in range(n):
    trained = synk.fetch(mine, rank=rank)["half"]
    for one, other in zip(trained.parameters(), whole.halves[rank].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)
score = right(x_test, t_test)
assert np.isclose(score, (whole(x_test).argmax(dim=1) == t_test).double().mean().item())
assert score > 0.9
print(f"{n} workers, a half of the network on each, read {score:.1%} of {len(t_test)} other digits")

figure, (image, bars) = plt.subplots(1, 2, figsize=(6.4, 3.4), width_ratios=[1, 2.2])
image.imshow(x_test[0].reshape(8, 8).numpy(), cmap="gray_r")
image.set_title("a digit")
image.axis("off")
of_halves = parts(x_test[:1])
for rank, each in enumerate(of_halves):
    places = np.arange(10) + 0.4 * rank - 0.2
    bars.bar(places, each, 0.4, color=WORKERS[rank], label=f"worker {rank}'s half")
bars.plot(of_halves.sum(axis=0), "k_", markersize=17, markeredgewidth=3, label="their sum")
bars.set(xticks=range(10), title="The scores of the halves add up", xlabel="read as", ylabel="score")
bars.legend(frameon=False)
save(figure)

print("All assertions passed.")
