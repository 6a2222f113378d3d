"""Data: what it holds, how it reads and writes, where it lies, and what it refuses."""

import copy
import gc
import operator
import os
import pickle
import stat
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

import synkro as synk
from support.examples import examples, given, st
from support.sessions import lasting
from synkro import InvalidType, InvalidValue, SessionClosed, SharedMemoryError
from synkro.machine import available_memory, readable_bytes
from synkro.memory import segment

pytestmark = pytest.mark.quick  # on every Python version

some = examples(60)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)
DTYPES = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16", ">f4", ">i8"]


session = lasting(2)


def rows_seen(session, data):
    """What the workers see of *data*."""
    return session.function(lambda x: x, outputs="gather")(data)


# ── making it ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"value": [[1, 2], [3, 4]]}, np.array([[1, 2], [3, 4]])),
        ({"value": np.arange(3, dtype="f4")}, np.arange(3, dtype="f4")),
        ({"value": 5}, np.array(5)),
        ({"value": True}, np.array(True)),
        ({"value": range(3)}, np.arange(3)),
        ({"value": [1, 2], "dtype": "f4"}, np.array([1, 2], "f4")),
        ({"value": [1.5, 2], "dtype": "f4"}, np.array([1.5, 2], "f4")),
        ({"value": [1, 2], "dtype": complex}, np.array([1, 2], complex)),
        ({"value": [1, 2], "ndim": 1, "shape": (2,)}, np.array([1, 2])),
        ({"value": [1.7, 2.2], "dtype": int, "force_cast": True}, np.array([1, 2])),
        ({"value": np.arange(6).reshape(2, 3).T}, np.arange(6).reshape(2, 3).T),
        ({"value": np.arange(9)[::-2]}, np.arange(9)[::-2]),
        ({"value": np.float32(2.5)}, np.array(2.5, "f4")),
        ({"value": []}, np.array([])),
        ({"value": np.zeros((0, 3), "i2")}, np.zeros((0, 3), "i2")),
        ({"shape": (2, 3)}, np.zeros((2, 3))),
        ({"shape": 4, "dtype": "i2"}, np.zeros(4, "i2")),
        ({"shape": [2, 0]}, np.zeros((2, 0))),
        ({"shape": ()}, np.zeros(())),
        ({"ndim": 2}, np.zeros((0, 0))),
        ({"ndim": 1, "dtype": bool}, np.zeros(0, bool)),
        ({"ndim": 0, "dtype": "i4"}, np.zeros((), "i4")),
        ({"var": SimpleNamespace(dtype="f4", ndim=2)}, np.zeros((0, 0), "f4")),
        ({"var": SimpleNamespace(dtype="f4", ndim=1), "value": [1, 2]}, np.array([1, 2], "f4")),
        ({"var": SimpleNamespace(dtype="f4", ndim=1), "dtype": "f8"}, np.zeros(0, "f8")),
    ],
)
def test_all_forms_of_making_one(session, options, expected):
    x = session.data(**options)
    assert x.shape == expected.shape
    assert x.dtype == expected.dtype
    assert (x.ndim, x.size, x.nbytes) == (expected.ndim, expected.size, expected.nbytes)
    assert np.array_equal(x[...], expected)
    assert x.name is None
    assert x.minibatch is False


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(session, dtype):
    array = np.array([[0, 1], [1, 3]]).astype(dtype)
    x = session.data(array)
    assert x.dtype == array.dtype
    assert np.array_equal(x[:], array)
    assert np.array_equal(rows_seen(session, x), array)


def test_a_name_comes_from_the_variable_or_the_caller(session):
    var = SimpleNamespace(dtype="f4", ndim=1, name="w")
    assert session.data(var=var).name == "w"
    assert session.data(var=var, name="v").name == "v"
    assert repr(session.data([1, 2], name="v")) == "Data('v', shape=(2,), dtype=int64)"
    assert repr(session.data([1.0])) == "Data(shape=(1,), dtype=float64)"
    assert session.data([1], minibatch=True).minibatch is True


