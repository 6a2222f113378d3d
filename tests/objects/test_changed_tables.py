"""Tables, and other objects of libraries, that the program changes in place, and workers only read."""

import contextlib
import importlib
import types
import warnings

import numpy as np
import pytest

from support.sessions import lasting

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once]

session = lasting(2)


def made(package, code):
    """What makes an object of a package, which has the name ``m`` in the code."""
    return lambda: eval(code, {"np": np, "nan": np.nan, "m": importlib.import_module(package)})


def series(*values, dtype=None):
    index = list("abcdefgh")[: len(values)]
    return made("pandas", f"m.Series({list(values)}, index={index}, dtype={dtype!r})")


dates = made("pandas", "m.Series(m.date_range('2024', periods=3), index=list('abc'))")
frame = made(
    "pandas",
    "m.DataFrame({'v': np.arange(6.0), 'w': np.arange(6), 's': list('abcabc')}, index=list('uvwxyz'))",
)
polars_frame = made("polars", "m.DataFrame({'v': [1.0, 2.0], 's': ['a', 'b']})")
labelled = made("xarray", "m.DataArray(np.zeros(3), dims='x', coords={'x': [10, 20, 30]})")
dataset = made("xarray", "m.Dataset({'v': ('x', np.zeros(3))}, coords={'x': [10, 20, 30]})")
quantity = made("astropy.units", "np.arange(3.0) * m.m")
graph = made("networkx", "m.path_graph(4)")


def sparse(form):
    return made("scipy.sparse", f"m.random(9, 9, 0.5, format={form!r}, random_state=0)")


def masked():
    return np.ma.masked_greater(np.arange(4.0), 2)


def array(kind):
    return made("pandas", f"m.array([1, 2, 3], dtype={kind!r})")


PLACES = {
    "[]": lambda s, new: s.__setitem__("a", new),
    "at": lambda s, new: s.at.__setitem__("a", new),
    "iat": lambda s, new: s.iat.__setitem__(0, new),
    "loc": lambda s, new: s.loc.__setitem__("a", new),
    "iloc": lambda s, new: s.iloc.__setitem__(0, new),
    "mask": lambda s, new: s.mask(np.array([True] + [False] * (len(s) - 1)), new, inplace=True),
}
SERIES = {
    "int": (series(1, 2, 3), 77),
    "float": (series(1.0, 2.0, 3.0), 77.0),
    "bool": (series(False, False), True),
    "str": (series("x", "y", "z"), "new"),
    "object": (series("x", 1, dtype="object"), "new"),
    "category": (series("x", "y", "x", dtype="category"), "y"),
    "Int64": (series(1, None, 3, dtype="Int64"), 77),
    "boolean": (series(False, True, dtype="boolean"), True),
    "date": (dates, "1999-01-01"),
    "duration": (series(1, 2, dtype="timedelta64[s]"), np.timedelta64(9, "s")),
}


def changing(code):
    """What runs some code on an object ``o``."""
    return lambda o: exec(code, {"o": o, "np": np})


