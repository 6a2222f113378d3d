"""Whatever dies, hangs or is interrupted, whenever it does: the user hears of it, and can go on."""

import builtins
import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from conftest import INLINE, ROOT, children, shared_files, wait_until
from synkro import world
from synkro.engine import State
from synkro.ipc.segment import Segment
from synkro.messages import Phase

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
    return world.current.rank


class Watch:
    """Fails where its block takes longer than what is promised to happen soon."""

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *error):
        assert time.monotonic() - self.start < SOON


# ── a worker dies ────────────────────────────────────────────────────────────────────────────────────

KINDS = {  # what ends the worker: its signal, its exit code
    "SIGKILL": (signal.SIGKILL, None),
    "SIGSEGV": (signal.SIGSEGV, None),
    "SIGTERM": (signal.SIGTERM, None),
    "exit": (None, 3),
}


def ending(kind):
    """A function that ends its process."""

    def end():
        print(f"last words before {kind}", file=sys.stderr, flush=True)
        if kind == "exit":
            os._exit(3)
        if kind == "SIGSEGV":
            ctypes.string_at(0)
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(60)

    return end


def when_idle(session, end, tmp_path):
    """Between two calls: a thread of rank 1 waits for a sign."""
    trigger = str(tmp_path / "trigger")
    os.mkfifo(trigger)

    def wait():
        with open(trigger):
            end()

    def arm():
        if rank() == 1:
            threading.Thread(target=wait, daemon=True).start()

    f = session.function(rows, outputs="gather")
    session.function(arm, outputs=[])()
    with open(trigger, "w"):
        assert wait_until(lambda: gone(session.pids[1]))
    return lambda: f(np.ones(4))


def while_computing(session, end, tmp_path):
    return session.function(lambda: end() if rank() == 1 else None, outputs=[])


def while_the_other(session, end, tmp_path, does):
    sign = str(tmp_path / "sign")
    os.mkfifo(sign)

    def meet():
        with open(sign, "r" if rank() else "w"):  # opens when the other side does, too
            end() if rank() else does()

    return session.function(meet, outputs=[])


def while_the_other_sleeps(session, end, tmp_path):
    return while_the_other(session, end, tmp_path, lambda: time.sleep(60))


def while_the_other_is_in_native_code(session, end, tmp_path):
    return while_the_other(session, end, tmp_path, lambda: 10**10**8)


def on_report(session, phase, count, end):
    """Let rank 1 end when it says that it is in *phase*."""

    def arm():
        replica = world.current
        say = replica.report

        def report(now, done):
            if (now, done) == (phase, count):
                end()
            say(now, done)

        if replica.rank == 1:
            replica.report = report

    session.function(arm, outputs=[])()


def between_slices(session, end, tmp_path):
    f = session.function(rows, outputs="gather")
    on_report(session, Phase.RUNNING, 2, end)
    return lambda: f(np.ones(8), num_slices=3)


def while_storing(session, end, tmp_path):
    f = session.function(rows, outputs="gather")
    on_report(session, Phase.STORING, 0, end)
    return lambda: f(np.ones(2 * LARGE))


def while_reducing(session, end, tmp_path):
    f = session.function(lambda x: np.full(LARGE, x.sum()), outputs="sum")
    on_report(session, Phase.REDUCING, 0, end)
    return lambda: f(np.ones(8))


class Bomb:
    """Ends the worker that loads it, if that is rank 1."""

    def __init__(self, end):
        self.end = end

    def __reduce__(self):
        end = self.end
        return (lambda: end() if rank() == 1 else None), ()


def while_distributing(session, end, tmp_path):
    bomb = Bomb(end)
    f = session.function(lambda: bomb, outputs=[])
    session.f = f  # keep it
    return session.distribute


