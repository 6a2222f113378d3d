"""How functions get to the workers: when, with what they use, and what of it they share."""

import os
import sys
import threading

import numpy as np
import pytest

from support.inside import everyone
from support.sessions import ask, lasting
from synkro import InvalidType
from synkro.packing.pickles import OUT_OF_BAND

pytestmark = pytest.mark.quick  # on every Python version

X = np.arange(21.0).reshape(7, 3)

session = lasting(2)


def test_a_ufunc_of_a_library_beside_multiprocessing(run_python):
    """Which makes the script a module of a second name: pickle found the ufunc in that."""
    pytest.importorskip("scipy", reason="needs scipy")
    done = run_python(
        "import multiprocessing, numpy as np, synkro as synk\n"
        "from scipy.special import expit\n"
        "synk.fork(2, verbose=False)\n"
        "f = synk.function(lambda x: np.add(expit(x), x), outputs='gather')\n"
        "print(f(np.zeros(3)))\n"
    )
    assert done.stdout == "[0.5 0.5 0.5]\n"


def test_functions_import_modules_beside_the_script(run_python, tmp_path):
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    done = run_python(
        "import beside, collections, numpy as np, synkro as synk\n"
        "synk.fork(2, verbose=False)\n"
        "f = synk.function(beside.double, outputs='gather')\n"
        "g = synk.function(lambda x: beside.double(x) + 1, outputs='sum')\n"
        "assert f(np.arange(3)).tolist() == [0, 2, 4]\n"
        "print(g(np.arange(2)[:, None]).tolist())\n"
        "Pair = collections.namedtuple('Pair', 'a b')\n"
        "pair = synk.function(lambda x: Pair(x.sum(), x), outputs=Pair('sum', 'gather'))\n"
        "assert type(pair(np.arange(3))) is Pair\n"
        "def here(x):\n"
        "    return [x.sum(), helper(x)]\n"
        "helper = lambda x: x.max()\n"
        "print(synk.function(here, outputs=['sum', 'max'])(np.arange(5)))\n"
    )
    assert done.stdout.splitlines() == ["[[4]]", "[np.int64(10), np.int64(4)]"]
    assert done.stderr == ""


@pytest.mark.parametrize("size", [1, 1 << 16], ids=["small", "big"])
def test_distributed_together_they_share_what_they_use(session, size):
    memory = np.zeros(size)

    def add(x):
        memory[:] += x.sum()

    def read():
        return memory.max()

    add, read = session.function(add, outputs=[]), session.function(read, outputs="sum")
    session.distribute()
    assert read() == 0
    add(np.ones(10))
    add(np.ones(10))
    assert read() == 20
    assert not memory.any()


@pytest.mark.parametrize("nbytes", [OUT_OF_BAND - 8, OUT_OF_BAND, 1 << 21])
@pytest.mark.parametrize("writeable", [True, False])
def test_arrays_of_closures_stay_what_they_are_and_writes_in_their_worker(session, nbytes, writeable):
    table = np.arange(nbytes // 8, dtype="i8")
    table.flags.writeable = writeable

    def look(rows):
        return table[rows], np.array([table.flags.writeable])

    def write(rows):
        table[rows] = -1
        return (table == -1).sum()

    f, g = session.function(look, outputs="gather"), session.function(write, outputs=None)
    found, flags = f(np.array([0, 5, nbytes // 8 - 1]))
    assert found.tolist() == [0, 5, nbytes // 8 - 1]
    assert flags.tolist() == [writeable] * 2
    for _ in range(2 * writeable):
        assert g(np.arange(5)) == [3, 2]
    assert not (table == -1).any()


def test_a_big_closure_lies_in_memory_once(session):
    table = np.ones(1 << 18)

    def where():
        address = table.__array_interface__["data"][0]
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, _, _, _, inode, *name = line.split()
                low, high = (int(part, 16) for part in span.split("-"))
                if low <= address < high:
                    return int(inode) if name and "(deleted)" in name else -1
        return -1

    inodes = session.function(where, outputs=None)()
    assert inodes[0] == inodes[1] > 0


def test_nothing_is_sent_where_there_is_nothing_new(session, monkeypatch):
    def refuse(*_):
        raise AssertionError("a command was sent")

    session.distribute()
    monkeypatch.setattr(everyone(session), "send", refuse)
    session.distribute()
    dropped = session.function(lambda x: x.sum(), outputs="sum")
    del dropped
    session.distribute()
    kept = session.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(AssertionError, match="a command was sent"):
        session.distribute()
    assert kept.as_serial(np.ones(3)) == 3


def test_what_was_dropped_before_is_not_pickled(session):
    lock = threading.Lock()
    f = session.function(lambda x: (lock, x.sum())[1], outputs="sum")
    g = session.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(InvalidType, match="lock"):
        session.distribute()
    del f
    session.distribute()
    assert g(X) == X.sum()


def test_path_and_folder_reach_the_workers(session, tmp_path, monkeypatch):
    def here():
        return os.getcwd(), list(sys.path)

    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"module_of_{name}.py").write_text("def triple(x):\n    return 3 * x\n")
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        triple = __import__(f"module_of_{name}").triple  # by reference: imported by the workers
        f = session.function(triple, outputs="gather")
        session.distribute()
        assert f(np.arange(3)).tolist() == [0, 3, 6]
        assert ask(session, here) == [(str(folder), [os.path.abspath(p) for p in sys.path])] * 2
