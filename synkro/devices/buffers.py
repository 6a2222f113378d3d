"""Small pinned buffers through which memory that a GPU cannot reach by itself is copied."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ..values.arrays import Array
from .base import Source
from .portions import Bytes, empty, fill, portions

BUFFER = 1 << 22
_THREADS = 8  # at most so many fill and empty buffers, one each


class Buffers:
    """Buffers that are used in turn: threads fill or empty some while others are copied.

    They are made when they are first used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the order of the buffers, and those being filled
        self._workers = max(1, min(_THREADS, len(os.sched_getaffinity(0))))
        self._threads = ThreadPoolExecutor(self._workers, "synkro-rows")
        # each with an event, its last copy to or from the GPU, before it is filled or emptied
        self._buffers: deque[tuple[Bytes, Any]] = deque()

    def load(self, source: Source, address: int, stream: Any, over: threading.Event) -> None:
        """Queue copies of the rows of *source*, in native byte order, to *address* on the GPU.

        It stops early once *over* is set.
        """
        left = portions(source, BUFFER)
        while several := list(islice(left, self._workers)):
            if over.is_set():
                return
            with self._lock:  # another thread's portions may come between two of these turns
                self._load(several, address, stream)
            address += sum(portion.nbytes for portion in several)

    def _load(self, several: list[Source], address: int, stream: Any) -> None:
        taken = [self._take() for _ in several]
        filling: list[Future[None]] = []
        try:
            for (buffer, _), portion in zip(taken, several, strict=True):
                filling.append(self._do(fill, buffer, portion, len(several) == 1))
            for (buffer, _), portion, filled in zip(taken, several, filling, strict=True):
                filled.result()
                copy_in(address, buffer.ctypes.data, portion.nbytes, stream)
                address += portion.nbytes
        finally:
            wait(filling)  # after a failure, too, nobody may write to a buffer that others take
            for _, copied in taken:
                copied.record(stream)

    def unload(self, address: int, target: Array, stream: Any) -> None:
        """Copy what lies at *address* on the GPU into *target*; complete when it returns."""
        left = portions(Source(target), BUFFER)
        before: list[tuple[Source, Bytes, Any]] = []
        with self._lock:
            while True:
                several = list(islice(left, self._workers))
                queued = []
                for portion in several:
                    buffer, copied = self._take()
                    try:
                        copy_out(buffer.ctypes.data, address, portion.nbytes, stream)
                    finally:
                        copied.record(stream)
                    queued.append((portion, buffer, copied))
                    address += portion.nbytes
                self._empty(before)
                if not several:
                    return
                before = queued

    def _empty(self, several: list[tuple[Source, Bytes, Any]]) -> None:
        """Take out of buffers what has been copied into them."""
        emptying: list[Future[None]] = []
        try:
            for portion, buffer, copied in several:
                copied.synchronize()
                emptying.append(self._do(empty, buffer, portion, len(several) == 1))
            for each in emptying:
                each.result()
        finally:
            wait(emptying)

    def _do(
        self, what: Callable[[Bytes, Source], None], buffer: Bytes, portion: Source, alone: bool
    ) -> Future[None]:
        """Fill or empty a buffer in a thread, or at once if it is *alone*: small inputs are."""
        if not alone:
            return self._threads.submit(what, buffer, portion)
        done: Future[None] = Future()
        what(buffer, portion)
        done.set_result(None)
        return done

    def _take(self) -> tuple[Bytes, Any]:
        """The least recently used buffer, whose last copy is complete, and its event."""
        if not self._buffers:
            memory = [cupy.cuda.alloc_pinned_memory(BUFFER) for _ in range(2 * self._workers)]
            made = [np.frombuffer(each, np.uint8, BUFFER) for each in memory]
            self._buffers = deque((each, cupy.cuda.Event(disable_timing=True)) for each in made)
        self._buffers.rotate(-1)
        buffer, copied = self._buffers[-1]
        copied.synchronize()
        return buffer, copied


def copy_in(target: int, source: int, nbytes: int, stream: Any) -> None:
    """Queue a copy of host memory to the GPU, by their addresses."""
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, stream.ptr)


def copy_out(target: int, source: int, nbytes: int, stream: Any) -> None:
    """Queue a copy from the GPU to host memory, by their addresses."""
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToHost, stream.ptr)