def while_mapping(session, end, tmp_path):
    """When a Data has grown, the workers map its new memory at the next call."""

    def arm():
        if rank() == 1:
            Segment.attach = lambda *args: end()

    f = session.function(rows, outputs="gather")
    x = session.data(np.ones(4))
    f(x)
    session.function(arm, outputs=[])()
    x.set_length(10_000)
    return lambda: f(x)


def while_memory_is_freed(session, end, tmp_path):
    """Before new memory is asked for, the workers let go of what was freed."""

    class Last(dict):
        def pop(self, *args):
            end()

    def arm():
        if rank() == 1:
            world.current._segments = Last(world.current._segments)

    f = session.function(rows, outputs="gather")
    x = session.data(np.ones(4))
    f(x)
    session.function(arm, outputs=[])()
    return x.free_memory


PHASES = [
    when_idle,
    while_computing,
    while_the_other_sleeps,
    while_the_other_is_in_native_code,
    between_slices,
    while_storing,
    while_reducing,
    while_distributing,
    while_mapping,
    while_memory_is_freed,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_death_is_told(phase, kind, session, tmp_path):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    data = session.data(np.arange(5.0))
    f = session.function(lambda x: x.sum(), outputs="sum")
    assert f(data) == 10
    fatal = phase(session, ending(kind), tmp_path)
    with Watch(), pytest.raises(synk.WorkerDied) as caught:
        fatal()
    died = caught.value
    number, code = KINDS[kind]
    assert (died.rank, died.pid, died.signal, died.exitcode) == (1, session.pids[1], number, code)
    assert f"last words before {kind}" in died.stderr
    if kind == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in died.stderr
    for part in ("rank 1", f"pid {died.pid}", died.stderr, str(code) if code else kind, "fork()"):
        assert part in str(died)

    assert session.state is State.BROKEN
    for use in (
        lambda: f(data),
        session.distribute,
        lambda: session.data(np.ones(3)),
        lambda: session.function(rows),
        lambda: f.submit(data),
        lambda: data.set_length(1000),
    ):
        with Watch(), pytest.raises(synk.SessionBroken, match=rf"rank 1 \(pid {died.pid}\)"):
            use()
    assert data[:].tolist() == [0, 1, 2, 3, 4]
    assert wait_until(lambda: all(map(gone, session.pids)))
    with Watch():
        session.close()
    with pytest.raises(synk.SessionClosed):
        f(data)
    assert data[:].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("by", ["close and fork", "fork"])
def test_fork_starts_anew(by):
    synk.fork(2, verbose=False, timeout=60)
    x = synk.data(np.arange(4.0))
    f = synk.function(rows, outputs="gather")
    end = ending("SIGKILL")
    with pytest.raises(synk.WorkerDied):
        synk.function(lambda: end() if rank() else None, outputs=[])()
    if by != "fork":
        synk.close()
    assert synk.fork(2, verbose=False, timeout=60) == 2
    f = synk.function(rows, outputs="gather")
    assert f(synk.data(x[:])).tolist() == [0, 1, 2, 3]


def test_a_death_between_calls_is_found_however_it_came(session):
    f = session.function(rows, outputs="gather")
    f(np.ones(4))
    os.kill(session.pids[0], signal.SIGKILL)
    with Watch(), pytest.raises(synk.WorkerDied, match=r"rank 0 .*SIGKILL \(out of memory, perhaps"):
        [f(np.ones(4)) for _ in iter(int, 1)]  # for ever


def test_all_workers_die_at_once(session):
    with Watch(), pytest.raises(synk.WorkerDied):
        session.function(lambda: os._exit(0), outputs=[])()
    session.close()


def test_a_death_in_one_session_leaves_the_other_alone(session):
    with synk.Session(1, verbose=False, timeout=60) as other:
        with pytest.raises(synk.WorkerDied, match="exit code 3"):
            other.function(lambda: os._exit(3), outputs=[])()
        assert total(session) == 7
    assert total(session) == 7


def test_only_the_end_of_a_long_stderr_is_told(session):
    def shout():
        for line in range(5000):
            print("line", line, "x" * 50, file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    with pytest.raises(synk.WorkerDied) as caught:
        session.function(shout, outputs=[])()
    assert "line 4999" in caught.value.stderr
    assert len(str(caught.value)) < 10_000


def test_a_future_hears_of_the_death(session):
    future = session.function(lambda: os._exit(3), outputs=[]).submit()
    with pytest.raises(synk.WorkerDied):
        future.result(timeout=60)


# ── a worker does not even start ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("package", ["numpy", "cloudpickle"])
@pytest.mark.parametrize(
    ("line", "number", "code"),
    [
        ("raise ImportError('broken on purpose')", None, 1),
        ("import os; os._exit(3)", None, 3),
        ("raise SystemExit(0)", None, 0),
        ("import os; os.kill(os.getpid(), 9)", signal.SIGKILL, None),
        ("import ctypes; ctypes.string_at(0)", signal.SIGSEGV, None),
    ],
    ids=["error", "exit", "leave", "kill", "crash"],
)
def test_a_worker_that_dies_at_its_start(package, line, number, code, tmp_path, monkeypatch):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))  # this process has the real one already
    with Watch(), pytest.raises(synk.WorkerDied) as caught:
        synk.fork(2, verbose=False)
    died = caught.value
    assert (died.signal, died.exitcode) == (number, code)
    assert died.rank in (0, 1)
    assert gone(died.pid)
    assert ("broken on purpose" in str(died)) == ("purpose" in line)
    monkeypatch.undo()
    assert synk.fork(2, verbose=False) == 2


