"""Variables on the workers: made, read and written, from both sides."""

import numpy as np
import pytest

import synkro as synk
from support.arrays import DTYPES, SHAPES, check, fill, replicas, values
from support.sessions import per_rank, running
from synkro import InvalidType, InvalidValue, SessionClosed, WorkerError, here

pytestmark = pytest.mark.counted_once


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


@pytest.mark.parametrize("value", ["text", None, [object()], np.array([None]), [[1], [2, 3]]])
def test_values_of_no_fixed_size_are_refused(two, value):
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
    with pytest.raises(WorkerError, match="variable 'whole' has 1 dimension, got an array of 2"):
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


def test_variables_are_made_outside_of_functions(two):
    with pytest.raises(WorkerError, match=r"shared\(\) was called inside a worker"):
        synk.function(lambda: synk.shared(1.0))()
    w = synk.shared(1.0, "w")
    with pytest.raises(WorkerError, match=r"get_value\(\) was called inside a worker"):
        synk.function(lambda: synk.get_value(0, w))()


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
