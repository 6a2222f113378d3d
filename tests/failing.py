"""What the tests of failures share."""

import contextlib
import ctypes
import os
import signal
import sys
import time

import cloudpickle
import numpy as np

from conftest import INLINE
from synkro import here

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

LARGE = 4 * INLINE // 8  # float64 elements of an output that goes through Store and Reduce
SOON = 5.0  # seconds; what is promised in one, on a busy machine


def gone(pid):
    """Whether a process has ended (its entry may wait for whoever adopted it)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stopped(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def rows(x):
    return x


def total(session, n=7):
    """The sum of *n* ones, by the workers: *n*, if the session works."""
    return session.function(lambda x: x.sum(), outputs="sum")(np.ones(n))


def rank():
    return here.rank.number


class Watch:
    """Fails where its block takes longer than what is promised to happen soon."""

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *error):
        assert time.monotonic() - self.start < SOON


def hanging(tmp_path, monkeypatch):
    """Let workers hang before they begin."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def sleeping():
    if rank() == 1:
        time.sleep(20)


def in_native_code():
    """As if in C code that holds the interpreter lock and hears no signals."""
    if rank() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        ctypes.PyDLL(None).usleep(2_500_000)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def stubborn():
    for _ in range(2 * rank()):
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(20)


class Nap:
    """Takes a minute to load, the first time."""

    def __init__(self, flag):
        self.flag = str(flag)

    def __reduce__(self):
        flag = self.flag

        def load():
            if rank() == 1 and not os.path.exists(flag):
                open(flag, "w").close()
                time.sleep(60)

        return load, ()


def in_phase(session, phase):
    return lambda: session._engine._controller.whereabouts(1)[0] == phase
