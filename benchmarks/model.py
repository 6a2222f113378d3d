"""A model on paper: the time of a step of synchronous training, from pieces that are measured.

A step of n workers takes what the slowest of them computes, an all-reduce of the gradient, and the
call; Synkro reduces after computing, so nothing overlaps::

    step(n) = compute · slowest(n) + 2 (n - 1)/n · bytes / bus + call

``compute`` is one worker's time for its share, while the others compute, too; ``slowest`` the expected
maximum of n draws around 1 with the measured spread (normal: Blom's formula for order statistics,
1958); ``bus`` the bus bandwidth of the all-reduce, as nccl-tests defines it.  Efficiency is
compute / step.

Over several hosts the gradient is reduced on each host first, and then between them; each host's network
carries 2 (hosts - 1)/hosts of its bytes.  Rows that the main process has written go through the network
of its host, to all others: that is the bound of scattered inputs::

    all-reduce(hosts) = all-reduce(one host) + 2 (hosts - 1)/hosts · bytes / network
    inputs(hosts)     = (hosts - 1)/hosts · bytes of all rows / network

Checked here on 1, 2 and 3 hosts that are made of namespaces: there the network is the machine's memory
and cores, one for all hosts together, so the bytes of all of them count.  Its speed is what MPI needs
for one message there and back.

Checked here: the pieces are measured with 1, 2 and 4 CPU workers that share nothing but the machine,
the prediction for a training step is set beside the measured one, and the error is shown.  Predicted:
ResNet-50 (25.6 M parameters of float32, 64 images a GPU, as the reference trained it, 7.5 times one GPU
on 8) on 8 GPUs and on larger worlds, with bus bandwidths that NVIDIA and others publish; those are
assumptions, named as such in the record, not measurements of ours.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import numpy as np

import synkro
from synkro.machine import available_cores

from . import peers
from .common import Report, main
from .simulated import flat, on_first_host, session

PARAMETERS = 25.6e6
BYTES = 4 * PARAMETERS
IMAGES = 64
SECONDS = {"V100 (PCIe)": 64 / 360, "A100": 64 / 800, "H100": 64 / 1400}
"""Assumed: 64 images of a step, at the images a second that are commonly published for ResNet-50 in
float32 or TF32 on one GPU."""

BUS = {
    "PCIe 3 (10 GB/s)": 10e9,
    "100 Gb/s network": 11e9,
    "NVLink 2, as 8 V100 have it (130 GB/s)": 130e9,
    "NVSwitch, as 8 H100 have it (360 GB/s)": 360e9,
}
"""Assumed bus bandwidths of large all-reduces, bytes a second, of the order that nccl-tests reports."""


NETWORKS = {"100 Gb/s a host": 11e9, "8 x 400 Gb/s a host": 360e9}
"""Assumed bandwidths of a host's network for large messages, bytes a second."""

ROWS = IMAGES * 8 * 3 * 224 * 224
"""Bytes of the images that the GPUs of one host take in a step, a byte a colour."""

GATEWAY = 2e-5
"""Assumed seconds that a call takes for each other host: a message there, and one back."""


@dataclass(frozen=True)
class Pieces:
    """What a step is made of, in seconds, and *spread*, the relative deviation of computing."""

    compute: float
    reduce: float
    call: float
    spread: float = 0.0
    inputs: float = 0.0


def slowest(count: int, spread: float) -> float:
    """The expected maximum of *count* normal draws around 1 (Blom 1958)."""
    if count < 2:
        return 1.0
    return 1 + spread * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def step(pieces: Pieces, count: int) -> float:
    """Seconds of a step of *count* workers."""
    return pieces.compute + waiting(pieces, count) + pieces.reduce + pieces.call + pieces.inputs


def waiting(pieces: Pieces, count: int) -> float:
    """Seconds that the others wait for the slowest of *count* workers, in the mean."""
    return pieces.compute * (slowest(count, pieces.spread) - 1)


def ring(nbytes: float, count: int, bus: float) -> float:
    """Seconds of an all-reduce at *bus* bytes a second (nccl-tests, PERFORMANCE.md)."""
    return 2 * (count - 1) / count * nbytes / bus


def ask(report: Report, runs: int, width: int, rows: int, steps: int) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((width, width)).astype("float32")
    errors = []
    for count in (1, 2, 4):
        with synkro.Session(devices=["cpu"] * count, threads_per_worker=1, verbose=False) as session:
            measured, pieces = _measured(session, weights, rows * count, runs, steps)
        predicted = step(pieces, count)
        errors.append(predicted / measured - 1)
        table = {
            "measured": [measured],
            "predicted": [predicted],
            "of it computing": [pieces.compute],
            "of it waiting for the slowest": [waiting(pieces, count)],
            "of it all-reduce": [pieces.reduce],
            "of it the call": [pieces.call],
        }
        workers = f"{count} worker{'s' if count > 1 else ''}"
        report.table(f"a training step of {workers}", table)
        report.figure(f"error of the model with {workers}", errors[-1] * 100, "%")
    if available_cores() < 4:
        report.note(
            f"4 workers share {available_cores()} cores: computing is measured as they share it."
        )
    _predict(report)
    lacking = "namespaces need root" if os.geteuid() else peers.missing("mpi")
    if lacking:
        report.absent("several hosts", lacking)
    else:
        _hosts(report, runs, weights, rows, steps)
    _predict_hosts(report)


