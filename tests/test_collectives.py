"""Collectives inside functions: what they give, what they refuse, and that they strand nobody."""

import contextlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.sessions import running
from synkro import CallTimeout, SessionBroken, UsageError, WorkerDied, WorkerError
from synkro.errors import CollectiveError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

SOON = 3.0  # seconds; what is promised in one, on a busy machine
OPS = ["mean", "sum", "prod", "max", "min"]


class Watch:
    """Fails where its block takes longer than what is promised to happen soon."""

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *error):
        assert time.monotonic() - self.start < SOON


def per_rank(fn, *args, **options):
    """Call *fn* once on every rank, with broadcast arguments; the list of what the ranks returned."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return synk.function(fn, outputs=None, bcast_inputs=list(names))(*args, **options)


def mine(rank, shape=(5,), dtype="f8"):
    """What a rank gives to a collective."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 3 * rank + 1).astype(dtype)


def serial(op, arrays):
    with np.errstate(all="ignore"):
        return getattr(np.stack(arrays), op)(axis=0)


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


# ── generators ───────────────────────────────────────────────────────────────────────────────────


def drawn(seed, workers=2, calls=1):
    with running(workers, seed=seed):
        draw = synk.function(lambda: synk.rng().random(4), outputs=None)
        return np.array([draw() for _ in range(calls)])


def test_generators_are_reproducible_and_independent():
    first, again, other = drawn(7, calls=2), drawn(7, calls=2), drawn(8, calls=2)
    assert np.array_equal(first, again)
    numbers = np.concatenate([first.ravel(), other.ravel()])
    assert len(np.unique(numbers)) == numbers.size  # of all ranks, calls and seeds
    spawned = [np.random.default_rng(seed) for seed in np.random.SeedSequence(7).spawn(2)]
    for call in first:
        for generator, got in zip(spawned, call, strict=True):
            assert np.array_equal(got, generator.random(4))  # kept from call to call


def test_generators_without_a_seed_are_fresh():
    assert not np.array_equal(drawn(None), drawn(None))


def test_a_rank_draws_the_same_however_many_there_are():
    assert np.array_equal(drawn(3, workers=2)[0], drawn(3, workers=3)[0, :2])


def test_generators_in_slices_and_after_errors(three):
    draw = synk.function(lambda x: synk.rng().random(1), outputs=None)

    def fail():
        synk.rng().random()
        raise ValueError("drawn")

    with pytest.raises(WorkerError, match="drawn"):
        synk.function(fail, outputs=[])()
    numbers = np.ravel(draw(np.zeros(12), num_slices=4))
    assert len(np.unique(numbers)) == 12


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
    with pytest.raises(UsageError, match="root=1, but 1 ranks take part"):
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


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


def test_in_the_main_program():
    for name in ("rank", "size", "rng", "barrier"):
        with pytest.raises(UsageError, match=rf"{name}\(\) is for use inside a function"):
            getattr(synk, name)()
    for call in (
        lambda: synk.reduce_scatter(np.ones(2)),
        lambda: synk.all_to_all(np.ones(2)),
        lambda: synk.send(np.ones(2), 0),
        lambda: synk.recv(0),
    ):
        with pytest.raises(UsageError, match="is for use inside a function that runs on the workers"):
            call()