OTHERS = {
    "a series, in place": (series(1.0, 2.0), changing("o += 1")),
    "a series, its name": (dates, changing("o.name = 'n'")),
    "a series, its attrs": (dates, changing("o.attrs['k'] = 1")),
    "a series, its index": (dates, changing("o.index = list('xyz')")),
    "a series, the name of its index": (dates, changing("o.index.name = 'n'")),
    "a series, enlarged": (series(1, 2), changing("o['new'] = 5")),
    "a series, sorted": (series(3, 1, 2), changing("o.sort_values(inplace=True)")),
    "a series, updated": (series(3.0, 1.0), changing("o.update(o * 2)")),
    "a series, shortened": (series(3, 1, 2), changing("o.drop('b', inplace=True)")),
    "a series, filled": (series(3.0, np.nan), changing("o.fillna(0, inplace=True)")),
    "a frame at a place": (frame, changing("o.at['u', 'v'] = 77.0")),
    "a frame at a number": (frame, changing("o.iat[0, 1] = 77")),
    "a frame at a string": (frame, changing("o.loc['u', 's'] = 'new'")),
    "a frame, many": (frame, changing("o.loc[o.v > 2, 'w'] = -1")),
    "a frame, a column": (frame, changing("o['v'] = 7.0")),
    "a frame, a new column": (frame, changing("o['new'] = 7.0")),
    "a frame, a column less": (frame, changing("del o['v']")),
    "a frame, in place": (frame, changing("o['v'] += 1")),
    "a frame, inserted": (frame, changing("o.insert(0, 'first', 1)")),
    "a frame, taken out": (frame, changing("o.pop('v')")),
    "a frame, its columns": (frame, changing("o.columns = ['a', 'b', 'c']")),
    "a frame, its index": (frame, changing("o.index = range(5, 11)")),
    "a frame, its attrs": (frame, changing("o.attrs['k'] = 1")),
    "a frame, sorted": (frame, changing("o.sort_values('v', ascending=False, inplace=True)")),
    "a frame, a row more": (frame, changing("o.loc['new'] = [1.0, 2, 'n']")),
    "a frame, renamed": (frame, changing("o.rename(columns={'v': 'V'}, inplace=True)")),
    "a frame, its flags": (frame, changing("o.flags.allows_duplicate_labels = False")),
    "an index, its name": (lambda: frame().index, changing("o.name = 'n'")),
    "an extension array": (array("Int64"), changing("o[0] = 9")),
    "an array of strings": (array("string"), changing("o[0] = 'new'")),
    "a categorical": (array("category"), changing("o[0] = 3")),
    "an array of dates": (array("datetime64[s]"), changing("o[0] = type(o[0])('1999')")),
    "polars, a place": (polars_frame, changing("o[0, 'v'] = 9.0")),
    "polars, columns": (polars_frame, changing("o.columns = ['a', 'b']")),
    "polars, a column more": (polars_frame, changing("o.insert_column(0, o['v'].alias('new'))")),
    "polars, a string": (polars_frame, changing("o[0, 's'] = 'new'")),
    "polars, a column anew": (polars_frame, changing("o.replace_column(0, o['v'] * 2)")),
    "polars, extended": (polars_frame, changing("o.extend(o.clone())")),
    "polars, a series": (lambda: polars_frame()["v"], changing("o[0] = 9.0")),
    "polars, a series with none": (made("polars", "m.Series('s', [None, 1, 3])"), changing("o[0] = 9")),
    "polars, a series longer": (lambda: polars_frame()["v"].clone(), changing("o.extend(o.clone())")),
    "xarray, a place": (labelled, changing("o[0] = 9.0")),
    "xarray, loc": (labelled, changing("o.loc[10] = 9.0")),
    "xarray, values": (labelled, changing("o.values[0] = 9.0")),
    "xarray, attrs": (labelled, changing("o.attrs['k'] = 9.0")),
    "xarray, its name": (labelled, changing("o.name = 'n'")),
    "xarray, coordinates": (labelled, changing("o.coords['x'] = [1, 2, 3]")),
    "a dataset, a variable": (dataset, changing("o['v'][0] = 9.0")),
    "a dataset, a variable more": (dataset, changing("o['w'] = ('x', np.ones(3))")),
    "a dataset, attrs": (dataset, changing("o.attrs['k'] = 9.0")),
    "csr": (sparse("csr"), changing("o.data[0] = 9.0")),
    "lil": (sparse("lil"), changing("o[1, 1] = 5.0")),
    "dok": (sparse("dok"), changing("o[1, 1] = 5.0")),
    "masked, an element": (masked, changing("o[0] = np.ma.masked")),
    "masked, its data": (masked, changing("o.data[0] = 7")),
    "masked, its mask": (masked, changing("o.mask[0] = True")),
    "masked, filled with": (masked, changing("o.fill_value = 5")),
    "a quantity": (quantity, changing("o[0] = 9.0 * o.unit")),
    "a quantity, in place": (quantity, changing("o *= 2")),
    "a graph, an edge": (graph, changing("o.add_edge(0, 3)")),
    "a graph, an attribute": (graph, changing("o.graph['k'] = 1; o.nodes[0]['c'] = 2")),
}

