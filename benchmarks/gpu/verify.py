"""Do GPU workers keep their promises here, and how fast are they?  One command for a machine with a GPU.

::

    pip install -e ".[test,bench,cuda13]"                 # or cuda12, by the driver
    python -m benchmarks.gpu.verify                       # all of it, in under 9 minutes
    python -m benchmarks.gpu.verify --quick --only transfer,call
    python -m benchmarks.gpu.verify --only endurance --cycles 1000      # however long that takes

It runs the tests and the demos on the GPU, and then measures, each figure beside its floor or a peer in
the same run and after a comparison of results with NumPy's.  Each section is a process of its own with
its share of the time; what does not fit, cannot start or takes too long is listed as not measured, with
the reason.  A short table comes last, and a record as JSON: a full run on a GPU writes
``benchmarks/results/gpu.json``, others what ``--out`` says.  The record is there from the first section
on, so that a run that is ended leaves what it found.

``--against FILE`` compares each figure with that of an earlier record of the same GPU.

Exit status 1: a test, a demo or a comparison failed, a section broke, or a process could not be ended.
A target of speed that is missed is no failure.  On the tests' stand-in for CuPy all of it runs as well,
tiny, to show that it works; the record and the table say that this was no GPU, and judge no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..common import ROOT, environment, readable
from ..ranks import Ranks, RanksFailed, end, stuck
from .sections import FULL, MODULES, QUICK, STAND_IN, run_program

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"

SHARES = {
    "tests": 190,
    "demos": 60,
    "transfer": 35,
    "overlap": 20,
    "call": 15,
    "memory": 45,
    "endurance": 45,
    "collectives": 45,
    "peers": 25,
    "training": 60,
}
"""How the time is divided: each section gets its share of what is left when it begins."""

LEAST = 5.0
"""Seconds without which no section begins."""

GRACE = 25.0
"""Seconds that a section may be late: it may have to wait for processes that do not end."""

LINES = 60
"""That the table has at most …"""

WIDTH = 160
"""… and characters that they have."""

STAND_IN_NAME = "Stand-in"


# ── one section ──────────────────────────────────────────────────────────────────────────────────


def run_section(given: dict[str, Any], limit: float | None) -> dict[str, Any]:
    """The record of a section that is told what is *given*; it is ended after *limit* seconds."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        file = Path(folder, "record.json")
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.sections", json.dumps({**given, "file": str(file)})],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        start = time.monotonic()
        try:
            ended = _ends_within(process.pid, limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.stdin.close()
            end(process)
        record = json.loads(file.read_text()) if file.exists() else {"question": given["name"]}
        record = {"checks": [], "figures": [], "not_measured": [], **record}
        record["seconds"] = round(time.monotonic() - start, 1)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    if not ended:
        why = f"it was stopped after {record['seconds']:.0f} s"
        record["not_measured"].append({"name": "what was left", "reason": why})
    elif status := process.returncode:
        print("\n".join(said[-25:]), flush=True)
        record["errors"] = said[-100:]
        detail = f"exit status {status}: {said[-1] if said else 'it said nothing'}"
        record["checks"].append({"name": "runs to its end", "ok": False, "detail": detail})
    return record


def _ends_within(pid: int, limit: float | None) -> bool:
    """Whether a child ends in time.  It is not reaped, so that its number still stands for its group."""
    sentinel = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(sentinel, select.POLLIN)
        return bool(poll.poll(None if limit is None else limit * 1000))
    finally:
        os.close(sentinel)


# ── the machine ──────────────────────────────────────────────────────────────────────────────────


def look_around() -> dict[str, Any]:
    """The GPUs and versions, as another process sees them: CUDA never comes into this one."""
    with Ranks(["cuda:0"], "none", 120) as alone:
        machine: dict[str, Any] = alone.ask("describe")[0]
    machine["is_gpu"] = bool(machine["gpus"]) and STAND_IN_NAME not in machine["gpus"]
    machine["driver"] = _driver() if machine["is_gpu"] else None
    return machine


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        status, output = run_program(command, 60)
        if status == 0:
            return (output.split() or [None])[0]
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def table(record: dict[str, Any]) -> list[str]:
    """A line a figure; those without a target give way where there is too little room."""
    head = _head(record)
    lines = [line for section in record["sections"].values() for line in _lines(section)]
    room = LINES - len(head) - 2
    for unimportant in (True, False):
        while len(lines) > room and any(light == unimportant for light, _ in lines):
            last = max(index for index, (light, _) in enumerate(lines) if light == unimportant)
            del lines[last]
    total = sum(len(_lines(section)) for section in record["sections"].values())
    hidden = [f"… {total - len(lines)} more in the record"] if total > len(lines) else []
    return [*head, *(line for _, line in lines), *hidden]


def _head(record: dict[str, Any]) -> list[str]:
    surroundings, machine = record["environment"], record["machine"]
    versions = surroundings["versions"]
    names = ("cuda driver", "cupy", "nccl of cupy", "torch", "numpy")
    known = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    what = f"{len(machine['gpus'])} × {machine['gpus'][0]}"
    if not record["is_gpu"]:
        what = f"{what}: NOT A GPU, a stand-in made of NumPy; no figure here says anything of GPUs"
    commit = f"commit {str(surroundings['commit'])[:12]}, {surroundings['changed_files']} changed files"
    return [
        "",
        what,
        f"driver {machine['driver']}, {known}, python {surroundings['python']}",
        f"{surroundings['date']}, {commit}, {record['scale']}, {record['seconds']:.0f} s",
        *(f"{library}: {why}"[:WIDTH] for library, why in machine["broken"].items()),
        *record["not_ended"],
        "",
    ]


def _lines(section: dict[str, Any]) -> list[tuple[bool, str]]:
    """Each line of a section, and whether it can be done without."""
    name, lines = section["question"], []

    def line(light: bool, what: str, value: str, target: str = "", verdict: str = "") -> None:
        what = what if len(what) <= 58 else f"{what[:57]}…"
        lines.append((light, f"{name:11} {what:58} {value:>10} {target:>9} {verdict}".rstrip()))

    passed = sum(check["ok"] for check in section["checks"])
    if passed:
        line(False, "checks", f"{passed} ok")
    for check in section["checks"]:
        if not check["ok"]:
            line(False, f"{check['name']}: {check['detail']}", "FAILED")
    for texts in section.get("ways", {}).values():
        lines.extend((False, f"{name:11} {text}"[:WIDTH]) for text in texts)
    for note in section.get("notes", ()):
        lines.append((True, f"{name:11} {note}"[:WIDTH]))
    for figure in section["figures"]:
        verdict = {True: "met", False: "missed"}.get(figure.get("met"), "")
        value = readable(figure["value"], figure["unit"])
        target = figure.get("target", "")
        line(not target, figure["name"], value, target, verdict)
    reasons: dict[str, list[str]] = {}
    for miss in section["not_measured"]:
        reasons.setdefault(miss["reason"], []).append(miss["name"])
    for why, names in reasons.items():
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines.append((False, f"{name:11} not measured: {what}: {why}"[:WIDTH]))
    return lines


# ── the program ──────────────────────────────────────────────────────────────────────────────────


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record to FILE, as JSON")
    parser.add_argument("--seconds", type=float, help="how long all may take; 500, with --quick 150")
    parser.add_argument("--only", type=_sections, metavar="SECTION,…", help=",".join(MODULES))
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer repetitions")
    parser.add_argument(
        "--against", type=_record, metavar="FILE", help="compare the figures with those of this record"
    )
    parser.add_argument("--cycles", type=int, help="of fork and close, however long they take")
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="the large input, though it seem not to fit; 64 or what fits, quick 8",
    )
    return parser


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - MODULES.keys():
        raise argparse.ArgumentTypeError(f"no section {sorted(unknown)}; there are {list(MODULES)}")
    return [section for section in MODULES if section in chosen]


