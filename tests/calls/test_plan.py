"""What a call will do, without any process: splits, selections, nestings, parameters, operations."""

import functools
from collections import namedtuple
from fractions import Fraction

import numpy as np
import pytest

from support.examples import given, st
from synkro.comms.ops import OPERATIONS
from synkro.errors import InvalidType, InvalidValue
from synkro.plan.batch import select
from synkro.plan.binding import RESERVED, Binder
from synkro.plan.call import Broadcast, CallPlan, Region
from synkro.plan.outputs import (
    assemble,
    check_modes,
    check_subset,
    flatten,
    leaf_modes,
    leaf_paths,
    take_subset,
    unflatten,
)
from synkro.plan.split import slices_of, split, weight_unit

pytestmark = pytest.mark.counted_once

Pair = namedtuple("Pair", "first second")


# ── split ────────────────────────────────────────────────────────────────────────────────────────

few = st.integers(1, 9)
rows = st.integers(0, 60)


@given(start=rows, count=rows, parts=few)
def test_split_is_that_of_array_split(start, count, parts):
    spans = split(start, start + count, parts)
    expected = np.array_split(np.arange(start, start + count), parts)
    assert [list(range(*span)) for span in spans] == [part.tolist() for part in expected]


@given(start=rows, count=rows, slices=few)
def test_slices_cover_the_span_and_none_is_empty(start, count, slices):
    pieces = slices_of((start, start + count), slices)
    assert len(pieces) == min(slices, count)
    assert all(stop > begin for begin, stop in pieces)
    assert [row for piece in pieces for row in range(*piece)] == list(range(start, start + count))


