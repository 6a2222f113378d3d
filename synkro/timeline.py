"""A trace as a file for Perfetto and Chrome, as a table of where the time went, and as a picture."""

from __future__ import annotations

import importlib
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

from .errors import InvalidType, InvalidValue, NotAvailable
from .trace import MAIN, Called, Marks, Span, Trace


class Traced(Protocol):
    """What this needs of the ``Engine``."""

    size: int
    lock: RLock
    trace: Trace | None
    at_close: Callable[[], None] | None
    say: Callable[[str], None]

    @property
    def marks(self) -> Marks: ...

    def require_ready(self) -> None: ...


SHARES = {
    "compute": ("compute", "load"),
    "transfer": ("inputs", "outputs", "store"),
    "communication": ("collective", "reduce"),
    "waiting": ("wait for others",),
}
"""What counts as what in the table; what is left of a call is overhead."""

_COLOURS = {
    "compute": "tab:green",
    "inputs": "tab:orange",
    "outputs": "gold",
    "store": "khaki",
    "load": "tab:olive",
    "collective": "tab:blue",
    "reduce": "tab:cyan",
    "wait for others": "tab:red",
    "wake": "lightgrey",
    "begin": "grey",
    "plan": "tab:purple",
    "send": "thistle",
    "wait": "whitesmoke",
    "collect": "tab:pink",
}


def checked_path(path: Any) -> Path:
    """Raises: InvalidType, InvalidValue for what no file can be written to."""
    try:
        checked = Path(path)
    except TypeError:
        raise InvalidType(f"a trace needs the path of a file; got {path!r}.") from None
    folder = checked.parent
    if checked.is_dir() or not os.access(checked if checked.exists() else folder, os.W_OK):
        raise InvalidValue(f"{checked} cannot be written: name a file in a folder that can be.")
    return checked


class Recording:
    """A trace of an engine's calls, from here to ``end``, which writes it to *path*, if there is one.

    Raises: InvalidValue while another one goes on; SessionClosed, SessionBroken.
    """

    def __init__(self, engine: Traced, path: Path | None) -> None:
        with engine.lock:
            engine.require_ready()
            if engine.trace is not None:
                raise InvalidValue(
                    "this session is traced already: end that trace first (SYNKRO_TRACE traces all "
                    "of it)."
                )
            self.trace = engine.trace = Trace(engine.size, engine.marks)
            self._engine = engine
            self._path = path
            self.trace.begin()
            engine.at_close = self._close

    def end(self) -> None:
        """The second time it does nothing.  Raises: OSError."""
        with self._engine.lock:
            if self._engine.trace is not self.trace:
                return
            self._engine.trace = self._engine.at_close = None
            self.trace.end()
        if self._path is not None:
            write(self.trace, self._path)

    def _close(self) -> None:
        """The session is closed, which an error must not hinder."""
        try:
            self.end()
        except OSError as error:
            self._engine.say(f"Synkro: the trace could not be written: {error}")


