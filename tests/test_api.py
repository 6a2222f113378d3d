"""Functions of the module and methods of sessions: one signature, one docstring, one error."""

import inspect
import pickle

import numpy as np
import pytest

import synkro as synk

FUNCTIONS = [name for name in synk.__all__ if inspect.isfunction(getattr(synk, name))]
FORWARDED = [
    "data",
    "distribute",
    "function",
    "get_lengths",
    "get_shapes",
    "get_value",
    "load",
    "plot_timeline",
    "save",
    "set_value",
    "shared",
    "summary",
    "trace",
]
COLLECTIVES = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter"]

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", FORWARDED)
def test_a_function_of_the_module_is_a_method_of_the_session(name):
    function, method = getattr(synk, name), getattr(synk.Session, name)
    own, *parameters = inspect.signature(method).parameters.values()
    assert own.name == "self"
    assert list(inspect.signature(function).parameters.values()) == parameters
    assert inspect.signature(function).return_annotation == inspect.signature(method).return_annotation
    assert function.__doc__ == method.__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_module_travel_by_name(name):
    assert pickle.loads(pickle.dumps(getattr(synk, name))) is getattr(synk, name)


def test_collectives_are_methods_of_the_session(session):
    assert (
        str(inspect.signature(session.all_reduce)) == "(variables: 'Any', op: 'str' = 'mean') -> 'None'"
    )
    for name in COLLECTIVES:
        assert getattr(session, name).__doc__
        assert getattr(session, name) == getattr(session.variables, name)
    w = session.shared(np.arange(4.0))
    session.scatter(w, np.arange(4.0))
    assert session.get_value(1, w).tolist() == [2, 3]
    session.all_reduce(w, "sum")
    assert session.variables.gather(w).tolist() == [[2, 4], [2, 4]]


def test_fork_takes_what_a_session_takes():
    session, fork = inspect.signature(synk.Session), inspect.signature(synk.fork)
    assert fork.parameters == session.parameters
    assert fork.return_annotation == "int"
    assert inspect.getdoc(synk.fork).startswith("Start one worker process a device")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synk.fork(2, device="cpu"), r"fork\(\) got an unexpected keyword argument 'device'"),
        (lambda: synk.fork(2, "cpu"), r"fork\(\) too many positional arguments"),
        (lambda: synk.get_value(0), r"get_value\(\) missing a required argument: 'variables'"),
        (lambda: synk.data([1.0], dtyp="f4"), r"data\(\) got an unexpected keyword argument 'dtyp'"),
    ],
)
def test_arguments_that_a_function_does_not_take(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()
