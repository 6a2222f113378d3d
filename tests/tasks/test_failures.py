"""Maps that fail, are interrupted, take too long, or lose a worker: at any moment."""

import contextlib
import errno
import fcntl
import functools
import gc
import io
import itertools
import mmap
import os
import queue
import signal
import sys
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.inside import controller, in_phase, main_thread_in
from support.leftovers import nothing_left
from support.limits import descriptors
from support.sessions import running
from support.together import good, together
from support.waiting import SOON, Watch, wait_until
from synkro import (
    CallTimeout,
    InvalidType,
    OutputError,
    SessionBroken,
    SessionClosed,
    SessionError,
    UsageError,
    WorkerDied,
)
from synkro.controller.engine.engine import State
from synkro.controller.tasks.map import Map
from synkro.messages import Phase

pytestmark = pytest.mark.long


def double(x):
    return x * 2


def fine():
    """The session serves maps and calls."""
    assert synk.map(double, range(20)) == [2 * i for i in range(20)]
    assert synk.function(lambda x: x.sum(), outputs="sum")(np.ones(9)) == 9
    return True


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────────


def test_of_several_failures_the_first_item_is_told(own, results):
    def fail(x):
        raise ValueError(x)

    for _ in range(10):
        with pytest.raises(ValueError, match=r"at item 0 \('a'\)"):
            results(fail, "abcdef")
    assert fine()


def test_what_runs_ends_and_no_other_task_begins(own, tmp_path):
    def task(x):
        if x == 0:
            raise RuntimeError
        time.sleep(0.2)
        (tmp_path / str(x)).touch()

    with pytest.raises(RuntimeError, match="item 0"):
        synk.map(task, range(100))
    assert {path.name for path in tmp_path.iterdir()} <= {"1", "2"}
    assert fine()


def test_an_exception_of_the_iterable_comes_when_its_items_are_done(own):
    def items():
        yield from range(10)
        raise LookupError("no more")

    got = []
    with pytest.raises(LookupError, match="no more"):
        got.extend(synk.imap(double, items()))
    assert got == [2 * i for i in range(10)]
    assert fine()


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_dies_while_it_waits_for_items_is_told(own):
    def items():
        yield 1
        assert wait_until(in_phase(own, Phase.TAKING))
        os.kill(own.pids[1], signal.SIGKILL)
        yield from itertools.count()

    with Watch(), pytest.raises(WorkerDied):
        synk.map(double, items())


def test_a_worker_that_dies_between_two_results_is_told(own):
    results = synk.imap(double, itertools.count())
    next(results)
    os.kill(own.pids[0], signal.SIGKILL)
    with Watch(), pytest.raises(WorkerDied):
        for _ in results:
            pass
    with pytest.raises(SessionBroken):
        next(synk.imap(double, [1]))


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def test_a_timeout_says_what_runs(own):
    with Watch(), pytest.raises(CallTimeout, match=r"rank \d \((h\d, )?pid \d+\) is running item 3"):
        synk.map(sleep, [0, 0, 0, 30, 0], timeout=0.5)
    assert fine()


def test_a_timeout_of_map_is_for_all_and_of_imap_for_each(own):
    items = [0.1] * 20
    with pytest.raises(CallTimeout):
        synk.map(sleep, items, timeout=0.5)
    assert len(list(synk.imap(sleep, items, timeout=0.9))) == 20
    with pytest.raises(CallTimeout, match="item 20"):
        list(synk.imap(sleep, [*items, 30], timeout=0.9))
    assert fine()


