"""Errors of use: each of its class, saying what was expected and given; and the session goes on.

What can be known before a call is found before any worker is woken: ``quiet`` lets no command out.
"""

import math
import operator
import pickle
import threading
from collections import Counter

import numpy as np
import pytest

import synkro as synk
from support.inside import everyone
from support.sessions import INLINE, lasting
from synkro import (
    InvalidIndex,
    InvalidType,
    InvalidValue,
    NotAvailable,
    NotForked,
    OutputError,
    SessionClosed,
    SharedMemoryError,
    SynkroError,
    UsageError,
    WorkerError,
)
from synkro.devices.gpus import Visible
from synkro.errors import InternalError
from synkro.machine import available_memory
from synkro.messages import Release

pytestmark = pytest.mark.quick  # on every Python version

X = np.arange(12.0).reshape(6, 2)
ROWS = np.arange(6.0)

session = lasting(2)  # it has to survive every error


@pytest.fixture(autouse=True)
def still_works(session):
    """After every test: the session answers, and answers right."""
    yield
    assert session.function(lambda x: x.sum(), outputs="sum", name="after")(ROWS) == 15


@pytest.fixture
def quiet(session, monkeypatch):
    """The session, from which no command goes out but that which gives memory back."""
    really_send = everyone(session).send

    def send(command, housekeeping):
        if not isinstance(pickle.loads(command), Release):
            raise InternalError("a command was sent")
        really_send(command, housekeeping)

    monkeypatch.setattr(everyone(session), "send", send)
    return session


def total(x):
    return x.sum()


def two(x, y):
    return x.sum() + y.sum()


def test_the_guard_against_commands_works(quiet):
    with pytest.raises(InternalError, match="a command was sent"):
        quiet.function(total)(ROWS)


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("verb", ["data", "distribute"])
def test_nothing_goes_without_fork(verb):
    with pytest.raises(NotForked, match=rf"no workers yet for {verb}\(\): call synkro.fork\(\) first"):
        getattr(synk, verb)()
    assert synk.close() is None


