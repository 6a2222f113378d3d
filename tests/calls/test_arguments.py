"""Arguments that come again and again: what is kept of a call never shows in the next."""

import enum
import zlib

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.leftovers import descriptors
from support.sessions import lasting

NUMBERS = [
    *(0.1, -0.0, float("nan"), float("inf"), 1j),
    *(1, 0, -(2**63), 2**63, 10**100, True, False),
    *(np.float32(0.1), np.float64(0.1), np.float16(1), np.longdouble("0.1"), np.complex64(2j)),
    *(np.int8(3), np.uint64(2**63), np.bool_(True)),
]


def looked_at(value):
    """A number that tells apart all types and values."""
    return zlib.crc32(f"{type(value).__name__} {value!r}".encode())


session = lasting()

several_calls = examples(30)


@pytest.mark.quick
@several_calls
@given(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=12), st.booleans())
def test_broadcast_numbers_arrive_as_they_are(session, numbers, by_name):
    look = session.function(lambda x, k: looked_at(k), bcast_inputs="k", outputs=None)
    x = np.ones(2)
    for number in numbers:
        seen = look(x, k=number) if by_name else look(x, number)
        assert seen == [looked_at(number)] * 2


@pytest.mark.quick
def test_a_number_and_an_array_take_turns(session):
    f = session.function(lambda x, k: np.sum(x * k), bcast_inputs="k", outputs="sum")
    x = session.data(np.arange(4.0))
    for k in (2.0, np.array(3.0), 2.0, np.float32(0.5), [1.0], 2, np.ones(1), True, 2.0):
        assert f(x, k) == np.sum(np.arange(4.0) * k)


@pytest.mark.quick
def test_many_numbers_take_few_descriptors(session):
    f = session.function(lambda x, k: x * sum(k.values()), bcast_inputs="k", outputs="gather")
    f(np.ones(2), {"one": 1.0})
    before = len(descriptors())
    for factor in (1, 2):
        numbers = {f"k{index}": factor * index for index in range(600)}
        assert f(np.ones(2), numbers).tolist() == [factor * 599 * 300] * 2
    assert len(descriptors()) - before <= 3


ARRAYS = [
    *(np.arange(4, dtype=dtype) for dtype in ("f8", "f4", "i8", ">f8")),
    *(np.arange(4.0) + 1, np.arange(6.0), np.arange(8.0)[::2], [1.0, 2.0, 3.0]),
    *(np.arange(8.0).reshape(4, 2), np.asfortranarray(np.arange(8.0).reshape(4, 2))),
]


@pytest.mark.quick
@several_calls
@given(
    st.lists(
        st.tuples(
            st.sampled_from(range(len(ARRAYS))),
            st.sampled_from(["array", "data", "named"]),
            st.sampled_from([None, 2, slice(None, None, -1)]),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_arrays_and_data_of_any_shape_take_turns(session, calls):
    f = session.function(lambda x: x * 2, outputs="gather")
    kept = [session.data(array) for array in ARRAYS]
    for index, form, batch, slices in calls:
        array = np.asarray(ARRAYS[index])
        rows = array if batch is None else array[: batch if isinstance(batch, int) else None]
        rows = array[::-1] if isinstance(batch, slice) else rows
        options = {"batch": batch, "num_slices": slices}
        if form == "named":
            found = f(x=ARRAYS[index], **options)
        else:
            found = f(ARRAYS[index] if form == "array" else kept[index], **options)
        assert found.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, rows * 2)


RETURNED = [
    *(1.5, 3, 2 + 1j, np.float64(1.5), np.float32(1.5), np.float16(1.5)),
    *(np.int64(3), np.int8(100), np.bool_(True), np.array(2.5)),
    *(np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0]), np.array([1, 2]), np.array([1, 2], dtype=">i4")),
    *(np.array([True, False]), np.ones((2, 2), "f4"), (1.0, 2), {"a": 1.0}),
]


@pytest.mark.quick
@pytest.mark.parametrize("op", ["mean", "sum", "max", "gather", None])
@several_calls
@given(st.lists(st.sampled_from(range(len(RETURNED))), min_size=1, max_size=12))
def test_outputs_may_change_from_call_to_call(session, op, indices):
    def give(x, index):
        return RETURNED[index]

    again = session.function(give, bcast_inputs="index", outputs=op)
    x = session.data(np.ones(3))  # two rows and one: weights that differ
    for index in indices:
        fresh = session.function(give, bcast_inputs="index", outputs=op)
        if op == "gather" and not (isinstance(RETURNED[index], np.ndarray) and RETURNED[index].ndim):
            continue  # refused, as it has no rows
        found, wanted = again(x, index), fresh(x, index)
        assert repr(found) == repr(wanted)


# ── arguments with names alike, and many of them ─────────────────────────────────────────────────


class Rate(float):
    """A number of a class of one's own."""


class Mode(enum.IntEnum):
    SLOW = 1
    FAST = 2


def test_keys_that_look_alike_are_different_arguments(session):
    sums = session.function(
        lambda d: np.array([v.sum() for v in d.values()]), bcast_inputs="d", outputs="max"
    )
    alike = {float("nan"): np.ones(3), float("nan"): np.full(3, 2.0)}
    assert sums(alike).tolist() == [3, 6]
    both = session.function(
        lambda x, **others: np.array([x["p"].sum(), others["x['p']"].sum()]), outputs="sum"
    )
    assert both(x={"p": np.ones(4)}, **{"x['p']": np.full(4, 2.0)}).tolist() == [4, 8]


def test_new_keys_do_not_take_new_memory(session):
    f = session.function(lambda d, k: sum(v.sum() for v in d.values()) * k, "d", "sum", "k")
    x = np.ones(4)
    assert f({"file": x}, 2) == 8
    before = len(descriptors())
    for turn in range(20):
        assert f({f"file {turn}": x}, 2) == 8
    assert len(descriptors()) == before


@pytest.mark.parametrize("number", [*NUMBERS, Rate(0.5), Mode.FAST], ids=repr)
def test_numbers_also_of_ones_own_classes_and_submitted_arrive_as_they_are(session, number):
    look = session.function(lambda k: looked_at(k), bcast_inputs="k", outputs=None)
    assert look(number) == look.submit(number).result() == [looked_at(number)] * 2


def test_arguments_may_be_made_by_calls(session):
    class Lazy:
        """An array that another call, or a call of the same function, computes when it is asked for."""

        def __init__(self, by, *args):
            self.by, self.args = by, args

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.by(*self.args))

    double = session.function(lambda x: 2 * x, outputs="gather")
    total = session.function(lambda x: x.sum(), outputs="sum")
    assert total(Lazy(double, np.ones(4))) == 8
    with pytest.raises(synk.UsageError, match="in the middle of another one"):
        double(Lazy(double, np.ones(4)))
    assert total(Lazy(double, np.ones(4))) == 8
