"""One page over all records: plots, tables, figures, their targets if judged, and what was not measured.

``python -m benchmarks.report RECORDS.json FOLDER`` writes ``report.html``, which needs no other file,
and each plot as a PNG beside it.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from .common import readable

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
h2 { margin-top: 2.5em; border-bottom: 1px solid #ccc; } img { max-width: 100%; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
td, th { padding: .15em .8em; text-align: right; }
td { white-space: nowrap; } td:first-child { white-space: normal; }
td:first-child, th:first-child { text-align: left; } th { border-bottom: 1px solid #999; }
.met { color: light-dark(#17692e, #7fd494); }
.missed { color: light-dark(#b3261e, #ff9a90); }
.quiet { color: light-dark(#666, #aaa); overflow-wrap: anywhere; }
"""


_MINE = ("tab:green", "limegreen", "darkgreen", "olive", "yellowgreen")
_OTHERS = tuple(f"tab:{name}" for name in ("blue", "orange", "red", "purple", "brown", "pink", "cyan"))


def write(records: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write the page and its plots into *folder*; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, record in records.items():
        if "failed" in record:
            text = html.escape(record["failed"])
            parts.append(f"<h2 id={name}>{name}</h2><p class=missed>Failed: {text}</p>")
            continue
        pictures = []
        for number, table in enumerate(record["tables"]):
            picture = drawn(table, name)
            (folder / f"{name}_{number}.png").write_bytes(picture)
            pictures.append(picture)
        parts.append("\n".join(_section(name, record, pictures)))
    page = folder / "report.html"
    records = {name: record for name, record in records.items() if "failed" not in record}
    environment = next(iter(records.values()))["environment"] if records else {}
    page.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width'><title>Synkro, measured</title>"
        f"<style>{_STYLE}</style><h1>Synkro, measured</h1>{_about(environment)}{_missed(records)}"
        + "\n".join(parts)
        + "</html>\n"
    )
    return page


def drawn(table: dict[str, Any], question: str) -> bytes:
    """The table as a PNG: a curve a series where its rows lie along an axis, else a bar a side."""
    curves = "x" in table
    height = 5.0 if curves else 0.6 + 0.4 * max(6, len(table["rows"]))
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    (_curves if curves else _bars)(axes, table)
    axes.set_title(f"{question}: {table['title']}", fontsize=10)
    axes.grid(which="both", alpha=0.2)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _curves(axes: Any, table: dict[str, Any]) -> None:
    series: dict[str, list[dict[str, Any]]] = {}
    for row in table["rows"]:
        series.setdefault(row["series"], []).append(row)
    mine, others = iter(_MINE), iter(_OTHERS)
    for name, rows in series.items():
        rows.sort(key=lambda row: row["x"])
        xs, medians = [row["x"] for row in rows], [row["median"] for row in rows]
        if _is_limit(name):
            style = {"color": "black", "linestyle": "--"}
        elif _is_ours(name):
            style = {"color": next(mine), "marker": "o", "linewidth": 2.5}
        else:
            style = {"color": next(others), "marker": "o", "linewidth": 1.2}
        axes.plot(xs, medians, label=name, **style)
        low, high = [row["p10"] for row in rows], [row["p90"] for row in rows]
        axes.fill_between(xs, low, high, alpha=0.15, color=style["color"])
    axes.set_xscale("log")
    axes.set_xticks(sorted({row["x"] for row in table["rows"]}))
    axes.xaxis.set_minor_locator(NullLocator())
    unit = "bytes" if table["x"] == "bytes" else ""
    axes.xaxis.set_major_formatter(lambda x, _: readable(x, unit))
    axes.set_xlabel(table["x"])
    if not _measure(axes.yaxis, table) and table["unit"] == "s":
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _bars(axes: Any, table: dict[str, Any]) -> None:
    """Bars, or on a logarithmic axis, where lengths say nothing, points."""
    rows = table["rows"][::-1]
    names = [row["name"] for row in rows]
    medians = [row["median"] for row in rows]
    logarithmic = _measure(axes.xaxis, table)
    for place, row in enumerate(rows):
        colour = next(iter(_MINE)) if _is_ours(row["name"]) else "tab:grey"
        colour = "black" if _is_limit(row["name"]) else colour
        spread = [[row["median"] - row["p10"]], [row["p90"] - row["median"]]]
        if logarithmic:
            point = {"fmt": "o", "markersize": 9, "color": colour, "ecolor": colour, "capsize": 3}
            axes.errorbar([row["median"]], [place], xerr=spread, **point)
        else:
            axes.barh([place], [row["median"]], xerr=spread, color=colour, capsize=2)
        text = readable(row["median"], table["unit"])
        above = (8, 5) if logarithmic else (8, 0)
        axes.annotate(
            text, (row["p90"], place), xytext=above, textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.15, y=0.08)
    if not logarithmic and min(medians) >= 0:
        axes.set_xlim(left=0)


