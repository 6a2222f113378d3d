"""How fast do the ranks agree: on arrays, at a barrier, along a chain of functions, in a training step?

Floors, for two ranks and n bytes a rank.  An all-reduce of variables, which live in shared memory, reads
2n and writes 2n, each rank a half; of private arrays it also copies n in and n out on every rank.  A
barrier is one cache line's way there and one back.  A chain of functions whose results stay reads and
writes what the functions read and write; through the main process it also gathers and scatters.

Peers: torch.distributed with gloo, and MPICH through mpi4py, both reducing in place in private memory;
torch's DistributedDataParallel over gloo, one thread a process, for the training step.  Those that are
not installed are named as not measured.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

import synkro
from synkro import extensions
from synkro.machine import readable_bytes

from .common import Report, Side, main, paired
from .peers import Peer, missing

ROWS, HIDDEN = 256, 256


def timed_inside(body, rounds: int) -> float:
    """Seconds a round of *body*, the median on rank 0, each after a barrier."""
    seconds = []
    body()
    for _ in range(rounds):
        synkro.barrier()
        start = time.perf_counter()
        body()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def all_reduces(report: Report, peers: dict[str, Peer], sizes: list[int], runs: int) -> None:
    for nbytes in sizes:
        count, size = nbytes // 4, readable_bytes(nbytes)
        rounds = min(200, max(3, (1 << 26) // nbytes))
        variable = synkro.shared(np.zeros(count, np.float32))

        def inside(rounds=rounds, variable=variable):
            return timed_inside(lambda: synkro.all_reduce(variable, "sum"), rounds)

        def private(rounds=rounds, count=count):
            mine = np.zeros(count, np.float32)
            return timed_inside(lambda: synkro.all_reduce(mine, "sum"), rounds)

        of_variables = synkro.function(inside, inputs=[], outputs=None)
        of_arrays = synkro.function(private, inputs=[], outputs=None)
        sides = [
            Side(
                "Synkro, a variable, from the main process",
                lambda v=variable: synkro.all_reduce(v, "sum"),
                rounds,
                warm=2,
            ),
            Side("Synkro, a variable, in a function", lambda f=of_variables: f()[0], own_clock=True),
            Side("Synkro, a private array", lambda f=of_arrays: f()[0], own_clock=True),
        ]
        sides += [
            Side(
                name,
                lambda p=peer, n=count, k=rounds: p.seconds("all_reducer", count=n, rounds=k),
                own_clock=True,
            )
            for name, peer in peers.items()
        ]
        samples = paired(sides, runs)
        report.table(f"all-reduce of {size} over two ranks", samples)
        large = nbytes >= 1 << 20
        for name in peers:
            for mine in ("a variable, in a function", "a private array"):
                target = 1.0 if large else None
                if nbytes == 1 << 26 and name == "gloo":
                    target = 5.0 if "variable" in mine else 2.0
                report.ratio(
                    f"{name} ÷ {mine}, {size}",
                    samples[name],
                    samples[f"Synkro, {mine}"],
                    at_least=target,
                )
        del variable, inside, of_variables


def barriers(report: Report, runs: int) -> None:
    def many():
        start = time.perf_counter()
        for _ in range(1000):
            synkro.barrier()
        return (time.perf_counter() - start) / 1000

    loop = synkro.function(many, inputs=[], outputs=None)
    samples = paired([Side("Synkro", lambda: loop()[0], own_clock=True)], runs)
    report.table("a barrier in a hot loop, two ranks", samples)
    report.figure("a barrier", float(np.median(samples["Synkro"])), "s", at_most=10e-6)


def chain(report: Report, nbytes: int, runs: int) -> None:
    x = synkro.data(np.ones((nbytes // 4096, 1024), np.float32))
    staying = [
        synkro.function(fn, outputs="keep") for fn in (lambda x: x + 1, lambda x: x * 2, lambda x: x - 3)
    ]
    going = [
        synkro.function(fn, outputs="gather")
        for fn in (lambda x: x + 1, lambda x: x * 2, lambda x: x - 3)
    ]
    total = synkro.function(lambda x: x[:, 0].sum(dtype=np.float64), outputs="sum")
    between = [synkro.data(x[:]) for _ in range(2)]

    def through_main():
        value = going[0](x)
        for function, data in zip(going[1:], between, strict=True):
            data[...] = value
            value = function(data)
        return value

    def on_the_workers():
        value = x
        for function in staying:
            value = function(value)
        return value

    assert total(on_the_workers()) == through_main()[:, 0].sum(dtype=np.float64)
    samples = paired(
        [Side("through the main process", through_main), Side("kept", on_the_workers)], runs
    )
    report.table(f"three functions over {readable_bytes(nbytes)}", samples)
    report.ratio(
        "through the main process ÷ kept",
        samples["through the main process"],
        samples["kept"],
        at_least=2,
    )


def training(report: Report, peers: dict[str, Peer], steps: int, runs: int) -> None:
    rng = np.random.default_rng(0)
    first = synkro.shared(rng.standard_normal((64, HIDDEN), np.float32) / 8)
    bias = synkro.shared(np.zeros(HIDDEN, np.float32))
    second = synkro.shared(rng.standard_normal((HIDDEN, 10), np.float32) / 16)
    offset = synkro.shared(np.zeros(10, np.float32))
    params = [first, bias, second, offset]

    def loss_and_grad(x, labels):
        hidden = np.maximum(x @ first.value + bias.value, 0)
        scores = hidden @ second.value + offset.value
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(x))
        loss = -np.log(chances[rows, labels]).mean()
        chances[rows, labels] -= 1
        chances /= len(x)
        back = chances @ second.value.T
        back[hidden <= 0] = 0
        return loss, [x.T @ back, back.sum(0), hidden.T @ chances, chances.sum(0)]

    train = extensions.make_train_function(loss_and_grad, params, extensions.sgd(params, 0.01))
    x = synkro.data(rng.random((1797, 64), np.float32))
    y = synkro.data(rng.integers(10, size=1797))
    sides = [
        Side(
            "Synkro",
            lambda batch: train(x, y, batch=batch),
            steps,
            warm=5,
            prepare=lambda: (rng.permutation(1797)[:ROWS],),
        )
    ]
    if "gloo" in peers:
        sides.append(
            Side(
                "DistributedDataParallel",
                lambda: peers["gloo"].seconds("trainer", rows=ROWS, hidden=HIDDEN, rounds=steps),
                own_clock=True,
            )
        )
    samples = paired(sides, runs)
    report.table(f"a training step: 64 · {HIDDEN} · 10, {ROWS} rows", samples)
    if "gloo" in peers:
        name = "DistributedDataParallel"
        report.ratio(f"{name} ÷ Synkro", samples[name], samples["Synkro"], at_least=1)


def ask(report: Report, runs: int, sizes: list[int], nbytes: int, steps: int) -> None:
    with contextlib.ExitStack() as stack:
        peers = {}
        for name, kind in (("gloo", "gloo"), ("MPICH", "mpi")):
            if why := missing(kind):
                report.note(f"{name}: not measured, {why}")
                continue
            peers[name] = Peer(kind)
            stack.callback(peers[name].close)
        synkro.fork(2, threads_per_worker=1, verbose=False)
        stack.callback(synkro.close)
        all_reduces(report, peers, sizes, runs)
        barriers(report, runs)
        chain(report, nbytes, runs)
        training(report, peers, steps, runs)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 15,
            "sizes": [1 << 10, 1 << 20, 1 << 26, 1 << 28],
            "nbytes": 1 << 28,
            "steps": 100,
        },
        quick={"runs": 5},
        smoke={"runs": 2, "sizes": [1 << 10, 1 << 20], "nbytes": 1 << 22, "steps": 5},
    )
