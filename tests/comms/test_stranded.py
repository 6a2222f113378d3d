"""Ranks that do not come to a collective, whatever keeps them: those that wait there are told."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import leave, told
from support.sessions import per_rank, running
from support.waiting import Watch
from synkro import CallTimeout, SessionBroken, WorkerDied
from synkro.errors import CollectiveError

pytestmark = [pytest.mark.long, pytest.mark.counted_once]


# ── ranks that do not come ───────────────────────────────────────────────────────────────────────

WAITING = {
    "barrier": lambda: synk.barrier(),
    "all_reduce": lambda: synk.all_reduce(np.ones(3)),
    "all_reduce (large)": lambda: synk.all_reduce(np.ones(100_000)),
    "reduce": lambda: synk.reduce(np.ones(3), root=1),
    "broadcast": lambda: synk.broadcast(np.ones(3), root=1),
    "all_gather": lambda: synk.all_gather(np.ones(3)),
    "gather": lambda: synk.gather(np.ones(3), root=1),
    "scatter": lambda: synk.scatter(np.ones(3), root=1),
    "reduce_scatter": lambda: synk.reduce_scatter(np.ones(3)),
    "all_to_all": lambda: synk.all_to_all(np.ones(3)),
    "recv": lambda: synk.recv(1),
    "send": lambda: [synk.send(np.ones(3), 1) for _ in range(20)],
}


LATER = [kind for kind in WAITING if kind not in ("recv", "send")]


def name(kind):
    return kind.partition(" ")[0]


def when_the_others_wait(seconds=0.1):
    """Give the other ranks the time to begin to wait, polling first and then asleep."""
    time.sleep(seconds)


@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("how", ["fails", "returns"])
def test_who_leaves_while_the_others_wait(three, kind, early, how):
    wait = WAITING[kind]

    def does(r):
        synk.barrier()
        if early == (r != 1):
            when_the_others_wait()
        if r != 1:
            wait()
        elif how == "fails":
            raise ZeroDivisionError("on purpose")

    if how == "fails":
        error = told(does, r"rank 1 .*failed in the function 'run'.*on purpose", ZeroDivisionError)
        assert error.rank == 1
    else:
        error = told(does, f"rank 1 returned from the function .*taking part in {name(kind)}")
        assert error.rank in (0, 2)
        assert "every rank of a call must enter the same collectives" in str(error)


@pytest.mark.parametrize("kind", WAITING)
def test_the_others_are_told_who_failed(three, kind):
    """They may catch it: the error in their hands names the rank and the collective."""
    wait, called = WAITING[kind], name(kind)
    heard = synk.shared(False)

    def does(r):
        if r == 1:
            raise ZeroDivisionError("on purpose")
        try:
            wait()
        except CollectiveError as error:
            heard.value = "rank 1 failed" in str(error) and called in str(error) and error.strays

    told(does, "on purpose", ZeroDivisionError)
    assert synk.gather(heard).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", LATER)
def test_a_skipped_collective(three, kind):
    """One rank is a collective ahead of the others: in another one than they, and then gone."""
    wait = WAITING[kind]
    error = told(lambda r: (r == 1 or wait(), synk.all_reduce(np.ones(7), "prod")), "all_reduce")
    assert "rank 1" in str(error)


ENDINGS = {"exit": 5, "SIGKILL": None, "SIGSEGV": None}


DEATHS = [(kind, ending) for kind in WAITING for ending in ("exit", "SIGKILL")]


@pytest.mark.parametrize(("kind", "ending"), [*DEATHS, ("all_reduce", "SIGSEGV"), ("recv", "SIGSEGV")])
def test_a_death_while_the_others_wait(own, kind, ending):
    wait = WAITING[kind]

    def run():
        synk.barrier()
        if synk.rank() == 1:
            when_the_others_wait(0.05)
            if ending == "exit":
                leave(5)
            os.kill(os.getpid(), getattr(signal, ending))
            time.sleep(60)
        wait()

    x = synk.data([1.0, 2.0])
    with Watch(), pytest.raises(WorkerDied, match="worker of rank 1") as caught:
        synk.function(run, outputs=[])()
    assert caught.value.rank == 1
    assert caught.value.exitcode == ENDINGS[ending]
    if ending != "exit":
        assert caught.value.signal == getattr(signal, ending)
    with pytest.raises(SessionBroken, match="rank 1"):
        synk.all_reduce(synk.shared(1.0))
    with Watch():
        synk.close()
    assert x[:].tolist() == [1, 2]


def test_a_death_between_calls_breaks_the_collectives_of_the_main_process(own):
    w = synk.shared(np.ones(3))
    os.kill(own.pids[1], signal.SIGKILL)
    with Watch(), pytest.raises(WorkerDied, match="worker of rank 1"):
        synk.all_reduce(w)
    with pytest.raises(SessionBroken):
        synk.gather(w)


DEADLOCKS = {
    "all receive": (lambda r: synk.recv((r + 1) % 3), "recv from rank"),
    "all send too much": (
        lambda r: [synk.send(np.ones(1), (r + 1) % 3) for _ in range(100)],
        "send to rank",
    ),
    "one receives, the others meet": (lambda r: synk.barrier() if r else synk.recv(2), "barrier"),
    "a ring that closes late": (
        lambda r: (synk.recv((r - 1) % 3), synk.send(np.ones(1), (r + 1) % 3)),
        "rank 2 is in recv from rank 1",
    ),
    "two of three": (lambda r: synk.recv(1 - r) if r < 2 else None, "rank 2 has returned"),
}


@pytest.mark.parametrize("what", DEADLOCKS)
def test_deadlocks_are_answered(three, what):
    does, message = DEADLOCKS[what]
    assert message in str(told(does, "wait for each other, and none can go on"))


def test_a_slow_rank_is_waited_for(three):
    def run():
        if synk.rank() == 2:
            time.sleep(0.7)  # longer than any look whether something can still change
            synk.send(np.array(1.0), 0)
            synk.send(np.array(1.0), 1)
            got = 1.0
        else:
            got = synk.recv(2)
        if synk.rank() == 0:
            time.sleep(0.4)
        return got + synk.all_reduce(1.0, "sum")

    assert per_rank(run) == [4, 4, 4]


# ── timeouts and Ctrl-C ──────────────────────────────────────────────────────────────────────────


def test_a_timeout_while_the_others_wait():
    with running(2, timeout=2):

        def run(seconds):
            if synk.rank() == 1:
                time.sleep(seconds)
            return synk.all_reduce(float(synk.rank()), "sum")

        f = synk.function(run, bcast_inputs=["seconds"], outputs=None)
        assert f(0.0) == [1, 1]
        with Watch(), pytest.raises(CallTimeout, match=r"within the timeout of 2 s.*rank 1") as caught:
            f(30.0)
        assert 1 in caught.value.ranks
        assert f(0.0) == [1, 1]
        w = synk.shared(2.0)
        synk.all_reduce(w, "sum")
        assert synk.gather(w).tolist() == [4, 4]


@pytest.mark.parametrize("kind", WAITING)
def test_ctrl_c_while_one_rank_sleeps_and_the_others_wait(three, kind, tmp_path):
    wait = WAITING[kind]
    sign = str(tmp_path / "sign")
    os.mkfifo(sign)

    def run():
        synk.barrier()
        if synk.rank() == 1:
            with open(sign, "w"):
                pass
            time.sleep(30)
        wait()

    def interrupt():
        with open(sign):  # opens when the sleeper does
            pass
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    f = synk.function(run, outputs=[])
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with Watch(), pytest.raises(KeyboardInterrupt):
            f()
    finally:
        thread.join()
    with Watch():
        assert per_rank(lambda: synk.all_gather(synk.rank()).sum()) == [3, 3, 3]


def test_ctrl_c_during_a_collective_of_the_main_process(three):
    """Whenever it comes: it is heard, and the replicas are of one mind after the next broadcast."""
    w = synk.shared(np.ones(400_000))

    def reduce_until_interrupted(timer):
        timer.start()  # it may be over before this returns
        for _ in range(1_000_000):
            synk.all_reduce(w)

    for delay in (0.001, 0.003, 0.01, 0.03):
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            reduce_until_interrupted(timer)
        timer.join()
        synk.all_reduce(w)  # means of ones, even where one of them was left in the middle
        assert [float(synk.get_value(rank, w).sum()) for rank in range(3)] == [400_000] * 3
