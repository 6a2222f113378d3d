"""Ctrl-C at any moment: the call ends, the session goes on, none is lost, nothing is left behind."""

import contextlib
import importlib
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import Nap, ctrl_c, hanging, in_native_code, sleeping
from support.inside import answered, in_phase, main_thread_in
from support.leftovers import children
from support.sessions import LARGE, rank, rows, total
from support.streams import random_draw
from support.waiting import SOON, Watch, has_pending, stopped, wait_until
from synkro import here
from synkro.controller.calls.function import Definition
from synkro.controller.engine.engine import Engine, State
from synkro.errors import InvalidIndex
from synkro.ipc.channel import Lane
from synkro.memory.segment import Segment
from synkro.messages import Phase

pytestmark = pytest.mark.long


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("busy", "times"), [(sleeping, 5), (in_native_code, 1)], ids=["sleeps", "native"]
)
def test_ctrl_c_interrupts_the_call_not_the_session(busy, times, session):
    pids = session.pids
    f = session.function(busy, outputs=[])
    for _ in range(times):
        ctrl_c(in_phase(session, Phase.RUNNING), f)
    assert session.state is State.READY
    assert total(session) == 7
    assert session.pids == pids


def test_an_interrupt_does_not_end_an_idle_worker(session):
    """A call that is over may be interrupted a moment too late."""
    f = session.function(lambda x: x.sum(), outputs="sum")
    x = session.data(np.ones(7))
    for _ in range(40):
        assert f(x) == 7
        os.kill(session.pids[1], signal.SIGINT)
        time.sleep(0.005)  # now it sleeps
        os.kill(session.pids[1], signal.SIGINT)
    assert f(x) == 7


def test_ctrl_c_before_a_worker_has_begun(session):
    """An interrupt that comes before the command is not lost on the way."""
    f = session.function(sleeping, outputs=[])
    session.distribute()
    os.kill(session.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: stopped(session.pids[1]))
    ctrl_c(main_thread_in(Lane.wait), f)
    assert wait_until(
        lambda: has_pending(session.pids[1], signal.SIGINT)
    )  # from another host it takes a while
    os.kill(session.pids[1], signal.SIGCONT)
    assert wait_until(lambda: answered(session), SOON)
    assert total(session) == 7


def test_ctrl_c_while_waiting_for_an_interrupted_call(session):
    def deaf():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(2)

    f = session.function(rows, outputs="gather")
    session.distribute()
    ctrl_c(in_phase(session, Phase.RUNNING), session.function(deaf, outputs=[]))
    ctrl_c(main_thread_in(Engine.settle), lambda: f(np.ones(3)))
    ctrl_c(main_thread_in(Engine.settle), lambda: f(np.ones(3)))
    assert f(np.ones(3)).tolist() == [1, 1, 1]


def test_inputs_of_an_interrupted_call_are_not_written_to_while_it_runs(session, tmp_path):
    w = session.shared(0.0)

    def deaf(x):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        flag = tmp_path / f"rank {synk.rank()}"
        flag.touch()
        time.sleep(1)
        flag.unlink()
        w.value = w.value + synk.all_reduce(x.sum(), "sum")
        signal.signal(signal.SIGINT, before)
        return x.sum()

    def all_are_deaf():
        return len(list(tmp_path.iterdir())) == 2

    f = session.function(deaf, outputs="sum")
    assert f(np.zeros(4)) == 0
    ctrl_c(all_are_deaf, lambda: f(np.ones(4)))
    with pytest.raises(InvalidIndex):
        f(np.full(4, 100.0), batch=np.arange(20))
    assert w.get_value() == 4
    ctrl_c(all_are_deaf, lambda: f(np.ones(4)))
    assert f(np.full(4, 100.0)) == 400
    assert w.get_value() == 408