def test_nothing_goes_after_close():
    synk.fork(1, verbose=False)
    f, x = synk.function(total, outputs="sum"), synk.data(ROWS)
    with pytest.raises(UsageError, match=r"=, and its workers are running: call close\(\)"):
        synk.fork(2, verbose=False)
    assert f(x) == 15
    synk.close()
    synk.close()
    for call in (
        lambda: f(x),
        lambda: f.submit(x),
        lambda: f.build_inputs(ROWS),
        lambda: synk.data([1]),
        lambda: synk.function(total)(ROWS),
        lambda: synk.function(outputs="sum")(total)(ROWS),
        synk.distribute,
    ):
        with pytest.raises(SessionClosed, match=r"was closed: call fork\(\) for a new one"):
            call()
    assert synk.fork(1, verbose=False) == 1
    with pytest.raises(InvalidValue, match="belongs to a closed session"):
        synk.function(total)(x)
    assert f(ROWS) == 15


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("data", [X]),
        ("function", [len]),
        ("distribute", ()),
        ("fork", [1]),
        ("close", ()),
        ("Session", [1]),
    ],
)
def test_synkro_inside_a_worker(session, name, args):
    with pytest.raises(WorkerError, match=r"rank 0 .*UsageError: .* inside a worker") as caught:
        session.function(lambda x: getattr(synk, name)(*args), outputs=[])(ROWS)
    assert type(caught.value.original) is UsageError
    assert "main program" in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ("gpu", InvalidValue, "unknown device 'gpu': expected \"cpu\""),
        (["cpu", "tpu"], InvalidValue, "unknown device 'tpu'"),
        ("", InvalidValue, "unknown device ''"),
        ("cpu9999", InvalidValue, "'cpu9999', but this process may use .* cores"),
        ([1], InvalidType, r'devices= takes "cpu".*got \[1\]'),
        ("dev0->", InvalidValue, "malformed entry 'dev0->'.*write \"name->device\""),
        ("->cpu", InvalidValue, "malformed entry '->cpu'"),
        ("dev0->cpu;", InvalidValue, "malformed entry ''"),
        ("dev0->cpu;dev1", InvalidValue, "malformed entry 'dev1'"),
        ("dev0->cpu->cpu", InvalidValue, "malformed entry"),
        ("dev0->gpu", InvalidValue, "unknown device 'gpu'"),
        ("dev0->cpu;dev0->cpu", InvalidValue, "'dev0' twice"),
        ("cpu0->cpu", InvalidValue, "'cpu0', which looks like a device"),
        ("cuda", NotAvailable, 'asks for GPUs, but there are none: use "cpu"'),
        (["cuda:0", "cuda:1"], NotAvailable, "'cuda:0'.*use \"cpu\""),
        ("dev0->cuda0;dev1->cuda1", NotAvailable, "names 'cuda0', but there are none"),
    ],
)
def test_devices(devices, error, message, monkeypatch):
    monkeypatch.setattr(
        "synkro.controller.placement.choice.visible", lambda: Visible((), 0, "there are none")
    )
    with pytest.raises(error, match=message):
        synk.fork(devices=devices, verbose=False)
    if isinstance(devices, str) and devices:
        monkeypatch.setenv("SYNKRO_DEVICES", devices)
        with pytest.raises(error, match="SYNKRO_DEVICES"):
            synk.fork(verbose=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_parallel": 0}, InvalidValue, "workers must be 1 or more, .*; got 0"),
        ({"n_parallel": 2.5}, InvalidType, r"an int of 1 or more.*got 2\.5, a float"),
        ({"n_parallel": "two"}, InvalidType, "an int of 1 or more.*got 'two', a str"),
        ({"n_parallel": [1]}, InvalidType, r"got \[1\], a list"),
        ({"n_parallel": 3, "devices": ["cpu"]}, InvalidValue, "3 workers .* lists 1 device:"),
        ({"master_rank": 1}, InvalidValue, "master_rank must be from 0 to 0; got 1"),
        ({"master_rank": "0"}, InvalidType, "master_rank must be an int of 0 or more; got '0'"),
        ({"threads_per_worker": 0}, InvalidValue, "threads_per_worker must be 1 or more; got 0"),
        ({"threads_per_worker": 1.5}, InvalidType, r"threads_per_worker must be an int.*got 1\.5"),
        ({"timeout": float("inf")}, InvalidValue, "finite; got inf"),
        ({"start_timeout": "soon"}, InvalidType, "start_timeout must be a number .*; got 'soon'"),
        ({"seed": -1}, InvalidValue, "seed must be 0 or more"),
        ({"seed": "one"}, InvalidType, "seed must be an int"),
        ({"profile_workers": "all"}, InvalidType, "profile_workers must be True or False"),
    ],
)
def test_options_of_fork(options, error, message):
    with pytest.raises(error, match=message):
        synk.fork(**{"n_parallel": 1, "verbose": False, **options})


