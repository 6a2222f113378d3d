"""Collectives inside functions: what they give, and who takes part."""

import sys

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.arrays import OPS, mine, serial
from support.sessions import per_rank
from synkro import UsageError, WorkerError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

pytestmark = pytest.mark.counted_once


# ── what they give ───────────────────────────────────────────────────────────────────────────────


def test_who_is_who(n):
    assert per_rank(lambda: synk.rank()) == list(range(n))
    assert per_rank(lambda: synk.size()) == [n] * n
    for number in per_rank(lambda: isinstance(synk.rank(), int) and isinstance(synk.size(), int)):
        assert number


@pytest.mark.parametrize("op", [*OPS, "avg"])
@pytest.mark.parametrize("shape", [(), (5,), (0, 2), (3, 4), (70_001,)])
def test_reductions(n, op, shape):
    name = "mean" if op == "avg" else op
    want = serial(name, [mine(rank, shape) for rank in range(n)])

    def run():
        x = mine(synk.rank(), shape)
        given = x.copy()
        everywhere = synk.all_reduce(x, op)
        at_root = synk.reduce(x, op, root=synk.size() - 1)
        assert np.array_equal(x, given)
        assert type(everywhere) is (np.ndarray if shape else np.float64)
        assert (at_root is None) == (synk.rank() < synk.size() - 1)
        return everywhere, everywhere if at_root is None else at_root

    for everywhere, at_root in per_rank(run):
        assert everywhere.shape == want.shape
        assert np.allclose(everywhere, want, rtol=1e-14)
        assert np.array_equal(everywhere, at_root)


def test_means_of_integers_and_sums_of_bools(n):
    def run():
        mean = synk.all_reduce(np.array([synk.rank(), 1]))
        count = synk.all_reduce(np.array([True, synk.rank() == 0]), "sum")
        half = synk.all_reduce(np.full(3, 0.1, "f2"), "sum")
        low = synk.all_reduce(np.array([100], "i1"), "max")
        return mean, count, half, low

    for mean, count, half, low in per_rank(run):
        assert mean.dtype == np.float64
        assert mean.tolist() == [(n - 1) / 2, 1]
        assert (count.dtype, count.tolist()) == (np.int64, [n, 1])
        assert half.dtype == np.float16
        assert low.dtype == np.int8
        assert np.allclose(half, n * np.float32(np.float16(0.1)), rtol=1e-3)


def test_python_numbers(n):
    def run():
        total = synk.all_reduce(synk.rank() + 0.5, "sum")
        largest = synk.all_reduce(synk.rank(), "max")
        return total, largest, synk.broadcast(synk.rank() + 10), synk.all_gather(synk.rank()).sum()

    want = (n * (n - 1) / 2 + n / 2, n - 1, 10, n * (n - 1) // 2)
    assert [tuple(each) for each in per_rank(run)] == [want] * n


def test_nested_containers_in_one_go(n):
    def run():
        rank = synk.rank()
        given = {
            "layers": [(mine(rank, (3, 2)), mine(rank, (2,), "f4")), (mine(rank, (1, 1)), 1.5)],
            "steps": rank,
            "none": [],
        }
        got = synk.all_reduce(given, "sum")
        assert isinstance(got["layers"], list)
        assert isinstance(got["layers"][1], tuple)
        assert got["none"] == []
        assert got["layers"][0][1].dtype == np.float32
        return (
            got["layers"][0][0],
            got["layers"][0][1],
            got["layers"][1][0],
            got["layers"][1][1],
            got["steps"],
        )

    want = [
        serial("sum", [mine(rank, shape, dtype) for rank in range(n)])
        for shape, dtype in [((3, 2), "f8"), ((2,), "f4"), ((1, 1), "f8")]
    ]
    for got in per_rank(run):
        for one, other in zip(got, [*want, 1.5 * n, n * (n - 1) // 2], strict=True):
            assert np.array_equal(one, other)


def test_exchange(n):
    def run():
        rank, other = synk.rank(), synk.size() - 1 - synk.rank()
        array = synk.exchange(np.full((rank + 1, 2), rank, "i4" if rank else "f4"), other)
        assert array.shape == (other + 1, 2)
        assert array.dtype == ("i4" if other else "f4")
        assert (array == other).all()
        assert synk.exchange(1.5 + rank, other) == 1.5 + other
        own = np.ones(2)
        assert synk.exchange(own, rank) is not own
        return [synk.exchange(np.full(50_000, rank), other).sum() for _ in range(10)]

    assert np.allclose(per_rank(run), [[50_000 * (n - 1 - rank)] * 10 for rank in range(n)])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 100])
def test_a_weighted_mean_is_that_of_all_rows(n, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 3))

    def run(x):
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


