"""Workers that serve a test, or a whole file: the module functions go to them when a test asks."""

import contextlib
import pickle
import sys

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.leftovers import nothing_left
from synkro import here
from synkro.machine import available_cores

INLINE = 1 << 17
"""Outputs of more bytes than this go through Store and Reduce in the tests' sessions."""

LARGE = 4 * INLINE // 8  # float64 elements of such an output


def start(workers, **options):
    """Quiet workers by ``fork``; returns their session, which is no longer the current one."""
    crowded = pytest.warns(RuntimeWarning, match="CPU workers on")
    with crowded if workers > available_cores() else contextlib.nullcontext():
        synk.fork(workers, **{"timeout": 60, "verbose": False, **options})
    session, here.session = here.session, None
    return session


@contextlib.contextmanager
def current(session):
    """The module functions go to *session* until the end of the block."""
    here.session = session
    try:
        yield session
    finally:
        here.session = None


@contextlib.contextmanager
def running(workers, **options):
    """… to so many workers, which are closed at its end."""
    session = start(workers, **options)
    with session, current(session):
        yield session


_kept = {}
"""With ``--over``, sessions by their number of workers: to start one takes seconds of all processors."""


def lasting(workers=2, **options):
    """A fixture for a file: what a test makes must be gone after it, the session need not."""

    @pytest.fixture(scope="module")
    def session(request):
        yield from _serving(workers, request.config, **options)

    return session


@pytest.fixture(scope="module")
def two_mapping():
    """Two workers that serve the file, with the queue that the first map of a session makes."""
    with start(2) as session:
        session.map(abs, [0])
        yield session


def counts(*workers, rarely=()):
    """Parameters: so many workers, and those that only thorough runs have: three find what two do."""
    return [*workers, *[pytest.param(number, marks=pytest.mark.thorough) for number in rarely]]


def in_turn(*workers, rarely=()):
    """As ``lasting``, for each of these ``counts``."""

    @pytest.fixture(scope="module", params=counts(*workers, rarely=rarely))
    def session(request):
        yield from _serving(request.param, request.config)

    return session


def _serving(workers, config, **options):
    if config.getoption("over"):
        yield kept(workers)
        return
    with start(workers, **options) as session:
        yield session


def kept(workers):
    """The session of so many workers that serves all files; another one where it has been closed."""
    if workers not in _kept or "ready" not in repr(_kept[workers]):
        _kept[workers] = start(workers)
    assert total(_kept[workers]) == 7
    return _kept[workers]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_by_kept_sessions(request):
    """They are closed, and counted, when the last file has been served."""
    if not request.config.getoption("over"):
        yield
        return
    with nothing_left():
        yield
        for session in _kept.values():
            session.close()
        _kept.clear()


@pytest.fixture
def session():
    """A session of two workers, quiet, with a timeout as a watchdog."""
    with synk.Session(2, verbose=False, timeout=60) as session:
        yield session


@pytest.fixture
def own():
    """Two workers of a test's own, which it may kill."""
    with running(2) as session:
        yield session


forked = in_turn(1, 3, rarely=[2])


@pytest.fixture
def n(forked):
    """The number of workers that the module's functions go to; they serve the whole file."""
    with current(forked):
        yield forked.n_parallel


two_forked = lasting(2)
three_forked = lasting(3)


@pytest.fixture
def two(two_forked):
    """Two workers, for what does not depend on their number; they serve the whole file."""
    with current(two_forked):
        yield two_forked


@pytest.fixture
def three(three_forked):
    """Three workers that outlive all errors of use: they answer, and answer right, after the test."""
    with current(three_forked):
        yield three_forked
        answers = per_rank(lambda: synk.all_reduce(np.ones(2) * synk.rank(), "sum").tolist() == [3, 3])
        assert answers == [1] * 3


@pytest.fixture(params=["map", "imap"])
def results(request):
    """A list of the results of a map, by either."""
    return synk.map if request.param == "map" else lambda *args, **kw: list(synk.imap(*args, **kw))


@pytest.fixture(scope="module")
def named_forked():
    devices = "dev0->cpu;dev1->cpu;dev2->cpu"
    with synk.Session(devices=devices, verbose=False, timeout=60) as session:
        yield session


@pytest.fixture
def named(named_forked):
    """Three workers with the names dev0, dev1 and dev2; they answer right after the test."""
    with current(named_forked):
        yield named_forked
    with current(named_forked):  # also where the test had other sessions
        assert per_rank(lambda: synk.all_reduce(np.ones(2), "sum").tolist() == [3, 3]) == [1] * 3


def by_value(item):
    """Workers do not import the modules of a test: its functions are sent as they are."""
    for name in {item.module.__name__, item.function.__module__}:
        cloudpickle.register_pickle_by_value(sys.modules[name])


def per_rank(fn, *args, **options):
    """Call *fn* once on every rank, with broadcast arguments; the list of what the ranks returned."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return synk.function(fn, outputs=None, bcast_inputs=list(names))(*args, **options)


def ask(session, fn):
    """What *fn* returns on each rank."""

    def asked():
        return np.frombuffer(pickle.dumps(fn()), np.uint8)

    return [pickle.loads(each) for each in session.function(asked, outputs=None)()]


def total(session, n=7):
    """The sum of *n* ones, by the workers: *n*, if the session works."""
    return session.function(lambda x: x.sum(), outputs="sum")(np.ones(n))


def rows(x):
    return x


def rank():
    return here.rank.number
