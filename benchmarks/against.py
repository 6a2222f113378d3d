"""What does a call cost, beside another version of Synkro?

``python -m benchmarks.against FOLDER`` times this checkout against the package in FOLDER (a checkout of
another version, or what ``pip install --target FOLDER`` made), each in a process of its own with two
workers.  They take turns: in every run each makes a block of calls of each kind while the other sleeps.
All of it is done with several starts of both versions: where a process and its workers come to lie makes
a call of one start in five cost half as much again, as long as they live.

A call in a loop; single calls in turns with the other version; a call after a pause of 5 ms; a call with
a small plain array, and with a broadcast number that is new in each; a call to eight workers; a map of
1,000 integers, and of two; a session of two workers, started and closed; and all of the first beside
busy neighbours, processes that compute all the time.

``--limit 1.05`` is for changes that are to cost nothing: the program ends with status 1 where a median
is more than so many times the other version's.  Hold a checkout against itself first, to know the noise.

Floor: two wake-ups and four cache lines, as in ``call_overhead``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OURS, THEIRS = "this checkout", "the other"
TARGETS = {
    "empty": 0.65,
    "reduced scalar": 0.6,
    "mean": 1.0,
    "gathered": 1.0,
    "small plain array": 0.8,
    "new number": 1.0,
    "empty, after 5 ms": 0.7,
    "reduced scalar, after 5 ms": 0.7,
    "empty, 8 workers": 1.0,
    "two tasks": 1.0,
    "1,000 tasks": 1.0,
    "start": 1.0,
}
"""The kinds of calls, and what fraction of the other version's time each may take."""

HEAVY = {"two tasks": 10, "1,000 tasks": 30, "start": 100}
"""Kinds of which a block has so many times fewer calls."""

_IDLE = 5e-3  # seconds


# ── in the process of one version ────────────────────────────────────────────────────────────────────


def serve() -> None:
    """Answer lines ``[kind, calls]`` on stdin by the microseconds of each call, until stdin ends."""
    kinds = dict(_kinds())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind, calls = json.loads(line)
        call, idle = kinds[kind]
        for _ in range(0 if idle or kind == "start" else 20):
            call()
        print(json.dumps([_timed(call, idle) for _ in range(calls)]), flush=True)


def _timed(call: Any, idle: float) -> float:
    if idle:
        time.sleep(idle)
    start = time.perf_counter()
    call()
    return round((time.perf_counter() - start) * 1e6, 2)


def _kinds() -> Iterator[tuple[str, tuple[Any, float]]]:
    import synkro

    session = synkro.Session(devices=["cpu", "cpu"], verbose=False)
    x = session.data(np.ones(2))
    empty = session.function(lambda x: None, outputs=[])
    total = session.function(lambda x: x.sum(), outputs="sum")
    mean = session.function(lambda x: x.mean())
    rows = session.function(lambda x: x, outputs="gather")
    scaled = session.function(lambda x, rate: None, bcast_inputs="rate", outputs=[])
    small, rates = np.ones(128), iter(range(1, 1 << 62))
    yield "empty", (lambda: empty(x), 0)
    yield "reduced scalar", (lambda: total(x), 0)
    yield "mean", (lambda: mean(x), 0)
    yield "gathered", (lambda: rows(x), 0)
    yield "small plain array", (lambda: empty(small), 0)
    yield "fixed number", (lambda: scaled(x, 0.1), 0)
    yield "new number", (lambda: scaled(x, 1 / next(rates)), 0)
    yield "empty, after 5 ms", (lambda: empty(x), _IDLE)
    yield "reduced scalar, after 5 ms", (lambda: total(x), _IDLE)
    many = synkro.Session(devices=["cpu"] * 8, verbose=False)
    y = many.data(np.ones(8))
    all_eight = many.function(lambda x: None, outputs=[])
    yield "empty, 8 workers", (lambda: all_eight(y), 0)
    yield "two tasks", (lambda: session.map(abs, (1, 2)), 0)
    yield "1,000 tasks", (lambda: session.map(abs, range(1000)), 0)
    yield "start", (lambda: synkro.Session(devices=["cpu", "cpu"], verbose=False).close(), 0)


