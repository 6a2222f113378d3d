"""What workers log and warn of, in the main program."""

import collections
import contextlib
import enum
import logging
import logging.handlers
import os
import signal
import threading
import warnings

import numpy as np
import pytest

import synkro as synk
from support.logs import Kept, log
from support.sessions import two_mapping
from support.waiting import Watch, interrupted_after, wait_until

two_forked = two_mapping


def both(level, text):
    return sorted((level, text, rank) for rank in range(2))


@contextlib.contextmanager
def handling(emit):
    """Until the end of the block *emit* is called with each record."""
    handler = logging.Handler()
    handler.emit = emit
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


def raising(error):
    def fail(record):
        raise error

    return fail


# ── records ──────────────────────────────────────────────────────────────────────────────────────────


def test_records_come_in_order(two, kept):
    def task():
        for n in range(1000):
            log.info(n)

    log.info("before", extra={"rank": "main"})
    synk.function(task, outputs=[])()
    log.info("after", extra={"rank": "main"})
    assert kept.said[0][1:] == ("before", "main")
    assert kept.said[-1][1:] == ("after", "main")
    for rank in range(2):
        assert [int(text) for _, text, of in kept.said if of == rank] == list(range(1000))


def test_levels_are_those_of_now(two, kept):
    def task():
        found = [log.isEnabledFor(level) for level in (logging.DEBUG, logging.INFO, logging.ERROR)]
        log.debug("detail")
        log.info("more")
        return found

    f = synk.function(task, outputs=None)
    assert f() == [[False, True, True]] * 2
    assert sorted(kept.said) == both("INFO", "more")
    log.setLevel(logging.DEBUG)
    assert f() == [[True, True, True]] * 2
    logging.disable(logging.INFO)
    try:
        assert f() == [[False, False, True]] * 2
    finally:
        logging.disable(logging.NOTSET)
    log.setLevel(logging.NOTSET)  # the level is that of the root, which is WARNING
    kept.records.clear()
    assert f() == [[False, False, True]] * 2
    assert kept.said == []


class Named(logging.Logger):
    pass


def test_loggers_of_a_class_of_their_own(two, tmp_path):
    """Their level does not make another one on the worker before the module that makes them."""
    usual = logging.getLoggerClass()
    logging.setLoggerClass(Named)
    try:
        special = logging.getLogger(f"tests.special{os.getpid()}")
    finally:
        logging.setLoggerClass(usual)
    special.setLevel(logging.INFO)
    name = special.name
    assert synk.function(lambda: name in logging.root.manager.loggerDict, outputs=None)() == [False] * 2


def test_names_of_levels(two, kept):
    logging.addLevelName(25, "NOTICE")
    synk.function(lambda: log.log(25, "see"), outputs=[])()
    assert sorted(kept.said) == both("NOTICE", "see")


def test_levels_that_rise_while_tasks_run(kept):
    with synk.Executor(2) as executor:
        futures = [executor.submit(lambda n: log.info("item %d", n), n) for n in range(8)]
        log.setLevel(logging.ERROR)
        for future in futures:
            future.result()
        assert len(kept.said) == 8
        executor.submit(lambda: log.info("no more")).result()
    assert len(kept.said) == 8


def test_a_logger_that_is_made_later(two):
    name = f"tests.logs.later{os.getpid()}"

    def task():
        logging.getLogger(name).debug("here")

    f = synk.function(task, outputs=[])
    f()
    handler = Kept()
    logging.getLogger(name).addHandler(handler)
    logging.getLogger(name).setLevel(logging.DEBUG)
    f()
    assert sorted(handler.said) == both("DEBUG", "here")


def test_what_a_record_carries(two, kept):
    def task():
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("failed on %s", "this", extra={"where": (1, 2)}, stack_info=True)

    synk.function(task, outputs=[])()
    record = kept.records[0]
    assert record.where == (1, 2)
    assert record.funcName == "task"
    assert record.process in two.pids
    text = record.getMessage()
    assert text.startswith("failed on this\nTraceback (most recent call last):\n")
    assert "ZeroDivisionError: division by zero" in text
    assert "Stack (most recent call last)" in text
    assert (record.args, record.exc_info) == (None, None)


def test_a_stacklevel_beyond_the_function_is_that_of_the_function(two, kept):
    def task():
        log.warning("logged", stacklevel=2)
        warnings.warn("warned", stacklevel=2)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        synk.function(task, outputs=[])()
    assert {each.filename for each in found} == {__file__}
    assert {(record.pathname, record.funcName) for record in kept.records} == {(__file__, "task")}


