"""However the main process ends, the workers go with it."""

import os
import re
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import in_native_code, sleeping, stubborn
from support.inside import in_phase
from support.leftovers import shared_files
from support.programs import PATHS, start_python
from support.waiting import SOON, Watch, gone, wait_until
from synkro.controller.engine.engine import State
from synkro.messages import Phase

pytestmark = pytest.mark.programs


# ── the main process ends ────────────────────────────────────────────────────────────────────────────

HEAD = """
import os, signal, sys, threading, time, numpy as np, synkro as synk
from support.inside import say_ties, whereabouts
from synkro.messages import Phase

for each in (signal.SIGHUP, signal.SIGQUIT):  # nohup, or a shell with "&", may let them be ignored
    signal.signal(each, signal.SIG_DFL)
synk.fork(2, verbose=False)
print("pids", *synk.here.session.pids, flush=True)

def busy(doing):
    print("running")
    doing()

def running():
    while whereabouts(synk.here.session, 0) != Phase.RUNNING:
        time.sleep(0.005)

def napping(seconds):
    return synk.function(lambda: time.sleep(seconds), outputs=[])

def exit_beside(run, daemon=True):
    threading.Thread(target=run, daemon=daemon).start()
    running()
    sys.exit(7)
"""

MOMENTS = {
    "idle": "print('running', flush=True); time.sleep(60)",
    "computing": "synk.function(lambda: busy(lambda: time.sleep(60)), outputs=[])()",
    "in native code": "synk.function(lambda: busy(lambda: 10**10**8), outputs=[])()",
}


class Program:
    """A main process of its own, in a process group of its own."""

    def __init__(self, code, folder):
        options = {"stderr": subprocess.STDOUT, "cwd": folder, "start_new_session": True}
        self.process = start_python(HEAD + code, **options)
        self.pids = [int(pid) for pid in self.line("pids").split()[1:]]

    def line(self, *words):
        """The next line of its output that has one of *words* in it."""
        for line in self.process.stdout:
            if any(word in line for word in words):
                return line
        raise AssertionError(f"it ended without saying {words}")

    def end(self):
        for pid in [self.process.pid, *getattr(self, "pids", [])]:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    programs = []

    def start(code):
        programs.append(Program(code, tmp_path))
        return programs[-1]

    yield start
    for program in programs:
        program.end()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victims", ["main", "main, then workers", "a worker, then main"])
def test_killing_the_main_process_leaves_nothing(moment, victims, start):
    before = shared_files()
    program = start(MOMENTS[moment])
    program.line("running")
    main, workers = [program.process.pid], program.pids
    order = {"main": main, "main, then workers": main + workers}.get(victims, workers[:1] + main)
    for pid in order:
        os.kill(pid, signal.SIGKILL)
    with Watch():
        assert wait_until(lambda: all(map(gone, workers)), SOON)
    assert program.process.wait() == -signal.SIGKILL
    assert shared_files() <= before


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP, signal.SIGQUIT])
def test_workers_go_however_the_main_process_ends(by, start):
    program = start(MOMENTS["computing"])
    program.line("running")
    os.kill(program.process.pid, by)
    assert wait_until(lambda: all(map(gone, program.pids)), SOON)
    assert program.process.wait() == -by


