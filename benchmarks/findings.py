"""What ``multi_gpu`` is to measure, and what it found, or did not and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .common import Samples

SYNKRO = "Synkro"
RATIO = "×"


SECTIONS = {"all_reduce": 1.0, "scaling": 1.0, "resnet": 2.0}
"""Each one's share of the time."""

TOLERANCES = {"float32": 1e-3, "bf16": 5e-2}
"""How far two ways to train may be apart, relatively, after a few steps."""

SETTINGS = {
    "cuda": {
        "sizes": [1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 28, 1 << 30],
        "dtypes": ["float32", "float16"],
        "matrix": 8192,
        "rows": 1 << 30,
        "images": 64,
        "size": 224,
        "width": 64,
        "classes": 1000,
        "steps": 10,
        "runs": [3, 15],
        "turn": 0.3,
        "seconds": 180.0,
    },
    "cpu": {
        "sizes": [1 << 10, 1 << 16, 1 << 20],
        "dtypes": ["float32"],
        "matrix": 256,
        "rows": 1 << 22,
        "images": 4,
        "size": 32,
        "width": 8,
        "classes": 10,
        "steps": 3,
        "runs": [3, 9],
        "turn": 0.05,
        "seconds": 40.0,
    },
}
"""By device.  *sizes* and *rows* in bytes; *runs*: the least, and the most where there is time; *turn*:
seconds of work a side and run, where its rounds can be chosen; *steps*: of training, in a turn.
*images*: fewer than 4 of 32² leave the last normalization so few values that rounding errors explode."""

QUICK = {
    "cuda": {"sizes": [1 << 10, 1 << 20, 1 << 28], "steps": 4, "runs": [2, 5], "seconds": 60.0},
    "cpu": {"sizes": [1 << 10, 1 << 16], "runs": [2, 3], "turn": 0.01, "seconds": 30.0},
}


# ── what to measure ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Layout:
    """On which devices the ranks of one round are: ``cpu``, or ``cuda:0``, ``cuda:1`` …"""

    devices: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        return self.devices[0].partition(":")[0]

    @property
    def path_only(self) -> bool:
        """Whether ranks share a GPU: that shows that the path works, and is no scaling."""
        return self.kind == "cuda" and len(set(self.devices)) < self.size

    def __str__(self) -> str:
        if self.path_only:
            return f"{self.size} ranks on {len(set(self.devices))} GPU (path only)"
        return f"{self.size} {'GPU' if self.kind == 'cuda' else 'CPU worker'}{'s' * (self.size > 1)}"


def layouts(gpus: int, ranks: Sequence[int] | None = None) -> list[Layout]:
    """Those to measure: these numbers of *ranks*, or powers of two up to all *gpus* (0: CPUs).

    Where ranks are more than GPUs, they share them.
    """
    if ranks is None:
        powers = [1 << power for power in range(gpus.bit_length())]
        ranks = sorted({*powers, gpus}) if gpus > 1 else [1, 2]
    return [
        Layout(tuple(f"cuda:{rank % gpus}" if gpus else "cpu" for rank in range(count)))
        for count in ranks
    ]


def command_line(text: str) -> argparse.ArgumentParser:
    """What the command line may say; *text* describes the program."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SETTINGS, help="default: cuda where there is a GPU")
    parser.add_argument("--ranks", type=numbers, metavar="1,2,…", help="default: 1, 2, 4 … all GPUs")
    parser.add_argument("--only", type=sections, default=list(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    parser.add_argument("--seconds", type=float, help="how long all of it should take, roughly")
    parser.add_argument("--images", type=int, help="a rank and step")
    parser.add_argument("--size", type=int, help="height and width of an image")
    parser.add_argument("--width", type=int, help="of the network; 64 is ResNet-50")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16; default float32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record to FILE, as JSON")
    return parser


def settings_of(options: argparse.Namespace, device: str) -> argparse.Namespace:
    """Those of the device and the scale; what the command line says comes before them."""
    chosen = {"ranks": None} | SETTINGS[device] | (QUICK[device] if options.quick else {})
    given = {key: value for key, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{**chosen, **given, "device": device})


def sections(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - SECTIONS.keys():
        raise argparse.ArgumentTypeError(f"no section {sorted(unknown)}; there are {list(SECTIONS)}")
    return [section for section in SECTIONS if section in chosen]


def numbers(text: str) -> list[int]:
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 1:
        raise argparse.ArgumentTypeError("ranks are at least 1")
    return found


# ── what is found ───────────────────────────────────────────────────────────────────────────────────


def bandwidths(nbytes: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth of an all-reduce in GB/s (10⁹ bytes), as nccl-tests has them.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    algorithm = nbytes / seconds / 1e9
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference; infinite where something is missing or not finite."""
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-12), initial=0.0))


def rounds_for(seconds: float, once: float, most: int) -> int:
    """How many rounds that take *once* fill *seconds*: 1 to *most*."""
    return int(min(most, max(1, seconds / max(once, 1e-9))))


def summary(values: Sequence[float]) -> dict[str, Any]:
    p10, median, p90 = (float(value) for value in np.percentile(values, (10, 50, 90)))
    return {"median": median, "p10": p10, "p90": p90, "runs": len(values)}