def _record(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no record: {error}") from None
    if not isinstance(found, dict) or not {"machine", "sections", "environment"} <= found.keys():
        raise argparse.ArgumentTypeError(f"{text} is no record of this program")
    return found


def compared(record: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """A line for each figure of both records: its value now, before, and their ratio."""
    ours, theirs = record["machine"]["gpus"], earlier["machine"]["gpus"]
    if ours[:1] != theirs[:1]:
        return ["", f"not compared: the record is of {theirs[:1]}, this GPU is {ours[:1]}"]
    lines = ["", f"compared with commit {str(earlier['environment']['commit'])[:12]}:"]
    for name, section in record["sections"].items():
        before = earlier["sections"].get(name, {"figures": []})["figures"]
        known = {figure["name"]: figure["value"] for figure in before}
        for figure in section["figures"]:
            if known.get(figure["name"]) and figure["unit"]:
                value, was = figure["value"], known[figure["name"]]
                now = f"{readable(value, figure['unit'])}, was {readable(was, figure['unit'])}"
                lines.append(f"{name:11} {figure['name'][:80]}: {now}, {value / was:.2f} ×")
    return lines


def settings_of(section: str, options: argparse.Namespace, is_gpu: bool) -> dict[str, Any]:
    """Those of the scale; what the command line says comes before them."""
    settings = dict(FULL[section])
    if options.quick or not is_gpu:
        settings |= QUICK.get(section, {})
    if not is_gpu:
        settings |= STAND_IN.get(section, {})
    if section == "endurance" and options.cycles is not None:
        settings["cycles"] = options.cycles
    if section == "memory" and options.memory is not None:
        settings |= {"nbytes": int(options.memory * 1e9), "limited": False}
    return settings


def unjudged(section: dict[str, Any]) -> dict[str, Any]:
    """What was found without a GPU: no target is met or missed by it."""
    for figure in section["figures"]:
        figure.pop("met", None)
    return section


def main() -> int:
    parser = command_line()
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    started = time.monotonic()
    try:
        machine = look_around()
    except RanksFailed as error:
        parser.error(f"no process could look for GPUs: {error}")
    if not machine["gpus"]:
        parser.error(f"no GPU: neither CuPy nor torch sees one; what fails: {machine['broken']}")
    is_gpu, versions = machine.pop("is_gpu"), machine.pop("versions")
    todo = options.only or list(MODULES)
    surroundings = environment()
    surroundings["versions"] |= versions
    record: dict[str, Any] = {
        "question": "verify",
        "asks": " ".join(__doc__.partition("\n\n")[0].split()),
        "is_gpu": is_gpu,
        "scale": "quick" if options.quick else "full",
        "finished": False,
        "machine": machine,
        "environment": surroundings,
        "seconds": 0.0,
        "sections": {},
        "not_ended": stuck,
    }
    out = options.out
    if out is None and is_gpu and not options.quick and not options.only:
        out = RESULTS
    seconds = options.seconds or (150.0 if options.quick else 500.0)
    for place, name in enumerate(todo):
        left = started + seconds - time.monotonic()
        share = left * SHARES[name] / sum(SHARES[other] for other in todo[place:])
        given = {
            "name": name,
            "scale": record["scale"] if is_gpu else "not a GPU",
            "seconds": share,
            "gpus": len(machine["gpus"]),
            "torch": "cuda of torch" in versions,
            "broken": machine["broken"],
            "settings": settings_of(name, options, is_gpu),
        }
        limit: float | None = share + GRACE
        if name == "endurance" and options.cycles is not None:
            given["seconds"], limit = 1e9, None
        if limit is not None and share < LEAST:
            why = f"of {seconds:g} s only {max(left, 0):.0f} were left"
            miss = {"name": "all of it", "reason": why}
            found = {"question": name, "checks": [], "figures": [], "not_measured": [miss]}
        else:
            found = run_section(given, limit)
        found["settings"] = given["settings"]
        record["sections"][name] = found if is_gpu else unjudged(found)
        record["seconds"] = round(time.monotonic() - started, 1)
        record["finished"] = place + 1 == len(todo)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if out:
        print(f"\nrecord: {out}")
    print("\n".join(table(record)), flush=True)
    if options.against is not None:
        print("\n".join(compared(record, options.against)), flush=True)
    checks = [check for section in record["sections"].values() for check in section["checks"]]
    return 0 if all(check["ok"] for check in checks) and not stuck else 1


if __name__ == "__main__":
    sys.exit(main())
