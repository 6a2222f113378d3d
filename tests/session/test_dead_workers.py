"""Whatever dies or hangs in a worker, whenever it does: the user hears of it, and can go on."""

import builtins
import copy
import ctypes
import os
import pickle
import re
import resource
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.failing import leave
from support.sessions import LARGE, lasting, rank, rows, total
from support.waiting import Watch, gone, wait_until
from synkro import here
from synkro.controller.engine.engine import State
from synkro.memory.segment import Segment
from synkro.messages import Phase

pytestmark = pytest.mark.long

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module


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
            leave(3)
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


def while_the_other(does):
    """When both have begun: the other one *does* something meanwhile."""

    def prepare(session, end, tmp_path):
        sign = str(tmp_path / "sign")
        os.mkfifo(sign)

        def meet():
            with open(sign, "r" if rank() else "w"):  # opens when the other side does, too
                end() if rank() else does()

        return session.function(meet, outputs=[])

    return prepare


def on_report(phase, count, fn, outputs, length, **options):
    """In a call of *fn*, when rank 1 says that it is in *phase*."""

    def prepare(session, end, tmp_path):
        def arm():
            replica = here.rank
            say = replica.report

            def report(now, done):
                if (now, done) == (phase, count):
                    end()
                say(now, done)

            if replica.number == 1:
                replica.report = report

        f = session.function(fn, outputs=outputs)
        session.function(arm, outputs=[])()
        return lambda: f(np.ones(length), **options)

    return prepare


class Bomb:
    """Ends the worker that loads it, if that is rank 1."""

    def __init__(self, end):
        self.end = end

    def __reduce__(self):
        end = self.end
        return (lambda: end() if rank() == 1 else None), ()


def while_distributing(session, end, tmp_path):
    bomb = Bomb(end)
    session.f = session.function(lambda: bomb, outputs=[])  # kept there
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

    def arm():
        if rank() == 1:
            here.rank.device.forget = lambda number: end()

    f = session.function(rows, outputs=[])
    x = session.data(np.ones(1 << 21))  # much: a little is given back with the next command
    f(x)
    session.function(arm, outputs=[])()
    return x.free_memory


