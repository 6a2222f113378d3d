"""Run the questions, each in a fresh process, one after the other, and write their records.

::

    python benchmarks/run.py                       # all of them; writes benchmarks/results/cpu.json
    python benchmarks/run.py call_overhead --quick
    python benchmarks/run.py --out lab             # records, plots and a page in the folder lab
    python -m benchmarks.call_overhead             # one, without a record

Only a full run writes ``results/cpu.json`` unasked; records of questions that did not run stay in it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from synkro.progress import Progress  # noqa: E402  which may not be installed

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
QUESTIONS = (
    "call_overhead",
    "pools",
    "input_size",
    "shuffled_batch",
    "compute_bound",
    "scaling",
    "reduction",
    "collectives",
    "start_up",
    "training",
    "memory",
    "mapped",
    "recovery",
    "model",
    "kmeans",
    "compiled",
    "endurance",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m synkro bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.set_defaults(scale="full")
    parser.add_argument(
        "--quick", dest="scale", action="store_const", const="quick", help="about a tenth of the calls"
    )
    parser.add_argument(
        "--smoke", dest="scale", action="store_const", const="smoke", help="the least: does it work?"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write records.json, plots and report.html there (a path that ends in .json: the records)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print only what failed, and where records are"
    )
    options = parser.parse_args()
    if unknown := set(options.questions) - set(QUESTIONS):
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    out = options.out or (RESULTS if options.scale == "full" else None)
    folder = None if out is None or out.suffix == ".json" else out.resolve()
    if folder is not None:
        out = folder / "records.json"
    if problem := unwritable(out, folder):
        parser.error(problem)
    failed = []
    asked = options.questions or QUESTIONS
    with contextlib.ExitStack() as stack:
        progress = None
        if not options.quiet:
            progress = stack.enter_context(Progress("bench", len(asked), "question"))
        for number, question in enumerate(asked, 1):
            record = ask(question, options.scale, progress)
            if record is None:
                failed.append(question)
            elif out is not None:
                keep(out, record)
            if progress is not None:
                progress.reach(number)
    if out is not None:
        print(f"\nrecords: {out}")
    if folder is not None and out.exists():
        command = [sys.executable, "-m", "benchmarks.report", str(out), str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def unwritable(out: Path | None, folder: Path | None) -> str | None:
    """Why the records at *out*, or the page in *folder*, could not be written; None if they can."""
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        return "--out DIR draws plots: pip install matplotlib, or write records only, --out FILE.json."
    if out is None:
        return None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a"):  # which leaves what is there
            pass
    except OSError as error:
        return f"--out cannot be written ({error}): name a folder, or a .json file in one, that can be."
    if not out.stat().st_size:
        out.unlink()
    return None


def ask(question: str, scale: str, progress: Progress | None) -> dict[str, Any] | None:
    """The record of *question*; None if it failed.  Its tables are printed beside *progress*, if any."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        command = [sys.executable, "-m", f"benchmarks.{question}", "--json", str(file)]
        if scale != "full":
            command.append(f"--{scale}")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment["PYTHONUNBUFFERED"] = "1"
        pipe = {"stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipe) as process:
            for line in process.stdout:
                if progress is not None:
                    progress.print(line.rstrip("\n"))
        return json.loads(file.read_text()) if process.returncode == 0 else None


def keep(file: Path, record: dict[str, Any]) -> None:
    """Put *record* into *file*, instead of an older one of the same question."""
    records = json.loads(file.read_text()) if file.exists() else {}
    records[record["question"]] = record
    ordered = {name: records[name] for name in QUESTIONS if name in records}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
