"""For any rows, workers, slices, selections and dtypes, the answer is that of serial NumPy.

Integers, maxima, minima and gathered rows to the bit, floats to rounding; and the same bits each time.
"""

import numpy as np
import pytest

from support.arrays import DTYPES
from support.examples import examples, given, st
from support.sessions import INLINE, in_turn

pytestmark = pytest.mark.counted_once

session = in_turn(1, 3, rarely=[2, 4])


@pytest.fixture(scope="module")
def call(session):
    """``call(fn, outputs, *args, **options)``: with one ``Function`` for each *fn* and *outputs*."""
    made = {}

    def call(fn, outputs, *args, **options):
        key = fn, repr(outputs)
        if key not in made:
            made[key] = session.function(fn, outputs=outputs)
        return made[key](*args, **options)

    yield call
    made.clear()


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────


@st.composite
def row_counts(draw, ranks):
    """Few, about as many as ranks, or many."""
    edges = sorted({max(1, ranks - 1), ranks, ranks + 1, 3 * ranks + 1})
    return draw(st.sampled_from(edges) | st.integers(1, 40))


@st.composite
def selections(draw, rows):
    """A ``batch=`` of at least one row, and the index with which NumPy takes the same rows."""
    kind = draw(st.sampled_from(["all", "slice", "index", "mask", "first"]))
    if kind == "all":
        return None, slice(None)
    if kind == "first":
        number = draw(st.integers(1, rows))
        return number, slice(number)
    if kind == "slice":
        ends = st.none() | st.integers(-rows - 2, rows + 2)
        some = st.builds(slice, ends, ends, st.none() | st.integers(-5, 5).filter(bool))
        chosen = draw(some.filter(lambda s: len(range(rows)[s])))
        return chosen, chosen
    if kind == "index":
        index = draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=30))
        return draw(st.sampled_from([list, np.array]))(index), np.array(index)
    mask = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows).filter(any)))
    return mask, mask


