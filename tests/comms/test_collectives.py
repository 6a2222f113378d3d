"""Collectives inside functions: what they give, and who takes part."""

import numpy as np
import pytest

import synkro as synk
from support.arrays import OPS, mine, serial
from support.collectives import check_everything, everything
from support.sessions import per_rank
from synkro import UsageError, WorkerError

pytestmark = pytest.mark.counted_once


# ── what they give ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def where():
    """Whose arrays are given: those of the host, or (in gpu/) of the device, too."""
    return "host"


def module(where):
    return synk.xp() if where == "device" else np


def test_who_is_who(n):
    assert per_rank(lambda: (synk.rank(), synk.size())) == [(rank, n) for rank in range(n)]
    assert all(per_rank(lambda: type(synk.rank()) is type(synk.size()) is int))


@pytest.mark.parametrize("op", [*OPS, "avg"])
def test_reductions(n, op, where):
    shapes = [(), (5,), (0, 2), (3, 4), (70_001,)]

    def run():
        xp, results = module(where), []
        for shape in shapes:
            x = xp.asarray(mine(synk.rank(), shape))
            given = x.copy()
            everywhere = synk.all_reduce(x, op)
            at_root = synk.reduce(x, op, root=synk.size() - 1)
            assert (x == given).all()
            assert type(everywhere) is (xp.ndarray if shape or where == "device" else np.float64)
            assert (at_root is None) == (synk.rank() < synk.size() - 1)
            assert at_root is None or (at_root == everywhere).all()
            results.append(everywhere)
        return tuple(results)

    for results in per_rank(run):
        for shape, got in zip(shapes, results, strict=True):
            want = serial("mean" if op == "avg" else op, [mine(rank, shape) for rank in range(n)])
            assert got.shape == want.shape
            assert np.allclose(got, want, rtol=1e-14)


def test_means_of_integers_and_sums_of_bools(n, where):
    def run():
        xp = module(where)
        mean = synk.all_reduce(xp.asarray([synk.rank(), 1]))
        count = synk.all_reduce(xp.asarray([True, synk.rank() == 0]), "sum")
        half = synk.all_reduce(xp.full(3, 0.1, "f2"), "sum")
        low = synk.all_reduce(xp.asarray([100], "i1"), "max")
        return mean, count, half, low

    for mean, count, half, low in per_rank(run):
        assert (mean.dtype, mean.tolist()) == (np.float64, [(n - 1) / 2, 1])
        assert (count.dtype, count.tolist()) == (np.int64, [n, 1])
        assert (half.dtype, low.dtype) == (np.float16, np.int8)
        assert np.allclose(half, n * np.float32(np.float16(0.1)), rtol=1e-3)


