"""``f.options(out=target)``: gathered outputs go where the user wants them."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest

import synkro as synk
from support.sessions import current, in_turn, lasting, rows, running
from support.targets import BIG, SMALL, doubled, numbers, small_disk
from synkro import (
    CallTimeout,
    InvalidIndex,
    InvalidType,
    InvalidValue,
    OutputError,
    SessionClosed,
    WorkerDied,
    WorkerError,
)
from synkro.controller.results.transfer import Transfer

pytestmark = pytest.mark.counted_once  # a session keeps memory for the next large outputs

SELECTIONS = {
    "all": None,
    "first": 40,
    "slice": slice(3, 90, 4),
    "backwards": slice(None, None, -1),
    "list": [5, 5, 100, 0, 7],
    "mask": np.arange(101) % 3 == 1,
    "one": [4],
}


started = in_turn(3, rarely=[2])


@pytest.fixture
def session(started):
    with current(started):
        yield started


two = lasting(2)


def filled(shape, dtype, **options):
    return np.full(shape, -1, dtype, **options)


def mapped(shape, dtype, path, **options):
    return np.lib.format.open_memmap(path / "x.npy", "w+", dtype, shape, **options)


def raw(path, dtype, offset, shape):
    return np.memmap(path / "raw", dtype, "w+", offset, shape)


def copy_on_write(shape, dtype, path):
    np.save(path / "c.npy", filled(shape, dtype))
    return np.load(path / "c.npy", mmap_mode="c")


TARGETS = {  # of a shape and a dtype, by files in a folder
    "array": lambda s, dtype, path: filled(s, dtype),
    "in_fortran_order": lambda s, dtype, path: filled(s, dtype, order="F"),
    "every_other_column": lambda s, dtype, path: filled((s[0], 2 * s[1]), dtype)[:, ::2],
    "backwards": lambda s, dtype, path: filled(s, dtype)[::-1],
    "data": lambda s, dtype, path: synk.data(filled(s, dtype)),
    "mapped": mapped,
    "mapped_rows": lambda s, dtype, path: raw(path, dtype, 13, (s[0] + 2, *s[1:]))[1:-1],
    "mapped_in_fortran_order": lambda s, dtype, path: mapped(s, dtype, path, fortran_order=True),
    "mapped_columns": lambda s, dtype, path: raw(path, dtype, 0, (s[0], 2 * s[1]))[:, 1::2],
    "view_of_a_map": lambda s, dtype, path: np.asarray(mapped(s, dtype, path))[::-1],
    "copy_on_write": copy_on_write,
}


@pytest.fixture
def make(request):
    """What makes the target that the test's parameter names."""
    return TARGETS[request.param]


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("make", TARGETS, indirect=True)
def test_it_takes_what_numpy_says(session, tmp_path, make, columns):
    x = numbers(columns)
    target = make(x.shape, x.dtype, tmp_path)
    into = synk.function(doubled, outputs="gather").options(out=target)
    for factor in (1, -3):  # the second call finds all that the first has made
        assert into(synk.data(factor * x)) is target
        assert np.array_equal(target, 2 * factor * x)
    if make is mapped:
        assert np.array_equal(np.load(tmp_path / "x.npy"), target)


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("slices", [1, 3, "auto"])
def test_any_rows_and_slices(session, tmp_path, columns, name, slices):
    x = numbers(columns)
    batch = SELECTIONS[name]
    expected = 2 * (x if batch is None else x[:batch] if isinstance(batch, int) else x[batch])
    f = synk.function(doubled, outputs="gather")
    shared = synk.data(x)
    for kind in ("array", "data", "mapped"):
        target = TARGETS[kind](expected.shape, x.dtype, tmp_path)
        f.options(out=target)(shared, batch=batch, num_slices=slices)
        assert np.array_equal(target, expected)