def hanging(tmp_path, monkeypatch):
    """Let workers hang before they begin."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_start_that_takes_too_long(tmp_path, monkeypatch):
    hanging(tmp_path, monkeypatch)
    with Watch(), pytest.raises(synk.CallTimeout, match=r"0\.5 s from ranks 0, 1") as caught:
        synk.fork(2, start_timeout=0.5, verbose=False)
    assert caught.value.ranks == (0, 1)
    assert "has not begun" in str(caught.value)
    monkeypatch.undo()
    assert synk.fork(2, verbose=False) == 2


# ── an exception in a worker ─────────────────────────────────────────────────────────────────────────


class Plain(Exception):
    pass


class Odd(Exception):
    """Cannot be made from its own args."""

    def __init__(self, left, right):
        super().__init__(f"{left} is not {right}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class Leaver(Exception):
    def __str__(self):
        raise SystemExit(5)


class Trap(Exception):
    """Loading it ends the program that tries."""

    def __reduce__(self):
        return sys.exit, (5,)


def raising(error):
    def fail():
        raise error

    return fail


def deep(n=0):
    return deep(n + 1) + 1


def chained():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise Plain("second") from error


CASES = {  # what fails, the type of the original where it can be brought here, a text in the message
    "plain": (raising(Plain("text", 3)), Plain, "Plain: ('text', 3)"),
    "builtin": (lambda: {}["key"], KeyError, "KeyError: 'key'"),
    "chained": (chained, Plain, "second"),
    "odd constructor": (lambda: raising(Odd(1, 2))(), None, "Odd: 1 is not 2"),
    "unpicklable": (lambda: raising(Locked("text"))(), None, "Locked: text"),
    "mute": (raising(Mute()), Mute, "Mute: "),
    "str exits": (raising(Leaver()), Leaver, "Leaver: "),
    "trap": (lambda: raising(Trap("text"))(), None, "Trap: text"),
    "SystemExit": (lambda: sys.exit(3), SystemExit, "SystemExit: 3"),
    "KeyboardInterrupt": (raising(KeyboardInterrupt("me")), KeyboardInterrupt, "KeyboardInterrupt: me"),
    "GeneratorExit": (raising(GeneratorExit()), GeneratorExit, "GeneratorExit"),
    "recursion": (deep, RecursionError, "RecursionError: maximum recursion"),
    "memory": (lambda: np.empty(1 << 58), MemoryError, "Unable to allocate"),
    "usage": (raising(synk.InvalidValue("the user's")), synk.InvalidValue, "the user's"),
    "worker's": (raising(synk.WorkerDied("not really", 5, 6)), synk.WorkerDied, "not really"),
    "huge": (lambda: raising(Plain("x" * 10_000_000 + " end"))(), None, "x end"),
    "huge unicode": (lambda: raising(Plain("🙂" * 1_000_000 + " end"))(), None, "🙂 end"),
    "medium": (lambda: raising(Plain("🙂" * 15_000))(), Plain, "🙂"),
}
if group := vars(builtins).get("ExceptionGroup"):  # from Python 3.11 on
    CASES["group"] = (
        raising(group("two", [KeyError("a"), group("in", [ValueError(1)])])),
        group,
        "ExceptionGroup: two (2 sub-exceptions)",
    )


@pytest.mark.parametrize("case", CASES)
def test_an_exception_is_told(case, session):
    fail, original, text = CASES[case]
    f = session.function(lambda x: fail(), name="failing")
    pids = session.pids
    with Watch(), pytest.raises(synk.WorkerError) as caught:
        f(np.ones(4))
    error = caught.value
    assert (error.rank, error.function) == (0, "failing")
    assert isinstance(error.original, original or type(None))
    assert text in str(error)
    assert "rank 0 " in str(error)
    assert "'failing'" in str(error)
    assert "2 ranks failed" in str(error)
    assert isinstance(error.__cause__, synk.RemoteTraceback)
    assert "Traceback (most recent call last)" in error.__cause__.text or case.startswith("huge")
    assert len(str(error)) + len(str(error.__cause__)) < 100_000
    assert total(session) == 7
    assert session.pids == pids


def test_the_remote_traceback_shows_the_line(session):
    def divide(x):
        return x / np.intp(0) if False else 1 // (len(x) - len(x))

    with pytest.raises(synk.WorkerError) as caught:
        session.function(divide)(np.ones(4))
    text = str(caught.value.__cause__)
    assert "in divide" in text
    assert __file__ in text
    assert "ZeroDivisionError" in text


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_on_one_rank_strands_nobody(culprit, session):
    def f(x):
        if rank() == culprit:
            raise Plain(f"I am {culprit}")
        return np.ones(LARGE)

    with pytest.raises(synk.WorkerError, match=f"rank {culprit} .*Plain: I am {culprit}") as caught:
        session.function(f, outputs="sum")(np.ones(4))
    assert caught.value.rank == culprit
    assert caught.value.original.args == (f"I am {culprit}",)
    assert "ranks failed" not in str(caught.value)
    assert total(session) == 7


def test_failing_and_working_calls_alternate(session):
    def f(x):
        if x.min() < 0:
            raise Plain("negative")
        return x.sum()

    f = session.function(f, outputs="sum")
    good, bad = session.data(np.ones(6)), session.data(-np.ones(6))
    for _ in range(20):
        assert f(good) == 6
        with pytest.raises(synk.WorkerError, match="negative"):
            f(bad)


def test_a_function_that_fails_to_load_can_be_mended(session):
    class Broken:
        def __reduce__(self):
            return raising(Plain("cannot be loaded")), ()

    class Mended:
        pass

    part = Broken()
    f = session.function(lambda x: (part, x.sum())[1], outputs="sum")
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="cannot be loaded"):
            f(np.ones(3))
    part = Mended()
    assert f(np.ones(3)) == 3


def test_what_an_exception_held_is_freed(session):
    def f():
        block = np.ones(1 << 22)
        raise Plain(len(block))

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    f = session.function(f, outputs=[])
    resident = session.function(resident, outputs="max")
    before = resident()
    with pytest.raises(synk.WorkerError):
        f()
    assert resident() - before < 1 << 24  # of 32 MB


# ── a worker does not answer ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def impatient():
    with synk.Session(2, verbose=False, timeout=1) as session:
        yield session


def answers(f, *args):
    """The result of *f*, when its workers are free for it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return f(*args)
        except synk.CallTimeout:
            assert time.monotonic() < deadline


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