@pytest.mark.libraries
def test_ctrl_c_waits_for_a_piece_of_a_graph_that_draws(session, tmp_path):
    """Compiled code that draws does not survive an exception in its middle: the worker would be gone."""
    pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")
    tensor = pytensor.tensor

    class Slow(pytensor.graph.op.Op):
        """The same numbers, after a while."""

        itypes = otypes = (tensor.dmatrix,)
        __props__ = ()

        def perform(self, node, inputs, outputs):
            (tmp_path / f"begun {synk.rank()}").touch()
            time.sleep(0.5)
            (tmp_path / f"ended {synk.rank()}").touch()
            outputs[0][0] = inputs[0].copy()

    x, stream = tensor.dmatrix("x"), pytensor.shared(np.random.default_rng(0))
    following, draw = random_draw(tensor.random.normal, size=x.shape, rng=stream)
    options = {"updates": {stream: following}, "mode": "FAST_COMPILE"}
    f = session.function([x], (Slow()(draw), "gather"), **options)
    pids = session.pids
    ctrl_c(lambda: len(list(tmp_path.glob("begun *"))) == 2, lambda: f(np.ones((4, 2))))
    assert wait_until(lambda: len(list(tmp_path.glob("ended *"))) == 2)  # and not broken off
    assert len(np.unique(f(np.ones((4, 2))))) == 8
    assert session.pids == pids


def test_ctrl_c_during_distribute(session, tmp_path):
    nap = Nap(tmp_path / "flag")
    f = session.function(lambda x: (nap, x.sum())[1], outputs="sum")
    ctrl_c(lambda: (tmp_path / "flag").exists(), session.distribute)
    assert f(np.ones(4)) == 4


@pytest.mark.parametrize("phase", [Phase.STORING, Phase.REDUCING])
def test_ctrl_c_while_large_outputs_are_fetched(phase, session):
    def arm():
        replica = here.rank
        say = replica.report

        def report(now, done):
            say(now, done)
            if now == phase:
                replica.report = say
                time.sleep(60)

        if replica.number == 1:
            replica.report = report

    f = session.function(lambda x: np.full(LARGE, x.sum()), outputs="sum")
    g = session.function(lambda x: np.full(LARGE, x.sum()), outputs="gather")
    session.function(arm, outputs=[])()
    ctrl_c(in_phase(session, phase), lambda: f(np.ones(8)))
    assert np.array_equal(f(np.ones(8)), np.full(LARGE, 8.0))
    assert np.array_equal(g(np.ones(8)), np.full(2 * LARGE, 4.0))


def test_ctrl_c_while_a_worker_maps_memory(session, tmp_path):
    """What an interrupted call has sent is there for the next one."""
    flag = str(tmp_path / "flag")

    def arm():
        attach = Segment.attach

        def slow(*args):
            Segment.attach = attach
            open(flag, "w").close()
            time.sleep(1)
            return attach(*args)

        if rank() == 1:
            Segment.attach = slow

    f = session.function(lambda x: x.sum(), outputs="sum")
    f(np.ones(3))
    session.function(arm, outputs=[])()
    x, y = session.data(np.ones(1000)), session.data(np.ones(2000))
    ctrl_c(lambda: os.path.exists(flag), lambda: f(x))
    assert f(y) == 2000
    assert f(x) == 1000


@pytest.mark.fresh
def test_ctrl_c_during_fork(tmp_path, monkeypatch):
    hanging(tmp_path, monkeypatch)
    before = children()
    ctrl_c(main_thread_in(Lane.wait), lambda: synk.fork(2, verbose=False))
    assert wait_until(lambda: children() == before)
    monkeypatch.undo()
    assert synk.fork(2, verbose=False) == 2


def test_ctrl_c_at_any_moment_of_a_call(session):
    small = session.function(lambda x: x.sum(), outputs="sum")
    large = session.function(lambda x: np.full(LARGE, x.sum()), outputs="sum")
    wait = np.random.default_rng(0).uniform(0, 0.02, 40)
    interrupted = 0
    for n, seconds in enumerate(wait, 1):
        kept = []  # until the interrupt is over: Python drops one that comes in a finalizer
        small(np.ones(n))
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            deadline = time.monotonic() + SOON
            timer.start()
            while time.monotonic() < deadline:
                small(np.ones(n))
                kept.append(session.data(np.ones(n)))
                large(kept[-1])
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        assert small(np.ones(n)) == n
        assert np.array_equal(large(np.ones(n)), np.full(LARGE, float(n)))
    assert interrupted > len(wait) // 2