def test_weights_need_not_be_counts(n):
    for got in per_rank(
        lambda: synk.all_reduce(np.array(float(synk.rank())), weight=0.5 * (synk.rank() + 1))
    ):
        weights = np.arange(1, n + 1) / 2
        assert np.isclose(got, (np.arange(n) * weights).sum() / weights.sum())


def test_variables_are_reduced_in_place(n):
    w, v = synk.shared(np.zeros(3), "w"), synk.shared(np.zeros((2, 2), "f4"))

    def run():
        w.value = mine(synk.rank(), (3,))
        v.value = mine(synk.rank(), (2, 2), "f4")
        held = w.value
        result = synk.all_reduce([w, v], "sum")
        assert result[0] is w
        assert result[1] is v
        synk.all_reduce(w, "mean")
        return held, w.value, v.value

    total = serial("sum", [mine(rank, (3,)) for rank in range(n)])
    for held, one, other in per_rank(run):
        assert np.allclose(one, total)
        assert np.array_equal(held, one)
        assert np.array_equal(other, serial("sum", [mine(rank, (2, 2), "f4") for rank in range(n)]))


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
def test_moving(n, root):
    place = n - 1 if root == -1 else root

    def run():
        rank, size = synk.rank(), synk.size()
        there = place or 0
        whole = synk.broadcast(mine(rank, (2, 3)), root=place)
        rows = synk.scatter(mine(rank, (7, 2)), root=place)
        joined = synk.gather(mine(rank, (rank + 1,)), root=place)
        stacked = synk.gather(mine(rank, (2,)), nd_up=1, root=place)
        assert (joined is None) == (stacked is None) == (rank != there)
        everywhere = synk.all_gather(mine(rank, (rank, 2)))
        raised = synk.all_gather(mine(rank, (2,)), nd_up=1)
        transposed = synk.all_to_all(mine(rank, (2 * size + 1,)))
        share = synk.reduce_scatter(mine(rank, (4, 2)), "sum")
        synk.barrier()
        nothing = np.zeros(0)
        return {
            "whole": whole,
            "rows": rows,
            "joined": nothing if joined is None else joined,
            "stacked": nothing if stacked is None else stacked,
            "everywhere": everywhere,
            "raised": raised,
            "transposed": transposed,
            "share": share,
        }

    there, ranks = place or 0, range(n)
    for rank, got in enumerate(per_rank(run)):
        want = {
            "whole": mine(there, (2, 3)),
            "rows": np.array_split(mine(there, (7, 2)), n)[rank],
            "joined": np.concatenate([mine(r, (r + 1,)) for r in ranks]),
            "stacked": np.stack([mine(r, (2,)) for r in ranks]),
            "everywhere": np.concatenate([mine(r, (r, 2)) for r in ranks]),
            "raised": np.stack([mine(r, (2,)) for r in ranks]),
            "transposed": np.concatenate(
                [np.array_split(mine(r, (2 * n + 1,)), n)[rank] for r in ranks]
            ),
            "share": np.array_split(serial("sum", [mine(r, (4, 2)) for r in ranks]), n)[rank],
        }
        if rank != there:
            want["joined"] = want["stacked"] = np.zeros(0)
        for name, array in want.items():
            assert np.array_equal(got[name], array), name


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


def test_a_ring_of_messages(n):
    def run():
        right, left = (synk.rank() + 1) % synk.size(), (synk.rank() - 1) % synk.size()
        seen = [synk.rank()]
        for _ in range(synk.size() - 1):
            synk.send(np.array([seen[-1]]), right)
            seen.append(int(synk.recv(left)[0]))
        if synk.size() > 1:
            synk.send(2.5, to=right)
            assert synk.recv(source=left) == 2.5
        return np.array(seen)

    for rank, seen in enumerate(per_rank(run)):
        assert seen.tolist() == [(rank - step) % n for step in range(n)]


def test_many_collectives_in_one_call_and_many_calls(n):
    def run():
        total = 0.0
        for turn in range(50):
            total += synk.all_reduce(np.array(float(turn)), "sum")
            synk.barrier()
        return total

    f = synk.function(run, outputs=None)
    for _ in range(10):
        assert f() == [n * 1225.0] * n


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

    assert session.function(turned, outputs=None)()[0].tolist() == [2, 2]
    assert session.function(turned, outputs=None)()[1].tolist() == [2, 2]
