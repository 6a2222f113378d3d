"""What the questions share: timing side by side, tables with targets, records as JSON.

A *side* is Synkro or one of its peers.  In every *run* each side takes its turn once, and the turns
rotate, so that whatever else the machine does meets all sides alike.  A side's figure for a run is the
median of its timed calls in it; a table shows the median of these figures with their 10th and 90th
percentile.  A ratio is the ratio of the medians; its spread is that of the ratios within each run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from synkro.cli import ctrl_c
from synkro.machine import available_cores, cpu_name

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = (
    "synkro",
    "numpy",
    "cloudpickle",
    "joblib",
    "posix_ipc",
    "threadpoolctl",
    "scikit-learn",
    "pytensor",
    "torch",
    "mpi4py",
    "mpich",
    "jax",
    "numba",
    "ipyparallel",
    "ray",
    "distributed",
    "dask",
    "h5py",
    "zarr",
)
_UNITS = ("bytes", "KB", "MB", "GB", "TB")

Samples = dict[str, list[float]]


# ── timing ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Side:
    """One of those compared, and how its turn in a run goes.

    Attributes:
        call: what is timed; gets the values that *prepare* returns, which is not timed.
        calls: timed calls a turn.
        warm: calls before them that are not timed: 0 where a turn is to begin cold.
        idle: seconds to sleep before each timed call.
        own_clock: *call* returns the seconds itself.
    """

    name: str
    call: Callable[..., Any]
    calls: int = 1
    warm: int = 0
    idle: float = 0.0
    prepare: Callable[[], Iterable[Any]] = tuple
    own_clock: bool = False

    def turn(self) -> float:
        """Seconds a call: the median over one turn."""
        for _ in range(self.warm):
            self.call(*self.prepare())
        return float(np.median([self._timed() for _ in range(self.calls)]))

    def _timed(self) -> float:
        args = self.prepare()
        if self.idle:
            time.sleep(self.idle)
        if self.own_clock:
            return float(self.call(*args))
        start = time.perf_counter()
        self.call(*args)
        return time.perf_counter() - start


def paired(sides: Sequence[Side], runs: int, first: bool = True) -> Samples:
    """Seconds a call of every side, one figure a run.

    With *first* every side is called once before, for what happens only once: imports, pickling,
    first touch.
    """
    if first:
        for side in sides:
            side.call(*side.prepare())
    samples: Samples = {side.name: [] for side in sides}
    for run in range(runs):
        begin = run % len(sides)
        for side in (*sides[begin:], *sides[:begin]):
            samples[side.name].append(side.turn())
    return samples


def settled() -> tuple[()]:
    """Wait until this process's threads are idle, at most 30 s: a peer may tidy up after its turn."""
    end = time.monotonic() + 30
    idle = False
    while not idle and time.monotonic() < end:
        used = time.process_time()
        time.sleep(0.2)
        idle = time.process_time() - used < 0.01
    return ()


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


# ── reporting ────────────────────────────────────────────────────────────────────────────────────


class Report:
    """Prints tables as they come, and keeps what they show for the record.

    Attributes:
        record: what goes into the JSON file; numbers are in the unit that stands beside them.
    """

    def __init__(self, question: str, text: str, scale: str, judged: bool = False) -> None:
        """*judged*: figures are held against their targets."""
        self._judged = judged
        self.record: dict[str, Any] = {
            "question": question,
            "asks": paragraphs(text)[0],
            "floor_and_peers": paragraphs(text)[1:],
            "scale": scale,
            "environment": environment(),
            "tables": [],
            "figures": [],
            "notes": [],
            "not_measured": [],
        }
        print(f"\n══ {question} ({scale}) ══\n{self.record['asks']}", flush=True)

    def absent(self, name: str, why: str) -> None:
        """A peer that is not here: it is listed, never dropped."""
        self.record["not_measured"].append({"name": name, "why": why})
        print(f"  not measured: {name} ({why})", flush=True)

    def table(self, title: str, samples: Samples, unit: str = "s", x: str | None = None) -> None:
        """Medians with spread, one row a side.

        With *x*, what a number in the names stands for, sides are called ``series, number``: such as
        "Synkro, 4", or "Synkro, 64.0 MB"; the report draws a curve a series.
        """
        rows: list[dict[str, Any]] = [{"name": n, **_spread(values)} for n, values in samples.items()]
        table: dict[str, Any] = {"title": title, "unit": unit, "rows": rows}
        if x is not None:
            table["x"] = x
            for row in rows:
                series, _, number = row["name"].rpartition(", ")
                row |= {"series": series, "x": _number(number)}
        self.record["tables"].append(table)
        width = max(map(len, samples))
        print(f"\n{title}\n  {'':{width}}  {'median':>9}  {'p10':>9}  {'p90':>9}  runs")
        for row in rows:
            shown = "  ".join(f"{readable(row[key], unit):>9}" for key in ("median", "p10", "p90"))
            print(f"  {row['name']:{width}}  {shown}  {row['runs']:4}", flush=True)

    def ratio(
        self,
        name: str,
        over: Sequence[float],
        under: Sequence[float],
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """The ratio of two medians, with the spread of the ratios within each run."""
        within = _spread(np.divide(over, under))
        value = float(np.median(over) / np.median(under))
        spread = {key: within[key] for key in ("p10", "p90")} if len(over) > 1 else {}
        self.figure(name, value, "×", at_least=at_least, at_most=at_most, **spread)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        **spread: float,
    ) -> None:
        """A number, and whether it meets its target, if that is to be judged."""
        figure: dict[str, Any] = {"name": name, "unit": unit, "value": float(value), **spread}
        line = f"  {name}: {readable(value, unit)}"
        if spread:
            line += " (" + ", ".join(f"{k} {readable(v, unit)}" for k, v in spread.items()) + ")"
        target, sign = (at_least, "≥") if at_least is not None else (at_most, "≤")
        if target is not None and self._judged:
            met = bool(value >= target if at_least is not None else value <= target)
            figure |= {"target": f"{sign} {readable(target, unit)}", "met": met}
            line += f"   target {figure['target']}: {'met' if met else 'missed'}"
        self.record["figures"].append(figure)
        print(line, flush=True)

    def note(self, text: str) -> None:
        self.record["notes"].append(text)
        print(f"  {text}", flush=True)