DIFFERENT = {
    "kind": (
        lambda r: synk.barrier() if r == 1 else synk.all_gather(np.ones(2)),
        r"barrier.*all_gather|all_gather.*barrier",
    ),
    "operation": (
        lambda r: synk.all_reduce(np.ones(2), "sum" if r else "max"),
        r'all_reduce.*rank 0 is in all_reduce with "max", but rank 1 in all_reduce with "sum"',
    ),
    "root": (lambda r: synk.broadcast(np.ones(2), root=r), r"from or to rank 0, but rank 1.*to rank 1"),
    "shape": (
        lambda r: synk.all_reduce(np.ones(2 + (r == 2))),
        r"all_reduce.*rank 0 gave shape \(2,\) and dtype float64, but rank 2 shape \(3,\)",
    ),
    "dtype": (
        lambda r: synk.reduce(np.ones(2, "f4" if r == 1 else "f8")),
        r"reduce.*rank 0 gave shape \(2,\) and dtype float64, but rank 1 .*float32",
    ),
    "tree": (
        lambda r: synk.all_reduce([np.ones(2)] * (1 + r)),
        r"rank 0 is in all_reduce .* of \[0\], but rank 1 in all_reduce .* of \[0\], \[1\]",
    ),
    "row": (
        lambda r: synk.all_gather(np.ones((2, 1 + r))),
        r"\(2, 1\).*rank 1 shape \(2, 2\).*only the number of rows may differ",
    ),
    "row at the root": (
        lambda r: synk.gather(np.ones((2, 1 + r)), root=2),
        r"\(2, 1\).*rank 1 shape \(2, 2\).*only the number of rows may differ",
    ),
    "point": (lambda r: synk.scatter(np.float64(3)), "without dimensions has no rows"),
    "points": (lambda r: synk.all_to_all(3.0), "without dimensions has no rows"),
    "point, reduced": (lambda r: synk.reduce_scatter(3.0), "without dimensions has no rows"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_do_not_agree_are_told(three, what):
    does, message = DIFFERENT[what]

    def run():
        does(synk.rank())

    with Watch(), pytest.raises(WorkerError, match=message) as caught:
        synk.function(run, outputs=[], name="run")()
    assert isinstance(caught.value.original, CollectiveError)
    assert "(collective 1 of this call)" in str(caught.value)
    assert "in the function 'run'" in str(caught.value)


ARGUMENTS = {
    "send to oneself": (lambda r: synk.send(np.ones(1), r), "to=0 is this rank itself"),
    "receive from oneself": (lambda r: synk.recv(r), "source=0 is this rank itself"),
    "send outside": (lambda r: synk.send(np.ones(1), 3), "to=3, but 3 ranks take part"),
    "receive outside": (lambda r: synk.recv(-1), "source=-1, but 3 ranks take part"),
    "no rank": (lambda r: synk.recv("left"), "source must be a rank, an int; got 'left'"),
    "no root": (lambda r: synk.broadcast(1, root=1.5), "root must be a rank, an int; got 1.5"),
    "root outside": (lambda r: synk.reduce(np.ones(1), root=3), "root=3, but 3 ranks take part"),
    "operation": (lambda r: synk.all_reduce(np.ones(1), "median"), "op='median' is no reduce operation"),
    "gather is none": (
        lambda r: synk.reduce(np.ones(1), "gather"),
        "op='gather' is no reduce operation",
    ),
    "weight of a sum": (lambda r: synk.all_reduce(1.0, "sum", weight=2), 'weight= is for op="mean"'),
    "negative weight": (
        lambda r: synk.all_reduce(1.0, weight=-1),
        "weight must be a number of 0 or more",
    ),
    "weights": (lambda r: synk.all_reduce(1.0, weight=[1]), "weight must be a number of 0 or more"),
    "text": (lambda r: synk.all_reduce("text", "sum"), "takes arrays of bools, integers"),
    "objects": (lambda r: synk.all_gather(np.array([None])), "takes arrays of bools, integers"),
    "nd_up": (lambda r: synk.all_gather(np.ones(1), nd_up=2), "nd_up must be 0"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
@pytest.mark.parametrize("everywhere", [True, False])
def test_arguments_that_cannot_be(three, what, everywhere):
    does, message = ARGUMENTS[what]

    def run():
        if everywhere or synk.rank() == 0:
            does(synk.rank())
        else:
            synk.barrier()

    with Watch(), pytest.raises(WorkerError, match=message) as caught:
        synk.function(run, outputs=[])()
    assert caught.value.rank == 0
    assert isinstance(caught.value.original, UsageError)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0, 0, 0), "the weights of all ranks are 0"),
        ((float("nan"),) * 3, "weight must be a number of 0 or more"),
        ((float("inf"), 1, 1), "weight must be a number of 0 or more"),
    ],
    ids=str,
)
def test_weights_that_give_no_mean(three, weights, message):
    with Watch(), pytest.raises(WorkerError, match=message):
        per_rank(lambda: synk.all_reduce(np.ones(2), weight=float(weights[synk.rank()])))


def test_a_value_of_no_weight_does_not_count(three):
    def run():
        empty = synk.rank() == 1
        return synk.all_reduce(np.full(2, np.nan if empty else 3.0), weight=0 if empty else 5)

    assert [result.tolist() for result in per_rank(run)] == [[3, 3]] * 3


@pytest.mark.parametrize(
    ("dtype", "value", "weight"),
    [
        ("u1", 100, 3),
        ("i1", -3, 50),
        ("i4", 2_000_000, 2000),
        ("i8", 2**50, 16),
        ("u1", 100, 300),
        ("f2", 40000, 3),
        (">f2", 40000, 3),
        (">i4", 7, 3),
    ],
)
def test_weighted_means_are_taken_in_a_dtype_that_holds_them(three, dtype, value, weight):
    def run():
        return synk.all_reduce(np.array([value], dtype), "mean", weight=weight)

    assert [result.tolist() for result in per_rank(run)] == [[value]] * 3