class Place:
    class Kind(enum.Enum):
        HERE = 1

    def __init__(self, x):
        self.x = x


def test_objects_of_the_program_in_a_record(two, kept):
    def task():
        log.info("here", extra={"place": Place(3), "kind": Place.Kind.HERE, "cls": Place})

    synk.function(task, outputs=[])()
    for record in kept.records:
        assert type(record.place) is Place
        assert (record.place.x, record.kind, record.cls) == (3, Place.Kind.HERE, Place)


def test_what_cannot_be_pickled_is_said_as_by_the_standard_library(two, kept, capfd):
    f = synk.function(lambda: log.info("with a lock", extra={"lock": threading.Lock()}), outputs=[])
    f()
    assert kept.said == []
    assert wait_until(lambda: _err(capfd).count("cannot pickle '_thread.lock' object") >= 2)
    assert _err(capfd).count("--- Logging error ---") == 2


class _Odd:
    """Is unpickled by no one but who has made it."""

    def __reduce__(self):
        return _made_by, (os.getpid(),)


def _made_by(pid):
    if pid != os.getpid():
        raise RuntimeError(f"made by {pid}")


def test_what_cannot_be_unpickled_is_said(two, kept, capfd):
    def task():
        log.info("odd", extra={"odd": _Odd()})
        log.info("even")

    synk.function(task, outputs=[])()
    assert sorted(kept.said) == both("INFO", "even")
    assert _err(capfd).count("RuntimeError: made by") == 2


