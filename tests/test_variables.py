"""Variables on the workers: read, written, moved, updated and sliced; outputs that stay there."""

import gc
import os
import sys
import threading

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import synkro as synk
from conftest import children, descriptors, shared_files, wait_until
from serving import running, start
from synkro import (
    InvalidIndex,
    InvalidType,
    InvalidValue,
    OutputError,
    SessionClosed,
    UsageError,
    WorkerError,
    here,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

OPS = ["mean", "sum", "prod", "max", "min"]
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16"]
ORDERED = [dtype for dtype in DTYPES if dtype[0] != "c"]
SHAPES = [(), (1,), (5,), (0,), (2, 3), (3, 0, 2), (2, 1, 3, 2)]


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind():
    """Instead of the count after every test, for the sessions here serve many: one at the end."""
    before = children(), descriptors(), shared_files()
    yield
    gc.collect()
    assert wait_until(lambda: children() <= before[0])
    assert set(descriptors()) <= set(before[1])
    assert shared_files() <= before[2]


@pytest.fixture(scope="module", params=[1, 2, 3])
def forked(request):
    session = start(request.param)
    yield session
    session.close()


@pytest.fixture
def n(forked):
    """The number of workers that the module's functions go to; they serve the whole file."""
    here.session = forked
    yield forked.n_parallel
    here.session = None


@pytest.fixture(scope="module")
def two_forked():
    session = start(2)
    yield session
    session.close()


@pytest.fixture
def two(two_forked):
    """Two workers, for what does not depend on their number."""
    here.session = two_forked
    yield two_forked
    here.session = None


def moderate(examples):
    """Settings for tests of which every example costs several calls."""
    return settings(
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def values(seed, shape, dtype):
    """Small numbers, different for each seed, that all dtypes hold and none overflows with."""
    rng = np.random.default_rng([seed, *shape])
    if np.dtype(dtype).kind == "c":
        return np.asarray(rng.integers(1, 4, shape) + 1j * rng.integers(1, 4, shape)).astype(dtype)
    low = -3 if np.dtype(dtype).kind in "if" else 0
    return np.asarray(rng.integers(low, 4, shape)).astype(dtype)


def fill(variable, arrays):
    for rank, array in enumerate(arrays):
        synk.set_value(rank, variable, array)


def replicas(variable, ranks):
    return [synk.get_value(rank, variable) for rank in range(ranks)]


def check(got, want):
    """Same shape and dtype; integers to the bit, floats to rounding."""
    want = np.asarray(want)
    assert (np.shape(got), np.asarray(got).dtype) == (want.shape, want.dtype)
    if want.dtype.kind in "biu":
        assert np.array_equal(got, want)
    else:
        assert np.allclose(got, want, rtol=8 * np.finfo(want.dtype).eps, atol=0)


def serial(op, arrays):
    """What NumPy says of a list of one array a rank, in the dtype that is promised."""
    stacked = np.stack(arrays)
    dtype = stacked.dtype
    if op == "mean":
        result = stacked.mean(axis=0, dtype="f4" if dtype == "f2" else None)
        return result.astype("f8" if dtype.kind in "biu" else dtype)
    if op in ("max", "min"):
        return stacked.max(axis=0) if op == "max" else stacked.min(axis=0)
    if dtype.kind == "b":
        stacked = stacked.astype("i8")
    reduced = stacked.sum if op == "sum" else stacked.prod
    return reduced(axis=0, dtype=stacked.dtype)


def per_rank(fn):
    """Call *fn* once on every rank; the list of what the ranks returned."""
    return synk.function(fn, outputs=None)()


# ── making them ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_begins_with_its_value_on_every_rank(n, dtype):
    for shape in SHAPES:
        array = values(1, shape, dtype)
        w = synk.shared(array, "w")
        assert (w.dtype, w.ndim, w.shape, w.size) == (array.dtype, array.ndim, shape, array.size)
        for replica in (w.get_value(), w.value, *replicas(w, n)):
            check(replica, array)
        inside = synk.function(lambda w=w: w.value, outputs=None)()
        assert len(inside) == n
        for replica in inside:
            check(replica, array)


@pytest.mark.parametrize("value", [3, 2.5, True, 1j, [1, 2], [[1.5], [2.5]]])
def test_numbers_and_lists_are_values(n, value):
    check(synk.shared(value).value, value)


def test_other_byte_orders_become_native(n):
    w = synk.shared(np.arange(3, dtype=">f4"))
    assert w.dtype == np.dtype("f4")
    assert w.dtype.isnative
    check(w.value, np.arange(3, dtype="f4"))


def test_any_memory_order(n):
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    for view in (array, array[::-1], array[:, ::2], np.broadcast_to(np.float32(2), (3, 2))):
        w = synk.shared(view)
        for replica in replicas(w, n):
            check(replica, view)


def test_what_it_was_made_of_and_what_is_read_are_copies(n):
    array = np.zeros(3)
    w = synk.shared(array)
    array += 1
    w.get_value()[:] = 2
    w.value[:] = 2
    synk.get_value(0, w)[:] = 2
    for replica in replicas(w, n):
        assert not replica.any()


def test_names(two):
    assert synk.shared(1).name is None
    w = synk.shared(np.zeros((2, 2), "f4"), name="weights")
    assert w.name == "weights"
    assert repr(w) == "Shared('weights', dtype=float32, ndim=2)"
    assert per_rank(lambda: w.name == "weights") == [True, True]


def test_it_reads_like_an_array_in_the_main_process(n):
    array = np.array([[1.0, 2.0], [3.0, 4.0]])
    w = synk.shared(array)
    assert len(w) == 2
    assert np.array_equal(w[1], [3, 4])
    assert [row.tolist() for row in w] == array.tolist()
    assert np.array_equal(np.asarray(w), array)
    assert np.asarray(w, dtype="f4").dtype == np.float32
    assert np.array_equal(w + 1, array + 1)
    assert np.array_equal(2 / w, 2 / array)
    assert np.array_equal(np.sqrt(w), np.sqrt(array))
    assert np.sum(w) == 10
    assert float(synk.shared(2.5)) == 2.5
    assert int(synk.shared(3)) == 3
    assert bool(synk.shared(True)) is True
    assert bool(synk.shared(0)) is False


def test_writing_in_the_main_process_writes_all_replicas(n):
    w = synk.shared(np.zeros(3))
    w.value = [1.0, 2.0, 3.0]
    w[0] = 7
    w += 1
    for replica in replicas(w, n):
        check(replica, [8.0, 3.0, 4.0])
    w.set_value(np.ones(5))  # another length
    for replica in replicas(w, n):
        check(replica, np.ones(5))
    w.set_value(synk.data([2.0]))
    for replica in replicas(w, n):
        check(replica, [2.0])


@pytest.mark.parametrize("value", ["text", None, [object()], np.array(["2020"], "M8[Y]"), [[1], [2, 3]]])
def test_values_without_arithmetic_are_refused(two, value):
    with pytest.raises(InvalidType):
        synk.shared(value, "w")
    with pytest.raises(InvalidType, match=r"variable 'w'|no value|is no array"):
        synk.shared(np.zeros(1), "w").set_value([value] if value is None else value)


def test_names_must_be_strings(two):
    with pytest.raises(InvalidType, match="name of a variable must be a string; got 3"):
        synk.shared(1, name=3)


# ── one variable, however it travels ─────────────────────────────────────────────────────────────


def test_functions_distributed_in_different_calls_share_it(n):
    w = synk.shared(np.zeros(2), "w")

    def add():
        w[...] += synk.rank() + 1

    first = synk.function(add, outputs=[])
    synk.distribute()
    first()
    second = synk.function(lambda: w.value, outputs=None)
    synk.distribute()
    third = synk.function(lambda: w.value * 2, outputs=None)  # sent at its call
    first()
    for rank, (one, two) in enumerate(zip(second(), third(), strict=True)):
        assert one.tolist() == [2 * (rank + 1)] * 2
        assert two.tolist() == [4 * (rank + 1)] * 2
        check(synk.get_value(rank, w), one)


def test_it_is_found_wherever_a_function_carries_it(two):
    w = synk.shared(1.0)

    class Layer:
        def __init__(self):
            self.parameters = {"w": [w]}

        def step(self, by):
            self.parameters["w"][0].value += by

    synk.function(Layer().step, bcast_inputs=["by"], outputs=[])(2.0)
    default = synk.function(lambda v=w: v.value, outputs="sum")
    same = synk.function(lambda v=w: v is w and {"w": w}["w"] is v, outputs=None)
    assert default() == 6
    assert same() == [True, True]


def test_an_unused_variable_takes_part_in_everything(n):
    w = synk.shared(np.arange(2.0))
    synk.broadcast(w, [1.0, 3.0])
    synk.all_reduce(w, "sum")
    check(synk.gather(w), [[n * 1.0, n * 3.0]] * n)


def test_variables_come_and_go(two):
    f = synk.function(lambda x: x.sum(), outputs="sum")
    for turn in range(50):
        w = synk.shared(np.full(3, turn))
        assert w.value.tolist() == [turn] * 3
        del w
    assert f(np.ones(4)) == 4


# ── inside functions ─────────────────────────────────────────────────────────────────────────────


def test_every_way_of_writing(n):
    w = synk.shared(np.array([1.0, 2.0, 4.0]), "w")

    def run():
        seen = []
        w[...] -= 1
        seen.append(w.value.copy())
        w.value = w.value * 2
        seen.append(w.value.copy())
        v = w
        v += 1
        seen.append((v is w) * w.value)
        w[1:] = [10, 20]
        seen.append(w.get_value())
        w.set_value(np.zeros(3, "f4"))
        seen.append(w.get_value())
        np.add(w, [1, 2, 3], out=w)
        seen.append(w + synk.rank())
        w.value[0] = 50
        return np.stack(seen)

    for rank, seen in enumerate(per_rank(run)):
        assert seen.tolist() == [
            [0, 1, 3],
            [0, 2, 6],
            [1, 3, 7],
            [1, 10, 20],
            [0, 0, 0],
            [1 + rank, 2 + rank, 3 + rank],
        ]
        check(synk.get_value(rank, w), [50.0, 2.0, 3.0])


def test_assigning_leaves_arrays_that_were_read_before_as_they_were(n):
    w = synk.shared(np.zeros(3))

    def run():
        before = w.value
        w.value = before + 1
        between = w.value
        w.value = between[::-1] * 2  # of the same shape: new memory all the same
        return before, between, w.value

    for before, between, after in per_rank(run):
        assert (before.tolist(), between.tolist(), after.tolist()) == ([0] * 3, [1] * 3, [2] * 3)


def test_replicas_may_come_to_differ_in_their_shapes(n):
    w = synk.shared(np.zeros((1, 2)), "w")

    def grow():
        w.value = np.full((synk.rank() + 2, 2), synk.rank())

    synk.function(grow, outputs=[])()
    assert synk.get_lengths(w) == [rank + 2 for rank in range(n)]
    assert synk.get_shapes(w) == [(rank + 2, 2) for rank in range(n)]
    for rank, replica in enumerate(replicas(w, n)):
        check(replica, np.full((rank + 2, 2), float(rank)))


def test_what_does_not_fit_is_refused_inside(two):
    whole = synk.shared(np.array([1, 2]), "whole")

    def assign(value):
        whole.value = value

    f = synk.function(assign, bcast_inputs=["value"], outputs=[])
    with pytest.raises(WorkerError, match="variable 'whole' holds int64, got float64"):
        f(np.ones(2))
    with pytest.raises(WorkerError, match="variable 'whole' has 1 dimensions, got an array of 2"):
        f(np.ones((2, 2), int))
    assert whole.value.tolist() == [1, 2]
    f(np.array([3], "i2"))
    assert synk.get_value(1, whole).tolist() == [3]


def test_changes_stay_where_a_later_statement_fails(two):
    w = synk.shared(0.0)

    def run():
        w.value = 1.0
        raise KeyError("after")

    with pytest.raises(WorkerError, match="KeyError"):
        synk.function(run, outputs=[])()
    assert [float(replica) for replica in replicas(w, 2)] == [1, 1]


def test_assigning_under_slices_is_seen_by_the_next_slice(n):
    w = synk.shared(0.0)

    def count(x):
        w.value += len(x)
        return w.value

    f = synk.function(count, outputs="max")
    rows = 5 * n
    assert f(np.zeros(rows), num_slices=3) == 5
    assert [float(replica) for replica in replicas(w, n)] == [5] * n


def test_a_variable_as_an_argument_is_read_only_and_in_place(n):
    w = synk.shared(np.zeros(2))
    fill(w, [np.full(2, rank + 1.0) for rank in range(n)])
    f = synk.function(lambda w: w.sum(), bcast_inputs=["w"], outputs="sum")
    assert f(w) == n * (n + 1)

    def write(w):
        w[:] = 0

    with pytest.raises(WorkerError, match="read-only"):
        synk.function(write, bcast_inputs=["w"], outputs=[])(w)
    rows = synk.function(lambda w: w * 10, outputs="gather")
    check(rows(w), np.repeat(np.arange(1.0, n + 1), 2) * 10)


# ── collectives of the main process ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, dtype) for op in ["sum", "max"] for dtype in ORDERED),
        *((op, dtype) for op in [*OPS, "avg"] for dtype in ["?", "i2", "f4"]),
        *((op, "c16") for op in ["mean", "sum", "prod"]),
    ],
)
def test_reductions(n, op, dtype):
    name = "mean" if op == "avg" else op
    for shape in [(), (7,), (2, 3), (0, 2)]:
        arrays = [values(rank, shape, dtype) for rank in range(n)]
        want = serial(name, arrays)
        w = synk.shared(arrays[0], "w")
        fill(w, arrays)
        check(synk.reduce(w, op, in_place=False), want)
        for array, replica in zip(arrays, replicas(w, n), strict=True):
            check(replica, array)
        with np.errstate(all="ignore"):
            fits = np.array_equal(want.astype(dtype), want)
        if want.dtype != np.dtype(dtype) and not fits:
            for refused in (synk.reduce, synk.all_reduce):
                with pytest.raises(InvalidValue, match=rf'"{name}" of the variable \'w\' is not of its'):
                    refused(w, op)
            for array, replica in zip(arrays, replicas(w, n), strict=True):
                check(replica, array)
            continue
        assert synk.reduce(w, op) is None
        check(synk.get_value(0, w), want.astype(dtype))
        for array, replica in list(zip(arrays, replicas(w, n), strict=True))[1:]:
            check(replica, array)
        fill(w, arrays)
        assert synk.all_reduce(w, op) is None
        for replica in replicas(w, n):
            check(replica, want.astype(dtype))