def test_messages_that_nobody_received_are_in_nobodys_way(three):
    def ring(number):
        right, left = (synk.rank() + 1) % 3, (synk.rank() - 1) % 3
        if number < 0:
            for _ in range(8):  # as many as may wait
                synk.send(np.array(number), right)
            raise ValueError("planned")
        synk.send(np.array(number), right)
        return synk.recv(left)

    f = synk.function(ring, bcast_inputs="number", outputs=None)
    for number in range(5):
        with Watch(), pytest.raises(WorkerError, match="planned"):
            f(-1 - number)
        with Watch():
            assert f(number) == [number] * 3


def test_a_rank_thrown_out_of_a_collective_cannot_give_the_others_nonsense(three):
    def run():
        x = np.array([1e308, 1e308, 1.0, 1.0])
        with np.errstate(over="raise"), contextlib.suppress(FloatingPointError):
            synk.all_reduce(x, "sum")  # overflows where the first elements are reduced: on rank 0
        return synk.all_reduce(np.full(4, 5.0), "sum")

    with Watch(), pytest.raises(WorkerError, match=r"rank 0 was thrown out of all_reduce"):
        per_rank(run)


def test_collectives_from_threads_and_children_of_the_function_are_refused(three):
    def in_a_thread():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(synk.barrier).result()

    def in_a_child():
        child = os.fork()
        if not child:
            try:
                synk.barrier()
            except synk.UsageError:
                os._exit(7)
            os._exit(0)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with Watch(), pytest.raises(WorkerError, match="from a thread, or a process, that the function"):
        synk.function(in_a_thread, inputs=[], outputs=[])()
    with Watch():
        assert per_rank(in_a_child) == [7, 7, 7]


def test_a_variable_twice_in_one_all_reduce_is_refused(three):
    w = synk.shared(np.ones(2))
    with Watch(), pytest.raises(WorkerError, match="all_reduce got a variable twice"):
        synk.function(lambda: synk.all_reduce([w, w], "sum"), inputs=[], outputs=[])()
    assert synk.gather(w).tolist() == [[1, 1]] * 3


def test_an_error_that_is_caught_leaves_the_ranks_in_step(three):
    def run():
        with contextlib.suppress(CollectiveError):
            synk.all_reduce(np.ones(2 + synk.rank()))
        return synk.all_reduce(1.0, "sum")

    assert per_rank(run) == [3, 3, 3]


# ── ranks that do not come ───────────────────────────────────────────────────────────────────────

WAITING = {
    "barrier": lambda: synk.barrier(),
    "all_reduce": lambda: synk.all_reduce(np.ones(3)),
    "all_reduce (large)": lambda: synk.all_reduce(np.ones(100_000)),
    "reduce": lambda: synk.reduce(np.ones(3), root=1),
    "broadcast": lambda: synk.broadcast(np.ones(3), root=1),
    "all_gather": lambda: synk.all_gather(np.ones(3)),
    "gather": lambda: synk.gather(np.ones(3), root=1),
    "scatter": lambda: synk.scatter(np.ones(3), root=1),
    "reduce_scatter": lambda: synk.reduce_scatter(np.ones(3)),
    "all_to_all": lambda: synk.all_to_all(np.ones(3)),
    "recv": lambda: synk.recv(1),
    "send": lambda: [synk.send(np.ones(3), 1) for _ in range(20)],
}
LATER = [name for name in WAITING if name not in ("recv", "send")]


def when_the_others_wait(seconds=0.1):
    """Give the other ranks the time to begin to wait, polling first and then asleep."""
    time.sleep(seconds)


@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("early", [True, False])
def test_an_exception_while_the_others_wait(three, kind, early):
    wait = WAITING[kind]

    def run():
        synk.barrier()
        if synk.rank() == 1:
            if not early:
                when_the_others_wait()
            raise ZeroDivisionError("on purpose")
        if early:
            when_the_others_wait()
        wait()

    with (
        Watch(),
        pytest.raises(WorkerError, match=r"rank 1 failed in the function 'run'.*on purpose") as caught,
    ):
        synk.function(run, outputs=[])()
    assert caught.value.rank == 1
    assert isinstance(caught.value.original, ZeroDivisionError)


@pytest.mark.parametrize("kind", WAITING)
@pytest.mark.parametrize("early", [True, False])
def test_a_return_while_the_others_wait(three, kind, early):
    wait = WAITING[kind]
    name = kind.partition(" ")[0]

    def run():
        synk.barrier()
        if synk.rank() == 1:
            if not early:
                when_the_others_wait()
            return
        if early:
            when_the_others_wait()
        wait()

    with Watch(), pytest.raises(WorkerError, match="rank 1 returned from the function") as caught:
        synk.function(run, outputs=[])()
    assert caught.value.rank in (0, 2)
    assert isinstance(caught.value.original, CollectiveError)
    assert f"taking part in {name}" in str(caught.value)
    assert "every rank of a call must enter the same collectives" in str(caught.value)


