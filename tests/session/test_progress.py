"""Progress: a bar on a terminal, lines elsewhere, nothing when asked."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from synkro.controller import progress
from synkro.controller.progress import Progress

pytestmark = pytest.mark.programs

SLICES = """
import numpy as np, synkro
with synkro.Session(2, verbose=False) as session:
    f = session.function(lambda x: x.sum(), outputs="sum", name="counting")
    assert f(np.ones(8), num_slices=2, progress=True) == 8
"""
SLOW_TO_LOAD = """
import time, numpy as np, synkro.controller.calls.distribution
synkro.controller.calls.distribution._PATIENCE = 0.01
class Slow:
    def __setstate__(self, state):
        time.sleep(0.3)
    def __call__(self, x):
        return x.sum()
    def __reduce__(self):
        return object.__new__, (Slow,), {"any": "thing"}
synkro.fork(2, verbose=VERBOSE)
functions = [synkro.function(Slow(), outputs="sum", name=f"slow {i}") for i in range(3)]
synkro.distribute()
assert [f(np.ones(4)) for f in functions] == [4, 4, 4]
"""


def shown_on_a_terminal(script):
    """What *script* writes to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    return shown.decode()


def test_slices_on_a_terminal():
    shown = shown_on_a_terminal(SLICES)
    assert "counting: 100%" in shown
    assert "2/2" in shown  # of as many as were asked for, on each of two ranks


def test_a_slow_distribution_on_a_terminal():
    shown = shown_on_a_terminal(SLOW_TO_LOAD.replace("VERBOSE", "True"))
    assert "distributing:" in shown
    assert "3/3" in shown  # functions that both ranks have
    assert "1/3" in shown or "2/3" in shown


def test_silent_when_asked():
    assert shown_on_a_terminal(SLOW_TO_LOAD.replace("VERBOSE", "False")) == ""


def test_a_quick_distribution_shows_nothing(run_python):
    script = SLOW_TO_LOAD.replace("VERBOSE", "True").replace("_PATIENCE = 0.01", "_PATIENCE = 60")
    assert "of 3 functions" not in run_python(script).stderr


def test_lines_come_at_times(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("reading", 10, "file", patience=7) as reading:
        for done in range(1, 10):
            now = 2.0 * done
            reading.reach(done)
    assert capsys.readouterr().err.splitlines() == [
        "Synkro: reading: 4 of 10 files",
        "Synkro: reading: 7 of 10 files",
        "Synkro: reading: 9 of 10 files",
    ]


@pytest.mark.parametrize("patience", [0, 7])
def test_short_work_shows_where_it_ended_unless_it_was_to_wait(capsys, patience):
    with Progress("reading", 2, "file", patience) as reading:
        reading.reach(2)
    expected = "" if patience else "Synkro: reading: 2 of 2 files\n"
    assert capsys.readouterr().err == expected


def test_without_tqdm_a_terminal_gets_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with Progress("reading", 2, "file") as reading:
        reading.reach(1)
    assert capsys.readouterr().err == "Synkro: reading: 1 of 2 files\n"
