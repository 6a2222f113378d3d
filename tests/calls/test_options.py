"""``f.options(…)``: options of single calls."""

import copy
import time
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import synkro as synk
from support.sessions import lasting, running
from synkro import CallTimeout, InvalidType, InvalidValue, WorkerError

pytestmark = pytest.mark.quick

X = np.arange(8.0)

session = lasting(2)


def stuck(x):
    while x.sum() >= 0:
        time.sleep(0.01)


def sleepy(x):
    time.sleep(0.5)
    return x.sum()


def test_a_call_takes_no_longer(session):
    f = session.function(stuck, outputs=[], name="stuck")
    total = session.function(lambda x, y: x.sum() + y, bcast_inputs="y", outputs="sum")
    limited = f.options(timeout=0.2)
    for call in (limited, limited, lambda x: limited.submit(x).result()):
        with pytest.raises(CallTimeout, match=r"no answer within the timeout of 0\.2 s from ranks 0, 1"):
            call(X)
        assert total(X, 1) == 30
    assert total.options(timeout=60).submit(X, y=1, batch=slice(2)).result() == 3


def test_it_stands_in_for_the_sessions_limit_in_that_call_only():
    with running(2, timeout=0.3) as session:
        late = session.function(sleepy, outputs="sum")

        assert late.options(timeout=60)(X) == 28
        large = session.function(lambda x: np.zeros(1 << 20) + sleepy(x), outputs="sum")
        assert large.options(timeout=60)(X)[-1] == 28  # stored, and reduced
        for plain in (late, late.options(), late.options(timeout=None)):
            with pytest.raises(CallTimeout, match=r"0\.3 s"):
                plain(X)
            session.function(lambda: None, outputs=[]).options(timeout=60)()  # waits for the late ones
        assert late.options(timeout=60)(X) == 28


def test_arguments_results_and_errors_are_those_of_a_call(session):
    f = session.function(lambda x, y: (x.sum(), y), bcast_inputs="y", outputs=("sum", "max"))
    limited = f.options(timeout=60)
    assert limited(X, y=2, batch=[1, 2], num_slices=2) == (3, 2)
    assert limited(X, 2, output_subset=[0]) == (28,)
    with pytest.raises(InvalidType, match="was called wrongly"):
        limited()
    broken = session.function(lambda x: 1 // 0)
    with pytest.raises(WorkerError) as error:
        broken.options(timeout=60)(X)
    assert isinstance(error.value, ZeroDivisionError)
    assert f(X, 2) == (28, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *[
            ({"timeout": seconds}, InvalidValue, "must be more than 0 seconds, and finite; got")
            for seconds in (0, -1, float("nan"), float("inf"))
        ],
        ({"timeout": "soon"}, InvalidType, "timeout must be a number of seconds; got 'soon'"),
        ({"timeout": "2"}, InvalidType, "timeout must be a number of seconds; got '2'"),
        ({"timeout": b"2"}, InvalidType, "timeout must be a number of seconds; got b'2'"),
        ({"retries": 3}, InvalidType, r"options\(\) got the unknown keyword retries=: it knows timeout"),
        ({"time_out": 3}, InvalidType, "did you mean timeout="),
    ],
)
def test_wrong_options(session, options, error, message):
    with pytest.raises(error, match=message):
        session.function(len).options(**options)


def test_they_never_change(session):
    f = session.function(lambda x: x.sum(), outputs="sum", name="f")
    limited = f.options(timeout=60)
    with pytest.raises(FrozenInstanceError):
        limited.timeout = 1
    assert limited == f.options(timeout=60.0) == copy.copy(limited) != f.options(timeout=61)
    assert repr(limited) == f"Options(function={f!r}, timeout=60.0, out=None)"
    assert limited.name == "f"


def test_they_outlive_the_session():
    synk.fork(2, verbose=False, timeout=60)
    limited = synk.function(lambda x: x.sum(), outputs="sum").options(timeout=30)
    assert limited(X) == 28
    synk.close()
    synk.fork(1, verbose=False, timeout=60)
    assert limited(X) == 28
    synk.close()