class Findings:
    """Prints what is found as it comes, keeps it for the record, and shows it in a table at the end.

    Attributes:
        rows: one figure of one side each, or a ratio of two sides' speeds.
        checks: comparisons of numbers, not of speed.
        missing: what was not measured, with the reason.
        ways: on which way workers on GPUs reduced arrays, by layout.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.missing: list[dict[str, Any]] = []
        self.ways: dict[str, str] = {}

    def speeds(
        self,
        section: str,
        layout: Layout,
        what: str,
        unit: str,
        samples: Samples,
        speed: Callable[[float], float],
    ) -> None:
        """Every side's *speed* of its seconds, and Synkro's beside each in the same runs."""
        place = {"section": section, "layout": str(layout), "ranks": layout.size}
        place |= {"path_only": layout.path_only, "what": what}
        for side, seconds in samples.items():
            self._row({**place, "side": side, "unit": unit}, [speed(value) for value in seconds])
        for side, seconds in samples.items():
            if side != SYNKRO and SYNKRO in samples:
                ratios = [theirs / ours for theirs, ours in zip(seconds, samples[SYNKRO], strict=True)]
                self._row({**place, "side": f"{SYNKRO} ÷ {side}", "unit": RATIO, "of": unit}, ratios)

    def _row(self, place: dict[str, Any], values: Sequence[float]) -> None:
        row = {**place, **summary(values)}
        self.rows.append(row)
        print(
            f"  {row['layout']}, {row['what']}: {row['side']} {row['median']:.4g} {row['unit']} "
            f"(p10 {row['p10']:.4g}, p90 {row['p90']:.4g}, {row['runs']} runs)",
            flush=True,
        )

    def miss(self, section: str, layout: Layout, what: str, side: str, why: str) -> None:
        place = {"section": section, "layout": str(layout), "what": what}
        self.missing.append({**place, "side": side, "reason": why})
        print(f"  {layout}, {what}: {side} not measured: {why}", flush=True)

    def reason(self, side: str) -> str:
        """Why this side was not measured the last time."""
        return next(miss["reason"] for miss in reversed(self.missing) if miss["side"] == side)

    def compare(
        self,
        layout: Layout,
        peer: str,
        ours: dict[str, list[Sequence[float]]],
        theirs: Sequence[dict[str, list[float]]],
        tolerance: float,
    ) -> bool:
        """Whether the numbers under every key agree on all ranks, to a relative *tolerance*."""
        mine = {key: np.asarray(ranks).tolist() for key, ranks in ours.items()}
        yours = {key: [rank[key] for rank in theirs] for key in ours}
        distances = {key: apart(mine[key], yours[key]) for key in ours}
        agree = all(distance <= tolerance for distance in distances.values())
        check = {"layout": str(layout), "peer": peer, "agree": agree, "tolerance": tolerance}
        self.checks.append(
            {**check, "apart": distances, "Synkro": mine["losses"], "theirs": yours["losses"]}
        )
        print(f"  {layout}: {self._verdict(self.checks[-1])}", flush=True)
        return agree

    @staticmethod
    def _verdict(check: dict[str, Any]) -> str:
        verdict = "agree" if check["agree"] else "DISAGREE"
        distances = ", ".join(f"{key} {value:.1e}" for key, value in check["apart"].items())
        limit = f"{check['tolerance']:.0e}"
        return f"{SYNKRO} and {check['peer']} {verdict}; apart, relatively: {distances} (limit {limit})"

    def finish(self) -> None:
        """Add speed-up and efficiency to rows: over one rank of the same side, and over bare torch."""
        known = {(r["section"], r["what"], r["side"], r["unit"], r["ranks"]): r for r in self.rows}
        for row in self.rows:
            section, what, side, unit = (row[key] for key in ("section", "what", "side", "unit"))
            if section == "all_reduce" or row["path_only"] or unit == RATIO or side == "bare torch":
                continue
            for name, reference in (
                ("one rank", known.get((section, what, side, unit, 1))),
                ("bare torch", known.get((section, what, "bare torch", unit, row["ranks"]))),
            ):
                if reference:
                    gain = row["median"] / reference["median"]
                    row[f"speed-up over {name}"] = gain
                    row[f"efficiency beside {name}"] = gain / row["ranks"]

    def table(self) -> None:
        """A line a comparison: Synkro, and in brackets how fast it is beside the others."""
        print(f"\nmedians; [{SYNKRO}'s speed ÷ theirs]; efficiency: speed ÷ (ranks × speed of one rank)")
        same = ("section", "layout", "what", "unit")
        for mine in self.rows:
            shown_as_busbw = mine["unit"] == "GB/s algbw" and mine["ranks"] > 1
            if mine["side"] != SYNKRO or shown_as_busbw:
                continue
            ratios = {
                row["side"]: row["median"]
                for row in self.rows
                if row["unit"] == RATIO
                and (row["section"], row["layout"], row["what"], row["of"])
                == tuple(mine[k] for k in same)
            }
            cells = [f"{mine['layout']:15} {mine['what']:22} {mine['median']:9.4g} {mine['unit']}"]
            for row in self.rows:
                if row is not mine and all(row[key] == mine[key] for key in same):
                    ratio = ratios[f"{SYNKRO} ÷ {row['side']}"]
                    cells.append(f"{row['side']} {row['median']:.4g} [{ratio:.2f}]")
            if mine["ranks"] > 1 and "efficiency beside one rank" in mine:
                cells.append(f"efficiency {mine['efficiency beside one rank']:.2f}")
            print("; ".join(cells))
        for check in self.checks:
            print(f"{check['layout']:15} {self._verdict(check)}")
        whats: dict[tuple[str, ...], list[str]] = {}
        for miss in self.missing:
            whats.setdefault((miss["side"], miss["layout"], miss["reason"]), []).append(miss["what"])
        for (side, layout, why), names in whats.items():
            print(f"not measured: {side}, {layout}, {' and '.join(names)}: {why}")

    @property
    def sound(self) -> bool:
        """Whether Synkro was measured wherever it was to be, and agreed with its peers."""
        return all(check["agree"] for check in self.checks) and not any(
            miss["side"].startswith((SYNKRO, "all")) for miss in self.missing
        )
