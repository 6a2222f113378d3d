"""What an array of numbers cannot hold is never dropped: masks, units, integers that are missing."""

import operator

import numpy as np
import pytest

import synkro as synk
from support.sessions import per_rank
from synkro import InvalidType, OutputError, WorkerError

pytestmark = [pytest.mark.counted_once, pytest.mark.filterwarnings("ignore:.*outputs= was not given")]

X = np.array([1.0, 2.0, 3.0, -99.0])
MASK = "would lose its mask: fill it first"
UNIT = "would lose what its class Length adds to an array, such as a unit"


def good(a):
    return np.ma.masked_less(a, 0)


class Length(np.ndarray):
    unit = None

    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", None)


def length(a, unit="km"):
    made = np.asarray(a).view(Length)
    made.unit = unit
    return made


class Flagged(np.ndarray):
    """A masked array that is not NumPy's."""

    mask = True


class Holder:
    """What becomes a masked array when it is asked for one."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return good(self.values)


LOSES = {
    "masked": (good, MASK),
    "a masked number": (lambda a: np.ma.masked, MASK),
    "masked records": (lambda a: np.ma.array([(1, 2.0)] * 4, [("a", int), ("b", float)]), MASK),
    "a masked row": (lambda a: np.ma.array([(1, 2.0)], [("a", int), ("b", float)])[0], MASK),
    "another masked class": (lambda a: np.asarray(a).view(Flagged), MASK),
    "becomes masked": (Holder, MASK),
    "units": (length, UNIT),
    "one with a unit": (lambda a: length(a)[:1].sum(keepdims=True), UNIT),
}


@pytest.fixture(params=LOSES)
def loses(request):
    """A function of an array, and what is said of what it makes."""
    return LOSES[request.param]


COLLECTIVES = {
    "all_reduce": lambda v: synk.all_reduce(v, "sum"),
    "all_reduce of several": lambda v: synk.all_reduce({"a": np.ones(2), "b": v}, "max"),
    "reduce": lambda v: synk.reduce(v, "sum"),
    "reduce_scatter": lambda v: synk.reduce_scatter(v, "sum"),
    "broadcast": lambda v: synk.broadcast(v, root=0),
    "scatter": lambda v: synk.scatter(v, root=1),
    "all_gather": lambda v: synk.all_gather(v),
    "gather": lambda v: synk.gather(v, root=1),
    "all_to_all": lambda v: synk.all_to_all(v),
    "exchange": lambda v: synk.exchange(v, 1 - synk.rank()),
    "send": lambda v: synk.send(v, 1) if synk.rank() == 0 else synk.recv(0),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_refuse_it(two, loses, kind):
    (make, why), collective = loses, COLLECTIVES[kind]
    with pytest.raises(WorkerError, match=why) as caught:
        synk.function(lambda: collective(make(X)), outputs=[])()
    assert isinstance(caught.value, InvalidType)


@pytest.mark.parametrize("operation", ["mean", "sum", "prod", "max", "min", "gather", "keep", "default"])
@pytest.mark.parametrize("slices", [1, 2])
def test_outputs_refuse_it(two, loses, operation, slices):
    make, why = loses
    said = {} if operation == "default" else {"outputs": operation}
    f = synk.function(lambda a: make(a), **said)
    with pytest.raises(OutputError, match=why):
        f(X, num_slices=slices)


def test_data_and_variables_refuse_it(two, loses):
    make, why = loses
    value = make(X)
    w, x = synk.shared(X), synk.data(X)

    def change(w, x):
        x[...] = value

    for refused in (
        lambda: synk.data(value),
        lambda: synk.data(value, dtype="f4", force_cast=True),
        lambda: synk.shared(value),
        lambda: w.set_value(value),
        lambda: x.set_value(value),
        lambda: setattr(w, "value", value),
        lambda: synk.broadcast(w, value),
        lambda: synk.scatter(w, value),
    ):
        with pytest.raises(InvalidType, match=why):
            refused()
    if not isinstance(value, Holder):
        for refused in (
            lambda: synk.data([value, value]),
            lambda: synk.shared([value]),
            lambda: operator.setitem(x, ..., value),
            lambda: operator.setitem(w, ..., value),
            lambda: np.add(x, value, out=x),
            lambda: operator.iadd(w, value),
        ):
            with pytest.raises(InvalidType, match=why):
                refused()
    assert x[:].tolist() == w.value.tolist() == X.tolist()


def test_variables_on_the_workers_refuse_it(two, loses):
    make, why = loses
    w = synk.shared(X)

    def assign():
        w.value = make(X)

    def put():
        w[...] = make(X)

    def add():
        v = w
        v += make(X)

    for change in (assign, put, add):
        if isinstance(make(X), Holder) and change is not assign:
            continue
        with pytest.raises(WorkerError, match=why) as caught:
            synk.function(change, outputs=[])()
        assert isinstance(caught.value, InvalidType)
    assert [each.tolist() for each in per_rank(lambda: w.value)] == [X.tolist()] * 2


def test_rows_refuse_it_and_broadcasts_keep_it(two, loses):
    make, why = loses
    value = make(X)
    f = synk.function(lambda a: type(a).__name__, outputs=None)
    if np.ndim(value):
        with pytest.raises(InvalidType, match=r"would lose its mask|whose rows would be plain arrays"):
            f(value)
        if not isinstance(value, Holder):
            with pytest.raises(InvalidType, match=why):
                f([value, value])
    kept = synk.function(lambda a: a, outputs=None, bcast_inputs=["a"])
    assert [type(each).__name__ for each in kept(value)] == [type(value).__name__] * 2
    (name,) = synk.map(lambda i, a: type(a).__name__, [1], common={"a": value})
    assert name == type(value).__name__


def test_records_with_a_field_that_is_called_mask_are_no_masked_array(two):
    records = np.zeros(4, [("mask", "f8")]).view(np.recarray)
    with pytest.raises(InvalidType, match=r"whose rows would be plain arrays: give np\.asarray"):
        synk.function(lambda a: a.mask, outputs="gather")(records)


def test_lists_of_rows_that_are_no_array_come_as_they_are(two):
    rows = [good(X), good(X[:2]), good(-X)]
    assert synk.function(lambda rows: [r.sum() for r in rows], outputs="gather")(rows) == [
        r.sum() for r in rows
    ]


# ── what stays what it is ────────────────────────────────────────────────────────────────────────────


def kinds(values):
    return [(type(v).__name__, v.unit, v.tolist()) for v in values]


def test_units_stay_where_values_are_not_merged(two):
    km = [("Length", "km", [1, 2]), ("Length", "km", [3, -99])]
    assert kinds(synk.function(length, outputs=None)(X)) == km
    assert kinds(v["v"] for v in synk.function(lambda a: {"v": length(a)}, outputs=None)(X)) == km
    assert kinds(synk.map(length, [X[:2], X[2:]])) == km
    assert kinds([synk.function(length, outputs=operator.add)(X)]) == [("Length", "km", [4, -97])]
    assert kinds(synk.function(lambda a: [length(a)], outputs="gather")(X)) == km
    alone = synk.function(length, target=1, outputs=None)(X)
    assert kinds(alone if isinstance(alone, list) else [alone]) == [("Length", "km", X.tolist())]


def test_units_stay_in_what_functions_bring_along(two):
    known = length([1.0, 2.0])
    assert per_rank(lambda: (known.unit, type(known).__name__)) == [("km", "Length")] * 2


def test_masks_stay_where_values_are_not_merged(two):
    first, second = synk.function(good, outputs=None)(X)
    assert first.sum() + second.sum() == 6
    assert synk.function(good, outputs=lambda a, b: a.sum() + b.sum())(X) == 6
    assert [each.sum() for each in synk.map(good, [X, X])] == [6, 6]


@pytest.mark.parametrize("cls", [np.matrix, np.recarray, np.memmap])
def test_numpys_own_classes_are_arrays_where_they_merge(two, cls):
    dtype = [("a", "f8")] if cls is np.recarray else "f8"

    def made(n=2):
        array = np.zeros((n, 1) if cls is np.matrix else n, dtype)
        return array.view(cls)

    assert type(synk.function(lambda: made(), outputs="gather")()) is np.ndarray
    if cls in (np.matrix, np.memmap):
        assert type(synk.function(lambda: made(), outputs="sum")()) is np.ndarray
    (one, _) = synk.function(lambda: made(), outputs=None)()
    assert type(one) is (np.ndarray if cls is np.memmap else cls)
    assert type(synk.data(made())[:]) is np.ndarray


# ── missing integers ─────────────────────────────────────────────────────────────────────────────────

BIG = 2**53 + 1

COLUMNS = {
    "pandas": lambda pd: pd.Series([BIG, None, 5], dtype="Int64"),
    "pandas, unsigned": lambda pd: pd.Series([BIG, None, 5], dtype="UInt64"),
    "pandas, its array": lambda pd: pd.array([BIG, None, 5], dtype="Int64"),
    "pandas, an index": lambda pd: pd.Index([BIG, None, 5], dtype="Int64"),
    "polars": lambda pl: pl.Series([BIG, None, 5]),
    "pyarrow": lambda pa: pa.array([BIG, None, 5]),
    "pyarrow, in chunks": lambda pa: pa.chunked_array([[BIG], [None, 5]]),
}


@pytest.mark.libraries
@pytest.mark.parametrize("kind", COLUMNS)
def test_missing_integers_are_refused(two, kind):
    column = COLUMNS[kind](pytest.importorskip(kind.split(",")[0]))
    same = synk.function(lambda a: a, outputs="gather")
    made = synk.function(lambda: column, outputs="gather")
    moved = synk.function(lambda: synk.all_gather(column), outputs=[])
    for refused in (
        lambda: same(column),
        lambda: synk.data(column),
        lambda: synk.shared(column),
        made,
        moved,
    ):
        with pytest.raises((TypeError, OutputError), match="would lose its integers, as some are"):
            refused()
    whole = synk.function(lambda a: type(a).__name__, outputs=None, bcast_inputs=["a"])
    assert whole(column) == [type(column).__name__] * 2


@pytest.mark.libraries
@pytest.mark.parametrize("kind", COLUMNS)
def test_integers_of_which_none_is_missing_are_exact(two, kind):
    column = COLUMNS[kind](pytest.importorskip(kind.split(",")[0]))
    column = column[:1]
    found = synk.function(lambda a: a, outputs="gather")(column)
    assert found.tolist() == synk.data(column)[:].tolist() == [BIG]
    assert found.dtype.kind in "iu"


@pytest.mark.libraries
def test_missing_floats_are_nan(two):
    for library, column in (
        ("pandas", lambda pd: pd.Series([1.5, None], dtype="Float64")),
        ("polars", lambda pl: pl.Series([1.5, None])),
        ("pyarrow", lambda pa: pa.array([1.5, None])),
    ):
        found = synk.function(lambda a: a, outputs="gather")(column(pytest.importorskip(library)))
        assert found[0] == 1.5
        assert np.isnan(found[1])
