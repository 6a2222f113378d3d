"""Variables that live on GPUs: read, written, updated, sliced, kept, saved, and moved from outside."""

import sys

import numpy as np
import pytest

import synkro as synk
from support.arrays import DTYPES, OPS, check, fill, replicas, serial, values
from support.gpus import MOST, pools, serves, settled, started
from support.leftovers import nothing_left
from support.sessions import per_rank
from synkro import here
from variables import test_shared as cpu
from variables.test_shared import (  # noqa: F401
    test_replicas_may_come_to_differ_in_their_shapes,
    test_writing_in_the_main_process_writes_all_replicas,
)

SHAPES = [(), (1,), (0,), (2, 3), (70_001,)]


session = serves(MOST, seed=7)


def filled(n, shape=(5, 2), dtype="f8", name=None):
    """A variable with other values on every rank, and those values."""
    variable = synk.shared(np.zeros(shape, dtype), name)
    arrays = [values(rank, shape, dtype) for rank in range(n)]
    fill(variable, arrays)
    return variable, arrays


def close(got, want):
    """As ``check``, where rows are added in another order."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def all_are(variable, n, want):
    """The replicas of all ranks are so."""
    for got in replicas(variable, n):
        check(got, want)


# ── reading and writing ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "g"])
def test_values_come_back(n, dtype):
    cpu.test_it_begins_with_its_value_on_every_rank(n, dtype)
    w = synk.shared(values(3, (70_001,), dtype))
    check(w.get_value(), values(3, (70_001,), dtype))
    w.set_value(np.zeros(70_001, dtype))
    all_are(w, n, np.zeros(70_001, dtype))


def test_inside_they_lie_on_the_device(n):
    w, v = synk.shared(np.ones((3, 2))), synk.shared(np.float32(4))

    def look():
        xp = synk.xp()
        assert isinstance(w.value, xp.ndarray)
        assert isinstance(v.value, xp.ndarray)
        assert w.value.device.id == xp.cuda.runtime.getDevice()
        return w.value.sum() + v.value

    assert per_rank(look) == [10] * n


def test_every_way_to_write(n):
    w, v, number = synk.shared(np.zeros(4)), synk.shared(np.zeros(3)), synk.shared(0)

    def run():
        xp, rank = synk.xp(), synk.rank()
        seen = w.value
        w[...] = 1
        w[...] += rank
        w[1] = 7.0
        w[2:] = xp.arange(2.0)
        assert seen is w.value or (seen == w.value).all()
        first = w.value.copy()
        w.value = xp.full(4, 2.0)
        w.value *= 3
        w.value -= np.float64(1)
        with pytest.raises(synk.InvalidValue, match="has 1 dimension"):
            w.value = xp.ones((2, 2))
        v.value = np.arange(3.0) + rank  # of the host
        number.value = rank
        assert isinstance(v.value, xp.ndarray)
        return first, w.value, v.value, number.value

    for rank, (first, second, third, number) in enumerate(per_rank(run)):
        assert first.tolist() == [1 + rank, 7, 0, 1]
        assert second.tolist() == [5] * 4
        assert third.tolist() == [rank, 1 + rank, 2 + rank]
        assert number == rank
    assert np.array_equal(w.get_value(), np.full(4, 5.0))


def test_an_assigned_array_is_not_the_functions_own(n):
    """Memory that a variable was given is not that of somebody else, later."""
    w = synk.shared(np.zeros(3))

    def assign():
        mine = synk.xp().ones(3)
        w.value = mine
        return w.value.sum()

    assert per_rank(assign) == [3] * n
    filler = synk.function(lambda x: x * 0 - 1, outputs="gather")
    filler(np.ones((64, 3)))
    check(w.get_value(), np.ones(3))


# ── collectives of the main process ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["i4", "f2", "f4", "f8", "c16"])
def test_reductions(n, op, dtype):
    for shape in SHAPES:
        w, arrays = filled(n, shape, dtype)
        want = serial(op, arrays)
        check(synk.reduce(w, op, in_place=False), want)
        for got, array in zip(replicas(w, n), arrays, strict=True):
            check(got, array)
        if want.dtype == np.dtype(dtype):
            synk.all_reduce(w, op)
            all_are(w, n, want)


def test_reduce_in_place_changes_the_master_alone(n):
    w, arrays = filled(n)
    synk.reduce(w, "sum")
    for got, want in zip(replicas(w, n), [serial("sum", arrays), *arrays[1:]], strict=True):
        check(got, want)


def test_broadcasts(n):
    w, arrays = filled(n)
    v, others = filled(n, (3,), "i4")
    synk.broadcast([w, v])
    all_are(w, n, arrays[0])
    all_are(v, n, others[0])
    synk.broadcast([w, v], [np.full((5, 2), 7.0), synk.data(np.arange(3, dtype="i4"))])
    all_are(w, n, np.full((5, 2), 7.0))
    all_are(v, n, np.arange(3, dtype="i4"))


@pytest.mark.parametrize("dtype", ["?", "i2", "f4", "c8"])
def test_scatters_and_gathers(n, dtype):
    for rows in (0, 1, n, 3 * n + 1, 5001):
        table = values(rows, (rows, 3), dtype)
        w = synk.shared(np.zeros((0, 3), dtype))
        for given in (table, synk.data(table)):
            synk.scatter(w, given)
            assert synk.get_lengths(w) == [len(part) for part in np.array_split(table, n)]
            for got, part in zip(replicas(w, n), np.array_split(table, n), strict=True):
                check(got, part)
            check(synk.gather(w, nd_up=0), table)
        synk.all_gather(w)
        all_are(w, n, table)
        check(synk.gather(w), np.stack([table] * n))
    picked = np.array([2, 0, 5000, 5, 7])
    synk.scatter(w, table, batch=picked)
    check(synk.gather(w, nd_up=0), table[picked])


def test_without_nccl_they_go_through_host_memory(n):
    def forbid(forbidden):
        if "cupy" not in sys.modules:
            return 0
        from synkro.comms.nccl import Link

        for name in ("reduce", "reduce_scatter", "broadcast", "exchange"):
            if forbidden:
                setattr(Link, f"kept_{name}", getattr(Link, name))
                setattr(Link, name, None)
            else:
                setattr(Link, name, getattr(Link, f"kept_{name}"))
        return 0

    shape = (40_000, 2)  # its reductions do not fit an outbox
    mean = np.mean([values(rank, shape, "f8") for rank in range(n)], axis=0)
    w, arrays = filled(n, shape)
    per_rank(forbid, True)
    try:
        check(synk.reduce(w, in_place=False, nccl=False), mean)
        synk.reduce(w, "sum", nccl=False)
        check(synk.get_value(0, w), mean * n)
        synk.set_value(0, w, arrays[0])
        synk.all_reduce(w, nccl=False)
        all_are(w, n, mean)
        synk.set_value(0, w, arrays[0])
        synk.broadcast(w, nccl=False)
        all_are(w, n, arrays[0])
        synk.all_gather(w, nccl=False)
        check(synk.gather(w, 0, nccl=False), np.concatenate([*arrays[:1] * n] * n))
    finally:
        per_rank(forbid, False)
    synk.all_reduce(w)


def test_one_rank_at_a_time(n):
    w, arrays = filled(n)
    last = n - 1
    synk.set_value(last, w, np.full((9, 2), 3.0), batch=[1, 4])
    check(synk.get_value(last, w), np.full((2, 2), 3.0))
    for rank in range(n - 1):
        check(synk.get_value(rank, w), arrays[rank])


def test_what_was_read_is_the_users(n):
    w = synk.shared(np.ones(100_000))
    got = w.get_value()
    got[:] = 9
    check(w.get_value(), np.ones(100_000))
    w.set_value(np.zeros(100_000))
    assert (got == 9).all()


# ── in calls ─────────────────────────────────────────────────────────────────────────────────────


def test_updates_see_old_values_in_all_slices(n):
    w, count = synk.shared(np.zeros(3)), synk.shared(0)
    x = np.random.default_rng(0).standard_normal((4 * n + 3, 3))

    def step(x):
        return w.value.sum(), [x.mean(axis=0), len(x)]

    f = synk.function(step, updates=[w, (count, "sum")])
    for slices in (1, 3):
        w.set_value(np.full(3, float(slices)))
        assert np.isclose(f(x, num_slices=slices), 3 * slices)
        shards = np.array_split(x, n)
        for got, part in zip(replicas(w, n), shards, strict=True):
            close(got, part.mean(axis=0))
        assert [int(each) for each in replicas(count, n)] == [len(part) for part in shards]


@pytest.mark.parametrize("slices", [1, 3])
def test_variables_of_rows(n, slices):
    table = np.random.default_rng(0).standard_normal((6 * n + 1, 4))
    rows = synk.shared(np.zeros((0, 4)))
    synk.scatter(rows, table)
    mean = synk.function(lambda: rows.value.mean(axis=0), sliceable_shareds=[rows])
    close(mean(num_slices=slices), table.mean(axis=0))
    shards = np.array_split(table, n)
    chosen = [[1, 0, 4]] * n
    want = np.concatenate([part[[1, 0, 4]] for part in shards]).mean(axis=0)
    close(mean(batch_s=chosen, num_slices=slices), want)
    close(mean(batch_s=[1, 0, 4], num_slices=slices), want)
    close(
        mean(batch_s=slice(None, None, -2), num_slices=slices),
        np.concatenate([part[::-2] for part in shards]).mean(axis=0),
    )
    with_x = synk.function(
        lambda x: (x * rows.value).sum(axis=0), outputs="sum", sliceable_shareds=[rows]
    )
    close(with_x(table, num_slices=slices), (table**2).sum(axis=0))


@pytest.mark.parametrize("width", [2, 60_000])
def test_kept_outputs_are_inputs(n, width):
    table = np.random.default_rng(0).standard_normal((3 * n + 1, width))
    square = synk.function(lambda x: x * x, outputs="keep")
    total = synk.function(lambda x: x.sum(axis=0), outputs="sum")
    on_device = synk.function(lambda x: int(isinstance(x, synk.xp().ndarray)), outputs="min")
    kept = square(table, num_slices=2)
    assert on_device(kept) == 1
    close(total(kept, num_slices=3), (table**2).sum(axis=0))
    close(np.asarray(kept), table**2)
    close(np.asarray(square(square(kept))), table**8)
    assert not np.shares_memory(np.asarray(kept), np.asarray(kept))


def test_variables_are_inputs(n):
    rows = synk.shared(np.zeros((0, 2)))
    table = np.arange(14.0 * n).reshape(-1, 2)
    synk.scatter(rows, table)
    close(synk.function(lambda x: x.sum(axis=0), outputs="sum")(rows), table.sum(axis=0))
    close(synk.function(lambda x: x * 2, outputs="gather")(rows, num_slices=2), table * 2)


def test_generators_are_each_ranks_own(n):
    """And NumPy's: what they draw is on the host."""
    first = per_rank(lambda: synk.rng().random(3))
    assert len({tuple(each) for each in first}) == n
    used = per_rank(lambda: synk.xp().asarray(synk.rng().random(3)))
    assert not any(np.array_equal(one, other) for one, other in zip(first, used, strict=True))


@pytest.mark.parametrize("pool", pools("two", "sockets"))
def test_save_and_load(pool, tmp_path):
    """A session goes on where another one of as many ranks was."""

    def forked():
        session = started(pool, devices, seed=3)
        here.session = session
        w, arrays = filled(session.n_parallel, (4, 2), "f4", "w")
        return session, w, arrays, synk.shared(np.arange(3), name="v")

    def draw():
        return synk.rng().random(2)

    with nothing_left(), settled(pool) as devices:
        session, w, arrays, v = forked()
        v.set_value(np.full(3, 5))
        per_rank(draw)
        synk.save(tmp_path / "model")
        wanted = per_rank(draw)
        session.close()
        session, w, _, v = forked()
        w.set_value(np.zeros((4, 2), "f4"))
        synk.load(tmp_path / "model")
        for got, want in zip(replicas(w, session.n_parallel), arrays, strict=True):
            check(got, want)
        assert v.get_value().tolist() == [5, 5, 5]
        assert np.array_equal(per_rank(draw), wanted)
        session.close()
        here.session = None