def test_broadcast_inputs_and_other_dtypes(session, tmp_path):
    x, shift = numbers(BIG), 3 - 1j
    target = synk.data(np.zeros(x.shape, "c8"))
    f = synk.function(lambda x, shift: x + shift, bcast_inputs="shift", outputs="gather")
    f.options(out=target)(x, shift)
    assert np.array_equal(target, x + shift)
    flags = np.zeros(len(x), bool)
    synk.function(lambda x: x[:, 0] > 5, outputs="gather").options(out=flags)(x)
    assert np.array_equal(flags, x[:, 0] > 5)


def test_rows_that_a_function_leaves_out_or_adds(session):
    x = numbers(SMALL)
    picked = synk.data(np.zeros((51, SMALL), "f4"))
    synk.function(lambda x: x[x[:, 0] % 2 == 0], outputs="gather").options(out=picked)(x)
    assert np.array_equal(picked, x[::2])
    twice = np.zeros((202, SMALL), "f4")
    synk.function(lambda x: x.repeat(2, axis=0), outputs="gather").options(out=twice)(x)
    assert np.array_equal(twice, x.repeat(2, axis=0))
    none = np.zeros((0, SMALL), "f4")
    assert synk.function(lambda x: x[:0], outputs="gather").options(out=none)(x) is none


def test_what_was_a_target_is_an_input_and_the_other_way_round(session):
    x = numbers(BIG)
    one, other = synk.data(x), synk.data(np.zeros_like(x))
    f = synk.function(doubled, outputs="gather")
    for _ in range(3):
        f.options(out=other)(one)
        f.options(out=one)(other)
    assert np.array_equal(one, x * 64)
    assert synk.function(lambda x: x.flags.writeable, outputs=None)(other) == [False] * (
        session.n_parallel
    )


def test_a_target_that_has_moved(session):
    x = numbers(BIG)
    target = synk.data(np.zeros((2, BIG), "f4"))
    f = synk.function(doubled, outputs="gather").options(out=target)
    f(x, batch=2)
    target.set_length(101)
    f(x)
    assert np.array_equal(target, 2 * x)
    target.set_length(50)
    f(x, batch=slice(51, None))
    assert np.array_equal(target, 2 * x[51:])


def test_what_workers_hold_and_keep(session):
    table = numbers(BIG)
    held = synk.shared(np.zeros((0, BIG), "f4"))
    synk.scatter(held, table)
    f = synk.function(lambda x: {"rows": x, "kept": -x}, outputs={"rows": "gather", "kept": "keep"})
    target = synk.data(np.zeros_like(table))
    found = f.options(out={"rows": target, "kept": None})(held)
    assert found["rows"] is target
    assert np.array_equal(target, table)
    negative = np.zeros_like(table)
    synk.function(rows, outputs="gather").options(out=negative)(found["kept"])
    assert np.array_equal(negative, -table)


def described(x):
    return {"rows": 2 * x, "sums": (x.sum(axis=1), x.sum(axis=0)), "most": x.max()}


MODES = {"rows": "gather", "sums": ("gather", "sum"), "most": "max"}


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
def test_several_outputs(session, columns):
    x = numbers(columns)
    doubles, sums = synk.data(np.zeros_like(x)), np.zeros(len(x), "f4")
    f = synk.function(described, outputs=MODES)
    found = f.options(out={"most": None, "sums": [sums, None], "rows": doubles})(x)
    assert list(found) == ["rows", "sums", "most"]
    assert found["rows"] is doubles
    assert found["sums"][0] is sums
    assert np.array_equal(doubles, 2 * x)
    assert np.array_equal(sums, x.sum(axis=1))
    assert np.allclose(found["sums"][1], x.sum(axis=0))
    assert found["most"] == x.max()