PHASES = {
    "when_idle": when_idle,
    "while_computing": while_computing,
    "while_the_other_sleeps": while_the_other(lambda: time.sleep(60)),
    "while_the_other_is_in_native_code": while_the_other(lambda: 10**10**8),
    "between_slices": on_report(Phase.RUNNING, 2, rows, "gather", 8, num_slices=3),
    "while_storing": on_report(Phase.STORING, 0, rows, "gather", 2 * LARGE),
    "while_reducing": on_report(Phase.REDUCING, 0, lambda x: np.full(LARGE, x.sum()), "sum", 8),
    "while_distributing": while_distributing,
    "while_mapping": while_mapping,
    "while_memory_is_freed": while_memory_is_freed,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_death_is_told(phase, kind, session, tmp_path):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    data = session.data(np.arange(5.0))
    f = session.function(lambda x: x.sum(), outputs="sum")
    assert f(data) == 10
    fatal = PHASES[phase](session, ending(kind), tmp_path)
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


def test_fork_starts_anew():
    synk.fork(2, verbose=False, timeout=60)
    x = synk.data(np.arange(4.0))
    end = ending("SIGKILL")
    with pytest.raises(synk.WorkerDied):
        synk.function(lambda: end() if rank() else None, outputs=[])()
    assert synk.fork(2, verbose=False, timeout=60) == 2
    f = synk.function(rows, outputs="gather")
    assert f(synk.data(x[:])).tolist() == [0, 1, 2, 3]


CRASHED = """
import ctypes, resource, sys, numpy as np, synkro as synk

resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
synk.fork(2, verbose=False)

def crash(x):
    print("before the crash", file=sys.stderr)
    ctypes.string_at(0)

synk.function(crash)(np.ones(2))
"""


def test_a_crash_is_told_once(run_python):
    done = run_python(CRASHED, check=False)
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert done.stderr.count("in crash\n") == 1
    assert "] before the crash\n" in done.stderr


def test_a_crash_that_no_error_tells_is_told_at_the_end(session, tmp_path, capsys):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    when_idle(session, ending("SIGSEGV"), tmp_path)
    assert "Fatal" not in capsys.readouterr().err
    session.close()
    assert capsys.readouterr().err.count("[rank 1] Fatal Python error: Segmentation fault\n") == 1


def test_the_crash_of_a_child_of_a_worker_is_passed_on(session, capsys):
    def shout():
        print("Fatal Python error: of a child\n\nCurrent thread 0x1 (most recent", file=sys.stderr)
        print("and on it goes", file=sys.stderr)

    session.function(shout, outputs=[])()
    session.close()
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[rank 1]")]
    assert printed[0] == "[rank 1] Fatal Python error: of a child"
    assert printed[-1] == "[rank 1] and on it goes"
    assert len(printed) == 4


def test_only_the_end_of_a_long_stderr_is_told(session):
    def shout():
        for line in range(5000):
            print("line", line, "x" * 50, file=sys.stderr)
        sys.stderr.flush()
        leave(1)

    with pytest.raises(synk.WorkerDied) as caught:
        session.function(shout, outputs=[])()
    assert "line 4999" in caught.value.stderr
    assert len(str(caught.value)) < 10_000


def test_a_future_hears_of_the_death(session):
    future = session.function(lambda: leave(3), outputs=[]).submit()
    with pytest.raises(synk.WorkerDied):
        future.result(timeout=60)


# ── an exception in a worker ─────────────────────────────────────────────────────────────────────────

lived = lasting(2)  # as all these errors leave it in working order


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
    "odd constructor": (lambda: raising(Odd(1, 2))(), Odd, "Odd: 1 is not 2"),
    "unpicklable": (lambda: raising(Locked("text"))(), None, "Locked: text"),
    "mute": (raising(Mute()), Mute, "Mute: "),
    "str exits": (raising(Leaver()), Leaver, "Leaver: "),
    "trap": (lambda: raising(Trap("text"))(), Trap, "Trap: text"),
    "SystemExit": (lambda: sys.exit(3), SystemExit, "SystemExit: 3"),
    "KeyboardInterrupt": (raising(KeyboardInterrupt("me")), KeyboardInterrupt, "KeyboardInterrupt: me"),
    "GeneratorExit": (raising(GeneratorExit()), GeneratorExit, "GeneratorExit"),
    "recursion": (deep, RecursionError, "RecursionError: maximum recursion"),
    "memory": (lambda: np.empty(1 << 58), MemoryError, "Unable to allocate"),
    "usage": (raising(synk.InvalidValue("the user's")), synk.InvalidValue, "the user's"),
    "worker's": (raising(synk.WorkerDied("not really", 5, 6)), synk.WorkerDied, "not really"),
    "huge": (lambda: raising(Plain("x" * 10_000_000 + " end"))(), None, "x" * 20),
    "huge unicode": (lambda: raising(Plain("🙂" * 1_000_000 + " end"))(), None, "🙂" * 10),
    "medium": (lambda: raising(Plain("🙂" * 15_000))(), Plain, "🙂"),
}
if group := vars(builtins).get("ExceptionGroup"):  # from Python 3.11 on
    CASES["group"] = (
        raising(group("two", [KeyError("a"), group("in", [ValueError(1)])])),
        group,
        "ExceptionGroup: two (2 sub-exceptions)",
    )


@pytest.mark.parametrize("case", CASES)
def test_an_exception_is_told(case, lived):
    """By an error of the type of the original, also where that cannot be brought here, or a plain one
    for what would end something."""
    fail, original, text = CASES[case]
    kind = original or {"unpicklable": Locked}.get(case, Plain)
    ends = not issubclass(kind, Exception) or issubclass(kind, synk.WorkerDied)
    f = lived.function(lambda x: fail(), name="failing")
    pids = lived.pids
    with Watch(), pytest.raises(synk.WorkerError) as caught:
        f(np.ones(4))
    error = caught.value
    assert (error.rank, error.function) == (0, "failing")
    assert isinstance(error.original, original or type(None))
    for part in (text, "rank 0 ", "'failing'", "2 ranks failed"):
        assert part in str(error)
    assert isinstance(error.__cause__, synk.RemoteTraceback)
    assert "Traceback (most recent call last)" in error.__cause__.text or case.startswith("huge")
    assert len(str(error)) + len(str(error.__cause__)) < 100_000
    assert isinstance(error, kind) is not ends
    assert (type(error) is synk.WorkerError) is ends
    assert type(error).__name__ in ("WorkerError", f"WorkerError[{type(error).__bases__[-1].__name__}]")
    assert repr(error)
    again = copy.copy(error)
    assert (type(again), str(again), again.rank) == (type(error), str(error), 0)
    assert type(again.original) is type(error.original)
    assert total(lived) == 7
    assert lived.pids == pids