def test_a_hangup_that_is_ignored_ends_nobody(start):
    """As under nohup: it is the user's choice, and the workers go with the main process."""
    program = start("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
other = synk.Session(1, verbose=False)
print("others", *other.pids, flush=True)
f, g = (each.function(lambda x: x.sum(), outputs="sum") for each in (synk, other))
input()
print("total", f(np.ones(5)) + g(np.ones(2)), flush=True)
""")
    others = [int(pid) for pid in program.line("others").split()[1:]]
    for pid in (program.process.pid, *others):
        os.kill(pid, signal.SIGHUP)
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    assert program.line("total") == "total 7.0\n"
    assert program.process.wait(timeout=30) == 0


BEGINNINGS = {  # what hangs, and what makes it hang in the workers
    "the interpreter": ("sitecustomize.py", "os.environ['PYTHONPATH'] = {folder!r}"),
    "the import of NumPy": ("numpy.py", "sys.path.insert(0, {folder!r})"),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_killing_the_main_process_while_it_forks(beginning, start, tmp_path):
    """Its second session: those workers hang, and have not yet said that they are there."""
    folder = tmp_path / "hangs"
    folder.mkdir()
    file, how = BEGINNINGS[beginning]
    (folder / file).write_text(
        f"import os, time\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w')\ntime.sleep(60)\n"
    )
    program = start(
        f"{how.format(folder=str(folder))}\n"
        "say_ties()\n"
        "threading.Thread(target=synk.Session, args=(2,), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    for _ in range(2):
        assert program.line("tied")
    assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    program.process.kill()
    assert wait_until(lambda: all(map(gone, [*program.pids, *pids])), SOON)


def test_a_forked_child_does_not_keep_the_workers(start):
    """The child has copies of the main process's descriptors only until it knows what it is."""
    program = start(
        "child = os.fork()\nif not child:\n    print('child', os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    child = int(program.line("child").split()[1])
    try:
        program.process.kill()
        assert wait_until(lambda: all(map(gone, program.pids)), SOON)
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_ctrl_c_at_a_terminal(start):
    """A terminal sends SIGINT to the whole process group."""
    program = start("""
f = synk.function(lambda x: x.sum(), outputs="sum")
for _ in range(2):
    try:
        synk.function(lambda: busy(lambda: time.sleep(60)), outputs=[])()
    except KeyboardInterrupt:
        print("interrupted", f(np.ones(5)), flush=True)
""")
    for _ in range(2):
        program.line("running")
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.line("interrupted") == "interrupted 5.0\n"
    assert program.process.wait(timeout=30) == 0
    assert all(map(gone, program.pids))


OTHER = """
other = synk.Session(1, verbose=False)
print("pids", *other.pids, flush=True)
assert len(other.function(lambda x: x, outputs="gather")(other.data(np.arange(1e6)))) == 1e6
"""
EXITS = {
    "without close": "synk.function(lambda x: x.sum())(np.ones(4))",
    "after close": "synk.close()",
    "by an exception": "raise ZeroDivisionError",
    "beside another session": OTHER,
    "beside another session, at once": OTHER + "os._exit(7)",
    "in a broken session": "try:\n"
    "    synk.function(lambda: os._exit(3), outputs=[])()\n"
    "except synk.WorkerDied:\n"
    "    sys.exit(7)",
    "beside a call in a daemon thread": "exit_beside(napping(60))",
    "beside a native call in a daemon thread": "f = synk.function(lambda: 10**10**8, outputs=[])\n"
    "exit_beside(f)",
    "beside a call in a thread": "f = napping(0.5)\n"
    "exit_beside(lambda: print('done', f()), daemon=False)",
    "beside a submitted call": "f = napping(0.5)\n"
    "f.submit().add_done_callback(lambda future: print('done', future.result()))\n"
    "running(); sys.exit(7)",
    "by a thread, in a call": "def leave(): running(); os._exit(7)\n"
    "threading.Thread(target=leave, daemon=True).start()\n"
    "napping(60)()",
    "by an unheard Ctrl-C": "def stop(): running(); os.kill(os.getpid(), signal.SIGINT)\n"
    "threading.Thread(target=stop, daemon=True).start()\n"
    "napping(60)()",
}
STATUS = dict.fromkeys(("without close", "after close", "beside another session"), 0)
STATUS |= {"by an exception": 1, "by an unheard Ctrl-C": -signal.SIGINT}  # and 7 for the others


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_exits(how, run_python):
    code, status = EXITS[how], STATUS.get(how, 7)
    before = shared_files()
    with Watch():
        done = run_python(HEAD + code + "\n", check=False, timeout=60, env=PATHS)
    assert done.returncode == status, done.stderr
    pids = [int(pid) for line in re.findall("pids (.*)", done.stdout) for pid in line.split()]
    assert len(pids) == (3 if "other" in code else 2)
    assert wait_until(lambda: all(map(gone, pids)))
    assert shared_files() <= before
    if "done" in code:
        assert "done None" in done.stdout
    if status in (0, 7) and "daemon" not in how:
        assert done.stderr == ""


def closing(session):
    """A thread that closes the session when a call runs."""

    def close():
        assert wait_until(in_phase(session, Phase.RUNNING), 30)
        session.close()

    thread = threading.Thread(target=close)
    thread.start()
    return thread


@pytest.mark.parametrize("busy", [sleeping, in_native_code, stubborn], ids=lambda busy: busy.__name__)
def test_close_from_another_thread_ends_the_call(busy, session):
    f = session.function(busy, outputs=[])
    thread = closing(session)
    ended = (synk.SessionClosed, synk.SessionBroken, synk.WorkerDied)
    with Watch(), pytest.raises(ended):
        f()
    thread.join()
    assert session.state is State.CLOSED
    assert all(map(gone, session.pids))


def test_close_lets_a_short_call_end(session):
    def short(x):
        time.sleep(0.2)
        return x.sum()

    f = session.function(short, outputs="sum")
    thread = closing(session)
    assert f(np.ones(3)) == 3
    thread.join()


def test_close_cancels_what_was_submitted(session):
    f = session.function(sleeping, outputs=[])
    futures = [f.submit() for _ in range(3)]
    assert wait_until(in_phase(session, Phase.RUNNING), 30)
    with Watch():
        session.close()
        assert isinstance(futures[0].exception(30), (synk.SessionError, synk.WorkerDied))
        assert wait_until(lambda: all(future.done() for future in futures))
    assert all(future.cancelled() or future.exception() for future in futures)