# ── functions ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fn": 3}, InvalidType, "takes a callable, got 3, an int"),
        ({"fn": "total"}, InvalidType, "takes a callable, got 'total'"),
        ({"fn": two, "bcast_inputs": "z"}, InvalidValue, r"'two' has no parameter 'z'.*\(x, y\)"),
        ({"fn": two, "inputs": ["x", "x"]}, InvalidValue, "'x' is listed twice"),
        ({"fn": two, "inputs": "x", "bcast_inputs": ["x", "y"]}, InvalidValue, "'x' is listed twice"),
        ({"fn": two, "inputs": ["x"]}, InvalidValue, "'y' of the function 'two' is neither"),
        ({"fn": two, "inputs": ["x", "y", "z"]}, InvalidValue, "'two' has no parameter 'z'"),
        ({"fn": two, "inputs": 5}, InvalidType, "inputs takes the names of parameters.*got 5"),
        ({"fn": two, "inputs": [ROWS]}, InvalidType, "inputs takes the names of parameters"),
        ({"fn": two, "bcast_inputs": [ROWS]}, InvalidType, "bcast_inputs takes the names"),
        ({"fn": total, "outputs": ["sum", ["avg "]]}, InvalidValue, "unknown operation 'avg '"),
        ({"fn": total, "outputs": {"a": np.sum}}, InvalidType, "outputs= takes 'mean'"),
        ({"fn": total, "outputs": {"sum"}}, InvalidType, "a set"),
        ({"fn": total, "output": "sum"}, InvalidType, r"keyword output=: did you mean outputs=\?"),
        ({"fn": total, "rows": "x"}, InvalidType, "unknown keyword rows=: it knows inputs, outputs, "),
        ({"fn": total, "outputs": True}, InvalidType, "got True, a bool"),
        ({"fn": total, "updates": {}}, InvalidType, "updates= takes a list of variables"),
        ({"fn": total, "updates": [3]}, InvalidType, "updates= takes worker variables"),
        ({"fn": total, "givens": []}, InvalidType, "givens=, which is for graphs"),
        ({"fn": total, "sliceable_shareds": 3}, InvalidType, "sliceable_shareds= takes a list"),
        ({"fn": total, "sliceable_shareds": [3]}, InvalidType, "takes worker variables"),
        ({"inputs": [ROWS], "outputs": "sum"}, NotAvailable, "variables of a graph compiler"),
        ({"bcast_inputs": [object()]}, NotAvailable, "pass a callable"),
        ({"inputs": ["x"], "outputs": object()}, InvalidType, "outputs= takes 'mean'"),
    ],
)
def test_making_functions(quiet, options, error, message):
    def make():
        return quiet.function(**options)

    with pytest.raises(error, match=message):
        make() if "fn" in options else make()(total)  # without fn it is a decorator


OPERATIONS = {  # and what they are called elsewhere
    "mean": ["average", "c_avg", "Mean"],
    "sum": ["add"],
    "prod": ["product"],
    "max": ["maximum", np.max],
    "min": ["minimum"],
    "gather": ["concat", "concatenate", "gathered"],
    None: ["stack"],
}


@pytest.mark.parametrize("right", OPERATIONS)
def test_the_right_operation_is_suggested(quiet, right):
    for name in OPERATIONS[right]:
        with pytest.raises(UsageError, match=rf"outputs= .* None.*Did you mean {right!r}\?$"):
            quiet.function(total, outputs=[name])


def test_nothing_is_suggested_for_what_is_none_of_them(quiet):
    for name in ("median", "std", "c_foo"):
        with pytest.raises(
            InvalidValue, match=rf"operation '{name}': expected 'mean', 'sum', .*, None\.$"
        ):
            quiet.function(total, outputs=name)


def test_the_right_operation_of_a_collective_is_suggested(session):
    variable = session.shared(ROWS)
    for op, right in {"average": "'mean'", "add": "'sum'"}.items():
        with pytest.raises(InvalidValue, match=rf"op='{op}' is .* Did you mean {right}\?$"):
            session.all_reduce(variable, op=op)
    with pytest.raises(InvalidValue, match=r"op='concat' is no reduce operation: .*, min\.$"):
        session.all_reduce(variable, op="concat")


@pytest.mark.parametrize("call", ["as_serial", "build_inputs"])
def test_keywords_of_a_call_where_there_is_none(quiet, call):
    f = quiet.function(total)
    with pytest.raises(InvalidType, match=r"batch= is a keyword of a call, and as_serial\(\) and build"):
        getattr(f, call)(ROWS, batch=3)


class Holder:
    def __init__(self, thing):
        self.thing = thing

    def method(self, x):
        return x

    __call__ = method


def closing_over(thing):
    return lambda x: x if thing else -x


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (closing_over, "the variable 'thing' that it closes over"),
        (lambda lock: lambda x, y=lock: x, "the default of its parameter 0"),
        (lambda lock: Holder(lock).method, "its __self__"),
        (Holder, "its attribute 'thing'"),
    ],
)
def test_functions_that_cannot_be_pickled(quiet, make, part):
    f = quiet.function(make(threading.Lock()), name="f", outputs="gather")
    message = rf"the function 'f' cannot be sent to the workers: {part}, .* cannot be pickled"
    for send in (lambda: f(ROWS), quiet.distribute):
        with pytest.raises(InvalidType, match=message):
            send()
    good = quiet.function(total, name="good")
    with pytest.raises(InvalidType, match="the function 'f'"):
        quiet.distribute()
    with pytest.raises(InternalError, match="a command was sent"):
        good(ROWS)  # alone it can go


