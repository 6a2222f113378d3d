"""``python -m synkro``: facts about this machine, checks and benchmarks, printed."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..controller.progress import Progress
from ..errors import shown
from . import doctor, hosts, info

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_SIGNS = {"ok": "OK", "warning": "warning", "failure": "FAILURE", "skipped": "not checked"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    called = Path(sys.argv[0]).name
    prog = called if called == "synkro" else "python -m synkro"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    told = commands.add_parser("info", help="versions, devices, cores, memory, and which extras work")
    checked = commands.add_parser("doctor", help="check that everything works here, and how to mend it")
    for command in (told, checked):
        command.add_argument("--json", action="store_true", help="print JSON")
    checked.add_argument(
        "--data", type=_size, default="1G", metavar="SIZE", help="shared memory to expect, such as 8G"
    )
    checked.add_argument("--quiet", action="store_true", help="print only what is not OK")
    checked.add_argument("--devices", help='as in fork(), such as "cpu" or "cuda"; all by default')
    checked.add_argument(
        "--hosts",
        metavar="LIST",
        help="check, instead of this machine, hosts: h1,h2, a hostfile, slurm, pbs or mpi",
    )
    checked.add_argument("--launcher", help="what reaches them: ssh, slurm, or a program like ssh")
    commands.add_parser("bench", add_help=False, help="measure, against peers (--help)")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bench":
        return _bench(rest)
    if rest:
        (told if options.command == "info" else checked).error(f"unknown: {' '.join(rest)}")
    return _info(options.json) if options.command == "info" else _doctor(options)


def _info(as_json: bool) -> int:
    facts = info.facts()
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(len(name) for section in facts.values() for name in section)
    for title, section in facts.items():
        print(title)
        for name, fact in section.items():
            print(f"  {name.ljust(width)}  {fact}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    found, count = doctor.findings(options.data, options.devices or None), doctor.CHECKS
    if options.hosts is not None:
        found, count = hosts.findings(options.hosts, options.launcher), hosts.CHECKS
    if options.json:
        findings = list(found)
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif options.quiet:
        findings = list(found)
        for finding in findings:
            if finding.status in ("warning", "failure"):
                print(_shown(finding))
    else:
        findings = []
        with Progress("doctor", count, "check", patience=1) as progress:
            for finding in found:
                findings.append(finding)
                progress.print(_shown(finding))
                progress.reach(len(findings))
    return int(any(finding.status == "failure" for finding in findings))


def _shown(finding: doctor.Finding) -> str:
    line = f"{_SIGNS[finding.status]:>11}  {finding.check}: {finding.says}"
    return f"{line}\n{'':>11}  → {finding.remedy}" if finding.remedy else line


def _bench(arguments: list[str]) -> int:
    if not _BENCHMARKS.is_dir():
        print(
            f"The benchmarks are not part of the installed package: get the sources, and run this in "
            f"them (looked for {_BENCHMARKS}).",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(_BENCHMARKS.parent))
    try:
        status: int = importlib.import_module("benchmarks.run").main(arguments)
    except SystemExit as left:  # wrong arguments, or --help
        status = left.code if isinstance(left.code, int) else 0
    return status


def _size(text: str) -> int:
    """Bytes: ``8G``, ``512M``, ``64K``, or a number."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = units.get(number[-1:], 1)
    try:
        size = int(float(number[:-1] if factor > 1 else number) * factor)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(
            f"a size is a number of bytes, or such as 8G; got {shown(text)}"
        )
    return size