@given(count=st.integers(1, 200), ranks=few, slices=few)
def test_weights_in_units_are_whole_and_as_small_as_can_be(count, ranks, slices):
    spans = split(0, count, ranks)
    unit = weight_unit(spans, slices)
    lengths = [b - a for span in spans for a, b in slices_of(span, slices)]
    assert unit == np.gcd.reduce(lengths)
    plan = _plan(spans, range(count), slices, unit)
    assert plan.total_weight == sum(length // unit for length in lengths)
    assert plan.total_weight * unit == count


def _plan(spans, selection, slices=1, unit=1):
    world = tuple(range(len(spans)))
    return CallPlan(1, (), (), None, selection, spans, world, slices, unit, None)


def test_who_takes_part_where_some_have_no_rows_and_where_nothing_is_scattered():
    assert weight_unit(((0, 0), (0, 0)), 3) == 1
    assert _plan(split(0, 2, 4), range(2)).participants == (0, 1)
    plan = _plan(split(0, 3, 3), None)
    assert (plan.participants, plan.total_weight) == ((0, 1, 2), 3)


def test_regions_are_compared_by_identity():
    one, other = (Region(1, 0, (3,), "<f8") for _ in range(2))
    assert one != other
    assert Broadcast(one) == Broadcast(one)


# ── select ───────────────────────────────────────────────────────────────────────────────────────


def _chosen(selection):
    if isinstance(selection, np.ndarray):
        assert selection.dtype == np.int64
    return list(selection)


def _agrees(batch, index, count):
    """``select`` takes the rows that NumPy's indexing by *index* takes, or refuses if it takes none."""
    expected = np.arange(count)[index].tolist()
    if not expected:
        with pytest.raises(InvalidValue, match=f"got 0 of {count}"):
            select(batch, count)
        return
    selection = select(batch, count)
    assert _chosen(selection) == expected
    assert len(selection) == len(expected)


@given(count=rows)
def test_none_selects_all(count):
    _agrees(None, slice(None), count)


@given(count=rows, data=st.data(), kind=st.sampled_from([int, np.int64, np.uint8, np.asarray]))
def test_an_int_selects_the_first_so_many(count, data, kind):
    number = data.draw(st.integers(0, count))
    _agrees(kind(number), slice(number), count)


ends = st.none() | st.integers(-70, 70)


@given(count=rows, start=ends, stop=ends, step=st.none() | st.integers(-9, 9).filter(bool))
def test_slices_are_those_of_numpy(count, start, stop, step):
    _agrees(slice(start, stop, step), slice(start, stop, step), count)


@given(count=st.integers(1, 40), data=st.data(), kind=st.sampled_from([list, tuple, np.array]))
def test_index_lists_are_those_of_numpy(count, data, kind):
    index = data.draw(st.lists(st.integers(-count, count - 1), max_size=50))
    _agrees(kind(index), np.array(index, int), count)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8", ">i2"])
def test_index_arrays_of_any_integer_stay_as_they_are(dtype):
    index = np.array([2, 0, 2], dtype) - (np.dtype(dtype).kind == "i") * np.array([0, 0, 3], dtype)
    given_index = index.copy()
    assert _chosen(select(index, 3)) == [2, 0, 2]
    assert index.tolist() == given_index.tolist()


@given(count=st.integers(1, 40), data=st.data(), kind=st.sampled_from([list, np.array]))
def test_masks_are_those_of_numpy(count, data, kind):
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    _agrees(kind(mask), np.array(mask), count)


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────

keys = st.text("abc", min_size=1, max_size=2) | st.integers(0, 3)
nested = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def _same(one, other):
    """Equal, and of the same classes all the way down."""
    return one == other and repr(one) == repr(other)


@given(value=nested)
def test_unflatten_undoes_flatten(value):
    leaves, tree = flatten(value)
    assert _same(unflatten(tree, iter(leaves)), value)
    assert len(leaf_paths(tree)) == len(leaves)
    assert hash(tree) == hash(flatten(value)[1])


@given(value=nested)
def test_paths_lead_to_the_leaves(value):
    leaves, tree = flatten(value)
    assert [eval(f"value{path}", {"value": value}) for path in leaf_paths(tree)] == leaves


@given(value=nested, mode=st.sampled_from(["mean", "gather", None]))
def test_one_mode_serves_all_leaves(value, mode):
    leaves, tree = flatten(value)
    assert leaf_modes(mode, tree) == [mode] * len(leaves)


@given(value=nested)
def test_modes_nested_as_the_result(value):
    leaves, tree = flatten(value)
    modes = ["mean" if leaf % 2 else "sum" for leaf in leaves]
    spec = unflatten(tree, iter(modes))
    assert leaf_modes(check_modes(spec), tree) == modes
    assert _same(assemble(spec, tree, iter(leaves)), value)


@given(value=nested, pieces=st.integers(1, 4))
def test_without_reduction_comes_the_list_of_every_pieces_value(value, pieces):
    leaves, tree = flatten(value)
    columns = [[leaf + piece for piece in range(pieces)] for leaf in leaves]
    result = assemble(None, tree, iter(columns))
    if leaves:
        expected = [unflatten(tree, iter(leaf + p for leaf in leaves)) for p in range(pieces)]
        assert _same(result, expected)
    else:
        assert result == []


def test_a_list_of_modes_fits_a_tuple_and_a_named_tuple():
    _, tree = flatten(Pair(1, (2, 3)))
    assert leaf_modes(["max", ["min", "sum"]], tree) == ["max", "min", "sum"]
    assert assemble(["max", None], tree, iter([7, [1, 2], [3, 4]])) == Pair(7, [(1, 3), (2, 4)])


def test_avg_means_mean_everywhere():
    assert check_modes("avg") == "mean"
    given_modes = {"a": ["avg", None], "b": Pair("sum", "avg")}
    assert check_modes(given_modes) == {"a": ["mean", None], "b": Pair("sum", "mean")}


def test_a_subset_of_a_dict_is_in_its_own_order():
    found = take_subset(check_subset(["b", "a"]), {"a": 1, "b": 2}, "it")
    assert _same(found, {"b": 2, "a": 1})


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def _bind(fn, args=(), kwargs=None, inputs=None, bcast=None):
    """Names, values and whether broadcast, of the positional and of the keyword arguments."""
    bound = Binder(fn, inputs, bcast, "fn").bind(args, kwargs or {})
    found = [(each.name, each.value, "b" if each.broadcast else "s") for each in bound]
    return found[: len(args)], found[len(args) :]


def plain(x, y, z=3):
    return x, y, z


def keyword_only(x, *, y, z=3):
    return x, y, z


def positional_only(x, y, /):
    return x, y


def star(x, *rest):
    return x, rest


def open_ended(x, **more):
    return x, more


REST = [("rest[0]", 2, "b"), ("rest[1]", 3, "b")]
MORE = [("w", 2, "b"), ("v", 3, "s")]


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "inputs", "bcast", "expected"),
    [
        (plain, (1, 2), {}, None, None, ([("x", 1, "s"), ("y", 2, "s")], [])),
        (plain, (1, 2, 4), {}, None, "y", ([("x", 1, "s"), ("y", 2, "b"), ("z", 4, "s")], [])),
        (plain, (1,), {"y": 2}, None, ["y"], ([("x", 1, "s")], [("y", 2, "b")])),
        (plain, (), {"y": 2, "x": 1}, "x", "y", ([], [("y", 2, "b"), ("x", 1, "s")])),
        (keyword_only, (1,), {"y": 2}, None, "y", ([("x", 1, "s")], [("y", 2, "b")])),
        (positional_only, (1, 2), {}, ("x",), ("y",), ([("x", 1, "s"), ("y", 2, "b")], [])),
        (star, (1, 2, 3), {}, None, "rest", ([("x", 1, "s"), *REST], [])),
        (star, (1, 2), {}, ["x", "rest"], None, ([("x", 1, "s"), ("rest[0]", 2, "s")], [])),
        (star, (1,), {}, ["x"], None, ([("x", 1, "s")], [])),
        (open_ended, (1,), {"w": 2, "v": 3}, None, "w", ([("x", 1, "s")], MORE)),
        (max, (1, 2), {}, None, None, ([("args[0]", 1, "s"), ("args[1]", 2, "s")], [])),
        (max, (1, 2), {}, "a", "b", ([("a", 1, "s"), ("b", 2, "b")], [])),
        (functools.partial(plain, 0), (1,), {}, None, None, ([("y", 1, "s")], [])),
        (np.add, (1, 2), {}, None, "x2", ([("x1", 1, "s"), ("x2", 2, "b")], [])),
        (lambda: 0, (), {}, None, None, ([], [])),
    ],
)  # fmt: skip
def test_arguments_find_their_parameters(fn, args, kwargs, inputs, bcast, expected):
    assert _bind(fn, args, kwargs, inputs, bcast) == expected


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "message"),
    [
        (plain, (1,), {}, r"fn\(x, y, z=3\) was called wrongly: missing a required argument: 'y'"),
        (keyword_only, (1,), {}, r"'y'"),
        (keyword_only, (1, 2), {"y": 1}, r"too many positional"),
        (positional_only, (1,), {"y": 1}, r"'y'"),
        (star, (), {}, r"'x'"),
        (max, (1,), {"key": 1}, r"fn\(\*args\) got the unknown keyword key=: it knows batch, "),
    ],
)
def test_arguments_that_do_not_fit(fn, args, kwargs, message):
    with pytest.raises(InvalidType, match=message):
        Binder(fn, None, None, "fn").bind(args, kwargs)