def test_a_global_that_cannot_be_pickled(quiet, monkeypatch):
    fn = eval("lambda x: x if THING else x", {"__name__": "__main__", "THING": threading.Lock()})
    with pytest.raises(InvalidType, match=r"the global variable 'THING' that it uses, .*lock"):
        quiet.function(fn)(ROWS)


# ── calls that cannot mean anything ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, InvalidType, r"two\(x, y\) was called wrongly: missing a required argument: 'x'"),
        ((ROWS,), {}, InvalidType, "missing a required argument: 'y'"),
        ((ROWS,) * 3, {}, InvalidType, "too many positional arguments"),
        ((ROWS, ROWS), {"z": 1}, InvalidType, "unknown keyword z=: it knows x, y, batch, batch_s"),
        ((ROWS, ROWS), {"x": ROWS}, InvalidType, "multiple values for argument 'x'"),
        ((ROWS,), {"bacth": 3}, InvalidType, r"unknown keyword bacth=: did you mean batch=\?"),
        ((ROWS, ROWS), {"Batch": 1}, InvalidType, r"unknown keyword Batch=: did you mean batch=\?"),
        ((ROWS, ROWS[:5]), {}, InvalidValue, "'two' have different numbers of rows: x has 6, y has 5"),
        ((ROWS, X[:0]), {}, InvalidValue, "x has 6, y has 0"),
        ((ROWS[:0], ROWS[:0]), {}, InvalidValue, "no rows to compute on: .* 1 row, got 0 of 0"),
        ((ROWS, 3.0), {}, InvalidValue, "'y' of the function 'two' is scattered.*bcast_inputs"),
        ((ROWS, np.array(3)), {}, InvalidValue, "'y'.*no dimensions"),
        ((ROWS, "abc"), {}, InvalidType, "'y' .*by rows, .*: it is 'abc', a str.*bcast_inputs"),
        ((ROWS, ["a"] * 5), {}, InvalidValue, "x has 6, y has 5"),
        ((ROWS, None), {}, InvalidType, "'y' .*by rows, but has none: it is None.*bcast_inputs"),
        ((ROWS, [threading.Lock()] * 6), {}, InvalidType, "'y' .*cannot be pickled: TypeError"),
        ((ROWS, [[1], [1, 2]]), {}, InvalidValue, "x has 6, y has 2"),
        ((ROWS, np.zeros(6, object)), {}, InvalidType, "'y' .*cannot have the dtype object"),
    ],
)
def test_arguments(quiet, args, kwargs, error, message):
    f = quiet.function(two)
    datas = [quiet.data(a) if isinstance(a, np.ndarray) and a.dtype == float else a for a in args]
    for given in (args, datas):
        with pytest.raises(error, match=message):
            f(*given, **kwargs)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (7, InvalidIndex, "first 7 rows, but there are 6 rows: give a number from 1 to 6"),
        (-1, InvalidIndex, "batch=-1"),
        (0, InvalidValue, "expected at least 1 row that batch= selects, got 0 of 6"),
        ([0, 6], InvalidIndex, "index 6, but there are 6 rows: give indices from -6 to 5"),
        ([0, -7], InvalidIndex, "index -7, but there are 6 rows"),
        (np.array([2**64 - 1], "u8"), InvalidIndex, "index 18446744073709551615"),
        ([], InvalidValue, "got 0 of 6"),
        (slice(3, 3), InvalidValue, "got 0 of 6"),
        (slice(0, 6, 0), InvalidType, "step not 0"),
        (slice("a"), InvalidType, r"must be\s+integers or None"),
        (slice(0, 2.5), InvalidType, r"must be\s+integers or None"),
        (2.0, InvalidType, r"batch must be an int .*got 2\.0, a float"),
        (True, InvalidType, "got True, a bool"),
        (np.True_, InvalidType, "a bool"),
        ("all", InvalidType, "got 'all', a str"),
        ({1, 2}, InvalidType, "a set"),
        (["a"], InvalidType, "dtype <U1"),
        ([2**70], InvalidType, "dtype object"),
        ([0.0, 1.0], InvalidType, "1-d array of ints or bools; got dtype float64"),
        ([[0], [1]], InvalidType, "got 2 dimensions"),
        ([[0], [1, 2]], InvalidType, "not a 1-d array of ints or bools"),
        ([True] * 5, InvalidValue, "mask of 5 bools for 6 rows: give one bool a row"),
        ([True] * 7, InvalidValue, "mask of 7 bools for 6 rows"),
        ([False] * 6, InvalidValue, "got 0 of 6"),
    ],
)
def test_batches(quiet, batch, error, message):
    f = quiet.function(total)
    for x in (ROWS, quiet.data(ROWS)):
        with pytest.raises(error, match=message):
            f(x, batch=batch)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (7, InvalidValue, "minibatch 'x' of the function 'total' has 6 rows.*names 7"),
        ([8] * 7, InvalidValue, "has 6 rows.*names 7"),
        (slice(1, None), InvalidValue, "must say where it stops"),
        (0, InvalidValue, r"expected at least 1 row that batch= selects, got 0\.$"),
        (-1, InvalidIndex, r"asks for -1 rows: give 1 or more\.$"),
        (slice(0, "end"), InvalidType, "slice"),
        ("all", InvalidType, "got 'all', a str"),
        ([0.5], InvalidType, "dtype float64"),
    ],
)
def test_batches_of_minibatches_only(quiet, batch, error, message):
    f, x = quiet.function(total), quiet.data(ROWS, minibatch=True)
    with pytest.raises(error, match=message):
        f(x, batch=batch)


