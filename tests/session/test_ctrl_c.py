"""Ctrl-C at any moment of a command: it ends with status 130, says no traceback, and leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest

from support.leftovers import descendants
from support.programs import ROOT
from support.waiting import gone, wait_until

pytestmark = pytest.mark.programs

BENCH = ("-m", "synkro", "bench", "endurance", "--quick")


class Command:
    """A command in a process group of its own, that tells which modules it imports, as it goes on."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.errors = []
        self.reader = threading.Thread(target=self.read)
        self.imported = Counter()
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            head, found, rest = line.partition("import time:")
            if found:
                self.imported[head + rest.rpartition("|")[2].strip()] += 1
            else:
                self.errors.append(line)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def reaches(self, module, times=1):
        """Whether the command and its processes come to have imported *module* so many times."""
        return wait_until(lambda: self.imported[module] >= times or self.process.poll() is not None, 60)

    def says(self, text):
        """Whether it comes to print a line with *text* in it."""
        return any(text in line for line in self.process.stdout)

    def interrupt(self):
        """What a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self):
        """Its exit status, and what it has said on stderr but for its imports."""
        status = self.process.wait(timeout=60)
        self.reader.join()
        return status, "".join(self.errors)


MOMENTS = {
    "before all else": ("synkro.cli.ctrl_c", 1),
    "while NumPy is imported": ("numpy.version", 1),
    "while the package is imported": ("synkro.memory.segment", 1),
    "when the package is there": ("synkro.api", 1),
    "while the command is read": ("argparse", 1),
    "while the benchmarks are imported": ("benchmarks", 1),
    "when the question's interpreter begins": ("site", 2),
    "while the question imports NumPy": ("numpy.version", 2),
    "when the question has imported all": ("benchmarks.common", 1),
    "when its first worker begins": ("[rank 0] site", 1),
    "when its first worker has begun": ("[rank 1] synkro.worker.loop", 1),
    "when it has said what it does": "endurance (quick)",
    "when it has said a first result": "growth of resident memory",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_bench_can_be_interrupted(moment):
    with Command(*BENCH) as command:
        reached = MOMENTS[moment]
        assert command.says(reached) if isinstance(reached, str) else command.reaches(*reached)
        below = descendants(command.process.pid)
        command.interrupt()
        assert command.ended() == (130, "")
        assert wait_until(lambda: all(map(gone, below)))


COMMANDS = {  # what a command does, its status, and what it prints
    "only the first interrupts": (
        """
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        print("cleaned up")
""",
        130,
        "cleaned up\n",
    ),
    "one in a finalizer is heard": (
        """
    class Late:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    Late()
    time.sleep(60)
""",
        130,
        "",
    ),
    # by which dataclasses and named tuples are made: Python keeps a note of its interrupts
    "one in generated code": ("\n    exec('raise KeyboardInterrupt')\n", 130, ""),
    # as a shell starts what is to run in the background
    "what ignores it goes on": ("\n    signal.raise_signal(signal.SIGINT)\n    return 7\n", 7, ""),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_the_status_of_a_command(run_python, tmp_path, what):
    does, status, printed = COMMANDS[what]
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN)" if "ignores" in what else ""
    (tmp_path / "interrupted.py").write_text(
        f"import signal, sys, time\n{ignores}\nfrom synkro.cli import ctrl_c\n"
        f"def command():{does}sys.exit(ctrl_c.status_of(command))\n"
    )
    done = run_python("-m", "interrupted", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, printed, "")


@pytest.mark.parametrize("command", [("bench", "--help"), ("bench", "no_such_question")], ids=" ".join)
def test_a_command_that_is_about_to_end_ends_quietly(command):
    with Command("-m", "synkro", *command) as running:
        said = running.says("")  # its first line, or its end
        if not running.process.poll():
            with contextlib.suppress(ProcessLookupError):
                running.interrupt()
        status, errors = running.ended()
        # the interpreter itself may be past its handlers: then it is the kernel that ends it
        assert status in {0 if said else 2, 130, -signal.SIGINT}
        assert "Traceback" not in errors


def test_an_interrupt_that_another_thread_takes_leaves_no_question(run_python):
    """NumPy's threads do not block SIGINT when the main thread does."""
    done = run_python(
        """
import signal, socket, subprocess, threading
from types import SimpleNamespace

from benchmarks import run
from synkro.cli import ctrl_c

ctrl_c.interrupt_once()
over, (taken, told) = threading.Event(), socket.socketpair()
told.setblocking(False)
signal.set_wakeup_fd(told.fileno())
other = threading.Thread(target=over.wait)
other.start()
begun = []

class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        begun.append(self)
        signal.pthread_kill(other.ident, signal.SIGINT)
        taken.recv(1)

run.subprocess.Popen = Popen
try:
    run.ask("endurance", SimpleNamespace(scale="smoke", judge=False), None)
except KeyboardInterrupt:
    print("interrupted", begun[0].returncode)
finally:
    over.set()
"""
    )
    assert (done.stdout, done.stderr) == ("interrupted 130\n", "")


def test_other_programs_keep_their_own_handler(run_python):
    done = run_python("-c", "import signal, synkro; print(signal.getsignal(2).__name__)")
    assert done.stdout == "default_int_handler\n"
