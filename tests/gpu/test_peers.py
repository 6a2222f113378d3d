"""Ranks that open each other's device memory: what passes where, in pieces, and when it cannot."""

import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synkro as synk
from support.collectives import check_everything, everything
from support.gpus import NEAR, SINGLE, pools, serves
from support.waiting import Watch
from synkro import here
from synkro.comms.board import SLOTS

ON_TWO = {"FAKE_CUDA_DEVICES": "2", **SINGLE, **NEAR}
ROOM = 512
"""Bytes of a stage, where tests make it small."""


session = serves(pools("near"))


def narrow(room):
    """Have stages be filled with so many bytes from now on; returns what it was."""
    from synkro.comms import peers

    before, peers.STAGE = peers.STAGE, room
    return before


@pytest.fixture
def small_stages(session):
    """Everything goes in pieces."""
    change = session.function(narrow, bcast_inputs="room", outputs="max")
    before = change(ROOM)
    yield session
    change(before)


@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(0, 1),
    st.sampled_from(["f8", "i4", "u1", "c16"]),
    st.sampled_from(["sum", "prod", "mean"]),
)
def test_in_pieces_collectives_are_what_they_are_whole(small_stages, rows, columns, root, dtype, op):
    shape, size = (rows, columns), small_stages.n_parallel

    def run():
        return everything(synk, synk.rank(), shape, op, root, dtype, synk.xp())

    for rank, found in enumerate(small_stages.function(run, outputs=None)()):
        check_everything(found, range(size), rank, shape, op, root, dtype)


def copied():
    """How many bytes some collectives copy to the host, or from it."""
    x, found = synk.xp().ones(1 << 18), []
    before = dict(synk.xp().cuda.runtime.statistics)
    for _ in range(2):
        found += [synk.all_reduce(x, "sum"), synk.all_gather(x), synk.broadcast(x), synk.scatter(x)]
        found.append(synk.exchange(x, 1 - synk.rank()))
    after = dict(synk.xp().cuda.runtime.statistics)
    assert all(bool((each == 2 - bool(place % 5)).all()) for place, each in enumerate(found))
    return [after[name] - before[name] for name in ("pinned", "pageable")]


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]])
@pytest.mark.parametrize("nccl", ["none", "broken"])
def test_nothing_passes_through_the_host(make_believe, capfd, devices, nccl):
    make_believe.set(**{**ON_TWO, "FAKE_NCCL_VERSION": "23203", "FAKE_NCCL": nccl})
    with make_believe.session(devices, verbose=True) as session:
        assert session.function(copied, outputs=None)() == [[0, 0]] * 2
    if nccl == "broken":
        assert "outputs are reduced through host memory, as NCCL" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("devices", "variables", "why"),
    [
        ("cuda:0,cuda:0", {"FAKE_CUDA_IPC": "0"}, "cudaErrorInvalidValue: invalid argument"),
        ("cuda:0,cuda:1", {"FAKE_CUDA_PEERS": "0"}, "cuda:0 does not reach the memory of cuda:1"),
        ("cuda:0,cuda:0", {"FAKE_CUDA_MEMORY": "1000000"}, "there is no device memory for it"),
    ],
)
def test_where_that_cannot_be_it_is_said_and_goes_through_the_host(
    make_believe, capfd, devices, variables, why
):
    make_believe.set(**ON_TWO, FAKE_NCCL="none", **variables)

    def run():
        x = synk.xp().arange(20_000) + synk.rank()
        return synk.all_reduce(x, "sum"), synk.exchange(x, 1 - synk.rank())

    with make_believe.session(devices.split(","), verbose=True) as session:
        total, other = session.function(run, outputs=(None, None))()
    for rank in range(2):
        assert np.array_equal(total[rank], 2 * np.arange(20_000) + 1)
        assert np.array_equal(other[rank], np.arange(20_000) + 1 - rank)
    said = capfd.readouterr().err
    assert f"messages go from GPU to GPU through host memory, as {why}" in said
    assert "outputs and variables are reduced through host memory" in said


def test_without_the_switch_ranks_do_not_open_each_others_memory(make_believe):
    make_believe.set(**{**ON_TWO, "SYNKRO_GPU_PATHS": None})
    with make_believe.session() as session:
        assert not session.function(lambda: here.rank.comm._peers is not None, outputs="max")()


def refuse(greedy):
    """Have rank *greedy* find no memory for chunks from now on, the others as much as there is."""
    from synkro.devices import window

    def none(nbytes):
        raise synk.xp().cuda.runtime.CUDARuntimeError(2)

    kept = here.rank.__dict__.setdefault("chunks", window.Chunk)
    window.Chunk = none if synk.rank() == greedy else kept