def test_the_mean_is_the_default(n):
    arrays = [np.full(3, 10.0 * rank) for rank in range(n)]
    w = synk.shared(arrays[0])
    fill(w, arrays)
    check(synk.reduce(w, in_place=False), serial("mean", arrays))
    synk.all_reduce(w)
    check(w.value, serial("mean", arrays))


def test_large_variables(n):
    arrays = [np.random.default_rng(rank).standard_normal(300_001) for rank in range(n)]
    w = synk.shared(arrays[0])
    fill(w, arrays)
    check(synk.gather(w), np.stack(arrays))
    synk.all_reduce(w, "sum")
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array  # in the order of the ranks, so to the bit
    for replica in replicas(w, n):
        assert np.array_equal(replica, total)


MIXED = [((3, 2), "f4"), ((), "f8"), ((4,), "f4"), ((0,), "i8"), ((5,), "c16"), ((1, 1), "f8")]


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_several_variables_of_several_dtypes_at_once(n, op):
    arrays = [[values(rank, *what) for what in MIXED] for rank in range(n)]
    variables = [synk.shared(array) for array in arrays[0]]
    for rank, mine in enumerate(arrays):
        synk.set_value(rank, variables, mine)
        for got, want in zip(synk.get_value(rank, variables), mine, strict=True):
            check(got, want)
    wanted = [serial(op, list(each)) for each in zip(*arrays, strict=True)]
    for got, want in zip(synk.reduce(variables, op, in_place=False), wanted, strict=True):
        check(got, want)
    for got, each in zip(synk.gather(variables), zip(*arrays, strict=True), strict=True):
        check(got, np.stack(each))
    assert synk.get_shapes(variables) == [[shape] * n for shape, _ in MIXED]
    synk.all_reduce(variables, op)
    for variable, want in zip(variables, wanted, strict=True):
        for replica in replicas(variable, n):
            check(replica, want)
    rows = [v for v in variables if v.ndim]
    assert synk.get_lengths(rows) == [[shape[0]] * n for shape, _ in MIXED if shape]
    synk.broadcast(variables, [array * 0 + 1 for array in arrays[0]])
    for variable, (shape, dtype) in zip(variables, MIXED, strict=True):
        check(synk.get_value(n - 1, variable), np.ones(shape, dtype))


