"""Tables and columns that functions read as globals, and that the program writes to between calls."""

import contextlib
import os
import signal
import warnings

import numpy as np
import pytest

import synkro
from support.sessions import lasting, running
from synkro.errors import InvalidValue, WorkerDied

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once]

session = lasting(2)

table = None


class Holder:
    def __init__(self, held):
        self.held = held


def pandas_ways():
    pd = pytest.importorskip("pandas", reason="needs pandas")
    labels = list("abc")

    def series(values, **options):
        return lambda: pd.Series(values, index=labels, **options)

    def put(key, value):
        return lambda t: t.__setitem__(key, value)

    def at(accessor, key, value):
        return lambda t: getattr(t, accessor).__setitem__(key, value)

    frame = lambda: pd.DataFrame({"v": np.arange(3.0), "w": ["x", "y", "z"]}, index=labels)  # noqa: E731
    numbers, stamp = series([1.0, 2, 3]), pd.Timestamp("1999-01-01")
    yield "series[label]", numbers, put("a", 78.0)
    yield "series.iloc", numbers, at("iloc", 1, 78.0)
    yield "series.loc", numbers, at("loc", "b", 78.0)
    yield "series[mask]", numbers, lambda t: t.__setitem__(t > 1.5, 0.0)
    yield "series += 1", numbers, lambda t: t.__iadd__(1)
    yield "series, a new label", numbers, put("d", 4.0)
    yield "series.index", numbers, lambda t: setattr(t, "index", list("xyz"))
    yield "series.name", numbers, lambda t: setattr(t, "name", "other")
    yield "series of int", series([1, 2, 3]), put("a", 78)
    yield "series of str", series(["p", "q", "r"]), put("a", "other")
    yield "series of Int64", series([1, None, 3], dtype="Int64"), put("a", 78)
    yield "series of categories", series(["p", "q", "p"], dtype="category"), put("a", "q")
    yield "series of dates", series(pd.date_range("2024-01-01", periods=3)), at("iloc", 0, stamp)
    yield "frame.at", frame, at("at", ("a", "v"), 100.0)
    yield "frame.loc", frame, at("loc", (["a", "b"], "v"), 7.0)
    yield "frame[column]", frame, put("v", 7.0)
    yield "frame[new column]", frame, put("u", [4, 5, 6])
    yield "frame.columns", frame, lambda t: setattr(t, "columns", ["k", "l"])
    yield "frame.insert", frame, lambda t: t.insert(0, "u", 1)
    yield "frame.pop", frame, lambda t: t.pop("v")
    yield "frame.loc[:]", frame, at("loc", (slice(None), "v"), 12.0)
    yield "frame.attrs", frame, lambda t: t.attrs.update(k=1)
    yield "frame of text", frame, at("at", ("a", "w"), "other")


def polars_ways():
    pl = pytest.importorskip("polars", reason="needs polars")
    frame = lambda: pl.DataFrame({"v": [1.0, 2, 3], "w": ["x", "y", "z"]})  # noqa: E731
    column = lambda: pl.Series("s", [1, None, 3])  # noqa: E731
    yield "polars frame", frame, lambda t: t.__setitem__((0, "v"), 9.0)
    yield "polars text", frame, lambda t: t.__setitem__((0, "w"), "other")
    yield "polars columns", frame, lambda t: setattr(t, "columns", ["k", "l"])
    yield "polars replace", frame, lambda t: t.replace_column(0, pl.Series("v", [4.0, 5, 6]))
    yield "polars series", column, lambda t: t.__setitem__(0, 9)
    yield "polars series, appended", column, lambda t: t.append(pl.Series("s", [4]))


def shown(held):
    """All of a table as text; and its entries by label, which have a way of their own."""
    labels = [held[label] for label in held.index] if hasattr(held, "iloc") and held.ndim == 1 else []
    if hasattr(held, "iloc"):
        listed = held.to_dict()
    else:
        listed = held.to_dicts() if hasattr(held, "columns") else held.to_list()
    return repr((listed, labels, getattr(held, "attrs", None), getattr(held, "name", None)))


def looking_at(held, inside):
    """A function that shows a table, which it finds in this way."""
    in_dict, in_instance = {"held": held}, Holder(held)
    ways = {
        "itself": lambda: shown(held),
        "dict": lambda: shown(in_dict["held"]),
        "instance": lambda: shown(in_instance.held),
    }
    return ways[inside]


