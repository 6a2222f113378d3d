"""NCCL between processes and threads that share a folder.

Where FAKE_NCCL is 'none' the module has nothing but `available`, as the real one where the library
is missing.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

from . import _machine, _queues, _ranks, runtime

available = os.environ.get("FAKE_NCCL") != "none"

_UNHANDLED_CUDA, _SYSTEM, _INVALID_ARGUMENT, _INVALID_USAGE = 1, 2, 4, 5
_ERRORS = {
    0: "NCCL_ERROR_SUCCESS: no error",
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
_MULTI_RANK_SINCE = 23000
_ID_BYTES = 128

NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

_group = threading.local()  # `depth`; the `operations` that a group has so far, and its `status`
_communicators = weakref.WeakSet()


class NcclError(RuntimeError):
    """NCCL's error: `status` is its number."""

    def __init__(self, status):
        self.status = status
        super().__init__(_ERRORS[status])

    def __reduce__(self):
        return (type(self), (self.status,))


def get_version():
    """The version of the library."""
    return int(os.environ.get("FAKE_NCCL_VERSION", "23203"))


def get_build_version():
    """The version that CuPy was built with."""
    return 22501


def get_unique_id():
    """The name of a communicator to be, for its ranks to tell each other."""
    return os.urandom(_ID_BYTES)


def groupStart():
    """From now on operations are collected."""
    _group.depth = getattr(_group, "depth", 0) + 1
    if _group.depth == 1:
        _group.operations, _group.status = [], 0


def groupEnd():
    """Issue what has been collected as one operation, in which each part may come first.

    Ranks that are not connected yet connect first: that waits for them in C, for as long as it takes.
    Nothing is issued where a call of the group has failed: then this fails, too.
    """
    if not getattr(_group, "depth", 0):
        raise NcclError(_INVALID_USAGE)
    _group.depth -= 1
    if _group.depth:
        return
    operations, _group.operations = _group.operations, []
    aborted = _group.__dict__.pop("aborted", ())
    for comm in aborted:
        comm._leave()
    if _group.status:
        raise NcclError(_group.status)
    for comm, _, operation in operations:
        if comm not in aborted:
            comm._connect(operation)
    queues = {queue: None for _, queue, _ in operations}
    for queue in queues:
        _launch(queue, [(comm, operation) for comm, own, operation in operations if own is queue])


def _failed(status):
    """The error of an operation, which is its group's, too."""
    _group.status = status
    return NcclError(status)


def _launch(queue, parts):
    """Queue operations as one."""

    def work():
        steps = [operation.step() for _, operation in parts]  # all of them make one
        return all(steps)

    with _machine.lock:
        point = _queues.push(queue, work)
        for comm, _ in parts:
            comm._pending.append((queue, point))
        _queues.urgent.add(queue)
        if not _machine.lazy():
            _queues.advance(queue, point)


