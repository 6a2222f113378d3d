"""Workers of the tests are forks of one process, which has loaded what they import.

::

    client             the tests' process, or a program's; for a moment it adopts orphans
      └─ server        has loaded much, runs no thread
           └─ middle   ends at once: so its child becomes the client's
                └─ the worker, or the program

Two workers cost a tenth of the processor time so.  But what is forked has a NumPy that has read the
environment of the server.  Tests of how workers start have the marker ``fresh``; with ``pytest --fresh``
all tests get fresh interpreters.  With the marker ``loaded("torch")`` a file's workers have imported
PyTorch, too.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import pickle
import select
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

WORKERS = ("numpy", "cloudpickle", "synkro.worker.loop")
"""What the process loads that workers are forked from."""


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

    def fork(self, kind, argument, *, fds=(), environment=None, path=None, alone=False, connected=False):
        """A process that is what a fresh interpreter with these would be; if *connected*, it may fork.

        *kind* is "worker", with the *argument* of ``synkro.worker.loop``, or "program", with its path.
        """
        with contextlib.ExitStack() as theirs:
            streams = []
            for _ in range(2):
                read, write = os.pipe()
                theirs.callback(os.close, write)
                streams.append((read, write))
            nothing = os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, nothing)
            (stdout, out), (stderr, err) = streams
            environment = dict(os.environ if environment is None else environment)
            path = machine.search_path() if path is None else path
            where = [0, 1, 2, *fds], alone, environment, os.getcwd(), path
            request = pickle.dumps((kind, argument, connected, where))
            with self._lock, adopting():
                socket.send_fds(self._sock, [LENGTH.pack(len(request))], [nothing, out, err, *fds])
                self._sock.sendall(request)
                (pid,) = LENGTH.unpack(self._sock.recv(LENGTH.size))
        return Forked(pid, stdout, stderr)


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
    """The client of a server of its own, which has loaded these modules."""

    def __init__(self, *modules):
        own, theirs = socket.socketpair()
        once = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "NUMBA")}
        with theirs:
            self._process = machine.start(
                "from support.forked import serve; serve(argument)",
                " ".join([str(theirs.fileno()), *modules]),
                fds=[theirs.fileno()],
                environment={**os.environ, **once},
                alone=True,
            )
        super().__init__(own)

    def close(self):
        self._sock.close()
        self._process.communicate()


# ── the server ───────────────────────────────────────────────────────────────────────────────────────


def serve(argument):
    """In the server: load, fork for all clients until the first has gone; in what is forked: be that."""
    descriptor, *modules = argument.split()
    for module in modules:
        __import__(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{modules} have started threads, so their process must not fork"
    gc.collect()
    gc.freeze()
    kind, argument, theirs = _forked(socket.socket(fileno=int(descriptor)))
    if kind == "worker":
        from synkro.worker.loop import main

        main(argument)
    else:
        if theirs is not None:
            begin(Client(theirs))
        program(argument)


def program(path):
    """Be the program in that file, as ``python path`` would."""
    sys.argv = [path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def _forked(first):
    """Answer all clients; returns, in a process that was forked, what it is to be."""
    clients = {first.fileno(): first}
    while True:
        for fd in select.select(list(clients), [], [])[0]:
            request, fds = _received(clients[fd])
            if request is None:
                if clients.pop(fd) is first:
                    sys.exit()
                continue
            kind, argument, connected, where = request
            own, theirs = socket.socketpair() if connected else (None, None)
            pid = _grandchild()
            if pid is None:
                for sock in (*clients.values(), own):
                    if sock is not None:
                        sock.close()
                _settle(fds, *where)
                return kind, argument, theirs
            for each in fds:
                os.close(each)
            if connected:
                clients[own.fileno()] = own
                theirs.close()
            clients[fd].sendall(LENGTH.pack(pid))


def _received(sock):
    """The next request and its descriptors; None where the other end has gone."""
    head, fds, _, _ = socket.recv_fds(sock, LENGTH.size, 64)
    if not head:
        return None, []
    body = bytearray()
    while len(body) < LENGTH.unpack(head)[0]:
        body += sock.recv(LENGTH.unpack(head)[0] - len(body))
    return pickle.loads(body), fds


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


def _settle(fds, targets, alone, environment, folder, path):
    """In a forked process: what a fresh interpreter would have found."""
    above = max(*targets, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    if alone:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


# ── the plugin ───────────────────────────────────────────────────────────────────────────────────────

servers = {}
"""By the modules that they have loaded beside WORKERS."""

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
    return chosen.fork("worker", argument, fds=fds, environment=environment, alone=alone)


def _read_at_the_start(environment):
    """What of an environment the interpreter, or the loader, reads before a program begins."""
    return {name: each for name, each in environment.items() if name.startswith(("PYTHON", "LD_"))}


def server_of(*modules):
    if modules not in servers:
        servers[modules] = Server(*WORKERS, *modules)
    return servers[modules]


def pytest_addoption(parser):
    parser.addoption("--fresh", action="store_true", help="all workers are fresh interpreters")


def pytest_runtest_protocol(item):
    """Before all fixtures: the count of what is left has the server on both sides."""
    fresh = item.config.getoption("fresh") or item.get_closest_marker("fresh") is not None
    loaded = item.get_closest_marker("loaded")
    begin(None if fresh else server_of(*(loaded.args if loaded else ())))


def pytest_sessionfinish():
    for server in servers.values():
        server.close()
    servers.clear()
