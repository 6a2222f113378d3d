"""Outputs: how those of all ranks and slices become one result."""

import weakref
from collections import namedtuple

import numpy as np
import pytest

from support.arrays import alike
from support.sessions import INLINE, lasting
from synkro.controller.results.transfer import Outputs

pytestmark = [  # on every Python version; a session keeps memory for the next large outputs
    pytest.mark.quick,
    pytest.mark.counted_once,
]

X = np.arange(21.0).reshape(7, 3)
Y = np.array([1.0, -2.0, 3.0])

session = lasting(2)


Pair = namedtuple("Pair", "first second")


def means(x):
    return x.mean(axis=0), x.sum(axis=0)


def as_dict(x):
    return {"mean": x.mean(axis=0), "rows": x, "deep": {"max": x.max(axis=0)}}


@pytest.mark.parametrize(
    ("fn", "outputs", "expected"),
    [
        (lambda x: x.mean(axis=0), "avg", X.mean(axis=0)),
        (lambda x: x.sum(), "sum", X.sum()),
        (lambda x: float(x.sum()), "sum", X.sum()),
        (lambda x: len(x), "sum", 7),
        (lambda x: True, "sum", 2),
        (lambda x: x.mean(axis=0), None, [X[:4].mean(axis=0), X[4:].mean(axis=0)]),
        (means, ["mean", "sum"], (X.mean(axis=0), X.sum(axis=0))),
        (means, ("mean", None), (X.mean(axis=0), [X[:4].sum(axis=0), X[4:].sum(axis=0)])),
        (means, None, [means(X[:4]), means(X[4:])]),
        (lambda x: [x, [x.max()]], ["gather", "max"], [X, [20]]),
        (lambda x: [x, [x.max()]], ["gather", ["max"]], [X, [20]]),
        (lambda x: Pair(x.min(), (x.max(),)), Pair("min", ("max",)), Pair(0, (20,))),
        (lambda x: Pair(x.sum(), x.sum()), "sum", Pair(X.sum(), X.sum())),
        (
            as_dict,
            {"rows": "gather", "mean": "mean", "deep": "max"},
            {"mean": X.mean(axis=0), "rows": X, "deep": {"max": X.max(axis=0)}},
        ),
        (lambda x: {"a": x.sum(), "b": ()}, "sum", {"a": X.sum(), "b": ()}),
        (lambda x: (x.sum(),), "sum", (X.sum(),)),
        (lambda x: [], "sum", []),
        (lambda x: None, [], None),
        (lambda x: "what nobody wants", [], None),
        (lambda x: None, (), None),
    ],
)
def test_outputs_nest_and_reduce(session, fn, outputs, expected):
    for _ in range(2):
        alike(session.function(fn, outputs=outputs)(X), expected)


@pytest.mark.parametrize(
    ("fn", "outputs", "subset", "expected"),
    [
        (lambda x: (x.sum(), x.max(), x), ("sum", "max", "gather"), [2, 0], (X, X.sum())),
        (lambda x: [x.sum(), x.max()], ["sum", "max"], [-1], [20.0]),
        (lambda x: (x.sum(), -x.sum()), "sum", [1], (-X.sum(),)),
        (as_dict, {"rows": "gather", "mean": "mean", "deep": "max"}, ["rows"], {"rows": X}),
        (lambda x: (x.sum(), "text"), ("sum", "sum"), [0], (X.sum(),)),
    ],
)
def test_output_subset(session, fn, outputs, subset, expected):
    f = session.function(fn, outputs=outputs)
    alike(f(X, output_subset=subset), expected)
    alike(f(X, output_subset=subset, num_slices=2), expected)


@pytest.mark.parametrize("op", ["mean", "sum", "prod", "max", "min", "gather", None])
@pytest.mark.parametrize("width", [1, INLINE // 8 + 1])
def test_a_function_may_return_the_same_buffer_for_every_slice(session, op, width):
    kept = {}

    def running(x):
        buffer = kept.setdefault("buffer", np.empty((1, width)))
        buffer[...] = x.sum()
        return buffer

    f = session.function(running, outputs=op)
    values = np.arange(1.0, 7.0)
    for _ in range(2):
        result = f(values, num_slices=3)
        if op is None:
            assert [part[0, -1] for part in result] == values.tolist()
        elif op == "gather":
            assert result[:, -1].tolist() == values.tolist()
        else:
            assert result[0, -1] == getattr(values, op)()


def test_the_memory_of_a_result_is_used_again_when_it_is_dropped(own):
    f = own.function(lambda x: x, outputs="gather")
    x = own.data(np.ones((2, INLINE)))
    first, second = f(x), f(x)
    addresses = [result.ctypes.data for result in (first, second)]
    del first
    part = second[1:, :3]
    del second
    assert f(x).ctypes.data == addresses[0]
    part[...] = 9
    third = f(x)
    assert third.ctypes.data == addresses[0]
    assert f(x).ctypes.data not in addresses
    assert (third == 1).all()
    assert (part == 9).all()


def test_very_many_outputs(session):
    result = session.function(lambda x: [x.sum() + i for i in range(3000)], outputs="max")(X[:1])
    assert result == [X[0].sum() + i for i in range(3000)]


def test_a_function_may_return_its_input(session):
    f = session.function(lambda x: x, outputs="sum")
    x = session.data(np.ones((4, 3)))
    result = f(x, num_slices=2)
    result[:] = 7
    assert f(x, num_slices=2).tolist() == [[4] * 3]
    assert x[0].tolist() == [1, 1, 1]


def test_a_function_may_return_what_looks_like_an_array(session):
    class Wrapped:
        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.array, dtype)

    assert session.function(lambda x: Wrapped(x.sum(axis=0)), outputs="sum")(X).tolist() == [63, 70, 77]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_of_arrays_come_back_as_arrays(session):
    f = session.function(lambda x: np.matrix(x), outputs="prod")
    result = f(np.full((8, 2), 2.0), num_slices=2)
    assert type(result) is np.ndarray
    assert np.array_equal(result, np.full((2, 2), 16.0))


def test_memory_for_stages_is_freed_before_more_is_asked_for(session, monkeypatch):
    engine = session.services.engine
    outputs, allocate = Outputs(engine, np.empty((2, 0), np.uint8), False), engine.allocate
    small, lived = weakref.ref(outputs.stage(1, 100)), []

    def watched(nbytes):
        lived.append(small() is not None)
        return allocate(nbytes)

    monkeypatch.setattr(engine, "allocate", watched)
    assert outputs.stage(1, 100) is small()
    assert outputs.stage(1, 200).nbytes == 200
    assert lived == [False]
