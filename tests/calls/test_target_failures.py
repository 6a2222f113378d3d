"""Calls on different ranks at the same time: what goes wrong in one, and the others."""

import concurrent.futures
import os
import signal
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import ctrl_c
from support.inside import in_phase
from support.sessions import LARGE, running, total
from support.waiting import Watch, wait_until
from synkro.controller.engine.engine import State
from synkro.messages import Phase

pytestmark = pytest.mark.long


def large(path):
    """Run until the file is there; then return much."""
    while not path.exists():
        time.sleep(0.002)
    return np.ones(LARGE)


@pytest.fixture
def sign(tmp_path):
    """A file that lets ``large`` end."""
    return tmp_path / "sign"


def begun(session, sign):
    """The future of a call on rank 0 that runs until there is a sign."""
    f = session.function(large, bcast_inputs=["path"], target=0)
    session.distribute()
    future = f.submit(sign)
    assert wait_until(in_phase(session, Phase.RUNNING, 0))
    return future


def whole(future, sign):
    """Whether the other call goes on, and returns what it should."""
    assert not future.done()
    sign.touch()
    return bool((future.result() == np.ones(LARGE)).all())


@pytest.mark.parametrize("how", ["exception", "timeout", "ctrl-c"])
def test_a_call_that_is_broken_off_leaves_the_other_whole(session, sign, how):
    f = session.function(lambda: 1 / 0 if how == "exception" else time.sleep(20), target=1)
    where = session.function(os.getpid, target=1)
    other = begun(session, sign)
    if how == "exception":
        with pytest.raises(synk.WorkerError, match=r"rank 1 .*failed"):
            f.submit().result()
    elif how == "timeout":
        with Watch(), pytest.raises(synk.CallTimeout, match="rank 1") as caught:
            f.options(timeout=0.2)()
        assert caught.value.ranks == (1,)
    else:
        ctrl_c(in_phase(session, Phase.RUNNING, 1), f)
    assert where() == session.pids[1]
    assert whole(other, sign)
    assert total(session) == 7


def test_ctrl_c_while_a_call_on_all_ranks_waits_for_its_turn(session, sign):
    f = session.function(os.getpid, outputs=None)
    other = begun(session, sign)
    ctrl_c(lambda: len(session._engine.turns.line) > 1, f)
    assert whole(other, sign)
    assert f() == list(session.pids)


def test_a_stubborn_interrupted_rank_does_not_hold_up_the_others(session):
    """Its next call waits for it; calls on other ranks do not."""

    def deaf():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(1.5)

    f = session.function(deaf, target=1)
    one, zero = (session.function(time.monotonic, target=rank) for rank in (1, 0))
    session.distribute()
    with pytest.raises(synk.CallTimeout):
        f.options(timeout=0.1)()
    later = one.submit()
    assert wait_until(lambda: session._engine.turns.line)
    assert zero() < later.result()


@pytest.mark.parametrize("rank", [0, 1], ids=["its own", "the other"])
def test_a_death_ends_all_calls(rank, session, sign):
    f = session.function(lambda: time.sleep(20), target=1)
    other = begun(session, sign)
    mine = f.submit()
    assert wait_until(in_phase(session, Phase.RUNNING, 1))
    os.kill(session.pids[rank], signal.SIGKILL)
    with Watch():
        errors = [future.exception() for future in (other, mine)]
    assert {type(error) for error in errors} <= {synk.WorkerDied, synk.SessionBroken}
    assert any(isinstance(error, synk.WorkerDied) and error.rank == rank for error in errors)
    assert session.state is State.BROKEN
    session.close()


def test_close_ends_calls_that_run_and_cancels_the_rest(session, sign):
    both = session.function(os.getpid, outputs=None)
    f = session.function(lambda: time.sleep(20), target=1)
    other = begun(session, sign)
    mine, later, last = f.submit(), f.submit(), both.submit()
    assert wait_until(in_phase(session, Phase.RUNNING, 1))
    with Watch():
        session.close()
        for future in (other, mine):
            with pytest.raises(synk.SessionError):
                future.result()
        for future in (later, last):
            with pytest.raises((synk.SessionError, concurrent.futures.CancelledError)):
                future.result()


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, where another test has imported it
def test_a_fork_while_calls_run_has_no_session(session, sign):
    other = begun(session, sign)
    child = os.fork()
    if not child:
        try:
            total(session)
        except synk.SessionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert whole(other, sign)


def test_a_map_waits_and_calls_pause_it(session, sign):
    f = session.function(os.getpid, target=1)
    other = begun(session, sign)
    threading.Timer(0.1, sign.touch).start()
    assert session.map(abs, range(-5, 0)) == [5, 4, 3, 2, 1]
    assert (other.result() == 1).all()
    results = session.imap(abs, range(-50, 0))
    assert next(results) == 50
    assert f() == session.pids[1]
    assert list(results) == list(range(49, 0, -1))


def test_ranks_that_wait_for_each_other_are_found_while_others_work():
    """A standstill is that of a call: what other ranks do is nothing to it."""
    with running(3) as session:

        def stuck():
            return synk.recv(1 - synk.rank())

        def busy():
            end = time.monotonic() + 3
            while time.monotonic() < end:
                synk.barrier()

        f = session.function(stuck, outputs=None, target=[0, 1])
        g = session.function(busy, outputs=[], target=[2])
        session.distribute()
        future = g.submit()
        with Watch(), pytest.raises(synk.WorkerError, match="wait for each other"):
            f()
        assert not future.done()
        future.result()


def test_a_rank_that_stays_away_from_a_collective_of_its_world():
    with running(3) as session:

        def body():
            if synk.rank():
                synk.all_reduce(np.ones(2))

        f = session.function(body, outputs=[], target=[1, 2])
        with Watch(), pytest.raises(synk.WorkerError, match="rank 1 returned"):
            f()
        assert total(session) == 7
