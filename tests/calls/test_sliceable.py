"""``sliceable_shareds=`` and ``batch_s=``: rows of variables, however they lie and are selected."""

import numpy as np
import pytest

import synkro as synk
from calls import test_exact as exact
from calls.test_exact import EVERYTHING, everything
from support.arrays import check, chosen, fill, replicas
from support.examples import examples, given, st
from support.sessions import per_rank, running
from synkro import InvalidIndex, InvalidType, InvalidValue, WorkerError

pytestmark = pytest.mark.counted_once


def agree(got, x):
    for op, leaf in exact.flat(got).items():
        exact.agree(leaf, x, op)


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
    return s, synk.function(lambda: everything(s.value), outputs=EVERYTHING, sliceable_shareds=[s])


@examples(60)
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


@examples(30)
@given(data=st.data())
def test_rows_of_variables_as_scattered_arguments(n, data):
    s = synk.shared(np.zeros((1, 2)))
    f = synk.function(everything, outputs=EVERYTHING)
    lengths, batch, picked = data.draw(shards(n).filter(lambda drawn: any(map(len, drawn[2]))))
    arrays = rows_of(lengths)
    fill(s, arrays)
    x = np.concatenate([array[rows] for array, rows in zip(arrays, picked, strict=True)])
    agree(f(s, batch_s=batch, num_slices=data.draw(st.integers(1, 8))), x)


def test_a_2d_array_is_one_selection_a_rank(n, sliceable):
    s, f = sliceable
    arrays = rows_of([5] * n)
    fill(s, arrays)
    indices = np.array([[rank, 4, 0] for rank in range(n)])
    agree(f(batch_s=indices), np.concatenate([a[i] for a, i in zip(arrays, indices, strict=True)]))


def test_numbers_one_a_rank_beside_other_selections(two):
    s = synk.shared(np.zeros((1, 2)))
    arrays = rows_of([3, 4])
    fill(s, arrays)
    f = synk.function(lambda: everything(s.value), outputs=EVERYTHING, sliceable_shareds=[s])
    agree(f(batch_s=[2, slice(1, 3)]), np.concatenate([arrays[0][:2], arrays[1][1:3]]))
    agree(f(batch_s=[2, 0]), np.concatenate([array[[2, 0]] for array in arrays]))


@examples(25)
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
    for batch_s, error, message in (
        ([[0], [1], [2]], InvalidValue, "batch_s has 3 selections for 2 ranks"),
        ([0, 3], InvalidIndex, "batch_s has the index 3, but there are 3 rows"),
        (4, InvalidIndex, "batch_s=4 asks for the first 4 rows"),
        ([[0], [-4]], InvalidIndex, "batch_s has the index -4"),
        ([True, False], InvalidValue, "batch_s is a mask of 2 bools for 3 rows"),
        ([[], []], InvalidValue, "no rows to compute on"),
        (1.5, InvalidType, "batch_s"),
    ):
        with pytest.raises(error, match=message):
            f(batch_s=batch_s)
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
    for sliced, message in (
        ([s, s], "names a variable twice"),
        ([point], "'p' has no dimensions, so it has no rows"),
    ):
        with pytest.raises(InvalidValue, match=message):
            synk.function(lambda: 0, sliceable_shareds=sliced)
    assert f() == 0


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