def test_python_numbers(n):
    def run():
        total = synk.all_reduce(synk.rank() + 0.5, "sum")
        largest = synk.all_reduce(synk.rank(), "max")
        other = synk.size() - 1 - synk.rank()
        assert synk.exchange(1.5 + synk.rank(), other) == 1.5 + other
        if synk.size() > 1:
            synk.send(2.5, to=(synk.rank() + 1) % synk.size())
            assert synk.recv(source=(synk.rank() - 1) % synk.size()) == 2.5
        return total, largest, synk.broadcast(synk.rank() + 10), synk.all_gather(synk.rank()).sum()

    want = (n * (n - 1) / 2 + n / 2, n - 1, 10, n * (n - 1) // 2)
    assert [tuple(each) for each in per_rank(run)] == [want] * n


def test_nested_containers_in_one_go(n, where):
    """Arrays of the host and of the device together."""

    def run():
        xp, rank = module(where), synk.rank()
        given = {
            "layers": [(mine(rank, (3, 2)), xp.asarray(mine(rank, (2,), "f4"))), (np.ones((1, 1)), 1.5)],
            "steps": rank,
            "none": [],
        }
        got = synk.all_reduce(given, "sum")
        (first, second), last = got["layers"]
        assert (type(got["layers"]), type(last), got["none"]) == (list, tuple, [])
        assert (type(first), type(second), second.dtype) == (np.ndarray, xp.ndarray, np.float32)
        return first, second, *last, got["steps"]

    want = [
        serial("sum", [mine(rank, shape, dtype) for rank in range(n)])
        for shape, dtype in [((3, 2), "f8"), ((2,), "f4")]
    ]
    for got in per_rank(run):
        for one, other in zip(got, [*want, [[n]], 1.5 * n, n * (n - 1) // 2], strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 100])
def test_a_weighted_mean_is_that_of_all_rows(n, rows, where):
    x = np.random.default_rng(rows).standard_normal((rows, 3))

    def run(x):
        x = x.get() if where == "host" and type(x) is not np.ndarray else x
        mean = x.mean(axis=0)
        nested = synk.all_reduce({"mean": mean, "square": (x**2).mean(axis=0)}, weight=len(x))
        share = synk.reduce_scatter(mean, weight=len(x))
        at_root = synk.reduce(mean, weight=len(x))
        whole = synk.all_gather(share)
        return nested["mean"], nested["square"], whole, nested["mean"] if at_root is None else at_root

    wants = [x.mean(axis=0), (x**2).mean(axis=0), x.mean(axis=0), x.mean(axis=0)]
    for got in synk.function(run, outputs=None)(x):
        for one, want in zip(got, wants, strict=True):
            assert np.allclose(one, want, rtol=1e-12)


@pytest.mark.parametrize("shape", [(3,), (70_001,)])
def test_variables_are_reduced_in_place(n, where, shape):
    w, v = synk.shared(np.zeros(shape), "w"), synk.shared(np.zeros((2, 2), "f4"))

    def run():
        xp = module(where)
        w.value = xp.asarray(mine(synk.rank(), shape))
        v.value = xp.asarray(mine(synk.rank(), (2, 2), "f4"))
        held = w.value
        result = synk.all_reduce([w, v], "sum")
        assert result[0] is w
        assert result[1] is v
        synk.all_reduce(w, "mean")
        return held, w.value, v.value

    total = serial("sum", [mine(rank, shape) for rank in range(n)])
    for held, one, other in per_rank(run):
        assert np.allclose(one, total)
        assert np.array_equal(held, one)
        assert np.array_equal(other, serial("sum", [mine(rank, (2, 2), "f4") for rank in range(n)]))
    assert np.allclose(w.get_value(), total)


def test_a_weighted_mean_of_a_variable_is_in_place_as_well(n):
    w = synk.shared(0.0)

    def run():
        w.value = synk.rank()
        synk.all_reduce(w, weight=synk.rank() + 1)
        return w.value

    weights = np.arange(1, n + 1)
    for got in per_rank(run):
        assert np.isclose(got, (np.arange(n) * weights).sum() / weights.sum())


def test_variables_among_other_values_are_in_place_as_well(n):
    w = synk.shared(np.zeros(2))

    def run():
        w.value = mine(synk.rank(), (2,))
        loss = synk.all_reduce({"w": w, "loss": float(synk.rank())}, "sum")["loss"]
        return w.value, loss

    for got, loss in per_rank(run):
        assert loss == n * (n - 1) / 2
        assert np.array_equal(got, serial("sum", [mine(rank, (2,)) for rank in range(n)]))


@pytest.mark.parametrize("root", [None, 0, -1])
def test_everything(n, root, where):
    root = n - 1 if root == -1 else root
    for shape in [(3,), (7, 10_001)]:

        def run():
            return everything(synk, synk.rank(), shape, "sum", root, xp=module(where))

        for rank, found in enumerate(per_rank(run)):
            check_everything(found, range(n), rank, shape, "sum", root)


def test_what_the_others_give_to_a_broadcast_does_not_matter(n):
    def run():
        return synk.broadcast(np.arange(3.0) if synk.rank() == 0 else None)

    assert [got.tolist() for got in per_rank(run)] == [[0, 1, 2]] * n


def test_results_are_the_ranks_own(n):
    def run():
        results = [
            synk.broadcast(np.zeros(3)),
            synk.all_reduce(np.zeros(3), "sum"),
            synk.all_gather(np.zeros(3))[:3],
            synk.scatter(np.zeros(3 * synk.size())),
        ]
        synk.barrier()
        for result in results:
            result += synk.rank() + 1
        synk.barrier()
        return np.stack(results)

    for rank, got in enumerate(per_rank(run)):
        assert np.array_equal(got, np.full((4, 3), rank + 1.0))


# ── who takes part ───────────────────────────────────────────────────────────────────────────────


def test_fewer_rows_than_ranks(n):
    for rows in range(1, n + 1):

        def run(x):
            return np.stack([synk.all_gather(x), np.full(synk.size(), synk.rank())])

        results = synk.function(run, outputs=None)(np.arange(float(rows)))
        assert len(results) == rows
        for rank, (gathered, places) in enumerate(results):
            assert gathered.tolist() == list(range(rows))
            assert places.tolist() == [rank] * rows


def test_the_places_of_some_ranks(three):
    s = synk.shared(np.zeros(1))
    for rank in range(3):
        synk.set_value(rank, s, np.arange(float(rank)) + 10)  # rank 0 has none

    def run():
        if synk.rank() == 0:
            synk.send(s.value, 1)
        else:
            assert synk.recv(0).tolist() == [10]
        return np.array([synk.rank(), synk.size(), synk.broadcast(len(s))])

    got = synk.function(run, outputs=None, sliceable_shareds=[s])()
    assert [each.tolist() for each in got] == [[0, 2, 1], [1, 2, 1]]
    with pytest.raises(WorkerError, match="root=2, but 2 ranks take part in this call"):
        synk.function(lambda: synk.broadcast(1, root=2), sliceable_shareds=[s])()


@pytest.mark.parametrize("slices", [2, 3, 4, 100])
def test_every_rank_runs_equally_many_slices(n, slices):
    for rows in (2, 4, 7, 11):
        x = np.arange(float(rows))

        def run(x):
            return np.array(
                [synk.all_reduce(x.sum(), "sum"), synk.all_reduce(len(x), "sum"), synk.size()]
            )

        results = synk.function(run, outputs=None)(x, num_slices=slices)
        ranks = min(rows, n)
        fewest = rows // n if rows >= n else 1
        assert len(results) == ranks * min(slices, fewest)
        assert sum(total for total, _, _ in results) / ranks == x.sum()
        assert sum(count for _, count, _ in results) / ranks == rows
        assert {size for _, _, size in results} == {ranks}


def test_slices_of_uneven_shards_run_equally_many(three):
    s = synk.shared(np.zeros(1))
    for rank, rows in enumerate([5, 2, 9]):
        synk.set_value(rank, s, np.ones(rows))
    f = synk.function(lambda: synk.all_reduce(s.value.sum(), "sum"), outputs=None, sliceable_shareds=[s])
    results = f(num_slices=4)
    assert len(results) == 3 * 2
    assert sum(results) == 3 * 16


def test_alone_in_the_main_process(n):
    w = synk.shared(np.arange(3.0))

    def run(x):
        synk.barrier()
        assert (synk.rank(), synk.size()) == (0, 1)
        assert 0 <= synk.rng().random() < 1
        for same in (
            synk.all_reduce(x),
            synk.all_reduce({"x": [x]}, "sum", weight=None)["x"][0],
            synk.all_reduce(x, weight=5),
            synk.reduce(x, "max"),
            synk.reduce_scatter(x),
            synk.broadcast(x),
            synk.all_gather(x),
            synk.gather(x),
            synk.scatter(x),
            synk.all_to_all(x),
            synk.gather(x, nd_up=1)[0],
        ):
            assert np.array_equal(same, x)
            assert same is not x
        return synk.all_reduce(x.sum(), "sum") + synk.all_reduce(w.value.sum(), "sum")

    x = np.arange(4.0)
    assert synk.function(run, outputs="max").as_serial(x) == 9
    for refused in (lambda: synk.send(x, 0), lambda: synk.recv(0)):
        with pytest.raises(UsageError, match="this rank itself"):
            synk.function(refused).as_serial()
    with pytest.raises(UsageError, match="root=1, but 1 rank takes part"):
        synk.function(lambda: synk.broadcast(1, root=1)).as_serial()
    with pytest.raises(UsageError, match="this is the main program"):
        synk.rank()


def test_alone_with_a_variable(n):
    w = synk.shared(np.arange(3.0))
    big = synk.shared(np.arange(100_000.0))

    def run():
        assert synk.all_reduce(w, "sum") is w
        synk.all_reduce([w, big])
        return big.value.sum()

    assert synk.function(run).as_serial() == np.arange(100_000.0).sum()
    assert w.value.tolist() == [0, 1, 2]
    assert np.array_equal(big.value, np.arange(100_000.0))


def test_nested_values_meet_by_their_names_not_by_their_places(session):
    def turned():
        a, b = np.full(2, 1.0), np.full(2, 5.0)
        return synk.all_reduce({"a": a, "b": b} if synk.rank() else {"b": b, "a": a}, op="sum")["a"]

    assert [each.tolist() for each in session.function(turned, outputs=None)()] == [[2, 2]] * 2
