"""A section of ``verify``, in a process of its own; and those that run other programs.

``verify`` starts this with what to do as JSON, reads what the section found from a file, and ends it
with all that it started when its time is over.  What was found until then stays in the file.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from synkro.machine import available_cores

from ..common import ROOT, Report, Samples
from ..findings import SYNKRO
from ..ranks import end, stuck

MODULES = {
    "tests": "sections",
    "demos": "sections",
    "transfer": "copies",
    "overlap": "copies",
    "call": "calls",
    "memory": "copies",
    "endurance": "calls",
    "collectives": "calls",
    "peers": "peers",
    "training": "sections",
}
"""All sections, the most important first, with the module of each one's function."""

FULL: dict[str, dict[str, Any]] = {
    "tests": {
        "alone": "tests/gpu/test_hardware.py",
        "together": "tests/gpu/test_*.py",
        "options": ["-m", "gpu"],
    },
    "demos": {"pattern": "demo_*.py"},
    "transfer": {"nbytes": 1 << 30, "runs": 15},
    "overlap": {"nbytes": 1 << 30, "slices": 16, "runs": 15},
    "call": {"count": 1 << 24, "alone": 1e-3, "calls": 50, "runs": 15},
    "memory": {"nbytes": 64 * 10**9, "slices": 128, "limited": True},
    "endurance": {"calls": 10_000, "cycles": 1000},
    "collectives": {"sizes": [1 << (10 + 4 * step) for step in range(6)], "turn": 0.3, "runs": [3, 15]},
    "peers": {"sizes": [1 << 10, 1 << 20, 1 << 24, 1 << 26, 1 << 30], "runs": [5, 15]},
    "training": {"options": []},
}
"""Bytes, repetitions (*runs* of so many *calls*), seconds (*alone*, *turn*), elements (*count*)."""

QUICK: dict[str, dict[str, Any]] = {
    "transfer": {"runs": 3},
    "overlap": {"runs": 3},
    "call": {"calls": 10, "runs": 3},
    "memory": {"nbytes": 8 * 10**9},
    "endurance": {"calls": 1000, "cycles": 3},
    "collectives": {"sizes": [1 << 10, 1 << 20, 1 << 28], "turn": 0.1, "runs": [2, 5]},
    "peers": {"sizes": [1 << 10, 1 << 26], "runs": [2, 5]},
    "training": {"options": ["--quick"]},
}

STAND_IN: dict[str, dict[str, Any]] = {
    "tests": {"together": "tests/gpu/test_memory.py", "options": ["-m", "not gpu"]},
    "demos": {"pattern": "demo_[19]_*.py"},
    "transfer": {"nbytes": 1 << 20},
    "overlap": {"nbytes": 1 << 20},
    "call": {"count": 1 << 16},
    "memory": {"nbytes": 1 << 24},
    "endurance": {"calls": 40, "cycles": 2},
    "collectives": {"sizes": [1 << 10, 1 << 16], "turn": 0.01, "runs": [2, 3]},
    "peers": {"sizes": [1 << 10, 1 << 18], "runs": [2, 3]},
}
"""What a make-believe GPU can bear; beside a *quick* run's."""

DEMO_SECONDS = 90.0
"""That one demo may take."""

SHORT = 60.0
"""Seconds within which networks are trained in small, as in a quick run."""

FEW = 20
"""Failed tests of a file that are tried again."""

NO_TESTS = 5
"""pytest's exit status where all tests of a file were deselected."""

LOG = "VERIFY_LOG"
"""The variable that names the file to which pytest writes what happens to each test."""


class Section(Report):
    """What a section finds: a report, with checks, and with what could not be measured.

    Attributes:
        gpus: how many GPUs there are.
        torch: whether torch sees them.
        broken: why a library cannot be used, by its name.
    """

    def __init__(
        self,
        name: str,
        text: str,
        scale: str,
        seconds: float,
        file: str,
        gpus: int,
        torch: bool,
        broken: dict[str, str],
    ) -> None:
        """*file* always has what was found so far; *seconds* is how long the section should take."""
        self._file, self._until = Path(file), time.monotonic() + seconds
        self.gpus, self.torch, self.broken = gpus, torch, broken
        super().__init__(name, text, scale, judged=True)
        self.record |= {"checks": [], "not_measured": []}
        self._save()

    def left(self) -> float:
        """Seconds that are left."""
        return self._until - time.monotonic()

    def table(self, title: str, samples: Samples, unit: str = "s") -> None:
        super().table(title, samples, unit)
        self.record["tables"][-1]["samples"] = samples
        self._save()

    def figure(self, *args: Any, **options: Any) -> None:
        super().figure(*args, **options)
        self._save()

    def note(self, text: str) -> None:
        super().note(text)
        self._save()

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        """Whether something is as it must be; if not, all of the verification has failed."""
        self.record["checks"].append({"name": name, "ok": bool(ok), "detail": detail})
        print(f"  {name}: {'ok' if ok else 'FAILED'}{detail and f' ({detail})'}", flush=True)
        self._save()

    def miss(self, name: str, why: str) -> None:
        self.record["not_measured"].append({"name": name, "reason": why})
        print(f"  {name}: not measured: {why}", flush=True)
        self._save()

    def keep(self, name: str, value: Any) -> None:
        """Put something more into the record."""
        self.record[name] = value
        self._save()

    def _save(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self.record))
        fresh.replace(self._file)