def test_it_is_a_copy(session):
    array = np.arange(3)
    x = session.data(array)
    array[:] = 9
    assert x[:].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, InvalidValue, "needs a value, a shape, an ndim"),
        ({"value": [1], "shape": (2,)}, InvalidValue, r"shape=\(2,\) does not fit .*\(1,\)"),
        ({"value": [1], "ndim": 2}, InvalidValue, "ndim= has 2, the value has 1"),
        ({"ndim": 1, "shape": (2, 2)}, InvalidValue, "ndim= has 1, shape= has 2"),
        ({"ndim": -1}, InvalidValue, "ndim must be 0 or more; got -1"),
        ({"ndim": 1.5}, InvalidType, r"ndim must be an int of 0 or more; got 1\.5"),
        ({"shape": (2, -1)}, InvalidValue, r"0 or more; got \(2, -1\)"),
        ({"shape": (2.0,)}, InvalidType, r"tuple of ints; got \(2\.0,\)"),
        ({"shape": "ab"}, InvalidType, "tuple of ints; got 'ab'"),
        ({"value": "abc"}, InvalidValue, "path of a .npy file, and cannot read .abc.: No such file"),
        ({"value": ["a"], "name": "x"}, InvalidType, "the Data 'x' cannot have the dtype <U1"),
        ({"value": [None]}, InvalidType, "dtype object"),
        ({"value": [[1], [1, 2]]}, InvalidType, "is no array"),
        ({"shape": 2, "dtype": "float33"}, InvalidType, "'float33'"),
        ({"shape": 2, "dtype": object}, InvalidType, "dtype object"),
        ({"value": [1.5], "dtype": int}, InvalidType, "may lose information"),
        ({"shape": 2, "oversize": 2.5}, InvalidValue, r"from 1 to 2; got 2\.5"),
        ({"shape": 2, "oversize": 0.5}, InvalidValue, r"from 1 to 2; got 0\.5"),
        ({"shape": 2, "oversize": float("nan")}, InvalidValue, "from 1 to 2; got nan"),
        ({"shape": 2, "oversize": "much"}, InvalidType, "from 1 to 2; got 'much'"),
    ],
)
def test_what_cannot_be_made(session, options, error, message):
    with pytest.raises(error, match=message):
        session.data(**options)


# ── as an array ──────────────────────────────────────────────────────────────────────────────────


def test_it_reads_and_writes_as_an_array(session):
    array = np.arange(12.0).reshape(4, 3)
    x = session.data(array)
    assert len(x) == 4
    assert np.array_equal(x.data, array)
    assert np.array_equal(x[1:, ::2], array[1:, ::2])
    assert x[2, 1] == 7
    assert [row.tolist() for row in x] == array.tolist()
    x[0] = 9
    x[1:, 0] = [1, 2, 3]
    x[x[:] > 8] = -1
    array[0] = 9
    array[1:, 0] = [1, 2, 3]
    array[array > 8] = -1
    assert np.array_equal(x, array)
    assert np.array_equal(rows_seen(session, x), array)


def test_views_of_it_share_its_memory(session):
    x = session.data(np.zeros(4))
    view = x[1:3]
    view[:] = 5
    assert x[:].tolist() == [0, 5, 5, 0]
    assert np.shares_memory(np.asarray(x), x.data)


def test_0d_is_a_number(session):
    x = session.data(2.5)
    assert x[()] == 2.5
    x[...] = 4
    assert x + 1 == 5
    with pytest.raises(TypeError, match="unsized"):
        len(x)


def test_empty_reads_as_empty(session):
    x = session.data(np.zeros((0, 3)))
    assert len(x) == 0
    assert list(x) == []
    assert np.sum(x) == 0


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lt", "eq"])
def test_arithmetic_with_numbers_arrays_and_data(session, name):
    op, array = getattr(operator, name), np.array([1.0, 2, 5])
    x, y = session.data(array), session.data(array[::-1])
    for left, right in ((x, 2), (2, x), (x, array), (array, x), (x, y), (x, x)):
        result = op(left, right)
        expected = op(*(np.asarray(side) for side in (left, right)))
        assert type(result) is np.ndarray
        assert np.array_equal(result, expected)


