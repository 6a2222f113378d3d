"""Every test is followed by a count of what it may have left behind.

The sessions of a file that is marked ``counted_once`` serve many of its tests: it is counted at its end.
As root each process of tests has a /dev/shm of its own, where nobody else's files come and go.
"""

import contextlib
import ctypes
import gc
import os

import pytest

import synkro as synk
from support import forked
from support.waiting import wait_until
from synkro import here


def children(pid="self"):
    """The process ids of a process's children: of this one's, unless told otherwise, but for servers."""
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            found |= set(map(int, file.read().split()))
    return found - {server.process.pid for server in forked.servers.values()}


def descendants(pid):
    """The process ids of a process's children, and theirs."""
    found = children(pid)
    for child in tuple(found):
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            found |= descendants(child)
    return found


def descriptors():
    """This process's open descriptors, but for those of servers, each with what it refers to."""
    found = {}
    for fd in set(os.listdir("/proc/self/fd")) - forked.descriptors():
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def mappings(pid="self"):
    """How many mappings of shared memory a process has."""
    with open(f"/proc/{pid}/maps") as maps:
        return sum("/dev/shm/" in line or "memfd:" in line for line in maps)


OTHERS = ("joblib_", "psm_", "sem.", "mpich_shm_", "synkro-test-", "synkro-demo-", "synkro-howto")
"""How files begin of joblib's, multiprocessing's and MPICH's, which tests in other processes use
meanwhile, and names that the tests which make them look at by themselves.  What sessions over several
hosts leave there is in ``test_hosts_sessions``."""


def shared_files():
    """What this user has in /dev/shm, but for what other libraries' programs have there for a while."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir("/dev/shm") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return {name for name in found if not name.startswith(OTHERS)}


def pytest_configure(config):
    """Mount a /dev/shm that nobody else sees, where that is allowed; hosts of tests have their own."""
    clone_newns, ms_private, ms_rec = 0x20000, 1 << 18, 1 << 14
    libc = ctypes.CDLL(None)
    if not config.getoption("over") and libc.unshare(clone_newns) == 0:
        libc.mount(None, b"/", None, ms_rec | ms_private, None)
        libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None)


@contextlib.contextmanager
def nothing_left():
    """No process, no descriptor and no file in /dev/shm more than before the block."""
    gc.collect()
    before = children(), descriptors(), shared_files()
    yield
    gc.collect()
    assert wait_until(lambda: children() <= before[0]), children() - before[0]
    left = {fd: what for fd, what in descriptors().items() if fd not in before[1]}
    assert not left, left
    assert wait_until(lambda: shared_files() <= before[2]), shared_files() - before[2]


def _counted_once(request):
    return request.node.get_closest_marker("counted_once") is not None


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """After the test, and after the current session is closed, there is nothing more than before."""
    if _counted_once(request):
        yield
        return
    with nothing_left():
        yield
        synk.close()
        here.session = None


@pytest.fixture(scope="module", autouse=True)
def nothing_left_in_the_end(request):
    """The same for a whole file; kept sessions, over several hosts, are counted after the last file."""
    if not _counted_once(request) or request.config.getoption("over"):
        yield
        return
    with nothing_left():
        yield
        synk.close()
        here.session = None


def pytest_collection_finish(session):
    """What was imported stays: the collections before and after each test need not walk it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_walked_again():
    """What a module's tests leave in pytest's own records would slow every later collection."""
    yield
    gc.collect()
    gc.freeze()
