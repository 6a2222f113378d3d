"""Targets of what GPUs compute: ``f.options(out=target)``."""

import numpy as np
import pytest

import synkro as synk
from results import test_out as cpu
from support.gpus import MOST, serves
from support.sessions import current
from support.targets import BIG, SMALL, doubled, numbers
from synkro import OutputError

serving_session = serves(MOST)


@pytest.fixture
def session(serving_session):
    with current(serving_session):
        yield serving_session


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["array", "data", "mapped"])
def test_it_takes_what_numpy_says(session, tmp_path, kind, columns):
    cpu.test_it_takes_what_numpy_says(session, tmp_path, cpu.TARGETS[kind], columns)


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("name", ["backwards", "list"])
def test_any_rows_and_slices(session, tmp_path, columns, name):
    cpu.test_any_rows_and_slices(session, tmp_path, columns, name, 2)


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
def test_what_was_a_target_is_seen_as_an_input(session, columns):
    """What the devices have of it is stale then."""
    x = numbers(columns)
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
