"""Inputs on their way to the GPU: how fast, beside computation, and more than fits."""

from __future__ import annotations

import functools
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import synkro
from synkro.machine import available_cores, available_memory

from ..common import Side, paired
from ..ranks import Ranks, RanksFailed, reason, settle

if TYPE_CHECKING:
    from .sections import Section

WIDTH = 1024
"""float32 numbers in a row: 4 KB."""

PINNED, PAGEABLE = "bare pinned memcpyAsync", "bare pageable memcpyAsync"
TIMEOUT = 100.0
DEVICE_LIMIT = 4e9
"""Bytes of device memory that a large input may take."""

A_SECOND = 1.2e9
"""Bytes of a large input that are written and read twice in a second."""


def one_worker() -> synkro.Session:
    return synkro.Session(devices=["cuda:0"], timeout=TIMEOUT, verbose=False)


def pattern(start: int, stop: int, out: Any = None) -> Any:
    """Rows of small integers: sums of them are exact."""
    rows, columns = np.arange(start, stop) % 251, np.arange(WIDTH) % 7
    return np.add(rows[:, None].astype(np.float32), columns.astype(np.float32), out=out)


def write_pattern(x: synkro.Data) -> float:
    """Fill *x*, by all cores, and return the sum: views of it must not outlive this."""
    step, rows = 1 << 14, x.data

    def write(start: int) -> float:
        stop = min(start + step, len(rows))
        pattern(start, stop, rows[start:stop])
        return float(rows[start:stop].sum(dtype=np.float64))

    with ThreadPoolExecutor(available_cores()) as threads:
        return sum(threads.map(write, range(0, len(rows), step)))


