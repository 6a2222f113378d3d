"""Checks, with workers, that Synkro works on this machine; each says how to mend what does not."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import time
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ..api import xp
from ..controller.calls.serial import substituted
from ..controller.placement.placement import PATHS
from ..controller.session import Session
from ..devices import gpus
from ..errors import SharedMemoryError, SynkroError, counted, there_are
from ..machine import available_cores, readable_bytes
from ..memory.keeper import SHM_FOLDER
from ..memory.named import sweep
from ..memory.segment import Segment, shm_free

_DESCRIPTORS = 1024  # a program with many arrays needs so many
_REDUCED = 1 << 24  # elements of float32 that are reduced
_SLOWEST = 0.25  # the part of the speed of copying that a reduction should reach
_CALLS = 200  # whose clocks are compared

_MORE_MEMORY = (
    "Free memory, or raise the limit that is in the way (ulimit -v, or the container's); or use less "
    "data at once (check with --data), or map files (numpy.memmap)."
)

CHECKS = 11
"""The number of findings if the workers start."""


@dataclass(frozen=True)
class Finding:
    """What a check found: "ok", "warning", "failure" or "skipped", and what to do about it."""

    check: str
    status: str
    says: str
    remedy: str = ""


def findings(nbytes: int, devices: str | None) -> Iterator[Finding]:
    """All checks, one after the other, for programs with *nbytes* of shared memory on *devices*."""
    yield names()
    yield shared_memory(nbytes)
    yield open_files()
    yield from _with_workers(devices)
    seen = gpus.visible()
    yield device_memory(len(seen.gpus), seen.reason)
    if len(seen.gpus) < 2:
        reason = there_are(len(seen.gpus), "visible GPU") if seen.gpus else seen.reason
        yield Finding("peer access of GPUs", "skipped", reason)
        yield Finding("NCCL between all pairs", "skipped", reason)
        return
    yield peer_access(len(seen.gpus))
    yield pairs(len(seen.gpus))


def shared_memory(nbytes: int) -> Finding:
    """Whether *nbytes* of shared memory can be reserved, and where."""
    name = "shared memory"
    try:
        Segment.create(0, nbytes).close()
    except SharedMemoryError as error:
        return Finding(name, "failure", str(error), _MORE_MEMORY)
    free, wanted = shm_free(), f"{readable_bytes(nbytes)} can be had"
    if free >= nbytes:
        return Finding(name, "ok", f"{wanted} in {SHM_FOLDER}")
    remedy = (
        "Nothing to do: anonymous files serve instead. In a container, --shm-size=8g makes it larger."
    )
    says = f"{wanted}, but {SHM_FOLDER} has {readable_bytes(free)} free"
    return Finding(name, "warning", says, remedy)


def names() -> Finding:
    """Names of shared memory that killed programs have left, which are removed."""
    left = sweep()
    says = f"removed {', '.join(left)}, left by killed programs" if left else "no program has left any"
    return Finding("names of shared memory", "ok", says)


def open_files() -> Finding:
    name = "limit of open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _DESCRIPTORS or soft == resource.RLIM_INFINITY:
        return Finding(name, "ok", f"{soft}")
    remedy = f"ulimit -n {_DESCRIPTORS}, before the program."
    if 0 <= hard < _DESCRIPTORS:
        remedy = f"Raise the hard limit, {hard}, to {_DESCRIPTORS} (limits.conf; docker run --ulimit)."
    return Finding(name, "warning", f"{soft}, and each Data and each worker takes some", remedy)


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().partition("\n")[0] or type(error).__name__


def _with_workers(devices: str | None) -> Iterator[Finding]:
    name = "workers"
    start = time.monotonic()
    try:
        session = Session(devices=devices, verbose=False, timeout=120)
    except SynkroError as error:
        yield Finding(name, "failure", str(error), "Mend this first: the other checks need workers.")
        return
    with session:
        yield Finding(name, "ok", f"{session.n_parallel} started in {time.monotonic() - start:.2g} s")
        for check in (exactness, clocks, threads, reduction):
            try:
                yield check(session)
            except (SharedMemoryError, MemoryError) as error:
                yield Finding(check.__name__, "failure", _first_line(error), _MORE_MEMORY)
            except SynkroError as error:
                remedy = "Please report this, with the output of python -m synkro info."
                yield Finding(check.__name__, "failure", _first_line(error), remedy)


def exactness(session: Session) -> Finding:
    """A scattered sum against the serial one, to the bit."""
    rows = np.arange(10_007 * 3).reshape(-1, 3)
    f = session.function(lambda x: x.sum(axis=0), outputs="sum", name="doctor")
    if np.array_equal(f(rows), rows.sum(axis=0)):
        return Finding("exactness", "ok", "a sum of 10,007 rows is the serial one")
    return Finding("exactness", "failure", "a sum of rows is not the serial one", "Please report this.")


def clocks(session: Session) -> Finding:
    """Whether a worker's clock reads between two readings of the main process's."""
    f = session.function(time.perf_counter, outputs=None, name="doctor")
    apart = 0.0
    lengths = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        readings = f()
        stop = time.perf_counter()
        lengths.append(stop - start)
        apart = max(apart, start - min(readings), max(readings) - stop)
    if apart <= 0:
        took = f"a call takes {np.median(lengths) * 1e6:.0f} us"
        return Finding("clocks", "ok", f"all processes read the same one; {took}")
    remedy = "Traces will be off by as much: use the machine's own clock source, not a virtual one."
    return Finding(
        "clocks", "warning", f"the workers' clocks are up to {apart * 1e6:.0f} us off", remedy
    )


def threads(session: Session) -> Finding:
    """Whether the libraries in the workers start more threads than there are cores."""
    name = "threads"
    most = int(max(session.function(_thread_caps, outputs=None, name="doctor")()))
    cores = available_cores()
    workers = counted(session.n_parallel, "worker")
    if most * session.n_parallel <= max(cores, session.n_parallel):
        return Finding(name, "ok", f"{workers} with {most} each on {counted(cores, 'core')}")
    says = f"{workers}: each may start {counted(most, 'thread')}, on {counted(cores, 'core')}"
    remedy = "Unset OMP_NUM_THREADS and its like, or fork(threads_per_worker=…)."
    return Finding(name, "warning", says, remedy)


def _thread_caps() -> int:
    named = [
        value.partition(",")[0].strip()  # OpenMP's list one number for each level of nesting
        for name, value in os.environ.items()
        if name.endswith("_NUM_THREADS")
    ]
    return max((int(value) for value in named if value.isdigit()), default=os.cpu_count() or 1)


def reduction(session: Session) -> Finding:
    """How fast all-reduces are beside copying."""
    name = "reduction"
    if session.n_parallel < 2:
        return Finding(name, "skipped", "there is one worker, which has nobody to reduce with")
    speed = _reducing_speed(session)
    says = f"{speed / 1e9:.2g} GB/s of float32 all-reduced by {session.n_parallel} workers"
    copying = _copying_speed()
    if speed >= _SLOWEST * copying or session.n_parallel > available_cores():
        return Finding(name, "ok", f"{says}; one core copies {copying / 1e9:.2g} GB/s")
    remedy = "Look for other programs on the cores (top), and for a CPU quota of the container."
    return Finding(name, "warning", f"{says}, while one core copies {copying / 1e9:.2g} GB/s", remedy)


def _reducing_speed(session: Session) -> float:
    """Bytes a second of an all-reduce, after a check of its result."""
    variable = session.shared(np.ones(_REDUCED, np.float32))
    session.all_reduce(variable, "sum")
    if session.get_value(session.n_parallel - 1, variable)[-1] != session.n_parallel:
        raise SynkroError(f"the sum of {session.n_parallel} ones is not {session.n_parallel}.")
    count, seconds = timeit.Timer(lambda: session.all_reduce(variable)).autorange()
    return count * _REDUCED * variable.dtype.itemsize / seconds


def _copying_speed() -> float:
    source = np.ones(_REDUCED, np.float32)
    target = np.empty_like(source)
    times = timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=5)
    return source.nbytes / float(np.median(times))


def peer_access(count: int) -> Finding:
    """Which GPUs can read each other's memory."""
    name = "peer access of GPUs"

    def reachable() -> Any:
        runtime = xp().cuda.runtime
        ranks = range(count)
        return np.array([[i == j or runtime.deviceCanAccessPeer(i, j) for j in ranks] for i in ranks])

    try:
        with Session(devices="cuda", verbose=False, timeout=120) as session:
            table = session.function(reachable, outputs=None, name="doctor")()[0]
    except SynkroError as error:
        return Finding(name, "failure", _first_line(error), "See `workers` above.")
    apart = [f"{i}-{j}" for i, j in combinations(range(count), 2) if not table[i, j]]
    if not apart:
        return Finding(name, "ok", f"all {count} reach each other's memory")
    remedy = (
        "NCCL goes through host memory there: in a virtual machine or container, ask for peer-to-peer."
    )
    return Finding(name, "warning", f"none between {', '.join(apart)}", remedy)