@pytest.mark.parametrize("kind", WAITING)
def test_the_others_are_told_who_failed(three, kind):
    """They may catch it: the error in their hands names the rank and the collective."""
    wait = WAITING[kind]
    name = kind.partition(" ")[0]
    heard = synk.shared(False)

    def run():
        if synk.rank() == 1:
            raise ZeroDivisionError("on purpose")
        try:
            wait()
        except CollectiveError as error:
            heard.value = "rank 1 failed" in str(error) and name in str(error) and error.strays

    with Watch(), pytest.raises(WorkerError, match="on purpose"):
        synk.function(run, outputs=[])()
    assert synk.gather(heard).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", LATER)
def test_a_skipped_collective(three, kind):
    """One rank is a collective ahead of the others: in another one than they, and then gone."""
    wait = WAITING[kind]

    def run():
        if synk.rank() != 1:
            wait()
        synk.all_reduce(np.ones(7), "prod")

    with Watch(), pytest.raises(WorkerError, match="all_reduce") as caught:
        synk.function(run, outputs=[])()
    assert isinstance(caught.value.original, CollectiveError)
    assert "rank 1" in str(caught.value)


ENDINGS = {"os._exit": 5, "SIGKILL": None, "SIGSEGV": None}


DEATHS = [(kind, ending) for kind in WAITING for ending in ("os._exit", "SIGKILL")]


@pytest.mark.parametrize(("kind", "ending"), [*DEATHS, ("all_reduce", "SIGSEGV"), ("recv", "SIGSEGV")])
def test_a_death_while_the_others_wait(own, kind, ending):
    wait = WAITING[kind]

    def run():
        synk.barrier()
        if synk.rank() == 1:
            when_the_others_wait(0.05)
            if ending == "os._exit":
                os._exit(5)
            os.kill(os.getpid(), getattr(signal, ending))
            time.sleep(60)
        wait()

    x = synk.data([1.0, 2.0])
    with Watch(), pytest.raises(WorkerDied, match="worker of rank 1") as caught:
        synk.function(run, outputs=[])()
    assert caught.value.rank == 1
    assert caught.value.exitcode == ENDINGS[ending]
    if ending != "os._exit":
        assert caught.value.signal == getattr(signal, ending)
    with pytest.raises(SessionBroken, match="rank 1"):
        synk.all_reduce(synk.shared(1.0))
    with Watch():
        synk.close()
    assert x[:].tolist() == [1, 2]


def test_a_death_between_calls_breaks_the_collectives_of_the_main_process(own):
    w = synk.shared(np.ones(3))
    os.kill(own.pids[1], signal.SIGKILL)
    with Watch(), pytest.raises(WorkerDied, match="worker of rank 1"):
        synk.all_reduce(w)
    with pytest.raises(SessionBroken):
        synk.gather(w)


DEADLOCKS = {
    "all receive": (lambda r: synk.recv((r + 1) % 3), "recv from rank"),
    "all send too much": (
        lambda r: [synk.send(np.ones(1), (r + 1) % 3) for _ in range(100)],
        "send to rank",
    ),
    "one receives, the others meet": (lambda r: synk.barrier() if r else synk.recv(2), "barrier"),
    "a ring that closes late": (
        lambda r: (synk.recv((r - 1) % 3), synk.send(np.ones(1), (r + 1) % 3)),
        "rank 2 is in recv from rank 1",
    ),
    "two of three": (lambda r: synk.recv(1 - r) if r < 2 else None, "rank 2 has returned"),
}


@pytest.mark.parametrize("what", DEADLOCKS)
def test_deadlocks_are_answered(three, what):
    does, message = DEADLOCKS[what]

    def run():
        does(synk.rank())

    with Watch(), pytest.raises(WorkerError, match="wait for each other, and none can go on") as caught:
        synk.function(run, outputs=[])()
    assert message in str(caught.value)


def test_messages_that_nobody_receives_are_forgotten(three):
    def send():
        if synk.rank() == 0:
            synk.send(np.array(-1.0), 1)

    synk.function(send, outputs=[])()

    def run():
        if synk.rank() == 0:
            synk.send(np.array(5.0), 1)
        return synk.recv(0) if synk.rank() == 1 else 0.0

    assert per_rank(run) == [0, 5, 0]


