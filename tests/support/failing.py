"""Functions that die, hang or hear nothing, and interrupts at a moment that a test names."""

import contextlib
import ctypes
import os
import signal
import threading
import time

import pytest

import synkro as synk
from support.sessions import rank
from support.waiting import Watch, wait_until
from synkro.errors import CollectiveError, WorkerError


def leave(status):
    """End this process, without a word."""
    os._exit(status)


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


def ctrl_c(condition, call):
    """A call that a SIGINT interrupts when *condition* comes true, and soon."""
    over = threading.Event()

    def interrupt():
        if wait_until(lambda: over.is_set() or condition(), 30) and not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted():
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            call()
        finally:
            over.set()
            thread.join()

    with Watch(), pytest.raises(KeyboardInterrupt):
        interrupted()


def told(does, message, kind=CollectiveError):
    """The error of a call of 'run' in which each rank *does* what its number says; of that *kind*."""

    def run():
        does(rank())

    with Watch(), pytest.raises(WorkerError, match=message) as caught:
        synk.function(run, outputs=[])()
    assert isinstance(caught.value.original, kind)
    assert "in the function 'run'" in str(caught.value)
    return caught.value
