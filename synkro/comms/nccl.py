"""Collectives over NVLink and PCIe: one rank's end of an NCCL communicator, through CuPy.

Before an operation begins, all ranks have agreed on it (``agreement``) and have the memory that it
needs: only the hardware, or the end of a process, can then keep a rank away.  Still every wait ends:

    where a rank waits       who watches           what happens when it takes too long
    connecting, in C         the main thread       the thread that connects is left to itself
    groupEnd, abort, in C    a thread of its own   the process ends (WorkerDied)
    for the GPU              the main thread       the communicator is aborted (CollectiveError)

An error of NCCL aborts the communicator, too.  An error of CUDA ends the process: after it an abort, or
anything else that waits for the GPU, may wait for ever.

Operations run on the current stream, and are complete when their method returns.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl, runtime

from ..errors import CollectiveError
from ..ipc.process import give_up
from ..memory.interrupts import atomic
from .meeting import Meeting

PATIENCE = 120.0
"""Seconds that an operation, or the creation of a communicator, may take before it counts as stuck."""

_SPIN = 200e-6  # seconds to poll without a pause
_PAUSE = 20e-6  # seconds between polls after that
_CHECKED = 0.05  # seconds between checks for errors of NCCL and failures of other ranks
_WATCHED = 0.5  # seconds between checks of a call into C
_GRACE = 2.0  # seconds that an operation has left when another rank has failed
_SLOW_GRACE = 20.0  # the same for connecting, where ranks count as several hosts
_NOT_READY = 600  # cudaErrorNotReady


def _said(error: BaseException) -> str:
    """What NCCL reports, or an empty text.  CuPy raises KeyError for a status without a name."""
    if isinstance(error, KeyError) and isinstance(error.args[0], int):
        return f"status {error.args[0]}, for which CuPy has no name"
    return str(error) if isinstance(error, nccl.NcclError) else ""


class _Deadline:
    """The end of a wait: *patience* seconds from now, or *grace* seconds after another rank is gone."""

    def __init__(self, patience: float, grace: float, gone: Callable[[], bool]) -> None:
        self.begun = time.monotonic()
        self._until = self.begun + patience
        self._grace = grace
        self._gone = gone

    def passed(self) -> bool:
        now = time.monotonic()
        if self._gone():
            self._until = min(self._until, now + self._grace)
        return now > self._until

    def seconds(self) -> float:
        """The seconds since the wait began."""
        return time.monotonic() - self.begun


class _Watch:
    """A thread that ends the process if a call into C does not come back."""

    def __init__(self) -> None:
        # written by the main thread, read by the watching one: always as a whole, so without a lock
        self._call: tuple[_Deadline, Meeting, str] | None = None
        threading.Thread(target=self._run, name="synkro-watch", daemon=True).start()

    @contextmanager
    def over(self, meeting: Meeting, grace: float, doing: str) -> Iterator[None]:
        """Watch the block, which may take *grace* seconds more once another rank has failed."""
        self._call = _Deadline(PATIENCE, grace, meeting.failed), meeting, doing
        try:
            yield
        finally:
            self._call = None

    def _run(self) -> None:
        while True:
            time.sleep(_WATCHED)
            if (call := self._call) is not None:
                deadline, meeting, doing = call
                if deadline.passed():
                    give_up(f"stuck in NCCL, which was {doing}: {_overdue(meeting, deadline)}")


_watch = functools.cache(_Watch)


def _overdue(meeting: Meeting, deadline: _Deadline) -> CollectiveError:
    """The error of a collective that is not complete in time."""
    missing = meeting.behind()
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return CollectiveError(
        f"{meeting.where()}: not complete after {deadline.seconds():.0f} s, "
        + (f"as {who} did not begin it." if missing else "though all ranks have begun it."),
        strays=bool(missing) or meeting.failed(),
    )


def unique_id(meeting: Meeting) -> bytes:
    """A new id, by which the ranks of a link find each other.  Raises: CollectiveError."""
    try:
        with _watch().over(meeting, math.inf, "asked for the identity of a communicator"):
            identity = nccl.get_unique_id()
    except (nccl.NcclError, KeyError) as error:
        raise CollectiveError(f"NCCL: {_said(error)}") from error
    return identity if isinstance(identity, bytes) else bytes(byte % 256 for byte in identity)


class Link:
    """A communicator of some ranks.  Arrays are contiguous; those to reduce are of ``direct.NATIVE``."""

    def __init__(self, identity: bytes, place: int, count: int, meeting: Meeting, device: int) -> None:
        """Connect as rank *place* of *count*; returns when all ranks have connected.

        Raises: CollectiveError if that fails, if another rank gives up, or if it takes too long.
        """
        self._meeting = meeting
        made: Future[Any] = Future()

        def create() -> None:
            try:
                cupy.cuda.Device(device).use()  # each thread has a current device of its own
                made.set_result(nccl.NcclCommunicator(count, _given(identity), place))
            except BaseException as error:
                made.set_exception(error)

        # NCCL waits for the others in C, uninterruptibly: so a thread does it, which can be abandoned
        threading.Thread(target=create, name="synkro-nccl", daemon=True).start()
        near = os.environ.get("NCCL_SOCKET_IFNAME") == "lo" and "NCCL_HOSTID" not in os.environ
        deadline = _Deadline(PATIENCE, _GRACE if near else _SLOW_GRACE, meeting.overtaken)
        try:
            while not concurrent.futures.wait([made], _CHECKED).done:
                if deadline.passed():
                    raise CollectiveError(
                        f"NCCL did not connect {count} ranks within {deadline.seconds():.0f} s"
                    )
            self._comm = made.result()
        except (CollectiveError, KeyboardInterrupt):
            made.add_done_callback(_abort_made)  # in the abandoned thread, if it ever connects
            raise
        except Exception as error:
            raise CollectiveError(f"NCCL: {_said(error) or error}") from error

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduce(self, jobs: Sequence[tuple[Any, int]], operation: str) -> None:
        """Reduce each vector, in place, on its root, or on all ranks where that is -1."""
        with self._together() as stream:
            for vector, root in jobs:
                what = *_ends(vector, vector), *_kind(vector.dtype, operation)
                if root == -1:
                    self._comm.allReduce(*what, stream)
                else:
                    self._comm.reduce(*what, root, stream)

    def reduce_scatter(self, jobs: Sequence[tuple[Any, Any]], operations: Sequence[str]) -> None:
        """Reduce each first vector, this rank's n-th part of it into the second one."""
        with self._together() as stream:
            for (vector, part), operation in zip(jobs, operations, strict=True):
                kind = _kind(vector.dtype, operation)
                self._comm.reduceScatter(*_ends(vector, part), *kind, stream)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def broadcast(self, arrays: Sequence[Any], root: int) -> None:
        """Copy each array from the root to all other ranks, in place."""
        with self._together() as stream:
            for array in arrays:
                if array.nbytes:
                    ends = array.data.ptr, array.data.ptr, array.nbytes
                    self._comm.broadcast(*ends, nccl.NCCL_UINT8, root, stream)

    def exchange(self, sent: Sequence[tuple[Any, int]], received: Sequence[tuple[Any, int]]) -> None:
        """Send arrays to their ranks, and receive arrays from theirs."""
        with self._together() as stream:
            for move, pairs in ((self._comm.send, sent), (self._comm.recv, received)):
                for array, peer in pairs:
                    if array.nbytes:
                        move(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, peer, stream)

    # ── the watchdog ─────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _together(self) -> Iterator[int]:
        """Make the NCCL calls of the block one operation, which is complete when the block ends.

        Interrupts wait until then, as they would leave the other ranks in the middle.
        """
        stream = cupy.cuda.get_current_stream()
        with atomic:
            try:
                nccl.groupStart()
                try:
                    yield stream.ptr
                    self._meeting.mark()
                finally:  # an abort waits for the end of an open group
                    with _watch().over(self._meeting, _GRACE, "told to begin"):
                        nccl.groupEnd()
                self._wait(stream)
            except BaseException as error:
                broken = error if isinstance(error, runtime.CUDARuntimeError) else _broken(stream)
                if broken is not None:
                    give_up(f"{self._meeting.where()}: {broken}")
                self.abort(f" after {type(error).__name__}: {error}")
                if said := _said(error):
                    raise CollectiveError(f"{self._meeting.where()}: NCCL reports {said}.") from error
                raise

    def _wait(self, stream: Any) -> None:
        """Wait for all that is queued on *stream*.

        Raises: CollectiveError if it takes too long, CUDARuntimeError, NcclError, KeyError.
        """
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)  # happens when the operation, which is queued before it, is complete
        deadline = _Deadline(PATIENCE, _GRACE, self._meeting.failed)
        checked = deadline.begun
        while (status := runtime.eventQuery(event.ptr)) == _NOT_READY:
            now = time.monotonic()
            if now - deadline.begun > _SPIN:
                time.sleep(_PAUSE)
            if now - checked > _CHECKED:
                checked = now
                self._comm.check_async_error()
                if deadline.passed():
                    raise _overdue(self._meeting, deadline)
        if status:  # an error, which event.done does not raise
            raise runtime.CUDARuntimeError(status)
        self._comm.check_async_error()

    def abort(self, why: str = "") -> None:
        """End the communicator, even in the middle of an operation; the second time do nothing."""
        comm, self._comm = self._comm, None
        if comm is not None:
            with _watch().over(self._meeting, math.inf, f"told to give up{why}"):
                comm.abort()

    @property
    def alive(self) -> bool:
        return self._comm is not None


def _broken(stream: Any) -> BaseException | None:
    """The error that CUDA has on *stream*, if there is one."""
    status = runtime.streamQuery(stream.ptr)
    return None if status in (0, _NOT_READY) else runtime.CUDARuntimeError(status)


def _abort_made(made: Future[Any]) -> None:
    if made.exception() is None:
        made.result().abort()


def _given(identity: bytes) -> Any:
    """The identity in this CuPy's form: bytes since version 14, a tuple of ints before."""
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return identity
    return tuple(byte - 256 if byte > 127 else byte for byte in identity)


def _ends(source: Any, target: Any) -> tuple[int, int, int]:
    return source.data.ptr, target.data.ptr, target.size


@functools.cache
def _kind(dtype: np.dtype[Any], operation: str) -> tuple[int, int]:
    """NCCL's numbers of a dtype, which it calls as NumPy does, and of an operation."""
    return getattr(nccl, f"NCCL_{dtype.name.upper()}"), getattr(nccl, f"NCCL_{operation}")