@pytest.mark.parametrize("ways", [pandas_ways, polars_ways])
@pytest.mark.parametrize("inside", ["itself", "dict", "instance"])
def test_what_is_written_to_a_table_arrives_with_the_next_call(session, ways, inside):
    missed = []
    for name, make, write in ways():
        held = make()
        there = {"itself": held, "dict": {"held": held}, "instance": Holder(held)}[inside]
        reach = {"itself": lambda t: t, "dict": lambda t: t["held"], "instance": lambda t: t.held}[
            inside
        ]

        def look(there=None, held=there, reach=reach):
            return shown(reach(held))

        calls = {
            "function": session.function(lambda: look(), outputs=None),
            "one rank": session.function(lambda: look(), outputs=None, target=1),
            "two ranks": session.function(lambda: look(), outputs=None, target=[0, 1]),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for call in calls.values():
                call()
            session.map(lambda k: look(), range(2))
            before = shown(held)
            write(held)
            assert shown(held) != before, name
            found = {how: call() for how, call in calls.items()}
            found["map"] = session.map(lambda k: look(), range(2))
        for how, got in found.items():
            if (got if isinstance(got, str) else {*got}) not in (shown(held), {shown(held)}):
                missed.append((name, how, got, shown(held)))
    assert not missed


@pytest.mark.parametrize("target", [None, 0, [0, 1]])
def test_a_large_table_is_looked_at_in_calls_that_get_rarer(session, target):
    pd = pytest.importorskip("pandas", reason="needs pandas")
    large = pd.DataFrame({"v": np.zeros(60_000)})
    f = session.function(lambda: large["v"].sum(), outputs="max", target=target)
    f()
    seen, said = [], []
    for number in range(1, 40):
        large.at[0, "v"] = number
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen += [number] if f() == number else []
        said += [str(each.message) for each in told]
    assert said
    assert all("the object 'large', which the function" in each for each in said)
    assert len(seen) >= 4
    session.push(large)
    assert f() == 39


def test_what_both_sides_have_prepared_alike_is_no_contradiction(session):
    """Reading may set an attribute: xarray's ``attrs`` are made when they are first asked for."""

    class Lazy:
        _notes = None

        @property
        def notes(self):
            if self._notes is None:
                self._notes = {"units": ["m", "s"]}
            return self._notes

    lazy = Lazy()
    f = session.function(lambda: lazy.notes["units"][0], outputs=None)
    assert f() == ["m", "m"]
    assert lazy.notes["units"] == ["m", "s"]
    assert f() == ["m", "m"]
    lazy.notes["units"].append("kg")
    g = session.function(lambda: len(lazy.notes["units"]), outputs=None)
    assert g() == [3, 3]
    other = Lazy()
    h = session.function(
        lambda: other.notes["units"].append("A") or len(other.notes["units"]), outputs=None
    )
    assert h() == [3, 3]
    other.notes["units"].append("B")
    with pytest.raises(InvalidValue, match="has changed here and on the workers"):
        h()


def test_an_object_that_both_sides_have_changed_is_no_matter_of_calls_that_do_not_use_it(session):
    class Trainer:
        def __init__(self, w):
            self.w = np.full(3, float(w))

        def step(self, x):
            self.w += x.sum()
            return self.w.sum()

    trainer, x = Trainer(0), np.arange(6.0)
    session.map(lambda k: k + trainer.w.sum(), range(3))
    session.function(trainer.step, outputs=None)(x)
    trainer.w += 1
    with pytest.raises(InvalidValue, match="has changed here and on the workers"):
        session.function(trainer.step, outputs=None)(x)
    found = session.map(lambda each: each.w.sum(), [Trainer(k) for k in range(4)])
    assert found == [0, 3, 6, 9]
    session.push(trainer)
    assert session.map(lambda k: k + trainer.w.sum(), range(2)) == [3, 4]


def changed_there():
    """What a function does with a table each time: pairs of a maker and that."""
    pd = pytest.importorskip("pandas", reason="needs pandas")

    def grow(t):
        t.loc[len(t)] = [synkro.rank(), 1]

    def add(t):
        t["v"] += 1 + synkro.rank()

    def column(t):
        t[f"new{t.shape[1]}"] = t["v"] * 2

    frame = lambda: pd.DataFrame({"v": np.arange(3), "w": [1, 2, 3]})  # noqa: E731
    return [(frame, grow), (frame, add), (frame, column)]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("way", ["idle", "map"])
def test_a_worker_that_takes_a_place_has_the_table_of_the_one_before(number, way):
    make, change = changed_there()[number]
    held = Holder(make())

    def step():
        change(held.held)
        return held.held.to_numpy().tolist(), list(held.held.columns)

    with running(2, replace=way == "idle") as session:
        run = synkro.function(step, outputs=None)
        before = run()
        if way == "idle":
            os.kill(session.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDied, match="taken its place"):
                run()
        else:
            synkro.map(lambda x: os._exit(1) if x < 2 else x, range(5), errors="return", chunksize=1)
        for rank, (values, columns) in enumerate(run()):
            serial = make()
            for _ in range(2):
                with pretending(rank):
                    change(serial)
            assert values == serial.to_numpy().tolist()
            assert columns == list(serial.columns)
        assert len(before) == 2


@contextlib.contextmanager
def pretending(rank):
    """A block in which ``synkro.rank()`` is *rank* in this process."""
    real, synkro.rank = synkro.rank, lambda: rank
    try:
        yield
    finally:
        synkro.rank = real
