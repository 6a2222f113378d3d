"""Nothing grows: however often it is called, created, dropped, forked and closed."""

import gc
import os

import numpy as np
import pytest

import synkro as synk
from support.leftovers import children, descriptors, mappings, shared_files
from support.sessions import lasting
from support.waiting import wait_until
from synkro import here

MB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
SLACK = 12 * MB  # of resident memory; every leak that is looked for below would be far larger
FEW = 3  # descriptors and mappings that may come and go

pytestmark = [pytest.mark.long, pytest.mark.counted_once]

session = lasting(2)


def resident(pid="self"):
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


class Count:
    """What the main process and the workers of a session hold."""

    def __init__(self, session):
        def held():
            return np.array([len(here.rank.functions), len(os.listdir("/proc/self/fd"))])

        self.session = session
        self.held = session.function(held, outputs="max")

    def __call__(self):
        gc.collect()
        functions, fds = map(int, self.held())
        return {
            "functions of a worker": functions,
            "descriptors of a worker": fds,
            "descriptors": len(descriptors()),
            "mappings": mappings(),
            "mappings of the workers": sum(map(mappings, self.session.pids)),
            "children": len(children()),
            "files": len([name for name in shared_files() if name.startswith("synkro")]),
            "memory": resident(),
            "memory of the workers": sum(map(resident, self.session.pids)),
        }


def check_growth(count, call, first, more):
    """Nothing is held of so many *more* calls; the *first* ones may keep some memory for the next."""
    for n in range(first):
        call(n)
    before = count()
    for n in range(more):
        call(n)
    after = count()
    bounds = {name: SLACK if "memory" in name else FEW for name in before}
    grown = {n: (before[n], after[n]) for n in before if after[n] - before[n] > bounds[n]}
    assert not grown, grown


@pytest.mark.parametrize("rows", [100, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("outputs", ["mean", "gather", None], ids=str)
def test_calls_leave_nothing(rows, outputs, session):
    f = session.function(lambda x: 2 * x[: len(x) // 2], outputs=outputs)
    x = session.data(np.ones(rows))
    check_growth(Count(session), lambda n: f(x), 20, 200)


def test_calls_with_plain_arrays_and_batches_leave_nothing(session):
    f = session.function(lambda x, y: x + y.sum(), bcast_inputs="y", outputs="gather")

    def call(n):
        x = np.ones(1000 + 100 * n)
        assert len(f(x, np.ones(n % 7 + 1))) == len(x)
        assert len(f(x, y=np.ones(3), batch=np.arange(n + 1), num_slices=2)) == n + 1

    check_growth(Count(session), call, 200, 200)


def test_failing_calls_leave_nothing(session):
    def f(x):
        block = np.ones(MB // 8)
        raise ValueError(f"{len(block)} of {len(x)}")

    f = session.function(f)
    x = session.data(np.ones(4))

    def fail(n):
        with pytest.raises(synk.WorkerError, match="131072 of 2"):
            f(x)

    check_growth(Count(session), fail, 20, 100)


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("how", ["dropped", "freed", "grown"])
def test_data_leave_nothing(how, used, session):
    f = session.function(lambda x: x.sum(), outputs="sum")

    def create(n):
        x = session.data(np.ones(8000))
        if used:
            assert f(x) == 8000
        if how == "grown":
            x.set_length(12_000)
            if used:
                assert f(x) == 8000
        if how == "freed":
            x.free_memory()

    check_growth(Count(session), create, 50, 1000 if how == "dropped" else 300)


def test_many_data_at_once_leave_nothing(session):
    f = session.function(lambda *xs: sum(x.sum() for x in xs), outputs="sum")

    def create(n):
        assert f(*[session.data(np.ones(10)) for _ in range(60)]) == 600

    check_growth(Count(session), create, 1, 10)


def test_functions_leave_nothing(session):
    def create(n):
        closure = np.full(20_000, n)
        f = session.function(lambda x: x + closure[0], outputs="gather", name=f"f{n}")
        assert f(np.zeros(100))[0] == n
        unused = session.function(lambda x: x + closure[1])
        session.distribute()
        del unused

    check_growth(Count(session), create, 30, 300)


def test_results_that_are_kept_stay_and_those_dropped_go(session):
    f = session.function(lambda x: x, outputs="gather")
    x = session.data(np.ones(100_000))

    def keep_many(_):
        kept = []
        for n in range(12):
            x[:] = n
            kept.append(f(x))
        assert [result[0] for result in kept] == list(range(12))
        assert [result[-1] for result in kept] == list(range(12))

    check_growth(Count(session), keep_many, 1, 10)


def test_forking_and_closing_leaves_nothing():
    def cycle(n):
        synk.fork(2, verbose=False)
        f = synk.function(lambda x: np.full(50_000, x.sum()), outputs="sum")
        assert f(synk.data(np.ones(100_000)))[0] == 100_000
        synk.close()

    def counted():
        gc.collect()
        return len(children()), len(descriptors()), mappings(), len(os.listdir("/proc/self/task"))

    for n in range(3):
        cycle(n)
    before, memory = counted(), resident()
    for n in range(12):
        cycle(n)
    assert wait_until(lambda: counted() <= before), (counted(), before)
    assert resident() - memory < SLACK


@pytest.mark.fresh
@pytest.mark.parametrize("end", ["close", "drop"])
def test_sessions_that_fail_to_start_leave_nothing(end, tmp_path, monkeypatch):
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    with monkeypatch.context() as broken:
        broken.syspath_prepend(str(tmp_path))
        before = descriptors()
        for _ in range(3):
            with pytest.raises(synk.WorkerDied):
                synk.fork(2, verbose=False)
            if end == "close":
                synk.close()
        gc.collect()
        assert descriptors() == before
    assert synk.fork(1, verbose=False) == 1
    synk.close()