class NcclCommunicator:
    """One rank of a communicator; its device is the one that is current when it is made."""

    __slots__ = ("__weakref__", "_device", "_pending", "_session")

    def __new__(cls, ndev=0, commId=None, rank=0, config=None):
        self = super().__new__(cls)
        self._session = None
        self._pending = []
        return self

    def __init__(self, ndev, commId, rank, config=None):
        if commId is not None and not isinstance(commId, bytes):
            given = type(commId).__name__
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {given})")
        if len(commId) != _ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {_ID_BYTES}.")
        if os.environ.get("FAKE_NCCL") == "broken":
            raise NcclError(_SYSTEM)
        try:
            self._device = runtime.getDevice()
        except runtime.CUDARuntimeError:
            raise NcclError(_UNHANDLED_CUDA) from None
        if config is not None or not 0 <= rank < ndev:
            raise NcclError(_INVALID_ARGUMENT)
        _machine.touch(self._device)
        folder = _ranks.Folder(commId, ndev, rank)
        shared = (
            get_version() >= _MULTI_RANK_SINCE and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        )
        machine, interface = os.uname().nodename, os.environ.get("NCCL_SOCKET_IFNAME")
        host = os.environ.get("NCCL_HOSTID", machine)
        physical = _machine.devices()[self._device]
        where = {"device": [host, physical], "shared": shared, "ends": [machine, interface]}
        folder.write(f"rank-{rank}", where)
        while not folder.has_all("rank"):
            time.sleep(0.001)
        ranks = [folder.read(f"rank-{other}")[0] for other in range(ndev)]
        taken = {tuple(other["device"]) for other in ranks}
        if len(taken) < ndev and not all(other["shared"] for other in ranks):
            folder.leave()
            raise NcclError(_INVALID_USAGE)
        machines, interfaces = map(set, zip(*[other["ends"] for other in ranks], strict=True))
        if len(machines) > 1 and "lo" in interfaces:  # which reaches no other machine
            folder.leave()
            raise NcclError(_SYSTEM)
        self._session = _ranks.Session(folder)
        if os.environ.get("NCCL_RUNTIME_CONNECT") == "0":
            self._session.connected.add(None)
        _communicators.add(self)

    def __del__(self):
        if self._session is not None:
            self.abort()

    def _open(self, error=NcclError):
        """The session, of a communicator that is neither destroyed nor aborted."""
        if self._session is None:
            raise error(_INVALID_ARGUMENT)
        return self._session

    def rank_id(self):
        """The number of this rank."""
        return self._open().rank

    def size(self):
        """How many ranks there are."""
        return self._open().size

    def device_id(self):
        """The device of this rank."""
        self._open()
        return self._device

    def check_async_error(self):
        """Raise the error that spoilt the communicator, if there is one; returns nothing."""
        if status := self._open().error():
            raise NcclError(status)

    def abort(self):
        """Leave; what is still to be done completes without a result.  Twice is once.

        Within a group that happens at its end, as with all that is called there.
        """
        if getattr(_group, "depth", 0):
            _group.__dict__.setdefault("aborted", []).append(self)
        else:
            self._leave()

    def _leave(self):
        with _machine.lock:
            session, self._session = self._session, None
            if session is None:
                return
            session.over = True
        session.folder.leave()

    def _connect(self, operation):
        """Wait for the ranks of the operation's first kind: one for a message, all for a collective.

        For collectives they were connected when they met, if NCCL_RUNTIME_CONNECT is 0.
        """
        session, peer = self._open(), getattr(operation, "peer", None)
        if peer in session.connected:
            return
        folder, rank = session.folder, session.rank
        wanted = range(session.size) if peer is None else [peer]
        for other in wanted:
            folder.write(f"connects-{rank}-{other}-{peer is None}", {})
        while not all(folder.has(f"connects-{other}-{rank}-{peer is None}") for other in wanted):
            time.sleep(0.001)
        session.connected.add(peer)

    def destroy(self):
        """Leave when what has been issued is done. Twice is once."""
        if self._session is not None and not self._session.error():
            for queue, point in self._pending:
                _queues.finish(queue, point)
        self.abort()

    def _issue(self, operation, stream):
        """Queue an operation on a stream, or add it to the group."""
        self._pending = [(queue, point) for queue, point in self._pending if queue.completed < point]
        queue = _queues.lookup(stream, self._device)
        if queue.device != self._device:
            raise _failed(_UNHANDLED_CUDA)
        if getattr(_group, "depth", 0):
            _group.operations.append((self, queue, operation))
        else:
            self._connect(operation)
            _launch(queue, [(self, operation)])

    def _check(self, datatype, op=NCCL_SUM, root=0):
        """The session and the dtype, if the arguments are valid and the device is well."""
        session = self._open(_failed)
        dtype = _ranks.dtype_of(datatype)
        if dtype is None or not 0 <= op <= NCCL_AVG or not 0 <= root < session.size:
            raise _failed(_INVALID_ARGUMENT)
        try:
            _machine.check()
        except runtime.CUDARuntimeError:
            raise _failed(_UNHANDLED_CUDA) from None
        return session, dtype

    @staticmethod
    def _buffer(address, nbytes):
        """Device memory, which it must be."""
        buffer = _ranks.Buffer(address, nbytes)
        if not buffer.valid:
            raise _failed(_INVALID_ARGUMENT)
        return buffer

    def _collective(self, kind, send, receive, counts, datatype, stream, *, op=NCCL_SUM, root=0):
        """Issue an operation of all ranks; `counts` are those of what is sent and received."""
        session, dtype = self._check(datatype, op, root)
        if not counts[0]:
            return  # NCCL discards it, too
        header = {"kind": kind, "count": counts[0], "datatype": datatype, "op": op, "root": root}
        sends = None if send is None else self._buffer(send, counts[0] * dtype.itemsize)
        receives = None if receive is None else self._buffer(receive, counts[1] * dtype.itemsize)
        self._issue(_ranks.Collective(session, header, dtype, sends, receives), stream)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        """Combine the arrays of all ranks, for all."""
        self._collective("allReduce", sendbuf, recvbuf, (count, count), datatype, stream, op=op)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        """Combine the arrays of all ranks, for one."""
        receive = recvbuf if self._open(_failed).rank == root else None
        self._collective("reduce", sendbuf, receive, (count, count), datatype, stream, op=op, root=root)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        """Give all ranks the array of one."""
        send = sendbuff if self._open(_failed).rank == root else None
        self._collective("broadcast", send, recvbuff, (count, count), datatype, stream, root=root)

    def bcast(self, buff, count, datatype, root, stream):
        """Give all ranks the array of one, in place."""
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        """Combine the arrays of all ranks, and give each its share."""
        counts = (recvcount * self._open(_failed).size, recvcount)
        self._collective("reduceScatter", sendbuf, recvbuf, counts, datatype, stream, op=op)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        """Give all ranks the arrays of all, one after the other."""
        counts = (count, count * self._open(_failed).size)
        self._collective("allGather", sendbuf, recvbuf, counts, datatype, stream)

    def send(self, sendbuf, count, datatype, peer, stream):
        """Send an array to another rank."""
        session, dtype = self._check(datatype, root=peer)
        buffer = self._buffer(sendbuf, count * dtype.itemsize)
        self._issue(_ranks.Send(session, {"count": count, "datatype": datatype}, buffer, peer), stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        """Receive an array from another rank."""
        session, dtype = self._check(datatype, root=peer)
        buffer = self._buffer(recvbuf, count * dtype.itemsize)
        self._issue(
            _ranks.Receive(session, {"count": count, "datatype": datatype}, buffer, peer), stream
        )


def _at_exit():
    """Nothing stays behind in the folder of a process that forgot its communicators."""
    for communicator in list(_communicators):
        if communicator._session is not None:
            communicator.abort()


atexit.register(_at_exit)

if not available:
    for _name in [name for name in globals() if not name.startswith("_") and name != "available"]:
        del globals()[_name]
