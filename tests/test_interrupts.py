"""Ctrl-C at any moment: none is lost, nothing is left behind."""

import os
import signal
import threading

import pytest

import synkro as synk

STORM = """
import os, signal, sys, threading, time
import numpy as np
import synkro as synk

ignored = []
sys.unraisablehook = ignored.append  # where an exception goes that nobody can catch
session = synk.Session(2, verbose=False)
f = session.function(lambda x: x[0], outputs="sum")
values = np.ones(300_000)
who = os.getpid() if sys.argv[1] == "main" else session.pids[0]
stop = threading.Event()
armed = threading.Event()  # one interrupt at a time: the next only after this one has been seen
armed.set()


def shoot():
    while not stop.wait(0.004):
        if who != os.getpid():
            os.kill(who, signal.SIGINT)
        elif armed.is_set():
            armed.clear()
            os.kill(who, signal.SIGINT)


def storm():
    delivered = 0
    end = time.monotonic() + 4
    thread = threading.Thread(target=shoot)
    thread.start()
    while not stop.is_set():
        try:
            while time.monotonic() < end:
                data = session.data(values)
                if sys.argv[2] == "call":
                    f(data)
                data = None
            stop.set()
            thread.join()
        except (KeyboardInterrupt, synk.WorkerError):
            delivered += 1
            armed.set()
    return delivered


delivered = storm()
for _ in range(3):
    assert f(session.data(values)) == 2
for pid in (os.getpid(), *session.pids):
    lines = open(f"/proc/{pid}/maps").read().splitlines()
    mapped = {line.split()[4] for line in lines if "/dev/shm" in line}
    assert len(mapped) <= 4, (pid, len(mapped))
    assert len(os.listdir(f"/proc/{pid}/fd")) <= 32, pid
session.close()
assert delivered > 20, delivered
assert not ignored, ignored
"""


@pytest.mark.parametrize(("who", "what"), [("main", "make"), ("main", "call"), ("worker", "call")])
def test_a_storm_of_interrupts(run_python, tmp_path, who, what):
    script = tmp_path / "storm.py"
    script.write_text(STORM)
    run_python(str(script), who, what)


def test_close_is_finished_before_it_can_be_interrupted():
    session = synk.Session(2, verbose=False)
    os.kill(session.pids[0], signal.SIGSTOP)  # so that close() takes its second
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.close()
    timer.join()
    session.close()
    for pid in session.pids:
        assert not os.path.exists(f"/proc/{pid}")