def test_some_of_several_outputs(session):
    x = numbers(SMALL)
    f = synk.function(described, outputs=MODES)
    doubles = np.zeros_like(x)
    found = f.options(out={"most": None, "rows": doubles})(x, output_subset=["most", "rows"])
    assert found["rows"] is doubles
    assert np.array_equal(doubles, 2 * x)
    with pytest.raises(OutputError, match="a dict with the keys"):
        f.options(out={"most": None, "rows": doubles})(x)
    both = synk.function(lambda x: (x, -x), outputs="gather")
    one, other = both.options(out=(doubles, None))(x)
    assert one is doubles
    assert np.array_equal(doubles, x)
    assert np.array_equal(other, -x)


def test_targets_for_all_of_several_outputs_of_which_some_are_wanted(session):
    x = numbers(SMALL)
    doubles, negative, other = (np.zeros_like(x) for _ in range(3))
    f = synk.function(described, outputs=MODES)
    found = f.options(out=dict.fromkeys(MODES) | {"rows": doubles})(x, output_subset=["most", "rows"])
    assert list(found) == ["most", "rows"]
    assert found["rows"] is doubles
    assert np.array_equal(doubles, 2 * x)
    both = synk.function(lambda x: (x, -x), outputs="gather").options(out=(other, negative))
    assert both(x, output_subset=[1])[0] is negative
    assert np.array_equal(negative, -x)
    assert not other.any()
    with pytest.raises(InvalidIndex, match=r"output_subset=\['most'\] names .* out= has .*'none'"):
        f.options(out={"rows": doubles, "none": None})(x, output_subset=["most"])


def test_an_array_may_be_input_and_target(session):
    x = numbers(BIG)
    expected = 2 * x
    synk.function(doubled, outputs="gather").options(out=x)(x)
    assert np.array_equal(x, expected)


def test_submitted_calls(session):
    x = numbers(BIG)
    f = synk.function(doubled, outputs="gather")
    targets = [synk.data(np.zeros_like(x)) for _ in range(3)]
    futures = [f.options(out=t).submit(n * x) for n, t in enumerate(targets)]
    for n, (future, target) in enumerate(zip(futures, targets, strict=True)):
        assert future.result() is target
        assert np.array_equal(target, 2 * n * x)
    with pytest.raises(OutputError, match=r"has shape \(101"):
        f.options(out=targets[0][1:]).submit(x).result()


def test_functions_on_some_ranks(two):
    with current(two):
        x, target = numbers(BIG), synk.data(np.zeros((101, BIG), "f4"))
        other = np.zeros_like(x)
        for where in (1, [1], [0, 1]):
            f = synk.function(doubled, outputs="gather", target=where)
            f.options(out=target)(x)
            assert np.array_equal(target, 2 * x)
            target[:] = 0
        first = synk.function(doubled, outputs="gather", target=0).options(out=other).submit(x)
        synk.function(doubled, outputs="gather", target=1).options(out=target).submit(x).result()
        assert np.array_equal(first.result(), target)
        with pytest.raises(OutputError, match='say outputs="gather" for it'):
            synk.function(doubled, target=1).options(out=target)(x)


def test_a_plain_call_knows_nothing_of_the_target(session):
    x, target = numbers(SMALL), np.zeros((101, SMALL), "f4")
    f = synk.function(doubled, outputs="gather")
    with pytest.raises(InvalidType, match="called wrongly"):
        f.options(out=target)()
    assert np.array_equal(f(x), 2 * x)
    assert not target.any()
    assert f.options(out=None)(x) is not target


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


class Counted:
    """A function, and how often it has run: in a file, as it runs on the workers."""

    def __init__(self, path):
        self.path = path

    def __call__(self, x):
        with open(self.path, "a") as file:
            file.write(".")
        return 2 * x

    def runs(self):
        return os.path.getsize(self.path) if self.path.exists() else 0