def test_a_batch_of_nothing_scattered(quiet):
    f = quiet.function(total, bcast_inputs="x")
    with pytest.raises(
        InvalidValue, match=r"batch= selects rows of scattered inputs, but .*'total' got none"
    ):
        f(ROWS, batch=3)


def test_more_slices_than_rows_are_as_many_as_rows(session):
    assert session.function(total, outputs="sum")(ROWS, num_slices=100) == 15
    assert len(session.function(total, outputs=None)(ROWS, num_slices=np.int64(100))) == 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_slices": 0}, InvalidValue, 'num_slices must be 1 or more, or "auto"; got 0'),
        ({"num_slices": -1}, InvalidValue, 'num_slices must be 1 or more, or "auto"; got -1'),
        ({"num_slices": 2.0}, InvalidType, r'an int of 1 or more, or "auto"; got 2\.0, a float'),
        ({"num_slices": True}, InvalidType, "num_slices must be an int .*got True, a bool"),
        ({"num_slices": "2"}, InvalidType, "got '2', a str"),
        ({"num_slices": "Auto"}, InvalidType, "got 'Auto', a str"),
        ({"num_slices": None}, InvalidType, "got None"),
        ({"output_subset": "ab"}, InvalidType, "output_subset takes a list.*got 'ab'"),
        ({"output_subset": 0}, InvalidType, "output_subset takes a list of indices or keys.*got 0"),
        ({"output_subset": {0}}, InvalidType, "list of indices or keys"),
        ({"output_subset": []}, InvalidValue, "output_subset is empty"),
        ({"batch_s": 3}, InvalidValue, "batch_s= selects rows of what the workers hold"),
    ],
)
def test_other_options_of_calls(quiet, options, error, message):
    with pytest.raises(error, match=message):
        quiet.function(total)(ROWS, **options)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bcast", [None, "x"])
