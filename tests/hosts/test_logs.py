"""What workers on other hosts log and warn of."""

import builtins
import logging
import os
import traceback
import warnings

import numpy as np
import pytest

import synkro as synk
from support.logs import log

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]

HOSTS = ["localhost:1", "localhost:1"]


@pytest.fixture(scope="module")
def session():
    with synk.Session(2, hosts=HOSTS, verbose=False, timeout=60, start_timeout=60) as session:
        yield session


def test_records_are_there_when_the_call_returns(session, kept):
    f = session.function(lambda x: log.info("has %d rows", len(x)), outputs=[])
    for _ in range(20):
        f(np.zeros(6))
        assert sorted(kept.said) == [("INFO", "has 3 rows", 0), ("INFO", "has 3 rows", 1)]
        kept.records.clear()


def test_many_and_large_ones_come_in_order(session, kept):
    def task():
        log.info("x" * (1 << 20))
        for n in range(1000):
            log.info(n)

    session.function(task, outputs=[])()
    for rank in range(2):
        first, *others = (text for _, text, of in kept.said if of == rank)
        assert len(first) == 1 << 20
        assert [*map(int, others)] == list(range(1000))


def test_levels_and_filters_are_those_of_now(session, kept):
    def task():
        log.debug("detail")
        warnings.warn("careful", stacklevel=1)

    f = session.function(task, outputs=[])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        f()
        assert kept.said == []
        log.setLevel(logging.DEBUG)
        f()
    assert sorted(kept.said) == [("DEBUG", "detail", 0), ("DEBUG", "detail", 1)]
    assert [(str(each.message), each.filename) for each in found] == [("careful", __file__)]


def test_tasks_log(session, kept):
    def task(n):
        log.info(n)
        return os.getpid()

    pids = session.map(task, range(200))
    assert sorted(int(text) for _, text, _ in kept.said) == list(range(200))
    assert {rank for *_, rank in kept.said} == {session.pids.index(pid) for pid in pids}


def test_records_of_a_call_that_fails_come_before_its_error(session, kept):
    def task():
        log.info("begun")
        if synk.rank():
            raise ValueError("ended")

    with pytest.raises(synk.WorkerError):
        session.function(task, outputs=[])()
    assert ("INFO", "begun", 1) in kept.said


def test_functions_ask_the_user(session, monkeypatch, capfd):
    """On whichever host; the debugger's lines come before its prompt."""
    lines = {"[rank 0] (Pdb) ": ["p len(x)", "c"], "[rank 1] (Pdb) ": ["p len(x)", "c"]}
    said = []

    def answer(prompt=""):
        said.append(capfd.readouterr().out)
        if len(lines[prompt]) == 1:
            assert f"{prompt[:8]} 3\n" in "".join(said)
        return lines[prompt].pop(0)

    def stops(x):
        breakpoint()
        return len(x)

    monkeypatch.setattr(builtins, "input", answer)
    f = session.function(stops, outputs="sum")
    assert f.options(timeout=5)(np.zeros(6)) == 6
    assert not any(lines.values())

    def interrupt(prompt=""):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    with pytest.raises(KeyboardInterrupt):
        f(np.zeros(6))
    assert session.map(abs, [-1, -2]) == [1, 2]


def test_what_failed_on_another_host_runs_here_once_more(session, capfd):
    counts = {"calls": 0}
    w = session.shared(np.zeros(2), name="w")

    def work(x, y):
        counts["calls"] += 1
        w.value = w.value + synk.rank()
        place = synk.rank(), synk.size(), synk.host(), synk.local_rank(), synk.local_size()
        total = synk.all_reduce(x.sum(), op="sum")
        if x.min() < 0:
            raise ValueError(total, place, synk.rng().normal())
        return x.sum() * y

    f = session.function(work, bcast_inputs="y", outputs="sum")
    x = session.data(np.array([1.0, 2, 3, -4]))
    with pytest.raises(synk.WorkerError) as caught:
        f(x, 2)
    assert caught.value.rank == 1
    with pytest.raises(ValueError, match="2") as again:
        caught.value.replay()
    assert again.value.args == caught.value.args
    inside = traceback.walk_tb(again.value.__traceback__)
    (frame,) = [frame for frame, _ in inside if frame.f_code.co_name == "work"]
    assert np.array_equal(frame.f_locals["x"], [3, -4])
    assert frame.f_locals["place"] == (1, 2, 1, 0, 1)
    assert np.array_equal(frame.f_locals["w"].value, [2, 2])
    assert "on rank 1 this is what 'work'" in capfd.readouterr().err
    with pytest.raises(synk.WorkerError) as caught:
        session.map(lambda item: 1 // item, [1, 2, 0, 3])
    with pytest.raises(ZeroDivisionError):
        caught.value.replay()