@pytest.fixture
def counted(tmp_path):
    return Counted(tmp_path / "runs")


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        ("x.npy", InvalidType, "open the file: numpy.lib.format.open_memmap"),
        (3.0, InvalidType, "out= takes an array of NumPy's, a Data, a memory-mapped array or a zarr"),
        ([0.0] * 3, InvalidType, r"got 0\.0, .* a list of numbers is no array: give np\.zeros"),
        ((np.ma.zeros(3), None), InvalidType, "give one of these"),
        ((), InvalidValue, "names no target"),
        ({"a": None}, InvalidValue, "names no target"),
    ],
)
def test_what_is_no_target(session, out, error, says):
    with pytest.raises(error, match=says):
        synk.function(doubled, outputs="gather").options(out=out)


def test_a_variable_is_no_target(session):
    with pytest.raises(InvalidType, match="a variable lives on the workers"):
        synk.function(doubled, outputs="gather").options(out=synk.shared(np.zeros(3)))


@pytest.mark.parametrize(
    ("modes", "out", "says"),
    [
        ("sum", "one", "comes back by 'sum'.* say outputs=\"gather\""),
        (None, "one", "comes back as a list"),
        ("keep", "one", "comes back by 'keep'"),
        (["gather", "gather"], "one", "one target for the function .* its outputs= are a list of 2"),
        (["gather", "sum"], "two", r"output\[1\] of the function .* comes back by 'sum'"),
        (["gather", "gather", "sum"], "two", "a tuple of 2 for the function .*are a list of 3"),
        ({"a": "gather"}, "two", "out= has a tuple of 2 .* its outputs= are a dict"),
    ],
)
def test_outputs_that_are_not_gathered(session, counted, modes, out, says):
    x = numbers(SMALL)
    target = np.zeros_like(x)
    f = synk.function(counted, outputs=modes)
    with pytest.raises(OutputError, match=says):
        f.options(out=target if out == "one" else (target, target.copy()))(x)
    assert counted.runs() == 0


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("make", ["array", "data", "mapped", "every_other_column"], indirect=True)
@pytest.mark.parametrize(("rows", "dtype"), [(100, "f4"), (101, "f8"), (101, ">f8"), (101, "i4")])
def test_shapes_and_dtypes_are_those_of_the_output(session, tmp_path, make, columns, rows, dtype):
    x = numbers(columns)
    target = make((rows, columns), dtype, tmp_path)
    before = np.array(target)
    f = synk.function(doubled, outputs="gather")
    with pytest.raises(OutputError, match="they have to be equal") as error:
        f.options(out=target)(x)
    for part in (x.shape, x.dtype, target.shape, target.dtype):
        assert f" {part}" in str(error.value)
    assert np.array_equal(target, before)
    assert np.array_equal(f(x), 2 * x)


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("make", ["array", "data", "mapped", "every_other_column"], indirect=True)
@pytest.mark.parametrize(("dtype", "target_dtype"), [("<f4", ">f4"), (">f4", "<f4"), (">f4", ">f4")])
def test_another_order_of_bytes(session, tmp_path, make, columns, dtype, target_dtype):
    x = numbers(columns)
    target = make(x.shape, target_dtype, tmp_path)
    f = synk.function(lambda x: (2 * x).astype(dtype), outputs="gather").options(out=target)
    for sign in (1, -1):
        assert np.array_equal(f(sign * x), 2 * sign * x)
    assert target.dtype == target_dtype


def test_records_in_another_order_of_bytes(session):
    target = np.zeros(101, [("a", ">i4"), ("b", ">f8", (2,))])
    x = np.zeros(101, target.dtype.newbyteorder("="))
    x["a"] = np.arange(101)
    x["b"] = np.arange(202).reshape(101, 2)
    f = synk.function(lambda x: x, outputs="gather").options(out=target)
    assert np.array_equal(f(x), x)
    with pytest.raises(OutputError, match="they have to be equal"):
        f.options(out=np.zeros(101, [("a", ">i4"), ("c", ">f8", (2,))]))(x)