def missed(record: dict[str, Any]) -> list[str]:
    """The figures of a record that miss their targets, a sentence each."""
    return [
        f"{record['question']}: {each['name']} is {readable(each['value'], each['unit'])}, "
        f"target {each['target']}"
        for each in record.get("figures", ())
        if not each.get("met", True)
    ]


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring, a line each."""
    return [" ".join(part.split()) for part in text.strip().split("\n\n")]


def _number(text: str) -> float:
    """``_number("1.5 KB") == 1536``; of a plain number, that."""
    value, _, unit = text.partition(" ")
    return float(value) * 1024 ** _UNITS.index(unit or "bytes")


def _spread(values: Any) -> dict[str, Any]:
    p10, median, p90 = (float(value) for value in np.percentile(values, (10, 50, 90)))
    return {"median": median, "p10": p10, "p90": p90, "runs": len(values)}


def readable(value: float, unit: str) -> str:
    """``readable(15.6e-6, "s") == "15.6 us"``."""
    if unit == "s":
        for step, name in ((1e-6, "us"), (1e-3, "ms")):
            if abs(value) < 1000 * step:
                return f"{value / step:.3g} {name}"
        return f"{value:.3g} s"
    if unit == "bytes":
        power = min(4, max(0, int(math.log2(max(1, abs(value))) // 10)))
        return f"{value / 1024**power:.4g} {_UNITS[power]}"
    return f"{value:.3g} {unit}".rstrip()


def environment() -> dict[str, Any]:
    """When, on what and with which versions."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len((_git("status", "--porcelain") or "").splitlines()),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# ── a question as a program ──────────────────────────────────────────────────────────────────────


def main(
    file: str,
    text: str,
    ask: Callable[..., None],
    *,
    full: dict[str, Any],
    quick: dict[str, Any],
    smoke: dict[str, Any],
) -> None:
    """Run ``ask(report, **settings)`` at the scale that the command line wants.

    *quick* and *smoke* say only in what they differ from *full*.
    """

    def asked() -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by benchmarks/run.py
        exit_when_terminated()
        scales = {"full": full, "quick": full | quick, "smoke": full | smoke}
        return 1 if missed(_ask(file, text, ask, scales)) else 0

    sys.exit(ctrl_c.status_of(asked))


def exit_when_terminated() -> None:
    """From here on SIGTERM is a ``SystemExit``, so that what was started is ended, and files removed.

    One that comes in a callback of a weak reference, or in ``__del__``, is lost, as Ctrl-C is: the next
    one counts.
    """

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _ask(
    file: str, text: str, ask: Callable[..., None], scales: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The record."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    options = parser.parse_args()
    settings = scales[options.scale]
    report = Report(Path(file).stem, text, options.scale, options.judge)
    start = time.monotonic()
    ask(report, **settings)
    report.record["settings"] = settings
    report.record["seconds"] = round(time.monotonic() - start, 1)
    if options.json:
        options.json.write_text(json.dumps(report.record, indent=1, ensure_ascii=False) + "\n")
    return report.record


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--quick``, ``--smoke`` and ``--judge``."""
    parser.set_defaults(scale="full")
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--quick", dest="scale", action="store_const", const="quick", help="about a tenth of the calls")
    least = "the least: does it work?  It measures nothing that could be judged"
    either("--smoke", dest="scale", action="store_const", const="smoke", help=least)
    judge = "say which figures meet their targets; exit with 1 if one does not"
    either("--judge", action="store_true", help=judge)