def test_broadcast_of_the_master_ranks_replica(n):
    for what in MIXED:
        arrays = [values(rank, *what) for rank in range(n)]
        w = synk.shared(arrays[0])
        fill(w, arrays)
        assert synk.broadcast(w) is None
        for replica in replicas(w, n):
            check(replica, arrays[0])
    shorter = synk.shared(np.zeros(1))
    fill(shorter, [np.arange(3.0 - rank) for rank in range(n)])
    synk.broadcast([shorter, w])
    assert synk.get_lengths(shorter) == [3] * n


def test_replicas_are_apart_after_a_broadcast(n):
    w = synk.shared(np.zeros(3))
    synk.broadcast(w)

    def add():
        w[...] += synk.rank()

    synk.function(add, outputs=[])()
    for rank, replica in enumerate(replicas(w, n)):
        check(replica, np.full(3, float(rank)))


@pytest.fixture
def second_is_master():
    with running(2, master_rank=1) as session:
        yield session


def test_another_master_rank(second_is_master):
    w = synk.shared(np.zeros(2))
    fill(w, [np.zeros(2), np.array([1.0, 2.0])])
    assert w.value.tolist() == [1, 2]
    synk.reduce(w, "sum")
    synk.set_value(0, w, [8.0, 8.0])
    assert synk.get_value(1, w).tolist() == [1, 2]
    synk.reduce(w, "max")
    assert synk.gather(w).tolist() == [[8, 8], [8, 8]]
    synk.set_value(0, w, [9.0, 9.0])
    synk.broadcast(w)
    assert synk.gather(w).tolist() == [[8, 8], [8, 8]]
    root = synk.function(lambda: synk.broadcast(np.array(synk.rank())), outputs=None)
    assert root() == [1, 1]


@pytest.mark.parametrize("dtype", ["?", "i2", "f2", "f8", "c16"])
@pytest.mark.parametrize("tail", [(), (2,), (0,)])
def test_gathers_of_different_lengths(n, dtype, tail):
    arrays = [values(rank, ((2 * rank + 3) % 4, *tail), dtype) for rank in range(n)]
    w = synk.shared(arrays[0], "w")
    fill(w, arrays)
    assert synk.get_lengths(w) == [len(array) for array in arrays]
    check(synk.gather(w, nd_up=0), np.concatenate(arrays))
    for array, replica in zip(arrays, replicas(w, n), strict=True):
        check(replica, array)
    assert synk.all_gather(w) is None
    for replica in replicas(w, n):
        check(replica, np.concatenate(arrays))