@pytest.mark.parametrize("busy", [sleeping, in_native_code, stubborn], ids=lambda busy: busy.__name__)
def test_a_late_rank_is_named(busy, impatient):
    f = impatient.function(lambda x: x.sum(), outputs="sum")
    with Watch(), pytest.raises(synk.CallTimeout, match="rank 1 ") as caught:
        impatient.function(busy, outputs=[])()
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value, TimeoutError)
    assert f"pid {impatient.pids[1]}" in str(caught.value)
    assert "is running the function, 0 slices done" in str(caught.value)
    assert impatient.state is State.READY
    assert answers(f, np.ones(7)) == 7


def test_a_stopped_worker_is_named_and_can_go_on(impatient):
    f = impatient.function(lambda x: x.sum(), outputs="sum")
    x = impatient.data(np.ones(7))
    assert f(x) == 7
    os.kill(impatient.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: stopped(impatient.pids[1]))
    for _ in range(2):
        with Watch(), pytest.raises(synk.CallTimeout, match="rank 1") as caught:
            f(x)
        assert caught.value.ranks == (1,)
    os.kill(impatient.pids[1], signal.SIGCONT)
    assert answers(f, x) == 7


def test_all_late_ranks_are_named(impatient):
    f = impatient.function(lambda: time.sleep(60), outputs=[])
    with Watch(), pytest.raises(synk.CallTimeout, match="ranks 0, 1") as caught:
        f()
    assert caught.value.ranks == (0, 1)


