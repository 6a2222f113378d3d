"""DataFrames of pandas and polars: one array without loss, or an error that shows the cure."""

import numpy as np
import pytest

from support.sessions import lasting
from synkro.errors import InvalidType, InvalidValue, OutputError

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once]

session = lasting(2)

BIG = 2**53 + 1


@pytest.fixture(params=["pandas", "polars"])
def library(request):
    return pytest.importorskip(request.param, reason=f"needs {request.param}")


@pytest.fixture
def pandas():
    return pytest.importorskip("pandas", reason="needs pandas")


@pytest.fixture
def polars():
    return pytest.importorskip("polars", reason="needs polars")


@pytest.fixture
def total(session):
    return session.function(lambda x: x.sum(axis=0), outputs="sum", name="total")


def cure(frame):
    """The dict of columns, as the message shows it for *frame*."""
    names = frame if hasattr(frame, "iloc") else frame.columns
    return {name: frame[name].to_numpy() for name in names}


def shown(frame):
    return "name in frame}" if hasattr(frame, "iloc") else "name in frame.columns}"


def test_a_table_of_one_dtype_is_its_array(session, total, library):
    frame = library.DataFrame({"a": np.arange(7.0), "b": np.ones(7)})
    assert total(frame).tolist() == [21, 7]
    assert total.as_serial(frame).tolist() == [21, 7]
    assert session.data(frame).dtype == np.float64
    assert session.data(library.DataFrame({"a": np.arange(7)})).dtype == np.int64


def test_integers_that_a_float_can_hold_are_taken(total, library):
    frame = library.DataFrame({"id": np.array([1, 2**53]), "value": [0.5, np.nan], "low": [1, -3]})
    assert np.array_equal(total(frame), [2**53 + 1.0, np.nan, -2], equal_nan=True)
    small = library.DataFrame({"a": np.array([1, 2], np.float32), "b": np.array([1, 2], np.int64)})
    assert total(small).tolist() == [3, 3]


def test_integers_that_a_float_cannot_hold_are_refused(total, library):
    frame = library.DataFrame({"value": [0.5, 1.5], "id": np.array([7, BIG])})
    named = str(frame["id"].dtype)
    with pytest.raises(InvalidType) as caught:
        total(frame)
    assert str(caught.value) == (
        "the argument 'x' of the function 'total' is a table that cannot be one array of numbers "
        f"without loss: its column 'id' ({named}) would have 9007199254740992.0 in row 1, where it has "
        "9007199254740993. Give functions a dict of the columns, {name: frame[name].to_numpy() for "
        f"{shown(frame)}, which arrives as a dict of arrays; convert columns that are not of numbers, "
        "or leave them out."
    )


def test_unsigned_beside_signed_integers(total, library):
    frame = library.DataFrame({"a": np.array([2**64 - 1], np.uint64), "b": np.array([1])})
    with pytest.raises(
        InvalidType, match=r"'a' \((uint64|UInt64)\) would have 1\.8446744073709552e\+19"
    ):
        total(frame)
    total(library.DataFrame({"a": np.array([2**63], np.uint64), "b": np.array([1])}))


def test_it_is_refused_wherever_an_array_can_be_given(session, total, library):
    frame = library.DataFrame({"value": [0.5, 1.5], "id": np.array([7, BIG])})
    data, variable = session.data(np.zeros((2, 2))), session.shared(np.zeros((2, 2)))
    for use in (
        total.as_serial,
        lambda f: total({"x": f}),
        lambda f: total.submit(f).result(),
        session.data,
        data.set_value,
        session.shared,
        variable.set_value,
        lambda f: session.scatter(variable, f),
        lambda f: session.set_value(0, variable, f),
        total.build_inputs,
    ):
        with pytest.raises(InvalidType, match=rf"'id' .*\{{name: .* for {shown(frame)[:-1]}\}}"):
            use(frame)


def test_a_broadcast_one_arrives_as_it_is(session, library):
    frame = library.DataFrame({"value": [0.5, 1.5], "id": np.array([7, BIG]), "name": ["a", "b"]})
    rows = np.ones(4)
    f = session.function(lambda x, table: table, bcast_inputs="table", outputs=None)
    for table in (frame, frame["name"]):
        for found in (*f(rows, table), f.as_serial(rows, table), *f.submit(rows, table).result()):
            assert type(found) is type(table)
            assert found.equals(table)


def test_bools_beside_numbers_are_refused(total, library):
    frame = library.DataFrame({"value": [0.5, 1.5], "ok": [True, False]})
    with pytest.raises(InvalidType, match=r"would be of (object|float64)\. Give functions a dict"):
        total(frame)
    total(library.DataFrame({"a": [True, False], "b": [True, True]}))


def test_text_is_refused_by_its_name(total, library):
    frame = library.DataFrame({"value": [0.5, 1.5], "city": ["Rome", "Oslo"]})
    with pytest.raises(InvalidType, match=r"'city' \((object|str|String)\) holds what is no number\."):
        total(frame)


def test_the_dict_of_columns_works(session, library):
    def check(t):
        return {name: (column.sum(), str(column.dtype) == kinds[name]) for name, column in t.items()}

    kinds = {"id": "int64", "value": "float64", "ok": "bool"}
    frame = library.DataFrame({"id": np.array([BIG, BIG, 1]), "value": [0.5] * 3, "ok": [True] * 3})
    f = session.function(check, outputs="sum")
    assert f(cure(frame)) == {"id": (2 * BIG + 1, 2), "value": (1.5, 2), "ok": (3, 2)}
    assert f(cure(frame), num_slices=2)["id"][0] == 2 * BIG + 1
    held = {name: session.data(column) for name, column in cure(frame).items()}
    assert f(held, batch=[0, 2])["id"] == (BIG + 1, 2)


