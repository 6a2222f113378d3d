"""Targets of what GPUs compute: ``f.options(out=target)``."""

import sys

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.gpus import MOST, serving
from support.sessions import LARGE, current
from synkro import OutputError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

COLUMNS = [3, LARGE // 64]  # of these, 101 rows fit the outboxes, or do not


@pytest.fixture(scope="module", params=MOST)
def serving_session(request):
    with serving(request.param) as session:
        yield session


@pytest.fixture
def session(serving_session):
    with current(serving_session):
        yield serving_session


def doubled(x):
    return 2 * x


def array(x, path):
    return np.zeros_like(x)


def data(x, path):
    return synk.data(np.zeros_like(x))


def mapped(x, path):
    return np.lib.format.open_memmap(path / "x.npy", "w+", x.dtype, x.shape)


@pytest.mark.parametrize("columns", COLUMNS, ids=["small", "large"])
@pytest.mark.parametrize("make", [array, data, mapped], ids=lambda make: make.__name__)
def test_it_takes_what_numpy_says(session, tmp_path, make, columns):
    x = np.arange(101.0 * columns, dtype="f4").reshape(101, columns)
    f = synk.function(doubled, outputs="gather")
    for batch in (None, slice(90, None, -4), [5, 5, 0, 100]):
        expected = 2 * (x if batch is None else x[batch])
        target = make(expected, tmp_path)
        for factor in (1, -3):
            assert f.options(out=target)(factor * x, batch=batch, num_slices=2) is target
            assert np.array_equal(target, factor * expected)


@pytest.mark.parametrize("columns", COLUMNS, ids=["small", "large"])
def test_what_was_a_target_is_seen_as_an_input(session, columns):
    """What the devices have of it is stale then."""
    x = np.arange(101.0 * columns, dtype="f4").reshape(101, columns)
    one, other = synk.data(x), synk.data(np.zeros_like(x))
    f = synk.function(doubled, outputs="gather")
    for _ in range(3):
        f.options(out=other)(one)
        f.options(out=one)(other)
    assert np.array_equal(one, 64 * x)
    assert np.array_equal(f(one), 128 * x)
    with pytest.raises(OutputError, match="they have to be equal"):
        f.options(out=one)(x[1:])
    assert np.array_equal(f(one), 128 * x)