def _hosts(report: Report, runs: int, weights, rows: int, steps: int) -> None:
    """Steps on 1, 2 and 3 hosts, a rank on each, with new rows in each step."""
    with flat([1, 1]) as peer:
        peer.seconds("echo", count=1 << 22)
        network = 2 * (1 << 24) / peer.seconds("echo", count=1 << 22, rounds=5)
    report.figure("network of the simulated hosts", network / 1e9, "GB/s")
    for hosts in (1, 2, 3):
        with session([1] * hosts, threads_per_worker=1) as workers:
            measured, pieces = _measured(workers, weights, rows * hosts, runs, steps, new=True)
        others = hosts - 1
        pieces = Pieces(
            pieces.compute,
            2 * others * weights.nbytes / network,
            pieces.call,
            pieces.spread,
            others * rows * weights.itemsize * len(weights) / network,
        )
        predicted = step(pieces, hosts)
        table = {
            "measured": [measured],
            "predicted": [predicted],
            "of it computing": [pieces.compute],
            "of it all-reduce": [pieces.reduce],
            "of it inputs": [pieces.inputs],
            "of it the call": [pieces.call],
        }
        name = f"{hosts} host{'s' if hosts > 1 else ''}"
        report.table(f"a training step on {name}, with new rows", table)
        report.figure(f"error of the model with {name}", (predicted / measured - 1) * 100, "%")


def _predict_hosts(report: Report) -> None:
    seconds, bus = SECONDS["H100"], BUS["NVSwitch, as 8 H100 have it (360 GB/s)"]
    tables: dict[str, dict[str, list[float]]] = {"its own rows": {}, "rows of the main process": {}}
    for net, speed in NETWORKS.items():
        for hosts in (8, 16, 64, 256, 1024):
            reduce = ring(BYTES, 8, bus) + ring(BYTES, hosts, speed)
            for whose, table in tables.items():
                inputs = (hosts - 1) * ROWS / speed if whose == "rows of the main process" else 0.0
                pieces = Pieces(seconds, reduce, 1e-4 + GATEWAY * hosts, 0.01, inputs)
                table[f"{net}, {hosts}"] = [seconds / step(pieces, 8 * hosts)]
    for whose, table in tables.items():
        title = f"ResNet-50 on hosts of 8 x H100: predicted efficiency, each host has {whose}"
        report.table(title, table, unit="", x="hosts")


def _measured(
    session, weights, rows: int, runs: int, steps: int, new: bool = False
) -> tuple[float, Pieces]:
    """Seconds of a whole step; and of its pieces, each measured by itself.

    *new*: there are new rows before each step.
    """
    w = session.shared(weights)
    x = session.data(np.ones((rows, len(weights)), np.float32))

    def gradient(x):
        hidden = np.tanh(x @ w.value)
        return x.T @ (1 - hidden * hidden) / len(x)

    def whole(x):
        w[...] -= 1e-6 * synkro.all_reduce(gradient(x), weight=len(x))

    def computing(x):
        start = time.perf_counter()
        w[...] -= 1e-6 * gradient(x)
        return time.perf_counter() - start

    functions = [
        session.function(whole, outputs=[]),
        session.function(computing, outputs=None),
        session.function(lambda x: None, outputs=[]),
    ]
    reduce = session.function(lambda: synkro.all_reduce(w.value), outputs=[])
    seconds: list[list[float]] = [[], [], [], []]
    spreads = []
    for f in functions:
        f(x)
    reduce()
    for _ in range(runs):
        turn: list[list[float]] = [[], [], [], []]
        for _ in range(steps):
            if new:
                x[0] = 1
            start = time.perf_counter()
            functions[0](x)
            turn[0].append(time.perf_counter() - start)
            each = functions[1](x)
            turn[1].append(float(np.mean(each)))
            spreads.append(float(np.std(each) / np.mean(each)))
            start = time.perf_counter()
            functions[2](x)
            turn[2].append(time.perf_counter() - start)
            start = time.perf_counter()
            reduce()
            turn[3].append(time.perf_counter() - start)
        for all_of_them, some in zip(seconds, turn, strict=True):
            all_of_them.append(float(np.median(some)))
    measured, compute, call, both = (float(np.median(some)) for some in seconds)
    return measured, Pieces(compute, max(0.0, both - call), call, float(np.median(spreads)))


def _predict(report: Report) -> None:
    for gpu, seconds in SECONDS.items():
        table = {}
        for net, bus in BUS.items():
            pieces = Pieces(seconds, ring(BYTES, 8, bus), 1e-4, 0.01)
            table[net] = [8 * seconds / step(pieces, 8)]
        report.table(f"ResNet-50 on 8 x {gpu}: predicted speed-up", table, unit="×")
    table = {}
    for net in ("100 Gb/s network", "NVSwitch, as 8 H100 have it (360 GB/s)"):
        for count in (8, 16, 32, 64, 128, 256):
            pieces = Pieces(SECONDS["H100"], ring(BYTES, count, BUS[net]), 1e-4, 0.01)
            table[f"{net}, {count}"] = [SECONDS["H100"] / step(pieces, count)]
    report.table("ResNet-50 on n x H100: predicted efficiency", table, unit="", x="GPUs")
    report.note(
        "Speeds of single GPUs and bus bandwidths are assumptions (see benchmarks/model.py); the "
        "reference reached 7.5 times one GPU on 8."
    )


if __name__ == "__main__":
    if not os.geteuid():
        on_first_host("benchmarks.model")
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 10, "width": 1024, "rows": 256, "steps": 10},
        quick={"runs": 3},
        smoke={"runs": 1, "width": 64, "rows": 32, "steps": 2},
    )