def test_unary_and_matrix_operators(session):
    array = np.array([[1, -2], [3, 4]])
    x = session.data(array)
    assert np.array_equal(-x, -array)
    assert np.array_equal(abs(x), abs(array))
    assert np.array_equal(~x, ~array)
    assert np.array_equal(x @ x, array @ array)
    assert np.array_equal(array @ x, array @ array)
    assert [part.tolist() for part in divmod(x, 2)] == [part.tolist() for part in divmod(array, 2)]


def test_in_place_arithmetic_writes_the_shared_memory(session):
    x = session.data([1.0, 2.0])
    before = x
    x += 1
    x *= session.data([2.0, 3.0])
    assert x is before
    assert rows_seen(session, x).tolist() == [4, 9]


def test_ufuncs_and_numpys_functions(session):
    array = np.array([1.0, 4.0, 9.0])
    x, out = session.data(array), session.data(np.zeros(3))
    assert np.array_equal(np.sqrt(x), np.sqrt(array))
    assert np.sqrt(x, out=out) is out
    assert out[:].tolist() == [1, 2, 3]
    plain = np.empty(3)
    assert np.add(x, x, out=plain) is plain
    assert plain.tolist() == [2, 8, 18]
    assert np.add.reduce(x) == 14
    np.add.at(x, [0, 0], 1)
    assert x[:].tolist() == [3, 4, 9]
    assert np.mean(x) == np.mean(x[:])
    assert np.concatenate([x, x]).tolist() == [3, 4, 9] * 2
    fraction, whole = np.modf(x, out=(out, plain))
    assert np.array_equal(fraction + whole, x)
    assert out[:].tolist() == [0, 0, 0]


def test_asarray_copies_only_where_it_must(session):
    x = session.data([1.0, 2.0], name="x")
    assert np.shares_memory(np.asarray(x), x.data)
    assert not np.shares_memory(np.array(x), x.data)
    assert np.asarray(x, "f4").dtype == np.float32
    assert np.shares_memory(x.__array__(copy=False), x.data)
    with pytest.raises(ValueError, match=r"'x' of float64 as .* needs a copy"):
        x.__array__(np.float32, copy=False)


# ── growing and shrinking ────────────────────────────────────────────────────────────────────────


@some
@given(
    steps=st.integers(0, 3).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, 6)] * n), min_size=2, max_size=5)
    ),
    oversize=st.sampled_from([1, 1.3, 2]),
    dtype=st.sampled_from(["f8", "i2", "?"]),
)
def test_set_shape_keeps_what_is_in_both_and_zeroes_the_rest(session, steps, oversize, dtype):
    x = session.data(shape=steps[0], dtype=dtype)
    for number, shape in enumerate(steps):
        expected = np.zeros(shape, dtype)
        common = tuple(slice(0, min(a, b)) for a, b in zip(x.shape, shape, strict=True))
        expected[common] = x[common]
        x.set_shape(shape, oversize)
        assert x.shape == shape
        assert np.array_equal(x[...], expected)
        x[...] = number + 1


@some
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), oversize=st.floats(1, 2))
def test_set_length_keeps_rows_and_adds_zeros(session, lengths, oversize):
    x = session.data(np.full((3, 2), 7))
    for length in lengths:
        expected = np.zeros((length, 2), int)
        kept = min(length, len(x))
        expected[:kept] = x[:kept]
        x.set_length(length, oversize)
        assert np.array_equal(x, expected)
        x[:] = length + 1


@some
@given(first=shapes, data=st.data())
def test_set_value_takes_any_shape_of_the_same_ndim(session, first, data):
    x = session.data(np.ones(first))
    shape = data.draw(st.tuples(*[st.integers(0, 6)] * len(first)))
    value = np.arange(np.prod(shape, dtype=int), dtype="f8").reshape(shape)
    x.set_value(value)
    assert np.array_equal(x[...], value)