def numbers(dtype, shape, seed):
    """Numbers of that dtype: any integers, so that they wrap, and floats about 1 in size."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.6
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    size = rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
    if dtype.kind == "c":
        return (size * np.exp(1j * rng.uniform(0, 6, shape))).astype(dtype)
    return size.astype(dtype)


@st.composite
def cases(draw, ranks, shapes=st.sampled_from([(), (1,), (3,), (2, 3)])):
    """Data, the rows of it that a call selects, and the options of that call."""
    rows = draw(row_counts(ranks))
    dtype = draw(st.sampled_from(DTYPES))
    array = numbers(dtype, (rows, *draw(shapes)), draw(st.integers(0, 999)))
    batch, index = draw(selections(rows))
    return array, array[index], {"batch": batch, "num_slices": draw(st.integers(1, 7))}


# ── what is computed ─────────────────────────────────────────────────────────────────────────────


def total(x):
    return x.sum(axis=0)


def same(x):
    return x


FUNCTIONS = {
    "mean": lambda x: x.mean(axis=0),
    "sum": total,
    "prod": lambda x: x.prod(axis=0),
    "max": lambda x: x.max(axis=0),
    "min": lambda x: x.min(axis=0),
    "gather": same,
}
OPS = tuple(FUNCTIONS)


def everything(x):
    """All of them in one nested result."""
    return {
        "mean": x.mean(axis=0),
        "others": (x.sum(axis=0), [x.prod(axis=0), x.max(axis=0)], x.min(axis=0)),
        "rows": x,
    }


EVERYTHING = {"mean": "mean", "others": ("sum", ["prod", "max"], "min"), "rows": "gather"}


def flat(result):
    """The leaves of what ``everything`` returns, by operation."""
    assert list(result) == ["mean", "others", "rows"]
    one, (two, three), four = result["others"]
    return dict(zip(OPS, (result["mean"], one, two, three, four, result["rows"]), strict=True))


def agree(result, rows, op):
    """*result* is what serial NumPy makes of *rows*: in dtype, in shape, and in value."""
    with np.errstate(all="ignore"):
        expected = np.asarray(FUNCTIONS[op](rows))
    result = np.asarray(result)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if op in ("max", "min", "gather") or (op != "mean" and expected.dtype.kind in "biu"):
        assert np.array_equal(result, expected)
        return
    # Rounding: one unit for each row, and each term at most as large as the sum of all sizes.
    wide = np.result_type(rows.dtype, np.float64)
    sizes = np.abs(rows.astype(wide)).sum(axis=0)
    if op == "mean":
        sizes = sizes / len(rows)
    elif op == "prod":
        sizes = np.abs(expected).astype(np.float64)
    bound = 4 * np.finfo(expected.dtype).eps * len(rows) * sizes
    difference = np.abs(result.astype(wide) - expected.astype(wide))
    assert (difference <= bound + np.finfo(expected.dtype).tiny).all(), (result, expected)


def bits(array):
    """The bytes of *array* that mean something: a longdouble may end in others."""
    array = np.ascontiguousarray(array)
    raw = array.view(np.uint8).reshape(-1, array.itemsize)
    long = array.dtype.kind == "f" and np.finfo(array.dtype).nmant == 63
    return raw[:, : 10 if long else None].tobytes()


# ── small outputs ────────────────────────────────────────────────────────────────────────────────


@examples(80)
@given(data=st.data())
def test_all_operations_in_one_call_and_the_same_bytes_again(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel))
    one = flat(call(everything, EVERYTHING, session.data(array), **options))
    other = flat(call(everything, EVERYTHING, array, **options))
    for op in OPS:
        agree(one[op], rows, op)
        assert bits(one[op]) == bits(other[op])


@examples(60)
@given(data=st.data(), op=st.sampled_from(OPS))
def test_each_operation_alone(session, call, data, op):
    array, rows, options = data.draw(cases(session.n_parallel))
    agree(call(FUNCTIONS[op], op, array, **options), rows, op)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_with_uneven_shards(session, call, op, dtype, large):
    rows = (1 if large else 3) * session.n_parallel + 1
    array = numbers(dtype, (rows, INLINE // np.dtype(dtype).itemsize + 1 if large else 2), 7)
    agree(call(FUNCTIONS[op], op, array), array, op)


@examples(40)
@given(data=st.data())
def test_without_reduction_comes_every_piece_in_order(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel))
    pieces = call(same, None, array, **options)
    shards = [shard for shard in np.array_split(rows, session.n_parallel) if len(shard)]
    slices = min([options["num_slices"], *map(len, shards)])  # every rank runs equally many
    expected = [piece for shard in shards for piece in np.array_split(shard, slices)]
    assert len(pieces) == len(expected)
    assert all(np.array_equal(p, e) for p, e in zip(pieces, expected, strict=True))


@examples(30)
@given(data=st.data(), op=st.sampled_from(["max", "min"]))
def test_nan_is_carried_as_in_numpy(session, call, data, op):
    kind = data.draw(st.sampled_from(["f2", "f4", "f8", "g", "c8", "c16"]))
    count = data.draw(row_counts(session.n_parallel))
    array = numbers(kind, (count, 3), count)
    for row in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)):
        array[row, row % 3] = np.nan
    result = call(FUNCTIONS[op], op, array, num_slices=data.draw(st.integers(1, 3)))
    expected = FUNCTIONS[op](array)
    assert np.isnan(expected).any()
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    assert np.array_equal(result, expected, equal_nan=True)


@examples(30)
@given(data=st.data())
def test_several_inputs_of_other_dtypes_share_the_selection(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel, st.just((2,))))
    number = np.arange(len(array))

    def both(x, y):
        return x, y

    taken, which = call(both, "gather", array, number, **options)
    assert np.array_equal(taken, rows)
    assert np.array_equal(array[which], rows)


@examples(20)
@given(data=st.data(), dtype=st.sampled_from([">f8", ">i4", ">c16", ">u2"]))
def test_foreign_byte_orders(session, call, data, dtype):
    count = data.draw(row_counts(session.n_parallel))
    array = numbers(np.dtype(dtype).newbyteorder("="), (count, 2), 3).astype(dtype)
    result = flat(call(everything, EVERYTHING, array))
    for op in OPS:
        agree(result[op], array.astype(array.dtype.newbyteorder("=")), op)


def above(x):
    return x[x[:, 0] > 1], {"count": (x[:, 0] > 1).sum()}


@examples(30)
@given(data=st.data(), width=st.sampled_from([1, 3, INLINE // 8 + 1]))
def test_ranks_may_gather_any_number_of_rows_also_none(session, call, data, width):
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    array = np.outer(kinds, np.linspace(1, 2, width))
    slices = data.draw(st.integers(1, 4))
    taken, counts = call(above, ("gather", "sum"), array, num_slices=slices)
    assert np.array_equal(taken, array[array[:, 0] > 1])
    assert counts == {"count": len(taken)}


# ── outputs larger than the inline limit ─────────────────────────────────────────────────────────


@st.composite
def wide_cases(draw, ranks):
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(st.sampled_from(sorted({1, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks + 1})))
    limit = INLINE // np.dtype(dtype).itemsize
    width = draw(st.sampled_from([limit - 1, limit, limit + 1, 3 * limit + 5]))
    array = numbers(dtype, (rows, width), draw(st.integers(0, 99)))
    batch, index = draw(selections(rows))
    return array, array[index], {"batch": batch, "num_slices": draw(st.integers(1, 3))}


@examples(15)
@given(data=st.data())
def test_large_outputs_of_all_operations(session, call, data):
    array, rows, options = data.draw(wide_cases(session.n_parallel))
    result = call(everything, EVERYTHING, array, **options)
    for op, leaf in flat(result).items():
        agree(leaf, rows, op)


@examples(15)
@given(data=st.data(), op=st.sampled_from(OPS))
def test_a_large_output_alone_twice(session, call, data, op):
    array, rows, options = data.draw(wide_cases(session.n_parallel))
    one, other = (call(FUNCTIONS[op], op, array, **options) for _ in range(2))
    agree(one, rows, op)
    assert bits(one) == bits(other)


def mixed(x):
    return (x[:, 0].sum(), x.sum(axis=0)), {"rows": x, "few": x[:, :2], "peak": x.max(axis=0)}


@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_large_outputs_among_small_ones(session, call, slices, surplus):
    array = numbers("i4", (max(1, session.n_parallel + surplus), INLINE // 4 + 9), slices)
    modes = ("sum", "sum"), {"rows": "gather", "few": "gather", "peak": "max"}
    (one, column), rest = call(mixed, modes, array, num_slices=slices)
    assert one == array[:, 0].sum()
    assert np.array_equal(column, array.sum(axis=0))
    assert np.array_equal(rest["rows"], array)
    assert np.array_equal(rest["few"], array[:, :2])
    assert np.array_equal(rest["peak"], array.max(axis=0))


@pytest.mark.parametrize("mode", ["gather", None])
@pytest.mark.parametrize("slices", [1, 3])
def test_some_pieces_large_and_some_small(session, call, mode, slices):
    """Two rows are over the limit and one is not: the first ranks have more rows than the last."""
    array = numbers("f8", (2 * session.n_parallel + 1, INLINE // 16 + 8), 1)
    result = call(same, mode, array, num_slices=slices)
    assert np.array_equal(result if mode else np.concatenate(result), array)


def many(x):
    return [x[:, column].copy() for column in range(12)]


@pytest.mark.parametrize("op", ["sum", "gather"])
def test_more_small_outputs_than_the_outbox_holds(session, call, op):
    array = numbers("i8", (session.n_parallel, 12, INLINE // 8), 2)
    results = call(many, op, array)
    for column, result in enumerate(results):
        rows = array[:, column]
        expected = rows.reshape(-1, INLINE // 8)
        assert np.array_equal(result, expected.sum(axis=0)[None] if op == "sum" else expected)


def test_large_results_stay_as_they_are_when_others_come(session, call):
    arrays = [numbers("f8", (session.n_parallel, INLINE // 8 + 1 + i), i) for i in range(8)]
    results = [call(same, "gather", array) for array in arrays]
    slices_of_them = [result[:, 1:3] for result in results]
    del results[::2]
    results += [call(same, "gather", array) for array in arrays]
    for array, result in zip([*arrays[1::2], *arrays], results, strict=True):
        assert np.array_equal(result, array)
    for array, part in zip(arrays, slices_of_them, strict=True):
        assert np.array_equal(part, array[:, 1:3])


def test_results_are_the_users_to_change(session, call):
    for array in (numbers("f8", (5, 3), 0), numbers("f8", (5, INLINE // 8 + 1), 0)):
        for op in OPS:
            first = call(FUNCTIONS[op], op, array)
            first[...] = 99
            agree(call(FUNCTIONS[op], op, array), array, op)
            assert (first == 99).all()
