"""Is anything lost, or done twice, while workers die: in maps with ``retries=``, in training steps of a
session with ``replace=True``?

Workers die by SIGKILL, which comes from outside at any time, and in tasks and steps by SIGSEGV,
``os._exit``, and, where this user may make a cgroup with little memory, by the kernel.  Every result is
compared with what one process computes, bit by bit; so are the variables, the objects and the random
numbers of all ranks after each step.  The seed is printed.

Floor: no result lost, none twice, no session broken, nothing that grows.  A dead worker costs the start
of another one: an interpreter with NumPy, which takes 0.1 to 0.2 s of a core.

No peers: ``multiprocessing.Pool`` hangs, ``ProcessPoolExecutor`` breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import synkro
from synkro.values.random import generator, generator_of_item

from .common import Report, main
from .endurance import census

CGROUP = Path("/sys/fs/cgroup/memory")
ROOM = 150 << 20  # bytes that a worker may take in it


@contextlib.contextmanager
def cgroup() -> Iterator[str]:
    """A cgroup with little memory; an empty text where none can be made."""
    folder = CGROUP / f"synkro-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(ROOM))
    except OSError:
        yield ""
        return
    try:
        yield str(folder)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def die(way: str, folder: str) -> None:
    """End this process in a *way*, or do not."""
    match way:
        case "segv":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "memory" if folder:
            Path(folder, "cgroup.procs").write_text(str(os.getpid()))
            held = [np.ones(1 << 20) for _ in range(100)]
            raise AssertionError(f"{len(held)} arrays fit")


class Killer(threading.Thread):
    """Kills a worker now and then, as a user or the kernel would, and waits until another is there."""

    def __init__(self, session: synkro.Session, seed: int, mean: float) -> None:
        super().__init__(daemon=True)
        self._session, self._random, self._mean = session, random.Random(seed), mean
        self.over = threading.Event()
        self.killed = 0

    def run(self) -> None:
        while not self.over.wait(self._random.expovariate(1 / self._mean)):
            pids = self._session.pids
            try:
                os.kill(self._random.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed += 1
            while self._session.pids == pids and not self.over.wait(0.05):
                continue


class Model:
    """What functions change on the workers."""

    def __init__(self) -> None:
        self.steps = 0
        self.weights = np.zeros(1000)


def tasks(
    session: synkro.Session, rng: random.Random, folder: str, fatal: int, marks: str
) -> tuple[int, int]:
    """One map; returns how many tasks there were, and how many of these were fatal once.  They leave
    *marks* in a folder."""
    count = rng.choice([1, 7, 100, 1000, 5000])
    ways = {rng.randrange(count): rng.choice(["segv", "exit", "memory"]) for _ in range(fatal)}
    table = np.arange(float(count))

    def task(number: int) -> tuple[float, int, Any]:
        drawn = int(synkro.rng().integers(1 << 40))
        if number in ways:
            with contextlib.suppress(FileExistsError):
                open(f"{marks}/{number}", "x").close()
                die(ways[number], folder)
        return table[number] * 3, drawn, np.full(number % 2000, number) if number % 9 == 0 else None

    seed, this = session.services.variables.maps
    options: dict[str, Any] = {"retries": 20, "max_tasks": rng.choice([None, None, None, 40, 400])}
    if rng.random() < 0.5:
        found = session.map(task, range(count), **options)
    else:
        found = list(session.imap(task, range(count), **options))
    assert len(found) == count, (len(found), count)
    for number, (value, drawn, rows) in enumerate(found):
        assert value == number * 3.0, (number, value)
        assert drawn == generator_of_item(seed, this, number).integers(1 << 40), number
        assert (rows is None) == (number % 9 != 0)
        assert rows is None or (len(rows) == number % 2000 and (rows == number).all())
    for number in ways:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{marks}/{number}")
    return count, len(ways)


class Training:
    """Steps that change variables and an object, on all ranks; and what they make, computed here."""

    def __init__(self, session: synkro.Session, folder: str) -> None:
        size = session.n_parallel
        self._session, self._folder = session, folder
        self._model, self._steps = Model(), 0
        self._alike = session.shared(np.zeros(5000), "alike")
        self._apart = session.shared(np.zeros((10, 10)), "apart")
        self._draws = [generator(_SEED, rank) for rank in range(size)]
        alike, apart, model = self._alike, self._apart, self._model

        def step(rows: Any, way: str, victim: int) -> tuple[float, int, float, float]:
            drawn = synkro.rng().random()
            alike.value += synkro.all_reduce(rows.sum(), op="sum")
            apart.value = apart.value + synkro.rank() + 1
            model.steps += 1
            model.weights += model.steps
            if synkro.rank() == victim:
                die(way, folder)
            total = synkro.all_reduce(float(rows.sum()), op="sum")
            return total, model.steps, float(model.weights[-1]), drawn

        self._step = session.function(step, bcast_inputs=["way", "victim"], outputs=None)
        self._rows = session.data(np.arange(600.0))

    def step(self, rng: random.Random) -> int:
        """One step, again and again until it ends; returns how often workers died in it."""
        ways, deaths = ["", "", "", "", "segv", "exit", "memory"], 0
        while True:
            way, victim = rng.choice(ways), rng.randrange(self._session.n_parallel)
            try:
                found = self._step(self._rows, way, victim)
                break
            except synkro.WorkerDied as died:
                deaths += 1
                if self._session.state.name == "BROKEN":
                    raise SystemExit(f"the session broke: {died}") from died
        self._steps += 1
        total, size = 600 * 599 / 2, len(found)
        weight = self._steps * (self._steps + 1) / 2
        for rank, (each, steps, last, drawn) in enumerate(found):
            assert (each, steps, last) == (total, self._steps, weight), (rank, found)
            assert drawn == self._draws[rank].random(), rank
        self._check(total, size)
        return deaths

    def _check(self, total: float, size: int) -> None:
        while True:
            try:
                for rank in range(size):
                    alike = self._session.get_value(rank, self._alike)
                    apart = self._session.get_value(rank, self._apart)
                    assert (alike == self._steps * total).all(), (rank, alike)
                    assert (apart == self._steps * (rank + 1)).all(), (rank, apart)
                return
            except synkro.WorkerDied:
                continue


_SEED = 7


def ask(report: Report, seconds: float, mean: float) -> None:
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print(f"seed {seed}", flush=True)
    rng, began = random.Random(seed), time.monotonic()
    steps: dict[str, list[float]] = {"in which none died": [], "in which a worker died": []}
    counts = dict.fromkeys(("maps", "tasks", "steps", "deaths in tasks", "deaths in steps"), 0)
    with (
        cgroup() as folder,
        tempfile.TemporaryDirectory() as marks,
        synkro.Session(3, devices="cpu", verbose=False, replace=True, seed=_SEED) as session,
    ):
        killer, training = Killer(session, seed, mean), Training(session, folder)
        training.step(rng)
        killer.start()
        before: dict[str, int] | None = None
        while time.monotonic() - began < seconds:
            number, fatal = tasks(session, rng, folder, rng.choice([0, 0, 1, 3]), marks)
            counts["maps"] += 1
            counts["tasks"] += number
            counts["deaths in tasks"] += fatal
            for _ in range(1 + rng.randrange(20)):
                start = time.perf_counter()
                deaths = training.step(rng)
                took = time.perf_counter() - start
                steps["in which a worker died" if deaths else "in which none died"].append(took)
                counts["deaths in steps"] += deaths
                counts["steps"] += 1
            if before is None and time.monotonic() - began > seconds / 10:
                before = census([os.getpid()])
        killer.over.set()
        killer.join()
        training.step(rng)
        after = census([os.getpid()])
    report.table("steps, with all checks", {kind: times for kind, times in steps.items() if times})
    for what, count in counts.items():
        report.figure(what, count, "")
    report.figure("workers killed from outside", killer.killed, "")
    report.figure("with a cgroup for memory", int(bool(folder)), "")
    for what, held in after.items():
        unit, limit = ("bytes", 4 << 20) if what == "resident memory" else ("", 0)
        grown = held - (before or after)[what]
        report.figure(f"growth of {what}, of the main process", grown, unit, at_most=limit)


if __name__ == "__main__":
    main(
        __file__,
        __doc__ or "",
        ask,
        full={"seconds": 7200.0, "mean": 4.0},
        quick={"seconds": 60.0},
        smoke={"seconds": 5.0, "mean": 1.0},
    )