def run_program(command: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
    """The exit status, None if it had to be ended, and all that it printed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


# ── tests ────────────────────────────────────────────────────────────────────────────────────────


class _Run:
    """What came of some tests: pytest's *status* (None: ended by us), its output, and each test's."""

    def __init__(self, section: Section, file: str, names: list[str], options: list[str]) -> None:
        """Run the tests of these *names* in a file, or all of it, in half of the time that is left."""
        self.file = file
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            chosen = [f"{file}::{name.partition('::')[2]}" for name in names] or [file]
            command = [sys.executable, "-m", "pytest", *chosen, *options, "-o", "timeout=60"]
            command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.sections"]
            self.status, self.output = run_program(command, section.left() / 2, **{LOG: str(log)})
            lines = log.read_text().splitlines() if log.exists() else []
        self._events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.reports = [event for event in self._events if "outcome" in event]
        self.failures = {
            each["test"]: each["why"] for each in self.reports if each["outcome"] == "failed"
        }
        self.outcomes = {each["test"]: each["outcome"] for each in self.reports}
        self.outcomes |= dict.fromkeys(self.failures, "failed")
        print(f"  {Path(file).name}: {dict(Counter(self.outcomes.values()))}", flush=True)

    def judge_end(self, section: Section) -> None:
        """How pytest ended, where no failed test says it."""
        name = Path(self.file).name
        if self.status is None:
            selected = [event["selected"] for event in self._events if "selected" in event]
            running = [event["started"] for event in self._events if "started" in event]
            left = f": {selected[0] - len(self.outcomes)} of {selected[0]} tests" if selected else ""
            section.miss(f"{name}{left}", f"out of time, in {(running or ['collecting'])[-1]}")
        elif self.status not in (0, NO_TESTS) and not self.failures:
            tail = self.output.strip().splitlines()[-15:] or ["it said nothing"]
            print("\n".join(tail), flush=True)
            section.check(f"pytest {name}", False, f"exit status {self.status}: {tail[-1]}")


def tests(section: Section, alone: str, together: str, options: list[str]) -> None:
    """Do the tests that need a GPU pass?

    Those of the file *alone* run first, by themselves: they fill the GPU, or look at all its memory.
    The other files run several at a time, since they wait for interpreters to start; what fails there is
    tried again by itself, for it may have met another's shared memory.
    """
    if importlib.util.find_spec("pytest_timeout") is None:
        section.note("pytest-timeout is missing: a test that hangs takes the time of its file")
    files = [file for file in sorted(glob.glob(str(ROOT / together))) if file != str(ROOT / alone)]
    runs = [_Run(section, str(ROOT / alone), [], options)] if (ROOT / alone).is_file() else []
    with ThreadPoolExecutor(min(6, max(2, available_cores() // 3))) as threads:
        others = list(threads.map(lambda file: _Run(section, file, [], options), files))
    runs += others
    recovered: list[str] = []
    for run in others:
        if 0 < len(run.failures) <= FEW and section.left() > 10:
            again = _Run(section, run.file, list(run.failures), [])
            good = [test for test, outcome in again.outcomes.items() if outcome == "passed"]
            recovered += good
            run.outcomes |= dict.fromkeys(good, "passed")
    outcomes = {test: outcome for run in runs for test, outcome in run.outcomes.items()}
    reasons = {test: why for run in runs for test, why in run.failures.items()}
    skips = Counter(each["why"] for run in runs for each in run.reports if each["outcome"] == "skipped")
    section.keep("tests", {"outcomes": outcomes, "recovered": recovered, "failures": reasons})
    for outcome in ("passed", "failed", "skipped"):
        section.figure(f"tests {outcome}", list(outcomes.values()).count(outcome), "")
    if recovered:
        section.note(
            f"{len(recovered)} failed beside others and passed alone: {', '.join(recovered[:3])}"
        )
    for why, count in skips.most_common():
        section.note(f"{count} skipped: {why}")
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    for test in failed[:5]:
        print("\n".join(reasons[test].splitlines()[-30:]), flush=True)
        section.check(test, False, (reasons[test].strip().splitlines() or ["no reason"])[-1])
    if len(failed) > 5:
        section.check(f"{len(failed) - 5} more tests", False)
    for run in runs:
        run.judge_end(section)
    if not runs:
        section.check("there are tests", False, f"{alone}, {together}")


class _Log:
    """Writes what happens to a test as soon as it happens: pytest itself may be ended."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w", buffering=1)  # noqa: SIM115 (open until pytest ends)

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")

    def pytest_collection_finish(self, session: Any) -> None:
        self._write(selected=len(session.items))

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._tell(report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._tell(report)

    def _tell(self, report: Any) -> None:
        skipped = report.outcome == "skipped" and isinstance(report.longrepr, tuple)
        why = report.longrepr[2] if skipped else report.longreprtext
        self._write(test=report.nodeid, outcome=report.outcome, why=why)


def pytest_configure(config: Any) -> None:
    """This module is a plugin of the pytest that ``tests`` starts."""
    if path := os.environ.get(LOG):
        config.pluginmanager.register(_Log(path))


# ── demos and training ───────────────────────────────────────────────────────────────────────────


def demos(section: Section, pattern: str) -> None:
    """Do the demos that do not ask for CPUs run on GPUs?  Two ranks or more, two on the only GPU."""
    devices = ",".join(f"cuda:{index}" for index in range(section.gpus))
    devices = devices if section.gpus > 1 else "cuda:0,cuda:0"
    for demo in sorted((ROOT / "demos").glob(pattern)):
        if re.search(r'devices="[^"]*cpu', demo.read_text()):  # whatever there is
            continue
        limit = min(section.left(), DEMO_SECONDS)
        if section.left() < 5:
            section.miss(demo.stem, "its section had no time left")
            continue
        if "torch" in section.broken and "import torch" in demo.read_text():
            section.miss(demo.stem, f"torch: {section.broken['torch']}")
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(demo), folder]
            status, output = run_program(command, limit, SYNKRO_DEVICES=devices)
        lines = output.strip().splitlines() or ["it said nothing"]
        if lines[-1].startswith("ModuleNotFoundError"):
            section.miss(demo.stem, lines[-1])
        elif status is None and limit < DEMO_SECONDS:
            section.miss(demo.stem, f"its section had only {limit:.0f} s left")
        elif status == 0 and lines[-1] == "All assertions passed.":
            section.check(demo.stem, True, f"{time.monotonic() - start:.1f} s")
        else:
            print("\n".join(lines[-15:]), flush=True)
            ended = f"stopped after {limit:.0f} s" if status is None else f"exit status {status}"
            section.check(demo.stem, False, f"{ended}: {lines[-1]}")


