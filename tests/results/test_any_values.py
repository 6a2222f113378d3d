"""What is no array: arguments and outputs of any kind, and operations of one's own."""

import collections
import dataclasses
import fractions
import functools
import operator
import pathlib
import threading
from typing import NamedTuple

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.sessions import lasting, rank, running
from synkro import InvalidType, OutputError

pytestmark = pytest.mark.quick

X = np.arange(10.0)

session = lasting(3)


@dataclasses.dataclass
class Fitted:
    """An estimator, say."""

    weights: np.ndarray
    name: str = "fitted"

    def __eq__(self, other):
        return type(self) is type(other) and same(vars(self), vars(other))


class Pair(NamedTuple):
    loss: float
    tags: list


def same(one, other):
    """Equal, and of the same types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def pieces(count):
    """The rows of each rank."""
    return [X[slice(*span)] for span in synk.plan.split.split(0, len(X), count)]


KINDS = {
    "a string": lambda x: f"{x[0]:.0f} to {x[-1]:.0f}",
    "nothing": lambda x: None,
    "nothing on some ranks": lambda x: {"best": x.max()} if 5 in x else None,
    "an instance": lambda x: Fitted(x * 2),
    "a large one": lambda x: Fitted(np.full(100_000, x.sum())),
    "a dict": lambda x: {"mean": x.mean(), "n": len(x), "name": "x", "path": pathlib.Path("a"), 3: x},
    "a named tuple": lambda x: Pair(float(x.sum()), ["a", x.tolist()]),
    "lists of different lengths": lambda x: [value for value in x.tolist() if value > 2],
    "lists of arrays": lambda x: [x[i:] for i in range(int(x[0]) % 3)],
    "a set": lambda x: {"a", len(x)},
    "a long int": lambda x: 10**30 + len(x),
    "a fraction": lambda x: fractions.Fraction(int(x[0]), 3),
    "strings of NumPy": lambda x: x.astype(str),
    "records": lambda x: np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "dates": lambda x: np.array(["2026-11-22"], "datetime64[D]"),
    "arrays in Fortran's order, and with gaps": lambda x: {"a": np.ones((300, 200)).T, "b": x[::2]},
    "an empty list": lambda x: [],
    "an array of no elements": lambda x: {"a": np.empty((0, 3))},
    "a class": lambda x: Fitted,
    "a type of array on each rank": lambda x: "few" if len(x) < 4 else x,
}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_ranks_value_as_it_is(workers):
    with running(workers) as session:
        for name, fn in KINDS.items():
            f = session.function(fn, outputs=None, name=name)
            for _ in range(2):
                assert same(f(X), [fn(piece) for piece in pieces(workers)]), name


def test_each_pieces_value(session):
    f = session.function(KINDS["a dict"], outputs=None)
    wanted = [KINDS["a dict"](part) for piece in pieces(3) for part in np.array_split(piece, 2)]
    found = f(X, num_slices=2)
    assert len(found) == len(wanted) == 6
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


def test_beside_outputs_that_are_reduced(session):
    f = session.function(lambda x: (x.sum(), f"rank {rank()}", x), outputs=["sum", None, "gather"])
    total, names, rows = f(X)
    assert (total, names) == (X.sum(), ["rank 0", "rank 1", "rank 2"])
    assert np.array_equal(rows, X)
    assert f(X, output_subset=[1]) == (["rank 0", "rank 1", "rank 2"],)
    assert f.submit(X).result()[1] == names


def test_a_list_that_holds_itself(session):
    def endless(x):
        found = ["a"]
        found.append(found)
        return found

    for found in session.function(endless, outputs=None)(X):
        assert found[1] is found


def test_a_value_is_the_callers_own():
    with running(2) as session:
        f = session.function(lambda x: Fitted(np.zeros(50_000)), outputs=None)
        first, _ = f(X)
        first.weights[:] = 7
        first.name = "changed"
        assert f(X)[0] == Fitted(np.zeros(50_000))
        assert first.weights[0] == 7


@given(rows=st.lists(st.text(max_size=3), min_size=1, max_size=20), slices=st.integers(1, 3))
@examples(40)
def test_lists_are_gathered_in_the_order_of_the_rows(session, rows, slices):
    f = session.function(lambda i: [rows[k] for k in i], outputs="gather")
    assert f(np.arange(len(rows)), num_slices=slices) == rows


def test_lists_of_some_rows_and_of_none(session):
    def above(x, least):
        return [f"{value:.0f}" for value in x if value > least]

    f = session.function(above, bcast_inputs="least", outputs="gather")
    assert f(X, 6) == ["7", "8", "9"]
    assert f(X, 100) == []
    arrays = session.function(lambda x: [x, 2 * x], outputs="gather")(X)
    assert [array.tolist() for array in arrays] == [X.tolist(), (2 * X).tolist()]


def test_a_list_with_an_array_for_each_row_is_doubted(session):
    x = np.arange(12.0).reshape(6, 2)
    each = session.function(lambda x: [2 * row for row in x], outputs="gather")
    if session.n_parallel == 1:
        assert len(each(x)) == 6
    else:
        with pytest.warns(UserWarning, match=r"as many as the rank got rows.*lambda a, b: a \+ b"):
            each(x)
        with pytest.raises(OutputError, match=r"For one list say outputs=lambda a, b"):
            each(x[:5])
    one = session.function(lambda x: [2 * row for row in x], outputs=lambda a, b: a + b)
    assert np.array_equal(one(x), 2 * x)
    assert np.array_equal(one(x[:5]), 2 * x[:5])


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────

VALUES = {
    "a string": "adam",
    "no string": "",
    "nothing": None,
    "bytes": b"\0a",
    "a path": pathlib.Path("a") / "b",
    "mixed values": {"rate": 0.1, "name": "adam", "steps": 3, "deep": {"on": True, "to": None}},
    "many": {f"word {number}": number for number in range(1000)},
    "strings": ["a", "b"],
    "rows of different lengths": [[1, 2], [3]],
    "a pair": (1, "a"),
    "a counter": collections.Counter("aab"),
    "an ordered dict": collections.OrderedDict(b=1, a=2),
    "a set": {1, 2},
    "a fitted one": Fitted(np.arange(3.0)),
    "its class": Fitted,
    "a long int": 10**40,
    "a long double": np.longdouble("0.1"),
    "strings of NumPy": np.array(["a", "bc"]),
    "dates": np.array(["2026-11-22"], "datetime64[D]"),
    "objects": np.array([None, "a"]),
    "a large one": Fitted(np.arange(100_000.0)),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_broadcast_arrives_as_it_is(workers):
    with running(workers) as session:
        f = session.function(lambda x, value: value, bcast_inputs="value", outputs=None)
        for name, value in [*VALUES.items(), *reversed(VALUES.items())]:
            for found in f(X, value):
                assert same(found, value), name
            assert same(f.submit(X, value).result()[0], value)
            assert same(f.as_serial(X, value), value)


def test_arrays_beside_it_are_arrays(session):
    value = {"weights": np.ones(3), "name": "a", "list": [1, 2], "more": ["a", np.zeros(2)]}
    f = session.function(lambda x, value: value, bcast_inputs="value", outputs=None)
    found = f(X, value)[1]
    assert same(found["list"], np.array([1, 2]))
    assert same({**found, "list": [1, 2]}, value)


def test_what_a_call_makes_of_it_is_gone_in_the_next(session):
    def appended(x, given):
        given["list"].append(len(x))
        given["fitted"].weights += 1
        return len(given["list"]), given["fitted"].weights.sum()

    f = session.function(appended, bcast_inputs="given", outputs="max")
    given = {"list": ["a"], "fitted": Fitted(np.zeros(2))}
    for _ in range(3):
        assert f(X, given) == (2, 2)
    assert given == {"list": ["a"], "fitted": Fitted(np.zeros(2))}


def test_it_is_what_it_is_at_each_call(session):
    f = session.function(lambda x, given: given, bcast_inputs="given", outputs=None)
    given = {"names": ["a"], "fitted": Fitted(np.zeros(2))}
    for length in (1, 2, 3, 100, 1):
        given["names"] = ["a" * length] * length
        given["fitted"].weights[:] = length
        assert same(f(X, given)[2], given)
    later = f.submit(X, given)
    given["names"] = []
    given["fitted"].weights[:] = 7
    assert later.result()[0]["names"] == ["a"]
    assert later.result()[0]["fitted"].weights.tolist() == [1, 1]


def test_arrays_of_bytes_and_other_values_in_turn(session):
    f = session.function(lambda x, given: given, bcast_inputs="given", outputs=None)
    for value in (np.ones((100, 3), "u1"), "a" * 60, np.ones(100, "u1"), "b" * 60, np.zeros(100, "u1")):
        assert same(f(X, value)[1], value)


def test_an_object_that_functions_use_is_a_value_as_an_argument(session):
    model = Fitted(np.zeros(2))

    def train(x):
        model.weights += 1
        return model.weights.sum()

    trained = session.function(train, outputs="max")
    assert trained(X) == 2
    f = session.function(
        lambda x, given: (given.weights.sum(), isinstance(given, type(model))),
        bcast_inputs="given",
        outputs="max",
    )
    assert f(X, model) == (0, 1)
    assert session.fetch(model).weights.tolist() == [1, 1]
    assert trained(X) == 4


def test_its_class_may_change(session):
    class Scaled:
        by = 2

        def of(self, x):
            return x.sum() * self.by

    f = session.function(lambda x, given: given.of(x), bcast_inputs="given", outputs="sum")
    assert f(X, Scaled()) == 2 * X.sum()
    Scaled.by = 3
    assert f(X, Scaled()) == 3 * X.sum()
    Scaled.of = lambda self, x: -x.sum()
    assert f(X, Scaled()) == -X.sum()


LISTS = {
    "strings": list("abcdefghij"),
    "strings of all kinds": ["", "ü", "\udc80", "a\0", "𝄞" * 20, "b", "c", "d", "e", "f"],
    "dicts": [{"a": number} for number in range(10)],
    "lists of different lengths": [[0] * number for number in range(10)],
    "values of all kinds": [1, None, "a", 2.5, (1, 2), Fitted(np.ones(2)), [], {}, "b", b"a"],
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_split_like_rows(session, name):
    rows = LISTS[name]
    f = session.function(lambda rows: rows, outputs="gather")
    assert same(f(rows), rows)
    assert same(f(rows, num_slices=2), rows)
    assert same(f(rows, batch=slice(2, 9, 3)), rows[2:9:3])
    assert same(f(rows, batch=[7, 0, 7]), [rows[7], rows[0], rows[7]])
    assert same(f(tuple(rows)), rows)
    pairs = session.function(
        lambda x, r: [(float(a), b) for a, b in zip(x, r, strict=True)], outputs="gather"
    )
    assert same(pairs(X, rows), list(zip(X.tolist(), rows, strict=True)))
    assert same(f.submit(rows).result(), rows)


@given(rows=st.lists(st.text(max_size=3), min_size=1, max_size=20), data=st.data())
@examples(40)
def test_any_rows_of_a_list(session, rows, data):
    batch = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    f = session.function(lambda rows: rows, outputs="gather")
    assert f(rows, batch=batch) == [rows[index] for index in batch]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (threading.Lock(), "'value' .*no array and no number, and cannot be pickled: TypeError: .*lock"),
        ((v for v in X), "cannot be pickled: TypeError: .*generator"),
        ({"a": X, "b": [threading.Lock()]}, r"value\['b'\].*cannot be pickled"),
        (np.random.default_rng(), "is a random generator"),
    ],
)
def test_what_cannot_be_sent(session, value, message):
    f = session.function(lambda x, value: x.sum(), bcast_inputs="value", outputs="sum")
    with pytest.raises(InvalidType, match=message):
        f(X, value)
    assert f(X, "a") == X.sum()


# ── operations of one's own ──────────────────────────────────────────────────────────────────────────


def nearest(x):
    distance = np.abs(x - 6.2)
    return distance.min(), x[distance.argmin()]


def smaller(a, b):
    return min(a, b)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_argmin_with_its_place(workers):
    with running(workers) as session:
        f = session.function(nearest, outputs=smaller)
        for slices in (1, 2):
            assert f(X, num_slices=slices) == nearest(X)


def test_values_merge_in_the_order_of_the_rows(session):
    f = session.function(lambda x: "".join(f"{v:.0f}" for v in x), outputs=lambda a, b: a + b)
    assert f(X) == f(X, num_slices=2) == f(X, num_slices=3) == "0123456789"
    counts = session.function(
        lambda x: {int(v) % 3: 1 for v in x},
        outputs=lambda a, b: {k: a.get(k, 0) + b.get(k, 0) for k in {**a, **b}},
    )
    assert counts(X) == {0: 3, 1: 3, 2: 3}
    arrays = session.function(lambda x: x[:2], outputs=np.logaddexp)
    assert np.allclose(arrays(X), np.logaddexp.reduce([piece[:2] for piece in pieces(3)]))


def test_what_an_operation_raises_is_raised_here(session):
    def broken(a, b):
        raise ZeroDivisionError("broken")

    f = session.function(lambda x: x.sum(), outputs=broken)
    with pytest.raises(ZeroDivisionError, match="broken"):
        f(X)
    assert session.function(lambda x: x.sum(), outputs="sum")(X) == X.sum()


def test_check_compares_what_is_no_array(session):
    assert session.function(nearest, outputs=smaller).check(X) == nearest(X)
    with pytest.raises(
        OutputError, match=r"reduced by 'smaller', differs from the plain function's: it is a"
    ):
        session.function(lambda x: "abc"[len(x) % 3 :], outputs=smaller).check(X)


@pytest.mark.parametrize("operation", [operator.add, np.add, np.maximum, operator.or_])
def test_functions_of_two_values_of_libraries_are_operations(session, operation):
    f = session.function(lambda x: int(x.sum()), outputs=operation)
    expected = functools.reduce(operation, [int(piece.sum()) for piece in pieces(3)])
    assert f(X) == expected


@pytest.mark.parametrize("operation", [np.sum, sum, max, float, 3.0])
def test_what_is_no_operation(operation):
    with pytest.raises(InvalidType, match=r"outputs= takes 'mean', .*a function op\(a, b\)"):
        synk.function(lambda x: x, outputs=operation)


@pytest.mark.parametrize(
    "value",
    [
        collections.defaultdict(list, a=[1, 2]),
        collections.OrderedDict(a=[1.0]),
        collections.Counter(a=1),
        collections.defaultdict(int, a=np.ones(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_dicts_of_classes_of_their_own_keep_them(value, session):
    f = session.function(lambda x, d: (type(d).__name__, repr(d)), bcast_inputs=["d"], outputs=None)
    assert f(np.ones(3), value) == [(type(value).__name__, repr(value))] * 3


def test_an_item_that_is_a_tuple_is_one_argument():
    with running(2) as session:
        with pytest.raises(synk.InvalidType, match=r"as of enumerate\(\) and zip\(\), is one argument"):
            session.map(lambda i, name: name, enumerate("ab"))
        assert session.map(lambda i, name: name * i, [1, 2], "ab") == ["a", "bb"]