# ── at any moment ────────────────────────────────────────────────────────────────────────────────────

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


def shoot():
    while not stop.wait(0.004):
        if who != os.getpid():  # as the main process does
            session._engine.everyone.give_up()
            os.kill(who, signal.SIGINT)
        elif armed.is_set():
            armed.clear()
            os.kill(who, signal.SIGINT)


def storm():
    delivered = 0
    begun = time.monotonic()

    def goes_on():  # for a while, and on a busy machine until there have been enough
        return time.monotonic() < begun + (2 if delivered > 20 else 45)

    thread = threading.Thread(target=shoot, daemon=True)
    thread.start()
    while not stop.is_set():
        try:
            armed.set()  # in here: the next one may come before this returns
            while goes_on():
                data = session.data(values)
                if sys.argv[2] == "call":
                    f(data)
                data = None
            stop.set()
            thread.join()
        except (KeyboardInterrupt, synk.WorkerError):
            delivered += 1
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

    def close():
        timer.start()  # it may be over before this returns
        session.close()

    with pytest.raises(KeyboardInterrupt):
        close()
    timer.join()
    session.close()
    for pid in session.pids:
        assert not os.path.exists(f"/proc/{pid}")


SLOW = """
import pathlib, sys, time
assert not hasattr(sys, __name__)  # cannot be imported twice
setattr(sys, __name__, True)
pathlib.Path({!r}).touch()
time.sleep(0.3)
def double(x):
    return 2 * x.sum()
"""


@pytest.mark.parametrize("where", ["distribution", "call"])
def test_ctrl_c_cuts_off_no_import(where, session, tmp_path, monkeypatch):
    marker = tmp_path / "begun"
    name = f"slow_to_import_{where}"
    folder = tmp_path / "site-packages"  # else the function travels, and is not imported
    folder.mkdir()
    (folder / f"{name}.py").write_text(SLOW.format(str(marker)))
    monkeypatch.syspath_prepend(str(folder))
    if where == "call":

        def double(x):
            import importlib

            return importlib.import_module(name).double(x)
    else:
        double = importlib.import_module(name).double
        monkeypatch.delattr(sys, name)
    marker.unlink(missing_ok=True)
    f = session.function(double, outputs="sum")
    ctrl_c(marker.exists, lambda: [f(np.ones(10)), time.sleep(SOON)])
    assert f(np.ones(10)) == 20


def test_a_training_step_is_made_on_all_ranks_or_on_none(session, tmp_path):
    w = session.shared(np.zeros(2))
    marker = tmp_path / "begun"

    def finish(weight):
        synk.barrier()
        for turn in range(2):
            if synk.rank() == turn:
                w.set_value(w.value + 1)
            marker.touch()
            time.sleep(0.3)

    definition = Definition(np.sum, None, "sum", None, None, None, None, finish=finish)
    f = synk.Function(lambda verb: session.services, definition)
    ctrl_c(marker.exists, lambda: [f(np.ones(4)), time.sleep(SOON)])
    first, second = session.gather(w)
    np.testing.assert_array_equal(first, second)


@pytest.mark.libraries
def test_ctrl_c_cuts_off_no_compilation_of_numba(session, tmp_path):
    numba = pytest.importorskip("numba", reason="needs numba")
    marker = tmp_path / "begun"

    @numba.njit
    def total(x):
        return x.sum()

    def compiled(x):
        from numba.core import event

        class Slow(event.Listener):
            def on_start(self, event):
                marker.touch()
                time.sleep(0.5)

            def on_end(self, event):
                """Nothing to do."""

        with event.install_listener("numba:compile", Slow()):
            result = total(x)
        return {"total": result, "compiled": sum(total.stats.cache_misses.values())}

    f = session.function(compiled, outputs="sum")
    ctrl_c(marker.exists, lambda: [f(np.ones(10)), time.sleep(SOON)])
    assert f(np.ones(10)) == {"total": 10, "compiled": 1}