class Detailed(Exception):
    """Has attributes, and a constructor, of its own."""

    def __init__(self, left, right):
        super().__init__(f"{left} is not {right}")
        self.left, self.right = left, right
        self.rank = "high"

    def __str__(self):
        return "of its own"

    def both(self):
        return self.left, self.right, scale


scale = 1


@pytest.mark.parametrize(
    ("fail", "kind", "attributes"),
    [
        (
            lambda: os.stat("/nowhere/at/all"),
            FileNotFoundError,
            {"errno": 2, "filename": "/nowhere/at/all"},
        ),
        (lambda: b"\xff".decode(), UnicodeDecodeError, {"start": 0, "object": b"\xff"}),
        (lambda: np.linalg.inv(np.zeros((2, 2))), np.linalg.LinAlgError, {}),
        (lambda: np.ones(2).sum(axis=3), np.exceptions.AxisError, {"axis": 3, "ndim": 1}),
        (lambda: raising(Detailed(1, 2))(), Detailed, {"left": 1, "right": 2, "rank": 0}),
        (lambda: synk.rank(3), TypeError, {}),
        (lambda: synk.all_reduce(1, "median"), synk.InvalidValue, {}),
    ],
)
def test_it_is_caught_as_in_a_serial_program(fail, kind, attributes, lived):
    """It has the attributes of the original, but for those of a WorkerError's own."""
    with pytest.raises(kind) as caught:
        lived.function(fail, outputs=[])()
    error = caught.value
    assert isinstance(error, synk.WorkerError)
    assert re.match(r"rank 0 (\(h1\) )?failed in the function ", str(error))
    assert {name: getattr(error, name) for name in attributes} == attributes
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert {name: getattr(again, name) for name in attributes} == attributes


def test_the_end_of_an_iterator_ends_nothing_here(lived):
    with pytest.raises(synk.WorkerError, match="StopIteration") as caught:
        lived.function(lambda: next(iter(())), outputs=[])()
    assert type(caught.value) is synk.WorkerError


def test_the_users_own_class_stays_what_it_is(lived, monkeypatch):
    """Its methods read this program's globals, also after a copy of it has come from a worker."""
    method = Detailed.both
    with pytest.raises(Detailed) as caught:
        lived.function(lambda: raising(Detailed(1, 2))(), outputs=[])()
    monkeypatch.setattr(sys.modules[__name__], "scale", 5)
    assert Detailed.both is method
    assert caught.value.both() == (1, 2, 5)


def test_of_a_class_that_is_not_imported_here_it_is_of_a_base(lived, monkeypatch, tmp_path):
    """An exception brings no module along."""
    (tmp_path / "elsewhere.py").write_text("class Own(LookupError):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fail():
        import elsewhere

        raise elsewhere.Own("not here")

    with pytest.raises(LookupError, match="Own: not here") as caught:
        lived.function(fail, outputs=[])()
    assert type(caught.value).__name__ == "WorkerError[LookupError]"
    assert caught.value.original is None
    assert "elsewhere" not in sys.modules
    assert "elsewhere.Own: not here" in str(caught.value.__cause__)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_on_one_rank_strands_nobody(culprit, lived):
    def f(x):
        if rank() == culprit:
            raise Plain(f"I am {culprit}")
        return np.ones(LARGE)

    with pytest.raises(synk.WorkerError, match=f"rank {culprit} .*Plain: I am {culprit}") as caught:
        lived.function(f, outputs="sum")(np.ones(4))
    assert caught.value.rank == culprit
    assert caught.value.original.args == (f"I am {culprit}",)
    assert "ranks failed" not in str(caught.value)
    assert total(lived) == 7


def test_a_function_that_fails_to_load_can_be_mended(lived):
    class Broken:
        def __reduce__(self):
            return raising(Plain("cannot be loaded")), ()

    class Mended:
        pass

    part = Broken()
    f = lived.function(lambda x: (part, x.sum())[1], outputs="sum")
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="cannot be loaded"):
            f(np.ones(3))
    part = Mended()
    assert f(np.ones(3)) == 3


def test_what_an_exception_held_is_freed(lived):
    def f():
        block = np.ones(1 << 22)
        raise Plain(len(block))

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    f = lived.function(f, outputs=[])
    resident = lived.function(resident, outputs="max")
    before = resident()
    with pytest.raises(synk.WorkerError):
        f()
    assert resident() - before < 1 << 24  # of 32 MB