def test_where_nobody_handles_records_lines_say_all(two, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    f = synk.function(lambda: (log.info("not this"), log.warning("careful\nhere")), outputs=[])
    f()
    err = _err(capfd)
    for rank in range(2):
        assert f"[rank {rank}] WARNING:tests.logs:careful\n[rank {rank}] here\n" in err
    assert "not this" not in err


def test_filters_and_handlers_that_raise(two, kept, capfd):
    refuse = raising(ValueError("no such record"))
    f = synk.function(lambda: log.info("x") or 7.0, outputs="mean")
    with handling(raising(OSError("the disk is full"))):
        assert f() == 7
        assert _err(capfd).count("OSError: the disk is full") == 2
    log.addFilter(refuse)
    try:
        assert f() == 7
        assert _err(capfd).count("ValueError: no such record") == 2
    finally:
        log.removeFilter(refuse)
    kept.records.clear()
    assert f() == 7
    assert sorted(kept.said) == both("INFO", "x")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_handler_that_raises_no_exception(two, kept, kind):
    f = synk.function(lambda: log.info("x") or print("y" * 200_000) or 7.0, outputs="mean")
    with handling(raising(kind)), Watch():
        assert [f(), f(), f()] == [7, 7, 7]
    assert len(kept.said) == 6


def test_a_handler_that_calls_a_function_is_told(two, capfd):
    def call(record):
        try:
            f()
        except Exception:
            handler.handleError(record)

    f = synk.function(lambda: log.warning("x") or 7.0, outputs="mean")
    with handling(call) as handler, Watch():
        assert f() == 7
        assert _err(capfd).count("UsageError: a handler of log records") == 2
    assert f() == 7


def test_a_handler_that_waits_keeps_no_call_waiting_for_ever(two):
    begun, go = threading.Event(), threading.Event()

    def wait(record):
        begun.set()
        assert go.wait(30)

    f = synk.function(lambda: log.warning("x") or 7.0, outputs="mean")
    with handling(wait):
        try:
            with Watch():
                assert f() == 7  # it waits for a second
            assert begun.is_set()
        finally:
            go.set()
    assert f() == 7


def test_a_handler_that_takes_what_the_program_holds_stops_no_call(two):
    """Though the call logs far more than a socket holds."""
    held, count = threading.Lock(), []

    def take(record):
        with held:
            count.append(record.rank)

    def task():
        for n in range(3000):
            log.warning("line %d %s", n, "x" * 100)

    f = synk.function(task, outputs=[])
    with handling(take):
        with Watch(), held:
            f()
        assert wait_until(lambda: len(count) == 6000)


def test_a_handler_that_takes_too_long_is_told_of_what_is_left_out(two, capfd):
    go = threading.Event()
    f = synk.function(lambda: [log.warning("x" * (1 << 24)) for _ in range(6)], outputs=[])
    with handling(lambda record: go.wait(60)):
        try:
            with Watch():
                f()
        finally:
            go.set()
        assert wait_until(lambda: "messages of workers' logs were left out" in _err(capfd))


def test_a_handler_may_use_an_executor():
    found = []
    with (
        synk.Executor(1) as executor,
        handling(lambda record: found.append(executor.submit(pow, 2, 3).result(30))),
        Watch(),
    ):
        assert executor.submit(log.warning, "x").result(30) is None
        assert wait_until(lambda: found == [8])


def test_what_handlers_hold_stays_here(two):
    """A logger travels by its name: what its handlers use need not pickle."""
    guard, last = threading.Lock(), []

    def keep(record):
        with guard:
            last[:] = [record.getMessage()]

    with handling(keep):
        assert two.map(lambda n: log.warning("item %d", n) or n, [5]) == [5]
        assert last == ["item 5"]
        synk.function(lambda: log.warning("a call"), outputs=[])()
        assert last == ["a call"]


def test_large_records_and_many(two, kept):
    def task():
        log.info("x" * (1 << 21))
        for _ in range(3000):
            log.info("small")

    with Watch():
        synk.function(task, outputs=[])()
        assert wait_until(lambda: len(kept.records) == 2 * 3001)  # a call waits a second for handlers
    assert [len(record.getMessage()) for record in kept.records].count(1 << 21) == 2


def test_threads_and_signal_handlers_of_a_worker(two, kept):
    def task():
        def some(thread):
            for n in range(200):
                log.info("%d %s", thread, str(n) * 100)

        threads = [threading.Thread(target=some, args=(n,)) for n in range(4)]
        before = signal.signal(signal.SIGALRM, lambda *_: log.info("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            for thread in threads:
                thread.start()
            some(4)
            for thread in threads:
                thread.join()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    with Watch():
        synk.function(task, outputs=[])()
    texts = [record.getMessage() for record in kept.records if record.getMessage() != "alarm"]
    assert sorted(texts) == sorted(2 * [f"{t} {str(n) * 100}" for t in range(5) for n in range(200)])


def test_a_fork_of_a_worker_writes_lines(two, kept, capfd):
    def task():
        pid = os.fork()
        if not pid:
            log.warning("from a child")
            warnings.warn("of a child", stacklevel=1)
            os._exit(0)
        os.waitpid(pid, 0)

    synk.function(task, outputs=[])()
    assert wait_until(lambda: _err(capfd).count("WARNING:tests.logs:from a child") == 2)
    assert _err(capfd).count("UserWarning: of a child") == 2
    assert kept.said == []


def test_records_of_a_call_that_fails_come_before_its_error(two, kept):
    def task():
        log.info("begun")
        raise ValueError("ended")

    with pytest.raises(synk.WorkerError):
        synk.function(task, outputs=[])()
    assert ("INFO", "begun", 0) in kept.said


@pytest.mark.counted_once
def test_records_of_a_worker_that_dies(kept):
    def task():
        if synk.rank():
            log.info("last words")
            os._exit(3)

    with synk.Session(2, devices="cpu", verbose=False) as session:
        with pytest.raises(synk.WorkerDied):
            session.function(task, outputs=[])()
        assert kept.said == [("INFO", "last words", 1)]


@pytest.mark.counted_once
def test_ctrl_c_while_records_come(kept):
    """None of them is taken for a part of another one."""

    def task(n):
        log.info("%d %s", n, "y" * 5000)
        return n

    with synk.Session(2, devices="cpu", verbose=False, timeout=30) as session, Watch():
        mark = session.function(lambda: log.info("mark"), outputs=[])
        for delay in np.linspace(0.001, 0.1, 15):
            with pytest.raises(KeyboardInterrupt), interrupted_after(delay):
                collections.deque(session.imap(task, range(10**6)), maxlen=0)
            kept.records.clear()
            mark()
            assert [text for _, text, _ in kept.said].count("mark") == 2
    assert {len(text.split()) for _, text, _ in kept.said} <= {1, 2}


def test_tasks_log(two, kept):
    def task(n):
        log.info("item %d", n)
        return n

    assert two.map(task, range(500)) == list(range(500))
    assert sorted(text for _, text, _ in kept.said) == sorted(f"item {n}" for n in range(500))
    kept.records.clear()
    for n, _ in enumerate(two.imap(task, range(50))):
        assert f"item {n}" in [text for _, text, _ in kept.said]


# ── warnings ─────────────────────────────────────────────────────────────────────────────────────────


def shown(action, count, f):
    """The warnings that calls of *f* give, where the filters say *action*."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        for _ in range(count):
            f()
    return [(each.category, str(each.message), each.filename, each.lineno) for each in found]


def test_warnings_of_one_rank_after_the_other(two):
    f = synk.function(
        lambda x: warnings.warn("negative", stacklevel=1) if x.min() < 0 else None, outputs=[]
    )
    for place in (0, -1, 0, -1):
        x = np.ones(4)
        x[place] = -1
        assert len(shown("always", 1, lambda: f(x))) == 1


def test_each_task_warns(two):
    def task(n):
        warnings.warn(f"item {n}", stacklevel=1)

    for _ in range(3):
        found = shown("always", 1, lambda: two.map(task, [1, 1, 2]))
        assert sorted(text for _, text, *_ in found) == ["item 1", "item 1", "item 2"]


def test_tasks_of_an_executor_log(kept):
    def task(n):
        log.info("item %d", n)
        warnings.warn("once", stacklevel=1)

    with synk.Executor(2) as executor:
        executor.submit(abs, 1).result()

        def run():
            for n in range(10):
                executor.submit(task, n).result()
                assert kept.said[-1][1] == f"item {n}"

        assert [text for _, text, *_ in shown("default", 1, run)] == ["once"]
        assert shown("ignore", 1, run) == []
        with pytest.raises(UserWarning, match="once"):
            shown("error", 1, run)


@pytest.mark.parametrize(("action", "times"), [("default", 1), ("always", 3), ("ignore", 0)])
def test_warnings_come_as_often_as_one_rank_shows_them_and_at_their_line(two, action, times):
    def task():
        warnings.warn("careful")

    line = task.__code__.co_firstlineno + 1
    f = synk.function(task, outputs=[])
    assert shown(action, 3, f) == [(UserWarning, "careful", __file__, line)] * times


def test_warnings_that_are_errors_are_raised_there(two):
    f = synk.function(lambda: warnings.warn("as an error", stacklevel=1), outputs=[])
    with pytest.raises(synk.WorkerError) as info:
        shown("error", 1, f)
    assert isinstance(info.value.original, UserWarning)
    assert len(shown("always", 1, f)) == 1


class Ours(UserWarning):
    """A category of the program's, whose warnings take two arguments."""

    def __init__(self, text, more):
        super().__init__(text, more)
        self.more = more


class Holder:
    class Inner(UserWarning):
        pass


def test_categories_of_the_program(two):
    class Local(UserWarning):
        pass

    kinds = {Holder.Inner, Local, Ours}

    def task():
        warnings.warn(Ours("one", "two"), stacklevel=1)
        for kind in (Holder.Inner, Local, UserWarning):
            warnings.warn(kind("seen"), stacklevel=1)

    f = synk.function(task, outputs=[])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
        assert {each.category for each in found} == {UserWarning, *kinds}
        (ours,) = [each.message for each in found if each.category is Ours]
        assert (str(ours), ours.more) == ("('one', 'two')", "two")
        found.clear()
        for kind in kinds:
            warnings.simplefilter("ignore", kind)
        f()
        assert {each.category for each in found} == {UserWarning}
        found.clear()
        warnings.filterwarnings("ignore", "seen")
        f()
    assert found == []


class Unpicklable(UserWarning):
    """One that holds what does not pickle."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def test_a_warning_that_does_not_pickle(two):
    f = synk.function(lambda: warnings.warn(Unpicklable("but is told"), stacklevel=1), outputs=[])
    ((kind, text, *_),) = shown("always", 1, f)
    assert (kind, text) == (Unpicklable, "but is told")


def test_warnings_of_files_that_are_no_code(two):
    def task():
        warnings.warn_explicit("in the model", UserWarning, "model.stan", 7)

    assert shown("always", 1, synk.function(task, outputs=[])) == [
        (UserWarning, "in the model", "model.stan", 7)
    ]


def test_warnings_of_arithmetic(two):
    f = synk.function(lambda x: x / 0, outputs="gather")
    ((kind, text, file, _),) = shown("always", 1, lambda: f(np.ones(4)))
    assert (kind, file) == (RuntimeWarning, __file__)
    assert text.startswith("divide by zero")


def test_warnings_that_are_captured(two, kept):
    warned = logging.getLogger("py.warnings")
    warned.addHandler(kept)
    logging.captureWarnings(True)
    try:
        f = synk.function(lambda: warnings.warn("to the log", stacklevel=1), outputs=[])
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            f()
    finally:
        logging.captureWarnings(False)
        warned.removeHandler(kept)
    assert ["to the log" in record.getMessage() for record in kept.records] == [True]


def _err(capfd, _seen={}):
    """What was written to stderr in this test."""
    test = os.environ["PYTEST_CURRENT_TEST"]
    _seen[test] = _seen.get(test, "") + capfd.readouterr().err
    return _seen[test]