CASES = {
    **{
        f"{kind} {way}": (make, lambda o, change=change, new=new: change(o, new))
        for kind, (make, new) in SERIES.items()
        for way, change in PLACES.items()
    },
    **OTHERS,
}


def shown(o):
    """All that a worker can see of an object, by many ways to look."""
    if type(o).__module__.startswith("scipy"):
        return repr(o.toarray().tolist())
    found = [str(o)]
    for name in ("attrs", "name", "index", "columns", "fill_value", "graph"):
        value = getattr(o, name, None)
        found.append("" if callable(value) else repr(value))
    if type(o).__module__.startswith("pandas"):
        found.append(repr(o.to_numpy().tolist()))
        if hasattr(o, "loc"):
            found += [repr(o.loc[label]) + repr(o.iloc[0]) for label in o.index[:1]]
            found.append(repr(o.flags.allows_duplicate_labels))
    if type(o).__module__.startswith("networkx"):
        found += [repr(sorted(o.edges)), repr(dict(o.adj)), repr(dict(o.nodes(data=True)))]
    return "; ".join(found)


HOLDERS = {
    "bare": (lambda o: o, lambda held: held),
    "in a dict": (lambda o: {"k": o}, lambda held: held["k"]),
    "in an instance": (lambda o: types.SimpleNamespace(k=o), lambda held: held.k),
}


def runs(session, way, look):
    """What calls a function without arguments in one of the ways; all ranks see the same."""
    if way == "map":
        task = lambda number: look()  # noqa: E731

        def run():
            first, *others = session.map(task, range(4))
            assert all(each == first for each in others)
            return first

        return run
    if way == "target":
        return session.function(look, target=1)
    f = session.function(look, outputs=None)

    def call():
        first, second = f()
        assert first == second
        return first

    return call


