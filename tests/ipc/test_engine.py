"""The engine: every command gets one reply a rank, or an error says what became of the workers."""

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import Nap, hanging, in_native_code, leave, sleeping, stubborn
from support.leftovers import mappings
from support.sessions import rows, total
from support.waiting import Watch, gone, stopped, wait_until
from synkro.controller.engine.engine import Engine, State
from synkro.ipc.block import AREA
from synkro.ipc.pool import WorkerPool
from synkro.messages import Ack, Command, Create, Indirect, Inspect, Release, Shapes
from synkro.plan.call import Region

pytestmark = pytest.mark.long


@pytest.fixture
def engine():
    """An engine of two workers, which have not been told who they are."""
    engine = Engine(WorkerPool([range(2)]), [dict(os.environ)] * 2, 60, False)
    yield engine
    engine.close()


def created(engine, array, name=None):
    """The number of a new variable with the contents of *array*."""
    segment = engine.allocate(array.nbytes)
    region = Region(segment.number, 0, array.shape, array.dtype.str)
    segment.array(region)[...] = array
    number = engine.directory.number()
    replies = engine.run(Create(number, name, region))
    assert replies == [Ack(), Ack()]
    return number


# ── commands and replies ─────────────────────────────────────────────────────────────────────────────


def test_what_fails_in_a_worker_is_raised_and_the_next_command_works(engine):
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="2 ranks failed") as caught:
            engine.run(Inspect((12_345,)))
        assert caught.value.rank == 0
        assert isinstance(caught.value.original, KeyError)
        assert engine.run(Release()) == [Ack(), Ack()]


def test_a_command_that_nobody_knows_is_a_bug_of_ours(engine):
    with pytest.raises(synk.WorkerError, match="does not know the command") as caught:
        engine.run(Command())
    assert isinstance(caught.value.original, synk.InternalError)


@pytest.mark.parametrize("nbytes", [AREA // 2, AREA, 5 * AREA])
def test_commands_and_replies_that_do_not_fit_their_place(engine, nbytes):
    number = created(engine, np.zeros(4), "x" * nbytes)
    asked = Inspect((number,) * (nbytes // 2))
    for _ in range(2):
        assert engine.run(asked) == [Shapes(((4,),) * (nbytes // 2))] * 2
        assert engine.run(Release()) == [Ack(), Ack()]


def test_a_long_reply_is_fetched_although_much_was_freed_meanwhile(engine):
    command = pickle.dumps(Release())
    held = [engine.allocate(1 << 25)]
    held[0].base[: len(command)] = memoryview(command)
    region = Region(held[0].number, 0, (len(command),), "|u1")
    engine.run(Indirect(region))  # the workers have mapped it
    number = created(engine, np.zeros(4))
    for pid in engine.workers.pids:
        os.kill(pid, signal.SIGSTOP)

    def tick():
        held.clear()
        for pid in engine.workers.pids:
            os.kill(pid, signal.SIGCONT)

    asked = Inspect((number,) * AREA)
    assert engine.run(asked, on_tick=tick) == [Shapes(((4,),) * AREA)] * 2


def test_numbers_are_given_once(engine):
    numbers = [engine.directory.number(), engine.allocate(1).number, engine.directory.number()]
    assert len(set(numbers)) == 3


def test_what_is_freed_is_given_back_before_more_is_asked_for(engine):
    def mapped():
        return [mappings(pid) for pid in engine.workers.pids]

    engine.run(Release())
    before = mapped()
    large = engine.allocate(1 << 25)
    region = Region(large.number, 0, (1 << 25,), "|u1")
    with pytest.raises(synk.WorkerError):  # it is mapped, and found to be none of this
        engine.run(Indirect(region))
    assert mapped() == [count + 1 for count in before]
    assert engine.directory.freed == 0
    del large
    gc.collect()
    assert engine.directory.freed == 1 << 25
    engine.allocate(1)
    assert mapped() == before
    assert engine.directory.freed == 0


# ── states ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fresh
def test_workers_that_cannot_be_started_are_an_error_of_the_session(monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(synk.SessionError, match=r"2 workers could not be started .*temporarily"):
        Engine(WorkerPool([range(2)]), [dict(os.environ)] * 2, 60, False)


def test_who_is_late_is_waited_for_by_the_next_command(engine):
    engine.run(Release())
    os.kill(engine.workers.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: stopped(engine.workers.pids[1]))
    for _ in range(2):
        with Watch(), pytest.raises(synk.CallTimeout, match="rank 1") as caught:
            engine.run(Release(), timeout=0.1)
        assert caught.value.ranks == (1,)
        assert engine.interrupted
    with Watch(), pytest.raises(synk.CallTimeout):
        engine.settle(0.1)
    os.kill(engine.workers.pids[1], signal.SIGCONT)
    engine.settle()
    assert not engine.interrupted
    engine.settle()  # there is nothing to wait for
    assert engine.run(Release()) == [Ack(), Ack()]


# ── a worker dies ────────────────────────────────────────────────────────────────────────────────────


def test_a_death_between_calls_is_found_however_it_came(session):
    f = session.function(rows, outputs="gather")
    f(np.ones(4))
    os.kill(session.pids[0], signal.SIGKILL)
    with Watch(), pytest.raises(synk.WorkerDied, match=r"rank 0 .*SIGKILL \(out of memory, perhaps"):
        [f(np.ones(4)) for _ in iter(int, 1)]  # for ever


def test_all_workers_die_at_once(session):
    with Watch(), pytest.raises(synk.WorkerDied):
        session.function(lambda: leave(0), outputs=[])()
    session.close()


def test_a_death_in_one_session_leaves_the_other_alone(session):
    with synk.Session(1, verbose=False, timeout=60) as other:
        with pytest.raises(synk.WorkerDied, match="exit code 3"):
            other.function(lambda: leave(3), outputs=[])()
        assert total(session) == 7
    assert total(session) == 7


# ── a worker does not even start ─────────────────────────────────────────────────────────────────────


@pytest.mark.fresh
@pytest.mark.parametrize("package", ["numpy", "cloudpickle"])
@pytest.mark.parametrize(
    ("line", "number", "code"),
    [
        ("raise ImportError('broken on purpose')", None, 1),
        ("import ctypes; ctypes.CDLL(None)['_exit'](3)", None, 3),
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


@pytest.mark.fresh
def test_a_start_that_takes_too_long(tmp_path, monkeypatch):
    hanging(tmp_path, monkeypatch)
    says = r"within 0\.5 s \(start_timeout=\): ranks 0, 1 did not answer\. Give more, or look at"
    with Watch(), pytest.raises(synk.CallTimeout, match=says) as caught:
        synk.fork(2, start_timeout=0.5, verbose=False)
    assert caught.value.ranks == (0, 1)
    monkeypatch.undo()
    assert synk.fork(2, verbose=False) == 2


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