def test_gather_of_replicas_without_dimensions(n):
    w = synk.shared(0)
    fill(w, range(n))
    check(synk.gather(w), np.arange(n))


@pytest.mark.parametrize(
    "call",
    [synk.all_reduce, synk.reduce, synk.gather, lambda w: synk.reduce(w, in_place=False)],
    ids=["all_reduce", "reduce", "gather", "reduce, not in place"],
)
def test_shapes_that_must_agree_are_compared_by_name(two, call):
    w = synk.shared(np.zeros(2), "uneven")
    synk.set_value(1, w, np.zeros(3))
    with pytest.raises(InvalidValue, match=r"'uneven'.*\(2,\) on rank 0, \(3,\) on rank 1"):
        call(w)
    with pytest.raises(InvalidValue, match="'uneven'"):
        call([synk.shared(np.zeros(2), "even"), w])
    assert synk.get_lengths(w) == [2, 3]


@pytest.mark.parametrize("call", [synk.all_gather, lambda w: synk.gather(w, nd_up=0)])
def test_gathered_replicas_may_differ_in_rows_only(two, call):
    w = synk.shared(np.zeros((2, 2)), "uneven")
    synk.set_value(1, w, np.zeros((2, 3)))
    with pytest.raises(InvalidValue, match=r"'uneven'.*\(2, 2\) on rank 0, \(2, 3\) on rank 1"):
        call(w)


SELECTIONS = [
    None,
    5,
    0,
    slice(None, None, -2),
    slice(2, 100),
    slice(3, 3),
    [6, 0, 0, -1],
    np.array([2, 1]),
    [],
    [True, False, True, True, False, False, True],
]


def chosen(batch, rows):
    if batch is None:
        return np.arange(rows)
    if isinstance(batch, int):
        return np.arange(batch)
    index = batch if isinstance(batch, slice) else np.asarray(batch, None if len(batch) else int)
    return np.arange(rows)[index]


@pytest.mark.parametrize("batch", SELECTIONS, ids=str)
@pytest.mark.parametrize("as_data", [False, True])
def test_scatter_and_set_value_of_selected_rows(n, batch, as_data):
    array = np.arange(14, dtype="f4").reshape(7, 2)
    given = synk.data(array) if as_data else array
    w = synk.shared(np.zeros((1, 2), "f4"))
    want = array[chosen(batch, 7)]
    assert synk.scatter(w, given, batch) is None
    for replica, rows in zip(replicas(w, n), np.array_split(want, n), strict=True):
        check(replica, rows)
    check(synk.gather(w, nd_up=0), want)
    before = replicas(w, n)
    assert synk.set_value(n - 1, w, given, batch) is None
    check(synk.get_value(n - 1, w), want)
    for rank in range(n - 1):
        check(synk.get_value(rank, w), before[rank])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8])
def test_scatter_of_any_number_of_rows(n, rows):
    x, y = values(1, (rows, 3), "f8"), values(2, (rows + 1,), "i4")
    variables = [synk.shared(x), synk.shared(y)]
    synk.scatter(variables, [x, y])
    for variable, array in zip(variables, [x, y], strict=True):
        for replica, part in zip(replicas(variable, n), np.array_split(array, n), strict=True):
            check(replica, part)


def test_values_are_cast_where_nothing_is_lost(n):
    w = synk.shared(np.zeros(2))
    for put in (synk.broadcast, synk.scatter, lambda w, value: synk.set_value(0, w, value)):
        put(w, np.array([3, 4], "i4"))
        assert synk.get_value(0, w)[0] == 3
        with pytest.raises(InvalidType, match="holds float64, and a cast of complex128"):
            put(w, np.array([1j, 2]))
        with pytest.raises(InvalidValue, match="has 1 dimensions, got a value of 2"):
            put(w, np.zeros((2, 2)))
        assert synk.get_value(0, w)[0] == 3


def test_a_mean_of_integers_in_place_is_refused_unless_it_divides(two):
    w = synk.shared(np.array([2, 4]), "counts")
    synk.set_value(1, w, [4, 8])
    synk.all_reduce(w)
    check(synk.gather(w), [[3, 6], [3, 6]])
    synk.set_value(1, w, [4, 6])
    check(synk.reduce(w, in_place=False), [3.5, 6.0])
    for refused in (synk.all_reduce, synk.reduce):
        with pytest.raises(InvalidValue, match=r"'counts' is not of its dtype int64.*in_place=False"):
            refused(w)
        check(synk.gather(w), [[3, 6], [4, 6]])
    synk.set_value(1, w, [5, 6])
    synk.reduce(w)
    check(synk.gather(w), [[4, 6], [5, 6]])


