"""Collectives inside functions on GPUs: arrays of the device and of the host, containers, variables."""

import sys

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.gpus import EVERY, serving
from support.sessions import per_rank
from synkro import extensions, here

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

OPS = ["mean", "sum", "prod", "max", "min"]


@pytest.fixture(scope="module", params=EVERY)
def session(request):
    with serving(request.param, seed=1) as session:
        yield session


def mine(rank, shape=(5,), dtype="f8"):
    """What a rank gives to a collective."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 3 * rank + 1).astype(dtype)


def module(where):
    return synk.xp() if where == "device" else np


WHERE = pytest.mark.parametrize("where", ["device", "host"])


@WHERE
@pytest.mark.parametrize("op", OPS)
def test_reductions(n, op, where):
    def run():
        xp, results = module(where), []
        for shape in ((), (5,), (0, 2), (3, 4), (70_001,)):
            x = xp.asarray(mine(synk.rank(), shape))
            given = x.copy()
            everywhere = synk.all_reduce(x, op)
            at_root = synk.reduce(x, op, root=synk.size() - 1)
            assert (x == given).all()
            assert isinstance(everywhere, xp.ndarray | xp.generic), type(everywhere)
            assert (at_root is None) == (synk.rank() < synk.size() - 1)
            assert at_root is None or (at_root == everywhere).all()
            results.append(everywhere)
        return tuple(results)

    for results in per_rank(run):
        for shape, got in zip(((), (5,), (0, 2), (3, 4), (70_001,)), results, strict=True):
            want = getattr(np, op)([mine(rank, shape) for rank in range(n)], axis=0)
            assert got.shape == want.shape
            assert np.allclose(got, want, rtol=1e-14)


@WHERE
def test_dtypes_of_results(n, where):
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


@WHERE
def test_moving(n, where):
    def run():
        xp, rank, size = module(where), synk.rank(), synk.size()
        rows = xp.asarray(mine(rank, (rank + 1, 2)))
        whole = synk.all_gather(rows)
        stacked = synk.all_gather(xp.full(3, rank), nd_up=1)
        gathered = synk.gather(rows, root=0)
        assert (gathered is None) == (rank > 0)
        root = synk.broadcast(xp.full((2, 2), rank + 1), root=size - 1)
        part = synk.scatter(xp.arange(10.0) if rank == 0 else None)
        share = synk.reduce_scatter(xp.arange(10.0), "sum")
        crossed = synk.all_to_all(xp.arange(size) + 10 * rank)
        synk.send(xp.full(4, rank), (rank + 1) % size) if size > 1 else None
        came = synk.recv((rank - 1) % size) if size > 1 else xp.full(4, 0)
        synk.barrier()
        for each in (whole, stacked, root, part, share, crossed, came):
            assert isinstance(each, xp.ndarray), type(each)
        return whole, stacked, root, part, share, crossed, came

    parts = np.array_split(np.arange(10.0), n)
    for rank, got in enumerate(per_rank(run)):
        whole, stacked, root, part, share, crossed, came = got
        assert np.array_equal(whole, np.concatenate([mine(r, (r + 1, 2)) for r in range(n)]))
        assert stacked.tolist() == [[r] * 3 for r in range(n)]
        assert root.tolist() == [[n, n], [n, n]]
        assert np.array_equal(part, parts[rank])
        assert np.array_equal(share, parts[rank] * n)
        assert crossed.tolist() == [10 * r + rank for r in range(n)]
        assert came.tolist() == [(rank - 1) % n] * 4


def test_containers_of_both(n):
    def run():
        xp, rank = synk.xp(), synk.rank()
        given = {
            "device": [xp.asarray(mine(rank, (3, 2))), xp.asarray(mine(rank, (2,), "f4"))],
            "host": (mine(rank, (4,)), np.float32(rank)),
            "number": rank,
            "none": [],
        }
        got = synk.all_reduce(given, "sum")
        assert isinstance(got["device"], list)
        assert isinstance(got["host"], tuple)
        assert all(isinstance(each, xp.ndarray) for each in got["device"])
        assert all(isinstance(each, np.ndarray | np.generic) for each in got["host"])
        assert got["none"] == []
        return (*got["device"], *got["host"], got["number"])

    want = [
        np.sum([mine(rank, shape, dtype) for rank in range(n)], axis=0)
        for shape, dtype in (((3, 2), "f8"), ((2,), "f4"), ((4,), "f8"))
    ]
    for got in per_rank(run):
        for one, other in zip(got, [*want, n * (n - 1) / 2, n * (n - 1) // 2], strict=True):
            assert np.array_equal(one, other)


def test_numbers(n):
    def run():
        total = synk.all_reduce(synk.rank() + 0.5, "sum")
        return total, synk.all_reduce(synk.rank(), "max"), synk.broadcast(synk.rank() + 10)

    want = (n * (n - 1) / 2 + n / 2, n - 1, 10)
    assert [tuple(each) for each in per_rank(run)] == [want] * n


@WHERE
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_a_weighted_mean_is_that_of_all_rows(n, rows, where):
    x = np.random.default_rng(rows).standard_normal((rows, 3))

    def run(x):
        x = x if where == "device" else x.get()
        mean = x.mean(axis=0)
        nested = synk.all_reduce({"mean": mean, "square": (x**2).mean(axis=0)}, weight=len(x))
        whole = synk.all_gather(synk.reduce_scatter(mean, weight=len(x)))
        return nested["mean"], nested["square"], whole

    for got in synk.function(run, outputs=None)(x):
        for one, want in zip(got, [x.mean(axis=0), (x**2).mean(axis=0), x.mean(axis=0)], strict=True):
            assert np.allclose(one, want, rtol=1e-12)


def test_variables_in_place(n):
    w, v = synk.shared(np.zeros(70_001)), synk.shared(np.zeros((2, 2), "f4"))

    def run():
        xp = synk.xp()
        w.value = xp.asarray(mine(synk.rank(), (70_001,)))
        v.value = xp.asarray(mine(synk.rank(), (2, 2), "f4"))
        held = w.value
        result = synk.all_reduce([w, v], "sum")
        assert result[0] is w
        assert result[1] is v
        synk.all_reduce(w, "mean")
        return held, w.value, v.value

    total = np.sum([mine(rank, (70_001,)) for rank in range(n)], axis=0)
    for held, one, other in per_rank(run):
        assert np.allclose(one, total)
        assert np.array_equal(held, one)
        assert np.array_equal(other, np.sum([mine(rank, (2, 2), "f4") for rank in range(n)], axis=0))
    assert np.allclose(w.get_value(), total)


def test_many_in_a_row_in_all_slices(n):
    def run(x):
        total = synk.xp().zeros(3)
        for turn in range(30):
            total += synk.all_reduce(synk.xp().full(3, float(synk.rank() + turn)), "sum")
            if turn % 4 == 0:
                total = synk.broadcast(total, root=turn % synk.size())
        return total

    f = synk.function(run, outputs=None)
    want = n * sum(range(30)) + 30 * sum(range(n))
    for got in f(np.ones(5 * n), num_slices=4):
        assert got.tolist() == [want] * 3


def test_what_a_collective_gives_is_complete_on_the_current_stream(n):
    """The function may go on computing at once, on a stream of its own as well."""

    def run():
        xp = synk.xp()
        results = []
        for turn in range(10):
            given = xp.full(50_000, float(turn))
            given *= 2  # still queued, perhaps, when the collective begins
            results.append(synk.all_reduce(given, "max") + 1)
            given *= 0
        own = xp.cuda.Stream(non_blocking=True)
        with own:
            given = xp.full(50_000, 5.0) * (synk.rank() + 1)
            results.append(synk.all_reduce(given, "sum") * 1)
        own.synchronize()
        return tuple(result[::9999] for result in results)

    for results in per_rank(run):
        for turn, got in enumerate(results[:-1]):
            assert (got == 2 * turn + 1).all()
        assert (results[-1] == 5 * n * (n + 1) / 2).all()


# ── training ─────────────────────────────────────────────────────────────────────────────────────

RNG = np.random.default_rng(0)
IMAGES = RNG.random((301, 16))
DIGITS = RNG.integers(0, 10, 301)
BATCHES = [RNG.permutation(301)[: 100 - turn] for turn in range(8)]


def loss_and_grad(x, t, w, b):
    """Softmax regression, for the arrays of any library."""
    xp = synk.xp()
    scores = x @ w + b
    scores = scores - scores.max(axis=1, keepdims=True)
    p = xp.exp(scores)
    p = p / p.sum(axis=1, keepdims=True)
    hot = xp.eye(10)[t]
    loss = -(hot * xp.log(p)).sum(axis=1).mean()
    slope = (p - hot) / len(t)
    return loss, [x.T @ slope, slope.sum(axis=0)]


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "adagrad"])
@pytest.mark.parametrize("slices", [1, 3])
def test_training_takes_the_serial_steps(n, rule, slices):
    def trained():
        w, b = synk.shared(np.zeros((16, 10))), synk.shared(np.zeros(10))
        step = extensions.make_train_function(
            lambda x, t: loss_and_grad(x, t, w.value, b.value),
            [w, b],
            getattr(extensions, rule)([w, b], 0.1),
        )
        x, t = synk.data(IMAGES), synk.data(DIGITS)
        losses = [step(x, t, batch=rows, num_slices=slices) for rows in BATCHES]
        for rank in range(here.session.n_parallel):
            assert np.array_equal(synk.get_value(rank, w), w.get_value())
        return losses, w.get_value(), b.get_value()

    before = here.session
    got = trained()
    with synk.Session(1, devices="cpu", verbose=False, timeout=60) as serial:
        here.session = serial
        want = trained()
        here.session = before
    for one, other in zip(got, want, strict=True):
        assert np.allclose(one, other, rtol=1e-9, atol=1e-12)


@WHERE
def test_worlds(n, where):
    """Some of the ranks, by links of their own; and all of them again."""

    def run():
        xp, rank = module(where), synk.rank()
        found = []
        for color in (rank % 2, rank // 2, 0, None if rank else 1):
            world = synk.split(color)
            for _ in range(2 if world else 0):
                x = xp.asarray(mine(rank))
                total, rows = world.all_reduce(x, "sum"), world.all_gather(x)
                own = world.exchange(x, world.size() - 1 - world.rank())
                assert isinstance(total, xp.ndarray)
                found.append((total, rows, own))
        return found, synk.all_reduce(xp.asarray(mine(rank)), "sum")

    for rank, (found, everyone) in enumerate(per_rank(run)):
        worlds = [range(rank % 2, n, 2), range(rank // 2 * 2, min(n, rank // 2 * 2 + 2)), range(n)]
        worlds += [range(1)] * (rank == 0)
        for (total, rows, own), world in zip(found, [w for w in worlds for _ in range(2)], strict=True):
            xs = [mine(other) for other in world]
            np.testing.assert_allclose(total, sum(xs))
            np.testing.assert_array_equal(rows, np.concatenate(xs))
            np.testing.assert_array_equal(own, xs[len(world) - 1 - world.index(rank)])
        np.testing.assert_allclose(everyone, sum(mine(other) for other in range(n)))