def test_none_is_written_where_one_does_not_fit(session):
    x = numbers(BIG)
    good, bad = synk.data(np.zeros_like(x)), np.zeros(7)
    both = synk.function(lambda x: (x, x.sum(axis=1)), outputs="gather")
    with pytest.raises(OutputError, match=r"output\[1\]"):
        both.options(out=(good, bad))(x)
    assert not good[:].any()


def test_what_an_earlier_call_has_told_is_found_before(session, counted):
    x = synk.data(numbers(SMALL))
    f = synk.function(counted, outputs="gather")
    f(x)
    runs = counted.runs()
    for out in (np.zeros(x.shape), np.zeros(101, "f4"), (np.zeros((101, SMALL), "f4"), None)):
        with pytest.raises(OutputError):
            f.options(out=out)(x)
    assert counted.runs() == runs


def test_lengths_may_be_others_than_in_an_earlier_call(session):
    x = synk.data(numbers(SMALL))
    f = synk.function(lambda x, k: x[:, :k], bcast_inputs="k", outputs="gather")
    f(x, 1)
    target = np.zeros((101, 2), "f4")
    f.options(out=target)(x, 2)
    assert np.array_equal(target, x[:, :2])


def test_lists_of_anything_have_no_target(session):
    f = synk.function(lambda x: [str(one) for one in x], outputs="gather")
    with pytest.raises(OutputError, match="a list of what is no array"):
        f.options(out=np.zeros(101))(numbers(1))


def test_read_only_targets(session, tmp_path, counted):
    x = numbers(SMALL)
    np.save(tmp_path / "x.npy", x)
    fixed = x.copy()
    fixed.flags.writeable = False
    f = synk.function(counted, outputs="gather")
    for target, says in (
        (fixed, "an array of shape .* that is read-only: give one"),
        (np.load(tmp_path / "x.npy", mmap_mode="r"), r'read-only: open the file with mode="r\+"'),
        (synk.data(np.load(tmp_path / "x.npy", mmap_mode="r")), "a Data in out= is read-only. If it sh"),
    ):
        with pytest.raises(InvalidValue, match=says):
            f.options(out=target)(x)
    assert counted.runs() == 0


def test_targets_that_overlap(session, tmp_path, counted):
    x = numbers(SMALL)
    f = synk.function(lambda x: (counted(x), x), outputs="gather")
    table, shared = np.zeros((150, SMALL), "f4"), synk.data(np.zeros((101, SMALL), "f4"))
    first = mapped(x.shape, "f4", tmp_path)
    second = np.load(tmp_path / "x.npy", mmap_mode="r+")
    for pair in ((table[:101], table[49:]), (shared, shared), (shared, shared[:]), (first, second)):
        with pytest.raises(InvalidValue, match="two targets in out= overlap"):
            f.options(out=pair)(x)
    assert counted.runs() == 0


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("make", ["array", "mapped", "view_of_a_map"], indirect=True)
def test_targets_that_lie_between_each_other(session, tmp_path, make, columns):
    x = numbers(columns)
    f = synk.function(lambda x: (x, 2 * x), outputs="gather")
    sums = synk.function(lambda x: (x.sum(axis=1), x[:, 0]), outputs="gather")
    for pair in (lambda m: (m[::2], m[1::2]), lambda m: (m[:101], m[101:])):
        target = make((202, columns), "f4", tmp_path)
        f.options(out=pair(target))(x)
        for got, expected in zip(pair(np.array(target)), (x, 2 * x), strict=True):
            assert np.array_equal(got, expected)
    with pytest.raises(InvalidValue, match="two targets in out= overlap"):
        f.options(out=(target[::2], target[:101]))(x)
    table = make((101, 2), sums(x)[0].dtype, tmp_path)
    sums.options(out=(table[:, 0], table[:, 1]))(x)
    assert np.array_equal(table, np.stack(sums(x), axis=1))


