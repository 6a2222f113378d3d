"""Whatever fails on a GPU: the user hears of it in words, nobody hangs, and the session goes on."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import told
from support.gpus import pools, serves, settled, started
from support.inside import whereabouts
from support.leftovers import nothing_left
from support.sessions import LARGE, current, rank
from support.waiting import SOON, Watch, wait_until
from synkro.controller.engine.engine import State
from synkro.messages import Phase

CREWS = pools("one", "two", "sockets", "four", "near", rarely=("one", "four"))
SEVERAL = pools("two", "sockets", "four", "near", rarely=("four",))


session = serves(CREWS)


several = serves(SEVERAL)


@pytest.fixture(params=SEVERAL)
def lonely(request):
    """A pool of which the test starts sessions by itself."""
    with nothing_left(), settled(request.param) as devices:

        def start(**options):
            return started(request.param, devices, **options)

        start.moment = 1 if request.param.machine == "stand-in" else 8  # seconds that a first call takes
        yield start


@pytest.fixture
def own(lonely):
    """A session that the test may break."""
    with lonely() as session, current(session):
        yield session


def total(session, n=7):
    """The sum of *n* ones, by the workers: *n*, if the session works; of small and of large outputs."""
    f = session.function(lambda x: (x.sum(), x.sum(axis=0)), outputs="sum")
    one, many = f(np.ones((n, LARGE)))
    assert (many == n).all()
    every = session.function(lambda: synk.all_reduce(synk.xp().ones(3), "sum").sum(), outputs=None)
    assert every() == [3 * session.n_parallel] * session.n_parallel
    return one / LARGE


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────


def before(fail):
    fail()
    synk.all_reduce(synk.xp().ones(4), "sum")


def between(fail):
    ones = synk.xp().ones(4)
    for _ in range(3):
        ones = synk.all_reduce(ones, "mean")
    fail()
    synk.all_gather(ones)
    synk.broadcast(ones)


def after(fail):
    synk.all_reduce(synk.xp().ones(70_000), "sum")
    fail()


@pytest.mark.parametrize("phase", [before, between, after], ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("culprit", [0, -1])
def test_an_exception_strands_nobody(session, phase, culprit):
    culprit %= session.n_parallel
    pids = session.pids

    def fail():
        if rank() == culprit:
            raise ZeroDivisionError("on purpose")

    f = session.function(lambda: phase(fail), outputs=[])
    for _ in range(2):
        with Watch(), pytest.raises(synk.WorkerError, match="ZeroDivisionError: on purpose") as caught:
            f()
        assert caught.value.rank == culprit
    assert total(session) == 7
    assert session.pids == pids


@pytest.mark.parametrize("width", [1, LARGE])
@pytest.mark.parametrize("slices", [1, 3])
def test_an_exception_before_the_outputs_are_reduced(session, width, slices):
    last = session.n_parallel - 1

    def f(x):
        if rank() == last and x.max() > 10:
            raise ValueError("too large")
        return synk.xp().full(width, x.sum())

    f = session.function(f, outputs="sum")
    good, bad = np.ones(3 * session.n_parallel), np.arange(11.0, 11 + 3 * session.n_parallel)
    for _ in range(3):
        assert f(good, num_slices=slices)[0] == len(good)
        with Watch(), pytest.raises(synk.WorkerError, match="too large"):
            f(bad, num_slices=slices)


def test_outputs_that_differ_between_ranks(several):
    def f():
        return synk.xp().ones(3 + (rank() == 1))

    with Watch(), pytest.raises((synk.OutputError, synk.WorkerError), match="shape"):
        several.function(f, outputs="sum")()
    with Watch(), pytest.raises((synk.OutputError, synk.WorkerError), match=r"float32|dtype"):
        several.function(lambda: synk.xp().ones(LARGE, "f4" if rank() else "f8"), outputs="sum")()
    assert total(several) == 7


def ones(n=3, dtype="f8"):
    return synk.xp().ones(n, dtype)


STRAYS = {
    "one returns": (lambda r: r or synk.all_reduce(ones()), "returned"),
    "one is elsewhere": (lambda r: synk.barrier() if r else synk.all_gather(ones()), "barrier"),
    "other shapes": (lambda r: synk.all_reduce(ones(3 + r)), "shape"),
    "other dtypes": (lambda r: synk.all_reduce(ones(3, ("f4", "f8")[r > 0])), "float32"),
    "other operations": (lambda r: synk.all_reduce(ones(), ("sum", "max")[r > 0]), "max"),
    "other roots": (lambda r: synk.broadcast(ones(), root=r % 2), "rank 1"),
    "one on the host": (
        lambda r: synk.all_reduce((np if r else synk.xp()).ones(3), "sum"),
        "GPU|host|device",
    ),
    "one receives for ever": (lambda r: r or synk.recv(1), "recv"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_ranks_that_are_out_of_step_are_told(several, case):
    with current(several):
        for _ in range(2):
            told(*STRAYS[case])
    assert total(several) == 7


def test_variables_are_usable_after_a_failure(several):
    with current(several):
        w = synk.shared(np.zeros(4))

        def step(x):
            w[...] += 1
            synk.all_reduce(w, "sum")
            if rank():
                raise ValueError("late")
            return x.sum()

        with pytest.raises(synk.WorkerError, match="late"):
            synk.function(step)(np.ones(several.n_parallel))
        synk.broadcast(w, np.full(4, 2.0))
        assert synk.gather(w).tolist() == [[2] * 4] * several.n_parallel
    assert total(several) == 7


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_alone():
    if rank() == 1:
        die()
    time.sleep(60)


def die_before_a_collective():
    if rank() == 1:
        die()
    synk.all_reduce(ones(1000), "sum")


def die_between_collectives():
    for turn in range(100):
        synk.all_reduce(ones(100_000), "sum")
        if rank() == 1 and turn == 50:
            die()


def die_amid_a_collective():
    """A thread ends rank 1 at some moment of many collectives."""
    if rank() == 1:
        threading.Timer(0.05, die).start()
    collecting()


@pytest.mark.parametrize(
    ("death", "met"),
    [
        (die_alone, False),
        (die_before_a_collective, False),
        (die_before_a_collective, True),
        (die_between_collectives, True),
        (die_amid_a_collective, False),
    ],
)
def test_a_death_is_told_at_once(own, death, met):
    x = synk.data(np.arange(4.0))
    if met:
        assert total(own) == 7
    f = own.function(death, outputs=[])
    own.distribute()
    with Watch(), pytest.raises(synk.WorkerDied) as caught:
        f()
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)
    assert own.state is State.BROKEN
    with Watch(), pytest.raises(synk.SessionBroken):
        f()
    assert x[:].tolist() == [0, 1, 2, 3]
    with Watch():
        own.close()


def test_a_death_while_a_large_output_is_reduced(own):
    def f():
        if rank() == 1:
            threading.Timer(0.05, die).start()
        return synk.xp().ones(LARGE)

    f = own.function(f, outputs="sum")
    with Watch(), pytest.raises(synk.WorkerDied):
        [f() for _ in iter(int, 1)]  # for ever


# ── interrupts and timeouts ──────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def interrupted(session):
    """SIGINT to this process once rank 0 has run the function for a moment."""
    over = threading.Event()

    def send():
        if wait_until(lambda: over.is_set() or whereabouts(session, 0) == Phase.RUNNING, 30):
            over.wait(0.05)
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def slow():
    synk.all_reduce(ones())
    time.sleep(60)


def collecting():
    while True:
        synk.all_reduce(ones(100_000), "sum")


def waiting():
    if rank():
        time.sleep(60)
    synk.all_reduce(ones())


@pytest.mark.parametrize("busy", [slow, collecting, waiting], ids=lambda busy: busy.__name__)
def test_ctrl_c_interrupts_the_call_not_the_session(several, busy):
    pids = several.pids
    f = several.function(busy, outputs=[])
    for _ in range(2):
        with Watch(), pytest.raises(KeyboardInterrupt), interrupted(several):
            f()
    assert several.state is State.READY
    assert total(several) == 7
    assert several.pids == pids


@pytest.mark.parametrize("busy", [collecting, waiting], ids=lambda busy: busy.__name__)
def test_a_late_call_is_ended(lonely, busy):
    with lonely(timeout=lonely.moment) as impatient:
        assert total(impatient) == 7
        begun = time.monotonic()
        with pytest.raises(synk.CallTimeout) as caught:
            impatient.function(busy, outputs=[])()
        assert time.monotonic() - begun < lonely.moment + SOON
        assert caught.value.ranks
        assert "is running the function" in str(caught.value)

        def works():
            with contextlib.suppress(synk.CallTimeout):
                return total(impatient) == 7

        assert wait_until(works, SOON)


def test_tasks_that_fail_are_tried_again(n, tmp_path):
    def task(k, folder):
        x = synk.xp().arange(4.0) * k
        with open(f"{folder}/{k}", "ab") as file:
            file.write(b".")
            tries = file.tell()
        if k % 3 == 0 and tries < k % 5:
            raise KeyError(k)
        return tries, x

    options = {"retries": 2, "errors": "return", "checkpoint": tmp_path / "run"}
    found = synk.map(task, range(40), common={"folder": str(tmp_path)}, **options)
    for k, each in enumerate(found):
        if k % 3 == 0 and k % 5 == 4:
            assert isinstance(each, KeyError)
        else:
            assert each[0] == (max(1, k % 5) if k % 3 == 0 else 1)
            assert each[1].tolist() == [0, k, 2 * k, 3 * k]
    again = synk.map(task, range(40), common={"folder": str(tmp_path)}, **options)
    assert [each[0] for k, each in enumerate(again) if not isinstance(found[k], KeyError)] == [
        each[0] for each in found if not isinstance(each, KeyError)
    ]