def write(trace: Trace, path: Path) -> None:
    """Write *trace* in the Trace Event Format (its duration and metadata events).

    Source: "Trace Event Format", by the authors of Chrome's tracing.
    """
    calls = list(trace.calls)
    origin = calls[0].start if calls else 0
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "Synkro"}}
    ]
    for lane in range(MAIN, trace.size):
        name = "main process" if lane == MAIN else f"rank {lane}"
        common = {"ph": "M", "pid": pid, "tid": lane + 1}
        events.append({**common, "name": "thread_name", "args": {"name": name}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": lane + 1}})

    def event(lane: int, start: int, stop: int, name: str, kind: str, args: dict[str, Any]) -> None:
        times = {"ts": (start - origin) / 1e3, "dur": (stop - start) / 1e3}
        events.append(
            {"ph": "X", "pid": pid, "tid": lane + 1, "name": name, "cat": kind, **times, "args": args}
        )

    for number, call in enumerate(calls):
        event(MAIN, call.start, call.stop, call.name, "call", {"call": number})
    for span, number in _placed(trace, calls):
        args = {"function": calls[number].name, "call": number}
        if span.lane != MAIN:
            args["slice"] = span.piece
        event(span.lane, span.start, span.stop, span.what, "step", args)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def table(trace: Trace) -> str:
    """For each function how often it was called, how long it took, and where that time went.

    Shares are those of the ranks' mean; *imbalance* is how much longer than that mean the slowest
    rank computed.
    """
    calls = list(trace.calls)
    spent: dict[str, dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0] * trace.size)
    )
    groups = {what: share for share, whats in SHARES.items() for what in whats}
    for span, number in _placed(trace, calls):
        if span.lane != MAIN and span.what in groups:
            spent[calls[number].name][groups[span.what]][span.lane] += span.stop - span.start
    lengths: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        lengths[call.name].append(call.stop - call.start)
    titles = ["function", "calls", "ms a call", *SHARES, "overhead", "imbalance"]
    rows = [_row(name, lengths[name], spent[name]) for name in lengths]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [titles, *rows]
    ]
    if trace.lost:
        lines.append(f"({trace.lost} marks came too fast to be kept: shares are too low.)")
    return "\n".join(lines)


def _row(name: str, lengths: Sequence[int], spent: dict[str, list[float]]) -> list[str]:
    whole = sum(lengths)
    shares = [sum(spent[share]) / len(spent[share]) / whole for share in SHARES]
    compute = spent["compute"]
    mean = sum(compute) / len(compute)
    imbalance = f"{max(compute) / mean - 1:.0%}" if mean else "-"
    percent = [f"{share:.0%}" for share in [*shares, max(0.0, 1 - sum(shares))]]
    return [name, str(len(lengths)), f"{whole / len(lengths) / 1e6:.3f}", *percent, imbalance]


def plot(trace: Trace, path: Path, count: int) -> None:
    """Draw the last *count* calls, a lane for the main process and one for each rank.

    Raises: NotAvailable without matplotlib.
    """
    try:
        figure_of = importlib.import_module("matplotlib.figure").Figure
        patches = importlib.import_module("matplotlib.patches")
    except ImportError:
        raise NotAvailable("plot_timeline() needs matplotlib: pip install matplotlib.") from None
    calls = list(trace.calls)
    first = max(0, len(calls) - count)
    origin = calls[first].start
    figure = figure_of(figsize=(12, 1.5 + 0.5 * (trace.size + 1)), layout="constrained")
    axes = figure.subplots()
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span, number in _placed(trace, calls):
        if number >= first:
            bar = ((span.start - origin) / 1e6, (span.stop - span.start) / 1e6)
            bars[span.lane, span.what].append(bar)
    for (lane, what), pieces in bars.items():
        axes.broken_barh(pieces, (lane - 0.4, 0.8), facecolors=_COLOURS[what])
    for call in calls[first:]:
        middle = ((call.start + call.stop) / 2 - origin) / 1e6
        axes.annotate(call.name, (middle, MAIN - 0.5), ha="center", va="bottom", fontsize=8)
    lanes = range(MAIN, trace.size)
    axes.set_yticks(lanes, ["main process" if lane == MAIN else f"rank {lane}" for lane in lanes])
    axes.set_ylim(trace.size - 0.5, MAIN - 1)
    axes.set_xlabel("ms")
    used = [what for what in _COLOURS if any(what == each for _, each in bars)]
    handles = [patches.Patch(color=_COLOURS[what], label=what) for what in used]
    figure.legend(handles=handles, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=150)


def _placed(trace: Trace, calls: Sequence[Called]) -> list[tuple[Span, int]]:
    """The spans that lie in a call, each with the number of that."""
    starts = [call.start for call in calls]
    placed = []
    for span in trace.spans():
        number = bisect_right(starts, span.start) - 1
        if number >= 0 and span.start < calls[number].stop:
            placed.append((span, number))
    return placed