def test_a_late_distribution_is_named(impatient, tmp_path):
    nap = Nap(tmp_path / "flag")
    f = impatient.function(lambda x: (nap, x.sum())[1], outputs="sum")
    with Watch(), pytest.raises(synk.CallTimeout, match="is loading functions"):
        impatient.distribute()
    assert answers(f, np.ones(7)) == 7


def test_a_late_answer_is_not_the_next_calls(impatient):
    def f(x):
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(20 * x.max())
        return x.sum()

    f = impatient.function(f, outputs="sum")
    with pytest.raises(synk.CallTimeout):
        f(np.ones(10))
    assert answers(f, np.zeros(2)) == 0


def test_close_does_not_wait_for_a_stopped_worker(session):
    os.kill(session.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: stopped(session.pids[1]))
    with Watch():
        session.close()
    assert all(map(gone, session.pids))


@pytest.mark.parametrize("busy", [sleeping, in_native_code, stubborn], ids=lambda busy: busy.__name__)
def test_close_does_not_wait_for_a_late_worker(busy, impatient):
    with pytest.raises(synk.CallTimeout):
        impatient.function(busy, outputs=[])()
    with Watch():
        impatient.close()
    assert all(map(gone, impatient.pids))


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────


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


class Interrupt:
    """Sends this process a SIGINT when *condition* comes true while its block runs."""

    def __init__(self, condition):
        self.condition = condition
        self.thread = threading.Thread(target=self.run)

        self.over = False

    def run(self):
        if wait_until(lambda: self.over or self.condition(), 30) and not self.over:
            os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *error):
        self.over = True
        self.thread.join()


def in_phase(session, phase):
    return lambda: session._engine._controller.whereabouts(1)[0] == phase


def inside(function):
    """Whether the main thread is in a function of this name."""

    def condition():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame is not None

    return condition


def ctrl_c(condition, call):
    with Watch(), pytest.raises(KeyboardInterrupt), Interrupt(condition):
        call()