def training(section: Section, options: list[str]) -> None:
    """How fast does ResNet-50 train, beside a bare torch loop and DistributedDataParallel?"""
    if not section.torch:
        section.miss("ResNet-50", section.broken.get("torch", "torch sees no GPU"))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        command = [sys.executable, "-m", "benchmarks.multi_gpu", "--only", "resnet", *options]
        command += ["--seconds", str(max(20, section.left() - 15)), "--out", str(file)]
        if section.left() < SHORT and "--quick" not in options:
            command.append("--quick")
        if section.gpus == 1:
            command += ["--ranks", "1"]
        status, output = run_program(command, section.left())
        if not file.exists():
            lines = output.strip().splitlines() or ["it said nothing"]
            ended = "was stopped" if status is None else f"ended with status {status}"
            section.miss("ResNet-50", f"benchmarks.multi_gpu {ended}: {lines[-1]}")
            return
        record = json.loads(file.read_text())
    stuck.extend(record["not_ended"])
    section.keep("multi_gpu", {key: record[key] for key in ("rows", "checks", "not_measured", "ways")})
    for check in record["checks"]:
        section.check(f"{check['layout']}: parameters as {check['peer']}", check["agree"])
    for row in record["rows"]:
        way = f", {record['ways'][row['layout']]}" if row["ranks"] > 1 else ""
        name = f"{row['layout']}{way}: {row['side']}"
        if row["unit"] == "images/s":
            section.figure(name, row["median"], row["unit"])
        elif row["side"].startswith(f"{SYNKRO} ÷ {SYNKRO}"):
            continue
        elif row["ranks"] == 1 and row["side"] == f"{SYNKRO} ÷ bare torch":
            section.figure(name, row["median"], "×", at_least=1 / 1.03)
        elif row["side"].startswith(f"{SYNKRO} ÷ DDP"):
            section.figure(name, row["median"], "×", at_least=1.0)
        else:
            section.figure(name, row["median"], "×")
    take_over(section, record["not_measured"])


def take_over(section: Section, missing: list[dict[str, Any]]) -> None:
    """What ``multi_gpu`` could not measure; where that is Synkro itself, something is wrong."""
    for miss in missing:
        name = f"{miss['layout']}, {miss['what']}: {miss['side']}"
        if miss["side"].startswith((SYNKRO, "all")):
            section.check(name, False, miss["reason"])
        else:
            section.miss(name, miss["reason"])


# ── the process ──────────────────────────────────────────────────────────────────────────────────


def end_with_parent() -> None:
    """End this process group when standard input does: then ``verify`` has gone."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def run(settings: dict[str, Any], **given: Any) -> None:
    """Do a section; *given* is what ``Section`` takes."""
    module = importlib.import_module(f"benchmarks.gpu.{MODULES[given['name']]}")
    function = getattr(module, given["name"])
    section = Section(text=function.__doc__, **given)
    try:
        function(section, **settings)
    finally:
        for text in stuck:
            section.check("all processes end", False, text)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    run(**json.loads(sys.argv[1]))
