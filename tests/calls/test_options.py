"""``f.options(…)``: options of single calls."""

import copy
import time
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import synkro as synk
from support.sessions import lasting, running
from synkro import CallTimeout, InvalidType, InvalidValue, WorkerError

X = np.arange(8.0)

session = lasting(2)


def stuck(x):
    while x.sum() >= 0:
        time.sleep(0.01)


def sleepy(x):
    time.sleep(0.5)
    return x.sum()


@pytest.mark.quick
def test_a_call_takes_no_longer(session):
    f = session.function(stuck, outputs=[], name="stuck")
    total = session.function(lambda x: x.sum(), outputs="sum")
    limited = f.options(timeout=0.2)
    for _ in range(2):
        with pytest.raises(CallTimeout, match=r"no answer within the timeout of 0\.2 s from ranks 0, 1"):
            limited(X)
        assert total(X) == 28


@pytest.mark.quick
def test_so_does_a_submitted_one(session):
    f = session.function(stuck, outputs=[])
    with pytest.raises(CallTimeout, match=r"0\.2 s"):
        f.options(timeout=0.2).submit(X).result()
    total = session.function(lambda x, y: x.sum() + y, bcast_inputs="y", outputs="sum")
    assert total.options(timeout=60).submit(X, y=1, batch=slice(2)).result() == 3


@pytest.mark.quick
def test_it_stands_in_for_the_sessions_limit_in_that_call_only():
    with running(2, timeout=0.3) as session:
        late = session.function(sleepy, outputs="sum")

        assert late.options(timeout=60)(X) == 28
        for plain in (late, late.options(), late.options(timeout=None)):
            with pytest.raises(CallTimeout, match=r"0\.3 s"):
                plain(X)
            session.function(lambda: None, outputs=[]).options(timeout=60)()  # waits for the late ones
        assert late.options(timeout=60)(X) == 28


@pytest.mark.quick
def test_it_holds_for_all_that_a_call_does():
    with running(2, timeout=60) as session:
        f = session.function(lambda x: np.zeros(1 << 20) + x.sum(), outputs="sum")  # stored, and reduced
        assert f.options(timeout=30)(X)[-1] == 28


@pytest.mark.quick
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


@pytest.mark.quick
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_impossible_seconds(session, timeout):
    with pytest.raises(InvalidValue, match="timeout must be more than 0 seconds, and finite; got"):
        session.function(len).options(timeout=timeout)


@pytest.mark.quick
def test_other_wrong_options(session):
    f = session.function(lambda x: x.sum())
    with pytest.raises(InvalidType, match="timeout must be a number of seconds; got 'soon'"):
        f.options(timeout="soon")
    with pytest.raises(
        InvalidType, match=r"options\(\) got the unknown keyword retries=: it knows timeout"
    ):
        f.options(retries=3)
    with pytest.raises(InvalidType, match="did you mean timeout="):
        f.options(time_out=3)


@pytest.mark.quick
def test_they_never_change(session):
    f = session.function(lambda x: x.sum(), outputs="sum")
    limited = f.options(timeout=60)
    with pytest.raises(FrozenInstanceError):
        limited.timeout = 1
    assert limited == f.options(timeout=60.0) == copy.copy(limited) != f.options(timeout=61)
    assert repr(limited) == f"Options(function={f!r}, timeout=60.0, out=None)"


@pytest.mark.quick
def test_they_outlive_the_session():
    synk.fork(2, verbose=False, timeout=60)
    limited = synk.function(lambda x: x.sum(), outputs="sum").options(timeout=30)
    assert limited(X) == 28
    synk.close()
    synk.fork(1, verbose=False, timeout=60)
    assert limited(X) == 28
    synk.close()


@pytest.mark.quick
@pytest.mark.parametrize("seconds", ["2", b"2"])
def test_a_text_is_no_number_of_seconds(session, seconds):
    with pytest.raises(InvalidType, match=r"timeout must be a number of seconds; got b?'2'"):
        session.function(lambda x: x).options(timeout=seconds)


@pytest.mark.quick
def test_it_has_the_name_of_the_function(session):
    assert session.function(lambda x: x, name="f").options(timeout=2).name == "f"