@pytest.mark.parametrize("kind", ["an array", "a view of a Data", "a mapped file"])
def test_a_target_that_overlaps_itself(session, tmp_path, counted, kind):
    memory = mapped((400,), "f4", tmp_path) if kind == "a mapped file" else np.zeros(400, "f4")
    if kind == "a view of a Data":
        memory = synk.data(memory)[:]
    x = np.ones((5, 3), "f4")
    f = synk.function(counted, outputs="gather")
    for strides in ((0, 4), (4, 4), (8, 4), (-4, 8), (12, 0)):
        start = 100 if min(strides) < 0 else 0
        target = np.lib.stride_tricks.as_strided(memory[start:], x.shape, strides)
        with pytest.raises(InvalidValue, match=r"of which share memory.*target.copy\(\)"):
            f.options(out=target)(x)
    assert counted.runs() == 0
    for strides in ((12, 4), (4, 20), (-12, 4), (40, 8)):
        start = 100 if min(strides) < 0 else 0
        target = np.lib.stride_tricks.as_strided(memory[start:], x.shape, strides)
        assert np.array_equal(f.options(out=target)(x), 2 * x)


def test_targets_that_are_inputs(session, tmp_path, counted):
    shared = synk.data(numbers(SMALL))
    file = mapped((101, SMALL), "f4", tmp_path)
    f = synk.function(lambda x, y: counted(x), bcast_inputs="y", outputs="gather")
    same_file = synk.data(np.load(tmp_path / "x.npy", mmap_mode="r"))
    for target, given in (
        (shared, (shared, 1)),
        (shared, (numbers(SMALL), {"table": [shared]})),
        (file, (file, 1)),
        (file, (np.load(tmp_path / "x.npy", mmap_mode="r")[5:], 1)),
        (file, (same_file, 1)),
    ):
        with pytest.raises(
            InvalidValue, match=r"is also an input of the function .*x\[\.\.\.\] = result"
        ):
            f.options(out=target)(*given)
    assert counted.runs() == 0
    lower, upper = np.memmap(tmp_path / "raw", "f4", "w+", 0, (202, SMALL)).reshape(2, 101, SMALL)
    lower[:] = numbers(SMALL)
    synk.function(doubled, outputs="gather").options(out=upper)(lower)
    assert np.array_equal(upper, 2 * lower)


def test_data_that_were_freed_or_are_of_another_session(session):
    x = numbers(SMALL)
    f = synk.function(doubled, outputs="gather")
    freed = synk.data(np.zeros_like(x))
    freed.free_memory()
    with pytest.raises(InvalidValue, match="a Data in out= has no memory"):
        f.options(out=freed)(x)
    with synk.Session(2, verbose=False) as another:
        other = another.data(np.zeros_like(x), name="result")
        with pytest.raises(InvalidValue, match="the Data 'result' in out= belongs to another session"):
            f.options(out=other)(x)


def test_maps_return_lists(session):
    f = synk.function(doubled, outputs="gather").options(out=np.zeros(3))
    with pytest.raises(InvalidValue, match=r"map\(\) returns a list"):
        synk.map(f, [1, 2, 3])


def test_options_are_of_calls(session):
    into = synk.function(doubled, outputs="gather").options(out=np.zeros(3))
    for name in ("check", "as_serial"):
        with pytest.raises(AttributeError, match=rf"use the function without them, f\.{name}"):
            getattr(into, name)
    for name in ("batch", "num_slices", "output_subset"):
        with pytest.raises(InvalidType, match=rf"options\(…\)\(x, {name}=…\), as an argument"):
            into.options(**{name: 1})


def test_later_options_win(session):
    f = synk.function(doubled, outputs="gather")
    x, first, second = np.ones((4, 2)), np.zeros((4, 2)), np.zeros((4, 2))
    assert f.options(out=first).options(timeout=30)(x) is first
    assert f.options(timeout=30).options(out=first).options(out=second)(x) is second
    assert np.array_equal(f.options(out=first).options(out=None)(x), 2 * x)
    slow = synk.function(lambda x: time.sleep(60), outputs=None)
    with pytest.raises(CallTimeout):
        slow.options(timeout=30).options(timeout=0.1)(x)


