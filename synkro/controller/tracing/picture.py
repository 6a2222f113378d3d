"""A trace as a picture: the last calls, lanes for the main process and one for each rank.

Only what draws imports this module: it needs matplotlib.  All places are in inches, so that labels can
be laid out before anything is drawn::

    title
                 ┌ a long name
                 │┌ small ×3             rows of labels: a call's begins where the call does
    ┌ large      ││
    main process ███████████████
    rank 0       ███████████████         a lane each
    rank 1       ███████████████
                 0    5   10  ms
    ■ plan  ■ send  ■ wait               what is there, and nothing else
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from ...errors import InvalidValue, counted
from .trace import MAIN, Trace, called, labels, placed

COLOURS = {
    "plan": "#660066",
    "copy": "#885500",
    "send": "#bb44ff",
    "wait": "#dddddd",
    "collect": "#bb0088",
    "wake": "#889999",
    "begin": "#222222",
    "load": "#004400",
    "inputs": "#ff9922",
    "compute": "#009955",
    "collective": "#0000dd",
    "outputs": "#ffcc00",
    "store": "#bbbb88",
    "reduce": "#00bbff",
    "wait for others": "#ff4455",
}
"""The colours of steps, in the order in which these come: on the main process, and on a rank.

They were searched for: any two are at least 0.09 apart in OKLab, also as seen without red, green or
blue cones (Machado, Oliveira and Fernandes 2009).
"""

_GONE = "not kept"

_WIDTH, _LEFT, _RIGHT = 12.0, 1.0, 0.25
_TOP, _LANE, _LINE, _AXIS = 0.4, 0.4, 0.17, 0.5  # heights; a line's is that of small text
_SMALL, _GAP = 8, 0.03  # points; inches beside a label
_ROWS = 10  # of labels; where there would be more, labels become one
_LETTERS, _NAME = 48, 28  # that a label has at most, and a name in it
_COLUMNS = 8  # of the legend
_UNITS = (("us", 1e3), ("ms", 1e6), ("s", 1e9))


class Timeline(Figure):
    """A figure of matplotlib's that pyplot does not know of.  Notebooks show it."""

    def _repr_png_(self) -> bytes:
        """The figure as PNG, for notebooks; those that have imported pyplot need it not."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


@dataclass(frozen=True)
class Label:
    """What stands above calls that lie side by side.

    Attributes:
        names: how often each function is called there.
        start, stop: when the first begins, and the last ends, in ns.
        row: 1 is the lowest.
    """

    names: Counter[str]
    start: int
    stop: int
    row: int = 0

    @property
    def text(self) -> str:
        parts = [
            _short(name, _NAME) + (f" ×{times}" if times > 1 else "")
            for name, times in self.names.items()
        ]
        return _short(", ".join(parts), _LETTERS)


def arranged(
    calls: Iterable[tuple[str, int, int]], scale: float, width: Callable[[str], float]
) -> list[Label]:
    """Labels for *calls* (name, start, stop; in their order) that do not overlap, from right to left.

    A label begins where its calls do, on a pole that stands there, and lies above the poles that it
    reaches over.  Calls of one function share a label where theirs would overlap; so do others where
    the rows end.  *scale* is in inches a ns, *width* gives a text's in inches.
    """
    done: list[Label] = []
    for name, start, stop in reversed(list(calls)):
        label = Label(Counter([name]), start, stop)
        while True:
            end = label.start * scale + width(label.text)
            row = 1
            for other in reversed(done):
                if other.start * scale >= end:
                    break
                row = max(row, other.row + 1)
            if row == 1:
                break
            several = len(label.names | done[-1].names) > 1
            crowded = row > _ROWS or max(len(label.names), len(done[-1].names)) > 1
            if several and not crowded:
                break
            later = done.pop()  # which shares the label
            label = Label(label.names + later.names, label.start, later.stop)
        done.append(replace(label, row=row))
    return done


def draw(trace: Trace, path: Path | None, count: int) -> Timeline:
    """Draw the last *count* calls, and write the picture to *path*, if that is given.

    Raises: InvalidValue for a path whose suffix stands for no kind of picture.
    """
    calls = trace.calls
    first = max(0, len(calls) - count)
    origin = calls[first].start
    width, room = _measure(), _WIDTH - _LEFT - _RIGHT
    named = [
        (" ".join(name.split()), call.start - origin, call.stop - origin)
        for name, call in zip(labels(calls)[first:], calls[first:], strict=True)
    ]
    fits, scale = room / max(1, named[-1][2]), 0.0
    while scale != fits:  # the last labels may need room beside the last calls
        scale = fits
        above = arranged(named, scale, width)
        fits = min([scale, *((room - width(each.text)) / each.start for each in above if each.start)])
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span, number in placed(trace, calls):
        if number >= first:
            bars[span.lane, span.what].append((span.start - origin, span.stop - span.start))
    for lane, start, stop in trace.gaps():
        if start < calls[-1].stop and stop > origin:
            bars[lane, _GONE].append((max(start, origin) - origin, stop - max(start, origin)))
    title = counted(len(calls), "traced call")
    title = f"the last {len(named)} of {title}" if first else title
    shown = [lane for lane in trace.lanes if lane >= MAIN or any(each == lane for each, _ in bars)]
    figure = _drawn(title, shown, bars, above, scale)
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:  # a suffix that stands for no kind of picture
            raise InvalidValue(f"{path} cannot be drawn: {error}.") from None
    return figure


def _drawn(
    title: str,
    lanes: Sequence[int],
    bars: dict[tuple[int, str], list[tuple[float, float]]],
    above: list[Label],
    scale: float,
) -> Timeline:
    """The picture of *bars* (start and length, in ns) of lanes and steps, with the labels *above*."""
    room = _WIDTH - _LEFT - _RIGHT
    unit, ns = next((each for each in _UNITS if room / scale < 1000 * each[1]), _UNITS[-1])
    entries = [what for what in (*COLOURS, _GONE) if any(what == each for _, each in bars)]
    legend = _LINE * (1 + -(-len(entries) // _COLUMNS))
    up = 0.5 + (_LINE * (0.5 + max(label.row for label in above))) / _LANE  # from the first lane on
    height = _LANE * (len(lanes) - 0.5 + up)
    whole = _TOP + height + _AXIS + legend
    figure = Timeline(figsize=(_WIDTH, whole))
    box = (_LEFT / _WIDTH, (_AXIS + legend) / whole, room / _WIDTH, height / whole)
    axes = figure.add_axes(box, xlim=(0, room / scale / ns), ylim=(len(lanes) - 0.5, -up))
    for (lane, what), pieces in bars.items():
        scaled = [(start / ns, length / ns) for start, length in pieces]
        axes.broken_barh(scaled, (lanes.index(lane) - 0.4, 0.8), **_style(what))
    for label in above:
        x, y = label.start / ns, -0.5
        top = y - label.row * _LINE / _LANE
        axes.plot([x, x, label.stop / ns], [top, y, y], color="grey", linewidth=0.7)
        text = axes.text(x + _GAP / scale / ns, top, label.text, fontsize=_SMALL, va="top")
        text.set(usetex=False, parse_math=False)  # a name is no formula
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(lanes)), list(map(called, lanes)), fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel(unit, fontsize=9)
    figure.text(_LEFT / _WIDTH, 1 - 0.12 / whole, title, fontsize=10, va="top")
    figure.legend(
        handles=[Patch(label=what, **_style(what)) for what in entries],
        loc="lower left",
        bbox_to_anchor=(_LEFT / _WIDTH, 0.08 / whole),
        borderaxespad=0,
        ncols=_COLUMNS,
        fontsize=_SMALL,
        frameon=False,
    )
    return figure


def _style(what: str) -> dict[str, Any]:
    if what == _GONE:
        return {"facecolor": "white", "edgecolor": "grey", "hatch": "///"}
    return {"facecolor": COLOURS[what], "edgecolor": COLOURS[what], "linewidth": 0.3}


def _measure() -> Callable[[str], float]:
    """What measures a label, with the space around it."""
    font = FontProperties(size=_SMALL)

    @cache
    def letter(one: str) -> float:
        points: float = text_to_path.get_text_width_height_descent(one, font, ismath=False)[0]
        return points / 72

    return lambda text: _GAP + sum(map(letter, text)) + _GAP


def _short(text: str, letters: int) -> str:
    """*text*, without its middle if it has more *letters*."""
    return text if len(text) <= letters else f"{text[: letters - 8]}…{text[-7:]}"
