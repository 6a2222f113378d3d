"""``fork(initializer=…)``: what each worker does first, and what its functions find."""

import functools
import logging
import os
import signal
import sqlite3
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.waiting import Watch
from synkro import CallTimeout, InvalidType, InvalidValue, UsageError, WorkerDied, WorkerError

pytestmark = pytest.mark.counted_once

hooks = []
connection = None
settings = {}
lock = None


def started(*args, workers=2, **options):
    """A session of workers, each of which calls a function first."""
    initializer, *initargs = args
    options = {"devices": "cpu", "verbose": False, "timeout": 60, **options}
    return synk.Session(workers, initializer=initializer, initargs=tuple(initargs), **options)


def connect(path):
    global connection, lock
    connection = sqlite3.connect(path)  # which does not pickle
    connection.execute("create table if not exists runs (rank int, n int)")
    lock = threading.Lock()
    settings["rank"] = synk.rank(), synk.size()


def test_functions_and_tasks_find_what_was_assigned():
    def ask():
        with lock:
            (sum_,) = connection.execute("select 1 + 1").fetchone()
        return sum_, settings["rank"], os.getpid()

    def task(n):
        with lock:
            return connection.execute("select ?", (n,)).fetchone()[0]

    with started(connect, ":memory:") as session:
        ask_all = session.function(ask, outputs=None)
        for _ in range(3):
            assert ask_all() == [(2, (rank, 2), pid) for rank, pid in enumerate(session.pids)]
        assert session.map(task, range(20)) == list(range(20))
    assert connection is None
    assert settings == {}


def test_what_the_program_assigns_does_not_come():
    global connection
    with started(connect, ":memory:") as session:
        f = session.function(lambda: type(connection).__name__, outputs=None)
        assert f() == ["Connection"] * 2
        connection = 5
        try:
            assert f() == ["Connection"] * 2
        finally:
            connection = None


def test_functions_may_assign_such_names():
    def again():
        global connection
        before, connection = connection, synk.rank()
        return type(before).__name__

    with started(connect, ":memory:") as session:
        f = session.function(again, outputs=None)
        assert f() == ["Connection"] * 2
        assert f() == ["int"] * 2
        assert session.function(lambda: connection, outputs=None)() == [0, 1]


def _other():
    global other
    other = 1


def test_functions_may_not_assign_others():
    with (
        started(connect, ":memory:") as session,
        pytest.raises(InvalidValue, match=r"assigns to 'other'.*fork\(initializer=…\)"),
    ):
        session.function(_other, outputs=[])()


def test_what_the_initializer_calls_may_assign():
    def first():
        connect(":memory:")
        _other()

    with started(first) as session:
        look = session.function(lambda: (other, type(connection).__name__), outputs=None)
        assert look() == [(1, "Connection")] * 2


def test_forms_of_initializers(tmp_path):
    class Prepares:
        def __init__(self, folder):
            self.folder = folder

        def __call__(self, name="called"):
            (self.folder / f"{name}-{synk.rank()}").touch()

        def method(self):
            self(name="method")

    prepares = Prepares(tmp_path)
    for initializer in (prepares, prepares.method, functools.partial(prepares, "partial")):
        with started(initializer):
            pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{kind}-{rank}" for kind in ("called", "method", "partial") for rank in range(2)]
    with started(np.seterr, "raise") as session, pytest.raises(WorkerError) as info:
        session.function(lambda x: 1 / x, outputs="gather")(np.zeros(2))
    assert isinstance(info.value.original, FloatingPointError)


def test_a_log_file_on_each_worker(tmp_path):
    def to_file(folder):
        handler = logging.FileHandler(folder / f"rank-{synk.rank()}.log")
        logging.getLogger("tests.file").addHandler(handler)

    with started(to_file, tmp_path) as session:
        f = session.function(lambda: logging.getLogger("tests.file").warning("here"), outputs=[])
        f()
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}.log").read_text() == "here\n"


