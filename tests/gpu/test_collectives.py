"""Collectives inside functions on GPUs: arrays of the device and of the host, containers, variables."""

import numpy as np
import pytest

import synkro as synk
from comms.test_collectives import (  # noqa: F401
    module,
    test_a_weighted_mean_is_that_of_all_rows,
    test_everything,
    test_means_of_integers_and_sums_of_bools,
    test_nested_containers_in_one_go,
    test_python_numbers,
    test_reductions,
    test_variables_are_reduced_in_place,
)
from support.collectives import check_everything, everything
from support.gpus import EVERY, serves
from support.sessions import per_rank
from synkro import extensions, here

session = serves(EVERY, seed=1)


@pytest.fixture(params=["device", "host"])
def where(request):
    return request.param


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


def test_worlds(n, where):
    """Some of the ranks, by links of their own; and all of them again."""

    def run():
        xp, rank, found = module(where), synk.rank(), []
        for color in (rank % 2, rank // 2, 0, None if rank else 1):
            world = synk.split(color)
            found += [everything(world, rank, (5, 2), "sum", xp=xp) for _ in range(2 if world else 0)]
        return [*found, everything(synk, rank, (5, 2), "sum", xp=xp)]

    for rank, found in enumerate(per_rank(run)):
        worlds = [range(rank % 2, n, 2), range(rank // 2 * 2, min(n, rank // 2 * 2 + 2)), range(n)]
        worlds = [world for world in [*worlds, *[range(1)] * (rank == 0)] for _ in range(2)]
        for got, world in zip(found, [*worlds, range(n)], strict=True):
            check_everything(got, world, rank, (5, 2), "sum")
