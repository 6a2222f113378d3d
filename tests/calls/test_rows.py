"""``rows()``: which rows a function sees, among all."""

import threading
from pathlib import Path

import numpy as np
import pytest

import synkro as synk
from calls.test_exact import selections
from support.examples import given, st
from support.sessions import lasting
from synkro import UsageError, WorkerError

pytestmark = pytest.mark.quick

N = 23
X = np.arange(N) * 10.0

session = lasting(3)


def seen(x):
    return synk.rows()


@given(chosen=selections(N), num_slices=st.integers(1, 9))
def test_they_are_those_that_the_batch_selects(session, chosen, num_slices):
    batch, index = chosen
    f = session.function(lambda x: (synk.rows(), x), outputs="gather")
    rows, values = f(X, batch=batch, num_slices=num_slices)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(rows, np.arange(N)[index])
    np.testing.assert_array_equal(values, X[rows])


def test_a_call_that_runs_again_has_its_own_rows(session):
    f = session.function(seen, outputs="gather")
    data = session.data(X)
    for _ in range(2):
        np.testing.assert_array_equal(f(data), np.arange(N))
        np.testing.assert_array_equal(f(data, batch=slice(5)), np.arange(5))
        np.testing.assert_array_equal(f(data, batch=[7, 3]), [7, 3])
        np.testing.assert_array_equal(f(data, batch=[2, 9]), [2, 9])


def test_they_are_the_users_own(session):
    def spoiled(x):
        first = synk.rows()
        kept = first.copy()
        first[:] = -1
        assert (synk.rows() == kept).all()
        return kept

    f = session.function(spoiled, outputs="gather")
    for batch in (None, [4, 4, 0, 9]):
        for _ in range(2):
            np.testing.assert_array_equal(f(X, batch=batch), np.arange(N) if batch is None else batch)


def test_minibatches(session):
    f = session.function(lambda x, y: (synk.rows(), x, y), outputs="gather")
    batch = np.array([3, 20, 3, 11])
    small = session.data(X[batch] + 1, minibatch=True)
    rows, x, y = f(X, small, batch=batch)
    np.testing.assert_array_equal(rows, batch)
    np.testing.assert_array_equal(y, x + 1)
    only = session.function(seen, outputs="gather")
    np.testing.assert_array_equal(only(small, batch=batch), batch)
    np.testing.assert_array_equal(only(small), np.arange(4))


def test_kept_rows_beside_scattered_inputs_and_beside_what_they_number(session):
    kept = session.function(lambda x: x, outputs="keep")(X)
    both = session.function(lambda k, x: (synk.rows(), k, x), outputs="gather")
    for each, expected in zip(both(kept, X), (np.arange(N), X, X), strict=True):
        np.testing.assert_array_equal(each, expected)
    first = session.function(lambda x: (x, synk.rows()), outputs="keep")
    second = session.function(lambda x, rows: (x, rows), outputs="gather")
    x, rows = second(*first(X, batch=slice(None, None, -2)))
    np.testing.assert_array_equal(rows, np.arange(N)[::-2])
    np.testing.assert_array_equal(x, X[rows])


def test_lists_dicts_and_fewer_rows_than_ranks(session):
    f = session.function(lambda names: [f"{r}{n}" for r, n in zip(synk.rows(), names, strict=True)])
    g = session.function(f.fn, outputs="gather")
    assert g(["a", "b", "cd", "e"]) == ["0a", "1b", "2cd", "3e"]
    assert g(["a", "b"]) == ["0a", "1b"]
    h = session.function(lambda d: synk.rows() + d["x"], outputs="gather")
    np.testing.assert_array_equal(h({"x": X, "y": X}), X + np.arange(N))


def test_in_this_process_and_in_check(session):
    f = session.function(lambda x, y: (synk.rows() * x).sum() + y, bcast_inputs="y", outputs="mean")
    assert f.as_serial(X, 3) == (np.arange(N) * X).sum() + 3
    g = session.function(lambda x: (synk.rows() * x).sum(), outputs="sum")
    assert g.check(X) == (np.arange(N) * X).sum()
    assert g.check(X, batch=[5, 2]) == 5 * X[5] + 2 * X[2]
    names = session.function(lambda names: synk.rows(), outputs="gather")
    np.testing.assert_array_equal(names.as_serial(["a", "b"]), [0, 1])


def test_without_scattered_inputs_and_outside_of_functions(session):
    whole = session.function(lambda y: synk.rows(), bcast_inputs="y", outputs=None)
    w = session.shared(X)
    held = session.function(seen, outputs="gather")
    for call in (lambda: whole(X), lambda: held(w)):
        with pytest.raises(WorkerError, match=r"rows\(\) are the indices of rows of scattered") as error:
            call()
        assert isinstance(error.value, UsageError)
    with pytest.raises(UsageError, match="scatter something with a row for each"):
        whole.as_serial(X)
    np.testing.assert_array_equal(held(X), np.arange(N))
    with pytest.raises(UsageError, match=r"rows\(\) is for use inside a function that runs"):
        synk.rows()


def test_in_a_thread_of_a_function(session):
    def threaded(x):
        errors = []

        def ask():
            try:
                synk.rows()
            except UsageError as error:
                errors.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return len(errors)

    assert session.function(threaded, outputs="sum")(X) == 3


def test_inputs_are_let_go_of_when_they_are_freed(session):
    f = session.function(lambda x: len(synk.rows()), outputs="sum")
    data = session.data(np.ones(1 << 22))
    assert f(data) == len(data)
    data.free_memory()
    session.data(X)  # large memory that was freed is given back before new memory is taken
    for pid in session.pids:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        ends = [line.split()[0].split("-") for line in maps if "(deleted)" in line]
        assert all(int(stop, 16) - int(start, 16) < 1 << 25 for start, stop in ends)