def of_all_kinds(count):
    xp, rank = synk.xp(), synk.rank()
    x = xp.arange(count) + rank
    found = [synk.all_reduce(x, "sum"), synk.broadcast(x, root=1), synk.exchange(x, 1 - rank)]
    found += [synk.all_gather(x)[count:], synk.reduce_scatter(x, "max"), synk.all_to_all(x)]
    return [int(each.sum()) for each in found]


@pytest.mark.parametrize("greedy", [0, 1])
def test_too_little_device_memory_is_said_once_and_nothing_is_lost(make_believe, capfd, greedy):
    """A rank that has none takes all to the host, in collectives of any kind and in messages."""
    make_believe.set(**ON_TWO)
    with make_believe.session(verbose=True) as session:
        change = session.function(refuse, bcast_inputs="greedy", outputs=[])
        f = session.function(of_all_kinds, bcast_inputs="count", outputs=None)
        small = f(10)
        change(greedy)
        through_host = [f(500_000) for _ in range(2)]
        assert f(10) == small  # which fits the memory that it has
        change(-1)
        assert [f(500_000)] * 2 == through_host
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "too little" in line]
    assert "16.0 MB were missing" in said, said


def test_messages_wait_unread_and_come_in_order(session):
    count = 1 << 15

    def run():
        rank, size = synk.rank(), synk.size()
        for number in range(SLOTS):
            synk.send(synk.xp().full(count, 10 * rank + number, "i8"), (rank + 1) % size)
        synk.barrier()
        source = (rank - 1) % size
        return [synk.recv(source).get().tolist() == [10 * source + n] * count for n in range(SLOTS)]

    f = session.function(run, outputs=None)
    for _ in range(3):
        assert f() == [[True] * SLOTS] * session.n_parallel


def test_large_messages_are_freed_and_others_used_again(session):
    def run(count):
        xp, rank, size = synk.xp(), synk.rank(), synk.size()
        sent = [xp.arange(count, dtype="i4") + number for number in range(3)]
        for x in sent:
            synk.send(x, (rank + 1) % size)
        synk.barrier()  # so that all of them wait at the same time, in every call
        return all(bool((synk.recv((rank - 1) % size) == x).all()) for x in sent)

    def taken():
        xp = synk.xp()
        xp.get_default_memory_pool().free_all_blocks()
        free, total = xp.cuda.Device().mem_info
        return total - free

    f = session.function(run, bcast_inputs=["count"], outputs="min")
    look = session.function(taken, outputs="max")
    assert f(1 << 20)
    before = look()
    for count in (5 << 20, 1 << 20, 7 << 20):
        assert f(count)
        assert look() <= before


def test_ranks_that_are_not_introduced_close_what_they_have_opened(make_believe, capfd):
    make_believe.set(**ON_TWO, FAKE_CUDA_PEERS="0")
    for _ in range(3):
        with make_believe.session(["cuda:0", "cuda:1", "cuda:0"]) as session:
            assert session.function(lambda: 1, outputs="sum")() == 3
    assert "stand-in for CUDA" not in capfd.readouterr().err


def test_memory_is_as_before_when_a_session_has_ended(make_believe):
    """Whoever opens a chunk closes it before its owner frees it: else the stand-in says so."""
    make_believe.set(**ON_TWO)
    done = make_believe.python(
        """if True:
        import synkro as synk
        def run(n):
            x = synk.xp().ones(n)
            return int(synk.all_reduce(x, "sum").sum() + synk.exchange(x, 1 - synk.rank()).sum())
        for _ in range(2):
            with synk.Session(devices=["cuda:0", "cuda:0"], verbose=False) as session:
                f = session.function(run, bcast_inputs="n", outputs=None)
                print(*map(int, f(10) + f(100_000)))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["30 30 300000 300000"] * 2
    assert "stand-in" not in done.stderr


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["before", "posted", "between", "reading"])
def test_a_death_while_memory_is_open(make_believe, victim, when):
    make_believe.set(**ON_TWO)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        rank, x = synk.rank(), synk.xp().ones(1 << 17)
        synk.all_reduce(x, "sum")
        if rank == victim and when == "before":
            die()
        synk.send(x, 1 - rank)
        if rank == victim and when == "posted":
            die()
        if rank == victim and when in ("between", "reading"):
            peers = here.rank.comm._peers
            name = "_merge" if when == "between" and rank == 0 else "_seen"
            setattr(peers, name, lambda *args: die())
        while True:
            synk.all_reduce(x, "sum")

    with make_believe.session() as session, Watch():
        with pytest.raises(synk.WorkerDied, match="SIGKILL") as caught:
            session.function(run, outputs=[])()
        assert caught.value.rank == victim
