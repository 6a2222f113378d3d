"""Model-parallel: a network whose halves lie on two workers, and meet after its third and sixth layers.

Chainer's guide to GPUs trains this network on two of them:

    worker 0   x ──┬── l1 ── l2 ── l3 ──┬── l4 ── l5 ── l6 ──┬── scores
    worker 1       └── l1 ── l2 ── l3 ──┴── l4 ── l5 ── l6 ──┘

Each worker makes its own half of the units, and no process has the whole network.  Where the halves
meet, ``all_reduce`` adds them up.  It is differentiable: its gradient is an ``all_reduce`` of the
gradients.  Every worker computes the same loss, of all rows of the batch, so each takes 1/size() of it.

    python demos/demo_22_torch_halves.py
"""

import numpy as np
import torch
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


def scores(x):
    first, second = mine["half"]
    h = torch.relu(synk.all_reduce(first(x), "sum"))
    return synk.all_reduce(second(h), "sum")


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


class Whole(nn.Module):
    """The same network in one process."""

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

for rank in range(n):
    trained = synk.fetch(mine, rank=rank)["half"]
    for one, other in zip(trained.parameters(), whole.halves[rank].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)
score = right(x_test, t_test)
assert np.isclose(score, (whole(x_test).argmax(dim=1) == t_test).double().mean().item())
assert score > 0.9
print(f"{n} workers, a half of the network on each, read {score:.1%} of {len(t_test)} other digits")

print("All assertions passed.")
