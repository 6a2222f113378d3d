"""For any rows, ranks, slices, selections and dtypes, GPU workers answer as serial NumPy does."""

import sys

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from calls import test_exact as cpu
from support.examples import examples, given, st
from support.gpus import MOST, serving
from support.sessions import INLINE

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module
cloudpickle.register_pickle_by_value(cpu)

OPS, FUNCTIONS, EVERYTHING = cpu.OPS, cpu.FUNCTIONS, cpu.EVERYTHING
DTYPES = [dtype for dtype in cpu.DTYPES if dtype != "g"]  # GPUs know no longer floats


@pytest.fixture(scope="module", params=MOST)
def session(request):
    with serving(request.param) as session:
        yield session


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


@st.composite
def cases(draw, ranks):
    """As on CPUs, with the dtypes of GPUs."""
    array, rows, options = draw(cpu.cases(ranks).filter(lambda case: case[0].dtype.char != "g"))
    return array, rows, options


def on_host(result):
    """Results are NumPy's, whatever the workers compute with."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        for each in result:
            on_host(each)
        return
    assert isinstance(result, np.ndarray | np.generic), type(result)


@examples(25)
@given(data=st.data())
def test_all_operations_in_one_call(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel))
    result = call(cpu.everything, EVERYTHING, session.data(array), **options)
    on_host(result)
    for op, leaf in cpu.flat(result).items():
        cpu.agree(leaf, rows, op)


@examples(25)
@given(data=st.data(), op=st.sampled_from(OPS))
def test_each_operation_alone(session, call, data, op):
    array, rows, options = data.draw(cases(session.n_parallel))
    result = call(FUNCTIONS[op], op, array, **options)
    on_host(result)
    cpu.agree(result, rows, op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_with_uneven_shards(session, call, dtype):
    for op in OPS:
        array = cpu.numbers(dtype, (3 * session.n_parallel + 1, 2), 7)
        cpu.agree(call(FUNCTIONS[op], op, array), array, op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_of_every_dtype(session, call, dtype):
    width = INLINE // np.dtype(dtype).itemsize + 1
    array = cpu.numbers(dtype, (session.n_parallel + 1, width), 5)
    for op in OPS:
        cpu.agree(call(FUNCTIONS[op], op, array), array, op)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of float16, as in NumPy
@examples(10)
@given(data=st.data())
def test_large_outputs_of_all_operations(session, call, data):
    array, rows, options = data.draw(
        cpu.wide_cases(session.n_parallel).filter(lambda case: case[0].dtype.char != "g")
    )
    result = call(cpu.everything, EVERYTHING, array, **options)
    on_host(result)
    for op, leaf in cpu.flat(result).items():
        cpu.agree(leaf, rows, op)


@examples(10)
@given(data=st.data())
def test_the_same_call_gives_the_same_bytes(session, call, data):
    array, _, options = data.draw(cases(session.n_parallel))
    one, other = (cpu.flat(call(cpu.everything, EVERYTHING, array, **options)) for _ in range(2))
    for op in OPS:
        assert cpu.bits(one[op]) == cpu.bits(other[op])


@pytest.mark.parametrize("surplus", [0, 7])
def test_the_same_large_call_gives_the_same_bytes(session, call, surplus):
    array = cpu.numbers("f4", (session.n_parallel + surplus, INLINE + 3), 3)
    for op in OPS:
        one, other = (call(FUNCTIONS[op], op, array) for _ in range(2))
        assert cpu.bits(one) == cpu.bits(other)


@examples(10)
@given(data=st.data())
def test_without_reduction_comes_every_piece_in_order(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel))
    pieces = call(cpu.same, None, array, **options)
    on_host(pieces)
    shards = [shard for shard in np.array_split(rows, session.n_parallel) if len(shard)]
    slices = min([options["num_slices"], *map(len, shards)])  # every rank runs equally many
    expected = [piece for shard in shards for piece in np.array_split(shard, slices)]
    assert len(pieces) == len(expected)
    assert all(np.array_equal(p, e) for p, e in zip(pieces, expected, strict=True))


@examples(10)
@given(data=st.data())
def test_what_is_kept_is_what_would_be_gathered(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel))
    kept = call(cpu.same, "keep", array, **options)
    assert np.array_equal(np.asarray(kept), rows)
    assert np.asarray(kept).dtype == rows.dtype
    cpu.agree(call(cpu.total, "sum", kept), rows, "sum")


@examples(10)
@given(data=st.data(), op=st.sampled_from(["max", "min"]), large=st.booleans())
def test_nan_is_carried_as_in_numpy(session, call, data, op, large):
    kind = data.draw(st.sampled_from(["f2", "f4", "f8", "c8", "c16"]))
    count = data.draw(cpu.row_counts(session.n_parallel))
    array = cpu.numbers(kind, (count, INLINE // 2 + 1 if large else 3), count)
    for row in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)):
        array[row, row % 3] = np.nan
    result = call(FUNCTIONS[op], op, array, num_slices=data.draw(st.integers(1, 3)))
    expected = FUNCTIONS[op](array)
    assert np.isnan(expected).any()
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    assert np.array_equal(result, expected, equal_nan=True)


def both(x, y):
    return x, y


@examples(10)
@given(data=st.data())
def test_several_inputs_share_the_selection(session, call, data):
    array, rows, options = data.draw(cases(session.n_parallel))
    number = np.arange(len(array))
    taken, which = call(both, "gather", array, number, **options)
    assert np.array_equal(taken, rows)
    assert np.array_equal(array[which], rows)


def above(x):
    return x[x[:, 0] > 1], {"count": (x[:, 0] > 1).sum()}


@examples(10)
@given(data=st.data(), width=st.sampled_from([1, 3, INLINE // 8 + 1]))
def test_ranks_may_gather_any_number_of_rows_also_none(session, call, data, width):
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    array = np.outer(kinds, np.linspace(1, 2, width))
    slices = data.draw(st.integers(1, 4))
    taken, counts = call(above, ("gather", "sum"), array, num_slices=slices)
    assert np.array_equal(taken, array[array[:, 0] > 1])
    assert counts == {"count": len(taken)}


@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_large_outputs_among_small_ones(session, call, slices, surplus):
    array = cpu.numbers("i4", (max(1, session.n_parallel + surplus), INLINE // 4 + 9), slices)
    modes = ("sum", "sum"), {"rows": "gather", "few": "gather", "peak": "max"}
    (one, column), rest = call(cpu.mixed, modes, array, num_slices=slices)
    assert one == array[:, 0].sum()
    assert np.array_equal(column, array.sum(axis=0))
    assert np.array_equal(rest["rows"], array)
    assert np.array_equal(rest["few"], array[:, :2])
    assert np.array_equal(rest["peak"], array.max(axis=0))


def listed(x):
    return x.mean(axis=0), x.sum(axis=0), x.prod(axis=0), x.max(axis=0), x.min(axis=0), x


@pytest.mark.parametrize("width", [3, INLINE])
def test_some_outputs_of_several(session, width):
    array = cpu.numbers("f8", (7, width), 0)
    f = session.function(listed, outputs=OPS)
    for chosen in ([0], [5], [2, 4], [0, 1, 5]):
        part = f(array, output_subset=chosen)
        assert len(part) == len(chosen)
        for result, index in zip(part, chosen, strict=True):
            cpu.agree(result, array, OPS[index])
    f = session.function(cpu.everything, outputs=EVERYTHING)
    part = f(array, output_subset=["mean", "rows"])
    assert list(part) == ["mean", "rows"]
    assert np.array_equal(part["rows"], array)


@pytest.mark.parametrize("mode", ["mean", "sum", "prod", "max", "min", None])
def test_scalars(session, mode):
    f = session.function(lambda x: x.sum(), outputs=mode)
    array = np.arange(1.0, 8)
    shards = [shard.sum() for shard in np.array_split(array, session.n_parallel)]
    result = f(array)
    if mode is None:
        assert result == shards
    elif mode == "mean":
        lengths = [len(shard) for shard in np.array_split(array, session.n_parallel)]
        assert result == pytest.approx(np.average(shards, weights=lengths))
    else:
        assert result == getattr(np, mode)(shards)


def test_results_are_the_users_to_change(session, call):
    for array in (cpu.numbers("f8", (5, 3), 0), cpu.numbers("f8", (5, INLINE // 8 + 1), 0)):
        for op in OPS:
            first = call(FUNCTIONS[op], op, array)
            first[...] = 99
            cpu.agree(call(FUNCTIONS[op], op, array), array, op)
            assert (first == 99).all()


def test_large_results_stay_as_they_are_when_others_come(session, call):
    arrays = [cpu.numbers("f8", (session.n_parallel, INLINE // 8 + 1 + i), i) for i in range(8)]
    for op in ("gather", "sum", "max"):
        results = [call(FUNCTIONS[op], op, array) for array in arrays]
        results += [call(FUNCTIONS[op], op, array) for array in arrays]
        for array, result in zip([*arrays, *arrays], results, strict=True):
            cpu.agree(result, array, op)


def test_long_doubles_are_refused_in_words(session, call):
    with pytest.raises(synk.SynkroError, match=r"longdouble|float128"):
        call(cpu.total, "sum", np.ones(5, "g"))
    assert call(cpu.total, "sum", np.ones(5)) == 5