def test_a_slow_rank_is_waited_for(three):
    def run():
        if synk.rank() == 2:
            time.sleep(0.7)  # longer than any look whether something can still change
            synk.send(np.array(1.0), 0)
            synk.send(np.array(1.0), 1)
            got = 1.0
        else:
            got = synk.recv(2)
        if synk.rank() == 0:
            time.sleep(0.4)
        return got + synk.all_reduce(1.0, "sum")

    assert per_rank(run) == [4, 4, 4]


# ── timeouts and Ctrl-C ──────────────────────────────────────────────────────────────────────────


def test_a_timeout_while_the_others_wait():
    with running(2, timeout=0.5):

        def run(seconds):
            if synk.rank() == 1:
                time.sleep(seconds)
            return synk.all_reduce(float(synk.rank()), "sum")

        f = synk.function(run, bcast_inputs=["seconds"], outputs=None)
        assert f(0.0) == [1, 1]
        with Watch(), pytest.raises(CallTimeout, match=r"within the timeout of 0.5 s.*rank 1") as caught:
            f(30.0)
        assert 1 in caught.value.ranks
        assert f(0.0) == [1, 1]
        w = synk.shared(2.0)
        synk.all_reduce(w, "sum")
        assert synk.gather(w).tolist() == [4, 4]


@pytest.mark.parametrize("kind", WAITING)
def test_ctrl_c_while_one_rank_sleeps_and_the_others_wait(three, kind, tmp_path):
    wait = WAITING[kind]
    sign = str(tmp_path / "sign")
    os.mkfifo(sign)

    def run():
        synk.barrier()
        if synk.rank() == 1:
            with open(sign, "w"):
                pass
            time.sleep(30)
        wait()

    def interrupt():
        with open(sign):  # opens when the sleeper does
            pass
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    f = synk.function(run, outputs=[])
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with Watch(), pytest.raises(KeyboardInterrupt):
            f()
    finally:
        thread.join()
    with Watch():
        assert per_rank(lambda: synk.all_gather(synk.rank()).sum()) == [3, 3, 3]


def test_ctrl_c_during_a_collective_of_the_main_process(three):
    """Whenever it comes: it is heard, and the replicas are of one mind after the next broadcast."""
    w = synk.shared(np.ones(400_000))

    def reduce_until_interrupted():
        for _ in range(1_000_000):
            synk.all_reduce(w)

    for delay in (0.001, 0.003, 0.01, 0.03):
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            reduce_until_interrupted()
        timer.join()
        synk.all_reduce(w)  # means of ones, even where one of them was left in the middle
        assert [float(synk.get_value(rank, w).sum()) for rank in range(3)] == [400_000] * 3


@pytest.mark.parametrize(
    "misplaced",
    [
        lambda: synk.broadcast(np.ones(2), 1),
        lambda: synk.scatter(np.ones(2), 1),
        lambda: synk.reduce(np.ones(2), "sum", 1),
        lambda: synk.scatter(np.ones(2), batch=[0]),
    ],
    ids=["broadcast", "scatter", "reduce", "batch"],
)
def test_a_root_that_is_not_named_is_not_taken_for_something_else(session, misplaced):
    with pytest.raises(
        synk.WorkerError, match=r"inside a function, .* the root by name: \w+\(x, root=…\)"
    ):
        session.function(misplaced, outputs=[])()


def test_nested_values_meet_by_their_names_not_by_their_places(session):
    def turned():
        a, b = np.full(2, 1.0), np.full(2, 5.0)
        return synk.all_reduce({"a": a, "b": b} if synk.rank() else {"b": b, "a": a}, op="sum")["a"]

    assert session.function(turned, outputs=None)()[0].tolist() == [2, 2]
    assert session.function(turned, outputs=None)()[1].tolist() == [2, 2]


@pytest.mark.parametrize(
    "nested",
    [
        lambda: (
            {"a": np.ones(2), "b": np.ones(2)} if synk.rank() else {"c": np.ones(2), "d": np.ones(2)}
        ),
        lambda: [[np.ones(2)], np.ones(2)] if synk.rank() else [np.ones(2), [np.ones(2)]],
        lambda: {str(i): np.ones(1) for i in range(synk.rank(), 100 + synk.rank())},
    ],
    ids=["other keys", "other nesting", "very many"],
)
def test_values_of_other_nesting_do_not_meet(session, nested):
    with pytest.raises(
        synk.WorkerError, match=r"rank 0 is in all_reduce .* of .*, but rank 1 in all_reduce"
    ):
        session.function(lambda: synk.all_reduce(nested()), outputs=[])()