def test_data_of_elsewhere(quiet, bcast):
    f = quiet.function(total, bcast_inputs=bcast)
    with synk.Session(1, verbose=False) as other:
        x = other.data(ROWS)
        with pytest.raises(InvalidValue, match="'x' of the function 'total' belongs to another session"):
            f(x)
    with pytest.raises(InvalidValue, match="belongs to a closed session"):
        f(x)
    y = quiet.data(ROWS)
    y.free_memory()
    with pytest.raises(InvalidValue, match=r"'x' .* has no memory .*set_value\(\)"):
        f(y)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.set_shape((3,)), InvalidValue, r"'x' has 2 dimensions, got the shape \(3,\)"),
        (lambda x: x.set_value(ROWS), InvalidValue, "'x' has 2 dimensions, got an array of 1"),
        (lambda x: x.set_length("six"), InvalidType, "tuple of ints"),
        (lambda x: x.set_length(9, oversize=3), InvalidValue, "oversize must be from 1 to 2; got 3"),
        (lambda x: x.set_value(X, oversize=None), InvalidType, "oversize must be a number from 1 to 2"),
        (lambda x: x.set_value(X * 1j), InvalidType, "'x' holds float64.*complex128.*force_cast=True"),
        (lambda x: x.set_value([["a"]]), InvalidType, "'x' cannot have the dtype <U1"),
        (lambda x: x.set_length(available_memory()), SharedMemoryError, "'x' of shape .*were asked for"),
    ],
)
def test_changes_of_data_change_nothing_when_they_fail(quiet, change, error, message):
    x = quiet.data(X, name="x")
    with pytest.raises(error, match=message):
        change(x)
    assert np.array_equal(x, X)


# ── results that do not fit ──────────────────────────────────────────────────────────────────────


def by_rank(first, other):
    """Returns *first* on rank 0 and *other* on rank 1: only rank 0 sees row 0."""
    return lambda x: first if x[0] == 0 else other


SMALL, OTHER = np.ones(3), np.ones(4)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(
    ("fn", "outputs", "message"),
    [
        (lambda x: (1, 2), ["sum"], "1 entry, but its result is a tuple of 2"),
        (lambda x: 1, ["sum", "sum"], "2 entries, but its result is a single value"),
        (lambda x: {"a": 1}, ["sum"], r"1 entry, but its result is a dict with the keys \['a'\]"),
        (lambda x: {"a": 1}, {"b": "sum"}, r"keys \['b'\], but its result .* the keys \['a'\]"),
        (lambda x: {"a": 1, "b": 1}, {"a": "sum"}, "name exactly the keys"),
        (lambda x: (1, 2), {"b": "sum"}, "its result is a tuple of 2"),
        (lambda x: (1, [2, 3]), ["sum", ["sum"]], r"1 entry, but its result\[1\] is a list of 2"),
        (lambda x: {"a": (1, 2)}, {"a": ["sum"]}, r"its result\['a'\] is a tuple of 2"),
        (lambda x: {"a": 1}, {"a": {"b": "sum"}}, r"its result\['a'\] is a single value"),
        (lambda x: None, "sum", r"an array or a number, got None\. .*outputs=None they .*outputs=\[\]"),
        (lambda x: "text", "max", "expected an array or a number, got 'text', a str"),
        (lambda x: (1, {"a": (v for v in x)}), ("sum", None), r"output\[1\] .*cannot be pickled"),
        (lambda x: (1, {"a": "text"}), "sum", r"output\[1\]\['a'\] .*got 'text', a str"),
        (lambda x: iter(()), "sum", "expected an array or a number"),
        (lambda x: np.array(["a"]), "sum", 'there is no "sum" of <U1, nor .* outputs=None take it'),
        (lambda x: np.array([None]), "gather", "of a fixed size, got an array of dtype object"),
        (lambda x: x.sum(), "gather", '"gather" concatenates rows, got a scalar'),
        (lambda x: 2.5, "gather", "got a scalar"),
    ],
)
def test_results_that_do_not_fit_their_outputs(session, fn, outputs, message, slices):
    f = session.function(fn, outputs=outputs, name="f")
    for _ in range(2):
        with pytest.raises(OutputError, match=message) as caught:
            f(ROWS, num_slices=slices)
        assert "the function 'f'" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "other", "outputs", "message"),
    [
        (1, (1, 2), "sum", "a single value on rank 0, but a tuple of 2 on rank 1"),
        ({"a": 1}, {"b": 1}, "sum", r"keys \['a'\].* on rank 0, but .*\['b'\].* on rank 1"),
        (["a"], SMALL, "gather", "is a list on rank 0, but no list on rank 1"),
        (SMALL, OTHER, "sum", r"shape \(3,\) .* on rank 0, but \(4,\) .* on rank 1"),
        (SMALL, SMALL[:1], "mean", r"shape \(3,\) .* but \(1,\)"),
        (SMALL, SMALL[0], "max", r"shape \(3,\) .* but \(\)"),
        (SMALL, SMALL.astype("f4"), "sum", "dtype float64 on rank 0, but .*float32 on rank 1"),
        (1, 1.0, "sum", "dtype int64 on rank 0, but .*float64"),
        (X, X[:, :1], "gather", r"\(6, 1\) .*the same shape but for the first dimension"),
        (X, ROWS, "gather", "the same shape but for the first dimension"),
        ((1, SMALL), (1, OTHER), "min", r"output\[1\] of the function 'f'"),
        (SMALL, np.ones(INLINE), "sum", rf"shape \(3,\) .* but \({INLINE},\)"),
    ],
)
def test_results_that_differ_between_ranks(session, first, other, outputs, message):
    f = session.function(by_rank(first, other), outputs=outputs, name="f")
    x = session.data(ROWS)
    for _ in range(2):
        with pytest.raises(OutputError, match=message) as caught:
            f(x)
        assert "the function 'f'" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "outputs", "message"),
    [
        (by_rank(1, (1, 2)), "sum", "a single value for one slice and a tuple of 2 for another"),
        (by_rank(SMALL, OTHER), "sum", r"shape \(3,\) for one slice and \(4,\) for another"),
        (by_rank(SMALL, SMALL[0]), "mean", r"shape \(3,\) for one slice and \(\) for another"),
        (by_rank(SMALL, SMALL.astype("f4")), "max", "dtype float64 for one slice, float32 for another"),
        (by_rank(X, X.astype("i4")), "gather", "dtype float64 for one slice, int32 for another"),
        (by_rank(X, ROWS), "gather", "the same shape but for the first dimension"),
    ],
)
def test_results_that_differ_between_slices(session, fn, outputs, message):
    f = session.function(fn, outputs=outputs, name="f")
    with pytest.raises(OutputError, match=message) as caught:
        f(ROWS, num_slices=2, batch=[0, 1, 0, 0])
    assert "the function 'f'" in str(caught.value)


