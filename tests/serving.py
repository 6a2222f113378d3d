"""Workers that serve many tests: the module functions go to them when a test asks."""

import contextlib

import pytest

import synkro as synk
from synkro import here
from synkro.machine import available_cores


def start(workers, **options):
    """Quiet workers by ``fork``; returns their session, which is no longer the current one."""
    crowded = pytest.warns(RuntimeWarning, match="CPU workers on")
    with crowded if workers > available_cores() else contextlib.nullcontext():
        synk.fork(workers, **{"timeout": 60, "verbose": False, **options})
    session, here.session = here.session, None
    return session


@contextlib.contextmanager
def running(workers, **options):
    """The module functions go to so many workers until the end of the block."""
    here.session = session = start(workers, **options)
    try:
        yield session
    finally:
        session.close()
        here.session = None
