"""Programs as users write them, with what type checkers are to see; nobody runs them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import synkro as synk

Array = NDArray[np.float64]
x = np.ones((8, 2))

# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────

assert_type(synk.fork(), int)
assert_type(synk.fork(2, seed=1, timeout=60.0, devices="cpu"), int)
assert_type(synk.fork(hosts=["h1", "h2:4"]), int)
assert_type(synk.size(), int)
synk.close()
with synk.Session(2, verbose=False) as session:
    assert_type(session.n_parallel, int)


# ── functions ────────────────────────────────────────────────────────────────────────────────────────


def loss(x: Array, w: Array, scale: float = 1.0) -> float:
    return float((x @ w).sum()) * scale


total = synk.function(loss, outputs="sum", bcast_inputs=["w", "scale"])
assert_type(total(x, np.ones(2)), float)
assert_type(total(x, w=np.ones(2), batch=slice(4), num_slices="auto", progress=True), float)
assert_type(total(x.tolist(), synk.data(np.ones(2))), float)
assert_type(total.submit(x, np.ones(2)), Future[float])
assert_type(total.submit(x, np.ones(2)).result(), float)
assert_type(total.options(timeout=2.0)(x, np.ones(2)), float)
assert_type(total.options(timeout=2.0).submit(x, np.ones(2)), Future[float])
assert_type(total.check(x, np.ones(2)), float)
assert_type(total.name, str)
total.as_serial(x, np.ones(2), scale=2.0)
each = synk.function(loss, outputs=None)
assert_type(each(x, np.ones(2)), list[float])
worst = synk.function(loss, outputs=max)
assert_type(worst(x, np.ones(2)), float)


@synk.function
def mean(x: Array) -> float:
    return float(x.mean())


@synk.function(outputs="gather", bcast_inputs="w")
def predicted(x: Array, w: Array) -> Array:
    return x @ w


@synk.function(outputs=None)
def places() -> tuple[int, str]:
    return synk.rank(), "here"


@synk.function(outputs="keep")
def features(x: Array) -> Array:
    return x * 2


@synk.function(outputs=["sum", "max"])
def several(x: Array) -> tuple[Array, Array]:
    return x.sum(0), x.max(0)


@synk.function(outputs={"low": "min", "high": "max"})
def ends(x: Array) -> dict[str, Array]:
    return {"low": x.min(0), "high": x.max(0)}


assert_type(mean(x), float)
assert_type(predicted(x, np.ones(2)), Array)
assert_type(places(), list[tuple[int, str]])
kept = features(x)
predicted(kept, np.ones(2))
several(x)[0]
ends(x)["low"]
synk.distribute()

alone = synk.function(loss, target=0)
assert_type(alone.submit(x, np.ones(2)).result(), float)


class Model:
    def __init__(self) -> None:
        self.w = np.ones(2)

    def score(self, x: Array) -> float:
        return float((x @ self.w).sum())


scored = synk.function(Model().score, outputs="sum")
assert_type(scored(x), float)
with synk.Session(2) as other:
    assert_type(other.function(loss, outputs=None)(x, np.ones(2)), list[float])

# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Trade:
    price: float


def valued(trade: Trade, rate: float = 0.0) -> Trade:
    return Trade(trade.price * (1 + rate))


def parsed(path: str, columns: int) -> Array:
    return np.zeros(columns)


assert_type(synk.map(valued, [Trade(1.0)]), list[Trade])
assert_type(synk.map(valued, [Trade(1.0)], common={"rate": 0.1}, progress=True), list[Trade])
assert_type(synk.map(parsed, ["a.csv"], [3], chunksize=2, timeout=5), list[Array])
assert_type(
    synk.map(valued, [Trade(1.0)], retries=2, errors="raise", checkpoint="a", max_tasks=3), list[Trade]
)
assert_type(synk.map(valued, [Trade(1.0)], errors="return"), list[Trade | synk.SynkroError])
lengths: Iterator[int] = synk.imap(len, ["a", "b"], ordered=False)
synk.imap(len, ["a"]).close()
for trade in synk.imap(valued, (Trade(n) for n in range(9))):
    assert_type(trade, Trade)
futures = [total.submit(x, np.ones(2)) for _ in range(3)]
for future in synk.as_completed(futures):
    assert_type(future.result(), float)

# ── data and variables ───────────────────────────────────────────────────────────────────────────────

rows = synk.data(x, name="rows", oversize=1.5)
assert_type(rows, synk.Data[np.float64])
assert_type(rows[2:], Array)
assert_type(rows.data, Array)
assert_type(rows.dtype, np.dtype[np.float64])
assert_type(synk.data(np.arange(10.0)).nbytes, int)
assert_type(synk.data("rows.npy"), synk.Data)
assert_type(synk.data([[1, 2]], dtype="f4"), synk.Data)
weights = synk.shared(np.zeros(2), name="w")
assert_type(weights, synk.Shared[np.float64])
assert_type(weights.value, Array)
assert_type(synk.shared(3.0), synk.Shared)
np.from_dlpack(rows)


def shown(rows: synk.Data, weights: synk.Shared[np.float64]) -> Array:
    print(rows)
    return weights.value


shown(rows, weights)
frames = synk.ring("/frames", slots=4, shape=(8, 2))
assert_type(frames, synk.Ring)
for frame in frames:
    assert_type(frame, synk.Data)
assert_type(synk.ring("/frames"), synk.RingWriter)
synk.set_value(0, weights, np.ones(2))
synk.broadcast(weights)
synk.all_reduce(weights, op="mean")
synk.save("state.npz")


@synk.function(outputs=[])
def step(x: Array) -> None:
    gradient = synk.all_reduce(x, "mean", weight=len(x)).mean(0)
    assert_type(synk.all_reduce(x), Array)
    total: float = synk.all_reduce(x.sum(), "sum")
    best: float = synk.all_reduce(float(x.max()), "max")
    print(total, best)
    assert_type(synk.all_gather(x, nd_up=1), Array)
    assert_type(synk.exchange(x, 1), Array)
    half = synk.split(synk.rank() // 2)
    assert half is not None
    assert_type(half.reduce_scatter(x, "sum"), Array)
    half.send(x, 0)
    weights.value = weights.value - 0.1 * gradient
    assert_type(synk.rank(), int)
    assert_type(synk.rng(), np.random.Generator)
    assert_type(synk.rows(), NDArray[np.int64])


step(rows)
with synk.trace():
    step(rows)
try:
    total(x, np.ones(2))
except synk.CallTimeout as late:
    print(late)
except synk.WorkerError as failed:
    assert_type(failed.rank, int)