@pytest.mark.filterwarnings("ignore:.*The workers have it now as it is", "ignore:The inplace keyword")
@pytest.mark.parametrize("way", ["function", pytest.param("target", marks=pytest.mark.thorough), "map"])
@pytest.mark.parametrize("case", CASES)
def test_what_the_program_changes_in_place_reaches_the_workers(session, case, way):
    for package in ("pandas", "polars", "xarray", "scipy", "astropy", "networkx"):
        pytest.importorskip(package, reason=f"needs {package}")
    make, change = CASES[case]
    held = [(hold(make()), get) for hold, get in HOLDERS.values()]
    here = lambda: [shown(get(each)) for each, get in held]  # noqa: E731
    run = runs(session, way, here)
    before = here()
    assert run() == before
    for each, get in held:
        change(get(each))
    assert all(one != other for one, other in zip(here(), before, strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*The workers have it now as it is")
        assert run() == here()  # it is call number 2
    assert run() == here()
    for each, get in held:  # and now that all of them have been looked at, here and there
        with contextlib.suppress(Exception):  # some changes can be made once
            change(get(each))
        if way != "map":
            session.push(each)
    assert run() == here()


@pytest.mark.filterwarnings("ignore:.*The workers have it now as it is")
@pytest.mark.parametrize("target", [None, 0, [0, 1]])
def test_calls_in_the_background_see_it_as_often(session, target):
    pytest.importorskip("pandas", reason="needs pandas")
    table = frame()
    f = session.function(lambda: float(table["v"].sum()), outputs="max", target=target)
    assert f.submit().result() == 15
    table.at["u", "v"] = 100.0
    assert 115 in [f.submit().result() for _ in range(3)]
    assert f.submit().result() == 115


def fitted(package, name):
    make = made(f"sklearn.{package}", f"m.{name}()")
    rows = np.random.default_rng(0).random((20, 3))
    return lambda: make().fit(rows, rows.sum(axis=1))


def ranked(o):
    import networkx as nx

    return [round(sum(nx.pagerank(o).values()), 6), len(o.adj), dict(o.degree)[0], nx.density(o)]


READ = {
    "sklearn": (
        fitted("linear_model", "LinearRegression"),
        lambda o: float(o.predict(np.eye(3)).sum()),
        lambda o: o.set_params(positive=True),
    ),
    "a scaler": (
        fitted("preprocessing", "StandardScaler"),
        lambda o: repr(o.transform(np.eye(3))),
        lambda o: o.mean_.__iadd__(1),
    ),
    "times": (
        made("astropy.time", "m.Time(['2020-01-01', '2021-01-01'])"),
        lambda o: (repr(o.jd), repr(o.iso), repr(o.tai.mjd)),
        lambda o: put(o, o[1]),
    ),
    "places": (
        made("astropy.coordinates", "m.SkyCoord([10, 20], [1, 2], unit='deg')"),
        lambda o: repr(o.galactic) + repr(o.cartesian.x),
        lambda o: put(o, o[1]),
    ),
    "a graph": (graph, ranked, lambda o: o.add_edge(0, 3)),
    "csr": (
        sparse("csr"),
        lambda o: (float(o.sum()), o.has_sorted_indices, o.has_canonical_format),
        lambda o: o.data.__setitem__(0, 9),
    ),
    "an index": (
        made("pandas", "m.MultiIndex.from_product([[1, 2], ['a', 'b']])"),
        lambda o: (o.get_loc((1, "a")), o.is_unique, repr(o.levels), repr(o.names)),
        lambda o: setattr(o, "names", ["p", "q"]),
    ),
    "a spline": (
        made("scipy.interpolate", "m.CubicSpline([0, 1, 2, 3], [0, 1, 4, 9])"),
        lambda o: float(o(1.5)) + float(o.derivative()(1.0)),
        lambda o: o.c.__setitem__((0, 0), 9),
    ),
    "a group": (
        frame,
        lambda o: repr(o.groupby("s").sum()) + repr(o.loc["u"]),
        lambda o: put(o, 9, "v"),
    ),
    "xarray": (
        dataset,
        lambda o: repr(o.sel(x=10).v.values) + repr(o.attrs) + repr(o.encoding) + repr(o.mean()),
        lambda o: put(o.v.values, 9),
    ),
    "units": (
        made("pint", "m.UnitRegistry()"),
        lambda o: float((3 * o.ft).to("m").magnitude) + float(o("2 km").to("ft").magnitude),
        lambda o: o.define("smoot = 1.7 m"),
    ),
}


def put(o, value, place=0):
    o[place] = value


@pytest.mark.filterwarnings("ignore:.*The workers have it now as it is")
@pytest.mark.parametrize(
    ("case", "way"),
    [
        (case, way)
        for case in READ
        for way in ("function", "map")
        if way == "function" or case not in ("places", "units")  # whose dicts no task may change
    ],
)
def test_what_is_only_read_is_not_changed_here_and_on_the_workers(session, case, way):
    for package in ("pandas", "sklearn", "xarray", "scipy", "astropy", "networkx", "pint"):
        pytest.importorskip(package, reason=f"needs {package}")
    make, read, change = READ[case]
    held = {"k": make()}
    run = runs(session, way, lambda: read(held["k"]))
    before = run()
    assert before == run() == read(held["k"])
    assert all(run() == before for _ in range(3))
    change(held["k"])
    if way != "map":
        session.push(held)
    assert run() == read(held["k"]) == run()  # which keep what they compute here, too
    assert run() == read(held["k"])