@pytest.mark.parametrize("replace", [False, True])
def test_a_worker_that_is_replaced_is_prepared_once(tmp_path, replace):
    """What the initializer does to objects is not done on top of what the dead worker had."""

    def prepare():
        connect(":memory:")
        hooks.append(synk.rank())

    def task(n):
        if n == 5 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return connection.execute("select ?", (n,)).fetchone()[0], len(hooks)

    def look():
        return type(connection).__name__, settings["rank"], len(hooks)

    with started(prepare, replace=replace) as session, Watch():
        looks = session.function(look, outputs=None)
        expected = [("Connection", (rank, 2), 1) for rank in range(2)]
        assert looks() == expected
        assert session.map(task, range(20), retries=1) == [(n, 1) for n in range(20)]
        assert looks() == expected
        if replace:
            with pytest.raises(WorkerDied):
                session.function(lambda: synk.rank() and os._exit(3), outputs=[])()
            assert looks() == expected
    assert hooks == []


def test_a_module_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "service_of_tests.py").write_text(
        "import logging\nlog = logging.getLogger(__name__)\nlink = None\n"
        "def setup(name):\n    global link\n    link = {'name': name, 'file': open('/dev/null')}\n"
        "def ask(n):\n    return link['name'], n\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import service_of_tests as service

    def by_a_helper(name):
        service.setup(name)

    def by_an_import(name):
        import service_of_tests

        service_of_tests.setup(name)

    for initializer in (service.setup, by_a_helper, by_an_import):
        with started(initializer, "h1") as session:
            assert session.map(service.ask, [1, 2]) == [("h1", 1), ("h1", 2)]
            assert session.map(lambda n: service.link["name"], [1]) == ["h1"]
            assert session.function(lambda: service.ask(0), outputs=None)() == [("h1", 0)] * 2
    assert service.link is None


def test_basic_config_works_in_an_initializer(tmp_path):
    def configure(folder):
        logging.basicConfig(filename=folder / f"{os.getpid()}.log", level=logging.INFO)

    with synk.Executor(1, initializer=configure, initargs=(tmp_path,)) as executor:
        executor.submit(lambda: logging.getLogger("tests.basic").warning("here")).result()
    with started(configure, tmp_path, workers=1) as session:
        session.map(lambda n: logging.getLogger("tests.basic").warning("here"), [0])
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts == ["WARNING:tests.basic:here\n"] * 2


def test_one_that_fails_is_told(tmp_path):
    def fails():
        raise ValueError("no such host")

    def once():
        if (tmp_path / "begun").exists():
            raise ValueError("no such host")

    def end():
        os._exit(3)

    with pytest.raises(WorkerError, match="'fails': ValueError: no such host"):
        started(fails)
    with pytest.raises(WorkerDied, match=r"in the initializer 'end', the worker of .*exit code 3"):
        started(end)
    with Watch(), pytest.raises(CallTimeout, match="in the initializer 'sleep', no answer"):
        started(time.sleep, 100, timeout=1)
    with started(once, replace=True) as session:
        (tmp_path / "begun").touch()
        with Watch(), pytest.raises(WorkerDied, match=r"could not take its place.*no such host"):
            session.function(end, outputs=[])()


made = None
times = 0


def make_once():
    """What is made when it is first asked for, as many do it."""
    global made, times
    if made is None:
        made = [os.getpid()]
    times += 1
    return made


def test_what_is_made_once():
    with started(make_once) as session:
        assert session.map(lambda _: make_once() == [os.getpid()] and times > 1, range(4)) == [True] * 4
    assert (made, times) == (None, 0)


def test_what_an_initializer_may_not():
    with pytest.raises(WorkerError, match="an initializer used a collective") as info:
        started(synk.barrier)
    assert isinstance(info.value.original, UsageError)
    for wrong in (5, "connect"):
        with pytest.raises(InvalidType, match="initializer= takes a function; got"):
            started(wrong)
    for wrong in (5, "path"):
        with pytest.raises(InvalidType, match="initargs= takes a tuple"):
            synk.Session(2, initializer=connect, initargs=wrong)
    with pytest.raises(InvalidType, match="initargs= are the arguments of initializer="):
        synk.Session(2, initargs=(5,))
    with pytest.raises(WorkerError, match=r"takes 1 positional|missing 1 required positional"):
        started(connect)


def test_fork_again_with_the_same_one():
    rows = np.arange(3)

    def prepare(array):
        settings["rows"] = array

    options = {"devices": "cpu", "verbose": False}
    for _ in range(2):
        assert synk.fork(2, initializer=prepare, initargs=(rows,), **options) == 2
    assert synk.function(lambda: settings["rows"].sum(), outputs=None)() == [3, 3]
    with pytest.raises(UsageError, match="another initargs="):
        synk.fork(2, initializer=prepare, initargs=(rows + 1,), **options)
