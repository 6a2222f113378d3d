"""Functions: what can be one, how it is called, and what comes back."""

import array as buffers
import functools
import operator
import os
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

import synkro as synk
from support.examples import given, st
from support.inside import controller, everyone
from support.sessions import INLINE, lasting
from support.together import good, together
from support.waiting import wait_until
from synkro import InvalidIndex, InvalidType, InvalidValue, NotAvailable, WorkerError
from synkro.controller.progress import Progress
from synkro.messages import Phase

pytestmark = pytest.mark.quick  # on every Python version

X = np.arange(21.0).reshape(7, 3)
Y = np.array([1.0, -2.0, 3.0])


session = lasting(2)


# ── what can be a function ───────────────────────────────────────────────────────────────────────


def projection(x, y, scale=1.0):
    return x.dot(y) * scale


def closure(factor):
    def scaled(x):
        return x * factor

    return scaled


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def scale(self, x):
        return x * self.factor

    def __call__(self, x):
        return x * self.factor

    @classmethod
    def twice(cls, x):
        return 2 * x

    @staticmethod
    def thrice(x):
        return 3 * x


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x + 1, X + 1),
        (closure(3), X * 3),
        (functools.partial(operator.mul, 2), X * 2),
        (functools.partial(projection, y=Y), X @ Y),
        (Scaler(4).scale, X * 4),
        (Scaler(5), X * 5),
        (Scaler.twice, X * 2),
        (Scaler.thrice, X * 3),
        (operator.neg, -X),
        (np.square, X**2),
        (np.array, X),
    ],
)
def test_any_callable(session, fn, expected):
    f = session.function(fn, outputs="gather")
    assert np.array_equal(f(X), expected)
    assert np.array_equal(f(X, batch=3), expected[:3])


def test_ufuncs_and_builtins_without_a_signature_take_what_comes(session):
    assert np.array_equal(session.function(np.add, bcast_inputs="x2", outputs="gather")(X, Y), X + Y)
    assert np.array_equal(session.function(np.maximum, outputs="gather")(X, -X), X)
    assert session.function(max, outputs="max")(X[:, 0]) == 18
    f = session.function(np.where, outputs="gather")
    assert np.array_equal(f(X > 5, X, -X), np.where(X > 5, X, -X))
    biggest = session.function(max, inputs="values", bcast_inputs="least", outputs="gather")
    assert biggest(X[:2, 0], np.array([2.0])).tolist() == [2, 3]


def test_the_modes_and_the_name_can_be_read(session):
    def means(x):
        return x.mean(axis=0), x.sum(axis=0)

    f = session.function(means, outputs=["avg", "sum"])
    assert f.output_modes == ["mean", "sum"]
    assert (f.name, f.__name__) == ("means", "means")
    assert "'means'" in repr(f)
    assert session.function(functools.partial(means), outputs="sum", name="other").name == "other"
    assert session.function(functools.partial(projection, y=Y)).name == "projection"
    assert session.function(Scaler(1)).name == "Scaler"


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, Y), {}),
        ((X, Y, 2.0), {}),
        ((X,), {"y": Y}),
        ((X,), {"scale": 2.0, "y": Y}),
        ((), {"y": Y, "x": X}),
        ((), {"scale": 0.5, "y": Y, "x": X}),
    ],
)
def test_arguments_by_position_and_name(session, args, kwargs):
    f = session.function(projection, bcast_inputs=["y", "scale"], outputs="gather")
    expected = projection(*args, **kwargs)
    assert np.allclose(f(*args, **kwargs), expected)
    datas = [session.data(a) for a in args]
    named = {key: session.data(value) for key, value in kwargs.items()}
    for _ in range(2):
        assert np.allclose(f(*datas, **named), expected)


def test_inputs_are_all_but_the_broadcast_ones(session):
    def lengths(x, y, z):
        return [np.array([len(each)]) for each in (x, y, z)]

    shards = session.function(lengths, bcast_inputs="y", outputs="gather")(X, X, X)
    assert [part.tolist() for part in shards] == [[4, 3], [7, 7], [4, 3]]
    named = session.function(lengths, inputs=["x"], bcast_inputs=["y", "z"], outputs="gather")
    assert [part.tolist() for part in named(X, X, X)] == [[4, 3], [7, 7], [7, 7]]


def test_any_number_of_arguments(session):
    def sums(x, *more, **named):
        return [each.sum() for each in (x, *more, *named.values())]

    f = session.function(sums, bcast_inputs=["more"], outputs="sum")
    assert f(X, Y, Y, z=X) == [X.sum(), 4, 4, X.sum()]
    assert f(X) == [X.sum()]