def test_the_workers_follow_every_change(session):
    f = session.function(lambda x: x, outputs="gather")
    x = session.data(np.arange(4))
    for change in (
        lambda: x.set_length(2),
        lambda: x.set_length(3),
        lambda: x.set_length(1000),
        lambda: x.set_value(np.arange(7)),
        lambda: x.__setitem__(slice(None), 1),
        lambda: (x.free_memory(), x.set_value([5, 6])),
    ):
        change()
        assert np.array_equal(f(x), x[:])


def test_oversize_leaves_room_to_grow(session):
    x = session.data(np.arange(100), oversize=1.5)
    assert x.alloc_size == 150
    start = x[:].__array_interface__["data"][0]
    x.set_length(150)
    assert x[:].__array_interface__["data"][0] == start
    assert x.alloc_size == 150
    x.set_length(151, oversize=2)
    assert x.alloc_size == 302
    assert x[:100].tolist() == list(range(100))
    assert not x[100:].any()
    x.set_length(10)
    assert x.alloc_size == 302
    assert session.data(np.arange(100)).alloc_size == 100


def test_views_stay_valid_when_it_moves(session):
    x = session.data(np.arange(4))
    view = x[:]
    x.set_length(10_000)
    x[:] = 1
    x.free_memory()
    assert view.tolist() == [0, 1, 2, 3]


def test_changing_ndim_is_refused(session):
    with pytest.raises(InvalidValue, match=r"'x' has 2 dimensions.*number of dimensions cannot"):
        session.data(np.zeros((2, 2)), name="x").condition_data(1.0)
    with pytest.raises(InvalidValue, match="no dimensions, so it has no length"):
        session.data(1.0).set_length(2)


def test_free_memory_leaves_no_rows_and_can_be_filled_again(session):
    x = session.data(np.ones((3, 2), "f4"))
    x.free_memory()
    assert (x.shape, x.ndim, x.dtype, x.alloc_size) == ((0, 0), 2, np.float32, 0)
    x.free_memory()
    x.set_value(np.ones((1, 2), "f4"))
    assert np.array_equal(rows_seen(session, x), [[1, 1]])


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_freed_one_takes_a_shape_again(session, shape):
    x = session.data(np.ones(shape))
    x.free_memory()
    x.set_shape(shape)
    assert np.array_equal(x[...], np.zeros(shape))


def test_freed_memory_is_given_back(session):
    before = len(os.listdir("/proc/self/fd"))
    kept = [session.data(np.ones(1000)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) > before
    for x in kept:
        x.free_memory()
    assert len(os.listdir("/proc/self/fd")) == before
    x = session.data([1])
    del x
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# ── casts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("f8", np.array([1], "f4"), [1]),
        ("f8", np.array([1], "i4"), [1]),
        ("i8", np.array([True]), [1]),
        ("c8", np.array([1.5], "f4"), [1.5]),
        ("f4", [0.1], np.array([0.1], "f4")),
        ("i1", [1, -128], [1, -128]),
        ("u1", [0, 255], [0, 255]),
        ("f4", [1, 2], [1, 2]),
        ("c8", [1.5], [1.5]),
        ("f2", [True], [1]),
        ("?", [True, False], [True, False]),
    ],
)
def test_casts_that_lose_nothing(session, dtype, value, expected):
    x = session.data(ndim=1, dtype=dtype)
    x.set_value(value)
    assert x.dtype == np.dtype(dtype)
    assert np.array_equal(x, expected)
    conditioned = x.condition_data(value)
    assert conditioned.dtype == np.dtype(dtype)


LOSSY = [
    ("f4", np.array([1.0])),
    ("i4", np.array([1], "i8")),
    ("u4", np.array([1], "i4")),
    ("f8", np.array([1j])),
    ("f4", np.array([1], "i4")),
    ("i8", [1.5]),
    ("i1", [128]),
    ("u1", [-1]),
    ("?", [1]),
    ("f8", [1j]),
    ("i8", [1.0]),
]


