"""Two ranks on one GPU that open each other's device memory: collectives and messages."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import synkro
from synkro import here
from synkro.machine import readable_bytes

from ..common import Side, paired
from ..ranks import settle
from .copies import TIMEOUT

if TYPE_CHECKING:
    from .sections import Section

PATHS = "SYNKRO_GPU_PATHS"

REDUCED_WITHIN = {1 << 10: 0.1e-3, 1 << 26: 0.5e-3, 1 << 30: 3e-3}
"""Seconds that an all-reduce of so many bytes may take."""

EXCHANGED_WITHIN = {1 << 10: 60e-6}
"""Seconds that an exchange of so many bytes may take."""

LARGE = 1 << 24
"""Bytes from which on an exchange is held against a bare copy on the device."""


def reduced(nbytes, rounds):
    """Seconds for an all-reduce in place, on this rank."""
    x = synkro.xp().zeros(nbytes // 4, "float32")
    return timed(lambda: synkro.all_reduce(x, "sum"), rounds)


def exchanged(nbytes, rounds):
    """Seconds until both ranks have what the other gave."""
    x = synkro.xp().zeros(nbytes // 4, "float32")
    return timed(lambda: synkro.exchange(x, 1 - synkro.rank()), rounds)


def copied(nbytes, rounds):
    """Seconds for a bare copy on the device, of rank 0 alone."""
    x = synkro.xp().zeros(nbytes // 4, "float32")
    y = synkro.xp().empty_like(x)
    return timed(
        lambda: y.data.copy_from_device_async(x.data, nbytes), rounds if not synkro.rank() else 0
    )


def timed(step, rounds):
    synkro.barrier()
    step()
    settle(synkro.xp())
    start = time.perf_counter()
    for _ in range(rounds):
        step()
    settle(synkro.xp())
    return (time.perf_counter() - start) / max(1, rounds)


def results(count):
    """A number for each collective, of arrays that differ from rank to rank."""
    xp, rank = synkro.xp(), synkro.rank()
    x = xp.sin(xp.arange(count, dtype="float32")) * (1 + rank)
    found = [synkro.all_reduce(x, op) for op in ("sum", "mean", "max", "prod")]
    found += [synkro.broadcast(x, root=1), synkro.all_gather(x), synkro.reduce_scatter(x, "sum")]
    found += [synkro.all_to_all(x), synkro.scatter(x, root=1), synkro.exchange(x, 1 - rank)]
    return xp.concatenate(found)


def near():
    """Whether this rank opens the other's memory; NCCL, which ``collectives`` measures, is put aside."""
    here.rank.comm.links._gpu = None
    return int(here.rank.comm._peers is not None)


def session_of(paths: str) -> synkro.Session:
    os.environ[PATHS] = paths
    return synkro.Session(devices=["cuda:0", "cuda:0"], timeout=TIMEOUT, verbose=False)


def peers(section: Section, sizes: list[int], runs: list[int]) -> None:
    """How fast do two ranks on one GPU reduce and exchange arrays through each other's memory?

    Floor: an all-reduce reads both arrays and writes each of the two results once.
    """
    found: dict[str, Any] = {}
    for paths in ("", "new"):
        with session_of(paths) as session:
            opened = session.function(near, outputs="min")()
            if paths and not opened:
                section.miss("each other's device memory", "the ranks do not open it")
                return
            compute = session.function(results, bcast_inputs=["count"], outputs=None)
            found[paths] = [compute(count) for count in (7, 100_000)]
            if paths:
                speeds(section, session, sizes, runs)
    alike = all(
        np.array_equal(one, other)
        for before, after in zip(found[""], found["new"], strict=True)
        for one, other in zip(before, after, strict=True)
    )
    section.check("the results are those through host memory, bit by bit", alike)


def speeds(section: Section, session: synkro.Session, sizes: list[int], runs: list[int]) -> None:
    reduce, exchange, copy = (
        session.function(f, bcast_inputs=["nbytes", "rounds"], outputs="max")
        for f in (reduced, exchanged, copied)
    )
    for nbytes in sizes:
        rounds = 100 if nbytes <= 1 << 20 else 5
        asked = {"all-reduce": reduce, "exchange": exchange, "device copy": copy}
        sides = [
            Side(name, functools.partial(f, nbytes, rounds), own_clock=True) for name, f in asked.items()
        ]
        samples = paired(sides, runs[0] if nbytes >= LARGE else runs[-1])
        size = readable_bytes(nbytes)
        section.table(f"{size}, two ranks on one GPU", samples)
        limits = {"at_most": REDUCED_WITHIN[nbytes]} if nbytes in REDUCED_WITHIN else {}
        section.figure(f"all-reduce of {size}", np.median(samples["all-reduce"]), "s", **limits)
        limits = {"at_most": EXCHANGED_WITHIN[nbytes]} if nbytes in EXCHANGED_WITHIN else {}
        section.figure(f"exchange of {size}", np.median(samples["exchange"]), "s", **limits)
        if nbytes >= LARGE:
            ratio = f"exchange of {size}: bare device copy ÷ it"
            section.ratio(ratio, samples["device copy"], samples["exchange"], at_least=0.8)