def test_functions_without_scattered_inputs_run_once_on_every_rank(session):
    assert session.function(lambda: 1, outputs="sum")() == 2
    assert session.function(lambda y: y, bcast_inputs="y", outputs="mean")(Y).tolist() == Y.tolist()
    assert session.function(os.getpid, outputs=None)() == list(session.pids)


@pytest.mark.parametrize("value", [[1, 2], np.array(2)])  # numbers: test_arguments.py
def test_broadcast_lists_and_arrays_arrive_as_arrays(session, value):
    f = session.function(lambda k: [type(k) is np.ndarray, k], bcast_inputs="k", outputs=["min", "max"])
    is_array, found = f(value)
    assert is_array
    assert np.array_equal(found, value)


def test_inputs_are_read_only_inside(session):
    def write(x, y):
        flags = [array.flags.writeable for array in (x, y)]
        try:
            x[...] = 0
        except ValueError:
            return [not any(flags)]
        return [False]

    f = session.function(write, bcast_inputs="y", outputs="min")
    x = session.data(X)
    for batch in (None, slice(0, 4, 2)):
        assert f(x, Y, batch=batch) == [True]
    assert np.array_equal(x, X)


def test_defaults_are_the_functions_own(session):
    f = session.function(lambda x, k=3, *, m=2: x * k * m, bcast_inputs=["k", "m"], outputs="gather")
    assert np.array_equal(f(X), X * 6)
    assert np.array_equal(f(X, m=1), X * 3)


def test_plain_arrays_are_copied_into_cached_data(session):
    f = session.function(lambda x: x.sum(), outputs="sum")
    assert f(X) == X.sum()
    files = len(os.listdir("/proc/self/fd"))
    for array in (X, X + 1, X[:2], X[::-1]):
        assert f(array) == array.sum()
    assert len(os.listdir("/proc/self/fd")) == files
    assert f(X.astype("f4")) == X.sum()
    assert f(X[0]) == X[0].sum()
    assert f([1, 2, 3]) == 6


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["data", "array", "float32", "list"]),
            st.sampled_from(["data", "array", "view"]),
            st.sampled_from([3, 4]),
            st.sampled_from(["position", "name", "both names", "names turned"]),
            st.sampled_from([1, 2]),
        ),
        min_size=2,
        max_size=8,
    )
)
def test_calls_of_all_kinds_take_turns(session, calls):
    function = session.function(lambda x, y: (x + 3 * y).sum(), outputs="sum")
    data = {rows: (session.data(np.ones(rows)), session.data(np.ones(rows))) for rows in (3, 4)}
    for number, (one, other, rows, naming, slices) in enumerate(calls):
        x, y = np.arange(rows) + 10.0 * number, np.arange(rows) - 7.0 * number
        for kept, value in zip(data[rows], (x, y), strict=True):
            kept[...] = value
        forms = {
            "data": lambda kept, value: kept,
            "array": lambda kept, value: value,
            "float32": lambda kept, value: value.astype("f4"),
            "list": lambda kept, value: value.tolist(),
            "view": lambda kept, value: np.repeat(value, 2)[::2],
        }
        first, second = forms[one](data[rows][0], x), forms[other](data[rows][1], y)
        result = {
            "position": lambda: function(first, second, num_slices=slices),
            "name": lambda: function(first, y=second, num_slices=slices),
            "both names": lambda: function(x=first, y=second, num_slices=slices),
            "names turned": lambda: function(y=second, x=first, num_slices=slices),
        }[naming]()
        assert result == (x + 3 * y).sum()
        assert data[rows][0][:].tolist() == x.tolist()  # nobody's Data was written to
        assert data[rows][1][:].tolist() == y.tolist()


@pytest.mark.parametrize("slices", [True, 1.0, [1]])
def test_what_equals_one_is_no_number_of_slices(session, slices):
    function = session.function(lambda x: x.sum(), outputs="sum")
    assert function(X) == X.sum()
    with pytest.raises(InvalidType, match="num_slices must be an int"):
        function(X, num_slices=slices)


@pytest.mark.parametrize("kind", ["array", "data", "r+", "c", "copied"])
def test_what_is_written_between_calls_is_seen(session, tmp_path, kind):
    np.save(tmp_path / "x.npy", X)
    if kind == "copied":  # an np.memmap by class, but of no file
        argument = np.load(tmp_path / "x.npy", mmap_mode="r").copy()
    elif kind in ("array", "data"):
        argument = X.copy() if kind == "array" else session.data(X)
    else:
        argument = np.load(tmp_path / "x.npy", mmap_mode=kind)
    f = session.function(lambda x: x, outputs="gather")
    for value in (5, 6):
        argument[1] = value
        assert np.array_equal(f(argument)[1], np.full(3, value))
        assert np.array_equal(f(argument), argument)
        assert np.array_equal(f(X + value), X + value)  # another one in between


