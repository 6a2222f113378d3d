"""Functions of the module and methods of sessions: one signature, one docstring, one error."""

import inspect
import operator
import pickle

import numpy as np
import pytest

import synkro as synk
from synkro.extensions import train, updates  # noqa: F401

FUNCTIONS = [name for name in synk.__all__ if inspect.isfunction(getattr(synk, name))]
FORWARDED = ["data", "distribute", "function", "load", "plot_timeline", "save", "summary", "trace"]
FORWARDED += ["get_lengths", "get_shapes", "get_value", "set_value", "shared"]
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
    for name in COLLECTIVES:
        assert getattr(session, name).__doc__
        assert getattr(session, name) == getattr(session.variables, name)
    w = session.shared(np.arange(4.0))
    session.scatter(w, np.arange(4.0))
    assert session.get_value(1, w).tolist() == [2, 3]
    session.all_reduce(w, "sum")
    assert session.variables.gather(w).tolist() == [[2, 4], [2, 4]]


CLASSIC = """
fork(n_parallel=None, use_gpu=True, master_rank=0, profile_workers=False)
get_n_gpu()
function(inputs, outputs=None, bcast_inputs=None, updates=None, givens=None, sliceable_shareds=None, \
**kwargs)
Function.__call__(self, *args, output_subset=None, batch=None, batch_s=None, num_slices=1, **kwargs)
Function.build_inputs(self, *args, force_cast=False, oversize=1.0, minibatch=False, **kwargs)
data(value=None, var=None, dtype=None, ndim=None, shape=None, minibatch=False, force_cast=False, \
oversize=1, name=None)
Data.set_value(self, input_data, force_cast=False, oversize=1)
Data.set_length(self, length, oversize=1)
Data.set_shape(self, shape, oversize=1)
Data.condition_data(self, input_data, force_cast=False)
broadcast(shared_vars, values=None, nccl=True)
scatter(shared_vars, values, batch=None)
gather(shared_vars, nd_up=1, nccl=True)
all_gather(shared_vars, nccl=True)
reduce(shared_vars, op="avg", in_place=True, nccl=True)
all_reduce(shared_vars, op="avg", nccl=True)
set_value(rank, shared_vars, values, batch=None)
get_value(rank, shared_vars)
get_lengths(shared_vars)
get_shapes(shared_vars)
extensions.train.make_train_function(loss, params, x, y, update_rule, *args, **kwargs)
extensions.updates.sgd(loss, params, learning_rate)
extensions.updates.momentum(loss, params, learning_rate, momentum=0.9)
extensions.updates.nesterov_momentum(loss, params, learning_rate, momentum=0.9)
extensions.updates.adagrad(loss, params, learning_rate=1.0, epsilon=1e-6)
extensions.updates.rmsprop(loss, params, learning_rate=1.0, rho=0.9, epsilon=1e-6)
extensions.updates.adadelta(loss, params, learning_rate=1.0, rho=0.95, epsilon=1e-6)
extensions.updates.adam(loss, params, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8)
extensions.updates.adamax(loss, params, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8)
"""
"""The signatures of Synkhronos; ours have them, in this order, and may have more behind them."""


@pytest.mark.parametrize("line", CLASSIC.strip().splitlines())
def test_signatures_are_those_of_synkhronos(line):
    name, _, rest = line.partition("(")
    space = {}
    exec(f"def classic({rest}: ...", space)
    theirs = list(inspect.signature(space["classic"]).parameters.values())
    ours = list(inspect.signature(operator.attrgetter(name)(synk)).parameters.values())
    for parameter in theirs:
        own = ours.pop(0)
        while parameter.kind is parameter.VAR_KEYWORD and own.kind is not own.VAR_KEYWORD:
            own = ours.pop(0)  # ours may have more
        assert (own.name, own.kind) == (parameter.name, parameter.kind)
        if parameter.default is not parameter.empty or name != "function":
            assert own.default == parameter.default
    assert all(own.kind is not own.POSITIONAL_ONLY for own in ours)


def test_fork_takes_what_a_session_takes():
    session, fork = inspect.signature(synk.Session), inspect.signature(synk.fork)
    assert fork.parameters == session.parameters
    assert fork.return_annotation == "int"
    assert inspect.getdoc(synk.fork).startswith("Start one worker process a device")


UNKNOWN = r"\(\) got the unknown keyword"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synk.fork(2, device="cpu"), rf"fork{UNKNOWN} device=: did you mean devices=\?"),
        (lambda: synk.fork(n_worker=2), rf"fork{UNKNOWN} n_worker=: it knows "),
        (lambda: synk.fork(2, "cpu"), "use_gpu must be True or False; got 'cpu'"),
        (lambda: synk.fork(2, False, 0, False, "cpu"), r"fork\(\) too many positional arguments"),
        (lambda: synk.get_value(0), r"get_value\(\) missing a required argument: 'shared_vars'"),
        (
            lambda: synk.all_reduce([], weight=3),
            rf"all_reduce{UNKNOWN} weight=: use it in the main program, as "
            r"``all_reduce\(shared_vars, op='avg', nccl=True\)``\.",
        ),
        (lambda: synk.data([1.0], dtyp="f4"), rf"data{UNKNOWN} dtyp=: did you mean dtype=\?"),
    ],
)
def test_arguments_that_a_function_does_not_take(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()