@pytest.mark.parametrize(("dtype", "value"), LOSSY)
def test_casts_that_may_lose_raise(session, dtype, value):
    x = session.data(np.ones(2).astype(dtype), name="x")
    for wrong in (x.set_value, x.condition_data):
        with pytest.raises(InvalidType, match=f"'x' holds {x.dtype}.*force_cast=True"):
            wrong(value)
    assert np.array_equal(x, np.ones(2))
    with pytest.raises(InvalidType, match="may lose information"):
        session.data(value, dtype=dtype)


@pytest.mark.parametrize(("dtype", "value"), LOSSY)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_force_cast_casts_as_numpy(session, dtype, value):
    with np.errstate(all="ignore"):
        expected = np.asarray(value).astype(dtype)
    x = session.data(ndim=1, dtype=dtype)
    x.set_value(value, force_cast=True)
    assert np.array_equal(x, expected)
    assert np.array_equal(x.condition_data(value, True), expected)
    assert np.array_equal(session.data(value, dtype=dtype, force_cast=True), expected)


def test_objects_cannot_be_forced(session):
    x = session.data([1.0])
    for wrong in ([None], ["1"], np.zeros(1, object), np.zeros(1, "m8[s]")):
        with pytest.raises(InvalidType, match=r"expected (bools|numbers)|is no such thing"):
            x.set_value(wrong, force_cast=True)


def test_conditioning_changes_nothing(session):
    x = session.data([1.0, 2.0])
    array = np.array([3.0, 4.0, 5.0])
    assert x.condition_data(array) is array
    assert x[:].tolist() == [1, 2]


@pytest.mark.parametrize(
    "part", [np.s_[::-1], np.s_[1:], np.s_[:2], np.s_[[2, 0]], np.s_[::2], np.s_[1:1], np.s_[:]]
)
def test_set_value_to_a_part_of_itself(session, part):
    x = session.data(np.arange(4))
    x.set_value(x[part])
    assert x[:].tolist() == np.arange(4)[part].tolist()


def test_set_value_to_another_data_and_to_itself(session):
    x, y = session.data([1, 2]), session.data([3, 4, 5])
    x.set_value(y)
    assert x[:].tolist() == [3, 4, 5]
    x.set_value(x)
    assert x[:].tolist() == [3, 4, 5]
    y[:] = 0
    assert x[:].tolist() == [3, 4, 5]


# ── its memory ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1000,)])
def test_it_begins_at_a_multiple_of_64_bytes(session, shape):
    where = session.function(
        lambda *arrays: [np.asarray(a.__array_interface__["data"][0]) for a in arrays],
        bcast_inputs="arrays",
        outputs=None,
    )
    datas = [session.data(np.ones(shape, dtype)) for dtype in ("i1", "f4", "c16")]
    assert all(x[...].__array_interface__["data"][0] % 64 == 0 for x in datas)
    assert all(int(address) % 64 == 0 for rank in where(*datas) for address in rank)


def open_files():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}


def test_segments_are_private_and_have_no_name(session):
    listed = set(os.listdir("/dev/shm"))
    before = open_files()
    kept = session.data(np.ones(5000))
    new = open_files() - before
    assert set(os.listdir("/dev/shm")) == listed
    assert new
    for fd in new:
        status = os.stat(f"/proc/self/fd/{fd}")
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert status.st_blocks * 512 >= kept.nbytes
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/")
        assert not os.get_inheritable(int(fd))


def test_a_memfd_serves_where_dev_shm_is_too_small(session, monkeypatch):
    monkeypatch.setattr(segment, "shm_free", lambda: 1 << 20)
    before = open_files()
    array = np.arange(1 << 19, dtype="f8")
    x = session.data(array)
    new = open_files() - before
    assert new
    for fd in new:
        assert "memfd:synkro" in os.readlink(f"/proc/self/fd/{fd}")
        assert stat.S_IMODE(os.stat(f"/proc/self/fd/{fd}").st_mode) == 0o600
    assert np.array_equal(x, array)
    f = session.function(lambda x: x.sum(), outputs="sum")
    assert f(x) == array.sum()