# ── progress ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "slices", "said"),
    [
        (7, 3, "3 of 3 slices"),
        (5, 8, "2 of 2 slices"),  # three rows on one rank, two on the other
        (1, 8, "1 of 1 slice"),
    ],
    ids=["all rows", "uneven", "one row"],
)
def test_progress_ends_with_a_line_where_there_is_no_terminal(session, capsys, rows, slices, said):
    f = session.function(lambda x: x.sum(), outputs="sum", name="counting")
    assert f(np.ones(rows), num_slices=slices, progress=True) == rows
    assert capsys.readouterr().err == f"Synkro: counting: {said}\n"


def test_a_slice_counts_when_all_ranks_have_computed_theirs(session, tmp_path, monkeypatch):
    go_on, seen, meanwhile = tmp_path / "go on", [], []

    def late_on_rank_1(k):
        if synk.rank() == 1 and k[0] == 13:  # the second of its four slices
            while not go_on.exists():
                time.sleep(0.001)
        return k.sum()

    def reach(progress, done):
        seen.append(done)
        if everyone(session).unanswered() == [1]:
            if controller(session).whereabouts(1) == (Phase.RUNNING, 1):
                meanwhile.append(done)
            if len(meanwhile) == 2:  # the first of them may be from just before
                go_on.touch()

    monkeypatch.setattr(Progress, "reach", reach)
    f = session.function(late_on_rank_1, outputs="sum")
    assert f(np.arange(20), num_slices=4, progress=True) == 190
    assert meanwhile[1] == 1
    assert seen[-1] == max(seen) == 4


# ── in the background ────────────────────────────────────────────────────────────────────────────


def test_submitted_calls_run_in_their_order(session):
    seen = []

    def count(k):
        seen.append(k)
        return np.array([seen[-1], len(seen)])

    f = session.function(count, bcast_inputs="k", outputs="max")
    futures = [f.submit(k) for k in range(10)]
    assert [future.result(30).tolist() for future in futures] == [[k, k + 1] for k in range(10)]
    assert f.submit(10).result(30).tolist() == [10, 11]


