"""Waiting for what comes a moment later, but soon."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

SOON = 5.0  # seconds; what is promised in one, on a busy machine


def wait_until(condition, seconds=5.0):
    """Whether *condition* comes true within *seconds*; for what the kernel does a moment later."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Watch:
    """Fails where its block takes longer than what is promised to happen soon."""

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *error):
        assert time.monotonic() - self.start < 3 * SOON  # other tests run beside this one


@contextlib.contextmanager
def interrupted_after(seconds):
    """Ctrl-C comes so many seconds after the beginning of the block, if that goes on."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def state(pid):
    """The letter that the kernel has for what a process does; Z where there is none any more."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def gone(pid):
    """Whether a process has ended (its entry may wait for whoever adopted it)."""
    return state(pid) in "ZX"


def stopped(pid):
    return state(pid) == "T"


def has_pending(pid, number):
    """Whether signal *number* waits for a process, which is stopped."""
    (pending,) = re.findall(r"^ShdPnd:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)
