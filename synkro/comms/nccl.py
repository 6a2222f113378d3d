"""Collectives over NVLink and PCIe: one rank's end of an NCCL communicator, through CuPy.

Whoever calls these has agreed with the other ranks before (``agreement``), and all have the memory
that they need: from then on nothing but the hardware, or the end of a process, can keep a rank away.
For that there is a watchdog: an operation is polled until it is complete; where NCCL reports an error,
or nothing happens for too long, the communicator is aborted, and the error says who was missing.

Everything runs on the current stream, and is complete when a method returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
from cupy.cuda import nccl

from ..errors import CollectiveError
from ..ipc.interrupts import atomic
from .agreement import Guard

PATIENCE = 120.0
"""Seconds that an operation, or the creation of a communicator, may take before it counts as stuck."""

_SPIN = 200e-6  # seconds to poll without a pause
_PAUSE = 20e-6  # … and between polls after it
_CHECKED = 0.05  # seconds between looks at what NCCL and the others say
_GRACE = 2.0  # seconds that an operation has left when another rank has failed
_IN_PROGRESS = 7  # ncclInProgress

_TYPES = {
    "i1": nccl.NCCL_INT8,
    "u1": nccl.NCCL_UINT8,
    "i4": nccl.NCCL_INT32,
    "u4": nccl.NCCL_UINT32,
    "i8": nccl.NCCL_INT64,
    "u8": nccl.NCCL_UINT64,
    "f4": nccl.NCCL_FLOAT32,
    "f8": nccl.NCCL_FLOAT64,
}

_OPERATIONS = {
    "SUM": nccl.NCCL_SUM,
    "PROD": nccl.NCCL_PROD,
    "MAX": nccl.NCCL_MAX,
    "MIN": nccl.NCCL_MIN,
}


def unique_id() -> bytes:
    """What the ranks of a new link find each other by.  Raises: CollectiveError."""
    try:
        identity = nccl.get_unique_id()
    except nccl.NcclError as error:
        raise CollectiveError(f"NCCL: {error}") from error
    return identity if isinstance(identity, bytes) else bytes(byte % 256 for byte in identity)


class Link:
    """A communicator of some ranks.  Arrays are contiguous; reduced ones are of ``wire.CARRIED``."""

    def __init__(self, identity: bytes, place: int, count: int, guard: Guard, device: int) -> None:
        """Be rank *place* of *count*; returns when all are there.

        Raises: CollectiveError if that fails, if another rank gives up, or if it takes too long.
        """
        self._comm: Any = None
        failure: list[BaseException] = []

        def create() -> None:
            try:
                cupy.cuda.Device(device).use()  # each thread has a current device of its own
                self._comm = nccl.NcclCommunicator(count, _given(identity), place)
            except BaseException as error:
                failure.append(error)

        # NCCL waits for the others in C, where nothing can interrupt it: so in a thread that can be left
        thread = threading.Thread(target=create, name="synkro-nccl", daemon=True)
        thread.start()
        begun = time.monotonic()
        deadline = begun + PATIENCE
        while thread.is_alive():
            thread.join(_CHECKED)
            now = time.monotonic()
            if guard.overtaken():
                deadline = min(deadline, now + _GRACE)
            if now > deadline:
                raise CollectiveError(f"NCCL did not connect {count} ranks within {now - begun:.0f} s")
        if failure:
            raise CollectiveError(f"NCCL: {failure[0]}")

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, vectors: Sequence[Any], operation: str, guard: Guard) -> None:
        """Each vector reduced over all ranks, in place."""
        with self._together(guard) as stream:
            for vector in vectors:
                self._comm.allReduce(*_ends(vector, vector), *_kind(vector, operation), stream)

    def reduce(self, jobs: Sequence[tuple[Any, int]], operation: str, guard: Guard) -> None:
        """Each vector reduced, in place, on the rank that stands beside it."""
        with self._together(guard) as stream:
            for vector, root in jobs:
                self._comm.reduce(*_ends(vector, vector), *_kind(vector, operation), root, stream)

    def reduce_scatter(
        self, jobs: Sequence[tuple[Any, Any]], operations: Sequence[str], guard: Guard
    ) -> None:
        """Of each first vector, reduced, this rank's n-th part into the second one."""
        with self._together(guard) as stream:
            for (vector, part), operation in zip(jobs, operations, strict=True):
                ends = vector.data.ptr, part.data.ptr, part.size
                self._comm.reduceScatter(*ends, *_kind(vector, operation), stream)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def broadcast(self, jobs: Sequence[tuple[Any, int]], guard: Guard) -> None:
        """The bytes of each array from the rank that stands beside it to all others, in place."""
        with self._together(guard) as stream:
            for array, root in jobs:
                if array.nbytes:
                    ends = array.data.ptr, array.data.ptr, array.nbytes
                    self._comm.broadcast(*ends, nccl.NCCL_UINT8, root, stream)

    def exchange(
        self, sent: Sequence[tuple[Any, int]], received: Sequence[tuple[Any, int]], guard: Guard
    ) -> None:
        """The bytes of arrays to, and into arrays from, the ranks that stand beside them."""
        with self._together(guard) as stream:
            for array, peer in sent:
                if array.nbytes:
                    self._comm.send(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, peer, stream)
            for array, peer in received:
                if array.nbytes:
                    self._comm.recv(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, peer, stream)

    # ── the watchdog ─────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _together(self, guard: Guard) -> Iterator[int]:
        """What is called in the block becomes one operation, which is complete after it.

        Interrupts wait until then: they would leave the others in the middle.
        """
        stream = cupy.cuda.get_current_stream()
        with atomic:
            try:
                nccl.groupStart()
                try:
                    yield stream.ptr
                finally:
                    nccl.groupEnd()
                guard.launched()
                self._wait(stream, guard)
            except nccl.NcclError as error:
                self.abort()
                raise CollectiveError(f"{guard.where()}: NCCL reports {error}.") from error

    def _wait(self, stream: Any, guard: Guard) -> None:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        begun = checked = time.monotonic()
        deadline = begun + PATIENCE
        while not event.done:
            now = time.monotonic()
            if now - begun > _SPIN:
                time.sleep(_PAUSE)
            if now - checked > _CHECKED:
                checked = now
                self._check()
                if guard.deserted():
                    deadline = min(deadline, now + _GRACE)
            if now > deadline:
                self.abort()
                raise guard.overdue(now - begun)
        self._check()

    def _check(self) -> None:
        """Raises: nccl.NcclError."""
        try:
            status = self._comm.check_async_error()
        except nccl.NcclError as error:
            if getattr(error, "status", None) == _IN_PROGRESS:
                return
            raise
        if status not in (None, 0, _IN_PROGRESS):
            raise nccl.NcclError(status)

    def abort(self) -> None:
        """End the communicator, whatever it is in; the second time nothing."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    @property
    def alive(self) -> bool:
        return self._comm is not None


def _given(identity: bytes) -> Any:
    """The identity as this CuPy takes it: bytes since version 14, a tuple of ints before."""
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return identity
    return tuple(byte - 256 if byte > 127 else byte for byte in identity)


def _ends(source: Any, target: Any) -> tuple[int, int, int]:
    return source.data.ptr, target.data.ptr, source.size


def _kind(vector: Any, operation: str) -> tuple[int, int]:
    return _TYPES[vector.dtype.str[1:]], _OPERATIONS[operation]