@pytest.mark.parametrize("name", RESERVED)
def test_parameters_cannot_be_named_as_keywords_of_the_call(name):
    fn = eval(f"lambda x, {name}=None: x")
    with pytest.raises(InvalidValue, match=f"parameter '{name}', which is a keyword of the call"):
        Binder(fn, None, None, "fn")


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "name"),
    [(plain, (1, 2, 3), {}, "z"), (open_ended, (1,), {"w": 1}, "w"), (star, (1, 2), {}, r"rest\[0\]")],
)
def test_an_argument_that_is_in_neither_list(fn, args, kwargs, name):
    binder = Binder(fn, ["x", "y"] if fn is plain else ["x"], None, "fn")
    with pytest.raises(InvalidType, match=f"'{name}' .* neither in inputs"):
        binder.bind(args, kwargs)


# ── operations ───────────────────────────────────────────────────────────────────────────────────


def _reduced(op, values, weights):
    operation = OPERATIONS[op]
    partials = [operation.lift(v, w) for v, w in zip(values, weights, strict=True)]
    merged = functools.reduce(operation.merge, partials)
    finished = operation.finish(merged, sum(weights))
    return finished.astype(operation.result_dtype(values[0].dtype), copy=False)


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=8), data=st.data())
def test_weighted_means_are_exact(values, data):
    weights = data.draw(st.lists(st.integers(1, 50), min_size=len(values), max_size=len(values)))
    result = _reduced("mean", [np.asarray(value) for value in values], weights)
    exact = Fraction(sum(v * w for v, w in zip(values, weights, strict=True)), sum(weights))
    assert result == float(exact)


def test_half_floats_do_not_overflow_on_the_way():
    big = np.array([60000, -60000], np.float16)
    assert _reduced("mean", [big, big, big], [1, 1, 1]).tolist() == big.tolist()
    assert _reduced("sum", [big, big, -big], [1, 1, 1]).tolist() == big.tolist()
    assert (
        _reduced("prod", [big, big, 0 * big + 1 / 512, 0 * big + 1 / 512], [1] * 4).tolist()
        == [13736] * 2
    )


def test_merge_writes_into_out_and_lift_leaves_the_value_as_it_is():
    value, out = np.ones(2), np.empty(2)
    assert OPERATIONS["sum"].merge(value, value, out=out) is out
    assert out.tolist() == [2, 2]
    assert OPERATIONS["mean"].finish(out, 4, out=out).tolist() == [0.5, 0.5]
    assert out.tolist() == [0.5, 0.5]
    assert OPERATIONS["mean"].lift(value, 3).tolist() == [3, 3]
    assert value.tolist() == [1, 1]
