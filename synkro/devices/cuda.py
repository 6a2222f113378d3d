"""A GPU as a device, through CuPy.

    segment (host) ─ pinned ────────────────────────▶ buffer A │ B (GPU) ─▶ function ─▶ outputs (GPU)
                   └ rows picked, or not pinnable ─▶ ring ─▶┘                              │
    outbox, results (host, pinned) ◀───────────────────────────────────────────────────────┤
    other memory of the host ◀────────────────────────────────────────────────────── ring ◀┘

Inputs are copied on a stream of their own, into two buffers in turn: a piece is copied while the one
before is computed on.  Events order copies and computation on the GPU, without the host: the current
stream waits for a piece's copy, and a copy waits until its buffer is no longer computed on.  Outputs are
taken when the device has computed all that the function queued, on any stream.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from ..errors import NotAvailable
from ..machine import readable_bytes
from ..memory.interrupts import atomic
from ..values.arrays import Array
from ..values.foreign import exposed, handed, move
from ..values.variable import Variable
from .base import Device, Source
from .hints import hint
from .kept import KeptInputs
from .pins import Pins
from .portions import empty, fill, portions

_RING_BYTES = 1 << 23
_RING_BUFFERS = 4
_SOON = 1 << 20  # bytes that are copied through the ring while the main thread waits
_THREADS = 4  # at most so many fill and empty the buffers of a ring


class CudaDevice(Device):
    """One GPU, current in this process from now on; the others stay untouched.

    Attributes:
        inputs: the stream on which inputs are copied.
        kept: copies of inputs that stay on the GPU from call to call.
    """

    xp = cupy
    pins = True

    def __init__(self, index: int, preallocate: float | None) -> None:
        """*preallocate* is the fraction of its memory that CuPy's pool takes at once.

        Raises: NotAvailable if less is free.
        """
        self._device = cupy.cuda.Device(index)
        self._device.use()
        self._pins = Pins(self._register, runtime.hostUnregister)
        self.inputs = cupy.cuda.Stream(non_blocking=True)
        self._incoming, self._outgoing = _Ring(), _Ring()
        self._loader = ThreadPoolExecutor(1, "synkro-inputs", initializer=self._device.use)
        self.kept = KeptInputs(self._device.mem_info[1] // 16)
        if preallocate is not None:
            self._preallocate(preallocate)

    def _preallocate(self, fraction: float) -> None:
        free, total = self._device.mem_info
        try:
            cupy.get_default_memory_pool().malloc(int(total * fraction))  # freed: it stays in the pool
        except cupy.cuda.memory.OutOfMemoryError:
            raise NotAvailable(
                f"preallocate={fraction:g} of {readable_bytes(total)} on cuda:{self._device.id}, but "
                f"{readable_bytes(free)} are free: ask for less, or end the programs that use the GPU "
                f"(nvidia-smi lists them)."
            ) from None

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self.resume()
        array: Array = cupy.empty(shape, dtype)
        return array

    def adopt(self, value: Any) -> Array | None:
        if isinstance(value, Variable):
            value = value.value
        if not isinstance(value, cupy.ndarray):
            shown, dtype = exposed(value)
            if shown is None:
                return None
            self.settle()  # its library may still compute it, on a stream of its own
            value = cupy.asarray(shown)
            value = value if dtype is None else value.view(dtype)
        if value.device != self._device:
            with value.device:
                runtime.deviceSynchronize()  # other streams may still compute it
                value = cupy.ascontiguousarray(value).reshape(value.shape)
                runtime.deviceSynchronize()
            self.resume()
            value = value.copy()
        array: Array = value
        return array

    def owns(self, array: Array) -> bool:
        if isinstance(array, cupy.ndarray):
            return array.base is None and isinstance(array.data.mem, cupy.cuda.memory.PooledMemory)
        return False

    def beside(self, array: Array, other: Array) -> Array:
        if isinstance(other, cupy.ndarray) == isinstance(array, cupy.ndarray):
            return array
        there: Array = cupy.asarray(array) if isinstance(other, cupy.ndarray) else cupy.asnumpy(array)
        return there

    def stow(self, array: Array) -> Array:
        copy: Array = np.empty(array.shape, array.dtype)
        self.copy_out([(copy, array)])
        return copy

    def assign(self, target: Array, source: Any) -> None:
        here, there = isinstance(target, cupy.ndarray), isinstance(source, cupy.ndarray)
        if there and not here:
            self.copy_out([(target, source)])
        elif here and not there:
            source = np.asarray(source)
            if source.shape == target.shape and target.flags.c_contiguous:
                self._copy_in(Source(source.astype(target.dtype, copy=False)), target)
            else:
                target[...] = cupy.asarray(source)
        else:
            target[...] = source

    def take(self, array: Array, indices: NDArray[np.int64]) -> Array:
        xp = cupy.get_array_module(array)
        rows: Array = xp.take(array, xp.asarray(indices), axis=0)
        return rows

    def welcome(self, things: Sequence[Any]) -> None:
        if not things:
            return
        try:
            here = handed(self.empty((1,), "f4"), "torch").device
        except (AssertionError, RuntimeError):  # a PyTorch for the CPU: tensors never come here
            return
        move(things, here)

    # ── from the host ────────────────────────────────────────────────────────────────────────────

    def feed(self, pieces: Sequence[Sequence[Any]]) -> Generator[list[Any], None, None]:
        feeding = _Feeding(self, pieces)
        try:
            feeding.begin(0)
            for number in range(len(pieces)):
                yield feeding.take(number)
                feeding.computed(number)
        finally:
            feeding.close()

    def _copy_in(self, source: Source, target: Array) -> None:
        """Copy *source* into *target*, between what the current stream did and will do with it."""
        stream = cupy.cuda.get_current_stream()
        with atomic:
            self.inputs.wait_event(stream.record())  # earlier uses of *target*, before the copy
            self.load(source, target)
            stream.wait_event(self.inputs.record())  # the copy, before later uses
            self.inputs.synchronize()  # now the host's memory may change, and *target* be freed

    def load(self, source: Source, target: Any, over: threading.Event | None = None) -> None:
        """Queue a copy of *source* into *target*, of the same shape, on the stream of inputs.

        It may stop early once *over* is set.
        """
        if not target.nbytes:
            return
        if self.direct(source):
            _copy(target.data.ptr, source.array.ctypes.data, target.nbytes, True, self.inputs)
        else:
            self._incoming.load(source, target.data.ptr, self.inputs, over)

    def direct(self, source: Source) -> bool:
        """Whether *source* is one block of pinned memory, which the GPU can copy as it is."""
        array = source.array
        plain = source.indices is None and array.flags.c_contiguous and array.dtype.isnative
        return plain and self._pins.pinned(array)

    def load_later(self, loads: Sequence[tuple[Source, Array]], over: threading.Event) -> Future[None]:
        """Do the loads in a thread of their own, until *over* is set."""

        def load_all() -> None:
            for source, target in loads:
                if not over.is_set():
                    self.load(source, target, over)

        return self._loader.submit(load_all)

    # ── to the host ──────────────────────────────────────────────────────────────────────────────

    def copy_out(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        stream = cupy.cuda.get_current_stream()
        sources = []
        with atomic:  # when an interrupted call has ended, others may use the targets
            for target, source in pairs:
                if not isinstance(source, cupy.ndarray):
                    target[...] = source
                elif target.nbytes:
                    flat = cupy.ascontiguousarray(source, target.dtype)
                    if target.flags.c_contiguous and self._pins.pinned(target):
                        sources.append(flat)  # alive until it is copied
                        _copy(target.ctypes.data, flat.data.ptr, target.nbytes, False, stream)
                    else:
                        self._outgoing.unload(flat.data.ptr, target, stream)
            if sources:
                stream.synchronize()

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def mapped(self, number: int, memory: NDArray[np.uint8]) -> None:
        self._pins.mapped(number, memory)

    def forget(self, number: int) -> None:
        self.settle()
        self.kept.forget(number)
        self._pins.forget(number)

    def _register(self, address: int, nbytes: int) -> bool:
        try:
            runtime.hostRegister(address, nbytes, 0)
        except runtime.CUDARuntimeError:
            return False  # it is copied through the ring
        return True

    # ── when things go wrong ─────────────────────────────────────────────────────────────────────

    def resume(self) -> None:
        if runtime.getDevice() != self._device.id:
            self._device.use()

    def settle(self) -> None:
        self.resume()
        runtime.deviceSynchronize()  # functions may have streams of their own

    def lost(self, error: BaseException) -> str | None:
        try:
            self.settle()
        except runtime.CUDARuntimeError as broken:  # it lasts: every later call of CUDA raises it
            return str(broken)
        return None

    def advice(self, error: BaseException, in_call: bool) -> str:
        if type(error).__name__ != "OutOfMemoryError":  # CuPy's, PyTorch's
            return hint(error)
        self.kept.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = self._device.mem_info
        room = f" (the GPU has {readable_bytes(total)}, of which {readable_bytes(free)} are free now"
        sliced = ": if the rows fill it, compute them in more pieces, with num_slices="
        return f"{room}{sliced if in_call else ''})"


class _Feeding:
    """The inputs of one call on their way to the device, one piece ahead of the computation."""

    def __init__(self, device: CudaDevice, pieces: Sequence[Sequence[Any]]) -> None:
        self._device = device
        self._pieces = pieces
        self._whole: dict[int, Array] = {}  # by column: inputs that are the same for all pieces
        self._missing: dict[int, Source] = {}  # those of them that have to be copied first
        sizes = self._find_whole()
        self._lent: dict[int, Array] = {}  # copies of whole inputs for functions, which may write
        self._buffers = [
            {column: cupy.empty(size, np.uint8) for column, size in sizes.items()}
            for _ in range(min(2, len(pieces)))
        ]
        # the pool gives memory that the current stream may still use: copies into it wait for this
        free = cupy.cuda.get_current_stream().record()
        self._computed: list[Any] = [free, free]  # by buffer: its last uses, before the next copy
        self._arrived: list[Any] = [None, None]  # by buffer: its last copy, before the next uses
        self._pending: Future[None] | None = None
        self._over = threading.Event()  # set when the call ends: the loading thread stops early

    def _find_whole(self) -> dict[int, int]:
        """Find the inputs that are the same for all pieces, or worth keeping.

        Returns, by column, how many bytes the largest piece of each other input has.
        """
        device = self._device
        sizes = {}
        for column, source in enumerate(self._pieces[0]):
            if not isinstance(source, Source):
                continue
            sources = [piece[column] for piece in self._pieces]
            if len(sources) == 1:
                whole = source.version is not None and source.nbytes <= device.kept.limit
            else:
                whole = all(other is source for other in sources)
            if not whole:
                sizes[column] = max(other.nbytes for other in sources)
                continue
            original = device.kept.find(source)
            if original is None:
                original = device.empty(source.shape, _native(source))
                self._missing[column] = source
            self._whole[column] = original
        return sizes

    def begin(self, number: int) -> None:
        """Queue the copies of missing whole inputs and of a piece, for when its buffer is free."""
        device = self._device
        loads = [(source, self._whole[column]) for column, source in self._missing.items()]
        for column in self._buffers[number % 2]:
            loads.append((self._pieces[number][column], self._target(number, column)))
        with atomic:  # no interrupt between a load and ``_pending``, for which ``close`` waits
            device.inputs.wait_event(self._computed[number % 2])
            if all(device.direct(source) or source.nbytes <= _SOON for source, _ in loads):
                for source, target in loads:
                    device.load(source, target)
                self._arrived[number % 2] = device.inputs.record()
            else:
                self._pending = device.load_later(loads, self._over)

    def _target(self, number: int, column: int) -> Array:
        source = self._pieces[number][column]
        memory = self._buffers[number % 2][column].data
        array: Array = cupy.ndarray(source.shape, _native(source), memory)
        return array

    def take(self, number: int) -> list[Any]:
        """The arguments of a piece; the current stream waits for their copies."""
        self._finish_pending(number)
        cupy.cuda.get_current_stream().wait_event(self._arrived[number % 2])
        if number + 1 < len(self._pieces):
            self.begin(number + 1)
        return [
            self._lend(column)
            if column in self._whole
            else self._target(number, column)
            if isinstance(value, Source)
            else value
            for column, value in enumerate(self._pieces[number])
        ]

    def _lend(self, column: int) -> Array:
        if column not in self._lent:
            self._lent[column] = self._whole[column].copy()
        else:
            self._lent[column][...] = self._whole[column]
        return self._lent[column]

    def computed(self, number: int) -> None:
        """Say that all that computes on the piece is queued."""
        self._computed[number % 2] = cupy.cuda.get_current_stream().record()

    def _finish_pending(self, number: int) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            self._arrived[number % 2] = self._device.inputs.record()
        while self._missing:
            column, source = self._missing.popitem()
            self._device.kept.add(source, self._whole[column])

    def close(self) -> None:
        """Wait until nothing reads the inputs or writes to the buffers any more."""
        with atomic:
            self._over.set()
            if self._pending is not None:
                self._pending.exception()
            with contextlib.suppress(runtime.CUDARuntimeError):  # it lasts: the next call reports it
                self._device.inputs.synchronize()


class _Ring:
    """Small pinned buffers, used in turn, through which memory that is not pinned is copied.

    Threads fill or empty one buffer while others are copied.  They are made when they are first used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the order of the buffers, and the one being filled
        self._workers = max(1, min(_THREADS, len(os.sched_getaffinity(0))))
        self._threads = ThreadPoolExecutor(self._workers, "synkro-rows")
        # each with an event, its last copy to or from the GPU, before it is filled or emptied
        self._buffers: deque[tuple[NDArray[np.uint8], Any]] = deque()

    def load(
        self, source: Source, address: int, stream: Any, over: threading.Event | None = None
    ) -> None:
        """Queue copies of the rows of *source*, in native byte order, to *address* on the GPU.

        It stops early once *over* is set.
        """
        for portion in portions(source, _RING_BYTES):
            if over is not None and over.is_set():
                return
            with self._lock:  # another thread's portions may come between two of these
                buffer, copied = self._take()
                try:
                    fill(buffer, portion, self._threads, self._workers)
                    _copy(address, buffer.ctypes.data, portion.nbytes, True, stream)
                finally:
                    copied.record(stream)
            address += portion.nbytes

    def unload(self, address: int, target: Array, stream: Any) -> None:
        """Copy what lies at *address* on the GPU into *target*; complete when it returns."""
        with self._lock:
            under_way: deque[tuple[Source, NDArray[np.uint8], Any]] = deque()
            for portion in portions(Source(target), _RING_BYTES):
                if len(under_way) == _RING_BUFFERS:
                    self._arrive(*under_way.popleft())
                buffer, copied = self._take()
                try:
                    _copy(buffer.ctypes.data, address, portion.nbytes, False, stream)
                finally:
                    copied.record(stream)
                under_way.append((portion, buffer, copied))
                address += portion.nbytes
            for each in under_way:
                self._arrive(*each)

    def _arrive(self, portion: Source, buffer: NDArray[np.uint8], copied: Any) -> None:
        copied.synchronize()
        empty(buffer, portion, self._threads, self._workers)

    def _take(self) -> tuple[NDArray[np.uint8], Any]:
        """The least recently used buffer, whose last copy is complete, and its event."""
        if not self._buffers:
            memory = [cupy.cuda.alloc_pinned_memory(_RING_BYTES) for _ in range(_RING_BUFFERS)]
            made = [np.frombuffer(each, np.uint8, _RING_BYTES) for each in memory]
            self._buffers = deque((each, cupy.cuda.Event(disable_timing=True)) for each in made)
        self._buffers.rotate(-1)
        buffer, copied = self._buffers[-1]
        copied.synchronize()
        return buffer, copied


