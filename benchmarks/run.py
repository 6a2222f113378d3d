"""Run the questions, each in a fresh process, one after the other, and write their records.

  python -m synkro bench                       all of them; writes benchmarks/results/cpu.json
  python -m synkro bench call_overhead --quick
  python -m synkro bench --out lab             records, plots and a page in the folder lab
  python -m synkro bench --judge               … and hold the figures against their targets

``python benchmarks/run.py`` is the same, ``python -m benchmarks.call_overhead`` one question without a
record.  Only a full run writes ``results/cpu.json`` unasked; records of questions that did not run stay
in it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from synkro.cli import ctrl_c  # noqa: E402  first, as what follows takes a while; it may not be installed

# isort: split
from benchmarks.common import add_options, exit_when_terminated, missed  # noqa: E402
from synkro.controller.progress import Progress  # noqa: E402
from synkro.memory.interrupts import uninterrupted  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
QUESTIONS: dict[str, tuple[str, ...]] = {
    "call_overhead": ("joblib", "posix_ipc"),
    "pools": (),
    "tasks": (),
    "plugged": ("joblib",),
    "input_size": (),
    "shuffled_batch": (),
    "compute_bound": ("threadpoolctl",),
    "scaling": ("threadpoolctl",),
    "reduction": (),
    "collectives": (),
    "start_up": (),
    "training": ("threadpoolctl",),
    "memory": (),
    "mapped": (),
    "files": ("h5py", "zarr"),
    "targets": ("scipy",),
    "recovery": (),
    "deaths": (),
    "model": (),
    "kmeans": ("sklearn", "threadpoolctl"),
    "mixture": ("threadpoolctl",),
    "hosts": ("mpi4py",),
    "placement": ("threadpoolctl", "pytensor"),
    "compiled": ("pytensor", "threadpoolctl"),
    "endurance": (),
}
"""The questions, each with the modules that it cannot be asked without."""

INSTALL = "pip install -e '.[bench]'"
_PATIENCE = 10  # seconds that a question has to end after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask what *arguments*, or the command line, want; returns the exit status."""
    options, out, folder = parsed(arguments)
    exit_when_terminated()
    failed, misses, targets = [], [], 0
    asked = options.questions or list(QUESTIONS)
    with contextlib.ExitStack() as stack:
        progress = None
        if not options.quiet:
            progress = stack.enter_context(Progress("bench", len(asked), "question"))
        for number, question in enumerate(asked, 1):
            record = ask(question, options, progress)
            if "failed" in record:
                failed.append(f"{question} ({record['failed']})")
            misses += missed(record)
            targets += sum("met" in figure for figure in record.get("figures", ()))
            if out is not None:
                keep(out, record)
            if progress is not None:
                progress.reach(number)
    if out is not None:
        print(f"\nrecords: {out}")
    if folder is not None:
        command = [sys.executable, "-m", "benchmarks.report", str(out), str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, start_new_session=True)
    if options.judge:
        print(f"\ntargets: {targets - len(misses)} of {targets} met")
    for sentence in misses:
        print(f"missed: {sentence}", file=sys.stderr)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed or misses else 0


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Path | None, Path | None]:
    """What the command line says; the file for the records, and the folder for a page, if any."""
    parser = argparse.ArgumentParser(
        prog="python -m synkro bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    add_options(parser)
    where = "write records.json, plots and report.html there (a path that ends in .json: the records)"
    add("--out", metavar="DIR", help=where)
    add(
        "--quiet",
        action="store_true",
        help="print only what failed or was judged, and where records are",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.questions) - set(QUESTIONS):
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    if options.out == "":
        parser.error("--out is empty: name a folder, or a .json file.")
    out = Path(options.out) if options.out else (RESULTS if options.scale == "full" else None)
    try:
        folder = None if out is None or out.suffix == ".json" else out.resolve()
    except FileNotFoundError:
        parser.error("--out is relative to a working directory that was deleted: name an absolute path.")
    if folder is not None:
        out = folder / "records.json"
    if problem := unwritable(out, folder):
        parser.error(problem)
    return options, out, folder


def unwritable(out: Path | None, folder: Path | None) -> str | None:
    """Why the records at *out*, or the page in *folder*, could not be written; None if they can."""
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        return "--out DIR draws plots: pip install matplotlib, or write records only, --out FILE.json."
    if out is None:
        return None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a+") as file:  # which leaves what is there
            file.seek(0)
            text = file.read()
    except OSError as error:
        advice = "name a folder, or a .json file in one, that can be."
        return f"--out cannot be written ({error.filename}: {error.strerror}): {advice}"
    if not text:
        out.unlink()
        return None
    try:
        known = isinstance(json.loads(text), dict)
    except ValueError:
        known = False
    return None if known else f"--out: {out} is there already, and is no file of records: name another."


def ask(question: str, options: argparse.Namespace, progress: Progress | None) -> dict[str, Any]:
    """The record of *question*, or why it *failed*.  Its tables are printed above *progress*, if any."""
    missing = [name for name in QUESTIONS[question] if importlib.util.find_spec(name) is None]
    if missing:
        return {"question": question, "failed": f"{', '.join(missing)} is not installed: {INSTALL}"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        command = [sys.executable, "-m", f"benchmarks.{question}", "--json", str(file)]
        if options.scale != "full":
            command.append(f"--{options.scale}")
        if options.judge:
            command.append("--judge")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        process = None
        try:
            with uninterrupted(), blocked():  # until the process is known, and its question begins
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            for line in process.stdout:
                if progress is not None:
                    progress.print(line.rstrip("\n"))
            status = process.wait()
        except BaseException:
            if process is not None:
                end(process)
            raise
        record = json.loads(file.read_text()) if file.exists() else {}
        if status != 0 and not missed(record):
            return {"question": question, "failed": f"exit status {status}"}
        return record


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Processes that start in this block have SIGINT blocked, until they unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(process: subprocess.Popen[str]) -> None:
    """Let a question clean up, and then kill what it has left of its processes."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def keep(file: Path, record: dict[str, Any]) -> None:
    """Put *record* into *file*, instead of an older one of the same question, unless this one failed."""
    records = json.loads(file.read_text()) if file.exists() else {}
    if "failed" not in record or record["question"] not in records:
        records[record["question"]] = record
    ordered = {name: records[name] for name in QUESTIONS if name in records}
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    draft.replace(file)  # whole, whenever this is interrupted


def command() -> int:
    """``main``, for a process of its own."""
    if sys.stdout is None:  # closed: there are the records still
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        return main()
    except BrokenPipeError:  # who read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(ctrl_c.status_of(command))