def test_without_reduction_results_may_differ_in_shape(session):
    one, other = session.function(by_rank(SMALL, OTHER), outputs=None)(ROWS)
    assert (one.shape, other.shape) == ((3,), (4,))


@pytest.mark.parametrize(
    ("fn", "subset", "error", "message"),
    [
        (lambda x: (1, 2), [2], InvalidIndex, r"output_subset=\[2\] .*the result of 'f' has 2"),
        (lambda x: (1, 2), ["a"], InvalidIndex, "names an output that is not there"),
        (lambda x: {"a": 1}, ["b"], InvalidIndex, r"has \['a'\]"),
        (lambda x: 1, [0], OutputError, "the result of 'f' is one"),
    ],
)
def test_subsets_of_results(session, fn, subset, error, message):
    f = session.function(fn, outputs="sum", name="f")
    with pytest.raises(error, match=message):
        f(ROWS, output_subset=subset)


@pytest.mark.parametrize(
    ("outputs", "subset", "message"),
    [(["sum", "max"], [2], "outputs= has 2"), ({"a": "sum"}, ["b"], r"outputs= has \['a'\]")],
)
def test_subsets_of_the_modes_are_checked_before_the_call(quiet, outputs, subset, message):
    f = quiet.function(total, outputs=outputs, name="f")
    with pytest.raises(InvalidIndex, match=message):
        f(ROWS, output_subset=subset)


# ── the errors are also Python's own ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (InvalidValue, (UsageError, ValueError)),
        (InvalidType, (UsageError, TypeError)),
        (InvalidIndex, (UsageError, IndexError)),
        (OutputError, (UsageError, ValueError)),
        (NotAvailable, (SynkroError, NotImplementedError)),
        (NotForked, (SynkroError, RuntimeError)),
        (SessionClosed, (SynkroError, RuntimeError)),
        (SharedMemoryError, (SynkroError, MemoryError)),
    ],
)
def test_errors_are_also_pythons_own(error, bases):
    assert all(issubclass(error, base) for base in bases)