def _native(source: Source) -> np.dtype[Any]:
    """The dtype of *source* on the GPU, which knows one byte order."""
    native: np.dtype[Any] = source.array.dtype.newbyteorder("=")
    return native


def _copy(target: int, source: int, nbytes: int, to_device: bool, stream: Any) -> None:
    kind = runtime.memcpyHostToDevice if to_device else runtime.memcpyDeviceToHost
    runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)


def describe() -> None:
    """Print what this process sees, as JSON: GPUs, versions of NCCL and CuPy; or why there are none."""
    try:
        found = [_properties(index) for index in range(runtime.getDeviceCount())]
    except (runtime.CUDARuntimeError, ImportError) as error:
        versions = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        print(json.dumps({"reason": str(error), "versions": versions}))
        return
    nccl = importlib.import_module("cupy.cuda.nccl")  # a dummy module if NCCL cannot be loaded
    version = nccl.get_version() if getattr(nccl, "available", True) else 0
    print(json.dumps({"gpus": found, "nccl": version, "cupy": cupy.__version__}))


def _properties(index: int) -> dict[str, Any]:
    properties = runtime.getDeviceProperties(index)
    return {
        "name": properties["name"].decode(),
        "address": runtime.deviceGetPCIBusId(index),
        "nbytes": properties["totalGlobalMem"],
    }
