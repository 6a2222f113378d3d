"""Inputs on their way to a GPU, on a stream of their own.

::

    one block, pinned ──────────────── copied ─────────▶┐
    rows picked, of pinned memory ──── gathered ───────▶│ buffer A │ B ─▶ function
    not pinned, strided, big-endian ─ through buffers ─▶┘

A piece is copied into one of two buffers while the one before is computed on.  Events order copies and
computation on the GPU, without the host: the current stream waits for a piece's copy, and a copy waits
until its buffer is no longer computed on.

Buffers are small, and pinned: through them memory is copied that a GPU cannot reach by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime

from ..memory.interrupts import atomic
from ..values.arrays import Array
from .base import Source
from .gathering import gather
from .pins import Pins
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


_SOON = 1 << 20  # bytes that are pinned or pass through buffers while the main thread waits


class KeptInputs:
    """Copies of broadcast inputs on the device, by their version and where they lie in host memory.

    Attributes:
        limit: the bytes that they may have together; larger inputs are not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._copies: dict[Any, Array] = {}

    def find(self, source: Source) -> Array | None:
        """A copy of an input that has not changed; None if there is none."""
        return self._copies.get(_key(source))

    def add(self, source: Source, array: Array) -> None:
        """Remember that *array* is a copy of *source*."""
        if source.version is None or array.nbytes > self.limit:
            return
        number = source.version[0]
        self._drop(lambda version: version[0] == number and version != source.version)
        while sum(copy.nbytes for copy in self._copies.values()) + array.nbytes > self.limit:
            del self._copies[next(iter(self._copies))]  # the oldest
        self._copies[_key(source)] = array

    def forget(self, number: int) -> None:
        """Drop the copies of inputs in segment *number*."""
        self._drop(lambda version: version[0] == number)

    def _drop(self, goes: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self._copies if goes(key[0])]:
            del self._copies[key]

    def clear(self) -> None:
        self._copies.clear()


def _key(source: Source) -> Any:
    array = source.array
    return source.version, array.ctypes.data, array.shape, array.dtype, array.strides