def test_the_sessions_timeout_holds_for_maps():
    with running(2, timeout=0.5), Watch(), pytest.raises(CallTimeout):
        synk.map(sleep, [30] * 4)


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def interrupt_when(condition):
    """Send this process a SIGINT when *condition* comes true, in the block."""

    def wait():
        assert wait_until(condition, 30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("item", [0, 40])
def test_ctrl_c_ends_the_map_and_not_the_session(own, results, item):
    def task(x):
        if x >= item:
            time.sleep(30)
        return x

    pids = own.pids
    with interrupt_when(in_phase(own, Phase.TASK)), Watch(), pytest.raises(KeyboardInterrupt):
        results(task, range(100))
    with Watch():
        assert fine()
    assert own.pids == pids
    assert own.state is State.READY


def test_ctrl_c_in_the_items_ends_the_map(own):
    f = synk.function(lambda x: x.sum(), outputs="sum")

    def items():
        for i in itertools.count():
            if i == 30:
                os.kill(os.getpid(), signal.SIGINT)
            yield f(np.full(4, float(i)))

    with Watch(), pytest.raises(KeyboardInterrupt):
        synk.map(double, items())
    results = synk.imap(double, items())
    with Watch(), pytest.raises(KeyboardInterrupt):
        list(results)
    with pytest.raises(UsageError, match="was interrupted"):
        list(results)
    assert fine()


def test_a_task_that_catches_the_interrupt_is_the_last_one(own):
    def stubborn(x):
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(1 if x < 2 else 30)
        return x

    with interrupt_when(in_phase(own, Phase.TASK)), Watch(), pytest.raises(KeyboardInterrupt):
        synk.map(stubborn, range(100))
    with Watch():
        assert fine()


def test_an_imap_that_was_interrupted_does_not_go_on(own):
    results = synk.imap(sleep, [0.0] * 4 + [30.0] * 20)
    assert [next(results) for _ in range(4)] == [0.0] * 4
    assert wait_until(lambda: min(controller(own).whereabouts(rank)[1] for rank in (0, 1)) > 3)
    with interrupt_when(main_thread_in(Map.pause)), Watch(), pytest.raises(KeyboardInterrupt):
        synk.map(double, [1])  # which waits for the tasks that run
    with pytest.raises(UsageError, match=r"this imap\(\) was interrupted"):
        list(results)
    assert fine()


@pytest.fixture
def interrupted():
    """Says whether a call was interrupted, after a delay; what it returns is true otherwise."""

    def whether(call, delay):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                assert call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    old = signal.signal(signal.SIGALRM, lambda *args: signal.raise_signal(signal.SIGINT))
    yield whether
    signal.signal(signal.SIGALRM, old)


# Python drops an interrupt that comes in a finalizer, and says so
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(3))
def test_interrupts_at_any_moment(own, interrupted, seed):
    """Maps of all kinds, interrupted at random moments: every result that comes is right."""
    rng = np.random.default_rng(seed)
    large = [np.full(50_000, i) for i in range(30)]
    kinds = [
        lambda: synk.map(double, range(500)) == [2 * i for i in range(500)],
        lambda: list(synk.imap(double, iter(range(500)))) == [2 * i for i in range(500)],
        lambda: all((r == 2 * i).all() for i, r in enumerate(synk.imap(double, large))),
        lambda: all((r == 2 * i).all() for i, r in enumerate(synk.map(double, large))),
        lambda: next(synk.imap(double, itertools.count())) == 0,
    ]
    came = [interrupted(kinds[n % 5], rng.uniform(1e-4, 0.03)) for n in range(100)]
    assert any(came)
    assert fine()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_an_interrupt_no_old_item_is_seen(own, interrupted):
    """Items that lay in slots and were not published are those of nobody."""
    first = [np.full(100_000, float(i)) for i in range(40)]
    rng = np.random.default_rng(0)
    for _ in range(60):
        interrupted(lambda: synk.map(np.sum, first), rng.uniform(1e-3, 0.03))
        assert synk.map(double, list(range(100))) == [2 * i for i in range(100)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_first_map_of_a_session_may_be_interrupted(interrupted):
    for delay in np.linspace(1e-4, 5e-3, 8):
        with running(2):
            gc.collect()  # a __del__ of the standard library's would lose the interrupt
            interrupted(lambda: synk.map(double, range(2000)) == [2 * i for i in range(2000)], delay)
            assert fine()


# ── threads and forks ────────────────────────────────────────────────────────────────────────────────


def test_maps_of_several_threads_do_not_mix(own):
    def run(name):
        return list(synk.imap(lambda x: x, ((name, i) for i in range(1500))))

    found = together(*(functools.partial(run, name) for name in "abc"))
    assert found == [[(name, i) for i in range(1500)] for name in "abc"]
    assert fine()


@pytest.mark.parametrize("end", ["return", "raise"])
def test_a_task_may_fork(own, end):
    def fork(x):
        if x % 20 == 5 and os.fork() == 0 and end == "raise":
            raise ValueError
        return np.full(2000, x)

    for _ in range(2):
        assert [result[0] for result in synk.map(fork, range(100))] == list(range(100))
    assert fine()


def test_a_fork_that_drops_an_iterator_does_not_stop_it_here(own):
    for _ in range(10):
        results = synk.imap(double, range(3000))
        assert next(results) == 0
        child = os.fork()
        if child == 0:
            del results
            os._exit(0)
        assert list(results) == [2 * i for i in range(1, 3000)]
        os.waitpid(child, 0)


def test_a_result_that_cannot_be_unpickled_is_the_maps_error(own):
    class Odd:
        def __init__(self, value):
            self.value = value

        def __reduce__(self):
            return int, (self.value,)

    f = synk.function(lambda x: x.sum(), outputs="sum")
    results = synk.imap(lambda x: Odd("no number" if x == 5 else str(x)), range(40))
    assert next(results) == 0
    for _ in range(3):
        assert f(np.ones(5)) == 5
    got = []
    with pytest.raises(OutputError, match=r"item 5 of map\(\) cannot be unpickled"):
        got.extend(iter(lambda: next(results), None))
    assert f(np.ones(5)) == 5


def test_without_descriptors_there_is_an_error_and_nothing_is_left(own):
    told = pytest.raises(synk.SharedMemoryError, match=r"queue of tasks could not be made .*ulimit -n")
    with descriptors(3), told:
        synk.map(double, [1])
    assert fine()


def test_another_error_of_the_queue_is_told_as_it_is(own, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "pipe2", refuse)
    with pytest.raises(SessionError, match=r"could not be made \(\[Errno 13\] Permission denied\)\.$"):
        synk.map(double, [1])
    monkeypatch.undo()
    assert fine()


# ── what is left ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["done", "left", "failed", "died", "unfinished"])
def test_nothing_is_left_of_a_session_with_maps(end):
    def task(x):
        if x == 50 and end == "failed":
            raise ValueError
        if x == 50 and end == "died":
            os._exit(3)
        return np.full(100_000, x)

    with nothing_left(), running(2):
        results = synk.imap(task, range(100))
        with contextlib.suppress(ValueError, WorkerDied):
            if end in ("left", "unfinished"):
                next(results)
            else:
                list(results)
        if end != "unfinished":
            del results


def test_the_memory_of_maps_is_used_again(own):
    large = np.zeros(1 << 20)
    for times in (20, 100):
        before = shared_memory()
        for _ in synk.imap(double, itertools.repeat(large, times)):
            pass
    # of 1.6 GB that went there and back; other programs share some, too
    assert shared_memory() - before < 200 << 20


def test_a_forked_child_has_no_map(own):
    assert synk.map(double, [1]) == [2]
    results = synk.imap(double, itertools.count())
    next(results)
    child = os.fork()
    if child == 0:
        try:
            for _ in results:
                pass
        except synk.SessionClosed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(results) == 2


# ── what is seen of it ───────────────────────────────────────────────────────────────────────────────


def test_the_bar_counts_items(own, monkeypatch):
    seen = []
    reach = "synkro.controller.progress.Progress.reach"
    monkeypatch.setattr(reach, lambda self, done: seen.append(done))
    assert synk.map(double, range(300), progress=True) == [2 * i for i in range(300)]
    assert list(synk.imap(double, iter(range(10)), progress=True)) == [2 * i for i in range(10)]
    assert seen[-1] == 10
    assert 300 in seen
    assert seen == sorted(seen[: seen.index(300) + 1]) + seen[seen.index(300) + 1 :]


def test_a_map_is_a_call_in_a_trace(own, capsys):
    with synk.trace():
        synk.map(double, range(50))
        list(synk.imap(sleep, [0.01] * 4))
    synk.summary()
    table = capsys.readouterr().out
    assert "double" in table
    assert "sleep" in table


def test_prints_of_tasks_without_an_end_of_line_stay_apart(own, capsys):
    """Those of calls, too; within one of them they run together."""

    def speak(item):
        import sys

        print("a", end="")
        print("b", item, end="")
        sys.stderr.write(f"error {item}")
        sys.stdout.write("")

    assert synk.map(speak, range(4)) == [None] * 4
    for item in (4, 5):
        synk.function(speak, bcast_inputs="item", outputs=[], target=0)(item)
    synk.function(lambda: print("whole"), outputs=[], target=0)()
    synk.function(lambda: None, outputs=[])()
    synk.close()
    out, err = capsys.readouterr()
    assert sorted(line[9:] for line in out.splitlines()) == [*(f"ab {n}" for n in range(6)), "whole"]
    assert sorted(line[9:] for line in err.splitlines()) == [f"error {n}" for n in range(6)]
    assert all(line.startswith("[rank ") for line in (out + err).splitlines())


def test_the_signals_of_other_programs_do_not_harm(own):
    """What interrupts a system call (a timer of the program's, say) ends no task."""
    old = signal.signal(signal.SIGALRM, lambda *args: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(5):
            assert synk.map(double, range(2000)) == [2 * i for i in range(2000)]
            assert list(synk.imap(double, iter(range(500)))) == [2 * i for i in range(500)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_output_is_not_mixed(own):
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        synk.map(double, range(10))
    assert stream.getvalue() == ""


# ── the program's own code in the middle of a map ────────────────────────────────────────────────────


settings = {"rate": 1}


def uses(x):
    return x * settings["rate"]


def test_functions_that_are_values_see_what_is_there_now(own):
    f = synk.function(uses, inputs=[], bcast_inputs=["x"], outputs=None)
    g = synk.function(lambda k: k(1), inputs=[], bcast_inputs=["k"], outputs=None)
    for rate in (1, 10, 100):
        settings["rate"] = rate
        assert synk.map(lambda k: k(1), [uses, lambda x: settings["rate"]]) == [rate, rate]
        assert synk.map(lambda x, k: k(x), [1], common={"k": uses}) == [rate]
        assert g(uses) == [rate, rate]
    assert f(1) == [100, 100]


def test_the_function_of_the_last_map_may_be_an_argument(own):
    assert synk.map(double, [1]) == [2]
    assert synk.map(lambda x, k: k(x), [1, 2], common={"k": double}) == [2, 4]
    assert list(synk.imap(lambda x, k: k(x), [1, 2], common={"k": double})) == [2, 4]


def test_the_options_of_a_function_are_those_of_its_map(own, results):
    f = synk.function(sleep, outputs=[]).options(timeout=0.2)
    with Watch(), pytest.raises(synk.CallTimeout):
        results(f, [20])
    assert synk.map(synk.function(double).options(timeout=3), [1]) == [2]


class Interrupted:
    """Raises KeyboardInterrupt at one line of ``next`` after the other."""

    def __init__(self, line):
        self.line = line

    def __call__(self, frame, event, arg):
        if frame.f_code is not Map.next.__code__:
            return self if event == "call" else None
        if event == "line":
            self.line -= 1
            if not self.line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("line", range(1, 40, 6))
def test_an_interrupt_in_next_loses_no_result_silently(own, line):
    results, got = synk.imap(double, range(30)), []

    def read():
        sys.settrace(Interrupted(line))
        got.extend(results)

    with pytest.raises(KeyboardInterrupt):
        read()
    sys.settrace(None)
    assert got == [2 * k for k in range(len(got))]
    with pytest.raises(UsageError, match="was interrupted"):
        next(results)
    assert synk.map(double, range(9)) == list(range(0, 18, 2))


def test_a_map_that_waits_for_its_items_blocks_nobody(own):
    items = queue.Queue()

    def another():
        items.put(3)
        assert wait_until(items.empty)
        found = synk.map(double, [1], timeout=SOON)
        for item in (4, None):
            items.put(item)
        return found

    with Watch():
        found = together(lambda: synk.map(double, iter(items.get, None)), another)
    assert found == [[6, 8], [2]]


def test_closing_ends_a_map_that_waits_for_its_items(own):
    items = queue.Queue()

    def close():
        items.put(1)
        assert wait_until(items.empty)
        synk.close()
        items.put(2)

    with Watch():
        ended, _ = together(lambda: synk.map(double, iter(items.get, None)), close)
    assert isinstance(ended, SessionClosed)


def test_the_items_may_close_the_session(own, results):
    def items():
        yield 1
        synk.close()
        yield 2

    with Watch(), pytest.raises(SessionClosed):
        results(double, items())


def test_the_items_may_close_the_results(own):
    def items():
        for number in range(1000):
            if number == 500:
                results.close()
            yield number

    results = synk.imap(double, items())
    got = list(results)
    assert got == [2 * k for k in range(len(got))]
    assert synk.map(double, [1]) == [2]


def test_several_threads_may_read_the_results(own):
    results = synk.imap(double, range(5000))
    found = good(together(*[lambda: list(results)] * 3))
    assert sorted(itertools.chain(*found)) == list(range(0, 10_000, 2))


class Slow:
    """Takes long to come to the workers."""

    def __call__(self, x):
        return x

    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        time.sleep(30)


def test_the_timeout_is_also_that_of_sending_the_function(own):
    with Watch(), pytest.raises(CallTimeout, match="loading"):
        synk.map(Slow(), [1], timeout=0.3)


def test_pipes_of_two_pages_do(own, monkeypatch):
    """As a user gets them who has many."""

    def small(flags, made=os.pipe2):
        ends = made(flags)
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 2 * mmap.PAGESIZE)
        return ends

    monkeypatch.setattr(os, "pipe2", small)
    texts = ["x" * (k % 80) for k in range(2000)]
    for _ in range(5):
        assert synk.map(double, range(5000)) == list(range(0, 10_000, 2))
        assert list(synk.imap(len, iter(texts))) == [len(text) for text in texts]


def test_pipes_of_one_page_are_too_small(own, monkeypatch):
    def sized(fd, command, *args, asked=fcntl.fcntl):
        return mmap.PAGESIZE if command == fcntl.F_GETPIPE_SZ else asked(fd, command, *args)

    monkeypatch.setattr(fcntl, "fcntl", sized)
    with pytest.raises(SessionError, match="single page"):
        synk.map(double, [1])


def test_functions_that_return_no_result_are_refused(own):
    async def later(x):
        return x

    def several(x):
        yield x

    async def both(x):
        yield x

    class Later:
        async def __call__(self, x):
            return x

    named = (later, "later"), (functools.partial(later), "later"), (Later(), "Later")
    refused = [(fn, rf"\(\) takes a function .*'{name}' is async") for fn, name in named]
    refused += [(fn, f"'{fn.__name__}' is a generator function") for fn in (several, both)]
    for fn, why in refused:
        for call in (lambda: synk.map(fn, [1]), lambda: synk.imap(fn, [1]), lambda: synk.function(fn)):
            with pytest.raises(InvalidType, match=why):
                call()


def test_results_that_are_nested_too_deeply_are_named(own):
    def deep(x):
        result = []
        for _ in range(100_000):
            result = [result]
        return result

    with pytest.raises(OutputError, match="function 'deep' for item 0 is nested too deeply"):
        synk.map(deep, [1])


def test_a_task_that_closes_its_output(own):
    assert synk.map(lambda x: sys.stdout.close(), [1]) == [None]
    assert synk.map(double, range(10)) == [2 * i for i in range(10)]


def test_close_gives_the_memory_of_large_results_back():
    before = shared_memory()
    with running(2) as session:
        found = session.map(lambda x: np.zeros(x, np.uint8), [1 << 26] * 2)
        assert [len(each) for each in found] == [1 << 26] * 2
    assert wait_until(lambda: shared_memory() < before + (1 << 25))


def shared_memory():
    """Bytes of shared memory of the machine."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Shmem:"))
