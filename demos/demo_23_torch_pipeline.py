"""
A pipeline of stages
====================

This is pipeline-parallel: the stages of a network lie on two workers, and micro-batches flow through
them. The first stage is on "dev0", the second on "dev1". A batch is cut into micro-batches. While the
second stage works on one of them, the first works on the next::

    dev0   forward 0 │ forward 1   │ forward 2   │ forward 3   │             │ backward 0 … 3 │ update
    dev1             │ both ways 0 │ both ways 1 │ both ways 2 │ both ways 3 │                │ update

What a stage hands on stays on its device until ``transfer`` copies it to the other one.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import synkro as synk

EPOCHS, BATCH, MICRO, UNITS, RATE = 4, 128, 4, 100, 0.003

synk.fork(devices="dev0->cpu;dev1->cpu")
digits = load_digits()  # 8 x 8 pixels from 0 to 16
x_train, x_test, t_train, t_test = map(
    torch.tensor, train_test_split(digits.data / 16, digits.target, random_state=0)
)


def stage(number):
    """One stage of the network."""
    torch.manual_seed(number)
    if number == 0:
        layers = nn.Linear(64, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.ReLU()
    else:
        layers = nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 10)
    return nn.Sequential(*layers).double()


mine = {}  # what each worker has for itself


def begin(number):
    mine["stage"] = stage(number)
    mine["optimizer"] = torch.optim.Adam(mine["stage"].parameters(), lr=RATE)
    mine["graphs"], mine["loss"] = {}, 0.0


# %%
# What the workers run: the first stage on "dev0", the second one on "dev1".


def forward(x, k):
    """The first stage, of micro-batch k; autograd's graph waits for the way back."""
    mine["graphs"][k] = mine["stage"](x.clone())  # the next call puts its own input in the place of x
    return mine["graphs"][k].detach()


def both_ways(h, t):
    """The second stage, forward and backward; returns the gradient of what came in."""
    h = torch.tensor(h, requires_grad=True)
    loss = nn.functional.cross_entropy(mine["stage"](h), t, reduction="sum") / BATCH
    loss.backward()
    mine["loss"] += loss.item()
    return h.grad


def backward(gradient, k):
    mine["graphs"].pop(k).backward(torch.tensor(gradient))


def update():
    mine["optimizer"].step()
    mine["optimizer"].zero_grad()
    loss, mine["loss"] = mine["loss"], 0.0
    return loss


# %%
# Results with ``outputs="keep"`` stay on their worker: the caller has a handle of them.

first = synk.function(forward, bcast_inputs=["k"], outputs="keep", target="dev0")
second = synk.function(both_ways, outputs="keep", target="dev1")
back = synk.function(backward, bcast_inputs=["k"], outputs=[], target="dev0")
updates = [synk.function(update, target=target) for target in ("dev0", "dev1")]
begins = [synk.function(begin, bcast_inputs=["number"], outputs=[], target=d) for d in ("dev0", "dev1")]
synk.distribute()


# %%
# Every call is submitted, and takes the futures of those before it as arguments. Each worker does its
# own in their order, and waits only for what it needs.


def step(x, t):
    """One batch through the pipeline, and back; returns its loss."""
    gradients = []
    for k, (part, labels) in enumerate(zip(x.chunk(MICRO), t.chunk(MICRO), strict=True)):
        arrived = synk.transfer(first.submit(part, k), "dev1")
        gradients.append(second.submit(arrived, labels))
    for k, gradient in enumerate(gradients):
        back.submit(synk.transfer(gradient, "dev0"), k)
    return [update.result() for update in [one.submit() for one in updates]][1]


# %%
# The same network in one process is trained along. The losses are equal, to rounding, in all steps.

for number, one in enumerate(begins):
    one(number)
whole = nn.Sequential(stage(0), stage(1))
optimizer = torch.optim.Adam(whole.parameters(), lr=RATE)
rng = np.random.default_rng(0)
for epoch in range(EPOCHS):
    order = rng.permutation(len(x_train))
    for rows in np.array_split(order[: len(order) // BATCH * BATCH], len(order) // BATCH):
        loss = step(x_train[rows], t_train[rows])
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(whole(x_train[rows]), t_train[rows])
        expected.backward()
        optimizer.step()
        assert np.isclose(loss, expected.item(), rtol=1e-6)
    print(f"epoch {epoch + 1}: loss {loss:.6f}, in one process {expected.item():.6f}")

trained = [synk.fetch(mine, rank=rank)["stage"] for rank in (0, 1)]
for one, other in zip(nn.Sequential(*trained).parameters(), whole.parameters(), strict=True):
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)
score = (trained[1](trained[0](x_test)).argmax(dim=1) == t_test).double().mean().item()
assert score > 0.85
print(f"A pipeline of two stages, one on each worker, reads {score:.1%} of {len(t_test)} other digits")

# %%
# A trace knows when each worker computed. Here it is of a step with a large batch.

large = x_train.repeat(6, 1), t_train.repeat(6)
step(*large)  # a first time, which makes room for it
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "step.json")
    with synk.trace(path):
        step(*large)
    events = json.loads(path.read_text())["traceEvents"]

figure, axes = plt.subplots(figsize=(6.4, 3.0))
lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
for name in ("forward", "both_ways", "backward"):
    runs = [each for each in events if each["name"] == "compute" and each["args"]["function"] == name]
    begins, durations = ([each[what] / 1000 for each in runs] for what in ("ts", "dur"))
    bars = axes.barh([lanes[each["tid"]] for each in runs], durations, left=begins, label=name)
    axes.bar_label(bars, range(MICRO), label_type="center", color="white")
axes.set(title="One batch, as four micro-batches through two stages", xlabel="ms", xlim=0)
axes.invert_yaxis()
figure.legend(loc="outside lower center", ncols=3, frameon=False)
save(figure)

print("All assertions passed.")
