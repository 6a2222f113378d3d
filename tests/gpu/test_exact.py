"""For any rows, ranks, slices, selections and dtypes, GPU workers answer as serial NumPy does."""

from unittest import mock

import numpy as np
import pytest

import synkro as synk
from calls import test_exact as cpu
from calls.test_exact import (  # noqa: F401
    test_large_outputs_among_small_ones,
    test_results_are_the_users_to_change,
)
from support.examples import examples, given, st
from support.gpus import MOST, serving
from support.sessions import INLINE

OPS, FUNCTIONS, EVERYTHING = cpu.OPS, cpu.FUNCTIONS, cpu.EVERYTHING
DTYPES = [dtype for dtype in cpu.DTYPES if dtype != "g"]  # GPUs know no longer floats


@pytest.fixture(scope="module", params=MOST)
def session(request):
    with serving(request.param) as session, mock.patch.object(cpu, "DTYPES", DTYPES):
        yield session


@pytest.fixture(scope="module")
def call(session):
    """As on CPUs: ``call(fn, outputs, *args, **options)``."""
    made = {}

    def call(fn, outputs, *args, **options):
        key = fn, repr(outputs)
        if key not in made:
            made[key] = session.function(fn, outputs=outputs)
        result = made[key](*args, **options)
        if outputs != "keep":
            on_host(result)
        return result

    yield call
    made.clear()


def on_host(result):
    """Results are NumPy's, whatever the workers compute with."""
    if isinstance(result, dict | list | tuple):
        for each in result.values() if isinstance(result, dict) else result:
            on_host(each)
    else:
        assert isinstance(result, np.ndarray | np.generic), type(result)


# ── as on CPUs ───────────────────────────────────────────────────────────────────────────────────


def fewer(test, count, **drawn):
    """The same test of so many examples."""
    body = test.hypothesis.inner_test if hasattr(test, "hypothesis") else test
    return examples(count)(given(data=st.data(), **drawn)(body))


test_all_operations_in_one_call = fewer(cpu.test_all_operations_in_one_call_and_the_same_bytes_again, 25)
test_each_operation_alone = fewer(cpu.test_each_operation_alone, 25, op=st.sampled_from(OPS))
test_without_reduction_comes_every_piece_in_order = fewer(
    cpu.test_without_reduction_comes_every_piece_in_order, 10
)
test_several_inputs_share_the_selection = fewer(
    cpu.test_several_inputs_of_other_dtypes_share_the_selection, 10
)
test_ranks_may_gather_any_number_of_rows_also_none = fewer(
    cpu.test_ranks_may_gather_any_number_of_rows_also_none,
    10,
    width=st.sampled_from([1, 3, INLINE // 8 + 1]),
)
test_large_outputs_of_all_operations = pytest.mark.filterwarnings(  # of float16, as in NumPy
    "ignore:overflow:RuntimeWarning"
)(fewer(cpu.test_large_outputs_of_all_operations, 10))
test_a_large_output_alone_twice = fewer(cpu.test_a_large_output_alone_twice, 15, op=st.sampled_from(OPS))


# ── on GPUs ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_every_dtype_with_uneven_shards(session, call, dtype, large):
    rows = session.n_parallel * (1 if large else 3) + 1
    array = cpu.numbers(dtype, (rows, INLINE // np.dtype(dtype).itemsize + 1 if large else 2), 7)
    for op in OPS:
        cpu.agree(call(FUNCTIONS[op], op, array), array, op)


@examples(10)
@given(data=st.data())
def test_what_is_kept_is_what_would_be_gathered(session, call, data):
    array, rows, options = data.draw(cpu.cases(session.n_parallel))
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
