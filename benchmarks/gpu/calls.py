"""What calls cost, what many of them leave behind, and how fast ranks agree."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import synkro
from synkro.controller.placement.placement import SOCKETS
from synkro.machine import readable_bytes

from ..common import Side, paired, readable
from ..endurance import census
from ..findings import SYNKRO, Findings, layouts
from ..multi_gpu import LOOPBACK, Round, fork, nccl_serves
from ..ranks import Ranks, settle
from .copies import TIMEOUT, one_worker
from .sections import run_program, take_over

if TYPE_CHECKING:
    from .sections import Section

GROWTH = {
    "resident memory": ("bytes", 1 << 20),
    "device memory": ("bytes", 1 << 21),  # it is taken in pieces of so much
    "arrays on the device": ("bytes", 0),
    "descriptors": ("", 0),
}
"""What may not grow, with its unit, and by how much it may waver."""

LOOK = "import cupy; free, total = cupy.cuda.Device(0).mem_info; print(total - free)"


# ── a call ───────────────────────────────────────────────────────────────────────────────────────


def call(section: Section, count: int, alone: float, calls: int, runs: int) -> None:
    """What does a call add to a function that keeps the GPU busy for a millisecond?

    The function's own time is taken by CUDA's events on the worker; nothing but a number is copied.
    """
    with one_worker() as session:
        numbers = session.shared(np.zeros(count, np.float32))

        def work(rounds):
            value = numbers.value
            for _ in range(rounds):
                synkro.xp().add(value, 1, out=value)
            return value[0]

        def timed(rounds):
            cuda = synkro.xp().cuda
            settle(synkro.xp())
            if not hasattr(cuda, "get_elapsed_time"):
                start = time.perf_counter()
                work(rounds)
                settle(synkro.xp())
                return time.perf_counter() - start
            begin, end = cuda.Event(), cuda.Event()
            begin.record()
            work(rounds)
            end.record()
            end.synchronize()
            return cuda.get_elapsed_time(begin, end) / 1000

        busy = session.function(work, bcast_inputs=["rounds"])
        clock = session.function(timed, bcast_inputs=["rounds"])
        has_events = session.function(
            lambda: hasattr(synkro.xp().cuda, "get_elapsed_time"), outputs="min"
        )
        if not has_events():
            section.note("no elapsed time of events here: the function's own time is of the wall clock")
        empty = session.function(lambda: None, outputs=[])
        before = busy(1)
        section.check("the function does its work", busy(3) == before + 3)
        a_round = min(clock(100) for _ in range(5)) / 100
        rounds = max(1, round(alone / a_round))
        sides = [
            Side("call", lambda: busy(rounds), calls=calls, warm=3),
            Side("alone", lambda: clock(rounds), calls=calls, warm=3, own_clock=True),
            Side("empty call", empty, calls=calls, warm=3),
        ]
        samples = paired(sides, runs)
        section.table(f"a function of {rounds} kernels", samples)
        section.figure("the function alone", np.median(samples["alone"]), "s")
        section.figure("a call of it", np.median(samples["call"]), "s")
        section.ratio("call ÷ function alone, of 1 ms", samples["call"], samples["alone"], at_most=1.1)
        section.figure("empty call", np.median(samples["empty call"]), "s", at_most=25e-6)


# ── endurance ────────────────────────────────────────────────────────────────────────────────────


def device_memory() -> int:
    """Bytes that are taken of the first GPU, as a process sees it that is there for nothing else."""
    status, output = run_program([sys.executable, "-c", LOOK], TIMEOUT)
    if status != 0:
        raise RuntimeError(f"no process could look at the GPU's memory: {output}")
    return int(output.split()[-1])


def endurance(section: Section, calls: int, cycles: int) -> None:
    """Does anything grow, on the GPU, in the main process or in the worker?"""
    with one_worker() as session:
        x = session.data(np.ones((1000, 10), np.float32))
        mean = session.function(lambda x: x.mean(axis=0))
        large = session.function(lambda x: synkro.xp().ones(100_000), outputs="sum")
        indices = np.arange(0, 1000, 3)

        def held() -> tuple[int, int]:
            cupy = synkro.xp()
            free, total = cupy.cuda.Device().mem_info
            return total - free, cupy.get_default_memory_pool().used_bytes()

        look = session.function(held, outputs=("max", "max"))

        def call_once(number: int) -> None:
            match number % 4:
                case 0:
                    mean(x)
                case 1:
                    mean(x, batch=indices)
                case 2:
                    mean(x, num_slices=3)
                case 3:
                    large(x)

        def holds() -> dict[str, int]:
            memory, arrays = look()
            device = {"device memory": int(memory), "arrays on the device": int(arrays)}
            return {**census((os.getpid(), *session.pids)), **device}

        for number in range(max(8, calls // 10)):
            call_once(number)
        before = holds()
        for number in range(calls):
            call_once(number)
        growth(section, f"{calls} calls", before, holds())
        section.check("the last call is right", bool((mean(x) == 1).all()))
    forks(section, cycles)


def forks(section: Section, cycles: int) -> None:
    """Start a worker, call it and close it, as often as there is time for."""

    def cycle() -> bool:
        with one_worker() as session:
            return session.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4

    def holds() -> dict[str, int]:
        return {**census([os.getpid()]), "device memory": device_memory()}

    right = [cycle(), cycle()]
    before = holds()
    start = time.monotonic()
    while len(right) - 2 < cycles and section.left() > 8:
        right.append(cycle())
    count, seconds = len(right) - 2, time.monotonic() - start
    section.check(f"{count} times fork, a call and close", all(right))
    if count:
        section.figure("fork, a call and close", seconds / count, "s")
        growth(section, f"{count} times fork and close", before, holds())
    if count < cycles:
        why = f"{count} fitted into the time of its section ({seconds:.0f} s; --cycles takes them all)"
        section.miss(f"{cycles} times fork and close", why)


def growth(section: Section, title: str, before: dict[str, int], after: dict[str, int]) -> None:
    """The growth of what has a name in ``GROWTH``, and the largest of all the rest together."""
    grown = {what: after[what] - before[what] for what in after}
    section.keep(f"held over {title}", {"before": before, "after": after})
    for what, (unit, limit) in GROWTH.items():
        if what in grown:
            section.figure(f"{title}: growth of {what}", grown.pop(what), unit, at_most=limit)
    rest = f"{title}: growth of {', '.join(grown)}"
    section.figure(rest, max(grown.values()), "", at_most=0)


# ── collectives ──────────────────────────────────────────────────────────────────────────────────


def collectives(section: Section, sizes: list[int], turn: float, runs: list[int]) -> None:
    """How fast do ranks add up an array, beside NCCL without Synkro?

    Where NCCL does not serve several ranks on one GPU, beside a copy from the device to pinned memory;
    and both ways are measured, through host memory and over loopback sockets.
    """
    (layout,) = layouts(section.gpus, [max(2, section.gpus)])
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # for the bare one; from NCCL 2.30 on
    settings = argparse.Namespace(sizes=sizes, turn=turn, runs=runs)
    there = Round(layout, settings, Findings(), alone=None)
    with Ranks(layout.devices, "nccl", max(5.0, section.left() / 2)) as there.bare:
        both = not nccl_serves(layout, {}) and nccl_serves(layout, {SOCKETS: "1"})
        os.environ[SOCKETS] = ""
        one_way(section, there, section.left() / (1 + both))
        if both:
            os.environ[SOCKETS] = "1"
            one_way(section, there, section.left())


def one_way(section: Section, there: Round, seconds: float) -> None:
    """On which way Synkro's ranks reduce arrays, and how fast they do; in so many seconds."""
    there.findings = findings = Findings()
    copies, ways, times = {}, section.record.setdefault("ways", {}), []
    with contextlib.ExitStack() as stack:
        stack.callback(synkro.close)
        start = time.monotonic()
        way, text = fork(there.layout)
        if way in ways:
            section.miss(LOOPBACK, text)
            return
        ways[way] = [text]
        copy = synkro.function(copy_out, bcast_inputs=["nbytes"], outputs=None)
        for nbytes in there.settings.sizes:
            side = Side("copy", lambda n=nbytes: max(copy(n)), own_clock=True)
            seen = paired([side], there.settings.runs[0])["copy"]
            copies[f"all-reduce, {readable_bytes(nbytes)}"] = nbytes, seen
        section.keep(f"copies, {way}", {what: seen for what, (_, seen) in copies.items()})
        there.run("all_reduce", start + seconds - 8 - time.monotonic())
    section.keep(f"all_reduce, {way}", findings.rows)
    speeds = [row for row in findings.rows if "GB/s algbw" in (row["unit"], row.get("of"))]
    for what, (nbytes, copied) in copies.items():
        found = {row["side"]: row["median"] for row in speeds if row["what"] == what}
        if SYNKRO not in found:
            continue
        taken = nbytes / 1e9 / found[SYNKRO]
        section.figure(f"{what}, {way}", taken, "s")
        times.append(f"{readable_bytes(nbytes)} {readable(taken, 's')}")
        beside = [side for side in found if side.startswith(f"{SYNKRO} ÷")]
        for side in beside:
            peer = side.removeprefix(f"{SYNKRO} ÷ ")
            section.figure(f"{what}, {way}: time ÷ {peer}", 1 / found[side], "×", at_most=1.05)
        if not beside:
            section.figure(f"{what}, {way}: time ÷ copy to the host", taken / np.median(copied), "×")
    ways[way].append(f"{way}: {', '.join(times)}")
    missing = [{**miss, "layout": f"{miss['layout']}, {way}"} for miss in findings.missing]
    take_over(section, missing)


def copy_out(nbytes):
    """Seconds for a bare copy of so much from the device to pinned memory."""
    cupy = synkro.xp()
    runtime = cupy.cuda.runtime
    source, target = cupy.zeros(nbytes, "uint8"), cupy.cuda.alloc_pinned_memory(nbytes)
    runtime.deviceSynchronize()
    start = time.perf_counter()
    runtime.memcpyAsync(target.ptr, source.data.ptr, nbytes, runtime.memcpyDeviceToHost, 0)
    runtime.deviceSynchronize()
    return time.perf_counter() - start