def test_a_submitted_table_is_that_of_the_submit(total, library):
    frame = library.DataFrame({"a": np.arange(4), "b": np.ones(4)})
    future = total.submit(frame)
    if hasattr(frame, "iloc"):
        frame.iloc[:, :] = 100
    else:
        frame[0, "a"] = 100
    assert future.result().tolist() == [6, 4]


def test_columns_of_pandas(total, pandas):
    def refused(dtype, column, problem, **others):
        frame = pandas.DataFrame({"c": column, **others})
        with pytest.raises(InvalidType, match=rf"'c' \({dtype}.*\) {problem}"):
            total(frame)

    one = {"other": [1.0, 2.0]}
    refused("category", pandas.Categorical([1, 2]), "holds what is no number")
    refused("category", pandas.Categorical([1, 2]), "holds what is no number", **one)
    refused("object", pandas.Series([1, 2], dtype=object), "holds what is no number")
    refused("datetime64", pandas.to_datetime(["2020-01-01"] * 2), "holds what is no number")
    refused("datetime64", pandas.to_datetime(["2020-01-01"] * 2), "holds what is no number", **one)
    refused("timedelta64", pandas.to_timedelta([1, 2]), "holds what is no number", **one)
    refused("boolean", pandas.array([True, None], dtype="boolean"), "holds what is no number")
    missing = pandas.array([1, None], dtype="Int64")
    refused("Int64", missing, "(has missing values|holds what is no number)")
    refused("Int64", missing, "(has missing values|holds what is no number)", **one)
    total(pandas.DataFrame({"c": pandas.array([1, 2], dtype="Int64")}))
    total(pandas.DataFrame({"c": np.array([1j, 2]), "id": [1, 2]}))
    twice = pandas.DataFrame([[1.0, 2.0]], columns=["a", "a"])
    assert total(twice).tolist() == [1, 2]
    assert total(pandas.DataFrame({"c": [1, 2], "d": [0.5, 1]})["c"]) == 3


def test_columns_of_polars(total, polars):
    def refused(column, problem):
        frame = polars.DataFrame({"c": column, "other": [1, 2]})
        with pytest.raises(InvalidType, match=rf"'c' \({column.dtype}.*\) {problem}"):
            total(frame)

    refused(polars.Series([1, None]), "has missing values")
    refused(polars.Series([True, None]), "holds what is no number")
    refused(polars.Series([True, False]), "would be of int64")
    refused(polars.Series(["a", "b"], dtype=polars.Categorical), "holds what is no number")
    refused(polars.Series([None, None], dtype=polars.Date), "holds what is no number")
    total(polars.DataFrame({"c": polars.Series([1.0, None]), "other": [1, 2]}))


def test_tables_are_not_reduced_by_position(session):
    """A group that one rank has and another has not would be added to its neighbour."""
    pandas = pytest.importorskip("pandas", reason="needs pandas")

    def totals(names, mass):
        table = pandas.DataFrame({"name": names, "mass": mass})
        return table.groupby("name")["mass"].sum()

    names, mass = list("abbaccca"), np.arange(1.0, 9)
    with pytest.raises(OutputError, match="not reduced: they would be by position"):
        session.function(totals, outputs="sum")(names, mass)
    found = session.function(totals, outputs=lambda a, b: a.add(b, fill_value=0))(names, mass)
    assert found.to_dict() == {"a": 13, "b": 5, "c": 18}


def test_tasks_cannot_change_a_table(session, pandas):
    table = pandas.DataFrame({"v": [1.0, 2.0]})

    def by_loc(k):
        table.loc[0, "v"] = k

    def new_column(k):
        table["w"] = k

    def reads(k):
        return float(table.v.sum() * k)

    assert session.map(reads, range(9)) == [3.0 * k for k in range(9)]
    for task in (by_loc, new_column):
        with pytest.raises(InvalidValue, match=f"'{task.__name__}' changes table"):
            session.map(task, range(9))


@pytest.mark.parametrize("mode", ["gather", "keep"])
def test_tables_are_not_gathered_without_their_columns(session, library, mode):
    def doubled(x):
        return library.DataFrame({"x": x, "double": 2 * x})

    def both(a, b):
        return library.concat([a, b])

    x = np.arange(5.0)
    with pytest.raises(OutputError, match=rf'DataFrames do not go .*"{mode}".* outputs=None.*concat'):
        session.function(doubled, outputs=mode)(x)
    found = session.function(doubled, outputs=both)(x)
    assert list(found.columns) == ["x", "double"]
    assert found["double"].to_list() == [0, 2, 4, 6, 8]


def test_dates_and_fixed_strings_are_columns_of_a_dict(session, library):
    days = np.array(["2024-02-29", "2024-03-01", "2024-03-02"], "M8[D]").astype("M8[ns]")
    frame = library.DataFrame({"day": days, "city": ["Rome", "Oslo", "Bern"], "x": [1.0, 2.0, 3.0]})
    table = cure(frame) | {"city": frame["city"].to_numpy().astype("U4")}

    def latest(t):
        return {"day": t["day"].max(), "cities": t["city"][t["x"] > 1]}

    found = session.function(latest, outputs={"day": "max", "cities": "gather"})(table)
    assert found["day"] == days.max()
    assert found["day"].dtype == table["day"].dtype
    assert found["cities"].tolist() == ["Oslo", "Bern"]
    last = session.function(lambda x: x.max(), outputs="max")
    assert last(frame["day"]) == days.max()
    with pytest.raises(InvalidType, match=r"cannot have the dtype object.*\.tolist\(\)"):
        session.function(lambda t: t["city"], outputs="gather")(cure(frame))
