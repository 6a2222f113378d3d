"""Collectives of the user's process over variables: reduced, gathered, broadcast and scattered."""

import numpy as np
import pytest

import synkro as synk
from support.arrays import OPS, ORDERED, check, chosen, fill, replicas, serial, values
from support.sessions import running
from synkro import InvalidIndex, InvalidType, InvalidValue, UsageError, WorkerError

pytestmark = pytest.mark.counted_once


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
        with pytest.raises(InvalidValue, match="has 1 dimension, got a value of 2"):
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
        stranger = other.shared(np.zeros(2), "stranger")
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
    no_rows = "'point' has no dimensions, so it has no rows"
    for call, error, says in (
        (lambda: synk.all_reduce([]), InvalidValue, "at least one variable"),
        (lambda: synk.all_reduce(w, "median"), InvalidValue, "op='median' is no reduce operation"),
        (lambda: synk.reduce(w, "gather"), InvalidValue, "op='gather' is no reduce operation"),
        (lambda: synk.gather(w, nd_up=2), InvalidValue, "nd_up must be 0"),
        (lambda: synk.broadcast([w, v], [[0.0] * 2] * 3), InvalidValue, "got 3 values: give one each"),
        (lambda: synk.scatter(w, None), InvalidValue, "no value was given"),
        (lambda: synk.scatter(point, 0.0), InvalidValue, no_rows),
        (lambda: synk.all_gather(point), InvalidValue, no_rows),
        (lambda: synk.get_lengths(point), InvalidValue, no_rows),
        (lambda: synk.gather(point, nd_up=0), InvalidValue, no_rows),
        (lambda: synk.scatter(w, [1.0, 2.0], [0, 2]), InvalidIndex, "the index 2, but there are 2 rows"),
        (lambda: synk.set_value(0, w, [1.0, 2.0], 3), InvalidIndex, "batch=3 asks for the first 3 rows"),
        (lambda: synk.reduce(w, root=0), InvalidType, "use it in the main program, as"),
        (lambda: synk.reduce(w, weight=1), InvalidType, "use it in the main program, as"),
    ):
        with pytest.raises(error, match=says):
            call()
    assert not synk.gather([w, v])[0].any()