def test_asking_for_more_memory_than_there_is(session):
    length = available_memory() // 8 * 4
    x = session.data(np.arange(3.0), name="huge")
    asked = readable_bytes(length * 8)
    message = rf"'huge' of shape .*{asked} .*were asked for.* has [\d.]+ \w+ of memory left"
    with pytest.raises(SharedMemoryError, match=message) as caught:
        x.set_length(length)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(SharedMemoryError, match=asked):
        session.data(shape=length)
    assert x[:].tolist() == [0, 1, 2]
    assert rows_seen(session, x).tolist() == [0, 1, 2]


VIEWS = [lambda x: x.data, lambda x: x[:], lambda x: x[1, ::2], lambda x: memoryview(x.data), iter]


@pytest.mark.parametrize("view", VIEWS, ids=["data", "slice", "part", "memoryview", "iterator"])
@pytest.mark.parametrize("of_a_file", [False, True], ids=["memory", "file"])
def test_its_copies_on_gpus_are_renewed_only_where_a_view_lived(
    session, monkeypatch, tmp_path, view, of_a_file
):
    array = np.ones((3, 4))
    if of_a_file:
        np.save(tmp_path / "x.npy", array)
        array = np.load(tmp_path / "x.npy", mmap_mode="r")
    x = session.data(array)
    touched = []
    monkeypatch.setattr(session.services.engine, "touch", touched.append)

    def renewed():
        touched.clear()
        x.touch_if_shared()
        return touched != []

    assert not renewed()
    held = view(x)
    assert [renewed(), renewed()] == [True, True]
    del held
    assert [renewed(), renewed(), renewed()] == [True, False, False]  # written to until it went, perhaps


# ── whose it is ──────────────────────────────────────────────────────────────────────────────────


def test_freed_and_empty_data_are_refused(session):
    f = session.function(lambda x: x.sum(), outputs="sum", name="f")
    x = session.data([1, 2])
    assert f(x) == 3
    x.free_memory()
    for empty in (x, session.data(ndim=1)):
        with pytest.raises(InvalidValue, match="argument 'x' of the function 'f' has no memory"):
            f(empty)
    x.set_value([4, 5])
    assert f(x) == 9


def test_contents_outlive_the_session():
    with synk.Session(1, verbose=False) as session:
        x = session.data(np.arange(5), oversize=2)
    assert x[:].tolist() == [0, 1, 2, 3, 4]
    x[0] = 9
    assert (x + 1).tolist() == [10, 2, 3, 4, 5]
    x.set_value([5, 4, 3, 2, 1])
    assert x[:].tolist() == [5, 4, 3, 2, 1]
    with pytest.raises(SessionClosed, match="closed"):
        x.set_length(1000)
    with pytest.raises(SessionClosed, match="closed"):
        session.data([1])
    x.free_memory()
    assert len(x) == 0


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_not_pickled(session, send):
    x = session.data([1], name="x")
    with pytest.raises(InvalidType, match=r"the Data 'x' cannot be pickled.*x\[:\]\.copy\(\)"):
        send(x)
    send(x[:].copy())


def test_other_libraries_take_the_memory_by_dlpack(session, tmp_path):
    x = session.data(np.arange(6.0).reshape(3, 2))
    view = np.from_dlpack(x)
    assert np.shares_memory(view, x[:])
    view[1] = 7.0
    assert (x[1] == 7.0).all()
    assert session.function(lambda x: x.sum(), outputs="sum")(x) == view.sum()
    np.save(tmp_path / "x.npy", view)
    mapped = np.from_dlpack(session.data(tmp_path / "x.npy"))
    assert not mapped.flags.writeable
    assert (mapped == view).all()
    assert x.__dlpack_device__() == view.__dlpack_device__()
