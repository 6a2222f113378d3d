"""Integers of Python's merge exactly, to one of 64 bits or of any size: they never wrap."""

import math
import operator

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.sessions import per_rank
from synkro import InvalidValue, OutputError, WorkerError

pytestmark = pytest.mark.counted_once

EDGES = [side * 2**63 + step for side in (-1, 1) for step in (-1, 0, 1)]
SIZES = [0, 1, -1, 7, 2**31, 2**62, -(2**62), 2**64 - 1, 2**64, 10**40, *EDGES]
MERGED = {"sum": sum, "prod": math.prod, "max": max, "min": min}


@pytest.fixture(scope="module")
def merged(three_forked):
    """``merged(op, numbers, slices)`` of a function that returns each of *numbers* in its turn."""

    def pick(row, numbers):
        return [int(number) for number in numbers.split()][row[0]]

    functions = {op: three_forked.function(pick, outputs=op, bcast_inputs=["numbers"]) for op in MERGED}

    def call(op, numbers, slices):
        text = " ".join(map(str, numbers))
        return functions[op](np.arange(len(numbers)), numbers=text, num_slices=slices)

    yield call
    functions.clear()


@examples(60)
@given(
    op=st.sampled_from(list(MERGED)),
    numbers=st.lists(st.sampled_from(SIZES) | st.integers(-(2**66), 2**66), min_size=1, max_size=9),
)
def test_they_are_those_of_python(merged, op, numbers):
    found = merged(op, 3 * numbers, len(numbers))  # on each of the ranks, one a slice
    assert int(found) == MERGED[op](3 * numbers)
    assert isinstance(found, int) == (not -(2**63) <= int(found) < 2**64)


@pytest.mark.parametrize("op", MERGED)
@pytest.mark.parametrize("number", EDGES)
@pytest.mark.parametrize("other", [0, 1, -1])
@pytest.mark.parametrize("slices", [1, 2])
def test_at_the_edges_of_64_bits(merged, op, number, other, slices):
    numbers = (number, other) if slices == 1 else (number, other, other, other, other, other)
    assert int(merged(op, numbers, slices)) == MERGED[op](numbers)


@pytest.mark.parametrize("op", MERGED)
def test_what_fits_is_of_numpys_int64_as_ever(three, op):
    found = synk.function(lambda x: int(x.sum()), outputs=op)(np.arange(9))
    assert type(found) is np.int64
    assert found == MERGED[op]([3, 12, 21])


def test_beside_other_outputs(three):
    def f(x):
        return {"n": len(x), "big": 2**70, "sum": x.sum(), "each": [2**70]}

    outputs = {"n": "sum", "big": "max", "sum": "sum", "each": "gather"}
    found = synk.function(f, outputs=outputs)(np.arange(9.0))
    assert found == {"n": 9, "big": 2**70, "sum": 36, "each": [2**70] * 3}


def test_beside_integers_of_numpys(three):
    for kind in (np.int64, np.uint8, np.array):
        f = synk.function(lambda x: kind(7) if x[0] % 2 else 2**63, outputs="sum")
        assert int(f(np.arange(3))) == 2**64 + 7
        assert int(f(np.arange(6), num_slices=2)) == 3 * (2**63 + 7)


def test_beside_floats_they_are_refused_as_ever(three):
    f = synk.function(lambda x: 0.5 if x[0] else 1, outputs="sum")
    with pytest.raises(OutputError, match=r"dtype int64 on rank 0, but \(\) and float64 on rank 1"):
        f(np.arange(3))


def test_a_slice_with_a_float_is_refused_by_the_name_of_its_dtype(three):
    f = synk.function(lambda x: 0.5 if x[0] % 2 else 1, outputs="sum")
    with pytest.raises(OutputError, match="dtype int64 for one slice, float64 for another"):
        f(np.arange(6), num_slices=2)


def test_numpys_own_wrap_as_in_numpy(three):
    with np.errstate(over="ignore"):
        want = np.array([2**62] * 3).sum()
    assert synk.function(lambda: np.int64(2**62), outputs="sum")() == want


def test_a_mean_of_what_does_not_fit_is_refused_by_name(three):
    with pytest.raises(OutputError, match=r"71 bits does not fit .* a function op\(a, b\)"):
        synk.function(lambda: 2**70, outputs="mean")()
    assert synk.function(lambda: 2**70, outputs=operator.add)() == 3 * 2**70


def test_serial_and_parallel_agree(three):
    product = synk.function(lambda k: math.prod(k.tolist()), outputs="prod")
    k = np.arange(1, 26)
    assert product(k) == product(k, num_slices=3) == product.as_serial(k) == math.factorial(25)
    product.check(k)


def test_lists_of_integers_that_would_become_floats_are_refused(three):
    for refused in ([2**63 + 1, -1], ((2**63 + 1, 0), (0, -1)), [-(2**63), 2**63]):
        with pytest.raises(TypeError, match="would be rounded"):
            synk.data(refused)
    assert synk.data([2**63, 2**64 - 1])[:].tolist() == [2**63, 2**64 - 1]
    assert synk.data([2.0**63, -1])[:].tolist() == [2.0**63, -1]


# ── in collectives ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize(
    "numbers", [(a, b) for a in SIZES[:7] + EDGES[:-1] for b in (0, 1, -1, 2, 2**62)]
)
def test_collectives_are_exact_or_refuse(two, op, numbers):
    if not all(-(2**63) <= number < 2**63 for number in numbers):
        return
    want = MERGED[op](numbers)

    def run(numbers):
        number = numbers[synk.rank()]
        return synk.all_reduce({"n": number, "x": np.ones(2)}, op)["n"], synk.reduce(number, op, root=0)

    f = synk.function(lambda: run(numbers), outputs=None)
    if -(2**63) <= want < 2**63:
        (one, reduced), (other, none) = f()
        assert one == other == reduced == want
        assert none is None
        assert type(one) is np.int64
        return
    with pytest.raises(WorkerError, match=r"does not fit the 64 bits .* op\(a, b\)") as caught:
        f()
    assert isinstance(caught.value, InvalidValue)


def test_in_collectives_numpys_own_wrap(two):
    with np.errstate(over="ignore"):
        want = np.array([2**62] * 2).sum()
    assert per_rank(lambda: synk.all_reduce(np.int64(2**62), "sum")) == [want] * 2


@pytest.mark.parametrize("op", ["sum", "max", "prod"])
@pytest.mark.parametrize("edge", [2**63, 2**63 + 1, 2**64 - 1, 2**64, -(2**63) - 1])
def test_one_rank_beyond_the_integers_of_the_others_is_told_what_to_do(two, op, edge):
    f = synk.function(lambda: synk.all_reduce(edge if synk.rank() else 1, op), outputs=None)
    with pytest.raises(WorkerError, match=r"reduce float\(…\).*op\(a, b\).*operator.add"):
        f()


def test_integers_beside_floats_in_a_list_are_not_rounded(three_forked):
    first = three_forked.function(lambda x, m: int(m[0]), bcast_inputs=["m"], outputs="max")
    for numbers in ([2**53 + 1, 0.5], (2**53 + 1, 1.0), [2**63, -1], [2**53 + 1, 3], [2**53, 0.5]):
        assert first(np.arange(3), numbers) == numbers[0]
    total = three_forked.function(lambda x: x.sum(), outputs="sum")
    for rows in ([2**53 + 1, 0.5, 1.0], [[2**53 + 1, 0.5]] * 3):
        with pytest.raises(synk.InvalidType, match="would be rounded"):
            total(rows)
    assert total([2**53, 0.5, 0.0]) == float(2**53)