def test_submitted_calls_take_options_and_raise_what_the_call_raises(session):
    f = session.function(lambda x, k: x // k, bcast_inputs="k", outputs="gather")
    assert np.array_equal(f.submit(X, k=2, batch=3, num_slices=2).result(30), X[:3] // 2)
    with pytest.raises(InvalidIndex, match="there are 7"):
        f.submit(X, 2, batch=8).result(30)
    failing = session.function(lambda x: x.nothing, outputs="sum")
    assert isinstance(failing.submit(X).exception(30), WorkerError)
    assert f.submit(X, 1).result(30).shape == X.shape


def test_submitted_calls_can_be_cancelled_before_they_begin(session, tmp_path):
    flag = tmp_path / "flag"

    def wait():
        while not flag.exists():
            time.sleep(0.001)
        return 1

    f = session.function(wait, outputs="sum")
    first, second, third = (f.submit() for _ in range(3))
    assert second.cancel()
    flag.touch()
    assert first.result(30) == third.result(30) == 2
    with pytest.raises(CancelledError):
        second.result(0)


def test_closing_cancels_what_has_not_begun(tmp_path):
    with synk.Session(1, verbose=False) as session:
        begun = tmp_path / "begun"
        f = session.function(lambda: [begun.touch(), time.sleep(0.2)], outputs=[])
        first, *waiting = [f.submit() for _ in range(4)]
        assert wait_until(begun.exists)
        session.close()
    assert first.done()
    assert all(future.cancelled() for future in waiting)


def test_calls_from_many_threads_are_served_one_at_a_time(own):
    f = own.function(lambda x, k: [x * k, x.sum()], bcast_inputs="k", outputs=["gather", "sum"])
    g = own.function(lambda x: x.max(axis=0), outputs="max")
    wide = np.ones((3, INLINE // 8 + 1))

    def work(k):
        for _ in range(10):
            product, total = f(X, k)
            assert np.array_equal(product, X * k)
            assert total == X.sum()
            assert (g(wide * k) == k).all()

    good(together(*[functools.partial(work, k) for k in range(1, 5)], seconds=60))


# ── in this process ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["as_serial", "as_theano"])
def test_as_serial_runs_here_on_whole_arrays(session, method):
    f = session.function(
        lambda x, y: (os.getpid(), type(x), len(x), x @ y), bcast_inputs="y", outputs="sum"
    )
    for x, y in ((X, Y), (session.data(X), session.data(Y))):
        pid, kind, length, product = getattr(f, method)(x, y=y)
        assert (pid, kind, length) == (os.getpid(), np.ndarray, 7)
        assert np.array_equal(product, X @ Y)


def test_build_inputs_makes_data_named_as_the_parameters(session):
    f = session.function(projection, bcast_inputs=["y", "scale"], outputs="gather")
    x, y, scale = f.build_inputs(X, scale=2.0, y=Y)[:3]
    assert [(d.name, d.ndim) for d in (x, y, scale)] == [("x", 2), ("scale", 0), ("y", 1)]
    assert np.array_equal(x, X)
    assert np.allclose(f(x, y=scale, scale=y), X @ Y * 2)
    x = session.function(lambda x: x.sum()).build_inputs(X, minibatch=True)  # one argument: its data
    assert isinstance(x, synk.Data)
    assert (x.name, x.minibatch, x.shape) == ("x", True, X.shape)


def test_build_inputs_passes_its_options_on(session):
    f = session.function(projection, bcast_inputs="y")
    for given_flags, flags in ((True, (True, False)), ([False, True], (False, True))):
        x, y = f.build_inputs(X, Y, oversize=2, minibatch=given_flags)
        assert (x.minibatch, y.minibatch) == flags
        assert (x.alloc_size, y.alloc_size) == (42, 6)
    for wrong, error, message in (
        ([True], InvalidValue, r"has 1 flag for the 2 arguments of the function 'projection'"),
        ([True, 1], InvalidType, r"each flag of minibatch= .* must be True or False; got 1\."),
        ("yes", InvalidType, r"minibatch must be True or False; got 'yes'\."),
    ):
        with pytest.raises(error, match=message):
            f.build_inputs(X, Y, minibatch=wrong)


# ── as a decorator ───────────────────────────────────────────────────────────────────────────────


def test_decorators(session):
    @session.function
    def bare(x):
        """What it does."""
        return x.mean(axis=0)

    @session.function(outputs="gather", bcast_inputs="y", name="named")
    def with_arguments(x, y):
        return x * y

    assert isinstance(bare, synk.Function)
    assert np.allclose(bare(X), X.mean(axis=0))
    assert bare.__doc__ == "What it does."
    assert with_arguments.name == "named"
    assert np.array_equal(with_arguments(X, Y), X * Y)


def test_what_comes_first_is_a_callable_or_the_inputs(session):
    total = session.function(lambda x, y: (x * y).sum(), "x", "sum", "y")
    assert total(X, Y) == (X * Y).sum()
    for f in (
        session.function(projection, inputs=["x"], bcast_inputs=["y", "scale"], outputs="gather"),
        session.function(fn=projection, inputs=["x"], bcast_inputs=["y", "scale"], outputs="gather"),
        session.function(inputs=["x"], bcast_inputs=["y", "scale"], outputs="gather")(projection),
    ):
        assert np.allclose(f(X, Y, 2.0), X @ Y * 2)
    for args, kwargs, message in [
        ((projection,), {"fn": projection}, r"function\(\) multiple values for argument 'fn'\."),
        ((projection, *[None] * 8), {}, r"function\(\) too many positional arguments\."),
        (([],), {"inputs": []}, r"function\(\) multiple values for argument 'inputs'\."),
    ]:
        with pytest.raises(InvalidType, match=message):
            session.function(*args, **kwargs)
    for nothing in ([], ["x"], ("x",)):
        with pytest.raises(NotAvailable, match=r"without a callable takes the variables of a graph"):
            session.function(nothing)
    assert session.function(lambda x: x.sum(), outputs=None)(X) == [66, 144]  # not the default


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def test_an_exception_inside_names_the_function_and_keeps_the_session(session):
    def unlucky(x):
        return x[0] / missing  # noqa: F821

    f = session.function(unlucky, outputs="sum")
    with pytest.raises(WorkerError, match=r"rank 0 .*NameError") as caught:
        f(X)
    assert isinstance(caught.value.original, NameError)
    assert "the function 'unlucky'" in str(caught.value)
    assert (caught.value.rank, caught.value.function) == (0, "unlucky")
    assert "return x[0] / missing" in str(caught.value.__cause__)
    assert session.function(lambda x: x.sum(), outputs="sum")(X) == X.sum()


def test_what_was_submitted_is_not_changed_by_later_writing(own):
    f = own.function(
        lambda x, y, z: [time.sleep(0.1), x * y + z.sum()][1], bcast_inputs=["y", "z"], outputs="gather"
    )
    x, factors, rows = np.ones((50_000, 2)), [2.0, 3.0], np.arange(40_000)
    numbers = buffers.array("d", [1.0, 2.0])
    first, second = (f.submit(x, factors, numbers, batch=rows) for _ in range(2))
    x[:] = factors[0] = rows[:] = numbers[0] = 0
    for future in (first, second):
        assert np.array_equal(future.result(30), np.tile([5.0, 6.0], (40_000, 1)))
