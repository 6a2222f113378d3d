"""Arrays of strings, dates and records: moved as they are, and reduced where NumPy reduces them."""

import pickle

import numpy as np
import pytest

import synkro as synk
from calls.test_exact import FUNCTIONS, row_counts, selections
from support.examples import examples, given, st
from support.sessions import INLINE, current, in_turn, rows
from synkro.errors import InvalidType, InvalidValue, OutputError, WorkerError

NESTED = [("id", ">i4"), ("at", "M8[ms]"), ("px", [("bid", "f8"), ("sizes", "u2", (2, 3))]), ("s", "U3")]
PADDED = {"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [3, 8], "itemsize": 24}
DTYPES = [
    *("S1", "S7", "U1", "U5", ">U5", "V1", "V2", "V9"),
    *("M8[D]", "M8[ns]", ">M8[s]", "M8[25s]", "m8[us]", ">m8[h]"),
    NESTED,
    PADDED,
    np.dtype([("a", "i1"), ("b", "S3"), ("c", "c16")], align=True),
]
largest = FUNCTIONS["max"]
DATES = [dtype for dtype in DTYPES if np.dtype(dtype).kind in "mM"]

pytestmark = pytest.mark.counted_once


session = in_turn(1, 3)


@pytest.fixture(scope="module")
def calls(session):
    """``calls(fn, outputs)``: one ``Function`` for each."""
    made = {}
    yield lambda fn, outputs: made.setdefault((fn, outputs), session.function(fn, outputs=outputs))
    made.clear()


def filled(dtype, shape, seed=0):
    """Elements of any value, NaT among them."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    array = np.zeros(shape, dtype)
    if dtype.names is not None:
        for name in dtype.names:
            array[name] = filled(dtype[name].base, array[name].shape, seed + 1)
    elif dtype.kind == "U":
        letters = rng.integers(0, 0x2FFF, (*shape, dtype.itemsize // 4), np.uint32)
        array[...] = letters.view(f"U{letters.shape[-1]}")[..., 0] if letters.size else ""
    elif dtype.kind in "mM":
        array[...] = rng.integers(-(2**40), 2**40, shape).view(dtype.newbyteorder("="))
        array[rng.random(shape) < 0.02] = "NaT"
    elif dtype.kind in "fc":
        array[...] = rng.standard_normal(shape)
        array[rng.random(shape) < 0.1] = np.nan
    else:
        array[...] = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    return array


def same(got, want):
    """Whether all is equal but for the byte order: the dtype, the shape, the elements, NaN and NaT."""
    native = want.dtype.newbyteorder("=")
    got = np.asarray(got)
    assert (got.dtype.newbyteorder("="), got.shape) == (native, want.shape)
    got = got.astype(native)
    if native.names is not None:
        return all(same(got[name], want[name].astype(native[name].base)) for name in native.names)
    return np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want.astype(native)).tobytes()


def as_it_comes(array, form, session, tmp_path):
    if form == "Data":
        return session.data(array)
    if form == "memmap":
        path = tmp_path / "array.npy"
        np.save(path, array)
        array = np.load(path, mmap_mode="r")
    return array


# ── exactness ────────────────────────────────────────────────────────────────────────────────────


@examples(60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), tail=st.sampled_from([(), (2,), (0,)]))
def test_rows_are_moved_as_they_are(session, calls, tmp_path, data, dtype, tail):
    count = data.draw(row_counts(session.n_parallel))
    array = filled(dtype, (count, *tail), data.draw(st.integers(0, 99)))
    batch, index = data.draw(selections(count))
    options = {"batch": batch, "num_slices": data.draw(st.integers(1, 4))}
    form = data.draw(st.sampled_from(["plain", "Data", "memmap"]))
    x = as_it_comes(array, form, session, tmp_path)
    want = array[index]
    got = calls(rows, "gather")(x, **options)
    assert got.dtype.isnative
    assert same(got, want)
    kept = calls(rows, "keep")(x, **options)
    assert same(kept, want)
    assert same(calls(rows, "gather")(kept), want)
    pieces = calls(rows, None)(x, **options)
    native = want.dtype.newbyteorder("=")
    assert same(np.concatenate([np.asarray(piece) for piece in pieces], dtype=native), want)


@examples(40)
@given(data=st.data(), dtype=st.sampled_from(DATES), tail=st.sampled_from([(), (2,)]))
def test_dates_are_reduced_as_numpy_does(session, calls, data, dtype, tail):
    count = data.draw(row_counts(session.n_parallel))
    array = filled(dtype, (count, *tail), data.draw(st.integers(0, 99)))
    batch, index = data.draw(selections(count))
    options = {"batch": batch, "num_slices": data.draw(st.integers(1, 4))}
    for op in ("max", "min", *["sum"] * (array.dtype.kind == "m")):
        fn = FUNCTIONS[op]
        assert same(calls(fn, op)(array, **options), np.asarray(fn(array[index])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_outputs(session, calls, dtype):
    width = INLINE // np.dtype(dtype).itemsize + 1
    array = filled(dtype, (session.n_parallel + 1, width))
    assert same(calls(rows, "gather")(array), array)
    assert same(calls(rows, "keep")(array), array)
    if dtype in DATES:
        assert same(calls(largest, "max")(array), largest(array))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_one_process_and_checked(session, calls, dtype):
    array = filled(dtype, (5, 2))
    f = calls(rows, "gather")
    assert same(f.as_serial(array), array)
    assert same(f.check(array), array)
    assert same(f.check(session.data(array)), array)
    if dtype in DATES:
        assert same(calls(largest, "max").check(array), largest(array))


def test_check_finds_what_differs(session):
    def numbered(x):
        x = x.copy()
        x["id"] = np.arange(len(x))
        return x

    def ranked(x):
        return np.array(sorted(x))[::-1]

    if session.n_parallel == 1:
        return
    with pytest.raises(OutputError, match=r"output\['id'\] .* differs"):
        session.function(numbered, outputs="gather").check(filled(NESTED, (6,)))
    with pytest.raises(OutputError, match="differs from the plain function's"):
        session.function(ranked, outputs="gather").check(np.array(["b", "a", "c", "d"]))


@pytest.mark.parametrize("width", [1, INLINE])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("kind", ["U", "S"])
def test_gathered_strings_may_differ_in_length(session, width, slices, kind):
    words = np.array(["a", "bcd", "ef", "ghij", "k", "lmnopq", "r"]).astype(kind)

    def doubled(x):
        return np.array([word + word for word in x.tolist()] * width).reshape(-1, len(x)).T

    got = session.function(doubled, outputs="gather")(words, num_slices=slices)
    assert same(got, doubled(words))


def test_gathered_dates_of_two_units_are_refused(session):
    if session.n_parallel > 1:
        f = session.function(lambda x: x.astype(f"M8[{'sDh'[synk.rank()]}]"), outputs="gather")
        with pytest.raises(OutputError, match=r"dtype datetime64\[s\] on rank 0, but .*\[D\] on rank 1"):
            f(np.zeros(4, "M8[s]"))


def test_single_dates_keep_their_units(session):
    """The same function, with another unit in each call."""
    last = session.function(lambda x: x.max(), outputs="max")
    for dtype in ("m8[s]", "m8[ms]", "m8[s]", "M8[D]", "M8[h]"):
        array = np.array([5, 1999, 7]).astype(dtype)
        assert same(last(array), np.asarray(array.max()))


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_arrays(session, dtype):
    array = filled(dtype, (5, 2))
    f = session.function(lambda x, table: table, bcast_inputs="table", outputs=None)
    for table in (array, session.data(array)):
        assert all(same(found, array) for found in f(np.ones(7), table))


ELEMENTS = [
    *(np.datetime64("2024-02-29"), np.datetime64("NaT", "ns"), np.timedelta64(3, "h")),
    *(np.str_("ab"), np.bytes_(b"ab"), "text\0", b"bytes\0"),
    filled(NESTED, (1,))[0],
]


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: type(element).__name__)
def test_broadcast_elements_arrive_as_they_are(session, element):
    f = session.function(lambda x, one: pickle.dumps(one), bcast_inputs="one", outputs=None)
    for found in map(pickle.loads, f(np.ones(7), element)):
        assert type(found) is type(element)
        assert pickle.dumps(found) == pickle.dumps(element)


def test_a_list_of_strings_stays_a_list(session):
    f = session.function(lambda x: [type(x).__name__, *x], outputs="gather")
    found = f(["a", "b\0", "cd"])
    assert [each for each in found if each != "list"] == ["a", "b\0", "cd"]
    assert "list" in found


def test_columns_of_a_table(session):
    table = {"city": np.array(["Rome", "Oslo", "Bern"]), "day": filled("M8[D]", (3,)), "x": np.ones(3)}
    found = session.function(rows, outputs="gather")(table)
    assert all(same(found[name], column) for name, column in table.items())


def test_inputs_are_read_only(session):
    def write(x):
        x[0] = x[1]

    with pytest.raises(WorkerError, match="read-only"):
        session.function(write, outputs=[])(np.array(["a", "b"] * 3))


# ── Data ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_rows_are_zero(session, dtype):
    array = filled(dtype, (3,))
    x = session.data(array)
    x.set_length(5)
    x.set_shape((7,))
    assert same(x[:3], array)
    assert same(x[3:], np.zeros(4, dtype))
    assert same(session.data(shape=(4,), dtype=dtype)[:], np.zeros(4, dtype))


TAKEN = [
    ("U5", np.array(["abc"])),
    ("S5", np.array([b"abc"])),
    ("M8[ns]", np.array(["2024-02-29", "NaT"], "M8[D]")),
    ("m8[ms]", np.array([3], ">m8[s]")),
    ([("a", "f8"), ("b", "U4")], np.array([(1, "x")], [("a", "i4"), ("b", "U2")])),
]

LOSING = [
    ("U2", np.array(["abc"])),
    ("S2", np.array([b"abc"])),
    ("M8[D]", np.array(["2024-02-29T12"], "M8[h]")),
    ("M8[ns]", np.array(["9999-01-01"], "M8[D]")),
    ([("a", "i4")], np.array([(1.5,)], [("a", "f8")])),
    ([("at", "M8[ns]")], np.array([("9999-01-01",)], [("at", "M8[D]")])),
]

OTHER = [
    ("f8", np.array(["1.5"])),
    ("U5", np.array([1])),
    ("U5", np.array([b"a"])),
    ("m8[s]", np.array([1])),
    ("i8", np.array([1], "m8[s]")),
    ("M8[s]", np.array([1], "m8[s]")),
    ([("a", "i4"), ("b", "i4")], np.array([(1, 2)], [("b", "i4"), ("a", "i4")])),
    ([("a", [("b", "i4")])], np.array([((1,),)], [("a", [("c", "i4")])])),
]


@pytest.mark.parametrize(("dtype", "value"), TAKEN, ids=str)
def test_casts_that_lose_nothing(session, dtype, value):
    x = session.data(ndim=1, dtype=dtype)
    x.set_value(value)
    assert same(x[:], value.astype(dtype))
    assert same(session.data(value, dtype=dtype)[:], value.astype(dtype))


@pytest.mark.parametrize(("dtype", "value"), LOSING, ids=str)
def test_casts_that_lose_something(session, dtype, value):
    x = session.data(ndim=1, dtype=dtype)
    with pytest.raises(InvalidType, match=r"may lose information: .*force_cast=True"):
        x.set_value(value)
    x.set_value(value, force_cast=True)
    assert same(x[:], value.astype(dtype))


@pytest.mark.parametrize(("dtype", "value"), OTHER, ids=str)
@pytest.mark.parametrize("force", [True, False])
def test_nothing_becomes_of_another_kind(session, dtype, value, force):
    x = session.data(ndim=1, dtype=dtype)
    with pytest.raises(InvalidType, match="is no such thing: convert it yourself"):
        x.set_value(value, force_cast=force)


REFUSED = [
    ("U", 'have no bytes: say how long they are, by "U10" say'),
    ("S0", "have no bytes"),
    ("V", "have no bytes"),
    ([], "have no bytes"),
    (("i4", (3,)), r"It is an array: give the dtype int32, and the lengths \(3,\) in shape="),
    ([("a", "i4"), ("b", object)], r'Its fields hold objects: .* by "U10" say.*\.tolist\(\)'),
    ([("a", [("b", object)])], "Its fields hold objects"),
    (object, r"cannot have the dtype object: expected numbers, .*\.tolist\(\)"),
]


@pytest.mark.parametrize(("dtype", "message"), REFUSED, ids=str)
def test_dtypes_without_a_size(session, dtype, message):
    with pytest.raises(InvalidType, match=message):
        session.data(shape=(3,), dtype=dtype)


def test_records_of_objects_by_rows(session):
    array = np.array([(1, "a"), (2, "bc")], [("a", "i4"), ("b", object)])
    with pytest.raises(InvalidType, match=r"'x' .* Its fields hold objects"):
        session.function(rows, outputs="gather")(array)
    f = session.function(lambda x, table: table["b"][1], bcast_inputs="table", outputs=None)
    assert set(f(np.ones(4), array)) == {"bc"}


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="needs NumPy 2")
def test_strings_of_any_length(session):
    array = np.array(["a", "bcd"], np.dtypes.StringDType())
    with pytest.raises(
        InvalidType, match=r"expected numbers, dates, strings or records of a fixed size"
    ):
        session.data(array)


def test_lists_of_strings_are_no_data(session):
    with pytest.raises(InvalidType, match=r"of a list: .*; got \['a'\], a list\. .*give np\.array"):
        session.data(["a"])


# ── what does not reduce ─────────────────────────────────────────────────────────────────────────

REDUCTIONS = [
    ("S3", "max", 'no "max" of |S3, nor any other reduction. "gather", "keep" and outputs=None take it'),
    ("U3", "sum", 'no "sum" of <U3, nor any other'),
    (NESTED, "min", 'no "min" of [('),
    ("M8[s]", "sum", 'no "sum" of datetime64[s], only "max", "min". "gather"'),
    ("M8[s]", "mean", 'no "mean" of datetime64[s], only "max", "min"'),
    ("m8[s]", "prod", 'no "prod" of timedelta64[s], only "sum", "max", "min"'),
    ("m8[s]", "mean", 'each rank would round: take "sum", and divide by the number of rows'),
]


@pytest.mark.parametrize(("dtype", "op", "message"), REDUCTIONS, ids=str)
def test_reductions_that_numpy_does_not_have(session, dtype, op, message):
    array = filled(dtype, (4, 2))
    with pytest.raises(OutputError, match=r"output\['a'\] of the function") as caught:
        session.function(lambda x: {"a": x[0]}, outputs=op)(array)
    assert message in str(caught.value)
    variable = session.shared(array)
    for use in (
        lambda: session.reduce(variable, op),
        lambda: session.all_reduce(variable, op),
        lambda: session.function(lambda: None, updates=[(variable, op)]),
    ):
        with pytest.raises(InvalidType, match=f'there is no "{op}" of'):
            use()
    with current(session):
        for use in (
            lambda: synk.all_reduce(variable, op),
            lambda: synk.all_reduce(variable.value, op),
            lambda: synk.reduce_scatter(variable.value, op),
            lambda: synk.reduce(variable.value, op),
        ):
            with pytest.raises(WorkerError, match=f'there is no "{op}" of'):
                session.function(use, outputs=[])()


# ── variables and collectives ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variables(session, dtype, tmp_path):
    array, other = filled(dtype, (5,)), filled(dtype, (7,), 3)
    w = session.shared(array, name=f"w of {DTYPES.index(dtype)}")
    assert same(w.get_value(), array)
    session.scatter(w, other)
    assert same(session.gather(w, nd_up=0), other)
    session.save(tmp_path / "file")
    w.set_value(array)
    assert same(w.value, array)
    session.load(tmp_path / "file")
    assert same(session.gather(w, nd_up=0), other)

    def reverse():
        w.value = w.value[::-1].copy()

    w.set_value(array)
    session.function(reverse, outputs=[])()
    assert same(w.get_value(), array[::-1])
    session.function(reverse, outputs=[]).as_serial()
    assert same(w.get_value(), array)


def test_variables_take_no_longer_strings(session):
    w = session.shared(np.array(["ab"]))

    def assign(text):
        w.value = np.array([text])

    f = session.function(assign, bcast_inputs="text", outputs=[])
    f("c")
    assert w.get_value().tolist() == ["c"]
    with pytest.raises(WorkerError, match="holds <U2, got <U3: convert the values yourself"):
        f("cde")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, INLINE // 4])
def test_collectives_that_move(session, dtype, width):
    array = filled(dtype, (2 * session.n_parallel + 1, width))

    def moved(x):
        rank, size = synk.rank(), synk.size()
        whole = synk.all_gather(x)
        found = [whole, synk.broadcast(whole[::-1] if not rank else None, root=0)]
        found.append(synk.all_gather(synk.scatter(whole if not rank else None, root=0)))
        synk.send(x, (rank + 1) % size) if size > 1 else None
        back = synk.recv((rank - 1) % size) if size > 1 else x
        at_root = synk.gather(x, root=0)
        return [*found, back if at_root is None else at_root]

    found = session.function(lambda x: tuple(moved(x)), outputs=None)(array)
    for rank, (whole, reverse, scattered, last) in enumerate(found):
        assert same(whole, array)
        assert same(reverse, array[::-1])
        assert same(scattered, array)
        assert same(last, array if not rank else np.array_split(array, session.n_parallel)[rank - 1])


@pytest.mark.parametrize("dtype", DATES, ids=str)
def test_collectives_of_dates(session, dtype):
    array = filled(dtype, (3 * session.n_parallel, 3))
    f = session.function(lambda x: synk.all_reduce(x.max(axis=0), "max"), outputs=None)
    for found in f(array):
        assert same(found, array.max(axis=0))


def test_gathered_strings_of_two_lengths_in_a_collective(session):
    if session.n_parallel > 1:
        f = session.function(lambda: synk.all_gather(np.array(["a" * (1 + synk.rank())])), outputs=None)
        with pytest.raises(WorkerError, match=r"dtype <U1, but rank 1 .*dtype <U2"):
            f()


def test_kept_strings_need_one_length(session):
    if session.n_parallel > 1:
        f = session.function(lambda x: x.astype(f"U{1 + synk.rank()}"), outputs="keep")
        with pytest.raises(OutputError, match=r"dtype <U1 on rank 0, but .* <U2 on rank 1"):
            f(np.array(["a"] * 6))


def test_minibatches_and_pictures_of_rows(session):
    x = session.data(np.array(["a", "b", "c", "d"]))
    some = session.data(np.array(["x", "y"]), minibatch=True)
    f = session.function(lambda x, some: np.char.add(x, some), outputs="gather")
    assert f(x, some, batch=[3, 0]).tolist() == ["dx", "ay"]
    with pytest.raises(InvalidValue, match="different numbers of rows"):
        f(x, np.array(["x"]))