# ── in the process that asks ─────────────────────────────────────────────────────────────────────────


class Version:
    """A process that runs one version, and makes calls when it is asked to."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--serve"],
            cwd="/",
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready":
            raise RuntimeError(f"the package in {folder} did not start")

    def times(self, kind: str, calls: int) -> list[float]:
        """Microseconds of each of *calls* calls of a *kind*."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([kind, calls]) + "\n")
        self.process.stdin.flush()
        times: list[float] = self._answer()
        return times

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a version ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


Blocks = dict[str, list[list[float]]]
"""The microseconds of calls, by version: a list a block."""


@contextlib.contextmanager
def started(folders: dict[str, Path]) -> Iterator[dict[str, Version]]:
    """A process of each version, until the end of the block."""
    with contextlib.ExitStack() as stack:
        versions = {}
        for name, folder in folders.items():
            versions[name] = Version(folder)
            stack.callback(versions[name].close)
        yield versions


def ask(versions: dict[str, Version], kind: str, runs: int, calls: int, blocks: Blocks) -> None:
    """Add to *blocks*, for each version, *runs* blocks of calls of a *kind*; they take turns."""
    for run in range(runs):
        for name in list(versions)[:: 1 if run % 2 else -1]:
            times = versions[name].times(kind, max(1, calls // HEAVY.get(kind, 1)))
            blocks.setdefault(name, []).append(times)


def summary(blocks: Blocks) -> dict[str, dict[str, float]]:
    """The median and 90th percentile of a call by version, medians over the blocks, and their ratios."""
    found = {
        name: {
            "median": float(np.median([np.median(block) for block in mine])),
            "p90": float(np.median([np.percentile(block, 90) for block in mine])),
        }
        for name, mine in blocks.items()
    }
    found["ratio"] = {key: found[OURS][key] / found[THEIRS][key] for key in ("median", "p90")}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="what holds the other version's package")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--kinds", nargs="*", default=list(TARGETS), metavar="KIND")
    parser.add_argument("--neighbours", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--limit", type=float, help="what each ratio of medians may be at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return
    if options.folder is None or not (options.folder / "synkro").is_dir():
        parser.error("name the folder that holds the other version's package, synkro/")
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Time both versions, print the figures, and end with status 1 where one is over the limit."""
    from .common import environment, neighbours  # not above: versions run this file by itself

    record: dict[str, Any] = {name: vars(options)[name] for name in ("starts", "runs", "calls")}
    record["environment"] = environment()
    folders = {OURS: ROOT, THEIRS: options.folder.resolve()}
    blocks: dict[tuple[int, str], Blocks] = {}  # by the number of neighbours, and the kind
    for _ in range(options.starts):
        with started(folders) as versions:
            for count in options.neighbours:
                with neighbours(count):
                    for kind in options.kinds if not count else ("empty", "reduced scalar"):
                        mine = blocks.setdefault((count, kind), {})
                        ask(versions, kind, options.runs, options.calls, mine)
    record["kinds"] = {}
    for (count, kind), mine in blocks.items():
        name = f"{kind}, beside {count} busy" if count else kind
        found = record["kinds"][name] = summary(mine)
        _show(name, found, options.limit or (1.0 if count else TARGETS.get(kind, 1.0)))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    limit = options.limit or float("inf")
    over = [name for name, found in record["kinds"].items() if found["ratio"]["median"] > limit]
    if over:
        sys.exit(f"slower than {options.limit} x: {', '.join(over)}")


def _show(kind: str, found: dict[str, dict[str, float]], target: float) -> None:
    ours, theirs, ratio = found[OURS], found[THEIRS], found["ratio"]
    print(
        f"{kind:38} {ours['median']:8.1f} us ÷ {theirs['median']:8.1f} = {ratio['median']:.2f}"
        f"   p90 {ours['p90']:8.1f} ÷ {theirs['p90']:8.1f} = {ratio['p90']:.2f}   (≤ {target})",
        flush=True,
    )


if __name__ == "__main__":
    main()
