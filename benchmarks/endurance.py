"""Does anything grow: over 10 000 calls, 10 000 ``Data``, 1000 sessions?

Floor: nothing may: no descriptor, no process, no mapping of shared memory, no file in ``/dev/shm``,
in the main process and in the workers together.  Their resident memory settles in the first tenth;
from there to the end 1 MB is allowed.

No peers.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import synkro

from .common import Report, main


def census(pids: Iterable[int]) -> dict[str, int]:
    """What the processes *pids* hold."""
    gc.collect()
    held = dict.fromkeys(("resident memory", "descriptors", "mappings of shared memory"), 0)
    for pid in pids:
        process = Path("/proc", str(pid))
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        held["resident memory"] += int(status["VmRSS"].split()[0]) * 1024
        held["descriptors"] += len(os.listdir(process / "fd"))
        maps = (process / "maps").read_text().splitlines()
        held["mappings of shared memory"] += sum("/dev/shm/" in m or "memfd:" in m for m in maps)
    held["child processes"] = _children()
    held["files in /dev/shm"] = len(os.listdir("/dev/shm"))
    return held


def _children() -> int:
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found += int(fields[1]) == os.getpid()
    return found


def endure(
    report: Report,
    title: str,
    count: int,
    act: Callable[[int], None],
    pids: Callable[[], Iterable[int]],
) -> None:
    """Do it *count* times, and compare what is held after a tenth of them and at the end."""
    seconds = []
    before: dict[str, int] = {}
    for number in range(count + count // 10):
        if number == count // 10:
            before = census(pids())
        start = time.perf_counter()
        act(number)
        seconds.append(time.perf_counter() - start)
    after = census(pids())
    report.table(f"{count} {title}", {"each": seconds[-count:]})
    for what, held in after.items():
        unit, limit = ("bytes", 1 << 20) if what == "resident memory" else ("", 0)
        report.figure(f"growth of {what}", held - before[what], unit, at_most=limit)


def ask(report: Report, calls: int, datas: int, sessions: int) -> None:
    with synkro.Session(2, verbose=False) as session:
        x = session.data(np.ones((1000, 10), np.float32))
        mean = session.function(lambda x: x.mean(axis=0), outputs="mean")
        large = session.function(lambda x: np.ones(100_000), outputs="sum")
        indices = np.arange(0, 1000, 3)

        def call(number):
            match number % 4:
                case 0:
                    mean(x)
                case 1:
                    mean(x, batch=indices)
                case 2:
                    mean(x, num_slices=3)
                case 3:
                    large(x)

        def make(number):
            made = session.data(np.ones((100 + number % 50, 10), np.float32))
            if number % 2:
                mean(made)

        def all_pids():
            return os.getpid(), *session.pids

        endure(report, "calls: whole, a batch, sliced, with a large output", calls, call, all_pids)
        endure(report, "Data made and dropped, every other one used in a call", datas, make, all_pids)

    def cycle(_):
        with synkro.Session(2, verbose=False) as session:
            total = session.function(lambda x: x.sum(), outputs="sum")
            assert total(np.ones(4)) == 4

    endure(report, "sessions of two workers with a call each", sessions, cycle, lambda: [os.getpid()])


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"calls": 10_000, "datas": 10_000, "sessions": 1000},
        quick={"calls": 1000, "datas": 1000, "sessions": 100},
        smoke={"calls": 100, "datas": 100, "sessions": 4},
    )
