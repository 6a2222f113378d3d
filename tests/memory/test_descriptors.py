"""Where no descriptor is left, the error says so, and no other cause."""

import contextlib
import os
import sys

import numpy as np
import pytest

import synkro as synk
from support.limits import descriptors
from support.programs import PATHS

pytestmark = pytest.mark.quick

X = np.arange(6.0)


@contextlib.contextmanager
def told(left):
    """What is said in a block that has so many descriptors left, which are too few."""
    says = r"Too many open files\): raise the limit \(ulimit -n"
    with descriptors(left), pytest.raises(synk.SharedMemoryError, match=says):
        yield


@pytest.mark.fresh
@pytest.mark.parametrize("left", [0, 1, 5, 7, 12, 20])
def test_workers_that_cannot_be_started(left):
    fork = synk.fork
    with told(left):
        fork(2, verbose=False)
    assert synk.fork(2, verbose=False) == 2


@pytest.mark.parametrize("left", [0, 1])
def test_collectives_of_one_rank(two, left):
    f = synk.function(lambda x: synk.all_reduce(x.sum()), outputs="sum")
    with told(left):
        f.as_serial(X)
    assert f.as_serial(X) == 15


def test_a_file_that_is_mapped(two, tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with told(0):
        synk.data(mapped)
    assert synk.data(mapped)[-1] == 5


LAZY = """
import numpy as np, synkro as synk
from support.limits import descriptors

def tried(call):
    with descriptors(0):
        try:
            call()
        except (OSError, synk.SharedMemoryError) as error:
            print(error)

tried(lambda: synk.fork)
synk.fork(2, verbose=False)
w = synk.shared(np.zeros(2), name="w")
f = synk.function(lambda x: x.sum(), outputs="sum")
f(np.ones(2))
calls = [lambda: synk.save("saved"), lambda: f.submit(np.ones(2)).result(), lambda: synk.load("saved")]
for call in calls:
    tried(call)
for call in calls:
    call()
"""


def test_what_is_imported_when_it_is_used_first(run_python):
    """Python says so itself where nothing of Synkro is there yet that could."""
    first, *others = run_python(LAZY, env=PATHS).stdout.splitlines()
    assert "Too many open files" in first
    assert len(others) == 3
    assert all("raise the limit (ulimit -n)" in line for line in others)


# ── other causes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fresh
def test_a_python_that_cannot_be_started(tmp_path, monkeypatch):
    folder = tmp_path / "python"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder))
    with pytest.raises(synk.SessionError, match=r"Permission denied.*: they are started from ") as told:
        synk.fork(2, verbose=False)
    assert str(folder) in str(told.value)
    assert "ulimit" not in str(told.value)


@pytest.fixture
def without_matplotlib(monkeypatch):
    """It, and what imports it, is not loaded, whatever other tests have done."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    import synkro.controller.tracing as folder

    monkeypatch.delitem(sys.modules, f"{folder.__name__}.picture", raising=False)
    monkeypatch.delattr(folder, "picture", raising=False)
    synk.fork(1, verbose=False)
    with synk.trace():
        synk.function(lambda x: x.sum(), outputs="sum")(X)


def test_a_package_that_is_missing(without_matplotlib, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(synk.NotAvailable, match=r"needs matplotlib .*: pip install matplotlib\.$"):
        synk.plot_timeline()


def test_a_package_that_is_there_but_does_not_work(without_matplotlib, monkeypatch, tmp_path):
    words = f"libpng.so: cannot open shared object file: {os.strerror(24)}"
    (tmp_path / "matplotlib.py").write_text(f"raise ImportError({words!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="Too many open files"):
        synk.plot_timeline()