def made(session: synkro.Session, nbytes: int) -> tuple[synkro.Data, float]:
    """Rows of about so many bytes in shared memory, and their sum."""
    x = session.data(shape=(nbytes // (4 * WIDTH), WIDTH), dtype="float32")
    return x, write_pattern(x)


# ── on the worker ────────────────────────────────────────────────────────────────────────────────


def corner(x):
    return x[0, 0]


def total(x):
    return x.sum(dtype="float64")


def climb(x, rounds):
    """Take one step up so many times; the highest place of the first column."""
    xp = synkro.xp()
    y = xp.add(x, 1)
    for _ in range(rounds - 1):
        xp.add(y, 1, out=y)
    return y[:, 0].max()


def climb_alone(rows, rounds, times):
    """Seconds for the same on rows that lie on the GPU, so many times one after the other."""
    xp = synkro.xp()
    x = on_the_device(rows)
    settle(xp)
    start = time.perf_counter()
    for _ in range(times):
        climb(x, rounds)
    settle(xp)
    return time.perf_counter() - start


@functools.lru_cache(maxsize=1)
def on_the_device(rows):
    return synkro.xp().zeros((rows, WIDTH), "float32")


@functools.lru_cache(maxsize=1)
def pageable(nbytes):
    return np.ones(nbytes, np.uint8), synkro.xp().zeros(nbytes, "uint8")


def copy_pageable(nbytes):
    """Seconds for a bare copy of memory as the operating system gives it."""
    source, target = pageable(nbytes)
    runtime = synkro.xp().cuda.runtime
    runtime.deviceSynchronize()
    start = time.perf_counter()
    runtime.memcpyAsync(target.data.ptr, source.ctypes.data, nbytes, runtime.memcpyHostToDevice, 0)
    runtime.deviceSynchronize()
    return time.perf_counter() - start


def total_and_memory(x):
    """The sum, and bytes: of CuPy's pool, and all that is taken of the GPU, by whomever."""
    cupy = synkro.xp()
    free, there_is = cupy.cuda.Device().mem_info
    return x.sum(dtype="float64"), cupy.get_default_memory_pool().total_bytes(), there_is - free


# ── sections ─────────────────────────────────────────────────────────────────────────────────────


def transfer(section: Section, nbytes: int, runs: int) -> None:
    """How fast does an input reach the GPU, beside a bare copy of as many bytes?

    The function only looks at one number.  Floor: one bare cudaMemcpyAsync from pinned memory.
    """
    with one_worker() as session, Ranks(["cuda:0"], "none", TIMEOUT) as bare:
        x, expected = made(session, nbytes)
        nbytes = x.size * 4
        look = session.function(corner, outputs="sum")
        add_up = session.function(total, outputs="sum")
        slow_copy = session.function(copy_pageable, bcast_inputs=["nbytes"], outputs="max")
        for function in (look, add_up):  # sent and compiled
            function(np.ones((2, WIDTH), np.float32))
        start = time.perf_counter()
        look(x)
        first = time.perf_counter() - start
        section.check("sum of all rows", float(add_up(x)) == expected)

        def write() -> tuple[()]:
            x[0, 0] = x[0, 0] + 1
            return ()

        def seen() -> None:
            if look(x) != x[0, 0]:
                raise AssertionError("a call saw an old value")

        sides = [
            Side("Synkro", seen, prepare=write),
            Side(PAGEABLE, lambda: slow_copy(nbytes), own_clock=True),
        ]
        try:
            bare.ask("copy", nbytes=nbytes)
            sides.append(Side(PINNED, lambda: bare.ask("copy", nbytes=nbytes)[0], own_clock=True))
        except RanksFailed as error:
            section.miss(PINNED, reason(error))
        samples = paired(sides, runs)
        section.table(f"{nbytes} bytes to the GPU", samples)
        speed(section, "Synkro", nbytes, samples["Synkro"])
        speed(section, PAGEABLE, nbytes, samples[PAGEABLE])
        rate = None
        if PINNED in samples:
            rate = nbytes / np.median(samples[PINNED])
            speed(section, PINNED, nbytes, samples[PINNED])
            section.ratio(f"Synkro ÷ {PINNED}", samples[PINNED], samples["Synkro"], at_least=0.9)
        section.ratio(f"Synkro ÷ {PAGEABLE}", samples[PAGEABLE], samples["Synkro"], at_least=2.5)
        section.figure(
            "registration: first call beyond others", first - np.median(samples["Synkro"]), "s"
        )
        unchanged(section, session, x, runs)
        other_ways(section, session, nbytes, runs, rate)


def speed(section: Section, name: str, nbytes: int, seconds: Any) -> None:
    section.figure(name, nbytes / np.median(seconds) / 1e9, "GB/s")


def unchanged(section: Section, session: synkro.Session, x: synkro.Data, runs: int) -> None:
    """A broadcast input that nobody wrote to is still on the device; one that was, is copied."""
    look = session.function(corner, outputs="mean", bcast_inputs=["x"])
    empty = session.function(lambda: None, outputs=[])
    small = session.data(pattern(0, 16))
    sides = [
        Side("unchanged broadcast input", lambda: look(x), calls=10, warm=3),
        Side("one of 64 KB", lambda: look(small), calls=50, warm=3),
        Side("empty call", empty, calls=50, warm=3),
    ]
    samples = paired(sides, runs)
    section.table("calls without a copy", samples)
    large, little, none = (np.asarray(samples[side.name]) for side in sides)
    section.figure("unchanged broadcast input, a call", np.median(large), "s", at_most=0.7e-3)
    beyond = np.median(little - none)
    section.figure("one of 64 KB: beyond an empty call", beyond, "s", at_most=40e-6)
    fresh = []
    for value in (-1.0, -2.0):
        x[0, 0] = value
        fresh.append(look(x) == value)
    section.check("a broadcast input that was written to is copied", all(fresh))


def other_ways(
    section: Section, session: synkro.Session, nbytes: int, runs: int, rate: float | None
) -> None:
    """Rows that a batch picks, and a file that is mapped, beside a bare copy at *rate*, bytes/s."""
    look, add_up = session.function(corner, outputs="sum"), session.function(total, outputs="sum")
    rows = pattern(0, nbytes // (4 * WIDTH))
    picked = np.random.default_rng(0).permutation(len(rows))[: len(rows) // 2]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "rows.npy"), rows)
        mapped = session.data(np.load(Path(folder, "rows.npy"), mmap_mode="r"))
        held = session.data(rows)
        for name, given, batch in (
            ("half of the rows, picked at random", held, picked),
            ("memory-mapped file", mapped, None),
        ):
            selected = rows if batch is None else rows[batch]
            call = functools.partial(look, given, batch=batch)
            start = time.perf_counter()
            call()
            first = selected.nbytes / (time.perf_counter() - start)
            same = float(add_up(given, batch=batch)) == selected.sum(dtype=np.float64)
            section.check(f"sum: {name}", same)
            samples = paired([Side(name, call)], max(3, runs // 3))
            section.table(name, samples)
            speed(section, name, selected.nbytes, samples[name])
            if rate is not None:
                later = selected.nbytes / np.median(samples[name]) / rate
                of_file = given is mapped
                section.figure(f"{name} ÷ {PINNED}", later, "×", at_least=0.9 if of_file else 0.8)
                if of_file:
                    section.figure(f"{name}, first call ÷ {PINNED}", first / rate, "×", at_least=0.6)


def overlap(section: Section, nbytes: int, slices: int, runs: int) -> None:
    """Is a slice copied while the one before computes, where both take about as long?

    Floor: of so many slices, the first copy and the last computation have nothing beside them.
    """
    with one_worker() as session:
        x, _ = made(session, nbytes)
        rows = len(x) // slices
        look = session.function(corner, outputs="sum")
        work = session.function(climb, outputs="max", bcast_inputs=["rounds"])
        alone = session.function(climb_alone, bcast_inputs=["rows", "rounds", "times"])

        def write() -> tuple[()]:
            x[0, 0] = 1 - x[0, 0]
            return ()

        copy = Side("copy, in one piece", lambda: look(x), prepare=write)
        alone(rows, 2, 1)
        paired([copy], 1)
        a_slice = np.median(paired([copy], 3)[copy.name]) / slices
        many = 64
        a_round = min(alone(rows, many, 1) for _ in range(3)) / many
        rounds = max(1, round(a_slice / a_round))
        highest = x[:, 0].max() + rounds
        section.check("result of slices", work(x, rounds, num_slices=slices) == highest)
        sides = [
            Side("both, in slices", lambda: work(x, rounds, num_slices=slices), prepare=write),
            copy,
            Side("computation", lambda: alone(rows, rounds, slices), own_clock=True),
        ]
        samples = paired(sides, runs)
        section.table(f"{slices} slices, {rounds} rounds", samples)
        both, copies, computations = (np.asarray(samples[side.name]) for side in sides)
        section.ratio("computation ÷ copy, as calibrated", computations, copies)
        name = f"{slices} slices ÷ (copy + computation)"
        section.ratio(name, both, copies + computations, at_most=0.57)


def memory(section: Section, nbytes: int, slices: int, limited: bool) -> None:
    """How much device memory does a large input take, that is reduced in slices?

    *limited*: it takes no more than half of the host's free memory.
    """
    fits = nbytes
    if limited:
        fits = min(available_memory() // 2, int(section.left() * A_SECOND))
    if nbytes > fits:
        why = f"half of the free memory, or the time, is enough for {fits / 1e9:.1f} GB (--memory)"
        section.miss(f"an input of {nbytes / 1e9:.1f} GB", why)
    with one_worker() as session:
        reduce = session.function(total_and_memory, outputs=("sum", "max", "max"))
        before = reduce(np.ones((2, WIDTH), np.float32))[2]
        start = time.perf_counter()
        x, expected = made(session, min(nbytes, fits))
        section.figure("input", x.size * 4 / 1e9, "GB")
        section.figure("written to shared memory in", time.perf_counter() - start, "s")
        speeds = []
        for name in ("first call, which registers it", "second call"):
            start = time.perf_counter()
            sum_, pool, taken = reduce(x, num_slices=slices)
            seconds = time.perf_counter() - start
            section.check(f"sum, {name}", float(sum_) == expected)
            section.figure(name, x.size * 4 / seconds / 1e9, "GB/s")
            speeds.append(1 / seconds)
        section.figure("first ÷ second", speeds[0] / speeds[1], "×", at_least=0.6)
        section.figure("device memory taken at rest, by all", before / 1e9, "GB")
        section.figure("CuPy's pool at most", pool / 1e9, "GB")
        section.figure(
            "device memory taken at most, by all", taken / 1e9, "GB", at_most=DEVICE_LIMIT / 1e9
        )
