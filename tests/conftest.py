"""Shared fixtures.  Every test is followed by a count of what it may have left behind."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import synkro as synk
import synkro.controller.session
from synkro import here
from synkro.controller.placement.gpus import visible

INLINE = 1 << 17
"""Outputs of more bytes than this go through Store and Reduce in the tests' sessions."""

synkro.controller.session._OUTBOXES = INLINE

ROOT = Path(__file__).resolve().parent.parent

if visible().gpus:  # the tests are of CPU workers, but for those in tests/gpu
    os.environ.setdefault("SYNKRO_DEVICES", "cpu")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser, pluginmanager):
    """Where pytest-timeout is missing, the tests run without the limit that it would set them."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take, for pytest-timeout")


def pytest_collection_finish(session):
    """What was imported stays: the collections before and after each test need not walk it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_walked_again():
    """What a module's tests leave in pytest's own records would slow every later collection."""
    yield
    gc.collect()
    gc.freeze()


def children():
    """The process ids of this process's children."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def descendants(pid):
    """The process ids of a process's children, and theirs."""
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in map(int, file.read().split()):
                found |= {child, *descendants(child)}
    return found


def descriptors():
    """This process's open descriptors, each with what it refers to."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def shared_files():
    """What lies in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def wait_until(condition, seconds=5.0):
    """Whether *condition* comes true within *seconds*; for what the kernel does a moment later."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No process, no descriptor and no file in /dev/shm more than before the test."""
    gc.collect()
    before = children(), descriptors(), shared_files()
    yield
    synk.close()
    here.session = None
    gc.collect()
    assert wait_until(lambda: children() <= before[0]), children() - before[0]
    left = {fd: what for fd, what in descriptors().items() if fd not in before[1]}
    assert not left, left
    # others on the machine may have files there for a moment; ours have no name at all
    assert wait_until(lambda: shared_files() <= before[2]), shared_files() - before[2]


@pytest.fixture
def session():
    """A session of two workers, quiet, with a timeout as a watchdog."""
    with synk.Session(2, verbose=False, timeout=60) as session:
        yield session


@pytest.fixture
def run_python(tmp_path):
    """Run Python in a process of its own, in an empty folder; returns the finished process.

    ``run_python(code)`` runs a script of that text; ``run_python("-c", code)`` passes arguments on.
    """

    def run(*args, input=None, check=True, timeout=60, env=None, cwd=None):
        if len(args) == 1 and "\n" in args[0]:
            script = tmp_path / "script.py"
            script.write_text(args[0])
            args = (str(script),)
        folder = {"FAKE_CUDA_FOLDER": str(tmp_path)}  # where ranks of the stand-in meet
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **folder, **(env or {})}
        done = subprocess.run(
            [sys.executable, *args],
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            cwd=cwd or tmp_path,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run