# ── other signals ────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def alarm(seconds, handler):
    """SIGALRM is handled by *handler*, and comes after so many *seconds* of the block."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


PROLOGUE = """
import os, random, signal, time, numpy as np, synkro as synk
synk.fork(2, verbose=False)
"""
CHANGING = """
def changing(k):
    return np.full(2000, k) if k % 2 else np.full(1000, -0.5 * k)


f = synk.function(changing, outputs="max", bcast_inputs="k")
f(1)
rng = random.Random(0)
interrupted = k = 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
end = time.monotonic() + 2
while time.monotonic() < end:
    k += 1
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-4))
            f(k)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
        k += rng.choice([0, 1])
    assert np.array_equal(f(k), changing(k)), k
assert interrupted
"""


HANDLING = """
w = synk.shared(np.full(50, 3.0))
x = synk.data(np.full((8, 50), 7.0))
f = synk.function(lambda x: x.sum(0), outputs="sum")
f(x)
calls, refused = {"f": (lambda: f(x), 56), "get_value": (w.get_value, 3)}, 0


def handler(*_):
    global refused
    for call, wanted in calls.values():
        try:
            assert (call() == wanted).all()
        except synk.UsageError as error:
            assert "in the middle of another one" in str(error)
            refused += 1


signal.signal(signal.SIGALRM, handler)
for call, wanted in calls.values():
    for turn in range(1500):
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 40 * 1e-5)
        assert (call() == wanted).all()
signal.setitimer(signal.ITIMER_REAL, 0)
assert refused
"""


FORKING = """
f = synk.function(lambda t: time.sleep(t) or 1.0, bcast_inputs="t", outputs="max")
f(0.0)
children = []
signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
signal.setitimer(signal.ITIMER_REAL, 0.01)
try:
    assert f(0.3) == 1
except synk.SessionClosed:
    os._exit(7)  # in the child
assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) in (0, 7)
assert f(0.0) == 1
"""


@pytest.mark.parametrize(
    "program",
    [CHANGING, HANDLING, FORKING],
    ids=["results are right after interrupts", "calls are right or refused", "forks"],
)
def test_signal_handlers_at_any_moment(run_python, program):
    """A worker is interrupted anywhere, also while it lays its output out."""
    run_python(PROLOGUE + program, env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})


@pytest.mark.parametrize("ignored", [[], [KeyboardInterrupt]], ids=["in a call", "waiting for the last"])
def test_a_signal_handler_may_close_the_session(own, ignored):
    def sleeps(x, t):
        while t:
            with contextlib.suppress(*ignored):
                time.sleep(t)

    f = own.function(sleeps, outputs=[], bcast_inputs="t")
    own.distribute()
    if ignored:
        ctrl_c(in_phase(own, Phase.RUNNING), lambda: f(np.ones(4), 60.0))
    with Watch(), alarm(0.2, lambda *_: own.close()), pytest.raises(synk.SessionClosed):
        f(np.ones(4), 0.0 if ignored else 60.0)
    assert own.state is State.CLOSED
    own.close()


def test_an_interrupt_that_comes_late_does_not_hit_the_next_call(session):
    f = session.function(lambda x: (time.sleep(0.2), x.sum())[1], outputs="sum")
    session.distribute()
    future = f.submit(np.ones(4))
    assert wait_until(in_phase(session, Phase.RUNNING))
    os.kill(session.pids[0], signal.SIGINT)
    assert future.result() == 4


def test_no_call_can_be_submitted_while_the_session_is_closed(own):
    f = own.function(lambda x: x.sum(), outputs="sum")
    f(np.ones(4))
    f.submit(np.ones(4)).result()
    own.services.background.cancel()  # the first thing that close() does
    with pytest.raises(synk.SessionClosed, match="submitted"):
        f.submit(np.ones(4))