# ── operations of the user's ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("builtin", [max, min])
def test_pythons_max_may_be_meant_for_arrays_or_for_tuples(quiet, builtin):
    name = builtin.__name__
    with pytest.raises(
        InvalidType, match=rf"Did you mean '{name}'\? .*tuples say, give lambda a, b: {name}\(a, b\)"
    ):
        quiet.function(total, outputs=builtin)


@pytest.mark.parametrize("operation", [any, all, len, np.sum, sorted, lambda value: value])
def test_what_cannot_merge_two_values_is_no_operation(quiet, operation):
    with pytest.raises(InvalidType, match=r"a function op\(a, b\) that merges two values"):
        quiet.function(total, outputs=operation)


def test_python_numbers_reach_an_operation_as_they_are(session):
    def merged(fn, operation):
        return session.function(fn, outputs=operation)(ROWS[:2], num_slices=2)

    assert merged(lambda x: 1 << 40, lambda a, b: a << 30 | b) == 1 << 70 | 1 << 40
    assert merged(lambda x: math.factorial(17), operator.mul) == math.factorial(17) ** 2
    assert merged(lambda x: 1 << 70 * int(x[0]), operator.or_) == 1 << 70 | 1
    for value in (True, 3, 0.5, 2j):
        kept = merged(lambda x, value=value: value, lambda a, b: (a, b))
        assert [type(each) for each in kept] == [type(value)] * 2
    arrays = merged(lambda x: x, lambda a, b: (a, b))
    assert all(isinstance(each, np.ndarray) for each in arrays)
    numbers = merged(lambda x: x.sum(), lambda a, b: (a, b))
    assert all(isinstance(each, np.float64) for each in numbers)


def test_a_mean_of_ints_of_more_than_64_bits_is_refused_by_name(session):
    message = r"output\[1\] .*int of 19933 bits .* 64 .*float.*outputs=None.*operator"
    with pytest.raises(OutputError, match=message):
        session.function(lambda x: (1, 3**12576), outputs="mean")(ROWS)


@pytest.mark.parametrize(
    "fn", [lambda x: {1, 2}, lambda x: "ab", lambda x: ("a",), lambda x: {1: 2}.keys()]
)
def test_what_is_gathered_is_an_array_or_a_list(session, fn):
    with pytest.raises(OutputError, match=r'"gather" concatenates .*Return one list.* op\(a, b\)'):
        session.function(fn, outputs="gather")(ROWS)


@pytest.mark.parametrize("options", [{}, {"outputs": "sum"}])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_counter_of_other_words_on_every_rank(session, options, slices):
    def counted(x):
        return Counter(f"{x[0]} {i}" for i in range(2000))

    with pytest.raises(OutputError, match=r"Only one .*outputs=operator\.add") as caught:
        session.function(counted, **options)(ROWS, num_slices=slices)
    assert len(str(caught.value)) < 800
    merged = session.function(counted, outputs=operator.add)(ROWS, num_slices=slices)
    assert sum(merged.values()) == 2000 * 2 * slices


# ── what has rows, and is no array ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "made",
    [lambda: {1: "a"}.values(), lambda: {1, 2}, lambda: (i for i in range(2)), lambda: map(str, [1])],
)
def test_what_can_be_a_list_of_rows_is_to_be_one(quiet, made):
    f = quiet.function(total)
    with pytest.raises(
        InvalidType, match=r"but has none: .*Give list\(…\) to split it by rows\."
    ) as caught:
        f(made())
    assert ("bcast_inputs" in str(caught.value)) == (not hasattr(made(), "__next__"))


def test_arrays_of_objects_are_to_be_lists(session):
    array = np.array([0, 1, 2]).astype(object)
    with pytest.raises(InvalidType, match=r"cannot have the dtype .*\.tolist\(\).*bcast_inputs"):
        session.function(total)(array)
    rows = session.function(lambda x: list(x), outputs="gather")(array.tolist())
    assert list(rows) == array.tolist()