@pytest.mark.parametrize("refused", [synk.all_reduce, synk.reduce])
def test_a_refused_mean_of_several_changes_none_of_them(two, refused):
    real, even, odd = synk.shared([1.0, 2.0]), synk.shared([2]), synk.shared([1], "odd")
    synk.set_value(1, [real, even, odd], [[3.0, 4.0], [4], [2]])
    with pytest.raises(InvalidValue, match="'odd'"):
        refused([real, even, odd])
    check(synk.gather(odd), [[1], [2]])
    check(synk.gather(even), [[2], [4]])
    check(synk.gather(real), [[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    "twice",
    [lambda each: synk.all_reduce(each, "sum"), lambda each: synk.reduce(each, "sum"), synk.all_gather],
    ids=["all_reduce", "reduce", "all_gather"],
)
def test_one_variable_twice_is_refused_or_means_it_once(two, twice):
    w = synk.shared([2.0])
    synk.set_value(1, w, [4.0])
    try:
        twice([w, w])
    except InvalidValue:
        assert replicas(w, 2) == [[2], [4]]
    else:
        once = synk.shared([2.0])
        synk.set_value(1, once, [4.0])
        twice([once, synk.shared([0.0])])
        for got, want in zip(replicas(w, 2), replicas(once, 2), strict=True):
            check(got, want)


def test_the_mean_of_bools_is_refused_in_place_unless_it_is_one(two):
    w = synk.shared([True, False])
    synk.all_reduce(w)
    check(w.value, [True, False])
    synk.set_value(1, w, [False, False])
    check(synk.reduce(w, in_place=False), [0.5, 0.0])
    with pytest.raises(InvalidValue, match="dtype bool"):
        synk.all_reduce(w)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


def test_only_variables_of_this_session(two):
    w = synk.shared(np.zeros(2), "w")
    with synk.Session(1, verbose=False, timeout=60) as other:
        stranger = other.variables.shared(np.zeros(2), "stranger")
        for refused in (
            lambda: synk.all_reduce(stranger),
            lambda: synk.get_value(0, [w, stranger]),
            lambda: synk.function(lambda: 0, updates=[stranger]),
            lambda: synk.function(lambda: 0, sliceable_shareds=[stranger]),
            lambda: synk.function(lambda x: x)(stranger),
        ):
            with pytest.raises(InvalidValue, match="'stranger' belongs to another session"):
                refused()
        with pytest.raises((WorkerError, UsageError), match="variable of another session"):
            synk.function(lambda: stranger.value)()
    assert w.value.tolist() == [0, 0]
    assert synk.function(lambda: w.value, outputs="sum")().tolist() == [0, 0]


@pytest.mark.parametrize("what", [np.zeros(2), 3, None, "w", [np.zeros(2)]])
def test_only_variables(two, what):
    for call in (synk.all_reduce, synk.broadcast, synk.gather, synk.get_shapes):
        with pytest.raises(InvalidType, match=r"takes worker variables, made by shared\(\); got"):
            call(what)
    with pytest.raises(InvalidType, match="updates= takes"):
        synk.function(lambda: 0, updates=[what])


def test_ranks_that_are_not_there(two):
    w = synk.shared(np.zeros(2))
    for rank in (-1, 2):
        with pytest.raises(InvalidValue, match=f"a rank must be from 0 to 1; got {rank}"):
            synk.get_value(rank, w)
        with pytest.raises(InvalidValue, match=f"a rank must be from 0 to 1; got {rank}"):
            synk.set_value(rank, w, [1.0, 1.0])
    for rank in ("0", True):
        with pytest.raises(InvalidType, match=f"a rank must be an int from 0 to 1; got {rank!r}"):
            synk.get_value(rank, w)
    assert not synk.gather(w).any()


def test_arguments_of_collectives_that_mean_nothing(two):
    w, v, point = synk.shared(np.zeros(2)), synk.shared(np.zeros(2)), synk.shared(0.0, "point")
    with pytest.raises(InvalidValue, match="at least one variable"):
        synk.all_reduce([])
    with pytest.raises(InvalidValue, match="op='median' is no reduce operation"):
        synk.all_reduce(w, "median")
    with pytest.raises(InvalidValue, match="op='gather' is no reduce operation"):
        synk.reduce(w, "gather")
    with pytest.raises(InvalidValue, match="nd_up must be 0"):
        synk.gather(w, nd_up=2)
    with pytest.raises(InvalidValue, match="2 variables were given, but 3 values"):
        synk.broadcast([w, v], [np.zeros(2)] * 3)
    with pytest.raises(InvalidValue, match="no value was given"):
        synk.scatter(w, None)
    for call in (
        lambda: synk.scatter(point, 0.0),
        lambda: synk.all_gather(point),
        lambda: synk.get_lengths(point),
        lambda: synk.gather(point, nd_up=0),
    ):
        with pytest.raises(InvalidValue, match="'point' has no dimensions, so it has no rows"):
            call()
    with pytest.raises(InvalidIndex, match="batch has the index 2, but there are 2 rows"):
        synk.scatter(w, [1.0, 2.0], [0, 2])
    with pytest.raises(InvalidIndex, match="batch=3 asks for the first 3 rows"):
        synk.set_value(0, w, [1.0, 2.0], 3)
    for keyword in ({"root": 0}, {"weight": 1}):
        with pytest.raises(InvalidType, match="is for use inside functions"):
            synk.reduce(w, **keyword)
    assert not synk.gather([w, v])[0].any()


def test_variables_are_made_outside_of_functions(two):
    with pytest.raises(WorkerError, match=r"shared\(\) was called inside a worker"):
        synk.function(lambda: synk.shared(1.0))()
    w = synk.shared(1.0, "w")
    with pytest.raises(WorkerError, match=r"get_value\(\) was called inside a worker"):
        synk.function(lambda: synk.get_value(0, w))()


# ── updates= ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_updates_are_merged_over_slices_and_applied_once(n, op, slices):
    x = np.random.default_rng(1).standard_normal((7 * n + 1, 2))
    w = synk.shared(np.array([1.0, 2.0]), "w")
    seen = synk.shared(0.0)

    def step(x):
        seen.value = max(float(seen.value), float(np.abs(w.value - [1, 2]).max()))
        new = {"mean": x.mean, "sum": x.sum, "prod": x.prod, "max": x.max, "min": x.min}[op](axis=0)
        return x.sum(), [new + 0 * w.value]

    f = synk.function(step, outputs="sum", updates=[(w, op)])
    assert f.update_modes == (op,)
    assert np.isclose(f(x, num_slices=slices), x.sum())
    assert not synk.gather(seen).any()  # every slice saw the old value
    for replica, rows in zip(replicas(w, n), np.array_split(x, n), strict=True):
        want = getattr(rows, op)(axis=0)
        assert np.allclose(replica, want, rtol=1e-12)


def test_an_update_without_slices_is_simply_the_new_value(n):
    total, last, name = synk.shared(0), synk.shared(np.zeros(1, "f4")), synk.shared([True])

    def step(x):
        return x.sum(), (total.value + len(x), x, [False])

    f = synk.function(step, outputs="sum", updates=[total, (last, "avg"), (name, "max")])
    x = np.arange(3.0 * n)
    assert f(x) == x.sum()
    assert f(x) == x.sum()
    assert synk.gather(total).tolist() == [6] * n
    check(synk.gather(last, nd_up=0), x.astype("f4"))
    assert not synk.gather(name).any()


def test_one_update_needs_no_list(two):
    w = synk.shared(1.0)
    f = synk.function(lambda x: (x.sum(), w.value * 2), outputs="sum", updates=[w])
    assert f(np.ones(4)) == 4
    assert f(np.ones(4)) == 4
    assert synk.gather(w).tolist() == [4, 4]


def test_updates_of_a_function_without_outputs(two):
    w = synk.shared(0.0)
    f = synk.function(lambda x: (None, [w.value + x.sum()]), outputs=[], updates=[(w, "sum")])
    assert f(np.arange(4.0)) is None
    assert synk.gather(w).tolist() == [1, 5]


def test_updates_with_an_output_subset(n):
    w = synk.shared(0.0)
    f = synk.function(
        lambda x: ((x.sum(), x.max(), x.min()), [w.value + 1]),
        outputs=("sum", "max", "min"),
        updates=[(w, "max")],
    )
    x = np.arange(4.0 * n)
    assert list(f(x, output_subset=[1])) == [4 * n - 1]
    assert list(f(x, output_subset=[2, 0], num_slices=2)) == [0, x.sum()]
    assert synk.gather(w).tolist() == [2] * n


def test_updates_serially(n):
    w = synk.shared(np.zeros(2))
    f = synk.function(lambda x: (x.sum(), [w + x.mean(axis=0)]), outputs="sum", updates=[w])
    x = np.arange(8.0 * n).reshape(-1, 2)
    assert f.as_serial(x) == x.sum()
    assert f.as_serial(x) == x.sum()
    for replica in replicas(w, n):
        check(replica, 2 * x.mean(axis=0))


def test_updates_and_all_reduce_make_a_training_step(n):
    rng = np.random.default_rng(0)
    x, truth = rng.standard_normal((17, 3)), np.array([1.0, -2.0, 0.5])
    y = x @ truth
    w = synk.shared(np.zeros(3), "w")

    def step(x, y):
        error = x @ w.value - y
        gradient = synk.all_reduce(2 * x.T @ error / len(x), weight=len(x))
        return (error**2).mean(), [w - 0.1 * gradient]

    f = synk.function(step, updates=[w])
    serially = np.zeros(3)
    for _ in range(20):
        loss = f(x, y)
        error = x @ serially - y
        assert np.isclose(loss, (error**2).mean(), rtol=1e-9)
        serially -= 0.1 * 2 * x.T @ error / len(x)
    for replica in replicas(w, n):
        assert np.allclose(replica, serially, rtol=1e-9)


def test_updates_of_ranks_without_rows_stay_as_they_are(n):
    w = synk.shared(0.0)
    f = synk.function(lambda x: (x.sum(), [x[0]]), outputs="sum", updates=[w])
    assert f(np.array([5.0])) == 5
    assert synk.gather(w).tolist() == [5] + [0] * (n - 1)


def test_a_failed_call_applies_no_update(two):
    w = synk.shared(1.0)

    def step(x):
        if x[0] == 2:  # rank 0, slice 2
            raise ValueError("enough")
        return x.sum(), [w.value + 1]

    f = synk.function(step, outputs="sum", updates=[w])
    with pytest.raises(WorkerError, match="enough"):
        f(np.arange(8.0), num_slices=4)
    assert synk.get_value(0, w) == 1


def test_an_update_that_is_refused_leaves_all_as_they_were(two):
    fine, other = synk.shared(1.0), synk.shared([1, 2], "other")
    f = synk.function(lambda: (0.0, [fine + 1, np.ones(2)]), updates=[fine, other])
    with pytest.raises((WorkerError, UsageError), match="'other' holds int64, got float64"):
        f()
    assert synk.gather(other).tolist() == [[1, 2], [1, 2]]
    assert synk.gather(fine).tolist() == [1, 1]


@pytest.mark.parametrize("slices", [1, 2])
def test_updates_of_integers(two, slices):
    """A mean over slices that is an integer is put in place, as that of a collective is."""
    count, flag = synk.shared(np.array([3, 4], "i4")), synk.shared(False)
    f = synk.function(lambda x: (x.sum(), [count + 1, True]), outputs="sum", updates=[count, flag])
    assert f(np.ones(8), num_slices=slices) == 8
    check(synk.gather(count), np.array([[4, 5], [4, 5]], "i4"))
    assert synk.gather(flag).tolist() == [True, True]


def test_writing_serially_writes_all_replicas(n):
    w = synk.shared(np.zeros(2))

    def run(x):
        w[...] += x.sum()
        w.value = w.value * 2
        return x.max()

    assert synk.function(run, outputs="max").as_serial(np.arange(3.0)) == 2
    for replica in replicas(w, n):
        check(replica, [6.0, 6.0])


def test_updates_that_cannot_be(two):
    w = synk.shared(np.zeros(2), "w")
    with pytest.raises(InvalidValue, match="updates= names a variable twice"):
        synk.function(lambda: 0, updates=[w, (w, "sum")])
    with pytest.raises(InvalidValue, match="op='gather' is no reduce operation"):
        synk.function(lambda: 0, updates=[(w, "gather")])
    with pytest.raises(InvalidType, match="updates= takes a list"):
        synk.function(lambda: 0, updates="w")
    for value, message in [
        (lambda: 3.0, "'step' has updates=, so it returns two things"),
        (lambda: (1.0, [1.0, 2.0]), "'step' returned 2 new values for the 1 variables in updates="),
    ]:
        with pytest.raises(OutputError, match=message):
            synk.function(value, updates=[w], name="step")()
    for value in (np.zeros((2, 2)), np.array([1j, 2])):
        with pytest.raises((WorkerError, UsageError), match="'w'"):
            synk.function(lambda value=value: (1.0, [value]), updates=[w])()
    assert not synk.gather(w).any()


# ── sliceable_shareds= and batch_s= ──────────────────────────────────────────────────────────────

MODES = {"mean": "mean", "sum": "sum", "max": "max", "min": "min", "rows": "gather"}


def describe(x):
    return {
        "mean": x.mean(axis=0),
        "sum": x.sum(axis=0),
        "max": x.max(axis=0),
        "min": x.min(axis=0),
        "rows": x * 1,
    }


def agree(got, x):
    want = describe(x)
    assert np.array_equal(got["rows"], want["rows"])
    assert np.array_equal(got["max"], want["max"])
    assert np.array_equal(got["min"], want["min"])
    for name in ("mean", "sum"):
        assert np.allclose(got[name], want[name], rtol=1e-12, atol=1e-12)


def rows_of(lengths):
    """One array of rows a rank, all rows different."""
    ends = np.cumsum(lengths)
    whole = np.random.default_rng(3).standard_normal((int(ends[-1]), 2))
    return np.split(whole, ends[:-1])


@st.composite
def shards(draw, ranks):
    """Lengths a rank, a ``batch_s=``, and the rows of each rank that it selects."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks).filter(any))
    one = st.sampled_from(["none", "int", "slice", "indices", "mask"])

    def a_selection(kind, rows):
        if kind == "none":
            return None
        if kind == "int":
            return draw(st.integers(0, rows))
        if kind == "slice":
            bound = st.none() | st.integers(-9, 9)
            return slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, -1, -3])))
        if kind == "mask":
            return np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
        return draw(st.lists(st.integers(-rows, rows - 1), max_size=9)) if rows else []

    if draw(st.booleans()):
        kind = draw(one)
        rows = min(lengths)
        if kind == "mask":
            lengths = [max(lengths)] * ranks
            rows = max(lengths)
        batch = a_selection(kind, rows)
        each = [batch] * ranks
    else:
        # numbers alone would be one selection for all
        kinds = [draw(one.filter(lambda kind: kind != "int")) for _ in range(ranks)]
        batch = each = [a_selection(kind, rows) for kind, rows in zip(kinds, lengths, strict=True)]
    picked = [chosen(b, rows) for b, rows in zip(each, lengths, strict=True)]
    return lengths, batch, picked


@pytest.fixture
def sliceable(n):
    """A variable, and a function of its rows."""
    s = synk.shared(np.zeros((1, 2)), "s")
    return s, synk.function(lambda: describe(s.value), outputs=MODES, sliceable_shareds=[s])


@moderate(60)
@given(data=st.data())
def test_rows_of_variables_in_any_lengths_selections_and_slices(n, sliceable, data):
    s, f = sliceable
    lengths, batch, picked = data.draw(shards(n))
    slices = data.draw(st.integers(1, 8))
    arrays = rows_of(lengths)
    fill(s, arrays)
    x = np.concatenate([array[rows] for array, rows in zip(arrays, picked, strict=True)])
    if not len(x):
        with pytest.raises(InvalidValue, match="no rows to compute on"):
            f(batch_s=batch, num_slices=slices)
        return
    agree(f(batch_s=batch, num_slices=slices), x)
    for array, replica in zip(arrays, replicas(s, n), strict=True):
        assert np.array_equal(replica, array)


@moderate(30)
@given(data=st.data())
def test_rows_of_variables_as_scattered_arguments(n, data):
    s = synk.shared(np.zeros((1, 2)))
    f = synk.function(describe, outputs=MODES)
    lengths, batch, picked = data.draw(shards(n).filter(lambda drawn: any(map(len, drawn[2]))))
    arrays = rows_of(lengths)
    fill(s, arrays)
    x = np.concatenate([array[rows] for array, rows in zip(arrays, picked, strict=True)])
    agree(f(s, batch_s=batch, num_slices=data.draw(st.integers(1, 8))), x)


def test_a_2d_array_is_one_selection_a_rank(n):
    s = synk.shared(np.zeros((1, 2)))
    arrays = rows_of([5] * n)
    fill(s, arrays)
    indices = np.array([[rank, 4, 0] for rank in range(n)])
    f = synk.function(lambda: describe(s.value), outputs=MODES, sliceable_shareds=[s])
    agree(f(batch_s=indices), np.concatenate([a[i] for a, i in zip(arrays, indices, strict=True)]))


def test_numbers_one_a_rank_beside_other_selections(two):
    s = synk.shared(np.zeros((1, 2)))
    arrays = rows_of([3, 4])
    fill(s, arrays)
    f = synk.function(lambda: describe(s.value), outputs=MODES, sliceable_shareds=[s])
    agree(f(batch_s=[2, slice(1, 3)]), np.concatenate([arrays[0][:2], arrays[1][1:3]]))
    agree(f(batch_s=[2, 0]), np.concatenate([array[[2, 0]] for array in arrays]))


@moderate(25)
@given(data=st.data())
def test_rows_of_variables_beside_scattered_inputs(n, data):
    rows = data.draw(st.integers(1, 12))
    slices = data.draw(st.integers(1, 5))
    x = np.random.default_rng(rows).standard_normal((rows, 2))
    s = synk.shared(np.zeros(1))
    order = np.random.default_rng(slices).permutation(rows)
    fill(s, np.array_split(order.astype(float), n))
    f = synk.function(
        lambda x: ((x * s.value[:, None]).mean(axis=0), s.value),
        outputs=("mean", "gather"),
        sliceable_shareds=[s],
    )
    mean, used = f(x, num_slices=slices)
    assert np.allclose(mean, (x * order[:, None]).mean(axis=0), rtol=1e-12)
    assert used.tolist() == order.tolist()


def test_selections_on_both_sides(n):
    s = synk.shared(np.zeros(1))
    fill(s, [np.arange(4.0) + 10 * rank for rank in range(n)])
    x = np.arange(9.0 * n)
    f = synk.function(lambda x: x + s.value, outputs="gather", sliceable_shareds=[s])
    got = f(x, batch=slice(None, 2 * n), batch_s=[3, 1])
    held = np.concatenate([[3 + 10 * rank, 1 + 10 * rank] for rank in range(n)])
    assert got.tolist() == (x[: 2 * n] + held).tolist()


def test_several_sliceable_variables_are_selected_alike(n):
    x, y = synk.shared(np.zeros((1, 2))), synk.shared(np.zeros(1))
    arrays = rows_of([3 + rank for rank in range(n)])
    fill(x, arrays)
    fill(y, [array[:, 0] for array in arrays])
    whole = synk.shared(np.arange(3.0))  # beside them, one that is used whole
    f = synk.function(
        lambda: ((x.value[:, 0] - y.value).sum(), whole.value.sum(), x.value.sum()),
        outputs=("sum", "max", "sum"),
        sliceable_shareds=[x, y],
    )
    difference, used, total = f(batch_s=[2, 0], num_slices=2)
    assert (difference, used) == (0, 3)
    assert np.isclose(total, sum(array[[2, 0]].sum() for array in arrays))


def test_the_whole_variable_is_back_after_the_call(two):
    s = synk.shared(np.arange(4.0))

    def fail():
        raise ValueError(str(len(s)))

    f = synk.function(fail, sliceable_shareds=[s])
    with pytest.raises(WorkerError, match="ValueError: 2"):
        f(batch_s=2)
    assert per_rank(lambda: len(s)) == [4, 4]
    assert synk.get_lengths(s) == [4, 4]


@pytest.mark.parametrize("batch_s", [None, slice(0, 4), slice(3, 0, -1)])
def test_slices_of_a_variable_are_written_through(two, batch_s):
    s = synk.shared(np.zeros(4))

    def add():
        s[...] += 1

    synk.function(add, outputs=[], sliceable_shareds=[s])(batch_s=batch_s, num_slices=2)
    want = np.zeros(4)
    want[slice(None) if batch_s is None else batch_s] += 1
    check(synk.gather(s), [want, want])


@pytest.mark.parametrize("batch_s", [None, 3, slice(None, None, 2), [0, 2, 1]], ids=str)
def test_an_all_reduce_of_selected_rows_is_one_of_these_rows(batch_s):
    with running(2, timeout=5):
        s = synk.shared(np.zeros(1))
        arrays = [np.arange(1.0, 6.0), np.arange(10.0, 60.0, 10.0)]
        fill(s, arrays)
        f = synk.function(
            lambda: synk.all_reduce(s, "sum").value * 1, outputs=None, sliceable_shareds=[s]
        )
        want = (arrays[0] + arrays[1])[chosen(batch_s, 5)]
        for rows in f(batch_s=batch_s):
            assert rows.tolist() == want.tolist()
        assert synk.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4


def test_selections_that_cannot_be(two):
    s, t, point = synk.shared(np.zeros(3), "s"), synk.shared(np.zeros(2), "t"), synk.shared(0.0, "p")
    plain = synk.function(lambda x: x.sum(), outputs="sum", name="plain")
    with pytest.raises(InvalidValue, match="'plain' has no sliceable_shareds"):
        plain(np.zeros(3), batch_s=2)
    f = synk.function(lambda: s.value.sum(), outputs="sum", sliceable_shareds=[s], name="f")
    with pytest.raises(InvalidValue, match="batch_s has 3 selections for 2 ranks"):
        f(batch_s=[[0], [1], [2]])
    with pytest.raises(InvalidIndex, match="batch_s has the index 3, but there are 3 rows"):
        f(batch_s=[0, 3])
    with pytest.raises(InvalidIndex, match="batch_s=4 asks for the first 4 rows"):
        f(batch_s=4)
    with pytest.raises(InvalidIndex, match="batch_s has the index -4"):
        f(batch_s=[[0], [-4]])
    with pytest.raises(InvalidValue, match="batch_s is a mask of 2 bools for 3 rows"):
        f(batch_s=[True, False])
    with pytest.raises(InvalidValue, match="no rows to compute on"):
        f(batch_s=[[], []])
    with pytest.raises(InvalidType, match="batch_s"):
        f(batch_s=1.5)
    both = synk.function(lambda x: x.sum(), outputs="sum", sliceable_shareds=[s], name="both")
    with pytest.raises(InvalidValue, match=r"'both' do not fit.*have 3, 2.*'s' has 3, 3"):
        both(np.zeros(5))
    with pytest.raises(InvalidValue, match=r"have 3, 2.*has 2, 2, after batch_s="):
        both(np.zeros(5), batch_s=2)
    uneven = synk.function(lambda: 0.0, sliceable_shareds=[s, t])
    with pytest.raises(
        InvalidValue, match=r"differs in its rows by rank.*'s' has \[3, 3\].*'t' has \[2"
    ):
        uneven()
    with pytest.raises(InvalidValue, match="names a variable twice"):
        synk.function(lambda: 0, sliceable_shareds=[s, s])
    with pytest.raises(InvalidValue, match="'p' has no dimensions, so it has no rows"):
        synk.function(lambda: 0, sliceable_shareds=[point])
    with pytest.raises(InvalidType, match="sliceable_shareds= takes a list"):
        synk.function(lambda: 0, sliceable_shareds="s")
    assert f() == 0


# ── outputs="keep" ───────────────────────────────────────────────────────────────────────────────


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


def test_kept_rows_are_in_the_order_of_the_selection(n):
    x = np.arange(20.0).reshape(10, 2)
    keep = synk.function(lambda x: x * 1, outputs="keep")
    order = np.random.default_rng(0).permutation(10)[:7]
    assert np.array_equal(np.asarray(keep(x, batch=order, num_slices=2)), x[order])
    assert np.array_equal(np.asarray(keep(x, batch=slice(None, None, -3))), x[::-3])


def test_kept_views_of_inputs_do_not_follow_them(n):
    x = synk.data(np.arange(4.0 * n))
    kept = synk.function(lambda x: x, outputs="keep")(x)
    x[:] = -1
    assert np.asarray(kept).tolist() == np.arange(4.0 * n).tolist()


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


def test_calls_of_one_function_keep_apart(n):
    f = synk.function(lambda x: x + 0, outputs="keep")
    handles = [f(np.full(2 * n, float(turn))) for turn in range(5)]
    for turn, handle in enumerate(handles):
        assert np.asarray(handle).tolist() == [turn] * 2 * n


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
    wrong = []

    def work(number):
        for turn in range(10):
            handle = f(np.full(4, number * 100.0 + turn))
            if g(handle) != 4 * (number * 100 + turn):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


@pytest.fixture
def own():
    """Two workers of a test's own, of which it looks at the memory."""
    with running(2) as session:
        yield session


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


def test_handles_and_variables_of_a_closed_session():
    with running(1):
        w = synk.shared(1.0, "w")
        kept = synk.function(lambda x: x * 1, outputs="keep")(np.ones(3))
    for read in (lambda: w.value, lambda: np.asarray(kept), lambda: w.set_value(2.0)):
        with pytest.raises(SessionClosed):
            read()
    with running(1), pytest.raises(InvalidValue, match="'w' belongs to another session"):
        synk.get_value(0, w)


def test_many_variables_that_go_at_once_are_told_in_parts(monkeypatch):
    monkeypatch.setattr("synkro.controller.engine.directory._AT_A_TIME", 3)
    with running(2):
        keep = synk.shared(1.0)
        many = [synk.shared(np.zeros(3)) for _ in range(20)]
        del many
        left = synk.function(lambda: float(len(here.rank.variables)), inputs=[], outputs="max")
        counts = [left() for _ in range(8)]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1
        assert keep.get_value() == 1


def test_rows_picked_by_index_are_written_back(two):
    w = synk.shared(np.zeros(0), "w")
    synk.scatter(w, np.arange(6.0))

    def assign():
        w.value = w.value + 10

    def in_place():
        w[...] += 10

    def lost():
        w.value[...] += 10

    for function in (assign, in_place):
        synk.scatter(w, np.arange(6.0))
        synk.function(function, inputs=[], outputs=[], sliceable_shareds=[w])(batch_s=[2, 0])
        assert synk.gather(w, 0).tolist() == [10, 1, 12, 13, 4, 15]
    with pytest.raises(WorkerError, match="read-only"):
        synk.function(lost, inputs=[], outputs=[], sliceable_shareds=[w])(batch_s=[2, 0])

    def shorter():
        w.value = np.ones(1)

    with pytest.raises(WorkerError, match="assign as many rows"):
        synk.function(shorter, inputs=[], outputs=[], sliceable_shareds=[w])(batch_s=slice(0, 2))