def _measure(axis: Any, table: dict[str, Any]) -> bool:
    """Label an axis of medians, and return whether it is logarithmic: where their orders differ."""
    medians = [row["median"] for row in table["rows"]]
    logarithmic = min(medians) > 0 and max(medians) > 5 * min(medians)
    if logarithmic:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_minor_formatter(NullFormatter())
        if max(medians) < 100 * min(medians):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: readable(value, table["unit"]))
    return logarithmic


def _is_ours(side: str) -> bool:
    return side.lower().startswith("synkro")


def _is_limit(side: str) -> bool:
    return side.startswith(("floor", "perfect scaling"))


def _section(name: str, record: dict[str, Any], pictures: list[bytes]) -> Iterator[str]:
    environment = record["environment"]
    yield f"<h2 id={name}>{name}</h2><p><b>{html.escape(record['asks']).replace('``', '')}</b></p>"
    for paragraph in record.get("floor_and_peers", ()):
        yield f"<p>{html.escape(paragraph).replace('``', '')}</p>"
    yield (
        f"<p class=quiet>{record['scale']} run, {environment['date']}, commit "
        f"{html.escape(str(environment['commit'])[:10])}, {record.get('seconds', '?')} s, load at its "
        f"start {environment['load']:.2g}</p>"
    )
    for table, picture in zip(record["tables"], pictures, strict=True):
        encoded = base64.b64encode(picture).decode()
        yield f"<img alt='{html.escape(table['title'])}' src='data:image/png;base64,{encoded}'>"
        yield "<table><tr><th><th>median<th>p10<th>p90<th>runs</tr>"
        for row in table["rows"]:
            cells = "".join(
                f"<td>{readable(row[key], table['unit'])}" for key in ("median", "p10", "p90")
            )
            yield f"<tr><td>{html.escape(row['name'])}{cells}<td>{row['runs']}</tr>"
        yield "</table>"
    yield _figures(record["figures"])
    for note in record["notes"]:
        yield f"<p>{html.escape(note)}</p>"
    for peer in record.get("not_measured", ()):
        text = html.escape(f"{peer['name']} ({peer['why']})")
        yield f"<p class=missed>Not measured: {text}</p>"


def _figures(figures: list[dict[str, Any]]) -> str:
    if not figures:
        return ""
    judged = any("met" in each for each in figures)
    rows = "".join(
        f"<tr><td>{html.escape(each['name'])}<td>{readable(each['value'], each['unit'])}"
        f"{_verdict(each) if judged else ''}</tr>"
        for each in figures
    )
    return f"<table><tr><th>figure<th>value{'<th>target<th>' if judged else ''}</tr>{rows}</table>"


def _verdict(figure: dict[str, Any]) -> str:
    if "met" not in figure:
        return "<td><td>"
    word = "met" if figure["met"] else "missed"
    return f"<td>{html.escape(figure['target'])}<td class={word}>{word}"


def _missed(records: dict[str, dict[str, Any]]) -> str:
    """How many targets were met, of those that were judged, and those that were not, with links."""
    targets = [(name, each) for name, record in records.items() for each in record["figures"]]
    targets = [(name, each) for name, each in targets if "met" in each]
    missed = [(name, each) for name, each in targets if not each["met"]]
    items = "".join(
        f"<li><a href=#{name}>{name}</a>: {html.escape(each['name'])} is "
        f"{readable(each['value'], each['unit'])}, target {html.escape(each['target'])}</li>"
        for name, each in missed
    )
    scales = {record["scale"] for record in records.values()} - {"full"}
    warning = (
        f"<p class=missed>Some are {' and '.join(sorted(scales))} runs: noise.</p>" if scales else ""
    )
    if not targets:
        return warning
    met = f"{len(targets) - len(missed)} of {len(targets)} targets met"
    return warning + (f"<p>{met}; missed:</p><ul>{items}</ul>" if missed else f"<p>{met}.</p>")


def _about(environment: dict[str, Any]) -> str:
    if not environment:
        return "<p>No records.</p>"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"<p>{html.escape(environment['cpu'])}, {environment['cores']} cores, Linux "
        f"{html.escape(environment['kernel'])}, Python {environment['python']}.</p>"
        f"<p class=quiet>{html.escape(versions)}</p>"
        f"<p>Sides take turns in every run; a figure is the median over the runs, whiskers and bands "
        f"are its 10th and 90th percentile. Ratios are of medians of one run of the program.</p>"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(write(json.loads(options.records.read_text()), options.folder))
