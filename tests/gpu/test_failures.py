"""Whatever fails on a GPU: the user hears of it in words, nobody hangs, and the session goes on."""

import contextlib
import os
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.gpus import pools, serving, settled, started
from support.inside import whereabouts
from support.leftovers import nothing_left
from support.sessions import INLINE
from support.waiting import SOON, Watch, wait_until
from synkro import here
from synkro.controller.engine.engine import State
from synkro.messages import Phase

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

LARGE = 4 * INLINE // 8  # float64 elements of an output that does not fit beside the reply
CREWS = pools("one", "two", "sockets", "four", "near", rarely=("one", "four"))
SEVERAL = pools("two", "sockets", "four", "near", rarely=("four",))


@pytest.fixture(scope="module", params=CREWS)
def session(request):
    with serving(request.param) as session:
        yield session


@pytest.fixture(scope="module", params=SEVERAL)
def several(request):
    with serving(request.param) as session:
        yield session


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
    with lonely() as session:
        here.session = session
        yield session
        session.close()
        here.session = None


def total(session, n=7):
    """The sum of *n* ones, by the workers: *n*, if the session works; of small and of large outputs."""
    f = session.function(lambda x: (x.sum(), x.sum(axis=0)), outputs="sum")
    one, many = f(np.ones((n, LARGE)))
    assert (many == n).all()
    every = session.function(lambda: synk.all_reduce(synk.xp().ones(3), "sum").sum(), outputs=None)
    assert every() == [3 * session.n_parallel] * session.n_parallel
    return one / LARGE


def rank():
    return here.rank.number


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────


def before(culprit):
    def fail():
        if rank() == culprit:
            raise ZeroDivisionError("on purpose")
        synk.all_reduce(synk.xp().ones(4), "sum")

    return fail


def between(culprit):
    def fail():
        ones = synk.xp().ones(4)
        for _ in range(3):
            ones = synk.all_reduce(ones, "mean")
        if rank() == culprit:
            raise ZeroDivisionError("on purpose")
        synk.all_gather(ones)
        synk.broadcast(ones)

    return fail


def after(culprit):
    def fail():
        synk.all_reduce(synk.xp().ones(70_000), "sum")
        if rank() == culprit:
            raise ZeroDivisionError("on purpose")

    return fail


def amid_memory(culprit):
    """The collective itself finds no memory on one rank."""

    def fail():
        xp = synk.xp()
        given = xp.ones(4)
        if rank() == culprit:
            given = xp.broadcast_to(given, (1 << 44, 4))
            raise_if_larger(given)
        synk.all_reduce(given, "sum")

    def raise_if_larger(array):
        try:
            array.copy()
        except Exception as error:
            raise ZeroDivisionError("on purpose") from error

    return fail


@pytest.mark.parametrize(
    "phase", [before, between, after, amid_memory], ids=lambda phase: phase.__name__
)
@pytest.mark.parametrize("culprit", [0, -1])
def test_an_exception_strands_nobody(session, phase, culprit):
    culprit %= session.n_parallel
    pids = session.pids
    f = session.function(phase(culprit), outputs=[])
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


STRAYS = {
    "one returns": (lambda: rank() or synk.all_reduce(synk.xp().ones(3)), "returned"),
    "one is elsewhere": (
        lambda: synk.barrier() if rank() else synk.all_gather(synk.xp().ones(3)),
        "barrier",
    ),
    "other shapes": (lambda: synk.all_reduce(synk.xp().ones(3 + rank())), "shape"),
    "other dtypes": (lambda: synk.all_reduce(synk.xp().ones(3, ("f4", "f8")[rank() > 0])), "float32"),
    "other operations": (
        lambda: synk.all_reduce(synk.xp().ones(3), ("sum", "max")[rank() > 0]),
        "max",
    ),
    "other roots": (lambda: synk.broadcast(synk.xp().ones(3), root=rank() % 2), "rank 1"),
    "one on the host": (
        lambda: synk.all_reduce((np if rank() else synk.xp()).ones(3), "sum"),
        "GPU|host|device",
    ),
    "one receives for ever": (lambda: synk.recv(1) if not rank() else None, "recv"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_ranks_that_are_out_of_step_are_told(several, case):
    f, word = STRAYS[case]

    def run():
        f()

    for _ in range(2):
        with Watch(), pytest.raises(synk.WorkerError, match=word) as caught:
            several.function(run, outputs=[])()
        assert isinstance(caught.value.original, synk.CollectiveError)
    assert total(several) == 7


def test_variables_are_usable_after_a_failure(several):
    here.session = several
    w = synk.shared(np.zeros(4))

    def step(x):
        w[...] += 1
        synk.all_reduce(w, "sum")
        if rank():
            raise ValueError("late")
        return x.sum()

    with pytest.raises(synk.WorkerError, match="late"):
        several.function(step)(np.ones(several.n_parallel))
    synk.broadcast(w, np.full(4, 2.0))
    for place in range(several.n_parallel):
        assert synk.get_value(place, w).tolist() == [2] * 4
    here.session = None
    assert total(several) == 7


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────


def die_alone():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_before_a_collective():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    synk.all_reduce(synk.xp().ones(1000), "sum")


def die_between_collectives():
    for turn in range(100):
        synk.all_reduce(synk.xp().ones(100_000), "sum")
        if rank() == 1 and turn == 50:
            os.kill(os.getpid(), signal.SIGKILL)


def die_amid_a_collective():
    """A thread ends rank 1 at some moment of many collectives."""
    if rank() == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        synk.all_reduce(synk.xp().ones(100_000), "sum")


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
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return synk.xp().ones(LARGE)

    f = own.function(f, outputs="sum")
    with Watch(), pytest.raises(synk.WorkerDied):
        [f() for _ in iter(int, 1)]  # for ever


def test_a_session_after_it_works(lonely):
    for _ in range(2):
        with lonely() as session:
            assert total(session) == 7
            with pytest.raises(synk.WorkerDied):
                session.function(die_before_a_collective, outputs=[])()


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
    synk.all_reduce(synk.xp().ones(3))
    time.sleep(60)


def collecting():
    while True:
        synk.all_reduce(synk.xp().ones(100_000), "sum")


def waiting():
    if rank():
        time.sleep(60)
    synk.all_reduce(synk.xp().ones(3))


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
        deadline = time.monotonic() + SOON
        while True:
            try:
                assert total(impatient) == 7
                break
            except synk.CallTimeout:
                assert time.monotonic() < deadline


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
