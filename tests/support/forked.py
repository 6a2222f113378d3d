"""Workers of the tests are forks of one process, which has loaded what they import.

::

    client             the tests' process, or a program's; for a moment it adopts orphans
      └─ server        has loaded much, runs no thread
           └─ middle   ends at once: so its child becomes the client's
                └─ the worker, or the program

Two workers cost a tenth of the processor time so.  But what is forked has a NumPy that has read the
environment of the server.  Tests of how workers start have the marker ``fresh``; with ``pytest --fresh``
all tests get fresh interpreters.  With the marker ``loaded("jax")`` the workers have imported JAX, too,
and scripts that ``run_python`` runs are forks of the same process.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import types

import synkro.ipc.process
from synkro import machine

LENGTH = struct.Struct("q")
"""Before each request, which is pickled; and each answer, the number of a process."""

ALWAYS = ("numpy", "cloudpickle", "synkro.worker.loop", "synkro.controller.session")
"""What each server has loaded."""

TORCH = "torch._dynamo"
"""PyTorch, and what its optimizers import, which takes three seconds."""


# ── the client ───────────────────────────────────────────────────────────────────────────────────────


class Forked:
    """A process that a server has forked, as ``subprocess.Popen`` would show it."""

    def __init__(self, pid, stdout, stderr):
        self.pid = pid
        self.returncode = None
        self.stdout = os.fdopen(stdout, "rb")
        self.stderr = os.fdopen(stderr, "rb")
        self._lock = threading.Lock()

    def wait(self):
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Client:
    """A connection to a server."""

    def __init__(self, sock):
        self._sock = sock
        self._lock = threading.Lock()

    def worker(self, argument, fds, environment):
        """The process that ``synkro.worker.begin`` makes a worker of, by its *argument*."""
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        place = os.getcwd(), machine.search_path(), dict(environment)
        try:
            return Forked(self._fork("worker", argument, place, [out, err, *fds], fds), stdout, stderr)
        finally:
            os.close(out)
            os.close(err)

    def program(self, argv, folder, environment, stdout, stderr):
        """The number of a process that is ``python *argv`` in *folder*, whose workers are forks, too."""
        found = [os.path.dirname(argv[0]), *environment["PYTHONPATH"].split(os.pathsep), *sys.path]
        place = str(folder), found, environment
        return self._fork("program", argv, place, [stdout.fileno(), stderr.fileno()], ())

    def _fork(self, kind, argument, place, fds, targets):
        request = pickle.dumps((kind, argument, place, [0, 1, 2, *targets]))
        with open(os.devnull) as nothing, self._lock, adopting():
            socket.send_fds(self._sock, [LENGTH.pack(len(request))], [nothing.fileno(), *fds])
            self._sock.sendall(request)
            return LENGTH.unpack(self._sock.recv(LENGTH.size))[0]


@contextlib.contextmanager
def adopting():
    """Processes below this one whose parent ends become its children."""
    set_child_subreaper = 36
    libc = ctypes.CDLL(None)
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(set_child_subreaper, 0, 0, 0, 0)


class Server(Client):
    """The client of a server of its own, the *process*, which has loaded these modules."""

    def __init__(self, *modules):
        own, theirs = socket.socketpair()
        read = dict.fromkeys(
            [f"{name}_NUM_THREADS" for name in ("OPENBLAS", "OMP", "MKL", "NUMBA")], "1"
        )
        read["PYTENSOR_FLAGS"] = "mode=FAST_COMPILE"  # to compile a demo's graphs takes half a minute
        with theirs:
            self.process = machine.start(
                "from support.forked import serve; serve(argument)",
                " ".join([str(theirs.fileno()), *modules]),
                fds=[theirs.fileno()],
                environment={**os.environ, **read},
                alone=True,
            )
        super().__init__(own)

    def descriptors(self):
        return (self._sock.fileno(), self.process.stdout.fileno(), self.process.stderr.fileno())

    def close(self):
        self._sock.close()
        self.process.communicate()


# ── the server ───────────────────────────────────────────────────────────────────────────────────────


def serve(argument):
    """In the server: load, then fork until the client has gone; in what is forked: be that."""
    descriptor, *modules = argument.split()
    for module in modules:
        __import__(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{modules} have started threads, so their process must not fork"
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(descriptor)))


def _serve(sock):
    while (received := _received(sock)) is not None:
        kind, argument, place, targets, fds = received
        pid = _grandchild()
        if pid is None:
            sock.close()
            _settle(fds, targets, *place)
            return _work(argument) if kind == "worker" else _run(argument)
        for each in fds:
            os.close(each)
        sock.sendall(LENGTH.pack(pid))
    return None


def _work(argument):
    os.setsid()
    from synkro.worker.begin import main

    main(argument)


def _run(argv):
    """Be the program in the file *argv[0]*; a fork of this process, as it is now, forks its workers."""
    own, theirs = socket.socketpair()
    if not os.fork():
        own.close()
        return _serve(theirs)
    theirs.close()
    begin(Client(own))
    sys.argv = argv
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = argv[0]
    with open(argv[0]) as file:
        code = compile(file.read(), argv[0], "exec")
    exec(code, main.__dict__)
    return None


def _received(sock):
    """The next request, with its descriptors; None where the other end has gone."""
    head, fds, _, _ = socket.recv_fds(sock, LENGTH.size, 64)
    if not head:
        return None
    body = bytearray()
    while len(body) < LENGTH.unpack(head)[0]:
        body += sock.recv(LENGTH.unpack(head)[0] - len(body))
    return *pickle.loads(body), fds


def _grandchild():
    """Fork twice: the process id, or None in the process that is to go on."""
    read, write = os.pipe()
    middle = os.fork()
    if not middle:
        middle = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write, LENGTH.pack(pid))
            os._exit(0)
        while os.getppid() == middle:
            os.sched_yield()
    else:
        os.waitpid(middle, 0)  # from now on the process is the client's
        pid = LENGTH.unpack(os.read(read, LENGTH.size))[0]
    os.close(read)
    os.close(write)
    return pid or None


def _settle(fds, targets, folder, path, environment):
    """In a forked process: what a fresh interpreter would have found."""
    above = max(*targets, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


# ── the plugin ───────────────────────────────────────────────────────────────────────────────────────

servers = {}
"""By the modules that they have loaded, too."""

chosen = None
"""Which forks the workers of the test that runs; None where they are fresh interpreters."""

_fresh = machine.start


def begin(client):
    """From now on *client* forks the workers of this process."""
    global chosen
    chosen = client
    synkro.ipc.process.start = _start


def _start(code, argument="", *, fds=(), environment=None, alone=False):
    """``machine.start``, for workers."""
    if chosen is None or _read_at_the_start(os.environ) != _read_at_the_start(environment):
        return _fresh(code, argument, fds=fds, environment=environment, alone=alone)
    return chosen.worker(argument, fds, environment)


def _read_at_the_start(environment):
    """What of an environment the interpreter, or the loader, reads before a program begins."""
    return {name: each for name, each in environment.items() if name.startswith(("PYTHON", "LD_"))}


def descriptors():
    """Those of this process that belong to servers, as in /proc."""
    return {str(fd) for server in servers.values() for fd in server.descriptors()}


def pytest_addoption(parser):
    parser.addoption("--fresh", action="store_true", help="all workers are fresh interpreters")


def pytest_runtest_protocol(item):
    loaded = item.get_closest_marker("loaded")
    fresh = item.config.getoption("fresh") or item.get_closest_marker("fresh") is not None
    modules = loaded.args if loaded else ()
    if not fresh and modules not in servers:
        servers[modules] = Server(*ALWAYS, *modules)
    begin(None if fresh else servers[modules])


def pytest_sessionfinish():
    for server in servers.values():
        server.close()
    servers.clear()
