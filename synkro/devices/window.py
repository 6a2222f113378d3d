"""Device memory of one process that others read and write: by CUDA IPC.

A rank's *window* consists of chunks.  Each is an allocation of its own, as CUDA names nothing else to
other processes (CUDA C++ Programming Guide, "Interprocess Communication"), and the name, a handle, goes
to them with what they are to do.  CUDA wants a chunk to be closed by all before it is freed:

    of one of SIZES    stays open in those that have read it, and is used again, never freed
    for one message    is opened for one reading, and freed when it has been read

Whoever is told of a chunk finds in it what was written before ``wait`` returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from ..machine import readable_bytes
from ..memory.interrupts import atomic, call_with_last
from ..values.arrays import Array

SIZES = (1 << 21, 1 << 24, 1 << 27)
"""Bytes of the chunks that are used again.  The driver hands out as many as the first, and names what is
smaller together with others."""

STAGE = SIZES[-1]
"""Bytes of the largest chunk that collectives use."""

MESSAGE = SIZES[-2]
"""Bytes of the largest message that goes by a chunk which is used again."""

CudaError = runtime.CUDARuntimeError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Chunk:
    """An allocation that others can open.

    Attributes:
        handle: its name.
        nbytes: its size.
        start: its beginning, as CuPy's pointer.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises: CUDARuntimeError."""
        memory = cupy.cuda.Memory(nbytes)
        self.nbytes: Final = nbytes
        self.start: Final = cupy.cuda.MemoryPointer(memory, 0)
        self.handle: Final = bytes(runtime.ipcGetMemHandle(memory.ptr))


class Lease:
    """A chunk as long as somebody holds this.

    Attributes:
        chunk: the chunk.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk: Final = chunk


class Window:
    """The chunks of this rank, and those of others that are open here."""

    def __init__(self, device: int, say: Callable[[str], None]) -> None:
        """*device* is the number of this rank's GPU; *say* shows a status line."""
        self._device = device
        self._say = say
        self._spare: list[Chunk] = []
        self._left: dict[Chunk, object] = {}  # the keys are chunks whose leases are gone
        self._opened: dict[bytes, Any] = {}  # the beginning of each chunk, by its handle
        self._refused = False  # whether there was once no memory for a chunk

    def take(self, nbytes: int, once: bool = False) -> Lease | None:
        """A chunk with room for *nbytes*, to be used again or *once*; None if the device has no memory
        for it."""
        with atomic:
            self.tidy()
            size = -(-nbytes // SIZES[0]) * SIZES[0] if once else next(s for s in SIZES if nbytes <= s)
            spare = [chunk for chunk in self._spare if chunk.nbytes == size and not once]
            chunk = spare[-1] if spare else self._allocate(size)
            if chunk is None:
                return None
            if spare:
                self._spare.remove(chunk)
            lease = Lease(chunk)
            call_with_last(lease, self._left.__setitem__, chunk)
            return lease

    def _allocate(self, size: int) -> Chunk | None:
        for attempt in range(2):
            try:
                return Chunk(size)
            except CudaError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
            if not attempt:
                cupy.get_default_memory_pool().free_all_blocks()
        if not self._refused:
            self._refused = True
            self._say(
                f"Synkro: arrays go from GPU to GPU through host memory where there is too little on "
                f"cuda:{self._device}: {readable_bytes(size)} were missing"
            )
        return None

    def tidy(self) -> None:
        """Free chunks for one message that nobody holds any more, and keep the others for later."""
        with atomic:
            while self._left:
                chunk, _ = self._left.popitem()
                if chunk.nbytes in SIZES:
                    self._spare.append(chunk)

    def seen(self, handle: bytes, nbytes: int) -> Any:
        """The beginning of another rank's chunk of so many bytes, as CuPy's pointer.

        Raises: CUDARuntimeError.
        """
        start = self._opened.get(handle)
        if start is None:
            with atomic:
                start = self._opened[handle] = self._open(handle, nbytes)
        return start

    def _open(self, handle: bytes, nbytes: int) -> Any:
        address = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        # of this device, whichever it lies on: kernels here may read and write it
        memory = cupy.cuda.UnownedMemory(address, nbytes, None, self._device)
        return cupy.cuda.MemoryPointer(memory, 0)

    def copy(self, handle: bytes, nbytes: int, target: Any) -> None:
        """Copy the beginning of another rank's chunk, of so many bytes, to a contiguous *target*."""
        if nbytes in SIZES:
            copy(target.data, self.seen(handle, nbytes), target.nbytes)
            self.wait()
            return
        with atomic:
            start = self._open(handle, nbytes)
            try:
                copy(target.data, start, target.nbytes)
                self.wait()
            finally:
                runtime.ipcCloseMemHandle(start.ptr)

    def wait(self) -> None:
        """Wait until all that the current stream does is done: others may see it then."""
        cupy.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        """Close what is open here, as the process ends."""
        while self._opened:
            _, start = self._opened.popitem()
            with contextlib.suppress(Exception):  # what cannot be given back goes with the process
                runtime.ipcCloseMemHandle(start.ptr)


def reaches(one: int, other: int) -> bool:
    """Whether one GPU reads the memory of another, by their numbers."""
    return bool(runtime.deviceCanAccessPeer(one, other))


def copy(target: Any, source: Any, nbytes: int) -> None:
    """Queue a copy on the device, between two of CuPy's pointers, on the current stream."""
    target.copy_from_device_async(source, nbytes)


def typed(start: Any, dtype: np.dtype[Any], count: int) -> Array:
    """*count* elements of device memory from *start* on."""
    array: Array = cupy.ndarray((count,), dtype, start)
    return array