# ── when things go wrong ─────────────────────────────────────────────────────────────────────────────


def test_a_function_that_fails_leaves_the_target_alone(session):
    x, target = numbers(BIG), synk.data(np.zeros((101, BIG), "f4"))
    f = synk.function(lambda x: 2 * x if synk.rank() else 1 / 0, outputs="gather").options(out=target)
    with pytest.raises(WorkerError):
        f(x)
    assert not target[:].any()


@contextlib.contextmanager
def before_the_outputs_move(monkeypatch, action):
    """Do *action* when the functions have run, and no worker has written."""
    commands = Transfer._commands

    def acting(self, *args):
        action()
        return commands(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "_commands", acting)
        yield


@pytest.mark.one_host
@pytest.mark.parametrize("make", ["data", "mapped"], indirect=True)
def test_a_worker_that_dies_while_they_write(own, tmp_path, monkeypatch, make):
    x = numbers(BIG)
    target = make(x.shape, x.dtype, tmp_path)
    before = np.array(target)
    f = synk.function(doubled, outputs="gather").options(out=target)
    pid = own._engine.workers.pids[1]
    with (
        before_the_outputs_move(monkeypatch, lambda: os.kill(pid, signal.SIGKILL)),
        pytest.raises(WorkerDied),
    ):
        f(x)
    assert np.array_equal(target[51:], before[51:])  # the rows of the dead one


@pytest.mark.one_host
@pytest.mark.parametrize("error", [CallTimeout, KeyboardInterrupt])
def test_a_time_that_is_over_and_ctrl_c_while_they_write(own, monkeypatch, error):
    x = numbers(BIG)
    target = synk.data(np.zeros_like(x))
    f = synk.function(doubled, outputs="gather")
    pid = own._engine.workers.pids[1]

    def stop():
        os.kill(pid, signal.SIGSTOP)
        if error is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with before_the_outputs_move(monkeypatch, stop), pytest.raises(error):
            f.options(out=target, timeout=0.3 if error is CallTimeout else None)(x)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.kill(pid, signal.SIGCONT)
    f.options(out=target)(-x)
    assert np.array_equal(target, -2 * x)


def test_a_session_that_was_closed():
    with running(2):
        f = synk.function(doubled, outputs="gather")
        target = synk.data(np.zeros((101, SMALL), "f4"))
        f.options(out=target)(numbers(SMALL))
    with pytest.raises((SessionClosed, synk.NotForked)):
        f.options(out=target)(numbers(SMALL))


def test_a_file_that_was_cut(session, tmp_path, counted):
    x = numbers(BIG)
    target = mapped(x.shape, x.dtype, tmp_path)
    f = synk.function(counted, outputs="gather").options(out=target)
    f(x)
    runs = counted.runs()
    os.truncate(tmp_path / "x.npy", 5000)
    with pytest.raises(InvalidValue, match="the file was cut after it was mapped"):
        f(x)
    assert counted.runs() == runs


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path, 1) as disk:
        yield disk


@pytest.mark.one_host
@pytest.mark.parametrize("columns", [64, BIG], ids=["small", "large"])
@pytest.mark.parametrize("make", ["mapped", "mapped_columns", "view_of_a_map"], indirect=True)
def test_a_full_disk(session, disk, counted, make, columns):
    x = numbers(columns)
    target = make(x.shape, x.dtype, disk)  # a sparse file
    filling = disk / "filling"
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    f = synk.function(counted, outputs="gather").options(out=target)
    with pytest.raises(OSError, match=r"No space left .* Nothing was computed, and the file holds") as e:
        f(x)
    assert not isinstance(e.value, synk.SynkroError)
    assert counted.runs() == 0
    filling.unlink()
    f(x)
    assert np.array_equal(target, 2 * x)
