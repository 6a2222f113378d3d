"""``outputs="keep"``: what stays on the workers, and what that does to their memory."""

import gc
import os
from functools import partial

import numpy as np
import pytest

import synkro as synk
from support.arrays import DTYPES, check, chosen, replicas, values
from support.together import good, together
from synkro import InvalidValue, OutputError

pytestmark = pytest.mark.counted_once


@pytest.mark.parametrize("rows", [1, 2, 3, 10])
@pytest.mark.parametrize("slices", [1, 3])
def test_a_chain_stays_on_the_workers(n, rows, slices):
    x = np.random.default_rng(rows).standard_normal((rows, 3))
    double = synk.function(lambda x: 2 * x, outputs="keep")
    shift = synk.function(lambda x, by: x + by, bcast_inputs=["by"], outputs="keep")
    mean = synk.function(lambda x: x.mean(axis=0))
    kept = double(x, num_slices=slices)
    moved = shift(kept, 1.0, num_slices=slices)
    assert (kept.name, kept.dtype, kept.ndim) == (None, np.float64, 2)
    assert np.allclose(mean(moved, num_slices=slices), (2 * x + 1).mean(axis=0))
    assert np.array_equal(np.asarray(moved), 2 * x + 1)
    assert np.array_equal(kept.gather(), 2 * x)
    assert np.array_equal(kept[:1], 2 * x[:1])
    assert len(kept) == rows
    assert synk.get_lengths(kept) == [len(part) for part in np.array_split(x, n)]
    for rank, part in enumerate(np.array_split(x, n)):
        check(synk.get_value(rank, kept), 2 * part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_outputs_of_every_dtype(n, dtype):
    for shape in [(4,), (5, 2), (4, 0), (6, 2, 2)]:
        x = values(1, shape, dtype)
        handle = synk.function(lambda x: x[::-1], outputs="keep")(x)
        want = np.concatenate([part[::-1] for part in np.array_split(x, n)])
        assert handle.dtype == x.dtype
        check(np.asarray(handle), want)


def test_kept_views_of_inputs_do_not_follow_them(n):
    x = synk.data(np.arange(4.0 * n))
    kept = synk.function(lambda x: x, outputs="keep")(x)
    x[:] = -1
    assert np.asarray(kept).tolist() == np.arange(4.0 * n).tolist()


def test_a_function_may_keep_one_array_that_it_fills_anew_for_each_slice(n):
    filled = np.zeros((2, 3))

    def fill(x):
        filled[: len(x)] = x
        return filled[: len(x)]

    x = np.arange(12.0 * n).reshape(-1, 3)
    kept = synk.function(fill, outputs="keep")(x, num_slices=2)
    assert np.array_equal(np.asarray(kept), x)


def test_kept_values_of_variables_do_not_follow_them(n):
    w = synk.shared(np.zeros(3))
    mine = np.ones(2)
    f = synk.function(lambda: (w.value, mine), outputs="keep")
    first, second = f()

    def write():
        w[...] += 5

    synk.function(write, outputs=[])()
    assert not np.asarray(first).any()
    own = synk.function(lambda x: x.sum(), outputs="sum")
    assert own(second) == 2 * n


def test_writing_to_a_kept_output_leaves_what_it_came_from(two):
    state = {"held": np.zeros(2)}

    def run():
        return state["held"]

    f = synk.function(run, outputs="keep")
    kept = f()

    def write():
        kept[...] += 1

    synk.function(write, outputs=[])()
    assert np.asarray(kept).tolist() == [1] * 4
    assert np.asarray(f()).tolist() == [0] * 4


@pytest.mark.parametrize("slices", [1, 2])
def test_kept_rows_beside_data_and_with_selections(n, slices):
    x, y = np.arange(5.0 * n), np.arange(100.0, 100 + 5 * n)
    kept = synk.function(lambda x: x * 2, outputs="keep")(x)
    add = synk.function(lambda a, b: a + b, outputs="gather")
    assert add(kept, synk.data(y), num_slices=slices).tolist() == (2 * x + y).tolist()
    assert add(y, b=kept, num_slices=slices).tolist() == (2 * x + y).tolist()
    assert add(kept, kept, num_slices=slices).tolist() == (4 * x).tolist()
    parts = np.array_split(2 * x, n)
    one = synk.function(lambda a: a * 1, outputs="gather")
    for batch_s in (3, slice(None, None, -2), [4, 0, 0], [[rank] for rank in range(n)]):
        each = [chosen(b, 5) for b in (batch_s if np.ndim(batch_s) == 2 else [batch_s] * n)]
        want = np.concatenate([part[rows] for part, rows in zip(parts, each, strict=True)])
        assert one(kept, batch_s=batch_s, num_slices=slices).tolist() == want.tolist()


def test_kept_rows_that_do_not_fit_the_others(two):
    kept = synk.function(lambda x: x[1:], outputs="keep")(np.arange(6.0))
    add = synk.function(lambda a, b: a + b, outputs="gather", name="add")
    with pytest.raises(InvalidValue, match=r"'add' do not fit.*have 3, 2.*argument 'a' has 2, 2"):
        add(kept, np.arange(5.0))
    other = synk.function(lambda x: x * 1, outputs="keep")(np.arange(5.0))
    with pytest.raises(InvalidValue, match=r"'a' has \[2, 2\]; the argument 'b' has \[3, 2\]"):
        add(kept, other)
    with pytest.raises(InvalidValue, match="batch= selects rows of scattered inputs"):
        add(kept, kept, batch=2)


def test_kept_rows_as_a_broadcast_input_are_each_ranks_own(n):
    x = np.arange(4.0 * n)
    kept = synk.function(lambda x: x * 1, outputs="keep")(x)
    f = synk.function(
        lambda y, whole: np.full(len(y), whole.sum()), bcast_inputs=["whole"], outputs="gather"
    )
    got = f(np.zeros(2 * n), kept, num_slices=2)
    assert got.tolist() == np.repeat([part.sum() for part in np.array_split(x, n)], 2).tolist()


def test_some_outputs_kept_some_reduced(n):
    x = np.random.default_rng(0).standard_normal((4 * n + 1, 3))
    f = synk.function(
        lambda x: {
            "stay": [x * 2, x[:, 0]],
            "sum": x.sum(axis=0),
            "big": np.outer(x[:, 0], range(9000)),
        },
        outputs={"stay": "keep", "sum": "sum", "big": "gather"},
    )
    for slices in (1, 3):
        got = f(x, num_slices=slices)
        assert np.allclose(got["sum"], x.sum(axis=0))
        assert np.array_equal(got["big"], np.outer(x[:, 0], range(9000)))
        assert np.array_equal(np.asarray(got["stay"][0]), x * 2)
        assert np.array_equal(np.asarray(got["stay"][1]), x[:, 0])
    only = f(x, output_subset=["stay"])
    assert np.array_equal(np.asarray(only["stay"][1]), x[:, 0])


def test_keeping_what_has_no_rows_is_refused(two):
    with pytest.raises(OutputError, match='"keep" concatenates rows, got a scalar'):
        synk.function(lambda x: x.sum(), outputs="keep")(np.ones(3))
    with pytest.raises(OutputError, match=r'"keep" needs the same dtype'):
        synk.function(lambda x: np.ones((2, len(x))), outputs="keep")(np.ones(3))


def test_kept_outputs_in_collectives(n):
    x = np.arange(6.0 * n).reshape(2 * n, 3)
    keep = synk.function(lambda x: x * 1, outputs="keep")
    kept = keep(x)
    check(synk.gather(kept), x.reshape(n, 2, 3))
    check(synk.reduce(kept, "sum", in_place=False), x.reshape(n, 2, 3).sum(axis=0))
    synk.all_reduce(kept, "max")
    for replica in replicas(kept, n):
        check(replica, x[-2:])
    again = keep(x)
    synk.all_gather(again)
    for replica in replicas(again, n):
        check(replica, x)
    third = keep(x)
    synk.broadcast(third)
    check(np.asarray(third), np.concatenate([x[:2]] * n))
    synk.scatter(third, x[::-1])
    check(np.asarray(third), x[::-1])
    synk.set_value(0, third, np.zeros((0, 3)))
    assert synk.get_lengths(third) == [0] + [2] * (n - 1)
    fourth = keep(x)
    total = synk.function(lambda: synk.all_reduce(fourth, "sum").value * 1, outputs=None)
    for got in total():
        check(got, x.reshape(n, 2, 3).sum(axis=0))


def test_kept_outputs_are_closed_over_like_variables(n):
    kept = synk.function(lambda x: x * 2, outputs="keep")(np.arange(2.0 * n))
    lengths = synk.function(lambda: len(kept), outputs="sum")
    assert lengths() == 2 * n
    sliced = synk.function(lambda: kept.value.sum(), outputs="sum", sliceable_shareds=[kept])
    assert sliced(batch_s=1, num_slices=2) == sum(4 * rank for rank in range(n))


def test_kept_outputs_of_submitted_calls(two):
    f = synk.function(lambda x: x + 1, outputs="keep")
    futures = [f.submit(np.full(4, float(turn))) for turn in range(3)]
    assert [np.asarray(future.result()).tolist() for future in futures] == [[1] * 4, [2] * 4, [3] * 4]


def test_kept_outputs_of_calls_from_several_threads(two):
    f = synk.function(lambda x: x * 1, outputs="keep")
    g = synk.function(lambda x: x.sum(), outputs="sum")

    def work(number):
        return [g(f(np.full(4, number * 100.0 + turn))) for turn in range(10)]

    found = good(together(*(partial(work, number) for number in range(3)), seconds=100))
    assert found == [[4 * (number * 100 + turn) for turn in range(10)] for number in range(3)]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def resident_bytes(pid):
    """The private memory of a process."""
    with open(f"/proc/{pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["RssAnon"].split()[0]) * 1024


def arena_bytes(pid):
    """What the file that the workers share takes in all."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        if "synkro-arena" in os.readlink(path):
            return os.stat(path).st_blocks * 512
    raise AssertionError("a worker has no arena")


MEGABYTE = 1 << 20


@pytest.mark.one_host
@pytest.mark.parametrize(
    ("slices", "count", "megabytes"),
    [(1, 2, 80), (2, 16, 8)],
    ids=["private, more than malloc keeps", "joined, more blocks than an arena keeps"],
)
def test_dropped_handles_free_their_memory_at_the_next_command(own, slices, count, megabytes):
    def used():
        return arena_bytes(own.pids[0]) + sum(map(resident_bytes, own.pids))

    keep = synk.function(lambda x: x * 2, outputs="keep")
    nothing = synk.function(lambda: None, outputs=[])
    data = synk.data(np.ones((megabytes * MEGABYTE // 8, 1)))
    handles = [keep(data, num_slices=slices)]
    del handles[:]
    nothing()
    before = used()
    handles = [keep(data, num_slices=slices) for _ in range(count)]
    held = used()
    assert held - before > 0.8 * count * megabytes * MEGABYTE
    del handles
    gc.collect()
    nothing()
    assert used() - before < 0.3 * (held - before)


@pytest.mark.one_host
def test_dropped_variables_free_their_memory_at_the_next_command(own):
    nothing = synk.function(lambda: None, outputs=[])
    nothing()
    before = arena_bytes(own.pids[0])
    variables = [synk.shared(np.ones(MEGABYTE // 4)) for _ in range(16)]
    held = arena_bytes(own.pids[0])
    assert held - before >= 16 * 2 * 2 * MEGABYTE
    del variables
    gc.collect()
    nothing()
    assert arena_bytes(own.pids[0]) - before < 0.3 * (held - before)


def test_a_long_chain_needs_no_more_memory_than_its_links(own):
    step = synk.function(lambda x: x + 1, outputs="keep")
    handle = step(np.zeros(4 * MEGABYTE // 8))
    for _ in range(8):
        handle = step(handle, num_slices=2)
    before = arena_bytes(own.pids[0]) + sum(map(resident_bytes, own.pids))
    for _ in range(40):
        handle = step(handle, num_slices=2)
    after = arena_bytes(own.pids[0]) + sum(map(resident_bytes, own.pids))
    assert after - before < 16 * MEGABYTE
    assert float(np.asarray(handle)[-1]) == 49


def test_one_rank_and_a_task_would_have_a_part(n):
    kept = synk.function(lambda x: x * 2, outputs="keep")(np.arange(10.0))
    total = synk.function(lambda k: k.sum(), outputs="sum", target=0)
    if n == 1:
        assert total(kept) == 90
    else:
        with pytest.raises(InvalidValue, match=r"'k' of .* is a kept output, of which ranks 0"):
            total(kept)
        with pytest.raises(InvalidValue, match=r"common=\{'k': …\} is a kept output"):
            synk.map(lambda i, k: k.sum(), range(4), common={"k": kept})
    assert total(np.asarray(kept)) == 90
    assert synk.map(lambda i, k: k.sum(), range(4), common={"k": np.asarray(kept)}) == [90] * 4