@pytest.mark.parametrize("busy", [sleeping, in_native_code], ids=lambda busy: busy.__name__)
def test_ctrl_c_interrupts_the_call_not_the_session(busy, session):
    pids = session.pids
    ctrl_c(in_phase(session, Phase.RUNNING), session.function(busy, outputs=[]))
    assert session.state is State.READY
    assert total(session) == 7
    assert session.pids == pids


def test_ctrl_c_several_times_in_a_row(session):
    f = session.function(sleeping, outputs=[])
    for _ in range(5):
        ctrl_c(in_phase(session, Phase.RUNNING), f)
    assert total(session) == 7


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
    ctrl_c(inside("_wait"), f)
    os.kill(session.pids[1], signal.SIGCONT)
    assert wait_until(lambda: not session._engine._controller.unanswered(), SOON)
    assert total(session) == 7


def test_ctrl_c_while_waiting_for_an_interrupted_call(session):
    def deaf():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(2)

    f = session.function(rows, outputs="gather")
    session.distribute()
    ctrl_c(in_phase(session, Phase.RUNNING), session.function(deaf, outputs=[]))
    ctrl_c(inside("_settle"), lambda: f(np.ones(3)))
    ctrl_c(inside("_settle"), lambda: f(np.ones(3)))
    assert f(np.ones(3)).tolist() == [1, 1, 1]


def test_ctrl_c_during_distribute(session, tmp_path):
    nap = Nap(tmp_path / "flag")
    f = session.function(lambda x: (nap, x.sum())[1], outputs="sum")
    ctrl_c(lambda: (tmp_path / "flag").exists(), session.distribute)
    assert f(np.ones(4)) == 4


@pytest.mark.parametrize("phase", [Phase.STORING, Phase.REDUCING])
def test_ctrl_c_while_large_outputs_are_fetched(phase, session):
    def arm():
        replica = world.current
        say = replica.report

        def report(now, done):
            say(now, done)
            if now == phase:
                replica.report = say
                time.sleep(60)

        if replica.rank == 1:
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


def test_ctrl_c_during_fork(tmp_path, monkeypatch):
    hanging(tmp_path, monkeypatch)
    before = children()
    ctrl_c(inside("_wait"), lambda: synk.fork(2, verbose=False))
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


# ── the main process ends ────────────────────────────────────────────────────────────────────────────

HEAD = """
import os, signal, sys, threading, time
import numpy as np, synkro as synk
from synkro.messages import Phase

synk.fork(2, verbose=False)
print("pids", *synk.world.current.pids, flush=True)

def busy(doing):
    print("running")
    doing()

def running():
    while synk.world.current._engine._controller.whereabouts(0)[0] != Phase.RUNNING:
        time.sleep(0.005)
"""

MOMENTS = {
    "idle": "print('running', flush=True); time.sleep(60)",
    "computing": "synk.function(lambda: busy(lambda: time.sleep(60)), outputs=[])()",
    "in native code": "synk.function(lambda: busy(lambda: 10**10**8), outputs=[])()",
}


class Program:
    """A main process of its own, in a process group of its own."""

    def __init__(self, code, folder):
        script = folder / "program.py"
        script.write_text(HEAD + code)
        self.process = subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            start_new_session=True,
        )
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


