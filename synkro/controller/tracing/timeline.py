"""A trace as a file for Perfetto and Chrome, and as a table of where the time went."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidType, InvalidValue, shown
from ...values.arrays import Array
from .trace import MAIN, Called, Span, Trace

SHARES: dict[str, tuple[str, ...]] = {
    "compute": ("compute", "load"),
    "transfer": ("copy", "inputs", "outputs", "store", "collect"),
    "communication": ("collective", "reduce"),
    "waiting": ("wait for others",),
}
"""The columns of the table, and the spans that each counts; the rest of a call is overhead."""


def checked_path(path: Any) -> Path:
    """*path*, absolute.  Raises: InvalidType, InvalidValue unless a file can be written there."""
    try:
        checked = Path(path)
    except TypeError:
        raise InvalidType(f"expected the path of a file to write; got {shown(path)}.") from None
    try:
        possible = os.access(checked if checked.exists() else checked.parent, os.W_OK)
    except ValueError:  # a zero in it
        possible = False
    if not possible or checked.is_dir():
        raise InvalidValue(f"{checked} cannot be written: name a file in a folder that can be.")
    try:
        return checked.absolute()
    except OSError as error:
        raise InvalidValue(
            f"{checked} is relative to a working directory that was deleted, or cannot be reached "
            f"({error.strerror}): name an absolute path, or change to one that exists (os.chdir)."
        ) from None


def write(trace: Trace, path: Path) -> None:
    """Write *trace* in the Trace Event Format (its duration and metadata events).

    Source: "Trace Event Format", by the authors of Chrome's tracing.

    Raises: InvalidValue if the file cannot be written.
    """
    try:
        with path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(_events(trace)):  # one by one: there may be a million
                file.write(f"{',' if number else ''}\n{json.dumps(event)}")
            file.write("\n]}\n")
    except OSError as error:
        raise InvalidValue(f"the trace could not be written to {path}: {error}") from None


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    calls = trace.calls
    origin = calls[0].start if calls else 0
    pid = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "Synkro"}}
    threads = {lane: number for number, lane in enumerate(trace.lanes)}
    for lane, number in threads.items():
        common = {"ph": "M", "pid": pid, "tid": number}
        yield {**common, "name": "thread_name", "args": {"name": called(lane)}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": number}}

    def event(lane: int, start: int, stop: int, name: str, kind: str, **args: Any) -> dict[str, Any]:
        what = {"ph": "X", "pid": pid, "tid": threads[lane], "name": name, "cat": kind}
        when = {"ts": (start - origin) / 1e3, "dur": (stop - start) / 1e3}
        return {**what, **when, "args": args}

    for lane, start, stop in trace.gaps():
        yield event(lane, max(start, origin), max(stop, origin), "steps that were not kept", "gap")
    for number, call in enumerate(calls):
        yield event(call.lane, call.start, call.stop, call.name, "call", call=number)
    for span, number in placed(trace, calls):
        args: dict[str, Any] = {"function": calls[number].name, "call": number}
        if span.what in ("compute", "collective"):
            args["slice"] = span.piece
        yield event(span.lane, span.start, span.stop, span.what, "step", **args)


def table(trace: Trace) -> str:
    """A row for each function: how often it was called, how long it took, and where that time went.

    Shares are means over the ranks, or the main process's where the ranks have nothing to do;
    *imbalance* is how much longer than the mean the slowest rank computed.  Calls of which marks are
    missing are left out, and counted below.
    """
    calls, whole = trace.calls, trace.whole()
    names = labels(calls)
    elapsed: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(trace.size))
    groups = {what: share for share, whats in SHARES.items() for what in whats}
    for span, number in placed(trace, calls):
        if span.what in groups and whole[number]:
            ranks = slice(None) if span.lane <= MAIN else span.lane
            elapsed[names[number], groups[span.what]][ranks] += span.stop - span.start
    lengths: dict[str, list[int]] = defaultdict(list)
    ranks_of: dict[str, list[int]] = {}
    for label, call, known in zip(names, calls, whole, strict=True):
        if known:
            lengths[label].append(call.stop - call.start)
            ranks_of[label] = sorted(call.ranks)
    titles = ["function", "calls", "ms a call", *SHARES, "overhead", "imbalance"]
    rows = [
        _row(name, each, [elapsed[name, share][ranks_of[name]] for share in SHARES])
        for name, each in lengths.items()
    ]
    first, *others = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    pattern = "  ".join([f"{{:{first}}}", *[f"{{:>{width}}}" for width in others]])
    lines = [pattern.format(*row) for row in [titles, *rows]]
    if missing := len(calls) - sum(whole):
        left_out = "1 call is" if missing == 1 else f"{missing} calls are"
        lines.append(
            f"({left_out} left out: too long ago, or with too many slices or collectives, for all "
            f"steps to be kept.)"
        )
    return "\n".join(lines if rows else lines[1:])


def labels(calls: Sequence[Called]) -> list[str]:
    """The calls' functions by their names; those that share a name are numbered."""
    known: dict[tuple[str, int], str] = {}
    count: dict[str, int] = defaultdict(int)
    for call in calls:
        if (call.name, call.number) not in known:
            count[call.name] += 1
            suffix = f" ({count[call.name]})" if count[call.name] > 1 else ""
            known[call.name, call.number] = call.name + suffix
    return [known[call.name, call.number] for call in calls]


def _row(name: str, lengths: Sequence[int], elapsed: Sequence[Array]) -> list[str]:
    """The row of a function with calls of these *lengths*, and its shares of them on each rank."""
    whole = sum(lengths)
    shares = [share.mean() / whole for share in elapsed]
    compute = elapsed[0]
    imbalance = f"{compute.max() / compute.mean() - 1:.0%}" if compute.any() else "-"
    percent = [f"{share:.0%}" for share in [*shares, max(0.0, 1 - sum(shares))]]
    return [name, str(len(lengths)), f"{whole / len(lengths) / 1e6:.3f}", *percent, imbalance]


def placed(trace: Trace, calls: Sequence[Called]) -> list[tuple[Span, int]]:
    """The spans that lie in a call, each with the number of that."""
    own: dict[int, list[int]] = defaultdict(list)  # by lane: the numbers of its calls
    for number, call in enumerate(calls):
        for lane in (call.lane, *call.ranks):
            own[lane].append(number)
    starts = {lane: [calls[number].start for number in numbers] for lane, numbers in own.items()}
    placed = []
    for span in trace.spans():
        at = bisect_right(starts.get(span.lane, []), span.start) - 1
        if at >= 0 and span.start < (end := calls[number := own[span.lane][at]].stop):
            placed.append((span if span.stop <= end else replace(span, stop=end), number))
    return placed


def called(lane: int) -> str:
    """What a lane is called."""
    if lane >= 0:
        return f"rank {lane}"
    return "main process" if lane == MAIN else f"main {MAIN - lane + 1}"
