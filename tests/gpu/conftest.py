"""Tests of GPU workers: on real GPUs where there are some, and on make-believe ones in a step of CI."""

import os
import sys

import pytest

from support.sessions import by_value, current


def pytest_itemcollected(item):
    """Sessions serve whole files here; ``machine`` and ``make_believe`` count after each test."""
    by_value(item)
    module = item.getparent(pytest.Module)
    if module.get_closest_marker("counted_once") is None:
        module.add_marker("counted_once")
    if item.get_closest_marker("gpu") is None and item.get_closest_marker("hosts") is None:
        item.add_marker("make_believe")


def _nameless(item):
    """Each environment is looked at for GPUs once; what names the test must not make another of it."""
    os.environ["PYTEST_CURRENT_TEST"] = "a test of GPUs"


pytest_runtest_setup = pytest.hookimpl(tryfirst=True)(_nameless)
pytest_runtest_call = pytest.hookimpl(tryfirst=True)(_nameless)
pytest_runtest_teardown = pytest.hookimpl(tryfirst=True)(_nameless)


@pytest.fixture(autouse=True)
def the_main_process_never_meets_cuda():
    yield
    met = [name for name in sys.modules if name.partition(".")[0] == "cupy"]
    for name in met:
        del sys.modules[name]
    assert not met


@pytest.fixture
def n(session):
    """The number of ranks of a session that serves the module functions."""
    with current(session):
        yield session.n_parallel
