"""Where memory runs out, the user hears how much was asked for, and can go on."""

import builtins
import contextlib
import errno
import os
import resource
import types
from pathlib import Path

import numpy as np
import pytest

import synkro as synk
from support.limits import descriptors
from support.sessions import LARGE, rank, rows, total
from support.waiting import Watch
from synkro.memory.segment import Segment

pytestmark = pytest.mark.long


# ── no memory ────────────────────────────────────────────────────────────────────────────────────────


def full(monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def knowing(value):
    """A function that brings *value* along."""
    return lambda x: len(value) + x.sum()


def need_growth(session):
    x = session.data(np.arange(4.0))

    def grow():
        try:
            x.set_length(1_000_000)
        finally:
            assert x[:4].tolist() == [0, 1, 2, 3]

    return grow


def calling(fn, outputs, rows, plain=False, **options):
    """A call of *fn* with so many *rows*, which lie in shared memory unless they are *plain*."""

    def need(session):
        f = session.function(fn, outputs=outputs)
        x = np.ones(rows) if plain else session.data(np.ones(rows))
        return lambda: f(x, **options)

    return need


NEEDS = {
    "data": lambda session: lambda: session.data(np.ones(10)),
    "the start": lambda _: lambda: synk.Session(1, verbose=False).close(),
    "growth": need_growth,
    "a copied input": calling(rows, "gather", 1000, plain=True),
    "a batch": calling(rows, "gather", 10, batch=[1, 3, 5]),
    "stages": calling(lambda x: np.full(LARGE, x.sum()), "sum", 10),
    "a result": calling(rows, "gather", 2 * LARGE),
    "room for a closure": calling(knowing(np.ones(LARGE)), "mean", 10),
    "room for a long command": calling(knowing("".join(map(str, range(40_000)))), "mean", 10),
}


@pytest.mark.parametrize("need", NEEDS)
def test_full_memory_is_an_error_and_the_session_goes_on(need, session, monkeypatch):
    call = NEEDS[need](session)
    full(monkeypatch)
    for _ in range(2):
        with pytest.raises(synk.SharedMemoryError, match=r"could not be had \(No space left on device"):
            call()
    monkeypatch.undo()
    call()
    assert total(session) == 7


def test_more_than_the_machine_has_is_an_error_at_once(session):
    with Watch(), pytest.raises(synk.SharedMemoryError, match=r"asked for.*free_memory"):
        session.data(shape=(1 << 50,), dtype="uint8")
    assert total(session) == 7


def test_no_descriptor_left_is_an_error_and_the_session_goes_on(session):
    f = session.function(lambda x: x.sum(), outputs="sum")
    kept = []
    with descriptors(9), pytest.raises(synk.SharedMemoryError, match="ulimit -n"):
        kept.extend(session.data(np.ones(3)) for _ in range(100))
    assert [f(x) for x in kept] == [3] * len(kept)
    assert total(session) == 7


def test_the_limit_of_the_size_of_files_is_named(session):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(synk.SharedMemoryError, match=r"ulimit -f, RLIMIT_FSIZE\) is 1\.0 MB"):
            session.data(np.ones(1 << 18))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert total(session) == 7


def test_a_worker_that_cannot_map_memory_now_can_do_so_later(session):
    def arm():
        attach = Segment.attach

        def refuse(*args):
            Segment.attach = attach
            raise synk.SharedMemoryError("no room in this worker")

        if rank() == 1:
            Segment.attach = refuse

    f = session.function(lambda x: x.sum(), outputs="sum")
    f(np.ones(3))
    session.function(arm, outputs=[])()
    x, y = session.data(np.ones(1000)), session.data(np.ones(2000))
    with pytest.raises((synk.WorkerError, synk.SharedMemoryError), match="no room in this worker"):
        f(x)
    assert f(y) == 2000
    assert f(x) == 1000


def test_inputs_outlive_a_worker_s_shortage_of_descriptors(session):
    def hog(on):
        held = vars(builtins).setdefault("held", [])
        with contextlib.suppress(OSError):
            while on:
                held.append(os.open(os.devnull, os.O_RDONLY))
        while held and not on:
            os.close(held.pop())

    def opens():
        os.close(os.open(os.devnull, os.O_RDONLY))

    hogging = session.function(hog, bcast_inputs="on", outputs=[])
    f = session.function(lambda x: x.sum(), outputs="sum")
    g = session.function(opens, outputs=[])
    f(np.ones(3))
    g()
    hogging(False)
    hogging(True)
    x = session.data(np.ones(5))
    says = "Too many open files.*the worker has no descriptor left: .*ulimit -n"
    for call in (
        lambda: f(x),
        lambda: f(x),
        lambda: f(session.data(np.ones(5))),
        lambda: f(session.data(np.ones(5))),  # the workers hear that the last one is gone
        lambda: session.function(lambda x: x.max(), outputs="max")(x),
        lambda: session.map(abs, [1]),
        g,
    ):
        with pytest.raises(OSError, match=says):
            call()
    hogging(False)
    assert f(x) == 5
    assert session.map(abs, [-1]) == [1]


@pytest.mark.parametrize("leave", ["pass", "raise SystemExit(3)"])
def test_a_child_forked_by_a_function_is_no_rank(session, leave):
    def forks(x):
        child = os.fork()
        if child == 0:
            exec(leave)
            return x.sum() + 1000.0
        os.waitpid(child, 0)
        return x.sum()

    f = session.function(forks, outputs="sum")
    with Watch():
        for start in range(5):
            x = np.arange(start, start + 9.0)
            assert f(x) == x.sum()


def test_a_worker_that_closed_its_descriptors_is_given_up(session):
    def deafen(x):
        os.closerange(3, 20)
        x.spare = [os.open("/dev/zero", os.O_RDONLY) for _ in range(17)]

    spare = types.SimpleNamespace()
    total = session.function(lambda x: x.sum(), outputs="sum")
    with Watch(), pytest.raises(synk.SynkroError):  # noqa: PT012
        session.function(lambda x: deafen(spare), outputs=[])(np.ones(4))
        for _ in range(3):
            total(session.data(np.ones(5)))
    session.close()


def test_a_rank_that_cannot_even_begin_strands_nobody(session):
    def limit():
        if rank() == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))

    def meet(x):
        synk.barrier()
        return x[0, 0]

    session.function(limit, outputs=[])()
    f = session.function(meet, outputs="sum")
    with Watch(), pytest.raises(synk.SynkroError, match=r"of shared memory could not be had") as error:
        f(session.data(np.ones((2, 16 << 20))))
    assert error.value.rank == 1
    assert f(session.data(np.ones((2, 1)))) == 2