def test_killing_the_main_process_while_it_forks(start, tmp_path):
    """Its second session: those workers hang, and have not yet said that they are there."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import os, time\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w')\ntime.sleep(2)\n"
    )
    program = start(
        f"os.environ['PYTHONPATH'] = {str(tmp_path / 'site')!r}\n"
        "threading.Thread(target=synk.Session, args=(2,), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    program.process.kill()
    assert wait_until(lambda: all(map(gone, program.pids)), SOON)
    assert wait_until(lambda: all(map(gone, pids)), 2 + SOON)


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


EXITS = {
    "without close": ("synk.function(lambda x: x)(np.ones(4))", 0),
    "after close": ("synk.close()", 0),
    "by an exception": ("raise ZeroDivisionError", 1),
    "in a broken session": (
        "try:\n"
        "    synk.function(lambda: os._exit(3), outputs=[])()\n"
        "except synk.WorkerDied:\n"
        "    sys.exit(7)",
        7,
    ),
    "beside a call in a daemon thread": (
        "f = synk.function(lambda: time.sleep(60), outputs=[])\n"
        "threading.Thread(target=f, daemon=True).start()\n"
        "running(); sys.exit(7)",
        7,
    ),
    "beside a native call in a daemon thread": (
        "f = synk.function(lambda: 10**10**8, outputs=[])\n"
        "threading.Thread(target=f, daemon=True).start()\n"
        "running(); sys.exit(7)",
        7,
    ),
    "beside a call in a thread": (
        "f = synk.function(lambda: time.sleep(0.5), outputs=[])\n"
        "threading.Thread(target=lambda: print('done', f())).start()\n"
        "running(); sys.exit(7)",
        7,
    ),
    "beside a submitted call": (
        "f = synk.function(lambda: time.sleep(0.5), outputs=[])\n"
        "f.submit().add_done_callback(lambda future: print('done', future.result()))\n"
        "running(); sys.exit(7)",
        7,
    ),
    "by a thread, in a call": (
        "f = synk.function(lambda: time.sleep(60), outputs=[])\n"
        "threading.Thread(target=lambda: (running(), os._exit(7)), daemon=True).start()\n"
        "f()",
        7,
    ),
    "by an unheard Ctrl-C": (
        "f = synk.function(lambda: time.sleep(60), outputs=[])\n"
        "def stop(): running(); os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        "f()",
        -signal.SIGINT,
    ),
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_exits(how, run_python):
    code, status = EXITS[how]
    with Watch():
        done = run_python(HEAD + code + "\n", check=False, timeout=60)
    assert done.returncode == status, done.stderr
    pids = [int(pid) for pid in done.stdout.splitlines()[0].split()[1:]]
    assert wait_until(lambda: all(map(gone, pids)))
    if "done" in code:
        assert "done None" in done.stdout
    if status in (0, 7) and "daemon" not in how:
        assert done.stderr == ""


@pytest.mark.parametrize("busy", [sleeping, in_native_code, stubborn], ids=lambda busy: busy.__name__)
def test_close_from_another_thread_ends_the_call(busy, session):
    def close():
        assert wait_until(in_phase(session, Phase.RUNNING), 30)
        session.close()

    f = session.function(busy, outputs=[])
    thread = threading.Thread(target=close)
    thread.start()
    ended = (synk.SessionClosed, synk.SessionBroken, synk.WorkerDied)
    with Watch(), pytest.raises(ended):
        f()
    thread.join()
    assert session.state is State.CLOSED
    assert all(map(gone, session.pids))


def test_close_lets_a_short_call_end(session):
    def close():
        assert wait_until(in_phase(session, Phase.RUNNING), 30)
        session.close()

    def short(x):
        time.sleep(0.2)
        return x.sum()

    thread = threading.Thread(target=close)
    f = session.function(short, outputs="sum")
    thread.start()
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


# ── no memory ────────────────────────────────────────────────────────────────────────────────────────


def full(monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def need_data(session):
    return lambda: session.data(np.ones(10))


def need_growth(session):
    x = session.data(np.arange(4.0))

    def grow():
        try:
            x.set_length(1_000_000)
        finally:
            assert x[:4].tolist() == [0, 1, 2, 3]

    return grow


def need_a_copied_input(session):
    f = session.function(rows, outputs="gather")
    return lambda: f(np.ones(1000))


def need_a_batch(session):
    f = session.function(rows, outputs="gather")
    x = session.data(np.ones(10))
    return lambda: f(x, batch=[1, 3, 5])


def need_stages(session):
    f = session.function(lambda x: np.full(LARGE, x.sum()), outputs="sum")
    x = session.data(np.ones(10))
    return lambda: f(x)


def need_a_result(session):
    f = session.function(rows, outputs="gather")
    x = session.data(np.ones(2 * LARGE))
    return lambda: f(x)


def need_room_for_a_closure(session):
    closure = np.ones(LARGE)
    f = session.function(lambda x: closure.sum() + x.sum())
    x = session.data(np.ones(10))
    return lambda: f(x)


def need_room_for_a_long_command(session):
    text = "".join(map(str, range(40_000)))
    f = session.function(lambda x: len(text) + x.sum())
    x = session.data(np.ones(10))
    return lambda: f(x)


NEEDS = [value for name, value in list(globals().items()) if name.startswith("need_")]


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.__name__)
def test_full_memory_is_an_error_and_the_session_goes_on(need, session, monkeypatch):
    call = need(session)
    full(monkeypatch)
    for _ in range(2):
        with pytest.raises(synk.SharedMemoryError, match=r"could not be had \(No space left on device"):
            call()
    monkeypatch.undo()
    call()
    assert total(session) == 7


def test_full_memory_at_the_start(monkeypatch):
    full(monkeypatch)
    with pytest.raises(synk.SharedMemoryError, match="No space left"):
        synk.fork(2, verbose=False)
    monkeypatch.undo()
    assert synk.fork(2, verbose=False) == 2


def test_more_than_the_machine_has_is_an_error_at_once(session):
    with Watch(), pytest.raises(synk.SharedMemoryError, match=r"asked for.*free_memory"):
        session.data(shape=(1 << 50,), dtype="uint8")
    assert total(session) == 7


def test_no_descriptor_left_is_an_error_and_the_session_goes_on(session):
    f = session.function(lambda x: x.sum(), outputs="sum")
    kept = []
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 9, hard))
    try:
        with pytest.raises(synk.SharedMemoryError, match="ulimit -n"):
            kept.extend(session.data(np.ones(3)) for _ in range(100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [f(x) for x in kept] == [3] * len(kept)
    assert total(session) == 7


def test_a_worker_that_cannot_map_memory_now_can_do_so_later(session):
    def arm():
        attach = Segment.attach

        def refuse(*args):
            Segment.attach = attach
            raise synk.SharedMemoryError("no room in this worker")

        if rank() == 1:
            Segment.attach = refuse

    f = session.function(lambda x: x.sum(), outputs="sum")
    f(np.ones(3))
    session.function(arm, outputs=[])()
    x, y = session.data(np.ones(1000)), session.data(np.ones(2000))
    with pytest.raises((synk.WorkerError, synk.SharedMemoryError), match="no room in this worker"):
        f(x)
    assert f(y) == 2000
    assert f(x) == 1000


@pytest.mark.parametrize("leave", ["pass", "sys.exit(3)"])
def test_a_child_forked_by_a_function_is_no_rank(session, leave):
    def forks(x):
        import os
        import sys  # noqa: F401

        child = os.fork()
        if child == 0:
            exec(leave)
            return x.sum() + 1000.0
        os.waitpid(child, 0)
        return x.sum()

    f = session.function(forks, outputs="sum")
    with Watch():
        for start in range(5):
            x = np.arange(start, start + 9.0)
            assert f(x) == x.sum()


def test_a_worker_that_closed_its_descriptors_is_given_up(session):
    def deafen(x):
        import os

        os.closerange(3, 20)
        x.spare = [os.open("/dev/zero", os.O_RDONLY) for _ in range(17)]

    class Spare:
        pass

    spare = Spare()
    total = session.function(lambda x: x.sum(), outputs="sum")
    with Watch(), pytest.raises(synk.SynkroError):  # noqa: PT012
        session.function(lambda x: deafen(spare), outputs=[])(np.ones(4))
        for _ in range(3):
            total(session.data(np.ones(5)))
    session.close()