def device_memory(count: int, reason: str) -> Finding:
    """Whether ranks open each other's device memory: two on the first GPU, and one on each other."""
    name = "device memory of other processes"
    if not count:
        return Finding(name, "skipped", reason)
    devices, said = ["cuda:0", *(f"cuda:{index}" for index in range(count))], io.StringIO()
    try:
        with substituted(os.environ, {PATHS: "new"}), contextlib.redirect_stderr(said):
            Session(devices=devices, timeout=120).close()
    except SynkroError as error:
        return Finding(name, "failure", _first_line(error), "See `workers` above.")
    why = [line.partition(", as ")[2] for line in said.getvalue().splitlines() if "messages go" in line]
    if not why:
        return Finding(name, "ok", f"{len(devices)} ranks open that of each other ({PATHS}=new)")
    remedy = (
        "Arrays go through host memory between ranks: containers need --ipc=host, WSL and MIG lack it."
    )
    return Finding(name, "warning", why[0], remedy)


def pairs(count: int) -> Finding:
    """An all-reduce by NCCL between any two GPUs."""
    name = "NCCL between all pairs"
    speeds = []
    for one, other in combinations(range(count), 2):
        devices = [f"cuda:{one}", f"cuda:{other}"]
        try:
            with Session(devices=devices, verbose=False, timeout=120) as session:
                speeds.append(_reducing_speed(session))
        except SynkroError as error:
            says = f"{' and '.join(devices)}: {_first_line(error)}"
            remedy = "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 goes through host memory instead."
            return Finding(name, "failure", says, remedy)
    slowest = min(speeds) / 1e9
    return Finding(name, "ok", f"all {len(speeds)} work; the slowest reduces {slowest:.3g} GB/s")