class Inputs:
    """What brings host memory to one GPU.

    Attributes:
        stream: on which all of it is copied.
        kept: copies of inputs that stay on the GPU from call to call.
        computed: an event a buffer: its last uses, before the next copy.
        arrived: an event a buffer: its last copy, before the next uses.
    """

    def __init__(self, device: Any, pins: Pins) -> None:
        """*device* is CuPy's."""
        self.stream: Final = cupy.cuda.Stream(non_blocking=True)
        self.kept: Final = KeptInputs(device.mem_info[1] // 16)
        self.computed: Final = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self.arrived: Final = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._pins = pins
        self._buffers = Buffers()
        self._loader = ThreadPoolExecutor(1, "synkro-inputs", initializer=device.use)
        self._pending: Future[None] | None = None  # what the thread loads
        self._over = threading.Event()  # set when the call ends: the thread stops early
        shows_host = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        self._shows_host = bool(runtime.deviceGetAttribute(shows_host, device.id))

    def assign(self, source: Source, target: Array) -> None:
        """Copy *source* into *target*, between what the current stream did and will do with it."""
        stream = cupy.cuda.get_current_stream()
        with atomic:
            self.stream.wait_event(stream.record())  # earlier uses of *target*, before the copy
            self.load(source, target)
            stream.wait_event(self.stream.record())  # the copy, before later uses
            self.stream.synchronize()  # now the host's memory may change, and *target* be freed

    def load(self, source: Source, target: Any) -> None:
        """Queue a copy of *source* into *target*, of the same shape; ``finish`` stops it early."""
        if not target.nbytes:
            return
        plain = self._is_plain(source)
        if plain and source.indices is None and self._copied(source, target):
            return
        if plain and source.indices is not None and self._pins.pinned(source.array):
            self._gather(source, target)
            return
        self._buffers.load(source, target.data.ptr, self.stream, self._over)

    def _copied(self, source: Source, target: Any) -> bool:
        """Copy *source* as far as it can be pinned; returns whether that is all, or the call ends."""
        copied = 0
        for address, nbytes in self._pins.blocks(source.array):
            if self._over.is_set():
                return True
            copy_in(target.data.ptr + copied, address, nbytes, self.stream)
            copied += nbytes
        return copied == int(target.nbytes)

    def _gather(self, source: Source, target: Any) -> None:
        """Have the GPU fetch the rows of *source* by itself."""
        indices = np.ascontiguousarray(source.indices, np.int64)
        with self.stream:
            rows = cupy.empty(indices.shape, np.int64)
            self.load(Source(indices), rows)
            gather(source.array.ctypes.data, rows, target)

    def _is_plain(self, source: Source) -> bool:
        """Whether the GPU can read *source* as it is, once its memory is pinned."""
        array = source.array
        plain: bool = array.flags.c_contiguous and array.dtype.isnative
        return plain and (source.indices is None or self._shows_host)

    def loads_at_once(self, source: Source) -> bool:
        """Whether ``load`` of *source* does little more than queue copies."""
        missing = self._pins.missing(source.array) if self._is_plain(source) else None
        return (source.nbytes if missing is None else missing) <= _SOON

    def ready(self, piece: Sequence[Any]) -> list[Any] | None:
        """The arguments of a call, where nothing has to come from the host; else None."""
        found = []
        for value in piece:
            if isinstance(value, Source):
                kept = self.kept.find(value)
                if kept is None:
                    return None
                found.append(lend(kept))
            else:
                found.append(value)
        return found

    def load_later(self, loads: Sequence[tuple[Source, Array]]) -> None:
        """Do the loads in a thread of their own; ``wait`` waits for them."""

        def load_all() -> None:
            for source, target in loads:
                if not self._over.is_set():
                    self.load(source, target)

        with atomic:  # what is submitted is known to ``finish``
            self._pending = self._loader.submit(load_all)

    def wait(self) -> bool:
        """Wait for what ``load_later`` does, and raise its error; returns whether it did anything."""
        if self._pending is None:
            return False
        self._pending.result()
        self._pending = None
        return True

    def finish(self) -> None:
        """Wait until nothing reads the inputs or writes to their copies any more."""
        with atomic:
            if self._pending is not None:
                self._over.set()
                self._pending.exception()
                self._pending = None
                self._over.clear()
            with contextlib.suppress(runtime.CUDARuntimeError):  # it lasts: the next call reports it
                self.stream.synchronize()


class Feeding:
    """The inputs of one call, one piece ahead of the computation."""

    def __init__(self, inputs: Inputs, pieces: Sequence[Sequence[Any]]) -> None:
        self._inputs = inputs
        self._pieces = pieces
        self._whole: dict[int, Any] = {}  # by column: inputs that are the same for all pieces
        self._missing: dict[int, Source] = {}  # those of them that have to be copied first
        self._lent: dict[int, Any] = {}  # copies of whole inputs for functions, which may write
        sizes = self._find_whole()
        self._buffers = [
            {column: cupy.empty(size, np.uint8) for column, size in sizes.items()}
            for _ in range(min(2, len(pieces)) if sizes else 1)
        ]
        self._copies = bool(sizes)  # whether every piece is copied, not the first alone
        self._begun = False  # whether anything is copied
        if sizes or self._missing:
            # the pool gives memory that the current stream may still use: copies into it wait for this
            for event in inputs.computed:
                event.record(cupy.cuda.get_current_stream())

    def _find_whole(self) -> dict[int, int]:
        """Find the inputs that are the same for all pieces, or worth keeping.

        Returns, by column, how many bytes the largest piece of each other input has.
        """
        kept = self._inputs.kept
        sizes = {}
        for column, source in enumerate(self._pieces[0]):
            if not isinstance(source, Source):
                continue
            sources = [piece[column] for piece in self._pieces]
            if len(sources) == 1:
                whole = source.version is not None and source.nbytes <= kept.limit
            else:
                whole = all(other is source for other in sources)
            if not whole:
                sizes[column] = max(other.nbytes for other in sources)
                continue
            original = kept.find(source)
            if original is None:
                original = cupy.empty(source.shape, _native(source))
                self._missing[column] = source
            self._whole[column] = original
        return sizes

    def begin(self, number: int) -> None:
        """Queue the copies of missing whole inputs and of a piece, for when its buffer is free."""
        inputs, place = self._inputs, number % 2
        loads = [(source, self._whole[column]) for column, source in self._missing.items()]
        if self._copies:
            for column in self._buffers[place]:
                loads.append((self._pieces[number][column], self._target(number, column)))
        if not loads:
            return
        self._begun = True
        with atomic:
            inputs.stream.wait_event(inputs.computed[place])
            if all(inputs.loads_at_once(source) for source, _ in loads):
                for source, target in loads:
                    inputs.load(source, target)
                inputs.arrived[place].record(inputs.stream)
            else:
                inputs.load_later(loads)

    def _target(self, number: int, column: int) -> Array:
        source = self._pieces[number][column]
        memory = self._buffers[number % 2][column].data
        array: Array = cupy.ndarray(source.shape, _native(source), memory)
        return array

    def take(self, number: int) -> list[Any]:
        """The arguments of a piece; the current stream waits for their copies."""
        if self._inputs.wait():
            self._inputs.arrived[number % 2].record(self._inputs.stream)
        if self._copies or self._missing:
            cupy.cuda.get_current_stream().wait_event(self._inputs.arrived[number % 2])
        while self._missing:
            column, source = self._missing.popitem()
            self._inputs.kept.add(source, self._whole[column])
        if self._copies and number + 1 < len(self._pieces):
            self.begin(number + 1)
        return [
            self._lend(column)
            if column in self._whole
            else self._target(number, column)
            if isinstance(value, Source)
            else value
            for column, value in enumerate(self._pieces[number])
        ]

    def _lend(self, column: int) -> Any:
        self._lent[column] = lend(self._whole[column], self._lent.get(column))
        return self._lent[column]

    def computed(self, number: int) -> None:
        """Say that all that computes on the piece is queued."""
        if self._copies:
            self._inputs.computed[number % 2].record(cupy.cuda.get_current_stream())

    def close(self) -> None:
        """Wait until nothing reads the inputs or writes to the buffers any more."""
        if self._begun:
            self._inputs.finish()


def lend(whole: Any, to: Any = None) -> Any:
    """A copy of an input that is kept, for a function, which may write to it; in the memory of *to*."""
    if to is None:
        to = cupy.empty(whole.shape, whole.dtype)
    if whole.nbytes:  # CuPy's own copy is a kernel, which is slower
        to.data.copy_from_device_async(whole.data, whole.nbytes)
    return to


def _native(source: Source) -> np.dtype[Any]:
    """The dtype of *source* on the GPU, which knows one byte order."""
    native: np.dtype[Any] = source.array.dtype.newbyteorder("=")
    return native
